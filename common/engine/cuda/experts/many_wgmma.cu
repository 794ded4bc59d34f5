/* Experts of many rows on Hopper: one kernel of grouped products (WGMMA). A part is up to 256 rows
 * of one expert. An item is a part times 256 rows of weights, in the first product (gate and up,
 * ends in SwiGLU) or in the second (down); a pair of blocks computes it:
 *   - Weights are the M of m64nNk16 and the part's rows its N, in steps of 32. So a part costs what
 *     its rows need: with rows as M, an expert's last part cost nearly as much as a full one.
 *   - Each block has 128 of the rows of weights, two warpgroups with 64 each. Both need the same
 *     rows of x: each block fetches half of them for both.
 *   - Blocks are persistent. A thread of each pair takes items from a counter, first those of all
 *     first products, and hands them to both blocks. So no pair waits for another one's last item.
 *   - An item of a second product waits for all items of its part's first product. Pairs take items
 *     in order and finish them in order, so what it waits for is always running.
 *   - One thread of each block copies 64 columns of both through TMA into a ring of four stages. A
 *     pass over x has put its rows in the order of their places (gather_kernel), unless there is
 *     one row.
 *   - A box of weights of the first product has gate and up in turns of eight rows. So one thread
 *     holds both values of a SwiGLU.
 *   - Sums are converted to bf16 at once. The rest of the ending (SwiGLU, and the way through
 *     shared memory that transposes a tile) is done during the next item's products. */
#include "common/engine/cuda/copy_async.cuh"
#include "common/engine/cuda/experts/experts_priv.h"
#include "common/engine/cuda/gemm/wide_tile.cuh"
#include "common/engine/cuda/tensor_map.h"
#include "common/engine/cuda/value.h"

#define TOKENS   BT_CU_EXPERTS_MANY_PART
#define GRANULE  BT_CU_EXPERTS_GRANULE
#define MW_BYTES (128 * BK * 2) /* a stage's weights; x follows */
#define BOX      (GRANULE * BK * 2)
#define PARTS    5     /* of a tile's ending; each runs during one step of the next tile */
#define OUT      16384 /* bytes in which a warpgroup transposes its results */
#define TWICE    8     /* see begin_step */
#define CLUSTER  2

static_assert(MW_BYTES + TOKENS * BK * 2 == STAGE && GROUPS * OUT == WARPS * STAGED,
              "the stages of wide_tile.cuh have the same size");

/* How an item's columns go through the ring: in n steps of 64 columns, or of 128 in two halves of a
 * stage if there are up to two boxes of rows of x, as stages would be half empty. */
struct steps {
    uint32_t boxes, n;
    bool twice;
};

struct many_args {
    struct bt_cu_experts_plan p;
    uint32_t hidden, inter;
    uint32_t cols[2]; /* items of a part in the first and in the second product */
    bool one;         /* x has one row, which all parts use */
};
struct many_maps {
    CUtensorMap x[2], w[2]; /* of the first and the second product */
};

/* As one thread hands it to both blocks; 16 bytes. rows 0: there is no more. */
struct item {
    uint32_t first;        /* place of the part's first row */
    uint32_t part;         /* its number */
    uint16_t expert, rows; /* rows: of the part */
    uint16_t col, down;    /* col: which 256 rows of weights */
};
union item_words {
    struct item it;
    uint32_t w[4];
};

struct many_bars {
    struct wide_bars ring;
    uint64_t queued, taken; /* taken: of the pair's first block, for both */
    __align__(16) struct item item;
};

/* ---- items ---- */

static __device__ __forceinline__ void hand_out(const struct many_args &a, struct many_bars *b)
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

/* One thread of the copying warps asks for the item (bar_expect) before all wait for it. */
static __device__ __forceinline__ struct item next_item(struct many_bars *b, uint32_t &phase)
{
    bar_wait(smem_addr(&b->queued), phase);
    phase ^= 1;
    union item_words v;
    *(uint4 *)v.w = *(const uint4 *)&b->item;
    return v.it;
}

static __device__ __forceinline__ struct steps steps_of(const struct many_args &a,
                                                        const struct item &it)
{
    const uint32_t k = it.down ? a.inter : a.hidden, boxes = (it.rows + GRANULE - 1) / GRANULE;
    const bool twice = boxes <= 2 && k > 2 * BK * (PARTS - 1);
    const uint32_t cols = BK << twice;
    return {boxes, (k + cols - 1) / cols, twice};
}

/* ---- the copying thread ---- */

