/* Beam search (common/search/beam.c) against a plain search that is written here from the rules of
 * transformers' generate: it keeps whole sequences, and sorts all candidates of all beams. The
 * model is a hash of the tokens so far. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/engine/engine.h"
#include "common/search/beam.h"

#define VOCAB 48u
#define LEN   24u

struct seq {
    uint32_t n, t[LEN];
    float lp[LEN];
    double sum, score;
    bool by_eos;
};

struct world {
    struct bt_beam_conf conf;
    uint32_t max_new, n_eos, eos[4];
    uint64_t seed;
    double peaked; /* how likely an EOS id is */
};

static uint64_t mix(uint64_t h, uint64_t v)
{
    h = (h ^ (v + 0x9e3779b97f4a7c15ull)) * 0xbf58476d1ce4e5b9ull;
    return h ^ h >> 29;
}

static bool is_eos(const struct world *w, uint32_t token)
{
    for (uint32_t i = 0; i < w->n_eos; i++) {
        if (w->eos[i] == token) {
            return true;
        }
    }
    return false;
}

/* Logprobs of all tokens behind these. */
static void model(const struct world *w, const uint32_t *tokens, uint32_t n, float *lp)
{
    uint64_t h = w->seed;
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        h = mix(h, tokens[i]);
    }
    for (uint32_t v = 0; v < VOCAB; v++) {
        lp[v] = (float)((double)(mix(mix(h, v), 1) >> 40) / (1u << 24) * 6);
        lp[v] += is_eos(w, v) ? (float)w->peaked : 0;
        sum += exp(lp[v]);
    }
    for (uint32_t v = 0; v < VOCAB; v++) {
        lp[v] -= (float)log(sum);
    }
}

struct cand {
    double sum;
    uint32_t beam, token;
    float lp;
};

static int by_sum(const void *a, const void *b)
{
    const struct cand *x = a, *y = b;
    return x->sum > y->sum ? -1 : x->sum < y->sum;
}

static int by_score(const void *a, const void *b)
{
    const struct seq *x = a, *y = b;
    return x->score > y->score ? -1 : x->score < y->score;
}

/* The plain search; returns how many answers it has, 0 if two of its candidates are equal. */
static uint32_t plain(const struct world *w, struct seq *best)
{
    const struct bt_beam_conf *c = &w->conf;
    struct seq beams[BT_BEAM_WIDTH_MAX] = {{0}}, next[BT_BEAM_WIDTH_MAX];
    static struct cand all[BT_BEAM_WIDTH_MAX * VOCAB];
    struct seq done[2 * BT_BEAM_WIDTH_MAX];
    uint32_t live = 1, n_done = 0;
    for (uint32_t len = 1;; len++) {
        uint32_t n = 0, keep = BT_MAX(2u, 1 + w->n_eos) * c->width, n_next = 0;
        for (uint32_t b = 0; b < live; b++) {
            float lp[VOCAB];
            model(w, beams[b].t, beams[b].n, lp);
            for (uint32_t v = 0; v < VOCAB; v++) {
                bool early = is_eos(w, v) && len - 1 < c->min_new;
                all[n++] = (struct cand){early ? -INFINITY : beams[b].sum + lp[v], b, v, lp[v]};
            }
        }
        qsort(all, n, sizeof(all[0]), by_sum);
        for (uint32_t i = 0; i < BT_MIN(n, keep); i++) {
            struct seq s = beams[all[i].beam];
            if (i > 0 && all[i].sum == all[i - 1].sum && all[i].sum > -INFINITY) {
                return 0;
            }
            s.t[s.n] = all[i].token;
            s.lp[s.n++] = all[i].lp;
            s.sum = all[i].sum;
            s.by_eos = is_eos(w, all[i].token);
            s.score = s.sum / pow(len, c->length_penalty);
            if ((s.by_eos || len == w->max_new) && i < c->width) {
                done[n_done++] = s;
            } else if (!s.by_eos && len < w->max_new && n_next < c->width) {
                next[n_next++] = s;
            }
        }
        qsort(done, n_done, sizeof(done[0]), by_score);
        n_done = BT_MIN(n_done, c->width);
        bool full = n_done == c->width;
        bool longest = c->stop == BT_BEAM_NEVER && c->length_penalty > 0;
        double most = next[0].sum / pow(longest ? w->max_new : len, c->length_penalty);
        if (len == w->max_new ||
            (full && (c->stop == BT_BEAM_FULL || !(most > done[c->width - 1].score)))) {
            memcpy(best, done, n_done * sizeof(done[0]));
            return n_done;
        }
        memcpy(beams, next, sizeof(beams));
        live = c->width;
    }
}

