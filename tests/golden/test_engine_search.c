/* DoLa and contrastive search against float32 tokens that tests/tools/make_search_references.py has
 * computed from the papers: equal up to near ties, after which the comparison goes on with the
 * reference's token. BT_GOLDEN_ENGINE names another engine than cpu. */
#include "tests/golden/drive.h"

#include <jansson.h>
#include <math.h>
#include <unistd.h>

#include "common/conf/conf.h"

/* What counts as a tie: the engine's own differences from f32 are smaller. */
#define DOLA_TIE     0.05
#define CONTRAST_TIE 0.005
/* Engines that round to bf16 differ ten times as much. */
#define ROUNDED 10

static const char *engine(void)
{
    const char *name = bt_conf_env("BT_GOLDEN_ENGINE");
    return name ? name : "cpu";
}
static bool rounds(void)
{
    return strcmp(engine(), "cpu") != 0;
}

static uint32_t *ids_of(const json_t *list, uint32_t *n_p)
{
    uint32_t n = (uint32_t)json_array_size(list), *ids = malloc((n + 1) * sizeof(*ids));
    for (uint32_t i = 0; i < n; i++) {
        ids[i] = (uint32_t)json_integer_value(json_array_get(list, i));
    }
    *n_p = n;
    return ids;
}

static struct bt_engine_params params_of(const json_t *c)
{
    struct bt_engine_params p = drive_greedy(-1);
    const json_t *dola = json_object_get(c, "dola");
    p.repetition_penalty = (float)json_number_value(json_object_get(c, "repetition"));
    p.penalty_alpha = (float)json_number_value(json_object_get(c, "alpha"));
    p.top_k = (uint32_t)json_integer_value(json_object_get(c, "k"));
    p.hidden_max = 256;
    for (size_t i = 0; i < json_array_size(dola); i++) {
        p.dola[p.n_dola++] = (uint16_t)json_integer_value(json_array_get(dola, i));
    }
    return p;
}

/* Opens the slot again with the first n tokens, n_prompt of them prompt, and computes them. */
static struct bt_engine_out begin(struct drive *d, const struct bt_engine_params *p,
                                  const uint32_t *all, uint32_t n, uint32_t n_prompt,
                                  uint32_t chunk)
{
    uint32_t pages[64], count = BT_DIV_UP(n + 32, d->info->layout.page_tokens);
    assert_true(count <= 64);
    for (uint32_t i = 0; i < count; i++) {
        pages[i] = 3 * count - 2 * i;
    }
    assert_int_equal(d->vt->slot_open(d->e, 0, p, all, n, n_prompt), BT_OK);
    assert_int_equal(d->vt->slot_pages(d->e, 0, 0, pages, count), BT_OK);
    return drive_prefill(d, 0, all, 0, n, chunk);
}

/* Returns the near ties. */
static uint32_t check_case(struct drive *d, const json_t *c, double tie)
{
    uint32_t n, n_prompt, ties = 0;
    uint32_t *prompt = ids_of(json_object_get(c, "prompt_ids"), &n_prompt);
    uint32_t *want = ids_of(json_object_get(c, "ids"), &n);
    uint32_t *all = malloc((n_prompt + n) * sizeof(*all));
    memcpy(all, prompt, n_prompt * sizeof(*all));
    memcpy(all + n_prompt, want, n * sizeof(*all));
    const struct bt_engine_params p = params_of(c);
    struct bt_engine_out o = begin(d, &p, all, n_prompt, n_prompt, 13);
    for (uint32_t i = 0; i < n; i++) {
        double gap = json_number_value(json_array_get(json_object_get(c, "gaps"), i));
        assert_false(o.bad);
        if (o.token == want[i]) {
            o = i + 1 < n ? drive_decode(d, 0) : o;
            continue;
        }
        if (gap >= tie) {
            fail_msg("token %u is %u, the reference's is %u with a gap of %f", i, o.token, want[i],
                     gap);
        }
        ties++;
        drive_slot_close(d, 0);
        o = begin(d, &p, all, n_prompt + i + 1, n_prompt, 2048);
    }
    drive_slot_close(d, 0);
    free(prompt);
    free(want);
    free(all);
    return ties;
}

