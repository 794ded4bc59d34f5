/* Which matrices of a checkpoint are fp8 (e4m3), and how they are scaled: quantization_config of a
 * model's config.json. Read are
 *   quant_method fp8                 blocks (weight_block_size) or one scale for a matrix
 *   quant_method compressed-tensors  format float-quantized; a scale for a matrix, row or block
 * A weight's value is its fp8 number times its scale. How the file wants activations rounded does
 * not matter here. */
#ifndef BT_ENGINE_MODEL_FP8_H
#define BT_ENGINE_MODEL_FP8_H

#include "common/base/base.h"
#include "common/engine/model_config.h"

/* A scale for each block of rows x cols; UINT32_MAX: as many as the matrix has. */
struct bt_fp8_form {
    uint32_t block_rows, block_cols;
};

struct bt_model_fp8;

/* *q_p: NULL if the model has no quantization_config. ERR_NOT_FOUND, INVALID, UNSUPPORTED: err
 * names the file, the field and the accepted values. The caller destroys it. */
bt_status_t bt_model_fp8_load(const char *dir, struct bt_model_fp8 **q_p, char *err,
                              size_t err_cap) BT_MUST_CHECK;
void bt_model_fp8_destroy(struct bt_model_fp8 *q);
/* ERR_UNSUPPORTED if model.quantize is not for this model: its weights are fp8 already. Errors of
 * load, too. */
bt_status_t bt_model_fp8_check_quantize(const char *dir, char *err, size_t err_cap) BT_MUST_CHECK;
/* Whether most weights of this model are fp8: in its files, or by model.quantize (may be NULL). */
bool bt_model_is_fp8(const char *dir, const char *quantize);
/* Returns whether a Hopper GPU keeps such a model's matrices in 8 bits. There are no kernels for
 * GPT-2, nor for experts whose blocks have fewer than 128 rows or columns. */
static inline bool bt_model_stays_fp8(const struct bt_model_config *c)
{
    return !c->gpt2 &&
           (!c->experts.n || (c->hidden % 128 == 0 && c->experts.intermediate % 128 == 0));
}

/* What a matrix is for: a checkpoint's lm_head and routers are linear layers for compressed-tensors
 * only, embeddings never. */
typedef enum { BT_FP8_OF_LAYER, BT_FP8_OF_ROUTER, BT_FP8_OF_HEAD, BT_FP8_OF_NONE } bt_fp8_role_t;

/* The form of the matrix `name` ("model.layers.0.mlp.down_proj.weight"); NULL: it is not fp8.
 * q may be NULL. Valid as long as q. */
const struct bt_fp8_form *bt_model_fp8_form(const struct bt_model_fp8 *q, const char *name,
                                            bt_fp8_role_t role);

#endif
