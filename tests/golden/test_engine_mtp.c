/* The MTP layer through engine.h: its logits against a float32 reference
 * (tests/tools/make_mtp_reference.py), drafts that change no token, and KV that is the same bit for
 * bit whatever way a sequence came: chunks, loaded KV, drafts, forks. */
#include "tests/golden/drive.h"

#include <jansson.h>
#include <math.h>

#define MODEL  "tests/golden/models/tiny-mtp"
#define PAGE   16
#define N_TEXT 150
#define N_NEW  100
#define DRAFTS 3
#define BLOCKS ((N_TEXT + N_NEW + PAGE) / PAGE)

static struct drive d;
static uint32_t text[N_TEXT];

static int setup(void **state)
{
    uint32_t x = 11;
    (void)state;
    drive_mtp = true;
    drive_open(&d, "cpu", MODEL, PAGE);
    for (uint32_t i = 0; i < N_TEXT; i++) {
        x = x * 1664525u + 1013904223u;
        text[i] = 3 + (x >> 8) % (d.info->vocab - 3);
    }
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    drive_close(&d);
    return 0;
}

static void need_exact(void)
{
    d.next_page = 0;
    if (!(d.info->caps & BT_ENGINE_CAP_EXACT)) {
        skip();
    }
}

/* k drafts of a slot; returns how many there are. */
static uint32_t drafts_of(uint32_t slot, uint32_t k, struct bt_engine_out *out)
{
    uint32_t n = 99;
    assert_int_equal(d.vt->draft(d.e, &slot, 1, k, out, &n), BT_OK);
    for (uint32_t i = 0; i < n; i++) {
        assert_int_equal(out[i].slot, slot);
        assert_false(out[i].bad);
    }
    return n;
}

/* ---- against the reference ---- */

static void check_top(const json_t *want, const struct bt_engine_out *o, double *worst)
{
    const json_t *ids = json_object_get(want, "ids"), *lps = json_object_get(want, "logprobs");
    for (size_t i = 0; i < json_array_size(ids); i++) {
        double near = INFINITY, lp = json_number_value(json_array_get(lps, i));
        for (uint32_t k = 0; k < o->n_top; k++) {
            if (o->top_id[k] == json_integer_value(json_array_get(ids, i))) {
                near = fabs(o->top_logprob[k] - lp);
            }
        }
        *worst = fmax(*worst, near);
        if (!(near < 0.05)) {
            fail_msg("token %lld: %f instead of %f", json_integer_value(json_array_get(ids, i)),
                     near, lp);
        }
    }
}

/* The last token is set, so that the first draft is behind it; the others follow. */
static void test_reference(void **state)
{
    (void)state;
    json_error_t je;
    json_t *cases = json_load_file(MODEL ".json", 0, &je);
    assert_non_null(cases);
    double worst = 0;
    uint32_t checked = 0;
    for (size_t c = 0; c < json_array_size(cases); c++) {
        const json_t *one = json_array_get(cases, c), *ids = json_object_get(one, "ids");
        uint32_t n = (uint32_t)json_array_size(ids), at[N_TEXT];
        for (uint32_t i = 0; i < n; i++) {
            at[i] = (uint32_t)json_integer_value(json_array_get(ids, i));
        }
        const struct bt_engine_params p = drive_greedy(BT_ENGINE_MAX_TOP);
        struct bt_engine_out out[DRAFTS], next;
        d.next_page = 0;
        drive_slot(&d, 0, &p, at, n - 1, 1 + DRAFTS);
        const struct bt_engine_row row = {.n = n - 1, .tokens = at};
        drive_step(&d, &row, 1, out);
        assert_int_equal(d.vt->slot_accept(d.e, 0, at[n - 1]), BT_OK);
        assert_int_equal(drafts_of(0, DRAFTS, out), DRAFTS);
        const json_t *want = json_object_get(one, "drafts");
        for (size_t i = 0; i < DRAFTS; i++) {
            check_top(json_array_get(want, i), &out[i], &worst);
            assert_int_equal(out[i].pos, n + i);
            checked++;
            /* The next one follows this token: only where the reference chose the same. */
            if (out[i].token != json_integer_value(json_array_get(
                                    json_object_get(json_array_get(want, i), "ids"), 0))) {
                break;
            }
        }
        next = drive_decode(&d, 0);
        check_top(json_object_get(one, "next"), &next, &worst);
        drive_slot_close(&d, 0);
    }
    printf("# %u drafts, largest difference %.4f\n", checked, worst);
    assert_true(checked >= 2 * json_array_size(cases));
    json_decref(cases);
}

