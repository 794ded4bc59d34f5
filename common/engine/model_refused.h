/* Within common/engine/: keys of config.json and generation_config.json that change what a model
 * computes and that no back end follows. Pure. */
#ifndef BT_ENGINE_MODEL_REFUSED_H
#define BT_ENGINE_MODEL_REFUSED_H

#include <jansson.h>

#include "common/base/base.h"

enum bt_model_object { BT_MODEL_CONFIG, BT_MODEL_ROPE, BT_MODEL_GENERATION };

/* True if no such key is set to more than its neutral value. False: text names the key and what is
 * accepted. Keys in no table are ignored: most do not affect the forward pass. */
bool bt_model_follows(const json_t *o, enum bt_model_object kind, char *text, size_t cap);

#endif
