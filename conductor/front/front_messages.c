/* Answers of Anthropic's POST /v1/messages (version 2023-06-01). A stream is message_start, for
 * each block content_block_start, deltas and content_block_stop, then message_delta with the reason
 * of the end and the usage, and message_stop. Clients stop at an error event. */
#include <jansson.h>
#include <string.h>

#include "conductor/front/front_format.h"
#include "conductor/front/front_write.h"

static void init(struct bt_front_answer *a, const char *id, const char *model, uint64_t created_s)
{
    (void)created_s;
    bt_buf_printf(&a->prefix,
                  "{\"id\":\"%s\",\"type\":\"message\",\"role\":\"assistant\",\"model\":", id);
    bt_front_put_cstr(&a->prefix, model);
}

/* "input_tokens" are those that were not read from the cache. */
static void put_usage(uint32_t prompt, uint32_t cached, uint32_t output, struct bt_buf *out)
{
    bt_buf_printf(out,
                  "\"usage\":{\"input_tokens\":%u,\"cache_creation_input_tokens\":0,"
                  "\"cache_read_input_tokens\":%u,\"output_tokens\":%u}",
                  prompt - BT_MIN(cached, prompt), BT_MIN(cached, prompt), output);
}

static void put_end(const struct bt_front_answer *a, struct bt_buf *out)
{
    const struct bt_front_choice *c = &a->choices[0];
    const char *reason = c->end == FRONT_LENGTH   ? "max_tokens"
                         : c->end == FRONT_CALLS  ? "tool_use"
                         : c->stop_string != NULL ? "stop_sequence"
                                                  : "end_turn";
    bt_buf_printf(out, "\"stop_reason\":\"%s\",\"stop_sequence\":", reason);
    if (c->stop_string != NULL) {
        bt_front_put_cstr(out, c->stop_string);
    } else {
        bt_buf_puts(out, "null");
    }
}

/* ---- streams ---- */

static void begin(struct bt_front_answer *a, struct bt_buf *out)
{
    bt_buf_puts(out, "event: message_start\ndata: {\"type\":\"message_start\",\"message\":");
    bt_buf_append(out, a->prefix.data, a->prefix.len);
    bt_buf_puts(out, ",\"content\":[],\"stop_reason\":null,\"stop_sequence\":null,");
    put_usage(a->prompts[0].n_tokens, a->cached_tokens, 0, out);
    bt_buf_puts(out, "}}\n\nevent: ping\ndata: {\"type\":\"ping\"}\n\n");
}

static void begin_block(struct bt_front_answer *a, const struct bt_front_item *item,
                        struct bt_buf *out)
{
    bt_buf_printf(out,
                  "event: content_block_start\ndata: {\"type\":\"content_block_start\","
                  "\"index\":%u,\"content_block\":",
                  a->items.n - 1);
    if (item->kind == BT_REPLY_TEXT) {
        bt_buf_puts(out, "{\"type\":\"text\",\"text\":\"\"}");
    } else if (item->kind == BT_REPLY_REASONING) {
        bt_buf_puts(out, "{\"type\":\"thinking\",\"thinking\":\"\",\"signature\":\"\"}");
    } else {
        bt_buf_puts(out, "{\"type\":\"tool_use\",\"id\":");
        bt_front_put_call_id("toolu", a, item, out);
        bt_buf_puts(out, ",\"name\":");
        bt_front_put_cstr(out, item->name);
        bt_buf_puts(out, ",\"input\":{}}");
    }
    bt_buf_puts(out, "}\n\n");
}

