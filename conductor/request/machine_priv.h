/* Inside the request machine (machine.h): a request, its sequences, their flights (one a plan), and
 * all requests together. Pure: the time is an argument, or mc->now_ns, the time of the event under
 * way. */
#ifndef BT_CONDUCTOR_MACHINE_PRIV_H
#define BT_CONDUCTOR_MACHINE_PRIV_H

#include "common/base/list.h"
#include "common/base/map.h"
#include "common/engine/sampling.h"
#include "common/policy/sched/copies.h"
#include "common/policy/sched/expected.h"
#include "common/policy/sched/share.h"
#include "common/policy/sched/survival.h"
#include "common/spec/predict.h"
#include "conductor/request/emit.h"
#include "conductor/request/inspect.h"
#include "conductor/request/journal.h"
#include "conductor/request/machine.h"
#include "conductor/request/prompt.h"
#include "conductor/request/sources.h"

typedef enum {
    BT_SEQ_WAITING,    /* waits for one of max_running */
    BT_SEQ_PLANNING,   /* wants a plan; may have to wait for a worker or for room */
    BT_SEQ_PREFILLING, /* submitted, no token of this epoch yet */
    BT_SEQ_DECODING,   /* tokens come */
    BT_SEQ_SETTLING,   /* the client has all its tokens; the numbers of usage are on their way */
    BT_SEQ_FINISHING,  /* the client has its end; workers are still ending */
    BT_SEQ_STATES
} bt_sequence_state_t;

struct bt_flight_use {   /* a flight's use of one peer */
    struct bt_list link; /* in the peer's own_flights */
    struct bt_flight *f;
};

/* One plan that was submitted: (wire id, epoch). After a replan it still exists until the workers
 * have said Ended (or their sessions broke) and both kvstores were told to release. */
struct bt_flight {
    struct bt_list link;
    struct bt_sequence *sequence;
    uint32_t epoch;
    bool both, same_kv;
    /* NULL: its session broke, or (decode, kv_decode) nothing is to be generated */
    struct bt_peer *prefill, *decode; /* the same one if both */
    struct bt_peer *kv_prefill, *kv_decode;
    struct bt_flight_use uses[4]; /* of these, until they are NULL */
    bool prefill_ended, decode_ended;
    bool prefill_cancelled, decode_cancelled;
    bool prefill_released, decode_released; /* the kvstores' grants */
    bool got_first, got_decode;             /* a token of the prefill's, of the decode's side */
    bool flow_done;
    uint8_t reserved;    /* kvstores that have granted the Reserve */
    uint64_t working[2]; /* incarnations of workers that have received it and not ended, or 0 */
    bool killed; /* a worker's death was counted; the loss of its node's other worker is not counted
                    again */
    bool no_room; /* a daemon had no room for it, so its end frees no room */
    enum { BT_FLIGHT_ACTIVE, BT_FLIGHT_SOFT, BT_FLIGHT_HARD } wind; /* see flight.c */
    bool decode_useless;           /* no more tokens are wanted: cancel the decode worker at once */
    uint64_t wind_ns;              /* when the flight became inactive */
    uint32_t own_rows;             /* counted at decode's session until it has ended */
    uint64_t own_tokens;           /* counted at prefill's session until its PrefillDone */
    struct bt_sched_prompt prompt; /* in prefill's session's own until then */
    uint64_t own_kv;               /* counted at decode's session until it has ended */
    struct bt_sched_plan plan;     /* its indices belong to an old snapshot */
    uint64_t planned_ns;
    bool expected, decoding; /* in the forecast; counted at decode's own.decoding */
    bool late_coming;        /* counted at decode's own.late */
    double expect_ready_ms;  /* the time of readiness that the forecast has */
    double first_token_ms;   /* first token after planned_ns, only of a first plan; 0: not yet */
    struct {                 /* tokens given to the client */
        uint64_t from_ns, to_ns;
        uint32_t tokens;
    } given;
};

#define BT_SEQ_AVOID_MAX   16
#define BT_SEQ_CHOICES_MAX BT_ENGINE_CHOICES_MAX
#define BT_SEQ_DEATHS_MAX  2 /* a request that has killed two workers is not tried on a third */

