/* Private to sim/: the state of a run, and the functions by which its parts call each other. Each
 * part is one file. Parts that do not need this state (a node's queues, rows, caches) have a header
 * of their own. */
#ifndef BT_CONDUCTOR_SIM_PRIV_H
#define BT_CONDUCTOR_SIM_PRIV_H

#include "common/policy/sched/copies.h"
#include "common/policy/sched/expected.h"
#include "common/policy/sched/load.h"
#include "common/policy/sched/survival.h"
#include "conductor/sim/cache.h"
#include "conductor/sim/decode.h"
#include "conductor/sim/events.h"
#include "conductor/sim/prefill.h"
#include "conductor/sim/roles.h"
#include "conductor/sim/sim.h"

/* max_tokens that clients set; the real length is not known. */
#define BT_SIM_MAX_NEW 4096
/* Tokens of a step that other prompts wait for, and of a late prompt's step. */
#define BT_SIM_SHORT_CHUNK 2048

typedef enum {
    EV_PREFILL,
    EV_HANDOFF_END,
    EV_DECODE,
    EV_PROMPT,
    EV_FAIL,
    EV_BACK,
    EV_REPLAN,
    EV_AGAIN,
    EV_LOOK,
    EV_COPY
} bt_sim_event_t;

struct bt_sim_live {               /* the additional state of a running request */
    struct bt_sim_job job;         /* its prompt at a prefill node */
    struct bt_sched_prompt prompt; /* ... as the conductor counts it there */
    double fetch_end_ms;
    double begun_ms; /* its computing */
    double ready_ms; /* end of its prefill as the forecast has it */
    double placed_ms, prefilled_ms;
    double last_ms, gap_ms; /* its last token before a failure; the longest such interruption */
    double row_ms;          /* decode time as the forecast has it */
    /* The first token that its plan predicted; it is compared with the real one, as in
     * outcome.c. */
    bool told_plan, alone; /* told_plan: it is compared. alone: no queue was expected */
    double work_ms;
    double step_ms, mixed_ms; /* ... and the gaps */
    bool lands;               /* the first token comes from another node */
    uint32_t told;            /* tokens that the estimate of lengths knows of */
    uint32_t given;           /* tokens given out before it was placed for the last time */
    uint32_t fetch_from, tries;
    uint32_t best_tokens, fetch_tokens;
    uint32_t held;      /* blocks of its prefix at its prefill node, while it computes */
    double read_end_ms; /* time when the part of its prefix from that node's SSD is in memory */
    double handed_ms;   /* time when its KV, except the part that is computed last, is on the decode
                           node */
};

struct bt_sim_link { /* of a node, each direction */
    double send_free_ms, recv_free_ms;
};

struct bt_sim_decode_node {
    struct bt_sim_decode *d; /* NULL: it never decodes */
    uint32_t version;
    uint32_t late_coming;   /* late requests whose KV has not landed */
    uint64_t coming_tokens; /* tokens of the other requests whose KV has not landed */
};

struct bt_sim_node { /* as the conductor knows it */
    struct bt_sched_said said;
    struct bt_sched_own own;
    struct bt_sched_learned learned; /* of first tokens */
};

struct bt_sim_lengths {                 /* the learned lengths of answers */
    struct bt_sched_survival *survival; /* by class of prompt; NULL: all alike, by the following */
    double looked_ms;                   /* time of the last look at the progress of rows */
    double ms, ended, at_ms; /* Faded sums over rows: their time, and how many have ended */
};

struct bt_sim {
    const struct bt_sim_cluster *c;
    const struct bt_sim_trace *t;
    const struct bt_sim_options *o;
    struct bt_sim_result *r;
    const struct bt_sim_request *req; /* the part of the trace */
    struct bt_sim_live *live;
    struct bt_sim_events events;
    double now_ms;
    uint32_t finished;

    uint32_t n, n_p;          /* nodes; those that prefill at first */
    struct bt_sim_prefill *p; /* these arrays: [n] */
    struct bt_sim_decode_node *d;
    struct bt_sim_node *nodes;
    struct bt_sim_link *links;
    double *failed_ms; /* time of the last failure; < 0: never */
    double *back_ms;   /* ... and until when, 0: never */
    struct bt_sim_caches *caches;
    struct bt_sim_roles roles;

