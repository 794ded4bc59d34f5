/* Within front/: a prompt's own logprobs are written into the answer, off the loop where that takes
 * long. */
#ifndef BT_CONDUCTOR_FRONT_ECHO_H
#define BT_CONDUCTOR_FRONT_ECHO_H

#include "conductor/front/front_format.h"
#include "conductor/front/front_jobs.h"

struct front_echo;

/* Writes the logprobs of a's prompt. NULL: done. Else taken(arg) is called from the loop when they
 * are in a, which must live until then or until front_echo_forget. tokens are copied. */
struct front_echo *front_echo_start(struct bt_front *f, struct front_answer *a, uint32_t prompt,
                                    const struct bt_gen_token *tokens, size_t n,
                                    void (*taken)(void *arg), void *arg);
/* Nobody waits any more: taken is not called. */
void front_echo_forget(struct front_echo *e);

#endif
