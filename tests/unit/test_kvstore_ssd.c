/* Slab and SSD together under the grants: what is written when, what a reservation finds again, how
 * long it waits, and what a broken disk costs. */
#include "kv_node.h"

#include <errno.h>
#include <stdatomic.h>
#include <sys/syscall.h>

#define SLOTS 24u

static struct node node;
static int sess_a;
#define SA ((void *)&sess_a)

/* The disk as the test wants it. */
static struct {
    _Atomic int read_errno, write_errno;
    _Atomic uint32_t read_us;
} disk;

static ssize_t disk_pread(void *arg, int fd, void *buf, size_t len, off_t off)
{
    (void)arg;
    usleep(disk.read_us);
    if (disk.read_errno != 0) {
        return -disk.read_errno;
    }
    ssize_t n = pread(fd, buf, len, off);
    return n < 0 ? -errno : n;
}

static ssize_t disk_pwrite(void *arg, int fd, const void *buf, size_t len, off_t off)
{
    (void)arg;
    if (disk.write_errno != 0) {
        return -disk.write_errno;
    }
    ssize_t n = pwrite(fd, buf, len, off);
    return n < 0 ? -errno : n;
}

static int disk_flush(void *arg, int fd)
{
    (void)arg;
    return fdatasync(fd) == 0 ? 0 : -errno;
}

static const struct bt_ssd_sys sys = {disk_pread, disk_pwrite, disk_flush, NULL};
static char folder[64];

static void start(bt_tier_policy_t policy, bool seam, uint64_t load_ms)
{
    struct node_ssd ssd = {.path = folder,
                           .slots = 400,
                           .policy = policy,
                           .load_ms = load_ms,
                           .sys = seam ? &sys : NULL};
    memset(&disk, 0, sizeof(disk));
    node_start_ssd(&node, SLOTS, 60000, &ssd);
}

static int setup(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/baton-unit-tier-XXXXXX");
    assert_non_null(mkdtemp(folder));
    return 0;
}

static int teardown(void **state)
{
    char cmd[128];
    (void)state;
    node_stop(&node);
    snprintf(cmd, sizeof(cmd), "rm -rf '%s'", folder);
    return system(cmd);
}

static struct bt_ssd_stats ssd(void)
{
    struct bt_ssd_stats s;
    bt_ssd_stats(bt_tier_ssd(node.tier), &s);
    return s;
}

static void content(uint32_t chain, uint32_t block, uint64_t *words, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        words[i] = ((uint64_t)chain << 40 | (uint64_t)block << 20) + i;
    }
}

static bool right(uint32_t slot, uint32_t chain, uint32_t block)
{
    uint64_t want[512];
    assert_int_equal(node.layout.block_bytes, sizeof(want));
    content(chain, block, want, 512);
    return memcmp(bt_slab_data(node.slab, slot), want, sizeof(want)) == 0;
}

/* A block computed here: written, sealed, cached, let go. */
static void compute(uint32_t chain, uint32_t block)
{
    struct bt_kv_key k;
    uint32_t slot;
    node_key(chain, block, &k);
    assert_int_equal(cache_take(node.cache, 1, &slot), BT_OK);
    content(chain, block, bt_slab_data(node.slab, slot), 512);
    for (uint32_t l = 0; l < node.layout.n_layers; l++) {
        bt_pool_segment_crc(node.cache->pool, slot, l, &k);
    }
    cache_seal(node.cache, slot, &k, NODE_BT, block);
    bt_cache_put(node.cache, &slot, 1);
}

static void settle(void)
{
    NODE_UNTIL(&node, ssd().backlog == 0 && ssd().reading == 0);
}

static void chain_compute(uint32_t chain, uint32_t n)
{
    for (uint32_t b = 0; b < n; b++) {
        compute(chain, b);
        settle(); /* in the pace of the disk: only a few may wait for it */
    }
}

static uint32_t in_slab(uint32_t chain, uint32_t n)
{
    struct bt_kv_key k;
    uint32_t have = 0;
    for (uint32_t b = 0; b < n; b++) {
        node_key(chain, b, &k);
        have += bt_index_find(node.cache->index, &k) != UINT32_MAX;
    }
    return have;
}

static uint32_t slot_of(uint32_t chain, uint32_t block)
{
    struct bt_kv_key k;
    node_key(chain, block, &k);
    return bt_index_find(node.cache->index, &k);
}

static uint32_t on_ssd(uint32_t chain, uint32_t n)
{
    struct bt_kv_key k;
    uint32_t have = 0;
    for (uint32_t b = 0; b < n; b++) {
        node_key(chain, b, &k);
        have += bt_ssd_has(bt_tier_ssd(node.tier), &k);
    }
    return have;
}

