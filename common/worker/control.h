/* The control thread's state, private to common/worker: sessions with conductors (session.c), the
 * session with the node's kvstore (node.c), start, stop and etcd (control.c). Nothing blocks here.
 */
#ifndef BT_WORKER_CONTROL_H
#define BT_WORKER_CONTROL_H

#include "common/base/map.h"
#include "common/conf/daemon.h"
#include "common/etcd/member.h"
#include "common/http/status_page.h"
#include "common/loop/loop.h"
#include "common/rpc/pb.h"
#include "common/rpc/session.h"
#include "common/rpc/tls_conf.h"
#include "common/slab/local.h"
#include "common/worker/core.h"

/* Limits of steps with prompt tokens beside rows; 0: no limit. */
struct bt_wmixed {
    uint64_t step_ns, gap_ns;
};

struct bt_wsession { /* one conductor */
    struct bt_list link;
    struct bt_wctl *ctl;
    struct bt_rpc_session rpc;
    uint64_t id;
    char *name; /* of the conductor, after its hello */
    uint64_t incarnation;
    struct bt_wmixed mixed; /* the limits that it sent */
    struct bt_buf unsent;   /* tokens that wait for the message before them: packed Tokens */
};

struct bt_wknown { /* an id that was seen: older requests of it are refused */
    struct bt_list link;
    struct bt_list reqs; /* active submissions, by ctl_link */
    uint64_t request;
    uint32_t epoch;
};

typedef enum {
    BT_WCTL_LOADING,
    BT_WCTL_SERVING,
    BT_WCTL_DRAINING, /* no new submissions; running ones finish */
    BT_WCTL_ENDING,   /* drain time is over: everything was cancelled */
    BT_WCTL_STOPPED
} bt_wctl_state_t;

#define BT_WCTL_TICK_MS 100

/* The role that it offers. role.c. */
struct bt_wrole {
    uint32_t now, next; /* BT_ROLES_*; next: offered once the requests of the old role have ended;
                           0: no change */
    uint64_t epoch, since_ns; /* of the change */
    struct bt_roles_watch *watch;
    struct bt_timer timer;
};

/* How others reach the worker, and how it reaches etcd. control.c. */
struct bt_wnet {
    struct bt_rpc *rpc;
    struct bt_tls_conf tls;
    struct bt_rpc_server *server;
    struct bt_etcd *etcd;
    struct bt_member *member;
    struct bt_starting *starting; /* until it is a member */
    struct bt_status_page *page;
    char *rpc_addr, *http_addr;
};

/* Buffers kept back while a conductor does not take its messages; the engine thread then waits. */
struct bt_wheld {
    struct bt_wtokens *bufs[BT_WORKER_TOKEN_BUFS];
    uint32_t n;
    uint64_t since_ns;
    struct bt_timer timer;
};

struct bt_wctl {
    struct bt_worker_conf conf;
    const char *kind; /* the kind in which it was started */
    struct bt_wrole role;
    struct bt_secret secret; /* its id only */
    char *model_id;
    uint64_t incarnation, started_ns;
    struct bt_wcore core;
    struct bt_wstats *stats;
    struct bt_loop *loop;
    struct bt_wnet net;
    struct bt_local *local; /* session with the node's kvstore */
    bt_wctl_state_t state;
    int exit_code;
    double load_logged;
    char health[256];
    uint64_t drain_until_ns;
    struct bt_timer tick, drain_timer;
    struct bt_list sessions;
    uint32_t n_sessions;
    uint64_t next_session;
    struct bt_map *known;         /* request id -> struct bt_wknown */
    struct bt_list known_list;    /* oldest first */
    struct bt_map *active;        /* struct bt_wkey -> struct bt_wreq */
    uint32_t n_active, n_choices; /* submissions, and the sequences they make */
    /* kvstore */
    uint64_t attach; /* number of the present attachment, 0: none */
    uint64_t next_attach;
    bool refused, joined, engine_ready, ready_said;
    struct bt_wheld held;
    /* scratch for Tokens: [max_tokens] */
    Baton__Token *tok, **tok_ptr;
    Baton__Top *top, **top_ptr;
};

