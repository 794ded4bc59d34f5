/* Within front/: DoLa and contrastive search: their fields, and with what they do not go together.
 * Pure. */
#ifndef BT_CONDUCTOR_FRONT_CONTRAST_H
#define BT_CONDUCTOR_FRONT_CONTRAST_H

#include "conductor/front/front_prompt.h"
#include "conductor/request/request.h"

/* Reads dola_layers and penalty_alpha into spec, whose sampling is set; a contrastive search reads
 * and keeps no cache. n: choices of a prompt. */
bool bt_front_take_contrast(const struct bt_front_model *m, const json_t *root, uint32_t n,
                            struct bt_gen_spec *spec, struct bt_front_error *e);

#endif