/* Other prompts take all the room there is. */
static void flood(void)
{
    uint32_t slots[2 * SLOTS], n = node_counts(&node).total;
    settle();
    assert_int_equal(cache_take(node.cache, n, slots), BT_OK);
    bt_cache_put(node.cache, slots, n);
}

/* Waits for the answer to a Reserve of n_tokens of chain; returns its resident blocks. */
static uint32_t reserve(uint64_t request, uint32_t chain, uint32_t n_tokens)
{
    uint32_t before = node.n_reserved;
    node_reserve_send(&node, SA, request, 1, chain, n_tokens, 0);
    NODE_UNTIL(&node, node.n_reserved == before + 1);
    assert_int_equal(node.reserved_status, BT_OK);
    return node.resident;
}

static void assert_prefix(uint32_t chain, uint32_t n)
{
    struct bt_kv_key k;
    for (uint32_t b = 0; b < n; b++) {
        node_key(chain, b, &k);
        uint32_t slot = bt_index_find(node.cache->index, &k);
        assert_true(slot != UINT32_MAX);
        assert_true(right(slot, chain, b));
        assert_int_equal(bt_pool_verify(node.cache->pool, slot), BT_OK);
        assert_int_equal(bt_pool_depth(node.cache->pool, slot), b);
    }
}

static void second_use_is_written_and_comes_back(void **state)
{
    (void)state;
    start(BT_TIER_SECOND_USE, false, 20000);
    chain_compute(1, 8);
    chain_compute(2, 8);
    assert_int_equal(ssd().written, 0);              /* used once: no wear */
    for (uint64_t r = 100; ssd().written < 8; r++) { /* a few at a time, so a few uses */
        assert_true(r < 3000);
        assert_int_equal(reserve(r, 1, 8 * NODE_BT + 5), 8);
        bt_grants_release(node.grants, SA, r, 1);
        settle();
        node_poll_ms(&node, 20);
    }
    flood();
    assert_int_equal(in_slab(1, 8), 0);
    assert_int_equal(on_ssd(1, 8), 8);
    assert_int_equal(reserve(2, 1, 8 * NODE_BT + 5), 8);
    assert_prefix(1, 8);
    bt_grants_release(node.grants, SA, 2, 1);
    settle();
    assert_int_equal(ssd().written, 8); /* it is there already */
    assert_int_equal(on_ssd(2, 8), 0);
}

/* A bit turns over in the slab between sealing and writing: the record has the CRCs of the sealed
 * bytes, so what comes back is refused. */
static void damaged_before_it_was_written(void **state)
{
    (void)state;
    start(BT_TIER_SECOND_USE, false, 20000);
    chain_compute(1, 4);
    ((uint8_t *)bt_slab_data(node.slab, slot_of(1, 2)))[77] ^= 1;
    for (uint64_t r = 100; ssd().written < 4; r++) {
        assert_true(r < 3000);
        assert_int_equal(reserve(r, 1, 4 * NODE_BT + 5), 4);
        bt_grants_release(node.grants, SA, r, 1);
        settle();
        node_poll_ms(&node, 20);
    }
    flood();
    assert_int_equal(on_ssd(1, 4), 4);
    assert_int_equal(reserve(2, 1, 4 * NODE_BT + 5), 2);
    assert_prefix(1, 2);
    bt_grants_release(node.grants, SA, 2, 1);
    settle();
    assert_int_equal(ssd().crc_errors, 1);
    assert_int_equal(on_ssd(1, 4), 3);
}

static void computed_again_is_a_second_use(void **state)
{
    (void)state;
    start(BT_TIER_SECOND_USE, false, 20000);
    chain_compute(1, 4);
    flood();
    settle();
    assert_int_equal(ssd().written, 0);
    chain_compute(1, 4);
    NODE_UNTIL(&node, on_ssd(1, 4) == 4);
}

/* Of the first two blocks of chains 1..20: on neither tier. */
static uint32_t lost_blocks(void)
{
    uint32_t lost = 0;
    for (uint32_t chain = 1; chain <= 20; chain++) {
        for (uint32_t b = 0; b < 2; b++) {
            struct bt_kv_key k;
            node_key(chain, b, &k);
            lost += bt_index_find(node.cache->index, &k) == UINT32_MAX &&
                    !bt_ssd_has(bt_tier_ssd(node.tier), &k);
        }
    }
    return lost;
}

