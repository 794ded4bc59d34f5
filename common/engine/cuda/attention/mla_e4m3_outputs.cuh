/* The outputs' warpgroups of the MLA decode kernel for fp8 latents (mla_e4m3_wgmma.cu): O^T with
 * V^T from registers, and the result. Device code only. */
#ifndef BT_CUDA_MLA_E4M3_OUTPUTS_CUH
#define BT_CUDA_MLA_E4M3_OUTPUTS_CUH

#include "common/engine/cuda/attention/mla_e4m3_tile.cuh"

/* The bytes of 16 tokens and four of the thread's latents, which are in one group, and the scales.
 * [h]: tokens 2c and 2c + 1, then 2c + 8 and 2c + 9 (c: lane % 4). */
struct latent_bytes {
    uint32_t even[2], odd[2], scales[2];
};
/* row: token 2c of the 16. */
static __device__ __forceinline__ void load_latents(struct latent_bytes &r, const uint8_t *row,
                                                    int latent, int group)
{
#pragma unroll
    for (int h = 0; h < 2; h++, row += 8 * E4M3_ROW) {
        r.even[h] = *(const uint32_t *)(row + latent);
        r.odd[h] = *(const uint32_t *)(row + E4M3_ROW + latent);
        r.scales[h] = *(const uint32_t *)(row + BT_MLA_E4M3_SCALES + group * 4);
    }
}

/* V^T of them. A thread has rows lane / 4 and lane / 4 + 8 of each product: of two products these
 * are its latents 0, 1 and 2, 3. */
static __device__ __forceinline__ void latent_columns(uint32_t (&v)[2][4],
                                                      const struct latent_bytes &r)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int i = 0; i < 2; i++) { /* bytes of both tokens side by side */
            e4m3_scaled(__byte_perm(r.even[h], r.odd[h], i ? 0x7362 : 0x5140), r.scales[h],
                        v[i][h * 2], v[i][h * 2 + 1]);
        }
    }
}

/* Adds a tile to the outputs. Operands are made while up to DEPTH - 1 pairs of products run. The
 * tile's place is free when its values are in registers. */
template <int N>
static __device__ __forceinline__ void outputs(struct out_state<N> &t, const uint8_t *tile,
                                               int half, uint64_t p, uint64_t *empty)
{
    constexpr int DEPTH = N == 64 ? 2 : 4, STEPS = TOKENS / 16 * 2;
    const uint8_t *row = tile + threadIdx.x % 4 * 2 * E4M3_ROW;
    const int latent = half * 256 + threadIdx.x % 128 / 4 * 4;
    struct latent_bytes r[2];
    uint32_t v[DEPTH][2][4];
    load_latents(r[0], row, latent, half * 2);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        wgmma_hold(t.o[i]);
    }
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        const int next = i + 1, group = i % 2;
        if (next < STEPS) {
            load_latents(r[next % 2], row + next / 2 * 16 * E4M3_ROW, latent + next % 2 * 128,
                         half * 2 + next % 2);
        } else {
            release<1>(empty);
        }
        latent_columns(v[i % DEPTH], r[i % 2]);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 2; j++) { /* 16 tokens: 32 bytes of P */
            wgmma_rs_f16(t.o[group * 2 + j], v[i % DEPTH][j], p + (uint64_t)(i / 2 * 32) / 16, 1);
        }
        wgmma_commit();
        wgmma_wait<DEPTH - 1>();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        wgmma_hold(t.o[i]);
    }
}

