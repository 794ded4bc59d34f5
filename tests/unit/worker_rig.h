/* The rig of the engine thread's tests: the thread itself over a scripted engine (worker_engine.h).
 * The test is the control thread and the kvstore: it feeds the ring of commands and answers what
 * comes out. Static helpers; for one program. */
#ifndef BT_TESTS_WORKER_RIG_H
#define BT_TESTS_WORKER_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <unistd.h>

#include "common/worker/core.h"
#include "tests/unit/worker_engine.h"

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
    uint32_t n, max_new, want, choices, beams;
    uint32_t *found[BT_WORKER_CHOICES]; /* a beam search's answers */
    uint32_t prompt_last;
    struct {
        uint32_t got, last; /* tokens by offset */
        bool finished;
    } k[BT_WORKER_CHOICES];
    uint32_t prompt_got;                     /* positions reported by prompt logprobs */
    uint32_t resident, tail_first, tail_end; /* blocks; of the tail none is told while equal */
    uint32_t cached;                         /* tokens */
    uint32_t nth;                            /* to end, from 1 */
    bool part;                               /* its grant has only the beginning of the prompt */
    bool opened, closed, ended, trailer, trailer_finished, prefill_done, cancelled, detached,
        searched;
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
    uint32_t n, open, n_ended, puts, put_dones, passed;
    uint64_t rng;
    bool fatal, hold_puts, hold_tokens, gone, recall, tails;
    uint32_t met; /* prompts of which a part came as a tail */
    uint32_t tail_ends;
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

static void __attribute__((unused)) detach(struct rig *g)
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
    g->conf.speculate = "suffix";
    g->core.conf = &g->conf;
    atomic_store(&g->core.role, BT_ROLES_DECODE);
    g->core.prefill = &bt_prefill;
    g->core.decode = &bt_decode;
    g->core.stats = bt_wstats_create("m", "decode");
    g->core.bell = no_bell;
    g->core.vt = &fe_vtable;
    assert_int_equal(bt_ring_init(&g->core.in, 8192, sizeof(struct bt_wcmd)), BT_OK);
    assert_int_equal(bt_ring_init(&g->core.out, 64, sizeof(struct bt_wout)), BT_OK);
    assert_int_equal(bt_model_root_key(FE_MODEL,
                                       &(struct bt_model_settings){.load_format = "dummy",
                                                                   .block_tokens = FE_BLOCK},
                                       &g->layout, &g->root, err, sizeof(err)),
                     BT_OK);
    snprintf(g->path, sizeof(g->path), "/tmp/baton-test-core-%d", (int)getpid());
    unlink(g->path);
    uint64_t bytes = (SLOTS + 2) * (g->layout.block_bytes + 8192) + (4u << 20);
    struct bt_slab_spec spec = {
        .path = g->path, .bytes = bytes, .layout = &g->layout, .root = &g->root, .incarnation = 1};
    assert_int_equal(bt_slab_create(&spec, NULL, NULL, &g->slab, err, sizeof(err)), BT_OK);
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
    int32_t priority;
    bool late;
    uint32_t beams; /* a search, for `choices` answers */
};

