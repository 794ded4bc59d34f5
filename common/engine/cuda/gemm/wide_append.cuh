/* Endings of large products whose tile is BN columns of queries, keys and values (wide.cu,
 * wide_e4m3.cu): bias, QK norm and RoPE in registers, then 16-bit values through shared memory to
 * queries and pages. A thread holds rows lane / 4 and + 8 of its warp's 16, columns 8 i + lane % 4
 * * 2 and the next: acc[4 i + 2 (row) + (column)]. Device code only. */
#ifndef BT_CUDA_WIDE_APPEND_CUH
#define BT_CUDA_WIDE_APPEND_CUH

#include "common/engine/cuda/gemm/wide_tile.cuh"
#include "common/engine/cuda/rows/rows.h"

/* The place in shared memory where this warp writes 128 columns of 16-bit values: 16 rows of 16
 * pieces of 16 bytes. The pieces are permuted by row, so that neither writing nor reading has bank
 * conflicts. */
static __device__ __forceinline__ uint32_t *staged(uint8_t *stage, uint32_t row, uint32_t piece)
{
    return (uint32_t *)(stage + row * 256 + (piece ^ row % 8) * 16);
}

/* Applies bias, QK norm and RoPE to the heads in a tile, in place. pos: of the thread's two
 * rows. */
template <int D>
static __device__ __forceinline__ void turn(const struct bt_cu_append &a, uint32_t head0,
                                            const float2 (&cs)[D / 4], float (&acc)[128])
{
    constexpr int HEADS = BN / D, PER = D / 2;
    const uint32_t all = a.heads + 2 * a.kv_heads, first = threadIdx.x % 4 * 2;
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        const uint32_t head = head0 + h;
        const float *norm = head < a.heads                ? a.q_norm
                            : head < a.heads + a.kv_heads ? a.k_norm
                                                          : NULL;
        if (a.bias && head < all) {
#pragma unroll
            for (int i = 0; i < PER; i += 4) {
                float2 v = *(const float2 *)(a.bias + (size_t)head * D + i * 2 + first);
                acc[h * PER + i] += v.x;
                acc[h * PER + i + 1] += v.y;
                acc[h * PER + i + 2] += v.x;
                acc[h * PER + i + 3] += v.y;
            }
        }
        if (norm) {
            float sum[2] = {0, 0}, f[2];
#pragma unroll
            for (int i = 0; i < PER; i++) {
                sum[i / 2 % 2] += acc[h * PER + i] * acc[h * PER + i];
            }
#pragma unroll
            for (int r = 0; r < 2; r++) {
                sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
                sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
                f[r] = rsqrtf(sum[r] / D + a.eps);
            }
#pragma unroll
            for (int i = 0; i < PER; i += 4) {
                float2 v = *(const float2 *)(norm + i * 2 + first);
                acc[h * PER + i] *= f[0] * v.x;
                acc[h * PER + i + 1] *= f[0] * v.y;
                acc[h * PER + i + 2] *= f[1] * v.x;
                acc[h * PER + i + 3] *= f[1] * v.y;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float2 c = cs[i * 4 + r * 2], s = cs[i * 4 + r * 2 + 1];
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                if (head0 + h < a.heads + a.kv_heads) {
                    float *v = acc + h * PER + i * 4 + r * 2, *u = v + PER / 2;
                    float x = v[0], y = v[1];
                    v[0] = x * c.x - u[0] * s.x;
                    v[1] = y * c.y - u[1] * s.y;
                    u[0] = u[0] * c.x + x * s.x;
                    u[1] = u[1] * c.y + y * s.y;
                }
            }
        }
    }
}

/* Loads the cosines and sines for the thread's columns in its two rows. */
template <int D>
static __device__ __forceinline__ void angles(const struct bt_cu_append &a, int at_pos,
                                              float2 (&cs)[D / 4])
{
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int pos = __shfl_sync(~0u, at_pos, lane / 4 + r * 8);
        const float *at = a.rope + (size_t)pos * D + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            cs[i * 4 + r * 2] = *(const float2 *)(at + i * 8);
            cs[i * 4 + r * 2 + 1] = *(const float2 *)(at + D / 2 + i * 8);
        }
    }
}

/* Lane l gets the place of row l % 16 among a plane's rows, and its position. ~0: a padding row. */
static __device__ __forceinline__ uint32_t place_of(const struct bt_cu_append &a, uint32_t row0,
                                                    int *pos)
{
    uint32_t t = row0 + threadIdx.x % 16;
    *pos = 0;
    if (t >= a.n || a.slots[t] < 0) {
        return ~0u;
    }
    *pos = a.pos[t];
    size_t page = (size_t)a.table[(size_t)a.slots[t] * a.table_stride + *pos / a.page_tokens];
    return (uint32_t)(page * a.page_rows + a.layer_row + *pos % a.page_tokens);
}

/* Puts 128 columns of 16-bit pairs into shared memory. v[2 i + (row)]: columns 8 i and on. */
static __device__ __forceinline__ void stage_append(const uint32_t *v, uint8_t *stage)
{
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        staged(stage, lane / 4 + i % 2 * 8, i / 2)[lane % 4] = v[i];
    }
    __syncwarp();
}

/* Writes staged queries to their rows, keys and values to their pages. col0: the first column of
 * n; place: of this lane's row, as place_of says. */
template <int D>
static __device__ __forceinline__ void put_append(const struct bt_cu_append &a, uint32_t n,
                                                  uint32_t row0, uint32_t col0, uint32_t place,
                                                  uint8_t *stage)
{
    const uint32_t lane = threadIdx.x % 32, piece = lane % 16;
    const uint32_t col = col0 + piece * 8, head = col / D, d = col % D, kv = head - a.heads;
    const uint32_t plane = kv < a.kv_heads ? kv * 2 : (kv - a.kv_heads) * 2 + 1;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t row = i * 2 + lane / 16, to = __shfl_sync(~0u, place, row);
        uint4 v = *(const uint4 *)staged(stage, row, piece);
        if (to != ~0u && col < n) {
            size_t at = head < a.heads ? (size_t)(row0 + row) * a.heads + head
                                       : (size_t)to + plane * a.page_tokens;
            *(uint4 *)((__half *)(head < a.heads ? a.q : a.pool) + at * D + d) = v;
        }
    }
    __syncwarp();
}

#endif
