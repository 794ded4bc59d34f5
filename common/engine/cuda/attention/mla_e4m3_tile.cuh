/* What the warpgroups of the MLA decode kernel for fp8 latents (mla_e4m3_wgmma.cu) share: sizes,
 * shared memory, and operands of products made of e4m3. Device code only. */
#ifndef BT_CUDA_MLA_E4M3_TILE_CUH
#define BT_CUDA_MLA_E4M3_TILE_CUH

#include "common/engine/cuda/attention/mla_outputs.cuh"
#include "common/engine/cuda/attention/mla_scores.cuh"
#include "common/engine/cuda/e4m3.cuh"

#define E4M3_ROW    BT_MLA_E4M3_ROW
#define E4M3_TILE   (TOKENS * E4M3_ROW)
#define E4M3_STAGES 4 /* at most */
#define WEIGHTS     2 /* tiles whose weights have a place */

struct e4m3_shared {
    uint64_t full[E4M3_STAGES], empty[E4M3_STAGES]; /* tiles as they are in memory */
    uint64_t scored[WEIGHTS], weighed[WEIGHTS], weights_empty[WEIGHTS];
    uint64_t q_full[2], q_empty[2];
    struct mla_weights w;
};

/* N columns of query rows. Everything that products read begins at a multiple of 1024. */
template <int N> struct e4m3_shape {
    static constexpr uint32_t stages = N == 64 ? 3 : 4, q_stages = N == 16 ? 2 : 1;
    static constexpr uint32_t q_bytes = N * BT_MLA_ROW * 2, p_bytes = N * 128;
    static constexpr uint32_t p_at = q_stages * q_bytes, tiles_at = p_at + WEIGHTS * p_bytes;
    static constexpr uint32_t shared_at = tiles_at + stages * E4M3_TILE;
    static constexpr uint32_t bytes = shared_at + sizeof(struct e4m3_shared);
    /* Registers of a thread. 64 columns need all that there are. */
    static constexpr int copy_regs = N == 64 ? 24 : 56, score_regs = N == 64 ? 120 : 168,
                         out_regs = N == 64 ? 184 : 144;
    static_assert(stages <= E4M3_STAGES && bytes <= SMEM_MAX, "tiles do not fit");
};

static __device__ __forceinline__ float latent_scale(const uint8_t *row, int group)
{
    return *(const float *)(row + BT_MLA_E4M3_SCALES + group * 4);
}

#endif
