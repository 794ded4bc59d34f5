/* Spans from records. Names of attributes: gen_ai.* where OpenTelemetry's conventions for
 * generative AI have one, baton.* for the rest; predictions are beside what happened. Not pure: it
 * reads both clocks, to turn times of one into those of the other. */
#include "conductor/request/spans.h"

#include <stdio.h>
#include <string.h>

#include "common/base/clock.h"

static void put_ms(struct bt_span *s, const char *key, double ms)
{
    if (ms >= 0) {
        bt_span_double(s, key, ms);
    }
}

static void put_name(struct bt_span *s, const char *key, const char *name)
{
    if (name[0] != '\0') {
        bt_span_text(s, key, name);
    }
}

static void request_attrs(struct bt_span *s, const char *operation, const char *model,
                          const struct bt_gen_spec *spec)
{
    bt_span_text(s, "gen_ai.operation.name", operation);
    bt_span_text(s, "gen_ai.provider.name", "baton");
    bt_span_text(s, "gen_ai.request.model", model);
    bt_span_text(s, "gen_ai.response.model", model);
    bt_span_text(s, "gen_ai.response.id", spec->id != NULL ? spec->id : "");
    bt_span_int(s, "gen_ai.request.max_tokens", spec->max_tokens);
    bt_span_double(s, "gen_ai.request.temperature", (double)spec->sampling.temperature);
    bt_span_double(s, "gen_ai.request.top_p", (double)spec->sampling.top_p);
    if (spec->n > 1) {
        bt_span_int(s, "gen_ai.request.choice.count", spec->n);
    }
}

static void result_attrs(struct bt_span *s, const struct bt_gen_usage *u,
                         const struct bt_record *rec)
{
    bt_span_int(s, "gen_ai.usage.input_tokens", u->prompt_tokens);
    bt_span_int(s, "gen_ai.usage.output_tokens", u->completion_tokens);
    bt_span_texts(s, "gen_ai.response.finish_reasons", rec->finish);
    bt_span_int(s, "baton.cached_tokens", u->cached_tokens);
    bt_span_int(s, "baton.replans", u->replans);
    put_ms(s, "baton.ttft_ms", u->ttft_ms);
    put_ms(s, "baton.predicted.ttft_ms", u->plan.ttft_ms);
    put_ms(s, "baton.tbt_ms", u->tbt_ms);
    put_ms(s, "baton.predicted.tbt_ms", u->plan.tbt_ms);
    if (rec->lost > 0) {
        bt_span_int(s, "baton.lost_stages", rec->lost);
    }
    if (rec->http != 0) {
        bt_span_int(s, "http.response.status_code", rec->http);
        char type[16];
        snprintf(type, sizeof(type), "%d", rec->http);
        bt_span_text(s, "error.type", type);
        bt_span_fail(s, rec->error);
    }
}

static void plan_attrs(struct bt_span *s, const struct bt_stage *g)
{
    bt_span_text(s, "baton.reason", g->why);
    put_name(s, "baton.prefill_worker", g->from);
    put_name(s, "baton.decode_worker", g->to);
    bt_span_int(s, "baton.tokens", g->tokens);
    bt_span_int(s, "baton.predicted.cached_tokens", g->cached_tokens);
    bt_span_int(s, "baton.predicted.fetch_tokens", g->fetch_tokens);
    put_ms(s, "baton.predicted.queue_ms", g->queue_ms);
    put_ms(s, "baton.predicted.prefill_ms", g->prefill_ms);
    put_ms(s, "baton.predicted.ttft_ms", g->ttft_ms);
    put_ms(s, "baton.predicted.tbt_ms", g->tbt_ms);
}

static void stage_attrs(struct bt_span *s, const struct bt_stage *g)
{
    double ms = (double)(g->end_ns - g->start_ns) / 1e6;
    bt_span_int(s, "baton.epoch", g->epoch);
    bt_span_int(s, "baton.choice", g->choice);
    switch (g->kind) {
    case BT_STAGE_QUEUE: break;
    case BT_STAGE_REPLAN: bt_span_text(s, "baton.reason", g->why); break;
    case BT_STAGE_PLAN: plan_attrs(s, g); break;
    case BT_STAGE_PREFILL:
        put_name(s, "baton.worker", g->from);
        bt_span_int(s, "baton.tokens", g->tokens);
        bt_span_int(s, "baton.cached_tokens", g->cached_tokens);
        bt_span_double(s, "baton.prefill_ms", ms);
        put_ms(s, "baton.predicted.prefill_ms", g->prefill_ms);
        put_ms(s, "baton.predicted.queue_ms", g->queue_ms);
        break;
    case BT_STAGE_FLOW:
        put_name(s, "baton.sender", g->from);
        put_name(s, "baton.receiver", g->to);
        bt_span_int(s, "baton.bytes", (int64_t)g->bytes);
        bt_span_int(s, "baton.segments", (int64_t)g->segments);
        break;
    case BT_STAGE_DECODE:
        put_name(s, "baton.worker", g->from);
        bt_span_int(s, "baton.tokens", g->tokens);
        put_ms(s, "baton.predicted.tbt_ms", g->tbt_ms);
        break;
    }
}

void bt_spans_offer(struct bt_trace *t, const char *model, const struct bt_gen_spec *spec,
                    const struct bt_gen_usage *usage, const struct bt_record *rec)
{
    static const char *const names[] = {"queue", "replan", "plan", "prefill", "flow", "decode"};
    uint64_t ahead_ns = bt_real_ns() - bt_mono_ns();
    struct bt_spans *all = bt_spans_create(rec->n + 1);
    const char *operation = spec->operation != NULL ? spec->operation : "text_completion";
    char name[BT_SPAN_TEXT_MAX];
    snprintf(name, sizeof(name), "%s %s", operation, model);
    struct bt_span *root = bt_spans_add(all, name, BT_SPAN_SERVER);
    root->has_parent = spec->trace.has_parent;
    memcpy(root->parent_id, spec->trace.parent_id, sizeof(root->parent_id));
    root->start_ns = ahead_ns + rec->received_ns;
    root->end_ns = ahead_ns + rec->ended_ns;
    request_attrs(root, operation, model, spec);
    result_attrs(root, usage, rec);
    for (uint32_t i = 0; i < rec->n; i++) {
        const struct bt_stage *g = &rec->at[i];
        struct bt_span *s = bt_spans_add(all, names[g->kind], BT_SPAN_INTERNAL);
        s->has_parent = true;
        memcpy(s->parent_id, root->span_id, sizeof(s->parent_id));
        s->start_ns = ahead_ns + g->start_ns;
        s->end_ns = ahead_ns + g->end_ns;
        stage_attrs(s, g);
    }
    for (uint32_t i = 0; i < all->n; i++) {
        memcpy(all->at[i].trace_id, spec->trace.trace_id, sizeof(spec->trace.trace_id));
    }
    bt_trace_offer(t, all);
}
