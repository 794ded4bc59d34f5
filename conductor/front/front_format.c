/* OpenAI's response formats. Load generators rely on the following (found in their sources). An
 * event is "data: {json}\n\n". Every event has id, object, created and model. The first event with
 * choices contains the first token, so no event with only a role precedes it. Usage comes only on
 * request, in an event without choices. The last line is "data: [DONE]". */
#include "conductor/front/front_format.h"

#include <stdlib.h>
#include <string.h>

#include "conductor/front/front_write.h"

static void init(struct bt_front_answer *a, const char *id, const char *model, uint64_t created_s)
{
    const char *object = !a->opt.chat    ? "text_completion"
                         : a->opt.stream ? "chat.completion.chunk"
                                         : "chat.completion";
    bt_buf_printf(&a->prefix, "{\"id\":\"%s\",\"object\":\"%s\",\"created\":%llu,\"model\":", id,
                  object, (unsigned long long)created_s);
    bt_front_put_cstr(&a->prefix, model);
}

/* ---- usage ---- */

/* thoughts: number of reasoning tokens; -1: the model has no reasoning. */
static void put_usage(uint32_t prompt, uint32_t completion, int64_t thoughts,
                      const struct bt_gen_usage *u, struct bt_buf *out)
{
    bt_buf_puts(out, "\"usage\":{\"prompt_tokens\":");
    bt_front_put_uint(out, prompt);
    bt_buf_puts(out, ",\"completion_tokens\":");
    bt_front_put_uint(out, completion);
    bt_buf_puts(out, ",\"total_tokens\":");
    bt_front_put_uint(out, (uint64_t)prompt + completion);
    if (u != NULL) {
        bt_buf_puts(out, ",\"prompt_tokens_details\":{\"cached_tokens\":");
        bt_front_put_uint(out, u->cached_tokens);
        bt_buf_puts(out, "}");
    }
    bool predicted = u != NULL && u->predicted_tokens > 0;
    if (thoughts >= 0 || predicted) {
        bt_buf_puts(out, ",\"completion_tokens_details\":{");
    }
    if (thoughts >= 0) {
        bt_buf_puts(out, "\"reasoning_tokens\":");
        bt_front_put_uint(out, (uint64_t)thoughts);
    }
    if (predicted) {
        bt_buf_puts(out, thoughts >= 0 ? "," : "");
        bt_buf_puts(out, "\"accepted_prediction_tokens\":");
        bt_front_put_uint(out, u->accepted_tokens);
        bt_buf_puts(out, ",\"rejected_prediction_tokens\":");
        bt_front_put_uint(out, u->predicted_tokens - u->accepted_tokens);
    }
    if (thoughts >= 0 || predicted) {
        bt_buf_puts(out, "}");
    }
    bt_buf_puts(out, "}");
}

static bool has_thoughts(const struct bt_front_answer *a)
{
    return a->opt.parts.reply.style.thoughts != BT_THOUGHTS_NONE;
}

static void put_timings(const struct bt_gen_usage *u, struct bt_buf *out)
{
    const struct {
        const char *name;
        double v;
    } times[] = {{"ttft_ms", u->ttft_ms},
                 {"queue_ms", u->queue_ms},
                 {"prefill_ms", u->prefill_ms},
                 {"decode_ms", u->decode_ms},
                 {"hidden_fraction", u->hidden_fraction}};
    bt_buf_printf(out,
                  "\"timings\":{\"prompt_tokens\":%u,\"completion_tokens\":%u,\"cached_tokens\":%u,"
                  "\"kv_bytes\":%llu,\"kv_segments\":%llu,\"replans\":%u",
                  u->prompt_tokens, u->completion_tokens, u->cached_tokens,
                  (unsigned long long)u->kv_bytes, (unsigned long long)u->kv_segments, u->replans);
    for (size_t i = 0; i < BT_ARRAY_LEN(times); i++) {
        bt_buf_printf(out, ",\"%s\":", times[i].name);
        bt_front_put_known(out, times[i].v);
    }
    bt_buf_puts(out, ",\"prefill\":");
    bt_front_put_str(out, u->prefill, strnlen(u->prefill, sizeof(u->prefill)));
    bt_buf_puts(out, ",\"decode\":");
    bt_front_put_str(out, u->decode, strnlen(u->decode, sizeof(u->decode)));
    bt_buf_puts(out, "}");
}

