/* Within common/engine/: keys of config.json and generation_config.json that change what a model
 * computes and that no back end follows. Pure. */
#ifndef BT_ENGINE_MODEL_REFUSED_H
#define BT_ENGINE_MODEL_REFUSED_H

#include <jansson.h>

#include "common/base/base.h"

enum bt_model_object { BT_MODEL_CONFIG, BT_MODEL_ROPE, BT_MODEL_GENERATION };

/* Keys that an architecture has itself and that its reader follows. */
enum bt_model_own {
    BT_MODEL_OWN_MLA = 1,
    BT_MODEL_OWN_ROUTED = 2,  /* DeepSeek's names of its experts */
    BT_MODEL_OWN_EXPERTS = 4, /* Qwen's and Mixtral's */
    BT_MODEL_OWN_YARN = 8
};

/* Returns true if none of these keys has another value than its neutral one. On false, text names
 * the key and the accepted values. Keys that are in no table are ignored: most do not affect the
 * forward pass. own: bits of bt_model_own, whose keys are not refused. */
bool bt_model_follows(const json_t *o, enum bt_model_object kind, uint32_t own, char *text,
                      size_t cap);

#endif
