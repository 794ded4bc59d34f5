/* The engine thread against a scripted engine that finishes things late and checks the owner's
 * duties (worker_engine.h). The test is the control thread and the kvstore: it feeds the ring of
 * commands and answers what comes out. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <unistd.h>

#include "common/worker/core.h"
#include "decode/decode.h"
#include "prefill/prefill.h"
#include "worker_engine.h"

#define SLOTS      64u /* the upper half are SEALED and leased, the lower one WRITING */
#define MAX_REQS   400
#define MAX_KEYS   16384
#define MAX_LEASES 1024

/* How the rig answers a LocalLease. */
enum lease_mode {
    LEASE_ALL,   /* with the longest prefix that was put or came with a grant */
    LEASE_SOME,  /* with a part of it, at random */
    LEASE_WRONG, /* with slots that were given away before, or are during the load */
    LEASE_NEVER
};

struct track { /* what the test knows of one submission */
    struct bt_wreq *req;
    uint32_t n, max_new, want, choices;
    uint32_t prompt_last;
    struct {
        uint32_t got, last; /* tokens by offset */
        bool finished;
    } k[BT_WORKER_CHOICES];
    uint32_t prompt_got;                     /* positions reported by prompt logprobs */
    uint32_t resident, tail_first, tail_end; /* blocks; of the tail none is told while equal */
    uint32_t cached;                         /* tokens */
    bool opened, closed, ended, trailer, trailer_finished, prefill_done, cancelled, detached;
    bt_status_t status;
    char detail[BT_WORKER_DETAIL];
};

struct rig {
    struct bt_worker_conf conf;
    struct bt_wcore core;
    pthread_t thread;
    struct bt_slab *slab;
    char path[64];
    struct bt_kv_layout layout;
    struct bt_kv_key root;
    uint64_t attach;
    struct track t[MAX_REQS];
    uint32_t n, open, puts, put_dones;
    uint64_t rng;
    bool fatal, hold_puts, hold_tokens, gone, recall, tails;
    uint32_t met; /* prompts of which a part came as a tail */
    enum lease_mode lease_mode;
    struct bt_kv_key *keys; /* [n_keys] of blocks that are in the pool */
    uint32_t n_keys, n_leases, asked, recalls, n_held_puts;
    uint64_t held_puts[MAX_REQS]; /* not answered */
    uint64_t leases[MAX_LEASES];  /* held */
    struct bt_wtokens *held[BT_WORKER_TOKEN_BUFS];
    uint32_t n_held;
};

static uint32_t rnd(struct rig *g, uint32_t n)
{
    g->rng = g->rng * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(g->rng >> 33) % n;
}

static void no_bell(void *arg)
{
    (void)arg;
}

static void command(struct rig *g, const struct bt_wcmd *c)
{
    assert_true(bt_ring_push(&g->core.in, c));
}

static void attach(struct rig *g)
{
    char err[256];
    struct bt_wcmd c = {.kind = BT_WCMD_ATTACHED};
    c.u.slab = bt_calloc(1, sizeof(*c.u.slab));
    c.u.slab->attach = ++g->attach;
    assert_int_equal(
        bt_slab_map(g->slab->fd, &g->layout, &g->root, &c.u.slab->slab, err, sizeof(err)), BT_OK);
    command(g, &c);
    g->gone = false;
}

static void detach(struct rig *g)
{
    struct bt_wcmd c = {.kind = BT_WCMD_DETACHED};
    command(g, &c);
    g->gone = true;
    g->n_leases = 0;
    for (uint32_t i = 0; i < g->n; i++) {
        g->t[i].detached = true;
    }
}

static void start(struct rig *g, uint64_t seed)
{
    char err[256] = "";
    memset(g, 0, sizeof(*g));
    g->rng = seed;
    g->conf.common.model_path = FE_MODEL;
    g->conf.common.model_load_format = "dummy";
    g->conf.common.kv_block_tokens = FE_BLOCK;
    g->conf.engine_mixed_prompt_tokens = 32;
    g->conf.max_requests = MAX_REQS;
    g->conf.writeback = true;
    g->conf.writeback_max = 6;
    g->core.conf = &g->conf;
    atomic_store(&g->core.role, BT_ROLES_DECODE);
    g->core.roles[BT_ROLE_PREFILL] = &bt_prefill_role;
    g->core.roles[BT_ROLE_DECODE] = &bt_decode_role;
    g->core.writeback = &bt_decode_writeback;
    g->core.stats = bt_wstats_create("m", "decode");
    g->core.bell = no_bell;
    g->core.vt = &fe_vtable;
    assert_int_equal(bt_ring_init(&g->core.in, 8192, sizeof(struct bt_wcmd)), BT_OK);
    assert_int_equal(bt_ring_init(&g->core.out, 64, sizeof(struct bt_wout)), BT_OK);
    assert_int_equal(bt_model_root_key(FE_MODEL, "dummy", NULL, NULL, FE_BLOCK, &g->layout,
                                       &g->root, err, sizeof(err)),
                     BT_OK);
    snprintf(g->path, sizeof(g->path), "/tmp/baton-test-core-%d", (int)getpid());
    unlink(g->path);
    uint64_t bytes = (SLOTS + 2) * (g->layout.block_bytes + 8192) + (4u << 20);
    assert_int_equal(bt_slab_create(g->path, bytes, &g->layout, &g->root, 1, NULL, NULL, &g->slab,
                                    err, sizeof(err)),
                     BT_OK);
    assert_true(g->slab->super->n_slots >= SLOTS && g->slab->super->n_flow_words >= 1);
    for (uint32_t i = 0; i < SLOTS; i++) {
        atomic_store(&g->slab->headers[i].state,
                     bt_slot_word(3, i < SLOTS / 2 ? BT_SLOT_WRITING : BT_SLOT_SEALED));
    }
    g->keys = bt_calloc(MAX_KEYS, sizeof(g->keys[0]));
    assert_int_equal(pthread_create(&g->thread, NULL, bt_wcore_thread, &g->core), 0);
    struct bt_wout o;
    do {
        while (!bt_ring_pop(&g->core.out, &o)) {
            usleep(100);
        }
    } while (o.kind == BT_WOUT_PROGRESS);
    assert_int_equal(o.kind, BT_WOUT_READY);
    attach(g);
}

