/* One kvstore wire in a process of its own, for tests: a tiny slab, flows from a script on stdin,
 * what happens on stdout, one line each. See tests/cluster/test_wire_flows.py for the commands.
 * Everything runs on the loop's thread. */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "common/base/list.h"
#include "common/log/log.h"
#include "common/rpc/tls.h"
#include "kvstore/wire/wire.h"
#include "kvstore/wire/wx_child.h"
#include "tests/tools/break_send.h"
#include "tests/tools/flip_recv.h"

#define LINE_MAX_BYTES 4096
#define SEG_HEADS      4
#define PAGE_TOKENS    16

struct source {
    struct bt_list link;
    uint64_t request, seed;
    uint32_t epoch;
    struct bt_flow_shape shape;
    uint32_t *slots;
    struct bt_kv_key *names;
    bt_flow_word_t *word; /* of the slab, but of an automatic one: */
    bt_flow_word_t own_word;
    struct bt_wire_send *send;
    struct bt_wire_trailer trailer;
    bool has_trailer, automatic;
};

struct sink {
    struct bt_list link;
    uint64_t request;
    uint32_t epoch, first_block;
    struct bt_flow_shape shape;
    uint32_t *slots;
    struct bt_kv_key *names;
    bt_flow_word_t word;
    struct bt_wire_recv *recv;
    bool storm;
};

struct storm { /* many flows, a few at a time, from a peer that grants by itself */
    uint64_t next, last;
    uint32_t running, at_once, done, failed, n_tokens, chunk;
    uint64_t bytes, start_ns, seed;
    bool verify;
    char name[64], rpc[64];
    uint64_t incarnation;
};

static struct {
    struct bt_loop *loop;
    struct bt_rpc *rpc;
    struct bt_tls *tls;
    struct bt_rpc_server *server;
    struct bt_slab *slab;
    struct bt_kv_layout layout;
    struct bt_metrics *metrics;
    struct bt_wire *wire;
    struct bt_list sources, sinks;
    uint32_t *free_slots, n_free;
    struct bt_slab_crcs *crcs;
    bool *word_taken;
    char in[1 << 16];
    size_t in_len;
    struct storm storm;
    uint32_t auto_tokens, auto_chunk;
    struct source *auto_data;
    uint32_t crc_sum;  /* so that nobody optimises it away */
    uint32_t distinct; /* a flow's blocks are these many slots over and over; 0: all its own */
    bool fresh;        /* every CRC is computed when it is asked for, as for fresh blocks */
    struct bt_list servings;
    bool hold_offers; /* peers that ask for blocks are not answered */
} T = {.auto_tokens = 0};

