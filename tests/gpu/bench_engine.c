/* make bench-gpu: the CUDA engine at the shape of Llama-3-8B with random weights, through engine.h:
 * decode steps (host to host, drawn on the device, launched one ahead of the results), prompts with
 * and without their KV streaming to the slab. Floors: bytes of weights and KV over 4.3 TB/s. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/engine/engine.h"

#define PAGE    64
#define LAYERS  32
#define VOCAB   128256
#define CHUNK   8192
#define WEIGHTS 15.01e9  /* bytes a step reads */
#define KV      131072.0 /* bytes of a token */

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
static uint8_t *slab;
static size_t slab_bytes;

static void must(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "bench_engine: %s failed\n", what);
        exit(1);
    }
}

static void open_engine(void)
{
    char dir[] = "/tmp/baton-bench-XXXXXX", path[64], err[512];
    must(mkdtemp(dir) != NULL, "mkdtemp");
    snprintf(path, sizeof(path), "%s/config.json", dir);
    FILE *f = fopen(path, "w");
    must(f && fputs(config, f) >= 0 && fclose(f) == 0, path);
    if (bt_engine_load("cuda", &vt, err, sizeof(err)) != BT_OK) {
        fprintf(stderr, "%s\n", err);
        exit(1);
    }
    slab_bytes = (size_t)5 << 30; /* a 32k prompt */
    slab = mmap(NULL, slab_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE,
                -1, 0);
    must(slab != MAP_FAILED, "mmap of the slab");
    const struct bt_engine_config c = {.size = sizeof(c),
                                       .model_dir = dir,
                                       .load_format = "dummy",
                                       .page_tokens = PAGE,
                                       .pages = 10000,
                                       .max_slots = 64,
                                       .max_rows = CHUNK,
                                       .ranks = 1,
                                       .stages = 1,
                                       .slab = slab,
                                       .slab_bytes = slab_bytes};
    uint64_t t0 = bt_mono_ns();
    if (vt->open(&c, &e, &info, err, sizeof(err)) != BT_OK) {
        fprintf(stderr, "%s\n", err);
        exit(1);
    }
    printf("%s: open %.1f s\n", info->device, (double)(bt_mono_ns() - t0) * 1e-9);
    unlink(path);
    rmdir(dir);
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

static void open_slot(uint32_t slot, uint32_t first_page, uint32_t len)
{
    const struct bt_engine_params p = {.top_p = 1, .repetition_penalty = 1, .logprobs = -1};
    uint32_t n = BT_DIV_UP(len, PAGE), *pages = malloc(n * sizeof(*pages));
    for (uint32_t i = 0; i < n; i++) {
        pages[i] = first_page + i;
    }
    must(vt->slot_open(e, slot, &p, NULL, 0, 0) == BT_OK, "slot_open");
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
        tokens[i] = (i * 7919u + 13u) % VOCAB;
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
                                          .fire = {flow, c * LAYERS}};
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

static void bench_prefill(uint32_t len, double torch_ms)
{
    double plain[5], with[5], exposed[5], bytes = (double)len * KV;
    uint32_t blocks = len / PAGE;
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
                                            .seq = k * PAGE / CHUNK * LAYERS};
        }
        must(vt->flow_open(e, BT_ENGINE_STORE, BT_ENGINE_PRIO_LAND, &word, 1, NULL, NULL, &flow) ==
                     BT_OK &&
                 vt->flow_add(e, flow, b, blocks) == BT_OK,
             "flow");
        with[i] = prefill(0, len, flow);
        uint64_t t0 = bt_mono_ns();
        while (bt_flow_read(&word, 1) < len / CHUNK * LAYERS) {
        }
        exposed[i] = (double)(bt_mono_ns() - t0) * 1e-9;
        must(vt->flow_close(e, flow, false, &t) == BT_OK, "flow_close");
        wait_for(t);
        close_slot(0);
    }
    /* and back: the whole prefix from the slab */
    bt_engine_ticket_t t;
    uint32_t flow;
    must(vt->flow_open(e, BT_ENGINE_LOAD, BT_ENGINE_PRIO_LAND, NULL, 1, NULL, NULL, &flow) ==
                 BT_OK &&
             vt->flow_add(e, flow, b, blocks) == BT_OK,
         "flow");
    uint64_t t0 = bt_mono_ns();
    must(vt->flow_release(e, flow, len / CHUNK * LAYERS, &t) == BT_OK, "flow_release");
    wait_for(t);
    double load = (double)(bt_mono_ns() - t0) * 1e-9;
    must(vt->flow_close(e, flow, false, &t) == BT_OK, "flow_close");
    wait_for(t);
    qsort(plain, 5, sizeof(double), by_value);
    qsort(with, 5, sizeof(double), by_value);
    qsort(exposed, 5, sizeof(double), by_value);
    printf("prefill %u: %.1f ms, streaming %.1f ms (+%.1f %%), exposed after the first token %.2f "
           "ms, load %.1f GB/s; compiled torch without streaming %.1f ms\n",
           len, plain[2] * 1e3, with[2] * 1e3, (with[2] / plain[2] - 1) * 100, exposed[2] * 1e3,
           bytes / load * 1e-9, torch_ms);
    printf("bench,prefill_%u_streaming,%.1f,ms,compiled torch with cuDNN and no streaming,%.2f\n",
           len, with[2] * 1e3, with[2] * 1e3 / torch_ms);
    printf("bench,prefix_load_%u,%.1f,GB/s,PCIe 55 GB/s,%.2f\n", len, bytes / load * 1e-9,
           bytes / load * 1e-9 / 55);
    fflush(stdout);
    free(b);
}

