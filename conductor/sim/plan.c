/* The capacity of every split, and of instances that do both, by bisection over simulated rates. */
#include "conductor/sim/plan.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/engine/model_config.h"
#include "common/engine/model_fp8.h"
#include "conductor/sim/output.h"
#include "conductor/sim/report.h"
#include "conductor/sim/sizing.h"

#define SPLITS     16  /* tried at first: half with prompts beside rows, half without */
#define SPLITS_MAX 128 /* tried in all, with those between them around the best */
#define NODES_MAX  1e4 /* as of cluster.h's keys */
#define GOOD_SHARE 0.9 /* a rate is carried if this share meets both objectives */
#define SEARCH     7   /* halvings */

/* Data sheets: dense bf16, memory, link of a GPU (each direction), to the host. */
static const struct gpu {
    const char *name;
    double flops, bytes_per_s, memory, link, host;
} gpus[] = {{"h200", 989e12, 4.8e12, 141e9, 50e9, 55e9},
            {"h100", 989e12, 3.35e12, 80e9, 50e9, 55e9},
            {"a800", 312e12, 2.04e12, 80e9, 12.5e9, 20e9}};

/* ---- an instance ---- */

static bt_status_t from_model(const char *dir, const struct gpu *g, struct bt_sim_cluster *c,
                              uint32_t *gpus_p, char *err, size_t cap)
{
    struct bt_model_config m;
    bt_status_t st = bt_model_config_load(dir, &m, err, cap);
    if (st != BT_OK) {
        return st;
    }
    struct bt_model_size size;
    struct bt_kv_layout layout;
    bt_model_count(&m, &size);
    st = bt_model_kv_layout(&m, NULL, BT_SIM_BLOCK_TOKENS, &layout);
    if (st != BT_OK) {
        snprintf(err, cap, "%s: no KV layout for this model: %s", dir, bt_status_text(st));
        return st;
    }
    /* Bytes of a parameter: most of a dense fp8 checkpoint's are one. */
    double each = bt_model_is_fp8(dir, NULL) && bt_model_stays_fp8(&m)
                      ? 2 - (double)(size.weights + size.embed - size.wide) / (double)size.weights
                      : 2;
    double all = each * (double)size.weights + 2 * (double)size.embed, dense = (double)size.dense;
    double used = dense + (double)size.expert * m.experts.used * size.expert_layers;
    double missed = m.experts.n ? 1 - (double)m.experts.used / m.experts.n : 0;
    double token_bytes = (double)layout.block_bytes / BT_SIM_BLOCK_TOKENS;
    uint32_t tp = 1;
    while (tp < 64 && all > 0.7 * g->memory * tp) { /* the weights must leave room for KV */
        tp *= 2;
    }
    /* Prefill at half of the peak and decode at three quarters of the bandwidth, as in the presets.
     * With more than one GPU, two all-reduces a layer of 60 us each. A row with latents reads few
     * bytes and computes much: what takes longer counts. Prefill reads its weights while it
     * computes. */
    double flops = 0.5 * g->flops * tp, bytes = 0.75 * g->bytes_per_s * tp;
    double reduce = tp > 1 ? 2.0 * m.layers * 60e3 : 0;
    *c = (struct bt_sim_cluster){
        .prefill = {.base_ns = 1e6 + reduce,
                    .token_ns = BT_BATCH_TOKEN_NS(1e9 * 2 * used / flops),
                    .attn_ns = 1e9 * 2 * (double)size.pair / flops},
        .decode = {.base_ns = 5e5 + reduce + 1e9 * each * dense / bytes,
                   .kv_ns = 1e9 * BT_MAX(token_bytes / bytes, 2 * (double)size.latent_pair / flops),
                   .token_ns = BT_BATCH_TOKEN_NS(1e9 * 2 * used / flops),
                   .experts_ns = 1e9 * each * ((double)size.weights - dense) / bytes,
                   .missed = missed},
        .chunk_tokens = 8192,
        .token_bytes = token_bytes,
        .layers = m.layers,
        .link_bytes_per_s = g->link * tp,
        .load_bytes_per_s = g->host * tp,
        .cache_tokens = 100e9 * tp / token_bytes,
        .kv_tokens = (0.9 * g->memory * tp - all) / token_bytes,
        .rows_max = 256,
    };
    if (c->kv_tokens < BT_SIM_BLOCK_TOKENS) {
        snprintf(err, cap,
                 "%s: its weights, %.0f GB, leave no room for KV on %u GPUs of %.0f GB; larger "
                 "instances are not planned",
                 dir, 1e-9 * all, tp, 1e-9 * g->memory);
        return BT_ERR_INVALID;
    }
    *gpus_p = tp;
    return BT_OK;
}

