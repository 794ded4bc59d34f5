/* Where a prompt that comes now would be in a prefill worker's steps (common/batch/ahead.h), held
 * against the batcher with that prompt really in it, and a conductor's backlog at a worker
 * (common/policy/sched/backlog.h), held against a worker that computes it. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/batch/ahead.h"
#include "common/policy/sched/load.h"
#include "common/policy/sched/sched_priv.h"

#define SEQS 32

static uint64_t rng(uint64_t *s)
{
    *s = *s * 6364136223846793005ull + 1442695040888963407ull;
    return *s >> 33;
}

/* Token prices from nearly nothing to more than the base is worth. */
static struct bt_batch_cost random_cost(uint64_t *s)
{
    double price[] = {0, 500, 5e3, 5e4, 2e5};
    double t = price[rng(s) % BT_ARRAY_LEN(price)];
    return (struct bt_batch_cost){.base_ns = 5e6, .token_ns = {t / 2, t / 2, t, t}};
}

static uint32_t random_state(uint64_t *s, uint32_t chunk, struct bt_batch_seq *seqs)
{
    uint32_t n = (uint32_t)(rng(s) % 9);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t len = 1 + (uint32_t)(rng(s) % (rng(s) % 4 == 0 ? 8 * chunk : chunk));
        seqs[i] = (struct bt_batch_seq){.order = i,
                                        .pos = (uint32_t)(rng(s) % len),
                                        .len = len,
                                        .chunk_tokens = chunk,
                                        .kind = BT_BATCH_PROMPT};
    }
    return n;
}

/* The newcomer is the last of b: when its first step begins and its last one ends. */
static void compute(struct bt_batch *b, struct bt_batch_row *rows, uint32_t n, double *begin_p,
                    double *end_p)
{
    uint32_t it = b->n - 1;
    double now = 0;
    *begin_p = -1;
    for (bool first = true; b->seqs[it].kind == BT_BATCH_PROMPT; first = false) {
        n = first && n > 0 ? n : bt_batch_prefill(b, rows, SEQS);
        for (uint32_t i = 0; i < n; i++) {
            *begin_p = rows[i].seq == it && *begin_p < 0 ? now : *begin_p;
        }
        now += bt_batch_step_ns(b->cost, b, rows, n);
        bt_batch_apply(b, rows, n);
    }
    *end_p = now;
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The newcomer itself makes it more worth while for others to share a step, and a first chunk that
 * a prefix makes shorter joins where a whole one would not: mostly the same, seldom far off. Those
 * who wait counted one after the other are wrong by more than the whole in the mean. */
static void test_ahead_is_what_the_batcher_does(void **state)
{
    (void)state;
    enum { N = 4000 };
    static double off[N];
    uint64_t s = 11;
    double serial_off = 0;
    for (int t = 0; t < N; t++) {
        struct bt_batch_cost cost = random_cost(&s);
        struct bt_batch_seq seqs[SEQS], copy[SEQS];
        struct bt_batch_row rows[SEQS];
        uint32_t chunk = rng(&s) % 2 ? 128 : 512, n = random_state(&s, chunk, seqs);
        struct bt_batch b = {
            .lim = {.max_rows = 2048, .block_tokens = 1}, .seqs = seqs, .n = n, .cost = &cost};
        uint32_t under_way = rng(&s) % 2 ? bt_batch_prefill(&b, rows, SEQS) : 0;
        uint32_t from = 16 * (uint32_t)(rng(&s) % 8);
        uint32_t to = from + 1 + (uint32_t)(rng(&s) % (2 * chunk));
        memcpy(copy, seqs, sizeof(copy));
        copy[n] = (struct bt_batch_seq){
            .order = n, .pos = from, .len = to, .chunk_tokens = chunk, .kind = BT_BATCH_PROMPT};
        struct bt_batch real = {.lim = b.lim, .seqs = copy, .n = n + 1, .cost = &cost};
        struct bt_batch_ahead a;
        double begin, end, beside, serial = 0, alone = bt_batch_prefill_ns(&cost, from, to, chunk);
        for (uint32_t i = 0; i < n; i++) {
            serial += bt_batch_prefill_ns(&cost, seqs[i].pos, seqs[i].len, chunk);
        }
        compute(&real, rows, under_way, &begin, &end);
        bt_batch_ahead(&b, rows, under_way, chunk, &a);
        double at = bt_batch_ahead_of(&a, &cost, from, to, chunk, &beside);
        off[t] = fabs(at + beside + alone - end) / end;
        serial_off += fabs(serial + alone - end) / end / N;
        assert_true(a.step_ns <= a.done_ns && a.done_ns <= a.all_ns && at <= a.all_ns);
        assert_true(n > 0 || (at == 0 && beside == 0 && a.all_ns == 0));
        assert_true(beside >= 0);
    }
    qsort(off, N, sizeof(*off), by_size);
    print_message(
        "off by %.3f (p50), %.3f (p90), %.3f (p99); one after the other: %.3f in the mean\n",
        off[N / 2], off[N * 9 / 10], off[N * 99 / 100], serial_off);
    assert_true(off[N / 2] < 1e-9 && off[N * 9 / 10] < 0.25 && off[N * 99 / 100] < 0.7);
    assert_true(serial_off > 1);
}

/* ---- small states by hand: a step takes 1000 ns and one for each token ---- */

static const struct bt_batch_cost by_hand = {.base_ns = 1000, .token_ns = BT_BATCH_TOKEN_NS(1)};
static const struct bt_batch_cost base_only = {.base_ns = 1000};

static struct bt_batch batch_of(const struct bt_batch_cost *c, struct bt_batch_seq *seqs,
                                uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        seqs[i].order = i;
    }
    return (struct bt_batch){
        .lim = {.max_rows = 100, .block_tokens = 1}, .seqs = seqs, .n = n, .cost = c};
}

