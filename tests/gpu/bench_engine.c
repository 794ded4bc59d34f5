/* make bench-gpu: the CUDA engine at the shape of Llama-3-8B, or of a config.json, with random
 * weights, through engine.h:
 * decode steps (host to host, drawn on the device, launched one ahead of the results), prompts with
 * and without their KV streaming to the slab, many prompts at once cut as the prefill worker cuts
 * them, decode steps with prompt tokens among them, with drafts, with masks. Floors: bytes of
 * weights and KV over 4.3 TB/s, products at 790 TFLOP/s. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/batch/batch.h"
#include "common/engine/engine.h"
#include "common/engine/model_config.h"

#define PAGE  64
#define CHUNK 8192
#define SLOTS 400
#define FLOW  512 /* tokens of a flow's chunk: kv.flow_chunk_tokens */

static const char config[] =
    "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"hidden_size\":4096,"
    "\"intermediate_size\":14336,\"num_hidden_layers\":32,\"num_attention_heads\":32,"
    "\"num_key_value_heads\":8,\"head_dim\":128,\"vocab_size\":128256,\"rms_norm_eps\":1e-5,"
    "\"rope_theta\":500000.0,\"max_position_embeddings\":40960,\"tie_word_embeddings\":false,"
    "\"hidden_act\":\"silu\",\"bos_token_id\":128000,\"eos_token_id\":128001,"
    "\"torch_dtype\":\"bfloat16\"}";

static const struct bt_engine_vtable *vt;
static struct bt_engine *e;
static const struct bt_engine_info *info;
static const char *engine_name = "cuda", *model_dir; /* NULL: the shape above, random weights */
static const char *config_file;                      /* NULL: the shape above */
static struct bt_model_config model;
static struct bt_model_size size;
static uint32_t n_pages = 10000;
static const char *kv_dtype = "f16", *quantize = "none";
static bool deterministic;
static double kv_token; /* bytes of a token */
static uint8_t *slab;
static size_t slab_bytes;

static void must(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "bench_engine: %s failed\n", what);
        exit(1);
    }
}

/* A directory with the config.json that random weights are for. */
static void put_config(char *dir)
{
    char path[64], text[16384];
    size_t n = sizeof(config) - 1;
    must(mkdtemp(dir) != NULL, "mkdtemp");
    snprintf(path, sizeof(path), "%s/config.json", dir);
    memcpy(text, config, n);
    if (config_file) {
        FILE *in = fopen(config_file, "r");
        must(in != NULL, config_file);
        n = fread(text, 1, sizeof(text), in);
        must(n < sizeof(text) && fclose(in) == 0, config_file);
    }
    FILE *f = fopen(path, "w");
    must(f && fwrite(text, 1, n, f) == n && fclose(f) == 0, path);
}

static void remove_config(const char *dir)
{
    char path[64];
    snprintf(path, sizeof(path), "%s/config.json", dir);
    unlink(path);
    rmdir(dir);
}

static void open_engine(void)
{
    char dir[] = "/tmp/baton-bench-XXXXXX", err[1024];
    put_config(dir);
    if (bt_model_config_load(model_dir ? model_dir : dir, &model, err, sizeof(err)) != BT_OK) {
        fprintf(stderr, "%s\n", err);
        exit(1);
    }
    bt_model_count(&model, &size);
    struct bt_kv_layout layout;
    must(bt_model_kv_layout(&model, kv_dtype, PAGE, &layout) == BT_OK, "--kv");
    kv_token = (double)layout.block_bytes / PAGE;
    if (bt_engine_load(engine_name, &vt, err, sizeof(err)) != BT_OK) {
        fprintf(stderr, "%s\n", err);
        exit(1);
    }
    slab_bytes = BT_MIN((size_t)10 << 30, n_pages * layout.block_bytes); /* 64 prompts of 1,000 */
    slab = mmap(NULL, slab_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE,
                -1, 0);
    must(slab != MAP_FAILED, "mmap of the slab");
    const struct bt_engine_config c = {.size = sizeof(c),
                                       .model_dir = model_dir ? model_dir : dir,
                                       .load_format = model_dir ? "auto" : "dummy",
                                       .page_tokens = PAGE,
                                       .pages = n_pages,
                                       .max_slots = SLOTS,
                                       .max_rows = CHUNK,
                                       .ranks = 1,
                                       .slab = slab,
                                       .slab_bytes = slab_bytes,
                                       .quantize = quantize,
                                       .deterministic = deterministic,
                                       .kv_dtype = kv_dtype};
    uint64_t t0 = bt_mono_ns();
    if (vt->open(&c, &e, &info, err, sizeof(err)) != BT_OK) {
        fprintf(stderr, "%s\n", err);
        exit(1);
    }
    printf("%s: open %.1f s\n", info->device, (double)(bt_mono_ns() - t0) * 1e-9);
    remove_config(dir);
}

