/* The tensors of a decoder model (what bt_model_config accepts), listed once for all back ends:
 * which there are, their names in a checkpoint, and which are joined into one matrix. A back end
 * only stores them. */
#ifndef BT_ENGINE_DECODER_H
#define BT_ENGINE_DECODER_H

#include "common/engine/engine.h"
#include "common/engine/model_config.h"
#include "common/engine/safetensors.h"

#define BT_DECODER_PARTS_MAX 3

typedef enum {
    BT_DECODER_EMBED,          /* matrix [vocab, hidden] */
    BT_DECODER_NORM_ATTN,      /* vector [hidden] of a layer, like all up to DOWN */
    BT_DECODER_NORM_MLP,       /* vector [hidden] */
    BT_DECODER_NORM_ATTN_BIAS, /* vector [hidden]; GPT-2 only, like the other biases of norms */
    BT_DECODER_NORM_MLP_BIAS,
    BT_DECODER_QKV,            /* matrix [(heads + 2 kv_heads) * head_dim, hidden], Q first */
    BT_DECODER_QKV_BIAS,       /* vector of as many */
    BT_DECODER_Q_NORM,         /* vector [head_dim] */
    BT_DECODER_K_NORM,         /* vector [head_dim] */
    BT_DECODER_Q_A,            /* MLA with q_rank: matrix [q_rank, hidden] */
    BT_DECODER_Q_A_NORM,       /* vector [q_rank] */
    BT_DECODER_Q_B,            /* MLA: matrix [heads * head_dim, q_rank or hidden] */
    BT_DECODER_KV_A,           /* MLA: matrix [kv_rank + rope, hidden] */
    BT_DECODER_KV_A_NORM,      /* vector [kv_rank] */
    BT_DECODER_KV_B,           /* MLA: matrix [heads * (nope + v), kv_rank] */
    BT_DECODER_O,              /* matrix [hidden, heads * head_dim; MLA: heads * v] */
    BT_DECODER_O_BIAS,         /* vector [hidden] */
    BT_DECODER_GATE_UP,        /* matrix [2 * intermediate, hidden], gate first */
    BT_DECODER_UP,             /* GPT-2, instead of gate and up: matrix [intermediate, hidden] */
    BT_DECODER_UP_BIAS,        /* vector [intermediate] */
    BT_DECODER_DOWN,           /* matrix [hidden, intermediate] */
    BT_DECODER_DOWN_BIAS,      /* vector [hidden] */
    BT_DECODER_ROUTER,         /* layers with experts: matrix [experts, hidden] */
    BT_DECODER_ROUTER_BIAS,    /* vector [experts] */
    BT_DECODER_EXPERT_GATE_UP, /* matrix [2 * experts.intermediate, hidden] of expert `expert` */
    BT_DECODER_EXPERT_DOWN,    /* matrix [hidden, experts.intermediate] of expert `expert` */
    BT_DECODER_SHARED_GATE_UP, /* matrix [2 * experts.shared, hidden] */
    BT_DECODER_SHARED_DOWN,    /* matrix [hidden, experts.shared] */
    BT_DECODER_MTP_NORM_EMBED, /* MTP layer, in front of its layer's items: vector [hidden] */
    BT_DECODER_MTP_NORM_STATE, /* vector [hidden] */
    BT_DECODER_MTP_JOIN,       /* matrix [hidden, 2 * hidden], the token's embedding first */
    BT_DECODER_MTP_NORM,       /* vector [hidden], before the head */
    BT_DECODER_NORM,           /* vector [hidden] */
    BT_DECODER_NORM_BIAS,
    BT_DECODER_POSITIONS, /* GPT-2: matrix [max_model_len, hidden] */
    BT_DECODER_HEAD,      /* matrix [vocab, hidden]; the embedding's tensor if they are tied */
    BT_DECODER_ITEMS
} bt_decoder_item_t;

/* Tensors [rows_i, cols] to be joined below each other, or vectors [rows_i] where cols is 0. */
struct bt_decoder_tensors {
    bt_decoder_item_t item;
    uint32_t layer;  /* 0 for those of no layer */
    uint32_t expert; /* 0 for those of no expert */
    uint32_t cols;
    uint64_t rows; /* of all parts */
    /* model.quantize is fp8 and this is a matrix that it converts (bt_fp8_quantize in fp8.h, part
     * by part), or random weights are wanted for a matrix that is fp8 in the checkpoint. */
    bool quantize;
    uint32_t n_parts;
    struct bt_decoder_part {
        char name[96];
        uint32_t rows;
        const struct bt_tensor *t; /* of the right shape; NULL: dummy weights are wanted */
        bool transposed;           /* t is [cols, rows]: GPT-2 keeps its matrices so */
    } parts[BT_DECODER_PARTS_MAX];
};

/* Takes one item and copies what it needs after the call. A status that is not OK ends the walk;
 * the back end then writes err. */
typedef bt_status_t (*bt_decoder_sink_fn)(void *arg, const struct bt_decoder_tensors *d);

/* Opens conf->model_dir's weights (load_format dummy: none) and gives every item of c to sink, in
 * the order of a forward pass. ERR_NOT_FOUND, INVALID, UNSUPPORTED, TOO_LARGE: err names file and
 * tensor; else the sink's status. Calls conf->progress. */
bt_status_t bt_decoder_load(const struct bt_engine_config *conf, const struct bt_model_config *c,
                            bt_decoder_sink_fn sink, void *arg, char *err,
                            size_t err_cap) BT_MUST_CHECK;

/* Half the width of the uniform distribution of dummy weights for a product over `cols` inputs. It
 * is about the size of trained weights, so that activations neither vanish nor overflow. */
float bt_decoder_dummy_width(uint32_t cols);

/* Bytes of a parameter in an engine's memory: of a matrix that is fp8, in the checkpoint or by
 * model.quantize; of another one, a norm or the head; of an embedding that is only looked up. */
struct bt_engine_bytes {
    uint32_t fp8, other, embed;
};
/* Whether the model's weights fit into free_bytes of `where` ("GPU", "machine"), before any is
 * read. ERR_TOO_LARGE: err says how much is missing. */
bt_status_t bt_engine_check_fits(const struct bt_engine_config *conf,
                                 const struct bt_model_config *c, struct bt_engine_bytes bytes,
                                 uint64_t free_bytes, const char *where, char *err,
                                 size_t err_cap) BT_MUST_CHECK;
/* Returns whether most matrices of the checkpoint are F16 or F32. Reads headers only; false if
 * there are none. */
bool bt_decoder_exceeds_bf16(const struct bt_engine_config *conf);

/* Checks the part of a configuration that every back end checks; a back end checks its own limits.
 * ERR_CONFIG: err names the key and the allowed values. */
struct bt_engine_limits {
    const char *name; /* of the back end */
    uint32_t max_slots, max_rows;
};
bt_status_t bt_engine_check_config(const struct bt_engine_config *c,
                                   const struct bt_engine_limits *limits, char *err,
                                   size_t err_cap) BT_MUST_CHECK;

#endif