/* One choice: what its client has been given. */
struct bt_choice {
    struct bt_journal journal;
    struct bt_emit emit;
    struct bt_spec_predict predict; /* its place in the prediction */
    bool finished;
    uint32_t told;    /* tokens that the estimate of lengths knows of */
    uint64_t last_ns; /* of its last token */
    float *gaps_ms;   /* between its tokens, n_gaps of them */
    uint32_t n_gaps, gaps_cap;
};

/* A daemon that plans of the sequence avoid while others are eligible. */
struct bt_sequence_avoid {
    uint64_t incarnation, full_until_ns; /* full_until_ns: it had no room, avoid it till then */
    bool failed;                         /* ... or it failed the sequence */
};

/* The unit of states.def, of epochs and of plans; daemons know it by its id. A request begins as
 * one sequence that carries all its choices (one prefill, forks). If that fails after the first
 * token, each unfinished choice goes on in a sequence of its own: their tokens differ, so their
 * prompts differ, and epochs of one id cannot run side by side. */
struct bt_sequence {
    struct bt_list link;  /* r->sequences */
    struct bt_list queue; /* mc->queues.waiting, mc->queues.planning or mc->queues.starved */
    struct bt_request *r;
    uint64_t id;
    bt_sequence_state_t state;
    uint32_t first, n; /* choices [first, first + n) */

    struct bt_kv_key *keys; /* of the full blocks of prompt + journal */
    uint32_t n_keys, keys_cap;
    uint32_t *tokens; /* scratch: prompt + journal of the current plan */
    uint32_t n_tokens, tokens_cap;

    uint32_t epoch;
    struct bt_list flights;
    struct bt_flight *flight; /* of the current epoch, NULL without one */
    bool want_flow;           /* the numbers of usage wait for FlowDone */

    struct bt_sequence_avoid avoid[BT_SEQ_AVOID_MAX];
    uint32_t n_avoid, replans;
    uint32_t put_offs;  /* refusals for lack of room since its last token */
    bool demanded;      /* it is in mc->expect.demand */
    bool let_in;        /* ... and in mc->expect.let_in and mc->expect.decodes */
    bool late_demanded; /* counted in mc->expect.late_demand */
    bool follows; /* it waits for a prefix that another request computes, and counts as late */
    bool starved; /* a daemon had no room for it; it is in mc->queues.starved unless it is the probe
                   */
    uint32_t charged; /* tokens that the tenant was charged for the plan; given back if it finds no
                         room */
    uint64_t queued_ns;    /* when its wait for a place or for room began; 0: it does not wait */
    uint64_t plan_at_ns;   /* not before */
    uint64_t no_worker_ns; /* when the last worker became unavailable; 0: one can take it */
    uint64_t progress_ns;  /* its last event */
    uint64_t excused_ns;   /* watch.c: the last time when it waited for a reason that no prediction
                              covers */
    /* watch.c: was planned again because it made no progress, and has made none since */
    bool stuck;
    uint64_t settle_ns;
    uint64_t stay_ns;     /* set when no other daemon could take it: the next try is not earlier */
    uint64_t round;       /* of the queues, in which it had its turn last */
    struct {              /* record.c: its wait for a plan */
        uint64_t from_ns; /* 0: it has one */
        bool again;
        char why[96];
    } wait;
};

struct bt_request {
    struct bt_list link; /* mc->all, mc->over */
    struct bt_machine *mc;
    struct bt_gen_spec spec;
    const struct bt_gen_ops *ops; /* NULL: no further callbacks */
    bool ended;                   /* the last callback is queued, or the client has left */
    void *arg;
    int refuse;       /* a BT_REJECT_* that the loop reports; -1: none */
    bool counted;     /* holds one of max_running, or of max_overtaking */
    bool late;        /* ... and is served late (mc->queues.n_late) */
    uint64_t arrival; /* order of bt_request_start */
    uint64_t tenant;  /* hash of its name */
    struct bt_kv_key root;