/* Five prompts share each step, and one of them ends with each. */
static void test_steps_have_ever_more_room(void **state)
{
    (void)state;
    struct bt_batch_seq seqs[5] = {{.len = 18, .chunk_tokens = 18},
                                   {.len = 36, .chunk_tokens = 18},
                                   {.len = 54, .chunk_tokens = 18},
                                   {.len = 72, .chunk_tokens = 18},
                                   {.len = 90, .chunk_tokens = 18}};
    struct bt_batch_seq again[5];
    struct bt_batch b = batch_of(&by_hand, seqs, 5), c;
    struct bt_batch_ahead a;
    double beside, now = 0;
    memcpy(again, seqs, sizeof(again));
    bt_batch_ahead(&b, NULL, 0, 0, &a);
    assert_true(a.step_ns == 0 && a.done_ns == 1090 && a.all_ns == 5 * 1000 + 15 * 18);
    assert_int_equal(a.n_joins, BT_BATCH_AHEAD_JOINS);
    for (uint32_t i = 0; i < a.n_joins; i++) {
        uint32_t tokens = 18 * (5 - i);
        assert_int_equal(a.joins[i].most_tokens, 100 - tokens);
        assert_true(a.joins[i].begin_ns == now);
        assert_true(a.joins[i].step_ns == 1000 + tokens);
        assert_true(a.joins[i].tokens == tokens);
        /* As many tokens join the step, one more the next one. */
        assert_true(bt_batch_ahead_of(&a, &by_hand, 50, 150 - tokens, 0, &beside) == now);
        assert_true(beside == tokens);
        now += 1000 + tokens;
        double next = bt_batch_ahead_of(&a, &by_hand, 50, 151 - tokens, 0, &beside);
        assert_true(next == (i < 3 ? now : a.all_ns));
    }
    assert_true(beside == 0); /* behind all others it is alone */
    /* A newcomer in chunks of ten joins each of the five steps. */
    c = batch_of(&by_hand, again, 5);
    bt_batch_ahead(&c, NULL, 0, 10, &a);
    assert_int_equal(a.n_joins, 1);
    assert_int_equal(a.joins[0].most_tokens, 10);
    assert_true(a.chunks_begin_ns == 0);
    const double sums[] = {90, 162, 216, 252, 270, 270, 270, 270};
    for (uint32_t i = 0; i < BT_BATCH_AHEAD_CHUNKS; i++) {
        assert_true(a.chunks_beside_ns[i] == sums[i]);
    }
    assert_true(bt_batch_ahead_of(&a, &by_hand, 0, 20, 10, &beside) == 0 && beside == 162);
    assert_true(bt_batch_ahead_of(&a, &by_hand, 5, 20, 10, &beside) == 0 && beside == 162);
    assert_true(bt_batch_ahead_of(&a, &by_hand, 10, 20, 10, &beside) == 0 && beside == 90);
    assert_true(bt_batch_ahead_of(&a, &by_hand, 0, 500, 10, &beside) == 0 && beside == 270);
}