static void put_name(struct bt_buf *out, const char *key, const char *name, size_t max)
{
    bt_buf_printf(out, "\"%s\":", key);
    if (name[0] != '\0') {
        bt_front_put_str(out, name, strnlen(name, max));
    } else {
        bt_buf_puts(out, "null");
    }
}

static void put_ms(struct bt_buf *out, const char *key, double ms)
{
    bt_buf_printf(out, "\"%s\":", key);
    bt_front_put_known(out, ms);
}

/* Writes the predicted times of the request's first plan, and the actual times. */
static void put_plan(const struct bt_gen_usage *u, struct bt_buf *out)
{
    const struct bt_gen_plan *p = &u->plan;
    const struct {
        const char *name;
        double ttft_ms, tbt_ms, queue_ms, prefill_ms;
        uint32_t cached;
    } both[] = {{"predicted", p->ttft_ms, p->tbt_ms, p->queue_ms, p->prefill_ms, p->cached_tokens},
                {"actual", u->ttft_ms, u->tbt_ms, u->queue_ms, u->prefill_ms, u->cached_tokens}};
    bt_buf_puts(out, "\"plan\":{");
    put_name(out, "prefill", p->prefill, sizeof(p->prefill));
    bt_buf_puts(out, ",");
    put_name(out, "decode", p->decode, sizeof(p->decode));
    bt_buf_puts(out, ",");
    put_name(out, "source", p->source, sizeof(p->source));
    bt_buf_puts(out, ",");
    put_name(out, "reason", p->reason, sizeof(p->reason));
    bt_buf_printf(out, ",\"fetch_tokens\":%u", p->fetch_tokens);
    for (size_t i = 0; i < BT_ARRAY_LEN(both); i++) {
        bt_buf_printf(out, ",\"%s\":{\"cached_tokens\":%u,", both[i].name, both[i].cached);
        put_ms(out, "ttft_ms", both[i].ttft_ms);
        bt_buf_puts(out, ",");
        put_ms(out, "tbt_ms", both[i].tbt_ms);
        bt_buf_puts(out, ",");
        put_ms(out, "queue_ms", both[i].queue_ms);
        bt_buf_puts(out, ",");
        put_ms(out, "prefill_ms", both[i].prefill_ms);
        bt_buf_puts(out, "}");
    }
    bt_buf_printf(out, ",\"replans\":%u,", u->replans);
    put_name(out, "again", u->again, sizeof(u->again));
    bt_buf_puts(out, ",\"served_by\":{"); /* the workers of the last plan */
    put_name(out, "prefill", u->prefill, sizeof(u->prefill));
    bt_buf_puts(out, ",");
    put_name(out, "decode", u->decode, sizeof(u->decode));
    bt_buf_puts(out, "}}");
}

void bt_front_put_usage(const struct bt_front_answer *a, const struct bt_gen_usage *u,
                        struct bt_buf *out)
{
    put_usage(u->prompt_tokens, u->completion_tokens,
              has_thoughts(a) ? (int64_t)bt_front_thought_tokens(a) : -1, u, out);
}

/* Writes the additional objects that a request may ask for. */
void bt_front_put_extras(const struct bt_front_answer *a, const struct bt_gen_usage *u,
                         struct bt_buf *out)
{
    if (a->timings) {
        bt_buf_puts(out, ",");
        put_timings(u, out);
    }
    if (a->plan) {
        bt_buf_puts(out, ",");
        put_plan(u, out);
    }
}

/* ---- choices ---- */

/* Writes ,"logprobs":... */
static void put_logprobs(struct bt_front_answer *a, struct bt_front_choice *c, struct bt_buf *out)
{
    if (a->opt.logprobs < 0) {
        bt_buf_puts(out, ",\"logprobs\":null");
    } else {
        bt_buf_puts(out, ",\"logprobs\":");
        bt_front_logprobs_put(&c->lp, a->opt.chat, out);
    }
}

void bt_front_put_finish(const struct bt_front_choice *c, struct bt_buf *out)
{
    if (c->end == FRONT_RUNS) {
        bt_buf_puts(out, ",\"finish_reason\":null,\"stop_reason\":null");
        return;
    }
    bt_buf_puts(out, ",\"finish_reason\":\"");
    bt_buf_puts(out, c->end == FRONT_LENGTH  ? "length"
                     : c->end == FRONT_CALLS ? "tool_calls"
                                             : "stop");
    bt_buf_puts(out, "\",\"stop_reason\":");
    if (c->stop_string != NULL) {
        bt_front_put_cstr(out, c->stop_string);
    } else if (c->stop_by_id) {
        bt_front_put_uint(out, c->last_id);
    } else {
        bt_buf_puts(out, "null");
    }
}

