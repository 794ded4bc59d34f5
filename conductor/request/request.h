/* The request machine as the front sees it: one generation request in, text deltas out. It plans
 * (sched), submits to workers and kvstores, keeps the token journal, re-plans after failures,
 * detokenizes, cuts at stop strings. Runs on the conductor's loop thread. */
#ifndef BT_CONDUCTOR_REQUEST_H
#define BT_CONDUCTOR_REQUEST_H

#include <stdatomic.h>

#include "common/base/base.h"
#include "common/engine/sampling.h"
#include "common/search/beam.h"
#include "common/spec/spec.h"
#include "common/token/token.h"
#include "common/trace/context.h"

struct bt_requests; /* all requests of this conductor */
struct bt_request;

#define BT_GEN_SALT_BYTES_MAX 256 /* of a request's cache_salt, and of a pin's */

/* The grammar that every answer of a request must follow: its text, which workers compile.
 * Immutable; the specs of all prompts of one body share it. */
struct bt_gen_grammar {
    _Atomic uint32_t refs;
    uint32_t kind; /* enum bt_grammar_kind */
    size_t len;
    char text[]; /* [len] */
};
/* Copies text; one reference. */
struct bt_gen_grammar *bt_gen_grammar_create(uint32_t kind, const char *text, size_t len);
struct bt_gen_grammar *bt_gen_grammar_ref(struct bt_gen_grammar *g); /* NULL: NULL */
void bt_gen_grammar_unref(struct bt_gen_grammar *g);                 /* may be NULL */

struct bt_gen_marker { /* of a reasoning; see Marker in session.proto */
    const char *text;  /* of the style (conductor/reply) */
    bool is_token;
    uint32_t id;
};

#define BT_GEN_THOUGHTS_ENDS 2
#define BT_GEN_FORCE_MAX     32 /* tokens that a worker takes */

struct bt_gen_thoughts { /* a budget of the reasoning */
    uint32_t n_force;    /* 0: there is none */
    uint32_t budget;     /* tokens behind the opening marker */
    bool begun;          /* the prompt has opened the reasoning */
    struct bt_gen_marker open, ends[BT_GEN_THOUGHTS_ENDS];
    uint32_t n_ends;
    const uint32_t *force; /* [n_force] what ends it; the front's, which outlives the spec */
};

struct bt_gen_spec { /* the front fills it; bt_request_start takes ownership of the heap members */
    struct bt_tokens prompt; /* n >= 1 */
    uint32_t max_tokens;     /* already cut to the model's context; 0 only with prompt_logprobs */
    struct bt_engine_params
        sampling;                   /* eos: filled by the front from the model unless ignore_eos */
    bt_spec_kind_t speculation;     /* where drafts may come from */
    uint32_t n;                     /* choices, 1..16, numbered from 0: one prefill, then forks */
    struct bt_beam_conf beams;      /* a beam search, if it has a width (at least n): its n best
                                       answers are the choices. Only these are read: width,
                                       length_penalty, stop */
    struct bt_gen_grammar *grammar; /* a reference; NULL: the answer is free */
    struct bt_gen_thoughts thoughts;
    struct bt_tokens prediction; /* what much of the answer is expected to be; may be empty */
    char **stop;                 /* NULL-terminated list of stop strings, or NULL */
    bool include_stop;           /* keep the stop string in the text */
    bool skip_special;           /* leave special tokens out of the text */
    const struct bt_tokens
        *kept;     /* ... except these; NULL: no exceptions. The front owns them, and outlives it */
    bool unseeded; /* the client gave no seed: the machine draws one, kept over re-plans */
    bool no_cache; /* neither reads nor keeps cached blocks */
    bool prompt_logprobs; /* on_prompt is wanted: computed without reading cache */
    uint32_t prompt_top;  /* ... with this many of the most likely tokens, 0 to 20 */
    char *tenant;         /* heap; separates the caches of tenants; NULL: shared */
    char *cache_salt;     /* at most BT_GEN_SALT_BYTES_MAX bytes; NULL: shared */
    int32_t priority;     /* smaller goes first, as vLLM's field of that name; above 32766 it counts
                             as 32766 */
    double weight;        /* the tenant's share against others'; 0 counts as 1 */
    char *id;             /* "cmpl-..." for logs; heap */
    struct bt_trace_context trace;
    const char *operation;          /* the kind of request in traces, static; NULL: a completion */
    uint64_t received_ns;           /* bt_mono_ns at the body's last byte */
    uint64_t timeout_ms;            /* 0: none */
    double slo_ttft_ms, slo_tbt_ms; /* objectives of its own; 0: the configuration's */
};

