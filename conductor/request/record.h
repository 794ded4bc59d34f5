/* The stages of a traced request, in the order in which they ended. The request machine writes
 * them, and spans.c makes spans of them. Plain values; pure. */
#ifndef BT_CONDUCTOR_RECORD_H
#define BT_CONDUCTOR_RECORD_H

#include "common/base/base.h"

typedef enum {
    BT_STAGE_QUEUE,   /* it waited for a place, a worker, room or a prefix */
    BT_STAGE_REPLAN,  /* it waited for its next plan after the loss of one: why */
    BT_STAGE_PLAN,    /* a plan was made: why; from: prefill worker, to: decode worker */
    BT_STAGE_PREFILL, /* a worker (from) computed the prompt */
    BT_STAGE_FLOW,    /* KV went from one kvstore to another */
    BT_STAGE_DECODE   /* a worker (from) generated */
} bt_stage_kind_t;

#define BT_STAGE_NAME 64

struct bt_stage {
    bt_stage_kind_t kind;
    uint32_t epoch, choice;    /* of the sequence; its first choice */
    uint64_t start_ns, end_ns; /* the conductor's monotonic clock */
    char from[BT_STAGE_NAME], to[BT_STAGE_NAME];
    char why[96];
    uint32_t tokens; /* PLAN: of the prompt; PREFILL: computed; DECODE: given to the client */
    uint32_t cached_tokens;   /* PLAN: expected; PREFILL: found */
    uint32_t fetch_tokens;    /* PLAN */
    uint64_t bytes, segments; /* FLOW */
    /* Predictions, ms; < 0: none. PLAN has all, PREFILL queue and prefill, DECODE tbt. */
    double queue_ms, prefill_ms, ttft_ms, tbt_ms;
};

#define BT_STAGES_MAX 64

struct bt_record {
    uint32_t n, cap, lost; /* lost: stages beyond BT_STAGES_MAX */
    struct bt_stage *at;
    uint64_t received_ns, ended_ns, first_ns; /* first_ns 0: it had no token */
    const char *finish;                       /* static: stop, length, abort, error */
    int http;                                 /* of an error that the client got; 0: none */
    char error[96];
};

void bt_record_destroy(struct bt_record *rec); /* may be NULL */

#endif
