/* Block events to conductors: first an inventory, then deltas, as far as the reader's credit
 * allows. A message holds only additions or only removals, so its order does not matter. A reader
 * that falls too far behind loses its deltas and gets a new inventory (reset). Control thread.  A
 * node has a block as long as one of its tiers has it. Positions are the slab's slots, then those
 * of the SSD. An addition or removal may be announced twice; the second one changes nothing. During
 * an inventory a cursor walks over the slots. A change behind the cursor is a delta; a change ahead
 * of it is found when the cursor gets there. Deltas are sent before more inventory. */
#include <stdlib.h>
#include <string.h>

#include "common/base/list.h"
#include "common/log/log.h"
#include "common/rpc/pb.h"
#include "common/rpc/ranges.h"
#include "kvstore/serve/serve.h"

#define ADDED_BYTES   36u /* key, depth */
#define REMOVED_BYTES 32u
#define SCAN_MAX      65536u /* slots looked at in one turn */

struct event {
    struct bt_kv_key key;
    uint32_t depth;
    bool added;
};

struct bt_blocks_reader {
    struct bt_list link;
    void (*gone)(void *arg);
    void *arg;
    struct bt_blocks *b;
    struct bt_rpc_stream *stream;
    uint32_t credit;
    uint64_t seq;
    uint32_t cursor; /* next slot of the inventory; n_slots: done */
    bool reset;      /* the next message begins an inventory */
    struct event *ring;
    uint32_t head, count;
};

struct bt_blocks {
    struct bt_loop *loop;
    struct bt_index *index;
    struct bt_tier *tier; /* NULL: the slab only */
    uint64_t incarnation;
    struct bt_list readers;
    struct bt_timer timer; /* sends the events of one turn together */
    bool armed;
    uint8_t *buf; /* BT_BLOCKS_MSG_BYTES */
};

static void pump_all(void *arg);

static void arm(struct bt_blocks *b)
{
    if (!b->armed && !bt_list_empty(&b->readers)) {
        b->armed = true;
        bt_timer_start(b->loop, &b->timer, 1, 0, pump_all, b);
    }
}

/* Restarts the reader with a new inventory. seq jumps, so the reader sees the gap even if it missed
 * `reset`. */
static void resync(struct bt_blocks_reader *r)
{
    r->seq += r->count + 1;
    r->head = r->count = 0;
    r->cursor = 0;
    r->reset = true;
}

static uint32_t positions(const struct bt_blocks *b)
{
    struct bt_ssd_stats s = {0};
    if (b->tier != NULL) {
        bt_ssd_stats(bt_tier_ssd(b->tier), &s);
    }
    return bt_index_slots(b->index) + s.slots;
}

/* The block at a position; NULL: none. */
static const struct bt_kv_key *at_position(const struct bt_blocks *b, uint32_t pos,
                                           uint32_t *depth_p)
{
    uint32_t n = bt_index_slots(b->index);
    if (pos >= n) {
        return bt_ssd_at(bt_tier_ssd(b->tier), pos - n, depth_p);
    }
    return bt_index_has_slot(b->index, pos) ? bt_index_key(b->index, pos, depth_p) : NULL;
}

static void change(struct bt_blocks *b, bool added, uint32_t pos, const struct bt_kv_key *key,
                   uint32_t depth)
{
    struct bt_list *i;
    bt_list_for_each (i, &b->readers) {
        struct bt_blocks_reader *r = BT_CONTAINER_OF(i, struct bt_blocks_reader, link);
        /* With two tiers a removal is always announced, since the other tier may have announced
         * the block. */
        if (r->reset || ((added || b->tier == NULL) && pos >= r->cursor)) {
            continue;
        }
        if (r->count == BT_BLOCKS_PENDING_MAX) {
            resync(r);
            continue;
        }
        r->ring[(r->head + r->count) % BT_BLOCKS_PENDING_MAX] = (struct event){*key, depth, added};
        r->count++;
    }
    arm(b);
}

