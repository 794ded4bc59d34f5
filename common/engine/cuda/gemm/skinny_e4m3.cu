/* Launches skinny.cuh's kernels for e4m3 weights that become f16. A file of their own, as they take
 * long to compile. */
#include "common/engine/cuda/gemm/skinny.cuh"
#include "common/engine/cuda/hopper.cuh"

extern "C" cudaError_t bt_cu_skinny_e4m3(const CUtensorMap *w_map, const CUtensorMap *x_map,
                                         struct bt_cu_skinny_args *a, uint32_t groups,
                                         uint32_t tokens, cudaStream_t s)
{
    return launch_tokens<SKINNY_F16>(*w_map, *x_map, *a, groups, tokens, s);
}
