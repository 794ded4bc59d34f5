/* Launches skinny.cuh's kernels for e4m3 weights and activations. A file of their own, as they take
 * long to compile. */
#include "common/engine/cuda/gemm/skinny.cuh"

extern "C" cudaError_t bt_cu_skinny_both(const CUtensorMap *w_map, const CUtensorMap *x_map,
                                         struct bt_cu_skinny_args *a, uint32_t groups,
                                         uint32_t tokens, cudaStream_t s)
{
    return tokens <= 64 ? launch_groups<64, SKINNY_E4M3>(*w_map, *x_map, *a, groups, s)
                        : launch_groups<128, SKINNY_E4M3>(*w_map, *x_map, *a, groups, s);
}
