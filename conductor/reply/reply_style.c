/* The styles of models: their markers, and which one a chat template speaks; see reply.h. */
#include <stdio.h>

#include "conductor/reply/reply_priv.h"

static const struct bt_reply_xml_form qwen_xml = {.call_open = "<function=",
                                                  .call_close = "</function>",
                                                  .key_open = "<parameter=",
                                                  .key_close = ">",
                                                  .value_close = "</parameter>",
                                                  .lines = true};
static const struct bt_reply_xml_form glm_xml = {.key_open = "<arg_key>",
                                                 .key_close = "</arg_key>",
                                                 .value_open = "<arg_value>",
                                                 .value_close = "</arg_value>"};

/* The markers are those of the models' own chat templates. */
static const struct bt_reply_form forms[BT_TOOLS_STYLES] = {
    [BT_TOOLS_NONE] = {.name = "none"},
    [BT_TOOLS_HERMES] = {.name = "hermes",
                         .frame = {.open = "<tool_call>", .close = "</tool_call>"},
                         .object = true},
    [BT_TOOLS_LLAMA3] = {.name = "llama3",
                         .frame = {.open = "<|python_tag|>"},
                         .between = ";",
                         .object = true,
                         .bare = true},
    [BT_TOOLS_MISTRAL_LIST] = {.name = "mistral-list",
                               .frame = {.open = "[TOOL_CALLS]", .name_end = "[ARGS]"},
                               .between = ",[]",
                               .object = true,
                               .list = true,
                               .names = true,
                               .ends_thoughts = true},
    [BT_TOOLS_MISTRAL] = {.name = "mistral",
                          .frame = {.open = "[TOOL_CALLS]", .name_end = "[ARGS]"},
                          .between = ",[]",
                          .object = true,
                          .list = true,
                          .names = true,
                          .ends_thoughts = true},
    [BT_TOOLS_DEEPSEEK_V3] = {.name = "deepseek-v3",
                              .frame = {.open = "<｜tool▁calls▁begin｜>",
                                        .call = "<｜tool▁call▁begin｜>",
                                        .name_end = "<｜tool▁sep｜>",
                                        .call_end = "<｜tool▁call▁end｜>",
                                        .close = "<｜tool▁calls▁end｜>"},
                              .between = "`",
                              .fenced = true,
                              .ends_thoughts = true},
    [BT_TOOLS_DEEPSEEK_V31] = {.name = "deepseek-v3.1",
                               .frame = {.open = "<｜tool▁calls▁begin｜>",
                                         .call = "<｜tool▁call▁begin｜>",
                                         .name_end = "<｜tool▁sep｜>",
                                         .call_end = "<｜tool▁call▁end｜>",
                                         .close = "<｜tool▁calls▁end｜>"},
                               .between = "`",
                               .fenced = true,
                               .ends_thoughts = true},
    [BT_TOOLS_KIMI] = {.name = "kimi",
                       .frame = {.open = "<|tool_calls_section_begin|>",
                                 .call = "<|tool_call_begin|>",
                                 .name_end = "<|tool_call_argument_begin|>",
                                 .call_end = "<|tool_call_end|>",
                                 .close = "<|tool_calls_section_end|>"},
                       .numbered = true,
                       .ends_thoughts = true},
    [BT_TOOLS_QWEN_XML] = {.name = "qwen-xml",
                           .frame = {.open = "<tool_call>", .close = "</tool_call>"},
                           .xml = &qwen_xml},
    [BT_TOOLS_GLM_XML] = {.name = "glm-xml",
                          .frame = {.open = "<tool_call>", .close = "</tool_call>"},
                          .xml = &glm_xml},
};