    struct bt_list sequences;
    struct bt_choice choices[BT_SEQ_CHOICES_MAX];
    uint32_t n_unfinished;
    struct bt_prompt *prompt; /* logprobs of the prompt that are wanted and not complete: tokens
                                 wait for them; else NULL */
    uint64_t killed[BT_SEQ_DEATHS_MAX]; /* incarnations of workers that were lost while they had
                                           this request */
    uint32_t n_killed;

    struct bt_gen_usage usage;
    int success;                /* BT_SUCCESS_*: label of its end */
    uint64_t first_ns, last_ns; /* of the first and the last token */
    bool have_prefill_done;
    uint64_t last_compute_ns; /* wall clock, PrefillDone */
    uint64_t flow_first_ns, flow_last_ns;
    struct bt_record *record; /* NULL: it is not traced, or its record is given out */
};

/* Bounded label values of metrics. */
enum {
    BT_REJECT_QUEUE_FULL,
    BT_REJECT_DRAINING,
    BT_REJECT_NO_WORKER,
    BT_REJECT_TOO_LARGE,
    BT_REJECT_OVERLOADED,
    BT_REJECT_NO_ROOM,
    BT_REJECT_INVALID,
    BT_REJECT_DEADLINE,
    BT_REJECT_FAILED,
    BT_REJECT_REASONS
};
enum { BT_SUCCESS_STOP, BT_SUCCESS_LENGTH, BT_SUCCESS_ABORT, BT_SUCCESS_ERROR, BT_SUCCESS_REASONS };
extern const char *const bt_success_names[BT_SUCCESS_REASONS]; /* metrics.c */

/* The requests that wait and those that run (queue.c). */
struct bt_queues {
    struct bt_list waiting, planning, starved;
    uint32_t n_waiting, n_active, n_starved;
    uint32_t n_late;           /* of n_active: served late */
    struct bt_classes running; /* n_active by class */
    struct bt_sched_fair fair; /* between tenants, for a place among the running */
    struct bt_sequence *probe; /* the one starved sequence that is being tried, or NULL */
    uint64_t probe_at_ns;      /* next try, unless a release comes earlier */
    uint32_t probe_misses;
    bool look;      /* something has changed, so a round is needed */
    uint64_t round; /* number of the current round */
};

/* The expectations for admission (expect.c). */
struct bt_expect {
    struct bt_sched_survival survival;
    struct bt_sched_expected stages;
    uint64_t learned_ns;
};

struct bt_machine_metrics {
    struct bt_metric *ttft, *queue, *itl, *e2e, *finished[BT_SUCCESS_REASONS], *running, *waiting,
        *prompt, *generation;
    struct bt_metric *tpot, *prefill, *decode, *inference; /* times of a request */
    struct bt_metric *prompt_length, *answer_length, *longest_answer, *max_tokens, *choices;
    struct bt_metric *ttft_error, *tbt_error;
    struct bt_metric *in_time;
    struct bt_metric *replanned, *stuck, *moved, *stale, *ended_late, *cached;
    struct bt_metric *fetch_plans, *fetch_tokens, *places_short;
    struct bt_metric *plan[2][BT_SCHED_REASONS], *rejected[BT_REJECT_REASONS];
};

/* Actions that were not taken yet, and their texts (actions.c). */
struct bt_actions {
    struct bt_action *list;
    size_t first, n, cap; /* list[first..n) */
    struct bt_buf text;   /* texts of all actions since the list was empty */
};

/* The verdict of admission on the shortest prompt of a class with these objectives
 * (turn_away.c). */
struct bt_gate {
    int32_t priority;
    double slo_ttft_ms, slo_tbt_ms, waited_ms;
    uint64_t asked_ns; /* 0: not yet */
    bool refuses;
    struct bt_sched_reject rej;
};

