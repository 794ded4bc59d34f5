/* Answers of OpenAI's POST /v1/responses: a list of output items (message, reasoning,
 * function_call). A stream announces each item, sends its text in deltas, repeats the whole text in
 * events that end it, and ends with the whole response. All events are numbered. */
#include <string.h>

#include "conductor/front/front_format.h"
#include "conductor/front/front_write.h"

static void init(struct bt_front_answer *a, const char *id, const char *model, uint64_t created_s)
{
    bt_buf_printf(&a->prefix,
                  "{\"id\":\"%s\",\"object\":\"response\",\"created_at\":%llu,\"model\":", id,
                  (unsigned long long)created_s);
    bt_front_put_cstr(&a->prefix, model);
}

/* ---- items ---- */

static bool is_open(const struct bt_front_answer *a, const struct bt_front_item *item)
{
    return item == bt_front_items_last(&a->items);
}

static void put_item_id(const struct bt_front_answer *a, const struct bt_front_item *item,
                        struct bt_buf *out)
{
    static const char *const prefixes[] = {
        [BT_REPLY_TEXT] = "msg", [BT_REPLY_REASONING] = "rs", [BT_REPLY_CALL] = "fc"};
    bt_buf_printf(out, "\"%s_%s_%u\"", prefixes[item->kind], a->id + strlen(a->format->id_prefix),
                  (unsigned)(item - a->items.list));
}

/* The only part of a text or of reasoning. fresh: it is announced, and has no text yet. */
static void put_part(const struct bt_front_item *item, bool fresh, struct bt_front_script *s)
{
    static const struct bt_buf none;
    bool text = item->kind == BT_REPLY_TEXT;
    bt_buf_puts(&s->own, text ? "{\"type\":\"output_text\",\"text\":"
                              : "{\"type\":\"reasoning_text\",\"text\":");
    bt_front_script_string(s, fresh ? &none : &item->text);
    if (text) {
        bt_buf_puts(&s->own, ",\"annotations\":[],\"logprobs\":[");
        bt_front_script_raw(s, fresh ? &none : &item->logprobs);
        bt_buf_puts(&s->own, "]");
    }
    bt_buf_puts(&s->own, "}");
}

static void put_item(const struct bt_front_answer *a, const struct bt_front_item *item,
                     const char *status, bool fresh, struct bt_front_script *s)
{
    static const struct bt_buf none;
    bt_buf_puts(&s->own, "{\"id\":");
    put_item_id(a, item, &s->own);
    bt_buf_printf(&s->own, ",\"status\":\"%s\"", status);
    if (item->kind == BT_REPLY_CALL) {
        bt_buf_puts(&s->own, ",\"type\":\"function_call\",\"call_id\":");
        bt_front_put_call_id("call", a, item, &s->own);
        bt_buf_puts(&s->own, ",\"name\":");
        bt_front_put_cstr(&s->own, item->name);
        bt_buf_puts(&s->own, ",\"arguments\":");
        bt_front_script_string(s, fresh ? &none : &item->text);
    } else {
        bt_buf_puts(&s->own, item->kind == BT_REPLY_TEXT
                                 ? ",\"type\":\"message\",\"role\":\"assistant\",\"content\":["
                                 : ",\"type\":\"reasoning\",\"summary\":[],\"content\":[");
        if (!fresh) {
            put_part(item, false, s);
        }
        bt_buf_puts(&s->own, "]");
    }
    bt_buf_puts(&s->own, "}");
}

/* ---- the response object ---- */

static void put_usage(const struct bt_front_answer *a, const struct bt_gen_usage *u,
                      struct bt_buf *out)
{
    bt_buf_printf(out,
                  "{\"input_tokens\":%u,\"input_tokens_details\":{\"cached_tokens\":%u},"
                  "\"output_tokens\":%u,\"output_tokens_details\":{\"reasoning_tokens\":%u},"
                  "\"total_tokens\":%llu}",
                  u->prompt_tokens, u->cached_tokens, u->completion_tokens,
                  bt_front_thought_tokens(a),
                  (unsigned long long)u->prompt_tokens + u->completion_tokens);
}

