/* Sampled with drafts, tokens have the model's distribution: chi-square over 20,000 draws, of the
 * first token and of the one behind an accepted draft. A rule that accepts drafts a little too
 * often must fail the same test. Known logits instead of a model, in the slots and tickets of
 * common/engine that the cpu engine samples with. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/engine/host.h"
#include "common/engine/model_config.h"

#define VOCAB 12
#define DRAWS 20000
#define DRAFT 3u
#define TEMP  0.7f
/* Chi-square of 11 degrees of freedom: larger once in 100,000 times. */
#define LIMIT 43.2

static const float logits[2][VOCAB] = {
    {0.3f, 1.1f, -0.7f, 2.0f, 0.0f, 1.4f, -1.2f, 0.6f, 0.9f, -0.2f, 1.0f, 0.5f},
    {1.0f, -0.4f, 0.8f, 0.1f, 1.9f, 0.2f, 0.7f, -1.0f, 0.4f, 1.2f, -0.3f, 0.6f}};

static double chi_square(const uint32_t count[VOCAB], const float l[VOCAB])
{
    double sum = 0, n = 0, chi = 0;
    for (int i = 0; i < VOCAB; i++) {
        sum += exp(l[i] / TEMP);
        n += count[i];
    }
    for (int i = 0; i < VOCAB; i++) {
        double want = n * exp(l[i] / TEMP) / sum;
        assert_true(want > 5); /* otherwise the approximation does not hold */
        chi += (count[i] - want) * (count[i] - want) / want;
    }
    return chi;
}

static void open_host(struct bt_host *h)
{
    struct bt_model_config c;
    char err[256] = "";
    struct bt_engine_info info = {
        .vocab = VOCAB, .max_model_len = 64, .pages = 4, .max_slots = 1, .max_rows = 16};
    assert_int_equal(
        bt_model_config_load("deploy/models/shakespeare-draft-1m", &c, err, sizeof(err)), BT_OK);
    assert_int_equal(bt_model_kv_layout(&c, NULL, 16, &info.layout), BT_OK);
    assert_int_equal(bt_host_init(h, &info, 0, err, sizeof(err)), BT_OK);
}

/* A sequence of its own seed takes a row with one draft; returns its results, 1 or 2. */
static uint32_t draw(struct bt_host *h, uint64_t seed, uint32_t out[2])
{
    static const uint32_t known[3] = {1, 2, 5}, row_tokens[2] = {5, DRAFT};
    const struct bt_engine_params p = {.temperature = TEMP,
                                       .top_p = 1,
                                       .repetition_penalty = 1,
                                       .logprobs = -1,
                                       .seed = seed * 0x9e3779b97f4a7c15ull};
    const struct bt_engine_row row = {
        .pos = 2, .n = 2, .tokens = row_tokens, .n_draft = 1, .flags = BT_ROW_SAMPLE};
    bt_engine_ticket_t id, quiet;
    struct bt_engine_event ev[4];
    assert_int_equal(bt_host_slot_open(h, 0, &p, known, 3, 3), BT_OK);
    struct bt_host_ticket *t = bt_host_ticket_new(h, (size_t)2 * VOCAB);
    t->forward = true;
    memcpy(t->logits, logits, sizeof(logits));
    bt_host_ticket_sample_row(h, t, &row);
    bt_host_ticket_done(h, t, BT_OK);
    bt_engine_ticket_t fwd = t->id;
    assert_int_equal(bt_host_sample(h, fwd, NULL, NULL, NULL, &id), BT_OK);
    assert_int_equal(bt_host_slot_close(h, 0, &quiet), BT_OK);
    assert_int_equal(bt_host_poll(h, ev, 4, 0), 3);
    uint32_t n = ev[1].n_out;
    for (uint32_t i = 0; i < n; i++) {
        out[i] = ev[1].out[i].token;
    }
    for (int i = 0; i < 3; i++) {
        bt_host_release(h, ev[i].ticket);
    }
    assert_int_equal(n, out[0] == DRAFT ? 2 : 1);
    return n;
}

static void test_the_distribution_is_the_models(void **state)
{
    (void)state;
    struct bt_host h;
    uint32_t first[VOCAB] = {0}, second[VOCAB] = {0}, biased[VOCAB] = {0};
    uint64_t seed = 0;
    open_host(&h);
    for (uint32_t n = 0; n < DRAWS;) { /* of both: a second token comes only with a draft */
        uint32_t out[2], results = draw(&h, ++seed, out);
        if (seed <= DRAWS) {
            first[out[0]]++;
            biased[seed % 20 == 0 ? DRAFT : out[0]]++; /* takes the draft unseen, once in 20 */
        }
        if (results == 2) {
            second[out[1]]++;
            n++;
        }
    }
    double a = chi_square(first, logits[0]), b = chi_square(second, logits[1]);
    double wrong = chi_square(biased, logits[0]);
    print_message("chi-square %.1f, %.1f; of a rule that is wrong once in 20: %.1f\n", a, b, wrong);
    assert_true(a < LIMIT && b < LIMIT);
    assert_true(wrong > LIMIT);
    bt_host_cleanup(&h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_distribution_is_the_models),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