/* ---- streams ---- */

static void put_event_head(struct bt_front_answer *a, uint32_t choice, struct bt_buf *out)
{
    bt_buf_puts(out, "data: ");
    bt_buf_append(out, a->prefix.data, a->prefix.len);
    bt_buf_puts(out, ",\"choices\":[{\"index\":");
    bt_front_put_uint(out, choice);
}

void bt_front_put_event_head(struct bt_front_answer *a, uint32_t choice, struct bt_buf *out)
{
    struct bt_front_choice *c = &a->choices[choice];
    put_event_head(a, choice, out);
    if (!a->opt.chat) {
        bt_buf_puts(out, ",\"text\":\"");
    } else {
        bt_buf_puts(out, c->role_sent ? ",\"delta\":{\"content\":\""
                                      : ",\"delta\":{\"role\":\"assistant\",\"content\":\"");
        c->role_sent = true;
    }
}

static struct bt_front_call *call_of(struct bt_front_choice *c, uint32_t call)
{
    if (call == c->n_calls) {
        if (c->n_calls == c->calls_cap) {
            c->calls_cap = c->calls_cap == 0 ? 4 : c->calls_cap * 2;
            c->calls = bt_realloc(c->calls, c->calls_cap * sizeof(c->calls[0]));
        }
        c->calls[c->n_calls++] = (struct bt_front_call){0};
    }
    BT_ASSERT(call < c->n_calls);
    return &c->calls[call];
}

static void keep_bit(struct bt_front_choice *c, const struct bt_reply_bit *b)
{
    struct bt_buf *to = b->kind == BT_REPLY_TEXT        ? &c->text
                        : b->kind == BT_REPLY_REASONING ? &c->thoughts
                        : b->kind == BT_REPLY_CALL      ? &call_of(c, b->call)->name
                                                        : &call_of(c, b->call)->arguments;
    bt_buf_append(to, b->text, b->len);
}

static void keep(struct bt_front_answer *a, uint32_t choice, const struct bt_reply_bit *bits,
                 size_t n)
{
    for (size_t i = 0; i < n; i++) {
        keep_bit(&a->choices[choice], &bits[i]);
    }
}

/* ,"key":"all texts of this kind"; nothing if there are none. */
static void put_kind(enum bt_reply_kind kind, const char *key, const struct bt_reply_bit *bits,
                     size_t n, struct bt_buf *out)
{
    bool any = false;
    for (size_t i = 0; i < n; i++) {
        if (bits[i].kind == kind) {
            if (!any) {
                bt_buf_printf(out, ",\"%s\":\"", key);
            }
            any = true;
            bt_front_put_text(out, bits[i].text, bits[i].len);
        }
    }
    bt_buf_puts(out, any ? "\"" : "");
}

void bt_front_put_call_head(const struct bt_front_answer *a, uint32_t choice, uint32_t call,
                            const char *name, size_t len, struct bt_buf *out)
{
    char id[FRONT_CALL_ID];
    bt_front_call_id(a, choice, call, id);
    bt_buf_printf(out, "\"id\":\"%s\",\"type\":\"function\",\"function\":{\"name\":", id);
    bt_front_put_str(out, name, len);
    bt_buf_puts(out, ",\"arguments\":\"");
}

/* ,"tool_calls":[...]: the calls that begin or continue. */
static void put_calls(const struct bt_front_answer *a, uint32_t choice,
                      const struct bt_reply_bit *bits, size_t n, struct bt_buf *out)
{
    int64_t open = -1; /* the call that is being written */
    for (size_t i = 0; i < n; i++) {
        const struct bt_reply_bit *b = &bits[i];
        if (b->kind != BT_REPLY_CALL && b->kind != BT_REPLY_ARGUMENTS) {
            continue;
        }
        if (open != (int64_t)b->call) {
            bt_buf_puts(out, open < 0 ? ",\"tool_calls\":[" : "\"}},");
            bt_buf_puts(out, "{\"index\":");
            bt_front_put_uint(out, b->call);
            bt_buf_puts(out, ",");
            if (b->kind == BT_REPLY_CALL) {
                bt_front_put_call_head(a, choice, b->call, b->text, b->len, out);
            } else {
                bt_buf_puts(out, "\"function\":{\"arguments\":\"");
            }
            open = b->call;
        }
        if (b->kind == BT_REPLY_ARGUMENTS) {
            bt_front_put_text(out, b->text, b->len);
        }
    }
    bt_buf_puts(out, open >= 0 ? "\"}}]" : "");
}