/* u NULL: the usage is not known yet. e NULL: no error. */
static void put_response(const struct bt_front_answer *a, const char *status,
                         const struct bt_gen_usage *u, const struct bt_front_error *e,
                         struct bt_front_script *s)
{
    bool cut = a->choices[0].end == FRONT_LENGTH;
    bt_buf_append(&s->own, a->prefix.data, a->prefix.len);
    bt_buf_printf(&s->own, ",\"status\":\"%s\",\"error\":", status);
    if (e != NULL) {
        bt_buf_printf(&s->own,
                      "{\"code\":\"%s\",\"message\":", e->code != NULL ? e->code : e->type);
        bt_front_put_cstr(&s->own, e->message);
        bt_buf_puts(&s->own, "}");
    } else {
        bt_buf_puts(&s->own, "null");
    }
    bt_buf_printf(&s->own, ",\"incomplete_details\":%s,\"output\":[",
                  cut ? "{\"reason\":\"max_output_tokens\"}" : "null");
    for (uint32_t i = 0; i < a->items.n; i++) {
        const struct bt_front_item *item = &a->items.list[i];
        bt_buf_puts(&s->own, i > 0 ? "," : "");
        put_item(a, item, is_open(a, item) && (cut || e != NULL) ? "incomplete" : "completed",
                 false, s);
    }
    bt_buf_puts(&s->own, "],");
    bt_buf_append(&s->own, a->echoed.data, a->echoed.len);
    bt_buf_puts(&s->own, ",\"usage\":");
    if (u != NULL) {
        put_usage(a, u, &s->own);
        bt_front_put_extras(a, u, &s->own);
    } else {
        bt_buf_puts(&s->own, "null");
    }
    bt_buf_puts(&s->own, "}");
}

/* ---- streams ---- */

/* Begins an event. The caller appends members and "}\n\n". */
static void begin_event(struct bt_front_answer *a, const char *type, struct bt_buf *out)
{
    bt_buf_puts(out, "event: response.");
    bt_buf_puts(out, type);
    bt_buf_puts(out, "\ndata: {\"type\":\"response.");
    bt_buf_puts(out, type);
    bt_buf_puts(out, "\",\"sequence_number\":");
    bt_front_put_uint(out, a->sequence++);
}

static void put_place(const struct bt_front_answer *a, const struct bt_front_item *item,
                      struct bt_buf *out)
{
    bt_buf_puts(out, ",\"output_index\":");
    bt_front_put_uint(out, (uint64_t)(item - a->items.list));
    bt_buf_puts(out, ",\"item_id\":");
    put_item_id(a, item, out);
    bt_buf_puts(out, item->kind == BT_REPLY_CALL ? "" : ",\"content_index\":0");
}

static void put_response_event(struct bt_front_answer *a, const char *type, const char *status,
                               const struct bt_gen_usage *u, const struct bt_front_error *e,
                               struct bt_front_script *s)
{
    begin_event(a, type, &s->own);
    bt_buf_puts(&s->own, ",\"response\":");
    put_response(a, status, u, e, s);
    bt_buf_puts(&s->own, "}\n\n");
}

/* Writes all of a script at once. */
static void write_out(struct bt_front_script *s, struct bt_buf *out)
{
    while (!bt_front_script_write(s, out)) {
    }
    bt_front_script_cleanup(s);
}

static void begin(struct bt_front_answer *a, struct bt_buf *out)
{
    struct bt_front_script s = {0};
    put_response_event(a, "created", "in_progress", NULL, NULL, &s);
    put_response_event(a, "in_progress", "in_progress", NULL, NULL, &s);
    write_out(&s, out);
}

