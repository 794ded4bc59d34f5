/* baton-sim cache: reads its arguments, replays the trace, prints and plots. */
#include "conductor/sim/command_cache.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "conductor/sim/output.h"
#include "conductor/sim/replay.h"
#include "conductor/sim/report.h"

#define ROWS_MAX 8u  /* policies */
#define CAPS_MAX 64u /* capacities */
#define BELADY   "belady"
#define EVERY    "density,slru,lru,lfu,length_aware," BELADY

struct table {
    struct bt_sim_replay_options o;
    struct bt_sim_cluster cluster;
    struct bt_sim_trace trace;
    const char *names[ROWS_MAX];
    char *names_text;
    uint32_t n_names, n_caps;
    uint32_t caps[CAPS_MAX];
    struct bt_sim_replay_result r[ROWS_MAX][CAPS_MAX];
    uint32_t run; /* number of the run, of n_names * n_caps */
    const struct bt_sim_cache_args *a;
};

static bool fail(const char *what)
{
    fprintf(stderr, "baton-sim: %s\n", what);
    return false;
}

static bool read_blocks(struct table *t, const char *text)
{
    if (text == NULL) {
        return fail("--blocks N[,N...] is missing; 0: unlimited");
    }
    for (const char *p = text;; p++) {
        char *end;
        unsigned long n = strtoul(p, &end, 10);
        if (end == p || *p == '-' || (*end != ',' && *end != '\0') || n > UINT32_MAX / 2) {
            return fail("--blocks is not a list of numbers; as in --blocks 1000,10000,0");
        }
        if (t->n_caps == CAPS_MAX) {
            return fail("--blocks has more than 64 numbers; give fewer");
        }
        t->caps[t->n_caps++] = (uint32_t)n;
        p = end;
        if (*p == '\0') {
            return true;
        }
    }
}

static bool read_policies(struct table *t, const char *text)
{
    bool request = t->o.mode == BT_SIM_REPLAY_REQUEST;
    text = text == NULL || strcmp(text, "all") == 0 ? EVERY : text;
    t->names_text = bt_sprintf("%s", text);
    char *save = NULL;
    for (char *p = strtok_r(t->names_text, ",", &save); p != NULL; p = strtok_r(NULL, ",", &save)) {
        bool belady = strcmp(p, BELADY) == 0;
        if (!belady && bt_evict_by_name(p) == NULL) {
            fprintf(stderr, "baton-sim: --policy '%s' is none of %s, " BELADY ", all\n", p,
                    bt_evict_names);
            return false;
        }
        if (belady && request) {
            continue; /* the optimum is known only for the mode sequence */
        }
        if (t->n_names == ROWS_MAX) {
            return fail("--policy has more than 8 names; give fewer");
        }
        t->names[t->n_names++] = p;
    }
    return t->n_names > 0 ||
           fail(request ? "--policy names no policy that --replay request can show"
                        : "--policy names no policy; all: every one");
}

static bool read_args(struct table *t, const struct bt_sim_cache_args *a)
{
    char err[512];
    const char *mode = a->replay != NULL ? a->replay : "sequence";
    if (strcmp(mode, "sequence") != 0 && strcmp(mode, "request") != 0) {
        return fail("--replay is sequence or request");
    }
    t->o = (struct bt_sim_replay_options){.mode = *mode == 's' ? BT_SIM_REPLAY_SEQUENCE
                                                               : BT_SIM_REPLAY_REQUEST,
                                          .from = a->from,
                                          .to = a->to,
                                          .cluster = &t->cluster};
    if (a->from >= a->to) {
        return fail("--from is not before --to");
    }
    if (bt_sim_cluster_load(a->cluster != NULL ? a->cluster : "h200-8b", &t->cluster, err,
                            sizeof(err)) != BT_OK) {
        return fail(err);
    }
    if (!read_blocks(t, a->blocks) || !read_policies(t, a->policies)) {
        return false;
    }
    bt_status_t st = bt_sim_trace_load(a->trace, &t->trace, err, sizeof(err));
    for (uint32_t c = 0; c < t->n_caps && st == BT_OK; c++) { /* before the table begins */
        st = bt_sim_replay_check(&t->trace, t->caps[c], err, sizeof(err));
    }
    return st == BT_OK || fail(err);
}

