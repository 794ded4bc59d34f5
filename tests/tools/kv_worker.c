/* A worker without an engine: it speaks the local protocol with a real kvstore, its commands come
 * on stdin, its events go to stdout. For unit tests (kill, stop, reconnect of a real process) and
 * cluster tests of kvstores. One loop thread.
 *
 *   kv_worker run_dir=DIR name=NAME [inc=N] [kvstore_uid=N] [model=DIR tokens=N | layers=N heads=N
 * dim=N tokens=N] open R E r|w    fill R E SEED    raise R E ITEMS    trailer R E TOKEN    close R
 * E r|w ABORT tailend R E check R E SEED    put ID KEYBYTE DEPTH TOKENS    putkey ID KEYHEX DEPTH
 * TOKENS putfill ID SEED [BLOCK]    putdone ID ABORT lease ID KEYBYTE N (keys KEYBYTE, KEYBYTE + 1,
 * ...)    unlease ID    quit leases BATCHES KEYBYTE N DEPTH (batches of N blocks leased and given
 * back, DEPTH at once)
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "common/engine/model_config.h"
#include "common/slab/local.h"

#define OPENS_MAX 64

struct opened {
    bool used, writer;
    uint64_t request;
    uint32_t epoch, n, resident, chunk, n_tokens, flow;
    uint32_t *slots;
};

struct put {
    bool used;
    uint64_t id;
    uint32_t slot;
};

struct worker {
    struct bt_loop *loop;
    struct bt_local *local;
    struct bt_slab *slab;
    struct bt_kv_layout layout;
    struct bt_kv_key root;
    struct opened opens[OPENS_MAX];
    struct put puts[OPENS_MAX];
    struct {
        uint32_t byte, n, to_ask, to_come, short_of; /* short_of: batches that lacked blocks */
        uint64_t start_ns;
    } run; /* of `leases` */
    char line[65536];
    size_t len;
};

static void forget(struct worker *w)
{
    for (int i = 0; i < OPENS_MAX; i++) {
        free(w->opens[i].slots);
    }
    memset(w->opens, 0, sizeof(w->opens));
    memset(w->puts, 0, sizeof(w->puts));
}

static void on_attached(void *arg, struct bt_slab *slab, uint64_t inc)
{
    struct worker *w = arg;
    w->slab = slab;
    printf("attached inc=%016llx slots=%u pid=%d\n", (unsigned long long)inc, slab->super->n_slots,
           (int)getpid());
}

static void on_detached(void *arg)
{
    struct worker *w = arg;
    w->slab = NULL;
    forget(w);
    printf("detached\n");
}

static void on_refused(void *arg, bt_status_t st, const char *why)
{
    (void)arg;
    printf("refused %s %s\n", bt_status_name(st), why);
}

static void on_bell(void *arg)
{
    (void)arg;
    printf("bell\n");
}

static struct opened *find(struct worker *w, uint64_t r, uint32_t e)
{
    for (int i = 0; i < OPENS_MAX; i++) {
        struct opened *o = &w->opens[i];
        if (o->used && o->request == r && o->epoch == e) {
            return o;
        }
    }
    return NULL;
}

static void on_opened(struct worker *w, const Baton__LocalOpened *m)
{
    printf("opened %llu %u %c status=%s n=%zu resident=%u flow=%u slots=",
           (unsigned long long)m->request, m->epoch,
           m->mode == BATON__LOCAL_MODE__WRITER ? 'w' : 'r', bt_status_name((bt_status_t)m->status),
           m->n_slots, m->resident_blocks, m->flow_word);
    for (size_t i = 0; i < m->n_slots; i++) {
        printf("%s%u", i == 0 ? "" : ",", m->slots[i]);
    }
    printf(" gens=");
    for (size_t i = 0; i < m->n_generations; i++) {
        printf("%s%u", i == 0 ? "" : ",", m->generations[i]);
    }
    printf(" why=%s\n", m->detail);
    for (int i = 0; m->status == BT_OK && i < OPENS_MAX; i++) {
        struct opened *o = &w->opens[i];
        if (!o->used) {
            *o = (struct opened){.used = true,
                                 .writer = m->mode == BATON__LOCAL_MODE__WRITER,
                                 .request = m->request,
                                 .epoch = m->epoch,
                                 .n = (uint32_t)m->n_slots,
                                 .resident = m->resident_blocks,
                                 .chunk = m->chunk_tokens,
                                 .n_tokens = m->n_tokens,
                                 .flow = m->flow_word};
            o->slots = malloc(m->n_slots * 4 + 1);
            memcpy(o->slots, m->slots, m->n_slots * 4);
            break;
        }
    }
}

