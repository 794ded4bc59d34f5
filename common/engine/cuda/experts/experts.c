/* Implements experts.h: sizes, and which kernels compute a step. */
#include "common/engine/cuda/experts/experts_priv.h"

#include "common/engine/cuda/device.h"
#include "common/engine/cuda/tensor_map.h"
#include "common/engine/cuda/value.h"

cudaError_t bt_cu_experts_weights_map(CUtensorMap *map, const struct bt_cu_experts *x,
                                      const void *w, bool down, uint32_t blocks)
{
    const uint64_t k = down ? x->inter : x->hidden, row = k * (x->e4m3 ? 1 : 2);
    const uint64_t rows = down ? x->hidden : 2ull * x->inter;
    const uint64_t dims[5] = {row / 2, 8, 2, rows / 16, x->n};
    const uint64_t strides[4] = {row, down ? row * 8 : row * x->inter, down ? row * 16 : row * 8,
                                 row * rows};
    const uint32_t box[5] = {64, 8, 2, blocks, 1};
    return bt_cu_tensor_map(map, BT_CU_BF16, w, 5, dims, strides, box);
}

static size_t up256(size_t n)
{
    return (n + 255) / 256 * 256;
}

/* Takes bytes from the scratch memory. base NULL: only counts. */
static void *take(void *base, size_t *at, size_t bytes)
{
    void *p = base ? (uint8_t *)base + *at : NULL;
    *at += up256(bytes);
    return p;
}

/* Whether the kernel of many rows can compute such experts: that of bf16 writes a tile during the
 * first five steps of 64 columns of the next. */
static bool large(const struct bt_cu_experts *x)
{
    return x->e4m3 || (x->hidden > 256 && x->inter > 256);
}

static uint32_t few_each(const struct bt_cu_experts *x)
{
    return x->e4m3 ? BT_CU_EXPERTS_FEW_E4M3 : BT_CU_EXPERTS_FEW_EACH;
}

bool bt_cu_experts_few_rows(const struct bt_cu_experts *x, uint32_t rows)
{
    if (x->invariant) {
        return !large(x);
    }
    return rows <= BT_CU_EXPERTS_FEW && (rows * x->used <= x->n * few_each(x) || !large(x));
}

struct bt_cu_experts_plan bt_cu_experts_plan(const struct bt_cu_experts *x, uint32_t rows,
                                             void *scratch)
{
    struct bt_cu_experts_plan p = {0};
    bool few = bt_cu_experts_few_rows(x, rows);
    size_t uses = (size_t)rows * x->used, at = 0;
    size_t chunks = (rows + BT_CU_EXPERTS_CHUNK - 1) / BT_CU_EXPERTS_CHUNK;
    size_t hit = uses < x->n ? uses : x->n;
    p.most_parts =
        (uint32_t)(hit + uses / (few ? BT_CU_EXPERTS_FEW_PART : BT_CU_EXPERTS_MANY_PART));
    p.state = take(scratch, &at, sizeof(*p.state));
    p.first = take(scratch, &at, (x->n + 1) * sizeof(*p.first));
    p.expert = take(scratch, &at, uses * sizeof(*p.expert));
    p.weight = take(scratch, &at, uses * sizeof(*p.weight));
    p.uses = take(scratch, &at, uses * sizeof(*p.uses));
    p.places = take(scratch, &at, uses * sizeof(*p.places));
    p.parts = take(scratch, &at, p.most_parts * sizeof(*p.parts));
    p.done = take(scratch, &at, p.most_parts * sizeof(*p.done));
    p.counts = take(scratch, &at, chunks * x->n * sizeof(*p.counts));
    const bool rounds = x->e4m3 && !few;
    const size_t stride = (uses + 7) / 8 * 8 + 8 * (size_t)x->n, block = BT_CU_WEIGHT_BLOCK;
    p.h = take(scratch, &at, uses * x->inter * (rounds ? 1 : 2));
    p.y = take(scratch, &at, uses * x->hidden * (few ? 4 : 2));
    p.scale_stride = (uint32_t)stride;
    p.x_scale = take(scratch, &at, rounds ? x->hidden / block * stride * 2 : 0);
    p.h_scale = take(scratch, &at, rounds ? x->inter / block * stride * 2 : 0);
    p.bytes = at;
    return p;
}

