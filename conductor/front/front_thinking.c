/* Fields about the model's reasoning; see front_thinking.h. */
#include "conductor/front/front_thinking.h"

#include <stdio.h>
#include <string.h>

#include "conductor/front/front_adapt.h"
#include "conductor/front/front_fields.h"

#define EFFORT_BYTES_MAX 64
#define NEWLINES_MAX     2 /* around the marker */

/* ---- fields ---- */

/* Sets a variable of the template, unless the client has set it by name. */
static void set_variable(json_t *ctx, const char *name, json_t *value)
{
    if (json_object_get(ctx, name) == NULL) {
        json_object_set_new(ctx, name, value);
    } else {
        json_decref(value);
    }
}

/* The names of the switch in the templates of different families. */
static void switch_thinking(json_t *ctx, bool on)
{
    set_variable(ctx, "enable_thinking", json_boolean(on));
    set_variable(ctx, "thinking", json_boolean(on));
}

/* Two fields may give a budget if it is the same. */
static bool take_budget(const json_t *object, const char *key, const char *prefix,
                        struct bt_front_chat *chat, struct bt_front_error *e)
{
    char where[64];
    const json_t *v = json_object_get(object, key);
    snprintf(where, sizeof(where), "%.30s%.30s", prefix, key);
    if (v == NULL || json_is_null(v)) {
        return true;
    }
    int64_t budget = json_integer_value(v);
    if (!json_is_integer(v) || bt_front_is_huge(v) || budget < -1 || budget > INT32_MAX) {
        return bt_front_fail(e, 400, where, "invalid_value",
                             "'%s' must be a number of tokens from 0 to %d, or -1 for any number",
                             where, INT32_MAX);
    }
    if (budget >= 0 && chat->budget >= 0 && chat->budget != budget) {
        return bt_front_fail(e, 400, where, "invalid_value",
                             "'%s' is %lld, and another field gives the reasoning a budget of "
                             "%lld tokens; leave one of them out",
                             where, (long long)budget, (long long)chat->budget);
    }
    chat->budget = budget >= 0 ? budget : chat->budget;
    return true;
}

static bool take_effort(const json_t *v, const char *where, json_t *ctx, struct bt_front_error *e)
{
    const char *effort = json_string_value(v);
    if (v == NULL || json_is_null(v)) {
        return true;
    }
    if (effort == NULL || json_string_length(v) > EFFORT_BYTES_MAX) {
        return bt_front_fail(e, 400, where, "invalid_type",
                             "'%s' must be a string of at most %d bytes, such as \"high\"", where,
                             EFFORT_BYTES_MAX);
    }
    if (strcmp(effort, "none") == 0) {
        switch_thinking(ctx, false);
    }
    set_variable(ctx, "reasoning_effort", json_incref((json_t *)v));
    return true;
}

static bool check_object(const json_t *root, const char *key, const json_t **v_p,
                         struct bt_front_error *e)
{
    *v_p = bt_front_has(root, key) ? json_object_get(root, key) : NULL;
    return *v_p == NULL || json_is_object(*v_p) ||
           bt_front_fail(e, 400, key, "invalid_type", "'%s' must be an object", key);
}

/* {"type":"enabled","budget_tokens":2048} */
static bool take_switch(const json_t *root, json_t *ctx, struct bt_front_chat *chat,
                        struct bt_front_error *e)
{
    const json_t *v;
    if (!check_object(root, "thinking", &v, e) || v == NULL) {
        return v == NULL;
    }
    const json_t *type = json_object_get(v, "type");
    bool on = bt_front_adapt_is(type, "enabled");
    bool free = bt_front_adapt_is(type, "adaptive") || bt_front_adapt_is(type, "auto");
    if (!on && !free && !bt_front_adapt_is(type, "disabled")) {
        return bt_front_fail(e, 400, "thinking", "invalid_value",
                             "'thinking' must be an object of the type enabled, disabled or "
                             "adaptive");
    }
    if (!free) {
        switch_thinking(ctx, on);
    }
    return bt_front_fields_check(v, FRONT_MESSAGES_THINKING, "thinking.", e) &&
           take_budget(v, "budget_tokens", "thinking.", chat, e);
}

/* {"effort":"low","max_tokens":2048,"enabled":true,"exclude":false} */
static bool take_reasoning(const json_t *root, json_t *ctx, struct bt_front_chat *chat,
                           struct bt_front_error *e)
{
    const json_t *v;
    bool exclude = false, on = true;
    if (!check_object(root, "reasoning", &v, e) || v == NULL) {
        return v == NULL;
    }
    if (!bt_front_fields_check(v, FRONT_RESPONSES_EFFORT, "reasoning.", e) ||
        !take_effort(json_object_get(v, "effort"), "reasoning.effort", ctx, e) ||
        !take_budget(v, "max_tokens", "reasoning.", chat, e) ||
        !bt_front_get_bool(v, "exclude", &exclude, e) || !bt_front_get_bool(v, "enabled", &on, e)) {
        return false;
    }
    if (bt_front_has(v, "enabled")) {
        switch_thinking(ctx, on);
    }
    chat->hides_thoughts |= exclude && !chat->reply.keep_thoughts;
    return true;
}