static void evict_policy_saves_what_goes(void **state)
{
    (void)state;
    start(BT_TIER_EVICT, false, 20000);
    assert_true(node.cache->low >= 1);
    node.cache->low = 4;
    for (uint32_t chain = 1; chain <= 20; chain++) { /* in the pace of a disk */
        compute(chain, 0);
        compute(chain, 1);
        bt_cache_trim(node.cache, 4);
        settle();
    }
    NODE_UNTIL(&node, lost_blocks() <= 2); /* records become durable a little later */
}

static void restart_finds_everything(void **state)
{
    (void)state;
    start(BT_TIER_ALWAYS, false, 20000);
    chain_compute(1, 10);
    NODE_UNTIL(&node, on_ssd(1, 10) == 10);
    node_stop(&node);
    start(BT_TIER_ALWAYS, false, 20000);
    assert_int_equal(in_slab(1, 10), 0);
    assert_int_equal(reserve(1, 1, 10 * NODE_BT), 9); /* the last block is computed */
    assert_prefix(1, 9);
}

/* One block of the chain lies in the slab, in the middle of those on the SSD. */
static void mixed_tiers_and_a_hole(void **state)
{
    struct bt_kv_key k;
    (void)state;
    start(BT_TIER_ALWAYS, false, 20000);
    chain_compute(1, 6);
    NODE_UNTIL(&node, on_ssd(1, 6) == 6);
    compute(3, 0);
    settle();
    node_stop(&node);
    start(BT_TIER_SECOND_USE, false, 20000);
    compute(1, 2);
    compute(1, 7); /* 6 is nowhere: of no use */
    assert_int_equal(reserve(1, 1, 9 * NODE_BT), 6);
    assert_prefix(1, 6);
    node_key(1, 7, &k);
    assert_true(bt_index_find(node.cache->index, &k) != UINT32_MAX);
}

static void many_wait_for_the_same_blocks(void **state)
{
    (void)state;
    start(BT_TIER_ALWAYS, true, 20000);
    chain_compute(1, 4);
    NODE_UNTIL(&node, on_ssd(1, 4) == 4);
    flood();
    settle();
    uint64_t read = ssd().read;
    disk.read_us = 50000;
    for (uint64_t r = 1; r <= 3; r++) {
        node_reserve_send(&node, SA, r, 1, 1, 4 * NODE_BT + 3, 0);
    }
    assert_int_equal(node.n_reserved, 0);
    struct bt_grants_stats gs;
    bt_grants_stats(node.grants, &gs);
    assert_int_equal(gs.pending, 3);
    node_reserve_send(&node, SA, 3, 1, 1, 4 * NODE_BT + 3, 0); /* twice: refused at once */
    assert_int_equal(node.n_reserved, 1);
    assert_int_equal(node.reserved_status, BT_ERR_EXISTS);
    NODE_UNTIL(&node, node.n_reserved == 4);
    assert_int_equal(node.reserved_status, BT_OK);
    assert_int_equal(node.resident, 4);
    assert_int_equal(ssd().read - read, 4); /* once each */
    assert_prefix(1, 4);
}

static void slow_disk_is_not_waited_for(void **state)
{
    (void)state;
    start(BT_TIER_ALWAYS, true, 150);
    chain_compute(1, 8);
    NODE_UNTIL(&node, on_ssd(1, 8) == 8);
    flood();
    settle();
    disk.read_us = 400000;
    uint64_t t = bt_mono_ns();
    uint32_t resident = reserve(1, 1, 8 * NODE_BT + 1);
    assert_true(bt_mono_ns() - t < 3000000000ull);
    assert_true(resident < 8);
    struct bt_pool_counts c = node_counts(&node);
    assert_true(c.writing >= 9 - resident); /* late reads have slots of their own */
    NODE_UNTIL(&node, ssd().reading == 0);
    assert_prefix(1, 8); /* what came late is cached all the same */
    bt_grants_release(node.grants, SA, 1, 1);
}