#define RUN_IDS (1ull << 40) /* leases of a run have ids from here on */

static void cmd_lease(struct worker *w, uint64_t id, unsigned byte, uint32_t n);
static void cmd_unlease(struct worker *w, uint64_t id);

/* A batch of the run has come: it goes back, and another is asked for. */
static void run_leased(struct worker *w, const Baton__LocalLeased *m)
{
    w->run.short_of += m->n_slots != w->run.n;
    cmd_unlease(w, m->lease);
    if (w->run.to_ask > 0) {
        cmd_lease(w, RUN_IDS + --w->run.to_ask, w->run.byte, w->run.n);
    }
    if (--w->run.to_come == 0) {
        printf("leases short=%u ns=%llu\n", w->run.short_of,
               (unsigned long long)(bt_mono_ns() - w->run.start_ns));
    }
}

static void run_leases(struct worker *w, uint32_t batches, uint32_t byte, uint32_t n,
                       uint32_t depth)
{
    w->run.byte = byte;
    w->run.n = n;
    w->run.short_of = 0;
    w->run.to_ask = w->run.to_come = batches;
    w->run.start_ns = bt_mono_ns();
    for (uint32_t i = 0; i < depth && w->run.to_ask > 0; i++) {
        cmd_lease(w, RUN_IDS + --w->run.to_ask, byte, n);
    }
}

static void on_message(void *arg, const Baton__LocalMsg *m)
{
    struct worker *w = arg;
    if (m->m_case == BATON__LOCAL_MSG__M_LEASED && m->leased->lease >= RUN_IDS) {
        run_leased(w, m->leased);
        return;
    }
    if (m->m_case == BATON__LOCAL_MSG__M_OPENED) {
        on_opened(w, m->opened);
    } else if (m->m_case == BATON__LOCAL_MSG__M_TRAILER) {
        printf("trailer %llu %u token=%u finished=%d\n", (unsigned long long)m->trailer->request,
               m->trailer->epoch, m->trailer->first_token, m->trailer->finished);
    } else if (m->m_case == BATON__LOCAL_MSG__M_REVOKE) {
        printf("revoke %llu %u status=%s\n", (unsigned long long)m->revoke->request,
               m->revoke->epoch, bt_status_name((bt_status_t)m->revoke->status));
    } else if (m->m_case == BATON__LOCAL_MSG__M_PUT_SLOT) {
        printf("putslot %llu status=%s slot=%u gen=%u\n", (unsigned long long)m->put_slot->put,
               bt_status_name((bt_status_t)m->put_slot->status), m->put_slot->slot,
               m->put_slot->generation);
        for (int i = 0; m->put_slot->status == BT_OK && i < OPENS_MAX; i++) {
            if (!w->puts[i].used) {
                w->puts[i] = (struct put){true, m->put_slot->put, m->put_slot->slot};
                break;
            }
        }
    } else if (m->m_case == BATON__LOCAL_MSG__M_TAIL) {
        printf("tail %llu %u first=%u n=%zu slots=", (unsigned long long)m->tail->request,
               m->tail->epoch, m->tail->first, m->tail->n_slots);
        for (size_t i = 0; i < m->tail->n_slots; i++) {
            printf("%s%u", i == 0 ? "" : ",", m->tail->slots[i]);
        }
        printf("\n");
    } else if (m->m_case == BATON__LOCAL_MSG__M_RECALL) {
        printf("recall %llu\n", (unsigned long long)m->recall->lease);
    } else if (m->m_case == BATON__LOCAL_MSG__M_LEASED) {
        printf("leased %llu status=%s n=%zu", (unsigned long long)m->leased->lease,
               bt_status_name((bt_status_t)m->leased->status), m->leased->n_slots);
        for (size_t i = 0; i < m->leased->n_slots && i < m->leased->n_generations; i++) {
            printf(" %u.%u", m->leased->slots[i], m->leased->generations[i]);
        }
        printf("\n");
    }
}

