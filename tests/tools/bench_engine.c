/* Speed of the CPU engine beside what the machine gives: prompt processing against the best bf16
 * product, generation against the reading of memory, long prompts against short ones. A 125M shape
 * with random weights. The machine is shared: limits and engine are measured in turns, the best of
 * each counts; so for each phase of a prompt's step. usage: bench_engine [rounds [threads
 * [activations]]] */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/engine/cpu/limits.h"
#include "common/engine/cpu/phases.h"
#include "common/engine/engine.h"

#define LAYERS 12
#define HIDDEN 768
#define INTER  2048
#define VOCAB  32000
#define HEADS  12
#define KV     4
#define DIM    64
#define LONG   2048
#define SHORT  512
#define N_GEN  64

/* Weights that a token passes: of the layers, and of the head (generation only). */
#define LAYER_PARAMS                                                                               \
    ((double)LAYERS * HIDDEN * ((HEADS + 2.0 * KV) * DIM + HEADS * DIM + 3.0 * INTER))
#define HEAD_PARAMS ((double)HIDDEN * VOCAB)

static const char config[] =
    "{\"architectures\":[\"LlamaForCausalLM\"],\"vocab_size\":32000,\"hidden_size\":768,"
    "\"intermediate_size\":2048,\"num_hidden_layers\":12,\"num_attention_heads\":12,"
    "\"num_key_value_heads\":4,\"head_dim\":64,\"max_position_embeddings\":4096,"
    "\"rms_norm_eps\":1e-5,\"rope_theta\":10000.0,\"tie_word_embeddings\":true}";

struct bench {
    const struct bt_engine_vtable *vt;
    struct bt_engine *e;
    const struct bt_engine_info *info;
    uint32_t tokens[LONG];
    struct bt_cpu_limits best;
    double prefill[2], decode, decode_long; /* seconds a token, the best */
    bt_cpu_phases_fn phases;
    double phase_s[2][BT_CPU_PHASES]; /* of a prompt, the best of each */
};

static void must(bt_status_t st, const char *what)
{
    if (st != BT_OK) {
        fprintf(stderr, "bench_engine: %s: %s\n", what, bt_status_text(st));
        exit(1);
    }
}

static void open_engine(struct bench *b, uint32_t threads, const char *activations)
{
    char dir[] = "/tmp/baton-bench-XXXXXX", path[64], err[512] = "";
    if (!mkdtemp(dir)) {
        perror(dir);
        exit(1);
    }
    snprintf(path, sizeof(path), "%s/config.json", dir);
    FILE *f = fopen(path, "w");
    if (!f || fputs(config, f) < 0 || fclose(f) != 0) {
        perror(path);
        exit(1);
    }
    const struct bt_engine_config c = {.size = sizeof(c),
                                       .model_dir = dir,
                                       .load_format = "dummy",
                                       .threads = threads,
                                       .page_tokens = 64,
                                       .pages = 64,
                                       .max_slots = 4,
                                       .max_rows = LONG,
                                       .ranks = 1,
                                       .activations = activations};
    bt_status_t st = bt_engine_load("cpu", &b->vt, err, sizeof(err));
    if (st == BT_OK) {
        st = b->vt->open(&c, &b->e, &b->info, err, sizeof(err));
    }
    unlink(path);
    rmdir(dir);
    if (st != BT_OK) {
        fprintf(stderr, "bench_engine: %s\n", err);
        exit(1);
    }
}