static void releases_and_epochs_while_loading(void **state)
{
    (void)state;
    start(BT_TIER_ALWAYS, true, 20000);
    chain_compute(1, 4);
    NODE_UNTIL(&node, on_ssd(1, 4) == 4);
    flood();
    settle();
    disk.read_us = 100000;
    node_reserve_send(&node, SA, 1, 1, 1, 70, 0);
    bt_grants_release(node.grants, SA, 1, 1);
    assert_int_equal(node.n_reserved, 1);
    assert_int_equal(node.reserved_status, BT_ERR_STALE);
    node_reserve_send(&node, SA, 2, 1, 1, 70, 0);
    node_reserve_send(&node, SA, 2, 2, 1, 70, 0); /* a newer epoch: the older is answered */
    assert_int_equal(node.n_reserved, 2);
    assert_int_equal(node.reserved_status, BT_ERR_STALE);
    int other = 0;
    node_reserve_send(&node, &other, 3, 1, 1, 70, 0);
    bt_grants_session_end(node.grants, &other); /* nobody is there to be answered */
    NODE_UNTIL(&node, node.n_reserved == 3);
    assert_int_equal(node.reserved_status, BT_OK);
    assert_ptr_equal(node.last_session, SA);
    node_poll_ms(&node, 300);
    assert_int_equal(node.n_reserved, 3);
    node_reserve_send(&node, SA, 4, 1, 1, 70, 0); /* teardown comes while it waits, or not */
}

static void broken_disk_is_a_miss_and_heals(void **state)
{
    (void)state;
    start(BT_TIER_ALWAYS, true, 20000);
    chain_compute(1, 8);
    NODE_UNTIL(&node, on_ssd(1, 8) == 8);
    flood();
    settle();
    disk.read_errno = disk.write_errno = EIO;
    assert_int_equal(reserve(1, 1, 8 * NODE_BT + 1), 0); /* computed then */
    bt_grants_release(node.grants, SA, 1, 1);
    NODE_UNTIL(&node, !ssd().up);
    chain_compute(3, 8); /* sealing and evicting go on */
    flood();
    chain_compute(3, 2);
    assert_int_equal(reserve(2, 3, 40), in_slab(3, 2));
    bt_grants_release(node.grants, SA, 2, 1);
    assert_true(ssd().read_errors >= 3);
    disk.read_errno = disk.write_errno = 0;
    NODE_UNTIL(&node, ssd().up);
    compute(5, 0);
    NODE_UNTIL(&node, on_ssd(5, 1) == 1);
}

/* ---- leases of preempted rows ---- */

static struct { /* what the worker was last told */
    uint64_t lease;
    int32_t status;
    uint32_t answers, n, slots[SLOTS];
} told;

#define PUTS 64u
static struct put_answer { /* by the number of the put, from 1 on */
    bool answered;
    int32_t status;
    uint32_t slot;
} passed[PUTS];
static uint32_t put_answers;

static void told_send(void *conn, const Baton__LocalMsg *m)
{
    (void)conn;
    if (m->m_case == BATON__LOCAL_MSG__M_PUT_SLOT) {
        const Baton__LocalPutSlot *a = m->put_slot;
        assert_true(a->put > 0 && a->put <= PUTS && !passed[a->put - 1].answered);
        passed[a->put - 1] = (struct put_answer){true, a->status, a->slot};
        put_answers++;
        return;
    }
    assert_int_equal(m->m_case, BATON__LOCAL_MSG__M_LEASED);
    told.lease = m->leased->lease;
    told.status = m->leased->status;
    told.answers++;
    told.n = (uint32_t)m->leased->n_slots;
    assert_true(told.n <= SLOTS);
    for (uint32_t i = 0; i < told.n; i++) {
        told.slots[i] = m->leased->slots[i];
    }
}

static void told_nothing(void *conn)
{
    (void)conn;
}

static struct bt_grant_worker *attach(void)
{
    static const struct bt_grant_worker_ops ops = {told_send, told_nothing, told_nothing};
    memset(&told, 0, sizeof(told));
    memset(passed, 0, sizeof(passed));
    put_answers = 0;
    int pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    assert_true(pidfd >= 0);
    return bt_grants_attach(node.grants, "w", 1, (uint32_t)getpid(), pidfd, &ops, &told);
}

static void lease_from(struct bt_grant_worker *w, uint64_t id, bool passing, uint32_t chain,
                       uint32_t first, uint32_t n)
{
    struct bt_kv_key keys[PUTS];
    Baton__LocalLease l = BATON__LOCAL_LEASE__INIT;
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    for (uint32_t b = 0; b < n; b++) {
        node_key(chain, first + b, &keys[b]);
    }
    l.lease = id;
    l.passing = passing;
    l.first = first;
    l.keys.data = (uint8_t *)keys;
    l.keys.len = n * sizeof(keys[0]);
    m.m_case = BATON__LOCAL_MSG__M_LEASE;
    m.lease = &l;
    assert_int_equal(bt_grants_message(node.grants, w, &m), BT_OK);
}

static void lease(struct bt_grant_worker *w, uint64_t id, uint32_t chain, uint32_t n)
{
    lease_from(w, id, false, chain, 0, n);
}

