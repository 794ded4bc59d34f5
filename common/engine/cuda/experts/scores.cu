/* Launches the norm and the router's product (scores.cuh) for any number of rows. */
#include "common/engine/cuda/experts/scores.cuh"

template <class C>
static __global__ void __launch_bounds__(C::THREADS)
    scores_kernel(const __grid_constant__ struct scores_args a)
{
    extern __shared__ __align__(16) uint8_t raw[];
    early_next();
    const float *factor = scores_block<C>(a, raw);
    write_norm(a, blockIdx.x / a.tiles * (C::MT * 16), C::MT * 16, factor, threadIdx.x, C::THREADS);
}

template <class C> static cudaError_t launch(struct scores_args a, cudaStream_t s)
{
    const size_t smem = scores_smem<C>();
    cudaError_t e = cudaFuncSetAttribute(scores_kernel<C>,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem);
    a.tiles = scores_tiles<C>(a.n);
    return e == cudaSuccess
               ? launch_early(scores_kernel<C>, scores_grid<C>(a), C::THREADS, smem, s, a)
               : e;
}

extern "C" cudaError_t bt_cu_experts_scores(const struct bt_cu_experts *x,
                                            const struct bt_cu_experts_norm *norm,
                                            const void *router, uint32_t rows, void *a,
                                            float *scores, cudaStream_t s)
{
    if (x->hidden % 8 != 0 || rows == 0) {
        return cudaErrorInvalidValue;
    }
    const struct scores_args args = scores_args_of(x, norm, router, rows, a, scores);
    if (rows <= BT_CU_EXPERTS_FEW) { /* few_cut alone has sixteen warps, which divide k */
        return x->invariant ? launch<least_cut>(args, s) : launch<few_cut>(args, s);
    }
    return args.n <= 64 ? launch<narrow_cut>(args, s) : launch<broad_cut>(args, s);
}