/* Every byte depends on seed, block, and place, so that a block in the wrong place shows. */
static uint8_t pattern(uint32_t seed, uint32_t block, uint64_t i)
{
    uint64_t x = (uint64_t)seed * 0x9E3779B97F4A7C15ull + block * 0xD1B54A32D192ED03ull + i;
    x ^= x >> 29;
    x *= 0xBF58476D1CE4E5B9ull;
    return (uint8_t)(x >> 56);
}

static void fill_block(struct worker *w, uint32_t slot, uint32_t seed, uint32_t block)
{
    uint8_t *d = bt_slab_data(w->slab, slot);
    for (uint64_t i = 0; i < w->layout.block_bytes; i++) {
        d[i] = pattern(seed, block, i);
    }
}

static bool block_ok(struct worker *w, uint32_t slot, uint32_t seed, uint32_t block)
{
    const uint8_t *d = bt_slab_data(w->slab, slot);
    for (uint64_t i = 0; i < w->layout.block_bytes; i++) {
        if (d[i] != pattern(seed, block, i)) {
            return false;
        }
    }
    return true;
}

static void say(struct worker *w, const Baton__LocalMsg *m)
{
    bt_status_t st = bt_local_send(w->local, m);
    if (st != BT_OK) {
        printf("send_failed %s\n", bt_status_name(st));
    }
}

static void cmd_tail_end(struct worker *w, uint64_t r, uint32_t e)
{
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    Baton__LocalTailEnd t = BATON__LOCAL_TAIL_END__INIT;
    t.request = r;
    t.epoch = e;
    m.m_case = BATON__LOCAL_MSG__M_TAIL_END;
    m.tail_end = &t;
    say(w, &m);
}

static void cmd_close(struct worker *w, uint64_t r, uint32_t e, char mode, int abort_it)
{
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    Baton__LocalClose c = BATON__LOCAL_CLOSE__INIT;
    c.request = r;
    c.epoch = e;
    c.mode = mode == 'w' ? BATON__LOCAL_MODE__WRITER : BATON__LOCAL_MODE__READER;
    c.abort = abort_it != 0;
    m.m_case = BATON__LOCAL_MSG__M_CLOSE;
    m.close = &c;
    say(w, &m);
    for (int i = 0; i < OPENS_MAX; i++) {
        struct opened *o = &w->opens[i];
        if (o->used && o->request == r && o->epoch == e && o->writer == (mode == 'w')) {
            free(o->slots);
            memset(o, 0, sizeof(*o));
            return;
        }
    }
}

static void cmd_put(struct worker *w, uint64_t id, struct bt_kv_key key, uint32_t depth,
                    uint32_t tokens)
{
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    Baton__LocalPut p = BATON__LOCAL_PUT__INIT;
    p.put = id;
    p.key.data = key.b;
    p.key.len = sizeof(key.b);
    p.depth = depth;
    p.n_tokens = tokens;
    m.m_case = BATON__LOCAL_MSG__M_PUT;
    m.put = &p;
    say(w, &m);
}

/* Key of 64 hexadecimal digits. */
static void cmd_put_key(struct worker *w, uint64_t id, const char *hex, uint32_t depth,
                        uint32_t tokens)
{
    struct bt_kv_key key;
    for (size_t i = 0; i < sizeof(key.b); i++) {
        if (sscanf(hex + 2 * i, "%2hhx", &key.b[i]) != 1) {
            printf("error putkey: not a key: %s\n", hex);
            return;
        }
    }
    cmd_put(w, id, key, depth, tokens);
}

static void cmd_put_fill(struct worker *w, uint64_t id, uint32_t seed, uint32_t block)
{
    for (int i = 0; i < OPENS_MAX; i++) {
        if (w->puts[i].used && w->puts[i].id == id && w->slab != NULL) {
            fill_block(w, w->puts[i].slot, seed, block);
            w->puts[i].used = false;
        }
    }
}

