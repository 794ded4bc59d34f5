/* make check-gpu: the CUDA engine through engine.h: batches against single sequences, chunks
 * against whole prompts, prompts and single tokens in one step, draws with masks and ahead of the
 * host, KV through slab and back; for each kind of model that the engine computes differently.
 * Logits of different batch sizes may differ in their last bits, so tokens are compared up to
 * near-ties. */
#include "tests/golden/drive.h"

#include <math.h>
#include <unistd.h>

#include "common/conf/conf.h"

/* Leaves the long ones out, where each step is slow. */
#ifndef BRIEF
#define BRIEF 0
#endif
/* Leaves the large model out. */
#ifndef ON_HOST
#define ON_HOST 0
#endif

/* A kind of model: trained (text NULL, files in dir) or with random weights. The latter lead by
 * less, so their texts go apart at more near-ties. */
struct kind {
    const char *name, *dir, *text, *kv_dtype;
    uint32_t page_tokens;
    bool hopper; /* there are kernels for Hopper alone */
    bool deterministic;
    bool experts; /* a rounding may choose another one, which moves logprobs further */
};

#define DEEPSEEK                                                                                   \
    "\"vocab_size\":2048,\"hidden_size\":256,\"intermediate_size\":512,\"moe_intermediate_size\":" \
    "128,\"n_routed_experts\":8,\"num_experts_per_tok\":2,\"n_shared_experts\":1,"                 \
    "\"num_hidden_layers\":2,\"max_position_embeddings\":768,\"kv_lora_rank\":512,"                \
    "\"qk_nope_head_dim\":128,\"qk_rope_head_dim\":64,\"v_head_dim\":128,\"rms_norm_eps\":1e-6,"   \
    "\"bos_token_id\":0,\"eos_token_id\":1,\"hidden_act\":\"silu\","

static const struct kind llama = {
    .name = "llama", .dir = "deploy/models/shakespeare-llama-6m", .page_tokens = 16};
static const struct kind llama_fp8 = {.name = "llama, fp8 KV",
                                      .dir = "deploy/models/shakespeare-llama-6m",
                                      .kv_dtype = "fp8",
                                      .page_tokens = 16};
/* Here every token must be the same; test_engine_exact compares bits. */
static const struct kind llama_deterministic = {.name = "llama, deterministic",
                                                .dir = "deploy/models/shakespeare-llama-6m",
                                                .page_tokens = 16,
                                                .hopper = true,
                                                .deterministic = true};
/* Latent attention, queries by two matrices, an odd number of heads. */
#define LATENT                                                                                     \
    "{\"architectures\":[\"DeepseekV3ForCausalLM\"]," DEEPSEEK                                     \
    "\"num_attention_heads\":3,\"q_lora_rank\":192,\"first_k_dense_replace\":2,"                   \
    "\"n_group\":1,\"topk_group\":1,\"norm_topk_prob\":true,\"routed_scaling_factor\":1.0}"
static const struct kind latent = {
    .name = "latent attention", .text = LATENT, .page_tokens = 64, .hopper = true};
static const struct kind latent_fp8 = {.name = "latent attention, fp8 KV",
                                       .text = LATENT,
                                       .kv_dtype = "fp8",
                                       .page_tokens = 64,
                                       .hopper = true};
/* The same with queries by one matrix and YaRN. */
static const struct kind latent_yarn = {
    .name = "latent attention, YaRN",
    .text =
        "{\"architectures\":[\"DeepseekV2ForCausalLM\"]," DEEPSEEK
        "\"num_attention_heads\":16,\"q_lora_rank\":null,\"first_k_dense_replace\":2,"
        "\"topk_method\":\"greedy\",\"norm_topk_prob\":false,\"rope_scaling\":{\"type\":\"yarn\","
        "\"factor\":40,\"mscale\":0.707,\"mscale_all_dim\":0.707,"
        "\"original_max_position_embeddings\":64}}",
    .page_tokens = 64,
    .hopper = true};

/* Latent attention and experts: a trained model that lies beside the repository. With random
 * weights there is no telling: a rounding sends a token to another expert, and its text goes apart.
 */
static const struct kind deepseek = {.name = "latent attention, experts",
                                     .dir = "../shared/models/shakespeare-deepseek-8m",
                                     .page_tokens = 64,
                                     .hopper = true,
                                     .experts = true};
static const struct kind deepseek_fp8 = {.name = "latent attention, experts, fp8 KV",
                                         .dir = "../shared/models/shakespeare-deepseek-8m",
                                         .kv_dtype = "fp8",
                                         .page_tokens = 64,
                                         .hopper = true,
                                         .experts = true};

static struct drive d;
static const struct kind *kind;

static void fill(uint32_t *t, uint32_t n, uint32_t seed)
{
    for (uint32_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        t[i] = 3 + (seed >> 12) % 2000;
    }
}