static const struct thoughts {
    const char *name, *open, *close;
} thoughts[BT_THOUGHTS_STYLES] = {
    [BT_THOUGHTS_NONE] = {"none", NULL, NULL},
    [BT_THOUGHTS_TAGS] = {"think", "<think>", "</think>"},
    [BT_THOUGHTS_BRACKETS] = {"think-brackets", "[THINK]", "[/THINK]"},
    [BT_THOUGHTS_TRIANGLES] = {"think-triangles", "◁think▷", "◁/think▷"},
    [BT_THOUGHTS_SEED] = {"think-seed", "<seed:think>", "</seed:think>"},
};

const struct bt_reply_form *bt_reply_form_of(enum bt_reply_tools tools)
{
    return &forms[tools];
}

const char *bt_reply_thoughts_open(enum bt_reply_thoughts t)
{
    return thoughts[t].open;
}

const char *bt_reply_thoughts_close(enum bt_reply_thoughts t)
{
    return thoughts[t].close;
}

const struct bt_reply_frame *bt_reply_frame(enum bt_reply_tools tools)
{
    return &forms[tools].frame;
}

const struct bt_reply_xml_form *bt_reply_xml_form(enum bt_reply_tools tools)
{
    return forms[tools].xml;
}

const char *bt_reply_call_in_thoughts(enum bt_reply_tools tools)
{
    return forms[tools].ends_thoughts ? forms[tools].frame.open : NULL;
}

const char *bt_reply_marker(const struct bt_reply_style *s, size_t i)
{
    const struct bt_reply_frame *f = &forms[s->tools].frame;
    static const struct bt_reply_xml_form none;
    const struct bt_reply_xml_form *x = forms[s->tools].xml != NULL ? forms[s->tools].xml : &none;
    const char *const all[] = {thoughts[s->thoughts].open,
                               thoughts[s->thoughts].close,
                               f->open,
                               f->call,
                               f->name_end,
                               f->call_end,
                               f->close,
                               forms[s->tools].names ? BT_REPLY_CALL_ID : NULL,
                               x->call_open,
                               x->call_close,
                               x->key_open,
                               x->key_close,
                               x->value_open,
                               x->value_close};
    for (size_t k = 0; k < BT_ARRAY_LEN(all); k++) {
        if (all[k] != NULL && i-- == 0) {
            return all[k];
        }
    }
    return NULL;
}

/* ---- from a template ---- */

static bool has(const char *text, const char *word)
{
    return strstr(text, word) != NULL;
}