static void cmd_lease(struct worker *w, uint64_t id, unsigned byte, uint32_t n)
{
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    Baton__LocalLease l = BATON__LOCAL_LEASE__INIT;
    uint8_t *keys = bt_calloc(n, sizeof(struct bt_kv_key));
    for (uint32_t i = 0; i < n; i++) {
        memset(keys + i * sizeof(struct bt_kv_key), (int)(byte + i), sizeof(struct bt_kv_key));
    }
    l.lease = id;
    l.keys.data = keys;
    l.keys.len = n * sizeof(struct bt_kv_key);
    m.m_case = BATON__LOCAL_MSG__M_LEASE;
    m.lease = &l;
    say(w, &m);
    free(keys);
}

static void cmd_unlease(struct worker *w, uint64_t id)
{
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    Baton__LocalUnlease l = BATON__LOCAL_UNLEASE__INIT;
    l.lease = id;
    m.m_case = BATON__LOCAL_MSG__M_UNLEASE;
    m.unlease = &l;
    say(w, &m);
}

static void cmd_put_done(struct worker *w, uint64_t id, int abort_it)
{
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    Baton__LocalPutDone p = BATON__LOCAL_PUT_DONE__INIT;
    p.put = id;
    p.abort = abort_it != 0;
    m.m_case = BATON__LOCAL_MSG__M_PUT_DONE;
    m.put_done = &p;
    say(w, &m);
}

static void cmd_flow(struct worker *w, const char *cmd, uint64_t r, uint32_t e, uint32_t v)
{
    struct opened *o = find(w, r, e);
    if (o == NULL || w->slab == NULL) {
        printf("error %s: not open\n", cmd);
    } else if (strcmp(cmd, "fill") == 0) {
        for (uint32_t b = o->resident; b < o->n; b++) {
            fill_block(w, o->slots[b], v, b);
        }
        printf("filled %llu\n", (unsigned long long)r);
    } else if (strcmp(cmd, "raise") == 0) {
        bt_flow_raise(&w->slab->flows[o->flow], e, v);
        bt_local_ring(w->local);
    } else if (strcmp(cmd, "check") == 0) {
        uint32_t bad = 0;
        for (uint32_t b = 0; b < o->n; b++) {
            bad += !block_ok(w, o->slots[b], v, b);
        }
        printf("check %llu bad=%u progress=%u\n", (unsigned long long)r, bad,
               bt_flow_read(&w->slab->flows[o->flow], e));
    } else {
        Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
        Baton__LocalTrailer t = BATON__LOCAL_TRAILER__INIT;
        t.request = r;
        t.epoch = e;
        t.first_token = v;
        t.last_compute_ns = bt_real_ns();
        m.m_case = BATON__LOCAL_MSG__M_TRAILER;
        m.trailer = &t;
        say(w, &m);
    }
}

static void command(struct worker *w, const char *line)
{
    char cmd[32] = "", hex[65], mode = 0;
    unsigned long long r = 0;
    unsigned e = 0, v = 0, t = 0;
    int abort_it = 0;
    if (sscanf(line, "%31s", cmd) != 1) {
        return;
    }
    if (strcmp(cmd, "quit") == 0) {
        bt_loop_stop(w->loop);
    } else if (sscanf(line, "open %llu %u %c", &r, &e, &mode) == 3) {
        Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
        Baton__LocalOpen o = BATON__LOCAL_OPEN__INIT;
        o.request = r;
        o.epoch = e;
        o.mode = mode == 'w' ? BATON__LOCAL_MODE__WRITER : BATON__LOCAL_MODE__READER;
        m.m_case = BATON__LOCAL_MSG__M_OPEN;
        m.open = &o;
        say(w, &m);
    } else if (sscanf(line, "tailend %llu %u", &r, &e) == 2) {
        cmd_tail_end(w, r, e);
    } else if (sscanf(line, "close %llu %u %c %d", &r, &e, &mode, &abort_it) == 4) {
        cmd_close(w, r, e, mode, abort_it);
    } else if (sscanf(line, "leases %llu %u %u %u", &r, &e, &v, &t) == 4) {
        run_leases(w, (uint32_t)r, e, v, t);
    } else if (sscanf(line, "lease %llu %u %u", &r, &e, &v) == 3) {
        cmd_lease(w, r, e, v);
    } else if (sscanf(line, "unlease %llu", &r) == 1) {
        cmd_unlease(w, r);
    } else if (sscanf(line, "putdone %llu %d", &r, &abort_it) == 2) {
        cmd_put_done(w, r, abort_it);
    } else if (sscanf(line, "putfill %llu %u %u", &r, &v, &e) >= 2) {
        cmd_put_fill(w, r, v, e);
    } else if (sscanf(line, "putkey %llu %64s %u %u", &r, hex, &v, &t) == 4) {
        cmd_put_key(w, r, hex, v, t);
    } else if (sscanf(line, "put %llu %u %u %u", &r, &e, &v, &t) == 4) {
        struct bt_kv_key key;
        memset(key.b, (int)e, sizeof(key.b));
        cmd_put(w, r, key, v, t);
    } else if (sscanf(line, "%*s %llu %u %u", &r, &e, &v) == 3) {
        cmd_flow(w, cmd, r, e, v);
    } else {
        printf("error unknown command: %s\n", line);
    }
}

