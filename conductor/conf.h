/* The configuration of baton-conductor: its table of keys, and the checks across several keys. */
#ifndef BT_CONDUCTOR_CONF_H
#define BT_CONDUCTOR_CONF_H

#include "common/conf/conf.h"

/* Values that no operator needs to choose. */
enum {
    /* Requests of a higher class may exceed conductor.max_running by this many while as many of
     * lower classes run. A sixteenth of its default: memory that holds 1,024 requests holds 1,088
     * as well. */
    BT_CONDUCTOR_OVERTAKING_MAX = 64,
    /* A request that failed is planned at most this many times; then it gets 500. A request that
     * has lost two workers is not planned again at all. */
    BT_CONDUCTOR_REPLANS_MAX = 8,
    /* How long a request waits while no worker can take it, before it gets 503. A client shall know
     * within 10 s. Of these, 2 s pass until the silence of a dead worker shows, and 1 s is for the
     * answer. */
    BT_CONDUCTOR_NO_WORKER_MS = 7000,
    /* How long a worker may take to say that a cancelled request has ended there. The kvstore waits
     * as long for its slots (kvstore.reclaim_ms) and then kills the worker. */
    BT_CONDUCTOR_ENDED_MS = 30000
};

/* The bytes of request bodies that the conductor may hold at once, if the largest body has body_max
 * bytes: 64 bodies of the default size, which is the number that may wait to be read. One client
 * may have half of the bytes that the others leave. So with four times the largest body, three
 * clients can send one each. */
static inline uint64_t bt_conductor_body_total(uint64_t body_max)
{
    return BT_MAX((uint64_t)256 << 20, 4 * body_max);
}

/* The blocks of an entry of the index of cached prefixes. Each block has one while all entries fit
 * into 128 MiB. A larger index has one for each 512 tokens, so that a decision about a prompt of
 * 128k tokens takes 0.1 ms in a cluster of 1,000 nodes (tests/tools/bench_sched.c). */
static inline uint32_t bt_conductor_extent_blocks(int64_t index_blocks, int64_t block_tokens)
{
    return index_blocks > 4194304 ? (uint32_t)BT_MAX(512 / block_tokens, 1) : 1;
}

struct bt_conductor_conf {
    struct bt_conf_common common; /* first: bt_conf_main writes through it */
    char *name;
    struct { /* conductor.http.* */
        char *listen;
        uint64_t body_max, answers_max;
        int64_t conns_max;
        char *allowed_origins;
        char *tls;
    } http;
    char *api_keys_file;
    char *answer_form;
    char *access_log;
    int64_t max_model_len;
    int64_t max_running, max_waiting;
    uint64_t queue_timeout_ms, stall_ms, request_timeout_ms, drain_ms;
    uint64_t drain_grace_ms;
    int64_t index_blocks;
    char *policy, *admission, *roles;
    uint64_t ttft_objective_ms, tbt_objective_ms;
    uint64_t role_move_ms, roles_window_ms;
    uint64_t replica_bytes_per_s;
};

/* conductor.http.tls; NULL: plain HTTP. */
static inline const char *bt_conductor_tls(const struct bt_conductor_conf *c)
{
    return c->http.tls != NULL && c->http.tls[0] != '\0' ? c->http.tls : NULL;
}

const struct bt_conf_schema *bt_conductor_schema(void);

#endif