static struct bt_engine_event wait_for(bt_engine_ticket_t t)
{
    for (;;) {
        struct bt_engine_event ev;
        if (vt->poll(e, &ev, 1, 100000) == 0) {
            continue;
        }
        must(ev.status == BT_OK, "a ticket");
        if (ev.ticket == t) {
            return ev;
        }
        vt->release(e, ev.ticket);
    }
}

static struct bt_engine_params params = {.top_p = 1, .repetition_penalty = 1, .logprobs = -1};

static void open_slot(uint32_t slot, uint32_t first_page, uint32_t len)
{
    uint32_t n = BT_DIV_UP(len, PAGE), *pages = malloc(n * sizeof(*pages));
    for (uint32_t i = 0; i < n; i++) {
        pages[i] = first_page + i;
    }
    must(vt->slot_open(e, slot, &params, NULL, 0, 0) == BT_OK, "slot_open");
    must(vt->slot_pages(e, slot, 0, pages, n) == BT_OK, "slot_pages");
    free(pages);
}
static void close_slot(uint32_t slot)
{
    bt_engine_ticket_t t;
    must(vt->slot_close(e, slot, &t) == BT_OK, "slot_close");
    wait_for(t);
    vt->release(e, t);
}

/* Seconds until the first token is known; flow 0: no streaming. */
static double prefill(uint32_t slot, uint32_t len, uint32_t flow)
{
    uint32_t *tokens = malloc(len * sizeof(*tokens));
    for (uint32_t i = 0; i < len; i++) {
        tokens[i] = ((i + slot * 7907u) * 7919u + 13u) % model.vocab;
    }
    bt_engine_ticket_t f = 0, s = 0;
    uint64_t t0 = bt_mono_ns();
    for (uint32_t at = 0, c = 0; at < len; at += CHUNK, c++) {
        uint32_t n = BT_MIN(CHUNK, len - at);
        const struct bt_engine_row row = {.slot = slot,
                                          .pos = at,
                                          .n = n,
                                          .tokens = tokens + at,
                                          .flags = at + n == len ? BT_ROW_SAMPLE : 0,
                                          .fire = {flow, c * model.layers}};
        const struct bt_engine_batch b = {.n_rows = 1, .rows = &row};
        must(vt->forward(e, &b, &f) == BT_OK, "forward");
    }
    must(vt->sample(e, f, NULL, &s) == BT_OK, "sample");
    wait_for(s);
    vt->release(e, s);
    free(tokens);
    return (double)(bt_mono_ns() - t0) * 1e-9;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Seconds that nothing but copies of these blocks between pages and slab take. */
static double copy_all(int way, const struct bt_engine_block *b, uint32_t n, uint32_t items)
{
    bt_engine_ticket_t t;
    uint32_t flow;
    must(vt->flow_open(e, way, BT_ENGINE_PRIO_LAND, NULL, 1, NULL, NULL, &flow) == BT_OK &&
             vt->flow_add(e, flow, b, n) == BT_OK,
         "flow");
    uint64_t t0 = bt_mono_ns();
    must(vt->flow_release(e, flow, items, &t) == BT_OK, "flow_release");
    wait_for(t);
    double s = (double)(bt_mono_ns() - t0) * 1e-9;
    must(vt->flow_close(e, flow, false, &t) == BT_OK, "flow_close");
    wait_for(t);
    return s;
}

/* Multiply-adds of a token's weights; in a prompt the head does not count. */
static double params_of(bool prompt)
{
    double head = prompt ? (double)model.vocab * model.hidden : 0;
    return (double)size.dense - head +
           (double)size.expert * model.experts.used * size.expert_layers;
}

static bool is_fp8(void)
{
    return strcmp(quantize, "fp8") == 0;
}

/* What a prompt cannot be faster than, in ms: products, and attention to half of its pairs. */
static double prompt_floor(uint32_t len)
{
    double pairs = (double)len * len / 2;
    /* 1,300: what cuBLASLt's block-scaled fp8 products reach at best. */
    double products = 2 * params_of(true) * len / (is_fp8() ? 1300e12 : 790e12);
    return (products + 2 * pairs * (double)size.pair / 790e12) * 1e3;
}

static void bench_prefill(uint32_t len, double torch_ms)
{
    double plain[5], with[5], exposed[5], bytes = (double)len * kv_token;
    uint32_t blocks = len / PAGE;
    must(blocks < n_pages && bytes <= (double)slab_bytes, "room for that prompt (--pages)");
    struct bt_engine_block *b = malloc(blocks * sizeof(*b));
    for (int i = 0; i < 5; i++) {
        bt_flow_word_t word = 0;
        bt_engine_ticket_t t;
        uint32_t flow;
        open_slot(0, 0, len + 1);
        plain[i] = prefill(0, len, 0);
        close_slot(0);
        open_slot(0, 0, len + 1);
        for (uint32_t k = 0; k < blocks; k++) {
            b[k] = (struct bt_engine_block){.mem = slab + k * info->layout.block_bytes,
                                            .page = k,
                                            .toks = PAGE,
                                            .seq = k * PAGE / CHUNK * model.layers};
        }
        must(vt->flow_open(e, BT_ENGINE_STORE, BT_ENGINE_PRIO_LAND, &word, 1, NULL, NULL, &flow) ==
                     BT_OK &&
                 vt->flow_add(e, flow, b, blocks) == BT_OK,
             "flow");
        with[i] = prefill(0, len, flow);
        uint64_t t0 = bt_mono_ns();
        while (bt_flow_read(&word, 1) < BT_DIV_UP(len, CHUNK) * model.layers) {
        }
        exposed[i] = (double)(bt_mono_ns() - t0) * 1e-9;
        must(vt->flow_close(e, flow, false, &t) == BT_OK, "flow_close");
        wait_for(t);
        close_slot(0);
    }
    double store = copy_all(BT_ENGINE_STORE, b, blocks, len / CHUNK * model.layers);
    double load = copy_all(BT_ENGINE_LOAD, b, blocks, len / CHUNK * model.layers); /* as a prefix */
    qsort(plain, 5, sizeof(double), by_value);
    qsort(with, 5, sizeof(double), by_value);
    qsort(exposed, 5, sizeof(double), by_value);
    printf(
        "prefill %u: %.1f ms, streaming %.1f ms (+%.1f %%), exposed after the first token %.2f "
        "ms; copies alone: store %.1f GB/s, load %.1f; compiled torch without streaming %.1f ms\n",
        len, plain[2] * 1e3, with[2] * 1e3, (with[2] / plain[2] - 1) * 100, exposed[2] * 1e3,
        bytes / store * 1e-9, bytes / load * 1e-9, torch_ms);
    double floor = prompt_floor(len);
    printf("bench,prefill_%u,%.1f,ms,floor %.1f,%.2f\n", len, plain[2] * 1e3, floor,
           plain[2] * 1e3 / floor);
    if (torch_ms > 0) {
        printf("bench,prefill_%u_streaming,%.1f,ms,compiled torch with cuDNN and no streaming,"
               "%.2f\n",
               len, with[2] * 1e3, with[2] * 1e3 / torch_ms);
    }
    printf("bench,kv_store_%u,%.1f,GB/s,PCIe 55 GB/s,%.2f\n", len, bytes / store * 1e-9,
           bytes / store * 1e-9 / 55);
    printf("bench,prefix_load_%u,%.1f,GB/s,PCIe 55 GB/s,%.2f\n", len, bytes / load * 1e-9,
           bytes / load * 1e-9 / 55);
    fflush(stdout);
    free(b);
}

/* `batch` sequences of len tokens in pages of their own: the same text, or texts of their own where
 * there are experts, as equal rows would use equal experts. */
static void open_batch(uint32_t batch, uint32_t len, uint32_t per)
{
    must(batch <= SLOTS && batch * per <= n_pages, "room for that many sequences (--pages)");
    for (uint32_t s = 0; s < batch; s++) {
        open_slot(s, s * per, per * PAGE);
        if (s == 0 || model.experts.n) {
            prefill(s, len, 0);
        } else {
            for (uint32_t p = 0; p < per; p++) {
                must(vt->page_copy(e, p, s * per + p, PAGE) == BT_OK, "page_copy");
            }
        }
    }
}

/* Median time in ms of a step of `batch` single tokens, and `prompt` tokens of another sequence. */
static double time_steps(uint32_t batch, uint32_t len, uint32_t prompt)
{
    enum { STEPS = 40, PROMPT_CHUNKS = 4 };
    uint32_t per = BT_DIV_UP(len + STEPS + 8, PAGE), n = batch + (prompt > 0);
    uint32_t *tokens = calloc(BT_MAX(prompt, 1u), sizeof(*tokens));
    struct bt_engine_row rows[SLOTS + 1];
    double v[STEPS];
    open_batch(batch, len, per);
    if (prompt) {
        must(batch < SLOTS && batch * per + BT_DIV_UP(PROMPT_CHUNKS * prompt, PAGE) <= n_pages,
             "room (--pages)");
        open_slot(batch, batch * per, PROMPT_CHUNKS * prompt);
        rows[batch] = (struct bt_engine_row){.slot = batch, .n = prompt, .tokens = tokens};
    }
    for (uint32_t s = 0; s < batch; s++) {
        rows[s] = (struct bt_engine_row){.slot = s, .n = 1, .flags = BT_ROW_SAMPLE};
    }
    uint32_t first[SLOTS];
    for (uint32_t s = 0; s < batch; s++) {
        first[s] = (11 + s * 4999) % model.vocab;
    }
    bt_engine_ticket_t f, before = 0, t = 0;
    uint64_t t0 = bt_mono_ns();
    for (uint32_t i = 0; i < STEPS; i++) {
        for (uint32_t s = 0; s < batch; s++) {
            rows[s].tokens = i ? NULL : &first[s];
            rows[s].pos = len + i;
        }
        rows[batch].pos = i % PROMPT_CHUNKS * prompt; /* the same prompt over and over */
        const struct bt_engine_batch b = {.n_rows = n, .rows = rows};
        must(vt->forward(e, &b, &f) == BT_OK && vt->sample(e, f, NULL, &t) == BT_OK, "step");
        if (before) {
            wait_for(before);
            vt->release(e, before);
        }
        before = t;
        uint64_t now = bt_mono_ns();
        v[i] = (double)(now - t0) * 1e-6;
        t0 = now;
    }
    wait_for(before);
    vt->release(e, before);
    for (uint32_t s = 0; s < n; s++) {
        close_slot(s);
    }
    free(tokens);
    qsort(v + 4, STEPS - 4, sizeof(double), by_value);
    return v[4 + (STEPS - 4) / 2];
}

/* What a step cannot be faster than, in ms. Rows choose experts evenly and independently. */
static double step_floor(uint32_t batch, uint32_t len, uint32_t prompt)
{
    double flops = 2 * (params_of(false) * batch + params_of(true) * prompt);
    double miss = model.experts.n ? 1 - (double)model.experts.used / model.experts.n : 1;
    double hit = model.experts.n * (1 - pow(miss, batch + prompt));
    double bytes = 2 * ((double)size.dense + hit * (double)size.expert * size.expert_layers);
    bytes -= is_fp8() ? (double)(size.weights + size.embed - size.wide) * bytes /
                            (2 * (double)size.weights)
                      : 0;
    double weights = BT_MAX(bytes / 4.3e12, flops / 790e12);
    return (weights + (double)batch * len * kv_token / 4.3e12) * 1e3;
}

static void bench_decode(uint32_t batch, uint32_t len, double torch_ms)
{
    double ms = time_steps(batch, len, 0), floor = step_floor(batch, len, 0);
    printf("decode B%u %u: %.2f ms, floor %.2f (%.0f %%)\n", batch, len, ms, floor,
           floor / ms * 100);
    if (torch_ms > 0) {
        printf("bench,decode_step_b%u_%u,%.2f,ms,compiled torch in a CUDA graph,%.2f\n", batch, len,
               ms, ms / torch_ms);
    } else {
        printf("bench,decode_step_b%u_%u,%.2f,ms,floor,%.2f\n", batch, len, ms, ms / floor);
    }
    fflush(stdout);
}

/* With what clients ask for by default, in every row. */
static void bench_sampled(uint32_t batch, uint32_t len)
{
    double greedy = time_steps(batch, len, 0);
    params = (struct bt_engine_params){
        .temperature = 0.6f, .top_p = 0.9f, .repetition_penalty = 1.1f, .seed = 1, .logprobs = 5};
    double ms = time_steps(batch, len, 0);
    params = (struct bt_engine_params){.top_p = 1, .repetition_penalty = 1, .logprobs = -1};
    printf("bench,sampled_step_b%u_%u,%.2f,ms,greedy,%.3f\n", batch, len, ms, ms / greedy);
    fflush(stdout);
}

static void bench_mixed(uint32_t batch, uint32_t len, uint32_t prompt)
{
    double ms = time_steps(batch, len, prompt), floor = step_floor(batch, len, prompt);
    printf(
        "mixed B%u %u with %u prompt tokens: %.2f ms, floor %.2f (%.0f %%): with one prompt token "
        "a generated one that is %.0f tokens/s\n",
        batch, len, prompt, ms, floor, floor / ms * 100, BT_MIN(batch, prompt) / (ms * 1e-3));
    printf("bench,mixed_step_b%u_%u_p%u,%.2f,ms,floor,%.2f\n", batch, len, prompt, ms, ms / floor);
    fflush(stdout);
}

/* ---- steps one after the other, as a worker makes them, which needs a step's tokens for the next
 * one's drafts and masks ---- */

/* What a kind of step is made of. */
struct kind {
    uint32_t drafts; /* of each row, each right with a probability of 0.8 */
    bool masked;     /* a mask for each row, another one each step */
};

/* Sequences and where they are in the text that they generate without drafts. */
struct texts {
    uint32_t batch, len, n;
    uint32_t *text[SLOTS]; /* [n], known from a run before */
    uint32_t at[SLOTS];    /* text[at] is the next token to be run, at position len + at */
    uint32_t *mask;
    uint64_t rng, results, steps;
};
enum { DRAFTS_MOST = 16, MASKS = 4 };

static uint32_t random_of(struct texts *t, uint32_t n)
{
    t->rng = t->rng * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)((t->rng >> 33) % n);
}