struct job {
    Baton__Phases phases;
    uint32_t n, max_new, choices; /* choices 0: one */
    uint64_t seed;
    uint32_t stop; /* EOS id; 0: none */
    bool prompt_logprobs;
};

static uint32_t submit_job(struct rig *g, const struct job *j)
{
    uint32_t len_max = BT_MIN(j->n + j->max_new, FE_CONTEXT);
    struct bt_wreq *r = bt_wreq_alloc(j->n, len_max, FE_BLOCK, 0);
    struct track *t = &g->t[g->n];
    assert_true(g->n < MAX_REQS && BT_DIV_UP(len_max, FE_BLOCK) <= FE_PAGES);
    r->request = g->n + 1;
    r->epoch = 1;
    r->phases = j->phases;
    r->n_prompt = j->n;
    r->max_new = j->max_new;
    r->attach = g->attach;
    r->arrived_ns = bt_mono_ns();
    r->params.seed = j->seed;
    r->params.n_eos = j->stop != 0;
    r->params.eos[0] = j->stop;
    r->logprobs = -1;
    r->prompt_logprobs = j->prompt_logprobs;
    r->prompt_top = r->params.logprobs = j->prompt_logprobs ? 2 : -1;
    for (uint32_t i = 0; i < j->n; i++) { /* each submission's are its own */
        r->tokens[i] = (i * 13 + g->n) % FE_VOCAB;
    }
    *t = (struct track){.req = r, .n = j->n, .max_new = j->max_new};
    t->prompt_last = r->tokens[j->n - 1];
    t->choices = BT_MAX(j->choices, 1u);
    t->want = j->phases == BATON__PHASES__PREFILL ? 1 : len_max - j->n;
    for (uint32_t i = 0; i < t->choices; i++) {
        t->k[i].last = t->prompt_last;
        if (i > 0) {
            bt_wreq_add_choice(r, i, FE_BLOCK);
        }
    }
    t->k[0].got = j->phases == BATON__PHASES__DECODE ? 1 : 0;
    struct bt_wcmd c = {.kind = BT_WCMD_SUBMIT, .req = r};
    command(g, &c);
    g->open++;
    return g->n++;
}

static uint32_t submit(struct rig *g, Baton__Phases phases, uint32_t n, uint32_t max_new,
                       uint64_t seed)
{
    return submit_job(g, &(struct job){.phases = phases, .n = n, .max_new = max_new, .seed = seed});
}

static bool has_key(const struct rig *g, const struct bt_kv_key *key)
{
    for (uint32_t i = 0; i < g->n_keys; i++) {
        if (memcmp(&g->keys[i], key, sizeof(*key)) == 0) {
            return true;
        }
    }
    return false;
}

static void add_key(struct rig *g, const struct bt_kv_key *key)
{
    if (!has_key(g, key)) {
        assert_true(g->n_keys < MAX_KEYS);
        g->keys[g->n_keys++] = *key;
    }
}

/* The kvstore has brought n more blocks of the tail, those in front of what was told. */
static void tail(struct rig *g, uint32_t i, uint32_t n, uint32_t generation)
{
    struct track *t = &g->t[i];
    struct bt_wtail *w = bt_calloc(1, sizeof(*w) + 8 * n);
    t->tail_first -= n;
    w->first = t->tail_first;
    w->n = n;
    for (uint32_t b = 0; b < n; b++) {
        w->slots[b] = SLOTS / 2 + rnd(g, SLOTS / 2);
        w->slots[n + b] = generation;
    }
    struct bt_wcmd c = {.kind = BT_WCMD_TAIL, .req = t->req, .u.tail = w};
    command(g, &c);
}

static void some_tail(struct rig *g)
{
    struct track *t = &g->t[g->n > 0 ? rnd(g, g->n) : 0];
    if (t->opened && !t->ended && t->tail_first > t->resident) {
        tail(g, (uint32_t)(t - g->t), 1 + rnd(g, t->tail_first - t->resident), 3);
    }
}

static void opened_with(struct rig *g, uint32_t i, uint32_t resident)
{
    struct track *t = &g->t[i];
    uint32_t blocks = BT_DIV_UP(t->n, FE_BLOCK);
    struct bt_wgrant *w = bt_calloc(1, sizeof(*w) + 8 * blocks);
    *w = (struct bt_wgrant){.n_tokens = t->n, .chunk_tokens = 64, .n_slots = blocks};
    w->resident_blocks = t->resident = resident;
    for (uint32_t b = 0; b < blocks; b++) {
        w->slots[b] = rnd(g, SLOTS / 2);
        w->slots[blocks + b] = 3;
    }
    struct bt_kv_key key = t->req->root;
    for (uint32_t b = 0; b < t->n / FE_BLOCK; b++) {
        bt_kv_key_next(&key, t->req->tokens + b * FE_BLOCK, FE_BLOCK, &key);
        add_key(g, &key);
    }
    struct bt_wcmd c = {.kind = BT_WCMD_OPENED, .req = t->req, .u.grant = w};
    t->opened = true;
    command(g, &c);
}

static void opened(struct rig *g, uint32_t i)
{
    struct track *t = &g->t[i];
    uint32_t most = (t->n - 1) / FE_BLOCK;
    opened_with(g, i, rnd(g, most + 1));
    if (g->tails && t->req->phases != BATON__PHASES__DECODE) {
        t->tail_first = t->tail_end = t->resident + rnd(g, most - t->resident + 1);
    }
}

static void trailer(struct rig *g, uint32_t i)
{
    struct track *t = &g->t[i];
    struct bt_wcmd c = {.kind = BT_WCMD_TRAILER, .req = t->req};
    c.u.trailer.first_token = fe_next(t->prompt_last, t->n, 0);
    c.u.trailer.finished = t->req->max_new == 1;
    t->k[0].last = c.u.trailer.first_token;
    command(g, &c);
}

static void on_token(struct rig *g, const struct bt_wtoken *k)
{
    struct track *t = &g->t[k->request - 1];
    const struct bt_engine_params *p = &t->req->params;
    assert_false(t->ended || k->choice >= t->choices || t->k[k->choice].finished);
    uint32_t got = t->k[k->choice].got++;
    assert_int_equal(k->offset, got);
    assert_int_equal(k->token, fe_next(t->k[k->choice].last, t->n + got, k->choice));
    t->k[k->choice].last = k->token;
    t->k[k->choice].finished = k->finish != BATON__FINISH__NOT_FINISHED;
    bool stop = p->n_eos > 0 && k->token == p->eos[0];
    assert_int_equal(k->finish == BATON__FINISH__STOP, stop);
    if (t->req->phases != BATON__PHASES__PREFILL) {
        assert_int_equal(t->k[k->choice].finished, stop || got + 1 == t->want);
    }
}