struct bt_wkey {
    uint64_t request;
    uint64_t epoch;
};

/* ---- control.c ---- */
/* Sends cmd to the engine thread. Copies cmd, and passes on ownership of everything it points
 * to. */
void bt_wctl_command(struct bt_wctl *w, const struct bt_wcmd *cmd);
/* A submission that has not ended here; NULL: there is none. */
struct bt_wreq *bt_wctl_find(struct bt_wctl *w, uint64_t request, uint32_t epoch);
/* Makes the engine thread end it, once: Ended has st and why. */
void bt_wctl_cancel(struct bt_wctl *w, struct bt_wreq *r, bt_status_t st, const char *why);
void bt_wctl_update_state(struct bt_wctl *w); /* tells etcd what we are */
/* Registers the worker in etcd. */
void bt_wctl_join(struct bt_wctl *w);

/* ---- role.c ---- */
/* Follows the role table; the worker joins the cluster when the table is first known. */
void bt_wrole_start(struct bt_wctl *w);
void bt_wrole_stop(struct bt_wctl *w);

/* ---- session.c ---- */
void bt_wsession_accept(void *ctl, struct bt_rpc_stream *s);
/* Heartbeats, silence, deadlines; every 100 ms. */
void bt_wsession_tick(struct bt_wctl *w);
/* A step's tokens, one message a conductor. t is not kept. */
void bt_wsession_tokens(struct bt_wctl *w, struct bt_wtokens *t);
/* Returns whether a conductor has more than a few steps of unread messages. */
bool bt_wsession_behind(const struct bt_wctl *w);
/* Sends and frees. */
/* A mask was made ahead (struct bt_wmask_pool_conf): its row gets it. ctl: struct bt_wctl. */
void bt_wsession_mask_made(void *ctl, struct bt_wahead *a);
void bt_wsession_prompt_logprobs(struct bt_wctl *w, struct bt_wprompt *p);
void bt_wsession_prefill_done(struct bt_wctl *w, const struct bt_wout *o);
void bt_wsession_searching(struct bt_wctl *w, const struct bt_wout *o);
void bt_wsession_ended(struct bt_wctl *w, struct bt_wreq *r, bt_status_t st, const char *detail);
/* Ends all sessions with UNAVAILABLE, after the queued messages. */
void bt_wsession_close_all(struct bt_wctl *w, const char *why);

/* ---- mixed_limits.c ---- */
/* The limits in a hello or heartbeat of the conductor of s; NULL: none. */
void bt_wmixed_told(struct bt_wsession *s, const Baton__MixedSteps *m);
/* Uses the smallest of all limits from now on. True: that is a change. */
bool bt_wmixed_apply(struct bt_wctl *w);

/* ---- submit.c ---- */
/* Checks a Submit and makes the request with its choices; NULL with *st_p and err when it is
 * refused. */
struct bt_wreq *bt_wreq_create(const struct bt_wctl *w, const Baton__Submit *m, uint64_t session,
                               bt_status_t *st_p, char *err, size_t err_cap);

/* ---- node.c ---- */
/* Looks for the node's kvstore from now on (bt_local_start). */
void bt_wnode_start(struct bt_wctl *w);
/* Asks for r's grant; BT_WCMD_OPENED follows. Else as bt_local_send. */
bt_status_t bt_wnode_open(struct bt_wctl *w, const struct bt_wreq *r) BT_MUST_CHECK;
/* TRAILER, CLOSE, PUT, PUT_DONE, LEASE, UNLEASE of the engine thread. */
void bt_wnode_out(struct bt_wctl *w, const struct bt_wout *o);

#endif
