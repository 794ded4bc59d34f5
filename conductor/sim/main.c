/* baton-sim: the scheduler on traces, without a cluster. One process, one thread, no network. */
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/policy/sched/copies.h"
#include "conductor/sim/bound.h"
#include "conductor/sim/command_cache.h"
#include "conductor/sim/command_size.h"
#include "conductor/sim/output.h"
#include "conductor/sim/plan.h"
#include "conductor/sim/report.h"

static const char usage[] =
    "baton-sim run --cluster PRESET|FILE --trace FILE|- [options]\n"
    "                      a cluster serves a trace\n"
    "  --policy P          random, round-robin, least-load, cache-aware, kvcache,\n"
    "                      baton (default)\n"
    "  --admission A       none, late, early, predict, priced (default)\n"
    "  --rate X            the trace X times as fast (1)\n"
    "  --from X --to X     uses only this part of the requests, as shares (0, 1)\n"
    "  --seed S            seed of random choices (1)\n"
    "  --ttft MS --tbt MS  objectives (30000, 100); 0: no objective\n"
    "  --fetch-ratio X     policy kvcache: kvcache_balancing_threshold (1.5); 0: none\n"
    "  --work-weight X     policy baton: weight of the time that a prefill occupies\n"
    "                      its node (0.5)\n"
    "  --demand-price X    admission priced: how strongly load lowers the admitted\n"
    "                      share (0.4)\n"
    "  --mixed-step MS     policy baton: decode nodes add prompt tokens to steps up\n"
    "                      to this time (0.75 of --tbt); 0: they add none\n"
    "  --mixed-gap MS      policy baton: limit of a row's first gap with such a step\n"
    "                      (0.95 of --tbt); 0: no limit\n"
    "  --pack X            policy baton: packs rows on few decode nodes, up to this\n"
    "                      share of --tbt (0.75); 0: spreads them\n"
    "  --late-wait MS      policy baton: serves a refused request late if it delays\n"
    "                      none in time and waits less than this (60000); 0: never\n"
    "  --eviction P        eviction policy of the nodes, as of 'cache' (density)\n"
    "  --ssd-write W       what nodes write to SSDs (--set ssd_tokens=N): second_use\n"
    "                      (default), evict, always, as kvstore.ssd.write_policy\n"
    "  --roles R           fixed (default), auto: nodes change roles by load, as\n"
    "                      sched.roles\n"
    "  --roles-window S    --roles auto: averages the load over S seconds (60)\n"
    "  --replica-bytes X   bytes a second for copies of hot prefixes (0)\n"
    "  --life MS           expected decode time of the first requests (10000)\n"
    "  --lengths B         1: learns the length of answers by length of prompt (1);\n"
    "                      0: one length for all\n"
    "  --one-token         every answer is one token: prefill alone\n"
    "  --fail NODE@S[+S]   node p1, p2 ... or d1, d2 ... fails S seconds after the\n"
    "                      start and is back S seconds later (60) with an empty\n"
    "                      slab; repeatable\n"
    "  --set KEY=VALUE     changes the cluster; repeatable\n"
    "  --csv FILE          a line for each request; - is standard output\n"
    "  --plot DIR          ttft.svg, tbt.svg, load.svg, replicas.svg, series.csv\n"
    "  --brief             one line of key=value\n"
    "baton-sim plan --config MODEL --trace FILE --gpus N [--gpu h200|h100|a800]\n"
    "  [--ttft MS --tbt MS] [--rate X] [--plot DIR]\n"
    "                      whether to separate prefill and decode for this load, in\n"
    "                      which ratio, and the gain. Options of 'run': --seed,\n"
    "                      --fetch-ratio, --work-weight, --demand-price, --late-wait,\n"
    "                      --life, --lengths, --one-token, --replica-bytes\n"
    "baton-sim cache --trace FILE --blocks N[,N...] [options]\n"
    "                      eviction policies on a trace\n"
    "  --policy P[,P...]   density, slru, lru, lfu, length_aware (the kvstore's own),\n"
    "                      belady (offline optimum); all (default)\n"
    "  --blocks N[,N...]   capacities in blocks of 512 tokens; 0: unlimited\n"
    "  --replay R          sequence (default: a block counts wherever it stands),\n"
    "                      request (as the kvstore serves: prefixes only, no partial\n"
    "                      blocks)\n"
    "  --from X --to X     counts only these requests, as shares; earlier ones warm\n"
    "                      the cache\n"
    "  --cluster P|FILE    cost of a prefill (h200-8b)\n"
    "  --plot DIR          hits.svg, saved.svg\n"
    "baton-sim size DIR...  weights and KV of models by their config.json, and the\n"
    "                      tokens of KV that fit on 1 and 8 GPUs\n"
    "baton-sim clusters    presets and their keys\n";

