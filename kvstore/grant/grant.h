/* Grants: who may use which slots for (request, epoch), and when the slots come back.
 *
 * A conductor's Reserve makes a grant. Its slots are the resident prefix, leased, and WRITING slots
 * for the rest. They come back when every reference has ended:
 *   - The conductor's reservation ends by Release (of this epoch and below), by a Reserve of a
 *     higher epoch, or with the conductor's session.
 *   - A local worker's open ends by LocalClose, one second after a new attachment of the same
 *     incarnation, or one second after the worker's death, which its pidfd proves. The end of the
 *     socket ends nothing, since the process may still copy.
 *   - The wire's sends and its receive end by send_end and on_quiet.
 *   - The job of the seal thread ends when it is done.
 * Puts (until LocalPutDone) and leases (until LocalUnlease) of workers end in the same way.
 *
 * A worker that keeps an open or a lease for reclaim_ms after it was told to give it back is
 * killed; its slots are never taken from a living process. A lease is recalled when it is
 * reclaim_ms old. A put that is open for twice reclaim_ms shows that its worker has stopped; that
 * worker is killed too. Everything here runs on the control thread. */
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

#define BT_GRANT_OPEN_WAIT_MS 2000 /* how long a LocalOpen waits for its Reserve */
#define BT_GRANT_BLOCKS_MAX                                                                        \
    BT_RANGE_BLOCKS_MAX /* of one prompt: its slot list must fit one local packet */

struct bt_grants;
struct bt_grant_worker; /* a worker process, from its first attach to its proven death */

/* The functions of the wire that grants call. main.c binds bt_wire_*, tests bind fakes. */
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
extern const struct bt_grants_wire bt_grants_wire_real; /* without w */

struct bt_grants_config {
    struct bt_loop *loop;
    struct bt_slab *slab;
    struct bt_kv_layout layout;
    uint32_t flow_chunk_tokens;
    uint64_t reclaim_ms;
    struct bt_cache *cache;
    struct bt_sealer *sealer;
    struct bt_tier *tier;    /* NULL: no SSD */
    uint64_t fetch_wait_ms;  /* longest wait of a reservation for blocks of other nodes */
    uint64_t fetch_stall_ms; /* a source that sends nothing for so long is replaced */
    double stream_max;       /* share of the slots for the window of pass-through prompts */
    bool overlap; /* compute while the end of a prefix is fetched, where both take about as long */
    /* Returns whether this kvstore is a known member of the cluster. NULL: all kvstores count as
     * known. */
    bool (*peer_known)(void *arg, const char *name, uint64_t incarnation);
    void *peer_arg;
    struct bt_metrics *metrics; /* may be NULL */
    /* Sends msg to the conductor's session, the key given to reserve. It must not call back into
     * the grants; a session that cannot take the message is ended later. */
    void (*to_session)(void *session, const Baton__FromKvstore *msg);
};

struct bt_grants *bt_grants_create(const struct bt_grants_config *c);
/* Call once, before the first reserve. */
void bt_grants_set_wire(struct bt_grants *gs, const struct bt_grants_wire *wire);
/* Call before the wire is destroyed. The grants do not call the wire any more; the wire's callbacks
 * may still come. */
void bt_grants_stop(struct bt_grants *gs);
/* The wire and all connections must be gone. */
void bt_grants_destroy(struct bt_grants *gs);

/* ---- conductors ---- */
/* Makes a grant and answers `session` with Reserved in every case. The answer comes at once, or
 * when the missing part of the prefix is in the slab: from the SSD within kvstore.ssd.load_ms, from
 * the sources that the reservation names within kvstore.fetch.wait_ms. With `overlap`, if fetching
 * takes about as long as computing, the grant of a writer is made at once, and the writer is told
 * about blocks at the prefix's end as they arrive (LocalTail). */
void bt_grants_reserve(struct bt_grants *gs, void *session, const Baton__Reserve *r);
/* Fetches the prefix from its sources in the lowest class and answers with Replicated. */
void bt_grants_replicate(struct bt_grants *gs, void *session, const Baton__Replicate *m);
/* The conductor no longer needs this epoch of the request, nor older ones. If another session has
 * reserved it, this only logs a line. */
void bt_grants_release(struct bt_grants *gs, void *session, uint64_t request, uint32_t epoch);
/* The session has ended: releases its reservations and sends nothing to it any more. */
void bt_grants_session_end(struct bt_grants *gs, void *session);

/* ---- local workers; conn is the caller's connection, NULL after detach ---- */
/* These functions must not call back into the grants; a failing connection is detached later. */
struct bt_grant_worker_ops {
    void (*send)(void *conn, const Baton__LocalMsg *msg);
    void (*ring)(void *conn);
    /* Closes conn, because the worker was replaced or is dead. Do not call bt_grants_detach then.
     */
    void (*drop)(void *conn);
};
/* A worker has attached; takes ownership of pidfd. An earlier attachment of the same name and
 * incarnation is closed, and its opens and puts end, as common/slab/local.h says. */
struct bt_grant_worker *bt_grants_attach(struct bt_grants *gs, const char *name,
                                         uint64_t incarnation, uint32_t pid, int pidfd,
                                         const struct bt_grant_worker_ops *ops, void *conn);
/* The socket has ended. This proves nothing about the worker's memory accesses. */
void bt_grants_detach(struct bt_grants *gs, struct bt_grant_worker *w);
/* ERR_PEER_PROTOCOL: the caller closes the connection. */
bt_status_t bt_grants_message(struct bt_grants *gs, struct bt_grant_worker *w,
                              const Baton__LocalMsg *m) BT_MUST_CHECK;
/* The worker rang its doorbell: one of its flow words has moved. */
void bt_grants_bell(struct bt_grants *gs, struct bt_grant_worker *w);

/* ---- the wire: bt_wire_ops, arg = the grants ---- */
extern const struct bt_wire_ops bt_grants_wire_ops;

/* ---- statistics ---- */
struct bt_grants_stats {
    uint32_t grants, opens, puts, leases, workers, sends, recvs, waiting_opens, requests_known,
        pending, pieces, served;
    uint64_t killed;
};
void bt_grants_stats(const struct bt_grants *gs, struct bt_grants_stats *s_p);
/* The measured speed of other nodes and of the SSD. */
const struct bt_rates *bt_grants_rates(const struct bt_grants *gs);

#endif
