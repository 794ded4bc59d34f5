/* The CUDA engine's inside: shared by cuda.c (calls), weights.c (loading), step.c (a forward, with
 * step_priv.h), draw.c (sampling, tickets), draw_check.c (is the device's sampler right?), copy.c
 * (flows), slab.c (pinned memory). */
#ifndef BT_ENGINE_CUDA_PRIV_H
#define BT_ENGINE_CUDA_PRIV_H

#include <cuda_runtime.h>
#include <pthread.h>

#include "common/engine/cuda/attention/attention.h"
#include "common/engine/cuda/experts/experts.h"
#include "common/engine/cuda/gemm/gemm.h"
#include "common/engine/cuda/rows/quant.h"
#include "common/engine/cuda/rows/rows.h"
#include "common/engine/cuda/sample/sample.h"
#include "common/engine/engine.h"
#include "common/engine/host.h"
#include "common/engine/model_config.h"

#define BT_CU_STAGING   4 /* steps whose inputs may be on their way */
#define BT_CU_RESULTS   8 /* samples whose results may be on their way */
#define BT_CU_GRAPH_MAX 512u
#define BT_CU_CLASSES   4    /* of steps, by the drafts of their rows: bt_cu_class_of */
#define BT_CU_DRAFTS    256u /* of a step: about as many as pay */
/* Decode graphs for 1, 2, 4, ... 128, 192, 256, ... tokens. */
#define BT_CU_BUCKETS (8 + (BT_CU_GRAPH_MAX - BT_CU_SKINNY_ROWS) / BT_CU_CLOSE_STEP)

/* Products that wide.h or, with e4m3 weights, wide_e4m3.h may take from cuBLASLt. wide.h takes the
 * first two. */
enum bt_cu_wide { BT_CU_WIDE_QKV, BT_CU_WIDE_GATE_UP, BT_CU_WIDE_O, BT_CU_WIDE_DOWN, BT_CU_WIDES };

/* What wide.h takes: by rows in steps of BT_CU_CLOSE_STEP up to BT_CU_CLOSE_ROWS, and beyond from
 * how many rows on (UINT32_MAX: none). */
struct bt_cu_wides {
    bool at[BT_CU_WIDES][BT_CU_CLOSE_ROWS / BT_CU_CLOSE_STEP + 1];
    uint32_t from[BT_CU_WIDES];
};

struct bt_cu_mlp_weights {
    struct bt_cu_weight in;   /* gate's rows, then up's; GPT-2: up's alone */
    struct bt_cu_weight down; /* [hidden][intermediate] */
};

/* Multi-head latent attention, as in decoder.h. The matrices that read the norm of the residual
 * stream (q_a, or q_b where there is none, and kv_a) are one, in the layer's qkv. */
struct bt_cu_latent_weights {
    struct bt_cu_weight q_b;
    struct bt_cu_weight kv_b; /* f16, as it is multiplied with latents of pages */
    float *q_a_norm, *kv_a_norm;
};

/* Experts one behind the other: the router's n, then the shared expert as `always` more of them
 * (experts/experts.h). */
struct bt_cu_expert_weights {
    struct bt_cu_weight router; /* [n][hidden]; NULL: the layer has one MLP */
    float *bias;                /* [n] of the router, or NULL */
    struct bt_cu_weight in;     /* [n + always][2 intermediate][hidden], as one matrix */
    struct bt_cu_weight down;   /* [n + always][hidden][intermediate] */
};

struct bt_cu_gpt2_weights { /* biases that only GPT-2 has */
    float *norm_attn, *norm_mlp, *o, *up, *down;
};

struct bt_cu_layer { /* device memory; what an architecture lacks is NULL */
    float *norm_attn, *norm_mlp, *qkv_bias, *q_norm, *k_norm;
    struct bt_cu_weight qkv, o;
    struct bt_cu_mlp_weights mlp;
    struct bt_cu_latent_weights latent;
    struct bt_cu_expert_weights experts;
    struct bt_cu_gpt2_weights bias;
};

struct bt_cu_model {
    struct bt_model_config config;
    struct bt_cu_layer *layers;
    struct bt_cu_weight embed, positions, lm_head;
    float *norm, *norm_bias;
    void **memory; /* all of the above, to be freed */
    uint32_t n_memory, cap_memory;
    size_t bytes;
    /* Which matrices are e4m3, in all layers: attention's, those of MLPs, those of experts. */
    bool e4m3_attention, e4m3_mlp, e4m3_experts;
};

struct bt_cu_staging { /* one step's small inputs on their way to the device */
    uint8_t *host;
    cudaEvent_t sent;
    bool used;
};

