/* The scores' warpgroup of the MLA decode kernel for fp8 latents (mla_e4m3_wgmma.cu): S^T with K
 * from registers, softmax, P. Device code only. */
#ifndef BT_CUDA_MLA_E4M3_SCORES_CUH
#define BT_CUDA_MLA_E4M3_SCORES_CUH

#include "common/engine/cuda/attention/mla_e4m3_tile.cuh"

/* A thread reads four contiguous latents of a row at once, and uses them as columns 2c, 2c + 1, 2c
 * + 8 and 2c + 9 of 16 (c: lane % 4): a sum over columns may run in any order. This brings the
 * queries' columns into the same order: of each eight pairs the even ones first. */
template <int N> static __device__ __forceinline__ void order_queries(uint8_t *q)
{
    constexpr int GROUPS = N * BT_MLA_LATENT / 16;
#pragma unroll 4
    for (int i = threadIdx.x % 128; i < GROUPS; i += 128) {
        const int row = i / 4 % N, group = i % 4;
        uint8_t *at = q + i / (4 * N) * (N * 128) + row * 128;
        uint4 *lo = (uint4 *)(at + (group * 2 ^ row % 8) * 16);
        uint4 *hi = (uint4 *)(at + ((group * 2 + 1) ^ row % 8) * 16);
        const uint4 u = *lo, v = *hi;
        *lo = make_uint4(u.x, u.z, v.x, v.z);
        *hi = make_uint4(u.y, u.w, v.y, v.w);
    }
    fence_async_shared();
    named_sync(NAMED_S, 128);
}

/* The bytes of 64 columns of K in two rows, eight apart: [j][row] are of 16 columns. */
static __device__ __forceinline__ void load_box(uint32_t (&raw)[4][2], const uint8_t *row, int box)
{
    const uint8_t *at = row + box * 64 + threadIdx.x % 4 * 4;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        raw[j][0] = *(const uint32_t *)(at + j * 16);
        raw[j][1] = *(const uint32_t *)(at + j * 16 + 8 * E4M3_ROW);
    }
}
static __device__ __forceinline__ void latent_box(uint32_t (&k)[4][4], const uint32_t (&raw)[4][2])
{
#pragma unroll
    for (int j = 0; j < 4; j++) {
        e4m3_four(raw[j][0], k[j][0], k[j][2]);
        e4m3_four(raw[j][1], k[j][1], k[j][3]);
    }
}
static __device__ __forceinline__ void scaled_box(uint32_t (&k)[4][4], const uint32_t (&raw)[4][2],
                                                  uint32_t scale0, uint32_t scale1)
{
#pragma unroll
    for (int j = 0; j < 4; j++) {
        e4m3_scaled(raw[j][0], scale0, k[j][0], k[j][2]);
        e4m3_scaled(raw[j][1], scale1, k[j][1], k[j][3]);
    }
}

/* The same of the columns with position, which are bf16. */
static __device__ __forceinline__ void rope_box(uint32_t (&k)[4][4], const uint8_t *row)
{
    const uint8_t *at = row + BT_MLA_E4M3_ROPE + threadIdx.x % 4 * 4;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const uint32_t two =
            *(const uint32_t *)(at + i % 2 * 8 * E4M3_ROW + i / 4 * 32 + i / 2 % 2 * 16);
        k[i / 4][i % 4] =
            pack2<__half>(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
    }
}

static __device__ __forceinline__ float4 row_scales(const uint8_t *row)
{
    return *(const float4 *)(row + BT_MLA_E4M3_SCALES);
}
static __device__ __forceinline__ float scale_of(const float4 &f, int group)
{
    return group == 0 ? f.x : group == 1 ? f.y : group == 2 ? f.z : f.w;
}

template <int N>
static __device__ __forceinline__ void box_scores(float (&s)[N / 2], const uint32_t (&k)[4][4],
                                                  uint64_t q, int box, bool first)
{
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; j++) { /* 16 values are 32 bytes */
        wgmma_rs_f16(s, k[j], q + (uint64_t)(box * (N * 128) + j * 32) / 16, !first || j > 0);
    }
    wgmma_commit();
}

/* Makes the operands of a box while the products of the box before run. The bytes of the next one
 * are already on their way. With few columns it is less work to scale the sums of a group than its
 * operands. */