static void on_prompt(struct rig *g, struct bt_wprompt *p)
{
    struct track *t = &g->t[p->request - 1];
    assert_true(!t->prefill_done && p->n > 0 && p->n <= BT_WORKER_PROMPT_MSG);
    for (uint32_t i = 0; i < p->n; i++) {
        uint32_t pos = p->first + i;
        assert_int_equal(pos, ++t->prompt_got);
        assert_int_equal(p->t[i].token, (pos * 13 + p->request - 1) % FE_VOCAB);
        assert_true(p->t[i].logprob == -(float)pos);
        assert_int_equal(p->t[i].n_top, 2);
    }
    free(p);
}

static void on_lease(struct rig *g, const struct bt_wout *o)
{
    struct bt_wkeys *k = o->u.lease.keys;
    uint32_t n = 0;
    while (n < k->n && has_key(g, &k->keys[n])) {
        n++;
    }
    free(k);
    g->asked++;
    if (g->lease_mode == LEASE_NEVER || o->attach != g->attach || g->gone) {
        return;
    }
    n = g->lease_mode == LEASE_ALL ? n : rnd(g, n + 1);
    struct bt_wcmd c = {.kind = BT_WCMD_LEASED, .status = n > 0 ? BT_OK : BT_ERR_NOT_FOUND};
    c.u.lease.id = o->u.lease.id;
    if (rnd(g, 2) == 0) { /* the kvstore reads its SSD first */
        struct bt_wcmd again = {.kind = BT_WCMD_LEASED, .status = BT_AGAIN};
        again.u.lease.id = o->u.lease.id;
        command(g, &again);
    }
    uint32_t wrong = g->lease_mode == LEASE_WRONG ? rnd(g, 3) : 0;
    if (n > 0) {
        struct bt_wlease *l = bt_calloc(1, sizeof(*l) + 8 * n);
        l->n = n;
        for (uint32_t i = 0; i < n; i++) {
            l->slots[i] = SLOTS / 2 + rnd(g, SLOTS / 2);
            l->slots[n + i] = wrong == 1 ? 2 : 3;
        }
        c.u.lease.lease = l;
        assert_true(g->n_leases < MAX_LEASES);
        g->leases[g->n_leases++] = o->u.lease.id;
    }
    command(g, &c);
    if (g->recall &&
        rnd(g, 2) == 0) { /* of one that waits, is being read, or has been given back */
        struct bt_wcmd back = {.kind = BT_WCMD_RECALL};
        back.u.lease.id = o->u.lease.id - rnd(g, 2);
        g->recalls++;
        command(g, &back);
    }
    for (uint32_t i = SLOTS / 2; i < SLOTS && wrong == 2; i++) {
        usleep(rnd(g, 20)); /* before, during or after the load */
        atomic_store(&g->slab->headers[i].state, bt_slot_word(4, BT_SLOT_WRITING));
    }
    for (uint32_t i = SLOTS / 2; i < SLOTS && wrong == 0; i++) {
        atomic_store(&g->slab->headers[i].state, bt_slot_word(3, BT_SLOT_SEALED));
    }
}

static void on_unlease(struct rig *g, uint64_t id)
{
    for (uint32_t i = 0; i < g->n_leases; i++) {
        if (g->leases[i] == id) {
            g->leases[i] = g->leases[--g->n_leases];
            return;
        }
    }
    assert_true(g->gone || g->attach > 1); /* otherwise every lease is one that was given */
}

static void on_out(struct rig *g, struct bt_wout *o)
{
    struct track *t = NULL;
    struct bt_wcmd c = {0};
    if (g->tails) {
        some_tail(g);
    }
    switch (o->kind) {
    case BT_WOUT_TOKENS:
        for (uint32_t i = 0; i < o->u.tokens->n; i++) {
            on_token(g, &o->u.tokens->t[i]);
        }
        if (g->hold_tokens) {
            g->held[g->n_held++] = o->u.tokens;
            break;
        }
        atomic_store(&o->u.tokens->busy, false);
        bt_ring_nudge(&g->core.in); /* a step may wait for a buffer */
        break;
    case BT_WOUT_PROMPT_LOGPROBS: on_prompt(g, o->u.prompt); break;
    case BT_WOUT_PREFILL_DONE:
        t = &g->t[o->u.prefill.request - 1];
        assert_int_equal(t->k[0].got, BT_MIN(t->max_new, 1u)); /* the first token went before */
        if (t->req->prompt_logprobs) {
            assert_int_equal(o->u.prefill.cached, 0);
            assert_int_equal(t->prompt_got, t->n - 1);
        }
        assert_int_equal(o->u.prefill.cached + o->u.prefill.computed, t->n);
        t->cached = o->u.prefill.cached;
        if (!t->req->prompt_logprobs) { /* nothing but what was resident and what was told */
            assert_in_range(t->cached, t->resident * FE_BLOCK,
                            (t->resident + t->tail_end - t->tail_first) * FE_BLOCK);
            g->met += t->cached > t->resident * FE_BLOCK;
        }
        t->prefill_done = true;
        break;
    case BT_WOUT_TRAILER:
        t = &g->t[o->u.local.request - 1];
        assert_true(t->opened && !t->closed && !t->trailer && t->prefill_done);
        t->trailer = true;
        t->trailer_finished = o->u.local.finished;
        break;
    case BT_WOUT_CLOSE:
        t = &g->t[o->u.local.request - 1];
        assert_false(t->closed);
        t->closed = true;
        break;
    case BT_WOUT_PUT:
        assert_int_equal(o->u.put.n_tokens, FE_BLOCK);
        g->puts++;
        if (g->hold_puts) {
            assert_true(g->n_held_puts < MAX_REQS);
            g->held_puts[g->n_held_puts++] = o->u.put.id;
        }
        if (!g->hold_puts && o->attach == g->attach) {
            c.kind = BT_WCMD_PUT_SLOT;
            c.status = rnd(g, 4) == 0 ? BT_ERR_EXISTS : BT_OK;
            c.u.put.id = o->u.put.id;
            c.u.put.slot = rnd(g, SLOTS / 2);
            c.u.put.generation = 3;
            add_key(g, &o->u.put.key);
            command(g, &c);
        }
        break;
    case BT_WOUT_PUT_DONE: g->put_dones++; break;
    case BT_WOUT_LEASE: on_lease(g, o); break;
    case BT_WOUT_UNLEASE: on_unlease(g, o->u.lease.id); break;
    case BT_WOUT_ENDED:
        t = &g->t[o->req->request - 1];
        assert_false(t->ended);
        assert_true(t->closed || !t->opened || t->detached); /* the grant goes first */
        t->ended = true;
        t->status = o->status;
        memcpy(t->detail, o->detail, sizeof(t->detail));
        g->open--;
        c.kind = BT_WCMD_FORGET;
        c.req = o->req;
        command(g, &c);
        break;
    case BT_WOUT_FATAL: g->fatal = true; break;
    case BT_WOUT_PROGRESS:
    case BT_WOUT_READY:
    case BT_WOUT_FAILED: fail(); break;
    }
}