struct bt_machine {
    const struct bt_machine_env *env;
    void *env_arg;
    const struct bt_tokenizer *tok;
    struct bt_requests_config conf;
    uint8_t *secret;
    char *labels; /* model_name="..." */
    struct bt_metrics *metrics;
    struct bt_machine_metrics m;
    uint64_t now_ns;          /* of the event under way */
    uint64_t wall_ns;         /* the wall clock at the last tick, whose time was ... */
    uint64_t ticked_ns;       /* ... this */
    uint64_t awake_ns;        /* when ticks began to come in time */
    struct bt_map *map;       /* id -> bt_sequence */
    struct bt_list all, over; /* requests; over: to be freed */
    struct bt_list lost;      /* peers that went down and have own_flights */
    struct bt_queues queues;
    struct bt_actions actions;
    struct bt_expect expect;
    struct { /* Smoothed rate of requests that end. ended: number since the rate was last updated.
              */
        double ends_per_s;
        uint32_t ended;
        uint64_t from_ns;
    } rate;
    struct bt_gate gates[4];
    uint32_t next_gate;
    uint64_t total, replanned;
    struct bt_requests_stats done; /* what is counted of requests that have ended */
    uint64_t decisions;            /* asked of the policy so far */
    struct bt_explain_ring *explained;
    uint32_t moves_left; /* moves that this tick may still make: a drained node is emptied step by
                            step */
    bool draining;
    uint64_t short_log_ns; /* time of the last log line about too few slots; 0: never */
    struct bt_replicate {
        struct bt_sched_copies copies;
        const struct bt_peer *to; /* the kvstore that makes a copy, NULL: none; one at a time */
        uint64_t id, ordered_ns;  /* of the order */
        struct bt_metric *started, *blocks;
    } replicate; /* replicate.c */
};

struct bt_explain_ring; /* inspect.c */

/* The input of a state's function. */
struct bt_sequence_input {
    struct bt_peer *peer;      /* the daemon that sent it or was lost */
    struct bt_flight *flight;  /* ENDED, LOST: the plan concerned */
    const struct bt_event *ev; /* the present message of a daemon; otherwise NULL */
    uint64_t now_ns;
};

/* ---- machine.c ---- */
static inline struct bt_peer_facts bt_machine_facts(const struct bt_machine *mc,
                                                    const struct bt_peer *p)
{
    struct bt_peer_facts f;
    mc->env->facts(mc->env_arg, p, &f);
    return f;
}
/* The wall clock now, as far as it has not been set since the last tick. */
static inline uint64_t bt_machine_wall_ns(const struct bt_machine *mc)
{
    return mc->wall_ns + (mc->now_ns - mc->ticked_ns);
}
void bt_machine_register(struct bt_machine *mc); /* metrics.c */

/* ---- actions.c ---- */
/* Adds an action behind all others. It is zeroed except for its type, and valid until the next one
 * is added. */
struct bt_action *bt_action_add(struct bt_machine *mc, bt_action_type_t type);
/* The same, but returns NULL if the client has left. */
struct bt_action *bt_action_client(struct bt_request *r, bt_action_type_t type);
/* Keeps a text for an action; returns where, for its text_at. */
size_t bt_action_text(struct bt_machine *mc, const char *text);

/* ---- sequence.c: the states ---- */
struct bt_sequence *bt_sequence_create(struct bt_request *r, uint32_t first, uint32_t n);
void bt_sequence_destroy(struct bt_sequence *sq);
void bt_sequence_event(struct bt_sequence *sq, bt_event_type_t ev,
                       const struct bt_sequence_input *in);
void bt_sequence_set_state(struct bt_sequence *sq, bt_sequence_state_t s);
/* Every flight is wound up; the sequence only waits for their ends. */
void bt_sequence_finishing(struct bt_sequence *sq, bool hard, uint64_t now_ns);
/* A choice's last token has been delivered: when it was the sequence's last one, it settles. */
void bt_sequence_choice_finished(struct bt_sequence *sq, uint32_t choice, bool by_worker,
                                 uint64_t now_ns);
