/* The highest speeds of this machine, measured. Benchmarks compare the CPU engine with them. The
 * plugin exports bt_cpu_limits; a benchmark finds it by dlsym. */
#ifndef BT_ENGINE_CPU_LIMITS_H
#define BT_ENGINE_CPU_LIMITS_H

#include "common/base/base.h"

struct bt_cpu_limits {
    double product; /* flop/s of oneDNN's product in bf16 (f32 where the processor has no bf16
                       units), the best of some shapes */
    double read;    /* bytes/s of reading memory far larger than any cache */
    char product_text[64];
};

typedef bt_status_t (*bt_cpu_limits_fn)(uint32_t threads, uint32_t rounds, struct bt_cpu_limits *);
/* Takes the best of `rounds` rounds of both. ERR_NO_MEMORY, ERR_DEVICE. Some seconds. */
bt_status_t bt_cpu_limits(uint32_t threads, uint32_t rounds,
                          struct bt_cpu_limits *l_p) BT_MUST_CHECK;

#endif