static bool turn(struct rig *g)
{
    struct bt_wout o;
    bool any = false;
    while (bt_ring_pop(&g->core.out, &o)) {
        on_out(g, &o);
        any = true;
    }
    return any;
}

static void run_until_done(struct rig *g)
{
    uint64_t end = bt_mono_ns() + 25000000000ull;
    while (g->open > 0 && !g->fatal) {
        if (!turn(g)) {
            usleep(50);
        }
        assert_true(bt_mono_ns() < end);
    }
}

static void stop(struct rig *g)
{
    struct bt_wcmd c = {.kind = BT_WCMD_STOP};
    struct bt_wout o;
    if (!g->fatal) {
        /* Puts still on their way hold pages. */
        for (int i = 0; i < 5000 && atomic_load(&g->core.stats->l_pages_free) != FE_PAGES; i++) {
            turn(g);
            usleep(1000);
        }
        assert_int_equal(atomic_load(&g->core.stats->l_pages_free), FE_PAGES);
        assert_int_equal(atomic_load(&g->core.stats->l_slots_free), FE_SLOTS);
    }
    command(g, &c);
    while (!atomic_load(&g->core.exited)) {
        while (bt_ring_pop(&g->core.out, &o)) {
            on_out(g, &o);
        }
        usleep(100);
    }
    pthread_join(g->thread, NULL);
    if (!g->fatal) {
        for (uint32_t i = 0; i < FE_FLOWS; i++) {
            assert_false(fe_last->flows[i].open);
        }
        for (uint32_t i = 0; i < FE_SLOTS; i++) {
            assert_false(fe_last->slots[i].open);
        }
    }
    while (bt_ring_pop(&g->core.in, &c)) {
        if (c.kind == BT_WCMD_LEASED) { /* came too late */
            on_unlease(g, c.u.lease.id);
            free(c.u.lease.lease);
            continue;
        }
        if (c.kind == BT_WCMD_TAIL) {
            free(c.u.tail);
            continue;
        }
        assert_int_equal(c.kind, BT_WCMD_FORGET);
        bt_wreq_free(c.req);
    }
    if (!g->fatal) {
        assert_int_equal(g->n_leases, 0);
    }
    free(g->keys);
    if (g->core.slab != NULL) {
        bt_slab_unmap(g->core.slab->slab);
        free(g->core.slab);
    }
    bt_ring_cleanup(&g->core.in);
    bt_ring_cleanup(&g->core.out);
    bt_wstats_destroy(g->core.stats);
    bt_slab_unmap(g->slab);
    unlink(g->path);
    free(fe_last);
    free(g);
}

static struct rig *rig(uint64_t seed)
{
    struct rig *g = bt_calloc(1, sizeof(*g));
    start(g, seed);
    return g;
}

static void test_each_kind_runs_to_its_end(void **state)
{
    (void)state;
    struct rig *g = rig(1);
    uint32_t p = submit(g, BATON__PHASES__PREFILL, 200, 9, 0);
    uint32_t d = submit(g, BATON__PHASES__DECODE, 33, 70, 0);
    uint32_t b = submit(g, BATON__PHASES__BOTH, 100, 40, 0);
    uint32_t one = submit(g, BATON__PHASES__DECODE, 5, 1, 0);
    for (uint32_t i = 0; i < 4; i++) {
        opened(g, i);
    }
    trailer(g, d);
    trailer(g, one);
    run_until_done(g);
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(g->t[i].status, BT_OK);
        assert_true(g->t[i].closed);
    }
    assert_true(g->t[p].trailer && g->t[b].trailer && !g->t[d].trailer);
    assert_int_equal(g->t[p].k[0].got, 1);
    assert_int_equal(g->t[d].k[0].got, 70);
    assert_int_equal(g->t[b].k[0].got, 40);
    assert_int_equal(g->t[one].k[0].got,
                     1); /* nothing of its own: the first token was the prefill's */
    assert_true(g->puts >= 6);
    stop(g);
}

/* Where the computing reaches the part that the kvstore has brought it goes on behind it. */
static void test_a_tail_is_not_computed(void **state)
{
    (void)state;
    struct rig *g = rig(3);
    atomic_store(&fe_held, false);
    atomic_store(&fe_hold, true); /* until all is said: who computes is soon beyond a tail */
    opened(g, submit(g, BATON__PHASES__BOTH, 20, 1, 0));
    while (!atomic_load(&fe_held)) {
        turn(g);
        usleep(100);
    }
    uint32_t first = g->n, middle = submit(g, BATON__PHASES__PREFILL, 200, 1, 0);
    uint32_t all = submit(g, BATON__PHASES__BOTH, 200, 3, 0);
    uint32_t behind = submit(g, BATON__PHASES__PREFILL, 200, 1, 0);
    uint32_t stale = submit(g, BATON__PHASES__PREFILL, 200, 1, 0);
    uint32_t wrong = submit(g, BATON__PHASES__PREFILL, 192, 1, 0);
    uint32_t logprobs = submit_job(
        g, &(struct job){
               .phases = BATON__PHASES__PREFILL, .n = 100, .max_new = 1, .prompt_logprobs = true});
    for (uint32_t i = first; i < g->n; i++) {
        opened_with(g, i, i == behind ? 3 : 0);
        g->t[i].tail_first = g->t[i].tail_end = g->t[i].n / FE_BLOCK;
        tail(g, i, 4, i == stale ? 2 : 3);
        tail(g, i, i == all || i == behind ? g->t[i].tail_first - g->t[i].resident : 1, 3);
    }
    atomic_store(&fe_hold, false);
    run_until_done(g);
    for (uint32_t i = 0; i < g->n; i++) {
        assert_int_equal(g->t[i].status, BT_OK);
    }
    assert_int_equal(g->t[middle].cached, 5 * FE_BLOCK);
    assert_int_equal(g->t[all].cached, 12 * FE_BLOCK); /* loaded at once */
    assert_int_equal(g->t[behind].cached, 12 * FE_BLOCK);
    assert_int_equal(g->t[stale].cached, 0); /* slots that were given to others are not read */
    assert_int_equal(g->t[wrong].cached, FE_BLOCK); /* the last token is never loaded: refused */
    assert_int_equal(g->t[logprobs].cached, 0);
    assert_int_equal(g->t[all].k[0].got, 3);
    assert_int_equal(g->met, 4);
    stop(g);
}

