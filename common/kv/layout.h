/* KV layout: what the bytes of a block are. One definition for engine, slab and wire.
 *
 * A block is the KV of page_tokens consecutive tokens for all layers; a segment is one layer of one
 * block. Its values are planes of rows, [plane][token][row].
 *
 * GQA: a plane for each [kv_head][K,V], a row is head_dim values, K after RoPE. Heads are outermost
 * so that a tensor-parallel rank's share is one run. FP8_E4M3: a row's values share a scale, a
 * power of two 2^(e - 127) whose byte e lies at scale_off + [plane][token]; e = 0 says that all
 * values are zero.
 *
 * MLA (DeepSeek-V2, 2.1): one plane. A row is the token's latent, after its norm, then the key part
 * that all heads share, after RoPE: head_dim = kv_lora_rank + qk_rope_head_dim values (512 + 64).
 * FP8_E4M3 (latent.h): the row is the latent in e4m3, its scales, one f32 for each 128 values, and
 * the key part in bf16; 512 + 16 + 128 = 656 bytes, the row of FlashMLA's fp8 cache.
 *
 * A block is its groups' segments one after another, layer by layer, each segment aligned to 128
 * bytes (GQA in FP8_E4M3: and to head_dim). Pure. */
#ifndef BT_KV_LAYOUT_H
#define BT_KV_LAYOUT_H

#include "common/base/base.h"

#define BT_KV_MAX_GROUPS 4
#define BT_KV_SEG_ALIGN  128

/* Part of layout_id: a new kind takes a new number. */
typedef enum { BT_KV_GQA = 0, BT_KV_MLA = 1 } bt_kv_kind_t;
typedef enum { BT_DT_BF16 = 0, BT_DT_F16 = 1, BT_DT_F32 = 2, BT_DT_FP8_E4M3 = 3 } bt_dtype_t;

struct bt_kv_group {
    uint16_t kind;  /* bt_kv_kind_t */
    uint16_t dtype; /* bt_dtype_t */
    uint16_t layer0, layers;
    uint32_t n_kv_heads, head_dim; /* MLA: 1, values of a row */
    uint32_t window;               /* sliding window in tokens, 0: full */
    uint32_t seg_bytes;            /* of one layer of one block, scales included; aligned */
    uint32_t scale_off;            /* offset of scales inside a segment, 0: none */
    uint32_t rope;                 /* MLA in FP8_E4M3: values of a row's key part; otherwise 0 */
    uint64_t block_off;            /* offset of the group's first segment inside a block */
};

struct bt_kv_layout {
    uint32_t page_tokens; /* tokens of a block = of an engine page */
    uint32_t n_groups;    /* one group today: layers that all keep the same KV */
    uint32_t n_layers;    /* over all groups: items per chunk of a flow */
    uint64_t block_bytes; /* sum of all segments */
    uint64_t layout_id;   /* hash over everything above; equal ids mean equal bytes */
    struct bt_kv_group groups[BT_KV_MAX_GROUPS];
};

/* Builds a layout of one GQA group, with scales if dtype is FP8_E4M3; ERR_INVALID if a number is 0
 * or a size overflows. */
bt_status_t bt_kv_layout_gqa(uint32_t page_tokens, uint32_t layers, uint32_t n_kv_heads,
                             uint32_t head_dim, bt_dtype_t dtype, uint32_t window,
                             struct bt_kv_layout *layout_p) BT_MUST_CHECK;

/* Builds a layout of one MLA group whose rows have `latent` + `rope` values, in 16 bits or in
 * FP8_E4M3 with scales; ERR_INVALID if a number is 0, if a size overflows, for F32, or in FP8_E4M3
 * if one of both is not a multiple of 16. */
bt_status_t bt_kv_layout_mla(uint32_t page_tokens, uint32_t layers, uint32_t latent, uint32_t rope,
                             bt_dtype_t dtype, struct bt_kv_layout *layout_p) BT_MUST_CHECK;

/* Offset and size in bytes of layer `layer`'s segment (0..n_layers-1) inside a block. */
uint64_t bt_kv_segment(const struct bt_kv_layout *l, uint32_t layer, uint32_t *bytes_p);

uint32_t bt_dtype_bytes(bt_dtype_t dt);

/* Planes of a segment. */
static inline uint32_t bt_kv_planes(const struct bt_kv_group *g)
{
    return g->kind == BT_KV_MLA ? 1 : g->n_kv_heads * 2;
}

/* Values that share a scale in a row of MLA in FP8_E4M3. */
#define BT_KV_LATENT_GROUP 128

/* A row of MLA in FP8_E4M3: its latent values, and the bytes where its scales and its key part
 * begin. */
static inline uint32_t bt_kv_latent(const struct bt_kv_group *g)
{
    return g->head_dim - g->rope;
}
static inline uint32_t bt_kv_latent_scales(const struct bt_kv_group *g)
{
    return bt_kv_latent(g);
}
static inline uint32_t bt_kv_latent_rope(const struct bt_kv_group *g)
{
    uint32_t latent = bt_kv_latent(g);
    return latent + BT_DIV_UP(latent, BT_KV_LATENT_GROUP) * (uint32_t)sizeof(float);
}

/* Bytes of one token in one plane. */
static inline uint32_t bt_kv_row_bytes(const struct bt_kv_group *g)
{
    if (g->rope) { /* loads of 16 bytes stay aligned in every row */
        return BT_ALIGN_UP(bt_kv_latent_rope(g) + g->rope * 2, 16u);
    }
    return g->head_dim * bt_dtype_bytes((bt_dtype_t)g->dtype);
}

#endif