    struct bt_sched_copies copies;
    struct { /* the copy on its way; one at a time */
        bool now;
        struct bt_sched_copy what;
        uint32_t of; /* a prefix of this request */
        double begun_ms;
    } copying;

    uint32_t *match; /* blocks of the request at hand, [n] */
    struct bt_sched_worker *workers;
    struct bt_sched_kvstore *kvstores;
    struct bt_sched_snapshot snap;
    struct bt_sched_params params;
    struct bt_sched_expected stages;
    struct bt_sim_lengths lengths;

    uint32_t n_prefilling; /* nodes in that role */
    struct {               /* of the load over time */
        double at_ms;      /* the next one */
        uint32_t arrived, refused, cap;
    } sample;
};

static inline void bt_sim_push(struct bt_sim *s, double at_ms, bt_sim_event_t type, uint32_t id,
                               uint32_t version)
{
    bt_sim_events_push(&s->events, at_ms, (uint32_t)type, id, version);
}

/* The tokens to compute: its prompt, and the tokens that it gave out before its node failed. */
static inline uint32_t bt_sim_tokens_of(const struct bt_sim *s, uint32_t id)
{
    return s->req[id].input + s->live[id].given;
}

static inline uint64_t bt_sim_now_ns(const struct bt_sim *s)
{
    return (uint64_t)(1e6 * s->now_ms);
}

static inline uint32_t bt_sim_output_of(const struct bt_sim *s, uint32_t id)
{
    return s->o->one_token ? 1 : s->req[id].output;
}

static inline const uint32_t *bt_sim_blocks_of(const struct bt_sim *s, uint32_t id)
{
    return s->t->blocks + s->req[id].first;
}

static inline uint32_t bt_sim_full_blocks(const struct bt_sim *s, uint32_t id)
{
    return s->req[id].input / BT_SIM_BLOCK_TOKENS;
}

/* The cached blocks that may be used. At least the last token is always computed, also of tokens
 * given out before a failure. */
static inline uint32_t bt_sim_usable_blocks(const struct bt_sim *s, uint32_t id)
{
    return BT_MIN((bt_sim_tokens_of(s, id) - 1) / BT_SIM_BLOCK_TOKENS, bt_sim_full_blocks(s, id));
}

/* Returns whether this node has failed since the request was placed. */
static inline bool bt_sim_failed_since(const struct bt_sim *s, uint32_t id, uint32_t node)
{
    return s->failed_ms[node] >= s->live[id].placed_ms;
}

/* ---- nodes: nodes.c ---- */
void bt_sim_nodes_init(struct bt_sim *s);
void bt_sim_nodes_cleanup(struct bt_sim *s);
void bt_sim_node_fail(struct bt_sim *s, const struct bt_sim_failure *f);
void bt_sim_node_back(struct bt_sim *s, uint32_t node);
void bt_sim_nodes_look_at_roles(struct bt_sim *s); /* and again a second later */

/* ---- what policies see: show.c ---- */
void bt_sim_show_init(struct bt_sim *s);
void bt_sim_show_node(struct bt_sim *s, uint32_t node);
/* How a node computes the prompts that are counted there, and how long a prompt in time waits. */
struct bt_sched_pace bt_sim_pace(const struct bt_sim *s, uint32_t node);
double bt_sim_queue_ms(const struct bt_sim *s, uint32_t node);
void bt_sim_show(struct bt_sim *s); /* the nodes as they are now */
/* The same, with the places of this request's blocks and its demands. */
struct bt_sched_request bt_sim_show_request(struct bt_sim *s, uint32_t id);
struct bt_sched_request bt_sim_ask(const struct bt_sim *s, uint32_t id);

