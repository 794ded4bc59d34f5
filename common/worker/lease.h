/* Leases: which blocks of a request the pool has, and the right to read them. Engine thread. */
#ifndef BT_WORKER_LEASE_H
#define BT_WORKER_LEASE_H

#include "common/kv/key.h"

struct bt_wcmd;
struct bt_wcore;
struct bt_wreq;
struct bt_wslab;

/* The contents of the kvstore's LocalLeased. */
struct bt_wlease {
    uint32_t n;
    uint32_t slots[]; /* [n], then generations [n] */
};

struct bt_wkeys { /* of a LocalLease; the control thread frees them */
    uint32_t n;
    struct bt_kv_key keys[];
};

/* A request's lease: written by lease.c. */
struct bt_wreq_lease {
    enum { BT_WLEASE_NONE, BT_WLEASE_ASKED, BT_WLEASE_KNOWN } state;
    uint64_t id, until_ns;  /* ASKED: not waited for beyond */
    uint32_t first, want;   /* blocks asked for: [first, first + want) */
    struct bt_wlease *got;  /* which of them are leased; NULL: none */
    struct bt_wslab *slab;  /* of got */
    bool by_pieces;         /* r has a slot and pages, and is LOADING until all pieces are loaded */
    struct bt_kv_key chain; /* of the block before chain_at, where the last piece begins */
    uint32_t chain_at, ask_blocks; /* blocks to ask for next */
};

/* The leases of all requests. */
struct bt_wleases {
    uint64_t next_id;
    uint32_t n_asked;     /* not answered yet */
    uint64_t ask_from_ns; /* mono: no lease is asked for before */
};

/* Returns whether the worker knows which blocks of r, from `first` on, the pool has. The first call
 * asks the kvstore. */
bool bt_wlease_known(struct bt_wcore *c, struct bt_wreq *r, uint32_t first);
/* Returns whether this is unknown and worth asking. */
bool bt_wlease_may_ask(const struct bt_wcore *c, const struct bt_wreq *r, uint32_t first);
/* The kvstore's answer; takes cmd's lease. */
void bt_wlease_answered(struct bt_wcore *c, const struct bt_wcmd *cmd);
/* The kvstore wants the lease back: a request that only waits gives it. */
void bt_wlease_recalled(struct bt_wcore *c, uint64_t id);
/* r needs no lease any more; nothing reads its slots. */
void bt_wlease_drop(struct bt_wcore *c, struct bt_wreq *r);
/* The slab is gone: leases mean nothing, and no piece comes. */
void bt_wlease_detached(struct bt_wcore *c);
/* Loads the leased blocks [first, end) into r's pages; r->role->quiet() follows. On failure r's
 * load flow may be open. */
bt_status_t bt_wlease_load(struct bt_wcore *c, struct bt_wreq *r, uint32_t first,
                           uint32_t end) BT_MUST_CHECK;
/* The load is over: gives the lease back. True: its slots were SEALED all the while. */
bool bt_wlease_loaded(struct bt_wcore *c, struct bt_wreq *r);
/* r has a slot, pages, and KV up to its position, which is the beginning of a block. Loads the
 * blocks behind it that the pool has, piece by piece. bt_wlease_piece_loaded is called after each
 * piece. After the last one r goes on as PROMPT. */
void bt_wlease_pieces(struct bt_wcore *c, struct bt_wreq *r);
void bt_wlease_piece_loaded(struct bt_wcore *c, struct bt_wreq *r);
/* Pieces that the kvstore does not send in time are computed. Every turn of the engine thread. */
void bt_wlease_tick(struct bt_wcore *c);

#endif