static void begin_item(struct bt_front_answer *a, const struct bt_front_item *item,
                       struct bt_buf *out)
{
    struct bt_front_script s = {0};
    begin_event(a, "output_item.added", &s.own);
    bt_buf_printf(&s.own, ",\"output_index\":%u,\"item\":", a->items.n - 1);
    put_item(a, item, "in_progress", true, &s);
    bt_buf_puts(&s.own, "}\n\n");
    if (item->kind != BT_REPLY_CALL) {
        begin_event(a, "content_part.added", &s.own);
        put_place(a, item, &s.own);
        bt_buf_puts(&s.own, ",\"part\":");
        put_part(item, true, &s);
        bt_buf_puts(&s.own, "}\n\n");
    }
    write_out(&s, out);
}

/* The events that end the open item. */
static void end_item(struct bt_front_answer *a, const char *status, struct bt_front_script *s)
{
    static const char *const names[][2] = {
        [BT_REPLY_TEXT] = {"output_text.done", ",\"text\":"},
        [BT_REPLY_REASONING] = {"reasoning_text.done", ",\"text\":"},
        [BT_REPLY_CALL] = {"function_call_arguments.done", ",\"arguments\":"}};
    const struct bt_front_item *item = bt_front_items_last(&a->items);
    if (item == NULL) {
        return;
    }
    begin_event(a, names[item->kind][0], &s->own);
    put_place(a, item, &s->own);
    bt_buf_puts(&s->own, names[item->kind][1]);
    bt_front_script_string(s, &item->text);
    if (item->kind == BT_REPLY_TEXT) {
        bt_buf_puts(&s->own, ",\"logprobs\":[");
        bt_front_script_raw(s, &item->logprobs);
        bt_buf_puts(&s->own, "]");
    } else if (item->kind == BT_REPLY_CALL) {
        bt_buf_puts(&s->own, ",\"name\":");
        bt_front_put_cstr(&s->own, item->name);
    }
    bt_buf_puts(&s->own, "}\n\n");
    if (item->kind != BT_REPLY_CALL) {
        begin_event(a, "content_part.done", &s->own);
        put_place(a, item, &s->own);
        bt_buf_puts(&s->own, ",\"part\":");
        put_part(item, false, s);
        bt_buf_puts(&s->own, "}\n\n");
    }
    begin_event(a, "output_item.done", &s->own);
    bt_buf_printf(&s->own, ",\"output_index\":%u,\"item\":", a->items.n - 1);
    put_item(a, item, status, false, s);
    bt_buf_puts(&s->own, "}\n\n");
}

/* Takes the bit into its item. The logprobs since the last text go with text. NULL: it says
 * nothing. */
static struct bt_front_item *keep_bit(struct bt_front_answer *a, const struct bt_reply_bit *bit,
                                      struct bt_buf *logprobs)
{
    struct bt_front_item *item = bt_front_items_of(&a->items, bit);
    if (item != NULL && bit->kind != BT_REPLY_CALL) {
        bt_front_items_text(&a->items, item, bit->text, bit->len);
    }
    if (item != NULL && bit->kind == BT_REPLY_TEXT) {
        bt_front_items_logprobs(&a->items, item, logprobs);
    }
    return item;
}

static void put_piece(struct bt_front_answer *a, const struct bt_front_item *item,
                      const struct bt_reply_bit *bit, const struct bt_buf *logprobs,
                      struct bt_buf *out)
{
    static const char *const names[] = {[BT_REPLY_TEXT] = "output_text.delta",
                                        [BT_REPLY_REASONING] = "reasoning_text.delta",
                                        [BT_REPLY_CALL] = "function_call_arguments.delta"};
    begin_event(a, names[item->kind], out);
    put_place(a, item, out);
    bt_buf_puts(out, ",\"delta\":");
    bt_front_put_str(out, bit->text, bit->len);
    if (item->kind == BT_REPLY_TEXT) {
        bt_buf_puts(out, ",\"logprobs\":[");
        bt_buf_append(out, logprobs->data, logprobs->len);
        bt_buf_puts(out, "]");
    }
    bt_buf_puts(out, "}\n\n");
}

