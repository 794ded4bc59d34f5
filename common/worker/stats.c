/* Registration of the worker's metrics, and the load snapshot. Updates are atomic (common/metrics),
 * from the engine thread; rendering happens on the control thread. */
#include "common/worker/stats.h"
#include "common/base/clock.h"

#include <stdio.h>
#include <stdlib.h>

static const double tokens_bounds[] = {1,   2,   4,   8,    16,   32,   64,
                                       128, 256, 512, 1024, 2048, 4096, 8192};
static const double queue_bounds[] = {0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100};

static const double mask_bounds[] = {1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3};

static const double error_bounds[] = {0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 1, 2, 5};
struct bt_wstats *bt_wstats_create(const char *model, const char *kind)
{
    static const char *const reasons[BT_REASONS] = {"stop", "length", "abort", "error", "handoff"};
    struct bt_wstats *s = bt_calloc(1, sizeof(*s));
    struct bt_metrics *m = s->registry = bt_metrics_create();
    /* The conductor counts clients' requests and tokens (vllm:...): one request has up to two
     * workers, so a sum over all daemons would count it several times. */
    char *name = bt_metrics_label("model_name", model);
    char *l = bt_sprintf("%s,engine=\"0\"", name);
    free(name);
    s->running = bt_metrics_gauge(m, "baton_worker_requests_running", l);
    s->waiting = bt_metrics_gauge(m, "baton_worker_requests_waiting", l);
    s->kv_usage = bt_metrics_gauge(m, "vllm:kv_cache_usage_perc", l);
    s->kv_usage_old = bt_metrics_gauge(m, "vllm:gpu_cache_usage_perc", l);
    s->prompt_tokens = bt_metrics_counter(m, "baton_worker_prompt_tokens_total", l);
    s->prompt_cached = bt_metrics_counter(m, "baton_worker_prompt_tokens_cached_total", l);
    s->generation_tokens = bt_metrics_counter(m, "baton_worker_generation_tokens_total", l);
    s->preemptions = bt_metrics_counter(m, "vllm:num_preemptions_total", l);
    s->reloaded = bt_metrics_counter(m, "baton_worker_resumed_tokens_total", "kv=\"reloaded\"");
    s->recomputed = bt_metrics_counter(m, "baton_worker_resumed_tokens_total", "kv=\"recomputed\"");
    s->prefix_queries = bt_metrics_counter(m, "vllm:prefix_cache_queries_total", l);
    s->prefix_hits = bt_metrics_counter(m, "vllm:prefix_cache_hits_total", l);
    for (int i = 0; i < BT_REASONS; i++) {
        char *fl = bt_sprintf("%s,finished_reason=\"%s\"", l, reasons[i]);
        s->finished[i] = bt_metrics_counter(m, "baton_worker_requests_ended_total", fl);
        free(fl);
    }
    s->iteration_tokens = bt_metrics_histogram(m, "vllm:iteration_tokens_total", l, tokens_bounds,
                                               BT_ARRAY_LEN(tokens_bounds));
    s->queue_time = bt_metrics_histogram(m, "baton_worker_queue_seconds", l, queue_bounds,
                                         BT_ARRAY_LEN(queue_bounds));
    s->beam_searches = bt_metrics_counter(m, "baton_worker_beam_searches_total", NULL);
    s->beam_copies = bt_metrics_counter(m, "baton_worker_beam_page_copies_total", NULL);
    s->compile_time = bt_metrics_histogram(m, "baton_worker_grammar_compile_seconds", NULL,
                                           mask_bounds, BT_ARRAY_LEN(mask_bounds));
    s->mask_time = bt_metrics_histogram(m, "baton_worker_mask_seconds", NULL, mask_bounds,
                                        BT_ARRAY_LEN(mask_bounds));
    s->mask_wait = bt_metrics_histogram(m, "baton_worker_mask_wait_seconds", NULL, mask_bounds,
                                        BT_ARRAY_LEN(mask_bounds));
    s->masks_late = bt_metrics_counter(m, "baton_worker_masks_late_total", NULL);
    s->grammars_failed = bt_metrics_counter(m, "baton_worker_grammars_failed_total", NULL);
    s->steps = bt_metrics_counter(m, "baton_worker_steps_total", NULL);
    s->step_error[0] = bt_metrics_histogram(m, "baton_worker_step_error_ratio", "step=\"decode\"",
                                            error_bounds, BT_ARRAY_LEN(error_bounds));
    s->step_error[1] = bt_metrics_histogram(m, "baton_worker_step_error_ratio", "step=\"prompt\"",
                                            error_bounds, BT_ARRAY_LEN(error_bounds));
    s->drafts = bt_metrics_counter(m, "vllm:spec_decode_num_drafts_total", l);
    s->draft_tokens = bt_metrics_counter(m, "vllm:spec_decode_num_draft_tokens_total", l);
    s->drafts_accepted = bt_metrics_counter(m, "vllm:spec_decode_num_accepted_tokens_total", l);
    for (uint32_t i = 0; i < BT_SPEC_MAX; i++) {
        char *pl = bt_sprintf("%s,position=\"%u\"", l, i);
        s->accepted_at[i] =
            bt_metrics_counter(m, "vllm:spec_decode_num_accepted_tokens_per_pos_total", pl);
        free(pl);
    }
    s->pages_free = bt_metrics_gauge(m, "baton_worker_pages_free", NULL);
    s->wb_done = bt_metrics_counter(m, "baton_worker_writeback_blocks_total", "result=\"done\"");
    s->wb_skipped =
        bt_metrics_counter(m, "baton_worker_writeback_blocks_total", "result=\"skipped\"");
    char *il = bt_sprintf("role=\"%s\",version=\"%s\"", kind, bt_version());
    bt_metric_set(bt_metrics_gauge(m, "baton_worker_info", il), 1);
    free(il);
    s->role[0] = bt_metrics_gauge(m, "baton_worker_role", "role=\"prefill\"");
    s->role[1] = bt_metrics_gauge(m, "baton_worker_role", "role=\"decode\"");
    s->mixed[0] = bt_metrics_gauge(m, "baton_worker_mixed_step_seconds", "of=\"step\"");
    s->mixed[1] = bt_metrics_gauge(m, "baton_worker_mixed_step_seconds", "of=\"gap\"");
    free(l);
    return s;
}

