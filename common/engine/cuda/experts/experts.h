/* A layer's experts on the device: which experts each row uses, and the sum of what they compute.
 * A row's result is the sum over its experts, by rising number, of weight * down(silu(gate) * up).
 * All pointers are device memory; every launch is asynchronous on its stream and reads nothing on
 * the host, so that CUDA graphs can hold it. Needs a Hopper device. */
#ifndef BT_CUDA_EXPERTS_H
#define BT_CUDA_EXPERTS_H

#include <cuda_runtime.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/engine/cuda/weight.h"

#ifdef __cplusplus
extern "C" {
#endif

#define BT_CU_EXPERTS_MAX        1024u
#define BT_CU_EXPERTS_USED_MAX   32u
#define BT_CU_EXPERTS_GROUPS_MAX 32u
/* More rows go through other kernels, where gate, up and each expert's result are rounded to bf16;
 * fewer ones too if they are many for each expert. */
#define BT_CU_EXPERTS_FEW      128u
#define BT_CU_EXPERTS_NORM_MAX 8192u /* the widest rows for struct bt_cu_experts_next */

/* Routing is what struct bt_model_experts defines, with the same names. A model's shared expert is
 * the last `always` of n and of used: each row uses them with weight 1, and the router does not
 * know them.
 * invariant: one kernel computes any number of rows, that of many rows where it can. It sums a row
 * from the first column to the last, whatever part of an expert's rows it is in.
 * e4m3: weights are BT_CU_WEIGHT_BLOCKS, and activations f16 instead of bf16. Kernels of few rows
 * make weights f16, exactly; those of many rows round activations to e4m3, with a scale for each
 * row and 128 columns, and SwiGLU's results, too. */
struct bt_cu_experts {
    uint32_t n, used;
    uint32_t hidden, inter;                   /* of a row; of one expert */
    uint32_t groups, groups_used, group_best; /* groups 1: no choice of groups */
    bool sigmoid;                             /* else softmax */
    bool normalise;
    float scale;
    uint32_t always;
    bool invariant; /* a row's result has the same bits whatever the other rows are */
    bool e4m3;      /* weights are; else bf16 */
};

/* Hopper; n, used and groups within the limits above, enough experts in the groups that are used,
 * hidden a multiple of 16 and inter of 8; e4m3: both of 128, and not invariant. */
bool bt_cu_experts_fits(const struct bt_cu_experts *x);
/* The most rows of a call: BT_CU_EXPERTS_FEW where hidden or inter is not more than 256 (bf16),
 * otherwise any number. */
uint32_t bt_cu_experts_rows(const struct bt_cu_experts *x);
/* Bytes of scratch memory for steps of up to `rows` rows; a multiple of 256, as its address must
 * be. Its first 256 bytes are zero before the first use, and stay with the kernels. */
size_t bt_cu_experts_scratch(const struct bt_cu_experts *x, uint32_t rows);

/* x [rows][hidden] f32 is the residual stream, w [hidden] and eps are RMSNorm's. */
struct bt_cu_experts_norm {
    const float *x, *w;
    float eps;
};
/* a [rows][hidden] = norm(x) in bf16 (e4m3: f16), and scores [rows][n - always] = its product with
 * the router [n - always][hidden] bf16. The product reads 16 bits of each activation, not a's 8. */
cudaError_t bt_cu_experts_scores(const struct bt_cu_experts *x,
                                 const struct bt_cu_experts_norm *norm, const void *router,
                                 uint32_t rows, void *a, float *scores, cudaStream_t s);
/* Chooses the experts of each row and sorts the rows by expert, into scratch. scores: [rows][n -
 * always] f32, the router's product; bias [n - always] f32 or NULL. slots [rows]: -1 marks a
 * padding row, which uses no expert; NULL: there is none. cudaErrorInvalidValue: it does not fit.
 */
cudaError_t bt_cu_experts_route(const struct bt_cu_experts *x, const float *scores,
                                const float *bias, const int32_t *slots, uint32_t rows,
                                void *scratch, cudaStream_t s);
struct bt_cu_experts_router {
    const void *w;     /* [n - always][hidden] bf16 */
    const float *bias; /* [n - always], or NULL */
};
/* Both in as few launches as possible: the norm in a, the scores, and what route puts into scratch.
 */
cudaError_t bt_cu_experts_choose(const struct bt_cu_experts *x,
                                 const struct bt_cu_experts_norm *norm,
                                 const struct bt_cu_experts_router *router, const int32_t *slots,
                                 uint32_t rows, void *a, float *scores, void *scratch,
                                 cudaStream_t s);
/* What follows the experts: a [rows][hidden] = RMSNorm of out with the weights w [hidden], in bf16
 * or f16. It may be the memory of the experts' own input. */
struct bt_cu_experts_next {
    const float *w;
    float eps;
    void *a;
    bool f16;
};
/* Computes the experts of rows that route has put into scratch: once after each route or choose.
 * gate_up [n][2 inter][hidden] (an expert's gate rows, then its up rows) and down
 * [n][hidden][inter], each as one matrix; a [rows][hidden] as choose leaves it. out [rows][hidden]
 * f32: set, or added to if `add` (a padding row's: set to zero, or kept). next: NULL, or where
 * hidden is at most BT_CU_EXPERTS_NORM_MAX. cudaErrorInvalidValue: it does not fit. */
cudaError_t bt_cu_experts_run(const struct bt_cu_experts *x, struct bt_cu_weight gate_up,
                              struct bt_cu_weight down, const void *a, uint32_t rows, void *scratch,
                              float *out, bool add, const struct bt_cu_experts_next *next,
                              cudaStream_t s);

/* What route has written for `rows` rows, for tests. expert, weight: [rows][used] by rising expert,
 * ~0: a padding row's. first [n + 1]: where an expert's uses begin in `uses`, whose values are row
 * * used + k, by rising row. */
struct bt_cu_experts_routes {
    const uint32_t *expert, *first, *uses;
    const float *weight;
};
struct bt_cu_experts_routes bt_cu_experts_routes(const struct bt_cu_experts *x, uint32_t rows,
                                                 void *scratch);

#ifdef __cplusplus
}
#endif

#endif