const char *bt_sequence_state_name(bt_sequence_state_t s);
/* Tokens of the answer so far, which the next plan continues. A beam search begins again. */
static inline uint32_t bt_sequence_have(const struct bt_sequence *sq)
{
    const struct bt_request *r = sq->r;
    return r->spec.beams.width > 0 ? 0 : r->choices[sq->first].journal.n;
}
/* Rows that its workers compute at once. */
static inline uint32_t bt_sequence_rows(const struct bt_sequence *sq)
{
    return sq->r->spec.beams.width > 0 ? sq->r->spec.beams.width : sq->n;
}
static inline bool bt_sequence_running(const struct bt_sequence *sq)
{
    return sq->state == BT_SEQ_PREFILLING || sq->state == BT_SEQ_DECODING;
}

/* ---- repair.c: failure is re-planning ---- */
void bt_sequence_avoid(struct bt_sequence *sq, const struct bt_peer *p);
/* Milliseconds between the replans-th failure of a request (from 1) and its next plan. The pause
 * doubles up to a second, so that a network that fails for some seconds does not use up a request's
 * tries. lost: a daemon was lost; its node's other sessions break at about the same time. */
uint32_t bt_replan_delay_ms(bool lost, uint32_t replans);
/* Ends the current plan, and plans again or fails the request. lost: the daemon that was lost or
 * hangs; if it is a worker that had begun with the request, the request may have killed it, and
 * this is counted. NULL: no daemon was lost. */
void bt_sequence_replan(struct bt_sequence *sq, const struct bt_peer *lost, const char *why,
                        uint64_t now_ns);
/* A daemon of plan f, which the sequence has left, was lost. True: it counts as killed by the
 * request, because f was left without a death. */
bool bt_sequence_count_late(struct bt_sequence *sq, struct bt_flight *f,
                            const struct bt_peer *lost);
/* ... then fails the request if that is one death too many and no token has come since. */
void bt_sequence_died_late(struct bt_sequence *sq);
/* A worker or kvstore (p, may be NULL) refused the request or gave it up with this status. */
void bt_sequence_repair(struct bt_sequence *sq, const struct bt_peer *p, int32_t status,
                        const char *detail, uint64_t now_ns);
/* Plans the sequence again because a daemon that it needs is leaving, if others can take it. This
 * does not count as a failure. */
void bt_sequence_move(struct bt_sequence *sq, uint64_t now_ns);
/* Ends the sequence's plan, if it has one: it is to be planned. */
void bt_sequence_leave_plan(struct bt_sequence *sq, uint64_t now_ns);
/* Returns whether each choice will go on in a sequence of its own when the sequence is planned
 * again. */
bool bt_sequence_splits(const struct bt_sequence *sq);
/* Fails a sequence that has waited for a place or for room for too long. */
bool bt_sequence_queued_too_long(struct bt_sequence *sq, uint64_t now_ns);

/* ---- watch.c ---- */
/* The worker that should send the next message. NULL: no worker has the sequence. */
struct bt_peer *bt_sequence_due(const struct bt_sequence *sq);
/* Plans a running sequence again if nothing has moved it for too long. The second time it fails the
 * request. True: it did one of the two. */
bool bt_sequence_watch(struct bt_sequence *sq, uint64_t now_ns);

/* ---- request.c: towards the client ---- */
/* Puts a worker's token into the choice's journal. Returns what bt_journal_put returns, or
 * ERR_INVALID for a token that the tokenizer does not have, or ERR_MISMATCH if a beam search that
 * began again has found another token than the client was given. */
bt_status_t bt_request_put(struct bt_request *r, const struct bt_event *ev) BT_MUST_CHECK;
/* Gives the client the next tokens of the choice's journal. If the prompt's logprobs are wanted,
 * the tokens wait until those are complete. */
void bt_request_deliver(struct bt_sequence *sq, uint32_t choice, uint64_t now_ns);
/* Ends a request that wanted only the prompt's logprobs. */
void bt_request_no_tokens(struct bt_sequence *sq, uint64_t now_ns);
/* Ends a request with an error for the client. */
void bt_request_fail(struct bt_request *r, int reject, int http, uint32_t retry_after_s,
                     const char *why);
void bt_request_prefill_done(struct bt_request *r, const struct bt_event *ev, uint64_t now_ns);
/* Returns whether the times in its usage meet its objectives. Without objectives: true. */
bool bt_request_in_time(const struct bt_request *r);
void bt_request_flow_done(struct bt_request *r, const struct bt_event *ev);
/* A sequence has settled. When it is the last one, the request is done. */
void bt_request_settled(struct bt_request *r, uint64_t now_ns);