static void unlease(struct bt_grant_worker *w, uint64_t id)
{
    Baton__LocalUnlease l = BATON__LOCAL_UNLEASE__INIT;
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    l.lease = id;
    m.m_case = BATON__LOCAL_MSG__M_UNLEASE;
    m.unlease = &l;
    assert_int_equal(bt_grants_message(node.grants, w, &m), BT_OK);
}

/* A row's blocks have left the slab: its lease brings them back from the SSD. */
static void leases_bring_blocks_back(void **state)
{
    (void)state;
    start(BT_TIER_ALWAYS, false, 20000);
    struct bt_grant_worker *w = attach();
    chain_compute(1, 6);
    NODE_UNTIL(&node, on_ssd(1, 6) == 6);
    flood();
    assert_int_equal(in_slab(1, 6), 0);
    lease(w, 1, 1, 8); /* two more than there are anywhere */
    assert_int_equal(told.answers, 1);
    assert_int_equal(told.status, BT_AGAIN);
    NODE_UNTIL(&node, told.answers == 2);
    assert_int_equal(told.status, BT_OK);
    assert_int_equal(told.n, 6);
    for (uint32_t b = 0; b < 6; b++) {
        assert_true(right(told.slots[b], 1, b));
    }
    assert_int_equal(node_counts(&node).leases, 6);
    lease(w, 2, 1, 6); /* they are in the slab by now */
    assert_int_equal(told.answers, 3);
    assert_int_equal(told.status, BT_OK);
    unlease(w, 1);
    unlease(w, 2);
    assert_int_equal(node_counts(&node).leases, 0);
    bt_grants_detach(node.grants, w);
}

/* Whoever gives up, or goes, while its blocks are on their way holds nothing when they come. */
static void given_up_leases_hold_nothing(void **state)
{
    struct bt_grants_stats s;
    (void)state;
    start(BT_TIER_ALWAYS, true, 20000);
    struct bt_grant_worker *w = attach();
    chain_compute(1, 4);
    NODE_UNTIL(&node, on_ssd(1, 4) == 4);
    flood();
    disk.read_us = 100000;
    lease(w, 1, 1, 4);
    lease(w, 2, 1, 4);
    bt_grants_stats(node.grants, &s);
    assert_int_equal(s.leases, 2);
    unlease(w, 1);
    bt_grants_stats(node.grants, &s);
    assert_int_equal(s.leases, 1);
    bt_grants_detach(node.grants, w);
    NODE_UNTIL(&node, ssd().reading == 0);
    assert_int_equal(told.answers, 2); /* both times: they are on their way */
    assert_int_equal(node_counts(&node).leases, 0);
    assert_int_equal(in_slab(1, 4), 4);
    bt_grants_stats(node.grants, &s);
    assert_int_equal(s.leases + s.workers, 0);
}

/* ---- prompts that no slab holds ---- */

#define WINDOW (SLOTS / 8) /* BT_KVSTORE_STREAM_SHARE of a node */

/* n blocks of chain, ids from first_id on: asked for all at once. */
static void pass_from(struct bt_grant_worker *w, uint64_t first_id, uint32_t chain, uint32_t n)
{
    for (uint32_t b = 0; b < n; b++) {
        struct bt_kv_key key;
        Baton__LocalPut p = BATON__LOCAL_PUT__INIT;
        Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
        node_key(chain, b, &key);
        p.put = first_id + b;
        p.key.data = key.b;
        p.key.len = sizeof(key.b);
        p.depth = b;
        p.n_tokens = NODE_BT;
        p.passing = true;
        m.m_case = BATON__LOCAL_MSG__M_PUT;
        m.put = &p;
        assert_int_equal(bt_grants_message(node.grants, w, &m), BT_OK);
    }
}

static void pass(struct bt_grant_worker *w, uint32_t chain, uint32_t n)
{
    memset(passed, 0, sizeof(passed));
    put_answers = 0;
    pass_from(w, 1, chain, n);
}

static void put_done(struct bt_grant_worker *w, uint64_t id, bool abort)
{
    Baton__LocalPutDone d = BATON__LOCAL_PUT_DONE__INIT;
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    d.put = id;
    d.abort = abort;
    m.m_case = BATON__LOCAL_MSG__M_PUT_DONE;
    m.put_done = &d;
    assert_int_equal(bt_grants_message(node.grants, w, &m), BT_OK);
}