static void progress(void *arg, uint32_t done, uint32_t of)
{
    struct table *t = arg;
    uint32_t runs = t->n_names * t->n_caps;
    double share = (t->run + (double)done / of) / runs;
    t->a->progress(NULL, (uint32_t)(share * 10000), 10000);
}

/* 0 if all is 0: a trace without full blocks, or a part without requests. */
static double ratio(double part, double all)
{
    return all > 0 ? part / all : 0;
}

static void print_row(const struct table *t, uint32_t k, uint32_t c)
{
    const struct bt_sim_replay_result *r = &t->r[k][c];
    printf("%s,%u,%.4f,%.4f,%.4f,%.4f,%.1f,%llu,%llu,%llu,%.0f\n", t->names[k], t->caps[c],
           ratio(r->hit_blocks, r->blocks), ratio(r->hit_tokens, r->tokens),
           ratio(r->prefix_tokens, r->tokens), ratio(r->saved_s, r->prefill_s), r->saved_s,
           (unsigned long long)r->hit_blocks, (unsigned long long)r->evicted,
           (unsigned long long)r->headless, ratio(r->events, r->wall_s));
}

/* Plots the share of found blocks, or of saved prefill time. */
static bool plot(const struct table *t, const char *name, const char *title, bool saved)
{
    char err[512];
    struct bt_sim_output o;
    struct bt_sim_curve curves[ROWS_MAX];
    double x[CAPS_MAX], y[ROWS_MAX][CAPS_MAX];
    uint32_t at[CAPS_MAX];
    for (uint32_t i = 0; i < t->n_caps; i++) { /* by rising capacity; unlimited counts as all
                                                * blocks */
        uint32_t n = t->caps[i] != 0 ? t->caps[i] : t->trace.n_unique, k = i;
        for (; k > 0 && x[k - 1] > n; k--) {
            x[k] = x[k - 1];
            at[k] = at[k - 1];
        }
        x[k] = n;
        at[k] = i;
    }
    for (uint32_t k = 0; k < t->n_names; k++) {
        for (uint32_t i = 0; i < t->n_caps; i++) {
            const struct bt_sim_replay_result *r = &t->r[k][at[i]];
            y[k][i] = saved ? ratio(r->saved_s, r->prefill_s) : ratio(r->hit_blocks, r->blocks);
        }
        curves[k] = (struct bt_sim_curve){t->names[k], x, y[k], t->n_caps};
    }
    if (bt_sim_output_open(&o, t->a->plot, name, err, sizeof(err)) != BT_OK) {
        return fail(err);
    }
    bt_sim_plot(o.f, title, "blocks in the cache",
                saved ? "share of prefill time" : "share of blocks", curves, t->n_names);
    return bt_sim_output_close(&o, err, sizeof(err)) == BT_OK || fail(err);
}

static int replay_all(struct table *t)
{
    char err[256];
    for (uint32_t k = 0; k < t->n_names; k++) {
        for (uint32_t c = 0; c < t->n_caps; c++, t->run++) {
            if (bt_sim_replay(&t->trace, bt_evict_by_name(t->names[k]), t->caps[c], &t->o,
                              &t->r[k][c], err, sizeof(err)) != BT_OK) {
                fail(err);
                return 2;
            }
            if (t->run == 0) {
                printf("policy,blocks,hit_blocks,hit_tokens,prefix_tokens,saved_prefill,"
                       "saved_prefill_s,hits,evicted,headless,decisions_per_s\n");
            }
            print_row(t, k, c);
        }
    }
    return 0;
}

int bt_sim_cache_command(const struct bt_sim_cache_args *a)
{
    struct table *t = bt_calloc(1, sizeof(*t));
    t->a = a;
    int rc = 2;
    if (read_args(t, a)) {
        t->o.progress = a->progress != NULL ? progress : NULL;
        t->o.arg = t;
        rc = replay_all(t);
        if (rc == 0 && a->plot != NULL &&
            (!plot(t, "hits.svg", "Blocks found in the cache", false) ||
             !plot(t, "saved.svg", "Prefill time saved", true))) {
            rc = 1;
        }
    }
    bt_sim_trace_cleanup(&t->trace);
    free(t->names_text);
    free(t);
    return rc;
}