/* A newcomer that joins a step, finds no room in the next one, and joins the last one. */
static void test_chunks_wait_between_steps(void **state)
{
    (void)state;
    struct bt_batch_seq seqs[1] = {{.pos = 80, .len = 220, .chunk_tokens = 100}};
    struct bt_batch_row row;
    struct bt_batch b = batch_of(&by_hand, seqs, 1);
    struct bt_batch_ahead a;
    double beside;
    bt_batch_ahead(&b, NULL, 0, 10, &a);
    assert_true(a.done_ns == 3140 && a.all_ns == 3140);
    assert_true(a.chunks_beside_ns[0] == 20);
    assert_true(a.chunks_beside_ns[1] == 20 + 1100 + 20);
    assert_true(a.chunks_beside_ns[7] == 20 + 1100 + 20);
    /* With the first step under way it comes when the last one begins. */
    seqs[0] = (struct bt_batch_seq){.pos = 80, .len = 220, .chunk_tokens = 100};
    assert_int_equal(bt_batch_prefill(&b, &row, 1), 1);
    bt_batch_ahead(&b, &row, 1, 10, &a);
    assert_true(a.step_ns == 1020 && a.done_ns == 3140 && a.all_ns == 3140);
    assert_true(a.chunks_begin_ns == 2120 && a.chunks_beside_ns[0] == 20);
    assert_int_equal(a.n_joins, 1);
    assert_true(a.joins[0].begin_ns == 2120);
    assert_true(bt_batch_ahead_of(&a, &by_hand, 0, 15, 10, &beside) == 2120 && beside == 20);
    /* It ends with the step under way: nobody waits, and nothing is shared. */
    seqs[0] = (struct bt_batch_seq){.pos = 0, .len = 30};
    assert_int_equal(bt_batch_prefill(&b, &row, 1), 1);
    bt_batch_ahead(&b, &row, 1, 10, &a);
    assert_true(a.step_ns == 1030 && a.done_ns == 1030 && a.all_ns == 1030);
    assert_int_equal(a.n_joins, 0);
    assert_true(bt_batch_ahead_of(&a, &by_hand, 0, 15, 10, &beside) == 1030 && beside == 0);
}

/* So many steps are rolled forward; behind them prompts take turns. Who generates by then does not
 * count. */
static void test_steps_are_bounded(void **state)
{
    (void)state;
    struct bt_batch_seq seqs[3] = {{.len = 400, .chunk_tokens = 10},
                                   {.len = 400, .chunk_tokens = 10},
                                   {.len = 30, .chunk_tokens = 10, .left = 5}};
    struct bt_batch b = batch_of(&base_only, seqs, 3);
    struct bt_batch_ahead a;
    bt_batch_ahead(&b, NULL, 0, 50, &a);
    assert_true(a.done_ns == 3000);
    assert_true(a.all_ns == 1000.0 * (BT_BATCH_AHEAD_STEPS + 2 * (40 - BT_BATCH_AHEAD_STEPS)));
    assert_true(a.chunks_beside_ns[0] == 0 && a.chunks_begin_ns == 0);
    assert_int_equal(a.n_joins, 1);
    assert_int_equal(a.joins[0].most_tokens, 50); /* it need not be asked again */
}

/* ---- backlog ---- */

static const struct bt_batch_cost dear_base = {.base_ns = 10e6, .token_ns = BT_BATCH_TOKEN_NS(5e3)};
static const struct bt_batch_cost dear_tokens = {.base_ns = 1e6,
                                                 .token_ns = BT_BATCH_TOKEN_NS(2e5)};

