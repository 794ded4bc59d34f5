/* Inside of gathers: the plan of a chain (fetch.c), of one that comes from its end
 * (backward.c), and transfers (piece.c). */
#ifndef BT_KVSTORE_FETCH_FETCH_PRIV_H
#define BT_KVSTORE_FETCH_FETCH_PRIV_H

#include "common/base/list.h"
#include "common/base/map.h"
#include "kvstore/fetch/fetch.h"

#define PIECE_BYTES  (4u << 20) /* of one transfer: what is lost when a source is replaced */
#define PIECE_TOKENS 512u       /* ... and no more than an extent */
#define TAIL_WORTH   8.0 /* a peer that is so many times as slow as computing is left alone */
#define PIECES_MAX   2u  /* of one gather from one source at once: one moves, one is asked */

typedef enum {
    BLOCK_MISSING,
    BLOCK_HERE,    /* in the slab, leased by the gather */
    BLOCK_DISK,    /* being read from the own SSD */
    BLOCK_FLYING,  /* in a piece of this gather */
    BLOCK_FOREIGN, /* in a piece of another gather */
    BLOCK_LOST     /* nobody is left to have it from: the prefix ends before it */
} block_state_t;

#define TRIED_DISK 0x100u /* besides a bit a source */

struct block {
    uint8_t state;
    uint16_t tried;
    uint32_t slot; /* HERE */
};

struct gather_source {
    char *name, *rpc;
    uint64_t incarnation;
    uint8_t *has; /* [n] */
    bool bad;     /* lost or hanging: not asked again by this gather */
    uint32_t n_pieces;
    uint64_t landed_ns; /* its last piece: the next one had the link to itself since then */
};

struct disk_run { /* blocks that one load of the tier reads */
    struct bt_gather *g;
    struct bt_tier_load *load;
    uint32_t first, n, n_read;
    uint64_t start_ns;
};

struct bt_gather {
    struct bt_list link;
    struct bt_gathers *gs;
    uint32_t class; /* of the wire; WINDOW: its blocks only pass through */
    uint64_t request;
    uint32_t epoch;
    uint8_t group;
    double prefill_tokens_per_s;
    uint32_t n, low;              /* low: blocks before it are HERE */
    uint32_t end;                 /* of the prefix that can be had: the first LOST one, or n */
    uint32_t n_foreign, n_active; /* FOREIGN blocks; DISK runs and pieces under way */
    struct bt_kv_key *keys;
    struct block *blocks;
    struct gather_source sources[BT_GATHER_SOURCES_MAX];
    uint32_t n_sources;
    struct disk_run **runs;
    uint32_t n_runs, runs_cap, n_disk; /* n_disk: of them under way */
    uint64_t disk_ns;                  /* when the last run came: the next had the disk to itself */
    struct bt_timer wait, due;
    uint64_t start_ns;
    void (*done)(void *arg);
    void *arg;
    bool ended; /* done was called, or is about to be */
    bool pumping, again;
    /* a tail: blocks [first, end) are HERE, those below floor are not wanted */
    bool tail;
    uint32_t first, floor, told; /* told: first, when landed was called last */
};

struct piece { /* one transfer */
    struct bt_list link;
    struct bt_gathers *gs;
    struct bt_gather *g; /* NULL: it has ended, what comes is sealed all the same */
    uint32_t source;     /* of g */
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
    bool starting, over, quiet; /* over: has come, failed or was given up; quiet: on_quiet was */
};

struct bt_gathers {
    struct bt_gathers_config c;
    struct bt_gather_wire wire;
    bool stopping;
    uint32_t piece_blocks;
    struct bt_list all, pieces;
    uint32_t n_pieces;
    struct bt_map *flying; /* key -> struct piece */
    struct bt_rates rates;
    struct {
        struct bt_metric *bytes[2], *ok, *lacking, *failed, *replaced, *piece_s, *wait_s, *late;
        struct bt_metric *tails, *tail_blocks;
    } m;
};

/* ---- fetch.c ---- */
/* Starts what can be started; ends the gather when nothing is left to wait for. */
void gather_pump(struct bt_gather *g);
/* A block that was under way has come (slot: leased, now the gather's) or not (NONE). */
void gather_block(struct bt_gather *g, uint32_t block, uint32_t slot);
/* Some piece has ended: gathers that waited for blocks of it look again. */
void gather_foreign(struct bt_gathers *gs);
void gather_count(struct bt_metric *m, uint64_t n); /* m may be NULL */

/* A gather of the ask's chain that has started nothing. */
struct bt_gather *gather_new(struct bt_gathers *gs, const struct bt_gather_ask *ask,
                             void (*done)(void *arg), void *arg);
double gather_block_s(const struct bt_gathers *gs, uint64_t incarnation, bt_rate_tier_t tier);
/* Is block i nowhere yet? Leases it if it is in the slab. */
bool gather_missing(struct bt_gather *g, uint32_t i);
/* How block i, which is MISSING, is to be had now: DISK, FLYING (*source_p is set), LOST: not at
 * all; MISSING: as soon as a source has less to do. */
block_state_t gather_way(const struct bt_gather *g, uint32_t i, uint32_t *source_p);
/* Reads blocks [first, first + n) from the SSD; they may be MISSING afterwards. */
void gather_run(struct bt_gather *g, uint32_t first, uint32_t n);

/* ---- backward.c ---- */
void tail_pump(struct bt_gather *g);

/* ---- piece.c ---- */
/* Asks source s of g for blocks [first, first + n), all of them MISSING: FLYING from now on. */
void piece_start(struct bt_gather *g, uint32_t s, uint32_t first, uint32_t n);
/* g ends: its pieces are nobody's; those that are not moving yet are given up. */
void piece_detach(struct bt_gather *g);

#endif