static void on_slab(void *arg, bool added, uint32_t slot, const struct bt_kv_key *key,
                    uint32_t depth)
{
    struct bt_blocks *b = arg;
    /* A disk that fails for a while keeps its blocks, but would not announce them again. */
    if (added || b->tier == NULL || !bt_ssd_keeps(bt_tier_ssd(b->tier), key)) {
        change(b, added, slot, key, depth);
    }
}

static void on_ssd(void *arg, bool added, uint32_t pos, const struct bt_kv_key *key, uint32_t depth)
{
    struct bt_blocks *b = arg;
    if (added || bt_index_find(b->index, key) == UINT32_MAX) {
        change(b, added, bt_index_slots(b->index) + pos, key, depth);
    }
}

static bool send_events(struct bt_blocks_reader *r, bool added, uint32_t n, size_t bytes)
{
    Baton__BlockEvents m = BATON__BLOCK_EVENTS__INIT;
    m.seq = r->seq;
    m.reset = r->reset;
    m.incarnation = r->b->incarnation;
    ProtobufCBinaryData *d = added ? &m.added : &m.removed;
    d->data = r->b->buf;
    d->len = bytes;
    if (bt_rpc_stream_send_pb(r->stream, &m.base) != BT_OK) {
        return false; /* its queue is full; on_writable or the next credit tries again */
    }
    r->seq += n;
    r->reset = false;
    r->credit--;
    return true;
}

static size_t put_added(uint8_t *to, const struct bt_kv_key *key, uint32_t depth)
{
    memcpy(to, key->b, 32);
    to[32] = (uint8_t)depth;
    to[33] = (uint8_t)(depth >> 8);
    to[34] = (uint8_t)(depth >> 16);
    to[35] = (uint8_t)(depth >> 24);
    return ADDED_BYTES;
}

/* Sends one message with the oldest pending deltas of one kind; false: cannot send. */
static bool pump_deltas(struct bt_blocks_reader *r)
{
    bool added = r->ring[r->head].added;
    uint32_t n = 0;
    size_t len = 0;
    while (n < r->count && len + ADDED_BYTES <= BT_BLOCKS_MSG_BYTES) {
        const struct event *e = &r->ring[(r->head + n) % BT_BLOCKS_PENDING_MAX];
        if (e->added != added) {
            break;
        }
        if (added) {
            len += put_added(r->b->buf + len, &e->key, e->depth);
        } else {
            memcpy(r->b->buf + len, e->key.b, REMOVED_BYTES);
            len += REMOVED_BYTES;
        }
        n++;
    }
    if (!send_events(r, added, n, len)) {
        return false;
    }
    r->head = (r->head + n) % BT_BLOCKS_PENDING_MAX;
    r->count -= n;
    return true;
}

/* Sends one message of inventory. *scanned limits the work of one turn. */
static bool pump_inventory(struct bt_blocks_reader *r, uint32_t *scanned)
{
    uint32_t end = positions(r->b), at = r->cursor, n = 0;
    size_t len = 0;
    while (at < end && len + ADDED_BYTES <= BT_BLOCKS_MSG_BYTES && *scanned < SCAN_MAX) {
        uint32_t depth;
        const struct bt_kv_key *key = at_position(r->b, at, &depth);
        if (key != NULL) {
            len += put_added(r->b->buf + len, key, depth);
            n++;
        }
        at++;
        (*scanned)++;
    }
    /* Send an empty inventory too, so that the reader knows that there are no blocks. */
    if ((n > 0 || r->reset) && !send_events(r, true, n, len)) {
        return false;
    }
    r->cursor = at;
    return true;
}

/* Sends as much as credit allows; true: there is more to send in this turn. */
static bool pump(struct bt_blocks_reader *r)
{
    uint32_t scanned = 0;
    while (r->credit > 0) {
        if (r->count > 0) {
            if (!pump_deltas(r)) {
                return false;
            }
        } else if (r->cursor < positions(r->b)) {
            if (scanned >= SCAN_MAX) {
                return true;
            }
            if (!pump_inventory(r, &scanned)) {
                return false;
            }
        } else {
            return false;
        }
    }
    return false;
}

