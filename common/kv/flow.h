/* Flows: the arithmetic of streaming progress. A flow = (request, epoch, direction) moves the KV of
 * n_tokens prompt tokens in a declared order of items (chunk, layer), layer fastest. Chunk c covers
 * tokens [c * chunk_tokens, (c+1) * chunk_tokens) cut at n_tokens; chunk_tokens is a multiple of
 * the block. Item i = c * n_layers + l. Progress p means: items 0..p-1 are whole and visible.
 * The progress word is epoch:32 | progress:32, raised with release order, read with acquire. Pure.
 */
#ifndef BT_KV_FLOW_H
#define BT_KV_FLOW_H

#include <stdatomic.h>

#include "common/base/base.h"

struct bt_flow_shape {
    uint32_t n_tokens;
    uint32_t block_tokens;
    uint32_t chunk_tokens;
    uint32_t n_layers;
};

typedef _Atomic uint64_t bt_flow_word_t;

static inline uint64_t bt_flow_pack(uint32_t epoch, uint32_t progress)
{
    return (uint64_t)epoch << 32 | progress;
}
/* Raises the word; only its one writer calls this. */
static inline void bt_flow_raise(bt_flow_word_t *w, uint32_t epoch, uint32_t progress)
{
    atomic_store_explicit(w, bt_flow_pack(epoch, progress), memory_order_release);
}
/* Progress if the word belongs to epoch, else 0. */
static inline uint32_t bt_flow_read(bt_flow_word_t *w, uint32_t epoch)
{
    uint64_t v = atomic_load_explicit(w, memory_order_acquire);
    return (uint32_t)(v >> 32) == epoch ? (uint32_t)v : 0;
}

static inline uint32_t bt_flow_blocks(const struct bt_flow_shape *s)
{
    return BT_DIV_UP(s->n_tokens, s->block_tokens);
}
static inline uint32_t bt_flow_chunks(const struct bt_flow_shape *s)
{
    return BT_DIV_UP(s->n_tokens, s->chunk_tokens);
}
static inline uint32_t bt_flow_items(const struct bt_flow_shape *s)
{
    return bt_flow_chunks(s) * s->n_layers;
}
/* Blocks [*first_p, *end_p) of item i's chunk. */
static inline void bt_flow_item_blocks(const struct bt_flow_shape *s, uint32_t item,
                                       uint32_t *first_p, uint32_t *end_p)
{
    uint32_t per = s->chunk_tokens / s->block_tokens, c = item / s->n_layers;
    *first_p = c * per;
    *end_p = BT_MIN((c + 1) * per, bt_flow_blocks(s));
}
/* Items that are whole at once when the first `blocks` blocks are resident. */
static inline uint32_t bt_flow_resident_items(const struct bt_flow_shape *s, uint32_t blocks)
{
    uint32_t per = s->chunk_tokens / s->block_tokens;
    return (blocks >= bt_flow_blocks(s) ? bt_flow_chunks(s) : blocks / per) * s->n_layers;
}

#endif