/* ---- speculation ---- */

struct run { /* a sequence that was generated */
    uint32_t tokens[N_TEXT + N_NEW + DRAFTS + 1], n;
    uint32_t steps, tried, accepted;
    uint8_t kv[BLOCKS][1 << 16]; /* blocks of all tokens that ran */
};

/* Stores whole blocks of a slot whose pages drive_slot took from page0 on. */
static void store(uint32_t page0, uint32_t pages, uint32_t n, struct run *r)
{
    const struct bt_kv_layout *l = &d.info->layout;
    uint32_t flow, blocks = n / PAGE;
    struct bt_engine_block b[BLOCKS];
    bt_engine_ticket_t done, quiet;
    assert_true(l->block_bytes <= sizeof(r->kv[0]) && blocks <= BLOCKS);
    for (uint32_t i = 0; i < blocks; i++) {
        b[i] = (struct bt_engine_block){
            .mem = r->kv[i], .page = page0 + pages - 1 - i, .toks = PAGE, .seq = i};
        memset(r->kv[i], 0x5a, l->block_bytes);
    }
    assert_int_equal(
        d.vt->flow_open(d.e, BT_ENGINE_STORE, BT_ENGINE_PRIO_WRITEBACK, NULL, 1, NULL, NULL, &flow),
        BT_OK);
    assert_int_equal(d.vt->flow_add(d.e, flow, b, blocks), BT_OK);
    assert_int_equal(d.vt->flow_release(d.e, flow, blocks + l->n_layers, &done), BT_OK);
    drive_wait(&d, done);
    d.vt->release(d.e, done);
    assert_int_equal(d.vt->flow_close(d.e, flow, false, &quiet), BT_OK);
    drive_wait(&d, quiet);
    d.vt->release(d.e, quiet);
}

/* Steps with up to k drafts until r has `want` tokens. */
static void generate(uint32_t slot, uint32_t k, uint32_t want, struct run *r)
{
    while (r->n < want) {
        struct bt_engine_out out[DRAFTS + 1];
        uint32_t row[DRAFTS + 1] = {r->tokens[r->n - 1]};
        uint32_t n = k > 0 ? drafts_of(slot, k, out) : 0;
        for (uint32_t i = 0; i < n; i++) {
            row[1 + i] = out[i].token;
        }
        const struct bt_engine_row b = {.slot = slot,
                                        .pos = r->n - 1,
                                        .n = 1 + n,
                                        .tokens = row,
                                        .flags = BT_ROW_SAMPLE,
                                        .n_draft = n};
        uint32_t got = drive_step(&d, &b, 1, out);
        for (uint32_t i = 0; i < got; i++) {
            r->tokens[r->n++] = out[i].token;
        }
        r->steps++;
        r->tried += n;
        r->accepted += got - 1;
    }
}

/* Generates behind the text, with drafts or without (k 0), and stores all that ran. */
static void run(struct run *r, const struct bt_engine_params *p, uint32_t chunk, uint32_t k)
{
    uint32_t page0 = d.next_page;
    memset(r, 0, sizeof(*r));
    memcpy(r->tokens, text, sizeof(text));
    drive_slot(&d, 1, p, text, N_TEXT, N_NEW + DRAFTS);
    struct bt_engine_out o = drive_prefill(&d, 1, text, 0, N_TEXT, chunk);
    r->tokens[N_TEXT] = o.token;
    r->n = N_TEXT + 1;
    generate(1, k, N_TEXT + N_NEW - DRAFTS, r);
    store(page0, d.next_page - page0, N_TEXT + N_NEW - DRAFTS - 1, r);
    drive_slot_close(&d, 1);
}