#define SAMPLES_MIN 100    /* of a short trace, if they are 100 ms apart or more */
#define SAMPLES_MAX 100000 /* of a long trace */

static int fail(const char *what)
{
    fprintf(stderr, "baton-sim: %s\n", what);
    return 2;
}

struct args {
    const char *config, *gpu;
    double gpus;
    const char *cluster, *trace, *policy, *admission, *csv, *plot, *blocks, *replay, *eviction,
        *ssd_write, *roles;
    double window_s;
    const char *set[64], *fail[64];
    uint32_t n_set, n_fail;
    struct bt_sim_failure failures[64];
    struct bt_sim_options o;
    bool brief, help;
};

/* Commands, as bits: an option belongs to one or more commands. */
enum { RUN = 1, PLAN = 2, CACHE = 4 };

enum {
    O_CLUSTER = 256,
    O_TRACE,
    O_POLICY,
    O_ADMISSION,
    O_RATE,
    O_FROM,
    O_TO,
    O_SEED,
    O_TTFT,
    O_TBT,
    O_RATIO,
    O_WEIGHT,
    O_CONFIG,
    O_GPU,
    O_GPUS,
    O_MIXED,
    O_GAP,
    O_PACK,
    O_DEMAND,
    O_SSD_WRITE,
    O_ROLES,
    O_WINDOW,
    O_REPLICA,
    O_LIFE,
    O_LENGTHS,
    O_EVICTION,
    O_LATE,
    O_ONE,
    O_SET,
    O_FAIL,
    O_CSV,
    O_PLOT,
    O_BLOCKS,
    O_REPLAY,
    O_BRIEF,
    O_HELP
};
static const struct {
    const char *name;
    int has_value;
    unsigned of;
} known[] = {
    [O_CLUSTER - 256] = {"cluster", 1, RUN | CACHE},
    [O_TRACE - 256] = {"trace", 1, RUN | PLAN | CACHE},
    [O_POLICY - 256] = {"policy", 1, RUN | CACHE},
    [O_ADMISSION - 256] = {"admission", 1, RUN},
    [O_RATE - 256] = {"rate", 1, RUN | PLAN},
    [O_FROM - 256] = {"from", 1, RUN | CACHE},
    [O_TO - 256] = {"to", 1, RUN | CACHE},
    [O_SEED - 256] = {"seed", 1, RUN | PLAN},
    [O_TTFT - 256] = {"ttft", 1, RUN | PLAN},
    [O_TBT - 256] = {"tbt", 1, RUN | PLAN},
    [O_RATIO - 256] = {"fetch-ratio", 1, RUN | PLAN},
    [O_WEIGHT - 256] = {"work-weight", 1, RUN | PLAN},
    [O_CONFIG - 256] = {"config", 1, PLAN},
    [O_GPU - 256] = {"gpu", 1, PLAN},
    [O_GPUS - 256] = {"gpus", 1, PLAN},
    [O_MIXED - 256] = {"mixed-step", 1, RUN},
    [O_GAP - 256] = {"mixed-gap", 1, RUN},
    [O_PACK - 256] = {"pack", 1, RUN | PLAN},
    [O_DEMAND - 256] = {"demand-price", 1, RUN | PLAN},
    [O_SSD_WRITE - 256] = {"ssd-write", 1, RUN},
    [O_ROLES - 256] = {"roles", 1, RUN},
    [O_WINDOW - 256] = {"roles-window", 1, RUN},
    [O_REPLICA - 256] = {"replica-bytes", 1, RUN | PLAN},
    [O_LIFE - 256] = {"life", 1, RUN | PLAN},
    [O_LENGTHS - 256] = {"lengths", 1, RUN | PLAN},
    [O_EVICTION - 256] = {"eviction", 1, RUN},
    [O_LATE - 256] = {"late-wait", 1, RUN | PLAN},
    [O_ONE - 256] = {"one-token", 0, RUN | PLAN},
    [O_SET - 256] = {"set", 1, RUN},
    [O_FAIL - 256] = {"fail", 1, RUN},
    [O_CSV - 256] = {"csv", 1, RUN},
    [O_PLOT - 256] = {"plot", 1, RUN | PLAN | CACHE},
    [O_BLOCKS - 256] = {"blocks", 1, CACHE},
    [O_REPLAY - 256] = {"replay", 1, CACHE},
    [O_BRIEF - 256] = {"brief", 0, RUN},
    [O_HELP - 256] = {"help", 0, RUN | PLAN | CACHE},
};