/* Greedy tokens of one sequence and how far each led, alone in its batch. */
static float alone_logprob[64]; /* of the last call's tokens */
static void alone(const uint32_t *prompt, uint32_t n, uint32_t chunk, uint32_t *out, float *gap,
                  uint32_t steps)
{
    const struct bt_engine_params p = drive_greedy(2);
    drive_slot(&d, 31, &p, prompt, n, steps);
    struct bt_engine_out o = drive_prefill(&d, 31, prompt, 0, n, chunk);
    for (uint32_t i = 0; i < steps; i++) {
        assert_false(o.bad);
        out[i] = o.token;
        alone_logprob[i] = o.logprob;
        gap[i] = o.top_logprob[0] - o.top_logprob[1];
        o = i + 1 < steps ? drive_decode(&d, 31) : o;
    }
    drive_slot_close(&d, 31);
}

/* The largest lead of a token that rounding may turn round. */
static float near_tie(void)
{
    return kind->kv_dtype || kind->experts ? 1.5f : 0.3f;
}

/* The same up to the first near-tie, after which texts may go apart: each of two logprobs may be
 * off by 0.15 (fp8 KV and experts: 0.75). Returns how far. */
static uint32_t same(const uint32_t *a, const uint32_t *b, const float *gap, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        if (a[i] != b[i]) {
            if (gap[i] > near_tie() || kind->deterministic) {
                fail_msg("token %u: %u and %u, gap %f", i, a[i], b[i], gap[i]);
            }
            return i;
        }
    }
    return n;
}

static void test_chunks(void **state)
{
    (void)state;
    if (BRIEF) {
        skip();
    }
    enum { N = ON_HOST ? 330 : 700, STEPS = ON_HOST ? 12 : 24 };
    uint32_t prompt[N], whole[STEPS], parts[STEPS], tiny[STEPS];
    float gap[STEPS], other[STEPS];
    fill(prompt, N, 1);
    d.next_page = 0;
    alone(prompt, N, 2048, whole, gap, STEPS);
    alone(prompt, N, 100, parts, other, STEPS);
    same(whole, parts, gap, STEPS);
    alone(prompt, 40, 2048, whole, gap, STEPS);
    alone(prompt, 40, 1, tiny, other, STEPS); /* single tokens: the decode kernel alone */
    same(whole, tiny, gap, STEPS);
}

/* Three prompts and single tokens in one step: the same as alone. Together the prompts are longer
 * than a sequence may be. */
static void test_mixed(void **state)
{
    (void)state;
    enum { SEQS = 6, PROMPTS = 3, LEN = ON_HOST ? 180 : 300, STEPS = 8 };
    static uint32_t prompt[SEQS][LEN], want[SEQS][STEPS];
    static float gap[SEQS][STEPS];
    struct bt_engine_row rows[SEQS];
    struct bt_engine_out out[SEQS];
    const struct bt_engine_params p = drive_greedy(2);
    for (uint32_t s = 0; s < SEQS; s++) {
        d.next_page = 0;
        fill(prompt[s], LEN, s + 70);
        alone(prompt[s], LEN - s * 11, 2048, want[s], gap[s], STEPS);
    }
    d.next_page = 0;
    for (uint32_t s = 0; s < SEQS; s++) { /* prompts stand between the single tokens */
        uint32_t n = LEN - s * 11;
        bool whole = s % 2 == 0;
        drive_slot(&d, s, &p, prompt[s], n, STEPS);
        if (!whole) {
            drive_prefill(&d, s, prompt[s], 0, n - 1, 2048);
        }
        rows[s] = (struct bt_engine_row){.slot = s,
                                         .pos = whole ? 0 : n - 1,
                                         .n = whole ? n : 1,
                                         .tokens = whole ? prompt[s] : &prompt[s][n - 1],
                                         .flags = BT_ROW_SAMPLE};
    }
    for (uint32_t i = 0; i < STEPS; i++) {
        assert_int_equal(drive_step(&d, rows, SEQS, out), SEQS);
        for (uint32_t s = 0; s < SEQS; s++) {
            assert_false(out[s].bad);
            if (out[s].token != want[s][i] && gap[s][i] > near_tie()) {
                fail_msg("sequence %u, token %u: %u and %u, gap %f", s, i, out[s].token, want[s][i],
                         gap[s][i]);
            }
            assert_int_equal(d.vt->slot_accept(d.e, s, want[s][i]), BT_OK);
            rows[s] = (struct bt_engine_row){.slot = s,
                                             .pos = LEN - s * 11 + i,
                                             .n = 1,
                                             .tokens = &want[s][i],
                                             .flags = BT_ROW_SAMPLE};
        }
    }
    for (uint32_t s = 0; s < SEQS; s++) {
        drive_slot_close(&d, s);
    }
}

