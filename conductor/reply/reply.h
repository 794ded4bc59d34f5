/* The parts of a model's answer: reasoning, content and tool calls. Models write all of them as
 * one text, each family in its own form. A style names the form; a reply takes the text apart
 * while it is generated. Pure: text in, bits out; no clock, no I/O. */
#ifndef BT_CONDUCTOR_REPLY_H
#define BT_CONDUCTOR_REPLY_H

#include "common/base/base.h"
#include "common/base/buf.h"

/* ---- styles ---- */

enum bt_reply_tools { /* how a model writes tool calls */
                      BT_TOOLS_NONE,
                      BT_TOOLS_HERMES,       /* Hermes, Qwen:
                                                <tool_call>{"name":...,"arguments":{...}}</tool_call> */
                      BT_TOOLS_LLAMA3,       /* {"name":...,"parameters":{...}}, maybe behind
                                                <|python_tag|> */
                      BT_TOOLS_MISTRAL_LIST, /* [TOOL_CALLS][{"name":...,"arguments":{...}}, ...] */
                      BT_TOOLS_MISTRAL,      /* [TOOL_CALLS]name[ARGS]{...} */
                      BT_TOOLS_DEEPSEEK_V3,  /* type, separator, name, arguments as a block of code
                                              */
                      BT_TOOLS_DEEPSEEK_V31, /* name, separator, arguments */
                      BT_TOOLS_KIMI,         /* functions.name:0, separator, arguments */
                      BT_TOOLS_QWEN_XML, /* <function=name><parameter=key>value</parameter>... */
                      BT_TOOLS_GLM_XML,  /* name, <arg_key>key</arg_key>, <arg_value>value... */
                      BT_TOOLS_STYLES
};

enum bt_reply_thoughts { /* what encloses reasoning */
                         BT_THOUGHTS_NONE,
                         BT_THOUGHTS_TAGS,      /* <think>...</think> */
                         BT_THOUGHTS_BRACKETS,  /* [THINK]...[/THINK] */
                         BT_THOUGHTS_TRIANGLES, /* ◁think▷...◁/think▷ */
                         BT_THOUGHTS_SEED,      /* <seed:think>...</seed:think> */
                         BT_THOUGHTS_STYLES
};

struct bt_reply_style {
    enum bt_reply_tools tools;
    enum bt_reply_thoughts thoughts;
};

/* Reads a configuration's words: "auto" (or NULL) looks at the text of the chat template (NULL:
 * none); "none"; or the names of a style of tools, of reasoning, or both with a comma between
 * them. ERR_CONFIG: err names the word and the known ones. */
bt_status_t bt_reply_style_read(const char *words, const char *template_text,
                                struct bt_reply_style *s, char *err, size_t err_cap) BT_MUST_CHECK;
/* Returns whether the template reads the variable `tools`. */
bool bt_reply_template_takes_tools(const char *template_text);
/* The i-th marker of the style; NULL after the last. Those that are special tokens must stay in
 * the text that a reply gets. */
#define BT_REPLY_MARKERS 14 /* at most */
const char *bt_reply_marker(const struct bt_reply_style *s, size_t i);
/* Returns whether this text of a prompt has opened the reasoning, so that the answer begins inside
 * it. */
bool bt_reply_prompt_thinks(const struct bt_reply_style *s, const char *prompt, size_t len);
/* ... or has closed it, so that the answer has no reasoning. */
bool bt_reply_prompt_thought(const struct bt_reply_style *s, const char *prompt, size_t len);
/* Returns whether this beginning of an answer has opened its reasoning and not closed it. */
bool bt_reply_text_thinks(const struct bt_reply_style *s, const char *text);

/* The strings around a style's calls, for those who make a grammar of them. NULL: it has none. */
struct bt_reply_frame {
    const char *open, *call, *name_end, *call_end, *close; /* open: of all calls; call: of each */
};
const struct bt_reply_frame *bt_reply_frame(enum bt_reply_tools tools);
/* The marker of calls that may come within reasoning, which it ends; NULL: there is none. */
const char *bt_reply_call_in_thoughts(enum bt_reply_tools tools);
/* The strings around the arguments of a style that writes them as elements; NULL: it writes JSON.
 * lines: a value stands between newlines. */