/* ---- lengths: lengths.c ---- */
void bt_sim_lengths_init(struct bt_sim *s);
void bt_sim_lengths_cleanup(struct bt_sim *s);
/* The mean number of tokens that it is expected to give out; 0: not known. */
double bt_sim_lengths_mean(const struct bt_sim *s, uint32_t id);
void bt_sim_lengths_served(struct bt_sim *s, uint32_t id);
/* Sets the life of rows that the forecast assumes, from the progress of rows. If lengths are
 * learned by class, this happens before the nodes are shown; otherwise with their rows. */
void bt_sim_lengths_look(struct bt_sim *s);
void bt_sim_lengths_look_alike(struct bt_sim *s, double rows);

/* ---- from arrival to end: place.c ---- */
void bt_sim_arrive(struct bt_sim *s, uint32_t id);
/* It is there, or has waited for its prefix: it is placed, refused, or waits. */
void bt_sim_decide(struct bt_sim *s, uint32_t id);
/* Its node failed: any node that can take it gets it, without regard to objectives. */
void bt_sim_replan(struct bt_sim *s, uint32_t id);
/* It leaves the node where it was placed, and is planned again once the failure of `node` is
 * noticed. expected: it has not become a row yet. */
void bt_sim_abandon(struct bt_sim *s, uint32_t id, uint32_t node, bool expected);
/* Ends a request that was placed. */
void bt_sim_finish(struct bt_sim *s, uint32_t id, bt_sim_outcome_t outcome);

/* ---- prompts: compute.c ---- */
/* It is placed: its prompt joins the queue of its node. */
void bt_sim_compute_queue(struct bt_sim *s, uint32_t id);
/* At a prefill node: ends its step, if there is one, and begins the next one. */
void bt_sim_compute_step(struct bt_sim *s, uint32_t node);
/* The conductor no longer counts it among the prompts of its node. */
void bt_sim_compute_forget(struct bt_sim *s, uint32_t id);
/* At a decode node: the fetched blocks have arrived, and its computing begins. */
void bt_sim_compute_beside(struct bt_sim *s, uint32_t id);
void bt_sim_compute_beside_end(struct bt_sim *s, uint32_t id);

/* ---- rows: rows.c ---- */
/* It is placed, or it has ended: the conductor begins or stops counting it at its decode node. */
void bt_sim_row_placed(struct bt_sim *s, uint32_t id);
void bt_sim_row_over(struct bt_sim *s, uint32_t id);
/* It will become a row (sign -1: it will not, or it has become one). */
void bt_sim_row_expect(struct bt_sim *s, uint32_t id, int sign);
/* The prefill gives out a token: the first one, or the one after an interruption. */
void bt_sim_row_first(struct bt_sim *s, uint32_t id);
/* Is that its last one? */
bool bt_sim_row_needless(const struct bt_sim *s, uint32_t id);
/* Its KV is on its decode node: it becomes a row, or it has ended if that token was its last one.
 * False: it has not become a row. */
bool bt_sim_row_begin(struct bt_sim *s, uint32_t id);
void bt_sim_row_handed(struct bt_sim *s, uint32_t id);
void bt_sim_rows_step(struct bt_sim *s, uint32_t node); /* what ends there by now */
void bt_sim_rows_wake(struct bt_sim *s, uint32_t node); /* its next change may be another one */

/* ---- KV between nodes: transfer.c ---- */
void bt_sim_fetch(struct bt_sim *s, uint32_t id, const struct bt_sched_plan *plan);
/* The source of its fetch failed before all blocks had arrived. */
bool bt_sim_fetch_lost(const struct bt_sim *s, uint32_t id);
/* Its KV streams to its decode node from now on, also if it will be refused there. The links' time
 * for it is taken at once, although the computing spreads it out. */
void bt_sim_handoff_begin(struct bt_sim *s, uint32_t id);
/* Its first token is out: the rest of its KV goes to the decode node. */
void bt_sim_handoff(struct bt_sim *s, uint32_t id);
/* Begins a copy of its prefix ahead of need, if one is due. The copy comes after all other
 * transfers on the links and delays none. */
void bt_sim_copy_begin(struct bt_sim *s, uint32_t id);
void bt_sim_copy_end(struct bt_sim *s);

#endif
