/* Grants: who may use which slots for (request, epoch), and when they come back.
 *
 * A grant is made by a conductor's Reserve. Its slots (resident prefix leased, the rest WRITING)
 * return only when every reference is gone:
 *   - the conductor's reservation: ends by Release (this epoch and below), by a Reserve of a higher
 *     epoch, or with the conductor's session;
 *   - local workers' opens: end by LocalClose, by a new attachment of the same incarnation or by
 *     the worker's death proven by its pidfd, in the last two cases one second later. The end of a
 *     socket ends nothing: the process may still copy;
 *   - the wire's sends and receive: end by send_end / on_quiet;
 *   - the seal thread's job.
 * What workers hold without a grant (puts, until LocalPutDone; leases, until LocalUnlease) ends in
 * the same way.
 * A worker that keeps an open, or a lease, longer than reclaim_ms after it was told to give it back
 * is killed, not robbed. Leases are asked back when they are reclaim_ms old. A put that is open for
 * twice as long is a worker that has stopped: killed too.
 * Everything here runs on the control thread. */
#ifndef BT_KVSTORE_GRANT_GRANT_H
#define BT_KVSTORE_GRANT_GRANT_H

#include "common/base/base.h"
#include "common/loop/loop.h"
#include "common/metrics/metrics.h"
#include "common/rpc/ranges.h"
#include "kvstore/cache/cache.h"
#include "kvstore/cache/sealer.h"
#include "kvstore/cache/tier.h"
#include "kvstore/fetch/fetch.h"
#include "kvstore/wire/wire.h"
#include "local.pb-c.h"
#include "session.pb-c.h"

#define BT_GRANT_OPEN_WAIT_MS  2000 /* LocalOpen waits so long for its Reserve */
#define BT_GRANT_QUARANTINE_MS 1000
#define BT_GRANT_BLOCKS_MAX                                                                        \
    BT_RANGE_BLOCKS_MAX /* of one prompt: its slot list must fit one local packet */

struct bt_grants;
struct bt_grant_worker; /* a worker process, known from its first attach to its proven death */

/* The wire as grants use it: kvstore/main.c binds bt_wire_*, tests bind what they want to see. */
struct bt_grants_wire {
    struct bt_wire *w;
    struct bt_wire_recv *(*recv_start)(struct bt_wire *w, const struct bt_wire_peer_addr *peer,
                                       uint64_t request, uint32_t epoch,
                                       const struct bt_flow_shape *shape, uint32_t first_block,
                                       const uint32_t *slots, const struct bt_kv_key *names,
                                       bt_flow_word_t *word, uint64_t timeout_ms,
                                       const struct bt_wire_recv_ops *ops, void *arg);
    void (*recv_cancel)(struct bt_wire_recv *r);
    void (*kick)(struct bt_wire *w);
    void (*send_trailer)(struct bt_wire_send *s, const struct bt_wire_trailer *t);
    void (*send_abort)(struct bt_wire_send *s, bt_status_t st, const char *why);
    struct bt_wire_recv *(*fetch_start)(struct bt_wire *w, const struct bt_wire_peer_addr *peer,
                                        uint64_t request, uint32_t epoch,
                                        const struct bt_kv_key *keys, uint32_t n, uint32_t class,
                                        const struct bt_wire_recv_ops *ops, void *arg);
    void (*fetch_take)(struct bt_wire_recv *r, const uint32_t *slots);
    void (*send_offer)(struct bt_wire_send *s, const struct bt_wire_source *src,
                       const uint8_t *have, uint32_t n);
};
extern const struct bt_grants_wire bt_grants_wire_real; /* all but w */