/* Steps of many sequences of different lengths, drawn on the device, launched ahead of results. */
static void test_batch(void **state)
{
    (void)state;
    if (BRIEF) {
        skip();
    }
    /* On a host the lengths still cross pages of 64 tokens and items of prompts. */
    enum { SEQS = 20, STEPS = ON_HOST ? 12 : 24, MORE = ON_HOST ? 5 : 20, LEN = SEQS * MORE };
    static uint32_t prompt[SEQS][LEN], want[SEQS][STEPS], got[SEQS][STEPS];
    static float gap[SEQS][STEPS], lp[SEQS][STEPS], other[SEQS][STEPS];
    struct bt_engine_row rows[SEQS];
    const struct bt_engine_params p = drive_greedy(0);
    static uint32_t first[SEQS][STEPS];
    uint32_t together = 0;
    d.next_page = 0;
    for (uint32_t s = 0; s < SEQS; s++) {
        uint32_t n = 1 + s * MORE;
        fill(prompt[s], n, s + 7);
        alone(prompt[s], n, 2048, want[s], gap[s], STEPS);
        memcpy(lp[s], alone_logprob, sizeof(lp[s]));
        d.next_page = 0;
    }
    for (int round = 0; round < 2; round++) { /* the same launches give the same tokens */
        d.next_page = 0;
        for (uint32_t s = 0; s < SEQS; s++) {
            uint32_t n = 1 + s * MORE;
            drive_slot(&d, s, &p, prompt[s], n, STEPS);
            got[s][0] = drive_prefill(&d, s, prompt[s], 0, n, 2048).token;
            rows[s] = (struct bt_engine_row){
                .slot = s, .pos = BT_ENGINE_POS_NEXT, .n = 1, .flags = BT_ROW_SAMPLE};
        }
        bt_engine_ticket_t last = 0, samples[STEPS];
        for (uint32_t i = 1; i < STEPS; i++) { /* nothing is polled before all is launched */
            const struct bt_engine_batch b = {.n_rows = SEQS, .rows = rows};
            assert_int_equal(d.vt->forward(d.e, &b, &last), BT_OK);
            assert_int_equal(d.vt->sample(d.e, last, NULL, &samples[i]), BT_OK);
        }
        for (uint32_t i = 1; i < STEPS; i++) {
            struct bt_engine_event ev = drive_wait(&d, samples[i]);
            assert_int_equal(ev.status, BT_OK);
            assert_int_equal(ev.n_out, SEQS);
            for (uint32_t s = 0; s < SEQS; s++) {
                assert_int_equal(ev.out[s].slot, s);
                assert_int_equal(ev.out[s].pos, 1 + s * MORE + i);
                assert_false(ev.out[s].bad);
                got[s][i] = ev.out[s].token;
                other[s][i] = ev.out[s].logprob;
            }
            d.vt->release(d.e, samples[i]);
        }
        for (uint32_t s = 0; s < SEQS; s++) {
            drive_slot_close(&d, s);
        }
        if (round) {
            assert_memory_equal(first, got, sizeof(got));
        }
        memcpy(first, got, sizeof(got));
    }
    float worst = 0, sum = 0;
    uint32_t n = 0;
    for (uint32_t s = 0; s < SEQS; s++) {
        for (uint32_t i = 1; i < STEPS && want[s][i] == got[s][i]; i++) {
            float diff = fabsf(lp[s][i] - other[s][i]);
            worst = fmaxf(worst, diff);
            sum += diff;
            n++;
        }
    }
    printf("# logprobs alone and in a batch differ by at most %.3f, in the mean %.4f\n", worst,
           sum / (float)n);
    assert_true(worst < (kind->kv_dtype ? 1.5f : 0.25f));
    assert_true(sum / (float)n < (kind->kv_dtype ? 0.1f : 0.03f));
    for (uint32_t s = 0; s < SEQS; s++) {
        together += same(want[s], got[s], gap[s], STEPS);
    }
    printf("# %u of %u tokens before near-ties\n", together, SEQS * STEPS);
    assert_true(together > SEQS * STEPS * (kind->kv_dtype || kind->text ? 1 : 3) / 4);
}

/* A mask that allows all changes nothing, whoever the neighbours are. */
static void test_draws(void **state)
{
    (void)state;
    enum { SEQS = 16, STEPS = 20, N = 30 };
    uint32_t prompt[N], mask[SEQS * 64], differ = 0;
    memset(mask, 0xff, sizeof(mask));
    fill(prompt, N, 99);
    static struct bt_engine_out outs[2][SEQS];
    struct bt_engine_row rows[SEQS];
    d.next_page = 0;
    for (uint32_t s = 0; s < 2 * SEQS - 1; s++) { /* slots s and s + SEQS are twins, but the last */
        struct bt_engine_params p = drive_greedy(0);
        p.temperature = 0.5f + 0.1f * (float)(s % SEQS);
        p.seed = 1000 + s % SEQS;
        p.choice = s % SEQS % 3;
        drive_slot(&d, s, &p, prompt, N, STEPS + 2);
    }
    for (uint32_t i = 0; i < STEPS; i++) {
        for (int side = 0; side < 2; side++) {
            uint32_t n = side ? SEQS - 1 : SEQS;
            for (uint32_t s = 0; s < n; s++) { /* both read the device side's tokens */
                rows[s] = (struct bt_engine_row){.slot = s + (side ? SEQS : 0),
                                                 .pos = i ? BT_ENGINE_POS_NEXT : 0,
                                                 .n = i ? 1 : N,
                                                 .tokens = i ? &outs[0][s].token : prompt,
                                                 .flags = BT_ROW_SAMPLE};
            }
            struct bt_engine_row own[SEQS];
            uint32_t tokens[SEQS];
            for (uint32_t s = 0; s < n; s++) {
                static uint32_t before[SEQS];
                before[s] = side == 0 ? outs[0][s].token : before[s];
                tokens[s] = before[s];
                own[s] = rows[s];
                own[s].tokens = i ? &tokens[s] : prompt;
            }
            const struct bt_engine_batch b = {.n_rows = n, .rows = own};
            bt_engine_ticket_t f, t;
            assert_int_equal(d.vt->forward(d.e, &b, &f), BT_OK);
            assert_int_equal(d.vt->sample(d.e, f, side ? mask : NULL, &t), BT_OK);
            struct bt_engine_event ev = drive_wait(&d, t);
            assert_int_equal(ev.n_out, n);
            memcpy(outs[side], ev.out, n * sizeof(ev.out[0]));
            d.vt->release(d.e, t);
        }
        for (uint32_t s = 0; s < SEQS - 1; s++) {
            differ += outs[0][s].token != outs[1][s].token;
            if (outs[0][s].token == outs[1][s].token) {
                assert_true(fabsf(outs[0][s].logprob - outs[1][s].logprob) < 0.01f);
            }
        }
    }
    for (uint32_t s = 0; s < 2 * SEQS - 1; s++) {
        drive_slot_close(&d, s);
    }
    printf("# %u of %u draws differ with a mask and without\n", differ, STEPS * (SEQS - 1));
    assert_true(differ <= STEPS * (SEQS - 1) / 50); /* near-ties of batches */
}