/* ---- plan.c: one plan and its submission ---- */
typedef enum {
    BT_PLAN_SUBMITTED,
    BT_PLAN_WAIT,   /* for a worker */
    BT_PLAN_FOLLOW, /* for its prefix, until plan_at_ns */
    BT_PLAN_NO_ROOM,
    BT_PLAN_REFUSED
} bt_plan_result_t;
/* Plans and submits the next epoch. WAIT: no worker can take it now. NO_ROOM: every worker or
 * kvstore that could take it is full; the sequence would still meet its objective behind those that
 * wait for room. REFUSED: rej says why. */
bt_plan_result_t bt_sequence_plan(struct bt_sequence *sq, uint64_t now_ns,
                                  struct bt_sched_reject *rej);
/* Returns whether the sequence would miss an objective if it were planned wait_ms later; rej says
 * which one. False for a sequence that was admitted before. */
bool bt_sequence_hopeless(struct bt_sequence *sq, uint64_t now_ns, double wait_ms,
                          struct bt_sched_reject *rej);
/* The rate at which w would compute a whole prompt of n tokens. 0: not known. */
double bt_request_tokens_per_s(const struct bt_sched_worker *w, uint32_t n,
                               const struct bt_sched_params *c);
/* The request's own objective, or the configured one if it has none (0). */
double bt_request_objective(double own_ms, double all_ms);
/* The configuration with the request's own objectives in it (0: it has none). */
struct bt_sched_params bt_request_params(const struct bt_machine *mc, double slo_ttft_ms,
                                         double slo_tbt_ms);
void bt_overload_text(const struct bt_sched_reject *rej, char *why, size_t cap);
/* After how many seconds a client that is refused for this reason should try again. 0: trying again
 * does not help. */
uint32_t bt_overload_retry_s(const struct bt_machine *mc, const struct bt_sched_reject *rej);
/* Fails the request with 429, because it would miss the objective that rej names. */
void bt_sequence_overloaded(struct bt_sequence *sq, const struct bt_sched_reject *rej);
/* Plans the sequence, which has a plan, on daemons that are not leaving and do not give their role
 * up, and ends the plan that it has. If it splits it has no plan afterwards: its choices are to be
 * planned each for itself. False: it stays where it is, because no other worker can take it. */
bool bt_sequence_plan_away(struct bt_sequence *sq, uint64_t now_ns);

/* ---- replicate.c ---- */
void bt_replicate_init(struct bt_machine *mc, uint64_t now_ns);
/* Counts the prefix of sq, which has been planned with snapshot v. Orders a copy of the prefix if
 * it is used often enough. */
void bt_replicate_look(struct bt_sequence *sq, const struct bt_view_snapshot *v, uint64_t now_ns);
void bt_replicate_answer(struct bt_machine *mc, const struct bt_event *ev);
void bt_replicate_lost(struct bt_machine *mc, const struct bt_peer *p);

/* ---- flight.c ---- */
struct bt_flight *bt_flight_create(struct bt_sequence *sq);
/* The current plan is over. Hard: workers that have not ended are cancelled, and all grants are
 * released at once. Soft (the request finished by itself): workers end by themselves and are
 * cancelled only if that takes too long. Grants are released after the workers have ended, so that
 * finished blocks are kept. */
void bt_flight_wind(struct bt_flight *f, bool hard, uint64_t now_ns);
/* One of several choices has ended with a stop string. Tells the worker, which does not know stop
 * strings. */
void bt_flight_cancel_choice(struct bt_flight *f, uint32_t choice);
/* The session with p broke. The flight expects nothing from p any more. */
void bt_flight_lose(struct bt_flight *f, const struct bt_peer *p);
bool bt_flight_uses(const struct bt_flight *f, const struct bt_peer *p);
void bt_flight_ended(struct bt_flight *f, const struct bt_peer *p);
/* A worker says that it has received the plan. Only such a worker counts as killed by the request
 * if it is lost. */