struct bt_reply_xml_form {
    const char *call_open, *call_close; /* inside the frame; NULL: the name follows it at once */
    const char *key_open, *key_close, *value_open, *value_close; /* value_open may be NULL */
    bool lines;
};
const struct bt_reply_xml_form *bt_reply_xml_form(enum bt_reply_tools tools);
/* The end and the beginning of reasoning; NULL for BT_THOUGHTS_NONE. */
const char *bt_reply_thoughts_close(enum bt_reply_thoughts thoughts);
const char *bt_reply_thoughts_open(enum bt_reply_thoughts thoughts);

/* ---- replies ---- */

enum bt_reply_kind {
    BT_REPLY_TEXT,
    BT_REPLY_REASONING,
    BT_REPLY_CALL,     /* a call begins; the text is its function's name */
    BT_REPLY_ARGUMENTS /* text of its arguments: JSON, if the model has written JSON */
};

struct bt_reply_bit {
    enum bt_reply_kind kind;
    uint32_t call; /* number of the call, from 0 */
    const char *text;
    size_t len;
};

/* The kinds that a value may have. In a form with elements they decide whether a text is JSON. */
enum bt_reply_is {
    BT_REPLY_IS_STRING = 1,
    BT_REPLY_IS_NUMBER = 2,
    BT_REPLY_IS_BOOLEAN = 4,
    BT_REPLY_IS_NULL = 8,
    BT_REPLY_IS_OBJECT = 16,
    BT_REPLY_IS_ARRAY = 32,
    BT_REPLY_IS_ANY = 63
};
/* The kinds of a function's argument, as its schema says. */
typedef unsigned (*bt_reply_kinds_fn)(const void *arg, const char *function, size_t function_len,
                                      const char *key, size_t key_len);

/* Markers that are tokens of the model's vocabulary. Such a marker counts only as its token: a text
 * that spells it is text. */
struct bt_reply_tokens {
    uint32_t n;
    const char *marker[BT_REPLY_MARKERS]; /* as bt_reply_marker gives them */
    uint32_t id[BT_REPLY_MARKERS];
};

struct bt_reply_options {
    struct bt_reply_style style;
    const struct bt_reply_tokens *tokens; /* outlives the reply; NULL: all markers are text */
    bt_reply_kinds_fn kinds;              /* NULL: every argument may be of any kind */
    const void *kinds_arg;                /* outlives the reply */
    bool tools;                           /* false: nothing is taken for a call */
    bool one_call;                        /* calls behind the first one are left out */
    bool thinks;        /* the answer begins inside the reasoning (bt_reply_prompt_thinks) */
    bool keep_thoughts; /* reasoning with its markers is part of the text */
};

struct bt_reply;
/* bit is called during feed and end, with text that is valid during the call. */
struct bt_reply *bt_reply_create(const struct bt_reply_options *o,
                                 void (*bit)(void *arg, const struct bt_reply_bit *b), void *arg);
void bt_reply_destroy(struct bt_reply *r);
/* A token that is a marker begins at this byte of the answer's text, or behind characters that were
 * incomplete there. Call it before the token's text is fed. */
void bt_reply_token(struct bt_reply *r, uint32_t id, uint64_t offset);
/* Takes further text. What does not parse as a call comes out as text: nothing is lost. Wherever
 * the text is cut, the same bits come out, in other pieces. */
void bt_reply_feed(struct bt_reply *r, const char *text, size_t len);
/* The answer is complete: releases the text that was held back. */
void bt_reply_end(struct bt_reply *r);
uint32_t bt_reply_calls(const struct bt_reply *r); /* so far */
/* Bytes of the answer's text up to the end of its reasoning; UINT64_MAX while it lasts (or may
 * still begin), 0 if there is none. */
uint64_t bt_reply_thoughts_end(const struct bt_reply *r);
size_t bt_reply_held(const struct bt_reply *r); /* bytes of memory */

#endif