/* Sequences with penalties, bias, a minimum length and truncation, each step launched before the
 * last one's tokens are known: the same tokens as step by step. What the device counts of its own
 * draws shows here. */
static void test_ahead(void **state)
{
    (void)state;
    enum { SEQS = 8, STEPS = 40, N = 30 };
    static const uint32_t ids[] = {5, 9, 40};
    static const float bias[] = {4, -3, 2};
    uint32_t prompt[N], tokens[2][STEPS][SEQS];
    fill(prompt, N, 7);
    for (int ahead = 0; ahead < 2; ahead++) {
        struct bt_engine_row rows[SEQS];
        bt_engine_ticket_t f, t[STEPS];
        d.next_page = 0;
        for (uint32_t s = 0; s < SEQS; s++) {
            struct bt_engine_params p = drive_greedy(s % 3 ? -1 : 3);
            p.temperature = s % 4 ? 0.9f : 0;
            p.top_p = s % 2 ? 0.9f : 1;
            p.top_k = s == 5 ? 40 : 0;
            p.min_p = s == 6 ? 0.05f : 0;
            p.repetition_penalty = s > 1 ? 1.3f : 1;
            p.frequency_penalty = s > 3 ? 0.4f : 0;
            p.presence_penalty = s > 4 ? 0.6f : 0;
            p.seed = 70 + s;
            p.min_new = STEPS / 2;
            p.n_eos = 1;
            p.eos[0] = 12;
            p.n_bias = s % 2 ? BT_ARRAY_LEN(ids) : 0;
            p.bias_ids = ids;
            p.bias = bias;
            drive_slot(&d, s, &p, prompt, N, STEPS + 2);
        }
        for (uint32_t i = 0; i < STEPS + (uint32_t)ahead; i++) {
            for (uint32_t s = 0; s < SEQS && i < STEPS; s++) {
                rows[s] = (struct bt_engine_row){.slot = s,
                                                 .pos = i ? BT_ENGINE_POS_NEXT : 0,
                                                 .n = i ? 1 : N,
                                                 .tokens = i ? NULL : prompt,
                                                 .flags = BT_ROW_SAMPLE};
            }
            const struct bt_engine_batch b = {.n_rows = SEQS, .rows = rows};
            if (i < STEPS) {
                assert_int_equal(d.vt->forward(d.e, &b, &f), BT_OK);
                assert_int_equal(d.vt->sample(d.e, f, NULL, &t[i]), BT_OK);
            }
            if (ahead && i == 0) {
                continue;
            }
            uint32_t of = i - (uint32_t)ahead;
            struct bt_engine_event ev = drive_wait(&d, t[of]);
            assert_int_equal(ev.n_out, SEQS);
            for (uint32_t s = 0; s < SEQS; s++) {
                assert_false(ev.out[s].bad);
                assert_int_equal(ev.out[s].n_top, s % 3 ? 0 : 3);
                tokens[ahead][of][s] = ev.out[s].token;
                assert_true(of >= STEPS / 2 || ev.out[s].token != 12);
            }
            d.vt->release(d.e, t[of]);
        }
        for (uint32_t s = 0; s < SEQS; s++) {
            drive_slot_close(&d, s);
        }
    }
    assert_memory_equal(tokens[0], tokens[1], sizeof(tokens[0]));
}

/* A row with drafts: `from` is the last token of its sequence, the drafts are the next `n` of
 * right[], but the one number `wrong`. text: room for the row. */
