/* Shared by the files of grant/. The way of a Reserve: reserve.c checks it, pending.c lets it wait
 * for its prefix, reserve.c makes the grant, workers.c and transfer.c let a worker or a peer fill
 * and read its slots, progress.c follows the flow and seals, grant.c ends it. request.c knows which
 * epochs are over. put.c and lease.c serve workers without a grant. Control thread. */
#ifndef BT_KVSTORE_GRANT_GRANT_PRIV_H
#define BT_KVSTORE_GRANT_GRANT_PRIV_H

#include "common/base/list.h"
#include "common/base/map.h"
#include "kvstore/fetch/server.h"
#include "kvstore/grant/grant.h"

#define GRANT_TICK_MS       100
#define GRANT_FORGET_MS     30000  /* how long the epochs of an ended request are remembered */
#define GRANT_REMEMBER_MAX  65536u /* how many ended requests are remembered */
#define GRANT_WAITS_MAX     1024u  /* opens of one worker that wait for their Reserve */
#define GRANT_PUTS_MAX      4096u  /* open puts of one worker */
#define GRANT_LEASES_MAX    1024u  /* leases of one worker */
#define GRANT_KILL_AGAIN_MS 5000

/* A request id. It outlives its grants, so that late messages are recognized as stale. */
struct bt_grant_request {
    uint64_t id;
    uint32_t epoch_max; /* highest epoch of a Reserve or Release */
    uint32_t released;  /* this epoch and below are over */
    uint32_t refused;   /* the Reserve of this epoch was refused with `refusal`; 0: none was */
    bt_status_t refusal;
    struct bt_list grants;
    struct bt_list idle; /* in gs->requests.idle while it has no grant */
    uint64_t forget_ns;
};

/* ---- one grant, in parts; each part names the file that writes it ---- */

struct bt_grant_reservation { /* reserve.c */
    void *session;            /* the conductor's; NULL: released */
    uint8_t group;            /* of the tenant */
    bool receive, keep, no_cache;
    bool beginning; /* the grant holds only the beginning of a pass-through prompt */
    /* the part of such a prompt's Reserve that is still needed, without its keys; or NULL */
    Baton__Reserve *rest;
};

struct bt_grant_blocks { /* reserve.c */
    struct bt_flow_shape shape;
    uint32_t n; /* 0: the slots of a beginning were given back */
    uint32_t n_full, resident, n_transit;
    uint32_t *slots;         /* [n] */
    struct bt_kv_key *names; /* [n] keys of full blocks, then the private name of the partial one */
};

struct bt_grant_flow { /* progress.c */
    uint32_t index;    /* of its flow word */
    bt_flow_word_t *word;
    uint32_t items, announced; /* announced: the progress that readers know of */
    bool has_writer;           /* a WRITER open was given once */
    bool has_trailer, done;
    struct bt_wire_trailer trailer;
};

struct bt_grant_seal { /* progress.c */
    bool produced;     /* the producer has ended */
    bool active;       /* blocks [resident, end) belong to the seal thread */
    uint32_t end;
};

struct bt_grant_transfer { /* transfer.c */
    struct bt_list sends;
    struct bt_wire_recv *recv;
    bool receiving, recv_ended; /* until on_quiet; since on_done or on_failed */
    char *peer, *peer_rpc;
    bool doubted; /* a receiver has found other bytes than were sealed */
};

struct bt_grant_revocation { /* grant.c */
    bool on;
    bt_status_t status;
    char why[160];
};

struct bt_grant_overlap {   /* overlap.c */
    struct bt_fetch *fetch; /* of the prefix's end, while the writer computes; NULL: none */
    uint32_t told;          /* the writer knows the blocks from here on; UINT32_MAX: none */
};

struct bt_grant {
    struct bt_list in_all, in_request;
    struct bt_grants *gs;
    struct bt_grant_request *req;
    uint32_t epoch;
    int busy;             /* calls in progress that still need the struct */
    struct bt_list opens; /* workers.c */
    struct bt_grant_reservation res;
    struct bt_grant_blocks blocks;
    struct bt_grant_flow flow;
    struct bt_grant_seal seal;
    struct bt_grant_transfer transfer;
    struct bt_grant_revocation revoked;
    struct bt_grant_overlap overlap;
};