/* Reads a number in [lo, hi]. False: a message was printed. */
static bool number(const char *name, const char *text, double lo, double hi, double *out)
{
    char *end;
    double v = strtod(text, &end);
    if (end == text || *end != '\0' || !(v >= lo && v <= hi)) {
        fprintf(stderr, "baton-sim: --%s: '%s' is not a number from %g to %g\n", name, text, lo,
                hi);
        return false;
    }
    *out = v;
    return true;
}

static bool whole(const char *name, const char *text, double lo, double hi, double *out)
{
    double v;
    if (!number(name, text, lo, hi, &v)) {
        return false;
    }
    if (v != floor(v)) {
        fprintf(stderr, "baton-sim: --%s: '%s' is not a whole number\n", name, text);
        return false;
    }
    *out = v;
    return true;
}

static bool take_number(struct args *a, int opt, const char *text)
{
    double v;
    switch (opt) {
    case O_RATE: return number("rate", text, 1e-3, 1e6, &a->o.rate);
    case O_FROM: return number("from", text, 0, 1, &a->o.from);
    case O_TO: return number("to", text, 0, 1, &a->o.to);
    case O_RATIO: return number("fetch-ratio", text, 0, 1e9, &a->o.fetch_ratio);
    case O_WEIGHT: return number("work-weight", text, 0, 1e6, &a->o.work_weight);
    case O_GPUS: return whole("gpus", text, 1, 1e6, &a->gpus);
    case O_MIXED: return number("mixed-step", text, 0, 1e6, &a->o.mixed_step_ms);
    case O_GAP: return number("mixed-gap", text, 0, 1e6, &a->o.mixed_gap_ms);
    case O_PACK: return number("pack", text, 0, 1, &a->o.pack_share);
    case O_DEMAND: return number("demand-price", text, 0, 100, &a->o.demand_price);
    case O_WINDOW: return number("roles-window", text, 1, 1e6, &a->window_s);
    case O_REPLICA: return number("replica-bytes", text, 0, 1e15, &a->o.replica_bytes_per_s);
    case O_LENGTHS:
        v = a->o.lengths;
        bool ok = whole("lengths", text, 0, 1, &v);
        a->o.lengths = v > 0;
        return ok;
    case O_LIFE: return number("life", text, 0, 1e9, &a->o.life_ms);
    case O_LATE: return number("late-wait", text, 0, 1e9, &a->o.late_wait_ms);
    case O_SEED:
        a->o.seed = whole("seed", text, 0, 1e15, &v) ? (uint64_t)v : UINT64_MAX;
        return a->o.seed != UINT64_MAX;
    case O_TTFT:
    case O_TBT:
        if (!whole(opt == O_TTFT ? "ttft" : "tbt", text, 0, 1e9, &v)) {
            return false;
        }
        *(opt == O_TTFT ? &a->o.ttft_ms : &a->o.tbt_ms) = (uint32_t)v;
        return true;
    default: return false;
    }
}

static const char *command_name(unsigned command)
{
    return command == RUN ? "run" : command == PLAN ? "plan" : "cache";
}