static void same_run(const struct run *a, const struct run *b)
{
    const uint32_t n = N_TEXT + N_NEW - DRAFTS;
    assert_memory_equal(a->tokens, b->tokens, n * sizeof(a->tokens[0]));
    for (uint32_t i = 0; i < (n - 1) / PAGE; i++) {
        if (memcmp(a->kv[i], b->kv[i], d.info->layout.block_bytes) != 0) {
            fail_msg("block %u differs", i);
        }
    }
}

/* Greedy and drawn; in chunks of all sizes. Drafts are right often, and change nothing: neither the
 * tokens nor a bit of the KV of the MTP layer, which drafts write before their tokens are known. */
static void test_drafts_change_nothing(void **state)
{
    (void)state;
    need_exact();
    static struct run plain, with;
    for (int drawn = 0; drawn < 2; drawn++) {
        struct bt_engine_params p = drive_greedy(-1);
        p.temperature = drawn ? 0.8f : 0;
        p.seed = 17;
        p.frequency_penalty = 0.2f;
        d.next_page = 0;
        run(&plain, &p, 2048, 0);
        assert_int_equal(plain.tried, 0);
        static const uint32_t chunks[] = {2048, 1, 7, 64};
        for (size_t i = 0; i < BT_ARRAY_LEN(chunks); i++) {
            d.next_page = 0;
            run(&with, &p, chunks[i], 1 + (uint32_t)i % DRAFTS);
            same_run(&plain, &with);
            assert_true(with.accepted > with.tried / 5 && with.accepted < with.tried);
        }
        printf("# %s: %u of the last run's %u drafts accepted, %u steps for %u tokens\n",
               drawn ? "drawn" : "greedy", with.accepted, with.tried, with.steps,
               with.n - N_TEXT - 1);
    }
}

/* The MTP layer's bytes are no constant, but for the row of position 0. */
static void test_bytes(void **state)
{
    (void)state;
    need_exact();
    static struct run r;
    const struct bt_engine_params p = drive_greedy(-1);
    uint32_t bytes, row = bt_kv_row_bytes(&d.info->layout.groups[0]);
    run(&r, &p, 64, 0);
    const uint8_t *mtp = r.kv[0] + bt_kv_segment(&d.info->layout, 2, &bytes);
    uint8_t zeros[1024] = {0};
    assert_int_equal(d.info->layout.n_layers, 3);
    assert_memory_equal(mtp, zeros, row);
    for (uint32_t i = 1; i < PAGE; i++) {
        assert_memory_not_equal(mtp + i * row, mtp + (i - 1) * row, row);
    }
}

/* ---- sequences that begin in the middle ---- */

/* Loads the blocks of r's first n tokens into the pages of a new slot. */
static void load(uint32_t slot, const struct bt_engine_params *p, const struct run *r, uint32_t n,
                 uint32_t known)
{
    uint32_t flow, page0 = d.next_page, blocks = n / PAGE;
    struct bt_engine_block b[BLOCKS];
    bt_engine_ticket_t quiet;
    drive_slot(&d, slot, p, r->tokens, known, N_TEXT + N_NEW + DRAFTS - known);
    for (uint32_t i = 0; i < blocks; i++) {
        b[i] = (struct bt_engine_block){.mem = (void *)r->kv[i],
                                        .page = d.next_page - 1 - i,
                                        .toks = PAGE,
                                        .seq = i * d.info->layout.n_layers};
    }
    assert_true(d.next_page - page0 >= blocks);
    assert_int_equal(
        d.vt->flow_open(d.e, BT_ENGINE_LOAD, BT_ENGINE_PRIO_LAND, NULL, 1, NULL, NULL, &flow),
        BT_OK);
    assert_int_equal(d.vt->flow_add(d.e, flow, b, blocks), BT_OK);
    assert_int_equal(d.vt->flow_close(d.e, flow, false, &quiet), BT_OK);
    assert_int_equal(drive_wait(&d, quiet).status, BT_OK);
    d.vt->release(d.e, quiet);
}