void bt_wstats_destroy(struct bt_wstats *s)
{
    if (s != NULL) {
        bt_metrics_destroy(s->registry);
        free(s);
    }
}

void bt_wstats_cache_config(struct bt_wstats *s, uint32_t block_tokens, uint32_t pages)
{
    char *l = bt_sprintf("engine=\"0\",block_size=\"%u\",num_gpu_blocks=\"%u\","
                         "enable_prefix_caching=\"True\"",
                         block_tokens, pages);
    bt_metric_set(bt_metrics_gauge(s->registry, "vllm:cache_config_info", l), 1);
    free(l);
}

void bt_wstats_engine(struct bt_wstats *s, const char *plugin, const char *device, bool exact)
{
    char *l = bt_sprintf("plugin=\"%s\",device=\"%s\",exact=\"%d\"", plugin, device, exact);
    bt_metric_set(bt_metrics_gauge(s->registry, "baton_worker_engine_info", l), 1);
    free(l);
}

void bt_wstats_cost(struct bt_wstats *s, const struct bt_batch_cost *c, uint64_t steps)
{
    const double v[] = {c->base_ns, c->kv_ns, c->attn_ns, c->experts_ns, c->missed};
    _Static_assert(BT_ARRAY_LEN(v) == BT_WLOAD_COSTS, "the segments' prices lie behind them");
    for (size_t i = 0; i < BT_ARRAY_LEN(v); i++) {
        atomic_store_explicit(&s->load.cost[i], v[i], memory_order_relaxed);
    }
    for (size_t i = 0; i < BT_BATCH_SEGMENTS; i++) {
        atomic_store_explicit(&s->load.cost[BT_WLOAD_COSTS + i], c->token_ns[i],
                              memory_order_relaxed);
    }
    atomic_store(&s->load.cost_steps, steps);
}

