/* The CPU engine's inside: shared by cpu.c (calls), weights.c (loading), forward.c (the step). */
#ifndef BT_ENGINE_CPU_PRIV_H
#define BT_ENGINE_CPU_PRIV_H

#include "common/engine/cpu/gemm.h"
#include "common/engine/cpu/kernels.h"
#include "common/engine/cpu/phases.h"
#include "common/engine/engine.h"
#include "common/engine/host.h"
#include "common/engine/model_config.h"

/* One decoder layer; what an architecture lacks is NULL. */
struct bt_cpu_layer {
    float *norm_attn, *norm_mlp; /* [hidden] */
    struct bt_linear *qkv;       /* hidden -> (heads + 2 kv_heads) * head_dim */
    float *qkv_bias;             /* [(heads + 2 kv_heads) * head_dim] */
    float *q_norm, *k_norm;      /* [head_dim] */
    struct bt_linear *o;         /* heads * head_dim -> hidden */
    struct bt_linear *gate_up;   /* hidden -> 2 * intermediate */
    struct bt_linear *down;      /* intermediate -> hidden */
};

struct bt_cpu_model {
    struct bt_model_config config;
    uint16_t *embed;    /* [vocab, hidden] bf16 */
    uint16_t *embed_lo; /* what bf16 could not hold of it, or NULL */
    struct bt_cpu_layer *layers;
    float *norm; /* [hidden] */
    struct bt_linear *lm_head;
};

struct bt_cpu_token { /* one row of the step's matrices */
    uint32_t id, pos, slot;
};

struct bt_cpu_item {              /* a block of query tokens of one sequence */
    uint32_t first, n, pos, slot; /* first: row of y */
    uint32_t out;                 /* row of the output */
};

struct bt_cpu_kept { /* what the logits of a row are for */
    uint32_t prompt; /* a prompt token's result: its index + 1; 0: none */
    uint32_t slot, pos;
    uint32_t sample; /* a sample: index + 1; 0: none */
};

#define BT_CPU_LOGIT_ROWS 64 /* rows of logits at a time for prompt logprobs */

struct bt_engine {
    struct bt_host host;
    struct bt_cpu_model model;
    const struct bt_cpu_kernels *k;
    void (*attn)(const struct bt_cpu_attn *a); /* k's, or the one on AMX */
    uint32_t attn_rows;                        /* rows (token, head) of one attention item */
    struct bt_gemm *gemm;
    int threads;
    float *inv_freq; /* [head_dim / 2] */
    float *rope;     /* [max_model_len][head_dim]: cosines, sines; filled below rope_n */
    uint32_t rope_n;
    struct bt_cpu_token *tokens; /* [max_rows] */
    struct bt_cpu_item *items;   /* [max_rows] */
    struct bt_cpu_kept *kept;    /* [max_rows] */
    float *x;                    /* [rows, hidden], the residual stream */
    float *y;                    /* [rows, widest product], f32 */
    uint32_t mlp_acts;           /* parts of act in gate, up and down; 2 elsewhere */
    void *a;                     /* act [rows, widest input] */
    void *a2;                    /* act [rows, intermediate], if products fuse SwiGLU */
    float *y2;                   /* [rows, hidden], if they do not */
    float *logits;    /* [BT_CPU_LOGIT_ROWS, vocab], once prompt logprobs are asked for */
    uint8_t *scratch; /* [threads] attention */
    size_t scratch_bytes;
    uint64_t phase_ns[BT_CPU_PHASES], phase_at; /* ended phases; when the current one began */
    bool failed;                                /* oneDNN reported an error: sticky */
};

/* mlp_acts: parts of act in gate, up and down. */
bt_status_t bt_cpu_model_load(struct bt_cpu_model *m, struct bt_gemm *g, uint32_t mlp_acts,
                              const struct bt_engine_config *c, char *err,
                              size_t err_cap) BT_MUST_CHECK;
void bt_cpu_model_cleanup(struct bt_cpu_model *m);

/* Runs a checked batch; logits of the SAMPLE rows go to logits (bt_gemm_rows(n_sample) rows). */
bt_status_t bt_cpu_forward(struct bt_engine *e, const struct bt_engine_batch *b, uint32_t n_tokens,
                           struct bt_host_ticket *t) BT_MUST_CHECK;

#endif
