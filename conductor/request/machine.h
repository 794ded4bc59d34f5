/* The request machine: a pure core. Events and the time go in, actions come out; nothing here reads
 * a clock, sends a message, waits or knows the protocol. receive.c turns messages into events,
 * send.c actions into messages and callbacks, requests.c gives it the time; in tests a model of the
 * cluster does all three (tests/unit/test_request_lives.c).
 *
 * The caller hands over one event, then takes and applies all actions in order, then hands over the
 * next event. While it applies them a client may cancel its request: that event is handed over at
 * once, and its actions come behind those that are left. An action's pointers are valid until the
 * next event but such a cancel. One thread. */
#ifndef BT_CONDUCTOR_MACHINE_H
#define BT_CONDUCTOR_MACHINE_H

#include "conductor/request/inspect.h"
#include "conductor/request/journal.h"
#include "conductor/request/prompt.h"
#include "conductor/request/record.h"
#include "conductor/request/requests.h"
#include "conductor/view/peer.h"

struct bt_machine;
struct bt_sources; /* sources.h */

/* ---- input ---- */

typedef enum {
    /* A worker says: */
    BT_EV_RECEIVED,     /* the Submit has arrived */
    BT_EV_TOKEN,        /* one token of one choice */
    BT_EV_PROMPT,       /* logprobs of a part of the prompt */
    BT_EV_PREFILL_DONE, /* the prompt is computed; its times */
    BT_EV_SEARCHING,    /* a beam search goes on */
    BT_EV_ENDED, /* the worker holds nothing of (request, epoch) any more; with a status if it gave
                    up */
    /* A kvstore says: */
    BT_EV_RESERVED,     /* its answer to a Reserve */
    BT_EV_FLOW_DONE,    /* all KV has landed there; its times */
    BT_EV_GRANT_FAILED, /* the grant cannot be used */
    BT_EV_REPLICATED,   /* the answer to an ordered copy */
    BT_EV_MESSAGES,     /* number of kinds of messages */
    /* Events from the machine to a sequence: */
    BT_EV_PLACE = BT_EV_MESSAGES, /* it has a place among those that run */
    BT_EV_PLAN,                   /* it may be planned */
    BT_EV_LOST,                   /* a daemon of one of its plans is lost */
    BT_EV_TICK,                   /* time has passed */
    BT_EV_EVENTS
} bt_event_type_t;

/* A message of a daemon. */
struct bt_event {
    bt_event_type_t type;
    struct bt_peer *from;
    uint64_t request; /* a sequence's id; REPLICATED: the order's */
    uint32_t epoch;
    int32_t status;     /* ENDED, RESERVED, GRANT_FAILED: bt_status_t */
    const char *detail; /* ... and why; may be NULL */
    union {
        struct {
            uint32_t choice, offset;           /* offset: since this epoch's submission */
            const struct bt_journal_entry *at; /* epoch and all; finish: bt_token_finish_t */
        } token;
        struct {
            uint32_t first, n; /* positions [first, first + n) of the prompt */
            const struct bt_prompt_logprob *at;
        } prompt;
        struct {
            uint32_t cached_tokens;
            uint64_t start_ns, last_compute_ns; /* the worker's wall clock */
        } prefill_done;
        struct {
            uint64_t first_ns, last_ns; /* the kvstore's wall clock */
            uint64_t bytes, segments;
        } flow_done;
        uint32_t replicated_blocks;
    };
};

void bt_machine_event(struct bt_machine *mc, const struct bt_event *ev, uint64_t now_ns);
/* The session with p is up: it takes requests from now on. */
void bt_machine_up(struct bt_machine *mc, struct bt_peer *p);
/* The session with p is down. Its plans are told one by one: bt_machine_lose. */
void bt_machine_down(struct bt_machine *mc, struct bt_peer *p);
/* Tells one more plan that it has lost a daemon. False: no plan is left to tell. */
bool bt_machine_lose(struct bt_machine *mc, uint64_t now_ns);

/* The same as bt_request_start and bt_request_cancel (request.h). */
struct bt_request *bt_machine_start(struct bt_machine *mc, struct bt_gen_spec *spec,
                                    const struct bt_gen_ops *ops, void *arg, uint64_t now_ns);
