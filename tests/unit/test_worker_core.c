/* The engine thread against a scripted engine that finishes things late and checks the owner's
 * duties (worker_engine.h). The test is the control thread and the kvstore: it feeds the ring of
 * commands and answers what comes out. */
#include "tests/unit/worker_rig.h"

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
    assert_int_equal(g->tail_ends, 6); /* met, or passed */
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

/* One report at a time: the engine thread is at most a few steps ahead. */
static void until_got(struct rig *g, uint32_t i, uint32_t choice, uint32_t n)
{
    struct bt_wout o;
    while (g->t[i].k[choice].got < n) {
        if (bt_ring_pop(&g->core.out, &o)) {
            on_out(g, &o);
        } else {
            usleep(50);
        }
    }
}

/* `rows` have all slots, or most pages, when somebody of `priority` comes who is short and would be
 * done before them. How many end before him? *preempted_p: how many rows made way until then. */
static uint32_t newcomer(uint32_t rows, int32_t priority, uint64_t *preempted_p)
{
    struct rig *g = rig(21);
    bool slots = rows == FE_SLOTS; /* otherwise 30 to 39 of 40 pages, and he needs 13 */
    struct job j = {.phases = BATON__PHASES__BOTH, .max_new = slots ? 44 : 50, .priority = 3};
    j.n = slots ? 20 : 150;
    for (uint32_t i = 0; i < rows; i++) {
        opened(g, submit_job(g, &j));
    }
    while (g->t[rows - 1].k[0].got == 0) { /* nobody is more than BT_WORKER_TOKEN_BUFS ahead */
        if (!turn_once(g)) {
            usleep(50);
        }
    }
    j = (struct job){.phases = BATON__PHASES__BOTH, .max_new = 4, .priority = priority};
    j.n = slots ? 60 : 200;
    opened_with(g, submit_job(g, &j), 0);
    struct track *t = &g->t[rows];
    while (!t->ended) {
        if (!turn_once(g)) {
            usleep(50);
        }
    }
    *preempted_p = (uint64_t)bt_metric_value(g->core.stats->preemptions);
    run_until_done(g);
    for (uint32_t i = 0; i < g->n; i++) {
        assert_int_equal(g->t[i].status, BT_OK);
        assert_int_equal(g->t[i].k[0].got, g->t[i].want);
    }
    uint32_t before = t->nth - 1;
    stop(g);
    return before;
}

/* A higher class takes slots and pages from rows of a lower one, no more than it needs; they go on
 * later and get the same tokens. An equal or a lower class waits. */
static void test_a_higher_class_takes_places_of_rows(void **state)
{
    (void)state;
    static const uint32_t rows[] = {FE_SLOTS, 3};
    static const int32_t higher[] = {2, -2000000000}, others[] = {3, 2000000000};
    uint64_t preempted;
    for (uint32_t i = 0; i < 2; i++) {
        for (uint32_t k = 0; k < 2; k++) {
            assert_int_equal(newcomer(rows[i], higher[k], &preempted), 0);
            assert_int_equal(preempted, 1);
            assert_true(newcomer(rows[i], others[k], &preempted) > 0);
            assert_int_equal(preempted, 0);
        }
    }
}

/* Rows that hold all slots, and no step until release(): what comes meanwhile waits. */
static void hold(struct rig *g)
{
    atomic_store(&fe_held, false);
    atomic_store(&fe_hold, true);
    while (!atomic_load(&fe_held)) {
        turn(g);
        usleep(50);
    }
}

/* The last priority that a request can have is before a late one, though that came first. */
static void test_no_priority_is_late(void **state)
{
    (void)state;
    struct rig *g = rig(23);
    struct job j = {.phases = BATON__PHASES__BOTH, .n = 20, .max_new = 60};
    opened(g, submit_job(g, &j));
    hold(g);
    j = (struct job){.phases = BATON__PHASES__BOTH, .n = 200, .max_new = 1, .late = true};
    uint32_t late = submit_job(g, &j);
    j.late = false;
    j.priority = INT32_MAX;
    uint32_t last = submit_job(g, &j);
    opened_with(g, late, 0);
    opened_with(g, last, 0);
    atomic_store(&fe_hold, false);
    run_until_done(g);
    assert_true(g->t[last].nth < g->t[late].nth);
    stop(g);
}