/* Prints why getopt refused an argument: argv[optind - 1]. */
static bool refuse(const char *arg, int opt, int meant)
{
    if (opt == ':') {
        fprintf(stderr, "baton-sim: --%s needs a value\n", known[meant - 256].name);
    } else {
        fprintf(stderr, "baton-sim: there is no option '%s'; baton-sim help lists them\n", arg);
    }
    return false;
}

static bool parse(int argc, char **argv, unsigned command, struct args *a)
{
    struct option options[BT_ARRAY_LEN(known) + 1] = {{0}};
    int opt;
    for (int i = 0; i < (int)BT_ARRAY_LEN(known); i++) {
        options[i] = (struct option){known[i].name, known[i].has_value, NULL, 256 + i};
    }
    while ((opt = getopt_long(argc, argv, ":", options, NULL)) != -1) {
        if (opt == '?' || opt == ':') {
            return refuse(argv[optind - 1], opt, optopt);
        }
        if ((known[opt - 256].of & command) == 0) {
            fprintf(stderr, "baton-sim: --%s is not an option of %s; baton-sim help lists them\n",
                    known[opt - 256].name, command_name(command));
            return false;
        }
        switch (opt) {
        case O_HELP: a->help = true; return true;
        case O_CLUSTER: a->cluster = optarg; break;
        case O_CONFIG: a->config = optarg; break;
        case O_GPU: a->gpu = optarg; break;
        case O_TRACE: a->trace = optarg; break;
        case O_POLICY: a->policy = optarg; break;
        case O_ADMISSION: a->admission = optarg; break;
        case O_EVICTION: a->eviction = optarg; break;
        case O_CSV: a->csv = optarg; break;
        case O_PLOT: a->plot = optarg; break;
        case O_BLOCKS: a->blocks = optarg; break;
        case O_ROLES: a->roles = optarg; break;
        case O_SSD_WRITE: a->ssd_write = optarg; break;
        case O_REPLAY: a->replay = optarg; break;
        case O_BRIEF: a->brief = true; break;
        case O_ONE: a->o.one_token = true; break;
        case O_SET:
            if (a->n_set == BT_ARRAY_LEN(a->set)) {
                return fail("more than 64 --set; put them into a file for --cluster") == 0;
            }
            a->set[a->n_set++] = optarg;
            break;
        case O_FAIL:
            if (a->n_fail == BT_ARRAY_LEN(a->fail)) {
                return fail("more than 64 --fail; give fewer") == 0;
            }
            a->fail[a->n_fail++] = optarg;
            break;
        default:
            if (!take_number(a, opt, optarg)) {
                return false;
            }
        }
    }
    if (optind != argc) {
        fprintf(stderr, "baton-sim: '%s' is not an option; baton-sim help lists the options\n",
                argv[optind]);
        return false;
    }
    return a->trace != NULL ||
           fail("--trace FILE is missing; a Mooncake .jsonl or Azure .csv") == 0;
}

static void progress(void *arg, uint32_t done, uint32_t of)
{
    (void)arg;
    int width = of != 0 ? (int)(40.0 * done / of) : 40;
    fprintf(stderr, "\r[%.*s%.*s] %u of %u", width, "########################################",
            40 - width, "                                        ", done, of);
    if (done == of) {
        fputs("\r\033[K", stderr);
    }
}

static void print_brief(FILE *f, const struct args *a, const struct bt_sim_result *r,
                        const struct bt_sim_summary *s)
{
    fprintf(f,
            "policy=%s admission=%s rate=%g ttft_mean_s=%.3f ttft_p50_s=%.3f ttft_p90_s=%.3f "
            "ttft_p99_s=%.3f tbt_mean_ms=%.2f tbt_p99_ms=%.2f good=%u bound=%u goodput=%.3f "
            "hit=%.4f fetched=%.4f ssd=%.4f written_gb=%.0f",
            a->policy, a->admission, a->o.rate, s->ttft_ms.mean / 1e3, s->ttft_ms.p50 / 1e3,
            s->ttft_ms.p90 / 1e3, s->ttft_ms.p99 / 1e3, s->tbt_ms.mean, s->tbt_ms.p99, s->good,
            s->bound, s->goodput, s->hit_ratio, s->fetched_ratio, s->ssd_ratio,
            r->bytes_written / 1e9);
    for (int i = BT_SIM_SERVED; i < BT_SIM_OUTCOMES; i++) {
        fprintf(f, " %s=%u", bt_sim_outcome_names[i], s->outcomes[i]);
    }
    fprintf(f,
            " background=%u mixed=%u roles=%u copies=%u copied_gb=%.0f wasted_s=%.1f busy=%.3f "
            "fetch_gb=%.0f swing=%.3f "
            "phase=%.2f\n",
            r->background, r->mixed_prompts, r->role_changes, r->copies, r->bytes_copied / 1e9,
            r->wasted_ms / 1e3, s->prefill_busy, r->bytes_fetch / 1e9, s->swing, s->phase);
}