/* Waits until the first product of a part has been written. Others wrote it by normal stores; TMA
 * reads it through another proxy, hence the fence. */
static __device__ __forceinline__ void wait_first(const struct many_args &a, uint32_t part)
{
    while (load_acquire(a.p.done + part) != a.cols[0] * CLUSTER * GROUPS) {
        __nanosleep(64);
    }
    fence_async();
}

static __device__ __forceinline__ void copy_items(const struct many_args &a,
                                                  const struct many_maps &maps, struct many_bars *b,
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
        const CUtensorMap *x = &maps.x[it.down], *w = &maps.w[it.down];
        const struct steps st = steps_of(a, it);
        const int block = (int)((it.col * CLUSTER + rank) * 8); /* of 16 rows of weights */
        const uint32_t first = a.one && !it.down ? 0 : it.first;
        if (it.down) {
            wait_first(a, it.part);
        }
        for (uint32_t s = 0; s < st.n; s++) {
            const uint32_t at = smem + r.at * STAGE, bar = smem_addr(&b->ring.full[r.at]);
            bar_wait(smem_addr(&b->ring.empty[r.at]), r.phase); /* of all blocks */
            bar_expect(bar, (MW_BYTES + st.boxes * BOX) << st.twice);
            for (uint32_t h = 0; h <= st.twice; h++) {
                const uint32_t to = at + h * (STAGE / 2);
                const int col = (int)(((s << st.twice) + h) * BK);
                tma_load_5d(to, w, bar, col, 0, 0, block, it.expert, TMA_EVICT_NORMAL);
                for (uint32_t i = rank; i < st.boxes; i += CLUSTER) {
                    tma_load_2d_both(to + MW_BYTES + i * BOX, x, bar, col,
                                     (int)(first + i * GRANULE));
                }
            }
            r.next(STAGES);
        }
    }
}

/* ---- products ---- */

/* HALVES of a stage, 64 columns each. */
template <int N, int HALVES>
static __device__ __forceinline__ void multiply(float (&acc)[128], uint64_t w, uint64_t x,
                                                bool first)
{
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < BK / 16 * HALVES; j++) { /* a descriptor counts in 16 bytes */
        const int at = j / (BK / 16) * (STAGE / 2 / 16) + j % (BK / 16) * 2;
        wgmma_part_bf16<N>(acc, w + at, x + at, !first || j > 0);
    }
    wgmma_commit();
}

/* Starts the products of one step. which: boxes of x, and TWICE. */
static __device__ __forceinline__ void begin_step(struct wide_bars *b, uint32_t smem,
                                                  const struct place &c, float (&acc)[128],
                                                  bool first, uint32_t which)
{
    const uint32_t at = smem + c.r.at * STAGE;
    const uint64_t w = wgmma_desc(at + (threadIdx.x / 128 - 1) * (64 * 128), 0, 1024);
    const uint64_t x = wgmma_desc(at + MW_BYTES, 0, 1024);
    bar_wait(smem_addr(&b->full[c.r.at]), c.r.phase);
    switch (which) {
    case 1: multiply<32, 1>(acc, w, x, first); break;
    case 2: multiply<64, 1>(acc, w, x, first); break;
    case 3: multiply<96, 1>(acc, w, x, first); break;
    case 4: multiply<128, 1>(acc, w, x, first); break;
    case 5: multiply<160, 1>(acc, w, x, first); break;
    case 6: multiply<192, 1>(acc, w, x, first); break;
    case 7: multiply<224, 1>(acc, w, x, first); break;
    case 8: multiply<256, 1>(acc, w, x, first); break;
    case TWICE + 1: multiply<32, 2>(acc, w, x, first); break;
    default: multiply<64, 2>(acc, w, x, first); break;
    }
}

/* ---- endings ----
 * A thread holds rows lane / 4 and + 8 of its warp's 16 rows of weights; of x, rows 8 i + lane % 4
 * * 2 and the next: v[2 i + (row of weights)]. */

/* A tile that is being written. */
struct leaving {
    uint32_t v[64];       /* each: two rows of x */
    uint32_t first, rows; /* rows 0: there is none */
    uint32_t part, col;   /* col: the warpgroup's first column of the result */
    bool down;
};