static void test_rows_compete_for_pages(void **state)
{
    (void)state;
    struct rig *g = rig(2);
    g->lease_mode = LEASE_NEVER;
    for (uint32_t i = 0; i < 30; i++) { /* each needs up to 14 of 40 pages, eight at a time */
        opened(g, submit(g, BATON__PHASES__BOTH, 20 + i, 180, 0));
    }
    run_until_done(g);
    for (uint32_t i = 0; i < 30; i++) {
        assert_int_equal(g->t[i].status, BT_OK);
        assert_int_equal(g->t[i].k[0].got, 180);
    }
    assert_true(bt_metric_value(g->core.stats->preemptions) > 0);
    assert_true(fe_last->max_pages > FE_PAGES * 3 / 4);
    /* What is computed a second time stays within half of what is generated even without a pool. */
    uint64_t prompts = 0;
    for (uint32_t i = 0; i < 30; i++) {
        prompts += g->t[i].n;
    }
    assert_true(fe_last->prompt_rows <= prompts + 30 * 180 / 2);
    stop(g);
}

/* What the pool has of a preempted row is loaded, whatever the kvstore answers, and the tokens are
 * the same. */
static void test_preempted_rows_are_reloaded(void **state)
{
    (void)state;
    for (enum lease_mode mode = LEASE_ALL; mode <= LEASE_NEVER; mode++) {
        struct rig *g = rig(15);
        const struct bt_wstats *s = g->core.stats;
        g->lease_mode = mode;
        for (uint32_t i = 0; i < 10; i++) {
            const struct job j = {.phases = i % 2 ? BATON__PHASES__BOTH : BATON__PHASES__DECODE,
                                  .n = 20 + 9 * i,
                                  .max_new = 200,
                                  .choices = i % 4 == 0 ? 3 : 1};
            opened(g, submit_job(g, &j));
            if (i % 2 == 0) {
                trailer(g, i);
            }
        }
        run_until_done(g);
        for (uint32_t i = 0; i < 10; i++) {
            assert_int_equal(g->t[i].status, BT_OK);
            for (uint32_t k = 0; k < g->t[i].choices; k++) {
                assert_int_equal(g->t[i].k[k].got, 200);
            }
        }
        uint64_t preempted = (uint64_t)bt_metric_value(s->preemptions),
                 reloaded = (uint64_t)bt_metric_value(s->reloaded),
                 recomputed = (uint64_t)bt_metric_value(s->recomputed);
        assert_true(preempted > 5 && g->asked > 0 && recomputed > 0);
        if (mode == LEASE_ALL) { /* the partial block, and blocks that are not yet sealed */
            assert_true(reloaded > 4 * recomputed && recomputed < 3 * FE_BLOCK * preempted);
        }
        if (mode == LEASE_NEVER) {
            assert_int_equal(reloaded, 0);
            assert_true(g->asked < preempted); /* not each time: that would be slow */
        } else {
            assert_true(reloaded > 0);
        }
        stop(g);
    }
}

/* Ten rows whose leases are wanted back at random. Were any asked for once more than rows were
 * preempted? */
static bool recalled_leases(uint64_t seed)
{
    struct rig *g = rig(seed);
    g->lease_mode = LEASE_ALL;
    g->recall = true;
    for (uint32_t i = 0; i < 10; i++) {
        const struct job j = {.phases = BATON__PHASES__BOTH, .n = 20 + 9 * i, .max_new = 200};
        opened(g, submit_job(g, &j));
    }
    run_until_done(g);
    for (uint32_t i = 0; i < 10; i++) {
        assert_int_equal(g->t[i].status, BT_OK);
        assert_int_equal(g->t[i].k[0].got, 200);
    }
    assert_true(g->recalls > 3);
    assert_true(bt_metric_value(g->core.stats->reloaded) > 0);
    assert_int_equal(g->n_leases, 0);
    bool again = g->asked > (uint64_t)bt_metric_value(g->core.stats->preemptions);
    stop(g);
    return again;
}

/* Leases that the kvstore wants back are given back, and asked for again when the row's turn comes:
 * the tokens are the same, none stays held. On a busy machine a row may be on before it has asked
 * at all, so one run of several is to show it. */
static void test_recalled_leases(void **state)
{
    (void)state;
    bool again = false;
    for (uint64_t seed = 16; seed < 28 && !again; seed++) {
        again = recalled_leases(seed);
    }
    assert_true(again);
}

/* No kvstore answers for the write-backs that hold pages, and the rows need nearly all pages: they
 * are given up. An answer that comes late is given back. */
static void test_unanswered_puts_do_not_stop_others(void **state)
{
    (void)state;
    struct rig *g = rig(3);
    g->hold_puts = true;
    for (uint32_t i = 0; i < 6; i++) {
        opened(g, submit(g, BATON__PHASES__BOTH, 30, 480, 0));
    }
    run_until_done(g);
    for (uint32_t i = 0; i < 6; i++) {
        assert_true(g->t[i].status == BT_OK && g->t[i].k[0].got == 480);
    }
    assert_true(g->puts > 6 && g->put_dones == 0); /* more than may be under way at once */
    for (uint32_t i = 0; i < g->n_held_puts; i++) {
        struct bt_wcmd c = {.kind = BT_WCMD_PUT_SLOT, .u.put = {g->held_puts[i], 1, 3}};
        command(g, &c);
    }
    for (int i = 0; i < 5000 && g->put_dones < g->puts; i++) {
        turn(g);
        usleep(1000);
    }
    assert_int_equal(g->put_dones, g->puts);
    stop(g);
}

