/* Decode attention on sm_80 and newer: cp.async fetches tiles, 16 bytes a lane, and puts them into
 * shared memory in the layout of Hopper's copy engine, so that the computing code is the same. */
#include "common/engine/cuda/attention/decode.cuh"
#include "common/engine/cuda/copy_async.cuh"

struct async_copy {
    static constexpr uint32_t WARPS = 4, ARRIVALS = WARPS * 32; /* each thread arrives when its
                                                                   copies are done */

    static __device__ __forceinline__ void prepare(const CUtensorMap *)
    {
    }
    static __device__ __forceinline__ void begin(uint32_t, uint32_t empty, uint32_t phase, uint32_t)
    {
        bar_wait(empty, phase);
    }
    template <bool E4M3, int D>
    static __device__ __forceinline__ void page(const struct decode_args &a, const CUtensorMap *,
                                                int page, uint32_t row, uint32_t to,
                                                uint32_t scales_to, uint32_t)
    {
        typedef tile_of<E4M3, D> tile;
        constexpr uint32_t bytes = D * tile::value, chunks = tile::row / 16;
        const uint32_t me = threadIdx.x % (WARPS * 32), rows = 2 * a.page_tokens;
        const uint8_t *first = a.kv + ((size_t)page * a.page_rows + a.layer_row + row) * bytes;
#pragma unroll 4
        for (uint32_t i = me; i < rows * chunks; i += WARPS * 32) {
            uint32_t r = i / chunks, c = i % chunks;
#pragma unroll
            for (uint32_t h = 0; h < tile::halves; h++) {
                async_load(to + h * (DECODE_TILE * 2 * tile::row) + swizzled<tile::row>(r, c),
                           first + r * bytes + h * tile::row + c * 16);
            }
        }
        if (E4M3 && me < rows / 16) {
            const uint8_t *from = a.scales + (size_t)page * a.page_rows * D + row;
            async_load(scales_to + me * 16, from + me * 16);
        }
    }
    static __device__ __forceinline__ void end(uint32_t full)
    {
        async_arrive(full);
    }
};

extern "C" cudaError_t bt_attn_decode_mma(struct bt_attn *a, const struct bt_attn_decode *d,
                                          uint32_t layer_row, cudaStream_t s)
{
    return decode_with<async_copy>(a, d, layer_row, s);
}
