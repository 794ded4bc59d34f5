/* Grammars of answers with tool calls or reasoning; see front_forced.h. The grammar is a text of
 * kind BT_GRAMMAR_TAGS (common/grammar/tags.c): a tag is one call. */
#include "conductor/front/front_forced.h"

#include <stdlib.h>

#include "common/grammar/grammar.h"
#include "conductor/front/front_elements.h"
#include "conductor/front/front_grammar.h"

/* ---- parts: texts and special tokens ---- */

static void put_special(struct bt_buf *out, const char *text, const char *before)
{
    if (text != NULL) {
        bt_buf_puts(out, before);
        bt_buf_puts(out, "{\"special\":");
        bt_front_put_cstr(out, text);
        bt_buf_puts(out, "}");
    }
}

static void put_text(struct bt_buf *out, const char *before, const char *a, const char *name,
                     const char *b)
{
    char *text = bt_sprintf("%s%s%s", a, name, b);
    bt_buf_puts(out, before);
    bt_front_put_cstr(out, text);
    free(text);
}

/* ,"key":[{"special":marker}] */
static void put_marker(struct bt_buf *out, const char *key, const char *marker)
{
    if (marker != NULL) {
        bt_buf_printf(out, ",\"%s\":[", key);
        put_special(out, marker, "");
        bt_buf_puts(out, "]");
    }
}

/* ---- one call ---- */

/* Writes what precedes the arguments of a call, as the inside of a list of parts. */
static void put_begin(enum bt_reply_tools style, const char *name, struct bt_buf *out)
{
    const struct bt_reply_frame *f = bt_reply_frame(style);
    switch (style) {
    case BT_TOOLS_HERMES:
        put_special(out, f->open, "");
        put_text(out, ",", "\n{\"name\": \"", name, "\", \"arguments\": ");
        return;
    case BT_TOOLS_LLAMA3: put_text(out, "", "{\"name\": \"", name, "\", \"parameters\": "); return;
    case BT_TOOLS_MISTRAL_LIST:
        put_text(out, "", "{\"name\": \"", name, "\", \"arguments\": ");
        return;
    case BT_TOOLS_MISTRAL:
        put_special(out, f->open, "");
        put_text(out, ",", "", name, "");
        break;
    case BT_TOOLS_DEEPSEEK_V3:
        put_special(out, f->call, "");
        bt_buf_puts(out, ",\"function\"");
        put_special(out, f->name_end, ",");
        put_text(out, ",", "", name, "\n```json\n");
        return;
    case BT_TOOLS_KIMI:
        put_special(out, f->call, "");
        put_text(out, ",", "functions.", name, ":");
        bt_buf_puts(out, ",{\"regex\":\"[0-9]{1,4}\"}");
        break;
    case BT_TOOLS_DEEPSEEK_V31:
        put_special(out, f->call, "");
        put_text(out, ",", "", name, "");
        break;
    case BT_TOOLS_QWEN_XML:
        put_special(out, f->open, "");
        put_text(out, ",", "\n<function=", name, ">\n");
        return;
    case BT_TOOLS_GLM_XML:
        put_special(out, f->open, "");
        put_text(out, ",", "", name, "\n");
        return;
    case BT_TOOLS_NONE:
    case BT_TOOLS_STYLES: return;
    }
    put_special(out, f->name_end, ",");
}

/* Writes what follows the arguments. */
static void put_end(enum bt_reply_tools style, struct bt_buf *out)
{
    const struct bt_reply_frame *f = bt_reply_frame(style);
    switch (style) {
    case BT_TOOLS_HERMES:
        bt_buf_puts(out, "\"}\\n\"");
        put_special(out, f->close, ",");
        return;
    case BT_TOOLS_LLAMA3:
    case BT_TOOLS_MISTRAL_LIST: bt_buf_puts(out, "\"}\""); return;
    case BT_TOOLS_DEEPSEEK_V3:
        bt_buf_puts(out, "\"\\n```\"");
        put_special(out, f->call_end, ",");
        return;
    case BT_TOOLS_DEEPSEEK_V31:
    case BT_TOOLS_KIMI: put_special(out, f->call_end, ""); return;
    case BT_TOOLS_QWEN_XML:
        bt_buf_puts(out, "\"</function>\\n\"");
        put_special(out, f->close, ",");
        return;
    case BT_TOOLS_GLM_XML: put_special(out, f->close, ""); return;
    case BT_TOOLS_MISTRAL:
    case BT_TOOLS_NONE:
    case BT_TOOLS_STYLES: return;
    }
}

