/* What the GPU checks compare with: slow kernels that are plainly right, and random data. */
#ifndef BT_TESTS_GPU_REF_H
#define BT_TESTS_GPU_REF_H

#include "common/engine/cuda/attention/attention.h"
#include "common/engine/cuda/attention/mla.h"
#include "common/engine/cuda/attention/mla_prefill.h"
#include "common/engine/cuda/weight.h"

#ifdef __cplusplus
extern "C" {
#endif

/* n normal values times sigma. */
void ref_fill(void *p, size_t n, int type, float sigma, uint32_t seed);
/* e4m3 weights [n][k] in the order of weight.h with scales of blocks, which differ by up to 2^5,
 * and the same values in bf16, exactly (NULL: not wanted). Normal values of about sigma. n and k
 * are multiples of 128. */
void ref_fill_e4m3(const struct bt_cu_weight *w, void *bf16, size_t n, uint32_t k, float sigma,
                   uint32_t seed);
/* K and V of tokens [0, len) of one sequence, in its pages of one layer. */
void ref_fill_kv(const struct bt_attn_pool *p, uint32_t layer_row, const int32_t *table_row,
                 int len, uint32_t seed);

struct ref_row { /* one query token */
    int32_t slot, pos;
};
/* Exchanges the KV of the rows' last tokens (pos; negative: none) with kept, [n][kv_heads][2] times
 * the bytes of a row and one more. It stands for the append before an attention that starts early
 * (attention.h): its successor may begin when it has, late_us before it writes. */
void ref_last_kv(const struct bt_attn_pool *p, uint32_t layer_row, const struct ref_row *rows,
                 uint32_t n, const int32_t *table, uint32_t table_stride, void *kept,
                 uint32_t late_us);
/* out[row][head][head_dim] in f32; rows, table on the device. */
void ref_attn(const struct bt_attn_pool *p, uint32_t layer_row, const void *q, uint32_t q_stride,
              const struct ref_row *rows, uint32_t n_rows, const int32_t *table,
              uint32_t table_stride, float *out);
/* Largest |out - ref| / |ref| of any (row, head): NaN counts as 1e9. All on the device. */
float ref_worst(const void *out, uint32_t out_stride, int type, const float *ref, uint32_t rows,
                uint32_t heads, uint32_t dim);
/* out[row][hidden] = the sum over the row's uses of weight * down(silu(gate) * up), as in
 * experts.h, sums in double; h: room for [rows * used][inter] bf16. expert ~0: not used. All on the
 * device. */
void ref_experts(const void *gate_up, const void *down, const void *a, const uint32_t *expert,
                 const float *weight, uint32_t rows, uint32_t used, uint32_t hidden, uint32_t inter,
                 void *h, float *out);

/* Latent rows of tokens [0, len) of one sequence, in its pages of one layer. Unless they are even,
 * some rows are larger than others, the more the later they are. */
void ref_fill_mla(const struct bt_mla_pool *p, uint32_t layer_row, const int32_t *table_row,
                  int len, uint32_t seed, bool even);
/* out[row][head][512] in f32 for q[row][head][576]; rows, table on the device. A row that sees no
 * token is 0. */
void ref_mla(const struct bt_mla_pool *p, uint32_t layer_row, const void *q,
             const struct ref_row *rows, uint32_t n_rows, const int32_t *table,
             uint32_t table_stride, float *out);
/* out[i][head][128] in f32 of query token at[i] of f, which sees pos + 1 rows of the KV from slot
 * on (not of its item); rows, at on the device. */
void ref_mla_prefill(const struct bt_mla_prefill *f, const struct ref_row *rows, const int32_t *at,
                     uint32_t n_rows, float *out);
/* Read bandwidth over 4 GiB, GB/s: the best of some grids. */
float ref_read_gbs(cudaStream_t s);

#ifdef __cplusplus
}
#endif

#endif
