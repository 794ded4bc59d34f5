/* The prefill role's steps of a request (PREFILL and BOTH submissions): load the resident prefix,
 * compute the rest in chunks, store each (chunk, layer) into the grant's slots while the next layer
 * computes, sample the first token. Runs on the engine thread. */
#ifndef BT_PREFILL_PREFILL_H
#define BT_PREFILL_PREFILL_H

#include "common/worker/worker.h"

extern const struct bt_role_ops bt_prefill_role;

#endif
