/* Experts of many rows with e4m3 weights on Hopper: one kernel of grouped products (WGMMA). A pass
 * before it (gather_kernel) puts the rows of x in the order of their places and rounds them to
 * e4m3. A part is up to 256 rows of one expert. An item is a part times 128 columns of the first
 * product's result, their gate and their up, or times 256 of the second's; a pair of blocks
 * computes it. Items, their order and waiting are those of many_wgmma.cu. Other than there:
 *   - Each block has half of a part's rows, as the N of the products, in steps of 16. Both blocks
 *     need the same 256 rows of weights, their M: each fetches half of them for both.
 *   - A warpgroup has 128 of the rows of weights, in two tiles of 64: in the first product the
 *     gate's and the up's of the same columns, so one thread holds both values of a SwiGLU.
 *   - A step is 128 columns, which have one scale for each row of x and for each tile. A tile's
 *     sums, times both, are added in f32 (wgmma_e4m3.cuh says why). While one warpgroup adds, the
 *     tensor cores work for the other; for that they take turns. Scales of rows come with a step
 *     through TMA. They are powers of two in bf16: so a register holds two of them, and all are in
 *     registers before the first sums are there.
 *   - 128 columns of the first product's result are what one scale of a row is for, so a block
 *     rounds them at once. A tile ends without the next one's products beside it, as two sets of
 *     sums fill the registers. */
#include "common/engine/cuda/copy_async.cuh"
#include "common/engine/cuda/experts/experts_priv.h"
#include "common/engine/cuda/fp8.cuh"
#include "common/engine/cuda/gemm/wide_tile.cuh"
#include "common/engine/cuda/tensor_map.h"
#include "common/engine/cuda/value.h"
#include "common/engine/cuda/wgmma_e4m3.cuh"

#define CLUSTER  2
#define GRANULE  16u              /* rows of a block */
#define ROWS     128u             /* the most rows of a block */
#define W_TILE   (64 * 128)       /* bytes of 64 rows of weights, 128 columns */
#define W_ALL    (4 * W_TILE)     /* a stage's; x follows */
#define X_BOX    (GRANULE * 128u) /* bytes of 16 rows of x */
#define OUT      8192             /* bytes in which a warpgroup transposes its results */
#define OUT_ROWS 64               /* rows of x in them */
#define E_SCALES (STAGES * STAGE) /* where the stages' scales of rows are, */
#define E_OUT    (E_SCALES + STAGES * ROWS * 2) /* and the results */
#define E_SMEM   (E_OUT + GROUPS * OUT + 1024)
/* Named barriers: 1 and 2 are each computing warpgroup's, */
#define BOTH_ALL 3 /* both's, */
#define TURN     4 /* and, plus 0 or 1, the turn of each */

static_assert(W_ALL + ROWS * 128 == STAGE, "the stages of wide_tile.cuh have the same size");

struct e4m3_args {
    struct bt_cu_experts_plan p;
    uint32_t hidden, inter;
    uint32_t cols[2];       /* items of a part in the first and in the second product */
    const float *scale[2];  /* of the two products' weights */
    uint32_t scale_step[2]; /* from one row of blocks to the next */
};
struct e4m3_maps {
    CUtensorMap x[2], scale[2], w[2]; /* of the first and the second product */
};

/* As one thread hands it to both blocks; 16 bytes. rows 0: there is no more. */
struct item {
    uint32_t first;        /* place of the part's first row */
    uint32_t part;         /* its number */
    uint16_t expert, rows; /* rows: of the part */
    uint16_t col, down;
};
union item_words {
    struct item it;
    uint32_t w[4];
};

struct e4m3_bars {
    struct wide_bars ring;
    uint64_t queued, taken; /* taken: of the pair's first block, for both */
    __align__(16) struct item item;
};

/* ---- items ---- */

static __device__ __forceinline__ void hand_out(const struct e4m3_args &a, struct e4m3_bars *b)
{
    const uint32_t parts = a.p.state->parts, ups = parts * a.cols[0];
    const uint32_t all = ups + parts * a.cols[1];
    uint32_t phase = 1;
    for (;;) {
        union item_words v = {};
        bar_wait(smem_addr(&b->taken), phase);
        phase ^= 1;
        const uint32_t n = atomicAdd(&a.p.state->next, 1);
        if (n < all) {
            const uint32_t down = n >= ups, i = down ? n - ups : n;
            const uint32_t cols = down ? a.cols[1] : a.cols[0];
            const struct bt_cu_experts_part part = a.p.parts[i / cols];
            v.it = {part.first,           i / cols,      (uint16_t)part.expert, (uint16_t)part.rows,
                    (uint16_t)(i % cols), (uint16_t)down};
        }
        for (uint32_t r = 0; r < CLUSTER; r++) {
            cluster_store4(smem_addr(&b->item), smem_addr(&b->queued), r, v.w);
        }
        if (n >= all) {
            return;
        }
    }
}