struct bt_grants_config {
    struct bt_loop *loop;
    struct bt_slab *slab;
    struct bt_kv_layout layout;
    uint32_t flow_chunk_tokens;
    uint64_t reclaim_ms;
    struct bt_cache *cache;
    struct bt_sealer *sealer;
    struct bt_tier *tier;    /* NULL: the slab is all there is */
    uint64_t fetch_wait_ms;  /* a reservation waits so long for blocks of other nodes */
    uint64_t fetch_stall_ms; /* a node that brings nothing for so long is not waited for */
    double stream_max;       /* part of the slots in which prompts pass that no slab holds */
    bool overlap; /* a writer computes while a prefix that is as dear to load comes from its end */
    /* Is this kvstore a member of the cluster, as far as is known? NULL: everybody is. */
    bool (*peer_known)(void *arg, const char *name, uint64_t incarnation);
    void *peer_arg;
    struct bt_metrics *metrics; /* may be NULL */
    /* Sends msg to the conductor's session (its key as given to reserve). Must not call back into
     * the grants: a session that cannot take it is ended later. */
    void (*to_session)(void *session, const Baton__FromKvstore *msg);
};

struct bt_grants *bt_grants_create(const struct bt_grants_config *c);
/* Wire callbacks come until then; set once, before the first reserve. */
void bt_grants_set_wire(struct bt_grants *gs, const struct bt_grants_wire *wire);
/* The wire is about to be destroyed: nothing is asked of it any more, its callbacks are welcome. */
void bt_grants_stop(struct bt_grants *gs);
/* After the wire and all connections are gone. */
void bt_grants_destroy(struct bt_grants *gs);

/* ---- conductors ---- */
/* Makes a grant and answers `session` with Reserved, whatever comes of it: at once, or when the
 * part of the prefix that lies on the SSD (kvstore.ssd.load_ms at most) or with the sources that
 * the reservation names (kvstore.fetch.wait_ms at most) is in the slab. Where bringing them would
 * take about as long as computing them (overlap), a writer's reservation is made at once, and the
 * writer is told of blocks at the prefix's end as they come (LocalTail). */
void bt_grants_reserve(struct bt_grants *gs, void *session, const Baton__Reserve *r);
/* Fetches the prefix from its sources behind everything that somebody waits for, and says
 * Replicated.
 */
void bt_grants_replicate(struct bt_grants *gs, void *session, const Baton__Replicate *m);
/* The conductor is done with (request, this epoch and below); nothing happens, but a line in the
 * log, where another session has reserved it. */
void bt_grants_release(struct bt_grants *gs, void *session, uint64_t request, uint32_t epoch);
/* The session is over: its reservations are released, nothing is sent to it any more. */
void bt_grants_session_end(struct bt_grants *gs, void *session);

/* ---- local workers; conn is the owner's connection, NULL after detach ---- */
/* None of them calls back into the grants; a failing connection is detached later. */
struct bt_grant_worker_ops {
    void (*send)(void *conn, const Baton__LocalMsg *msg);
    void (*ring)(void *conn);
    /* Close conn, the worker was replaced or is dead; bt_grants_detach is not to be called. */
    void (*drop)(void *conn);
};
/* A worker attached: takes pidfd. An earlier attachment of the same (name, incarnation) is closed,
 * and by the contract of common/slab/local.h its opens and puts are given up. */
struct bt_grant_worker *bt_grants_attach(struct bt_grants *gs, const char *name,
                                         uint64_t incarnation, uint32_t pid, int pidfd,
                                         const struct bt_grant_worker_ops *ops, void *conn);
/* The socket ended: proves nothing about the worker's memory accesses. */
void bt_grants_detach(struct bt_grants *gs, struct bt_grant_worker *w);
/* ERR_PEER_PROTOCOL: close the connection. */
bt_status_t bt_grants_message(struct bt_grants *gs, struct bt_grant_worker *w,
                              const Baton__LocalMsg *m) BT_MUST_CHECK;
/* The worker rang: one of its flow words moved. */
void bt_grants_bell(struct bt_grants *gs, struct bt_grant_worker *w);

/* ---- the wire: bt_wire_ops, arg = the grants ---- */
extern const struct bt_wire_ops bt_grants_wire_ops;

/* ---- to look at ---- */
struct bt_grants_stats {
    uint32_t grants, opens, puts, leases, workers, sends, recvs, waiting_opens, requests_known,
        pending, pieces, served;
    uint64_t killed;
};
void bt_grants_stats(const struct bt_grants *gs, struct bt_grants_stats *s_p);
/* What this node has measured of others and of its SSD. */
const struct bt_rates *bt_grants_rates(const struct bt_grants *gs);

#endif