/* Copies as answers come; never have more slots been given than the window has. Blocks written. */
static uint32_t pass_all(struct bt_grant_worker *w, uint32_t chain, uint32_t n)
{
    uint32_t copied = 0, written = 0;
    pass(w, chain, n);
    for (uint32_t b = 0; b < n; b++) {
        NODE_UNTIL(&node, passed[b].answered);
        assert_true(put_answers <= copied + WINDOW || passed[b].status != BT_OK);
        copied++;
        if (passed[b].status == BT_OK) {
            content(chain, b, bt_slab_data(node.slab, passed[b].slot), 512);
            put_done(w, b + 1, false);
            written++;
        }
    }
    settle();
    return written;
}

static uint32_t pieces_right(struct bt_grant_worker *w, uint32_t chain, uint32_t n)
{
    uint32_t have = 0;
    for (uint64_t id = 1; have < n; id++) {
        uint32_t before = told.answers;
        lease_from(w, id, true, chain, have, n - have);
        NODE_UNTIL(&node, told.answers > before && told.status != BT_AGAIN);
        if (told.status != BT_OK) {
            break;
        }
        assert_in_range(told.n, 1, WINDOW);
        for (uint32_t b = 0; b < told.n; b++) {
            assert_true(right(told.slots[b], chain, have + b));
        }
        have += told.n;
        unlease(w, id);
    }
    return have;
}

/* Ten times what is free: through the window to the disk and back, and nobody else's blocks go. */
static void a_prompt_passes_through_the_window(void **state)
{
    (void)state;
    start(BT_TIER_ALWAYS, false, 20000);
    struct bt_grant_worker *w = attach();
    uint32_t others = SLOTS - 2 * WINDOW;
    chain_compute(9, others);
    NODE_UNTIL(&node, on_ssd(9, others) == others);
    assert_int_equal(pass_all(w, 1, 60), 60);
    NODE_UNTIL(&node, on_ssd(1, 60) == 60);
    NODE_UNTIL(&node, in_slab(1, 60) == 0);
    assert_int_equal(in_slab(9, others), others);
    assert_int_equal(pieces_right(w, 1, 64), 60); /* there are no more */
    assert_int_equal(in_slab(1, 60), 0);
    assert_int_equal(in_slab(9, others), others);
    assert_int_equal(pass_all(w, 1, 60), 0); /* all of it is there */
    assert_int_equal(node_counts(&node).leases, 0);
    bt_grants_detach(node.grants, w);
}

static void lease_answered(uint64_t id)
{
    NODE_UNTIL(&node, told.lease == id && told.status != BT_AGAIN);
    assert_int_equal(told.status, BT_OK);
}

/* Two on their way out and then three on their way back, none of which lets go before the next has
 * come on: the windows are never exceeded, whoever finds no room waits, all of them come through.
 */
static void several_prompts_share_the_windows(void **state)
{
    (void)state;
    start(BT_TIER_ALWAYS, false, 20000);
    struct bt_grant_worker *w = attach();
    uint32_t copied = 0, have[4] = {0};
    for (uint32_t chain = 1; chain <= 2; chain++) {
        pass_from(w, 1 + 30 * (chain - 1), chain, 30);
    }
    for (uint64_t id = 1; id <= 60; id++) {
        NODE_UNTIL(&node, passed[id - 1].answered);
        assert_int_equal(passed[id - 1].status, BT_OK);
        assert_true(put_answers <= copied + WINDOW);
        uint32_t b = (uint32_t)(id - 1) % 30, chain = 1 + (uint32_t)(id - 1) / 30;
        content(chain, b, bt_slab_data(node.slab, passed[id - 1].slot), 512);
        put_done(w, id, false);
        copied++;
    }
    NODE_UNTIL(&node, on_ssd(1, 30) + on_ssd(2, 30) == 60);
    chain_compute(3, 15);
    NODE_UNTIL(&node, on_ssd(3, 15) == 15);
    flood();

    lease_from(w, 1, true, 1, 0, 30);
    lease_answered(1);
    have[1] += told.n;
    for (uint64_t id = 2; have[1] < 30 || have[2] < 30 || have[3] < 15; id++) {
        uint32_t chain = 1 + (uint32_t)(id - 1) % 3, n = chain == 3 ? 15 : 30;
        uint32_t left = have[chain] < n ? n - have[chain] : 1; /* at the end the last one again */
        assert_true(node_counts(&node).leases <= WINDOW);
        lease_from(w, id, true, chain, n - left, left);
        if (told.lease != id ||
            told.status == BT_AGAIN) { /* it may be waiting for the one before */
            node_poll_ms(&node, 5);
        }
        if (node_counts(&node).leases >= WINDOW && (told.lease != id || told.status == BT_AGAIN)) {
            assert_int_equal(told.status, BT_AGAIN);
            unlease(w, id - 1);
            lease_answered(id);
        } else {
            lease_answered(id);
            unlease(w, id - 1);
        }
        for (uint32_t b = 0; b < told.n; b++) {
            assert_true(right(told.slots[b], chain, n - left + b));
        }
        have[chain] += have[chain] < n ? told.n : 0;
        assert_true(id < 500);
        if (have[1] >= 30 && have[2] >= 30 && have[3] >= 15) {
            unlease(w, id);
            break;
        }
    }
    assert_int_equal(node_counts(&node).leases, 0);
    bt_grants_detach(node.grants, w);
}

