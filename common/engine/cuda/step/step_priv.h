/* Between a step's parts: inputs.c (what its rows are), attention.c and mlp.c (the halves of a
 * layer), products.c (matrix products), choose.c (what takes them), step.c (the rest of the model,
 * and when). */
#ifndef BT_CUDA_STEP_PRIV_H
#define BT_CUDA_STEP_PRIV_H

#include "common/engine/cuda/attention/mla_prefill.h"
#include "common/engine/cuda/cuda_priv.h"

/* A step's small inputs, in one piece of memory laid out by its sizes: a graph's pointers depend on
 * its sizes alone. Single tokens come first, each with its drafts behind it, then the chunks. */
struct bt_cu_layout {
    uint32_t tokens;       /* rows of the model */
    uint32_t singles;      /* of them: single tokens and drafts */
    uint32_t queries;      /* entries of decode attention, for singles; deterministic: none */
    uint32_t most;         /* tokens of an entry: bt_cu_class_most */
    uint32_t fresh;        /* of attention.h: 1, with drafts BT_ATTN_FRESH */
    uint32_t wanted;       /* rows whose logits are */
    uint32_t items, spans; /* of attention.h, for chunks; deterministic: for all */
    size_t ids, pos, slots, query, rows, item, span, bytes;
};
struct bt_cu_inputs { /* the same on the host or on the device */
    int32_t *ids, *pos, *slots, *rows;
    struct bt_attn_queries *queries;
    struct bt_attn_item *items;
    struct bt_mla_prefill_item *latent_items; /* with latent attention, in items' place */
    struct bt_attn_span *spans;
};

/* A product that layers have, for choose.c. */
struct bt_cu_layer_product {
    size_t weight; /* where struct bt_cu_layer has its struct bt_cu_weight; some layers lack it */
    uint32_t n, k;
    void *y;
    enum bt_cu_skinny_end end;
};
#define BT_CU_LAYER_PRODUCTS_MAX 8

/* ---- inputs.c ---- */

/* Finds the places for the sizes, which are set. */
void bt_cu_lay_out(struct bt_cu_layout *l);
/* Whether all tokens of a row are computed as single ones: it has one, or drafts. */
static inline bool bt_cu_is_single(const struct bt_engine_row *row)
{
    return row->n == 1 || (row->n_draft > 0 && row->n <= BT_ATTN_FRESH);
}
/* Where a batch's rows are among those of the model, one batch row after the other. */
struct bt_cu_rows_at {
    uint32_t single, chunk; /* chunk begins as the layout's singles */
};
/* The first row of the model of the next row of the batch. */
static inline uint32_t bt_cu_next_rows(struct bt_cu_rows_at *at, const struct bt_engine_row *row)
{
    uint32_t *next = bt_cu_is_single(row) ? &at->single : &at->chunk, first = *next;
    *next += row->n;
    return first;
}

/* Query tokens that fit an item. */
uint32_t bt_cu_item_tokens(const struct bt_engine *e);
/* Steps of a class have entries of decode attention that are as large: 0 has no drafts. With
 * latents a class has up to 1, 2, 4 or 8 tokens in an entry. With keys and values a row's drafts
 * are entries of their own (1), or as many as one (2) or two sets (3) of the kernel's columns hold.
 * The class of a batch, and the tokens that its entries have at most. */
uint32_t bt_cu_class_of(const struct bt_engine *e, const struct bt_engine_batch *b);
uint32_t bt_cu_class_most(const struct bt_engine *e, uint32_t class_);
struct bt_cu_inputs bt_cu_inputs_at(const struct bt_cu_layout *l, uint8_t *p);
/* What b's rows are, in l's places, and padding behind them; t learns which rows are sampled. */
void bt_cu_inputs_fill(struct bt_engine *e, const struct bt_engine_batch *b,
                       const struct bt_cu_layout *l, const struct bt_cu_inputs *in,
                       struct bt_host_ticket *t);

/* ---- products.c: ERR_DEVICE as everywhere ---- */

/* All products of layers but those of experts; returns their number. */
uint32_t bt_cu_layer_products(const struct bt_engine *e,
                              struct bt_cu_layer_product p[BT_CU_LAYER_PRODUCTS_MAX]);
/* A layer's matrix of p; its w is NULL where the layer has none. */
static inline const struct bt_cu_weight *bt_cu_weight_of(const struct bt_cu_layer *y,
                                                         const struct bt_cu_layer_product *p)
{
    return (const struct bt_cu_weight *)((const uint8_t *)y + p->weight);
}
/* Whether a product of m rows reads rounded activations, as w is e4m3 and there are many rows. */
bool bt_cu_takes_e4m3(const struct bt_cu_weight *w, uint32_t m);
/* y[m][n] (+)= a[m][k] * w[n][k]^T; y f32, or bf16 if so said. a is bf16, or f16 if w is e4m3;
 * where bt_cu_takes_e4m3, e->act.e4m3 is read instead. */
bt_status_t bt_cu_product(struct bt_engine *e, const struct bt_cu_weight *w, const void *a, void *y,
                          uint32_t m, uint32_t n, uint32_t k, bool bf16, bool add) BT_MUST_CHECK;
/* The same with e4m3 weights and activations; what: which product of a layer it is. */
bt_status_t bt_cu_product_e4m3(struct bt_engine *e, const struct bt_cu_weight *w,
                               const struct bt_cu_e4m3_rows *a, void *y, uint32_t m, uint32_t n,
                               uint32_t k, bool bf16, bool add) BT_MUST_CHECK;