/* The copying thread asks for the item (bar_expect) before all wait for it. */
static __device__ __forceinline__ struct item next_item(struct e4m3_bars *b, uint32_t &phase)
{
    bar_wait(smem_addr(&b->queued), phase);
    phase ^= 1;
    union item_words v;
    *(uint4 *)v.w = *(const uint4 *)&b->item;
    return v.it;
}

/* A block's rows of an item, in granules; from the part's first row on. Some may be beyond it. */
static __device__ __forceinline__ uint32_t granules_of(const struct item &it)
{
    return (it.rows + CLUSTER * GRANULE - 1) / (CLUSTER * GRANULE);
}
static __device__ __forceinline__ uint32_t steps_of(const struct e4m3_args &a,
                                                    const struct item &it)
{
    return (it.down ? a.inter : a.hidden) / BT_CU_WEIGHT_BLOCK;
}
/* Where the scales of a part's rows begin. Its first row is a multiple of 32 rows behind the
 * expert's. */
static __device__ __forceinline__ uint32_t scale_at(const struct item &it)
{
    return bt_cu_experts_scale_at(it.expert, it.first);
}
/* The first row of a tile among the weights of its expert. */
static __device__ __forceinline__ uint32_t tile_row(const struct e4m3_args &a,
                                                    const struct item &it, uint32_t group,
                                                    uint32_t tile)
{
    return it.down ? it.col * 256u + group * 128 + tile * 64
                   : tile * a.inter + it.col * 128u + group * 64;
}

/* ---- the copying thread ---- */

/* Waits until the first product of a part has been written. Others wrote it by normal stores; TMA
 * reads it through another proxy, hence the fence. */
static __device__ __forceinline__ void wait_first(const struct e4m3_args &a, uint32_t part)
{
    while (load_acquire(a.p.done + part) != a.cols[0] * CLUSTER) {
        __nanosleep(64);
    }
    fence_async();
}

static __device__ __forceinline__ void copy_items(const struct e4m3_args &a,
                                                  const struct e4m3_maps &maps, struct e4m3_bars *b,
                                                  uint32_t smem)
{
    const uint32_t rank = cluster_rank();
    struct ring r = {0, 1};
    uint32_t phase = 0;
    for (;;) {
        bar_expect(smem_addr(&b->queued), sizeof(struct item));
        const struct item it = next_item(b, phase);
        cluster_arrive(smem_addr(&b->taken), 0);
        if (it.rows == 0) {
            return;
        }
        const CUtensorMap *x = &maps.x[it.down], *scale = &maps.scale[it.down],
                          *w = &maps.w[it.down];
        const uint32_t steps = steps_of(a, it), boxes = granules_of(it);
        const uint32_t first = it.first + rank * boxes * GRANULE;
        const uint32_t scales = scale_at(it) + rank * boxes * GRANULE;
        const uint32_t each = it.down ? a.hidden : 2 * a.inter;
        const uint32_t row = it.expert * each; /* this block's tiles, for both */
        const uint32_t rows[2] = {row + tile_row(a, it, rank, 0), row + tile_row(a, it, rank, 1)};
        if (it.down) {
            wait_first(a, it.part);
        }
        for (uint32_t s = 0; s < steps; s++) {
            const uint32_t at = smem + r.at * STAGE, bar = smem_addr(&b->ring.full[r.at]);
            const int col = (int)s * 64; /* pairs of e4m3, as the maps have them */
            bar_wait(smem_addr(&b->ring.empty[r.at]), r.phase); /* of both blocks */
            bar_expect(bar, W_ALL + boxes * X_BOX + ROWS * 2);
            for (uint32_t i = 0; i < 2; i++) {
                tma_load_2d_both(at + (rank * 2 + i) * W_TILE, w, bar, col, (int)rows[i]);
            }
            for (uint32_t i = 0; i < boxes; i++) {
                tma_load_2d(at + W_ALL + i * X_BOX, x, bar, col, (int)(first + i * GRANULE),
                            TMA_EVICT_NORMAL);
            }
            tma_load_2d(smem + E_SCALES + r.at * ROWS * 2, scale, bar, (int)scales / 2, (int)s,
                        TMA_EVICT_NORMAL); /* pairs of scales */
            r.next(STAGES);
        }
    }
}