static bool to_stdout(const struct args *a)
{
    return a->csv != NULL && strcmp(a->csv, "-") == 0;
}

/* Checks this before the work begins. */
static bool outputs_can_be_written(const struct args *a)
{
    char err[512];
    return ((a->csv == NULL || to_stdout(a) ||
             bt_sim_output_check(a->csv, err, sizeof(err)) == BT_OK) &&
            (a->plot == NULL || bt_sim_output_check_folder(a->plot, err, sizeof(err)) == BT_OK)) ||
           fail(err) == 0;
}

static int write_files(const struct args *a, const struct bt_sim_result *r)
{
    char err[512];
    struct bt_sim_output o;
    if (to_stdout(a)) {
        bt_sim_write_requests(stdout, r);
    } else if (a->csv != NULL) {
        if (bt_sim_output_open(&o, NULL, a->csv, err, sizeof(err)) != BT_OK) {
            fail(err);
            return 1;
        }
        bt_sim_write_requests(o.f, r);
        if (bt_sim_output_close(&o, err, sizeof(err)) != BT_OK) {
            fail(err);
            return 1;
        }
    }
    if (a->plot != NULL && bt_sim_write_plots(a->plot, r, err, sizeof(err)) != BT_OK) {
        fail(err);
        return 1;
    }
    return 0;
}

/* Reads pN@S or dN@S, perhaps with +S behind it. */
static bool failure(const char *text, const struct bt_sim_cluster *c, struct bt_sim_failure *f)
{
    char role = 0;
    uint32_t node = 0;
    double at = -1, down = 60;
    int end = 0, longer = 0;
    bool ends =
        sscanf(text, "%c%9" SCNu32 "@%lf%n+%lf%n", &role, &node, &at, &end, &down, &longer) >= 3 &&
        text[BT_MAX(end, longer)] == '\0';
    uint32_t of = (uint32_t)(role == 'p' ? c->prefill_nodes : c->decode_nodes);
    if (!ends || (role != 'p' && role != 'd') || !(at >= 0 && at < 1e9) ||
        !(down > 0 && down < 1e9)) {
        fprintf(stderr, "baton-sim: --fail '%s' is not NODE@S or NODE@S+S, as in p3@600+60\n",
                text);
        return false;
    }
    if (node < 1 || node > of) {
        fprintf(stderr, "baton-sim: --fail '%s': the cluster has %c1 to %c%" PRIu32 "\n", text,
                role, role, of);
        return false;
    }
    uint32_t before = role == 'p' ? 0 : (uint32_t)c->prefill_nodes;
    *f = (struct bt_sim_failure){1e3 * at, 1e3 * down, before + node - 1};
    return true;
}