struct bt_grant_open {
    struct bt_list in_grant, in_worker; /* in_worker: in gs->workers.dead_opens while dead */
    struct bt_grant *g;
    struct bt_grant_worker *w; /* NULL: dead, in quarantine until expire_ns */
    Baton__LocalMode mode;
    uint64_t revoked_ns; /* mono; 0: not revoked */
    uint64_t expire_ns;
};

struct bt_grant_open_wait { /* an open that waits for its Reserve */
    struct bt_list in_worker;
    uint64_t request, deadline_ns;
    uint32_t epoch;
    Baton__LocalMode mode;
};

struct bt_grant_send {
    struct bt_list in_grant, in_due;
    struct bt_grant *g;
    struct bt_wire_send *snd;
};

struct bt_grant_worker {
    struct bt_list link;
    struct bt_grants *gs;
    char *name;
    uint64_t incarnation;
    uint32_t pid;
    int pidfd;
    struct bt_loop_fd *pidfd_w;
    struct bt_grant_worker_ops ops;
    void *conn;
    struct bt_list opens, puts, waits, leases;
    struct bt_list asked; /* leases that wait for their blocks; n_leases counts them too */
    uint32_t n_puts, n_put_waits, n_waits, n_leases;
    uint64_t killed_ns;
};

/* ---- all grants of a node, likewise ---- */

struct bt_grant_requests { /* request.c */
    struct bt_map *by_id;
    struct bt_list idle; /* requests without a grant, the oldest first */
    uint32_t n_idle;
};

struct bt_grant_flow_words { /* grants.c */
    uint32_t *free, n_free;
};

struct bt_grant_workers { /* workers.c */
    struct bt_list all;
    struct bt_list dead_opens; /* of dead workers and earlier attachments, in quarantine */
    uint64_t killed;
};

struct bt_grant_puts {      /* put.c */
    struct bt_list waiting; /* pass-through puts that wait for a slot, the oldest first */
    struct bt_list sealing;
    struct bt_list dead; /* in quarantine */
};

struct bt_grant_leases {    /* lease.c */
    struct bt_list waiting; /* pass-through leases that wait for room, the oldest first */
    struct bt_list dead;    /* in quarantine */
};

/* Pass-through prompts: up to `slots` slots may hold blocks on their way out, and as many on their
 * way in. */
struct bt_grant_window { /* put.c, lease.c */
    uint32_t slots, out, in;
};

struct bt_grant_transfers { /* transfer.c */
    struct bt_list due;     /* sends whose trailer is sent from the loop */
    struct bt_timer defer;
};

struct bt_grant_replicas { /* replica.c */
    struct bt_list all;
    uint32_t n;
};

struct bt_grant_metrics { /* metrics.c */
    struct bt_metric *slots[4], *transit, *leases, *copies, *fetching, *served, *grants, *opens,
        *workers, *passing, *overlaps;
    struct bt_metric *passed_out, *passed_in;
    struct bt_metric *hits, *misses, *sealed, *duplicates, *evicted, *killed, *failed;
    struct {
        uint64_t hits, misses, sealed, duplicates, evicted;
    } last; /* the cache's counters at the last update */
};

struct bt_grants {
    struct bt_grants_config c;
    struct bt_grants_wire wire;
    bool stopping;
    struct bt_fetches *fetches;
    struct bt_fetch_server *server;
    struct bt_timer tick;
    struct bt_list all; /* grants */
    uint32_t n_grants;
    struct bt_list pending; /* reservations that wait; pending.c */
    struct bt_grant_requests requests;
    struct bt_grant_flow_words flows;
    struct bt_grant_workers workers;
    struct bt_grant_puts puts;
    struct bt_grant_leases leases;
    struct bt_grant_window window;
    struct bt_grant_transfers transfers;
    struct bt_grant_replicas replicas;
    struct bt_grant_metrics m;
};

/* ---- request.c ---- */
struct bt_grant_request *bt_grant_request_get(struct bt_grants *gs, uint64_t id); /* made if new */
void bt_grant_request_add(struct bt_grant_request *r, struct bt_grant *g);
void bt_grant_request_remove(struct bt_grant *g);
struct bt_grant *bt_grant_find(const struct bt_grants *gs, uint64_t request, uint32_t epoch);
/* true: (request, epoch) is known to be over. */
bool bt_grant_is_stale(const struct bt_grants *gs, uint64_t request, uint32_t epoch);
/* The status that the last Reserve of (request, epoch) was refused with; OK: it was not refused. */
bt_status_t bt_grant_refusal(const struct bt_grants *gs, uint64_t request, uint32_t epoch);
void bt_grant_requests_init(struct bt_grants *gs);
/* Forgets requests whose grants ended GRANT_FORGET_MS ago. */
void bt_grant_requests_tick(struct bt_grants *gs, uint64_t now);
void bt_grant_requests_destroy(struct bt_grants *gs);