/* ---- products ----
 * A thread holds rows lane / 4 and + 8 of its warp's 16 rows of weights; of x, rows 8 i + lane % 4
 * * 2 and the next: acc[tile][4 i + 2 (row of weights) + (row of x)]. */

/* The scales of a warpgroup's tiles, a step after the other. */
struct tile_scales {
    const float *from[2];
};
static __device__ __forceinline__ struct tile_scales scales_at(const struct e4m3_args &a,
                                                               const struct item &it)
{
    const uint32_t group = threadIdx.x / 128 - 1, down = it.down;
    const uint32_t each = down ? a.hidden / 128 : a.inter / 128 * 2; /* rows of blocks */
    struct tile_scales s;
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) { /* the last tiles may be beyond hidden */
        const uint32_t row = min(tile_row(a, it, group, i) / 128, each - 1);
        s.from[i] = a.scale[down] + ((size_t)it.expert * each + row) * a.scale_step[down];
    }
    return s;
}

/* All steps of an item with N rows of x. */
template <int N>
static __device__ __forceinline__ void sum_steps(struct e4m3_bars *b, const uint8_t *smem,
                                                 struct ring &r, const struct tile_scales &s,
                                                 uint32_t steps, float (&acc)[2][64])
{
    const uint32_t base = smem_addr(smem), group = threadIdx.x / 128 - 1;
    float now[2] = {__ldg(s.from[0]), __ldg(s.from[1])};
#pragma unroll
    for (int i = 0; i < 128; i++) {
        acc[i / 64][i % 64] = 0;
    }
#pragma unroll 1
    for (uint32_t step = 0; step < steps; step++) {
        const uint32_t at = base + r.at * STAGE, ahead = min(step + 1, steps - 1);
        const uint64_t x = wgmma_desc(at + W_ALL, 0, 1024);
        const uint32_t *rows =
            (const uint32_t *)(smem + E_SCALES + r.at * ROWS * 2) + threadIdx.x % 4;
        uint32_t two[N / 8];
        const float next[2] = {__ldg(s.from[0] + ahead), __ldg(s.from[1] + ahead)};
        bar_wait(smem_addr(&b->ring.full[r.at]), r.phase);
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
            two[i] = rows[i * 4];
        }
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            const uint64_t w = wgmma_desc(at + (group * 2 + tile) * W_TILE, 0, 1024);
            float part[N / 2];
            named_sync(TURN + group, GROUPS * 128);
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < 4; j++) { /* 32 columns are 32 bytes */
                wgmma_part_e4m3<N>(part, w + j * 2, x + j * 2, j > 0);
                j < 2 ? (void)0 : wgmma_commit();
            }
            wgmma_wait<1>(); /* the other's products begin when the last of these run */
            named_arrive(TURN + 1 - group, GROUPS * 128);
            wgmma_wait<0>();
            wgmma_hold(part);
#pragma unroll
            for (int i = 0; i < N / 8; i++) {
                const float2 f = bf16_pair(two[i]);
                const float lo = f.x * now[tile], hi = f.y * now[tile];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    acc[tile][i * 4 + j] += part[i * 4 + j] * (j % 2 ? hi : lo);
                }
            }
        }
        release(smem_addr(&b->ring.empty[r.at]));
        r.next(STAGES);
        now[0] = next[0];
        now[1] = next[1];
    }
}

static __device__ __forceinline__ void sum_item(const struct e4m3_args &a, const struct item &it,
                                                struct e4m3_bars *b, const uint8_t *smem,
                                                struct ring &r, float (&acc)[2][64])
{
    const struct tile_scales s = scales_at(a, it);
    const uint32_t steps = steps_of(a, it);
    switch (granules_of(it)) {
    case 1: sum_steps<16>(b, smem, r, s, steps, acc); break;
    case 2: sum_steps<32>(b, smem, r, s, steps, acc); break;
    case 3: sum_steps<48>(b, smem, r, s, steps, acc); break;
    case 4: sum_steps<64>(b, smem, r, s, steps, acc); break;
    case 5: sum_steps<80>(b, smem, r, s, steps, acc); break;
    case 6: sum_steps<96>(b, smem, r, s, steps, acc); break;
    case 7: sum_steps<112>(b, smem, r, s, steps, acc); break;
    default: sum_steps<128>(b, smem, r, s, steps, acc); break;
    }
}

