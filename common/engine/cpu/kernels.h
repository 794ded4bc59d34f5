/* Kernels of the CPU engine, one set per instruction set; all arithmetic of a row is the same
 * whatever rows stand beside it. Activations ("act") are the tiles of packed.h in the bf16 set and
 * f32 rows in the others. Pure functions on caller memory; called from OpenMP threads. */
#ifndef BT_ENGINE_CPU_KERNELS_H
#define BT_ENGINE_CPU_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/engine/cpu/packed.h"
#include "common/kv/latent.h"

#define BT_CPU_TILE     64 /* KV tokens of one softmax step, at absolute multiples */
#define BT_CPU_ROWS_MAX 64 /* query rows (token, head) of one attention item */

/* One block of query tokens of one sequence against one KV head. A token's K is head_dim values and
 * its V v_dim values; in MLA, V is the first part of K. */
struct bt_cpu_attn {
    const float *q;  /* [n][group][head_dim] of this KV head's query heads, rows below */
    size_t q_stride; /* elements from token to token */
    /* Acts of two parts, all of them, out_width columns wide. Head i of the group goes to rows from
     * out_row on, columns from out_col + i * out_step on, of the act at out + i * out_next. */
    uint16_t *out;
    size_t out_next; /* elements; of f32 acts two each */
    uint32_t out_row, out_col, out_step, out_width;
    uint32_t n, pos; /* query tokens, position of the first */
    uint32_t group, head_dim, v_dim;
    uint32_t row_bytes; /* from one token's K (V) to the next one's */
    /* NULL: rows are f16 values. Otherwise they are latents of this group in e4m3, which `latent`,
     * of the kernel set, makes f16 of. */
    const struct bt_kv_group *latents;
    void (*latent)(const struct bt_kv_group *g, const uint8_t *row, uint16_t *out);
    uint32_t window;   /* a token sees itself and the window - 1 before it; 0: all before it */
    uint32_t first;    /* nothing before this position is seen; at most 1, and at most pos */
    const uint8_t *kv; /* segments of this layer: page p at kv + p * seg_bytes */
    size_t seg_bytes;
    size_t k_off, v_off;   /* of this KV head's K and V inside a segment */
    const uint32_t *pages; /* page + 1 */
    uint32_t page_tokens;
    float scale;   /* of the scores */
    void *scratch; /* bt_cpu_attn_scratch(head_dim, v_dim) bytes, 64-byte aligned */
};

struct bt_cpu_kernels {
    const char *name;
    bool bf16; /* act is tiled bf16 pairs */
    /* x[n] += add[n] (add may be NULL); out[n] = act(x / rms(x) * w), of `parts` parts. out is the
     * row's place: a full one in tiles, whose columns behind n are set to 0. */
    void (*norm)(float *x, const float *add, const float *w, void *out, uint32_t parts, uint32_t n,
                 float eps);
    /* The same with LayerNorm: act((x - mean) / deviation * w + bias). */
    void (*layer_norm)(float *x, const float *add, const float *w, const float *bias, void *out,
                       uint32_t parts, uint32_t n, float eps);
    /* One head in place: optional bias [d], optional RMS norm with w [d], then RoPE when cs, the
     * d/2 cosines followed by d/2 sines, is given. d: multiple of 16. */
    void (*head)(float *h, const float *bias, const float *w, const float *cs, uint32_t d,
                 float eps);
    /* Columns col .. col + n - 1 of an act row of two parts; both multiples of 16. */
    void (*to_act)(const float *x, void *row, uint32_t col, uint32_t n);
    void (*to_f16)(const float *x, uint16_t *out, uint32_t n); /* n: multiple of 16 */
    /* A row of latent.h -> f16 [head_dim]; exact for latents, and for key parts that f16 holds. */
    void (*latent)(const struct bt_kv_group *g, const uint8_t *row, uint16_t *out);
    /* out[n] = act(silu(gate_up[i]) * gate_up[n + i]), of two parts */
    void (*swiglu)(const float *gate_up, void *out, uint32_t n);
    /* out[n] = act(gelu(x + bias)), of `parts` parts; gelu by tanh (Hendrycks and Gimpel 2016) */
    void (*gelu)(const float *x, const float *bias, void *out, uint32_t parts, uint32_t n);
    void (*attn)(const struct bt_cpu_attn *a);
};