/* Waits until the engine thread says that so many requests hold a slot and so many wait. */
static void until_held(struct rig *g, uint32_t running, uint32_t waiting)
{
    const struct bt_wstats *s = g->core.stats;
    uint64_t end = bt_mono_ns() + 60000000000ull;
    while (atomic_load(&s->load.running) != running || atomic_load(&s->load.waiting) != waiting) {
        turn(g);
        usleep(50);
        if (bt_mono_ns() > end) {
            fail_msg("%u run and %u wait, not %u and %u", atomic_load(&s->load.running),
                     atomic_load(&s->load.waiting), running, waiting);
        }
    }
}

/* Late prompts that are being computed leave half of the slots and pages for the longest prompt:
 * one that is in time starts at once. One late prompt alone may be as long as it is. */
static void test_late_prompts_leave_room(void **state)
{
    (void)state;
    static const struct {
        uint32_t n, late, start; /* late prompts of n tokens: so many, of which so many may start */
        uint32_t in_time;        /* tokens of the one that comes then */
    } rows[] = {{100, 5, 1, 460}, {10, 7, FE_SLOTS / 2, 20}, {60, 3, 2, 400}};
    for (uint32_t i = 0; i < BT_ARRAY_LEN(rows); i++) {
        struct rig *g = rig(24);
        struct job j = {.phases = BATON__PHASES__BOTH, .n = 20, .max_new = 12};
        g->hold_tokens = true; /* no step begins once the buffers are used up */
        opened_with(g, submit_job(g, &j), 0);
        while (g->n_held < BT_WORKER_TOKEN_BUFS) {
            turn(g);
            usleep(50);
        }
        j = (struct job){.phases = BATON__PHASES__BOTH, .n = rows[i].n, .max_new = 1, .late = true};
        for (uint32_t k = 0; k < rows[i].late; k++) {
            opened_with(g, submit_job(g, &j), 0);
        }
        until_held(g, 1 + rows[i].start, rows[i].late - rows[i].start);
        j = (struct job){.phases = BATON__PHASES__BOTH, .n = rows[i].in_time, .max_new = 1};
        opened_with(g, submit_job(g, &j), 0);
        until_held(g, 2 + rows[i].start, rows[i].late - rows[i].start);
        g->hold_tokens = false;
        while (g->n_held > 0) {
            atomic_store(&g->held[--g->n_held]->busy, false);
        }
        bt_ring_nudge(&g->core.in);
        j = (struct job){.phases = BATON__PHASES__BOTH, .n = 400, .max_new = 1, .late = true};
        opened_with(g, submit_job(g, &j), 0); /* starts when all others have ended */
        run_until_done(g);
        for (uint32_t k = 0; k < g->n; k++) {
            assert_int_equal(g->t[k].status, BT_OK);
        }
        assert_int_equal(g->t[g->n - 1].nth, g->n);
        stop(g);
    }
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

/* Ten rows whose leases are wanted back at random. Were some, were blocks loaded all the same, and
 * was any lease asked for once more than rows were preempted? */
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
    assert_int_equal(g->n_leases, 0);
    bool again = g->recalls > 3 && bt_metric_value(g->core.stats->reloaded) > 0 &&
                 g->asked > (uint64_t)bt_metric_value(g->core.stats->preemptions);
    stop(g);
    return again;
}

/* Prompts of which a grant has only the beginning: the rest comes piece by piece, whatever the
 * kvstore answers, and what it does not have goes there, after the end as well. */
static void test_prompts_that_no_slab_holds(void **state)
{
    enum { N = 400, PART = 5 * FE_BLOCK };
    (void)state;
    for (enum lease_mode mode = LEASE_ALL; mode <= LEASE_NEVER; mode++) {
        struct rig *g = rig(40 + mode);
        g->lease_mode = mode;
        uint32_t first = mode == LEASE_NEVER ? 3 : 0; /* each of these waits for two seconds */
        for (uint32_t i = first; i < 6; i++) {
            const struct job j = {.phases = BATON__PHASES__BOTH, .n = N, .max_new = 20};
            uint32_t r = submit_job(g, &j), have = i % 2 == 0 ? (N - 1) / FE_BLOCK : 12;
            struct bt_kv_key key = g->t[r].req->sub->root;
            for (uint32_t b = 0; b < have; b++) { /* in the pool, in front of a hole */
                bt_kv_key_next(&key, g->t[r].req->tokens + b * FE_BLOCK, FE_BLOCK, &key);
                add_key(g, &key);
            }
            opened_part(g, r, PART, i < 4 ? PART / FE_BLOCK : i - 4);
            run_until_done(g);
            assert_int_equal(g->t[r].status, BT_OK);
            assert_int_equal(g->t[r].k[0].got, 20);
            assert_true(g->t[r].trailer && g->t[r].cached % FE_BLOCK == 0);
            if (mode == LEASE_ALL && i < 4) {
                assert_int_equal(g->t[r].cached, have * FE_BLOCK);
            }
            if (mode == LEASE_NEVER) {
                assert_int_equal(g->t[r].cached, g->t[r].resident * FE_BLOCK);
            }
            /* All blocks behind the grant are offered, those of the answer as well. */
            uint32_t all = (i + 1 - first) * ((N + 19) / FE_BLOCK - PART / FE_BLOCK);
            for (int k = 0; k < 60000 && g->puts < all; k++) {
                turn(g);
                usleep(1000);
            }
            assert_int_equal(g->puts, all);
        }
        assert_int_equal(g->passed, g->puts);
        stop(g);
    }
}

