/* The metrics of the request machine: names, help texts, buckets. Pure. */
#include <stdio.h>

#include "conductor/request/machine_priv.h"

const char *const bt_success_names[BT_SUCCESS_REASONS] = {"stop", "length", "abort", "error"};

static void register_latencies(struct bt_machine *mc)
{
    /* Dashboards that read these names expect these buckets. */
    static const double ttft[] = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
                                  1,     2.5,   5,    7.5,  10,   20,   40,   80,  160,  640, 2560};
    static const double itl[] = {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
                                 0.75, 1,     2.5,  5,     7.5, 10,   20,  40,  80};
    static const double e2e[] = {0.3, 0.5, 0.8, 1,  1.5, 2,   2.5, 5,   10,   15,  20,
                                 30,  40,  50,  60, 120, 240, 480, 960, 1920, 7680};
    static const double queue[] = {0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100};
    struct bt_metrics *m = mc->metrics;
    const char *l = mc->labels;
    mc->m.queue = bt_metrics_histogram(m, "vllm:request_queue_time_seconds", mc->labels, queue,
                                       BT_ARRAY_LEN(queue));
    mc->m.ttft = bt_metrics_histogram(m, "vllm:time_to_first_token_seconds", mc->labels, ttft,
                                      BT_ARRAY_LEN(ttft));
    mc->m.itl = bt_metrics_histogram(m, "vllm:inter_token_latency_seconds", mc->labels, itl,
                                     BT_ARRAY_LEN(itl));
    mc->m.e2e = bt_metrics_histogram(m, "vllm:e2e_request_latency_seconds", mc->labels, e2e,
                                     BT_ARRAY_LEN(e2e));
    mc->m.tpot =
        bt_metrics_histogram(m, "vllm:time_per_output_token_seconds", l, itl, BT_ARRAY_LEN(itl));
    mc->m.prefill =
        bt_metrics_histogram(m, "vllm:request_prefill_time_seconds", l, e2e, BT_ARRAY_LEN(e2e));
    mc->m.decode =
        bt_metrics_histogram(m, "vllm:request_decode_time_seconds", l, e2e, BT_ARRAY_LEN(e2e));
    mc->m.inference =
        bt_metrics_histogram(m, "vllm:request_inference_time_seconds", l, e2e, BT_ARRAY_LEN(e2e));
}

/* The same buckets as vLLM: 1, 2, 5 times the powers of ten. They do not depend on the model's
 * context, so that the series of several models can be added. */
static void register_lengths(struct bt_machine *mc)
{
    static const double tokens[] = {1,    2,    5,    10,    20,    50,    100,    200,    500,
                                    1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000};
    static const double choices[] = {1, 2, 5, 10, 20};
    struct bt_metrics *m = mc->metrics;
    const char *l = mc->labels;
    size_t n = BT_ARRAY_LEN(tokens);
    mc->m.prompt_length = bt_metrics_histogram(m, "vllm:request_prompt_tokens", l, tokens, n);
    mc->m.answer_length = bt_metrics_histogram(m, "vllm:request_generation_tokens", l, tokens, n);
    mc->m.longest_answer =
        bt_metrics_histogram(m, "vllm:request_max_num_generation_tokens", l, tokens, n);
    mc->m.max_tokens = bt_metrics_histogram(m, "vllm:request_params_max_tokens", l, tokens, n);
    mc->m.choices =
        bt_metrics_histogram(m, "vllm:request_params_n", l, choices, BT_ARRAY_LEN(choices));
}

static void register_errors(struct bt_machine *mc)
{
    static const double bounds[] = {0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 1, 2, 5};
    mc->m.ttft_error = bt_metrics_histogram(mc->metrics, "baton_plan_error_ratio", "of=\"ttft\"",
                                            bounds, BT_ARRAY_LEN(bounds));
    mc->m.tbt_error = bt_metrics_histogram(mc->metrics, "baton_plan_error_ratio", "of=\"tbt\"",
                                           bounds, BT_ARRAY_LEN(bounds));
}

static void register_reasons(struct bt_machine *mc)
{
    static const char *const reject[BT_REJECT_REASONS] = {"queue_full", "draining",   "no_worker",
                                                          "too_large",  "overloaded", "no_room",
                                                          "invalid",    "deadline",   "failed"};
    char l[256];
    for (size_t i = 0; i < BT_SUCCESS_REASONS; i++) {
        snprintf(l, sizeof(l), "%s,finished_reason=\"%s\"", mc->labels, bt_success_names[i]);
        mc->m.finished[i] = bt_metrics_counter(mc->metrics, "vllm:request_success_total", l);
    }
    for (size_t i = 0; i < BT_REJECT_REASONS; i++) {
        snprintf(l, sizeof(l), "reason=\"%s\"", reject[i]);
        mc->m.rejected[i] = bt_metrics_counter(mc->metrics, "baton_requests_rejected_total", l);
    }
    for (size_t i = 0; i < BT_SCHED_REASONS; i++) {
        for (int local = 0; local < 2; local++) {
            snprintf(l, sizeof(l), "kind=\"%s\",reason=\"%s\"", local ? "local" : "disaggregated",
                     bt_sched_reason_names[i]);
            mc->m.plan[local][i] = bt_sched_reason_of[i][local]
                                       ? bt_metrics_counter(mc->metrics, "baton_plan_total", l)
                                       : NULL;
        }
    }
    mc->m.fetch_plans = bt_metrics_counter(mc->metrics, "baton_plan_fetches_total", NULL);
    mc->m.fetch_tokens = bt_metrics_counter(mc->metrics, "baton_plan_fetch_tokens_total", NULL);
    mc->m.places_short = bt_metrics_counter(mc->metrics, "baton_plan_places_short_total", NULL);
}

void bt_machine_register(struct bt_machine *mc)
{
    struct bt_metrics *m = mc->metrics;
    register_latencies(mc);
    register_lengths(mc);
    register_errors(mc);
    register_reasons(mc);
    mc->m.running = bt_metrics_gauge(m, "vllm:num_requests_running", mc->labels);
    mc->m.waiting = bt_metrics_gauge(m, "vllm:num_requests_waiting", mc->labels);
    mc->m.prompt = bt_metrics_counter(m, "vllm:prompt_tokens_total", mc->labels);
    mc->m.generation = bt_metrics_counter(m, "vllm:generation_tokens_total", mc->labels);
    mc->m.in_time = bt_metrics_counter(m, "baton_requests_in_time_total", NULL);
    mc->m.cached = bt_metrics_counter(m, "vllm:prompt_tokens_cached_total", mc->labels);
    mc->m.replanned = bt_metrics_counter(m, "baton_requests_replanned_total", NULL);
    mc->m.stuck = bt_metrics_counter(m, "baton_requests_stuck_total", NULL);
    mc->m.moved = bt_metrics_counter(m, "baton_requests_moved_total", NULL);
    mc->m.stale = bt_metrics_counter(m, "baton_stale_messages_total", NULL);
    mc->m.ended_late = bt_metrics_counter(m, "baton_requests_never_ended_total", NULL);
}
