/* Attention: chooses the kernels, checks shapes, makes scratch memory and tensor maps, once per
 * engine. */
#include "common/engine/cuda/attention/attention_priv.h"
#include "common/engine/cuda/device.h"

#include <math.h>
#include <stdlib.h>

static int shape_ok(const struct bt_attn_pool *p)
{
    return (p->head_dim == 64 || p->head_dim == 128 || p->head_dim == 256) &&
           (p->page_tokens == 16 || p->page_tokens == 32 || p->page_tokens == 64) &&
           p->kv_heads > 0 && p->heads % p->kv_heads == 0 && p->heads / p->kv_heads >= 1 &&
           p->heads / p->kv_heads <= 16 && p->type >= BT_CU_F16 && p->type <= BT_CU_E4M3 &&
           p->rows > 0 && p->rows <= INT32_MAX && p->segment % 128 == 0;
}

static cudaError_t make_maps(struct bt_attn *a)
{
    const struct bt_attn_pool *p = &a->pool;
    const uint64_t columns = p->type == BT_CU_E4M3 ? p->head_dim / 2 : p->head_dim; /* 16 bits */
    const uint64_t dims[2] = {columns, p->rows}, strides[1] = {columns * 2};
    const uint32_t box = columns < 64 ? (uint32_t)columns : 64;
    const uint32_t pair[2] = {box, 2 * p->page_tokens}, plane[2] = {box, p->page_tokens};
    cudaError_t e = bt_cu_tensor_map(&a->kv_pair, p->type, p->kv, 2, dims, strides, pair);
    return e == cudaSuccess
               ? bt_cu_tensor_map(&a->kv_plane, p->type, p->kv, 2, dims, strides, plane)
               : e;
}

cudaError_t bt_cu_take(void **memory_p, const size_t *sizes, void **const *places, int n)
{
    size_t total = 0;
    for (int i = 0; i < n; i++) {
        total += (sizes[i] + 255) & ~(size_t)255;
    }
    cudaError_t e = cudaMalloc(memory_p, total);
    if (e == cudaSuccess) {
        /* Counters begin at 0, and each launch returns them to 0. */
        e = cudaMemset(*memory_p, 0, total);
    }
    char *at = *memory_p;
    for (int i = 0; i < n; i++) {
        *places[i] = at;
        at += (sizes[i] + 255) & ~(size_t)255;
    }
    return e;
}

static cudaError_t take_memory(struct bt_attn *a)
{
    size_t sizes[] = {sizeof(struct bt_cu_decode_plan),
                      (a->max_batch + 1) * sizeof(struct bt_cu_decode_seq),
                      a->blocks * sizeof(struct bt_cu_decode_run),
                      (size_t)a->max_batch * a->pool.kv_heads * sizeof(uint32_t),
                      (size_t)a->blocks * 2 * a->columns * a->pool.head_dim * sizeof(float),
                      (size_t)a->blocks * 2 * a->columns * 2 * sizeof(float),
                      2 * sizeof(uint32_t)};
    void **places[] = {(void **)&a->plan,    (void **)&a->seqs,   (void **)&a->decode_runs,
                       (void **)&a->arrived, (void **)&a->part_o, (void **)&a->part_ml,
                       (void **)&a->tickets};
    return bt_cu_take(&a->memory, sizes, places, 7);
}

/* Scratch memory of prefills over segments. */
static cudaError_t take_segments(struct bt_attn *a)
{
    const struct bt_attn_pool *p = &a->pool;
    const size_t threads = 256, group = p->heads / p->kv_heads; /* threads: that compute */
    const size_t sizes[] = {((size_t)p->items + BT_ATTN_PARTS) * sizeof(struct bt_attn_unit),
                            sizeof(int32_t),
                            a->blocks * threads * p->head_dim / 2 * sizeof(float),
                            BT_ATTN_PARTS * group * p->head_dim * sizeof(float),
                            BT_ATTN_PARTS * group * 2 * sizeof(float),
                            BT_ATTN_PARTS * sizeof(uint32_t)};
    struct bt_attn_segments *g = &a->segments;
    void **places[] = {(void **)&g->units,  (void **)&g->n_units, (void **)&g->kept,
                       (void **)&g->part_o, (void **)&g->part_ml, (void **)&g->arrived};
    g->tokens = p->segment;
    return bt_cu_take(&a->segments_memory, sizes, places, 6);
}

cudaError_t bt_attn_create(const struct bt_attn_pool *pool, uint32_t max_batch,
                           struct bt_attn **attn_p)
{
    if (!shape_ok(pool) || max_batch == 0) {
        return cudaErrorInvalidValue;
    }
    struct bt_attn *a = aligned_alloc(64, (sizeof(*a) + 63) & ~(size_t)63);
    if (!a) {
        return cudaErrorMemoryAllocation;
    }
    *a = (struct bt_attn){.pool = *pool, .max_batch = max_batch};
    float scale = pool->scale != 0 ? pool->scale : 1.0f / sqrtf((float)pool->head_dim);
    a->scale_log2 = scale * 1.44269504f;
    int device = 0, sms = 0, shared = 0;
    cudaError_t e = cudaGetDevice(&device);
    if (e == cudaSuccess) {
        e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    }
    if (e == cudaSuccess) {
        e = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    }
    a->blocks = (uint32_t)sms;
    a->shared = (uint32_t)shared;
    a->hopper = bt_cu_hopper();
    a->columns = e == cudaSuccess ? bt_attn_decode_columns(a) : 0;
    if (e == cudaSuccess && a->columns == 0) {
        e = cudaErrorInvalidValue;
    }
    if (e == cudaSuccess && a->hopper) {
        e = make_maps(a);
    }
    if (e == cudaSuccess) {
        e = take_memory(a);
    }
    if (e == cudaSuccess && pool->segment) {
        e = take_segments(a);
    }
    if (e != cudaSuccess) {
        bt_attn_destroy(a);
        return e;
    }
    *attn_p = a;
    return cudaSuccess;
}

void bt_attn_destroy(struct bt_attn *a)
{
    if (a) {
        cudaFree(a->memory);
        cudaFree(a->segments_memory);
        free(a);
    }
}

uint32_t bt_attn_prefill_tokens(const struct bt_attn *a)
{
    return 128 / (a->pool.heads / a->pool.kv_heads);
}

cudaError_t bt_attn_decode(struct bt_attn *a, const struct bt_attn_decode *d, uint32_t layer_row,
                           cudaStream_t s)
{
    return a->hopper ? bt_attn_decode_tma(a, d, layer_row, s)
                     : bt_attn_decode_mma(a, d, layer_row, s);
}

cudaError_t bt_attn_prefill(struct bt_attn *a, const struct bt_attn_prefill *f, uint32_t layer_row,
                            cudaStream_t s)
{
    if (f->n_items == 0) {
        return cudaSuccess;
    }
    if (f->invariant && !a->hopper) {
        return cudaErrorNotSupported;
    }
    if (f->invariant && a->pool.segment == 0) {
        return cudaErrorInvalidValue;
    }
    return a->hopper ? bt_attn_prefill_tma(a, f, layer_row, s)
                     : bt_attn_prefill_mma(a, f, layer_row, s);
}