static uint32_t submit_job(struct rig *g, const struct job *j)
{
    uint32_t len_max = BT_MIN(j->n + j->max_new, FE_CONTEXT), tokens[FE_CONTEXT];
    struct bt_submission sub = {.request = g->n + 1,
                                .epoch = 1,
                                .phases = j->phases,
                                .priority = j->priority,
                                .late = j->late,
                                .n = j->n,
                                .n_prompt = j->n,
                                .max_new = j->max_new,
                                .len_max = len_max,
                                .attach = g->attach,
                                .arrived_ns = bt_mono_ns(),
                                .n_slots = 1,
                                .logprobs = -1,
                                .prompt_logprobs = j->prompt_logprobs};
    sub.prompt_top = sub.params.logprobs = j->prompt_logprobs ? 2 : -1;
    sub.params.seed = j->seed;
    sub.params.n_eos = j->stop != 0;
    sub.params.eos[0] = j->stop;
    if (j->beams > 0) {
        sub.search = true;
        sub.params.seed = FE_BEAM;
        sub.params.n_eos = 1; /* 0 */
    }
    if (j->beams > 0 && j->phases != BATON__PHASES__PREFILL) {
        sub.n_slots = j->beams;
        sub.beams = (struct bt_beam_conf){.width = j->beams,
                                          .n = BT_MAX(j->choices, 1u),
                                          .length_penalty = 1,
                                          .stop = (bt_beam_stop_t)(g->n % BT_BEAM_STOPS)};
        sub.params.logprobs = (int32_t)bt_beam_tops(j->beams, 1);
    }
    struct track *t = &g->t[g->n];
    assert_true(g->n < MAX_REQS && BT_DIV_UP(len_max, FE_BLOCK) <= FE_PAGES);
    for (uint32_t i = 0; i < j->n; i++) { /* each submission's are its own */
        tokens[i] = (i * 13 + g->n) % FE_VOCAB;
    }
    struct bt_wreq *r = bt_wreq_alloc(&g->core, &sub, tokens);
    *t = (struct track){.req = r, .n = j->n, .max_new = j->max_new};
    t->prompt_last = r->tokens[j->n - 1];
    t->beams = j->beams;
    t->choices = BT_MAX(j->choices, 1u);
    t->want = j->phases == BATON__PHASES__PREFILL ? 1 : len_max - j->n;
    for (uint32_t i = 0; i < t->choices; i++) {
        t->k[i].last = t->prompt_last;
        t->found[i] = j->beams > 0 ? bt_calloc(j->max_new, sizeof(*t->found[i])) : NULL;
        if (i > 0 && j->beams == 0) {
            bt_wreq_add_choice(&g->core, r, i);
        }
    }
    t->k[0].got = j->phases == BATON__PHASES__DECODE && j->beams == 0 ? 1 : 0;
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

/* A grant for the first n tokens. */
static void opened_part(struct rig *g, uint32_t i, uint32_t n, uint32_t resident)
{
    struct track *t = &g->t[i];
    uint32_t blocks = BT_DIV_UP(n, FE_BLOCK);
    struct bt_wgrant *w = bt_calloc(1, sizeof(*w) + 8 * blocks);
    *w = (struct bt_wgrant){.n_tokens = n, .chunk_tokens = 64, .n_slots = blocks};
    t->part = n < t->n;
    w->resident_blocks = t->resident = resident;
    for (uint32_t b = 0; b < blocks; b++) {
        w->slots[b] = rnd(g, SLOTS / 2);
        w->slots[blocks + b] = 3;
    }
    struct bt_kv_key key = t->req->sub->root;
    for (uint32_t b = 0; b < n / FE_BLOCK; b++) {
        bt_kv_key_next(&key, t->req->tokens + b * FE_BLOCK, FE_BLOCK, &key);
        add_key(g, &key);
    }
    struct bt_wcmd c = {.kind = BT_WCMD_OPENED, .req = t->req, .u.grant = w};
    t->opened = true;
    command(g, &c);
}

static void opened_with(struct rig *g, uint32_t i, uint32_t resident)
{
    opened_part(g, i, g->t[i].n, resident);
}

static void opened(struct rig *g, uint32_t i)
{
    struct track *t = &g->t[i];
    uint32_t most = (t->n - 1) / FE_BLOCK;
    opened_with(g, i, rnd(g, most + 1));
    if (g->tails && t->req->sub->phases != BATON__PHASES__DECODE) {
        t->tail_first = t->tail_end = t->resident + rnd(g, most - t->resident + 1);
    }
}

static void trailer(struct rig *g, uint32_t i)
{
    struct track *t = &g->t[i];
    struct bt_wcmd c = {.kind = BT_WCMD_TRAILER, .req = t->req};
    c.u.trailer.first_token = fe_next(t->prompt_last, t->n, 0);
    c.u.trailer.finished = t->req->sub->max_new == 1;
    t->k[0].last = c.u.trailer.first_token;
    command(g, &c);
}

static void on_token(struct rig *g, const struct bt_wtoken *k)
{
    struct track *t = &g->t[k->request - 1];
    const struct bt_engine_params *p = &t->req->sub->params;
    assert_false(t->ended || k->choice >= t->choices || t->k[k->choice].finished);
    uint32_t got = t->k[k->choice].got++;
    assert_int_equal(k->offset, got);
    if (t->beams > 0) {
        assert_true(got < t->max_new && t->searched);
        t->found[k->choice][got] = k->token;
        t->k[k->choice].finished = k->finish != BATON__FINISH__NOT_FINISHED;
        assert_int_equal(k->finish == BATON__FINISH__STOP, k->token == 0);
        return;
    }
    assert_int_equal(k->token, fe_next(t->k[k->choice].last, t->n + got, k->choice));
    t->k[k->choice].last = k->token;
    t->k[k->choice].finished = k->finish != BATON__FINISH__NOT_FINISHED;
    bool stop = p->n_eos > 0 && k->token == p->eos[0];
    assert_int_equal(k->finish == BATON__FINISH__STOP, stop);
    if (t->req->sub->phases != BATON__PHASES__PREFILL) {
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
    assert_true(!o->u.lease.passing || g->t[o->u.lease.request - 1].part);
    n = o->u.lease.passing ? BT_MIN(n, 4u) : n; /* the slab's window */
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
        assert_int_equal(t->k[0].got, t->beams > 0 ? 0 : BT_MIN(t->max_new, 1u)); /* went before */
        if (t->req->sub->prompt_logprobs) {
            assert_int_equal(o->u.prefill.cached, 0);
            assert_int_equal(t->prompt_got, t->n - 1);
        }
        assert_int_equal(o->u.prefill.cached + o->u.prefill.computed, t->n);
        t->cached = o->u.prefill.cached;
        if (!t->req->sub->prompt_logprobs &&
            !t->part) { /* nothing but what was resident and what was told */
            assert_in_range(t->cached, t->resident * FE_BLOCK,
                            (t->resident + t->tail_end - t->tail_first) * FE_BLOCK);
            g->met += t->cached > t->resident * FE_BLOCK;
        }
        t->prefill_done = true;
        break;
    case BT_WOUT_TRAILER:
        t = &g->t[o->u.local.request - 1];
        assert_true(t->opened && !t->closed && !t->trailer && (t->prefill_done || t->part));
        t->trailer = true;
        t->trailer_finished = o->u.local.finished;
        break;
    case BT_WOUT_SEARCHING: g->t[o->u.searching.request - 1].searched = true; break;
    case BT_WOUT_TAIL_END: g->tail_ends++; break;
    case BT_WOUT_CLOSE:
        t = &g->t[o->u.local.request - 1];
        assert_false(t->closed);
        t->closed = true;
        break;
    case BT_WOUT_PUT:
        assert_int_equal(o->u.put.n_tokens, FE_BLOCK);
        g->puts++;
        g->passed += o->u.put.passing;
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
        t = &g->t[o->req->sub->request - 1];
        assert_false(t->ended);
        assert_true(t->closed || !t->opened || t->detached); /* the grant goes first */
        t->ended = true;
        t->nth = ++g->n_ended;
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

/* Takes one thing that came out, for whom it matters when: while the other thread goes on with each
 * buffer that it gets back, turn() may not return before all is over. */
static bool turn_once(struct rig *g)
{
    struct bt_wout o;
    if (!bt_ring_pop(&g->core.out, &o)) {
        return false;
    }
    on_out(g, &o);
    return true;
}

static bool turn(struct rig *g)
{
    bool any = false;
    while (turn_once(g)) {
        any = true;
    }
    return any;
}

static void run_until_done(struct rig *g)
{
    uint64_t end = bt_mono_ns() + 120000000000ull;
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
        for (int i = 0; i < 60000 && atomic_load(&g->core.stats->load.pages_free) != fe_pages;
             i++) {
            turn(g);
            usleep(1000);
        }
        assert_int_equal(atomic_load(&g->core.stats->load.pages_free), fe_pages);
        assert_int_equal(atomic_load(&g->core.stats->load.slots_free), FE_SLOTS);
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
    for (uint32_t i = 0; i < g->n; i++) {
        for (uint32_t k = 0; k < BT_WORKER_CHOICES; k++) {
            free(g->t[i].found[k]);
        }
    }
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

#endif