/* Prompt chunks of a step whose attention is one launch. */
struct bt_cu_group {
    uint32_t item, n_items; /* of the step's items */
    uint32_t span, n_spans; /* of its spans: where KV is e4m3 or latents */
    uint32_t pages;         /* of all its spans; tokens where KV is latents */
};

enum bt_cu_kind { BT_CU_FORWARD, BT_CU_DRAW, BT_CU_HOST_SAMPLE, BT_CU_QUIET };

struct bt_cu_work { /* a ticket that waits for the device */
    struct bt_list link;
    enum bt_cu_kind kind;
    struct bt_host_ticket *t;
    cudaEvent_t start, end;
    uint32_t results; /* place in the ring of pinned results */
    struct bt_host_sample *samples;
    uint32_t n, cap, flow; /* flow: to be freed with the ticket, index + 1 */
    bool drafts;           /* DRAW: rows whose drafts may be accepted are among the samples */
    const uint32_t *mask;  /* HOST_SAMPLE: the caller's, copied */
    uint32_t *mask_copy;
};

/* Memory for the experts of a step; unused if the model has none. */
struct bt_cu_routing {
    struct bt_cu_experts x;
    void *scratch;
    float *scores; /* [rows][experts of the router] */
};

/* DoLa's memory on the device; NULL until a sequence asks for it. step/dola.c. */
struct bt_cu_dola {
    void *rows;    /* [max_slots][BT_ENGINE_DOLA_MAX][hidden] bf16: what enters early layers */
    float *logits; /* [BT_ENGINE_DOLA_MAX][vocab], of one row */
    float *far;    /* [BT_ENGINE_DOLA_MAX], of one row */
    float *early;  /* [max_slots][vocab]: of the layers that were chosen */
};

/* Contrastive search's memory, likewise. step/contrast.c. */
struct bt_cu_contrast {
    float **states;    /* [max_slots] device: [params.hidden_max][hidden], of length 1 */
    float *candidates; /* [BT_HOST_SPARE][hidden] */
    uint32_t *most;    /* [BT_HOST_SPARE]: bt_cu_cosine */
};

/* Activations of a step, on the device. */
struct bt_cu_act {
    float *rope, *x, *qkv, *logits;
    void *a, *q, *o, *gu;        /* a: norm's output and SwiGLU's */
    struct bt_cu_e4m3_rows e4m3; /* rounded: of norm, attention or SwiGLU; none: NULL */
    struct bt_cu_routing experts;
    struct bt_cu_dola dola;
    struct bt_cu_contrast contrast;
};

/* Inputs of the running step, and the buffers that they are written to first. */
struct bt_cu_step_buffers {
    uint8_t *step; /* inputs of the running step */
    size_t step_bytes;
    struct bt_cu_staging staging[BT_CU_STAGING];
    uint32_t next;
};

/* The tokens that each step has drawn from the logits. */
struct bt_cu_results {
    struct bt_cu_draw *draws;  /* pinned [RESULTS][max_batch]: read from there, */
    struct bt_cu_drawn *drawn; /* and written there: a copy would cost a step 10 us */
    int32_t *prompt_rows;      /* device [max_batch]: of prompts' logprobs */
    uint32_t next;
};

/* The sampler's state of each slot. */
struct bt_cu_sampler {
    uint32_t *mask, *host_mask;  /* device [max_batch] rows; pinned [RESULTS], from the first on */
    struct bt_cu_chosen *chosen; /* device [max_batch] */
    struct bt_cu_bias *bias;     /* device [max_slots][BT_CU_BIAS_MAX] */
    uint32_t *known;             /* device: of host.ids; NULL: all ids have a token */
    uint32_t *counts;            /* device [max_slots][vocab], of slots with penalties */
    uint32_t *history;           /* device: tokens on their way into counts */
    float *adjusted;             /* device [max_batch][vocab] */
    uint32_t *pending;           /* [max_slots] last tokens of a slot that only the device knows */
    bool host_only;              /* every token is drawn on the host: see draw_check.c */
    float *host_logits;          /* pinned, grown when a row must be sampled here */
    size_t cap_host_logits;
};

