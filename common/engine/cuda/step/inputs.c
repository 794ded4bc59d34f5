/* A step's small inputs on the host: their places in one piece of memory, and their values for a
 * batch. Owner thread: the engine's. */
#include <stdlib.h>
#include <string.h>

#include "common/engine/cuda/attention/mla.h"
#include "common/engine/cuda/step/step_priv.h"

static size_t put(size_t *at, size_t bytes)
{
    size_t here = *at;
    *at = BT_ALIGN_UP(here + bytes, (size_t)64);
    return here;
}

struct bt_cu_layout bt_cu_lay_out(uint32_t tokens, uint32_t singles, uint32_t wanted,
                                  uint32_t items, uint32_t spans)
{
    struct bt_cu_layout l = {
        .tokens = tokens, .singles = singles, .wanted = wanted, .items = items, .spans = spans};
    l.ids = put(&l.bytes, tokens * 4);
    l.pos = put(&l.bytes, tokens * 4);
    l.slots = put(&l.bytes, tokens * 4);
    l.lens = put(&l.bytes, singles * 4);
    l.rows = put(&l.bytes, wanted * 4);
    l.item = put(&l.bytes, items * sizeof(struct bt_attn_item));
    l.span = put(&l.bytes, spans * sizeof(struct bt_attn_span));
    return l;
}

struct bt_cu_inputs bt_cu_inputs_at(const struct bt_cu_layout *l, uint8_t *p)
{
    return (struct bt_cu_inputs){(int32_t *)(p + l->ids),
                                 (int32_t *)(p + l->pos),
                                 (int32_t *)(p + l->slots),
                                 (int32_t *)(p + l->lens),
                                 (int32_t *)(p + l->rows),
                                 (struct bt_attn_item *)(p + l->item),
                                 (struct bt_mla_prefill_item *)(p + l->item),
                                 (struct bt_attn_span *)(p + l->span)};
}

static int longest_first(const void *a, const void *b)
{
    const struct bt_attn_item *x = a, *y = b;
    return (y->pos > x->pos) - (y->pos < x->pos);
}

static int latent_longest_first(const void *a, const void *b)
{
    const struct bt_mla_prefill_item *x = a, *y = b;
    return (y->pos > x->pos) - (y->pos < x->pos);
}

static void sort_items(const struct bt_engine *e, const struct bt_cu_group *g,
                       const struct bt_cu_inputs *in)
{
    if (e->latent && !e->deterministic) {
        qsort(in->latent_items + g->item, g->n_items, sizeof(*in->latent_items),
              latent_longest_first);
    } else {
        qsort(in->items + g->item, g->n_items, sizeof(*in->items), longest_first);
    }
}

uint32_t bt_cu_item_tokens(const struct bt_engine *e)
{
    if (e->latent) {
        return e->deterministic ? bt_mla_item_tokens(e->model.config.heads)
                                : bt_mla_prefill_tokens();
    }
    return bt_attn_prefill_tokens(e->attn);
}

/* The group of a chunk with this many pages. Pages of e4m3 or latents are expanded side by side; a
 * group has as many as there is room for. */
static struct bt_cu_group *group_for(struct bt_engine *e, uint32_t pages, uint32_t n_items)
{
    struct bt_cu_group *g = e->n_groups ? &e->groups[e->n_groups - 1] : NULL;
    if (!g || (e->group_room && g->pages + pages > e->group_room)) {
        uint32_t span = g ? g->span + g->n_spans : 0;
        g = &e->groups[e->n_groups++];
        *g = (struct bt_cu_group){.item = n_items, .span = span};
    }
    return g;
}