static void top(const struct world *w, const uint32_t *tokens, uint32_t n, struct bt_engine_out *o)
{
    float lp[VOCAB];
    bool used[VOCAB] = {false};
    model(w, tokens, n, lp);
    memset(o, 0, sizeof(*o));
    o->n_top = BT_MAX(bt_beam_tops(w->conf.width, w->n_eos), w->conf.n_top);
    assert_true(o->n_top <= BT_ENGINE_MAX_TOP);
    for (uint32_t i = 0; i < o->n_top; i++) {
        uint32_t best = UINT32_MAX;
        for (uint32_t v = 0; v < VOCAB; v++) {
            best = !used[v] && (best == UINT32_MAX || lp[v] > lp[best]) ? v : best;
        }
        used[best] = true;
        o->top_id[i] = best;
        o->top_logprob[i] = lp[best];
    }
}

/* Runs the search with rows in a random order; returns its number of turns. */
static uint32_t run(const struct world *w, void *mem, struct bt_beam_search **s_p)
{
    struct bt_beam_search *s = bt_beam_init(mem, &w->conf, w->max_new, w->eos, w->n_eos);
    uint32_t turns = 0, from[BT_BEAM_WIDTH_MAX], tokens[LEN], before[BT_BEAM_WIDTH_MAX][LEN];
    uint64_t rng = w->seed;
    bool goes_on;
    *s_p = s;
    do {
        while (!bt_beam_ready(s)) {
            struct bt_engine_out o;
            rng = mix(rng, 7);
            uint32_t p = (uint32_t)(rng >> 33) % w->conf.width;
            if (bt_beam_wants(s, p)) {
                bt_beam_path(s, p, tokens);
                memcpy(before[p], tokens, sizeof(tokens));
                top(w, tokens, bt_beam_len(s), &o);
                assert_true(bt_beam_put(s, p, o.top_id, o.top_logprob, o.n_top));
            }
        }
        turns++;
        goes_on = bt_beam_choose(s, from);
        for (uint32_t p = 0; goes_on && p < w->conf.width; p++) {
            bt_beam_path(s, p, tokens);
            assert_memory_equal(tokens, before[from[p]], (bt_beam_len(s) - 1) * 4);
            assert_int_equal(tokens[bt_beam_len(s) - 1], *bt_beam_last(s, p));
            assert_int_equal(from[from[p]], from[p]); /* who has a successor keeps its place */
        }
    } while (goes_on);
    return turns;
}

static bool check(const struct world *w)
{
    struct seq want[2 * BT_BEAM_WIDTH_MAX];
    uint32_t n = plain(w, want);
    if (n == 0) {
        return false;
    }
    struct bt_beam_search *s;
    void *mem = bt_calloc(1, bt_beam_bytes(&w->conf, w->max_new));
    (void)run(w, mem, &s);
    assert_int_equal(n, w->conf.width);
    for (uint32_t i = 0; i < n; i++) {
        bool by_eos;
        assert_int_equal(bt_beam_answer(s, i, &by_eos), want[i].n);
        assert_int_equal(by_eos, want[i].by_eos);
        for (uint32_t k = 0; k < want[i].n; k++) {
            struct bt_beam_token t;
            struct bt_engine_out o;
            bt_beam_answer_token(s, k, &t);
            assert_int_equal(t.token, want[i].t[k]);
            assert_true(t.logprob == want[i].lp[k]);
            assert_int_equal(t.n_top, w->conf.n_top);
            top(w, want[i].t, k, &o);
            assert_memory_equal(t.top_id, o.top_id, t.n_top * 4);
            assert_memory_equal(t.top_logprob, o.top_logprob, t.n_top * 4);
        }
    }
    free(mem);
    return true;
}