/* ---- endings ---- */

/* 64 rows of x of a tile as rows of 128 bytes. pair: two neighbouring rows of x in bf16, of one of
 * the thread's rows of weights. */
template <class PAIR> static __device__ __forceinline__ void put_tile(uint32_t stage, PAIR pair)
{
    const uint32_t lane = threadIdx.x % 32, piece = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
#pragma unroll
    for (int i = 0; i < OUT_ROWS / 8; i += 2) {
        const uint32_t r[4] = {pair(i, 0), pair(i, 1), pair(i + 1, 0), pair(i + 1, 1)};
        stmatrix4_t(stage + swizzled<128>((i + lane / 16) * 8 + lane % 8, piece), r);
    }
}

/* SwiGLU of the block's rows and 128 columns, rounded to e4m3. Both warpgroups have 64 columns. */
static __device__ __forceinline__ void end_up(const struct e4m3_args &a, const struct item &it,
                                              uint8_t *out, const float (&acc)[2][64])
{
    const uint32_t rows = granules_of(it) * GRANULE, from = cluster_rank() * rows;
    const uint32_t thread = threadIdx.x - 128, sixteen = thread % 8;
    const uint8_t *source = out + sixteen / 4 * OUT;
#pragma unroll
    for (uint32_t half = 0; half < ROWS / OUT_ROWS; half++) {
        if (half * OUT_ROWS >= rows) {
            break;
        }
        put_tile(smem_addr(out + thread / 128 * OUT), [&](int i, int row) {
            const int at = (half * (OUT_ROWS / 8) + i) * 4 + row * 2;
            return pack2<__nv_bfloat16>(swiglu_fast(acc[0][at], acc[1][at]),
                                        swiglu_fast(acc[0][at + 1], acc[1][at + 1]));
        });
        named_sync(BOTH_ALL, GROUPS * 128);
#pragma unroll
        for (uint32_t i = 0; i < OUT_ROWS; i += GROUPS * 128 / 8) {
            const uint32_t row = i + thread / 8, at = from + half * OUT_ROWS + row;
            const size_t place = it.first + at;
            float v[16];
            wide8<true>(*(const uint4 *)(source + swizzled<128>(row, sixteen % 4 * 2)), v);
            wide8<true>(*(const uint4 *)(source + swizzled<128>(row, sixteen % 4 * 2 + 1)), v + 8);
            const uint32_t e = e4m3_scale(top128(v));
            const uint4 w = ordered16(v, e4m3_scale_inverse(e));
            if (half * OUT_ROWS + row < rows && at < it.rows) {
                *(uint4 *)((uint8_t *)a.p.h + place * a.inter + it.col * 128 + sixteen * 16) = w;
                if (sixteen == 0) {
                    a.p.h_scale[(size_t)it.col * a.p.scale_stride + scale_at(it) + at] =
                        (uint16_t)(e << 7);
                }
            }
        }
        if (half == 0 && rows > OUT_ROWS) { /* the place is written again */
            named_sync(BOTH_ALL, GROUPS * 128);
        }
    }
    fence_async(); /* TMA will read it */
    named_sync(BOTH_ALL, GROUPS * 128);
    if (thread == 0) {
        __threadfence();
        atomicAdd(a.p.done + it.part, 1);
    }
}

