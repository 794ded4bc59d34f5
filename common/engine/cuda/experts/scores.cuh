/* The norm before a layer's experts, and the router's product: one pass over the residual stream.
 * An expert is chosen by comparing scores, so a rounding may replace one expert by another. Hence
 * the product reads each activation as two bf16 parts, 16 bits of it, as the CPU engine does; what
 * is left are ties closer than about 1e-5 of a score, which the order of a sum decides. The experts
 * themselves get one bf16, or f16.
 *
 * A warp multiplies rows of x (16 MT of them, the M of m16n8k16) with rows of the router (8 NT, its
 * N). A dot product may run over k in any order, so a lane reads 8 contiguous columns of either and
 * uses them as the columns that its fragments need. The warps of a block divide k, and add their
 * sums in shared memory in a fixed order. The norm's factor is the same for a whole row, so it
 * multiplies the sums: nothing waits for it. Device code, for scores.cu and route.cu. */
#ifndef BT_CUDA_EXPERTS_SCORES_CUH
#define BT_CUDA_EXPERTS_SCORES_CUH

#include "common/engine/cuda/experts/experts_priv.h"
#include "common/engine/cuda/fp8.cuh"
#include "common/engine/cuda/mma.cuh"

/* How a block divides its work: rows of x and of the router, in tiles of 16 and 8; warps; steps of
 * 32 columns whose values are on their way. */
template <int MT_, int NT_, int WARPS_, int AHEAD_> struct scores_cut {
    static constexpr int MT = MT_, NT = NT_, WARPS = WARPS_, AHEAD = AHEAD_, THREADS = WARPS * 32;
};
typedef scores_cut<1, 1, 16, 4> few_cut;   /* up to 128 rows: many blocks, and few loads in a row */
typedef scores_cut<1, 1, 8, 4> least_cut;  /* the same, and warps divide k as with more rows */
typedef scores_cut<2, 8, 8, 1> narrow_cut; /* more rows, up to 64 experts */
typedef scores_cut<2, 16, 8, 1> broad_cut; /* more rows: x is read once for each 128 experts */

struct scores_args {
    const float *x, *norm;
    const uint16_t *router;
    uint16_t *a;
    float *scores;
    uint32_t rows, hidden, n;
    uint32_t tiles; /* blocks beside each other: 8 NT experts each */
    float eps;
    bool f16; /* a is; else bf16 */
};

/* Two rows of 8 values as fragments of two products: their leading bf16 parts and the rest. */
struct split {
    uint32_t hi[2][4], lo[2][4];
};
static __device__ __forceinline__ void split_row(struct split &f, int row, const float (&v)[8])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t hi = pack2<__nv_bfloat16>(v[2 * i], v[2 * i + 1]);
        float lo0 = v[2 * i] - __uint_as_float(hi << 16);
        float lo1 = v[2 * i + 1] - __uint_as_float(hi & 0xffff0000u);
        f.hi[i / 2][i % 2 * 2 + row] = hi;
        f.lo[i / 2][i % 2 * 2 + row] = pack2<__nv_bfloat16>(lo0, lo1);
    }
}

static __device__ __forceinline__ void load8(float (&v)[8], const float *p)
{
    float4 a = ((const float4 *)p)[0], b = ((const float4 *)p)[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

template <int MT, int NT> struct sums {
    float acc[MT][NT][4];
    float square[MT][2];
};

/* A lane's values of 32 columns, which begin at its column `col`: zeros if !in, beyond the row. */
template <int MT> struct step_values {
    float norm[8], x[MT][2][8];
};
static __device__ __forceinline__ void load_norm(const struct scores_args &a, uint32_t col, bool in,
                                                 float (&norm)[8])
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        norm[i] = 0;
    }
    if (in) {
        load8(norm, a.norm + col);
    }
}
template <int MT>
static __device__ __forceinline__ void load_rows(const struct scores_args &a, uint32_t row0,
                                                 uint32_t col, bool in, float (&x)[MT][2][8])
{
#pragma unroll
    for (int i = 0; i < MT * 2; i++) {
        const uint32_t row = row0 + i * 8 + threadIdx.x % 32 / 4;
        float(&v)[8] = x[i / 2][i % 2];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            v[k] = 0;
        }
        if (in && row < a.rows) {
            load8(v, a.x + (size_t)row * a.hidden + col);
        }
    }
}