/* kind: the member that cases of this kind have. */
static void check_kind(const char *kind, double tie)
{
    json_error_t je;
    json_t *cases = json_load_file("tests/golden/search.json", 0, &je);
    const char *open = "";
    struct drive d;
    uint32_t ties = 0, tokens = 0, n = 0;
    if (!cases) {
        fail_msg("tests/golden/search.json: %s", je.text);
    }
    for (size_t i = 0; i < json_array_size(cases); i++) {
        const json_t *c = json_array_get(cases, i);
        const char *model = json_string_value(json_object_get(c, "model"));
        if (!json_object_get(c, kind) || access(model, R_OK) != 0 ||
            (bt_conf_env("BT_GOLDEN_BRIEF") && n++ % 4 > 0)) {
            continue; /* some models lie beside a checkout only */
        }
        if (strcmp(open, model) != 0) {
            if (*open) {
                drive_close(&d);
            }
            drive_open(&d, engine(), model, 16);
            open = model;
        }
        ties += check_case(&d, c, rounds() ? ROUNDED * tie : tie);
        tokens += (uint32_t)json_array_size(json_object_get(c, "ids"));
    }
    drive_close(&d);
    json_decref(cases);
    printf("# %s: %u tokens, %u near ties decided otherwise\n", kind, tokens, ties);
    assert_true(tokens > (n > 0 ? 100 : 300) && ties * (rounds() ? 10 : 50) < tokens);
}

static void test_dola(void **state)
{
    (void)state;
    check_kind("dola", DOLA_TIE);
}

static void test_contrastive(void **state)
{
    (void)state;
    check_kind("alpha", CONTRAST_TIE);
}

/* The same tokens from chunks of any length, beside other rows, and after a restart from prompt and
 * half of the answer: hidden states follow from the tokens. */
static void test_contrastive_chunks(void **state)
{
    (void)state;
    struct drive d;
    drive_open(&d, engine(), "deploy/models/shakespeare-llama-6m", 16);
    uint32_t all[60], want[20];
    struct bt_engine_params p = drive_greedy(0), other = drive_greedy(-1);
    p.penalty_alpha = 0.5f;
    p.top_k = 6;
    p.hidden_max = 60;
    for (uint32_t i = 0; i < 40; i++) {
        all[i] = 5 * i + 3;
    }
    struct bt_engine_out o = begin(&d, &p, all, 40, 40, 2048);
    for (uint32_t i = 0; i < 20; i++) {
        all[40 + i] = want[i] = o.token;
        assert_false(o.bad);
        assert_true(o.logprob < 0);
        o = i < 19 ? drive_decode(&d, 0) : o;
    }
    drive_slot_close(&d, 0);
    const uint32_t chunks[] = {1, 7, 16, 33};
    for (size_t i = 0; i < BT_ARRAY_LEN(chunks); i++) {
        assert_int_equal(begin(&d, &p, all, 40 + i, 40, chunks[i]).token, want[i]);
        drive_slot_close(&d, 0);
    }
    d.next_page = 64; /* a plain row and a second search beside it */
    drive_slot(&d, 1, &other, all, 30, 40);
    drive_prefill(&d, 1, all, 0, 30, 2048);
    drive_slot(&d, 2, &p, all, 20, 40);
    drive_prefill(&d, 2, all, 0, 20, 2048);
    o = begin(&d, &p, all, 50, 40, 50);
    for (uint32_t i = 10; i < 19; i++) {
        assert_int_equal(o.token, want[i]);
        const struct bt_engine_row rows[3] = {
            {.slot = 1, .pos = BT_ENGINE_POS_NEXT, .n = 1, .flags = BT_ROW_SAMPLE},
            {.slot = 0, .pos = BT_ENGINE_POS_NEXT, .n = 1, .flags = BT_ROW_SAMPLE},
            {.slot = 2, .pos = BT_ENGINE_POS_NEXT, .n = 1, .flags = BT_ROW_SAMPLE}};
        struct bt_engine_out three[3];
        assert_int_equal(drive_step(&d, rows, 3, three), 3);
        o = three[1];
    }
    drive_close(&d);
}