/* The second product's result in bf16. */
static __device__ __forceinline__ void end_down(const struct e4m3_args &a, const struct item &it,
                                                uint8_t *out, const float (&acc)[2][64])
{
    const uint32_t rows = granules_of(it) * GRANULE, from = cluster_rank() * rows;
    const uint32_t group = threadIdx.x / 128, thread = threadIdx.x % 128;
    uint8_t *stage = out + (group - 1) * OUT;
#pragma unroll
    for (uint32_t n = 0; n < 2 * ROWS / OUT_ROWS; n++) {
        const uint32_t half = n / 2, tile = n % 2;
        const uint32_t col = tile_row(a, it, group - 1, tile) + thread % 8 * 8;
        if (half * OUT_ROWS >= rows) {
            break;
        }
        if (n > 0) {
            named_sync(group, 128); /* the place has been read */
        }
        put_tile(smem_addr(stage), [&](int i, int row) {
            const int at = (half * (OUT_ROWS / 8) + i) * 4 + row * 2;
            return pack2<__nv_bfloat16>(acc[tile][at], acc[tile][at + 1]);
        });
        named_sync(group, 128);
#pragma unroll
        for (uint32_t i = 0; i < OUT_ROWS; i += 128 / 8) {
            const uint32_t row = i + thread / 8, at = from + half * OUT_ROWS + row;
            if (half * OUT_ROWS + row < rows && at < it.rows && col < a.hidden) {
                *(uint4 *)((uint16_t *)a.p.y + (size_t)(it.first + at) * a.hidden + col) =
                    *(const uint4 *)(stage + swizzled<128>(row, thread % 8));
            }
        }
    }
    named_sync(group, 128);
}

/* ---- the computing warpgroups ---- */

static __device__ __forceinline__ void consume(const struct e4m3_args &a, struct e4m3_bars *b,
                                               uint8_t *smem)
{
    struct ring r = {0, 0};
    uint32_t phase = 0;
    if (threadIdx.x / 128 == 2) { /* the first warpgroup has the first turn */
        named_arrive(TURN, GROUPS * 128);
    }
    for (;;) {
        const struct item it = next_item(b, phase);
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            cluster_arrive(smem_addr(&b->taken), 0);
        }
        if (it.rows == 0) {
            return;
        }
        float acc[2][64];
        sum_item(a, it, b, smem, r, acc);
        if (it.down) {
            end_down(a, it, smem + E_OUT, acc);
        } else {
            end_up(a, it, smem + E_OUT, acc);
        }
    }
}

static __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    many_e4m3_kernel(const __grid_constant__ struct e4m3_maps maps,
                     const __grid_constant__ struct e4m3_args a)
{
    extern __shared__ uint8_t raw[];
    __shared__ struct e4m3_bars b;
    uint8_t *smem = raw + (1024 - smem_addr(raw) % 1024) % 1024;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            tma_prefetch(&maps.x[i]);
            tma_prefetch(&maps.w[i]);
            tma_prefetch(&maps.scale[i]);
        }
        for (int i = 0; i < STAGES; i++) {
            bar_init(smem_addr(&b.ring.full[i]), 1);
            bar_init(smem_addr(&b.ring.empty[i]), CLUSTER * WARPS);
        }
        bar_init(smem_addr(&b.queued), 1);
        bar_init(smem_addr(&b.taken), CLUSTER * (WARPS + 1));
        bar_init_fence();
    }
    __syncthreads();
    cluster_sync(); /* the other block has initialized its barriers */
    early_wait();
    early_next(); /* combine_kernel relies on this order */
    if (threadIdx.x < 128) {
        regs_give<40>();
        if (threadIdx.x == 0) {
            copy_items(a, maps, &b, smem_addr(smem));
        } else if (threadIdx.x == 32 && cluster_rank() == 0) {
            hand_out(a, &b);
        }
        __syncwarp();
    } else {
        regs_take<232>();
        consume(a, &b, smem);
    }
    cluster_sync(); /* neither block ends while the other copies to it or arrives at its barriers */
}

/* ---- launches ---- */

struct gather_args {
    const uint4 *a; /* f16 */
    uint8_t *x;
    const uint32_t *places, *expert, *first;
    uint16_t *scale;
    uint32_t used, hidden, scale_stride;
};

