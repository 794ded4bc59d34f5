/* Within front/: how many choices a request makes and how they are found: n, best_of, beam search.
 * Pure. */
#ifndef BT_CONDUCTOR_FRONT_SEARCH_H
#define BT_CONDUCTOR_FRONT_SEARCH_H

#include "conductor/front/front_parse.h"

/* Reads n, best_of and the fields of beam search. `stream` was read. */
bool bt_front_take_choices(const json_t *root, struct bt_gen_spec *spec,
                           struct bt_front_options *opt, struct bt_front_error *e);
/* All of spec but its prompt and lengths is read: refuses what a beam search cannot do, and asks
 * for the logprobs by which best_of chooses. max: tokens of the answer, at most. */
bool bt_front_finish_choices(const json_t *root, int64_t max, struct bt_gen_spec *spec,
                             struct bt_front_options *opt, struct bt_front_error *e);

#endif
