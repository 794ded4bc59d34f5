/* The CPU engine's inside: shared by cpu.c (calls), weights.c (loading), forward.c (the step) with
 * attention.c and mlp.c (its two halves of a layer), and mtp.c (drafts). */
#ifndef BT_ENGINE_CPU_PRIV_H
#define BT_ENGINE_CPU_PRIV_H

#include "common/engine/cpu/gemm.h"
#include "common/engine/cpu/kernels.h"
#include "common/engine/cpu/phases.h"
#include "common/engine/engine.h"
#include "common/engine/host.h"
#include "common/engine/model_config.h"

/* The matrices of an MLP or of one expert; `in` is gate and up, or GPT-2's single first matrix. */
struct bt_cpu_mlp {
    struct bt_linear *in;   /* hidden -> 2 * intermediate, or intermediate */
    struct bt_linear *down; /* intermediate -> hidden */
};

/* Multi-head latent attention, in its absorbed form (attention.c). */
struct bt_cpu_mla {
    struct bt_linear *q_a;   /* hidden -> q_rank; NULL: q_b takes the hidden state */
    float *q_a_norm;         /* [q_rank] */
    struct bt_linear *q_b;   /* q_rank or hidden -> heads * head_dim */
    struct bt_linear *kv_a;  /* hidden -> kv_rank + rope */
    float *kv_a_norm;        /* [kv_rank] */
    struct bt_linear **k_up; /* [heads] nope -> kv_rank */
    struct bt_linear **v_up; /* [heads] kv_rank -> v */
};

/* One decoder layer; what an architecture or layer lacks is NULL. */
struct bt_cpu_layer {
    float *norm_attn, *norm_mlp;           /* [hidden] */
    float *norm_attn_bias, *norm_mlp_bias; /* [hidden] */
    struct bt_linear *qkv;                 /* hidden -> (heads + 2 kv_heads) * head_dim */
    float *qkv_bias;                       /* [(heads + 2 kv_heads) * head_dim] */
    float *q_norm, *k_norm;                /* [head_dim] */
    struct bt_cpu_mla mla;
    struct bt_linear *o; /* heads * head_dim (MLA: heads * v) -> hidden */
    float *o_bias;       /* [hidden] */
    struct bt_cpu_mlp mlp;
    float *up_bias, *down_bias; /* [intermediate], [hidden] */
    struct bt_linear *router;   /* hidden -> experts */
    float *router_bias;         /* [experts] */
    struct bt_cpu_mlp *experts; /* [experts] */
    struct bt_cpu_mlp shared;   /* the expert that every token uses */
};

/* The MTP layer's matrices, in addition to those of a layer. */
struct bt_cpu_mtp_model {
    float *norm_embed, *norm_state, *norm; /* [hidden] */
    struct bt_linear *join;                /* 2 * hidden -> hidden */
};

struct bt_cpu_model {
    struct bt_model_config config;
    uint16_t *embed;             /* [vocab, hidden] bf16 */
    uint16_t *embed_lo;          /* what bf16 could not hold of it, or NULL */
    float *positions;            /* [max_model_len, hidden], or NULL */
    struct bt_cpu_layer *layers; /* bt_model_kv_layers: the MTP layer is the last one */
    struct bt_cpu_mtp_model mtp;
    float *norm, *norm_bias; /* [hidden] */
    struct bt_linear *lm_head;
};

enum bt_cpu_kv { /* what becomes of a row's KV */
                 BT_CPU_KV_STORE,
                 BT_CPU_KV_SKIP, /* its page has it: the row is there for its hidden state */
                 BT_CPU_KV_ZERO
};

struct bt_cpu_token { /* one row of the step's matrices */
    uint32_t id, pos, slot;
    enum bt_cpu_kv kv; /* of latents; others are stored */
};

struct bt_cpu_item {              /* a block of query tokens of one sequence */
    uint32_t first, n, pos, slot; /* first: row of y */
    uint32_t out;                 /* row of the output */
};

struct bt_cpu_kept {    /* why the logits of a row are kept */
    uint32_t prompt;    /* a prompt token's result: its index + 1; 0: none */
    uint32_t slot, pos; /* pos: behind the row */
    uint32_t sample;    /* a sample: index + 1; 0: none */
    bool hidden;        /* its hidden state is kept */
};

#define BT_CPU_EXPERTS_MAX 1024

/* A token's use of an expert. */
struct bt_cpu_use {
    uint32_t expert;
    float weight;
};

/* The rows of a step that DoLa reads (dola.c). Memory is allocated at the first use. */
struct bt_cpu_dola {
    float *x;      /* [rows][BT_ENGINE_DOLA_MAX][hidden rounded up to 16] hidden states */
    uint32_t rows; /* of x */
    void *act;     /* [BT_ENGINE_DOLA_MAX, hidden] */
    float *logits; /* [BT_ENGINE_DOLA_MAX][vocab] */
};