static struct bt_sched_pace pace_of(const struct bt_batch_cost *c)
{
    return (struct bt_sched_pace){.cost = c, .max_rows = 2048, .chunk_tokens = 128, .slow = 1};
}

static void send(struct bt_sched_backlog *q, struct bt_sched_prompt *p, uint32_t tokens,
                 int32_t priority, const struct bt_sched_pace *pace, double now_ms)
{
    *p = (struct bt_sched_prompt){.len = tokens, .priority = priority};
    p->alone_ms =
        pace->cost != NULL ? 1e-6 * bt_batch_prefill_ns(pace->cost, 0, tokens, 128) : tokens;
    bt_sched_backlog_add(q, p, pace, (uint64_t)(now_ms * 1e6));
}

static double queue_at(const struct bt_sched_backlog *q, double slow, double now_ms)
{
    return bt_sched_backlog_ms(q, 0, slow, (uint64_t)(now_ms * 1e6));
}

#define NEAR(x, y) assert_true(fabs((x) - (y)) < 0.01)

/* Four prompts of a step each, where a step costs what its base does: the first is under way when
 * the others come, which share the next one. */
static void test_prompts_of_a_burst_share_a_step(void **state)
{
    (void)state;
    struct bt_sched_backlog q;
    struct bt_sched_prompt p[4];
    struct bt_sched_pace pace = pace_of(&dear_base);
    bt_sched_backlog_init(&q);
    NEAR(queue_at(&q, 1, 5), 0);
    for (int i = 0; i < 4; i++) {
        send(&q, &p[i], 100, 0, &pace, 1000 + i);
    }
    NEAR(queue_at(&q, 1, 1003), 10.5 + 11.5 - 3);
    double beside, begin = bt_batch_ahead_of(&q.ahead, &dear_base, 0, 100, 128, &beside);
    NEAR(begin * 1e-6, 10.5);
    NEAR(beside * 1e-6, 1.5);
    bt_sched_backlog_done(&q, &p[0], &pace, 1009000000); /* sooner than was thought */
    NEAR(queue_at(&q, 1, 1009), 11.5);
    NEAR(queue_at(&q, 2, 1029), 1.5); /* at half the speed ten of twenty have passed */
    for (int i = 1; i < 4; i++) {
        bt_sched_backlog_done(&q, &p[i], &pace, 1021000000);
    }
    NEAR(queue_at(&q, 1, 1021), 0);
    assert_true(q.alone_ms == 0 && bt_list_empty(&q.prompts));
    /* Where tokens are what costs, one is computed after the other. */
    pace.cost = &dear_tokens;
    for (int i = 0; i < 4; i++) {
        send(&q, &p[i], 100, 0, &pace, 2000);
    }
    NEAR(queue_at(&q, 1, 2000), 4 * 21);
    bt_sched_backlog_done(&q, &p[2], &pace, 2030000000); /* failed, say: in the middle */
    for (int i = 0; i < 4; i++) {
        if (i != 2) {
            bt_sched_backlog_done(&q, &p[i], &pace, 2100000000);
        }
    }
    assert_true(bt_list_empty(&q.prompts));
}

/* What has not been said to be done is not: however late the first one is, the others still come
 * after it. */
static void test_who_is_done_is_said(void **state)
{
    (void)state;
    struct bt_sched_backlog q;
    struct bt_sched_prompt a, b;
    struct bt_sched_pace pace = pace_of(&dear_tokens);
    bt_sched_backlog_init(&q);
    send(&q, &a, 500, 0, &pace, 1000); /* chunks of 26.6 ms, and one of 24.2 */
    send(&q, &b, 100, 0, &pace, 1001);
    double all = 1e-6 * (bt_batch_prefill_ns(&dear_tokens, 0, 500, 128) +
                         bt_batch_prefill_ns(&dear_tokens, 0, 100, 128));
    NEAR(queue_at(&q, 1, 1001), all - 1);
    NEAR(queue_at(&q, 1, 1050), all - 50); /* of two chunks 1.9 are over */
    NEAR(queue_at(&q, 1, 5000), 21);
    bt_sched_backlog_done(&q, &a, &pace, 5000000000);
    NEAR(queue_at(&q, 1, 5000), 21);
    bt_sched_backlog_done(&q, &b, &pace, 5021000000);
    NEAR(queue_at(&q, 1, 5021), 0);
}

