/* Between skinny.cu (ways, entry), skinny_e4m3.cu and skinny_rounded.cu (kernels of e4m3 weights).
 */
#ifndef BT_CUDA_SKINNY_PRIV_H
#define BT_CUDA_SKINNY_PRIV_H

#include <cuda.h>

#include "common/engine/cuda/gemm/skinny.h"

#define SMEM_MAX 231424u

/* Both operands in bf16; x in f16 and w in e4m3, which becomes f16; both in e4m3. */
enum bt_cu_skinny_kind { SKINNY_BF16, SKINNY_F16, SKINNY_E4M3 };

/* The most tokens for so many computing warpgroups in a block. */
static constexpr uint32_t bt_cu_skinny_most(enum bt_cu_skinny_kind kind, uint32_t groups)
{
    return kind == SKINNY_BF16   ? 128
           : kind == SKINNY_E4M3 ? groups == 4 ? 64 : 128
           : groups == 1         ? 0
           : groups == 2         ? 128
           : groups == 3         ? 64
                                 : 32;
}

struct bt_cu_skinny_args {
    void *y;
    uint32_t m, n, tiles, steps;             /* steps: k in units of 128 bytes of weights */
    uint32_t depth, slots, x_slots, cluster; /* slots: of each warpgroup */
    enum bt_cu_skinny_end end;
    bool rounded; /* SWIGLU_ROUNDED, whose end is SWIGLU here */
    /* The scale of row r and step i: scale[(r >> shift) * stride + i * step]. */
    const float *scale;
    uint32_t scale_shift, scale_stride, scale_step;
    const float *x_scale; /* of e4m3 activations */
    uint32_t x_stride;
    float *y_scale; /* SWIGLU: y is e4m3, with these scales in rows of x_stride; or NULL */
};

extern "C" cudaError_t bt_cu_skinny_e4m3(const CUtensorMap *w_map, const CUtensorMap *x_map,
                                         struct bt_cu_skinny_args *a, uint32_t groups,
                                         uint32_t tokens, cudaStream_t s);
extern "C" cudaError_t bt_cu_skinny_both(const CUtensorMap *w_map, const CUtensorMap *x_map,
                                         struct bt_cu_skinny_args *a, uint32_t groups,
                                         uint32_t tokens, cudaStream_t s);

#endif