void bt_flight_received(struct bt_flight *f, const struct bt_peer *p);
/* Returns whether the worker has received the plan and not ended it. Also true if the worker was
 * lost since. */
bool bt_flight_works_on(const struct bt_flight *f, const struct bt_peer *p);
/* The class of its work at the workers: the request's, or the last one if it is served late. */
static inline int32_t bt_flight_class(const struct bt_flight *f)
{
    return f->plan.background ? BT_SCHED_CLASS_LATE : f->sequence->r->spec.priority;
}
/* Adds the flight to its peers' flights and counts (bt_peer.own). It is taken out when they are
 * done with it.
 */
void bt_flight_count(struct bt_flight *f, uint64_t now_ns);
/* The class that a client's priority asks for: never that of late requests. */
static inline int32_t bt_request_class(int32_t priority)
{
    return BT_MIN(priority, BT_SCHED_CLASS_LATE - 1);
}
/* Its rows no longer count as late rows on their way: they have begun, or they will not come. */
void bt_flight_late_over(struct bt_flight *f);
/* The prefill is computed, or will not be: it leaves the worker's backlog. */
void bt_flight_prefilled(struct bt_flight *f);
/* All its kvstores have said yes. */
static inline bool bt_flight_reserved(const struct bt_flight *f)
{
    return f->reserved >= (f->same_kv ? 1 : 2);
}
/* Asks for the Cancels and Releases that have become due. It never destroys the flight, because
 * callers walk over lists of flights. The tick does it. */
void bt_flight_step(struct bt_flight *f, uint64_t now_ns);
bool bt_flight_over(const struct bt_flight *f);
void bt_flight_destroy(struct bt_flight *f);

/* ---- expect.c: lengths and the decode pool's load to come ---- */
void bt_expect_init(struct bt_machine *mc, uint64_t now_ns);
/* Fills the snapshot's clock, forecasts and demand. */
void bt_expect_show(struct bt_machine *mc, uint64_t now_ns, struct bt_sched_snapshot *s);
/* Counts the work that the sequence asks for, once, whether it is planned or refused: compute_ms of
 * a prefill worker, decode_work of a decode worker. let_in: prefill workers would accept it, so it
 * also asks for decode workers. */
void bt_expect_demand(struct bt_sequence *sq, uint64_t now_ns, double compute_ms,
                      double decode_work, bool let_in);
/* Counts the prefill of a sequence that admission refused, once. */
void bt_expect_late(struct bt_sequence *sq, uint64_t now_ns, double compute_ms);
/* How long the sequence's answer may get, as a quantile. */
void bt_expect_length(const struct bt_sequence *sq, struct bt_sched_request *req);
void bt_expect_planned(struct bt_flight *f, uint64_t now_ns);
/* Its rows have begun. */
void bt_expect_row(struct bt_flight *f, uint64_t now_ns);
/* The flight is not expected as rows any more: they have begun, or they will not come. */
void bt_expect_settled(struct bt_flight *f, uint64_t now_ns);
/* Notes the answer's length. whole: it ended by itself, not by a limit and not because the client
 * left. */
void bt_expect_choice_over(struct bt_request *r, uint32_t choice, bool whole);
void bt_expect_learn(struct bt_machine *mc, uint64_t now_ns);

/* ---- outcome.c: compares predictions with what happened ---- */
void bt_outcome_planned(struct bt_sequence *sq, const struct bt_flight *f);
/* Notes where the plan's prefix is fetched from. */
void bt_outcome_source(struct bt_sequence *sq, const struct bt_sources *from);
/* The request's first token is on its way to the client. */
void bt_outcome_first_token(struct bt_sequence *sq, uint64_t now_ns);
/* The prefill worker has reported its times. The conductor learns from them.
 */
void bt_outcome_prefilled(struct bt_sequence *sq);
/* Another token of the choice. */
void bt_outcome_gap(struct bt_choice *c, uint64_t now_ns);
/* The choice has its last token. */
void bt_outcome_choice(struct bt_sequence *sq, uint32_t choice);