static void say(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
static void say(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vprintf(fmt, ap);
    va_end(ap);
    putchar('\n');
    fflush(stdout);
}

/* ---- contents ---- */

static uint64_t mix(uint64_t x)
{
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9ull;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

static uint64_t *segment(uint32_t slot, uint32_t layer, uint32_t *words_p)
{
    uint32_t bytes;
    uint64_t off = bt_kv_segment(&T.layout, layer, &bytes);
    *words_p = bytes / 8;
    return (uint64_t *)(void *)((uint8_t *)bt_slab_data(T.slab, slot) + off);
}

/* Slots that n blocks of a flow take. */
static uint32_t distinct(uint32_t n)
{
    return T.distinct != 0 ? BT_MIN(n, T.distinct) : n;
}

/* Of loops over all bytes of a flow (256 MiB): watched one by one by the thread sanitizer they took
 * this process's loop more than two seconds, after which its peers give it up as silent. */
#define UNWATCHED __attribute__((no_sanitize("thread")))

UNWATCHED static void fill(uint64_t seed, uint32_t block, uint32_t slot)
{
    block = T.distinct != 0 ? block % T.distinct : block;
    for (uint32_t l = 0; l < T.layout.n_layers; l++) {
        uint32_t n;
        uint64_t *p = segment(slot, l, &n), x = mix(seed * 1000003 + block * 131 + l + 1);
        for (uint32_t i = 0; i < n; i++) {
            p[i] = x + (uint64_t)i * 0x9e3779b97f4a7c15ull;
        }
    }
}

UNWATCHED static bool check(uint64_t seed, uint32_t block, uint32_t slot)
{
    block = T.distinct != 0 ? block % T.distinct : block;
    for (uint32_t l = 0; l < T.layout.n_layers; l++) {
        uint32_t n;
        uint64_t *p = segment(slot, l, &n), x = mix(seed * 1000003 + block * 131 + l + 1);
        for (uint32_t i = 0; i < n; i++) {
            if (p[i] != x + (uint64_t)i * 0x9e3779b97f4a7c15ull) {
                return false;
            }
        }
    }
    return true;
}

static bool take_slots(uint32_t n, uint32_t *slots)
{
    uint32_t own = distinct(n);
    if (T.n_free < own) {
        return false;
    }
    for (uint32_t i = 0; i < n; i++) {
        slots[i] = i < own ? T.free_slots[--T.n_free] : slots[i % own];
        bt_slab_crcs_forget(T.crcs, slots[i]);
    }
    return true;
}

static void name_blocks(uint64_t request, uint32_t n, struct bt_kv_key *names)
{
    for (uint32_t b = 0; b < distinct(n); b++) {
        bt_slab_private_key(request, 0, b, &names[b]);
    }
    for (uint32_t b = distinct(n); b < n; b++) {
        names[b] = names[b % T.distinct];
    }
}

static void give_slots(uint32_t n, const uint32_t *slots)
{
    for (uint32_t i = 0; i < distinct(n); i++) {
        T.free_slots[T.n_free++] = slots[i];
    }
}

static bt_flow_word_t *take_word(void)
{
    uint32_t i = 1;
    while (i < T.slab->super->n_flow_words && T.word_taken[i]) {
        i++;
    }
    BT_ASSERT(i < T.slab->super->n_flow_words);
    T.word_taken[i] = true;
    return &T.slab->flows[i];
}

/* ---- sources ---- */

static struct source *find_source(uint64_t request)
{
    struct bt_list *i;
    bt_list_for_each (i, &T.sources) {
        struct source *s = BT_CONTAINER_OF(i, struct source, link);
        if (s->request == request) {
            return s;
        }
    }
    return NULL;
}

static struct source *make_source(uint64_t request, uint32_t epoch, uint32_t n_tokens,
                                  uint32_t chunk, uint64_t seed)
{
    struct source *s = bt_calloc(1, sizeof(*s));
    s->request = request;
    s->epoch = epoch;
    s->seed = seed;
    s->shape = (struct bt_flow_shape){n_tokens, PAGE_TOKENS, chunk, T.layout.n_layers};
    uint32_t n = bt_flow_blocks(&s->shape);
    s->slots = bt_calloc(n, sizeof(*s->slots));
    s->names = bt_calloc(n, sizeof(*s->names));
    BT_ASSERT(take_slots(n, s->slots));
    name_blocks(request, n, s->names);
    for (uint32_t b = 0; b < n; b++) {
        fill(seed, b, s->slots[b]);
    }
    s->word = take_word();
    bt_flow_raise(s->word, epoch, 0);
    bt_list_insert_tail(&T.sources, &s->link);
    return s;
}

static void free_source(struct source *s)
{
    give_slots(bt_flow_blocks(&s->shape), s->slots);
    T.word_taken[s->word - T.slab->flows] = false;
    bt_list_remove(&s->link);
    free(s->slots);
    free(s->names);
    free(s);
}

/* In auto mode every request exists, finished, all with the contents (and names) of one source. */
static struct source *auto_source(uint64_t request, uint32_t epoch)
{
    if (T.auto_tokens == 0) {
        return NULL;
    }
    struct source *s = bt_calloc(1, sizeof(*s));
    *s = *T.auto_data;
    s->request = request;
    s->epoch = epoch;
    s->automatic = true;
    s->has_trailer = true;
    s->trailer.first_token = (uint32_t)request;
    for (uint32_t b = 0; b < bt_flow_blocks(&s->shape); b++) { /* CRCs anew, as for fresh blocks */
        bt_slab_crcs_forget(T.crcs, s->slots[b]);
    }
    s->word = &s->own_word;
    bt_flow_raise(s->word, epoch, bt_flow_items(&s->shape));
    bt_list_insert_tail(&T.sources, &s->link);
    return s;
}

static bt_status_t on_lookup(void *arg, uint64_t request, uint32_t epoch, struct bt_wire_send *snd,
                             struct bt_wire_source *src)
{
    struct source *s = find_source(request);
    (void)arg;
    if (s == NULL) {
        s = auto_source(request, epoch);
    }
    if (s == NULL || s->send != NULL) {
        return BT_ERR_NOT_FOUND;
    }
    if (epoch < s->epoch) {
        return BT_ERR_STALE;
    }
    if (epoch > s->epoch) {
        return BT_ERR_NOT_FOUND;
    }
    *src = (struct bt_wire_source){s->shape, s->slots, s->names, s->word, s};
    s->send = snd;
    if (s->has_trailer) {
        bt_wire_send_trailer(snd, &s->trailer);
    }
    if (!s->automatic) {
        say("lookup %llu", (unsigned long long)request);
    }
    return BT_OK;
}

static void on_send_end(void *arg, void *grant, struct bt_wire_send *snd, bt_status_t st)
{
    struct source *s = grant;
    (void)arg;
    BT_ASSERT(s->send == snd);
    s->send = NULL;
    if (s->automatic) {
        bt_list_remove(&s->link);
        free(s);
        return;
    }
    say("send_end %llu %s", (unsigned long long)s->request, bt_status_name(st));
}

/* ---- fetches, the sending end: blocks by their names, from whatever source has them ---- */

struct serving {
    struct bt_list link;
    struct bt_wire_send *send;
    uint32_t n, n_have, epoch;
    uint8_t have[BT_WIRE_FETCH_MAX];
    uint32_t slots[BT_WIRE_FETCH_MAX];
    struct bt_kv_key names[BT_WIRE_FETCH_MAX];
    bt_flow_word_t word;
    struct bt_timer answer;
};

static uint32_t slot_of(const struct bt_kv_key *key)
{
    struct bt_list *i;
    bt_list_for_each (i, &T.sources) {
        struct source *s = BT_CONTAINER_OF(i, struct source, link);
        for (uint32_t b = 0; b < bt_flow_blocks(&s->shape); b++) {
            if (memcmp(&s->names[b], key, sizeof(*key)) == 0) {
                return s->slots[b];
            }
        }
    }
    return UINT32_MAX;
}

static void offer(void *arg)
{
    struct serving *v = arg;
    if (v->n_have == 0) {
        bt_wire_send_abort(v->send, BT_ERR_NOT_FOUND, "nothing of it is here");
        return;
    }
    struct bt_flow_shape shape = {v->n_have * PAGE_TOKENS, PAGE_TOKENS, v->n_have * PAGE_TOKENS,
                                  T.layout.n_layers};
    struct bt_wire_source src = {shape, v->slots, v->names, &v->word, v};
    bt_flow_raise(&v->word, v->epoch, bt_flow_items(&shape));
    bt_wire_send_offer(v->send, &src, v->have, v->n);
}

static bt_status_t on_want(void *arg, const struct bt_wire_want *want, struct bt_wire_send *snd,
                           void **handle_p)
{
    struct serving *v = bt_calloc(1, sizeof(*v));
    (void)arg;
    v->send = snd;
    v->n = want->n;
    v->epoch = want->epoch;
    for (uint32_t i = 0; i < want->n; i++) {
        uint32_t slot = slot_of(&want->keys[i]);
        if (slot != UINT32_MAX) {
            v->have[i] = BT_WIRE_IN_SLAB;
            v->slots[v->n_have] = slot;
            v->names[v->n_have++] = want->keys[i];
        }
    }
    bt_list_insert_tail(&T.servings, &v->link);
    say("wanted %llu by=%s n=%u have=%u class=%u", (unsigned long long)want->request, want->peer,
        want->n, v->n_have, want->class);
    if (!T.hold_offers) {
        bt_timer_start(T.loop, &v->answer, 0, 0, offer, v);
    }
    *handle_p = v;
    return BT_OK;
}

static void on_want_end(void *arg, void *handle, bt_status_t st)
{
    struct serving *v = handle;
    (void)arg;
    bt_timer_stop(T.loop, &v->answer);
    bt_list_remove(&v->link);
    free(v);
    say("want_end %s", bt_status_name(st));
}

/* ---- sinks ---- */

static void storm_step(void);

static void on_progress(void *arg)
{
    struct sink *k = arg;
    if (!k->storm) {
        say("progress %llu %u at=%llu", (unsigned long long)k->request,
            bt_flow_read(&k->word, k->epoch), (unsigned long long)bt_mono_ns());
    }
}

static void on_done(void *arg, const struct bt_wire_trailer *t, uint64_t first_ns, uint64_t last_ns,
                    uint64_t bytes, uint64_t segments)
{
    struct sink *k = arg;
    BT_ASSERT(first_ns <= last_ns);
    if (k->storm) {
        BT_ASSERT(t->first_token == (uint32_t)k->request);
        T.storm.done++;
        T.storm.bytes += bytes;
        for (uint32_t b = 0; T.storm.verify && b < bt_flow_blocks(&k->shape); b++) {
            BT_ASSERT(check(T.storm.seed, b, k->slots[b]));
        }
        return;
    }
    say("done %llu token=%u finished=%d bytes=%llu segments=%llu", (unsigned long long)k->request,
        t->first_token, t->finished, (unsigned long long)bytes, (unsigned long long)segments);
}

static void on_failed(void *arg, bt_status_t st, const char *why)
{
    struct sink *k = arg;
    T.storm.failed += k->storm;
    say("failed %llu %s %s", (unsigned long long)k->request, bt_status_name(st), why);
}

static void free_sink(struct sink *k)
{
    give_slots(bt_flow_blocks(&k->shape), k->slots);
    bt_list_remove(&k->link);
    free(k->slots);
    free(k->names);
    free(k);
}

static void on_quiet(void *arg)
{
    struct sink *k = arg;
    k->recv = NULL;
    if (k->storm) {
        free_sink(k);
        T.storm.running--;
        storm_step();
        return;
    }
    say("quiet %llu", (unsigned long long)k->request);
}

static void on_offer(void *arg, const uint8_t *have, uint32_t n)
{
    struct sink *k = arg;
    char text[BT_WIRE_FETCH_MAX + 1] = "";
    uint32_t n_have = 0;
    for (uint32_t i = 0; i < n; i++) {
        text[i] = (char)('0' + have[i]);
        n_have += have[i] != BT_WIRE_LACKS;
    }
    say("offer %llu %s", (unsigned long long)k->request, text);
    k->shape.n_tokens = k->shape.chunk_tokens = n_have * PAGE_TOKENS;
    for (uint32_t i = 0, to = 0; i < n; i++) {
        if (have[i] != BT_WIRE_LACKS) {
            k->names[to++] = k->names[i];
        }
    }
    BT_ASSERT(take_slots(n_have, k->slots));
    if (!T.hold_offers) {
        bt_wire_fetch_take(k->recv, k->slots);
    }
}

static const struct bt_wire_recv_ops sink_ops = {.on_offer = on_offer,
                                                 .on_progress = on_progress,
                                                 .on_done = on_done,
                                                 .on_failed = on_failed,
                                                 .on_quiet = on_quiet};

static struct sink *find_sink(uint64_t request)
{
    struct bt_list *i;
    bt_list_for_each (i, &T.sinks) {
        struct sink *k = BT_CONTAINER_OF(i, struct sink, link);
        if (k->request == request) {
            return k;
        }
    }
    return NULL;
}

static struct sink *start_sink(const struct bt_wire_peer_addr *peer, uint64_t request,
                               uint64_t name_of, uint32_t epoch, struct bt_flow_shape shape,
                               uint32_t first, uint64_t deadline_ms, bool storm)
{
    struct sink *k = bt_calloc(1, sizeof(*k));
    uint32_t n = bt_flow_blocks(&shape);
    k->request = request;
    k->epoch = epoch;
    k->shape = shape;
    k->first_block = first;
    k->storm = storm;
    k->slots = bt_calloc(n, sizeof(*k->slots));
    k->names = bt_calloc(n, sizeof(*k->names));
    BT_ASSERT(take_slots(n, k->slots));
    name_blocks(name_of, n, k->names);
    for (uint32_t b = 0; b < n; b++) {
        if (!storm) {
            memset(bt_slab_data(T.slab, k->slots[b]), 0, T.layout.block_bytes);
        }
    }
    bt_list_insert_tail(&T.sinks, &k->link);
    k->recv = bt_wire_recv_start(T.wire, peer, request, epoch, &k->shape, first, k->slots, k->names,
                                 &k->word, deadline_ms, &sink_ops, k);
    return k;
}

/* ---- storm and throughput ---- */

/* CPU time in us, descriptors and resident KiB of a process; its threads that have ended are left
 * out. */
static void usage_of(int pid, long long *cpu_us, int *fds, long *rss_kb)
{
    char path[64], task[400];
    long long size = 0, rss = 0, ns = 0;
    struct dirent *e;
    snprintf(path, sizeof(path), "/proc/%d/statm", pid);
    FILE *f = fopen(path, "r");
    if (f != NULL && fscanf(f, "%lld %lld", &size, &rss) == 2) {
        *rss_kb += rss * 4;
    }
    if (f != NULL) {
        fclose(f);
    }
    snprintf(path, sizeof(path), "/proc/%d/fd", pid);
    DIR *d = opendir(path);
    while (d != NULL && readdir(d) != NULL) {
        (*fds)++;
    }
    if (d != NULL) {
        closedir(d);
    }
    snprintf(path, sizeof(path), "/proc/%d/task", pid);
    d = opendir(path);
    while (d != NULL && (e = readdir(d)) != NULL) {
        snprintf(task, sizeof(task), "%s/%s/schedstat", path, e->d_name);
        f = e->d_name[0] != '.' ? fopen(task, "r") : NULL;
        if (f != NULL && fscanf(f, "%lld", &ns) == 1) {
            *cpu_us += ns / 1000;
        }
        if (f != NULL) {
            fclose(f);
        }
    }
    if (d != NULL) {
        closedir(d);
    }
}

/* The wire process; 0: there is none. */
static int wire_process(void)
{
    char path[64];
    int pid = 0;
    snprintf(path, sizeof(path), "/proc/self/task/%d/children", (int)getpid());
    FILE *f = fopen(path, "r");
    if (f != NULL && fscanf(f, "%d", &pid) != 1) {
        pid = 0;
    }
    if (f != NULL) {
        fclose(f);
    }
    return pid;
}

/* Of this process and its wire process together. */
static void usage_line(const char *tag)
{
    long long cpu_us = 0;
    long rss_kb = 0;
    int fds = 0, wire = wire_process();
    usage_of(getpid(), &cpu_us, &fds, &rss_kb);
    if (wire != 0) {
        usage_of(wire, &cpu_us, &fds, &rss_kb);
    }
    say("%s cpu_us=%lld fds=%d rss_kb=%ld free_slots=%u wire=%d", tag, cpu_us, fds, rss_kb,
        T.n_free, wire);
}

static void storm_step(void)
{
    struct storm *s = &T.storm;
    while (s->running < s->at_once && s->next <= s->last) {
        struct bt_wire_peer_addr a = {s->name, s->rpc, s->incarnation};
        struct bt_flow_shape shape = {s->n_tokens, PAGE_TOKENS, s->chunk, T.layout.n_layers};
        if (T.n_free < distinct(bt_flow_blocks(&shape))) {
            break;
        }
        s->running++;
        start_sink(&a, s->next++, UINT64_MAX, 1, shape, 0, 0, true);
    }
    if (s->running == 0 && s->next > s->last) {
        double sec = (double)(bt_mono_ns() - s->start_ns) * 1e-9;
        say("storm done=%u failed=%u bytes=%llu seconds=%.4f", s->done, s->failed,
            (unsigned long long)s->bytes, sec);
    }
}

/* ---- commands ---- */

typedef unsigned long long ull;

static void cmd_recv(const char *a)
{
    char name[64], rpc[64];
    ull inc, req, ms = 0;
    unsigned epoch, tokens, chunk, first;
    if (sscanf(a, "%63s %63s %llx %llu %u %u %u %u %llu", name, rpc, &inc, &req, &epoch, &tokens,
               &chunk, &first, &ms) < 8) {
        say("bad recv");
        return;
    }
    struct bt_wire_peer_addr p = {name, rpc, inc};
    struct bt_flow_shape shape = {tokens, PAGE_TOKENS, chunk, T.layout.n_layers};
    start_sink(&p, req, req, epoch, shape, first, ms, false);
}

/* fetch NAME RPC INC REQ SOURCE FIRST N CLASS: blocks [FIRST, FIRST + N) of the source's names. */
static void cmd_fetch(const char *a)
{
    char name[64], rpc[64];
    ull inc, req, source;
    unsigned first, n, class;
    if (sscanf(a, "%63s %63s %llx %llu %llu %u %u %u", name, rpc, &inc, &req, &source, &first, &n,
               &class) != 8) {
        say("bad fetch");
        return;
    }
    struct bt_wire_peer_addr p = {name, rpc, inc};
    struct sink *k = bt_calloc(1, sizeof(*k));
    k->request = req;
    k->epoch = 1;
    k->shape = (struct bt_flow_shape){0, PAGE_TOKENS, PAGE_TOKENS, T.layout.n_layers};
    k->slots = bt_calloc(n, sizeof(*k->slots));
    k->names = bt_calloc(n, sizeof(*k->names));
    for (uint32_t b = 0; b < n; b++) {
        bt_slab_private_key(source, 0, first + b, &k->names[b]);
    }
    bt_list_insert_tail(&T.sinks, &k->link);
    k->recv = bt_wire_fetch_start(T.wire, &p, req, 1, k->names, n, class, &sink_ops, k);
}

/* storm NAME RPC INC FIRST N TOKENS CHUNK SEED VERIFY [AT_ONCE] */
static void cmd_storm(const char *a)
{
    struct storm *s = &T.storm;
    ull inc, n, seed, from;
    unsigned verify;
    memset(s, 0, sizeof(*s));
    s->at_once = 8;
    if (sscanf(a, "%63s %63s %llx %llu %llu %u %u %llu %u %u", s->name, s->rpc, &inc, &from, &n,
               &s->n_tokens, &s->chunk, &seed, &verify, &s->at_once) < 9) {
        say("bad storm");
        return;
    }
    s->incarnation = inc;
    s->next = from;
    s->last = from + n - 1;
    s->seed = seed;
    s->verify = verify != 0;
    s->start_ns = bt_mono_ns();
    storm_step();
}

static void cmd_verify(ull req, ull seed)
{
    struct sink *k = find_sink(req);
    uint32_t bad = 0, n = bt_flow_blocks(&k->shape);
    for (uint32_t b = k->first_block; b < n; b++) {
        bad += !check(seed, b, k->slots[b]);
    }
    uint32_t crc_bad = 0;
    for (uint32_t b = k->first_block; b < n; b++) {
        for (uint32_t l = 0; l < T.layout.n_layers; l++) {
            uint32_t words;
            uint64_t *p = segment(k->slots[b], l, &words);
            crc_bad += T.slab->crcs[k->slots[b] * T.layout.n_layers + l] !=
                       bt_slab_segment_crc(&k->names[b], l, T.layout.layout_id, p, words * 8);
        }
    }
    say("verify %llu bad=%u crc_bad=%u", req, bad, crc_bad);
}

/* Poison: once quiet, nobody may write here. */
UNWATCHED static uint64_t not_poison(const uint8_t *p, uint64_t n)
{
    uint64_t changed = 0;
    for (uint64_t i = 0; i < n; i++) {
        changed += p[i] != 0xEE;
    }
    return changed;
}

static void cmd_poison(ull req, bool test)
{
    struct sink *k = find_sink(req);
    uint64_t changed = 0;
    for (uint32_t b = 0; b < bt_flow_blocks(&k->shape); b++) {
        uint8_t *p = bt_slab_data(T.slab, k->slots[b]);
        if (test) {
            changed += not_poison(p, T.layout.block_bytes);
        } else {
            memset(p, 0xEE, T.layout.block_bytes);
        }
    }
    say("%s %llu %llu", test ? "poison_changed" : "poisoned", req, (ull)changed);
}

static void cmd_corrupt(ull req, uint32_t block, uint32_t layer)
{
    struct source *s = find_source(req);
    uint32_t n;
    (void)bt_slab_crcs_get(T.crcs, s->slots[block], layer, &s->names[block]);
    segment(s->slots[block], layer, &n)[n / 2] ^= 1ull << 17;
    say("corrupted %llu", req);
}

static void cmd_source(const char *word, const char *a)
{
    ull req = 0, x = 0;
    unsigned y = 0;
    sscanf(a, "%llu %llu %u", &req, &x, &y);
    struct source *s = find_source(req);
    if (s == NULL) {
        say("no source %llu", req);
    } else if (strcmp(word, "raise") == 0) {
        uint64_t now = bt_mono_ns();
        bt_flow_raise(s->word, s->epoch, (uint32_t)x);
        bt_wire_kick(T.wire);
        say("raised %llu %u at=%llu", req, (uint32_t)x, (ull)now);
    } else if (strcmp(word, "trailer") == 0) {
        s->has_trailer = true;
        s->trailer = (struct bt_wire_trailer){(uint32_t)x, y != 0, bt_real_ns()};
        if (s->send != NULL) {
            bt_wire_send_trailer(s->send, &s->trailer);
        }
    } else if (strcmp(word, "abort") == 0) {
        if (s->send != NULL) {
            bt_wire_send_abort(s->send, BT_ERR_CANCELLED, "grant taken back");
        }
    } else if (strcmp(word, "drop") == 0) {
        BT_ASSERT(s->send == NULL);
        free_source(s);
    } else {
        cmd_corrupt(req, (uint32_t)x, y);
    }
}

static void cmd_sink(const char *word, const char *a)
{
    ull req = 0, x = 0;
    sscanf(a, "%llu %llu", &req, &x);
    struct sink *k = find_sink(req);
    if (k == NULL) {
        say("no sink %llu", req);
    } else if (strcmp(word, "verify") == 0) {
        cmd_verify(req, x);
    } else if (strcmp(word, "word") == 0) {
        say("word %llu %u", req, bt_flow_read(&k->word, k->epoch));
    } else if (strcmp(word, "forget") == 0) {
        BT_ASSERT(k->recv == NULL);
        free_sink(k);
    } else if (strcmp(word, "cancel") == 0) {
        if (k->recv != NULL) {
            bt_wire_recv_cancel(k->recv);
        }
    } else {
        cmd_poison(req, strcmp(word, "checkpoison") == 0);
    }
}

/* What the CRCs of the automatic source's segments cost, on this thread. */
static void cmd_crc(void)
{
    const struct source *s = T.auto_data;
    uint64_t bytes = 0;
    struct timespec a, b;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &a);
    for (uint32_t i = 0; i < bt_flow_blocks(&s->shape); i++) {
        for (uint32_t l = 0; l < T.layout.n_layers; l++) {
            uint32_t words;
            const uint64_t *p = segment(s->slots[i], l, &words);
            T.crc_sum += bt_slab_segment_crc(&s->names[i], l, T.layout.layout_id, p, words * 8);
            bytes += words * 8ull;
        }
    }
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &b);
    say("crc bytes=%llu cpu_us=%lld", (ull)bytes,
        (long long)(b.tv_sec - a.tv_sec) * 1000000 + (b.tv_nsec - a.tv_nsec) / 1000);
}