/* Runs a step and takes its time in ms. Without drafts the text follows from it. */
static double step_of(struct texts *t, struct kind k)
{
    static uint32_t tokens[SLOTS][1 + DRAFTS_MOST];
    struct bt_engine_row rows[SLOTS];
    bt_engine_ticket_t f, smp;
    const size_t words = BT_DIV_UP(model.vocab, 32u);
    for (uint32_t s = 0; s < t->batch; s++) {
        must(t->at[s] + k.drafts < t->n, "a text that is long enough");
        for (uint32_t i = 0; i <= k.drafts; i++) {
            bool wrong = i > 0 && random_of(t, 5) == 0;
            tokens[s][i] = (t->text[s][t->at[s] + i] + wrong) % model.vocab;
        }
        rows[s] = (struct bt_engine_row){.slot = s,
                                         .pos = t->len + t->at[s],
                                         .n = 1 + k.drafts,
                                         .tokens = tokens[s],
                                         .flags = BT_ROW_SAMPLE,
                                         .n_draft = k.drafts};
    }
    const struct bt_engine_batch b = {.n_rows = t->batch, .rows = rows};
    const uint32_t *mask =
        k.masked ? t->mask + t->steps % MASKS * t->batch * (1 + k.drafts) * words : NULL;
    uint64_t t0 = bt_mono_ns();
    must(vt->forward(e, &b, &f) == BT_OK && vt->sample(e, f, mask, &smp) == BT_OK, "step");
    struct bt_engine_event ev = wait_for(smp);
    double ms = (double)(bt_mono_ns() - t0) * 1e-6;
    for (uint32_t i = 0, s = 0; i < ev.n_out; i++, t->results++) {
        t->at[s]++;
        if (!ev.out[i].more) {
            t->text[s][t->at[s]] = ev.out[i].token; /* if texts went apart at a near-tie: this */
            s++;
        }
    }
    t->steps++;
    vt->release(e, f);
    vt->release(e, smp);
    return ms;
}