/* Prompt logprobs of a slot that keeps hidden states are those of one that does not. */
static void test_contrastive_prompt_logprobs(void **state)
{
    (void)state;
    struct drive d;
    drive_open(&d, engine(), "deploy/models/shakespeare-llama-6m", 16);
    uint32_t tokens[30];
    float want[29];
    uint32_t first[2];
    for (uint32_t i = 0; i < 30; i++) {
        tokens[i] = 9 * i + 4;
    }
    for (uint32_t s = 0; s < 2; s++) {
        struct bt_engine_params p = drive_greedy(0);
        p.penalty_alpha = s ? 0.6f : 0;
        p.top_k = s ? 4 : 0;
        p.hidden_max = 40;
        drive_slot(&d, s, &p, tokens, 30, 8);
        for (uint32_t at = 0; at < 30; at += 15) {
            const struct bt_engine_row row = {.slot = s,
                                              .pos = at,
                                              .n = 15,
                                              .tokens = tokens + at,
                                              .flags = BT_ROW_PROMPT_LOGPROBS |
                                                       (at ? BT_ROW_SAMPLE : 0)};
            const struct bt_engine_batch b = {.n_rows = 1, .rows = &row};
            bt_engine_ticket_t fwd, smp;
            assert_int_equal(d.vt->forward(d.e, &b, &fwd), BT_OK);
            struct bt_engine_event ev = drive_wait(&d, fwd);
            assert_int_equal(ev.n_out, at ? 14 : 15);
            for (uint32_t i = 0; i < ev.n_out; i++) {
                assert_int_equal(ev.out[i].pos, at + i + 1);
                if (s == 0) {
                    want[at + i] = ev.out[i].logprob;
                } else {
                    assert_true(fabsf(ev.out[i].logprob - want[at + i]) <
                                (rounds() ? 0.05f : 1e-6f));
                }
            }
            assert_int_equal(d.vt->sample(d.e, fwd, NULL, &smp), BT_OK);
            ev = drive_wait(&d, smp);
            assert_int_equal(ev.n_out, at ? 1 : 0);
            first[s] = at ? ev.out[0].token : 0;
            assert_false(at && ev.out[0].bad);
            d.vt->release(d.e, fwd);
            d.vt->release(d.e, smp);
        }
        assert_false(drive_decode(&d, s).bad);
    }
    assert_true(first[0] < 2048 && first[1] < 2048);
    drive_close(&d);
}

/* What a slot with contrastive search does not take. */
static void test_contrastive_refused(void **state)
{
    (void)state;
    struct drive d;
    drive_open(&d, engine(), "deploy/models/shakespeare-llama-6m", 16);
    const uint32_t tokens[24] = {5, 6, 7, 8}, pages[2] = {1, 2};
    struct bt_engine_params good = drive_greedy(-1), p;
    good.penalty_alpha = 0.6f;
    good.top_k = 4;
    good.hidden_max = 20;
    p = good;
    p.top_k = 1;
    assert_int_equal(d.vt->slot_open(d.e, 0, &p, tokens, 4, 4), BT_ERR_INVALID);
    p.top_k = BT_ENGINE_CANDIDATES + 1;
    assert_int_equal(d.vt->slot_open(d.e, 0, &p, tokens, 4, 4), BT_ERR_INVALID);
    p = good;
    p.temperature = 0.1f;
    assert_int_equal(d.vt->slot_open(d.e, 0, &p, tokens, 4, 4), BT_ERR_INVALID);
    p = good;
    p.penalty_alpha = NAN;
    assert_int_equal(d.vt->slot_open(d.e, 0, &p, tokens, 4, 4), BT_ERR_INVALID);
    assert_int_equal(d.vt->slot_open(d.e, 0, &good, tokens, 24, 24), BT_OK);
    assert_int_equal(d.vt->slot_pages(d.e, 0, 0, pages, 2), BT_OK);
    assert_int_equal(d.vt->slot_fork(d.e, 0, 1, 1), BT_ERR_UNSUPPORTED);
    bt_engine_ticket_t fwd;
    struct bt_engine_row row = {.slot = 0, .pos = 16, .n = 4, .tokens = tokens};
    const struct bt_engine_batch b = {.n_rows = 1, .rows = &row};
    assert_int_equal(d.vt->forward(d.e, &b, &fwd), BT_ERR_INVALID); /* as if 16 were loaded */
    row = (struct bt_engine_row){.slot = 0, .n = 21, .tokens = tokens};
    assert_int_equal(d.vt->forward(d.e, &b, &fwd), BT_ERR_TOO_LARGE);
    row.n = 3;
    row.n_draft = 1;
    row.flags = BT_ROW_SAMPLE;
    assert_int_equal(d.vt->forward(d.e, &b, &fwd), BT_ERR_INVALID);
    drive_close(&d);
}