/* Only in an engine with an MTP layer (mtp.c). */
struct bt_cpu_mtp {
    float *states;        /* [rows][hidden] hidden states of the step's, or of the pass's rows */
    const float **before; /* [rows] the hidden state before each row, or NULL */
    bool *again;          /* [max_rows] batch row: the token before it runs again in front of it */
    void *act;            /* [rows, 2 * hidden] */
    float *scratch;       /* [threads][hidden] */
    uint32_t *drafting;   /* [max_slots] which of the call's slots the pass's rows are of */
    float *logits;        /* of a pass; memory is taken when it is first used */
    size_t cap_logits;
};

#define BT_CPU_LOGIT_ROWS 64 /* rows of logits at a time for prompt logprobs */
/* Light loops use other threads from about this many floats on. */
#define BT_CPU_PARALLEL_FLOATS 32768u

struct bt_engine {
    struct bt_host host;
    struct bt_cpu_model model;
    const struct bt_cpu_kernels *k;
    void (*attn)(const struct bt_cpu_attn *a); /* k's, or the one on AMX */
    uint32_t attn_rows;                        /* rows (token, head) of one attention item */
    uint32_t attn_group;                       /* heads of one attention item */
    struct bt_gemm *gemm;
    int threads;
    float *inv_freq; /* [rope_dim / 2] */
    float *rope;     /* [max_model_len][rope_dim]: cosines, sines; filled below rope_n */
    uint32_t rope_n;
    struct bt_cpu_token *tokens; /* [max_rows] */
    struct bt_cpu_item *items;   /* [max_rows] */
    struct bt_cpu_kept *kept;    /* [max_rows] */
    float *x;                    /* [rows, hidden], the residual stream */
    float *y;                    /* [rows, widest product], f32 */
    uint32_t mlp_acts;           /* parts of act in gate, up and down; 2 elsewhere */
    void *a;                     /* act [rows, widest input] */
    void *a2;                    /* act [rows, widest intermediate] */
    float *y2;                   /* [rows, hidden]: a product that was not added to x */
    /* MLA */
    float *q;           /* [rows][heads][kv_rank + rope]: queries against latents */
    float *head_out;    /* [threads or 1][rows][widest product of a head] */
    uint16_t *head_act; /* [heads] acts of [rows, kv_rank] */
    size_t head_act_elems, head_out_floats;
    /* experts */
    struct bt_cpu_use *uses; /* [rows][used] */
    uint32_t *by_expert;     /* [rows * used]: indices into uses, expert by expert */
    uint32_t *first_use;     /* [experts + 1]: where an expert's begin */
    float *sum;              /* [rows, hidden]: of the experts */
    void *ae;                /* act [rows, hidden or q_rank]: input of one expert; MLA: of q_b */
    float *logits;           /* [BT_CPU_LOGIT_ROWS, vocab], once prompt logprobs are asked for */
    struct bt_cpu_dola dola;
    struct bt_cpu_mtp mtp;
    uint8_t *scratch; /* [threads] attention */
    size_t scratch_bytes;
    uint64_t phase_ns[BT_CPU_PHASES], phase_at; /* ended phases; when the current one began */
    bool failed;                                /* oneDNN reported an error: sticky */
};

/* One call of forward on its way. */
struct bt_cpu_step {
    struct bt_engine *e;
    const struct bt_engine_batch *b;
    uint32_t n;       /* rows of the matrices */
    uint32_t n_items; /* attention blocks */
    uint32_t n_prompt_out;
    uint64_t attn_work;
    bool mtp;      /* KV of the MTP layer is computed: the last layer is, for all rows */
    bool dola;     /* some of its sampled rows have early layers */
    bool contrast; /* some rows' hidden states are kept */
    float *states; /* in place of slots: of all rows; such a step has no logits */
};

/* Tokens of one step, with those that the MTP layer lets run again. */
static inline uint32_t bt_cpu_step_rows(const struct bt_engine *e)
{
    const struct bt_engine_info *i = &e->host.info;
    return i->max_rows + (e->model.config.mtp ? i->max_slots : 0);
}

static inline int bt_cpu_threads(const struct bt_engine *e, uint64_t floats)
{
    return floats < BT_CPU_PARALLEL_FLOATS ? 1 : e->threads;
}

/* What the norm must still add to x: the result of the last product, unless that product has added
 * it itself. */
static inline const float *bt_cpu_residual(const struct bt_engine *e)
{
    return bt_gemm_fuses(e->gemm) ? NULL : e->y2;
}

/* forward.c. Ends a phase. A step reads the clock some hundred times, which takes microseconds of
 * its milliseconds. */
void bt_cpu_phase(struct bt_engine *e, enum bt_cpu_phase ended);
/* x += add (NULL: nothing); a = act(norm(x)) of `parts` parts, all rows. bias: LayerNorm's; NULL:
 * RMSNorm. */
void bt_cpu_norm_rows(struct bt_cpu_step *s, const float *add, const float *w, const float *bias,
                      uint32_t parts);
