/* Within front/: turns bodies of other APIs (Anthropic's Messages, OpenAI's Responses) into bodies
 * of /v1/chat/completions. These files check only what has another form than in chat. The code for
 * chat checks numbers, tools and prompts. Pure. */
#ifndef BT_CONDUCTOR_FRONT_ADAPT_H
#define BT_CONDUCTOR_FRONT_ADAPT_H

#include "conductor/front/front_parse.h"

/* Returns the chat body for another API's body. For a chat or completions body it returns that body
 * with one more reference. NULL: e is set. */
json_t *bt_front_adapt(enum bt_front_api api, const json_t *root, struct bt_front_error *e);
/* Makes an error about the chat body name the fields of the client's own body. */
void bt_front_adapt_error(enum bt_front_api api, struct bt_front_error *e);

bool bt_front_adapt_is(const json_t *v, const char *text); /* a string with this text */
/* Returns the text of a member that must be a string without NUL. prefix: as in
 * bt_front_fields_check. NULL: e is set. */
const char *bt_front_adapt_text(const json_t *object, const char *name, const char *prefix,
                                struct bt_front_error *e);
/* Copies the members that have the same name and meaning in both bodies. */
void bt_front_adapt_copy(const json_t *from, json_t *to);
/* A turn of the conversation while it is being built. */
struct bt_front_turn {
    json_t *messages; /* the chat body's */
    const char *role; /* "user", "assistant", ...; NULL: no turn has begun */
    bool has_text;
    struct bt_buf text, reasoning;
    json_t *calls; /* NULL: none */
};
/* Adds to the text or to the reasoning. Newlines join the parts. */
void bt_front_turn_text(struct bt_front_turn *t, const json_t *text);
void bt_front_turn_reasoning(struct bt_front_turn *t, const json_t *text);
/* arguments: JSON text, of which the function takes ownership. */
void bt_front_turn_call(struct bt_front_turn *t, const char *id, const char *name,
                        json_t *arguments);
/* Ends the turn. It becomes a message if it is not empty. */
void bt_front_turn_end(struct bt_front_turn *t);
/* Ends the turn before it, and adds the result of a tool as a message. Takes ownership of
 * content. */
void bt_front_turn_result(struct bt_front_turn *t, const char *id, json_t *content);
void bt_front_turn_cleanup(struct bt_front_turn *t);

/* Returns the chat body for a body of /v1/messages; count: of /v1/messages/count_tokens. */
json_t *bt_front_messages_chat(const json_t *root, bool count, struct bt_front_error *e);
/* Returns the chat body for a body of /v1/responses. */
json_t *bt_front_responses_chat(const json_t *root, struct bt_front_error *e);
/* Adds the members of the response that repeat the request. Sampling parameters are those that are
 * used. */
void bt_front_responses_echo(const json_t *root, float temperature, float top_p,
                             struct bt_buf *out);

/* Reads the tools and tool_choice of another API's body. take_tool appends tool number i to the
 * chat body's tools. take_choice writes the chat body's tool_choice. Both return false with the
 * reason in *e. */
typedef bool (*bt_front_tool_fn)(const json_t *tool, size_t i, json_t *tools,
                                 struct bt_front_error *e);
typedef bool (*bt_front_choice_fn)(json_t *choice, json_t *chat, struct bt_front_error *e);
bool bt_front_adapt_tools(const json_t *root, json_t *chat, bt_front_tool_fn take_tool,
                          bt_front_choice_fn take_choice, struct bt_front_error *e);

#endif
