/* Between skinny.cu (ways, entry) and skinny_e4m3.cu (kernels of e4m3 weights). */
#ifndef BT_CUDA_SKINNY_PRIV_H
#define BT_CUDA_SKINNY_PRIV_H

#include <cuda.h>

#include "common/engine/cuda/gemm/skinny.h"

#define SMEM_MAX 231424u

/* The most tokens with e4m3 weights for 2, 3 or 4 computing warpgroups in a block. */
#define SKINNY_E4M3_TOKENS(groups) ((groups) == 2 ? 128 : (groups) == 3 ? 64 : 32)

struct bt_cu_skinny_args {
    void *y;
    uint32_t m, n, tiles, steps;             /* steps: k in units of 128 bytes of weights */
    uint32_t depth, slots, x_slots, cluster; /* slots: of each warpgroup */
    enum bt_cu_skinny_end end;
    bool rounded; /* SWIGLU_ROUNDED, whose end is SWIGLU here */
    /* The scale of row r and step i: scale[(r >> shift) * stride + i * step]. */
    const float *scale;
    uint32_t scale_shift, scale_stride, scale_step;
};

extern "C" cudaError_t bt_cu_skinny_e4m3(const CUtensorMap *w_map, const CUtensorMap *x_map,
                                         struct bt_cu_skinny_args *a, uint32_t groups,
                                         uint32_t tokens, cudaStream_t s);

#endif
