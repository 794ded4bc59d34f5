/* Products on bf16 units: dst f32 [M, N] = act [M, K] x W [K, N], by AMX tiles or by AVX512-BF16.
 * bf16 keeps 8 bits of a number; rounding activations to that moved logprobs of small models by
 * 0.1. So an activation is the sum of two bf16, hi + lo, 16 bits together, and each goes through
 * the unit; or of one, where half the work is worth more than the bits. A weight that bf16 cannot
 * hold (f16 and f32 checkpoints) is always split. Sums are f32. A row's sum runs over K in one
 * order, whatever M, N, the thread and the other rows are: results are equal bit for bit.
 *
 * act is tiled as the units want it: sixteen rows are cut into tiles of 32 columns, each 16 x 32
 * and contiguous, of two parts the tile of hi before that of lo. */
#ifndef BT_ENGINE_CPU_PACKED_H
#define BT_ENGINE_CPU_PACKED_H

#include "common/base/base.h"

struct bt_packed;

/* Elements of act that rows rows of k columns take. */
static inline size_t bt_act_elems(size_t rows, uint32_t k, uint32_t parts)
{
    return BT_ALIGN_UP(rows, (size_t)16) * parts * BT_ALIGN_UP(k, 32u);
}
/* Offset of a row's first element; column c stands at bt_act_col(c) behind it, its lo part
 * BT_ACT_LO more. */
#define BT_ACT_LO 512
static inline size_t bt_act_row(size_t row, uint32_t k, uint32_t parts)
{
    return row / 16 * 16 * parts * BT_ALIGN_UP(k, 32u) + row % 16 * 32;
}
static inline size_t bt_act_col(uint32_t c, uint32_t parts)
{
    return (size_t)(c / 32) * BT_ACT_LO * parts + c % 32;
}

/* True once this process may use AMX tiles (Linux hands them out on demand). */
bool bt_packed_amx_usable(void);

/* Sets this thread's eight tiles to 16 rows of 64 bytes; _tile_release ends their use. */
void bt_packed_tile_config(void);

struct bt_packed_spec {
    uint32_t k, n;
    uint32_t acts; /* parts of act, 1 or 2 */
    bool amx;
    bool swiglu; /* the first n / 2 columns are gate, the others up: for BT_PACKED_SWIGLU only */
};

/* Packs w_nk ([N, K] f32, as checkpoints have them). ERR_NO_MEMORY. The caller frees w_nk. */
bt_status_t bt_packed_create(const struct bt_packed_spec *spec, const float *w_nk,
                             struct bt_packed **p_p) BT_MUST_CHECK;
void bt_packed_destroy(struct bt_packed *p);

/* What happens to the result while it is in the first-level cache. A separate pass over memory
 * would take about as long as the product. */
typedef enum {
    BT_PACKED_STORE, /* dst [m, n] f32 = */
    BT_PACKED_ADD,   /* dst [m, n] f32 += */
    BT_PACKED_SWIGLU /* dst, act of n / 2 columns = silu(gate) * up, in as many parts as act; the
                        tail of a tile is zeros */
} bt_packed_out_t;

/* Columns of act behind K up to the next multiple of 32 must be finite. dst has m rows and is not
 * act. */
void bt_packed_run(const struct bt_packed *p, const uint16_t *act, uint32_t m, bt_packed_out_t out,
                   void *dst, int threads);

#endif