/* Median times of steps of both kinds, in turns. */
static void bench_kind(uint32_t batch, uint32_t len, struct kind k, const char *name)
{
    enum { STEPS = 40, FIRST = 6 };
    static struct texts t;
    uint32_t n = STEPS * (2 + k.drafts) + DRAFTS_MOST + 2, per = BT_DIV_UP(len + n, PAGE);
    size_t words = BT_DIV_UP(model.vocab, 32u) * (size_t)batch * (1 + k.drafts) * MASKS;
    double plain[STEPS], other[STEPS];
    must(k.drafts <= DRAFTS_MOST && batch * k.drafts <= info->max_drafts, "so many drafts");
    open_batch(batch, len, per);
    t = (struct texts){.batch = batch, .len = len, .n = n};
    t.mask = malloc(words * sizeof(*t.mask));
    for (size_t i = 0; i < words; i++) { /* half of the tokens */
        t.mask[i] = random_of(&t, UINT32_MAX);
    }
    for (uint32_t s = 0; s < batch; s++) {
        t.text[s] = calloc(n + 1, sizeof(*t.text[s]));
        t.text[s][0] = (11 + s * 4999) % model.vocab;
    }
    for (uint32_t i = 0; k.drafts && i + 1 < n; i++) {
        step_of(&t, (struct kind){0});
    }
    memset(t.at, 0, sizeof(t.at));
    t.results = t.steps = 0;
    for (uint32_t i = 0; i < STEPS; i++) {
        plain[i] = step_of(&t, (struct kind){0});
        other[i] = step_of(&t, k);
    }
    for (uint32_t s = 0; s < batch; s++) {
        close_slot(s);
        free(t.text[s]);
    }
    free(t.mask);
    qsort(plain + FIRST, STEPS - FIRST, sizeof(double), by_value);
    qsort(other + FIRST, STEPS - FIRST, sizeof(double), by_value);
    double p = plain[FIRST + (STEPS - FIRST) / 2], o = other[FIRST + (STEPS - FIRST) / 2];
    double tokens = ((double)t.results - STEPS * (double)batch) / (STEPS * (double)batch);
    printf("%s B%u %u, %u drafts: %.2f ms and %.2f tokens a row, without %.2f ms\n", name, batch,
           len, k.drafts, o, tokens, p);
    printf("bench,%s_step_b%u_%u_d%u,%.2f,ms,the same without,%.3f\n", name, batch, len, k.drafts,
           o, o / p);
    fflush(stdout);
}