static struct bt_engine_row drafts_row(uint32_t slot, uint32_t from, const uint32_t *right,
                                       uint32_t n, uint32_t wrong, uint32_t *text)
{
    text[0] = from;
    memcpy(text + 1, right, n * sizeof(*text));
    if (wrong < n) {
        text[1 + wrong] = (text[1 + wrong] + 1) % d.info->vocab;
    }
    return (struct bt_engine_row){.slot = slot,
                                  .pos = BT_ENGINE_POS_NEXT,
                                  .n = n + 1,
                                  .tokens = text,
                                  .flags = BT_ROW_SAMPLE,
                                  .n_draft = n};
}

/* Looks at a row's results, which begin at `o` for position `pos`: drafts are accepted as long as
 * they are the token drawn. Returns the number of results. */
static uint32_t run_of(const struct bt_engine_row *row, const struct bt_engine_out *o, uint32_t pos)
{
    for (uint32_t i = 0;; i++) {
        assert_int_equal(o[i].slot, row->slot);
        assert_int_equal(o[i].pos, pos + i);
        assert_false(o[i].bad);
        assert_int_equal(o[i].more, i < row->n_draft && o[i].token == row->tokens[1 + i]);
        if (!o[i].more) {
            return i + 1;
        }
    }
}

/* Sequences with drafts, right and wrong ones, another number in each row and step, at times beside
 * a prompt: the tokens are those of single rows. */
static void test_drafts(void **state)
{
    (void)state;
    enum { SEQS = 6, LEN = 70, MORE = 31, STEPS = ON_HOST ? 26 : 60, MOST = 10, CHUNK = 40 };
    static uint32_t prompt[SEQS + 1][LEN + SEQS * MORE], want[SEQS][STEPS], known[SEQS];
    static uint32_t text[SEQS][1 + MOST];
    static float gap[SEQS][STEPS];
    struct bt_engine_row rows[SEQS + 1];
    struct bt_engine_out out[SEQS * (1 + MOST)];
    const struct bt_engine_params p = drive_greedy(2);
    uint32_t checked = 0, accepted = 0, live = SEQS;
    for (uint32_t s = 0; s < SEQS; s++) {
        d.next_page = 0;
        fill(prompt[s], LEN + s * MORE, s + 40);
        alone(prompt[s], LEN + s * MORE, 2048, want[s], gap[s], STEPS);
    }
    d.next_page = 0;
    for (uint32_t s = 0; s < SEQS; s++) {
        uint32_t n = LEN + s * MORE;
        drive_slot(&d, s, &p, prompt[s], n, STEPS + MOST);
        uint32_t first = drive_prefill(&d, s, prompt[s], 0, n, 2048).token;
        known[s] = same(want[s], &first, gap[s], 1);
        live -= known[s] == 0;
    }
    fill(prompt[SEQS], CHUNK, 4711);
    drive_slot(&d, SEQS, &p, prompt[SEQS], CHUNK, 8);
    for (uint32_t turn = 0; live > 0; turn++) {
        uint32_t of[SEQS], n = 0, at = 0;
        for (uint32_t s = 0; s < SEQS; s++) {
            if (known[s] > 0 && known[s] < STEPS) {
                uint32_t room = STEPS - known[s] - 1,
                         k = BT_MIN((3 * s + 5 * turn) % (MOST + 1), room);
                of[n] = s;
                rows[n++] = drafts_row(s, want[s][known[s] - 1], want[s] + known[s], k,
                                       (turn + s) % (MOST + 2), text[s]);
            }
        }
        if (turn % 3 == 2) {
            rows[n] = (struct bt_engine_row){.slot = SEQS, .n = CHUNK, .tokens = prompt[SEQS]};
        }
        uint32_t n_out = drive_step(&d, rows, n + (turn % 3 == 2), out);
        live = 0;
        for (uint32_t i = 0; i < n; i++) {
            uint32_t s = of[i], m = run_of(&rows[i], out + at, LEN + s * MORE + known[s]), k = 0;
            while (k < m && out[at + k].token == want[s][known[s] + k]) {
                k++;
            }
            if (k < m && (gap[s][known[s] + k] > near_tie() || kind->deterministic)) {
                fail_msg("sequence %u, token %u: %u and %u, gap %f", s, known[s] + k,
                         want[s][known[s] + k], out[at + k].token, gap[s][known[s] + k]);
            }
            checked += k;
            accepted += m - 1;
            known[s] = k < m ? 0 : known[s] + m; /* 0: the texts went apart */
            live += known[s] > 0 && known[s] < STEPS;
            at += m;
        }
        assert_int_equal(at, n_out);
    }
    for (uint32_t s = 0; s <= SEQS; s++) {
        drive_slot_close(&d, s);
    }
    printf("# %u of %u tokens before near-ties, %u of them drafts\n", checked, SEQS * (STEPS - 1),
           accepted);
    assert_true(checked > SEQS * STEPS / (kind->kv_dtype || kind->text || kind->experts ? 6 : 2));
    assert_true(accepted > checked / 3);
}