void bt_machine_cancel(struct bt_machine *mc, struct bt_request *r, uint64_t now_ns);
/* Every request that is open fails with 503. */
void bt_machine_stop(struct bt_machine *mc, uint64_t now_ns);

/* Time has passed: 50 ms or so since the last call. wall_ns: the wall clock now. */
void bt_machine_tick(struct bt_machine *mc, uint64_t now_ns, uint64_t wall_ns);
/* Deadlines and retries are tens of ms or more: they come half a tick late on average. */
#define BT_MACHINE_TICK_MS 50
/* Frees one request that has ended and whose flights have ended. False: there is none. All actions
 * must have been taken. */
bool bt_machine_free(struct bt_machine *mc);

/* Must the caller make a round? A round begins with bt_machine_round. Then bt_machine_place gives
 * one waiting request its place, bt_machine_plan plans one sequence, and bt_machine_probe tries one
 * sequence that waits for room. Call place and plan until they return false. A caller without time
 * left may stop earlier and make a new round soon; sequences that had no turn come first then. */
bool bt_machine_wants_round(const struct bt_machine *mc);
void bt_machine_round(struct bt_machine *mc, uint64_t now_ns);
bool bt_machine_place(struct bt_machine *mc, uint64_t now_ns);
bool bt_machine_plan(struct bt_machine *mc, uint64_t now_ns);
void bt_machine_probe(struct bt_machine *mc, uint64_t now_ns);

/* The functions of request.h, requests.h and inspect.h with the prefix bt_requests_ call these. */
bool bt_machine_turn_away(struct bt_machine *mc, const struct bt_gen_terms *t, char *why,
                          size_t cap, uint32_t *retry_after_s_p, uint64_t now_ns);
uint32_t bt_machine_prompts_max(const struct bt_machine *mc, bool has_tenant);
void bt_machine_set_sched(struct bt_machine *mc, const struct bt_sched_policy *policy,
                          const struct bt_sched_admission *admission,
                          const struct bt_sched_params *sched);
void bt_machine_drain(struct bt_machine *mc);
bool bt_machine_draining(const struct bt_machine *mc);
const struct bt_requests_config *bt_machine_config(const struct bt_machine *mc);
void bt_machine_stats(const struct bt_machine *mc, struct bt_requests_stats *out);
void bt_machine_each(struct bt_machine *mc, bt_request_info_fn fn, void *arg, uint64_t now_ns);
uint32_t bt_machine_on_worker(struct bt_machine *mc, const struct bt_peer *p);
uint32_t bt_machine_on_node(struct bt_machine *mc, const char *node);
const struct bt_explanation *bt_machine_explain(const struct bt_machine *mc, const char *id);
const struct bt_explanation *bt_machine_recent(const struct bt_machine *mc, uint32_t i);

/* ---- output ---- */

typedef enum {
    BT_ACT_RESERVE,       /* to a kvstore */
    BT_ACT_SUBMIT,        /* to a worker */
    BT_ACT_CANCEL,        /* to a worker: (request, epoch) ends, or one choice of it */
    BT_ACT_RELEASE,       /* to a kvstore: (request, epoch) is over */
    BT_ACT_REPLICATE,     /* to a kvstore: make a prefix resident */
    BT_ACT_CLIENT_PROMPT, /* to the client: as struct bt_gen_ops */
    BT_ACT_CLIENT_DELTA,
    BT_ACT_CLIENT_FINISH,
    BT_ACT_CLIENT_DONE, /* the last one of its request, as is an error */
    BT_ACT_CLIENT_ERROR,
    BT_ACT_TRACED /* the request has ended: its record */
} bt_action_type_t;

typedef enum { BT_PHASES_PREFILL, BT_PHASES_DECODE, BT_PHASES_BOTH } bt_phases_t;

/* The fields that Reserve and Submit of one plan have in common. */
struct bt_action_plan {
    const struct bt_request *r; /* its spec */
    const struct bt_kv_key *keys;
    const uint32_t *tokens; /* [n_tokens]: the prompt, and the tokens generated before this plan */
    uint32_t n_tokens, block_tokens;
    uint64_t left_ms; /* of the request's time; 0: no limit */
};