template <int N>
static __device__ __forceinline__ void scores(float (&s)[N / 2], const uint8_t *row, uint64_t q)
{
    constexpr bool SUMS = N < 64;
    uint32_t raw[2][4][2], k[2][4][4];
    float sum[SUMS ? 4 : 1][N / 2];
    const float4 f0 = row_scales(row), f1 = row_scales(row + 8 * E4M3_ROW);
    wgmma_hold(s);
    load_box(raw[0], row, 0);
    rope_box(k[1], row);
    box_scores<N>(s, k[1], q, BOXES - 1, true);
#pragma unroll
    for (int i = 0; i < BOXES - 1; i++) {
        if (i + 1 < BOXES - 1) {
            load_box(raw[(i + 1) % 2], row, i + 1);
        }
        if constexpr (SUMS) {
            latent_box(k[i % 2], raw[i % 2]);
            box_scores<N>(sum[i / 2], k[i % 2], q, i, i % 2 == 0);
        } else {
            const float s0 = scale_of(f0, i / 2), s1 = scale_of(f1, i / 2);
            scaled_box(k[i % 2], raw[i % 2], pack2<__half>(s0, s0), pack2<__half>(s1, s1));
            box_scores<N>(s, k[i % 2], q, i, false);
        }
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
    wgmma_hold(s);
#pragma unroll
    for (int g = 0; SUMS && g < 4; g++) {
        wgmma_hold(sum[g]);
        const float s0 = scale_of(f0, g), s1 = scale_of(f1, g);
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            s[i] = fmaf(i % 4 < 2 ? s0 : s1, sum[g][i], s[i]);
        }
    }
}

/* Prepares the warp's 16 rows for the outputs. Clears those behind the sequence, from row `from` of
 * the tile on: they may be NaN, and 0 * NaN is not 0. Of two rows the scales become f16 in the
 * place of the first one's. All lanes have read the rows. */
static __device__ __forceinline__ void prepare_rows(uint8_t *tile, int from)
{
    const int lane = threadIdx.x % 32, first = threadIdx.x % 128 / 32 * 16;
    for (int row = max(first, from); row < first + 16; row++) {
        for (int i = lane; i < BT_MLA_E4M3_ROPE / 16; i += 32) {
            *(uint4 *)(tile + row * E4M3_ROW + i * 16) = make_uint4(0, 0, 0, 0);
        }
    }
    __syncwarp();
    uint8_t *pair = tile + (first + lane / 4 * 2) * E4M3_ROW;
    *(uint32_t *)(pair + BT_MLA_E4M3_SCALES + lane % 4 * 4) =
        pack2<__half>(latent_scale(pair, lane % 4), latent_scale(pair + E4M3_ROW, lane % 4));
}

template <int N, int C>
static __device__ __forceinline__ void score_e4m3(const struct mla_args &a, struct walk w,
                                                  uint8_t *smem, struct e4m3_shared *b)
{
    typedef e4m3_shape<N> at;
    const uint32_t smem_at = smem_addr(smem);
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    struct ring r = {0, 0}, p = {0, 0}, free = {0, 1}, qr = {0, 0};
    struct score_state<N> t;
    for (; walk_piece(w); walk_next(a, w)) {
        const uint64_t q = wgmma_desc(__shfl_sync(~0u, smem_at + qr.at * at::q_bytes, 0), 0, 1024);
#pragma unroll
        for (int c = 0; c < N / 4; c++) {
            t.m[c] = 0;
            t.l[c] = 0;
        }
        bar_wait(smem_addr(&b->q_full[qr.at]), qr.phase);
        order_queries<N>(smem + qr.at * at::q_bytes);
        for (int i = 0; i < w.n; i++) {
            const int base = (w.tile + i) * TOKENS;
            uint8_t *tile = smem + at::tiles_at + r.at * E4M3_TILE;
            bar_wait(smem_addr(&b->full[r.at]), r.phase);
            scores<N>(t.s, tile + row * E4M3_ROW, q);
            release<1>(&b->scored[p.at]);
            if (i == w.n - 1) {
                release<1>(&b->q_empty[qr.at]);
            }
            if (base + TOKENS > w.s.len - w.s.n + 1) {
                mask(t, a, w, base, group_of<C>(w) * N);
            }
            prepare_rows(tile, w.s.len - base);
            bar_wait(smem_addr(&b->weights_empty[p.at]), free.phase);
            relate(t, a, &b->w, p.at, i == 0);
            weigh(t, smem_at + at::p_at + p.at * at::p_bytes);
            if (i == w.n - 1) {
                store_sums(t, &b->w, p.at);
            }
            fence_async_shared();
            release<1>(&b->weighed[p.at]);
            r.next(at::stages);
            p.next(WEIGHTS);
            free.next(WEIGHTS);
        }
        qr.next(at::q_stages);
    }
}

#endif