/* n prompts that come together, cut by the prefill worker's batcher into steps of `step` tokens,
 * each with a flow to the slab; a step is launched when the last one's results are in, as there. */
static void bench_burst(uint32_t n, uint32_t len, uint32_t step)
{
    uint32_t per = BT_DIV_UP(len + 1, PAGE), blocks = BT_DIV_UP(len, PAGE), steps = 0;
    uint32_t flows[SLOTS], *tokens = malloc(len * sizeof(*tokens));
    bt_flow_word_t words[SLOTS] = {0};
    struct bt_batch_seq seqs[SLOTS];
    struct bt_batch_row cut[SLOTS];
    struct bt_engine_row rows[SLOTS];
    struct bt_engine_block *b = calloc(blocks, sizeof(*b));
    must(n <= SLOTS && n * per <= n_pages && step >= PAGE && step <= CHUNK &&
             (size_t)n * blocks * info->layout.block_bytes <= slab_bytes,
         "room for that many prompts, steps of 64 to 8192 tokens");
    for (uint32_t i = 0; i < len; i++) {
        tokens[i] = (i * 7919u + 13u) % model.vocab;
    }
    for (uint32_t s = 0; s < n; s++) {
        open_slot(s, s * per, len + 1);
        for (uint32_t k = 0; k < blocks; k++) {
            b[k] = (struct bt_engine_block){.mem = slab + ((size_t)s * blocks + k) *
                                                              info->layout.block_bytes,
                                            .page = s * per + k,
                                            .toks = BT_MIN(PAGE, len - k * PAGE),
                                            .seq = k * PAGE / FLOW * model.layers};
        }
        must(vt->flow_open(e, BT_ENGINE_STORE, BT_ENGINE_PRIO_LAND, &words[s], 1, NULL, NULL,
                           &flows[s]) == BT_OK &&
                 vt->flow_add(e, flows[s], b, blocks) == BT_OK,
             "flow");
        seqs[s] = (struct bt_batch_seq){.order = s, .len = len, .chunk_tokens = FLOW};
    }
    struct bt_batch batch = {.lim = {.max_rows = step, .block_tokens = PAGE}, .seqs = seqs, .n = n};
    double launch = 0;
    uint64_t t0 = bt_mono_ns();
    for (uint32_t m; (m = bt_batch_prefill(&batch, cut, SLOTS)) > 0; steps++) {
        bool sample = false;
        for (uint32_t i = 0; i < m; i++) {
            uint32_t s = cut[i].seq;
            rows[i] = (struct bt_engine_row){.slot = s,
                                             .pos = cut[i].pos,
                                             .n = cut[i].n,
                                             .tokens = tokens + cut[i].pos,
                                             .flags = cut[i].last ? BT_ROW_SAMPLE : 0};
            if (cut[i].chunk_end) {
                rows[i].fire = (struct bt_engine_at){flows[s], cut[i].pos / FLOW * model.layers};
            }
            sample |= cut[i].last;
        }
        const struct bt_engine_batch all = {.n_rows = m, .rows = rows};
        bt_engine_ticket_t f, t;
        uint64_t l0 = bt_mono_ns();
        must(vt->forward(e, &all, &f) == BT_OK, "forward");
        t = f;
        must(!sample || vt->sample(e, f, NULL, &t) == BT_OK, "sample");
        launch += (double)(bt_mono_ns() - l0) * 1e-6;
        wait_for(t);
        vt->release(e, t);
        bt_batch_apply(&batch, cut, m);
    }
    double secs = (double)(bt_mono_ns() - t0) * 1e-9, rate = (double)n * len / secs;
    for (uint32_t s = 0; s < n; s++) {
        bt_engine_ticket_t t;
        must(vt->flow_close(e, flows[s], false, &t) == BT_OK, "flow_close");
        wait_for(t);
        vt->release(e, t);
        must(bt_flow_read(&words[s], 1) >= BT_DIV_UP(len, FLOW) * model.layers, "a flow's word");
        close_slot(s);
    }
    free(tokens);
    free(b);
    printf(
        "burst of %u prompts of %u, steps of %u: %.0f ms in %u steps, %.1f ms of them launching\n",
        n, len, step, secs * 1e3, steps, launch);
    printf("bench,burst_%u_%u_%u,%.0f,tokens/s,one prompt at 790 TFLOP/s,%.2f\n", n, len, step,
           rate, rate * 2 * params_of(true) / 790e12);
    fflush(stdout);
}