static bool resolve(struct args *a, struct bt_sim_cluster *c)
{
    char err[512];
    a->policy = a->policy != NULL ? a->policy : "baton";
    a->admission = a->admission != NULL ? a->admission : "priced";
    double tbt_ms = a->o.tbt_ms != 0 ? a->o.tbt_ms : 100;
    a->o.mixed_step_ms = a->o.mixed_step_ms < 0 ? BT_SCHED_STEP_SHARE * tbt_ms : a->o.mixed_step_ms;
    a->o.mixed_gap_ms = a->o.mixed_gap_ms < 0 ? BT_SCHED_GAP_SHARE * tbt_ms : a->o.mixed_gap_ms;
    a->o.policy = bt_sched_policy_find(a->policy);
    a->o.admission = bt_sched_admission_find(a->admission);
    if (a->o.policy == NULL || a->o.admission == NULL) {
        fprintf(stderr, "baton-sim: --policy is %s; --admission is %s\n", bt_sched_policy_names,
                bt_sched_admission_names);
        return false;
    }
    if (a->eviction != NULL && (a->o.eviction = bt_evict_by_name(a->eviction)) == NULL) {
        fprintf(stderr, "baton-sim: --eviction '%s' is none of %s\n", a->eviction, bt_evict_names);
        return false;
    }
    if (a->roles != NULL && strcmp(a->roles, "auto") != 0 && strcmp(a->roles, "fixed") != 0) {
        fprintf(stderr, "baton-sim: --roles '%s' is neither fixed nor auto\n", a->roles);
        return false;
    }
    a->o.roles_window_ms =
        a->roles != NULL && strcmp(a->roles, "auto") == 0 ? 1e3 * a->window_s : 0;
    uint32_t w = 0;
    while (a->ssd_write != NULL && w < BT_ARRAY_LEN(bt_sim_write_names) &&
           strcmp(a->ssd_write, bt_sim_write_names[w]) != 0) {
        w++;
    }
    if (w == BT_ARRAY_LEN(bt_sim_write_names)) {
        fprintf(stderr, "baton-sim: --ssd-write '%s' is none of second_use, evict, always\n",
                a->ssd_write);
        return false;
    }
    a->o.ssd_write = (bt_sim_write_t)w;
    if (a->o.from >= a->o.to) {
        return fail("--from is not before --to") == 0;
    }
    if (a->cluster == NULL) {
        fprintf(stderr, "baton-sim: --cluster is missing; give %s, or a file\n",
                bt_sim_cluster_names);
        return false;
    }
    bt_status_t st = bt_sim_cluster_load(a->cluster, c, err, sizeof(err));
    for (uint32_t i = 0; st == BT_OK && i < a->n_set; i++) {
        st = bt_sim_cluster_set(c, a->set[i], err, sizeof(err));
    }
    if (st != BT_OK) {
        return fail(err) == 0;
    }
    for (uint32_t i = 0; i < a->n_fail; i++) {
        if (!failure(a->fail[i], c, &a->failures[i])) {
            return false;
        }
    }
    a->o.failures = a->failures;
    a->o.n_failures = a->n_fail;
    return true;
}

static int run(struct args *a)
{
    struct bt_sim_cluster c;
    struct bt_sim_trace t;
    struct bt_sim_result r;
    struct bt_sim_summary s;
    char err[512];
    if (!resolve(a, &c)) {
        return 2;
    }
    if (bt_sim_trace_load(a->trace, &t, err, sizeof(err)) != BT_OK) {
        return fail(err);
    }
    a->o.progress = isatty(2) ? progress : NULL;
    double span_ms = t.requests[t.n - 1].at_ms / a->o.rate;
    a->o.sample_ms = BT_MIN(a->o.sample_ms, BT_MAX(100, span_ms / SAMPLES_MIN));
    a->o.sample_ms = BT_MAX(a->o.sample_ms, span_ms / SAMPLES_MAX);
    clock_t start = clock(); /* CPU time, so that other processes do not count */
    bt_sim_run(&c, &t, &a->o, &r);
    double took = BT_MAX((double)(clock() - start) / CLOCKS_PER_SEC, 1e-6);
    bt_sim_summarize(&r, &a->o, &s);
    s.bound = bt_sim_bound(&c, &t, &a->o);
    FILE *out = to_stdout(a) ? stderr : stdout;
    if (a->brief) {
        print_brief(out, a, &r, &s);
    } else {
        bt_sim_print(out, &r, &s);
        fprintf(stderr, "simulated in %.2f s of CPU time: %.0f requests a second\n", took,
                r.n / took);
    }
    int rc = write_files(a, &r);
    bt_sim_result_cleanup(&r);
    bt_sim_trace_cleanup(&t);
    return rc;
}