bool bt_front_take_thinking(const json_t *root, json_t *ctx, struct bt_front_chat *chat,
                            struct bt_front_error *e)
{
    const json_t *vars = json_object_get(root, "chat_template_kwargs");
    bool on = true;
    chat->budget = -1;
    if (!bt_front_get_bool(root, "enable_thinking", &on, e)) {
        return false;
    }
    if (bt_front_has(root, "enable_thinking")) {
        switch_thinking(ctx, on);
    }
    return take_budget(root, "thinking_token_budget", "", chat, e) &&
           take_budget(root, "thinking_budget", "", chat, e) &&
           take_budget(vars, "thinking_budget", "chat_template_kwargs.", chat, e) &&
           take_effort(json_object_get(root, "reasoning_effort"), "reasoning_effort", ctx, e) &&
           take_switch(root, ctx, chat, e) && take_reasoning(root, ctx, chat, e);
}

/* ---- the budget ---- */

/* Newlines behind p[0..n), as a template writes them: as they are, or as \n. */
static size_t newlines(const char *p)
{
    size_t n = 0;
    while (n < NEWLINES_MAX && (p[0] == '\n' || (p[0] == '\\' && p[1] == 'n'))) {
        p += p[0] == '\n' ? 1 : 2;
        n++;
    }
    return n;
}

static bool newline_before(const char *text, const char *at)
{
    return (at > text && at[-1] == '\n') || (at > text + 1 && at[-2] == '\\' && at[-1] == 'n');
}

/* The marker as the template writes it. A model whose template opens its reasoning with a newline
 * writes the marker on a line of its own. */
static void end_of_thoughts(enum bt_reply_thoughts thoughts, const char *text, struct bt_buf *out)
{
    const char *open = bt_reply_thoughts_open(thoughts);
    const char *close = bt_reply_thoughts_close(thoughts);
    bool before = false;
    size_t after = 0;
    for (const char *at = text; (at = strstr(at, close)) != NULL; at += strlen(close)) {
        before |= newline_before(text, at);
        after = BT_MAX(after, newlines(at + strlen(close)));
    }
    for (const char *at = text; (at = strstr(at, open)) != NULL; at += strlen(open)) {
        bool line = newlines(at + strlen(open)) > 0;
        after = line && !before && after == 0 ? NEWLINES_MAX : after;
        before |= line;
    }
    bt_buf_puts(out, before ? "\n" : "");
    bt_buf_puts(out, close);
    bt_buf_puts(out, after == 2 ? "\n\n" : after == 1 ? "\n" : "");
}

void bt_front_thoughts_end(const struct bt_tokenizer *tok, enum bt_reply_thoughts thoughts,
                           const char *template_text, struct bt_tokens *ids)
{
    struct bt_buf text, first;
    if (thoughts == BT_THOUGHTS_NONE) {
        return;
    }
    bt_buf_init(&text);
    bt_buf_init(&first);
    end_of_thoughts(thoughts, template_text != NULL ? template_text : "", &text);
    if (bt_tokenizer_encode(tok, text.data, text.len, false, ids) != BT_OK ||
        ids->n > BT_GEN_FORCE_MAX) {
        ids->n = 0;
    }
    /* Some tokenizers put a blank before a text; here the text goes on. */
    if (ids->n > 1 && bt_tokenizer_piece(tok, ids->ids[0], &first) == BT_OK && first.len == 1 &&
        first.data[0] == ' ') {
        memmove(ids->ids, ids->ids + 1, --ids->n * sizeof(ids->ids[0]));
    }
    bt_buf_cleanup(&first);
    bt_buf_cleanup(&text);
}

/* As the reply sees it (bt_reply_options.tokens). Markers of a grammar may be spelled in any
 * tokens.
 */
static struct bt_gen_marker marker_of(const struct bt_front_model *m, const char *text,
                                      bool by_text)
{
    const struct bt_reply_tokens *t = m->style.tokens;
    struct bt_gen_marker marker = {.text = text};
    for (uint32_t i = 0; i < t->n && !by_text; i++) {
        if (strcmp(t->marker[i], text) == 0) {
            marker.is_token = true;
            marker.id = t->id[i];
        }
    }
    return marker;
}

void bt_front_set_budget(const struct bt_front_model *m, const struct bt_front_chat *chat,
                         struct bt_gen_spec *spec)
{
    struct bt_gen_thoughts *t = &spec->thoughts;
    bool by_text = spec->grammar != NULL;
    enum bt_reply_thoughts thoughts = m->style.reply.thoughts;
    if (chat->budget < 0 || !chat->may_think || m->thoughts_end->n == 0) {
        return;
    }
    t->budget = (uint32_t)chat->budget;
    t->begun = chat->reply.thinks;
    t->open = marker_of(m, bt_reply_thoughts_open(thoughts), by_text);
    t->ends[t->n_ends++] = marker_of(m, bt_reply_thoughts_close(thoughts), by_text);
    const char *call = bt_reply_call_in_thoughts(m->style.reply.tools);
    if (chat->reply.tools && call != NULL) {
        t->ends[t->n_ends++] = marker_of(m, call, by_text);
    }
    t->force = m->thoughts_end->ids;
    t->n_force = (uint32_t)m->thoughts_end->n;
}
