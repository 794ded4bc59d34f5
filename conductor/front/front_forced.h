/* Within front/: grammars of answers with tool calls or reasoning: what tool_choice and `strict`
 * ask for, in the form in which the model writes calls, and a constrained answer behind reasoning.
 */
#ifndef BT_CONDUCTOR_FRONT_FORCED_H
#define BT_CONDUCTOR_FRONT_FORCED_H

#include "conductor/front/front_prompt.h"
#include "conductor/request/request.h"

/* Sets spec->grammar if calls are asked for (tool_choice) or some tool is strict. If another field
 * has set it: lets the model's reasoning come before, and calls instead. False: e is set; e->beyond
 * if a reading thread has to do it. */
bool bt_front_force(const struct bt_front_model *m, const json_t *root,
                    const struct bt_front_chat *chat, const struct bt_front_tools *tools,
                    struct bt_gen_spec *spec, struct bt_front_error *e);

#endif
