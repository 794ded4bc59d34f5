/* The exact class, through engine.h: a row's result is the same bit for bit whatever the chunks,
 * the neighbours, the pages and the way its KV came. On processors without AVX512 the engine may
 * not claim it (CAP_EXACT); there the tests that compare bits are skipped.
 * BT_EXACT_ENGINE=cuda: of the cuda engine with engine.deterministic, on a GPU. */
#include "tests/golden/drive.h"

#include <math.h>
#include <unistd.h>

#define N_PROMPT 611
#define N_NEW    24

static const char *engine = "cpu";
static const char *model = "deploy/models/shakespeare-llama-6m";
static uint32_t page_tokens = 16;
static struct drive d;
static uint32_t prompt[8][N_PROMPT];
static struct bt_engine_out expect[N_NEW]; /* one chunk, alone */

static void same(const struct bt_engine_out *a, const struct bt_engine_out *b, uint32_t at)
{
    if (a->token != b->token || a->logprob != b->logprob || a->bad != b->bad ||
        a->n_top != b->n_top || memcmp(a->top_id, b->top_id, a->n_top * sizeof(*a->top_id)) != 0 ||
        memcmp(a->top_logprob, b->top_logprob, a->n_top * sizeof(*a->top_logprob)) != 0) {
        fail_msg("token %u: %u (%.9g) instead of %u (%.9g)", at, b->token, b->logprob, a->token,
                 a->logprob);
    }
}

static void open_and_expect(const char *activations)
{
    uint32_t x = 7;
    drive_open_with(&d, engine, model, "auto", page_tokens, activations);
    for (int s = 0; s < 8; s++) {
        for (int i = 0; i < N_PROMPT; i++) {
            x = x * 1664525u + 1013904223u;
            prompt[s][i] = (x >> 8) % BT_MIN(2000u, d.info->vocab);
        }
    }
    const struct bt_engine_params p = drive_greedy(20);
    drive_slot(&d, 0, &p, prompt[0], N_PROMPT, N_NEW);
    expect[0] = drive_prefill(&d, 0, prompt[0], 0, N_PROMPT, 2048);
    for (int i = 1; i < N_NEW; i++) {
        expect[i] = drive_decode(&d, 0);
    }
    drive_slot_close(&d, 0);
}