static int cache(const struct args *a)
{
    struct bt_sim_cache_args c = {.trace = a->trace,
                                  .policies = a->policy,
                                  .blocks = a->blocks,
                                  .replay = a->replay,
                                  .cluster = a->cluster,
                                  .plot = a->plot,
                                  .from = a->o.from,
                                  .to = a->o.to,
                                  .progress = isatty(2) ? progress : NULL};
    return bt_sim_cache_command(&c);
}

static int plan(struct args *a)
{
    struct bt_sim_trace t;
    char err[512];
    if (a->config == NULL || a->gpus < 1) {
        return fail(
            "plan needs --config MODEL and --gpus N; MODEL is a directory with config.json, a "
            "preset, or a file of costs");
    }
    if (bt_sim_trace_load(a->trace, &t, err, sizeof(err)) != BT_OK) {
        return fail(err);
    }
    struct bt_sim_plan_options o = {.config = a->config,
                                    .gpu = a->gpu,
                                    .gpus = (uint32_t)a->gpus,
                                    .sim = a->o,
                                    .plot = a->plot};
    bt_status_t st = bt_sim_plan(&t, &o, stdout, err, sizeof(err));
    bt_sim_trace_cleanup(&t);
    return st == BT_OK ? 0 : fail(err);
}

static int clusters(void)
{
    for (uint32_t i = 0; bt_sim_cluster_preset(i) != NULL; i++) {
        struct bt_sim_cluster c;
        char err[256];
        const char *key, *doc;
        double value;
        if (bt_sim_cluster_load(bt_sim_cluster_preset(i), &c, err, sizeof(err)) != BT_OK) {
            return fail(err);
        }
        printf("# %s\n", bt_sim_cluster_preset(i));
        for (uint32_t k = 0; bt_sim_cluster_key(&c, k, &key, &value, &doc); k++) {
            printf("%s: %.10g  # %s\n", key, value, doc);
        }
    }
    return 0;
}

static int command(int argc, char **argv)
{
    struct args a = {.window_s = 60,
                     .o = {.rate = 1,
                           .to = 1,
                           .seed = 1,
                           .eviction = &bt_evict_density,
                           .ttft_ms = 30000,
                           .tbt_ms = 100,
                           .fetch_ratio = BT_SCHED_FETCH_RATIO,
                           .work_weight = BT_SCHED_WORK_WEIGHT,
                           .demand_price = BT_SCHED_DEMAND_PRICE,
                           .mixed_step_ms = -1,
                           .mixed_gap_ms = -1,
                           .pack_share = BT_SCHED_STEP_SHARE,
                           .life_ms = 10000,
                           .lengths = true,
                           .replica_uses = BT_SCHED_COPY_USES,
                           .late_wait_ms = 60000,
                           .sample_ms = 5000}};
    const char *name = argc > 1 ? argv[1] : "help";
    if (strcmp(name, "help") == 0 || strcmp(name, "--help") == 0) {
        fputs(usage, argc > 1 ? stdout : stderr);
        return argc > 1 ? 0 : 2;
    }
    if (strcmp(name, "--version") == 0) {
        printf("baton-sim %s\n", bt_version());
        return 0;
    }
    if (strcmp(name, "clusters") == 0) {
        return clusters();
    }
    if (strcmp(name, "size") == 0) {
        return bt_sim_size_command(argv + 2, argc - 2);
    }
    bool is_run = strcmp(name, "run") == 0;
    bool is_plan = strcmp(name, "plan") == 0;
    if (!is_run && !is_plan && strcmp(name, "cache") != 0) {
        return fail("the first argument is run, plan, cache, size, clusters or help");
    }
    if (!parse(argc - 1, argv + 1, is_run ? RUN : is_plan ? PLAN : CACHE, &a)) {
        return 2;
    }
    if (a.help) {
        fputs(usage, stdout);
        return 0;
    }
    if (!outputs_can_be_written(&a)) {
        return 1;
    }
    return is_run ? run(&a) : is_plan ? plan(&a) : cache(&a);
}

int main(int argc, char **argv)
{
    return bt_end_of_output("baton-sim", command(argc, argv));
}