template <int MT, int NT>
static __device__ __forceinline__ void multiply_step(const struct step_values<MT> &v,
                                                     const uint4 (&w)[NT], struct sums<MT, NT> &s)
{
#pragma unroll
    for (int m = 0; m < MT; m++) {
        struct split f;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float u[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                s.square[m][h] += v.x[m][h][i] * v.x[m][h][i];
                u[i] = v.x[m][h][i] * v.norm[i];
            }
            split_row(f, h, u);
        }
#pragma unroll
        for (int n = 0; n < NT; n++) {
            mma16816<__nv_bfloat16>(s.acc[m][n], f.lo[0], w[n].x, w[n].y);
            mma16816<__nv_bfloat16>(s.acc[m][n], f.lo[1], w[n].z, w[n].w);
            mma16816<__nv_bfloat16>(s.acc[m][n], f.hi[0], w[n].x, w[n].y);
            mma16816<__nv_bfloat16>(s.acc[m][n], f.hi[1], w[n].z, w[n].w);
        }
    }
}

/* The router's values for a lane in 32 columns. */
template <int NT>
static __device__ __forceinline__ void load_router(const struct scores_args &a, uint32_t expert0,
                                                   uint32_t col, bool in, uint4 (&w)[NT])
{
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const uint32_t e = expert0 + n * 8 + threadIdx.x % 32 / 4;
        w[n] = make_uint4(0, 0, 0, 0);
        if (in && e < a.n) {
            w[n] = __ldg((const uint4 *)(a.router + (size_t)e * a.hidden + col));
        }
    }
}

/* What the warps of a block hand to each other. */
template <int MT, int NT, int WARPS> struct shared_sums {
    float acc[WARPS][MT * NT * 4][32];
    float square[WARPS][MT * 16];
    float factor[MT * 16];
};

template <int MT, int NT, int WARPS>
static __device__ __forceinline__ void add_warps(const struct scores_args &a, uint32_t row0,
                                                 uint32_t expert0, struct sums<MT, NT> &s,
                                                 struct shared_sums<MT, NT, WARPS> *all)
{
    constexpr uint32_t THREADS = WARPS * 32;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < MT * NT * 4; i++) {
        all->acc[warp][i][lane] = s.acc[i / (NT * 4)][i / 4 % NT][i % 4];
    }
#pragma unroll
    for (int i = 0; i < MT * 2; i++) {
        float v = s.square[i / 2][i % 2];
        v += __shfl_xor_sync(~0u, v, 1);
        v += __shfl_xor_sync(~0u, v, 2);
        if (lane % 4 == 0) {
            all->square[warp][i * 8 + lane / 4] = v;
        }
    }
    __syncthreads();
    if (threadIdx.x < MT * 16) {
        float sum = 0;
        for (int w = 0; w < WARPS; w++) {
            sum += all->square[w][threadIdx.x];
        }
        all->factor[threadIdx.x] = rsqrtf(sum / (float)a.hidden + a.eps);
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < MT * NT * 4 * 32; i += THREADS) {
        const uint32_t v = i / 32, l = i % 32;
        const uint32_t row = v / (NT * 4) * 16 + v % 4 / 2 * 8 + l / 4;
        const uint32_t expert = expert0 + v / 4 % NT * 8 + l % 4 * 2 + v % 2;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            sum += all->acc[w][v][l];
        }
        if (row0 + row < a.rows && expert < a.n) {
            a.scores[(size_t)(row0 + row) * a.n + expert] = sum * all->factor[row];
        }
    }
}

/* The norm's result: each of the blocks beside each other writes a share of the columns. thread:
 * this one of `threads`. */