/* The gate of 64 rows of x times up, as rows of 64 bytes. */
static __device__ __forceinline__ void put_up(const struct leaving &out, uint32_t stage, int part)
{
    const uint32_t lane = threadIdx.x % 32, piece = threadIdx.x / 32 % 4;
    if (part * 64 >= (int)out.rows) {
        return;
    }
#pragma unroll
    for (int i = part * 8; i < part * 8 + 8; i += 4) {
        uint32_t r[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float2 g = bf16_pair(out.v[(i + j) * 2]), u = bf16_pair(out.v[(i + j) * 2 + 1]);
            r[j] = pack2<__nv_bfloat16>(swiglu_fast(g.x, u.x), swiglu_fast(g.y, u.y));
        }
        stmatrix4_t(stage + swizzled<64>(i * 8 + lane, piece), r);
    }
}

/* 128 rows of x, as rows of 128 bytes. */
static __device__ __forceinline__ void put_down(const struct leaving &out, uint32_t stage, int half)
{
    const uint32_t lane = threadIdx.x % 32, piece = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        const int at = (half * 16 + i) * 2;
        const uint32_t r[4] = {out.v[at], out.v[at + 1], out.v[at + 2], out.v[at + 3]};
        stmatrix4_t(stage + swizzled<128>((i + lane / 16) * 8 + lane % 8, piece), r);
    }
}

/* Writes `count` rows of ROW bytes from shared memory to rows of `wide` columns. */
template <uint32_t ROW>
static __device__ __forceinline__ void write_rows(void *to, uint32_t wide, uint32_t first,
                                                  uint32_t count, uint32_t col0,
                                                  const uint8_t *stage)
{
    constexpr uint32_t PIECES = ROW / 16;
    const uint32_t thread = threadIdx.x % 128, piece = thread % PIECES, col = col0 + piece * 8;
#pragma unroll
    for (uint32_t i = 0; i < OUT / ROW; i += 128 / PIECES) {
        const uint32_t row = i + thread / PIECES;
        if (row < count && col < wide) {
            *(uint4 *)((uint16_t *)to + (size_t)(first + row) * wide + col) =
                *(const uint4 *)(stage + swizzled<ROW>(row, piece));
        }
    }
}

static __device__ __forceinline__ void leave_up(const struct many_args &a,
                                                const struct leaving &out, uint8_t *stage, int part)
{
    const uint32_t group = threadIdx.x / 128;
    if (part < 4) {
        put_up(out, smem_addr(stage), part);
        return;
    }
    named_sync(group, 128);
    write_rows<64>(a.p.h, a.inter, out.first, out.rows, out.col, stage);
    fence_async(); /* TMA will read it */
    named_sync(group, 128);
    if (threadIdx.x % 128 == 0) {
        __threadfence();
        atomicAdd(a.p.done + out.part, 1);
    }
}

static __device__ __forceinline__ void
leave_down(const struct many_args &a, const struct leaving &out, uint8_t *stage, int part)
{
    const uint32_t row = part / 2 * 128;
    if (part == 4 || row >= out.rows) {
        return;
    }
    named_sync(threadIdx.x / 128, 128);
    if (part % 2 == 0) {
        put_down(out, smem_addr(stage), part / 2);
    } else {
        write_rows<128>(a.p.y, a.hidden, out.first + row, out.rows - row, out.col, stage);
    }
}

static __device__ __forceinline__ void leave(const struct many_args &a, struct leaving &out,
                                             uint8_t *stage, int part)
{
    if (out.down) {
        leave_down(a, out, stage, part);
    } else {
        leave_up(a, out, stage, part);
    }
}

static __device__ __forceinline__ void leave_all(const struct many_args &a, struct leaving &out,
                                                 uint8_t *stage)
{
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        if (out.rows > 0) {
            leave(a, out, stage, part);
        }
    }
    out.rows = 0;
}

static __device__ __forceinline__ void take(struct leaving &out, const struct item &it,
                                            const float (&acc)[128])
{
    const uint32_t group = (it.col * CLUSTER + cluster_rank()) * GROUPS + threadIdx.x / 128 - 1;
    out.down = it.down;
    out.part = it.part;
    out.first = it.first;
    out.rows = it.rows;
    out.col = group * (it.down ? 64 : 32);
#pragma unroll
    for (int i = 0; i < 64; i++) {
        out.v[i] = pack2<__nv_bfloat16>(acc[i * 2], acc[i * 2 + 1]);
    }
}

/* ---- the computing warpgroups ---- */