/* Writes what surrounds all calls, and what separates two calls. */
static void put_frame(enum bt_reply_tools style, struct bt_buf *out)
{
    const struct bt_reply_frame *f = bt_reply_frame(style);
    switch (style) {
    case BT_TOOLS_HERMES:
    case BT_TOOLS_QWEN_XML:
    case BT_TOOLS_GLM_XML: bt_buf_puts(out, ",\"separator\":\"\\n\""); return;
    case BT_TOOLS_LLAMA3:
        bt_buf_puts(out, ",\"separator\":\"; \",\"triggers\":[\"{\\\"name\\\"\"]");
        return;
    case BT_TOOLS_MISTRAL_LIST:
        bt_buf_puts(out, ",\"separator\":\", \",\"close\":\"]\",\"open\":[");
        put_special(out, f->open, "");
        bt_buf_puts(out, ",{\"regex\":\" ?\\\\[\"}]"); /* Mistral Nemo writes no blank here */
        return;
    case BT_TOOLS_DEEPSEEK_V3:
    case BT_TOOLS_DEEPSEEK_V31:
    case BT_TOOLS_KIMI:
        bt_buf_puts(out, style == BT_TOOLS_DEEPSEEK_V3 ? ",\"separator\":\"\\n\"" : "");
        put_marker(out, "open", f->open);
        put_marker(out, "close", f->close);
        return;
    case BT_TOOLS_MISTRAL:
    case BT_TOOLS_NONE:
    case BT_TOOLS_STYLES: return;
    }
}

/* ---- the whole answer ---- */

/* Writes the reasoning, if the model has one. The prompt may have begun it already. */
static void put_first(const struct bt_front_chat *chat, struct bt_buf *out)
{
    const struct bt_reply_options *o = &chat->reply;
    const char *close = bt_reply_thoughts_close(o->style.thoughts);
    if (!chat->may_think) {
        return;
    }
    bt_buf_puts(out, ",\"first\":{\"any\":true,\"begin\":[");
    put_special(out, o->thinks ? NULL : bt_reply_thoughts_open(o->style.thoughts), "");
    bt_buf_puts(out, "],\"end\":[");
    put_special(out, close, "");
    bt_buf_puts(out, ",{\"regex\":\"\\\\n*\"}]");
    bt_buf_puts(out, o->thinks ? "}" : ",\"optional\":true}");
}

/* Writes the tag for an answer that another field constrains: {...}. Returns false with e set if a
 * tag cannot contain this kind of grammar. */
static bool put_content(const struct bt_gen_grammar *g, const char *why, struct bt_buf *out,
                        struct bt_front_error *e)
{
    bt_buf_puts(out, "{\"begin\":\"\",\"end\":\"\",");
    if (g->kind == BT_GRAMMAR_JSON_OBJECT) {
        bt_buf_puts(out, "\"schema\":{\"type\":\"object\"}}");
        return true;
    }
    if (g->kind == BT_GRAMMAR_JSON_SCHEMA) {
        bt_buf_puts(out, "\"schema\":");
        bt_buf_append(out, g->text, g->len);
    } else if (g->kind == BT_GRAMMAR_REGEX) {
        bt_buf_puts(out, "\"regex\":");
        bt_front_put_str(out, g->text, g->len);
    } else {
        return bt_front_fail(e, 400, "messages", "unsupported_parameter",
                             "%s, and the server cannot do that with a grammar of kind '%s'; use a "
                             "JSON schema or a regular expression",
                             why, bt_front_grammar_name(g->kind));
    }
    bt_buf_puts(out, "}");
    return true;
}

/* Writes the content of a call's tag. Returns false with e set. */
static bool put_arguments(enum bt_reply_tools style, const json_t *function, bool all, bool strict,
                          struct bt_buf *out, struct bt_front_error *e)
{
    const json_t *parameters = json_object_get(function, "parameters");
    const struct bt_reply_xml_form *xml = bt_reply_xml_form(style);
    if (xml != NULL) {
        size_t before = out->len;
        bool ok = (!all && !strict) || bt_front_put_members(xml, parameters, strict, out, e);
        bt_buf_puts(out, out->len == before ? "\"any\":true" : "");
        return ok;
    }
    bt_buf_puts(out, "\"schema\":");
    if (!all && !strict) {
        bt_buf_puts(out, "{\"type\":\"object\"}");
        return true;
    }
    return bt_front_put_json(out, parameters) ||
           bt_front_fail(e, 400, "tools", "invalid_value",
                         "a schema in 'tools' has a number that does not fit into 64 bits");
}

/* all: the arguments of all tools must follow their schemas, not only those of strict tools.
 * Returns false with e set. */
static bool put_tags(const struct bt_front_chat *chat, const struct bt_front_tools *t, bool all,
                     struct bt_buf *out, struct bt_front_error *e)
{
    enum bt_reply_tools style = chat->reply.style.tools;
    bool ok = true;
    for (size_t i = 0; ok && i < json_array_size(t->list); i++) {
        const json_t *f = json_object_get(json_array_get(t->list, i), "function");
        const char *name = json_string_value(json_object_get(f, "name"));
        bt_buf_puts(out, i > 0 ? ",{\"begin\":[" : "{\"begin\":[");
        put_begin(style, name, out);
        bt_buf_puts(out, "],");
        ok = put_arguments(style, f, all, json_object_get(t->strict, name) != NULL, out, e);
        bt_buf_puts(out, ",\"end\":[");
        put_end(style, out);
        bt_buf_puts(out, "]}");
    }
    return ok;
}