static const char usage[] =
    "usage: bench_engine [--engine NAME] [--kv f16|fp8] [--quantize none|fp8] [--model DIR | "
    "--config FILE] [--pages N] [--deterministic true] "
    "[WHAT...]\n\n"
    "The engine at the shape of Llama-3-8B with random weights. WHAT, by default a table of each:\n"
    "  decode:B:LEN        a step of B sequences of LEN tokens\n"
    "  decode:B:LEN:drafts=K  with K drafts in each row, each right with a probability of 0.8;\n"
    "                      beside steps without, each launched when the last one's tokens are "
    "known\n"
    "  masked:B:LEN        with a mask for each row, in the same way\n"
    "  masked:B:LEN:drafts=K  with both\n"
    "  sampled:B:LEN       the same with temperature, top_p, a penalty and logprobs\n"
    "  mixed:B:LEN:PROMPT  a step with PROMPT tokens of a prompt besides\n"
    "  prefill:LEN         one prompt of up to 8192 tokens, or a multiple, without and with its "
    "KV\n"
    "                      streaming to the slab\n"
    "  burst:N:LEN:STEP    N prompts at once in steps of STEP tokens, streaming\n"
    "--model: a model from files: the engine says how fast they came. --config: the shape of this\n"
    "config.json with random weights. --engine null tries this program without a GPU, with few "
    "--pages (of 8 MiB; default "
    "10000).\n";