/* Writes the delta of an answer with reasoning or calls. It has only members that are not empty. */
static void put_parts(struct bt_front_answer *a, uint32_t choice, const struct bt_reply_bit *bits,
                      size_t n, struct bt_buf *out)
{
    struct bt_front_choice *c = &a->choices[choice];
    put_event_head(a, choice, out);
    bt_buf_puts(out, ",\"delta\":{");
    size_t at = out->len;
    bt_buf_puts(out, c->role_sent ? "" : ",\"role\":\"assistant\"");
    c->role_sent = true;
    put_kind(BT_REPLY_REASONING, "reasoning_content", bits, n, out);
    put_kind(BT_REPLY_REASONING, "reasoning", bits, n, out);
    put_kind(BT_REPLY_TEXT, "content", bits, n, out);
    put_calls(a, choice, bits, n, out);
    if (out->len > at) { /* the first member has no comma before it */
        memmove(out->data + at, out->data + at + 1, out->len - at - 1);
        out->len--;
    }
    bt_buf_puts(out, "}");
}

static void put_delta(struct bt_front_answer *a, uint32_t choice, const struct bt_reply_bit *bits,
                      size_t n, struct bt_buf *out)
{
    bool parts = a->choices[choice].reply != NULL;
    if (parts) {
        put_parts(a, choice, bits, n, out);
    } else {
        bt_front_put_event_head(a, choice, out);
        for (size_t i = 0; i < n; i++) {
            bt_front_put_text(out, bits[i].text, bits[i].len);
        }
        bt_buf_puts(out, a->opt.chat ? "\"}" : "\"");
    }
    if (bits != NULL || parts) { /* tokens may have arrived whose text is held back */
        put_logprobs(a, &a->choices[choice], out);
    } else {
        bt_buf_puts(out, ",\"logprobs\":null");
    }
}

static void complete(struct bt_front_answer *a, uint32_t choice, struct bt_buf *out)
{
    bt_front_put_finish(&a->choices[choice], out);
    bt_buf_puts(out, "}]");
    if (a->opt.continuous_usage) { /* of this choice, without cached tokens: they are known only at
                                    * the end */
        bt_buf_puts(out, ",");
        const struct bt_front_choice *c = &a->choices[choice];
        put_usage(bt_front_prompt_of(a, choice)->n_tokens, c->tokens,
                  has_thoughts(a) ? (int64_t)c->thought_tokens : -1, NULL, out);
    } else if (a->opt.include_usage) {
        bt_buf_puts(out, ",\"usage\":null");
    }
    bt_buf_puts(out, "}\n\n");
}

/* The events after the last choice: usage and timings if asked for, then [DONE]. */
static bool put_last(struct bt_front_answer *a, const struct bt_gen_usage *u,
                     struct bt_front_writer *w, struct bt_buf *out)
{
    (void)w;
    if (a->opt.include_usage || a->timings || a->plan) {
        bt_buf_puts(out, "data: ");
        bt_buf_append(out, a->prefix.data, a->prefix.len);
        bt_buf_puts(out, ",\"choices\":[]");
        if (a->opt.include_usage) {
            bt_buf_puts(out, ",");
            bt_front_put_usage(a, u, out);
        }
        bt_front_put_extras(a, u, out);
        bt_buf_puts(out, "}\n\n");
    }
    bt_buf_puts(out, "data: [DONE]\n\n");
    return true;
}

/* Writes an error event without [DONE], because the client already has a part of the answer. */
static void put_error(struct bt_front_answer *a, const struct bt_front_error *e, struct bt_buf *out)
{
    (void)a;
    bt_buf_puts(out, "data: ");
    bt_front_error_json(e, out);
    bt_buf_puts(out, "\n\n");
}

const struct bt_front_format bt_front_format_completions = {.id_prefix = "cmpl-",
                                                            .init = init,
                                                            .keep = keep,
                                                            .delta = put_delta,
                                                            .complete = complete,
                                                            .error = put_error,
                                                            .echo = bt_front_write_echo,
                                                            .last = put_last,
                                                            .whole = bt_front_write_whole};

const struct bt_front_format bt_front_format_chat = {.id_prefix = "chatcmpl-",
                                                     .init = init,
                                                     .keep = keep,
                                                     .delta = put_delta,
                                                     .complete = complete,
                                                     .error = put_error,
                                                     .last = put_last,
                                                     .whole = bt_front_write_whole};
