/* Making a prefix resident: the blocks of a chain come into the slab from this node's own SSD and
 * from other nodes' slabs and SSDs, from several at once, in the order of the chain, in pieces of a
 * few MiB. Each block is checked, sealed and found as soon as its piece is there, whatever becomes
 * of the rest. A source is a hint: one that lacks blocks, dies, hangs or sends wrong bytes is
 * replaced by another; where none is left, or computing would be faster, the prefix ends. Somebody
 * waits, but never longer than wait_ms. Where loading is about as dear as computing nobody waits: a
 * tail comes from its end backwards until it meets who computes from the beginning. Control thread.
 */
#ifndef BT_KVSTORE_FETCH_FETCH_H
#define BT_KVSTORE_FETCH_FETCH_H

#include "common/base/base.h"
#include "common/loop/loop.h"
#include "common/metrics/metrics.h"
#include "kvstore/cache/cache.h"
#include "kvstore/cache/tier.h"
#include "kvstore/fetch/rates.h"
#include "kvstore/wire/wire.h"

#define BT_GATHER_SOURCES_MAX 8

struct bt_gathers; /* all of a node */
struct bt_gather;  /* one chain on its way here, and who waits for it */

/* The wire as gathers use it. */
struct bt_gather_wire {
    struct bt_wire *w;
    struct bt_wire_recv *(*fetch_start)(struct bt_wire *w, const struct bt_wire_peer_addr *peer,
                                        uint64_t request, uint32_t epoch,
                                        const struct bt_kv_key *keys, uint32_t n, uint32_t class,
                                        const struct bt_wire_recv_ops *ops, void *arg);
    void (*fetch_take)(struct bt_wire_recv *r, const uint32_t *slots);
    void (*recv_cancel)(struct bt_wire_recv *r);
};

struct bt_gathers_config {
    struct bt_loop *loop;
    struct bt_cache *cache;
    struct bt_tier *tier; /* NULL: no SSD */
    const struct bt_kv_layout *layout;
    uint64_t incarnation;       /* ours: nothing is fetched from it */
    uint64_t wait_ms;           /* nobody waits longer */
    uint64_t stall_ms;          /* a source that brings nothing for so long is replaced */
    struct bt_metrics *metrics; /* may be NULL */
};

struct bt_gathers *bt_gathers_create(const struct bt_gathers_config *c);
void bt_gathers_set_wire(struct bt_gathers *gs, const struct bt_gather_wire *wire);
/* The wire is about to be destroyed: it is not asked for anything any more. */
void bt_gathers_stop(struct bt_gathers *gs);
/* After the wire and every gather have ended. */
void bt_gathers_destroy(struct bt_gathers *gs);

struct bt_gather_source {
    const char *name, *rpc;
    uint64_t incarnation;
    const uint32_t *first, *count; /* [n_runs]: runs of blocks that it has, as far as is known */
    size_t n_runs;
};
struct bt_gather_ask {
    uint64_t request; /* for logs here and there */
    uint32_t epoch;
    const struct bt_kv_key *keys; /* [n], from the chain's first block on; copied */
    uint32_t n;
    uint8_t group; /* of the tenant whose blocks they are */
    const struct bt_gather_source
        *sources; /* copied; no more than BT_GATHER_SOURCES_MAX are used */
    size_t n_sources;
    double prefill_tokens_per_s; /* of who would compute; blocks that come slower are not waited
                                    for. 0: not known, everything is worth it */
    uint32_t class; /* of the wire; WINDOW: what comes stays in the slab only as long as it is held
                     */
    uint64_t wait_ms; /* not longer than that either; 0: no limit but the configured one */
};
/* done is called once, later: when all that can come is there, or wait_ms have passed; until
 * bt_gather_end what has come stays leased. NULL: nothing would become resident. */
struct bt_gather *bt_gather_start(struct bt_gathers *gs, const struct bt_gather_ask *ask,
                                  void (*done)(void *arg), void *arg);
/* Lets go of the blocks; before done: done will not be called. Blocks that are on their way are
 * still sealed when they arrive. */
void bt_gather_end(struct bt_gather *g);

/* Would loading the part of the chain that is not here take long, compared with computing it? Then
 * both at once are better than either. false too if nothing is known of the computing. */
bool bt_gather_dear(const struct bt_gathers *gs, const struct bt_gather_ask *ask);
/* The chain from its end backwards, as far as somebody has it, for one who computes it from its
 * beginning meanwhile. landed is called, from the loop, whenever more is there. What is there stays
 * leased until bt_gather_end. NULL: nothing is to be had. */
struct bt_gather *bt_gather_tail(struct bt_gathers *gs, const struct bt_gather_ask *ask,
                                 void (*landed)(void *arg), void *arg);
/* A tail: blocks [*first_p, *end_p) are there, the end is that of all that can come. */
void bt_gather_landed(const struct bt_gather *g, uint32_t *first_p, uint32_t *end_p);
/* The slot of a block that has landed. */
uint32_t bt_gather_slot(const struct bt_gather *g, uint32_t block);
/* A tail: blocks before `computed` are not wanted any more. */
void bt_gather_front(struct bt_gather *g, uint32_t computed);

const struct bt_rates *bt_gathers_rates(const struct bt_gathers *gs);
uint32_t bt_gathers_pieces(const struct bt_gathers *gs);     /* transfers that have not ended */
uint32_t bt_gathers_tail_slots(const struct bt_gathers *gs); /* that tails hold */

#endif