bt_status_t bt_sim_plan_instance(const char *config, const char *gpu, struct bt_sim_cluster *c,
                                 uint32_t *gpus_p, char *err, size_t cap)
{
    struct stat st;
    if (stat(config, &st) != 0 || !S_ISDIR(st.st_mode)) {
        if (gpu != NULL) {
            snprintf(err, cap,
                     "--gpu: '%s' is of no use with --config %s, whose costs are those of a GPU "
                     "already; leave it out, or give a model directory",
                     gpu, config);
            return BT_ERR_INVALID;
        }
        *gpus_p = bt_sim_cluster_gpus(config);
        return bt_sim_cluster_load(config, c, err, cap);
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(gpus); i++) {
        if (gpu == NULL || strcmp(gpu, gpus[i].name) == 0) {
            return from_model(config, &gpus[i], c, gpus_p, err, cap);
        }
    }
    snprintf(err, cap,
             "--gpu: there is no '%s'; use h200, h100 or a800, or a file of costs as --config",
             gpu);
    return BT_ERR_INVALID;
}

/* ---- one split ---- */

struct split {
    uint32_t prefill, decode; /* instances; prefill 0: all do both */
    bool mixed;               /* decode instances also take a prompt if that is earlier */
    double capacity;          /* times the trace's rate */
    struct bt_sim_summary at_load;
};

struct planner {
    const struct bt_sim_trace *t;
    const struct bt_sim_plan_options *o;
    struct bt_sim_cluster c;
};

static void prepare(const struct planner *p, const struct split *s, struct bt_sim_cluster *c,
                    struct bt_sim_options *o)
{
    *c = p->c;
    *o = p->o->sim;
    c->prefill_nodes = s->prefill;
    c->decode_nodes = s->decode;
    o->policy = &bt_sched_baton;
    o->admission = &bt_sched_admit_predict;
    o->sample_ms = 0;
    o->progress = NULL;
    /* Steps are bounded wherever prompts are computed beside rows. */
    o->mixed_step_ms = s->mixed || s->prefill == 0 ? 0.75 * o->tbt_ms : 0;
    o->mixed_gap_ms = 0.95 * o->tbt_ms;
}

static void simulate(const struct planner *p, const struct split *s, double rate, double from,
                     double to, struct bt_sim_summary *sum)
{
    struct bt_sim_cluster c;
    struct bt_sim_options o;
    struct bt_sim_result r;
    prepare(p, s, &c, &o);
    o.rate = rate;
    o.from = from;
    o.to = to;
    bt_sim_run(&c, p->t, &o, &r);
    bt_sim_summarize(&r, &o, sum);
    bt_sim_result_cleanup(&r);
}

static bool carried(const struct bt_sim_summary *s)
{
    return s->good >= GOOD_SHARE * s->n;
}

/* The largest rate that is carried, searched up to 64 times the given load. */
static double capacity_of(const struct planner *p, const struct split *s, double from, double to)
{
    struct bt_sim_summary sum;
    double lo = 0, hi = p->o->sim.rate;
    simulate(p, s, hi, from, to, &sum);
    if (carried(&sum)) {
        while (carried(&sum) && hi < 64 * p->o->sim.rate) {
            lo = hi;
            hi *= 2;
            simulate(p, s, hi, from, to, &sum);
        }
    }
    for (int i = 0; i < SEARCH; i++) {
        double mid = (lo + hi) / 2;
        simulate(p, s, mid, from, to, &sum);
        *(carried(&sum) ? &lo : &hi) = mid;
    }
    return lo;
}

/* ---- the answer ---- */

/* The share of an instance's time that prompts take if every instance does both: for this time its
 * rows wait or are slowed down. */
static double interference(const struct planner *p, uint32_t instances, double *prefill_s_p)
{
    const struct bt_sim_trace *t = p->t;
    double ms = 0, span = t->requests[t->n - 1].at_ms / p->o->sim.rate;
    for (uint32_t i = 0; i < t->n; i++) {
        ms += 1e-6 * bt_batch_prefill_ns(&p->c.prefill, 0, t->requests[i].input, p->c.chunk_tokens);
    }
    *prefill_s_p = ms / t->n / 1e3;
    return span > 0 ? ms / span / instances : 0;
}

/* The search reached its end, and the rate was still carried. */
static bool beyond(const struct planner *p, const struct split *s)
{
    return s->capacity > 63 * p->o->sim.rate;
}

