/* Within front/: the fields of DoLa and contrastive search, and the fields with which they cannot
 * be combined. Pure. */
#ifndef BT_CONDUCTOR_FRONT_CONTRAST_H
#define BT_CONDUCTOR_FRONT_CONTRAST_H

#include "conductor/front/front_prompt.h"
#include "conductor/request/request.h"

/* Reads dola_layers and penalty_alpha into spec, whose sampling parameters are set already. A
 * contrastive search neither reads nor fills the prefix cache. n: choices of a prompt. */
bool bt_front_take_contrast(const struct bt_front_model *m, const json_t *root, uint32_t n,
                            struct bt_gen_spec *spec, struct bt_front_error *e);

#endif