static bool is_name(char c)
{
    return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

bool bt_reply_template_takes_tools(const char *text)
{
    for (const char *at = text; at != NULL && (at = strstr(at, "tools")) != NULL; at += 5) {
        if ((at == text || (!is_name(at[-1]) && at[-1] != '.')) && !is_name(at[5])) {
            return true;
        }
    }
    return false;
}

/* Mistral's older templates write all calls as one list. */
static enum bt_reply_tools mistral(const char *text)
{
    return has(text, "[ARGS]") ? BT_TOOLS_MISTRAL : BT_TOOLS_MISTRAL_LIST;
}

static enum bt_reply_tools tools_of(const char *text)
{
    if (!bt_reply_template_takes_tools(text)) {
        return BT_TOOLS_NONE;
    }
    if (has(text, forms[BT_TOOLS_DEEPSEEK_V3].frame.open)) {
        return has(text, "```json") ? BT_TOOLS_DEEPSEEK_V3 : BT_TOOLS_DEEPSEEK_V31;
    }
    if (has(text, forms[BT_TOOLS_KIMI].frame.open) ||
        (has(text, "tool_declare") && has(text, "<|im_middle|>"))) { /* its first template */
        return BT_TOOLS_KIMI;
    }
    if (has(text, "[TOOL_CALLS]")) {
        return mistral(text);
    }
    if (has(text, "<arg_key>")) {
        return BT_TOOLS_GLM_XML;
    }
    if (has(text, "<function=") && has(text, "<parameter=")) {
        return BT_TOOLS_QWEN_XML;
    }
    if (has(text, "<tool_call>")) {
        return BT_TOOLS_HERMES;
    }
    if (has(text, "<|python_tag|>") || (has(text, "parameters") && has(text, "ipython"))) {
        return BT_TOOLS_LLAMA3;
    }
    return BT_TOOLS_NONE;
}

static enum bt_reply_thoughts thoughts_of(const char *text)
{
    for (int t = BT_THOUGHTS_NONE + 1; t < BT_THOUGHTS_STYLES; t++) {
        if (has(text, thoughts[t].open) || has(text, thoughts[t].close)) {
            return (enum bt_reply_thoughts)t;
        }
    }
    return BT_THOUGHTS_NONE;
}

/* ---- from a configuration ---- */

static bool take_word(const char *word, size_t len, struct bt_reply_style *s)
{
    for (int t = 1; t < BT_TOOLS_STYLES; t++) {
        if (strlen(forms[t].name) == len && memcmp(forms[t].name, word, len) == 0) {
            s->tools = (enum bt_reply_tools)t;
            return true;
        }
    }
    for (int t = 1; t < BT_THOUGHTS_STYLES; t++) {
        if (strlen(thoughts[t].name) == len && memcmp(thoughts[t].name, word, len) == 0) {
            s->thoughts = (enum bt_reply_thoughts)t;
            return true;
        }
    }
    return len == 4 && memcmp(word, "none", 4) == 0;
}

static void known_words(struct bt_buf *out)
{
    for (int t = 1; t < BT_TOOLS_STYLES; t++) {
        bt_buf_printf(out, ", %s", forms[t].name);
    }
    for (int t = 1; t < BT_THOUGHTS_STYLES; t++) {
        bt_buf_printf(out, ", %s", thoughts[t].name);
    }
}

bt_status_t bt_reply_style_read(const char *words, const char *template_text,
                                struct bt_reply_style *s, char *err, size_t err_cap)
{
    struct bt_reply_style style = {BT_TOOLS_NONE, BT_THOUGHTS_NONE};
    if (words == NULL || strcmp(words, "auto") == 0) {
        if (template_text != NULL) {
            style.tools = tools_of(template_text);
            style.thoughts = thoughts_of(template_text);
        }
        *s = style;
        return BT_OK;
    }
    for (const char *at = words;;) {
        at += strspn(at, " ");
        size_t len = strcspn(at, ",");
        while (len > 0 && at[len - 1] == ' ') {
            len--;
        }
        if (!take_word(at, len, &style)) {
            struct bt_buf known;
            bt_buf_init(&known);
            known_words(&known);
            snprintf(err, err_cap, "'%.*s' is not a known form of answers; known are: auto, none%s",
                     (int)len, at, known.data);
            bt_buf_cleanup(&known);
            return BT_ERR_CONFIG;
        }
        at += len;
        at += strspn(at, " ");
        if (*at != ',') {
            break;
        }
        at++;
    }
    *s = style;
    return BT_OK;
}

bool bt_reply_text_thinks(const struct bt_reply_style *s, const char *text)
{
    const char *open = thoughts[s->thoughts].open;
    text += strspn(text, " \n\r\t");
    return open != NULL && strncmp(text, open, strlen(open)) == 0 &&
           !has(text, thoughts[s->thoughts].close);
}

/* Returns whether the text ends with the marker, apart from white space. */
static bool ends_with(const char *text, size_t len, const char *marker)
{
    size_t n = marker != NULL ? strlen(marker) : 0;
    while (len > 0 && memchr(" \n\r\t", text[len - 1], 4) != NULL) {
        len--;
    }
    return n > 0 && len >= n && memcmp(text + len - n, marker, n) == 0;
}

bool bt_reply_prompt_thinks(const struct bt_reply_style *s, const char *prompt, size_t len)
{
    return ends_with(prompt, len, thoughts[s->thoughts].open);
}

bool bt_reply_prompt_thought(const struct bt_reply_style *s, const char *prompt, size_t len)
{
    return ends_with(prompt, len, thoughts[s->thoughts].close);
}
