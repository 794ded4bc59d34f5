/* The block events of a kvstore: a stream beside its session keeps the index (holders.h) as its
 * cache is. Loop thread. */
#include <inttypes.h>
#include <string.h>

#include "common/log/log.h"
#include "common/rpc/pb.h"
#include "common/rpc/ranges.h"
#include "conductor/view/view_priv.h"

/* BlockEvents that may be under way: 64 of 64 KiB are 4 MiB, half of what the stream queues at the
 * kvstore (BT_RPC_QUEUE_MAX_BYTES). Each credit that comes back allows 54,000 more blocks. */
#define BLOCKS_CREDIT 64u
/* Forgotten contents of a kvstore that may wait to be swept: its session may end once and it may
 * fall behind once while one sweep runs (some seconds); more comes only from a fault. */
#define UNSWEPT_MAX         2u
#define BLOCK_ADDED_BYTES   36u /* key and depth, see BlockEvents */
#define BLOCK_REMOVED_BYTES 32u /* key */

static void blocks_credit(struct bt_session *s, uint32_t n)
{
    Baton__BlocksCredit c = BATON__BLOCKS_CREDIT__INIT;
    c.messages = n;
    if (bt_rpc_stream_send_pb(s->blocks.stream, &c.base) != BT_OK) {
        bt_session_break(s, "the block event stream accepts no more credit");
    }
}

void bt_session_blocks_more(struct bt_session *s)
{
    if (s->blocks.stream != NULL && s->blocks.unacked >= BLOCKS_CREDIT / 2 &&
        bt_holders_unswept(s->view->index, s->kv_id) <= UNSWEPT_MAX) {
        blocks_credit(s, s->blocks.unacked);
        s->blocks.unacked = 0;
    }
}

static void forget_blocks(struct bt_session *s)
{
    bt_holders_forget(s->view->index, s->kv_id);
    s->blocks.synced = false;
    s->blocks.seq = 0;
}

static void apply_events(struct bt_session *s, const Baton__BlockEvents *e)
{
    size_t n_added = e->added.len / BLOCK_ADDED_BYTES;
    size_t n_removed = e->removed.len / BLOCK_REMOVED_BYTES;
    if (e->reset) {
        forget_blocks(s);
        s->blocks.synced = true;
    } else if (s->blocks.seq != 0 && e->seq != s->blocks.seq) {
        /* Deltas were lost on the way, so the index may have blocks that are gone. An inventory
         * follows. */
        BT_INFO("blocks_gap", "kvstore=%s expected=%" PRIu64 " got=%" PRIu64, s->member->name,
                s->blocks.seq, e->seq);
        bt_metric_add(s->view->m.gaps, 1);
        forget_blocks(s);
    }
    s->blocks.seq = e->seq + n_added + n_removed;
    for (size_t i = 0; i < n_added; i++) {
        const uint8_t *p = e->added.data + i * BLOCK_ADDED_BYTES;
        struct bt_kv_key key;
        memcpy(key.b, p, sizeof(key.b));
        uint32_t depth =
            p[32] | (uint32_t)p[33] << 8 | (uint32_t)p[34] << 16 | (uint32_t)p[35] << 24;
        if ((depth + 1) % s->view->conf.extent_blocks != 0) {
            continue; /* inside an extent: the extent's last block stands for it */
        }
        if (!bt_holders_add(s->view->index, &key, depth, s->kv_id)) {
            bt_metric_add(s->view->m.index_full, 1);
        }
    }
    for (size_t i = 0; i < n_removed; i++) {
        struct bt_kv_key key;
        memcpy(key.b, e->removed.data + i * BLOCK_REMOVED_BYTES, sizeof(key.b));
        bt_holders_remove(s->view->index, &key, s->kv_id);
    }
    bt_metric_set(s->view->m.index_keys, (double)bt_holders_keys(s->view->index));
}

static void on_blocks_message(void *arg, struct bt_rpc_stream *st, const void *data, size_t len)
{
    struct bt_session *s = arg;
    (void)st;
    char why[256];
    if (!bt_session_takes(s)) {
        return;
    }
    if (s->blocks.unacked >= BLOCKS_CREDIT) {
        bt_session_break(s, "more block events than it had credit for");
        return;
    }
    Baton__BlockEvents *e = bt_block_events_unpack(data, len, why, sizeof(why));
    if (e == NULL) {
        bt_session_break(s, why);
    } else if (e->incarnation != 0 && e->incarnation != s->member->incarnation) {
        bt_session_break(s, "block events of another incarnation");
    } else {
        apply_events(s, e);
        s->blocks.unacked++;
        bt_session_blocks_more(s);
    }
    if (e != NULL) {
        baton__block_events__free_unpacked(e, NULL);
    }
}

static void on_blocks_close(void *arg, struct bt_rpc_stream *st, int code, const char *detail)
{
    struct bt_session *s = arg;
    (void)st;
    s->blocks.stream = NULL;
    forget_blocks(s);
    if (code == BT_GRPC_UNIMPLEMENTED) { /* an older kvstore: its blocks are not in the index */
        BT_WARN("blocks_unsupported", "kvstore=%s why=%s", s->member->name,
                "it runs an older release, so prefixes that it has are not found; update it");
        return;
    }
    if (bt_session_up(s)) {
        BT_INFO("blocks_closed", "kvstore=%s code=%d detail=%s", s->member->name, code, detail);
        bt_session_break(s, "its block event stream ended");
    }
}

static const struct bt_rpc_stream_ops blocks_ops = {.on_message = on_blocks_message,
                                                    .on_close = on_blocks_close};

void bt_session_blocks_close(struct bt_session *s)
{
    if (s->blocks.stream != NULL) {
        bt_rpc_stream_close(s->blocks.stream, BT_GRPC_CANCELLED, "session ended", false);
        s->blocks.stream = NULL;
    }
    if (s->blocks.seq != 0 || s->blocks.synced) {
        forget_blocks(s);
    }
}

void bt_session_blocks_open(struct bt_session *s)
{
    s->blocks.unacked = 0;
    s->blocks.seq = 0;
    bt_status_t st = bt_rpc_stream_open(s->rpc.channel, "/baton.Kvstore/Blocks", false, &blocks_ops,
                                        s, &s->blocks.stream);
    if (st != BT_OK) {
        s->blocks.stream = NULL;
        bt_session_break(s, "its block event stream could not be opened");
        return;
    }
    blocks_credit(s, BLOCKS_CREDIT);
}