/* x += the product of act (all rows), or y2 = it where products do not add; then bias, or NULL. */
bt_status_t bt_cpu_project(struct bt_cpu_step *s, struct bt_linear *l, const void *act,
                           const float *bias) BT_MUST_CHECK;

/* Cosines and sines of the positions below `end`. */
void bt_cpu_rope_fill(struct bt_engine *e, uint32_t end);
/* x [hidden] = the token's embedding, without a position. */
void bt_cpu_embed(const struct bt_engine *e, uint32_t id, float *x);

/* attention.c. Divides n query tokens of a sequence into blocks for threads: rows from `first` of
 * the step, from `out` of the result. */
void bt_cpu_attn_items(struct bt_cpu_step *s, uint32_t first, uint32_t out, uint32_t n,
                       uint32_t pos, uint32_t slot);
/* a = norm(x) -> queries, and the layer's K and V (MLA: latents) in their pages. ERR_DEVICE. */
bt_status_t bt_cpu_attn_inputs(struct bt_cpu_step *s, uint32_t layer) BT_MUST_CHECK;
/* Only the latents, of a model with MLA: a = norm(x) -> their pages. ERR_DEVICE. */
bt_status_t bt_cpu_attn_latents(struct bt_cpu_step *s, uint32_t layer) BT_MUST_CHECK;
/* Attention over the pages of `layer`, and its output product: x += . ERR_DEVICE. */
bt_status_t bt_cpu_attn_outputs(struct bt_cpu_step *s, uint32_t layer) BT_MUST_CHECK;

/* mlp.c. x += MLP or experts of norm(x). ERR_DEVICE. */
bt_status_t bt_cpu_mlp(struct bt_cpu_step *s, uint32_t layer) BT_MUST_CHECK;

/* dola.c. A step with such rows calls all three, in this order. begin: ERR_NO_MEMORY as false. */
bool bt_cpu_dola_begin(struct bt_cpu_step *s) BT_MUST_CHECK;
/* Keeps what enters `layer` of the sampled rows whose slots name it. */
void bt_cpu_dola_keep(struct bt_cpu_step *s, uint32_t layer);
/* The last layer's logits are in t: chooses each row's early layer. */
bt_status_t bt_cpu_dola_head(struct bt_cpu_step *s, struct bt_host_ticket *t) BT_MUST_CHECK;
void bt_cpu_dola_cleanup(struct bt_engine *e);

/* What the final norm must still add to x. */
static inline const float *bt_cpu_last_residual(const struct bt_cpu_step *s)
{
    return s->mtp ? NULL : bt_cpu_residual(s->e);
}

/* contrast.c. Before the final norm: keeps the hidden states of rows that say so, and leaves those
 * with logits in the step. */
void bt_cpu_contrast_keep(struct bt_cpu_step *s);
/* A bt_host_cosines_fn; arg: the engine. */
bt_status_t bt_cpu_contrast_cosines(void *arg, uint32_t slot, uint32_t pos, const uint32_t *tokens,
                                    uint32_t n, float *cosines) BT_MUST_CHECK;

/* mtp.c. rows: those that a step may have. False: no memory. */
bool bt_cpu_mtp_open(struct bt_engine *e, size_t rows) BT_MUST_CHECK;
void bt_cpu_mtp_cleanup(struct bt_engine *e);
/* Decides for each row of a batch whether the token before it runs again; returns how many do. */
uint32_t bt_cpu_mtp_begin(struct bt_engine *e, const struct bt_engine_batch *b);
/* The last layer is done: hidden states of all rows. x is whole behind that. */
void bt_cpu_mtp_states(struct bt_cpu_step *s);
/* KV of the MTP layer of the step's n rows, and what slots keep of the states. x is lost. */
bt_status_t bt_cpu_mtp_latents(struct bt_cpu_step *s, uint32_t n) BT_MUST_CHECK;
/* Implements draft of engine.h. */
bt_status_t bt_cpu_draft(struct bt_engine *e, const uint32_t *slots, uint32_t n, uint32_t k,
                         struct bt_engine_out *outs, uint32_t *counts) BT_MUST_CHECK;

/* mlp_acts: parts of act in gate, up and down. */
bt_status_t bt_cpu_model_load(struct bt_cpu_model *m, struct bt_gemm *g, uint32_t mlp_acts,
                              const struct bt_engine_config *c, char *err,
                              size_t err_cap) BT_MUST_CHECK;
void bt_cpu_model_cleanup(struct bt_cpu_model *m);

/* Runs a checked batch; logits of the SAMPLE rows go to logits (bt_gemm_rows(n_sample) rows). */
bt_status_t bt_cpu_forward(struct bt_engine *e, const struct bt_engine_batch *b, uint32_t n_tokens,
                           struct bt_host_ticket *t) BT_MUST_CHECK;
/* Runs single tokens of slots without flows; states [n][hidden]: their hidden states, of length
 * 1. */
bt_status_t bt_cpu_states(struct bt_engine *e, const struct bt_engine_batch *b, uint32_t n,
                          float *states) BT_MUST_CHECK;

#endif
