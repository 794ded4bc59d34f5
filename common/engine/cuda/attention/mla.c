/* Latent attention: checks shapes, makes scratch memory and the tensor map, once per engine. */
#include "common/engine/cuda/attention/mla_priv.h"
#include "common/engine/cuda/device.h"

#include <stdlib.h>

#define MAX_COLUMNS 64
#define LOG2_E      1.44269504f
/* One block adds up the pieces of a sequence, each in about half the time of a tile. So about 32
 * are best for one sequence of 32k tokens. */
#define PIECES 32

/* Two blocks share KV if they can: then the L2 cache gives it out only once. */
static struct bt_mla_shape shape_of(const struct bt_mla *m, uint32_t queries)
{
    uint32_t rows = m->pool.heads * queries;
    uint32_t columns = rows <= 16 ? 16 : rows <= 32 ? 32 : MAX_COLUMNS;
    uint32_t groups = (rows + columns - 1) / columns, blocks = groups % 2 == 0 ? 2 : 1;
    return (struct bt_mla_shape){columns, groups / blocks, blocks};
}

static int pool_ok(const struct bt_mla_pool *p)
{
    return p->heads > 0 && p->heads <= BT_MLA_MAX_HEADS && p->rows >= BT_MLA_PAGE_TOKENS &&
           p->rows <= INT32_MAX && p->scale > 0 && (uintptr_t)p->kv % 16 == 0 &&
           p->segment % BT_MLA_PAGE_TOKENS == 0 && !(p->segment && p->e4m3);
}

static cudaError_t take_memory(struct bt_mla *m)
{
    size_t groups = (m->pool.heads * BT_MLA_MAX_QUERIES + MAX_COLUMNS - 1) / MAX_COLUMNS;
    size_t parts = m->pool.segment ? m->blocks + BT_MLA_SEGMENT_PARTS : m->blocks * 2;
    size_t pieces = parts * MAX_COLUMNS;
    size_t sizes[] = {m->max_batch * sizeof(struct bt_cu_decode_seq),
                      m->max_batch * groups * sizeof(struct bt_mla_cut),
                      m->blocks * sizeof(struct bt_cu_decode_run),
                      m->max_batch * groups * 2 * sizeof(uint32_t),
                      pieces * BT_MLA_LATENT * sizeof(float),
                      pieces * 2 * sizeof(float)};
    void **places[] = {(void **)&m->seqs,    (void **)&m->cuts,   (void **)&m->runs,
                       (void **)&m->arrived, (void **)&m->part_o, (void **)&m->part_ml};
    return bt_cu_take(&m->memory, sizes, places, sizeof(sizes) / sizeof(sizes[0]));
}

cudaError_t bt_mla_create(const struct bt_mla_pool *pool, uint32_t max_batch, struct bt_mla **m_p)
{
    if (!pool_ok(pool) || max_batch == 0 || max_batch > BT_MLA_MAX_BATCH) {
        return cudaErrorInvalidValue;
    }
    if (!bt_cu_hopper()) {
        return cudaErrorNotSupported;
    }
    struct bt_mla *m = aligned_alloc(64, (sizeof(*m) + 63) & ~(size_t)63);
    if (!m) {
        return cudaErrorMemoryAllocation;
    }
    *m = (struct bt_mla){.pool = *pool, .max_batch = max_batch, .scale_log2 = pool->scale * LOG2_E};
    int device = 0, sms = 0;
    cudaError_t e = cudaGetDevice(&device);
    if (e == cudaSuccess) {
        e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    }
    m->blocks = (uint32_t)sms;
    if (e == cudaSuccess) {
        e = bt_mla_rows_clusters(m->blocks, &m->clusters);
    }
    const uint64_t dims[2] = {BT_MLA_ROW, pool->rows}, strides[1] = {BT_MLA_ROW * 2};
    const uint32_t box[2] = {64, BT_MLA_PAGE_TOKENS};
    if (e == cudaSuccess && !pool->e4m3) { /* those pages are copied as they are */
        e = bt_cu_tensor_map(&m->kv, BT_CU_F16, pool->kv, 2, dims, strides, box);
    }
    if (e == cudaSuccess) {
        e = take_memory(m);
    }
    if (e != cudaSuccess) {
        bt_mla_destroy(m);
        return e;
    }
    *m_p = m;
    return cudaSuccess;
}

void bt_mla_destroy(struct bt_mla *m)
{
    if (m) {
        cudaFree(m->memory);
        free(m);
    }
}

cudaError_t bt_mla_decode_plan(struct bt_mla *m, const struct bt_attn_queries *queries, uint32_t n,
                               uint32_t most, cudaStream_t s)
{
    if (n == 0 || n > m->max_batch || most == 0 || most > BT_MLA_MAX_QUERIES) {
        return cudaErrorInvalidValue;
    }
    struct bt_mla_shape shape = shape_of(m, most);
    return bt_mla_plan(m, queries, n, &shape, PIECES, s);
}

cudaError_t bt_mla_decode(struct bt_mla *m, const struct bt_mla_decode *d, uint32_t layer_row,
                          cudaStream_t s)
{
    if (d->tokens == 0 || d->most == 0 || d->most > BT_MLA_MAX_QUERIES ||
        (uintptr_t)d->q % 16 != 0 || (uintptr_t)d->out % 16 != 0) {
        return cudaErrorInvalidValue;
    }
    struct bt_mla_shape shape = shape_of(m, d->most);
    if (m->pool.e4m3) {
        return bt_mla_decode_e4m3(m, d, &shape, layer_row, s);
    }
    return shape.columns == MAX_COLUMNS ? bt_mla_decode_rows(m, d, &shape, layer_row, s)
                                        : bt_mla_decode_wgmma(m, d, &shape, layer_row, s);
}

/* ---- in one form ---- */

uint32_t bt_mla_item_tokens(uint32_t heads)
{
    const uint32_t rows = 2 * MAX_COLUMNS; /* of two blocks that share KV */
    return heads * BT_MLA_MAX_QUERIES <= rows ? BT_MLA_MAX_QUERIES : rows / heads;
}

static struct bt_mla_shape shape_of_items(const struct bt_mla *m, uint32_t most)
{
    return (struct bt_mla_shape){MAX_COLUMNS, 1, m->pool.heads * most > MAX_COLUMNS ? 2 : 1};
}

static int items_ok(const struct bt_mla *m, uint32_t n_items, uint32_t most)
{
    return m->pool.segment > 0 && n_items > 0 && n_items <= m->max_batch && most > 0 &&
           most <= bt_mla_item_tokens(m->pool.heads);
}

cudaError_t bt_mla_invariant_plan(struct bt_mla *m, const struct bt_attn_item *items,
                                  uint32_t n_items, uint32_t most, cudaStream_t s)
{
    if (!items_ok(m, n_items, most)) {
        return cudaErrorInvalidValue;
    }
    const struct bt_mla_shape shape = shape_of_items(m, most);
    return bt_mla_items_plan(m, items, n_items, &shape, s);
}

cudaError_t bt_mla_invariant(struct bt_mla *m, const struct bt_mla_invariant *d, uint32_t layer_row,
                             cudaStream_t s)
{
    if (!items_ok(m, d->n_items, d->most) || d->tokens == 0 || (uintptr_t)d->q % 16 != 0 ||
        (uintptr_t)d->out % 16 != 0) {
        return cudaErrorInvalidValue;
    }
    const struct bt_mla_shape shape = shape_of_items(m, d->most);
    return bt_mla_invariant_rows(m, d, &shape, layer_row, s);
}