static int setup(void **state)
{
    (void)state;
    open_and_expect("split");
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

static void decode_and_compare(uint32_t slot, const struct bt_engine_out *first)
{
    same(&expect[0], first, 0);
    for (uint32_t i = 1; i < N_NEW; i++) {
        struct bt_engine_out o = drive_decode(&d, slot);
        same(&expect[i], &o, i);
    }
}

static void run_chunks(const uint32_t *chunks, size_t n)
{
    need_exact();
    const struct bt_engine_params p = drive_greedy(20);
    for (size_t i = 0; i < n; i++) {
        d.next_page = 0;
        drive_slot(&d, 3, &p, prompt[0], N_PROMPT, N_NEW);
        struct bt_engine_out o = drive_prefill(&d, 3, prompt[0], 0, N_PROMPT, chunks[i]);
        decode_and_compare(3, &o);
        drive_slot_close(&d, 3);
    }
}

static void test_chunks(void **state)
{
    (void)state;
    static const uint32_t chunks[] = {1, 7, 16, 48, 100, 128, 333, 610};
    run_chunks(chunks, BT_ARRAY_LEN(chunks));
}

/* Of further models: chunks that begin within pages and at their ends, and one of a single token.
 */
static void test_some_chunks(void **state)
{
    (void)state;
    static const uint32_t chunks[] = {7, 128, 610};
    run_chunks(chunks, BT_ARRAY_LEN(chunks));
}

/* Eight sequences of different lengths: their prompts in one step, then together. */
static void test_neighbours(void **state)
{
    (void)state;
    need_exact();
    const struct bt_engine_params p = drive_greedy(20);
    struct bt_engine_row rows[8];
    struct bt_engine_out out[8];
    for (uint32_t s = 0; s < 8; s++) {
        uint32_t slot = (s + 5) % 8, n = slot == 4 ? N_PROMPT : 30 + 41 * slot;
        uint32_t which = slot == 4 ? 0 : slot;
        drive_slot(&d, slot, &p, prompt[which], n, N_NEW);
        rows[s] = (struct bt_engine_row){
            .slot = slot, .n = n, .tokens = prompt[which], .flags = BT_ROW_SAMPLE};
    }
    assert_int_equal(drive_step(&d, rows, 8, out), 8);
    for (uint32_t i = 0;; i++) {
        for (uint32_t s = 0; s < 8; s++) {
            assert_int_equal(out[s].slot, rows[s].slot);
            if (out[s].slot == 4) {
                same(&expect[i], &out[s], i);
            }
            rows[s].pos = BT_ENGINE_POS_NEXT;
            rows[s].n = 1;
            rows[s].tokens = NULL;
        }
        if (i + 1 == N_NEW) {
            break;
        }
        assert_int_equal(drive_step(&d, rows, 8, out), 8);
    }
    for (uint32_t s = 0; s < 8; s++) {
        drive_slot_close(&d, s);
    }
}

/* A prompt chunk of another sequence in each of the row's steps. */
static void test_mixed(void **state)
{
    (void)state;
    need_exact();
    const struct bt_engine_params p = drive_greedy(20);
    drive_slot(&d, 1, &p, prompt[0], N_PROMPT, N_NEW);
    drive_slot(&d, 2, &p, prompt[5], N_PROMPT, 1);
    struct bt_engine_out o = drive_prefill(&d, 1, prompt[0], 0, N_PROMPT, 200);
    same(&expect[0], &o, 0);
    for (uint32_t i = 1; i < N_NEW; i++) {
        const struct bt_engine_row rows[2] = {
            {.slot = 2, .pos = (i - 1) * 25, .n = 25, .tokens = prompt[5] + (i - 1) * 25},
            {.slot = 1, .pos = BT_ENGINE_POS_NEXT, .n = 1, .flags = BT_ROW_SAMPLE}};
        assert_int_equal(drive_step(&d, rows, 2, &o), 1);
        same(&expect[i], &o, i);
    }
    drive_slot_close(&d, 1);
    drive_slot_close(&d, 2);
}

/* ---- through the slab ---- */

static void ring(void *arg)
{
    ++*(int *)arg;
}

struct slab {
    uint8_t *mem;
    uint32_t blocks;
    struct bt_engine_block b[N_PROMPT];
};

/* The blocks of tokens [0, n) in slab memory, chunk c's at seq c * layers. */
static void slab_open(struct slab *s, uint32_t n, uint32_t chunk, uint32_t page0, uint32_t n_pages)
{
    const struct bt_kv_layout *l = &d.info->layout;
    s->blocks = BT_DIV_UP(n, l->page_tokens);
    s->mem = aligned_alloc(4096, s->blocks * l->block_bytes);
    memset(s->mem, 0xa5, s->blocks * l->block_bytes);
    for (uint32_t i = 0; i < s->blocks; i++) {
        s->b[i] = (struct bt_engine_block){.mem = s->mem + i * l->block_bytes,
                                           .page = page0 + n_pages - 1 -
                                                   i, /* as drive_slot hands them out */
                                           .toks = BT_MIN(n - i * l->page_tokens, l->page_tokens),
                                           .seq = i * l->page_tokens / chunk * l->n_layers};
    }
}

/* A device's copies may end after the step that they belong to. */
static void reach(bt_flow_word_t *word, uint32_t want)
{
    for (int i = 0; i < 60000 && bt_flow_read(word, 9) < want; i++) {
        struct bt_engine_event ev;
        if (d.vt->poll(d.e, &ev, 1, 0)) {
            d.vt->release(d.e, ev.ticket);
        }
        usleep(1000); /* a minute in all: only a hang reaches that */
    }
    assert_int_equal(bt_flow_read(word, 9), want);
}

/* Prefills prompt 0 of slot 1 with a STORE flow in chunks of 128, two chunks a step. */
static struct bt_engine_out store_prompt(struct slab *s, uint32_t n, bt_flow_word_t *word,
                                         int *rings)
{
    const struct bt_engine_params p = drive_greedy(20);
    uint32_t layers = d.info->layout.n_layers, flow, page0 = d.next_page;
    drive_slot(&d, 1, &p, prompt[0], n, N_NEW);
    slab_open(s, n, 128, page0, d.next_page - page0);
    assert_int_equal(
        d.vt->flow_open(d.e, BT_ENGINE_STORE, BT_ENGINE_PRIO_LAND, word, 9, ring, rings, &flow),
        BT_OK);
    assert_int_equal(d.vt->flow_add(d.e, flow, s->b, s->blocks), BT_OK);
    struct bt_engine_out o = {0};
    for (uint32_t at = 0; at < n; at += 256) {
        struct bt_engine_row rows[2];
        uint32_t k = 0;
        for (uint32_t a = at; a < BT_MIN(at + 256, n); a += 128, k++) {
            uint32_t m = BT_MIN(128u, n - a);
            rows[k] = (struct bt_engine_row){.slot = 1,
                                             .pos = a,
                                             .n = m,
                                             .tokens = prompt[0] + a,
                                             .flags = a + m == n ? BT_ROW_SAMPLE : 0,
                                             .fire = {flow, a / 128 * layers}};
        }
        drive_step(&d, rows, k, &o);
        reach(word, (BT_MIN(at + 256, n) + 127) / 128 * layers);
    }
    assert_true(*rings > 0);
    bt_engine_ticket_t quiet;
    assert_int_equal(d.vt->flow_close(d.e, flow, false, &quiet), BT_OK);
    drive_wait(&d, quiet);
    d.vt->release(d.e, quiet);
    return o;
}

/* Loads the slab into slot 2's fresh pages; the word rises while the engine waits. */
static void load_prompt(const struct slab *s, uint32_t page0, uint32_t n_pages)
{
    struct bt_engine_block b[N_PROMPT];
    uint32_t layers = d.info->layout.n_layers, flow, items = s->b[s->blocks - 1].seq + layers;
    bt_flow_word_t word = 0;
    bt_engine_ticket_t part, quiet;
    struct bt_engine_event ev;
    for (uint32_t i = 0; i < s->blocks; i++) {
        b[i] = s->b[i];
        b[i].page = page0 + n_pages - 1 - i;
    }
    assert_int_equal(
        d.vt->flow_open(d.e, BT_ENGINE_LOAD, BT_ENGINE_PRIO_LAND, &word, 4, NULL, NULL, &flow),
        BT_OK);
    assert_int_equal(d.vt->flow_add(d.e, flow, b, s->blocks), BT_OK);
    assert_int_equal(d.vt->flow_release(d.e, flow, 3, &part), BT_OK);
    bt_flow_raise(&word, 3, items); /* another epoch's: nothing may move */
    assert_int_equal(d.vt->poll(d.e, &ev, 1, 1000), 0);
    bt_flow_raise(&word, 4, 3);
    drive_wait(&d, part);
    d.vt->release(d.e, part);
    assert_int_equal(d.vt->flow_close(d.e, flow, false, &quiet), BT_OK);
    assert_int_equal(d.vt->poll(d.e, &ev, 1, 1000), 0);
    bt_flow_raise(&word, 4, items);
    assert_int_equal(drive_wait(&d, quiet).status, BT_OK);
    d.vt->release(d.e, quiet);
}

/* Prefill here, decode there: the whole prompt's KV goes through slab memory. */
static void test_hand_off(void **state)
{
    (void)state;
    need_exact();
    const struct bt_engine_params p = drive_greedy(20);
    struct slab s;
    bt_flow_word_t word = 0;
    int rings = 0;
    struct bt_engine_out first = store_prompt(&s, N_PROMPT, &word, &rings);
    drive_slot_close(&d, 1);
    uint32_t page0 = d.next_page;
    drive_slot(&d, 2, &p, prompt[0], N_PROMPT, N_NEW);
    load_prompt(&s, page0, d.next_page - page0);
    assert_int_equal(d.vt->slot_accept(d.e, 2, first.token), BT_OK);
    decode_and_compare(2, &first);
    drive_slot_close(&d, 2);
    free(s.mem);
}

/* A cached prefix of 512 tokens: loaded layer by layer, the rest computed behind it. */
static void test_prefix(void **state)
{
    (void)state;
    need_exact();
    const struct bt_engine_params p = drive_greedy(20);
    struct slab s;
    bt_flow_word_t word = 0;
    int rings = 0;
    store_prompt(&s, N_PROMPT, &word, &rings);
    drive_slot_close(&d, 1);
    uint32_t page0 = d.next_page, flow;
    drive_slot(&d, 2, &p, prompt[0], N_PROMPT, N_NEW);
    struct bt_engine_block b[512 / 16];
    const uint32_t cached = 512 / page_tokens;
    for (uint32_t i = 0; i < cached; i++) {
        b[i] = s.b[i];
        b[i].page = d.next_page - 1 - i;
        b[i].seq = 0; /* one item a layer for all of the prefix */
    }
    assert_true(page0 < d.next_page);
    assert_int_equal(
        d.vt->flow_open(d.e, BT_ENGINE_LOAD, BT_ENGINE_PRIO_LAND, NULL, 1, NULL, NULL, &flow),
        BT_OK);
    assert_int_equal(d.vt->flow_add(d.e, flow, b, cached), BT_OK);
    const struct bt_engine_row row = {.slot = 2,
                                      .pos = 512,
                                      .n = N_PROMPT - 512,
                                      .tokens = prompt[0] + 512,
                                      .flags = BT_ROW_SAMPLE,
                                      .wait = {flow, 0}};
    struct bt_engine_out o;
    assert_int_equal(drive_step(&d, &row, 1, &o), 1);
    decode_and_compare(2, &o);
    bt_engine_ticket_t quiet;
    assert_int_equal(d.vt->flow_close(d.e, flow, true, &quiet), BT_OK);
    drive_slot_close(&d, 2);
    free(s.mem);
}

/* What stands behind the last token of a partial block must be zeros, not another sequence. */
static void test_partial_block(void **state)
{
    (void)state;
    d.next_page = 0; /* pages full of other prompts */
    struct slab s;
    bt_flow_word_t word = 0;
    int rings = 0;
    const struct bt_kv_layout *l = &d.info->layout;
    const uint32_t n = 160 / page_tokens * page_tokens + 5;
    store_prompt(&s, n, &word, &rings);
    const uint8_t *block = s.b[n / page_tokens].mem;
    assert_int_equal(s.b[n / page_tokens].toks, 5);
    for (uint32_t layer = 0; layer < l->n_layers; layer++) {
        uint32_t bytes;
        const uint8_t *seg = block + bt_kv_segment(l, layer, &bytes);
        uint32_t row = bt_kv_row_bytes(&l->groups[0]);
        for (uint32_t plane = 0; plane < bt_kv_planes(&l->groups[0]); plane++) {
            const uint8_t *t = seg + (size_t)plane * page_tokens * row;
            int used = 0;
            for (uint32_t i = 0; i < 5 * row; i++) {
                used |= t[i];
            }
            assert_true(used);
            for (uint32_t i = 5 * row; i < page_tokens * row; i++) {
                assert_int_equal(t[i], 0);
            }
        }
    }
    drive_slot_close(&d, 1);
    free(s.mem);
}

/* The same prompt on pages of 64 tokens, and with a third of the threads' chance to race. */
static void test_page_size(void **state)
{
    (void)state;
    need_exact();
    struct drive keep = d;
    const struct bt_engine_params p = drive_greedy(20);
    drive_open(&d, engine, model, 64);
    drive_slot(&d, 0, &p, prompt[0], N_PROMPT, N_NEW);
    struct bt_engine_out o = drive_prefill(&d, 0, prompt[0], 0, N_PROMPT, 2048);
    decode_and_compare(0, &o);
    drive_slot_close(&d, 0);
    drive_close(&d);
    d = keep;
}

/* Seeded sampling: alone, beside others, and resumed in another slot after 10 tokens. */
static void test_seeded(void **state)
{
    (void)state;
    need_exact();
    struct bt_engine_params p = drive_greedy(20);
    p.temperature = 0.9f;
    p.top_p = 0.95f;
    p.seed = 0x1234567890abcdefull;
    p.repetition_penalty = 1.1f;
    uint32_t text[100 + N_NEW];
    struct bt_engine_out alone[N_NEW], o;
    memcpy(text, prompt[3], 100 * sizeof(*text));
    drive_slot(&d, 0, &p, text, 100, N_NEW);
    alone[0] = drive_prefill(&d, 0, text, 0, 100, 2048);
    for (uint32_t i = 1; i < N_NEW; i++) {
        alone[i] = drive_decode(&d, 0);
    }
    for (uint32_t i = 0; i < N_NEW; i++) {
        text[100 + i] = alone[i].token;
    }
    drive_slot_close(&d, 0);
    uint32_t pages[16];
    for (uint32_t i = 0; i < 16; i++) {
        pages[i] = 100 + i;
    }
    assert_int_equal(d.vt->slot_open(d.e, 7, &p, text, 110, 100), BT_OK);
    assert_int_equal(d.vt->slot_pages(d.e, 7, 0, pages, 16), BT_OK);
    o = drive_prefill(&d, 7, text, 0, 110, 64);
    for (uint32_t i = 10; i < N_NEW; i++) {
        same(&alone[i], &o, i);
        o = drive_decode(&d, 7);
    }
    drive_slot_close(&d, 7);
}

/* Runs slot's next row behind text[0, n): with text[n, n + right) as drafts, then `wrong` others.
 * Checks the results against alone[], which begins at text[100]. Returns the new n. */
static uint32_t step_with_drafts(uint32_t slot, const uint32_t *text, uint32_t n, uint32_t right,
                                 uint32_t wrong, const struct bt_engine_out *alone)
{
    uint32_t row[16];
    struct bt_engine_out out[17];
    memcpy(row, text + n - 1, (1 + right) * sizeof(*row));
    for (uint32_t i = 0; i < wrong; i++) {
        row[1 + right + i] = (text[n + right + i] + 1) % d.info->vocab;
    }
    /* A neighbour between: its results come behind the run. */
    const struct bt_engine_row rows[2] = {
        {.slot = slot,
         .pos = BT_ENGINE_POS_NEXT, /* behind the drafts that were accepted before */
         .n = 1 + right + wrong,
         .tokens = row,
         .flags = BT_ROW_SAMPLE,
         .n_draft = right + wrong},
        {.slot = 9, .pos = BT_ENGINE_POS_NEXT, .n = 1, .flags = BT_ROW_SAMPLE}};
    assert_int_equal(drive_step(&d, rows, 2, out), right + 2);
    for (uint32_t i = 0; i <= right; i++) {
        assert_int_equal(out[i].slot, slot);
        assert_int_equal(out[i].pos, n + i);
        assert_int_equal(out[i].more, i < right);
        same(&alone[n + i - 100], &out[i], n + i);
    }
    assert_int_equal(out[right + 1].slot, 9);
    return n + right + 1;
}

/* Rows with drafts, right and wrong ones: each token is that of single rows, bit for bit, with
 * penalties that count the tokens of the run and an end that is not allowed before its middle. */
static void test_drafts(void **state)
{
    (void)state;
    need_exact();
    static const struct {
        uint32_t right, wrong;
    } rows[] = {{3, 0}, {0, 2}, {2, 4}, {0, 0}, {5, 1}, {1, 1}, {4, 0}};
    for (int greedy = 0; greedy < 2; greedy++) {
        struct bt_engine_params p = drive_greedy(20);
        p.temperature = greedy ? 0 : 0.9f;
        p.seed = 41;
        p.repetition_penalty = 1.3f;
        p.frequency_penalty = 0.7f;
        p.presence_penalty = 0.3f;
        uint32_t text[100 + N_NEW], n = 101, steps = 0;
        struct bt_engine_out alone[N_NEW];
        memcpy(text, prompt[4], 100 * sizeof(*text));
        d.next_page = 0;
        for (int turn = 0; turn < 2; turn++) { /* in the second one an end token comes too early */
            drive_slot(&d, 0, &p, text, 100, N_NEW);
            alone[0] = drive_prefill(&d, 0, text, 0, 100, 2048);
            for (uint32_t i = 1; i < N_NEW; i++) {
                alone[i] = drive_decode(&d, 0);
            }
            drive_slot_close(&d, 0);
            p.min_new = 12;
            p.n_eos = 1;
            p.eos[0] = turn ? p.eos[0] : alone[8].token;
        }
        for (uint32_t i = 0; i < N_NEW; i++) {
            text[100 + i] = alone[i].token;
        }
        const struct bt_engine_params other = drive_greedy(-1);
        drive_slot(&d, 9, &other, prompt[1], 40, N_NEW);
        drive_prefill(&d, 9, prompt[1], 0, 40, 2048);
        drive_slot(&d, 3, &p, text, 100, N_NEW + 8);
        struct bt_engine_out o = drive_prefill(&d, 3, text, 0, 100, 2048);
        same(&alone[0], &o, 0);
        for (size_t i = 0; i < BT_ARRAY_LEN(rows); i++, steps++) {
            n = step_with_drafts(3, text, n, rows[i].right, rows[i].wrong, alone);
        }
        assert_in_range(n, 101 + steps + 10, 100 + N_NEW - 1);
        o = drive_decode(&d, 3); /* the position after the run is the engine's, too */
        same(&alone[n - 100], &o, n);
        drive_slot_close(&d, 3);
        drive_slot_close(&d, 9);
    }
}

/* Prompt logprobs of slot `slot` in steps of `chunk`, checked to be each token's once; the last
 * step samples beside them. */
static struct bt_engine_out prompt_logprobs(uint32_t slot, uint32_t chunk,
                                            struct bt_engine_out *out)
{
    uint32_t seen = 0;
    struct bt_engine_out first = {0};
    for (uint32_t at = 0; at < N_PROMPT; at += chunk) {
        const uint32_t n = BT_MIN(chunk, N_PROMPT - at), end = at + n == N_PROMPT;
        const struct bt_engine_row row = {.slot = slot,
                                          .pos = at,
                                          .n = n,
                                          .tokens = prompt[0] + at,
                                          .flags =
                                              BT_ROW_PROMPT_LOGPROBS | (end ? BT_ROW_SAMPLE : 0)};
        const struct bt_engine_batch b = {.n_rows = 1, .rows = &row};
        bt_engine_ticket_t fwd, smp;
        assert_int_equal(d.vt->forward(d.e, &b, &fwd), BT_OK);
        struct bt_engine_event ev = drive_wait(&d, fwd);
        assert_int_equal(ev.status, BT_OK);
        assert_int_equal(ev.n_out, n - end);
        for (uint32_t i = 0; i < ev.n_out; i++) {
            assert_int_equal(ev.out[i].slot, slot);
            assert_int_equal(ev.out[i].pos, at + i + 1);
            assert_int_equal(ev.out[i].token, prompt[0][at + i + 1]);
            out[seen++] = ev.out[i];
        }
        assert_int_equal(d.vt->sample(d.e, fwd, NULL, &smp), BT_OK);
        ev = drive_wait(&d, smp);
        assert_int_equal(ev.n_out, end);
        first = end ? ev.out[0] : first;
        d.vt->release(d.e, fwd);
        d.vt->release(d.e, smp);
    }
    assert_int_equal(seen, N_PROMPT - 1);
    return first;
}

/* The host takes logprobs of prompts from the logits, a GPU those of what it draws: the same
 * logits, another order of sums. */
static void same_logprob(float drawn, float of_prompt)
{
    if (strcmp(engine, "cpu") == 0) {
        assert_true(drawn == of_prompt);
    } else {
        assert_true(fabsf(drawn - of_prompt) <= 1e-5f);
    }
}

/* The logprobs of a prompt's tokens are those that sampling at each position reports, whatever the
 * chunks, and asking for them changes nothing else. */
static void test_prompt_logprobs(void **state)
{
    (void)state;
    need_exact();
    static struct bt_engine_out all[N_PROMPT], again[N_PROMPT];
    const struct bt_engine_params p = drive_greedy(20);
    drive_slot(&d, 0, &p, prompt[0], N_PROMPT, N_NEW);
    struct bt_engine_out first = prompt_logprobs(0, 2048, all);
    decode_and_compare(0, &first);
    drive_slot_close(&d, 0);
    drive_slot(&d, 1, &p, prompt[0], N_PROMPT, N_NEW);
    first = prompt_logprobs(1, 100, again);
    same(&expect[0], &first, 0);
    drive_slot_close(&d, 1);
    for (uint32_t i = 0; i + 1 < N_PROMPT; i++) {
        same(&all[i], &again[i], i + 1);
    }
    /* sampled after i tokens: the same distribution, seen from there */
    for (uint32_t i = 1; i < N_PROMPT; i += 97) {
        d.next_page = 0;
        drive_slot(&d, 2, &p, prompt[0], i, 1);
        struct bt_engine_out o = drive_prefill(&d, 2, prompt[0], 0, i, 2048);
        assert_int_equal(o.pos, i);
        assert_memory_equal(o.top_id, all[i - 1].top_id, sizeof(o.top_id));
        for (uint32_t k = 0; k < o.n_top; k++) {
            same_logprob(o.top_logprob[k], all[i - 1].top_logprob[k]);
            if (o.top_id[k] == all[i - 1].token) {
                same_logprob(o.top_logprob[k], all[i - 1].logprob);
            }
        }
        drive_slot_close(&d, 2);
    }
}

/* A resumed sequence reports prompt tokens only, not what was generated. */
static void test_prompt_logprobs_end(void **state)
{
    (void)state;
    d.next_page = 0;
    const struct bt_engine_params p = drive_greedy(0);
    uint32_t pages[4] = {0, 1, 2, 3};
    assert_int_equal(d.vt->slot_open(d.e, 0, &p, prompt[0], 40, 30), BT_OK);
    assert_int_equal(d.vt->slot_pages(d.e, 0, 0, pages, 4), BT_OK);
    const struct bt_engine_row row = {
        .slot = 0, .n = 40, .tokens = prompt[0], .flags = BT_ROW_PROMPT_LOGPROBS};
    const struct bt_engine_batch b = {.n_rows = 1, .rows = &row};
    bt_engine_ticket_t fwd;
    assert_int_equal(d.vt->forward(d.e, &b, &fwd), BT_OK);
    struct bt_engine_event ev = drive_wait(&d, fwd);
    assert_int_equal(ev.n_out, 29);
    assert_int_equal(ev.out[28].pos, 29);
    assert_int_equal(ev.out[28].n_top, 0);
    assert_true(ev.out[28].logprob < 0);
    d.vt->release(d.e, fwd);
    drive_slot_close(&d, 0);
}

#define N_CHOICE 3
#define FORK_AT  155 /* prompt tokens: a partial page at the end */

/* Slot 0 has run its prompt; the forks get a page of their own for the partial block and the next.
 */
static void fork_slots(void)
{
    const uint32_t whole = FORK_AT / page_tokens, partial = d.next_page - 1 - whole;
    for (uint32_t c = 1; c < N_CHOICE; c++) {
        const uint32_t pages[3] = {500 + 8 * c, 501 + 8 * c, 502 + 8 * c};
        assert_int_equal(d.vt->slot_fork(d.e, 0, c, c), BT_OK);
        assert_int_equal(d.vt->slot_pages(d.e, c, whole, pages, 3), BT_OK);
        assert_int_equal(d.vt->page_copy(d.e, partial, pages[0], FORK_AT % page_tokens), BT_OK);
    }
}

static void run_forks(struct bt_engine_out alone[][N_NEW], uint32_t from)
{
    struct bt_engine_row rows[N_CHOICE];
    struct bt_engine_out out[N_CHOICE];
    for (uint32_t c = 0; c < N_CHOICE; c++) {
        rows[c] = (struct bt_engine_row){
            .slot = c, .pos = BT_ENGINE_POS_NEXT, .n = 1, .flags = BT_ROW_SAMPLE};
    }
    for (uint32_t i = from; i < N_NEW; i++) {
        assert_int_equal(drive_step(&d, rows, N_CHOICE, out), N_CHOICE);
        for (uint32_t c = 0; c < N_CHOICE; c++) {
            same(&alone[c][i], &out[c], i);
        }
    }
    for (uint32_t c = 0; c < N_CHOICE; c++) {
        drive_slot_close(&d, c);
    }
}

/* n choices of one prompt, computed once: whole pages shared by reference, the partial one copied;
 * each choice gets the tokens it gets alone. Forked between forward and sample, as a prefill does,
 * and after the first token, as a decode does that is told the first tokens. */
static void test_fork(void **state)
{
    (void)state;
    need_exact();
    struct bt_engine_params p = drive_greedy(20);
    p.temperature = 0.9f;
    p.repetition_penalty = 1.2f;
    p.seed = 77;
    static struct bt_engine_out alone[N_CHOICE][N_NEW];
    for (p.choice = 0; p.choice < N_CHOICE; p.choice++) {
        d.next_page = 0;
        drive_slot(&d, 0, &p, prompt[0], FORK_AT, N_NEW);
        alone[p.choice][0] = drive_prefill(&d, 0, prompt[0], 0, FORK_AT, 2048);
        for (uint32_t i = 1; i < N_NEW; i++) {
            alone[p.choice][i] = drive_decode(&d, 0);
        }
        drive_slot_close(&d, 0);
    }
    bool differ = false;
    for (uint32_t i = 0; i < N_NEW; i++) {
        differ |= alone[0][i].token != alone[1][i].token;
    }
    assert_true(differ);
    p.choice = 0;
    for (int late = 0; late < 2; late++) {
        d.next_page = 0;
        drive_slot(&d, 0, &p, prompt[0], FORK_AT, N_NEW);
        const struct bt_engine_row row = {
            .slot = 0, .n = FORK_AT, .tokens = prompt[0], .flags = late ? 0 : BT_ROW_SAMPLE};
        const struct bt_engine_batch b = {.n_rows = 1, .rows = &row};
        bt_engine_ticket_t fwd, smp;
        assert_int_equal(d.vt->forward(d.e, &b, &fwd), BT_OK);
        fork_slots();
        assert_int_equal(d.vt->sample(d.e, fwd, NULL, &smp), BT_OK);
        struct bt_engine_event ev = drive_wait(&d, smp);
        assert_int_equal(ev.n_out, late ? 0 : N_CHOICE);
        for (uint32_t c = 0; c < N_CHOICE; c++) {
            if (late) {
                assert_int_equal(d.vt->slot_accept(d.e, c, alone[c][0].token), BT_OK);
            } else {
                assert_int_equal(ev.out[c].slot, c);
                same(&alone[c][0], &ev.out[c], 0);
            }
        }
        d.vt->release(d.e, fwd);
        d.vt->release(d.e, smp);
        run_forks(alone, 1);
    }
    assert_int_equal(d.vt->slot_fork(d.e, 9, 4, 1), BT_ERR_INVALID);
    assert_int_equal(d.vt->page_copy(d.e, 0, d.info->pages, 1), BT_ERR_INVALID);
    assert_int_equal(d.vt->page_copy(d.e, 0, 1, page_tokens + 1), BT_ERR_INVALID);
}

/* A sliding window of 48 tokens: chunks begin and end anywhere in it. */
static void test_window(void **state)
{
    (void)state;
    need_exact();
    struct drive keep = d;
    const struct bt_engine_params p = drive_greedy(20);
    static const uint32_t chunks[] = {2048, 1, 13, 48, 100};
    uint32_t text[300];
    struct bt_engine_out want[N_NEW];
    drive_open(&d, "cpu", "tests/golden/models/tiny-mistral", 16);
    assert_int_equal(d.info->layout.groups[0].window, 48);
    for (uint32_t i = 0; i < 300; i++) {
        text[i] = prompt[2][i] % d.info->vocab;
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(chunks); i++) {
        d.next_page = 0;
        drive_slot(&d, 0, &p, text, 300, N_NEW);
        struct bt_engine_out o = drive_prefill(&d, 0, text, 0, 300, chunks[i]);
        for (uint32_t k = 0; k < N_NEW; k++) {
            want[k] = i ? want[k] : o;
            same(&want[k], &o, k);
            if (k + 1 < N_NEW) {
                o = drive_decode(&d, 0);
            }
        }
        drive_slot_close(&d, 0);
    }
    drive_close(&d);
    d = keep;
}

static void test_bad_calls(void **state)
{
    (void)state;
    d.next_page = 0;
    const struct bt_engine_params p = drive_greedy(-1);
    drive_slot(&d, 0, &p, prompt[0], 20, 0);
    const uint32_t big = d.info->vocab, page = d.info->pages;
    bt_engine_ticket_t t;
    const struct {
        struct bt_engine_row row;
        bt_status_t status;
    } cases[] = {
        {{.slot = 9, .n = 1, .tokens = prompt[0]}, BT_ERR_INVALID},
        {{.slot = 99, .n = 1, .tokens = prompt[0]}, BT_ERR_INVALID},
        {{.slot = 0, .n = 0, .tokens = prompt[0]}, BT_ERR_INVALID},
        {{.slot = 0, .n = 1, .tokens = &big}, BT_ERR_INVALID},
        {{.slot = 0, .n = 33, .tokens = prompt[0]}, BT_ERR_INVALID}, /* pages for 32 */
        {{.slot = 0, .pos = d.info->max_model_len, .n = 1, .tokens = prompt[0]}, BT_ERR_TOO_LARGE},
        {{.slot = 0, .n = 2, .tokens = NULL}, BT_ERR_INVALID},
        {{.slot = 0, .n = 1, .tokens = prompt[0], .fire = {1, 0}}, BT_ERR_INVALID},
        {{.slot = 0, .n = 2, .tokens = prompt[0], .n_draft = 1}, BT_ERR_INVALID}, /* no sample */
        {{.slot = 0, .n = 2, .tokens = prompt[0], .n_draft = 2, .flags = BT_ROW_SAMPLE},
         BT_ERR_INVALID},
        {{.slot = 0, .n = 1, .tokens = NULL, .n_draft = 1, .flags = BT_ROW_SAMPLE}, BT_ERR_INVALID},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        const struct bt_engine_batch b = {.n_rows = 1, .rows = &cases[i].row};
        assert_int_equal(d.vt->forward(d.e, &b, &t), cases[i].status);
    }
    assert_int_equal(d.vt->slot_open(d.e, 0, &p, prompt[0], 20, 20), BT_ERR_EXISTS);
    assert_int_equal(d.vt->slot_open(d.e, 1, &p, &big, 1, 1), BT_ERR_INVALID);
    assert_int_equal(d.vt->slot_pages(d.e, 0, 0, &page, 1), BT_ERR_INVALID);
    assert_int_equal(d.vt->slot_accept(d.e, 0, big), BT_ERR_INVALID);
    const struct bt_engine_batch none = {0};
    assert_int_equal(d.vt->forward(d.e, &none, &t), BT_OK); /* lock-step */
    assert_int_equal(drive_wait(&d, t).status, BT_OK);
    d.vt->release(d.e, t);
    drive_slot_close(&d, 0);
}

static void test_null_engine(void **state)
{
    (void)state;
    struct drive n;
    drive_open(&n, "null", model, 16);
    const struct bt_engine_params p = drive_greedy(0);
    uint32_t got[2][8];
    for (int r = 0; r < 2; r++) {
        n.next_page = 0;
        drive_slot(&n, 0, &p, prompt[0], 50, 8);
        got[r][0] = drive_prefill(&n, 0, prompt[0], 0, 50, r ? 50 : 16).token;
        for (int i = 1; i < 8; i++) {
            got[r][i] = drive_decode(&n, 0).token;
        }
        drive_slot_close(&n, 0);
    }
    assert_memory_equal(got[0], got[1], sizeof(got[0]));
    /* Two right drafts and a wrong one. */
    const uint32_t row[4] = {got[0][0], got[0][1], got[0][2], got[0][3] + 1};
    struct bt_engine_out out[4];
    n.next_page = 0;
    drive_slot(&n, 0, &p, prompt[0], 50, 8);
    drive_prefill(&n, 0, prompt[0], 0, 50, 50);
    const struct bt_engine_row r = {
        .pos = 50, .n = 4, .tokens = row, .flags = BT_ROW_SAMPLE, .n_draft = 3};
    assert_int_equal(drive_step(&n, &r, 1, out), 3);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(out[i].token, got[0][i + 1]);
    }
    assert_int_equal(drive_decode(&n, 0).token, got[0][4]);
    drive_close(&n);
}