/* Forced: the answer must be one of the tags. */
#define ONE_OF_THEM ",\"at_least_one\":true,\"free_text\":false,\"stop_after_first\":true"

/* content: the answer if it is not a call. NULL: any text; but if a call is required, there must be
 * one. */
static bool set_tags(const struct bt_front_model *m, const struct bt_front_chat *chat,
                     const struct bt_front_tools *t, bool all, const struct bt_gen_grammar *content,
                     struct bt_gen_spec *spec, struct bt_front_error *e)
{
    bool calls_only = t->choose == FRONT_TOOLS_REQUIRED || content != NULL;
    struct bt_buf text;
    bt_buf_init(&text);
    bt_buf_puts(&text, "{\"tags\":[");
    bool ok = put_tags(chat, t, all, &text, e);
    bt_buf_puts(&text, "]");
    put_frame(chat->reply.style.tools, &text);
    put_first(chat, &text);
    if (ok && content != NULL) {
        bt_buf_puts(&text, ",\"instead\":");
        ok = put_content(content, "the answer may be a call of a tool", &text, e);
    }
    bt_buf_puts(&text, calls_only ? ",\"at_least_one\":true,\"free_text\":false" : "");
    bt_buf_puts(&text, t->one ? ",\"stop_after_first\":true}" : "}");
    ok = ok && bt_front_set_grammar(m, BT_GRAMMAR_TAGS, text.data, text.len, "tools", spec, e);
    bt_buf_cleanup(&text);
    return ok;
}

/* Puts the model's reasoning, unconstrained, before a constrained answer. */
static bool behind_thoughts(const struct bt_front_model *m, const struct bt_front_chat *chat,
                            const struct bt_gen_grammar *content, struct bt_gen_spec *spec,
                            struct bt_front_error *e)
{
    struct bt_buf text;
    bt_buf_init(&text);
    bt_buf_puts(&text, "{\"tags\":[");
    bool ok = put_content(content, "this model thinks before it answers", &text, e);
    bt_buf_puts(&text, "]" ONE_OF_THEM);
    put_first(chat, &text);
    bt_buf_puts(&text, "}");
    ok = ok && bt_front_set_grammar(m, BT_GRAMMAR_TAGS, text.data, text.len, "messages", spec, e);
    bt_buf_cleanup(&text);
    return ok;
}

static bool force(const struct bt_front_model *m, const struct bt_front_chat *chat,
                  const struct bt_front_tools *t, const struct bt_gen_grammar *content,
                  struct bt_gen_spec *spec, struct bt_front_error *e)
{
    if (t->list == NULL) {
        return behind_thoughts(m, chat, content, spec, e);
    }
    if (t->choose != FRONT_TOOLS_REQUIRED && content != NULL) {
        return set_tags(m, chat, t, false, content, spec, e);
    }
    bool required = t->choose == FRONT_TOOLS_REQUIRED;
    if (set_tags(m, chat, t, required, NULL, spec, e)) {
        return true;
    }
    if (!required || e->beyond) {
        return false;
    }
    *e = (struct bt_front_error){0}; /* only strict tools need a schema that can be enforced */
    return set_tags(m, chat, t, false, NULL, spec, e);
}

bool bt_front_force(const struct bt_front_model *m, const json_t *root,
                    const struct bt_front_chat *chat, const struct bt_front_tools *t,
                    struct bt_gen_spec *spec, struct bt_front_error *e)
{
    struct bt_gen_grammar *content = spec->grammar;
    bool required = t->choose == FRONT_TOOLS_REQUIRED, ignore = false;
    if (t->list == NULL ? content == NULL || !chat->may_think
                        : content == NULL && !required && json_object_size(t->strict) == 0) {
        return true;
    }
    if (required && content != NULL && !bt_front_has(root, "response_format")) {
        return bt_front_fail(e, 400, "tool_choice", "invalid_value",
                             "'tool_choice' asks for a call, and another field (%s) constrains "
                             "the answer; leave one of them out",
                             bt_front_grammar_name(content->kind));
    }
    if (!bt_front_get_bool(root, "ignore_eos", &ignore, e)) {
        return false;
    }
    if (ignore) {
        return bt_front_fail(e, 400, "ignore_eos", "invalid_value",
                             "'ignore_eos' must not be true where 'tools' constrain the answer, "
                             "because the answer could not end");
    }
    spec->grammar = NULL;
    bool ok = force(m, chat, t, content, spec, e);
    bt_gen_grammar_unref(content);
    return ok;
}