size_t bt_cu_experts_scratch(const struct bt_cu_experts *x, uint32_t rows)
{
    /* The most rows of either kind: results of few rows are wider. */
    uint32_t most = rows;
    if (!bt_cu_experts_few_rows(x, rows)) {
        most = x->n * few_each(x) / x->used;
        most = most < BT_CU_EXPERTS_FEW && large(x) ? most : BT_CU_EXPERTS_FEW;
    }
    size_t few = bt_cu_experts_plan(x, most, NULL).bytes;
    size_t all = bt_cu_experts_plan(x, rows, NULL).bytes;
    return few > all ? few : all;
}

bool bt_cu_experts_fits(const struct bt_cu_experts *x)
{
    if (x->always >= x->n || x->always >= x->used || x->groups == 0) {
        return false;
    }
    uint32_t n = x->n - x->always, used = x->used - x->always;
    return bt_cu_hopper() && x->n <= BT_CU_EXPERTS_MAX && x->used <= BT_CU_EXPERTS_USED_MAX &&
           x->groups <= BT_CU_EXPERTS_GROUPS_MAX && n % x->groups == 0 && x->groups_used > 0 &&
           x->groups_used <= x->groups && n / x->groups * x->groups_used >= used &&
           x->hidden % 16 == 0 && x->inter % 8 == 0 && x->hidden > 0 && x->inter > 0 &&
           (!x->e4m3 || (x->hidden % BT_CU_WEIGHT_BLOCK == 0 &&
                         x->inter % BT_CU_WEIGHT_BLOCK == 0 && !x->invariant));
}

uint32_t bt_cu_experts_rows(const struct bt_cu_experts *x)
{
    return large(x) ? UINT32_MAX : BT_CU_EXPERTS_FEW;
}

struct bt_cu_experts_routes bt_cu_experts_routes(const struct bt_cu_experts *x, uint32_t rows,
                                                 void *scratch)
{
    struct bt_cu_experts_plan p = bt_cu_experts_plan(x, rows, scratch);
    return (struct bt_cu_experts_routes){
        .expert = p.expert, .first = p.first, .uses = p.uses, .weight = p.weight};
}

cudaError_t bt_cu_experts_run(const struct bt_cu_experts *x, struct bt_cu_weight gate_up,
                              struct bt_cu_weight down, const void *a, uint32_t rows, void *scratch,
                              float *out, bool add, const struct bt_cu_experts_next *next,
                              cudaStream_t s)
{
    const enum bt_cu_weight_kind kind = x->e4m3 ? BT_CU_WEIGHT_BLOCKS : BT_CU_WEIGHT_BF16;
    if (!bt_cu_experts_fits(x) || rows == 0 || rows > bt_cu_experts_rows(x) ||
        gate_up.kind != kind || down.kind != kind || (next && x->hidden > BT_CU_EXPERTS_NORM_MAX)) {
        return cudaErrorInvalidValue;
    }
    struct bt_cu_experts_plan p = bt_cu_experts_plan(x, rows, scratch);
    struct bt_cu_experts_product w = {.gate_up = gate_up, .down = down, .a = a, .rows = rows};
    /* Items of other sizes divide k otherwise. */
    const bool small = rows <= BT_CU_EXPERTS_SMALL && !x->invariant;
    const uint32_t item = x->e4m3 ? 128 : small ? 32 : 64;
    cudaError_t e = bt_cu_experts_few_rows(x, rows) ? bt_cu_experts_few(x, &p, &w, item, s)
                    : x->e4m3                       ? bt_cu_experts_many_e4m3(x, &p, &w, s)
                                                    : bt_cu_experts_many(x, &p, &w, s);
    return e == cudaSuccess ? bt_cu_experts_combine(x, &p, rows, out, add, next, s) : e;
}