static void test_no_logits_fail_one_request(void **state)
{
    (void)state;
    struct rig *g = rig(4);
    opened(g, submit(g, BATON__PHASES__BOTH, 40, 30, 0));
    opened(g, submit(g, BATON__PHASES__BOTH, 40, 30, FE_BAD));
    opened(g, submit(g, BATON__PHASES__BOTH, 40, 30, 0));
    run_until_done(g);
    assert_int_equal(g->t[0].status, BT_OK);
    assert_int_equal(g->t[2].status, BT_OK);
    assert_int_equal(g->t[1].status, BT_ERR_INTERNAL);
    assert_non_null(strstr(g->t[1].detail, "logits"));
    assert_true(g->t[1].k[0].got == 0 && g->t[1].closed && !g->t[1].trailer);
    stop(g);
}

static void test_a_lost_device_is_fatal(void **state)
{
    (void)state;
    struct rig *g = rig(5);
    opened(g, submit(g, BATON__PHASES__BOTH, 40, 30, 0));
    opened(g, submit(g, BATON__PHASES__BOTH, 40, 30, FE_DEVICE));
    run_until_done(g);
    assert_true(g->fatal);
    struct bt_wreq *left[2];
    for (int i = 0; i < 2; i++) {
        left[i] = g->t[i].ended ? NULL : g->t[i].req;
    }
    assert_true(left[0] != NULL || left[1] != NULL);
    for (int i = 0; i < 2; i++) {
        if (left[i] != NULL) {
            struct bt_wcmd c = {.kind = BT_WCMD_CANCEL, .req = left[i]};
            command(g, &c); /* harmless now */
        }
    }
    stop(g);
    for (int i = 0; i < 2; i++) {
        if (left[i] != NULL) {
            bt_wreq_free(left[i]);
        }
    }
}

static void test_a_grant_that_does_not_fit(void **state)
{
    (void)state;
    struct rig *g = rig(6);
    uint32_t i = submit(g, BATON__PHASES__BOTH, 40, 30, 0);
    struct bt_wgrant *w = bt_calloc(1, sizeof(*w) + 8 * 3);
    *w = (struct bt_wgrant){.n_tokens = 41, .chunk_tokens = 64, .n_slots = 3};
    struct bt_wcmd c = {.kind = BT_WCMD_OPENED, .req = g->t[i].req, .u.grant = w};
    g->t[i].opened = true;
    command(g, &c);
    uint32_t k = submit(g, BATON__PHASES__BOTH, 40, 30, 0);
    w = bt_calloc(1, sizeof(*w) + 8 * 3);
    *w = (struct bt_wgrant){.n_tokens = 40, .chunk_tokens = 64, .n_slots = 3};
    w->slots[3] = w->slots[4] = w->slots[5] = 2; /* generations: the slots' is 3 */
    c = (struct bt_wcmd){.kind = BT_WCMD_OPENED, .req = g->t[k].req, .u.grant = w};
    g->t[k].opened = true;
    command(g, &c);
    run_until_done(g);
    assert_int_equal(g->t[i].status, BT_ERR_PEER_PROTOCOL);
    assert_int_equal(g->t[k].status, BT_ERR_STALE);
    assert_true(g->t[i].closed && g->t[k].closed);
    stop(g);
}

/* Every choice is the sequence it would be alone, whatever the prompt's length is to the blocks,
 * and the prompt is computed once: each further choice begins with one row. */
static void test_choices_fork_from_one_prompt(void **state)
{
    (void)state;
    static const uint32_t lens[] = {1, 15, 16, 17, 64, 100};
    for (uint32_t both = 0; both < 2; both++) {
        for (uint32_t i = 0; i < BT_ARRAY_LEN(lens); i++) {
            struct rig *g = rig(7);
            uint32_t n = lens[i];
            const struct job j = {
                .phases = both ? BATON__PHASES__BOTH : BATON__PHASES__DECODE,
                .n = n,
                .max_new = 20,
                .choices = 6,
            };
            uint32_t r = submit_job(g, &j);
            opened(g, r);
            if (!both) {
                trailer(g, r);
            }
            run_until_done(g);
            assert_int_equal(g->t[r].status, BT_OK);
            assert_int_equal(g->t[r].trailer, both);
            for (uint32_t k = 0; k < 6; k++) {
                assert_int_equal(g->t[r].k[k].got, 20);
            }
            assert_true(fe_last->prompt_rows <= (both ? n : 0));
            stop(g);
        }
    }
}

/* More choices than slots and pages: they wait and are preempted, and are the same. */
static void test_choices_under_pressure(void **state)
{
    (void)state;
    struct rig *g = rig(8);
    for (uint32_t i = 0; i < 4; i++) {
        const struct job j = {.phases = i % 2 ? BATON__PHASES__BOTH : BATON__PHASES__DECODE,
                              .n = 60 + 30 * i,
                              .max_new = 150,
                              .choices = 16};
        uint32_t r = submit_job(g, &j);
        opened(g, r);
        if (i % 2 == 0) {
            trailer(g, r);
        }
    }
    run_until_done(g);
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(g->t[i].status, BT_OK);
        for (uint32_t k = 0; k < 16; k++) {
            assert_int_equal(g->t[i].k[k].got, 150);
        }
    }
    assert_true(bt_metric_value(g->core.stats->preemptions) > 0);
    stop(g);
}

/* The first choice ends with its first token, by an EOS id or by length: the others live on. */
static void test_the_first_choice_ends_at_once(void **state)
{
    (void)state;
    for (uint32_t both = 0; both < 2; both++) {
        struct rig *g = rig(9);
        uint32_t n = 40, last = ((n - 1) * 13) % FE_VOCAB;
        struct job j = {.phases = both ? BATON__PHASES__BOTH : BATON__PHASES__DECODE,
                        .n = n,
                        .max_new = 25,
                        .choices = 3,
                        .stop = fe_next(last, n, 0)};
        uint32_t r = submit_job(g, &j);
        j.stop = 0;
        j.max_new = 1;
        uint32_t one = submit_job(g, &j);
        for (uint32_t i = r; i <= one; i++) {
            opened(g, i);
            if (!both) {
                trailer(g, i);
            }
        }
        run_until_done(g);
        assert_true(g->t[r].status == BT_OK && g->t[one].status == BT_OK);
        for (uint32_t k = 0; k < 3; k++) {
            assert_int_equal(g->t[one].k[k].got, 1);
            assert_true(k == 0 ? g->t[r].k[k].got == 1 : g->t[r].k[k].finished);
        }
        assert_true(g->t[r].k[1].got > 1 && g->t[r].k[2].got > 1);
        assert_int_equal(g->t[r].trailer_finished, both);
        stop(g);
    }
}