static void cmd_metrics(void)
{
    struct bt_buf b;
    bt_buf_init(&b);
    bt_metrics_render(T.metrics, &b);
    fwrite(b.data, 1, b.len, stdout);
    say("metrics_end");
    bt_buf_cleanup(&b);
}

static bool one_of(const char *w, const char *list)
{
    const char *at = strstr(list, w);
    return at != NULL && (at == list || at[-1] == ' ') &&
           (at[strlen(w)] == ' ' || at[strlen(w)] == '\0');
}

static void command(const char *line)
{
    char word[32] = "", name[64];
    int used = 0;
    ull a = 0, b = 0;
    unsigned c = 0, d = 0, e = 0;
    if (sscanf(line, "%31s %n", word, &used) < 1) {
        return;
    }
    const char *rest = line + used;
    if (strcmp(word, "grant") == 0) {
        sscanf(rest, "%llu %u %u %u %llu", &a, &c, &d, &e, &b);
        make_source(a, c, d, e, b);
        say("granted %llu", a);
    } else if (one_of(word, "raise trailer abort drop corrupt")) {
        cmd_source(word, rest);
    } else if (one_of(word, "verify word cancel poison checkpoison forget")) {
        cmd_sink(word, rest);
    } else if (strcmp(word, "recv") == 0) {
        cmd_recv(rest);
    } else if (strcmp(word, "fetch") == 0) {
        cmd_fetch(rest);
    } else if (strcmp(word, "hold") == 0) {
        T.hold_offers = atoi(rest) != 0;
        say("hold %d", T.hold_offers);
    } else if (strcmp(word, "storm") == 0) {
        cmd_storm(rest);
    } else if (strcmp(word, "auto") == 0) {
        if (T.auto_data != NULL) {
            free_source(T.auto_data);
            T.auto_data = NULL;
        }
        sscanf(rest, "%u %u %llu", &T.auto_tokens, &T.auto_chunk, &b);
        T.auto_data = make_source(UINT64_MAX, 0, T.auto_tokens, T.auto_chunk, b);
        say("auto");
    } else if (strcmp(word, "peerdown") == 0) {
        sscanf(rest, "%63s %llx", name, &a);
        bt_wire_peer_down(T.wire, name, a);
    } else if (strcmp(word, "flip") == 0) {
        flip.armed = strncmp(rest, "header", 6) == 0 ? FLIP_HEADER : FLIP_PAYLOAD;
    } else if (strcmp(word, "flips") == 0) {
        say("flips %u", flip.flips);
    } else if (strcmp(word, "flipseed") == 0) {
        flip.state = strtoull(rest, NULL, 10);
    } else if (strcmp(word, "break") == 0) {
        snap.armed = (snap_what_t)atoi(rest);
    } else if (strcmp(word, "breaks") == 0) {
        say("breaks %u", snap.breaks);
    } else if (strcmp(word, "usage") == 0) {
        usage_line("usage");
    } else if (strcmp(word, "crc") == 0) {
        cmd_crc();
    } else if (strcmp(word, "metrics") == 0) {
        cmd_metrics();
    } else if (strcmp(word, "quit") == 0) {
        bt_loop_stop(T.loop);
    } else {
        say("unknown command %s", word);
    }
}