static void finds_what_the_plain_search_finds(void **state)
{
    (void)state;
    uint32_t checked = 0;
    static const float penalties[] = {1, 0, 0.5f, 2, -1, -0.5f};
    for (uint64_t seed = 0; seed < 2000; seed++) {
        struct world w = {.seed = mix(1, seed), .n_eos = (uint32_t)(seed % 4)};
        w.max_new = 1 + (uint32_t)(seed / 3 % LEN);
        w.conf = (struct bt_beam_conf){.width = 1 + (uint32_t)(seed % BT_BEAM_WIDTH_MAX),
                                       .length_penalty = penalties[seed / 5 % 6],
                                       .stop = (bt_beam_stop_t)(seed / 7 % BT_BEAM_STOPS),
                                       .min_new = seed % 9 == 0 ? w.max_new / 2 : 0,
                                       .n_top = (uint32_t)(seed % 6)};
        w.conf.n = w.conf.width;
        w.peaked = (double)(seed % 5);
        for (uint32_t i = 0; i < w.n_eos; i++) {
            w.eos[i] = 3 + 5 * i;
        }
        checked += check(&w);
    }
    assert_true(checked > 1800);
}

/* Turns of some searches together. */
static uint32_t turns_of(bt_beam_stop_t stop)
{
    struct world w = {.n_eos = 1, .eos = {3}, .max_new = LEN, .peaked = 2};
    w.conf = (struct bt_beam_conf){.width = 3, .n = 1, .length_penalty = 1.5f, .stop = stop};
    uint32_t turns = 0;
    for (w.seed = 0; w.seed < 20; w.seed++) {
        void *mem = bt_calloc(1, bt_beam_bytes(&w.conf, w.max_new));
        struct bt_beam_search *s;
        turns += run(&w, mem, &s);
        free(mem);
    }
    return turns;
}

/* Otherwise the test above would compare searches that all end in the same way. */
static void rules_of_stopping_differ(void **state)
{
    (void)state;
    uint32_t full = turns_of(BT_BEAM_FULL), heuristic = turns_of(BT_BEAM_HEURISTIC),
             never = turns_of(BT_BEAM_NEVER);
    assert_true(full < heuristic && heuristic < never);
}

static void needs_enough_tokens_of_a_row(void **state)
{
    (void)state;
    struct world w = {.seed = 1, .n_eos = 2, .eos = {3, 8}, .max_new = 4};
    w.conf = (struct bt_beam_conf){.width = 4, .n = 1, .length_penalty = 1, .n_top = 2};
    void *mem = bt_calloc(1, bt_beam_bytes(&w.conf, w.max_new));
    struct bt_beam_search *s = bt_beam_init(mem, &w.conf, w.max_new, w.eos, w.n_eos);
    struct bt_engine_out o;
    top(&w, NULL, 0, &o);
    assert_int_equal(o.n_top, 6);
    o.n_top = 5;
    assert_false(bt_beam_put(s, 0, o.top_id, o.top_logprob, o.n_top));
    assert_false(bt_beam_ready(s));
    assert_false(bt_beam_wants(s, 1)); /* there is only the prompt's row */
    o.n_top = 6;
    assert_true(bt_beam_put(s, 0, o.top_id, o.top_logprob, o.n_top));
    assert_false(bt_beam_wants(s, 0));
    assert_true(bt_beam_ready(s));
    free(mem);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(finds_what_the_plain_search_finds),
        cmocka_unit_test(rules_of_stopping_differ),
        cmocka_unit_test(needs_enough_tokens_of_a_row),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
