/* Write-back: full blocks that are in no grant, of generated text and of a prompt that no slab
 * holds, go back to the pool. Engine thread. */
#ifndef BT_WORKER_WRITEBACK_H
#define BT_WORKER_WRITEBACK_H

#include "common/base/list.h"
#include "common/engine/engine.h"
#include "common/kv/key.h"

struct bt_wcore;
struct bt_wreq;
struct bt_wslab;

/* A request's blocks on their way: written by writeback.c. */
struct bt_wreq_wback {
    uint32_t from;          /* first block that may not be in the pool */
    uint32_t next;          /* next block to offer */
    struct bt_kv_key chain; /* key of block next - 1 */
    bool chain_known;
    bool off; /* offers none: there is a gap in front of them */
};

/* One block on its way back to the pool. It holds references of its own (page, slab), so that its
 * request may end meanwhile. */
struct bt_wput {
    uint64_t id; /* 0: free */
    struct bt_wslab *slab;
    uint32_t page, flow;
    uint64_t asked_ns; /* mono */
    bool preempted;    /* its request gives up the page: copied before others */
    enum { BT_WPUT_ASKED, BT_WPUT_COPYING, BT_WPUT_CLOSING } stage;
    bool failed;
    bt_engine_ticket_t done;
    struct bt_wreq *req; /* NULL once the request has ended */
};

/* Of all requests. */
struct bt_wputs {
    struct bt_wput *put; /* [all] */
    uint32_t max;        /* at once while rows run ... */
    uint32_t all;        /* ... and with those of rows that are preempted */
    uint32_t n;
    uint64_t next_id;
    struct bt_list draining; /* requests that have ENDED, but for pages that are being written,
                                oldest first */
    uint32_t drain_pages;
};

/* Offers the blocks of r that have become full, as far as the limit of blocks in flight allows. */
void bt_wback_offer(struct bt_wcore *c, struct bt_wreq *r);
/* r has lost its pages: the blocks from `from` on may not be in the pool. off: offer none. */
void bt_wback_restart(struct bt_wreq *r, uint32_t from, bool off);
/* r has ended. True: it has blocks that are worth keeping its pages for, until they have been
 * offered or pages are short; then bt_wcore_drained. */
bool bt_wback_drain(struct bt_wcore *c, struct bt_wreq *r);
/* r is about to lose its pages: what has not been offered is offered now. */
void bt_wback_preempt(struct bt_wcore *c, struct bt_wreq *r);
/* r ends; the puts of its blocks go on without it. */
void bt_wback_leave(struct bt_wcore *c, const struct bt_wreq *r);
/* The kvstore's answer to an offer: a slot to write to, or why there is none. */
void bt_wback_slot(struct bt_wcore *c, uint64_t put, bt_status_t st, uint32_t slot, uint32_t gen);
/* A ticket of p's copy was polled. */
void bt_wback_ticket(struct bt_wcore *c, struct bt_wput *p);
/* Pages are short: gives up offers that the kvstore has not answered in time, and pages that are
 * only kept to be written. False: there are none. */
bool bt_wback_expire(struct bt_wcore *c);
/* The kvstore is gone: nothing that was offered will be answered. */
void bt_wback_detached(struct bt_wcore *c);

#endif