struct bt_engine {
    struct bt_host host; /* slots, tickets, flows; its page memory is not used */
    struct bt_cu_model model;
    int device;
    struct bt_cu_gemm *gemm;
    struct bt_cu_wides wides;
    struct bt_attn *attn;
    struct bt_attn_pool pool;
    cudaStream_t compute, store, load;
    void *kv; /* [page][layer] segments: a page's bytes are its slab block's */
    uint32_t page_rows;
    uint32_t max_batch; /* single tokens and drafts of a step, and rows whose logits are wanted */
    struct {            /* for the threads that pin slabs (slab.c) */
        _Atomic uint64_t asked_ns; /* when a slot, flow or step was asked for */
        _Atomic uint32_t launched; /* steps */
    } use;
    bool deterministic;  /* results do not depend on the other rows of a step */
    bool e4m3;           /* pages; chunks then attend to pages of `wide`: */
    void *wide;          /* one layer of wide_pages f16 pages, written anew for each group */
    uint32_t wide_pages; /* at least those of the longest sequence */
    int32_t *wide_table; /* device: page i is page i */
    struct bt_attn *wide_attn;
    struct bt_cu_latent *latent;   /* step/latent.c; NULL: keys and values of KV heads */
    struct bt_cu_group *groups;    /* of the step that is being enqueued: [max_rows] */
    uint32_t n_groups, group_room; /* group_room: most pages of a group; 0: no limit */
    int32_t *table;                /* [max_slots + BT_HOST_SPARE][max_pages_of_slot] */
    int32_t *last_token;
    struct bt_cu_act act;
    struct bt_cu_step_buffers inputs;
    cudaGraphExec_t graphs[BT_CU_CLASSES][BT_CU_BUCKETS];
    bt_engine_ticket_t logits_of; /* the forward whose logits these are */
    struct bt_list work, idle;    /* struct bt_cu_work */
    struct bt_list waiting;       /* tickets of flows whose items are not on their way */
    struct bt_cu_results results;
    struct bt_cu_sampler sampler;
    cudaEvent_t **load_events; /* [host.n_flows][n_layers], of LOAD flows; NULL: not yet */
    cudaEvent_t layer_done;
    struct bt_list slabs; /* struct bt_cu_slab */
    cudaError_t failed;   /* sticky */
    char fault[160];
};

/* Drafts of a step, over all rows: logits of that many more rows have memory. */
static inline uint32_t bt_cu_most_drafts(uint32_t max_slots, uint32_t max_rows)
{
    return BT_MIN(BT_MIN(max_slots * (BT_ATTN_FRESH - 1), BT_CU_DRAFTS), max_rows);
}
static inline bool bt_cu_has_experts(const struct bt_model_config *c)
{
    bool any = false;
    for (uint32_t i = 0; i < c->layers; i++) {
        any = any || bt_model_has_experts(c, i);
    }
    return any;
}
/* Columns between the products of an MLP; 0: all layers have experts. */
static inline uint32_t bt_cu_mlp_width(const struct bt_model_config *c)
{
    bool any = false;
    for (uint32_t i = 0; i < c->layers; i++) {
        any = any || !bt_model_has_experts(c, i);
    }
    return any ? c->intermediate : 0;
}
/* The width of the widest rows that a layer's products read. */
static inline uint32_t bt_cu_input_width(const struct bt_model_config *c)
{
    return BT_MAX(BT_MAX(c->hidden, bt_cu_mlp_width(c)), c->heads * c->head_dim);
}