/* An engine of one part in the MLP; the last test, for it leaves other expectations. */
static void test_bf16_mlp(void **state)
{
    need_exact(); /* of the other engine: one that is open cannot be closed by what skips */
    struct drive split = d;
    open_and_expect("bf16-mlp");
    assert_true((d.info->caps & BT_ENGINE_CAP_EXACT) != 0);
    test_some_chunks(state);
    test_neighbours(state);
    test_mixed(state);
    test_prefix(state);
    drive_close(&d);
    d = split;
}

/* Latents, experts, and both; the last tests, for they leave other expectations. */
static void all_of(const char *path, void **state)
{
    need_exact();
    if (access(path, R_OK) != 0) {
        skip(); /* beside a checkout only */
    }
    static const char *const activations[] = {"split", "bf16-mlp"};
    struct drive other = d;
    const char *before = model;
    model = path;
    /* How the KV is rounded has nothing to do with the parts of products: once is enough. */
    const size_t n = drive_kv_dtype ? 1 : BT_ARRAY_LEN(activations);
    for (size_t i = 0; i < n; i++) {
        open_and_expect(activations[i]);
        assert_true((d.info->caps & BT_ENGINE_CAP_EXACT) != 0);
        test_some_chunks(state);
        test_neighbours(state);
        test_mixed(state);
        test_hand_off(state);
        test_prefix(state);
        test_partial_block(state);
        test_fork(state);
        if (d.info->caps & BT_ENGINE_CAP_DRAFTS) {
            test_drafts(state);
        }
        if (i == 0 && page_tokens == 16) { /* it opens engines of its own, of two parts */
            test_page_size(state);
        }
        drive_close(&d);
    }
    d = other;
    model = before;
}