/* A prefix of the pool: the first chunk begins at a block whose hidden state nobody has. A hand-off
 * or a row that was preempted: so does the first step. It has no drafts; all later ones are those
 * of the run that was not interrupted, and so are the KV's bytes. */
static void test_begins_in_the_middle(void **state)
{
    (void)state;
    need_exact();
    static struct run whole, part;
    static const uint32_t at[] = {PAGE, 5 * PAGE, 144, 160, 192};
    const struct bt_engine_params p = drive_greedy(-1);
    run(&whole, &p, 2048, DRAFTS);
    for (size_t i = 0; i < BT_ARRAY_LEN(at); i++) {
        uint32_t n = at[i], page0 = d.next_page = 0;
        memset(&part, 0, sizeof(part));
        memcpy(part.tokens, whole.tokens, sizeof(part.tokens));
        struct bt_engine_out o[2][DRAFTS];
        if (n < N_TEXT) { /* a prompt */
            load(1, &p, &whole, n, N_TEXT);
            o[0][0] = drive_prefill(&d, 1, text, n, N_TEXT, 33);
            part.n = N_TEXT + 1;
            assert_int_equal(o[0][0].token, whole.tokens[N_TEXT]);
        } else { /* generated text: n tokens have KV, one more is known */
            load(1, &p, &whole, n, n + 1);
            part.n = n + 1;
            assert_int_equal(drafts_of(1, DRAFTS, o[0]), 0);
        }
        generate(1, DRAFTS, N_TEXT + N_NEW - DRAFTS, &part);
        store(page0, d.next_page - page0, N_TEXT + N_NEW - DRAFTS - 1, &part);
        drive_slot_close(&d, 1);
        same_run(&whole, &part);
        assert_true(part.accepted > 0);
    }
}

/* A fork goes on with what its origin knows, hidden state and all. */
static void test_fork(void **state)
{
    (void)state;
    need_exact();
    static struct run one;
    const struct bt_engine_params p = drive_greedy(-1);
    struct bt_engine_out a[DRAFTS], b[DRAFTS];
    uint32_t spare = d.info->pages - 1, n = N_TEXT / PAGE;
    memcpy(one.tokens, text, sizeof(text));
    drive_slot(&d, 0, &p, text, N_TEXT, 20);
    one.tokens[N_TEXT] = drive_prefill(&d, 0, text, 0, N_TEXT, 2048).token;
    one.n = N_TEXT + 1;
    assert_int_equal(d.vt->slot_fork(d.e, 0, 7, 1), BT_OK);
    uint32_t last = d.next_page - 1 - n; /* as drive_slot hands them out */
    assert_int_equal(d.vt->page_copy(d.e, last, spare, N_TEXT % PAGE), BT_OK);
    assert_int_equal(d.vt->slot_pages(d.e, 7, n, &spare, 1), BT_OK);
    assert_int_equal(drafts_of(0, DRAFTS, a), DRAFTS);
    assert_int_equal(drafts_of(7, DRAFTS, b), DRAFTS);
    for (uint32_t i = 0; i < DRAFTS; i++) {
        assert_int_equal(a[i].token, b[i].token);
    }
    drive_slot_close(&d, 0);
    drive_slot_close(&d, 7);
}