static void put_single(struct bt_engine *e, const struct bt_engine_row *row, uint32_t at,
                       const struct bt_cu_inputs *in, uint32_t *n_items)
{
    const struct bt_host_slot *s = &e->host.slots[row->slot];
    uint32_t pos = bt_host_row_pos(&e->host, row);
    in->ids[at] = row->tokens                     ? (int32_t)row->tokens[0]
                  : e->sampler.pending[row->slot] ? BT_CU_ID_LAST
                                                  : (int32_t)s->tokens[s->n_tokens - 1];
    in->pos[at] = (int32_t)pos;
    in->slots[at] = (int32_t)row->slot;
    in->lens[at] = (int32_t)pos + 1;
    if (e->deterministic) {
        group_for(e, 0, *n_items)->n_items++;
        in->items[(*n_items)++] = (struct bt_attn_item){.row = (int32_t)at,
                                                        .n = 1,
                                                        .pos = (int32_t)pos,
                                                        .slot = (int32_t)row->slot,
                                                        .len = (int32_t)pos + 1};
    }
}

static void put_chunk(struct bt_engine *e, const struct bt_engine_row *row, uint32_t at,
                      const struct bt_cu_inputs *in, uint32_t *n_items)
{
    uint32_t pos = bt_host_row_pos(&e->host, row), per = bt_cu_item_tokens(e);
    uint32_t pages =
        e->latent ? pos + row->n : BT_DIV_UP(pos + row->n, e->host.info.layout.page_tokens);
    struct bt_cu_group *g = group_for(e, pages, *n_items);
    int32_t slot = (int32_t)row->slot;
    if (e->group_room) { /* what is expanded has no slots; a sequence is named by its first page */
        in->spans[g->span + g->n_spans++] = (struct bt_attn_span){slot, (int32_t)g->pages};
        slot = (int32_t)g->pages;
        g->pages += pages;
    }
    g->n_items += BT_DIV_UP(row->n, per);
    for (uint32_t i = 0; i < row->n; i++) {
        in->ids[at + i] = (int32_t)row->tokens[i];
        in->pos[at + i] = (int32_t)(pos + i);
        in->slots[at + i] = (int32_t)row->slot;
    }
    for (uint32_t i = 0; i < row->n; i += per) {
        int32_t n = (int32_t)BT_MIN(per, row->n - i), first = (int32_t)(at + i);
        int32_t begin = (int32_t)(pos + i), index = (int32_t)(*n_items)++;
        if (e->latent && !e->deterministic) {
            in->latent_items[index] = (struct bt_mla_prefill_item){first, n, begin, slot};
        } else {
            in->items[index] = (struct bt_attn_item){
                .row = first, .n = n, .pos = begin, .slot = slot, .len = (int32_t)(pos + row->n)};
        }
    }
}

/* Rows get their samples in the batch's order; their logits are in the same order. */
void bt_cu_inputs_fill(struct bt_engine *e, const struct bt_engine_batch *b,
                       const struct bt_cu_layout *l, const struct bt_cu_inputs *in,
                       struct bt_host_ticket *t)
{
    uint32_t single = 0, chunk = l->singles, n_items = 0;
    e->n_groups = 0;
    for (uint32_t r = 0; r < b->n_rows; r++) {
        const struct bt_engine_row *row = &b->rows[r];
        uint32_t last;
        if (row->n == 1) {
            last = single++;
            put_single(e, row, last, in, &n_items);
        } else {
            put_chunk(e, row, chunk, in, &n_items);
            chunk += row->n;
            last = chunk - 1;
        }
        if (row->flags & BT_ROW_SAMPLE) {
            in->rows[t->n_rows] = (int32_t)last;
            bt_host_ticket_sample_row(&e->host, t, row);
        }
    }
    for (uint32_t i = 0; i < e->n_groups; i++) {
        sort_items(e, &e->groups[i], in);
    }
}

/* Fills the graph's unused sequences: no slot, no KV, and logits that are not read. */
void bt_cu_inputs_pad(const struct bt_cu_layout *l, const struct bt_cu_inputs *in, uint32_t from,
                      uint32_t wanted)
{
    for (uint32_t i = from; i < l->singles; i++) {
        in->ids[i] = in->pos[i] = in->lens[i] = 0;
        in->slots[i] = -1;
        if (l->items) { /* deterministic: the first token of slot 0's first page, whatever it is */
            in->items[i] = (struct bt_attn_item){.row = (int32_t)i, .n = 1, .len = 1};
        }
    }
    for (uint32_t i = wanted; i < l->wanted; i++) {
        in->rows[i] = 0;
    }
}
