/* Latent attention's half of a layer (latent.c) as the rest of the engine sees it. */
#ifndef BT_CUDA_STEP_LATENT_H
#define BT_CUDA_STEP_LATENT_H

#include "common/engine/cuda/step/step_priv.h"

/* Refuses shapes that the kernels lack. ERR_UNSUPPORTED, ERR_CONFIG: err names shape and remedy. */
bt_status_t bt_cu_latent_check(const struct bt_engine_config *conf, const struct bt_model_config *c,
                               char *err, size_t err_cap) BT_MUST_CHECK;
/* Memory for steps of `rows` tokens; e->latent is set. */
cudaError_t bt_cu_latent_open(struct bt_engine *e, size_t rows);
void bt_cu_latent_close(struct bt_engine *e);
/* When there are pages. */
cudaError_t bt_cu_latent_open_pages(struct bt_engine *e);
/* Rows of the layer's first product: queries, or the latents that they come from, and the tokens'
 * latents with their key parts. */
uint32_t bt_cu_latent_first_rows(const struct bt_model_config *c);
/* f32 [tokens][heads * 192]: where the queries' second product goes, if there is one and it has
 * room for that many tokens. NULL before bt_cu_latent_open. */
float *bt_cu_latent_sums(const struct bt_engine *e);
bool bt_cu_latent_sums_fit(const struct bt_engine *e, size_t tokens);
/* Tokens that may lie side by side as keys and values of a group of prompts (struct bt_cu_group);
 * 0: chunks need no such room. */
uint32_t bt_cu_latent_room(const struct bt_engine *e);

/* Once per step, before its first layer. */
bt_status_t bt_cu_latent_plan(struct bt_engine *e, const struct bt_cu_layout *l,
                              const struct bt_cu_inputs *in) BT_MUST_CHECK;
/* As bt_cu_attention. */
bt_status_t bt_cu_latent_attention(struct bt_engine *e, const struct bt_engine_batch *b,
                                   const struct bt_cu_layout *l, const struct bt_cu_inputs *in,
                                   uint32_t layer) BT_MUST_CHECK;

#endif