static void test_deepseek(void **state)
{
    all_of("../shared/models/shakespeare-deepseek-8m", state);
}

static void test_deepseek_v2(void **state)
{
    all_of("tests/golden/models/tiny-deepseek-v2-groups", state);
}

static void test_deepseek_v3(void **state)
{
    all_of("tests/golden/models/tiny-deepseek-v3", state);
}

/* Latents that were rounded to e4m3 while they were stored. */
static void test_fp8_latents(void **state)
{
    drive_kv_dtype = "fp8";
    test_deepseek_v2(state);
    test_deepseek_v3(state);
    test_deepseek(state); /* the last one: it skips where the model is missing */
    drive_kv_dtype = NULL;
}

/* With the MTP layer: the model's own tokens are the same, bit for bit. */
static void test_mtp(void **state)
{
    static const char *const path = "tests/golden/models/tiny-mtp";
    static struct bt_engine_out plain[N_NEW];
    need_exact();
    drive_kv_dtype = NULL; /* of a test that was skipped */
    struct drive other = d;
    const char *before = model;
    model = path;
    open_and_expect("bf16-mlp");
    memcpy(plain, expect, sizeof(plain));
    drive_close(&d);
    d = other;
    model = before;
    drive_mtp = true;
    all_of(path, state); /* leaves what an engine with bf16-mlp has said */
    drive_mtp = false;
    for (uint32_t i = 0; i < N_NEW; i++) {
        same(&plain[i], &expect[i], i);
    }
}