/* Classes stand in their order; the last one shares nobody's step, and is no more than counted.
 * More prompts than are rolled forward wait one after the other. */
static void test_classes_and_many(void **state)
{
    (void)state;
    struct bt_sched_backlog q;
    struct bt_sched_prompt p[40];
    struct bt_sched_pace pace = pace_of(&dear_base);
    bt_sched_backlog_init(&q);
    send(&q, &p[0], 1000, 0, &pace, 1000);
    double one = queue_at(&q, 1, 1000);
    send(&q, &p[1], 1000, BT_SCHED_CLASS_LATE, &pace, 1000);
    NEAR(queue_at(&q, 1, 1000), 2 * one);
    NEAR(bt_sched_backlog_ms(&q, p[1].alone_ms, 1, 1000000000), one);
    assert_true(q.rolled_ms == p[0].alone_ms);
    bt_sched_backlog_done(&q, &p[1], &pace, 1000000000);
    bt_sched_backlog_done(&q, &p[0], &pace, 1000000000);
    for (int i = 0; i < 40; i++) {
        send(&q, &p[i], 100, 0, &pace, 2000);
    }
    /* one under way, fifteen beside each other, the others by themselves */
    NEAR(queue_at(&q, 1, 2000), 10.5 + (10 + 15 * 0.5) + 24 * 10.5);
    for (int i = 0; i < 40; i++) {
        bt_sched_backlog_done(&q, &p[i], &pace, 2000000000 + (uint64_t)i * 1000000);
    }
    assert_true(bt_list_empty(&q.prompts) && q.alone_ms == 0 && q.rolled_ms == 0);
    /* Nothing is known of the cost: one after the other, the oldest since it is the oldest. */
    pace.cost = NULL;
    send(&q, &p[0], 100, 0, &pace, 3000);
    send(&q, &p[1], 50, 0, &pace, 3010);
    NEAR(queue_at(&q, 1, 3020), 130);
    bt_sched_backlog_done(&q, &p[0], &pace, 3200000000);
    NEAR(queue_at(&q, 1, 3220), 30);
    bt_sched_backlog_done(&q, &p[1], &pace, 3220000000);
}

/* A worker whose steps take `slow` times what the conductor believes, told of by done alone: what
 * is expected at each arrival against what came. */
static double followed(double slow, double learned, uint64_t seed)
{
    enum { N = 400 };
    static struct bt_sched_prompt p[N];
    static double expected[N], arrived[N];
    struct bt_batch_seq seqs[N];
    struct bt_batch_row rows[64];
    struct bt_sched_backlog q;
    struct bt_sched_pace pace = pace_of(&dear_base);
    struct bt_batch b = {
        .lim = {.max_rows = 2048, .block_tokens = 1}, .seqs = seqs, .cost = &dear_base};
    double now = 0, end = INFINITY, off = 0, next = 0;
    uint32_t sent = 0, under_way = 0, done = 0;
    bt_sched_backlog_init(&q);
    pace.slow = learned;
    while (done < N) {
        if (sent < N && next <= end) { /* bursts of eight, a millisecond apart */
            now = next;
            uint32_t len = 1 + (uint32_t)(rng(&seed) % 700);
            double alone = 1e-6 * bt_batch_prefill_ns(&dear_base, 0, len, 128), beside;
            double begin = bt_batch_ahead_of(&q.ahead, &dear_base, 0, len, 128, &beside) / 1e6 -
                           bt_sched_backlog_past_ms(&q, learned, (uint64_t)(now * 1e6));
            expected[sent] =
                now + learned * (BT_MAX(bt_list_empty(&q.prompts) ? 0 : begin, 0) +
                                 (bt_list_empty(&q.prompts) ? 0 : beside / 1e6) + alone);
            arrived[sent] = now;
            send(&q, &p[sent], len, 0, &pace, now);
            b.seqs[sent] = (struct bt_batch_seq){
                .order = sent, .len = len, .chunk_tokens = 128, .kind = BT_BATCH_PROMPT};
            b.n = ++sent;
            next += sent % 8 == 0 ? 150 : 1;
        } else { /* the step ends */
            now = end;
            struct bt_batch_row ended[64];
            memcpy(ended, rows, sizeof(ended));
            bt_batch_apply(&b, rows, under_way);
            for (uint32_t i = 0; i < under_way; i++) {
                if (ended[i].last) {
                    uint32_t k = ended[i].seq;
                    off += fabs(expected[k] - now) / (now - arrived[k]) / N;
                    bt_sched_backlog_done(&q, &p[k], &pace, (uint64_t)(now * 1e6));
                    done++;
                }
            }
            under_way = 0;
            end = INFINITY;
        }
        if (under_way == 0) {
            under_way = bt_batch_prefill(&b, rows, 64);
            end = under_way > 0
                      ? now + slow * 1e-6 * bt_batch_step_ns(&dear_base, &b, rows, under_way)
                      : INFINITY;
        }
    }
    assert_true(bt_list_empty(&q.prompts));
    return off;
}