/* ---- reserve.c ---- */
/* Sends Reserved to the conductor. */
void bt_grant_answer(struct bt_grants *gs, void *session, uint64_t request, uint32_t epoch,
                     bt_status_t st, uint32_t resident, const char *detail);
/* The most blocks of a grant that may be resident. A writer computes at least the last token and
 * needs a block of its own for it. A receiver does not, nor does a pass-through prompt (whole). */
uint32_t bt_grant_prefix_max(bool whole, uint32_t n_tokens, uint32_t block_tokens);
/* Makes the grant of a checked Reserve, with the blocks that are in the slab now, and answers. */
void bt_grant_make(struct bt_grants *gs, void *session, const Baton__Reserve *r);
/* The group that the tenant's slots are counted in. */
uint8_t bt_grant_group(const struct bt_grants *gs, const char *tenant);

/* ---- pending.c: reservations that wait for blocks from the SSD or from other nodes ---- */
struct bt_grant_fetch_ask { /* the fetch of a reservation; the caller frees keys */
    struct bt_fetch_ask ask;
    struct bt_fetch_source sources[BT_FETCH_SOURCES_MAX];
    struct bt_kv_key *keys;
};
void bt_grant_fetch_ask(const struct bt_grants *gs, const Baton__Reserve *r,
                        struct bt_grant_fetch_ask *a);
/* Converts at most BT_FETCH_SOURCES_MAX sources; returns their number. */
size_t bt_grant_fetch_sources(Baton__Source *const *from, size_t n, struct bt_fetch_source *to);
/* true: r waits; its grant is made, and answered, later. */
bool bt_grant_pending_start(struct bt_grants *gs, void *session, const Baton__Reserve *r);
bool bt_grant_pending_has(const struct bt_grants *gs, uint64_t request, uint32_t epoch);
/* Returns whether a reservation of the request, up to epoch, waits that another session has
 * sent. */
bool bt_grant_pending_of_another(const struct bt_grants *gs, const void *session, uint64_t request,
                                 uint32_t epoch);
/* Answers ERR_STALE to the session's waiting reservations of the request up to epoch; session NULL:
 * of every session. */
void bt_grant_pending_drop(struct bt_grants *gs, void *session, uint64_t request, uint32_t epoch,
                           const char *why);
/* Drops the session's reservations without an answer; session NULL: of every session. */
void bt_grant_pending_session_end(struct bt_grants *gs, void *session);
uint32_t bt_grant_pending_count(const struct bt_grants *gs);
/* Slots that waiting reservations will take for beginnings of pass-through prompts. */
uint32_t bt_grant_pending_beginnings(const struct bt_grants *gs);

/* ---- grant.c ---- */
/* Keeps g alive until bt_grant_unhold. */
void bt_grant_hold(struct bt_grant *g);
void bt_grant_unhold(struct bt_grant *g);
/* Ends and frees g if nothing refers to it any more. */
void bt_grant_unref(struct bt_grant *g);
/* Frees a grant that has neither slots nor references. */
void bt_grant_free(struct bt_grant *g);
/* Asks workers and peers to give the slots back. The first reason is kept. */
void bt_grant_revoke(struct bt_grant *g, bt_status_t st, const char *why);
/* Tells the conductor that the grant cannot be completed, and revokes it. */
void bt_grant_fail(struct bt_grant *g, bt_status_t st, const char *why);
/* Sends to the conductor's session, unless the reservation was released. */
void bt_grant_tell(const struct bt_grant *g, const Baton__FromKvstore *m);
/* A dead worker may still write: marks the slots that are not sealed. */
void bt_grant_quarantine(struct bt_grant *g);

/* ---- progress.c ---- */
/* The flow word or the trailer may have moved: rings readers, sends them the trailer, seals. */
void bt_grant_progress(struct bt_grant *g);
/* Full blocks that are complete according to the flow word. */
uint32_t bt_grant_complete_blocks(const struct bt_grant *g);
/* The producer has ended: complete blocks are sealed. */
void bt_grant_produced(struct bt_grant *g);
/* Writes cached blocks [first, end) of a pass-through prompt's beginning to the SSD: without them
 * the blocks behind could not be found. */
