/* The gRPC service baton.Kvstore: sessions of conductors (reservations, heartbeats) and streams of
 * block events. Control thread. */
#ifndef BT_KVSTORE_SERVE_SERVE_H
#define BT_KVSTORE_SERVE_SERVE_H

#include "common/loop/loop.h"
#include "common/rpc/rpc.h"
#include "kvstore/cache/cache.h"
#include "kvstore/cache/pins.h"
#include "kvstore/grant/grant.h"

#define BT_SERVE_SESSIONS_MAX 128         /* at once: conductors of a cluster are few */
#define BT_BLOCKS_MSG_BYTES   (60u << 10) /* of keys in one message: the whole stays below 64 KiB */
#define BT_BLOCKS_PENDING_MAX 16384u      /* deltas a slow reader may be behind before a resync */

struct bt_serve;
struct bt_blocks;
struct bt_blocks_reader; /* a stream of block events, of a session */

struct bt_serve_config {
    struct bt_loop *loop;
    const char *cluster, *name, *node;
    uint64_t incarnation;
    struct bt_kv_key root;
    uint64_t layout_id;
    struct bt_cache *cache;
    struct bt_tier *tier;       /* NULL: no SSD; outlives the service */
    const struct bt_pins *pins; /* NULL: none; outlives the service */
};

/* Copies the strings. */
struct bt_serve *bt_serve_create(const struct bt_serve_config *c);
/* Registers /baton.Kvstore/Session and /Blocks; before the server starts. */
void bt_serve_register(struct bt_serve *s, struct bt_rpc_server *server);
void bt_serve_set_grants(struct bt_serve *s, struct bt_grants *grants);
/* bt_grants_config.to_session. */
void bt_serve_to_session(void *session, const Baton__FromKvstore *msg);
/* Closes every session and releases its reservations. */
void bt_serve_destroy(struct bt_serve *s);

/* ---- block events (kvstore/serve/block_events.c) ---- */
/* tier: NULL without an SSD. */
struct bt_blocks *bt_blocks_create(struct bt_loop *loop, struct bt_index *index,
                                   struct bt_tier *tier, uint64_t incarnation);
/* s becomes a reader. gone: it has ended by itself, and is freed. */
struct bt_blocks_reader *bt_blocks_open(struct bt_blocks *b, struct bt_rpc_stream *s,
                                        void (*gone)(void *arg), void *arg);
void bt_blocks_close(struct bt_blocks_reader *r, const char *why); /* NULL: nothing happens */
/* No reader is left. */
void bt_blocks_destroy(struct bt_blocks *b);

#endif