/* One choice without usable logits fails all of its submission; a cancel ends all as well. */
static void test_choices_end_together_when_one_fails(void **state)
{
    (void)state;
    struct rig *g = rig(10);
    const struct job bad = {
        .phases = BATON__PHASES__DECODE, .n = 40, .max_new = 100, .choices = 4, .seed = FE_BAD};
    const struct job good = {.phases = BATON__PHASES__BOTH, .n = 50, .max_new = 400, .choices = 12};
    uint32_t b = submit_job(g, &bad), c = submit_job(g, &good), early = submit_job(g, &good);
    for (uint32_t i = b; i <= c; i++) {
        opened(g, i);
    }
    trailer(g, b);
    while (g->t[c].k[3].got == 0) {
        turn(g);
    }
    struct bt_wcmd cancel = {.kind = BT_WCMD_CANCEL, .req = g->t[c].req};
    command(g, &cancel);
    cancel.req = g->t[early].req; /* not even opened */
    command(g, &cancel);
    run_until_done(g);
    assert_int_equal(g->t[b].status, BT_ERR_INTERNAL);
    assert_non_null(strstr(g->t[b].detail, "logits"));
    assert_true(g->t[c].status == BT_OK && !g->t[c].k[3].finished);
    assert_int_equal(g->t[early].status, BT_OK);
    stop(g);
}

/* One report at a time: the engine thread is at most a few steps ahead. */
static void until_got(struct rig *g, uint32_t i, uint32_t choice, uint32_t n)
{
    struct bt_wout o;
    while (g->t[i].k[choice].got < n) {
        if (bt_ring_pop(&g->core.out, &o)) {
            on_out(g, &o);
        }
    }
}

static void cancel_choice(struct rig *g, struct bt_wreq *r)
{
    struct bt_wcmd c = {.kind = BT_WCMD_CANCEL_CHOICE, .req = r};
    command(g, &c);
}

/* Choices that nobody wants any more end alone, at any moment of their submission's life: the
 * others get all their tokens, and there is one end. */
static void test_one_choice_is_cancelled(void **state)
{
    (void)state;
    for (uint32_t moment = 0; moment < 4; moment++) {
        for (uint32_t both = 0; both < 2; both++) {
            struct rig *g = rig(13);
            const struct job j = {.phases = both ? BATON__PHASES__BOTH : BATON__PHASES__DECODE,
                                  .n = 40,
                                  .max_new = 200,
                                  .choices = 5};
            uint32_t r = submit_job(g, &j);
            struct bt_wreq *lead = g->t[r].req, *third = lead->next_choice->next_choice;
            if (moment == 1) {
                opened(g, r);
            }
            if (moment >= 2) {
                opened(g, r);
                if (!both) {
                    trailer(g, r);
                }
            }
            if (moment == 3) {
                until_got(g, r, 0, 5);
                until_got(g, r, 2, 5);
            }
            cancel_choice(g, lead);
            cancel_choice(g, lead); /* a second time: harmless */
            cancel_choice(g, third);
            if (moment == 0) {
                opened(g, r);
            }
            if (moment < 2 && !both) {
                trailer(g, r);
            }
            run_until_done(g);
            assert_int_equal(g->t[r].status, BT_OK);
            for (uint32_t k = 0; k < 5; k++) {
                bool cancelled = k == 0 || k == 2;
                assert_true(cancelled ? g->t[r].k[k].got < 200 : g->t[r].k[k].got == 200);
            }
            assert_int_equal(bt_metric_value(g->core.stats->finished[BT_REASON_STOP]), 2);
            stop(g);
        }
    }
}

static void test_all_choices_are_cancelled_one_by_one(void **state)
{
    (void)state;
    for (uint32_t order = 0; order < 2; order++) {
        struct rig *g = rig(14);
        const struct job j = {
            .phases = BATON__PHASES__DECODE, .n = 40, .max_new = 400, .choices = 3};
        uint32_t early = submit_job(g, &j), late = submit_job(g, &j);
        opened(g, late);
        trailer(g, late);
        until_got(g, late, 2, 5);
        for (uint32_t i = early; i <= late; i++) { /* the lead first, the lead last */
            struct bt_wreq *lead = g->t[i].req, *second = lead->next_choice;
            struct bt_wreq *all[] = {lead, second, second->next_choice};
            for (uint32_t k = 0; k < 3; k++) {
                cancel_choice(g, all[order ? 2 - k : k]);
            }
        }
        run_until_done(g);
        assert_true(g->t[early].status == BT_OK && g->t[late].status == BT_OK);
        assert_true(g->t[late].k[0].got < 400 && g->t[late].k[2].got < 400);
        stop(g);
    }
}

static void test_prompt_logprobs(void **state)
{
    (void)state;
    struct rig *g = rig(11);
    struct job j = {.phases = BATON__PHASES__BOTH, .n = 300, .max_new = 5, .prompt_logprobs = true};
    uint32_t both = submit_job(g, &j);
    j.phases = BATON__PHASES__PREFILL;
    uint32_t apart = submit_job(g, &j);
    j.max_new = 0; /* nothing is sampled */
    j.n = 64;
    uint32_t echo = submit_job(g, &j);
    j.n = 1;
    uint32_t one = submit_job(g, &j);
    j = (struct job){.phases = BATON__PHASES__BOTH,
                     .n = 30,
                     .max_new = 5,
                     .prompt_logprobs = true,
                     .seed = FE_BAD};
    uint32_t bad = submit_job(g, &j);
    for (uint32_t i = 0; i < g->n; i++) {
        opened(g, i);
    }
    run_until_done(g);
    for (uint32_t i = both; i <= one; i++) {
        assert_int_equal(g->t[i].status, BT_OK);
        assert_true(g->t[i].prefill_done && g->t[i].trailer);
        assert_int_equal(g->t[i].prompt_got, g->t[i].n - 1);
    }
    assert_int_equal(g->t[both].k[0].got, 5);
    assert_int_equal(g->t[apart].k[0].got, 1);
    assert_true(g->t[echo].k[0].got == 0 && g->t[echo].trailer_finished);
    assert_int_equal(g->t[bad].status, BT_ERR_INTERNAL);
    assert_int_equal(g->t[bad].prompt_got, 0);
    stop(g);
}

