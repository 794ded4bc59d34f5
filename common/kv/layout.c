/* KV layout: sizes, offsets and the id that both ends compare. Pure. */
#include "common/kv/layout.h"

#include <string.h>

#include "common/base/sha256.h"

uint32_t bt_dtype_bytes(bt_dtype_t dt)
{
    switch (dt) {
    case BT_DT_BF16:
    case BT_DT_F16: return 2;
    case BT_DT_F32: return 4;
    case BT_DT_FP8_E4M3: return 1;
    }
    return 0;
}

/* The id covers every number that determines the place of a byte, in a fixed order and width. */
static uint64_t layout_hash(const struct bt_kv_layout *l)
{
    uint64_t v[4 + BT_KV_MAX_GROUPS * 11] = {1, l->page_tokens, l->n_groups, l->n_layers};
    size_t n = 4;
    for (uint32_t g = 0; g < l->n_groups; g++) {
        const struct bt_kv_group *k = &l->groups[g];
        uint64_t row[] = {k->kind,     k->dtype,  k->layer0,    k->layers,    k->n_kv_heads,
                          k->head_dim, k->window, k->seg_bytes, k->scale_off, k->block_off};
        memcpy(v + n, row, sizeof(row));
        n += BT_ARRAY_LEN(row);
        if (k->rope) { /* ids of layouts without it are older than the field */
            v[n++] = k->rope;
        }
    }
    uint8_t d[BT_SHA256_LEN];
    bt_sha256(v, n * sizeof(v[0]), d);
    uint64_t id;
    memcpy(&id, d, sizeof(id));
    return id;
}

/* Completes a layout of one group, whose kind, dtype, heads, dim and window are set. */
static bt_status_t one_group(uint32_t page_tokens, uint32_t layers, const struct bt_kv_group *group,
                             struct bt_kv_layout *layout_p)
{
    struct bt_kv_group g = *group;
    uint32_t row = bt_kv_row_bytes(&g), planes = bt_kv_planes(&g);
    uint64_t seg, align = BT_KV_SEG_ALIGN;
    if (page_tokens == 0 || layers == 0 || layers > UINT16_MAX || planes == 0 || row == 0 ||
        __builtin_mul_overflow((uint64_t)page_tokens * planes, (uint64_t)row, &seg) ||
        seg > UINT32_MAX / 2) {
        return BT_ERR_INVALID;
    }
    /* Whole rows of values, because copy engines address them by row. */
    if (g.kind == BT_KV_GQA && g.dtype == BT_DT_FP8_E4M3) {
        g.scale_off = (uint32_t)seg;
        seg += (uint64_t)page_tokens * planes;
        align = row % align == 0 ? row : align;
    }
    seg = BT_DIV_UP(seg, align) * align;
    g.layers = (uint16_t)layers;
    g.seg_bytes = (uint32_t)seg;
    struct bt_kv_layout l = {
        .page_tokens = page_tokens, .n_groups = 1, .n_layers = layers, .block_bytes = seg * layers};
    l.groups[0] = g;
    l.layout_id = layout_hash(&l);
    *layout_p = l;
    return BT_OK;
}

bt_status_t bt_kv_layout_gqa(uint32_t page_tokens, uint32_t layers, uint32_t n_kv_heads,
                             uint32_t head_dim, bt_dtype_t dtype, uint32_t window,
                             struct bt_kv_layout *layout_p)
{
    const struct bt_kv_group g = {.kind = BT_KV_GQA,
                                  .dtype = (uint16_t)dtype,
                                  .n_kv_heads = n_kv_heads,
                                  .head_dim = head_dim,
                                  .window = window};
    return n_kv_heads > UINT32_MAX / 2 || head_dim > UINT32_MAX / 4
               ? BT_ERR_INVALID
               : one_group(page_tokens, layers, &g, layout_p);
}

bt_status_t bt_kv_layout_mla(uint32_t page_tokens, uint32_t layers, uint32_t latent, uint32_t rope,
                             bt_dtype_t dtype, struct bt_kv_layout *layout_p)
{
    bool fp8 = dtype == BT_DT_FP8_E4M3;
    const struct bt_kv_group g = {.kind = BT_KV_MLA,
                                  .dtype = (uint16_t)dtype,
                                  .n_kv_heads = 1,
                                  .head_dim = latent + rope,
                                  .rope = fp8 ? rope : 0};
    if (latent == 0 || rope == 0 || latent > UINT16_MAX || rope > UINT16_MAX ||
        (fp8 ? latent % 16 || rope % 16 : bt_dtype_bytes(dtype) != 2)) {
        return BT_ERR_INVALID;
    }
    return one_group(page_tokens, layers, &g, layout_p);
}

uint64_t bt_kv_segment(const struct bt_kv_layout *l, uint32_t layer, uint32_t *bytes_p)
{
    for (uint32_t g = 0; g < l->n_groups; g++) {
        const struct bt_kv_group *k = &l->groups[g];
        if (layer >= k->layer0 && layer - k->layer0 < k->layers) {
            *bytes_p = k->seg_bytes;
            return k->block_off + (uint64_t)(layer - k->layer0) * k->seg_bytes;
        }
    }
    BT_ASSERT(!"layer outside the layout");
    return 0;
}