static void on_stdin(void *arg, uint32_t events)
{
    struct worker *w = arg;
    (void)events;
    ssize_t n = read(STDIN_FILENO, w->line + w->len, sizeof(w->line) - 1 - w->len);
    if (n <= 0) {
        if (n == 0 || errno != EAGAIN) {
            bt_loop_stop(w->loop);
        }
        return;
    }
    w->len += (size_t)n;
    for (char *nl; (nl = memchr(w->line, '\n', w->len)) != NULL;) {
        *nl = '\0';
        command(w, w->line);
        size_t used = (size_t)(nl - w->line) + 1;
        memmove(w->line, w->line + used, w->len - used);
        w->len -= used;
    }
}

static const char *opt(int argc, char **argv, const char *key, const char *def)
{
    size_t n = strlen(key);
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], key, n) == 0 && argv[i][n] == '=') {
            return argv[i] + n + 1;
        }
    }
    return def;
}

int main(int argc, char **argv)
{
    static struct worker w;
    static const struct bt_local_ops ops = {.on_attached = on_attached,
                                            .on_detached = on_detached,
                                            .on_refused = on_refused,
                                            .on_message = on_message,
                                            .on_bell = on_bell};
    char err[512] = "";
    setvbuf(stdout, NULL, _IOLBF, 0);
    uint32_t tokens = (uint32_t)atoi(opt(argc, argv, "tokens", "16"));
    const char *model = opt(argc, argv, "model", NULL);
    bt_status_t st;
    if (model != NULL) {
        st = bt_model_root_key(
            model, &(struct bt_model_settings){.load_format = "auto", .block_tokens = tokens},
            &w.layout, &w.root, err, sizeof(err));
    } else {
        st = bt_kv_layout_gqa(tokens, (uint32_t)atoi(opt(argc, argv, "layers", "2")),
                              (uint32_t)atoi(opt(argc, argv, "heads", "1")),
                              (uint32_t)atoi(opt(argc, argv, "dim", "32")), BT_DT_BF16, 0,
                              &w.layout);
        memset(w.root.b, atoi(opt(argc, argv, "root", "7")), sizeof(w.root.b));
    }
    if (st != BT_OK || bt_loop_create(&w.loop) != BT_OK) {
        fprintf(stderr, "kv_worker: %s %s\n", bt_status_name(st), err);
        return 2;
    }
    fcntl(STDIN_FILENO, F_SETFL, O_NONBLOCK);
    struct bt_loop_fd *in = bt_loop_fd_add(w.loop, STDIN_FILENO, EPOLLIN, on_stdin, &w);
    w.local = bt_local_start(
        w.loop, opt(argc, argv, "run_dir", "."), opt(argc, argv, "name", "worker"),
        strtoull(opt(argc, argv, "inc", "1"), NULL, 0), &w.layout, &w.root, &ops, &w);
    if (opt(argc, argv, "kvstore_uid", NULL) != NULL) {
        bt_local_trust(w.local, (uid_t)strtoul(opt(argc, argv, "kvstore_uid", "0"), NULL, 10));
    }
    bt_loop_run(w.loop);
    bt_local_stop(w.local);
    forget(&w);
    bt_loop_fd_del(w.loop, in);
    bt_loop_destroy(w.loop);
    return 0;
}