/* Who keeps the whole window keeps others waiting, but not for long: they are told that nothing
 * comes, and compute. */
static void a_full_window_is_not_waited_for(void **state)
{
    (void)state;
    start(BT_TIER_ALWAYS, false, 20000);
    struct bt_grant_worker *w = attach();
    chain_compute(1, 8);
    NODE_UNTIL(&node, on_ssd(1, 8) == 8);
    lease_from(w, 1, true, 1, 0, 8);
    lease_answered(1);
    lease_from(w, 2, true, 1, 2, 6);
    lease_answered(2);
    assert_int_equal(node_counts(&node).leases, WINDOW);
    lease_from(w, 3, true, 1, 3, 5);
    assert_int_equal(told.status, BT_AGAIN);
    NODE_UNTIL(&node, told.lease == 3 && told.status == BT_ERR_EXHAUSTED);
    unlease(w, 1);
    lease_from(w, 4, true, 1, 3, 5);
    lease_answered(4);
    lease_from(w, 5, true, 1, 3, 5); /* waits, and is given up */
    assert_int_equal(told.status, BT_AGAIN);
    unlease(w, 5);
    lease_from(w, 6, true, 1, 3, 5); /* waits as the worker goes */
    bt_grants_detach(node.grants, w);
}

/* second_use counts it as one use, whose first wears no disk and takes no slot. */
static void a_prompt_is_one_use(void **state)
{
    (void)state;
    start(BT_TIER_SECOND_USE, false, 20000);
    struct bt_grant_worker *w = attach();
    assert_int_equal(pass_all(w, 1, 60), 0);
    assert_int_equal(node_counts(&node).sealed, 0);
    assert_int_equal(pass_all(w, 1, 60), 60);
    NODE_UNTIL(&node, on_ssd(1, 60) == 60);
    assert_int_equal(pieces_right(w, 1, 60), 60);
    bt_grants_detach(node.grants, w);
}

/* A disk that fails: what waits is told so, no slot stays. A worker that goes in between leaves
 * nothing either. */
static void a_prompt_that_cannot_pass(void **state)
{
    (void)state;
    start(BT_TIER_ALWAYS, true, 20000);
    struct bt_grant_worker *w = attach();
    disk.write_errno = EIO;
    pass(w, 1, 20);
    for (uint32_t b = 0; b < 20; b++) {
        NODE_UNTIL(&node, passed[b].answered);
        if (passed[b].status == BT_OK) {
            content(1, b, bt_slab_data(node.slab, passed[b].slot), 512);
            put_done(w, b + 1, b % 5 == 0);
        }
    }
    NODE_UNTIL(&node, node_counts(&node).leases == 0);
    assert_int_equal(on_ssd(1, 20) + in_slab(1, 20), 0);
    pass(w, 2, 1);
    NODE_UNTIL(&node, passed[0].answered);
    assert_int_equal(passed[0].status, BT_ERR_UNAVAILABLE);
    disk.write_errno = 0;
    NODE_UNTIL(&node, ssd().up);
    pass(w, 3, 20); /* three have slots, the others wait */
    bt_grants_detach(node.grants, w);
    struct bt_grants_stats s;
    bt_grants_stats(node.grants, &s);
    assert_int_equal(s.puts, WINDOW);
}

/* What exceeds the disk's backlog, or an eighth of the slab, is written when its turn comes. */
static void blocks_wait_for_their_turn(void **state)
{
    (void)state;
    start(BT_TIER_ALWAYS, true, 20000);
    for (uint32_t b = 0; b < SLOTS - 2; b++) {
        compute(1, b);
    }
    NODE_UNTIL(&node, on_ssd(1, SLOTS - 2) == SLOTS - 2);
    assert_int_equal(node_counts(&node).leases, 0);
}

/* The beginning of a prompt that no slab holds: others that come meanwhile do not evict it before
 * its turn, or what passed behind it could never be found. */
