/* Where a step's time goes, for benchmarks of the CPU engine: the plugin exports bt_cpu_phases, a
 * benchmark finds it by dlsym. */
#ifndef BT_ENGINE_CPU_PHASES_H
#define BT_ENGINE_CPU_PHASES_H

#include "common/base/base.h"

enum bt_cpu_phase {
    BT_CPU_PHASE_GATHER,  /* rows, embeddings, RoPE tables */
    BT_CPU_PHASE_WAIT,    /* KV that comes from the slab, copies to it */
    BT_CPU_PHASE_NORM,    /* both of a layer and the last; activations cut into two parts */
    BT_CPU_PHASE_QKV,     /* product */
    BT_CPU_PHASE_SCATTER, /* bias, QK norm, RoPE, K and V to their pages */
    BT_CPU_PHASE_ATTN,
    BT_CPU_PHASE_O,
    BT_CPU_PHASE_GATE_UP, /* with SwiGLU */
    BT_CPU_PHASE_DOWN,
    BT_CPU_PHASE_ROUTER,
    BT_CPU_PHASE_EXPERTS,
    BT_CPU_PHASE_HEAD,
    BT_CPU_PHASES
};

struct bt_engine;
typedef void (*bt_cpu_phases_fn)(struct bt_engine *e, uint64_t ns[BT_CPU_PHASES]);
/* Adds up over all forwards since the last call: wall ns of the calling thread, waits for the other
 * threads included. Engine thread only. */
void bt_cpu_phases(struct bt_engine *e, uint64_t ns[BT_CPU_PHASES]);

#endif