/* Notes a failed call; the engine is out of service from then on. */
bt_status_t bt_cu_fail(struct bt_engine *e, cudaError_t err, const char *what);
#define BT_CU_TRY(e, call)                                                                         \
    do {                                                                                           \
        cudaError_t err_ = (call);                                                                 \
        if (err_ != cudaSuccess) {                                                                 \
            return bt_cu_fail(e, err_, #call);                                                     \
        }                                                                                          \
    } while (0)

bt_status_t bt_cu_model_load(struct bt_engine *e, const struct bt_engine_config *c, char *err,
                             size_t err_cap) BT_MUST_CHECK;
void bt_cu_model_cleanup(struct bt_cu_model *m);

/* The model's experts as the kernels see them. */
struct bt_cu_experts bt_cu_experts_of(const struct bt_model_config *c);
bt_status_t bt_cu_step_open(struct bt_engine *e, char *err, size_t err_cap) BT_MUST_CHECK;
void bt_cu_step_close(struct bt_engine *e);
/* Enqueues a checked batch; t learns its samples. */
bt_status_t bt_cu_step_run(struct bt_engine *e, const struct bt_engine_batch *b, uint32_t n_tokens,
                           struct bt_host_ticket *t) BT_MUST_CHECK;

/* Memory that DoLa needs. ERR_NO_MEMORY. */
bt_status_t bt_cu_dola_open(struct bt_engine *e) BT_MUST_CHECK;
void bt_cu_dola_close(struct bt_engine *e);
/* Allocates memory for so many hidden states of a slot, or frees it. ERR_NO_MEMORY. */
bt_status_t bt_cu_contrast_open(struct bt_engine *e, uint32_t slot, uint32_t tokens) BT_MUST_CHECK;
void bt_cu_contrast_drop(struct bt_engine *e, uint32_t slot);
void bt_cu_contrast_close(struct bt_engine *e);
/* Returns whether f's samples include a contrastive search. */
bool bt_cu_contrasts(const struct bt_engine *e, const struct bt_host_ticket *f);
/* Replaces their results in t, whose draws are done, before another forward. mask: as sample's. */
bt_status_t bt_cu_contrast_draw(struct bt_engine *e, const struct bt_host_ticket *f,
                                const uint32_t *mask, struct bt_host_ticket *t) BT_MUST_CHECK;

/* Queues a ticket behind the present work of the stream. */
bt_status_t bt_cu_work_add(struct bt_engine *e, struct bt_host_ticket *t, enum bt_cu_kind kind,
                           cudaStream_t s, struct bt_cu_work **w_p) BT_MUST_CHECK;
/* config is loaded; sizes come from host.info. */
bt_status_t bt_cu_draw_open(struct bt_engine *e) BT_MUST_CHECK;
void bt_cu_draw_close(struct bt_engine *e);
/* Sends the device what a slot's draws need in addition to their parameters: bias, and, with
 * penalties, the counts of its tokens. */
bt_status_t bt_cu_draw_slot(struct bt_engine *e, uint32_t slot, const struct bt_engine_params *p,
                            const uint32_t *tokens, uint32_t n, uint32_t n_prompt) BT_MUST_CHECK;
bt_status_t bt_cu_draw_fork(struct bt_engine *e, uint32_t from, uint32_t to) BT_MUST_CHECK;
bt_status_t bt_cu_draw_accept(struct bt_engine *e, uint32_t slot, uint32_t token) BT_MUST_CHECK;
/* Draws n rows of place `at` of e->results.draws from e->act.logits into e->results.drawn. drafts:
 * some are of rows with drafts; mask: device, or NULL. */
bt_status_t bt_cu_draw_rows(struct bt_engine *e, uint32_t at, uint32_t n, bool drafts,
                            const uint32_t *mask) BT_MUST_CHECK;
/* Before the first slot: sets host_only if the device's draws are not the host's. */
bt_status_t bt_cu_draw_check(struct bt_engine *e) BT_MUST_CHECK;
bt_status_t bt_cu_sample(struct bt_engine *e, bt_engine_ticket_t fwd, const uint32_t *mask,
                         bt_engine_ticket_t *out_p);
/* Finishes the tickets whose work is done; wait: until all of them are. */
void bt_cu_work_advance(struct bt_engine *e, bool wait);

#ifndef BT_CU_SLAB_PIECE
#define BT_CU_SLAB_PIECE (4ull << 20) /* registered at a time: about 1 ms */
#endif
/* slab_open of engine.h; pin: the same, done when it returns. */
void bt_cu_slab_open(struct bt_engine *e, void *mem, uint64_t bytes);
bt_status_t bt_cu_slab_pin(struct bt_engine *e, void *mem, uint64_t bytes) BT_MUST_CHECK;
void bt_cu_slab_close(struct bt_engine *e, void *mem);
void bt_cu_slabs_close(struct bt_engine *e);
/* How many of the bytes at `at` one copy may take. */
uint64_t bt_cu_slab_run(const struct bt_engine *e, const void *at, uint64_t bytes);

bt_status_t bt_cu_flow_open(struct bt_engine *e, int dir, int prio, bt_flow_word_t *word,
                            uint32_t epoch, void (*bell)(void *), void *bell_arg, uint32_t *flow_p);
bt_status_t bt_cu_flow_add(struct bt_engine *e, uint32_t flow, const struct bt_engine_block *b,
                           uint32_t n);
bt_status_t bt_cu_flow_release(struct bt_engine *e, uint32_t flow, uint32_t seq,
                               bt_engine_ticket_t *done_p);
bt_status_t bt_cu_flow_close(struct bt_engine *e, uint32_t flow, bool abort_,
                             bt_engine_ticket_t *quiet_p);
void bt_cu_flows_advance(struct bt_engine *e);
void bt_cu_flow_free(struct bt_engine *e, uint32_t flow);
void bt_cu_flows_close(struct bt_engine *e);
/* The same as bt_host_layer_wait, bt_host_layer_fire and bt_host_step_end, for the device's
 * streams. */
bt_status_t bt_cu_layer_wait(struct bt_engine *e, const struct bt_engine_batch *b,
                             uint32_t layer) BT_MUST_CHECK;
bt_status_t bt_cu_layer_fire(struct bt_engine *e, const struct bt_engine_batch *b,
                             uint32_t layer) BT_MUST_CHECK;
bt_status_t bt_cu_step_end(struct bt_engine *e, const struct bt_engine_batch *b) BT_MUST_CHECK;

#endif