struct bt_action {
    bt_action_type_t type;
    struct bt_peer *to;   /* messages */
    struct bt_request *r; /* callbacks */
    uint64_t id;          /* of the sequence; REPLICATE: of the order */
    uint32_t epoch;
    union {
        struct {
            struct bt_action_plan plan;
            uint32_t n_tokens;    /* the whole prompt, or whole blocks of its beginning */
            struct bt_peer *peer; /* the sending kvstore; NULL: this one is it */
            bool keep;            /* received blocks stay in the cache */
            bool streams;         /* this is the beginning of a longer prompt */
            double prefill_tokens_per_s;
            struct bt_sources *from; /* owned by the action; NULL: nothing is fetched */
        } reserve;
        struct {
            struct bt_action_plan plan;
            bt_phases_t phases;
            uint32_t choice, n, max_new;
            int32_t priority;
            bool late, prompt_logprobs;
        } submit;
        struct {
            bool one_choice;
            uint32_t choice;
        } cancel;
        struct {
            const struct bt_kv_key *keys;
            uint32_t blocks;
            const char *tenant;
            struct bt_sources *from; /* the action's own */
        } replicate;
        struct {
            struct bt_prompt *tokens; /* the action's own */
        } prompt;
        struct {
            struct bt_gen_delta d;
            struct bt_gen_token t;
            size_t text_at; /* until it is taken: then d.text */
        } delta;            /* d.tokens: the caller's copy of t */
        struct {
            uint32_t choice;
            bt_finish_t reason;
            const char *stop_string;
        } finish;
        struct {
            const struct bt_gen_usage *usage;
        } done;
        struct {
            int http;
            uint32_t retry_after_s;
            size_t text_at; /* until it is taken: then text */
            const char *text;
        } error;
        struct {
            struct bt_record *record; /* the action's own */
        } traced;
    };
};

/* Takes the next action. False: all are taken. The caller applies it (a callback only while the
 * request has a client: bt_request_client) and ends it with bt_action_cleanup. */
bool bt_machine_action(struct bt_machine *mc, struct bt_action *out);
void bt_action_cleanup(struct bt_action *a);
/* The callbacks of the client of r. NULL: it has left, or has had its last callback. last: this is
 * the last callback. */
const struct bt_gen_ops *bt_request_client(struct bt_request *r, void **arg_p, bool last);
/* The spec; it does not change. root: root key of its chain of blocks. */
const struct bt_gen_spec *bt_request_spec(const struct bt_request *r);
const struct bt_kv_key *bt_request_root(const struct bt_request *r);
void *bt_request_env(const struct bt_request *r); /* env_arg of its machine */

/* ---- questions to the caller ---- */

/* Questions about the cluster, answered at once. Every answer is a hint: changes come as events. */
struct bt_machine_env {
    /* The same as bt_view_snapshot, then bt_view_overtake. */
    void (*snapshot)(void *arg, const struct bt_kv_key *keys, uint32_t n_keys, int32_t priority,
                     struct bt_view_snapshot *out);
    void (*facts)(void *arg, const struct bt_peer *p, struct bt_peer_facts *out);
    /* The same as bt_sources_find and bt_sources_spread. */
    void (*sources)(void *arg, const struct bt_view_snapshot *v, const struct bt_sched_plan *plan,
                    const struct bt_kv_key *keys, uint32_t n_keys, uint32_t n,
                    struct bt_sources *out);
    uint32_t (*spread)(void *arg, const struct bt_view_snapshot *v, const struct bt_kv_key *keys,
                       uint32_t n);
    void (*random)(void *arg, void *out, size_t n);
    uint32_t extent_blocks; /* of the index */
};

/* env, tok and metrics outlive it. */
struct bt_machine *bt_machine_create(const struct bt_machine_env *env, void *env_arg,
                                     const struct bt_tokenizer *tok,
                                     const struct bt_requests_config *conf,
                                     struct bt_metrics *metrics, uint64_t now_ns, uint64_t wall_ns);
/* After bt_machine_stop, with all actions applied. */
void bt_machine_destroy(struct bt_machine *mc);

#endif
