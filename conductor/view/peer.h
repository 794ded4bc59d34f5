/* A worker or kvstore as the request machine knows it, in plain values: its identity, its reports,
 * and this conductor's work there. No protocol, session or clock. */
#ifndef BT_CONDUCTOR_VIEW_PEER_H
#define BT_CONDUCTOR_VIEW_PEER_H

#include "common/base/list.h"
#include "common/policy/sched/load.h"
#include "common/policy/sched/sched.h"

struct bt_peer {
    /* Its identity. view/ writes it. It does not change while `own_flights` is not empty. */
    const char *kind, *name, *node;
    uint64_t incarnation;

    /* What the requests of this conductor have there. Only request/ writes these members; view/
     * reads them for its snapshots. All are 0 when own_flights is empty. */
    struct bt_sched_learned learned; /* since the session came up, by this conductor */
    struct bt_sched_own own; /* snapshots stop reading behind the first part of own.backlog */
    /* The plans that use it. A peer that went down keeps its incarnation until all of these plans
     * were told. Before that it is neither dialled again nor forgotten. */
    struct bt_list own_flights;
    struct bt_list own_lost; /* link in the list of lost peers whose plans are being told */
};

/* The known state of a peer at this moment. Pointers are valid until the view's next event. */
struct bt_peer_facts {
    bool up;       /* its session is up */
    bool departed; /* etcd says that it is gone */
    bool leaving;  /* its node is drained, or it says itself that it is leaving */
    bool gives_up_prefill, gives_up_decode; /* it no longer offers these roles. Requests in such a
                                               role are to end, since: */
    uint64_t gives_up_ns;
    struct bt_sched_pace pace; /* how it computes prompts */
    uint64_t output_ns;        /* of its last message that was not a heartbeat */
    uint64_t load_ns;          /* of its last heartbeat, which said: */
    uint32_t running, waiting, slots_free, pages_free, pages_total;
    const struct bt_classes *classes;
};

/* text: why no worker takes new requests, and the remedy */
extern const char bt_all_drained_text[];

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