static void on_stdin(void *arg, uint32_t events)
{
    (void)arg;
    (void)events;
    ssize_t n = read(STDIN_FILENO, T.in + T.in_len, sizeof(T.in) - T.in_len - 1);
    if (n <= 0) {
        if (n == 0 || errno != EAGAIN) {
            bt_loop_stop(T.loop);
        }
        return;
    }
    T.in_len += (size_t)n;
    char *nl;
    while ((nl = memchr(T.in, '\n', T.in_len)) != NULL) {
        char line[LINE_MAX_BYTES];
        size_t len = (size_t)(nl - T.in);
        snprintf(line, sizeof(line), "%.*s", (int)len, T.in);
        T.in_len -= len + 1;
        memmove(T.in, nl + 1, T.in_len);
        command(line);
    }
}

/* ---- start ---- */

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

static void make_slab(int argc, char **argv, struct bt_kv_key *root, uint64_t inc)
{
    char err[256], path[128];
    uint32_t layers = (uint32_t)atoi(opt(argc, argv, "layers", "4"));
    uint32_t seg = (uint32_t)atoi(opt(argc, argv, "seg", "8192"));
    uint64_t slots = strtoull(opt(argc, argv, "slots", "64"), NULL, 10);
    BT_ASSERT(bt_kv_layout_gqa(PAGE_TOKENS, layers, SEG_HEADS, seg / (SEG_HEADS * 4 * PAGE_TOKENS),
                               BT_DT_BF16, 0, &T.layout) == BT_OK);
    memset(root, 7, sizeof(*root));
    root->b[0] = (uint8_t)atoi(opt(argc, argv, "root", "1"));
    snprintf(path, sizeof(path), "/dev/shm/baton-wire-test.%d", (int)getpid());
    uint64_t bytes = (slots + 1) * (BT_ALIGN_UP(T.layout.block_bytes, 4096ull) + 4096) + (1 << 20);
    struct bt_slab_spec spec = {
        .path = path, .bytes = bytes, .layout = &T.layout, .root = root, .incarnation = inc};
    if (bt_slab_create(&spec, NULL, NULL, &T.slab, err, sizeof(err)) != BT_OK) {
        fprintf(stderr, "%s\n", err);
        exit(2);
    }
    unlink(path);
    T.distinct = (uint32_t)atoi(opt(argc, argv, "distinct", "0"));
    T.fresh = atoi(opt(argc, argv, "fresh", "0")) != 0;
    T.n_free = T.slab->super->n_slots;
    T.free_slots = bt_calloc(T.n_free, sizeof(uint32_t));
    T.crcs = bt_slab_crcs_create(T.slab, &T.layout);
    T.word_taken = bt_calloc(T.slab->super->n_flow_words, sizeof(bool));
    for (uint32_t i = 0; i < T.n_free; i++) {
        T.free_slots[i] = i;
    }
}

