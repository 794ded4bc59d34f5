/* The worker's metrics, under the names that vLLM's dashboards and pickers read, and the load that
 * heartbeats carry. Registered once; written by the engine thread, read by the control thread. */
#ifndef BT_WORKER_STATS_H
#define BT_WORKER_STATS_H

#include <stdatomic.h>

#include "common/base/base.h"
#include "common/batch/classes.h"
#include "common/batch/cost.h"
#include "common/metrics/metrics.h"
#include "common/spec/spec.h"
#include "session.pb-c.h"

enum {
    BT_REASON_STOP,
    BT_REASON_LENGTH,
    BT_REASON_ABORT,
    BT_REASON_ERROR,
    BT_REASON_HANDOFF, /* a prefill whose decoding goes on elsewhere */
    BT_REASONS
};

#define BT_WLOAD_COSTS 5 /* prices of a step beside those of its tokens */

/* What heartbeats say of the load: written by the engine thread, read by the control thread. */
struct bt_wload_shared {
    _Atomic uint32_t running, waiting, pages_total, pages_free, slots_total, slots_free;
    _Atomic uint64_t queued_tokens, prefill_mtps /* tokens/s * 1000 */, step_us;
    _Atomic uint64_t kv_tokens;
    _Atomic uint64_t row_mtokens;  /* tokens of a row in a step * 1000 */
    _Atomic uint64_t queue_end_ns; /* bt_mono_ns at which the prompts are computed, as predicted */
    _Atomic uint32_t chunk_tokens, landing;
    _Atomic uint64_t cost_steps; /* 0: cost is not known yet */
    _Atomic double cost[BT_WLOAD_COSTS + BT_BATCH_SEGMENTS];
    struct {
        _Atomic uint32_t turn; /* odd: is being written */
        _Atomic uint32_t n;
        struct {
            _Atomic int32_t priority;
            _Atomic double queue_ms;
            _Atomic uint32_t rows, pages, waiting, landing;
        } of[BT_CLASSES_MAX];
    } classes;
};

struct bt_wstats {
    struct bt_metrics *registry;
    struct bt_metric *running, *waiting, *kv_usage, *kv_usage_old;
    struct bt_metric *prompt_tokens, *prompt_cached, *generation_tokens, *preemptions;
    struct bt_metric *reloaded, *recomputed;
    struct bt_metric *prefix_queries, *prefix_hits;
    struct bt_metric *finished[BT_REASONS];
    struct bt_metric *iteration_tokens, *queue_time;
    struct bt_metric *step_error[2]; /* steps that only decode, steps with a prompt */
    struct bt_metric *role[2];       /* prefill, decode: offered */
    struct bt_metric *mixed[2];      /* seconds of a step with prompts beside rows, of a gap */
    struct bt_metric *drafts, *draft_tokens, *drafts_accepted;
    struct bt_metric *accepted_at[BT_SPEC_MAX]; /* the draft at this place of those of a step */
    struct bt_metric *beam_searches, *beam_copies;
    struct bt_metric *compile_time, *mask_time, *mask_wait, *masks_late, *grammars_failed;
    struct bt_metric *wb_done, *wb_skipped, *pages_free, *steps;
    struct bt_wload_shared load;
};

struct bt_wstats *bt_wstats_create(const char *model_name, const char *kind);
void bt_wstats_destroy(struct bt_wstats *s);
/* Sets vllm:cache_config_info; called once the engine is open. */
void bt_wstats_cache_config(struct bt_wstats *s, uint32_t block_tokens, uint32_t pages);
/* Sets baton_worker_engine_info, likewise. */
void bt_wstats_engine(struct bt_wstats *s, const char *plugin, const char *device, bool exact);
/* The fitted cost of a step, and the number of steps that it was fitted to. */
void bt_wstats_cost(struct bt_wstats *s, const struct bt_batch_cost *c, uint64_t steps);
/* The load of each class. */
void bt_wstats_classes(struct bt_wstats *s, const struct bt_classes *c);

struct bt_wload { /* a heartbeat's load with what it points to */
    Baton__WorkerLoad load;
    Baton__StepCost cost;
    double token_ns[BT_BATCH_SEGMENTS];
    Baton__ClassLoad class[BT_CLASSES_MAX], *classes[BT_CLASSES_MAX];
};
/* l may not be copied: it points into itself. */
void bt_wstats_load(const struct bt_wstats *s, uint32_t max_model_len, struct bt_wload *l);

#endif
