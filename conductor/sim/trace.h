/* Traces of requests: Mooncake's JSONL (timestamp ms, input_length, output_length, hash_ids of 512
 * tokens) and Azure's CSV (TIMESTAMP,ContextTokens,GeneratedTokens; nothing is shared there). */
#ifndef BT_CONDUCTOR_SIM_TRACE_H
#define BT_CONDUCTOR_SIM_TRACE_H

#include "common/base/base.h"

#define BT_SIM_BLOCK_TOKENS 512

struct bt_sim_request {
    double at_ms;             /* from the trace's first request on */
    uint32_t input, output;   /* tokens, both at least 1 */
    uint32_t first, n_blocks; /* its block ids in trace.blocks; the last one may be partial */
};

struct bt_sim_trace {
    struct bt_sim_request *requests; /* by rising at_ms */
    uint32_t n;
    uint32_t *blocks; /* ids below n_unique; a prefix has equal ids */
    uint32_t n_blocks, n_unique;
};

/* ERR_NOT_FOUND, ERR_INVALID; err says file, line, fault and remedy. The caller cleans up. */
bt_status_t bt_sim_trace_load(const char *path, struct bt_sim_trace *t, char *err,
                              size_t err_cap) BT_MUST_CHECK;
void bt_sim_trace_cleanup(struct bt_sim_trace *t);

#endif