static void finish(void)
{
    T.storm.next = T.storm.last + 1; /* else flows that end now are followed by others */
    bt_wire_destroy(T.wire);
    bt_rpc_server_destroy(T.server);
    bt_rpc_destroy(T.rpc);
    bt_tls_release(T.tls);
    bt_loop_poll(T.loop, 0);
    BT_ASSERT(bt_list_empty(&T.servings));
    while (!bt_list_empty(&T.sinks)) {
        free_sink(BT_CONTAINER_OF(T.sinks.next, struct sink, link));
    }
    while (!bt_list_empty(&T.sources)) {
        struct source *s = BT_CONTAINER_OF(T.sources.next, struct source, link);
        BT_ASSERT(s->send == NULL);
        free_source(s);
    }
    bt_loop_destroy(T.loop);
    bt_metrics_destroy(T.metrics);
    bt_slab_crcs_destroy(T.crcs);
    bt_slab_unmap(T.slab);
    free(T.free_slots);
    free(T.word_taken);
}

/* dir: of ca.crt and NAME-kvstore.crt, .key; NULL: plaintext. */
static void start_tls(const char *dir, const char *name)
{
    char ca[300], cert[300], key[300], err[700];
    if (dir == NULL) {
        return;
    }
    snprintf(ca, sizeof(ca), "%s/ca.crt", dir);
    snprintf(cert, sizeof(cert), "%s/%s-kvstore.crt", dir, name);
    snprintf(key, sizeof(key), "%s/%s-kvstore.key", dir, name);
    struct bt_tls_config c = {
        .key = "tls", .ca = ca, .cert = cert, .private_key = key, .cluster = "test"};
    if (bt_tls_create(&c, &T.tls, err, sizeof(err)) != BT_OK) {
        fprintf(stderr, "%s\n", err);
        exit(2);
    }
    bt_tls_watch(T.tls, T.loop, T.metrics);
    bt_rpc_set_tls(T.rpc, T.tls);
}