/* Where a thread's results go: as out_columns, with other latents. */
template <int N> struct out_latents {
    static constexpr int UNITS = N / 2, GROUP = 4, FIRST = 1, NEXT = 1;
    __half *to; /* of the first query row: the thread's first latent */
    int rows;   /* from that row to the sequence's last */

    __device__ __forceinline__ int query(int unit) const
    {
        return unit / 4 * 8 + threadIdx.x % 4 * 2;
    }
    /* v: K units from `unit` on; f0, f1: what the two columns are multiplied by. */
    template <int K>
    __device__ __forceinline__ void store(int unit, const float (&v)[K][4], float f0,
                                          float f1) const
    {
        static_assert(K == 1 || K == 4, "not made");
        const int row = query(unit);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            __half *at = to + (size_t)(row + j) * BT_MLA_LATENT + unit % 4 / 2 * 128 + unit % 2 * 2;
            const float f = j ? f1 : f0;
            uint32_t h[K];
#pragma unroll
            for (int i = 0; i < K; i++) {
                h[i] = pack2<__half>(v[i][j] * f, v[i][2 + j] * f);
            }
            if (row + j >= rows) {
                continue;
            }
            if constexpr (K == 4) {
                *(uint2 *)at = make_uint2(h[0], h[1]);
                *(uint2 *)(at + 128) = make_uint2(h[2], h[3]);
            } else {
                *(uint32_t *)at = h[0];
            }
        }
    }
};
template <int N, int C>
static __device__ __forceinline__ struct out_latents<N>
latents_of(const struct mla_args &a, const struct walk &w, int latent) {
    const int first = group_of<C>(w) * N;
    return {a.out + (size_t)(first_row(a, w) + first) * BT_MLA_LATENT + latent,
            rows_of(a, w) - first};
}

/* Writes the result of a sequence that is not cut. f: inverse sums of the thread's columns. */
template <int N, int C>
static __device__ __forceinline__ void store_result(const struct mla_args &a, const struct walk &w,
                                                    const struct out_state<N> &t, int latent,
                                                    const struct mla_weights *b, uint32_t place)
{
    const struct out_latents<N> to = latents_of<N, C>(a, w, latent);
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        const int c = n * 8 + threadIdx.x % 4 * 2;
        float v[4][4];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            v[i / 4][i % 4] = t.o[i / 4][n * 4 + i % 4];
        }
        to.store(n * 4, v, inverse(sum_of(b, place, c)), inverse(sum_of(b, place, c + 1)));
    }
}

template <int N, int C>
static __device__ __forceinline__ void sum_e4m3(const struct mla_args &a, struct walk w,
                                                uint8_t *smem, struct e4m3_shared *b)
{
    typedef e4m3_shape<N> at;
    const int half = (int)threadIdx.x / 128 - WG_OUT, thread = threadIdx.x % 128;
    const int latent = half * 256 + thread / 4 * 4;
    const uint32_t p_at = smem_addr(smem) + at::p_at;
    struct ring r = {0, 0}, p = {0, 0};
    struct out_state<N> t;
    for (; walk_piece(w); walk_next(a, w)) {
        const bool whole = w.n == w.s.tiles;
#pragma unroll
        for (int i = 0; i < 4 * (N / 2); i++) {
            t.o[i / (N / 2)][i % (N / 2)] = 0;
        }
        for (int i = 0; i < w.n; i++) {
            const uint64_t weights = wgmma_desc(p_at + p.at * at::p_bytes, 0, 1024);
            bar_wait(smem_addr(&b->weighed[p.at]), p.phase);
            bar_wait(smem_addr(&b->full[r.at]), r.phase);
            if (N == 64 && half == 1 && i + 1 < w.n) {
                struct ring next = p;
                next.next(WEIGHTS);
                bar_wait(smem_addr(&b->scored[next.at]), next.phase);
            }
            if (*(volatile int *)&b->w.raised[p.at]) {
                rescale(t, b->w.factor[p.at]);
            }
            outputs(t, smem + at::tiles_at + r.at * E4M3_TILE, half, weights, &b->empty[r.at]);
            if (i == w.n - 1) {
                if (whole) {
                    store_result<N, C>(a, w, t, latent, &b->w, p.at);
                } else if (half == 0 && thread < N) {
                    store_part_sum<N, C>(a, w, &b->w, p.at, thread);
                }
            }
            release<1>(&b->weights_empty[p.at]);
            r.next(at::stages);
            p.next(WEIGHTS);
        }
        if (!whole) {
            store_part<N, C>(a, w, t, half);
        }
    }
    for (w = run_walk<C>(a); walk_piece(w); walk_next(a, w)) {
        if (w.n < w.s.tiles) {
            combine<N, C>(a, w, &b->w.total, latents_of<N, C>(a, w, latent), half);
        }
    }
}

#endif