static void test_qwen3_moe(void **state)
{
    drive_kv_dtype = NULL; /* of a test that was skipped */
    all_of("tests/golden/models/tiny-qwen3-moe", state);
}

static void test_gpt2(void **state)
{
    all_of("tests/golden/models/tiny-gpt2", state);
}

/* Other models that the cuda engine takes. */
static void test_draft(void **state)
{
    all_of("deploy/models/shakespeare-draft-1m", state);
}

static void test_gpu_experts(void **state)
{
    all_of("tests/golden/models/gpu-qwen3-moe", state);
    all_of("tests/golden/models/gpu-mixtral", state);
}

/* Latent attention and experts; more tokens than two segments of attention's sums. */
#define N_LONG 2600
static void test_gpu_long(void **state)
{
    need_exact();
    (void)state;
    static const uint32_t chunks[] = {2048, 999, 129, 64};
    const struct bt_engine_params p = drive_greedy(20);
    static uint32_t text[N_LONG];
    static struct bt_engine_out want[N_NEW];
    for (uint32_t i = 0; i < N_LONG; i++) {
        text[i] = prompt[i % 8][i % N_PROMPT] % d.info->vocab;
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(chunks); i++) {
        d.next_page = 0;
        drive_slot(&d, 5, &p, text, N_LONG, N_NEW);
        struct bt_engine_out o = drive_prefill(&d, 5, text, 0, N_LONG, chunks[i]);
        for (uint32_t k = 0; k < N_NEW; k++) {
            want[k] = i ? want[k] : o;
            same(&want[k], &o, k);
            if (k + 1 < N_NEW) {
                o = drive_decode(&d, 5);
            }
        }
        drive_slot_close(&d, 5);
    }
}

