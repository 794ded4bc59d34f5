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

void bt_cu_lay_out(struct bt_cu_layout *l)
{
    l->bytes = 0;
    l->ids = put(&l->bytes, l->tokens * 4);
    l->pos = put(&l->bytes, l->tokens * 4);
    l->slots = put(&l->bytes, l->tokens * 4);
    l->query = put(&l->bytes, l->queries * sizeof(struct bt_attn_queries));
    l->rows = put(&l->bytes, l->wanted * 4);
    l->item = put(&l->bytes, l->items * sizeof(struct bt_attn_item));
    l->span = put(&l->bytes, l->spans * sizeof(struct bt_attn_span));
}

struct bt_cu_inputs bt_cu_inputs_at(const struct bt_cu_layout *l, uint8_t *p)
{
    return (struct bt_cu_inputs){(int32_t *)(p + l->ids),
                                 (int32_t *)(p + l->pos),
                                 (int32_t *)(p + l->slots),
                                 (int32_t *)(p + l->rows),
                                 (struct bt_attn_queries *)(p + l->query),
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

/* ---- classes ---- */

#define SET_COLUMNS                                                                                \
    16u /* query rows for which decode attention has one set of warps (decode.cuh) */
#ifndef BT_CU_CLASS_BYTES
#define BT_CU_CLASS_BYTES 1e6
#endif

/* What attention over keys and values costs more in a layer than with entries of one token, in
 * BT_CU_CLASS_BYTES of KV that are read in the same time; measured at the shape of Llama-3-8B.
 * Kernels with two sets of warps leave no room on a multiprocessor for the small blocks of products
 * of few tokens, which otherwise begin early. */
static double cost_of(uint32_t class_, uint32_t n_tokens)
{
    enum { FEW = 8 };
    return BT_CU_CLASS_BYTES * (class_ < 2 ? 0 : class_ == 2 ? 13 : n_tokens > FEW ? 33 : 134);
}

uint32_t bt_cu_class_most(const struct bt_engine *e, uint32_t class_)
{
    if (e->deterministic || class_ == 0) {
        return 1;
    }
    if (e->latent) {
        return 1u << class_;
    }
    uint32_t most = bt_attn_decode_most(e->attn);
    uint32_t one_set = SET_COLUMNS / (e->model.config.heads / e->model.config.kv_heads);
    return class_ == 1 ? 1 : class_ == 2 ? BT_MIN(one_set, most) : most;
}

/* The time that a class costs, in bytes of KV: those that its entries read again, and its cost. */
static double time_of(const struct bt_engine *e, const struct bt_engine_batch *b, uint32_t class_)
{
    const struct bt_kv_layout *kv = &e->host.info.layout;
    double again = 0, token = (double)kv->block_bytes / kv->page_tokens / kv->n_layers;
    uint32_t n = 0, most = bt_cu_class_most(e, class_);
    for (uint32_t r = 0; r < b->n_rows; r++) {
        const struct bt_engine_row *row = &b->rows[r];
        if (bt_cu_is_single(row)) {
            n += row->n;
            again += (double)(BT_DIV_UP(row->n, most) - 1) * bt_host_row_pos(&e->host, row);
        }
    }
    return again * token + cost_of(class_, n);
}

uint32_t bt_cu_class_of(const struct bt_engine *e, const struct bt_engine_batch *b)
{
    uint32_t most = 1, best = 1;
    for (uint32_t r = 0; r < b->n_rows; r++) {
        most = bt_cu_is_single(&b->rows[r]) ? BT_MAX(most, b->rows[r].n) : most;
    }
    if (most == 1 || e->deterministic) {
        return 0;
    }
    if (e->latent) { /* each further token of an entry costs all of the step's entries more */
        while (best + 1 < BT_CU_CLASSES && bt_cu_class_most(e, best) < most) {
            best++;
        }
        return best;
    }
    for (uint32_t i = 2; i < BT_CU_CLASSES; i++) {
        bool more = bt_cu_class_most(e, i) > bt_cu_class_most(e, i - 1);
        best = more && time_of(e, b, i) < time_of(e, b, best) ? i : best;
    }
    return best;
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

/* How much of the layout is filled. */
struct filled {
    uint32_t single, chunk; /* tokens; of chunks counted from the first row of the model */
    uint32_t queries, items;
};

/* A single token, and drafts behind it. */
static void put_single(struct bt_engine *e, const struct bt_engine_row *row,
                       const struct bt_cu_layout *l, const struct bt_cu_inputs *in,
                       struct filled *f)
{
    const struct bt_host_slot *s = &e->host.slots[row->slot];
    uint32_t pos = bt_host_row_pos(&e->host, row), at = f->single;
    int32_t slot = (int32_t)row->slot;
    for (uint32_t i = 0; i < row->n; i++) {
        in->ids[at + i] = row->tokens                     ? (int32_t)row->tokens[i]
                          : e->sampler.pending[row->slot] ? BT_CU_ID_LAST
                                                          : (int32_t)s->tokens[s->n_tokens - 1];
        in->pos[at + i] = (int32_t)(pos + i);
        in->slots[at + i] = slot;
    }
    for (uint32_t i = 0; i < row->n; i += l->most) {
        int32_t n = (int32_t)BT_MIN(l->most, row->n - i), first = (int32_t)(at + i);
        int32_t len = (int32_t)(pos + i) + n;
        if (e->deterministic) {
            group_for(e, 0, f->items)->n_items++;
            in->items[f->items++] = (struct bt_attn_item){
                .row = first, .n = n, .pos = len - n, .slot = slot, .len = len};
        } else {
            in->queries[f->queries++] = (struct bt_attn_queries){first, n, slot, len};
        }
    }
    f->single += row->n;
}

static void put_chunk(struct bt_engine *e, const struct bt_engine_row *row,
                      const struct bt_cu_inputs *in, struct filled *f)
{
    uint32_t pos = bt_host_row_pos(&e->host, row), per = bt_cu_item_tokens(e), at = f->chunk;
    uint32_t pages =
        e->latent ? pos + row->n : BT_DIV_UP(pos + row->n, e->host.info.layout.page_tokens);
    struct bt_cu_group *g = group_for(e, pages, f->items);
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
        int32_t begin = (int32_t)(pos + i), index = (int32_t)f->items++;
        if (e->latent && !e->deterministic) {
            in->latent_items[index] = (struct bt_mla_prefill_item){first, n, begin, slot};
        } else {
            in->items[index] = (struct bt_attn_item){
                .row = first, .n = n, .pos = begin, .slot = slot, .len = (int32_t)(pos + row->n)};
        }
    }
    f->chunk += row->n;
}

/* Fills the graph's unused places: no slot, no KV, and logits that are not read. */
static void pad(const struct bt_cu_layout *l, const struct bt_cu_inputs *in, const struct filled *f,
                uint32_t wanted)
{
    for (uint32_t i = f->single; i < l->singles; i++) {
        in->ids[i] = in->pos[i] = 0;
        in->slots[i] = -1;
        if (l->items) { /* deterministic: the first token of slot 0's first page, whatever it is */
            in->items[i] = (struct bt_attn_item){.row = (int32_t)i, .n = 1, .len = 1};
        }
    }
    for (uint32_t i = f->queries; i < l->queries; i++) {
        in->queries[i] = (struct bt_attn_queries){0};
    }
    for (uint32_t i = wanted; i < l->wanted; i++) {
        in->rows[i] = 0;
    }
}

/* Rows get their samples in the batch's order; their logits are in the same order. */
void bt_cu_inputs_fill(struct bt_engine *e, const struct bt_engine_batch *b,
                       const struct bt_cu_layout *l, const struct bt_cu_inputs *in,
                       struct bt_host_ticket *t)
{
    struct filled f = {.chunk = l->singles};
    e->n_groups = 0;
    for (uint32_t r = 0; r < b->n_rows; r++) {
        const struct bt_engine_row *row = &b->rows[r];
        uint32_t sample = t->n_rows, end;
        if (bt_cu_is_single(row)) {
            put_single(e, row, l, in, &f);
            end = f.single;
        } else {
            put_chunk(e, row, in, &f);
            end = f.chunk;
        }
        if (row->flags & BT_ROW_SAMPLE) {
            bt_host_ticket_sample_row(&e->host, t, row);
        }
        for (uint32_t i = sample; i < t->n_rows; i++) { /* the row's last tokens */
            in->rows[i] = (int32_t)(end - (t->n_rows - i));
        }
    }
    pad(l, in, &f, t->n_rows);
    for (uint32_t i = 0; i < e->n_groups; i++) {
        sort_items(e, &e->groups[i], in);
    }
}