/* ---- record.c: the stages of traced requests ---- */
void bt_record_begin(struct bt_request *r);
/* The sequence waits for a plan. why: why it has lost the one that it had; NULL: it had none, or
 * there was no room for it. */
void bt_record_waits(struct bt_sequence *sq, const char *why, uint64_t now_ns);
/* Its flight has begun. */
void bt_record_planned(struct bt_sequence *sq, uint64_t now_ns);
void bt_record_prefilled(struct bt_sequence *sq, const struct bt_event *ev, uint64_t now_ns);
void bt_record_flow(struct bt_sequence *sq, const struct bt_event *ev, uint64_t now_ns);
/* A token of its flight goes to the client. */
void bt_record_token(struct bt_sequence *sq, uint64_t now_ns);
/* The flight is not the current one any more. */
void bt_record_left(struct bt_flight *f);
/* The request is over: adds the action that gives the record out. success: BT_SUCCESS_*. */
void bt_record_end(struct bt_request *r, int success, int http, const char *why, uint64_t now_ns);

/* ---- inspect.c ---- */
/* Notes how the request ended, for batonctl explain. why: NULL if it did not fail. */
void bt_explain_outcome(const struct bt_request *r, const char *why);
struct bt_explain_ring *bt_explain_create(void);
void bt_explain_destroy(struct bt_explain_ring *x);
/* Notes how the sequence's plan was chosen. plan: NULL if it was rejected; then rej says why. */
void bt_explain_note(struct bt_sequence *sq, const struct bt_view_snapshot *v,
                     const struct bt_sched_params *params, const struct bt_sched_request *req,
                     const struct bt_sched_plan *plan, const struct bt_sched_reject *rej);
/* Notes the sources of the prefix of the plan that was noted last for sq. */
void bt_explain_sources(struct bt_sequence *sq, uint32_t fetch_tokens,
                        const struct bt_sources *from);

/* ---- queue.c: the queues ---- */
/* The queues want a round. */
static inline void bt_queue_kick(struct bt_machine *mc)
{
    mc->queues.look = true;
}
/* A new request's sequence enters at the end of mc->queues.waiting, or the request is marked to be
 * refused. */
void bt_queue_enter(struct bt_sequence *sq);
void bt_queue_leave(struct bt_sequence *sq);
void bt_queue_plan(struct bt_sequence *sq);
/* Every daemon that could take the sequence is full. It waits for room, in order of class, tenant
 * and arrival. */
void bt_queue_starve(struct bt_sequence *sq, uint64_t now_ns);
/* The sequence has its slots, or it does not wait for room any more. */
void bt_queue_fits(struct bt_sequence *sq);
/* No worker is there at all. All sequences that wait for room wait for a worker instead. */
void bt_queue_nobody(struct bt_machine *mc);
/* A kvstore or worker has got slots or pages back. */
void bt_queue_room(struct bt_machine *mc);
/* Takes a place among the running, or gives it back. */
void bt_queue_count(struct bt_request *r);
void bt_queue_uncount(struct bt_request *r);
typedef enum { BT_QUEUE_AT_ONCE, BT_QUEUE_WAITS, BT_QUEUE_FULL } bt_queue_answer_t;
/* Returns the answer that a new request of this class and tenant (NULL: none) would get. AT_ONCE:
 * it has a place and is planned without waiting for room. WAITS: it waits; *instead_p, if not NULL,
 * has a lower class and is refused instead of it. FULL: the queue, or the tenant's share of it, has
 * no place. */
bt_queue_answer_t bt_queue_ask(struct bt_machine *mc, int32_t priority, const char *tenant,
                               struct bt_sequence **instead_p);
/* How long a new request of this class would wait for a place or for room, at the rate at which
 * requests end. */
double bt_queue_wait_ms(const struct bt_machine *mc, int32_t priority);
extern const char bt_queue_full_text[];
/* After how many seconds a client that is refused now should try again, at the same rate. */
uint32_t bt_queue_retry_after_s(const struct bt_machine *mc);
void bt_queue_rate(struct bt_machine *mc, uint64_t now_ns); /* every tick */

#endif
