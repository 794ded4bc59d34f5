/* The logprobs of a prompt's tokens while they arrive, in order and in pieces. No I/O. */
#ifndef BT_CONDUCTOR_PROMPT_H
#define BT_CONDUCTOR_PROMPT_H

#include "conductor/request/request.h"
#include "session.pb-c.h"

struct bt_prompt;

/* top: most likely tokens kept for each, 0..BT_ENGINE_MAX_TOP. */
struct bt_prompt *bt_prompt_create(const struct bt_tokens *prompt, uint32_t top);
void bt_prompt_destroy(struct bt_prompt *p); /* NULL is fine */
/* A new plan: its worker begins with the second token again. */
void bt_prompt_begin(struct bt_prompt *p);
/* False: not what comes next, or not this prompt. */
bool bt_prompt_add(struct bt_prompt *p, const Baton__PromptLogprobs *m) BT_MUST_CHECK;
bool bt_prompt_complete(const struct bt_prompt *p);
/* [n tokens of the prompt]; the first has no logprob (NaN) and no top. Valid as long as p. */
const struct bt_gen_token *bt_prompt_tokens(const struct bt_prompt *p);

#endif
