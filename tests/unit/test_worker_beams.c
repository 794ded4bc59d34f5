/* Beam searches on the engine thread (decode/beam.c), over the scripted engine of worker_engine.h:
 * their answers are those of the pure search over whole sequences, and the engine checks that each
 * beam's rows run over the KV of its own tokens, on pages that nobody else writes. */
#include "common/search/beam.h"
#include "tests/unit/worker_rig.h"

/* KV of the prompt that was loaded is taken on trust: then the chain begins behind it. */
static uint64_t chain_of(const struct track *t, const uint32_t *prompt, const uint32_t *tokens,
                         uint32_t n)
{
    uint64_t chain = 0;
    for (uint32_t i = 0; i < t->n + n; i++) {
        chain = fe_chain(chain, i < t->n ? prompt[i] : tokens[i - t->n]);
    }
    return chain;
}

/* Compares what came with the search that the test runs itself. Before its request is freed. */
static void check(struct rig *g, uint32_t i)
{
    const struct track *t = &g->t[i];
    struct bt_beam_conf conf = {.width = t->beams,
                                .n = t->choices,
                                .length_penalty = 1,
                                .stop = (bt_beam_stop_t)(i % BT_BEAM_STOPS)};
    uint32_t eos = 0, from[BT_BEAM_WIDTH_MAX], prompt[FE_CONTEXT], tokens[FE_CONTEXT];
    void *mem = bt_calloc(1, bt_beam_bytes(&conf, t->max_new));
    struct bt_beam_search *s = bt_beam_init(mem, &conf, t->max_new, &eos, 1);
    for (uint32_t k = 0; k < t->n; k++) {
        prompt[k] = (k * 13 + i) % FE_VOCAB;
    }
    do {
        for (uint32_t p = 0; p < t->beams; p++) {
            if (bt_beam_wants(s, p)) {
                struct bt_engine_out o = {0};
                bt_beam_path(s, p, tokens);
                fe_top(chain_of(t, prompt, tokens, bt_beam_len(s)), bt_beam_tops(t->beams, 1), &o);
                assert_true(bt_beam_put(s, p, o.top_id, o.top_logprob, o.n_top));
            }
        }
    } while (bt_beam_choose(s, from));
    for (uint32_t k = 0; k < t->choices; k++) {
        bool by_eos;
        uint32_t n = bt_beam_answer(s, k, &by_eos);
        assert_int_equal(t->k[k].got, n);
        assert_true(t->k[k].finished);
        for (uint32_t at = 0; at < n; at++) {
            struct bt_beam_token b;
            bt_beam_answer_token(s, at, &b);
            assert_int_equal(t->found[k][at], b.token);
        }
    }
    free(mem);
}

static uint32_t search(struct rig *g, Baton__Phases phases, uint32_t n, uint32_t max_new,
                       uint32_t beams, uint32_t choices)
{
    return submit_job(
        g, &(struct job){
               .phases = phases, .n = n, .max_new = max_new, .beams = beams, .choices = choices});
}

static void finds_the_same_alone(void **state)
{
    (void)state;
    struct rig *g = rig(1);
    uint64_t copies = fe_copies;
    for (uint32_t i = 0; i < 12; i++) { /* prompts that end within a block, and at its end */
        uint32_t n = 14 + i;
        uint32_t k = search(g, BATON__PHASES__BOTH, n, 20 + i, 1 + i % 8, 1 + i % 2 * (i % 8));
        opened(g, k);
        run_until_done(g);
        assert_int_equal(g->t[k].status, BT_OK);
        check(g, k);
    }
    assert_true(fe_copies > copies);
    assert_int_equal((int)bt_metric_value(g->core.stats->beam_searches), 12);
    stop(g);
}

static void needs_no_token_of_the_prefill(void **state)
{
    (void)state;
    struct rig *g = rig(2);
    for (uint32_t i = 0; i < 6; i++) {
        uint32_t p = search(g, BATON__PHASES__PREFILL, 30 + i, 10, 4, 2);
        opened(g, p);
        run_until_done(g);
        assert_true(g->t[p].trailer && !g->t[p].trailer_finished && g->t[p].k[0].got == 0);
        uint32_t d = search(g, BATON__PHASES__DECODE, 30 + i, 10 + i, 4, 2);
        opened(g, d);
        trailer(g, d);
        run_until_done(g);
        assert_int_equal(g->t[d].status, BT_OK);
        assert_true(g->t[d].k[0].finished && g->t[d].k[1].finished);
    }
    stop(g);
}

/* Many searches and rows on few pages and slots: searches are preempted, and begin where they were.
 */
static void survives_want_of_pages(void **state)
{
    (void)state;
    uint64_t preempted = 0;
    fe_pages = 20;
    for (uint64_t seed = 1; seed < 5; seed++) {
        struct rig *g = rig(seed);
        for (uint32_t i = 0; i < 30; i++) {
            bool beams = rnd(g, 3) != 0;
            uint32_t n = 1 + rnd(g, 25), width = 1 + rnd(g, 3), more = 1 + rnd(g, 70);
            uint32_t k = beams ? search(g, BATON__PHASES__BOTH, n, more, width, 1 + rnd(g, width))
                               : submit(g, BATON__PHASES__BOTH, n, more + 60, 0);
            opened(g, k);
            for (uint32_t w = rnd(g, 3); w > 0; w--) {
                (void)turn(g);
                usleep(50);
            }
        }
        run_until_done(g);
        for (uint32_t i = 0; i < g->n; i++) {
            assert_int_equal(g->t[i].status, BT_OK);
            if (g->t[i].beams > 0) {
                check(g, i);
            }
        }
        preempted += (uint64_t)bt_metric_value(g->core.stats->preemptions);
        stop(g);
    }
    fe_pages = FE_PAGES;
    assert_true(preempted > 10);
}

static void ends_when_it_is_cancelled(void **state)
{
    (void)state;
    struct rig *g = rig(3);
    for (uint32_t i = 0; i < 20; i++) {
        uint32_t k = search(g, BATON__PHASES__BOTH, 20 + i, 200, 1 + i % 8, 1);
        opened(g, k);
        for (uint32_t w = rnd(g, 60); w > 0; w--) {
            (void)turn(g);
            usleep(20);
        }
        if (!g->t[k].ended) {
            struct bt_wcmd c = {.kind = BT_WCMD_CANCEL, .req = g->t[k].req};
            command(g, &c);
        }
        run_until_done(g);
    }
    stop(g); /* all pages and slots are free */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(finds_the_same_alone),
        cmocka_unit_test(needs_no_token_of_the_prefill),
        cmocka_unit_test(survives_want_of_pages),
        cmocka_unit_test(ends_when_it_is_cancelled),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
