/* Within front/: what a chat body asks of the model's reasoning: whether, how hard and how long.
 * Each family of APIs has fields of its own for it. Pure. */
#ifndef BT_CONDUCTOR_FRONT_THINKING_H
#define BT_CONDUCTOR_FRONT_THINKING_H

#include "conductor/front/front_prompt.h"
#include "conductor/request/request.h"

/* Reads the fields. Sets the variables of the chat template in ctx that chat_template_kwargs has
 * not set, chat->budget, and chat->hides_thoughts if the client does not want to have them. */
bool bt_front_take_thinking(const json_t *root, json_t *ctx, struct bt_front_chat *chat,
                            struct bt_front_error *e);

/* What ends a reasoning of the model, as tokens: its marker, between newlines if the chat template
 * writes it so. Empty: there is none. */
void bt_front_thoughts_end(const struct bt_tokenizer *tok, enum bt_reply_thoughts thoughts,
                           const char *template_text, struct bt_tokens *ids);
/* Sets spec->thoughts if the answer may have a reasoning and this has a budget. Call it with the
 * grammar set. */
void bt_front_set_budget(const struct bt_front_model *m, const struct bt_front_chat *chat,
                         struct bt_gen_spec *spec);

#endif
