/* Matrix products with packed weights: dst f32 [M, N] = src act [M, K] x W [K, N]. act is the tiles
 * of packed.h where the processor has bf16 units, plain f32 rows elsewhere. One thread calls; the
 * work is spread over OpenMP threads. */
#ifndef BT_ENGINE_CPU_GEMM_H
#define BT_ENGINE_CPU_GEMM_H

#include "common/base/base.h"

struct bt_gemm;
struct bt_linear;

typedef enum {
    BT_ISA_BASE,
    BT_ISA_AVX2,
    BT_ISA_AVX512,
    BT_ISA_AVX512_BF16, /* from here on products are packed.h's */
    BT_ISA_AMX
} bt_cpu_isa_t;

/* The processor's, limited by oneDNN's ONEDNN_MAX_CPU_ISA. */
bt_cpu_isa_t bt_gemm_isa(void);

bt_status_t bt_gemm_create(uint32_t threads, bt_cpu_isa_t isa, struct bt_gemm **g_p, char *err,
                           size_t err_cap) BT_MUST_CHECK;
/* Whether bt_linear_add and bt_linear_swiglu may be called: products are packed.h's. */
bool bt_gemm_fuses(const struct bt_gemm *g);
void bt_gemm_destroy(struct bt_gemm *g);
/* A row of every product made so far does not depend on the number of rows beside it: packed.h's by
 * construction; oneDNN's if all are of its "brg" kind, and a trial at creation that compared them
 * bit for bit. */
bool bt_gemm_exact(const struct bt_gemm *g);

struct bt_linear_spec {
    uint32_t k, n;
    uint32_t acts; /* parts of act, 1 or 2, where products are packed.h's */
    bool swiglu;   /* gate's columns, then as many of up: for bt_linear_swiglu if bt_gemm_fuses */
};

/* Packs weights w_nk ([N, K], as checkpoints have them). The caller frees w_nk. */
bt_status_t bt_linear_create(struct bt_gemm *g, const struct bt_linear_spec *spec,
                             const float *w_nk, struct bt_linear **l_p, char *err,
                             size_t err_cap) BT_MUST_CHECK;
void bt_linear_destroy(struct bt_linear *l);

/* Rows that a product of m rows may read and write: src and dst must have room for them. */
uint32_t bt_gemm_rows(uint32_t m);
bt_status_t bt_linear_run(struct bt_linear *l, const void *src, uint32_t m, float *dst);
/* x[m, n] += the product. */
void bt_linear_add(struct bt_linear *l, const void *src, uint32_t m, float *x);
/* act[m, n / 2] = silu(gate) * up. */
void bt_linear_swiglu(struct bt_linear *l, const void *src, uint32_t m, void *act);

#endif