static void put_delta(struct bt_front_answer *a, uint32_t choice, const struct bt_reply_bit *bits,
                      size_t n, struct bt_buf *out)
{
    struct bt_buf *logprobs = &a->choices[choice].lp.part[LP_TOKENS];
    for (size_t i = 0; i < n; i++) {
        bool fresh = bt_front_items_begins(&a->items, &bits[i]);
        if (fresh) {
            struct bt_front_script s = {0};
            end_item(a, "completed", &s);
            write_out(&s, out);
        }
        const struct bt_front_item *item = keep_bit(a, &bits[i], logprobs);
        if (fresh) {
            begin_item(a, item, out);
        }
        if (item != NULL && bits[i].kind != BT_REPLY_CALL) {
            put_piece(a, item, &bits[i], logprobs, out);
        }
        if (item != NULL && bits[i].kind == BT_REPLY_TEXT) {
            bt_buf_clear(logprobs);
        }
    }
}

static void complete(struct bt_front_answer *a, uint32_t choice, struct bt_buf *out)
{
    (void)a, (void)choice, (void)out; /* every event is complete */
}

/* Logprobs of the last tokens, which have no text. */
static void keep_rest(struct bt_front_answer *a)
{
    struct bt_front_item *last = bt_front_items_last(&a->items);
    if (last != NULL && last->kind == BT_REPLY_TEXT) {
        bt_front_items_logprobs(&a->items, last, &a->choices[0].lp.part[LP_TOKENS]);
    }
}

static bool put_last(struct bt_front_answer *a, const struct bt_gen_usage *u,
                     struct bt_front_writer *w, struct bt_buf *out)
{
    if (w->step == 0) {
        const char *status = a->choices[0].end == FRONT_LENGTH ? "incomplete" : "completed";
        w->step = 1;
        keep_rest(a);
        end_item(a, status, &a->script);
        put_response_event(a, status, status, u, NULL, &a->script);
    }
    return bt_front_script_write(&a->script, out);
}

/* Some clients look for the failed response, and some for an error event. */
static void put_error(struct bt_front_answer *a, const struct bt_front_error *e, struct bt_buf *out)
{
    struct bt_front_script s = {0};
    put_response_event(a, "failed", "failed", NULL, e, &s);
    bt_buf_printf(
        &s.own,
        "event: error\ndata: {\"type\":\"error\",\"sequence_number\":%llu,\"code\":\"%s\","
        "\"param\":null,\"message\":",
        (unsigned long long)a->sequence++, e->code != NULL ? e->code : e->type);
    bt_front_put_cstr(&s.own, e->message);
    bt_buf_puts(&s.own, "}\n\n");
    write_out(&s, out);
}

/* ---- whole responses ---- */

static void keep(struct bt_front_answer *a, uint32_t choice, const struct bt_reply_bit *bits,
                 size_t n)
{
    struct bt_buf *logprobs = &a->choices[choice].lp.part[LP_TOKENS];
    for (size_t i = 0; i < n; i++) {
        const struct bt_front_item *item = keep_bit(a, &bits[i], logprobs);
        if (item != NULL && bits[i].kind == BT_REPLY_TEXT) {
            bt_buf_clear(logprobs);
        }
    }
}

static bool put_whole(struct bt_front_answer *a, const struct bt_gen_usage *u,
                      struct bt_front_writer *w, struct bt_buf *out)
{
    if (w->step == 0) {
        w->step = 1;
        keep_rest(a);
        put_response(a, a->choices[0].end == FRONT_LENGTH ? "incomplete" : "completed", u, NULL,
                     &a->script);
    }
    return bt_front_script_write(&a->script, out);
}

const struct bt_front_format bt_front_format_responses = {.id_prefix = "resp_",
                                                          .pulled = true,
                                                          .init = init,
                                                          .keep = keep,
                                                          .begin = begin,
                                                          .delta = put_delta,
                                                          .complete = complete,
                                                          .error = put_error,
                                                          .last = put_last,
                                                          .whole = put_whole};
