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

/* Builds a layout of one MLA group whose rows have `latent` + `rope` values; ERR_INVALID if a
 * number is 0, if a size overflows, or if dtype is not a 16-bit one. */
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

/* Bytes of one token in one plane. */
static inline uint32_t bt_kv_row_bytes(const struct bt_kv_group *g)
{
    return g->head_dim * bt_dtype_bytes((bt_dtype_t)g->dtype);
}

#endif