static void print_split(FILE *f, const struct planner *p, const struct split *s, double per_s)
{
    char name[32];
    if (s->prefill == 0) {
        snprintf(name, sizeof(name), "all do both");
    } else {
        snprintf(name, sizeof(name), "%u:%u%s", s->prefill, s->decode, s->mixed ? " mixed" : "");
    }
    fprintf(f, "%-14s %s%8.2f/s  %6.1f %%  %9.2f  %9.2f  %9.1f\n", name, beyond(p, s) ? ">" : " ",
            s->capacity * per_s, 100.0 * s->at_load.good / BT_MAX(s->at_load.n, 1u),
            s->at_load.ttft_ms.p50 / 1e3, s->at_load.ttft_ms.p90 / 1e3, s->at_load.tbt_ms.p99);
}

static const struct split *best_of(const struct split *all, uint32_t n, bool apart)
{
    const struct split *best = NULL;
    for (uint32_t i = 0; i < n; i++) {
        if ((all[i].prefill != 0) == apart && (best == NULL || all[i].capacity > best->capacity)) {
            best = &all[i];
        }
    }
    return best;
}

/* Writes how much more load a split carries than instances that all do both. Uses words if there is
 * no number. */
static void gain_text(double apart, double both, char out[40])
{
    if (both > 0) {
        snprintf(out, 40, "%+.0f %%", 100 * (apart / both - 1));
    } else {
        snprintf(out, 40, "%s",
                 apart > 0 ? "without a split nothing is carried" : "nothing is carried");
    }
}

/* Returns 1 if it is better to separate the stages, -1 if it is worse, 0 if the difference is
 * small. */
static int verdict(double apart, double both)
{
    return apart > 1.05 * both ? 1 : apart < 0.95 * both ? -1 : 0;
}

/* Answers the same question for each half of the trace. */
static void print_sure(FILE *f, const struct planner *p, const struct split *all, uint32_t n)
{
    const struct split *best = best_of(all, n, true);
    char text[2][80];
    int says[2];
    uint32_t at[2] = {0, 0};
    for (int half = 0; half < 2; half++) {
        double top = 0, both = 0;
        for (uint32_t i = 0; i < n; i++) {
            bool near_best =
                all[i].prefill == 0 ||
                (all[i].mixed == best->mixed && abs((int)all[i].prefill - (int)best->prefill) <= 2);
            double c = near_best ? capacity_of(p, &all[i], half / 2.0, half / 2.0 + 0.5) : 0;
            both = all[i].prefill == 0 ? c : both;
            if (all[i].prefill != 0 && c > top) {
                top = c;
                at[half] = all[i].prefill;
            }
        }
        char gain[40];
        gain_text(top, both, gain);
        snprintf(text[half], sizeof(text[half]), top > 0 ? "%s with %u prefill instance%s" : "%s",
                 gain, at[half], at[half] == 1 ? "" : "s");
        says[half] = verdict(top, both);
    }
    bool agree = says[0] == says[1] && abs((int)at[0] - (int)at[1]) <= 1;
    bool as_all = says[0] == verdict(best->capacity, best_of(all, n, false)->capacity);
    fprintf(f, "how sure       first half of the trace: %s, second half: %s; %s\n", text[0],
            text[1],
            !agree    ? "they do not agree: the best ratio changes over time"
            : !as_all ? "they agree, but not with the whole trace"
                      : "they agree");
}

static void print_answer(FILE *f, const struct planner *p, const struct split *all, uint32_t n,
                         double span_s)
{
    const struct split *best = best_of(all, n, true), *both = best_of(all, n, false);
    double per_s = p->t->n / span_s, most = BT_MAX(best->capacity, both->capacity);
    if (most <= 0) {
        fprintf(f,
                "answer         none: even at the lowest rate, fewer than %.0f %% of the requests "
                "are within the objectives; raise --ttft or --tbt\n",
                100 * GOOD_SHARE);
        return;
    }
    if (beyond(p, best) && beyond(p, both)) {
        fprintf(f, "answer         unknown: with and without a split, the instances carry more "
                   "than 60 times this load; ask with fewer --gpus or a higher --rate\n");
        return;
    }
    static const char *const words[] = {"do not disaggregate", "it makes little difference",
                                        "disaggregate"};
    char gain[40];
    gain_text(best->capacity, both->capacity, gain);
    fprintf(f,
            "answer         %s: %u:%u%s carries %s%.2f requests a second; if all instances do "
            "both, %s%.2f (%s)\n",
            words[1 + verdict(best->capacity, both->capacity)], best->prefill, best->decode,
            best->mixed ? ", decode also prefills," : "", beyond(p, best) ? "more than " : "",
            best->capacity * per_s, beyond(p, both) ? "more than " : "", both->capacity * per_s,
            gain);
    print_sure(f, p, all, n);
    if (1e3 * span_s / most < p->o->sim.ttft_ms) {
        fprintf(f,
                "but            at that rate the whole trace comes within %.1f s, less than the "
                "objective for a first token: that is a burst and not a steady load; give a longer "
                "trace\n",
                span_s / most);
    }
}