/* Several slots in one call, ready or not: each has the drafts that it has alone. */
static void test_together(void **state)
{
    (void)state;
    need_exact();
    const struct bt_engine_params p = drive_greedy(-1);
    struct bt_engine_out alone[6][DRAFTS], out[6][DRAFTS];
    uint32_t slots[6], counts[6];
    for (uint32_t s = 0; s < 6; s++) {
        slots[s] = s;
        drive_slot(&d, s, &p, text, 20 + 7 * s, 8);
        if (s != 4) { /* which has not run */
            drive_prefill(&d, s, text, 0, 20 + 7 * s, 2048);
            assert_int_equal(drafts_of(s, DRAFTS, alone[s]), DRAFTS);
        }
    }
    assert_int_equal(d.vt->draft(d.e, slots, 6, DRAFTS, out[0], counts), BT_OK);
    for (uint32_t s = 0; s < 6; s++) {
        assert_int_equal(counts[s], s == 4 ? 0 : DRAFTS);
        for (uint32_t i = 0; i < counts[s]; i++) {
            assert_int_equal(out[s][i].token, alone[s][i].token);
        }
        drive_slot_close(&d, s);
    }
}

/* A beam's row may continue another beam: its row in the MTP layer is zeros, and it has no drafts
 * until rows of its own have run. */
static void test_beams(void **state)
{
    (void)state;
    need_exact();
    static struct run r;
    const struct bt_engine_params p = drive_greedy(0);
    struct bt_engine_out o[DRAFTS];
    uint32_t page0 = d.next_page, bytes, row = bt_kv_row_bytes(&d.info->layout.groups[0]);
    drive_slot(&d, 2, &p, text, 40, 24);
    drive_prefill(&d, 2, text, 0, 40, 2048);
    for (uint32_t i = 0; i < 8; i++) {
        const struct bt_engine_row b = {.slot = 2,
                                        .pos = 40 + i,
                                        .n = 1,
                                        .tokens = &text[60 + i], /* not what was drawn */
                                        .flags = BT_ROW_SAMPLE | BT_ROW_BEAM};
        assert_int_equal(drive_step(&d, &b, 1, o), 1);
    }
    assert_int_equal(drafts_of(2, 1, o), 0);
    store(page0, d.next_page - page0, 48, &r);
    uint8_t zeros[1024] = {0};
    const uint8_t *mtp = r.kv[2] + bt_kv_segment(&d.info->layout, 2, &bytes);
    assert_memory_not_equal(mtp + 7 * row, zeros, row);
    for (uint32_t i = 8; i < PAGE; i++) {
        assert_memory_equal(mtp + i * row, zeros, row);
    }
    drive_slot_close(&d, 2);
}

/* ---- other results of a step ---- */

#define N_OTHER 12
#define N_DOLA  30

struct results {
    struct bt_engine_out prompt[N_TEXT], next[2], dola[N_DOLA], contrast[N_OTHER];
    uint32_t n_prompt;
};

/* Prompt logprobs beside a neighbour, DoLa and contrastive search. With an MTP layer the sequence
 * of DoLa begins twice: the second time behind its KV, with the token that runs again in front. */
static void other_results(struct drive *e, struct results *r)
{
    struct bt_engine_params p = drive_greedy(2);
    struct bt_engine_event ev;
    bt_engine_ticket_t fwd, smp;
    memset(r, 0, sizeof(*r));
    e->next_page = 0;
    drive_slot(e, 0, &p, text, 60, N_OTHER);
    drive_slot(e, 1, &p, text + 20, 30, N_OTHER);
    const struct bt_engine_row rows[2] = {
        {.slot = 1, .n = 30, .tokens = text + 20, .flags = BT_ROW_SAMPLE},
        {.n = 60, .tokens = text, .flags = BT_ROW_SAMPLE | BT_ROW_PROMPT_LOGPROBS}};
    const struct bt_engine_batch b = {.n_rows = 2, .rows = rows};
    assert_int_equal(e->vt->forward(e->e, &b, &fwd), BT_OK);
    ev = drive_wait(e, fwd);
    r->n_prompt = ev.n_out;
    memcpy(r->prompt, ev.out, ev.n_out * sizeof(*ev.out));
    assert_int_equal(e->vt->sample(e->e, fwd, NULL, &smp), BT_OK);
    ev = drive_wait(e, smp);
    assert_int_equal(ev.n_out, 2);
    memcpy(r->next, ev.out, sizeof(r->next));
    e->vt->release(e->e, fwd);
    e->vt->release(e->e, smp);
    drive_slot_close(e, 0);
    drive_slot_close(e, 1);

    p.n_dola = 1;
    uint32_t pages[4] = {9, 5, 7, 3};
    for (uint32_t i = 0; i < 2 * N_DOLA; i++) {
        uint32_t n = 30 + i / 2, from = i % 2 ? 17 : 0; /* the KV before it is in the pages */
        assert_int_equal(e->vt->slot_open(e->e, 2, &p, text, n, n), BT_OK);
        assert_int_equal(e->vt->slot_pages(e->e, 2, 0, pages, 4), BT_OK);
        r->dola[i / 2] = drive_prefill(e, 2, text, from, n, 2048);
        drive_slot_close(e, 2);
    }

    p.n_dola = 0;
    p.penalty_alpha = 0.6f;
    p.top_k = 4;
    p.hidden_max = 64;
    drive_slot(e, 3, &p, text, 40, N_OTHER);
    r->contrast[0] = drive_prefill(e, 3, text, 0, 40, 13);
    for (uint32_t i = 1; i < N_OTHER; i++) {
        r->contrast[i] = drive_decode(e, 3);
    }
    drive_slot_close(e, 3);
}