/* The mask of a sequence's position, and a step with masks. */
static bool allows(uint32_t s, uint32_t pos, uint32_t id)
{
    return (id * 7 + id / 11 + pos + s) % 4 != 0;
}
static void put_mask(uint32_t *mask, uint32_t s, uint32_t pos)
{
    for (uint32_t i = 0; i < BT_DIV_UP(d.info->vocab, 32u) * 32; i++) {
        uint32_t bit = allows(s, pos, i);
        mask[i / 32] = (mask[i / 32] & ~(1u << i % 32)) | bit << i % 32;
    }
}
static void step_masked(const struct bt_engine_row *rows, uint32_t n, const uint32_t *mask,
                        struct bt_engine_out *out, uint32_t *n_out_p)
{
    const struct bt_engine_batch b = {.n_rows = n, .rows = rows};
    bt_engine_ticket_t f, t;
    assert_int_equal(d.vt->forward(d.e, &b, &f), BT_OK);
    assert_int_equal(d.vt->sample(d.e, f, mask, &t), BT_OK);
    struct bt_engine_event ev = drive_wait(&d, t);
    assert_int_equal(ev.status, BT_OK);
    memcpy(out, ev.out, ev.n_out * sizeof(*out));
    *n_out_p = ev.n_out;
    d.vt->release(d.e, f);
    d.vt->release(d.e, t);
}

/* Draws with every parameter and a mask for each position, with drafts and without: the same tokens
 * and logprobs, which only a deterministic engine promises. */
static void test_drafts_drawn(void **state)
{
    (void)state;
    if (!kind->deterministic) {
        skip();
    }
    enum { SEQS = 5, STEPS = 30, N = 30, MOST = 7, MORE = STEPS + MOST + 1, WORDS = 4096 };
    static const uint32_t ids[] = {5, 9, 40};
    static const float bias[] = {4, -3, 2};
    static struct bt_engine_out want[SEQS][MORE], out[SEQS * (1 + MOST)];
    static uint32_t prompt[N], mask[SEQS * (1 + MOST) * WORDS], text[SEQS][1 + MOST];
    struct bt_engine_row rows[SEQS];
    const uint32_t words = BT_DIV_UP(d.info->vocab, 32u);
    assert_true(words <= WORDS);
    fill(prompt, N, 8);
    for (int drafts = 0; drafts < 2; drafts++) {
        uint32_t known[SEQS] = {0}, behind = SEQS, right[MOST];
        d.next_page = 0;
        for (uint32_t s = 0; s < SEQS; s++) {
            struct bt_engine_params p = drive_greedy(s % 2 ? -1 : 3);
            p.temperature = s % 4 ? 0.9f : 0;
            p.top_p = s % 2 ? 0.9f : 1;
            p.repetition_penalty = s > 0 ? 1.3f : 1;
            p.frequency_penalty = s > 1 ? 0.4f : 0;
            p.presence_penalty = s > 2 ? 0.6f : 0;
            p.seed = 70 + s;
            p.min_new = STEPS / 2;
            p.n_eos = 1;
            p.eos[0] = 12;
            p.n_bias = s % 2 ? BT_ARRAY_LEN(ids) : 0;
            p.bias_ids = ids;
            p.bias = bias;
            drive_slot(&d, s, &p, prompt, N, MORE + 1);
        }
        for (uint32_t turn = 0; behind > 0; turn++) {
            uint32_t n_mask = 0, n_out, n_rows = 0, at = 0, of[SEQS];
            for (uint32_t s = 0; s < SEQS; s++) {
                uint32_t n = known[s], k = drafts && n > 0 ? (2 * s + 3 * turn) % (MOST + 1) : 0;
                if (n >= MORE - (drafts ? MOST + 1 : 0)) {
                    continue;
                }
                for (uint32_t i = 0; i < k; i++) {
                    right[i] = want[s][n + i].token;
                }
                rows[n_rows] = drafts_row(s, n ? want[s][n - 1].token : 0, right, k,
                                          (turn + s) % (MOST + 1), text[s]);
                if (n == 0) {
                    rows[n_rows] = (struct bt_engine_row){
                        .slot = s, .n = N, .tokens = prompt, .flags = BT_ROW_SAMPLE};
                }
                of[n_rows++] = s;
                for (uint32_t i = 0; i <= k; i++) {
                    put_mask(mask + (size_t)n_mask++ * words, s, n + i);
                }
            }
            step_masked(rows, n_rows, mask, out, &n_out);
            behind = 0;
            for (uint32_t r = 0; r < n_rows; r++) {
                uint32_t s = of[r], m = run_of(&rows[r], out + at, N + known[s]);
                for (uint32_t i = 0; i < m; i++, at++, known[s]++) {
                    struct bt_engine_out *w = &want[s][known[s]];
                    assert_true(allows(s, known[s], out[at].token));
                    assert_true(known[s] >= STEPS / 2 || out[at].token != 12);
                    if (!drafts) {
                        *w = out[at];
                        continue;
                    }
                    assert_int_equal(out[at].token, w->token);
                    assert_int_equal(out[at].n_top, w->n_top);
                    assert_memory_equal(&out[at].logprob, &w->logprob, sizeof(w->logprob));
                }
                behind += known[s] < MORE - (drafts ? MOST + 1 : 0);
            }
            assert_int_equal(at, n_out);
        }
        for (uint32_t s = 0; s < SEQS; s++) {
            drive_slot_close(&d, s);
        }
    }
}