/* Sizes for the better of the best split and of instances that all do both. */
static void print_sizes(FILE *f, const struct planner *p, const struct split *all, uint32_t n,
                        uint32_t per, double per_s)
{
    const struct split *apart = best_of(all, n, true), *both = best_of(all, n, false),
                       *s = apart->capacity >= both->capacity ? apart : both;
    struct bt_sim_cluster c;
    struct bt_sim_options o;
    if (s->capacity > 0) {
        prepare(p, s, &c, &o);
        bt_sim_sizing(f, p->t, &c, &o, per, s->capacity * per_s, p->o->sim.rate * per_s);
    }
}

static bt_status_t write_plot(const char *folder, const struct split *all, uint32_t n, double per_s,
                              char *err, size_t cap)
{
    struct bt_sim_output o;
    if (bt_sim_output_open(&o, folder, "plan.svg", err, cap) != BT_OK) {
        return BT_ERR_INVALID;
    }
    double x[3][SPLITS_MAX + 1], y[3][SPLITS_MAX + 1];
    uint32_t k[3] = {0, 0, 0}, most = 0;
    for (uint32_t i = 0; i < n; i++) {
        most = BT_MAX(most, all[i].prefill);
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t c = all[i].prefill == 0 ? 2 : all[i].mixed ? 1 : 0;
        for (uint32_t twice = 0; twice < (c == 2 ? 2u : 1u); twice++) {
            x[c][k[c]] = c == 2 ? (twice ? most : 1) : all[i].prefill;
            y[c][k[c]++] = all[i].capacity * per_s;
        }
    }
    struct bt_sim_curve curves[] = {{"prefill and decode apart", x[0], y[0], k[0]},
                                    {"decode also prefills", x[1], y[1], k[1]},
                                    {"all do both", x[2], y[2], k[2]}};
    bt_sim_plot(o.f, "Load carried within the objectives", "prefill instances", "requests a second",
                curves, 3);
    return bt_sim_output_close(&o, err, cap);
}

static uint32_t list_splits(struct split *all, uint32_t instances, uint32_t *each_p)
{
    uint32_t n = 0, each = BT_DIV_UP(instances - 1, SPLITS / 2);
    all[n++] = (struct split){.decode = instances};
    for (int mixed = 0; mixed < 2; mixed++) {
        for (uint32_t p = 1; p < instances; p += each) {
            all[n++] = (struct split){.prefill = p, .decode = instances - p, .mixed = mixed != 0};
        }
    }
    *each_p = each;
    return n;
}

static void try_split(const struct planner *p, struct split *s, FILE *out, double per_s)
{
    s->capacity = capacity_of(p, s, 0, 1);
    simulate(p, s, p->o->sim.rate, 0, 1, &s->at_load);
    print_split(out, p, s, per_s);
}

static const struct split *best_of_kind(const struct split *all, uint32_t n, bool mixed)
{
    const struct split *best = NULL;
    for (uint32_t i = 0; i < n; i++) {
        if (all[i].prefill != 0 && all[i].mixed == mixed &&
            (best == NULL || all[i].capacity > best->capacity)) {
            best = &all[i];
        }
    }
    return best;
}

/* Tries splits between those that were tried at distances of `each` instances: around the best
 * ones, with ever smaller steps. */
static uint32_t refine(const struct planner *p, struct split *all, uint32_t n, uint32_t each,
                       FILE *out, double per_s)
{
    for (int mixed = 0; mixed < 2; mixed++) {
        for (uint32_t step = each; step > 1;) {
            const struct split best = *best_of_kind(all, n, mixed != 0);
            uint32_t instances = best.prefill + best.decode;
            step = BT_DIV_UP(step, 2u);
            if (beyond(p, &best) || best.capacity <= 0) {
                break; /* all splits are equal here */
            }
            for (int side = -1; side <= 1; side += 2) {
                int64_t prefill = (int64_t)best.prefill + side * (int64_t)step;
                bool there = prefill < 1 || prefill >= instances;
                for (uint32_t i = 0; i < n && !there; i++) {
                    there = all[i].prefill == prefill && all[i].mixed == best.mixed;
                }
                if (there || n == SPLITS_MAX) {
                    continue;
                }
                all[n] = (struct split){.prefill = (uint32_t)prefill,
                                        .decode = instances - (uint32_t)prefill,
                                        .mixed = best.mixed};
                try_split(p, &all[n++], out, per_s);
            }
        }
    }
    return n;
}