/* What the plugin exports beside its vtable; `fn_p` is a pointer to a function pointer. */
static void find(const struct bt_engine_vtable *vt, const char *name, void *fn_p)
{
    Dl_info where;
    void *so = dladdr(vt, &where) ? dlopen(where.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    void *at = so ? dlsym(so, name) : NULL;
    if (!at) {
        fprintf(stderr, "bench_engine: the plugin has no %s; rebuild it\n", name);
        exit(1);
    }
    memcpy(fn_p, &at, sizeof(at));
}

static void wait_for(struct bench *b, bt_engine_ticket_t ticket)
{
    struct bt_engine_event ev;
    do {
        while (b->vt->poll(b->e, &ev, 1, 100000) == 0) {
        }
        must(ev.status, "step");
        b->vt->release(b->e, ev.ticket);
    } while (ev.ticket != ticket);
}

static void step(struct bench *b, uint32_t pos, uint32_t n, const uint32_t *tokens)
{
    const struct bt_engine_row row = {
        .slot = 0, .pos = pos, .n = n, .tokens = tokens, .flags = BT_ROW_SAMPLE};
    const struct bt_engine_batch batch = {.n_rows = 1, .rows = &row};
    bt_engine_ticket_t fwd, smp;
    must(b->vt->forward(b->e, &batch, &fwd), "forward");
    must(b->vt->sample(b->e, fwd, NULL, &smp), "sample");
    wait_for(b, smp);
}

/* One prompt of n tokens in one step, then n_gen tokens; seconds a token of each. */
static void run(struct bench *b, uint32_t n, uint32_t n_gen, double *prefill, double *decode)
{
    const struct bt_engine_params p = {.top_p = 1.0f, .repetition_penalty = 1.0f, .logprobs = -1};
    uint32_t pages[64];
    for (uint32_t i = 0; i < 64; i++) {
        pages[i] = i;
    }
    must(b->vt->slot_open(b->e, 0, &p, b->tokens, n, n), "slot_open");
    must(b->vt->slot_pages(b->e, 0, 0, pages, 64), "slot_pages");
    uint64_t ns[BT_CPU_PHASES];
    b->phases(b->e, ns);
    uint64_t t0 = bt_mono_ns();
    step(b, 0, n, b->tokens);
    *prefill = fmin(*prefill, (double)(bt_mono_ns() - t0) * 1e-9 / n);
    b->phases(b->e, ns);
    for (uint32_t i = 0; i < BT_CPU_PHASES; i++) {
        double *best = &b->phase_s[n == LONG][i];
        *best = *best == 0 ? (double)ns[i] * 1e-9 : fmin(*best, (double)ns[i] * 1e-9);
    }
    for (uint32_t i = 0; i < n_gen; i++) {
        t0 = bt_mono_ns();
        step(b, BT_ENGINE_POS_NEXT, 1, NULL);
        *decode = fmin(*decode, (double)(bt_mono_ns() - t0) * 1e-9);
    }
    bt_engine_ticket_t quiet;
    must(b->vt->slot_close(b->e, 0, &quiet), "slot_close");
    wait_for(b, quiet);
}

static const char usage[] =
    "usage: bench_engine [rounds [threads [split|bf16-mlp]]]\n\n"
    "Speed of the CPU engine at a 125M shape with random weights, beside the best product and the\n"
    "reading of memory on this machine. 10 rounds of engine and limits in turns, the best of each\n"
    "counts; 2 threads; model.activations split.\n";

/* A whole number of 1 to 10000, or the end of the program. */
static uint32_t number(const char *text)
{
    char *end;
    unsigned long v = strtoul(text, &end, 10);
    if (*text == 0 || *end != 0 || v == 0 || v > 10000) {
        bool help = strcmp(text, "--help") == 0 || strcmp(text, "-h") == 0;
        fprintf(help ? stdout : stderr, "%s", usage);
        exit(help ? 0 : 2);
    }
    return (uint32_t)v;
}

static void print_phases(const struct bench *b)
{
    static const char *const names[BT_CPU_PHASES] = {
        [BT_CPU_PHASE_GATHER] = "gather", [BT_CPU_PHASE_WAIT] = "wait",
        [BT_CPU_PHASE_NORM] = "norm",     [BT_CPU_PHASE_QKV] = "qkv",
        [BT_CPU_PHASE_SCATTER] = "rope",  [BT_CPU_PHASE_ATTN] = "attention",
        [BT_CPU_PHASE_O] = "o",           [BT_CPU_PHASE_GATE_UP] = "gate_up",
        [BT_CPU_PHASE_ROUTER] = "router", [BT_CPU_PHASE_EXPERTS] = "experts",
        [BT_CPU_PHASE_DOWN] = "down",     [BT_CPU_PHASE_HEAD] = "head"};
    for (int k = 0; k < 2; k++) {
        printf("prompt of %u, ms by phase:", k ? LONG : SHORT);
        for (int i = 0; i < BT_CPU_PHASES; i++) {
            printf(" %s %.1f", names[i], b->phase_s[k][i] * 1e3);
        }
        printf("\n");
    }
}

int main(int argc, char **argv)
{
    uint32_t rounds = argc > 1 ? number(argv[1]) : 10;
    uint32_t threads = argc > 2 ? number(argv[2]) : 2;
    static struct bench b = {.prefill = {1e9, 1e9}, .decode = 1e9, .decode_long = 1e9};
    const char *activations = argc > 3 ? argv[3] : "split";
    open_engine(&b, threads, activations);
    bt_cpu_limits_fn limits;
    find(b.vt, "bt_cpu_limits", &limits);
    find(b.vt, "bt_cpu_phases", &b.phases);
    printf("%s, activations %s; 12 layers, hidden 768, 12/4 heads of 64, ff 2048, vocab 32000\n",
           b.info->device, activations);
    for (uint32_t i = 0; i < LONG; i++) {
        b.tokens[i] = i * 7919 % VOCAB;
    }
    for (uint32_t r = 0; r < rounds; r++) {
        struct bt_cpu_limits l;
        must(limits(threads, 2, &l), "limits");
        b.best.read = fmax(b.best.read, l.read);
        if (l.product > b.best.product) {
            l.read = b.best.read;
            b.best = l;
        }
        run(&b, SHORT, N_GEN, &b.prefill[0], &b.decode);
        run(&b, LONG, N_GEN / 4, &b.prefill[1], &b.decode_long);
        printf("round %u of %u: product %.0f GFLOP/s, read %.1f GB/s, prompt %.0f and %.0f, "
               "generation %.0f and %.0f tokens/s\n",
               r + 1, rounds, b.best.product * 1e-9, b.best.read * 1e-9, 1 / b.prefill[0],
               1 / b.prefill[1], 1 / b.decode, 1 / b.decode_long);
        fflush(stdout);
    }
    print_phases(&b);
    const char *suffix = strcmp(activations, "split") == 0 ? "" : "_bf16_mlp";
    double flops = 2 * LAYER_PARAMS, bytes = 2 * (LAYER_PARAMS + HEAD_PARAMS);
    printf("bench,engine_prefill_512%s,%.0f,tokens/s,%.0f MFLOP a token at the %.0f GFLOP/s of %s,"
           "%.3f\n",
           suffix, 1 / b.prefill[0], flops * 1e-6, b.best.product * 1e-9, b.best.product_text,
           flops / b.prefill[0] / b.best.product);
    printf("bench,engine_prefill_2048%s,%.0f,tokens/s,prompt of 512,%.3f\n", suffix,
           1 / b.prefill[1], b.prefill[0] / b.prefill[1]);
    printf("bench,engine_decode%s,%.0f,tokens/s,%.0f MB a token at %.1f GB/s read,%.3f\n", suffix,
           1 / b.decode, bytes * 1e-6, b.best.read * 1e-9, bytes / b.decode / b.best.read);
    printf("bench,engine_decode_after_2048%s,%.0f,tokens/s,after 512,%.3f\n", suffix,
           1 / b.decode_long, b.decode / b.decode_long);
    b.vt->close(b.e);
    return 0;
}
