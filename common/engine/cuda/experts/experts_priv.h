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
#define BT_CU_EXPERTS_FEW_E4M3 8u /* the same for e4m3 weights */
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
    /* [place][inter]: SwiGLU's result in bf16; of e4m3 weights in f16 (few rows) or e4m3. */
    void *h;
    /* [place][hidden]: few rows f32, many rows bf16, and the rows of x before that (e4m3: in the
     * first half of a row each). */
    void *y;
    /* e4m3, many rows: [columns / 128][scale_stride], of x's rows and of h, in bf16: they are
     * powers of two. A place's is at bt_cu_experts_scale_at. */
    uint16_t *x_scale, *h_scale;
    uint32_t scale_stride;
    uint32_t most_parts;
    size_t bytes;
};
struct bt_cu_experts_plan bt_cu_experts_plan(const struct bt_cu_experts *x, uint32_t rows,
                                             void *scratch);

/* Where the scales of an expert's places, from `first` of its places on, begin: a multiple of
 * eight, as the copy engine wants. */
#define bt_cu_experts_scale_at(expert, first) (((first) & ~7u) + 8 * (expert))

/* Rows r of an expert's matrix as (r % 8, r / 8 % 2, r / 16), or of the first product as (r % 8,
 * gate or up, r / 8), so that a box has 16 of them side by side; `blocks` of 16 rows, 64 columns
 * (e4m3: 128). */
cudaError_t bt_cu_experts_weights_map(CUtensorMap *map, const struct bt_cu_experts *x,
                                      const void *w, bool down, uint32_t blocks);

struct bt_cu_experts_product {
    struct bt_cu_weight gate_up, down;
    const void *a;
    uint32_t rows;
};
/* item: weight rows of an item, 32 or 64; of e4m3 128. Small items keep all multiprocessors
 * busy to the end where there are few of them, large ones read activations less. */
cudaError_t bt_cu_experts_few(const struct bt_cu_experts *x, const struct bt_cu_experts_plan *p,
                              const struct bt_cu_experts_product *w, uint32_t item, cudaStream_t s);
cudaError_t bt_cu_experts_many(const struct bt_cu_experts *x, const struct bt_cu_experts_plan *p,
                               const struct bt_cu_experts_product *w, cudaStream_t s);
cudaError_t bt_cu_experts_many_e4m3(const struct bt_cu_experts *x,
                                    const struct bt_cu_experts_plan *p,
                                    const struct bt_cu_experts_product *w, cudaStream_t s);
/* The weighted sums of y, and what `add` and `next` (or NULL) say. */
cudaError_t bt_cu_experts_combine(const struct bt_cu_experts *x, const struct bt_cu_experts_plan *p,
                                  uint32_t rows, float *out, bool add,
                                  const struct bt_cu_experts_next *next, cudaStream_t s);

#ifdef __cplusplus
}
#endif

#endif
