/* Products of few rows (skinny.h) on Hopper. 64 weight rows are the M of a warpgroup's product and
 * tokens its N. The tensor cores are idle most of the time; what counts is that weights are fetched
 * without a pause:
 *   - a tile is 64 weight rows for each computing warpgroup of a block. One warp copies weights in
 *     boxes of 8 KB, 64 rows of 128 bytes, through a ring for each warpgroup; the rings fill most
 *     of the shared memory. It fetches `depth` neighbouring boxes of 64 rows before it goes to the
 *     next 64 rows, as memory is faster with longer pieces of a row. Another warp copies the
 *     activations, which all warpgroups share. They come from the L2 cache, and with many weight
 *     rows in a block there is little of that traffic;
 *   - the blocks of a cluster divide k and add their sums through each other's shared memory,
 *     always in the same order;
 *   - weights do not depend on the kernel before: their ring is filled while that kernel still runs
 *     (programmatic dependent launch);
 *   - weights in e4m3 go through registers, where they become f16 (skinny.cuh, fp8.cuh);
 *   - gate and up rows alternate in groups of eight in a tile. The tensor map does this, so that
 *     one thread holds both values of a SwiGLU. */
#include "common/engine/cuda/gemm/skinny.h"

#include "common/engine/cuda/device.h"
#include "common/engine/cuda/gemm/skinny.cuh"
#include "common/engine/cuda/tensor_map.h"
#include "common/engine/cuda/value.h"

static const struct way {
    uint32_t groups, cluster, depth;
} ways[] = {{2, 1, 4}, {2, 1, 2}, {1, 1, 4}, {1, 1, 8}, {1, 2, 4}, {1, 2, 8}, {1, 4, 4},
            {3, 1, 4}, {4, 1, 4}, {2, 2, 4}, {2, 2, 8}, {3, 2, 4}, {2, 3, 4}, {2, 3, 8},
            {3, 3, 4}, {3, 4, 4}, {4, 4, 4}, {3, 5, 4}, {4, 6, 4}};

extern "C" uint32_t bt_cu_skinny_ways(void)
{
    return sizeof(ways) / sizeof(ways[0]);
}

extern "C" uint32_t bt_cu_skinny_parts(uint32_t way)
{
    return ways[way].cluster;
}

static uint32_t tiles_of(const struct way *y, uint32_t n)
{
    return (n + y->groups * 64 - 1) / (y->groups * 64);
}

/* How many clusters of this many blocks run at once, with one block to a multiprocessor. */
static uint32_t clusters_of(uint32_t blocks)
{
    static int known[9]; /* the number + 1; 0: not known */
    if (known[blocks] == 0) {
        cudaLaunchConfig_t c = {};
        cudaLaunchAttribute attr[1];
        attr[0].id = cudaLaunchAttributeClusterDimension;
        attr[0].val.clusterDim.x = blocks;
        attr[0].val.clusterDim.y = attr[0].val.clusterDim.z = 1;
        c.gridDim = dim3(blocks);
        c.blockDim = dim3(2 * 128 + 64);
        c.dynamicSmemBytes = SMEM_MAX - 1024;
        c.attrs = attr;
        c.numAttrs = 1;
        int n = 0;
        if (cudaFuncSetAttribute(skinny_kernel<8, 2, SKINNY_BF16>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 SMEM_MAX - 1024) != cudaSuccess ||
            cudaOccupancyMaxActiveClusters(&n, skinny_kernel<8, 2, SKINNY_BF16>, &c) !=
                cudaSuccess) {
            n = 0;
        }
        known[blocks] = n + 1;
    }
    return (uint32_t)known[blocks] - 1;
}

static bool fits(uint32_t way, uint32_t m, uint32_t n, uint32_t k, enum bt_cu_skinny_kind kind)
{
    const bool e4m3 = kind != SKINNY_BF16;
    if (!bt_cu_hopper() || way >= bt_cu_skinny_ways() || m == 0 || m > BT_CU_SKINNY_ROWS ||
        n % 16 || k % (e4m3 ? 16 : 8)) {
        return false;
    }
    const struct way *y = &ways[way];
    return m <= bt_cu_skinny_most(kind, y->groups) &&
           (y->cluster == 1 ||
            (k / (e4m3 ? 128 : 64) >= y->cluster && tiles_of(y, n) <= clusters_of(y->cluster)));
}

extern "C" bool bt_cu_skinny_fits(uint32_t way, uint32_t m, uint32_t n, uint32_t k,
                                  enum bt_cu_weight_kind kind)
{
    return fits(way, m, n, k, kind == BT_CU_WEIGHT_BF16 ? SKINNY_BF16 : SKINNY_F16);
}

extern "C" bool bt_cu_skinny_rounded_fits(uint32_t way, uint32_t m, uint32_t n, uint32_t k)
{
    return k % BT_CU_WEIGHT_BLOCK == 0 && fits(way, m, n, k, SKINNY_E4M3);
}

/* e4m3 is mapped as pairs, so a box's 64 values are 128 bytes in both. */
static cudaError_t weights_map(CUtensorMap *map, const struct bt_cu_weight *w, uint32_t n,
                               uint32_t k, enum bt_cu_skinny_end end)
{
    const uint64_t row = w->kind == BT_CU_WEIGHT_BF16 ? k * 2ull : k;
    if (end != BT_CU_SKINNY_SWIGLU) {
        const uint64_t dims[2] = {row / 2, n}, strides[1] = {row};
        const uint32_t box[2] = {64, 64};
        return bt_cu_tensor_map(map, BT_CU_BF16, w->w, 2, dims, strides, box);
    }
    const uint64_t dims[4] = {row / 2, 8, 2, n / 16};
    const uint64_t strides[3] = {row, n / 2 * row, row * 8};
    const uint32_t box[4] = {64, 8, 2, 4};
    return bt_cu_tensor_map(map, BT_CU_BF16, w->w, 4, dims, strides, box);
}