static __device__ __forceinline__ void consume(const struct many_args &a, struct many_bars *b,
                                               uint8_t *smem)
{
    const uint32_t base = smem_addr(smem);
    uint8_t *stage = smem + STAGES * STAGE + (threadIdx.x / 128 - 1) * OUT;
    struct place c = {{0, 0}, 0};
    struct leaving out;
    uint32_t phase = 0;
    out.rows = out.down = 0;
    for (;;) {
        const struct item it = next_item(b, phase);
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            cluster_arrive(smem_addr(&b->taken), 0);
        }
        if (it.rows == 0 || it.down != out.down) { /* it may wait for what this pair computed */
            leave_all(a, out, stage);
        }
        if (it.rows == 0) {
            return;
        }
        const struct steps st = steps_of(a, it);
        const uint32_t which = st.boxes + (st.twice ? TWICE : 0);
        float acc[128];
#pragma unroll
        for (int s = 0; s < PARTS; s++) {
            begin_step(&b->ring, base, c, acc, s == 0, which);
            if (out.rows > 0) {
                leave(a, out, stage, s);
            }
            settle(&b->ring, c, s == 0);
        }
        for (uint32_t s = PARTS; s < st.n; s++) {
            begin_step(&b->ring, base, c, acc, false, which);
            settle(&b->ring, c, false);
        }
        wgmma_wait<0>();
        wgmma_hold(acc);
        release(c.before);
        take(out, it, acc);
    }
}

static __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    many_kernel(const __grid_constant__ struct many_maps maps,
                const __grid_constant__ struct many_args a)
{
    extern __shared__ uint8_t raw[];
    __shared__ struct many_bars b;
    uint8_t *smem = raw + (1024 - smem_addr(raw) % 1024) % 1024;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            tma_prefetch(&maps.x[i]);
            tma_prefetch(&maps.w[i]);
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
    const uint4 *a;
    uint4 *x;
    const uint32_t *places;
    uint32_t used, pieces; /* of a row, of 16 bytes */
};

/* Puts the rows of a in the order of their places: a block for each. */
static __global__ void __launch_bounds__(256)
    gather_kernel(const __grid_constant__ struct gather_args a)
{
    __shared__ uint32_t to[BT_CU_EXPERTS_USED_MAX];
    early_next();
    early_wait();
    if (threadIdx.x < a.used) {
        to[threadIdx.x] = a.places[blockIdx.x * a.used + threadIdx.x];
    }
    __syncthreads();
    if (to[0] == ~0u) {
        return;
    }
    for (uint32_t i = threadIdx.x; i < a.pieces; i += 256) {
        const uint4 v = a.a[(size_t)blockIdx.x * a.pieces + i];
        for (uint32_t k = 0; k < a.used; k++) {
            a.x[(size_t)to[k] * a.pieces + i] = v;
        }
    }
}

/* Rows of k values of x, by 32. */
static cudaError_t rows_map(CUtensorMap *map, const void *x, uint64_t rows, uint64_t k)
{
    const uint64_t dims[2] = {k, rows}, strides[1] = {k * 2};
    const uint32_t box[2] = {BK, GRANULE};
    return bt_cu_tensor_map(map, BT_CU_BF16, x, 2, dims, strides, box);
}

extern "C" cudaError_t bt_cu_experts_many(const struct bt_cu_experts *x,
                                          const struct bt_cu_experts_plan *p,
                                          const struct bt_cu_experts_product *w, cudaStream_t s)
{
    const struct gather_args g = {(const uint4 *)w->a, (uint4 *)p->y, p->places, x->used,
                                  x->hidden / 8};
    const struct many_args a = {*p,
                                x->hidden,
                                x->inter,
                                {(x->inter + 64 * CLUSTER - 1) / (64 * CLUSTER),
                                 (x->hidden + 128 * CLUSTER - 1) / (128 * CLUSTER)},
                                w->rows == 1};
    const uint64_t uses = (uint64_t)w->rows * x->used;
    struct many_maps m;
    cudaError_t e = rows_map(&m.x[0], a.one ? w->a : p->y, a.one ? 1 : uses, x->hidden);
    e = e == cudaSuccess ? rows_map(&m.x[1], p->h, uses, x->inter) : e;
    e = e == cudaSuccess ? bt_cu_experts_weights_map(&m.w[0], x, w->gate_up.w, false, 8) : e;
    e = e == cudaSuccess ? bt_cu_experts_weights_map(&m.w[1], x, w->down.w, true, 8) : e;
    if (e == cudaSuccess) {
        e = cudaFuncSetAttribute(many_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM);
    }
    if (e == cudaSuccess && !a.one) {
        e = launch_early(gather_kernel, w->rows, 256, 0, s, g);
    }
    if (e != cudaSuccess) {
        return e;
    }
    return launch_early(many_kernel, multiprocessors() / CLUSTER * CLUSTER, THREADS, SMEM, s, m, a);
}