static void same_results(const struct bt_engine_out *a, const struct bt_engine_out *b, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        if (a[i].slot != b[i].slot || a[i].pos != b[i].pos || a[i].token != b[i].token ||
            a[i].logprob != b[i].logprob || a[i].bad != b[i].bad) {
            fail_msg("result %u: token %u (%.9g) instead of %u (%.9g)", i, b[i].token, b[i].logprob,
                     a[i].token, a[i].logprob);
        }
    }
}

/* They are those of an engine without the layer, bit for bit. */
static void test_other_results(void **state)
{
    (void)state;
    need_exact();
    static struct results want, got;
    struct drive plain;
    drive_mtp = false;
    drive_open(&plain, "cpu", MODEL, PAGE);
    drive_mtp = true;
    other_results(&plain, &want);
    other_results(&d, &got);
    drive_close(&plain);
    assert_int_equal(want.n_prompt, 59);
    assert_int_equal(got.n_prompt, want.n_prompt);
    same_results(want.prompt, got.prompt, want.n_prompt);
    same_results(want.next, got.next, 2);
    same_results(want.dola, got.dola, N_DOLA);
    same_results(want.contrast, got.contrast, N_OTHER);
}

/* ---- refusals ---- */

static void test_bad_calls(void **state)
{
    (void)state;
    struct bt_engine_params p = drive_greedy(0);
    struct bt_engine_out o[64];
    uint32_t slot = 3, n = 0, many[33] = {0};
    d.next_page = 0;
    assert_int_equal(d.vt->draft(d.e, &slot, 1, 1, o, &n), BT_ERR_INVALID); /* not open */
    slot = 1u << 30;
    assert_int_equal(d.vt->draft(d.e, &slot, 1, 1, o, &n), BT_ERR_INVALID);
    slot = 3;
    drive_slot(&d, 3, &p, text, 30, 2); /* pages for 32 tokens */
    drive_prefill(&d, 3, text, 0, 30, 2048);
    assert_int_equal(d.vt->draft(d.e, &slot, 1, 0, o, &n), BT_ERR_INVALID);
    assert_int_equal(d.vt->draft(d.e, many, 33, 1, o, many), BT_ERR_INVALID);
    assert_int_equal(d.vt->draft(d.e, &slot, 1, 2, o, &n), BT_OK);
    assert_int_equal(n, 2);
    assert_int_equal(d.vt->draft(d.e, &slot, 1, 3, o, &n), BT_ERR_INVALID); /* no page */
    drive_slot_close(&d, 3);
    p.n_dola = 1;
    drive_slot(&d, 3, &p, text, 30, 8);
    drive_prefill(&d, 3, text, 0, 30, 2048);
    assert_int_equal(d.vt->draft(d.e, &slot, 1, 1, o, &n), BT_ERR_INVALID);
    drive_slot_close(&d, 3);
    p.dola[0] = 2; /* the MTP layer is none that DoLa may name */
    assert_int_equal(d.vt->slot_open(d.e, 3, &p, text, 2, 2), BT_ERR_INVALID);
}