/* Puts the rows of a, rounded, in the order of their places: a block for each. */
static __global__ void __launch_bounds__(256)
    gather_kernel(const __grid_constant__ struct gather_args a)
{
    __shared__ uint32_t to[BT_CU_EXPERTS_USED_MAX], scale_to[BT_CU_EXPERTS_USED_MAX];
    early_next();
    early_wait();
    if (threadIdx.x < a.used) {
        const uint32_t place = a.places[blockIdx.x * a.used + threadIdx.x];
        const uint32_t expert = a.expert[blockIdx.x * a.used + threadIdx.x];
        to[threadIdx.x] = place;
        if (place != ~0u) {
            const uint32_t first = a.first[expert];
            scale_to[threadIdx.x] = bt_cu_experts_scale_at(expert, first) + place - first;
        }
    }
    __syncthreads();
    if (to[0] == ~0u) {
        return;
    }
    for (uint32_t base = 0; base < a.hidden / 16; base += 256) { /* whole warps */
        const uint32_t i = base + threadIdx.x;
        const bool in = i < a.hidden / 16;
        const uint4 *from = a.a + (size_t)blockIdx.x * (a.hidden / 8) + i * 2;
        const uint4 zero = make_uint4(0, 0, 0, 0);
        float v[16];
        wide8<false>(in ? from[0] : zero, v);
        wide8<false>(in ? from[1] : zero, v + 8);
        const uint32_t e = e4m3_scale(top128(v));
        const uint4 w = ordered16(v, e4m3_scale_inverse(e));
        for (uint32_t k = 0; k < a.used && in; k++) {
            *(uint4 *)(a.x + (size_t)to[k] * a.hidden * 2 + i * 16) = w;
            if (i % 8 == 0) {
                a.scale[(size_t)(i / 8) * a.scale_stride + scale_to[k]] = (uint16_t)(e << 7);
            }
        }
    }
}

/* Rows of k e4m3 values, `pitch` bytes apart, by `box`. */
static cudaError_t rows_map(CUtensorMap *map, const void *x, uint64_t rows, uint64_t k,
                            uint64_t pitch, uint32_t by)
{
    const uint64_t dims[2] = {k / 2, rows}, strides[1] = {pitch};
    const uint32_t box[2] = {64, by};
    return bt_cu_tensor_map(map, BT_CU_BF16, x, 2, dims, strides, box);
}
/* Pairs of scales, as if they were numbers of 32 bits. */
static cudaError_t scales_map(CUtensorMap *map, const uint16_t *scale, uint64_t k, uint64_t stride)
{
    const uint64_t dims[2] = {stride / 2, k / BT_CU_WEIGHT_BLOCK}, strides[1] = {stride * 2};
    const uint32_t box[2] = {ROWS / 2, 1};
    return bt_cu_tensor_map(map, BT_CU_F32, scale, 2, dims, strides, box);
}

extern "C" cudaError_t bt_cu_experts_many_e4m3(const struct bt_cu_experts *x,
                                               const struct bt_cu_experts_plan *p,
                                               const struct bt_cu_experts_product *w,
                                               cudaStream_t s)
{
    const uint64_t uses = (uint64_t)w->rows * x->used, hidden = x->hidden, inter = x->inter;
    const struct gather_args g = {
        (const uint4 *)w->a, (uint8_t *)p->y, p->places, p->expert,      p->first,
        p->x_scale,          x->used,         x->hidden, p->scale_stride};
    struct e4m3_args a = {};
    struct e4m3_maps m;
    a.p = *p;
    a.hidden = x->hidden;
    a.inter = x->inter;
    a.cols[0] = x->inter / 128;
    a.cols[1] = (x->hidden + 255) / 256;
    a.scale[0] = w->gate_up.scale;
    a.scale[1] = w->down.scale;
    a.scale_step[0] = bt_cu_scale_stride(x->hidden);
    a.scale_step[1] = bt_cu_scale_stride(x->inter);
    cudaError_t e = rows_map(&m.x[0], p->y, uses, hidden, hidden * 2, GRANULE);
    e = e == cudaSuccess ? rows_map(&m.x[1], p->h, uses, inter, inter, GRANULE) : e;
    e = e == cudaSuccess ? scales_map(&m.scale[0], p->x_scale, hidden, p->scale_stride) : e;
    e = e == cudaSuccess ? scales_map(&m.scale[1], p->h_scale, inter, p->scale_stride) : e;
    e = e == cudaSuccess ? rows_map(&m.w[0], w->gate_up.w, x->n * 2 * inter, hidden, hidden, 64)
                         : e;
    e = e == cudaSuccess ? rows_map(&m.w[1], w->down.w, x->n * hidden, inter, inter, 64) : e;
    if (e == cudaSuccess) {
        e = cudaFuncSetAttribute(many_e4m3_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 E_SMEM);
    }
    e = e == cudaSuccess ? launch_early(gather_kernel, w->rows, 256, 0, s, g) : e;
    return e == cudaSuccess ? launch_early(many_e4m3_kernel, multiprocessors() / CLUSTER * CLUSTER,
                                           THREADS, E_SMEM, s, m, a)
                            : e;
}