static double torch_of(uint32_t batch, uint32_t len)
{
    if (model_dir || config_file) {
        return 0;
    }
    static const struct {
        uint32_t batch, len;
        double ms;
    } known[] = {{1, 1024, 4.94},  {8, 1024, 5.10},  {64, 1024, 8.25},
                 {64, 8192, 32.0}, {0, 8192, 212.6}, {0, 32768, 1238}};
    for (size_t i = 0; i < BT_ARRAY_LEN(known); i++) {
        if (known[i].batch == batch && known[i].len == len) {
            return known[i].ms;
        }
    }
    return 0; /* not measured */
}

/* false: it is none. */
static bool run_what(const char *what, bool try)
{
    uint32_t a = 0, b = 0, c = 0;
    int end = 0;
    if (sscanf(what, "decode:%u:%u%n", &a, &b, &end) == 2 && a && b && !what[end]) {
        try ? (void)0 : bench_decode(a, b, torch_of(a, b));
    } else if (sscanf(what, "decode:%u:%u:drafts=%u%n", &a, &b, &c, &end) == 3 && a && b && c &&
               !what[end]) {
        try ? (void)0 : bench_kind(a, b, (struct kind){.drafts = c}, "drafts");
    } else if ((sscanf(what, "masked:%u:%u:drafts=%u%n", &a, &b, &c, &end) == 3 ||
                sscanf(what, "masked:%u:%u%n", &a, &b, &end) == 2) &&
               a && b && !what[end]) {
        try ? (void)0 : bench_kind(a, b, (struct kind){.drafts = c, .masked = true}, "masked");
    } else if (sscanf(what, "sampled:%u:%u%n", &a, &b, &end) == 2 && a && b && !what[end]) {
        try ? (void)0 : bench_sampled(a, b);
    } else if (sscanf(what, "mixed:%u:%u:%u%n", &a, &b, &c, &end) == 3 && a && b && c &&
               !what[end]) {
        try ? (void)0 : bench_mixed(a, b, c);
    } else if (sscanf(what, "prefill:%u%n", &a, &end) == 1 && a && (a < CHUNK || a % CHUNK == 0) &&
               !what[end]) {
        try ? (void)0 : bench_prefill(a, torch_of(0, a));
    } else if (sscanf(what, "burst:%u:%u:%u%n", &a, &b, &c, &end) == 3 && a && b && c &&
               !what[end]) {
        try ? (void)0 : bench_burst(a, b, c);
    } else {
        return false;
    }
    return true;
}

