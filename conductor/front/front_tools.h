/* Within front/: reads the functions that a model may call, its earlier calls and what is asked of
 * its reasoning from a chat body, into values for the chat template and for replies. Pure. */
#ifndef BT_CONDUCTOR_FRONT_TOOLS_H
#define BT_CONDUCTOR_FRONT_TOOLS_H

#include "conductor/front/front_json.h"
#include "conductor/reply/reply.h"

struct bt_front_style { /* how the served model answers; see reply.h */
    struct bt_reply_style reply;
    const struct bt_reply_tokens *tokens; /* its markers; the front's */
    bool takes_tools;                     /* its template does */
    bool text_arguments;                  /* its template wants the arguments of calls as text */
};

enum bt_front_choose { FRONT_TOOLS_NONE, FRONT_TOOLS_AUTO, FRONT_TOOLS_REQUIRED };

struct bt_front_tools {
    json_t *list; /* [{"type":"function","function":{...}}, ...]; NULL: the model may call none */
    enum bt_front_choose choose;
    bool one;       /* at most one call */
    json_t *strict; /* {name: true}: tools whose arguments must follow their schemas */
};

/* Reads tools, tool_choice and parallel_tool_calls. A named function, or allowed_tools, leaves only
 * those in the list. False: e is set. */
bool bt_front_take_tools(const struct bt_front_style *style, const json_t *root,
                         struct bt_front_tools *t, struct bt_front_error *e);
void bt_front_tools_cleanup(struct bt_front_tools *t);

/* Messages with a call, whose arguments are an object or its text, and with its result, for finding
 * out what a template wants. With objects, a template that writes them right writes
 * FRONT_PROBE_TEXT. */
json_t *bt_front_probe(bool text);
#define FRONT_PROBE_TEXT "\"probe\": 1"

/* ---- earlier calls in messages ---- */

struct bt_front_calls { /* calls of the messages so far */
    const struct bt_front_style *style;
    json_t *by_id; /* {id: {"name":...,"id": as the template gets it}} */
    uint32_t n;
    size_t nested; /* objects and arrays in the texts of arguments */
};
void bt_front_calls_init(struct bt_front_calls *c, const struct bt_front_style *style);
void bt_front_calls_cleanup(struct bt_front_calls *c);
/* Takes tool_calls of message msg, and gives the template's message `out` its own: arguments as an
 * object, and ids as the model knows them. prefix: "messages[2].". */
bool bt_front_take_calls(struct bt_front_calls *c, const json_t *msg, const char *prefix,
                         json_t *out, struct bt_front_error *e);
/* The same of a message with a tool's result: its tool_call_id, and its name. */
bool bt_front_take_result(struct bt_front_calls *c, const json_t *msg, const char *prefix,
                          json_t *out, struct bt_front_error *e);

#endif