void bt_grant_save_beginning(const struct bt_grant *g, uint32_t first, uint32_t end);

/* ---- workers.c ---- */
/* Does nothing while the worker is detached. */
void bt_grant_worker_send(struct bt_grant_worker *w, const Baton__LocalMsg *m);
void bt_grant_worker_revoke(struct bt_grant_open *o);
void bt_grant_worker_send_trailer(struct bt_grant_open *o);
/* A reservation was made (st OK), failed or was released: answers the opens that waited for this
 * epoch, and tells those of older epochs that they are stale. */
void bt_grant_worker_answer_waiting(struct bt_grants *gs, uint64_t request, uint32_t epoch,
                                    bt_status_t st, const char *why);
/* Kills a worker that did not give something back for too long after it was told to; what: for the
 * log. */
void bt_grant_worker_kill(struct bt_grant_worker *w, const char *what, uint64_t now);
void bt_grant_worker_tick(struct bt_grants *gs, uint64_t now);
void bt_grant_worker_destroy(struct bt_grants *gs);

/* ---- transfer.c ---- */
void bt_grant_transfer_receive(struct bt_grant *g, const Baton__Reserve *r);
void bt_grant_transfer_revoke(struct bt_grant *g);
void bt_grant_transfer_trailer(struct bt_grant *g);

/* ---- overlap.c: the writer computes while the end of its prefix is fetched ---- */
/* true: r is such a reservation. */
bool bt_grant_overlap_wanted(const struct bt_grants *gs, const Baton__Reserve *r);
void bt_grant_overlap_start(struct bt_grant *g, const Baton__Reserve *r);
/* Tells the writer about blocks that it does not know yet. */
void bt_grant_overlap_tell(struct bt_grant *g);
/* The writer has computed more blocks: they are not fetched any more. */
void bt_grant_overlap_advance(struct bt_grant *g);
/* The writer does not read fetched blocks any more. */
void bt_grant_overlap_end(struct bt_grant *g);

/* ---- put.c ---- */
bt_status_t bt_grant_put_ask(struct bt_grant_worker *w, const Baton__LocalPut *m) BT_MUST_CHECK;
void bt_grant_put_end(struct bt_grant_worker *w, const Baton__LocalPutDone *m);
/* Drops the worker's waiting puts without an answer. */
void bt_grant_put_forget_waiting(struct bt_grant_worker *w);
/* The worker is dead or attached anew: its puts stay in quarantine until `until`. */
void bt_grant_put_void(struct bt_grant_worker *w, uint64_t until);
/* Kills a worker that has stopped in the middle of a copy. */
void bt_grant_put_reclaim(struct bt_grant_worker *w, uint64_t now);
void bt_grant_put_tick(struct bt_grants *gs, uint64_t now);
void bt_grant_put_destroy(struct bt_grants *gs);
uint32_t bt_grant_put_count(const struct bt_grants *gs);

/* ---- lease.c ---- */
bt_status_t bt_grant_lease_ask(struct bt_grant_worker *w, const Baton__LocalLease *m) BT_MUST_CHECK;
void bt_grant_lease_end(struct bt_grant_worker *w, const Baton__LocalUnlease *m);
/* Drops the worker's waiting leases without an answer. */
void bt_grant_lease_forget_asked(struct bt_grant_worker *w);
/* The worker is dead or attached anew: its leases stay in quarantine until `until`. */
void bt_grant_lease_void(struct bt_grant_worker *w, uint64_t until);
void bt_grant_lease_tick(struct bt_grants *gs, uint64_t now);
void bt_grant_lease_destroy(struct bt_grants *gs);
uint32_t bt_grant_lease_count(const struct bt_grants *gs);

/* ---- window.c: shares of pass-through prompts ---- */
/* How many of n blocks another prompt may keep as its beginning; 0: none now. */
uint32_t bt_grant_window_beginning(const struct bt_grants *gs, uint32_t n);
/* How many of n blocks may come back through the window; 0: none now. */
uint32_t bt_grant_window_piece(const struct bt_grants *gs, uint32_t n);

/* ---- replica.c ---- */
/* Ends the session's copies; session NULL: of every session. */
void bt_grant_replicas_drop(struct bt_grants *gs, const void *session);

/* ---- metrics.c ---- */
void bt_grant_metrics_create(struct bt_grants *gs, struct bt_metrics *ms);

#endif