/* Rows and steps with more drafts than the engine takes are refused, and nothing happens to their
 * sequences. */
static void test_too_many_drafts(void **state)
{
    (void)state;
    enum { N = 20, MANY = 400 };
    static uint32_t text[MANY];
    struct bt_engine_row rows[32];
    const struct bt_engine_params p = drive_greedy(0);
    bt_engine_ticket_t f;
    fill(text, MANY, 3);
    d.next_page = 0;
    assert_in_range(d.info->max_drafts, 1, 31 * 16 - 1);
    for (uint32_t s = 0; s < 32; s++) {
        drive_slot(&d, s, &p, text, N, 40);
        rows[s] = (struct bt_engine_row){.slot = s,
                                         .pos = N - 1,
                                         .n = 32,
                                         .tokens = text,
                                         .flags = BT_ROW_SAMPLE,
                                         .n_draft = 31};
    }
    const struct bt_engine_batch all = {.n_rows = 32, .rows = rows},
                                 one = {.n_rows = 1, .rows = rows};
    assert_int_equal(d.vt->forward(d.e, &all, &f), BT_ERR_TOO_LARGE);
    rows[0].n = 33;
    rows[0].n_draft = 32;
    assert_int_equal(d.vt->forward(d.e, &one, &f), BT_ERR_TOO_LARGE);
    for (uint32_t s = 0; s < 32; s++) {
        drive_slot_close(&d, s);
    }
}

static void wait_ok(bt_engine_ticket_t t)
{
    assert_int_equal(drive_wait(&d, t).status, BT_OK);
    d.vt->release(d.e, t);
}

static _Atomic uint32_t bells;
static void ring(void *arg)
{
    (void)arg;
    bells++;
}

/* Prompt in chunks, each layer leaves for the slab as it is done; another sequence loads it into
 * other pages and goes on: it must continue as the first does. */
static void test_flow(void **state)
{
    (void)state;
    enum { N = 203, STEPS = 16, CHUNK = 64, BLOCKS_MAX = (N + 15) / 16 };
    const struct bt_engine_params p = drive_greedy(2);
    const uint32_t page = d.info->layout.page_tokens, layers = d.info->layout.n_layers;
    const uint32_t n_blocks = BT_DIV_UP(N, page);
    uint32_t prompt[N], want[STEPS], got[STEPS];
    float gap[STEPS];
    size_t bytes = d.info->layout.block_bytes;
    uint8_t *slab = aligned_alloc(4096, BT_ALIGN_UP(bytes * n_blocks, (size_t)4096));
    memset(slab, 0xff, bytes * n_blocks);
    bells = 0;
    d.vt->slab_open(d.e, slab, bytes * n_blocks); /* copies begin before all of it is pinned */
    bt_flow_word_t word = 0;
    struct bt_engine_block blocks[BLOCKS_MAX];
    uint32_t flow, load;
    fill(prompt, N, 5);
    d.next_page = 0;
    drive_slot(&d, 0, &p, prompt, N, STEPS);
    assert_int_equal(
        d.vt->flow_open(d.e, BT_ENGINE_STORE, BT_ENGINE_PRIO_LAND, &word, 7, ring, NULL, &flow),
        BT_OK);
    uint32_t pages = BT_DIV_UP(N + STEPS, page), items = BT_DIV_UP(N, CHUNK) * layers;
    for (uint32_t i = 0; i < n_blocks; i++) {
        blocks[i] = (struct bt_engine_block){.mem = slab + i * bytes,
                                             .page = pages - 1 - i, /* as drive_slot hands out */
                                             .toks = BT_MIN(page, N - i * page),
                                             .seq = i * page / CHUNK * layers};
    }
    assert_int_equal(d.vt->flow_add(d.e, flow, blocks, n_blocks), BT_OK);
    struct bt_engine_out o = {0};
    for (uint32_t at = 0, c = 0; at < N; at += CHUNK, c++) {
        const struct bt_engine_row row = {.slot = 0,
                                          .pos = at,
                                          .n = BT_MIN(CHUNK, N - at),
                                          .tokens = prompt + at,
                                          .flags = at + CHUNK >= N ? BT_ROW_SAMPLE : 0,
                                          .fire = {flow, c * layers}};
        drive_step(&d, &row, 1, &o);
    }
    bt_engine_ticket_t t;
    assert_int_equal(d.vt->flow_close(d.e, flow, false, &t), BT_OK);
    wait_ok(t);
    assert_int_equal(bt_flow_read(&word, 7), items);
    assert_int_equal(bells, items);
    uint8_t *tail = slab + (n_blocks - 1) * bytes;
    const struct bt_kv_group *g = &d.info->layout.groups[0];
    uint32_t row = bt_kv_row_bytes(g);
    for (uint32_t i = N % page * row; i < page * row; i++) { /* K of head 0, behind the text */
        assert_int_equal(tail[i], 0);
    }
    for (uint32_t i = 0; g->scale_off && i < page; i++) { /* and its scales */
        assert_true((tail[g->scale_off + i] == 0) == (i >= N % page));
    }
    want[0] = o.token;
    gap[0] = o.top_logprob[0] - o.top_logprob[1];
    for (uint32_t i = 1; i < STEPS; i++) {
        o = drive_decode(&d, 0);
        want[i] = o.token;
        gap[i] = o.top_logprob[0] - o.top_logprob[1];
    }
    /* The other side: the word lets items through one after another. */
    uint32_t first = d.next_page;
    drive_slot(&d, 1, &p, prompt, N, STEPS);
    for (uint32_t i = 0; i < n_blocks; i++) {
        blocks[i].page = first + pages - 1 - i;
        blocks[i].toks = page;
    }
    bt_flow_word_t open_word = bt_flow_pack(3, layers);
    assert_int_equal(
        d.vt->flow_open(d.e, BT_ENGINE_LOAD, BT_ENGINE_PRIO_LAND, &open_word, 3, NULL, NULL, &load),
        BT_OK);
    assert_int_equal(d.vt->flow_add(d.e, load, blocks, n_blocks), BT_OK);
    bt_engine_ticket_t part;
    assert_int_equal(d.vt->flow_release(d.e, load, layers, &part), BT_OK);
    assert_int_equal(d.vt->flow_release(d.e, load, items, &t), BT_OK);
    wait_ok(part);
    struct bt_engine_event none;
    assert_int_equal(d.vt->poll(d.e, &none, 1, 2000), 0); /* the rest is not there yet */
    bt_flow_raise(&open_word, 3, items);
    wait_ok(t);
    assert_int_equal(d.vt->slot_accept(d.e, 1, want[0]), BT_OK);
    got[0] = want[0];
    for (uint32_t i = 1; i < STEPS; i++) {
        const struct bt_engine_row next = {.slot = 1,
                                           .pos = N + i - 1,
                                           .n = 1,
                                           .flags = BT_ROW_SAMPLE,
                                           .wait = {load, items - layers}};
        assert_int_equal(drive_step(&d, &next, 1, &o), 1);
        got[i] = o.token;
    }
    assert_int_equal(same(want, got, gap, STEPS), STEPS); /* the same bytes of KV */
    assert_int_equal(d.vt->flow_close(d.e, load, false, &t), BT_OK);
    wait_ok(t);
    drive_slot_close(&d, 0);
    drive_slot_close(&d, 1);
    d.vt->slab_close(d.e, slab);
    free(slab);
}