int main(int argc, char **argv)
{
    struct bt_kv_key root;
    char err[512];
    int port = 0;
    uint64_t inc = 0;
    wire_faults_open(argc, argv);
    bt_wx_child_main_if_asked(argc, argv);
    bt_random(&inc, sizeof(inc));
    inc = strtoull(opt(argc, argv, "inc", "0"), NULL, 16) ?: inc;
    bt_list_init(&T.sources);
    bt_list_init(&T.sinks);
    bt_list_init(&T.servings);
    bt_log_init("wire-peer", opt(argc, argv, "name", "peer"), BT_LOG_INFO, false);
    BT_ASSERT(bt_loop_create(&T.loop) == BT_OK && bt_rpc_create(T.loop, &T.rpc) == BT_OK);
    make_slab(argc, argv, &root, inc);
    T.metrics = bt_metrics_create();
    start_tls(opt(argc, argv, "tls", NULL),
              opt(argc, argv, "cert", opt(argc, argv, "name", "peer")));
    if (bt_rpc_server_create(T.rpc, opt(argc, argv, "rpc", "127.0.0.1:0"), &T.server, &port) !=
        BT_OK) {
        return 2;
    }
    char *addresses = bt_strdup(opt(argc, argv, "listen", "127.0.0.1")), *listen[16] = {NULL};
    for (char *save = NULL, *a = strtok_r(addresses, ",", &save), **to = listen;
         a != NULL && to < listen + 15; a = strtok_r(NULL, ",", &save)) {
        *to++ = a;
    }
    struct bt_wire_config conf = {
        .cluster = opt(argc, argv, "cluster", "test"),
        .name = opt(argc, argv, "name", "peer"),
        .incarnation = inc,
        .layout = &T.layout,
        .root = &root,
        .crcs = T.fresh ? NULL : T.crcs,
        .listen = (const char *const *)listen,
        .secret = opt(argc, argv, "secret", ""),
        .secret_len = strlen(opt(argc, argv, "secret", "")),
        .allow_routable = atoi(opt(argc, argv, "allow_routable", "0")) != 0,
        .over_grpc = atoi(opt(argc, argv, "grpc", "0")) != 0,
        .tls = T.tls,
        .bytes_in_flight_max = strtoull(opt(argc, argv, "inflight", "0"), NULL, 10),
        .idle_ms = strtoull(opt(argc, argv, "idle", "0"), NULL, 10),
    };
    struct bt_wire_ops ops = {
        .lookup = on_lookup, .send_end = on_send_end, .want = on_want, .want_end = on_want_end};
    bt_status_t st = bt_wire_create(T.loop, T.rpc, T.server, T.slab, &conf, &ops, NULL, T.metrics,
                                    &T.wire, err, sizeof(err));
    free(addresses);
    if (st != BT_OK) {
        fprintf(stderr, "%s\n", err);
        return 2;
    }
    bt_rpc_server_start(T.server);
    bt_loop_fd_add(T.loop, STDIN_FILENO, EPOLLIN, on_stdin, NULL);
    say("ready port=%d inc=%016llx pid=%d layout=%016llx root=%u", port, (ull)inc, (int)getpid(),
        (ull)T.layout.layout_id, root.b[0]);
    bt_loop_run(T.loop);
    finish();
    return 0;
}