static void pump_all(void *arg)
{
    struct bt_blocks *b = arg;
    struct bt_list *i;
    bool more = false;
    b->armed = false;
    bt_list_for_each (i, &b->readers) {
        more = pump(BT_CONTAINER_OF(i, struct bt_blocks_reader, link)) || more;
    }
    if (more) {
        arm(b);
    }
}

static void reader_free(struct bt_blocks_reader *r)
{
    bt_list_remove(&r->link);
    free(r->ring);
    free(r);
}

/* Ends a reader after its stream has failed, and tells its owner. */
static void reader_gone(struct bt_blocks_reader *r)
{
    r->gone(r->arg);
    reader_free(r);
}

static void on_message(void *arg, struct bt_rpc_stream *s, const void *data, size_t len)
{
    struct bt_blocks_reader *r = arg;
    char why[256];
    Baton__BlocksCredit *m = bt_blocks_credit_unpack(data, len, why, sizeof(why));
    if (m == NULL) {
        bt_rpc_stream_close(s, BT_GRPC_INVALID_ARGUMENT, why, true);
        reader_gone(r);
        return;
    }
    r->credit = (uint32_t)BT_MIN((uint64_t)r->credit + m->messages, (uint64_t)UINT32_MAX);
    baton__blocks_credit__free_unpacked(m, NULL);
    arm(r->b);
}

static void on_writable(void *arg, struct bt_rpc_stream *s)
{
    struct bt_blocks_reader *r = arg;
    (void)s;
    arm(r->b);
}

static void on_close(void *arg, struct bt_rpc_stream *s, int code, const char *detail)
{
    (void)s;
    (void)code;
    (void)detail;
    reader_gone(arg);
}

static const struct bt_rpc_stream_ops reader_ops = {
    .on_message = on_message, .on_close = on_close, .on_writable = on_writable};

struct bt_blocks_reader *bt_blocks_open(struct bt_blocks *b, struct bt_rpc_stream *s,
                                        void (*gone)(void *arg), void *arg)
{
    struct bt_blocks_reader *r = bt_calloc(1, sizeof(*r));
    r->b = b;
    r->stream = s;
    r->gone = gone;
    r->arg = arg;
    r->reset = true;
    r->ring = bt_calloc(BT_BLOCKS_PENDING_MAX, sizeof(*r->ring));
    bt_list_insert_tail(&b->readers, &r->link);
    bt_rpc_stream_set_arg(s, &reader_ops, r);
    return r;
}

void bt_blocks_close(struct bt_blocks_reader *r, const char *why)
{
    if (r != NULL) {
        bt_rpc_stream_close(r->stream, BT_GRPC_UNAVAILABLE, why, true);
        reader_free(r);
    }
}

struct bt_blocks *bt_blocks_create(struct bt_loop *loop, struct bt_index *index,
                                   struct bt_tier *tier, uint64_t incarnation)
{
    struct bt_blocks *b = bt_calloc(1, sizeof(*b));
    b->loop = loop;
    b->index = index;
    b->incarnation = incarnation;
    b->buf = bt_malloc(BT_BLOCKS_MSG_BYTES);
    bt_list_init(&b->readers);
    b->tier = tier;
    bt_index_observe(index, on_slab, b);
    if (tier != NULL) {
        bt_tier_observe(tier, on_ssd, b);
    }
    return b;
}

void bt_blocks_destroy(struct bt_blocks *b)
{
    if (b == NULL) {
        return;
    }
    bt_index_observe(b->index, NULL, NULL);
    if (b->tier != NULL) {
        bt_tier_observe(b->tier, NULL, b);
    }
    bt_timer_stop(b->loop, &b->timer);
    BT_ASSERT(bt_list_empty(&b->readers)); /* sessions have ended before */
    free(b->buf);
    free(b);
}
