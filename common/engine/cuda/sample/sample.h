/* Sampling on the device. Every call is asynchronous on its stream. */
#ifndef BT_CUDA_SAMPLE_H
#define BT_CUDA_SAMPLE_H

#include <cuda_runtime.h>

#include "common/engine/cuda/sample/sample_args.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Draws a->draws[0..n): as common/engine/sampler.h says, up to the last bits of its logarithms. One
 * block a row; a slot may stand in n once, or in the draws of one row with drafts. */
cudaError_t bt_cu_sample_rows(const struct bt_cu_sampling *a, uint32_t n, cudaStream_t s);
/* Counts tokens[0..n) (device memory), n_prompt of them prompt, into one slot's counts [vocab].
 * Tokens outside the vocabulary are left out. */
cudaError_t bt_cu_sample_count(uint32_t *counts, uint32_t vocab, const uint32_t *tokens, uint32_t n,
                               uint32_t n_prompt, cudaStream_t s);
/* The same for one generated token. */
cudaError_t bt_cu_sample_count_one(uint32_t *counts, uint32_t token, cudaStream_t s);

#ifdef __cplusplus
}
#endif

#endif