static int by_prefill(const void *a, const void *b)
{
    const struct split *x = a, *y = b;
    return (x->prefill > y->prefill) - (x->prefill < y->prefill);
}

/* Prints how the simulated instances differ from the model. */
static void print_unlike(FILE *f, const struct bt_sim_trace *t, const char *config)
{
    struct bt_model_config m;
    struct stat st;
    char err[256];
    if (stat(config, &st) != 0 || !S_ISDIR(st.st_mode) ||
        bt_model_config_load(config, &m, err, sizeof(err)) != BT_OK) {
        return;
    }
    uint32_t n = 0;
    for (uint32_t i = 0; i < t->n; i++) {
        n += (uint64_t)t->requests[i].input + t->requests[i].output > m.max_model_len;
    }
    if (n > 0) {
        fprintf(f,
                "but            %u of the %u requests are longer than the model's %u tokens: it "
                "cannot serve them\n",
                n, t->n, m.max_model_len);
    }
    if (m.window != 0) {
        fprintf(
            f,
            "but            a token of this model attends to %u tokens, and this plan assumes all "
            "before it: with longer contexts, steps are shorter and KV is less than it says\n",
            m.window);
    }
}

bt_status_t bt_sim_plan(const struct bt_sim_trace *t, const struct bt_sim_plan_options *o,
                        FILE *out, char *err, size_t cap)
{
    struct planner p = {.t = t, .o = o};
    uint32_t per = 1;
    bt_status_t st = bt_sim_plan_instance(o->config, o->gpu, &p.c, &per, err, cap);
    if (st != BT_OK) {
        return st;
    }
    uint32_t instances = o->gpus / per;
    if (instances < 2) {
        snprintf(err, cap,
                 "--gpus: %u make %u instance%s of %u; at least two are needed to take prefill and "
                 "decode apart",
                 o->gpus, instances, instances == 1 ? "" : "s", per);
        return BT_ERR_INVALID;
    }
    if (instances > NODES_MAX) {
        snprintf(err, cap, "--gpus: %u make %u instances; at most %.0f can be planned", o->gpus,
                 instances, NODES_MAX);
        return BT_ERR_INVALID;
    }
    if (o->sim.ttft_ms == 0 || o->sim.tbt_ms == 0) {
        snprintf(err, cap, "--ttft and --tbt: a plan needs both objectives");
        return BT_ERR_INVALID;
    }
    double span_s = t->requests[t->n - 1].at_ms / 1e3;
    if (span_s <= 0) {
        snprintf(
            err, cap,
            "--trace: all its requests come at the same time, so there is no rate to plan for");
        return BT_ERR_INVALID;
    }
    struct split all[SPLITS_MAX];
    uint32_t each, n = list_splits(all, instances, &each);
    double per_s = t->n / span_s;
    double prefill_s, beta = interference(&p, instances, &prefill_s);
    fprintf(out, "%u instances of %u GPU%s; %.2f requests a second, a prompt takes %.2f s\n",
            instances, per, per == 1 ? "" : "s", o->sim.rate * per_s, prefill_s);
    fprintf(out,
            "interference   beta = lambda * TTFT = %.2f of an instance's time, if all instances "
            "did both%s\n\n",
            beta, beta >= 1 ? ": more than it has, without a cache" : "");
    fprintf(out, "%-14s %11s  %8s  %9s  %9s  %9s\n", "prefill:decode", "carries", "good now",
            "TTFT p50", "TTFT p90", "TBT p99");
    for (uint32_t i = 0; i < n; i++) {
        try_split(&p, &all[i], out, per_s);
    }
    n = refine(&p, all, n, each, out, per_s);
    qsort(all, n, sizeof(*all), by_prefill);
    fprintf(out,
            "\n(carries: the highest rate at which %.0f %% of the requests are within %u ms to the "
            "first token and %u ms between tokens)\n",
            100 * GOOD_SHARE, o->sim.ttft_ms, o->sim.tbt_ms);
    print_answer(out, &p, all, n, span_s);
    print_sizes(out, &p, all, n, per, per_s);
    print_unlike(out, t, o->config);
    return o->plot != NULL ? write_plot(o->plot, all, n, per_s, err, cap) : BT_OK;
}