struct bt_gen_token {
    uint32_t id;
    float logprob;
    uint32_t rank; /* of a prompt's token among all, from 1; 0: not known */
    uint32_t n_top;
    const uint32_t *top_id;
    const float *top_logprob;
    uint32_t
        text_offset; /* of this token's first byte in the choice's text so far (0 = first byte) */
};

/* One emission: text that became final, and the tokens it came from. Text may be empty (a token
 * whose bytes are not yet whole characters, or held back because a stop string may begin), tokens
 * may be none. */
struct bt_gen_delta {
    uint32_t choice;
    const char *text;
    size_t text_len;
    const struct bt_gen_token *tokens;
    size_t n_tokens;
};

typedef enum { BT_FINISH_STOP, BT_FINISH_LENGTH } bt_finish_t;

struct bt_gen_plan { /* predictions of the first plan; "" and < 0: there was none */
    char prefill[64], decode[64], source[64]; /* source: kvstore that sends a prefix */
    char reason[32];
    uint32_t cached_tokens, fetch_tokens;
    double queue_ms, prefill_ms, ttft_ms, tbt_ms;
};

struct bt_gen_usage {
    uint32_t prompt_tokens, completion_tokens, cached_tokens;
    uint32_t predicted_tokens, accepted_tokens; /* of all choices' predictions; that came true */
    /* where the time went, for the `timings` object and the demo; ms, bytes, counts; < 0: not known
     */
    double ttft_ms, queue_ms, prefill_ms, decode_ms;
    double tbt_ms; /* mean of the longest tenth of the gaps; of several choices the largest */
    uint64_t kv_bytes, kv_segments; /* moved between nodes for this request */
    double hidden_fraction; /* 1 - (last compute -> last segment landed) / (first -> last landed) */
    uint32_t replans;
    char again[96];               /* why it was planned again, the last time; "": it was not */
    char prefill[64], decode[64]; /* workers of the last plan */
    struct bt_gen_plan plan;
};

struct bt_gen_ops {
    /* Called once, before the first delta, if spec.prompt_logprobs: the prompt's tokens, each with
     * its logprob given the tokens before it. The first one's logprob is NaN, and it has no top.
     * May be NULL otherwise. text_offset is not set. tokens are valid during the call. */
    void (*on_prompt)(void *arg, const struct bt_gen_token *tokens, size_t n);
    void (*on_delta)(void *arg, const struct bt_gen_delta *d);
    /* stop_string: which one matched, NULL for EOS or length. */
    void (*on_finish)(void *arg, uint32_t choice, bt_finish_t reason, const char *stop_string);
    /* All choices are finished. The request is freed when this returns. */
    void (*on_done)(void *arg, const struct bt_gen_usage *u);
    /* The request failed, before or after the first delta. It is freed when this returns. http:
     * 400, 429, 500, 503, 504. retry_after_s: 0: none. Exactly one of on_done and on_error is
     * called. */
    void (*on_error)(void *arg, int http, const char *message, uint32_t retry_after_s);
};

/* Starts a request. Never fails at once: errors come through on_error, from the loop, later. */
struct bt_request *bt_request_start(struct bt_requests *rs, struct bt_gen_spec *spec,
                                    const struct bt_gen_ops *ops, void *arg);
struct bt_gen_terms { /* the part of a request that is known before its body is parsed */
    uint64_t received_ns;
    const char *tenant;  /* NULL: none */
    bool knows_priority; /* false: its body may have one */
    int32_t priority;
    double slo_ttft_ms, slo_tbt_ms; /* 0: the configured ones */
};
/* Returns whether the request would be refused (429) whatever its prompt is: because the queue is
 * full, or because even the shortest prompt would miss an objective. Then why and retry_after_s_p
 * are the answer, and the request counts as refused. */
bool bt_requests_turn_away(struct bt_requests *rs, const struct bt_gen_terms *t, char *why,
                           size_t cap, uint32_t *retry_after_s_p);
/* The number of requests of one tenant (or without tenants) that can exist at once; further ones
 * are always refused. */
uint32_t bt_requests_prompts_max(const struct bt_requests *rs, bool has_tenant);
/* The plan (known before the first delta), and what happened (known with on_done). */
const struct bt_gen_usage *bt_request_usage(const struct bt_request *r);
/* The client has left: frees the request. There are no further callbacks. */
void bt_request_cancel(struct bt_request *r);
/* Decides whether a request with this header (NULL: it has none) is traced. */
void bt_requests_trace(const struct bt_requests *rs, const char *traceparent,
                       struct bt_trace_context *out);
/* Returns whether a request can be served now. If not, *why_p is the reason (static text). */
bool bt_requests_serving(const struct bt_requests *rs, const char **why_p);

#endif
