/* See sched_conf.h. */
#include "conductor/sched_conf.h"

#include <stdio.h>
#include <string.h>

#include "common/base/buf.h"

#define FOR_EVER_MS 1e15

/* What a worker and a link count as until they have been measured: a CPU, and 10 Gbit/s. */
#define PRIOR_TOKENS_PER_S     1000.0
#define PRIOR_STEP_MS          20.0
#define PRIOR_LINK_BYTES_PER_S 1e9

void bt_sched_conf_params(const struct bt_conductor_conf *conf, struct bt_sched_params *p)
{
    bool mixes = bt_sched_policy_find(conf->policy)->mixes;
    double tbt_ms = (double)conf->tbt_objective_ms;
    *p = (struct bt_sched_params){
        .objective = {.ttft_ms = (double)conf->ttft_objective_ms,
                      .tbt_ms = tbt_ms,
                      .tbt_margin = BT_SCHED_GAP_SHARE},
        .prior = {.prefill_tokens_per_s = PRIOR_TOKENS_PER_S,
                  .step_ms = PRIOR_STEP_MS,
                  .link_bytes_per_s = PRIOR_LINK_BYTES_PER_S},
        .place = {.fetch_ratio = BT_SCHED_FETCH_RATIO,
                  .tail_load = true,
                  .work_weight = BT_SCHED_WORK_WEIGHT},
        .price = {.demand = BT_SCHED_DEMAND_PRICE},
        .mixed = {.step_ms = mixes ? BT_SCHED_STEP_SHARE * tbt_ms : 0,
                  .step_tokens = (uint32_t)conf->common.kv_block_tokens,
                  .gap_ms = mixes ? BT_SCHED_GAP_SHARE * tbt_ms : 0,
                  .pack_share = BT_SCHED_STEP_SHARE},
        .late = {.wait_ms =
                     conf->queue_timeout_ms != 0 ? (double)conf->queue_timeout_ms : FOR_EVER_MS,
                 .others_tbt_ms = tbt_ms},
    };
}

/* ---- in words ---- */

static void objective(struct bt_buf *b, const char *what, double ms)
{
    if (ms > 0) {
        bt_buf_printf(b, "%s %g ms", what, ms);
    } else {
        bt_buf_printf(b, "%s none", what);
    }
}

void bt_sched_conf_describe(const void *conf, char *text, size_t cap)
{
    const struct bt_conductor_conf *c = conf;
    struct bt_sched_params p;
    struct bt_buf b;
    const char *note;
    bool mixes = bt_sched_policy_find(c->policy)->mixes;
    bt_sched_conf_params(c, &p);
    bt_buf_init(&b);
    bt_buf_printf(&b, "policy %s, admission %s; ", c->policy, c->admission);
    objective(&b, "objectives: first token", p.objective.ttft_ms);
    objective(&b, ", between tokens", p.objective.tbt_ms);
    bt_buf_printf(&b, "\n");
    if (p.mixed.step_ms > 0) {
        bt_buf_printf(&b,
                      "decode workers compute prompts beside their rows, in steps of at most %g ms "
                      "(%g ms for a step that a row joins, including the row's wait)",
                      p.mixed.step_ms, p.mixed.gap_ms);
    } else {
        bt_buf_printf(&b, "decode workers compute no prompts beside their rows");
    }
    bt_buf_printf(&b, "\n");
    if (mixes && strcmp(c->admission, "none") != 0) {
        bt_buf_printf(&b, "a request that would miss an objective is served late if that delays no "
                          "request that is in time; otherwise it is refused\n");
    }
    for (uint32_t i = 0; (note = bt_sched_conf_note(c, i)) != NULL; i++) {
        bt_buf_printf(&b, "note: %s\n", note);
    }
    snprintf(text, cap, "%s", b.data);
    bt_buf_cleanup(&b);
}

const char *bt_sched_conf_note(const struct bt_conductor_conf *c, uint32_t i)
{
    bool mixes = bt_sched_policy_find(c->policy)->mixes;
    bool ttft = c->ttft_objective_ms != 0, tbt = c->tbt_objective_ms != 0;
    const struct {
        bool holds;
        const char *text;
    } notes[] = {
        {mixes && ttft && !tbt,
         "sched.policy baton without sched.tbt_objective_ms: the longest allowed step is not "
         "known, so decode workers compute no prompts beside their rows, and rows are spread "
         "evenly; set sched.tbt_objective_ms"},
        {mixes && tbt && !ttft,
         "sched.policy baton without sched.ttft_objective_ms: only a request with an objective of "
         "its own (x-slo-ttft-ms) is refused or served late for its first token; set "
         "sched.ttft_objective_ms for all requests"},
        {strcmp(c->admission, "priced") == 0 && tbt && !ttft,
         "sched.admission priced without sched.ttft_objective_ms: a long queue refuses no request; "
         "set sched.ttft_objective_ms"},
        {strcmp(c->admission, "none") == 0 && (ttft || tbt),
         "sched.admission none: no request is refused for an objective; set another "
         "sched.admission to enforce objectives"},
    };
    for (size_t k = 0; k < BT_ARRAY_LEN(notes); k++) {
        if (notes[k].holds && i-- == 0) {
            return notes[k].text;
        }
    }
    return NULL;
}