/* A layer's or the model's norm. */
struct bt_cu_norm_of {
    const float *w, *bias; /* bias: LayerNorm's; NULL: RMSNorm */
    const float *add;      /* to e->act.x first: the bias of the product before; or NULL */
};
/* e->act.a = norm of rows (NULL: the first n, which keep what is added) of e->act.x, in bf16. */
bt_status_t bt_cu_norm_rows(struct bt_engine *e, const struct bt_cu_norm_of *norm,
                            const int32_t *rows, uint32_t n) BT_MUST_CHECK;
/* The norm of the first n rows as the product with w reads it. */
bt_status_t bt_cu_norm_for(struct bt_engine *e, const struct bt_cu_weight *w,
                           const struct bt_cu_norm_of *norm, uint32_t n) BT_MUST_CHECK;
/* Whether wide.h takes this product of n rows. */
bool bt_cu_takes_wide(const struct bt_engine *e, enum bt_cu_wide what, uint32_t n);
/* e->act.a -> queries in e->act.q, keys and values in their pages */
bt_status_t bt_cu_qkv(struct bt_engine *e, const struct bt_cu_layer *y, uint32_t n,
                      const struct bt_cu_inputs *in, uint32_t layer_row) BT_MUST_CHECK;
/* e->act.logits of rows (NULL: the first n) of e->act.x */
bt_status_t bt_cu_head(struct bt_engine *e, const int32_t *rows, uint32_t n) BT_MUST_CHECK;

/* ---- invariant.c: for deterministic engines ---- */

/* Tokens of the smallest segments that attention sums apart (attention/segments.cuh): results
 * depend on them. Fewer spread a sequence over more multiprocessors, and cost prompts more. With
 * latents all heads are one block's, so there are fewer blocks. */
#define BT_CU_SEGMENT        512u
#define BT_CU_SEGMENT_LATENT 256u

/* bt_cu_product, or gate and up with their SwiGLU (end BT_CU_SKINNY_SWIGLU_ROUNDED, y in bf16): a
 * row's result does not depend on m. */
bt_status_t bt_cu_product_invariant(struct bt_engine *e, const struct bt_cu_weight *w,
                                    const void *a, void *y, uint32_t m, uint32_t n, uint32_t k,
                                    enum bt_cu_skinny_end end) BT_MUST_CHECK;
/* Into how many parts k is cut. */
uint32_t bt_cu_invariant_parts(uint32_t n, uint32_t k);
/* Whether a way of skinny.h may take such a product. */
bool bt_cu_invariant_way(uint32_t way, uint32_t m, uint32_t n, uint32_t k);
/* ERR_UNSUPPORTED: err says which kernels are missing for this model or device. */
bt_status_t bt_cu_check_invariant(const struct bt_engine *e, char *err,
                                  size_t err_cap) BT_MUST_CHECK;

/* ---- attention.c ---- */

/* e->act.x += attention(norm(e->act.x)): writes the rows' keys and values to the layer's pages, and
 * fires b's flows between that and attention. b: NULL if there are no flows. */
bt_status_t bt_cu_attention(struct bt_engine *e, const struct bt_engine_batch *b,
                            const struct bt_cu_layout *l, const struct bt_cu_inputs *in,
                            uint32_t layer) BT_MUST_CHECK;

/* ---- mlp.c ---- */

/* e->act.x += MLP or experts of norm(e->act.x) */
bt_status_t bt_cu_mlp(struct bt_engine *e, const struct bt_cu_layout *l,
                      const struct bt_cu_inputs *in, uint32_t layer) BT_MUST_CHECK;
/* Whether the experts of the layer before have left this layer's first norm of n rows in e->act.a.
 */
bool bt_cu_experts_make_norm(const struct bt_engine *e, uint32_t layer, uint32_t n);
/* e->act.x += down(silu(gate(e->act.a)) * up(e->act.a)); GPT-2: down(gelu(up)) without down's bias,
 * which the next norm adds */
bt_status_t bt_cu_mlp_dense(struct bt_engine *e, const struct bt_cu_layer *y,
                            uint32_t n) BT_MUST_CHECK;

/* Memory for experts of steps of up to `rows` rows. */
cudaError_t bt_cu_experts_open(struct bt_engine *e, uint32_t rows) BT_MUST_CHECK;
void bt_cu_experts_close(struct bt_engine *e);

/* ---- dola.c: in a step's order; none of them in a graph ---- */

bool bt_cu_has_dola(const struct bt_engine *e, const struct bt_engine_batch *b);
/* Keeps what enters `layer` of the sampled rows whose slots name it. */
bt_status_t bt_cu_dola_keep(struct bt_engine *e, const struct bt_engine_batch *b,
                            const struct bt_cu_layout *l, uint32_t layer) BT_MUST_CHECK;
/* The samples' logits are complete: chooses each one's early layer. */
bt_status_t bt_cu_dola_head(struct bt_engine *e, const struct bt_host_ticket *t) BT_MUST_CHECK;

/* ---- contrast.c ---- */

/* Behind the last layer: keeps the hidden states of rows of contrastive searches. */
bt_status_t bt_cu_contrast_keep(struct bt_engine *e, const struct bt_engine_batch *b,
                                const struct bt_cu_layout *l) BT_MUST_CHECK;

/* ---- choose.c: once, in this order ---- */

bt_status_t bt_cu_choose_products(struct bt_engine *e) BT_MUST_CHECK;
/* What takes prompts' products: when there are pages, and before they hold anything. */
bt_status_t bt_cu_choose_wide(struct bt_engine *e, char *err, size_t err_cap) BT_MUST_CHECK;

#endif