/* While nobody takes the tokens no step is launched, but commands are obeyed; then it goes on. */
static void test_steps_wait_for_token_buffers(void **state)
{
    (void)state;
    struct rig *g = rig(12);
    g->hold_tokens = true;
    for (uint32_t i = 0; i < 3; i++) {
        opened(g, submit(g, BATON__PHASES__BOTH, 40, 100, 0));
    }
    while (g->n_held < BT_WORKER_TOKEN_BUFS) {
        turn(g);
    }
    struct bt_wcmd c = {.kind = BT_WCMD_CANCEL, .req = g->t[1].req};
    command(g, &c);
    while (!g->t[1].ended) {
        turn(g);
    }
    uint64_t steps = fe_last->steps; /* the engine thread sleeps */
    usleep(20000);
    turn(g);
    assert_int_equal(fe_last->steps, steps);
    assert_int_equal(g->n_held, BT_WORKER_TOKEN_BUFS);
    g->hold_tokens = false;
    for (uint32_t i = 0; i < g->n_held; i++) {
        atomic_store(&g->held[i]->busy, false);
    }
    bt_ring_nudge(&g->core.in);
    run_until_done(g);
    assert_true(g->t[0].k[0].got == 100 && g->t[2].k[0].got == 100);
    stop(g);
}

/* Everything at once, from a seed: submissions of all kinds, cancels, revokes, a kvstore that comes
 * and goes. The scripted engine asserts; here the ends are counted. */
static uint32_t chaos(uint64_t seed, uint32_t *met_p)
{
    struct rig *g = rig(seed);
    g->lease_mode = (enum lease_mode)(seed % 4);
    g->tails = g->lease_mode != LEASE_WRONG; /* a tail's slots are leased: they stay */
    uint64_t end = bt_mono_ns() + 60000000000ull;
    uint32_t todo = 120, next_open = 0;
    while (todo > 0 || g->open > 0) {
        assert_true(bt_mono_ns() < end);
        if (todo > 0 && g->open < 25 && rnd(g, 3) == 0) {
            struct job j = {.phases = BATON__PHASES__PREFILL + (int)rnd(g, 3),
                            .n = 1 + rnd(g, 250),
                            .max_new = 1 + rnd(g, 200)};
            if (j.phases != BATON__PHASES__PREFILL && rnd(g, 3) == 0) {
                j.choices = 2 + rnd(g, 6);
            }
            j.prompt_logprobs = j.phases != BATON__PHASES__DECODE && rnd(g, 5) == 0;
            submit_job(g, &j);
            todo--;
        }
        for (; next_open < g->n && rnd(g, 4) != 0; next_open++) {
            struct track *t = &g->t[next_open];
            if (!t->ended && !t->cancelled && !t->detached && rnd(g, 15) != 0) {
                opened(g, next_open);
                if (t->req->phases == BATON__PHASES__DECODE && rnd(g, 8) != 0) {
                    trailer(g, next_open);
                } else if (t->req->phases == BATON__PHASES__DECODE) {
                    t->cancelled = true; /* never lands: cancel below */
                }
            } else {
                t->cancelled = true;
            }
            if (t->cancelled && !t->ended) {
                struct bt_wcmd c = {.kind = BT_WCMD_CANCEL, .req = t->req};
                command(g, &c);
            }
        }
        if (g->n > 0 && rnd(g, 12) == 0) {
            struct track *t = &g->t[rnd(g, g->n)];
            if (!t->ended && !t->cancelled) {
                t->cancelled = true;
                struct bt_wcmd c = {.kind = rnd(g, 2) ? BT_WCMD_CANCEL : BT_WCMD_REVOKE,
                                    .req = t->req};
                c.status = c.kind == BT_WCMD_REVOKE ? BT_ERR_PEER_LOST : BT_OK;
                command(g, &c);
            }
        }
        if (rnd(g, 400) == 0) {
            detach(g);
            if (rnd(g, 2)) {
                usleep(500);
            }
            attach(g);
        }
        turn(g);
        usleep(20 + rnd(g, 200));
    }
    uint32_t whole = 0;
    for (uint32_t i = 0; i < g->n; i++) {
        struct track *t = &g->t[i];
        if (t->status == BT_OK && !t->cancelled) {
            whole++;
            for (uint32_t k = 0; k < t->choices; k++) {
                assert_int_equal(t->k[k].got, t->want);
            }
        } else if (t->status != BT_OK) {
            assert_true(t->status == BT_ERR_PEER_LOST && (t->cancelled || t->detached));
        }
    }
    *met_p += g->met;
    stop(g);
    return whole;
}

static void test_chaos(void **state)
{
    (void)state;
    uint32_t whole = 0, met = 0;
    for (uint64_t seed = 100; seed < 125; seed++) {
        whole += chaos(seed, &met);
    }
    assert_true(met > 0);
    assert_true(whole > 250); /* of 3000: how many a cancel meets depends on the machine's speed */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_kind_runs_to_its_end),
        cmocka_unit_test(test_a_tail_is_not_computed),
        cmocka_unit_test(test_rows_compete_for_pages),
        cmocka_unit_test(test_preempted_rows_are_reloaded),
        cmocka_unit_test(test_recalled_leases),
        cmocka_unit_test(test_unanswered_puts_do_not_stop_others),
        cmocka_unit_test(test_no_logits_fail_one_request),
        cmocka_unit_test(test_a_lost_device_is_fatal),
        cmocka_unit_test(test_a_grant_that_does_not_fit),
        cmocka_unit_test(test_choices_fork_from_one_prompt),
        cmocka_unit_test(test_choices_under_pressure),
        cmocka_unit_test(test_the_first_choice_ends_at_once),
        cmocka_unit_test(test_choices_end_together_when_one_fails),
        cmocka_unit_test(test_one_choice_is_cancelled),
        cmocka_unit_test(test_all_choices_are_cancelled_one_by_one),
        cmocka_unit_test(test_prompt_logprobs),
        cmocka_unit_test(test_steps_wait_for_token_buffers),
        cmocka_unit_test(test_chaos),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