/* What the kinds share: y = x * w^T as `how` cuts it; x's rows are x_row bytes. */
static cudaError_t launch_kind(enum bt_cu_skinny_kind kind, const struct way *how,
                               const struct bt_cu_weight &w, const void *x, uint64_t x_row,
                               struct bt_cu_skinny_args &a, uint32_t k, cudaStream_t s)
{
    const bool blocks = w.kind == BT_CU_WEIGHT_BLOCKS, e4m3 = kind != SKINNY_BF16;
    const uint32_t m = a.m, tokens = m <= 8 ? 8 : m <= 16 ? 16 : m <= 32 ? 32 : m <= 64 ? 64 : 128;
    const uint64_t dims[2] = {x_row / 2, m}, strides[1] = {x_row};
    const uint32_t box[2] = {64, kind == SKINNY_E4M3 && tokens < 64 ? 64 : tokens};
    CUtensorMap w_map, x_map;
    cudaError_t e = weights_map(&w_map, &w, a.n, k, a.end);
    e = e == cudaSuccess ? bt_cu_tensor_map(&x_map, BT_CU_BF16, x, 2, dims, strides, box) : e;
    if (e != cudaSuccess) {
        return e;
    }
    a.tiles = tiles_of(how, a.n);
    a.steps = e4m3 ? (k + 127) / 128 : (k + 63) / 64;
    a.depth = how->depth;
    a.cluster = how->cluster;
    a.scale = w.scale;
    a.scale_shift = blocks ? 7 : 0;
    a.scale_stride = blocks ? bt_cu_scale_stride(k) : 1;
    a.scale_step = blocks ? 1 : 0;
    return kind == SKINNY_F16 ? bt_cu_skinny_e4m3(&w_map, &x_map, &a, how->groups, tokens, s)
           : kind == SKINNY_E4M3
               ? bt_cu_skinny_both(&w_map, &x_map, &a, how->groups, tokens, s)
               : launch_tokens<SKINNY_BF16>(w_map, x_map, a, how->groups, tokens, s);
}

extern "C" cudaError_t bt_cu_skinny(uint32_t way, struct bt_cu_weight w, const void *x, void *y,
                                    uint32_t m, uint32_t n, uint32_t k, enum bt_cu_skinny_end end,
                                    cudaStream_t s)
{
    if (!bt_cu_skinny_fits(way, m, n, k, w.kind)) {
        return cudaErrorInvalidValue;
    }
    struct bt_cu_skinny_args a = {};
    a.y = y;
    a.m = m;
    a.n = n;
    a.rounded = end == BT_CU_SKINNY_SWIGLU_ROUNDED;
    a.end = a.rounded ? BT_CU_SKINNY_SWIGLU : end;
    return launch_kind(w.kind == BT_CU_WEIGHT_BF16 ? SKINNY_BF16 : SKINNY_F16, &ways[way], w, x,
                       k * 2ull, a, k, s);
}

static struct bt_cu_skinny_args rounded_args(const struct bt_cu_e4m3_rows *x, void *y, uint32_t m,
                                             uint32_t n, enum bt_cu_skinny_end end)
{
    struct bt_cu_skinny_args a = {};
    a.y = y;
    a.m = m;
    a.n = n;
    a.end = end;
    a.x_scale = x->scale;
    a.x_stride = bt_cu_e4m3_stride(m);
    return a;
}

extern "C" cudaError_t bt_cu_skinny_rounded(uint32_t way, struct bt_cu_weight w,
                                            const struct bt_cu_e4m3_rows *x, void *y, uint32_t m,
                                            uint32_t n, uint32_t k, enum bt_cu_skinny_end end,
                                            cudaStream_t s)
{
    if (!bt_cu_skinny_rounded_fits(way, m, n, k) || w.kind == BT_CU_WEIGHT_BF16 ||
        end == BT_CU_SKINNY_SWIGLU_ROUNDED) {
        return cudaErrorInvalidValue;
    }
    struct bt_cu_skinny_args a = rounded_args(x, y, m, n, end);
    return launch_kind(SKINNY_E4M3, &ways[way], w, x->v, k, a, k, s);
}

extern "C" bool bt_cu_skinny_rounds(uint32_t way, uint32_t m, uint32_t n, uint32_t k)
{
    /* A block has the 128 columns of a scale, and one tile. */
    return bt_cu_skinny_rounded_fits(way, m, n, k) && ways[way].groups == 4 && n % 256 == 0 &&
           tiles_of(&ways[way], n) * ways[way].cluster <= multiprocessors();
}

extern "C" cudaError_t bt_cu_skinny_rounded_swiglu(uint32_t way, struct bt_cu_weight w,
                                                   const struct bt_cu_e4m3_rows *x,
                                                   const struct bt_cu_e4m3_rows *to, uint32_t m,
                                                   uint32_t n, uint32_t k, cudaStream_t s)
{
    if (!bt_cu_skinny_rounds(way, m, n, k) || w.kind == BT_CU_WEIGHT_BF16) {
        return cudaErrorInvalidValue;
    }
    struct bt_cu_skinny_args a = rounded_args(x, to->v, m, n, BT_CU_SKINNY_SWIGLU);
    a.y_scale = to->scale;
    return launch_kind(SKINNY_E4M3, &ways[way], w, x->v, k, a, k, s);
}