int main(int argc, char **argv)
{
    static const char *const table[] = {"decode:1:1024",          "decode:8:1024",
                                        "decode:64:1024",         "decode:64:8192",
                                        "decode:256:1024",        "decode:300:1500",
                                        "decode:384:1500",        "sampled:64:1024",
                                        "decode:1:1024:drafts=4", "decode:16:1024:drafts=4",
                                        "masked:64:1024",         "mixed:128:1500:128",
                                        "mixed:255:1500:256",     "mixed:255:1500:512",
                                        "mixed:255:1500:2048",    "prefill:8192",
                                        "prefill:32768",          "burst:64:1000:4096",
                                        "burst:64:1000:8192"};
    int at = 1;
    for (; at < argc && argv[at][0] == '-'; at += 2) {
        if (at + 1 < argc && strcmp(argv[at], "--engine") == 0) {
            engine_name = argv[at + 1];
        } else if (at + 1 < argc && strcmp(argv[at], "--model") == 0) {
            model_dir = argv[at + 1];
        } else if (at + 1 < argc && strcmp(argv[at], "--config") == 0) {
            config_file = argv[at + 1];
        } else if (at + 1 < argc && strcmp(argv[at], "--kv") == 0) {
            kv_dtype = argv[at + 1];
        } else if (at + 1 < argc && strcmp(argv[at], "--quantize") == 0) {
            quantize = argv[at + 1];
        } else if (at + 1 < argc && strcmp(argv[at], "--deterministic") == 0) {
            deterministic = strcmp(argv[at + 1], "true") == 0;
        } else if (at + 1 < argc && strcmp(argv[at], "--pages") == 0 && atoi(argv[at + 1]) > 0) {
            n_pages = (uint32_t)atoi(argv[at + 1]);
        } else {
            bool help = strcmp(argv[at], "--help") == 0 || strcmp(argv[at], "-h") == 0;
            fprintf(help ? stdout : stderr, "%s", usage);
            return help ? 0 : 2;
        }
    }
    for (int i = at; i < argc; i++) {
        if (!run_what(argv[i], true)) {
            fprintf(stderr, "bench_engine: %s is not understood\n%s", argv[i], usage);
            return 2;
        }
    }
    open_engine();
    for (int i = at; i < argc; i++) {
        run_what(argv[i], false);
    }
    for (size_t i = 0; at == argc && i < BT_ARRAY_LEN(table); i++) {
        run_what(table[i], false);
    }
    vt->close(e);
    return 0;
}
