/* A worker or kvstore as the request machine knows it, in plain values: who it is, what it has
 * said, and what this conductor has there. No protocol, no session, no clock. */
#ifndef BT_CONDUCTOR_VIEW_PEER_H
#define BT_CONDUCTOR_VIEW_PEER_H

#include "common/base/list.h"
#include "common/policy/sched/load.h"
#include "common/policy/sched/sched.h"

struct bt_peer {
    /* Who it is; view/ writes these. They stay the same as long as `own_flights` is not empty. */
    const char *kind, *name, *node;
    uint64_t incarnation;

    /* What this conductor's requests have there; only request/ writes these, view/ reads them for
     * its snapshots. All of them are 0 when own_flights is empty. */
    struct bt_sched_learned learned; /* since the session came up, by this conductor */
    struct bt_sched_own own; /* snapshots stop reading behind the first part of own.backlog */
    /* Plans that use it. One that has gone down is neither dialled again nor forgotten, and keeps
     * its incarnation, until all of them have been told. */
    struct bt_list own_flights;
    struct bt_list own_lost; /* among those whose plans are being told */
};

/* What is known of a peer at this moment. Pointers are valid until the view's next event. */
struct bt_peer_facts {
    bool up;       /* its session is up */
    bool departed; /* etcd says that it is gone */
    bool leaving;  /* its node is drained, or it says itself that it is leaving */
    bool gives_up_prefill, gives_up_decode; /* roles no longer offered: what runs of them is to
                                               end, since then: */
    uint64_t gives_up_ns;
    struct bt_sched_pace pace; /* how it computes prompts */
    uint64_t output_ns;        /* of its last message that was not a heartbeat */
    uint64_t load_ns;          /* of its last heartbeat, which said: */
    uint32_t running, waiting, slots_free, pages_free, pages_total;
    const struct bt_classes *classes;
};

extern const char bt_all_drained_text[]; /* why nobody takes new requests, and the remedy */

/* The cluster for one decision; arrays belong to the view and are valid until its next call.
 * worker[i] and kvstore[i] are the peers behind snap's entries. */
struct bt_view_snapshot {
    struct bt_sched_snapshot snap;
    struct bt_sched_worker *workers;
    struct bt_sched_kvstore *kvstores;
    struct bt_peer *const *worker;
    struct bt_peer *const *kvstore;
};

#endif