/* Pages that are only kept until their blocks have been written are given to whoever wants them. */
static void test_pages_are_not_kept_from_others(void **state)
{
    (void)state;
    struct rig *g = rig(50);
    g->hold_puts = true; /* a disk that takes nothing */
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t r = submit(g, BATON__PHASES__BOTH, 500, 5, 0);
        opened_part(g, r, 80, 0);
        run_until_done(g);
        assert_int_equal(g->t[r].status, BT_OK);
    }
    for (uint32_t i = 0; i < g->n_held_puts; i++) {
        struct bt_wcmd c = {.kind = BT_WCMD_PUT_SLOT,
                            .status = BT_ERR_UNAVAILABLE,
                            .u.put = {g->held_puts[i], 1, 3}};
        command(g, &c);
    }
    stop(g);
}

/* Leases that the kvstore wants back are given back, and asked for again when the row's turn comes:
 * the tokens are the same, none stays held. On a busy machine a row may be on before it has asked
 * at all, so one run of several is to show it. */
static void test_recalled_leases(void **state)
{
    (void)state;
    bool again = false;
    for (uint64_t seed = 16; seed < 56 && !again; seed++) {
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
    for (int i = 0; i < 60000 && g->put_dones < g->puts; i++) {
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
    until_got(g, c, 3, 1); /* no later, so that there is much left to be cancelled */
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

/* An engine without a device is inside forward for a whole step: what is queued was said before,
 * that step included, and shrinks as time goes on. */
static void test_the_queue_is_told_while_a_step_runs(void **state)
{
    (void)state;
    struct rig *g = rig(13);
    struct bt_wload l;
    bt_wstats_load(g->core.stats, FE_CONTEXT, &l);
    assert_true(l.load.queue_ms == 0);
    atomic_store(&fe_held, false);
    atomic_store(&fe_hold, true);
    uint64_t before = bt_mono_ns();
    opened_with(g, submit(g, BATON__PHASES__PREFILL, 200, 1, 0), 0);
    while (!atomic_load(&fe_held)) {
        usleep(100);
    }
    assert_true(atomic_load(&g->core.stats->load.queue_end_ns) > before);
    assert_int_equal(atomic_load(&g->core.stats->load.queued_tokens), 200 - 48);
    do {
        usleep(1000);
        bt_wstats_load(g->core.stats, FE_CONTEXT, &l);
    } while (l.load.queue_ms > 0); /* it is overdue: nothing better is known */
    atomic_store(&fe_hold, false);
    run_until_done(g);
    stop(g);
}

/* A prompt beside a row: by tokens where no time bounds the step, and in a block a step where that
 * is all that the time has room for. */
static void test_time_bounds_steps_with_prompts(void **state)
{
    (void)state;
    static const uint32_t most[] = {32, FE_BLOCK};
    for (uint32_t i = 0; i < 2; i++) {
        struct rig *g = rig(31);
        atomic_store(&g->core.mixed_step_ns, i);
        atomic_store(&fe_held, false);
        atomic_store(&fe_hold, true);
        opened_with(g, submit(g, BATON__PHASES__BOTH, FE_BLOCK, 200, 0), 0);
        while (!atomic_load(&fe_held)) {
            usleep(100);
        }
        opened_with(g, submit(g, BATON__PHASES__BOTH, 200, 1, 0), 0); /* the row's step is held */
        atomic_store(&fe_hold, false);
        run_until_done(g);
        assert_int_equal(fe_last->max_row, most[i]);
        stop(g);
    }
}

/* What it has by class: three prompts that wait behind the one in the step, rows and their pages.
 */
static void test_classes_are_told_apart(void **state)
{
    (void)state;
    struct rig *g = rig(14);
    struct bt_wload l;
    static const int32_t class[] = {-2000000000, 7, 7, 9};
    for (uint32_t i = 0; i < 2; i++) { /* two rows of a class, and one of another */
        struct job j = {.phases = BATON__PHASES__BOTH, .n = 20, .max_new = 200, .priority = 7};
        opened(g, submit_job(g, &j));
    }
    until_got(g, 1, 0, 1);
    hold(g);
    struct job prompt = {.phases = BATON__PHASES__BOTH, .n = 40, .max_new = 1};
    for (uint32_t i = 0; i < BT_ARRAY_LEN(class); i++) {
        prompt.priority = class[i];
        (void)submit_job(g, &prompt); /* its grant is not open: it is landing, as far as is known */
    }
    atomic_store(&fe_hold, false);
    do {
        turn(g);
        usleep(50);
        bt_wstats_load(g->core.stats, FE_CONTEXT, &l);
    } while (l.load.n_classes < 3);
    assert_int_equal(l.load.n_classes, 3);
    assert_int_equal(l.class[0].priority, INT16_MIN);
    assert_int_equal(l.class[0].landing, 1);
    assert_int_equal(l.class[0].rows, 0);
    assert_int_equal(l.class[1].priority, 7);
    assert_int_equal(l.class[1].landing, 2);
    assert_int_equal(l.class[1].waiting, 2);
    assert_int_equal(l.class[1].rows, 2);
    assert_true(l.class[1].pages >= 2 * BT_DIV_UP(20, FE_BLOCK));
    assert_int_equal(l.class[2].priority, 9);
    for (uint32_t i = 2; i < g->n; i++) {
        opened(g, i);
    }
    run_until_done(g);
    do { /* the engine thread says so behind the last end */
        usleep(50);
        bt_wstats_load(g->core.stats, FE_CONTEXT, &l);
    } while (l.load.n_classes != 0);
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
            j.priority = seed % 2 == 0 ? (int32_t)rnd(g, 3) : 0;
            submit_job(g, &j);
            todo--;
        }
        for (; next_open < g->n && rnd(g, 4) != 0; next_open++) {
            struct track *t = &g->t[next_open];
            if (!t->ended && !t->cancelled && !t->detached && rnd(g, 15) != 0) {
                opened(g, next_open);
                if (t->req->sub->phases == BATON__PHASES__DECODE && rnd(g, 8) != 0) {
                    trailer(g, next_open);
                } else if (t->req->sub->phases == BATON__PHASES__DECODE) {
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

/* Rows with drafts keep all the rules: the engine asserts them, and the rig compares each token. */
static void test_drafts_keep_the_rules(void **state)
{
    uint32_t whole = 0, met = 0;
    fe_drafts = true;
    test_each_kind_runs_to_its_end(state);
    test_rows_compete_for_pages(state);
    test_preempted_rows_are_reloaded(state);
    test_no_logits_fail_one_request(state);
    test_choices_under_pressure(state);
    test_the_first_choice_ends_at_once(state);
    test_steps_wait_for_token_buffers(state);
    for (uint64_t seed = 200; seed < 210; seed++) {
        whole += chaos(seed, &met);
    }
    fe_drafts = false;
    assert_true(whole > 100);
    assert_true(fe_accepted > 1000 && fe_refused > 1000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_kind_runs_to_its_end),
        cmocka_unit_test(test_a_tail_is_not_computed),
        cmocka_unit_test(test_rows_compete_for_pages),
        cmocka_unit_test(test_a_higher_class_takes_places_of_rows),
        cmocka_unit_test(test_no_priority_is_late),
        cmocka_unit_test(test_late_prompts_leave_room),
        cmocka_unit_test(test_preempted_rows_are_reloaded),
        cmocka_unit_test(test_prompts_that_no_slab_holds),
        cmocka_unit_test(test_pages_are_not_kept_from_others),
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
        cmocka_unit_test(test_the_queue_is_told_while_a_step_runs),
        cmocka_unit_test(test_time_bounds_steps_with_prompts),
        cmocka_unit_test(test_classes_are_told_apart),
        cmocka_unit_test(test_chaos),
        cmocka_unit_test(test_drafts_keep_the_rules),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