/* At the end of the context there are as many drafts as tokens that fit. */
static void test_end_of_context(void **state)
{
    (void)state;
    const uint32_t len = d.info->max_model_len;
    const struct bt_engine_params p = drive_greedy(-1);
    struct bt_engine_out o[4];
    uint32_t *ids = malloc(len * sizeof(*ids));
    for (uint32_t i = 0; i < len; i++) {
        ids[i] = text[i % N_TEXT];
    }
    d.next_page = 0;
    drive_slot(&d, 0, &p, ids, len - 3, 3);
    drive_prefill(&d, 0, ids, 0, len - 3, 2048);
    assert_int_equal(drafts_of(0, 4, o), 2);
    drive_decode(&d, 0);
    assert_int_equal(drafts_of(0, 4, o), 1);
    drive_slot_close(&d, 0);
    free(ids);
}

static void expect_refused(const char *model, const char *engine, const char *what)
{
    const struct bt_engine_vtable *vt;
    const struct bt_engine_info *info;
    struct bt_engine *e;
    char err[1024] = "";
    assert_int_equal(bt_engine_load(engine, &vt, err, sizeof(err)), BT_OK);
    const struct bt_engine_config c = {.size = sizeof(c),
                                       .model_dir = model,
                                       .page_tokens = PAGE,
                                       .pages = 16,
                                       .max_slots = 2,
                                       .max_rows = 64,
                                       .threads = 1,
                                       .ranks = 1,
                                       .mtp = true};
    assert_int_equal(vt->open(&c, &e, &info, err, sizeof(err)), BT_ERR_UNSUPPORTED);
    if (!strstr(err, what) || !strstr(err, "set model.mtp to false")) {
        fail_msg("%s", err);
    }
}

/* Models that have no MTP layer, by config.json or by their files. */
static void test_refused(void **state)
{
    (void)state;
    expect_refused("tests/golden/models/tiny-llama31", "cpu", "num_nextn_predict_layers");
    expect_refused("tests/golden/models/tiny-llama31", "null", "num_nextn_predict_layers");
    expect_refused("tests/golden/models/tiny-deepseek-v3", "cpu", "model.layers.3.eh_proj.weight");
    /* The file's last tensor is the layer's copy of the head. */
    char dir[] = "/tmp/baton-mtp-XXXXXX", cmd[512];
    assert_non_null(mkdtemp(dir));
    snprintf(cmd, sizeof(cmd),
             "cp " MODEL "/* %s && printf '\\77' | dd of=%s/model.safetensors bs=1 "
             "conv=notrunc seek=$(($(stat -c %%s %s/model.safetensors) - 1)) 2>/dev/null",
             dir, dir, dir);
    assert_int_equal(system(cmd), 0);
    expect_refused(dir, "cpu",
                   "model.layers.2.shared_head.head.weight differs from lm_head.weight");
    snprintf(cmd, sizeof(cmd), "rm -r %s", dir);
    assert_int_equal(system(cmd), 0);
    struct drive plain;
    struct bt_engine_out o;
    uint32_t slot = 0, n;
    drive_mtp = false;
    drive_open(&plain, "cpu", MODEL, PAGE);
    drive_mtp = true;
    assert_int_equal(plain.info->layout.n_layers, 2);
    assert_int_equal(plain.vt->draft(plain.e, &slot, 1, 1, &o, &n), BT_ERR_UNSUPPORTED);
    drive_close(&plain);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reference), cmocka_unit_test(test_drafts_change_nothing),
        cmocka_unit_test(test_bytes),     cmocka_unit_test(test_begins_in_the_middle),
        cmocka_unit_test(test_fork),      cmocka_unit_test(test_together),
        cmocka_unit_test(test_beams),     cmocka_unit_test(test_other_results),
        cmocka_unit_test(test_bad_calls), cmocka_unit_test(test_end_of_context),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