static void bench_decode(uint32_t batch, uint32_t len, double torch_ms)
{
    enum { STEPS = 40 };
    uint32_t per = BT_DIV_UP(len + STEPS + 8, PAGE);
    struct bt_engine_row rows[64];
    double v[STEPS];
    for (uint32_t s = 0; s < batch; s++) { /* the same text in pages of its own */
        open_slot(s, s * per, per * PAGE);
        if (s == 0) {
            prefill(0, len, 0);
        } else {
            for (uint32_t p = 0; p < per; p++) {
                must(vt->page_copy(e, p, s * per + p, PAGE) == BT_OK, "page_copy");
            }
        }
        rows[s] = (struct bt_engine_row){.slot = s, .pos = len, .n = 1, .flags = BT_ROW_SAMPLE};
    }
    static const uint32_t one = 11;
    bt_engine_ticket_t f, before = 0, t = 0;
    uint64_t t0 = bt_mono_ns();
    for (int i = 0; i < STEPS; i++) {
        for (uint32_t s = 0; s < batch; s++) {
            rows[s].tokens = i ? NULL : &one;
            rows[s].pos = len + (uint32_t)i;
        }
        const struct bt_engine_batch b = {.n_rows = batch, .rows = rows};
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
    for (uint32_t s = 0; s < batch; s++) {
        close_slot(s);
    }
    qsort(v + 4, STEPS - 4, sizeof(double), by_value);
    double ms = v[4 + (STEPS - 4) / 2], floor = (WEIGHTS + batch * len * KV) / 4.3e12 * 1e3;
    printf("decode B%u %u: %.2f ms, floor %.2f (%.0f %%), compiled torch and graph %.2f\n", batch,
           len, ms, floor, floor / ms * 100, torch_ms);
    printf("bench,decode_step_b%u_%u,%.2f,ms,compiled torch in a CUDA graph,%.2f\n", batch, len, ms,
           ms / torch_ms);
    fflush(stdout);
}

int main(void)
{
    open_engine();
    bench_decode(1, 1024, 4.94);
    bench_decode(8, 1024, 5.10);
    bench_decode(64, 1024, 8.25);
    bench_decode(64, 8192, 32.0);
    bench_prefill(8192, 212.6);
    bench_prefill(32768, 1238);
    vt->close(e);
    return 0;
}