/* A reader may see coefficients of two consecutive steps; they differ by little. */
static void load_cost(const struct bt_wstats *s, struct bt_wload *l)
{
    uint64_t steps = atomic_load(&s->load.cost_steps);
    if (steps == 0) {
        return;
    }
    baton__step_cost__init(&l->cost);
    l->cost.steps = steps;
    l->cost.base_ns = atomic_load(&s->load.cost[0]);
    l->cost.kv_ns = atomic_load(&s->load.cost[1]);
    l->cost.attn_ns = atomic_load(&s->load.cost[2]);
    l->cost.experts_ns = atomic_load(&s->load.cost[3]);
    l->cost.missed = atomic_load(&s->load.cost[4]);
    for (size_t i = 0; i < BT_BATCH_SEGMENTS; i++) {
        l->token_ns[i] = atomic_load(&s->load.cost[BT_WLOAD_COSTS + i]);
    }
    l->cost.token_ns = l->token_ns;
    l->cost.n_token_ns = BT_BATCH_SEGMENTS;
    l->load.cost = &l->cost;
}

void bt_wstats_classes(struct bt_wstats *s, const struct bt_classes *c)
{
    uint32_t turn = atomic_load(&s->load.classes.turn);
    atomic_store(&s->load.classes.turn, turn + 1);
    atomic_store(&s->load.classes.n, c->n);
    for (uint32_t i = 0; i < c->n; i++) {
        atomic_store(&s->load.classes.of[i].priority, c->of[i].priority);
        atomic_store(&s->load.classes.of[i].queue_ms, c->of[i].queue_ns / 1e6);
        atomic_store(&s->load.classes.of[i].rows, c->of[i].rows);
        atomic_store(&s->load.classes.of[i].pages, c->of[i].pages);
        atomic_store(&s->load.classes.of[i].waiting, c->of[i].waiting);
        atomic_store(&s->load.classes.of[i].landing, c->of[i].landing);
    }
    atomic_store(&s->load.classes.turn, turn + 2);
}

/* All classes must come from one turn of the engine thread: a mixture of two turns would be wrong,
 * not only old. If the engine thread wrote during each try, no classes are reported, and the
 * conductor counts the whole queue for every request. */
#define CLASSES_TRIES 100

static void load_classes(const struct bt_wstats *s, struct bt_wload *l)
{
    for (int try = 0; try < CLASSES_TRIES; try++) {
        uint32_t turn = atomic_load(&s->load.classes.turn);
        uint32_t n = BT_MIN(atomic_load(&s->load.classes.n), (uint32_t)BT_CLASSES_MAX);
        for (uint32_t i = 0; i < n; i++) {
            Baton__ClassLoad *k = l->classes[i] = &l->class[i];
            baton__class_load__init(k);
            k->priority = atomic_load(&s->load.classes.of[i].priority);
            k->queue_ms = atomic_load(&s->load.classes.of[i].queue_ms);
            k->rows = atomic_load(&s->load.classes.of[i].rows);
            k->pages = atomic_load(&s->load.classes.of[i].pages);
            k->waiting = atomic_load(&s->load.classes.of[i].waiting);
            k->landing = atomic_load(&s->load.classes.of[i].landing);
        }
        if (turn % 2 == 0 && atomic_load(&s->load.classes.turn) == turn) {
            l->load.n_classes = n;
            l->load.classes = l->classes;
            return;
        }
    }
}

void bt_wstats_load(const struct bt_wstats *s, uint32_t max_model_len, struct bt_wload *out)
{
    Baton__WorkerLoad *l = &out->load;
    baton__worker_load__init(l);
    l->running = atomic_load(&s->load.running);
    l->waiting = atomic_load(&s->load.waiting);
    l->pages_total = atomic_load(&s->load.pages_total);
    l->pages_free = atomic_load(&s->load.pages_free);
    l->slots_total = atomic_load(&s->load.slots_total);
    l->slots_free = atomic_load(&s->load.slots_free);
    l->queued_prefill_tokens = atomic_load(&s->load.queued_tokens);
    l->prefill_tokens_per_s = (double)atomic_load(&s->load.prefill_mtps) / 1e3;
    l->step_ms = (double)atomic_load(&s->load.step_us) / 1e3;
    l->row_tokens = (double)atomic_load(&s->load.row_mtokens) / 1e3;
    l->max_model_len = max_model_len;
    l->kv_tokens = atomic_load(&s->load.kv_tokens);
    uint64_t now = bt_mono_ns(), end = atomic_load(&s->load.queue_end_ns);
    l->queue_ms = end > now ? (double)(end - now) / 1e6 : 0;
    l->chunk_tokens = atomic_load(&s->load.chunk_tokens);
    l->landing = atomic_load(&s->load.landing);
    load_cost(s, out);
    load_classes(s, out);
}
