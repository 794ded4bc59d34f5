/* What a sample is drawn with and what comes of it: plain structs that host and device share. */
#ifndef BT_CUDA_SAMPLE_ARGS_H
#define BT_CUDA_SAMPLE_ARGS_H

#include <stdint.h>

#define BT_CU_SAMPLE_THREADS 1024 /* of a row's block */
#define BT_CU_TOP_MAX        20   /* BT_ENGINE_MAX_TOP */
#define BT_CU_EOS_MAX        16   /* BT_ENGINE_MAX_EOS */
#define BT_CU_BIAS_MAX       1024 /* biased tokens of a slot: what the conductor lets in */
#define BT_CU_COUNT_PROMPT   0x80000000u

struct bt_cu_draw { /* a row's parameters; as struct bt_engine_params, but where it says more */
    uint64_t seed;
    uint32_t position, choice;
    float inv_temperature;            /* 0: greedy */
    float top_p, floor;               /* floor: log(min_p), -inf: off */
    float typical_p;                  /* 1: off */
    float xtc_probability, xtc_floor; /* xtc_floor: log of the threshold */
    float repetition, frequency, presence;
    uint32_t top_k;
    uint32_t row, slot; /* of the logits and the mask; whose tables and last_token */
    int32_t logprobs;
    uint32_t penalties; /* the slot's counts are kept */
    uint32_t n_bias, n_banned;
    uint32_t early;                 /* DoLa: row of the early logits and 1; 0: none */
    uint32_t banned[BT_CU_EOS_MAX]; /* EOS while the sequence is too short for it */
    /* Of a row with drafts: the draws before it and behind it are the row's others. It counts if
     * the token of each of the n_before draws before it is that one's draft. */
    uint32_t drafts, n_before, draft; /* drafts: it is of such a row; draft: BT_CU_NO_DRAFT: none */
};
#define BT_CU_DRAFTS_MAX 31u /* of a row */
#define BT_CU_NO_DRAFT   0xffffffffu

struct bt_cu_chosen { /* what becomes of a draw of a row with drafts is decided behind all draws */
    uint32_t token, bad, draft, n_before;
    uint32_t drafts, slot, penalties;
};

struct bt_cu_drawn {
    uint32_t token, bad, n_top;
    float logprob;
    uint32_t top_id[BT_CU_TOP_MAX];
    float top_logprob[BT_CU_TOP_MAX];
};

struct bt_cu_bias {
    uint32_t id;
    float value;
};

struct bt_cu_sampling {             /* draws, out: may be pinned memory of the host */
    const float *logits;            /* [rows][vocab]; only read */
    const struct bt_cu_draw *draws; /* [n] */
    const float *early;             /* [rows][vocab], of the layers that DoLa has chosen */
    const uint32_t *mask;           /* [rows][vocab / 32 rounded up] bits, or NULL */
    const struct bt_cu_bias *bias;  /* [slots][BT_CU_BIAS_MAX] */
    uint32_t *counts;            /* [slots][vocab]: generated tokens; COUNT_PROMPT: in the prompt */
    float *adjusted;             /* [n][vocab]: scratch */
    struct bt_cu_drawn *out;     /* [n] */
    struct bt_cu_chosen *chosen; /* [n], device; NULL: no draw is of a row with drafts */
    int32_t *last_token;         /* [slots] */
    uint32_t vocab;
    /* Ids that have a token (common/engine/ids.h): bits [vocab / 32 rounded up], how many, and the
     * last one plus 1. NULL: all of vocab. */
    const uint32_t *known;
    uint32_t n_known, end_known;
};

#endif