static void a_beginning_waits_for_its_turn_in_the_slab(void **state)
{
    (void)state;
    start(BT_TIER_ALWAYS, true, 20000);
    for (uint32_t b = 0; b < SLOTS / 2; b++) {
        compute(1, b);
        bt_tier_save_beginning(node.tier, slot_of(1, b));
    }
    assert_true(bt_tier_beginnings(node.tier) > 0);
    for (uint32_t b = 0; b < 2 * SLOTS; b++) {
        compute(2, b); /* at once: nothing is written meanwhile */
    }
    assert_int_equal(in_slab(1, SLOTS / 2), SLOTS / 2);
    NODE_UNTIL(&node, on_ssd(1, SLOTS / 2) == SLOTS / 2 && bt_tier_beginnings(node.tier) == 0);
    settle();
    assert_int_equal(node_counts(&node).leases, 0);
    /* A disk that fails lets go of them, and so does an end. */
    disk.write_errno = EIO;
    for (uint32_t b = 0; b < SLOTS / 2; b++) {
        compute(3, b);
        bt_tier_save_beginning(node.tier, slot_of(3, b));
    }
    NODE_UNTIL(&node, node_counts(&node).leases == 0);
    assert_int_equal(bt_tier_beginnings(node.tier), 0);
    disk.write_errno = 0;
    NODE_UNTIL(&node, ssd().up);
    for (uint32_t b = 0; b < SLOTS / 2; b++) {
        compute(4, b);
        bt_tier_save_beginning(node.tier, slot_of(4, b));
    }
    assert_true(bt_tier_beginnings(node.tier) > 0);
}

/* Random prompts over both tiers: every resident block has the right bytes, and all comes back. */
static void random_load(void **state)
{
    (void)state;
    start(BT_TIER_SECOND_USE, false, 20000);
    uint64_t x = 88172645463325252ull, ssd_hits = 0;
    for (uint32_t i = 1; i <= 1500; i++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        uint32_t chain = 1 + (uint32_t)(x % 12), n = 1 + (uint32_t)(x >> 20) % 7;
        uint64_t read = ssd().read;
        uint32_t resident = reserve(i, chain, n * NODE_BT + 1);
        ssd_hits += ssd().read - read;
        assert_prefix(chain, resident);
        bt_grants_release(node.grants, SA, i, 1);
        for (uint32_t b = resident; b < n; b++) {
            compute(chain, b);
        }
        if (i % 4 == 0) {
            settle(); /* else the disk is still busy with earlier ones */
        }
        bt_loop_poll(node.loop, 0);
    }
    assert_true(ssd_hits > 100);
    assert_int_equal(ssd().crc_errors + ssd().read_errors + ssd().write_errors, 0);
    settle();
    assert_int_equal(node_counts(&node).leases, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(second_use_is_written_and_comes_back, setup, teardown),
        cmocka_unit_test_setup_teardown(damaged_before_it_was_written, setup, teardown),
        cmocka_unit_test_setup_teardown(computed_again_is_a_second_use, setup, teardown),
        cmocka_unit_test_setup_teardown(evict_policy_saves_what_goes, setup, teardown),
        cmocka_unit_test_setup_teardown(restart_finds_everything, setup, teardown),
        cmocka_unit_test_setup_teardown(mixed_tiers_and_a_hole, setup, teardown),
        cmocka_unit_test_setup_teardown(many_wait_for_the_same_blocks, setup, teardown),
        cmocka_unit_test_setup_teardown(slow_disk_is_not_waited_for, setup, teardown),
        cmocka_unit_test_setup_teardown(releases_and_epochs_while_loading, setup, teardown),
        cmocka_unit_test_setup_teardown(broken_disk_is_a_miss_and_heals, setup, teardown),
        cmocka_unit_test_setup_teardown(leases_bring_blocks_back, setup, teardown),
        cmocka_unit_test_setup_teardown(given_up_leases_hold_nothing, setup, teardown),
        cmocka_unit_test_setup_teardown(a_prompt_passes_through_the_window, setup, teardown),
        cmocka_unit_test_setup_teardown(several_prompts_share_the_windows, setup, teardown),
        cmocka_unit_test_setup_teardown(a_full_window_is_not_waited_for, setup, teardown),
        cmocka_unit_test_setup_teardown(a_prompt_is_one_use, setup, teardown),
        cmocka_unit_test_setup_teardown(a_prompt_that_cannot_pass, setup, teardown),
        cmocka_unit_test_setup_teardown(blocks_wait_for_their_turn, setup, teardown),
        cmocka_unit_test_setup_teardown(a_beginning_waits_for_its_turn_in_the_slab, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(random_load, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
