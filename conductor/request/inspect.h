/* The data that batonctl shows of requests: the open ones, and the reasons for the last plans. */
#ifndef BT_CONDUCTOR_INSPECT_H
#define BT_CONDUCTOR_INSPECT_H

#include "common/kv/key.h"
#include "common/policy/sched/sched.h"

struct bt_requests;
struct bt_session;

struct bt_request_info { /* one sequence; strings are valid during the call */
    const char *id;      /* the client's: "cmpl-..." */
    uint64_t wire_id;
    const char *state;
    uint64_t age_ms;
    uint32_t choice, n;             /* choices [choice, choice + n) of the request */
    uint32_t prompt_tokens, tokens; /* tokens: given to the client, these choices */
    uint32_t epoch, replans;
    const char *prefill, *decode; /* "" without a plan */
};
typedef void (*bt_request_info_fn)(void *arg, const struct bt_request_info *info);
/* Every sequence that is not over yet, oldest request first. */
void bt_requests_each(struct bt_requests *rs, bt_request_info_fn fn, void *arg);
/* How many sequences have a current plan with unfinished work on s. */
uint32_t bt_requests_on_worker(struct bt_requests *rs, const struct bt_session *s);
/* How many sequences have a current plan that uses a daemon of this node. */
uint32_t bt_requests_on_node(struct bt_requests *rs, const char *node);

#define BT_EXPLAIN_CANDIDATES 16
#define BT_EXPLAIN_NAME       64
#define BT_EXPLAIN_SOURCES    BT_KV_SOURCES_MAX

struct bt_explained_outcome { /* what happened; times < 0: not known */
    bool over;
    char error[256]; /* why it failed, "" if it did not */
    uint32_t cached_tokens, tokens, replans;
    double ttft_ms, tbt_ms, queue_ms, prefill_ms;
    double planned_ms, decode_ms;    /* until this plan; from the first token to the last one */
    double flow_from_ms, flow_to_ms; /* of the KV to the decode side, since the request came */
    double hidden_fraction;
    uint64_t kv_bytes;
    bool in_time; /* it ended well and met its objectives */
};

struct bt_explained_candidate {
    char name[BT_EXPLAIN_NAME], node[BT_EXPLAIN_NAME];
    struct bt_sched_candidate c;
};

struct bt_explained_source {
    char name[BT_EXPLAIN_NAME];
    uint32_t blocks; /* blocks of the prefix that this kvstore has */
};

struct bt_explanation {
    char id[BT_EXPLAIN_NAME];
    uint64_t wire_id;
    uint32_t epoch;                   /* of the plan; of a rejected one, the last that was made */
    uint64_t received_ns, planned_ns; /* wall clock */
    char prefill[BT_EXPLAIN_NAME], decode[BT_EXPLAIN_NAME]; /* workers of the plan; "": none */
    uint32_t n_tokens, cached_tokens, n_choices;
    bool planned, both, draining;
    char reason[96];  /* static text of sched: why the roles are apart or together, or why the
                         request was rejected */
    char meaning[96]; /* reason in words */
    char again[96];   /* why the previous plan was given up; "": this is the first */
    /* predicted; < 0: not planned. ttft_ms: of a first plan since the request came, of a later one
     * since it was made, until the next token */
    double ttft_ms, tbt_ms, queue_ms, prefill_ms;
    struct bt_explained_outcome actual;
    uint32_t fetch_tokens; /* of cached_tokens, to be fetched from: */
    uint32_t n_sources;
    struct bt_explained_source sources[BT_EXPLAIN_SOURCES];
    struct bt_kv_key *keys; /* of the prompt's whole blocks; heap */
    uint32_t n_keys, prompt_tokens;
    char tenant[BT_EXPLAIN_NAME]; /* "": none */
    uint32_t n_candidates, n_listed;
    struct bt_explained_candidate candidates[BT_EXPLAIN_CANDIDATES];
};
/* The last plan of a request, by its client's id (with several prompts: the first one's) or by its
 * wire id in hexadecimal. id NULL: the last plan of all requests. NULL: not known, or forgotten.
 * Valid until the loop turns. */
const struct bt_explanation *bt_requests_explain(const struct bt_requests *rs, const char *id);

/* The plan number i of the last ones, the newest first. NULL: no more. Valid until the loop
 * turns. */
const struct bt_explanation *bt_requests_recent(const struct bt_requests *rs, uint32_t i);

#endif