/* A row's early layers do not depend on its neighbours, and rows without DoLa not on those with. */
static void test_mixed_batch(void **state)
{
    (void)state;
    struct drive d;
    drive_open(&d, engine(), "deploy/models/shakespeare-llama-6m", 16);
    uint32_t tokens[40], alone[3][8];
    struct bt_engine_params p[3] = {drive_greedy(-1), drive_greedy(0), drive_greedy(5)};
    for (uint32_t i = 0; i < 40; i++) {
        tokens[i] = 7 * i + 11;
    }
    p[0].n_dola = 3;
    p[0].dola[0] = 1;
    p[0].dola[1] = 3;
    p[0].dola[2] = 5;
    p[2].n_dola = 1;
    for (uint32_t s = 0; s < 3; s++) {
        drive_slot(&d, s, &p[s], tokens, 40 - s, 16);
        alone[s][0] = drive_prefill(&d, s, tokens, 0, 40 - s, 2048).token;
        for (uint32_t i = 1; i < 8; i++) {
            alone[s][i] = drive_decode(&d, s).token;
        }
        drive_slot_close(&d, s);
    }
    assert_memory_not_equal(alone[0], alone[1], sizeof(alone[0]));
    struct bt_engine_row rows[3];
    struct bt_engine_out out[3];
    for (uint32_t s = 0; s < 3; s++) {
        drive_slot(&d, s, &p[s], tokens, 40 - s, 16);
        rows[s] = (struct bt_engine_row){
            .slot = s, .n = 40 - s, .tokens = tokens, .flags = BT_ROW_SAMPLE};
    }
    for (uint32_t i = 0; i < 8; i++) {
        assert_int_equal(drive_step(&d, rows, 3, out), 3);
        for (uint32_t s = 0; s < 3; s++) {
            assert_int_equal(out[s].token, alone[s][i]);
            rows[s] = (struct bt_engine_row){
                .slot = s, .pos = BT_ENGINE_POS_NEXT, .n = 1, .flags = BT_ROW_SAMPLE};
        }
    }
    drive_close(&d);
}

static void test_refused(void **state)
{
    (void)state;
    struct drive d;
    drive_open(&d, engine(), "deploy/models/shakespeare-llama-6m", 16);
    struct bt_engine_params p = drive_greedy(-1);
    const uint32_t tokens[4] = {5, 6, 7, 8};
    p.n_dola = 1;
    p.dola[0] = 6;
    assert_int_equal(d.vt->slot_open(d.e, 0, &p, tokens, 4, 4), BT_ERR_INVALID);
    p.n_dola = BT_ENGINE_DOLA_MAX + 1;
    assert_int_equal(d.vt->slot_open(d.e, 0, &p, tokens, 4, 4), BT_ERR_INVALID);
    p.n_dola = 1;
    p.dola[0] = 5;
    drive_slot(&d, 0, &p, tokens, 2, 8);
    const struct bt_engine_row row = {
        .slot = 0, .n = 4, .tokens = tokens, .flags = BT_ROW_SAMPLE, .n_draft = 2};
    const struct bt_engine_batch b = {.n_rows = 1, .rows = &row};
    bt_engine_ticket_t fwd;
    assert_int_equal(d.vt->forward(d.e, &b, &fwd), BT_ERR_INVALID);
    drive_close(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dola),
        cmocka_unit_test(test_mixed_batch),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_contrastive),
        cmocka_unit_test(test_contrastive_chunks),
        cmocka_unit_test(test_contrastive_prompt_logprobs),
        cmocka_unit_test(test_contrastive_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