static void put_piece(struct bt_front_answer *a, const char *type, const char *member,
                      const char *text, size_t len, struct bt_buf *out)
{
    bt_buf_puts(out,
                "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":");
    bt_front_put_uint(out, a->items.n - 1);
    bt_buf_puts(out, ",\"delta\":{\"type\":\"");
    bt_buf_puts(out, type);
    bt_buf_puts(out, "\",\"");
    bt_buf_puts(out, member);
    bt_buf_puts(out, "\":");
    bt_front_put_str(out, text, len);
    bt_buf_puts(out, "}}\n\n");
}

/* Clients send reasoning back only with a signature. It is not read here. */
#define SIGNATURE "baton"

static void end_block(struct bt_front_answer *a, struct bt_buf *out)
{
    const struct bt_front_item *item = bt_front_items_last(&a->items);
    if (item == NULL) {
        return;
    }
    if (item->kind == BT_REPLY_REASONING) {
        put_piece(a, "signature_delta", "signature", SIGNATURE, strlen(SIGNATURE), out);
    }
    bt_buf_printf(out,
                  "event: content_block_stop\ndata: {\"type\":\"content_block_stop\","
                  "\"index\":%u}\n\n",
                  a->items.n - 1);
    a->items.open = false;
}

static void put_delta(struct bt_front_answer *a, uint32_t choice, const struct bt_reply_bit *bits,
                      size_t n, struct bt_buf *out)
{
    static const char *const names[][2] = {[BT_REPLY_TEXT] = {"text_delta", "text"},
                                           [BT_REPLY_REASONING] = {"thinking_delta", "thinking"},
                                           [BT_REPLY_CALL] = {"input_json_delta", "partial_json"}};
    (void)choice;
    for (size_t i = 0; i < n; i++) {
        bool fresh = bt_front_items_begins(&a->items, &bits[i]);
        if (fresh) {
            end_block(a, out);
        }
        const struct bt_front_item *item = bt_front_items_of(&a->items, &bits[i]);
        if (fresh) {
            begin_block(a, item, out);
        }
        if (item != NULL && bits[i].kind != BT_REPLY_CALL) {
            put_piece(a, names[item->kind][0], names[item->kind][1], bits[i].text, bits[i].len,
                      out);
        }
    }
}

static void complete(struct bt_front_answer *a, uint32_t choice, struct bt_buf *out)
{
    (void)a, (void)choice, (void)out; /* every event is complete */
}

static bool put_last(struct bt_front_answer *a, const struct bt_gen_usage *u,
                     struct bt_front_writer *w, struct bt_buf *out)
{
    (void)w;
    end_block(a, out);
    bt_buf_puts(out, "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{");
    put_end(a, out);
    bt_buf_puts(out, "},");
    put_usage(u->prompt_tokens, u->cached_tokens, u->completion_tokens, out);
    bt_front_put_extras(a, u, out);
    bt_buf_puts(out, "}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n");
    return true;
}

static void put_error(struct bt_front_answer *a, const struct bt_front_error *e, struct bt_buf *out)
{
    (void)a;
    bt_buf_puts(out, "event: error\ndata: ");
    bt_front_messages_error(e, NULL, out);
    bt_buf_puts(out, "\n\n");
}

/* ---- whole responses ---- */

static void keep(struct bt_front_answer *a, uint32_t choice, const struct bt_reply_bit *bits,
                 size_t n)
{
    (void)choice;
    for (size_t i = 0; i < n; i++) {
        struct bt_front_item *item = bt_front_items_of(&a->items, &bits[i]);
        if (item != NULL && bits[i].kind != BT_REPLY_CALL) {
            bt_front_items_text(&a->items, item, bits[i].text, bits[i].len);
        }
    }
}

static bool is_object(const struct bt_buf *text)
{
    json_t *v = json_loadb(text->data != NULL ? text->data : "", text->len, JSON_ALLOW_NUL, NULL);
    bool is = json_is_object(v);
    json_decref(v);
    return is;
}

/* "input" must be an object. A call that max_tokens has cut off may have the beginning of one only.
 */
static void put_input(const struct bt_front_item *item, struct bt_front_script *s)
{
    if (is_object(&item->text)) {
        bt_front_script_raw(s, &item->text);
    } else {
        bt_buf_puts(&s->own, "{\"incomplete\":");
        bt_front_script_string(s, &item->text);
        bt_buf_puts(&s->own, "}");
    }
}

static void put_block(struct bt_front_answer *a, const struct bt_front_item *item,
                      struct bt_front_script *s)
{
    if (item->kind == BT_REPLY_TEXT) {
        bt_buf_puts(&s->own, "{\"type\":\"text\",\"text\":");
        bt_front_script_string(s, &item->text);
    } else if (item->kind == BT_REPLY_REASONING) {
        bt_buf_puts(&s->own,
                    "{\"type\":\"thinking\",\"signature\":\"" SIGNATURE "\",\"thinking\":");
        bt_front_script_string(s, &item->text);
    } else {
        bt_buf_puts(&s->own, "{\"type\":\"tool_use\",\"id\":");
        bt_front_put_call_id("toolu", a, item, &s->own);
        bt_buf_puts(&s->own, ",\"name\":");
        bt_front_put_cstr(&s->own, item->name);
        bt_buf_puts(&s->own, ",\"input\":");
        put_input(item, s);
    }
    bt_buf_puts(&s->own, "}");
}

static bool put_whole(struct bt_front_answer *a, const struct bt_gen_usage *u,
                      struct bt_front_writer *w, struct bt_buf *out)
{
    struct bt_front_script *s = &a->script;
    if (w->step == 0) {
        w->step = 1;
        bt_buf_append(&s->own, a->prefix.data, a->prefix.len);
        bt_buf_puts(&s->own, ",\"content\":[");
        for (uint32_t i = 0; i < a->items.n; i++) {
            bt_buf_puts(&s->own, i > 0 ? "," : "");
            put_block(a, &a->items.list[i], s);
        }
        bt_buf_puts(&s->own, "],");
        put_end(a, &s->own);
        bt_buf_puts(&s->own, ",");
        put_usage(u->prompt_tokens, u->cached_tokens, u->completion_tokens, &s->own);
        bt_front_put_extras(a, u, &s->own);
        bt_buf_puts(&s->own, "}");
    }
    return bt_front_script_write(s, out);
}

const struct bt_front_format bt_front_format_messages = {.id_prefix = "msg_",
                                                         .init = init,
                                                         .keep = keep,
                                                         .begin = begin,
                                                         .delta = put_delta,
                                                         .complete = complete,
                                                         .error = put_error,
                                                         .last = put_last,
                                                         .whole = put_whole};

/* ---- errors ---- */

void bt_front_messages_error(const struct bt_front_error *e, const char *request_id,
                             struct bt_buf *out)
{
    static const struct {
        int http;
        const char *type;
    } types[] = {{400, "invalid_request_error"}, {401, "authentication_error"},
                 {403, "permission_error"},      {404, "not_found_error"},
                 {413, "request_too_large"},     {429, "rate_limit_error"},
                 {503, "overloaded_error"},      {504, "timeout_error"}};
    const char *type = e->http >= 500 ? "api_error" : "invalid_request_error";
    for (size_t i = 0; i < BT_ARRAY_LEN(types); i++) {
        type = types[i].http == e->http ? types[i].type : type;
    }
    bt_buf_printf(out, "{\"type\":\"error\",\"error\":{\"type\":\"%s\",\"message\":", type);
    bt_front_put_cstr(out, e->message);
    bt_buf_puts(out, "}");
    if (request_id != NULL) {
        bt_buf_puts(out, ",\"request_id\":");
        bt_front_put_cstr(out, request_id);
    }
    bt_buf_puts(out, "}");
}