static __device__ __forceinline__ void write_norm(const struct scores_args &a, uint32_t row0,
                                                  uint32_t rows, const float *factor,
                                                  uint32_t thread, uint32_t threads)
{
    const uint32_t tile = blockIdx.x % a.tiles;
    const uint32_t quads = a.hidden / 4, from = quads * tile / a.tiles;
    const uint32_t mine = quads * (tile + 1) / a.tiles - from;
    for (uint32_t i = thread; i < rows * mine; i += threads) {
        const uint32_t row = i / mine, q = from + i % mine;
        if (row0 + row >= a.rows) {
            break;
        }
        const size_t at = (size_t)(row0 + row) * quads + q;
        const float4 v = ((const float4 *)a.x)[at], w = ((const float4 *)a.norm)[q];
        const float f = factor[row];
        ((uint2 *)a.a)[at] =
            pack4_as(a.f16, v.x * f * w.x, v.y * f * w.y, v.z * f * w.z, v.w * f * w.w);
    }
}

/* A block's scores; write_norm() is what is left to do. raw: scores_smem<C>() bytes of shared
 * memory. Returns the norm's factors of the block's rows. */
template <class C>
static __device__ __forceinline__ const float *scores_block(const struct scores_args &a,
                                                            uint8_t *raw)
{
    constexpr int MT = C::MT, NT = C::NT, WARPS = C::WARPS, AHEAD = C::AHEAD;
    constexpr uint32_t STEP = WARPS * 32;
    struct shared_sums<MT, NT, WARPS> *all = (struct shared_sums<MT, NT, WARPS> *)raw;
    const uint32_t tile = blockIdx.x % a.tiles;
    const uint32_t row0 = blockIdx.x / a.tiles * (MT * 16), expert0 = tile * (NT * 8);
    const uint32_t first = threadIdx.x / 32 * 32 + threadIdx.x % 4 * 8;
    struct sums<MT, NT> s = {
    };
    struct step_values<MT> v[AHEAD];
    uint4 w[AHEAD][NT];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) { /* weights do not depend on the kernel before */
        const uint32_t col = first + i * STEP;
        load_router<NT>(a, expert0, col, col < a.hidden, w[i]);
        load_norm(a, col, col < a.hidden, v[i].norm);
    }
    early_wait();
    for (uint32_t at = first; at / 32 * 32 < a.hidden; at += AHEAD * STEP) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const uint32_t col = at + i * STEP;
            load_rows<MT>(a, row0, col, col < a.hidden, v[i].x);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const uint32_t next = at + (i + AHEAD) * STEP;
            multiply_step<MT, NT>(v[i], w[i], s);
            load_router<NT>(a, expert0, next, next < a.hidden, w[i]);
            load_norm(a, next, next < a.hidden, v[i].norm);
        }
    }
    add_warps<MT, NT, WARPS>(a, row0, expert0, s, all);
    return all->factor;
}

template <class C> static constexpr size_t scores_smem(void)
{
    return sizeof(struct shared_sums<C::MT, C::NT, C::WARPS>);
}

/* Blocks beside each other, and all blocks. */
template <class C> static uint32_t scores_tiles(uint32_t n)
{
    return (n + C::NT * 8 - 1) / (C::NT * 8);
}
template <class C> static uint32_t scores_grid(const struct scores_args &a)
{
    return (a.rows + C::MT * 16 - 1) / (C::MT * 16) * a.tiles;
}

static struct scores_args scores_args_of(const struct bt_cu_experts *x,
                                         const struct bt_cu_experts_norm *norm, const void *router,
                                         uint32_t rows, void *a, float *scores)
{
    struct scores_args args = {};
    args.x = norm->x;
    args.norm = norm->w;
    args.eps = norm->eps;
    args.router = (const uint16_t *)router;
    args.a = (uint16_t *)a;
    args.scores = scores;
    args.rows = rows;
    args.hidden = x->hidden;
    args.n = x->n - x->always;
    args.f16 = x->e4m3;
    return args;
}

#endif
