/* Shared by the files of fetch/: the plan of a fetch (fetch.c), of a backward fetch (backward.c),
 * and transfers from other nodes (piece.c). Control thread. */
#ifndef BT_KVSTORE_FETCH_FETCH_PRIV_H
#define BT_KVSTORE_FETCH_FETCH_PRIV_H

#include "common/base/list.h"
#include "common/base/map.h"
#include "kvstore/fetch/fetch.h"

#define PIECE_BYTES                                                                                \
    (4u << 20)              /* of one transfer: the most that is lost when a source is replaced */
#define PIECE_TOKENS   512u /* and at most one extent */
#define BACKWARD_WORTH 8.0  /* a source may be this many times as slow as computing */
#define PIECES_MAX     2u   /* of one fetch from one source: one moves, the next is requested */

typedef enum {
    BLOCK_MISSING,
    BLOCK_HERE,    /* in the slab, leased by the fetch */
    BLOCK_READING, /* being read from this node's SSD */
    BLOCK_FLYING,  /* in a piece of this fetch */
    BLOCK_SHARED,  /* in a piece of another fetch */
    BLOCK_LOST     /* no source is left: the prefix ends before it */
} bt_fetch_block_state_t;

#define TRIED_SSD 0x100u /* in `tried`, above one bit per source */

struct bt_fetch_block {
    uint8_t state;
    uint16_t tried;
    uint32_t slot; /* HERE */
};

struct bt_fetch_peer {
    char *name, *rpc;
    uint64_t incarnation;
    uint8_t *has; /* [n] */
    bool bad;     /* lost or hanging: this fetch does not ask it again */
    uint32_t n_pieces;
    uint64_t landed_ns; /* end of its last piece: the next one has had the link alone since then */
};

struct bt_fetch_ssd_read { /* blocks that one bt_tier_read brings */
    struct bt_fetch *f;
    struct bt_tier_read *read;
    uint32_t first, n, n_read;
    uint64_t start_ns;
};

struct bt_fetch {
    struct bt_list link;
    struct bt_fetches *fs;
    uint32_t class; /* of the wire; WINDOW: blocks leave with their last lease */
    uint64_t request;
    uint32_t epoch;
    uint8_t group;
    double prefill_tokens_per_s;
    uint32_t n, low;             /* low: blocks before it are HERE */
    uint32_t end;                /* of the prefix that can arrive: the first LOST block, or n */
    uint32_t n_shared, n_active; /* SHARED blocks; SSD reads and pieces under way */
    struct bt_kv_key *keys;
    struct bt_fetch_block *blocks;
    struct bt_fetch_peer sources[BT_FETCH_SOURCES_MAX];
    uint32_t n_sources;
    struct bt_fetch_ssd_read **runs;
    uint32_t n_runs, runs_cap, n_ssd_reads; /* n_ssd_reads: under way */
    uint64_t ssd_ns; /* end of the last read: the next one has had the disk alone since then */
    struct bt_timer wait, due;
    uint64_t start_ns;
    void (*done)(void *arg);
    void *arg;
    bool ended; /* done was called, or is about to be */
    bool pumping, again;
    /* Backward: blocks [first, end) are HERE, those below floor are not wanted any more. */
    bool backward;
    uint32_t first, floor, told; /* told: `first` at the last call of landed */
};

struct bt_fetch_piece { /* one transfer */
    struct bt_list link;
    struct bt_fetches *fs;
    struct bt_fetch *f; /* NULL: it has ended; arriving blocks are sealed all the same */
    uint32_t source;    /* of f */
    uint64_t incarnation;
    uint32_t first, n;      /* blocks of the chain */
    struct bt_kv_key *keys; /* [n] */
    uint32_t *at;           /* [n_taken] which of the n */
    uint32_t *slots;        /* [n_taken] */
    uint32_t n_taken, n_ssd;
    struct bt_wire_recv *recv;
    struct bt_timer stall;
    uint64_t start_ns;
    uint8_t group;
    bool passing;
    bool starting, over, quiet; /* over: arrived, failed or given up; quiet: on_quiet was called */
};

struct bt_fetches {
    struct bt_fetches_config c;
    struct bt_fetch_wire wire;
    bool stopping;
    uint32_t piece_blocks;
    struct bt_list all, pieces;
    uint32_t n_pieces;
    struct bt_map *flying; /* key -> struct bt_fetch_piece */
    struct bt_rates rates;
    struct {
        struct bt_metric *bytes[2], *ok, *lacking, *failed, *replaced, *piece_s, *wait_s, *late;
        struct bt_metric *overlaps, *overlap_blocks;
    } m;
};

/* ---- fetch.c ---- */
/* Starts every read and transfer that can start; ends the fetch when nothing is left to wait for.
 */
void bt_fetch_pump(struct bt_fetch *f);
/* A block under way has arrived in slot, whose lease is now the fetch's; BT_POOL_NONE: it has not.
 */
void bt_fetch_block_came(struct bt_fetch *f, uint32_t block, uint32_t slot);
/* A piece has ended: fetches that waited for its blocks look again. */
void bt_fetch_wake_sharers(struct bt_fetches *fs);
void bt_fetch_count(struct bt_metric *m, uint64_t n); /* m may be NULL */

/* A fetch of the chain that has started nothing yet. */
struct bt_fetch *bt_fetch_create(struct bt_fetches *fs, const struct bt_fetch_ask *ask,
                                 void (*done)(void *arg), void *arg);
double bt_fetch_block_s(const struct bt_fetches *fs, uint64_t incarnation, bt_rate_tier_t tier);
/* true: block i is neither in the slab nor under way. Leases it if it is in the slab. */
bool bt_fetch_block_missing(struct bt_fetch *f, uint32_t i);
/* How to get block i, which is MISSING. READING: from the SSD. FLYING: from source *source_p. LOST:
 * no source has it. MISSING: its sources are busy, try again later. */
bt_fetch_block_state_t bt_fetch_choose_way(const struct bt_fetch *f, uint32_t i,
                                           uint32_t *source_p);
/* Reads blocks [first, first + n) from the SSD. They stay MISSING if no slot is free. */
void bt_fetch_read_ssd(struct bt_fetch *f, uint32_t first, uint32_t n);

/* ---- backward.c ---- */
void bt_fetch_pump_backward(struct bt_fetch *f);

/* ---- piece.c ---- */
/* Asks source s for blocks [first, first + n), all of them MISSING. They are FLYING from now on. */
void bt_fetch_piece_start(struct bt_fetch *f, uint32_t s, uint32_t first, uint32_t n);
/* f ends: its pieces go on without it; those that have not begun to transfer are cancelled. */
void bt_fetch_piece_detach(struct bt_fetch *f);

#endif
