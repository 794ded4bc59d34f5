/* Decode attention on Hopper: the tensor copy engine fetches tiles. */
#include "common/engine/cuda/attention/decode.cuh"
#include "common/engine/cuda/hopper.cuh"

struct tma_copy {
    static constexpr uint32_t WARPS = 1, ARRIVALS = 1;

    static __device__ __forceinline__ void prepare(const CUtensorMap *map)
    {
        tma_prefetch(map);
        bar_init_fence();
    }
    static __device__ __forceinline__ void begin(uint32_t full, uint32_t empty, uint32_t phase,
                                                 uint32_t bytes)
    {
        if (threadIdx.x % 32 == 0) {
            bar_wait(empty, phase);
            bar_expect(full, bytes);
        }
    }
    template <bool E4M3, int D>
    static __device__ __forceinline__ void page(const struct decode_args &a, const CUtensorMap *map,
                                                int page, uint32_t row, uint32_t to,
                                                uint32_t scales_to, uint32_t full)
    {
        typedef tile_of<E4M3, D> tile;
        if (threadIdx.x % 32) {
            return;
        }
#pragma unroll
        for (uint32_t h = 0; h < tile::halves; h++) {
            tma_load_2d(to + h * (DECODE_TILE * 2 * tile::row), map, full, (int)h * 64,
                        page * (int)a.page_rows + (int)(a.layer_row + row), TMA_EVICT_FIRST);
        }
        if (E4M3) {
            bulk_load(scales_to, a.scales + (size_t)page * a.page_rows * D + row, 2 * a.page_tokens,
                      full);
        }
    }
    static __device__ __forceinline__ void end(uint32_t)
    {
    }
};

extern "C" cudaError_t bt_attn_decode_tma(struct bt_attn *a, const struct bt_attn_decode *d,
                                          uint32_t layer_row, cudaStream_t s)
{
    return decode_with<tma_copy>(a, d, layer_row, s);
}