static int setup(void **state)
{
    char dir[] = "/tmp/baton-kind-XXXXXX", path[64];
    (void)state;
    drive_kv_dtype = kind->kv_dtype;
    drive_deterministic = kind->deterministic;
    if (kind->text) {
        assert_non_null(mkdtemp(dir));
        snprintf(path, sizeof(path), "%s/config.json", dir);
        FILE *f = fopen(path, "w");
        assert_true(f && fputs(kind->text, f) >= 0 && fclose(f) == 0);
    }
    drive_open_as(&d, "cuda", kind->text ? dir : kind->dir, kind->text ? "dummy" : "auto",
                  kind->page_tokens);
    if (kind->text) {
        unlink(path);
        rmdir(dir);
    }
    printf("# %s on %s\n", kind->name, d.info->device);
    return 0;
}
static int teardown(void **state)
{
    (void)state;
    drive_close(&d);
    return 0;
}

static int run(const struct kind *k)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chunks), cmocka_unit_test(test_batch),
        cmocka_unit_test(test_mixed),  cmocka_unit_test(test_draws),
        cmocka_unit_test(test_ahead),  cmocka_unit_test(test_flow),
        cmocka_unit_test(test_drafts), cmocka_unit_test(test_too_many_drafts),
    };
    const struct CMUnitTest kv[] = {
        /* what the form of KV decides */
        cmocka_unit_test(test_chunks), cmocka_unit_test(test_batch),
        cmocka_unit_test(test_mixed),  cmocka_unit_test(test_flow),
        cmocka_unit_test(test_drafts), cmocka_unit_test(test_drafts_drawn),
    };
    kind = k;
    return k == &llama ? cmocka_run_group_tests_name(k->name, tests, setup, teardown)
                       : cmocka_run_group_tests_name(k->name, kv, setup, teardown);
}

int main(void)
{
    static const struct kind *const kinds[] = {&llama,    &llama_fp8,   &llama_deterministic,
                                               &latent,   &latent_fp8,  &latent_yarn,
                                               &deepseek, &deepseek_fp8};
    const char *ask = bt_conf_env("BATON_CUDA_PORTABLE");
    bool portable = ask && strcmp(ask, "1") == 0;
    int failed = 0;
    for (size_t i = 0; i < BT_ARRAY_LEN(kinds); i++) {
        const struct kind *k = kinds[i];
        bool there = k->text || access(k->dir, F_OK) == 0;
        if (!there || (ON_HOST && (k == &deepseek || k == &deepseek_fp8)) ||
            (portable && k->hopper)) {
            printf("# left out: %s\n", k->name);
        } else {
            failed += run(k);
        }
    }
    return failed;
}
