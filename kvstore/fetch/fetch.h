/* Prefix fetch: brings the blocks of a chain into the slab, from this node's SSD and from the slabs
 * and SSDs of other nodes. Several sources work at once, in pieces of a few MiB. Each block is
 * checked, sealed and indexed as soon as its piece has arrived, even if the rest fails.
 *
 * Sources are hints. A source that lacks blocks, dies, hangs or sends wrong bytes is replaced by
 * another one. The fetched prefix ends at the first block that no source has, or that would take
 * longer to fetch than to compute. A request waits for its fetch, but never longer than wait_ms.
 *
 * Where fetching takes about as long as computing, the request does not wait: a backward fetch
 * loads the chain from its end while a worker computes it from its beginning. Control thread. */
#ifndef BT_KVSTORE_FETCH_FETCH_H
#define BT_KVSTORE_FETCH_FETCH_H

#include "common/base/base.h"
#include "common/kv/key.h"
#include "common/loop/loop.h"
#include "common/metrics/metrics.h"
#include "kvstore/cache/cache.h"
#include "kvstore/cache/tier.h"
#include "kvstore/fetch/rates.h"
#include "kvstore/wire/wire.h"

#define BT_FETCH_SOURCES_MAX BT_KV_SOURCES_MAX

struct bt_fetches; /* all fetches of this node */
struct bt_fetch;   /* the fetch of one chain */

/* The functions of the wire that fetches call. */
struct bt_fetch_wire {
    struct bt_wire *w;
    struct bt_wire_recv *(*fetch_start)(struct bt_wire *w, const struct bt_wire_peer_addr *peer,
                                        uint64_t request, uint32_t epoch,
                                        const struct bt_kv_key *keys, uint32_t n, uint32_t class,
                                        const struct bt_wire_recv_ops *ops, void *arg);
    void (*fetch_take)(struct bt_wire_recv *r, const uint32_t *slots);
    void (*recv_cancel)(struct bt_wire_recv *r);
};

struct bt_fetches_config {
    struct bt_loop *loop;
    struct bt_cache *cache;
    struct bt_tier *tier; /* NULL: no SSD */
    const struct bt_kv_layout *layout;
    uint64_t incarnation;       /* of this node, which is not a source itself */
    uint64_t wait_ms;           /* longest wait of a request */
    uint64_t stall_ms;          /* a source that delivers nothing for so long is replaced */
    struct bt_metrics *metrics; /* may be NULL */
};

struct bt_fetches *bt_fetches_create(const struct bt_fetches_config *c);
void bt_fetches_set_wire(struct bt_fetches *fs, const struct bt_fetch_wire *wire);
/* Call this before the wire is destroyed. No fetch uses the wire afterwards. */
void bt_fetches_stop(struct bt_fetches *fs);
/* The wire and every fetch must have ended. */
void bt_fetches_destroy(struct bt_fetches *fs);

struct bt_fetch_source {
    const char *name, *rpc;
    uint64_t incarnation;
    const uint32_t *first, *count; /* [n_runs]: runs of blocks that it is known to have */
    size_t n_runs;
};
struct bt_fetch_ask {
    uint64_t request; /* for logs, on both nodes */
    uint32_t epoch;
    const struct bt_kv_key *keys; /* [n], from the chain's first block on; copied */
    uint32_t n;
    uint8_t group; /* of the tenant whose blocks they are */
    /* copied; only the first BT_FETCH_SOURCES_MAX are used */
    const struct bt_fetch_source *sources;
    size_t n_sources;
    /* Speed of the worker that would compute the blocks. Sources that are slower are not used. 0:
     * unknown, every source is used. */
    double prefill_tokens_per_s;
    uint32_t class;   /* of the wire; with WINDOW blocks leave the slab with their last lease */
    uint64_t wait_ms; /* a second limit of the wait; 0: only the configured one */
};
/* Starts a fetch. done is called once, from the loop: when every block that can arrive has arrived,
 * or when wait_ms have passed. Arrived blocks stay leased until bt_fetch_end. Returns NULL, and
 * never calls done, if there is nothing to fetch. The caller ends the fetch. */
struct bt_fetch *bt_fetch_start(struct bt_fetches *fs, const struct bt_fetch_ask *ask,
                                void (*done)(void *arg), void *arg);
/* Drops the leases and frees the fetch; done is not called any more. Blocks that are already moving
 * are still sealed when they arrive. */
void bt_fetch_end(struct bt_fetch *f);

/* true: fetching the missing part of the chain takes a large share of the time that computing it
 * takes, so doing both at once is faster than either. false also if the worker's speed is unknown.
 */
bool bt_fetch_overlap_pays(const struct bt_fetches *fs, const struct bt_fetch_ask *ask);
/* Starts a backward fetch, of as many blocks as sources have. landed is called from the loop
 * whenever more blocks have arrived. They stay leased until bt_fetch_end. NULL: there is nothing to
 * fetch. */
struct bt_fetch *bt_fetch_backward(struct bt_fetches *fs, const struct bt_fetch_ask *ask,
                                   void (*landed)(void *arg), void *arg);
/* Backward fetch: blocks [*first_p, *end_p) have arrived; no block from *end_p on will. */
void bt_fetch_landed(const struct bt_fetch *f, uint32_t *first_p, uint32_t *end_p);
/* The slot of a block that has landed. */
uint32_t bt_fetch_slot(const struct bt_fetch *f, uint32_t block);
/* Backward fetch: the worker has computed the blocks before `computed`; stop fetching those. */
void bt_fetch_computed(struct bt_fetch *f, uint32_t computed);

const struct bt_rates *bt_fetches_rates(const struct bt_fetches *fs);
uint32_t bt_fetches_pieces(const struct bt_fetches *fs);         /* transfers under way */
uint32_t bt_fetches_backward_slots(const struct bt_fetches *fs); /* held by backward fetches */

#endif