static void test_gpu_latents(void **state)
{
    static const char *const path = "tests/golden/models/gpu-deepseek-v2";
    const uint32_t before = page_tokens;
    struct drive other = d;
    const char *model_before = model;
    page_tokens = 64;
    all_of(path, state);
    model = path;
    open_and_expect("split");
    test_gpu_long(state);
    drive_close(&d);
    d = other;
    model = model_before;
    page_tokens = before;
}

/* The tests of every exact engine. */
#define OF_ANY_ENGINE                                                                              \
    cmocka_unit_test(test_chunks), cmocka_unit_test(test_neighbours),                              \
        cmocka_unit_test(test_mixed), cmocka_unit_test(test_hand_off),                             \
        cmocka_unit_test(test_prefix), cmocka_unit_test(test_partial_block),                       \
        cmocka_unit_test(test_page_size), cmocka_unit_test(test_seeded),                           \
        cmocka_unit_test(test_prompt_logprobs), cmocka_unit_test(test_prompt_logprobs_end),        \
        cmocka_unit_test(test_fork)

static int on_gpu(void)
{
    const struct CMUnitTest tests[] = {
        OF_ANY_ENGINE,
        cmocka_unit_test(test_draft),
        cmocka_unit_test(test_gpu_long),
        cmocka_unit_test(test_gpu_experts),
        cmocka_unit_test(test_gpu_latents),
    };
    drive_deterministic = true;
    return cmocka_run_group_tests(tests, setup, teardown);
}

int main(void)
{
    if (getenv("BT_EXACT_ENGINE")) {
        engine = getenv("BT_EXACT_ENGINE");
        return on_gpu();
    }
    const struct CMUnitTest tests[] = {
        OF_ANY_ENGINE,
        cmocka_unit_test(test_drafts),
        cmocka_unit_test(test_window),
        cmocka_unit_test(test_bad_calls),
        cmocka_unit_test(test_null_engine),
        cmocka_unit_test(test_bf16_mlp),
        cmocka_unit_test(test_deepseek),
        cmocka_unit_test(test_deepseek_v2),
        cmocka_unit_test(test_deepseek_v3),
        cmocka_unit_test(test_fp8_latents),
        cmocka_unit_test(test_mtp),
        cmocka_unit_test(test_qwen3_moe),
        cmocka_unit_test(test_gpt2),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
