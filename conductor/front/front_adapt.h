/* Within front/: bodies of other APIs (Anthropic's Messages, OpenAI's Responses) as bodies of
 * /v1/chat/completions. What such a body says in its own way is checked here; numbers, tools and
 * prompts are checked where those of chat are. Pure. */
#ifndef BT_CONDUCTOR_FRONT_ADAPT_H
#define BT_CONDUCTOR_FRONT_ADAPT_H

#include "conductor/front/front_parse.h"

/* The chat body of another API's body; of a chat or completions body itself (one more reference).
 * NULL: e is set. */
json_t *bt_front_adapt(enum bt_front_api api, const json_t *root, struct bt_front_error *e);
/* An error about a chat body names the fields of the client's own body. */
void bt_front_adapt_error(enum bt_front_api api, struct bt_front_error *e);

bool bt_front_adapt_is(const json_t *v, const char *text); /* a string with this text */
/* A member that must be a string without NUL. prefix: as in bt_front_fields_check. NULL: e is
 * set. */
const char *bt_front_adapt_text(const json_t *object, const char *name, const char *prefix,
                                struct bt_front_error *e);
/* Copies the members that both bodies have under the same name, as they are. */
void bt_front_adapt_copy(const json_t *from, json_t *to);
/* A turn of the conversation that is being put together. */
struct bt_front_turn {
    json_t *messages; /* the chat body's */
    const char *role; /* "user", "assistant", ...; NULL: none is begun */
    bool has_text;
    struct bt_buf text, reasoning;
    json_t *calls; /* NULL: none */
};
/* Adds to the text or the reasoning. Parts are joined by newlines. */
void bt_front_turn_text(struct bt_front_turn *t, const json_t *text);
void bt_front_turn_reasoning(struct bt_front_turn *t, const json_t *text);
/* arguments: JSON text; owned by the function. */
void bt_front_turn_call(struct bt_front_turn *t, const char *id, const char *name,
                        json_t *arguments);
/* Ends the turn: it becomes a message, if there is anything in it. */
void bt_front_turn_end(struct bt_front_turn *t);
/* Adds the result of a tool as a message; owns content. Ends the turn before it. */
void bt_front_turn_result(struct bt_front_turn *t, const char *id, json_t *content);
void bt_front_turn_cleanup(struct bt_front_turn *t);

/* The chat body of a body of /v1/messages; count: of /v1/messages/count_tokens. */
json_t *bt_front_messages_chat(const json_t *root, bool count, struct bt_front_error *e);
/* The chat body of a body of /v1/responses. */
json_t *bt_front_responses_chat(const json_t *root, struct bt_front_error *e);
/* Members of the response that repeat the request, with the sampling as it is used. */
void bt_front_responses_echo(const json_t *root, float temperature, float top_p,
                             struct bt_buf *out);

/* Takes the tools and the choice among them of a body in another API's form. take_tool appends tool
 * number i to the chat body's tools; take_choice writes its tool_choice. false: *e says why. */
typedef bool (*bt_front_tool_fn)(const json_t *tool, size_t i, json_t *tools,
                                 struct bt_front_error *e);
typedef bool (*bt_front_choice_fn)(json_t *choice, json_t *chat, struct bt_front_error *e);
bool bt_front_adapt_tools(const json_t *root, json_t *chat, bt_front_tool_fn take_tool,
                          bt_front_choice_fn take_choice, struct bt_front_error *e);

#endif
