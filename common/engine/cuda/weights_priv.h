/* Between weights.c (which tensor goes where) and weights_fp8.c (matrices that are e4m3). */
#ifndef BT_CUDA_WEIGHTS_PRIV_H
#define BT_CUDA_WEIGHTS_PRIV_H

#include "common/engine/cuda/cuda_priv.h"
#include "common/engine/decoder.h"

struct bt_cu_loader {
    struct bt_engine *e;
    const char *dir;
    uint32_t seed;     /* of dummy weights */
    uint8_t *stage[2]; /* pinned, used in turn */
    cudaEvent_t sent[2];
    int turn;
    void *scratch; /* device: a matrix before it is rounded or ordered */
    size_t scratch_bytes;
    uint32_t *bad; /* device [layers]; 1: a value is not finite */
    char *err;
    size_t err_cap;
};

/* ---- weights.c ---- */

bt_status_t bt_cu_loader_error(struct bt_cu_loader *l, cudaError_t e, size_t bytes);
/* Device memory that lives as long as the model. */
bt_status_t bt_cu_loader_take(struct bt_cu_loader *l, size_t bytes, void **p) BT_MUST_CHECK;
/* Part of a tensor: rows of `width` values, `stride` values apart. */
struct bt_cu_view {
    const struct bt_tensor *t;
    size_t from, rows, width, stride;
    bool turned; /* t is the matrix [width, rows], and is to become [rows, width] */
};
/* The values as `as` (turned: BF16) to the device. */
bt_status_t bt_cu_loader_upload(struct bt_cu_loader *l, const struct bt_cu_view *v,
                                bt_tensor_dtype_t as, uint8_t *to) BT_MUST_CHECK;
/* Random weights in bf16. */
bt_status_t bt_cu_loader_dummy(struct bt_cu_loader *l, const struct bt_decoder_tensors *d,
                               void *to) BT_MUST_CHECK;

/* Rows of the matrix that an item is part of, and those before it. The latter are with MLA: a
 * layer's first product has queries (or what they come from), then latents. */
uint64_t bt_cu_loader_rows(const struct bt_model_config *c, const struct bt_decoder_tensors *d,
                           uint64_t *before_p);
static inline bool bt_cu_is_expert(const struct bt_decoder_tensors *d)
{
    return d->item == BT_DECODER_EXPERT_GATE_UP || d->item == BT_DECODER_EXPERT_DOWN;
}
static inline bool bt_cu_is_shared(const struct bt_decoder_tensors *d)
{
    return d->item == BT_DECODER_SHARED_GATE_UP || d->item == BT_DECODER_SHARED_DOWN;
}

/* ---- weights_fp8.c ---- */

bt_status_t bt_cu_fp8_open(struct bt_cu_loader *l) BT_MUST_CHECK;
/* ERR_INVALID: a weight was not finite; err names the layer. Waits for the device. */
bt_status_t bt_cu_fp8_check(struct bt_cu_loader *l) BT_MUST_CHECK;
void bt_cu_fp8_close(struct bt_cu_loader *l);
/* Sets model.e4m3_*: whether all matrices of attention, of MLPs and of experts are kept in e4m3.
 * Not so if one of them is not fp8, has a shape or a form of scales without kernels, or the device
 * has none. Reads no weights. */
bt_status_t bt_cu_fp8_look(struct bt_cu_loader *l,
                           const struct bt_engine_config *conf) BT_MUST_CHECK;
/* What this matrix is kept as. */
enum bt_cu_weight_kind bt_cu_fp8_kind(const struct bt_cu_loader *l,
                                      const struct bt_decoder_tensors *d);
/* Places a matrix of that kind, if it is not bf16. */
bt_status_t bt_cu_fp8_place(struct bt_cu_loader *l, const struct bt_decoder_tensors *d,
                            struct bt_cu_weight *w) BT_MUST_CHECK;
/* A part of a matrix that model.quantize converts, but that is kept in bf16: its values rounded to
 * e4m3 as on the CPU, in f32. The caller frees rounded_p->data. ERR_INVALID: one is not finite. */
bt_status_t bt_cu_fp8_round(struct bt_cu_loader *l, const struct bt_decoder_part *p, uint32_t cols,
                            struct bt_tensor *rounded_p) BT_MUST_CHECK;

#endif
