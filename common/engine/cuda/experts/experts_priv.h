/* Inside experts/: the scratch memory of a step, and the kernels' launchers. */
#ifndef BT_CUDA_EXPERTS_PRIV_H
#define BT_CUDA_EXPERTS_PRIV_H

#include <cuda.h>

#include "common/engine/cuda/experts/experts.h"

#ifdef __cplusplus
extern "C" {
#endif

#define BT_CU_EXPERTS_FEW_PART  64u  /* rows of an expert that one item computes, few rows */
#define BT_CU_EXPERTS_MANY_PART 256u /* ... many rows, in steps of GRANULE */
#define BT_CU_EXPERTS_GRANULE   32u
#define BT_CU_EXPERTS_SMALL     4u   /* rows up to which an item has fewer rows of weights */
#define BT_CU_EXPERTS_CHUNK     128u /* rows that one block sorts */

/* Few rows: at most BT_CU_EXPERTS_FEW, and an expert has this many or fewer of them on average.
 * Then one kernel computes them that is bound by reading weights; it keeps rows in registers. */
#define BT_CU_EXPERTS_FEW_EACH 16u
bool bt_cu_experts_few_rows(const struct bt_cu_experts *x, uint32_t rows);

/* Rows of one expert that are computed together: places [first, first + rows) of `uses`. */
struct bt_cu_experts_part {
    uint32_t expert, first, rows, zero;
};

struct bt_cu_experts_state {
    uint32_t ticket; /* blocks of the router that are done; the last one sets it to 0 again */
    uint32_t tickets[BT_CU_EXPERTS_FEW / 16]; /* the same, of each 16 rows, with few rows */
    uint32_t parts;
    uint32_t next;  /* the work items that blocks have taken */
    uint32_t ready; /* few rows: items of the first product that are done */
};

struct bt_cu_experts_plan { /* device memory */
    struct bt_cu_experts_state *state;
    uint32_t *first;                  /* [n + 1] */
    uint32_t *expert, *uses;          /* [rows * used] */
    uint32_t *places;                 /* [rows * used]: of each use in `uses`; ~0: padding */
    float *weight;                    /* [rows * used] */
    struct bt_cu_experts_part *parts; /* [most_parts] */
    uint32_t *done;                   /* [most_parts]: how much of the first product is done */
    uint32_t *counts;                 /* [chunks][n] */
    void *h;                          /* [place][inter] bf16: SwiGLU's result */
    /* [place][hidden]: few rows f32, many rows bf16, and the rows of x before that. */
    void *y;
    uint32_t most_parts;
    size_t bytes;
};
struct bt_cu_experts_plan bt_cu_experts_plan(const struct bt_cu_experts *x, uint32_t rows,
                                             void *scratch);

/* Rows r of an expert's matrix as (r % 8, r / 8 % 2, r / 16), or of the first product as (r % 8,
 * gate or up, r / 8), so that a box has 16 of them side by side; `blocks` of 16 rows, 64 columns.
 */
cudaError_t bt_cu_experts_weights_map(CUtensorMap *map, const struct bt_cu_experts *x,
                                      const void *w, bool down, uint32_t blocks);

struct bt_cu_experts_product {
    const void *gate_up, *down, *a;
    uint32_t rows;
};
/* small: items of 32 weight rows, which keep all multiprocessors busy to the end where there are
 * few of them; else of 64, which read activations less. */
cudaError_t bt_cu_experts_few(const struct bt_cu_experts *x, const struct bt_cu_experts_plan *p,
                              const struct bt_cu_experts_product *w, bool small, cudaStream_t s);
cudaError_t bt_cu_experts_many(const struct bt_cu_experts *x, const struct bt_cu_experts_plan *p,
                               const struct bt_cu_experts_product *w, cudaStream_t s);
/* The weighted sums of y, and what `add` and `next` (or NULL) say. */
cudaError_t bt_cu_experts_combine(const struct bt_cu_experts *x, const struct bt_cu_experts_plan *p,
                                  uint32_t rows, float *out, bool add,
                                  const struct bt_cu_experts_next *next, cudaStream_t s);

#ifdef __cplusplus
}
#endif

#endif