static void test_follows_a_worker(void **state)
{
    (void)state;
    double right = followed(1, 1, 5), slow = followed(2, 2, 6), wrong = followed(1.3, 1, 7);
    print_message("off by %.3f; at half the speed, learned, %.3f; at 1.3 times the time, not "
                  "learned, %.3f\n",
                  right, slow, wrong);
    assert_true(right < 0.12 && slow < 0.12 && wrong < 0.4);
}

/* A newcomer shares the steps that were rolled forward only where nobody waits behind them: of a
 * long queue the first prompts are rolled alone. */
static void test_long_queue(void **state)
{
    (void)state;
    static const struct bt_sched_learned learned = {0};
    struct bt_sched_said said = {.has_cost = true,
                                 .cost = {.base_ns = 5e6, .token_ns = BT_BATCH_TOKEN_NS(1e5)},
                                 .max_rows = 2048,
                                 .chunk_tokens = 2048,
                                 .at_ns = 1000};
    struct bt_sched_own own;
    struct bt_sched_prompt p[BT_BATCH_AHEAD_SEQS + 1], late;
    struct bt_sched_worker w;
    struct bt_sched_params c = {0};
    bt_sched_own_init(&own);
    struct bt_sched_pace pace = bt_sched_pace_of(&said, &learned, true);
    for (uint32_t i = 0; i < BT_ARRAY_LEN(p); i++) {
        p[i] = (struct bt_sched_prompt){.len = 1000, .alone_ms = 105};
        bt_sched_own_prompt(&own, &p[i], &pace, 1000);
        bt_sched_show_worker(&said, &own, &learned, 1000, &w);
        bt_sched_show_class(&said, &own, &learned, 1000, 0, &w);
        assert_int_equal(w.queue.ahead != NULL, i < BT_BATCH_AHEAD_SEQS);
    }
    double beside;
    assert_float_equal(bt_sched_wait_ms(&c, &w, 0, 10, &beside), 17 * 105, 1e-6);
    bt_sched_own_prompt_done(&own, &p[0], &pace, 1000);
    late = (struct bt_sched_prompt){.len = 1000, .alone_ms = 105, .priority = BT_SCHED_CLASS_LATE};
    bt_sched_own_prompt(&own, &late, &pace, 1000);
    bt_sched_show_worker(&said, &own, &learned, 1000, &w);
    bt_sched_show_class(&said, &own, &learned, 1000, 0, &w);
    assert_non_null(w.queue.ahead); /* a late one goes behind the newcomer */
    assert_float_equal(w.queue.late_ms, 105, 1e-6);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ahead_is_what_the_batcher_does),
        cmocka_unit_test(test_steps_have_ever_more_room),
        cmocka_unit_test(test_chunks_wait_between_steps),
        cmocka_unit_test(test_steps_are_bounded),
        cmocka_unit_test(test_prompts_of_a_burst_share_a_step),
        cmocka_unit_test(test_who_is_done_is_said),
        cmocka_unit_test(test_classes_and_many),
        cmocka_unit_test(test_follows_a_worker),
        cmocka_unit_test(test_long_queue),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