extern const struct bt_cpu_kernels bt_cpu_kernels_base, bt_cpu_kernels_avx2, bt_cpu_kernels_avx512,
    bt_cpu_kernels_avx512_bf16;

/* Bytes of `rows` rows of act with k columns in `parts` parts, and where a row of them begins. */
static inline size_t bt_cpu_act_bytes(const struct bt_cpu_kernels *s, size_t rows, uint32_t k,
                                      uint32_t parts)
{
    return s->bf16 ? bt_act_elems(rows, k, parts) * 2 : rows * k * 4;
}
static inline void *bt_cpu_act_row(const struct bt_cpu_kernels *s, void *act, size_t row,
                                   uint32_t k, uint32_t parts)
{
    return (uint8_t *)act + (s->bf16 ? bt_act_row(row, k, parts) * 2 : row * k * 4);
}

/* attn on AMX tiles, for the bf16 set: head_dim and v_dim multiples of 32, up to BT_CPU_AMX_ROWS
 * rows: K and V are packed once for all of them, and what they need stays in the second-level
 * cache. */
#define BT_CPU_AMX_ROWS 768
void bt_cpu_attn_amx(const struct bt_cpu_attn *a);
size_t bt_cpu_attn_amx_scratch(uint32_t head_dim, uint32_t v_dim); /* bytes */

static inline size_t bt_cpu_attn_scratch(uint32_t head_dim, uint32_t v_dim)
{
    /* K and V tiles as f32 at most, the output rows, scores, a zero row, latents as f16 */
    return ((size_t)head_dim + v_dim) * BT_CPU_TILE * 4 + (size_t)BT_CPU_ROWS_MAX * v_dim * 4 +
           BT_CPU_ROWS_MAX * 8 + BT_CPU_ROWS_MAX * BT_CPU_TILE * 4 + (size_t)head_dim * 4 +
           (size_t)head_dim * BT_CPU_TILE * 2 + 1024;
}

/* Pointers to the K (or V) rows of the tile's `valid` tokens from t0 on, `plane_off` bytes behind
 * their segments; behind the last one a row of zeros. wide: [BT_CPU_TILE][head_dim], where latents
 * become f16. */
static inline void bt_cpu_tile_rows(const struct bt_cpu_attn *a, uint32_t t0, uint32_t valid,
                                    size_t plane_off, const uint16_t *zero, uint16_t *wide,
                                    const uint16_t **rows)
{
    uint32_t page = t0 / a->page_tokens, off = t0 % a->page_tokens;
    for (uint32_t t = 0; t < valid; page++, off = 0) {
        const uint8_t *at = a->kv + (size_t)(a->pages[page] - 1) * a->seg_bytes + plane_off +
                            (size_t)off * a->row_bytes;
        for (; t < valid && off < a->page_tokens; t++, off++, at += a->row_bytes) {
            rows[t] = (const uint16_t *)at;
            if (a->latents) {
                rows[t] = wide + (size_t)t * a->head_dim;
                a->latent(a->latents, at, wide + (size_t)t * a->head_dim);
            }
        }
    }
    for (uint32_t t = valid; t < BT_CPU_TILE; t++) {
        rows[t] = zero;
    }
}

/* Turns values by their position, cs as in `head`: values i and i + d / 2 together, or, if `pairs`,
 * 2i and 2i + 1 (Su et al., RoFormer). */
static inline void bt_cpu_rope(float *h, const float *cs, uint32_t d, bool pairs)
{
    uint32_t half = d / 2, step = pairs ? 2 : 1, other = pairs ? 1 : half;
    for (uint32_t i = 0; i < half; i++) {
        float *x = h + (size_t)i * step, a = x[0], b = x[other];
        x[0] = a * cs[i] - b * cs[half + i];
        x[other] = b * cs[i] + a * cs[half + i];
    }
}

#endif
