/* Local sessions with real worker processes (tests/tools/kv_worker): attach, death, stop, hang,
 * reconnect. What a dead, stopped or silent worker held must come back exactly when it may. The
 * times of the kvstore are of a virtual clock: a worker that a busy machine keeps waiting is not
 * one that hangs. */
#include "kv_cache.h"
#include "kv_child.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include "common/slab/local.h"
#include "tests/unit/stop_process.h"
#include "tests/unit/virtual_clock.h"

#define RECLAIM_MS 20000

static struct node node;
static int session_a; /* addresses serve as session keys */
#define SESSION ((void *)&session_a)

/* So much time passes in steps, and the node acts upon each. */
static void local_pass(uint64_t ms)
{
    for (uint64_t step; ms > 0; ms -= step) {
        step = BT_MIN(ms, (uint64_t)50);
        clock_jump(step);
        bt_loop_poll(node.loop, 1);
    }
}

/* ... until cond holds: ten minutes of it at most. */
#define LOCAL_PASS_UNTIL(cond)                                                                     \
    do {                                                                                           \
        uint64_t end_ = bt_mono_ns() + 600000000000ull;                                            \
        while (!(cond)) {                                                                          \
            assert_true(bt_mono_ns() < end_);                                                      \
            local_pass(50);                                                                        \
        }                                                                                          \
    } while (0)

/* Attached, and the writer of request r (48 tokens: 3 blocks, 2 chunks, 4 items). */
static void child_writer(struct child *c, uint64_t r, uint32_t chain)
{
    child_wait(c, "attached");
    assert_int_equal(node_reserve(&node, SESSION, r, 1, chain, 48, 0), BT_OK);
    child_say(c, "open %llu 1 w", (unsigned long long)r);
    assert_non_null(strstr(child_wait(c, "opened"), "status=OK"));
}

static int setup(void **state)
{
    (void)state;
    clock_skip_stalls();
    node_start(&node, 32, RECLAIM_MS);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    clock_go_on();
    node_stop(&node);
    return 0;
}

/* ---- the good path ---- */

static void write_and_read_on_one_node(void **state)
{
    struct child p, d;
    (void)state;
    child_start(&p, "p", 1, NULL);
    child_start(&d, "d", 2, NULL);
    child_wait(&d, "attached");
    child_writer(&p, 10, 1);
    child_say(&d, "open 10 1 r");
    assert_non_null(strstr(child_wait(&d, "opened"), "status=OK n=3 resident=0"));
    child_say(&p, "fill 10 1 77");
    child_wait(&p, "filled");
    child_say(&p, "raise 10 1 2");
    child_wait(&d, "bell");
    child_say(&p, "trailer 10 1 5");
    node_poll_ms(&node, 100);
    assert_false(child_said(&d, "trailer")); /* not before everything is there */
    child_say(&p, "raise 10 1 4");
    child_wait(&d, "trailer 10 1 token=5");
    child_say(&d, "check 10 1 77");
    child_wait(&d, "check 10 bad=0 progress=4");
    child_say(&p, "close 10 1 w 0");
    child_say(&d, "close 10 1 r 0");
    NODE_UNTIL(&node, node_counts(&node).sealed == 3);
    assert_int_equal(node.n_failed, 0);
    bt_grants_release(node.grants, SESSION, 10, 1);
    NODE_UNTIL(&node, node_counts(&node).leases == 0);
    assert_int_equal(node_counts(&node).writing, 0);
    assert_int_equal(index_count(node.cache->index), 3);
    for (uint32_t b = 0; b < 3; b++) {
        struct bt_kv_key k;
        node_key(1, b, &k);
        uint32_t s = bt_index_find(node.cache->index, &k);
        assert_true(s != UINT32_MAX);
        assert_int_equal(bt_pool_verify(node.cache->pool, s), BT_OK);
    }
    /* The same prompt again: all but the last block, which the writer computes. */
    assert_int_equal(node_reserve(&node, SESSION, 11, 1, 1, 48, 0), BT_OK);
    assert_int_equal(node.resident, 2);
    child_say(&p, "open 11 1 w");
    assert_non_null(strstr(child_wait(&p, "opened 11"), "resident=2"));
    child_say(&p, "close 11 1 w 1");
    bt_grants_release(node.grants, SESSION, 11, 1);
    NODE_UNTIL(&node, node_counts(&node).leases == 0);
    child_quit(&p);
    child_quit(&d);
}

static void open_waits_for_its_reservation(void **state)
{
    struct child p;
    (void)state;
    clock_stop();
    child_start(&p, "p", 1, NULL);
    child_wait(&p, "attached");
    child_say(&p, "open 5 1 w");
    local_pass(1900);
    assert_false(child_said(&p, "opened"));
    assert_int_equal(node_reserve(&node, SESSION, 5, 1, 1, 40, 0), BT_OK);
    assert_non_null(strstr(child_wait(&p, "opened 5"), "status=OK n=3"));
    uint64_t t0 = bt_mono_ns();
    child_say(&p, "open 6 1 w"); /* nobody ever reserves it */
    LOCAL_PASS_UNTIL(child_said(&p, "opened 6"));
    assert_non_null(strstr(child_wait(&p, "opened 6"), "status=ERR_NOT_FOUND"));
    assert_true(bt_mono_ns() - t0 >= 1900000000ull);
    child_say(&p, "open 7 1 w"); /* a newer epoch is reserved while it waits */
    local_pass(50);
    assert_int_equal(node_reserve(&node, SESSION, 7, 2, 1, 40, 0), BT_OK);
    assert_non_null(strstr(child_wait(&p, "opened 7 1"), "status=ERR_STALE"));
    child_say(&p, "open 8 1 w"); /* its reservation fails */
    local_pass(50);
    assert_int_equal(node_reserve(&node, SESSION, 8, 1, 9, 16 * 40, 0), BT_ERR_EXHAUSTED);
    assert_non_null(strstr(child_wait(&p, "opened 8"), "status=ERR_EXHAUSTED"));
    child_quit(&p);
}

static void puts_write_back(void **state)
{
    struct child d;
    (void)state;
    child_start(&d, "d", 1, NULL);
    child_wait(&d, "attached");
    child_say(&d, "put 1 42 3 16");
    assert_non_null(strstr(child_wait(&d, "putslot 1"), "status=OK"));
    child_say(&d, "putfill 1 9");
    child_say(&d, "putdone 1 0");
    NODE_UNTIL(&node, index_count(node.cache->index) == 1);
    struct bt_kv_key k;
    memset(&k, 42, sizeof(k));
    uint32_t s = bt_index_find(node.cache->index, &k);
    assert_int_equal(bt_pool_verify(node.cache->pool, s), BT_OK);
    assert_int_equal(bt_pool_depth(node.cache->pool, s), 3);
    assert_int_equal(node_counts(&node).leases, 0);
    child_say(&d, "put 2 42 3 16"); /* it is here now */
    assert_non_null(strstr(child_wait(&d, "putslot 2"), "status=ERR_EXISTS"));
    child_say(&d, "put 3 43 3 7"); /* not a full block */
    assert_non_null(strstr(child_wait(&d, "putslot 3"), "status=ERR_INVALID"));
    child_say(&d, "put 4 44 3 16");
    child_wait(&d, "putslot 4 status=OK");
    assert_int_equal(node_counts(&node).writing, 1);
    child_say(&d, "putdone 4 1");
    NODE_UNTIL(&node, node_counts(&node).writing == 0);
    assert_int_equal(index_count(node.cache->index), 1);
    child_say(&d, "put 5 45 3 16"); /* dies with an open put */
    child_wait(&d, "putslot 5 status=OK");
    kill(d.pid, SIGKILL);
    child_reap(&d, SIGKILL);
    NODE_UNTIL(&node, node_counts(&node).quarantine == 1);
    LOCAL_PASS_UNTIL(node_counts(&node).quarantine == 0);
    assert_int_equal(node_counts(&node).leases, 0);
}

/* Blocks 42, 43, 44 into the pool. */
static void put_three(struct child *d)
{
    child_wait(d, "attached");
    for (uint32_t i = 0; i < 3; i++) {
        child_say(d, "put %u %u %u 16", i + 1, 42 + i, i);
        child_wait(d, "putslot");
        child_say(d, "putfill %u 9", i + 1);
        child_say(d, "putdone %u 0", i + 1);
    }
    NODE_UNTIL(&node, index_count(node.cache->index) == 3 && node_counts(&node).leases == 0);
}

static uint32_t leases(void)
{
    struct bt_grants_stats s;
    bt_grants_stats(node.grants, &s);
    return s.leases;
}

static void leased_blocks_stay(void **state)
{
    struct child d;
    (void)state;
    child_start(&d, "d", 1, NULL);
    put_three(&d);
    child_say(&d, "lease 1 42 5"); /* a prefix of what is asked for */
    const char *said = child_wait(&d, "leased 1 status=OK n=3");
    for (uint32_t i = 0; i < 3; i++) {
        struct bt_kv_key k;
        char want[32];
        memset(&k, (int)(42 + i), sizeof(k));
        uint32_t s = bt_index_find(node.cache->index, &k);
        snprintf(want, sizeof(want), " %u.%u", s, bt_pool_generation(node.cache->pool, s));
        assert_non_null(strstr(said, want));
    }
    child_say(&d, "lease 2 41 2"); /* without its first block a chain is of no use */
    child_wait(&d, "leased 2 status=ERR_NOT_FOUND n=0");
    child_say(&d, "lease 3 44 1");
    child_wait(&d, "leased 3 status=OK n=1");
    assert_int_equal(node_counts(&node).leases, 4);
    assert_int_equal(leases(), 2);
    /* Everything else is taken: what is leased cannot be evicted. */
    uint32_t rest = node_counts(&node).total - 3;
    assert_int_equal(node_reserve(&node, SESSION, 10, 1, 1, 16 * rest, 0), BT_OK);
    assert_int_equal(node_reserve(&node, SESSION, 11, 1, 2, 16, 0), BT_ERR_EXHAUSTED);
    child_say(&d, "unlease 1");
    child_say(&d, "unlease 1"); /* has ended: nothing happens */
    NODE_UNTIL(&node, leases() == 1);
    assert_int_equal(node_reserve(&node, SESSION, 11, 2, 2, 16 * 2, 0), BT_OK);
    assert_int_equal(node_reserve(&node, SESSION, 12, 1, 3, 16, 0), BT_ERR_EXHAUSTED);
    assert_int_equal(index_count(node.cache->index), 1);
    child_say(&d, "unlease 3");
    NODE_UNTIL(&node, leases() == 0);
    assert_int_equal(node_reserve(&node, SESSION, 12, 2, 3, 16, 0), BT_OK);
    bt_grants_session_end(node.grants, SESSION);
    assert_int_equal(node_counts(&node).leases, 0);
    child_quit(&d);
}

static void leases_are_bounded(void **state)
{
    struct child d;
    (void)state;
    child_start(&d, "d", 1, NULL);
    put_three(&d);
    for (uint32_t i = 0; i < 1024; i++) {
        child_say(&d, "lease %u 42 1", i + 1);
        if (i % 64 == 63) { /* pipes hold so much */
            char last[32];
            snprintf(last, sizeof(last), "leased %u status=OK", i + 1);
            child_wait(&d, last);
        }
    }
    child_say(&d, "lease 2000 42 1");
    child_wait(&d, "leased 2000 status=ERR_EXHAUSTED n=0");
    assert_int_equal(leases(), 1024);
    child_say(&d, "unlease 7");
    child_say(&d, "lease 2001 42 1");
    child_wait(&d, "leased 2001 status=OK n=1");
    child_quit(&d); /* its end ends them */
    NODE_UNTIL(&node, leases() == 0 && node_counts(&node).leases == 0);
}

/* ---- death, stop, hang ---- */

static void killed_reader_keeps_its_leases_for_a_quarantine(void **state)
{
    struct child d;
    (void)state;
    child_start(&d, "d", 1, NULL);
    put_three(&d);
    child_say(&d, "lease 1 42 3");
    child_wait(&d, "leased 1 status=OK n=3");
    uint64_t t0 = bt_mono_ns();
    kill(d.pid, SIGKILL);
    child_reap(&d, SIGKILL);
    while (bt_mono_ns() - t0 < 900000000ull) {
        bt_loop_poll(node.loop, 20);
        uint32_t n = leases(), slots = node_counts(&node).leases;
        if (bt_mono_ns() - t0 < 1000000000ull) { /* that turn may have taken long */
            assert_int_equal(slots, 3);
            assert_int_equal(n, 1);
        }
    }
    LOCAL_PASS_UNTIL(node_counts(&node).leases == 0);
    assert_int_equal(leases(), 0);
    assert_int_equal(index_count(node.cache->index), 3); /* the blocks are good */
}

static void killed_writer_is_quarantined(void **state)
{
    struct child p;
    (void)state;
    child_start(&p, "p", 1, NULL);
    child_writer(&p, 10, 1);
    uint32_t free_before = node_counts(&node).free;
    bt_grants_release(node.grants, SESSION, 99, 1); /* of something unknown: nothing happens */
    uint64_t t0 = bt_mono_ns();
    kill(p.pid, SIGKILL);
    child_reap(&p, SIGKILL);
    NODE_UNTIL(&node, node_counts(&node).quarantine == 3);
    assert_int_equal(node.n_failed, 1); /* the conductor is told at once */
    assert_int_equal(node.failed_status, BT_ERR_PEER_LOST);
    bt_grants_release(node.grants, SESSION, 10, 1);
    while (bt_mono_ns() - t0 < 900000000ull) {
        bt_loop_poll(node.loop, 20);
        struct bt_pool_counts n = node_counts(&node);
        if (bt_mono_ns() - t0 < 1000000000ull) { /* that turn may have taken long */
            assert_int_equal(n.quarantine, 3);
            assert_int_equal(n.free, free_before);
        }
    }
    NODE_UNTIL(&node, node_counts(&node).free == free_before + 3);
    assert_true(bt_mono_ns() - t0 >= 1000000000ull);
    assert_int_equal(node_counts(&node).leases, 0);
}

/* The reservation too holds slots: a killed worker alone does not free them. */
static void killed_writer_still_reserved(void **state)
{
    struct child p;
    (void)state;
    child_start(&p, "p", 1, NULL);
    child_writer(&p, 10, 1);
    kill(p.pid, SIGKILL);
    child_reap(&p, SIGKILL);
    NODE_UNTIL(&node, node_counts(&node).quarantine == 3);
    local_pass(1300);
    assert_int_equal(node_counts(&node).quarantine, 3);
    bt_grants_session_end(node.grants, SESSION); /* its session ends: now all are gone */
    assert_int_equal(node_counts(&node).quarantine, 0);
    assert_int_equal(node_counts(&node).leases, 0);
}

/* What a killed writer had finished by its flow word is kept. */
static void killed_writer_leaves_whole_chunks(void **state)
{
    struct child p;
    (void)state;
    child_start(&p, "p", 1, NULL);
    child_writer(&p, 10, 1);
    child_say(&p, "fill 10 1 3");
    child_wait(&p, "filled");
    child_say(&p, "raise 10 1 3"); /* chunk 0 (2 blocks) is whole, chunk 1 has one of two layers */
    node_poll_ms(&node, 50);
    kill(p.pid, SIGKILL);
    child_reap(&p, SIGKILL);
    NODE_UNTIL(&node, index_count(node.cache->index) == 2);
    assert_int_equal(node_counts(&node).quarantine, 1);
    bt_grants_release(node.grants, SESSION, 10, 1);
    NODE_UNTIL(&node, node_counts(&node).leases == 0);
    assert_int_equal(node_counts(&node).sealed, 2);
    assert_int_equal(node_counts(&node).quarantine, 0);
}

static void stopped_worker_keeps_its_slots(void **state)
{
    struct child p;
    (void)state;
    child_start(&p, "p", 1, NULL);
    child_writer(&p, 10, 1);
    stop_process(p.pid);
    bt_grants_release(node.grants, SESSION, 10, 1);
    local_pass(RECLAIM_MS / 2);
    assert_int_equal(node_counts(&node).writing, 3);
    assert_int_equal(node_counts(&node).free + 3, node_counts(&node).total);
    kill(p.pid, SIGCONT);
    child_wait(&p, "revoke 10 1");
    assert_int_equal(node_counts(&node).writing, 3); /* told, but not yet given back */
    child_say(&p, "close 10 1 w 1");
    NODE_UNTIL(&node, node_counts(&node).writing == 0);
    assert_int_equal(node_counts(&node).leases, 0);
    child_quit(&p);
}

static void hung_worker_is_killed_not_robbed(void **state)
{
    struct child p;
    struct bt_grants_stats s;
    (void)state;
    child_start(&p, "p", 1, NULL);
    child_writer(&p, 10, 1);
    bt_grants_release(node.grants, SESSION, 10, 1);
    child_wait(&p, "revoke 10 1"); /* it does not close */
    assert_int_equal(node_counts(&node).writing, 3);
    local_pass(RECLAIM_MS / 2);
    assert_int_equal(node_counts(&node).writing, 3);
    LOCAL_PASS_UNTIL((bt_grants_stats(node.grants, &s), s.killed == 1));
    child_reap(&p, SIGKILL);
    NODE_UNTIL(&node, node_counts(&node).quarantine == 3);
    LOCAL_PASS_UNTIL(node_counts(&node).quarantine == 0);
    assert_int_equal(node_counts(&node).leases, 0);
}

/* A lease is asked back when it is old; who gives it lives on. */
static void old_leases_are_recalled(void **state)
{
    struct child d;
    struct bt_grants_stats s;
    (void)state;
    child_start(&d, "d", 1, NULL);
    put_three(&d);
    clock_stop();
    child_say(&d, "lease 1 42 3");
    child_wait(&d, "leased 1 status=OK n=3");
    local_pass(RECLAIM_MS - 100);
    assert_false(child_said(&d, "recall 1"));
    local_pass(1000);
    child_wait(&d, "recall 1");
    assert_int_equal(node_counts(&node).leases, 3); /* told, but not yet given back */
    child_say(&d, "unlease 1");
    NODE_UNTIL(&node, leases() == 0);
    local_pass(3 * RECLAIM_MS);
    bt_grants_stats(node.grants, &s);
    assert_int_equal(s.killed, 0);
    child_quit(&d);
}

/* One that has nothing but a lease, and keeps it. */
static void hung_reader_is_killed(void **state)
{
    struct child d;
    struct bt_grants_stats s;
    (void)state;
    child_start(&d, "d", 1, NULL);
    put_three(&d);
    child_say(&d, "lease 1 42 3");
    child_wait(&d, "leased 1 status=OK n=3");
    stop_process(d.pid);
    LOCAL_PASS_UNTIL((bt_grants_stats(node.grants, &s), s.killed == 1));
    clock_stop();
    child_reap(&d, SIGKILL);
    assert_int_equal(node_counts(&node).leases, 3); /* for a quarantine */
    LOCAL_PASS_UNTIL(node_counts(&node).leases == 0);
    assert_int_equal(index_count(node.cache->index), 3);
}

/* One that stops with a put open: as long as it lives the slot is its own, whatever it does with it
 * when it wakes. */
static void stopped_putter_keeps_its_slot(void **state)
{
    struct child d;
    (void)state;
    child_start(&d, "d", 1, NULL);
    child_wait(&d, "attached");
    child_say(&d, "put 1 42 0 16");
    child_wait(&d, "putslot 1 status=OK");
    stop_process(d.pid);
    child_say(&d, "putfill 1 9");
    local_pass(RECLAIM_MS);
    assert_int_equal(node_counts(&node).writing, 1);
    assert_int_equal(node_counts(&node).free + 1, node_counts(&node).total);
    kill(d.pid, SIGCONT);
    child_say(&d, "putdone 1 0");
    NODE_UNTIL(&node, index_count(node.cache->index) == 1 && node_counts(&node).leases == 0);
    child_quit(&d);
}

/* One that stays stopped is killed, and its slots are given away a quarantine after its death. */
static void stopped_putter_is_killed(void **state)
{
    struct child d;
    struct bt_grants_stats s;
    (void)state;
    child_start(&d, "d", 1, NULL);
    put_three(&d);
    uint64_t t0 = bt_mono_ns();
    child_say(&d, "put 7 50 0 16");
    child_wait(&d, "putslot 7 status=OK");
    stop_process(d.pid);
    while (bt_grants_stats(node.grants, &s), s.killed == 0) {
        assert_int_equal(node_counts(&node).writing, 1);
        assert_true(bt_mono_ns() - t0 < 10ull * RECLAIM_MS * 1000000);
        local_pass(50);
    }
    assert_true(bt_mono_ns() - t0 >= 2ull * RECLAIM_MS * 1000000);
    uint64_t t1 = bt_mono_ns();
    child_reap(&d, SIGKILL);
    NODE_UNTIL(&node, node_counts(&node).quarantine == 1);
    LOCAL_PASS_UNTIL(node_counts(&node).quarantine == 0);
    assert_true(bt_mono_ns() - t1 >= 990000000ull);
    assert_int_equal(node_counts(&node).leases, 0);
    assert_int_equal(index_count(node.cache->index), 3);
    bt_grants_stats(node.grants, &s);
    assert_int_equal(s.puts, 0);
}

/* ---- a worker whose process lives while its socket does not: this process itself ---- */

static int raw_attach(const char *name, uint64_t inc, int fd_to_send, uint64_t layout_id)
{
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    Baton__LocalAttach a = BATON__LOCAL_ATTACH__INIT;
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    uint8_t buf[512];
    int sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    snprintf(sa.sun_path, sizeof(sa.sun_path), "%s/kvstore.sock", node.dir);
    assert_int_equal(connect(sock, (struct sockaddr *)&sa, sizeof(sa)), 0);
    a.version = 1;
    a.name = (char *)(uintptr_t)name;
    a.incarnation = inc;
    a.layout_id = layout_id;
    a.root_key.data = node.root.b;
    a.root_key.len = 32;
    m.m_case = BATON__LOCAL_MSG__M_ATTACH;
    m.attach = &a;
    struct iovec iov = {buf, baton__local_msg__pack(&m, buf)};
    union {
        struct cmsghdr align;
        char buf[CMSG_SPACE(sizeof(int))];
    } u;
    memset(&u, 0, sizeof(u));
    struct msghdr mh = {.msg_iov = &iov, .msg_iovlen = 1};
    if (fd_to_send >= 0) {
        mh.msg_control = u.buf;
        mh.msg_controllen = sizeof(u.buf);
        struct cmsghdr *c = CMSG_FIRSTHDR(&mh);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &fd_to_send, sizeof(int));
    }
    assert_true(sendmsg(sock, &mh, 0) > 0);
    return sock;
}

static Baton__LocalMsg *raw_recv(int sock)
{
    uint8_t buf[4096];
    ssize_t n;
    uint64_t end = node_machine_ns() + 60000000000ull;
    while ((n = recv(sock, buf, sizeof(buf), 0)) < 0 && errno == EAGAIN &&
           node_machine_ns() < end) {
        bt_loop_poll(node.loop, 10);
    }
    assert_true(n > 0);
    Baton__LocalMsg *m = baton__local_msg__unpack(NULL, (size_t)n, buf);
    assert_non_null(m);
    return m;
}

static int32_t raw_attached(int sock)
{
    Baton__LocalMsg *m = raw_recv(sock);
    assert_int_equal(m->m_case, BATON__LOCAL_MSG__M_ATTACHED);
    int32_t st = m->attached->status;
    baton__local_msg__free_unpacked(m, NULL);
    return st;
}

static void raw_open(int sock, uint64_t request, Baton__LocalMode mode)
{
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT, *a;
    Baton__LocalOpen o = BATON__LOCAL_OPEN__INIT;
    uint8_t buf[128];
    o.request = request;
    o.epoch = 1;
    o.mode = mode;
    m.m_case = BATON__LOCAL_MSG__M_OPEN;
    m.open = &o;
    assert_true(send(sock, buf, baton__local_msg__pack(&m, buf), 0) > 0);
    a = raw_recv(sock);
    assert_int_equal(a->m_case, BATON__LOCAL_MSG__M_OPENED);
    assert_int_equal(a->opened->status, BT_OK);
    baton__local_msg__free_unpacked(a, NULL);
}

static int own_pidfd(void)
{
    int fd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    assert_true(fd >= 0);
    return fd;
}

static void closed_socket_proves_nothing(void **state)
{
    (void)state;
    int pidfd = own_pidfd();
    int sock = raw_attach("self", 7, pidfd, node.layout.layout_id);
    assert_int_equal(raw_attached(sock), BT_OK);
    assert_int_equal(node_reserve(&node, SESSION, 10, 1, 1, 48, 0), BT_OK);
    raw_open(sock, 10, BATON__LOCAL_MODE__WRITER);
    close(sock);
    NODE_UNTIL(&node, node.n_failed == 1); /* the flow cannot be completed any more */
    bt_grants_release(node.grants, SESSION, 10, 1);
    local_pass(RECLAIM_MS / 2);
    assert_int_equal(node_counts(&node).writing, 3); /* but its slots are still its own */

    /* A new attachment of the same incarnation says that the old opens are over. */
    uint64_t t0 = bt_mono_ns();
    sock = raw_attach("self", 7, pidfd, node.layout.layout_id);
    assert_int_equal(raw_attached(sock), BT_OK);
    NODE_UNTIL(&node, node_counts(&node).quarantine == 3);
    LOCAL_PASS_UNTIL(node_counts(&node).leases == 0);
    assert_true(bt_mono_ns() - t0 >= 1000000000ull);
    assert_int_equal(node_counts(&node).free, node_counts(&node).total);
    close(sock);
    close(pidfd);
}

/* Another incarnation is another worker: its attachment frees nothing of the first. */
static void other_incarnation_frees_nothing(void **state)
{
    (void)state;
    int pidfd = own_pidfd();
    int sock = raw_attach("self", 7, pidfd, node.layout.layout_id);
    assert_int_equal(raw_attached(sock), BT_OK);
    assert_int_equal(node_reserve(&node, SESSION, 10, 1, 1, 48, 0), BT_OK);
    raw_open(sock, 10, BATON__LOCAL_MODE__WRITER);
    int other = raw_attach("self", 8, pidfd, node.layout.layout_id);
    assert_int_equal(raw_attached(other), BT_OK);
    close(sock);
    bt_grants_release(node.grants, SESSION, 10, 1);
    local_pass(RECLAIM_MS / 2);
    assert_int_equal(node_counts(&node).writing, 3);
    close(other);
    close(pidfd);
}

static void refusals(void **state)
{
    struct child c;
    (void)state;
    child_start(&c, "wrong", 1, "heads=2"); /* another layout */
    assert_non_null(strstr(child_wait(&c, "refused ERR_MISMATCH"), "layout"));
    child_quit(&c);
    child_start(&c, "wrong", 1, "root=8");
    assert_non_null(strstr(child_wait(&c, "refused ERR_MISMATCH"), "root key"));

    int fds[2];
    assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
    int sock = raw_attach("self", 7, -1, node.layout.layout_id); /* no pidfd */
    assert_int_equal(raw_attached(sock), BT_ERR_PEER_PROTOCOL);
    close(sock);
    sock = raw_attach("self", 7, fds[0], node.layout.layout_id); /* something else */
    assert_int_equal(raw_attached(sock), BT_ERR_PEER_PROTOCOL);
    close(sock);
    int theirs = (int)syscall(SYS_pidfd_open, c.pid, 0); /* of another process */
    sock = raw_attach("self", 7, theirs, node.layout.layout_id);
    assert_int_equal(raw_attached(sock), BT_ERR_PEER_PROTOCOL);
    close(sock);
    close(theirs);
    close(fds[0]);
    close(fds[1]);
    child_quit(&c);
    /* An open before the attach, and garbage. */
    for (int i = 0; i < 2; i++) {
        struct sockaddr_un sa = {.sun_family = AF_UNIX};
        snprintf(sa.sun_path, sizeof(sa.sun_path), "%s/kvstore.sock", node.dir);
        sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        assert_int_equal(connect(sock, (struct sockaddr *)&sa, sizeof(sa)), 0);
        assert_true(send(sock, i == 0 ? "\x1a\x00" : "\xff\xff\xff", i == 0 ? 2 : 3, 0) > 0);
        char b;
        NODE_UNTIL(&node, recv(sock, &b, 1, MSG_DONTWAIT) == 0);
        close(sock);
    }
    struct bt_grants_stats stats;
    NODE_UNTIL(&node, (bt_grants_stats(node.grants, &stats), stats.workers == 0));
}

#define STRANGER 65534

/* A process of another user listens at the socket. Returns its pid; *said_p: it writes 'n' for a
 * peer that said nothing, 's' for one that spoke. */
static pid_t stranger_listens(int *said_p)
{
    int out[2];
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    snprintf(sa.sun_path, sizeof(sa.sun_path), "%s/kvstore.sock", node.dir);
    assert_int_equal(chmod(node.dir, 0777), 0);
    assert_int_equal(pipe2(out, O_CLOEXEC), 0);
    pid_t pid = fork();
    if (pid == 0) {
        int sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        if (setuid(STRANGER) != 0 || prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 ||
            bind(sock, (struct sockaddr *)&sa, sizeof(sa)) != 0 || chmod(sa.sun_path, 0777) != 0 ||
            listen(sock, 8) != 0) {
            _exit(1);
        }
        for (int fd; (fd = accept(sock, NULL, NULL)) >= 0; close(fd)) {
            char buf[4096];
            if (write(out[1], recv(fd, buf, sizeof(buf), 0) > 0 ? "s" : "n", 1) != 1) {
                _exit(1);
            }
        }
        _exit(1);
    }
    close(out[1]);
    *said_p = out[0];
    return pid;
}

/* A worker says nothing to a kvstore of another user, unless it was told to trust that one. */
static void a_stranger_at_the_socket(void **state)
{
    struct child c;
    char said = '\0';
    int from;
    (void)state;
    if (geteuid() != 0) {
        skip(); /* nobody else can become another user */
    }
    bt_serve_local_destroy(node.local);
    node.local = NULL;
    pid_t pid = stranger_listens(&from);
    child_start(&c, "p", 1, NULL);
    const char *why = child_wait(&c, "refused ERR_CONFIG");
    assert_non_null(strstr(why, "runs as user 65534"));
    assert_non_null(strstr(why, "worker.kvstore_user"));
    assert_int_equal(read(from, &said, 1), 1);
    assert_int_equal(said, 'n');
    child_quit(&c);
    child_start(&c, "p", 1, "kvstore_uid=65534");
    do {
        assert_int_equal(read(from, &said, 1), 1);
    } while (said == 'n'); /* of the first worker's last tries */
    assert_int_equal(said, 's');
    child_quit(&c);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    close(from);
    char path[128];
    snprintf(path, sizeof(path), "%s/kvstore.sock", node.dir);
    assert_int_equal(unlink(path), 0);
}

/* The kvstore stops and comes back: the worker detaches, attaches again, and works. */
static void reconnect(void **state)
{
    struct child p;
    char err[256];
    (void)state;
    child_start(&p, "p", 1, NULL);
    child_writer(&p, 10, 1);
    bt_serve_local_destroy(node.local);
    node.local = NULL;
    child_wait(&p, "detached");
    struct bt_serve_local_config lc = {.loop = node.loop,
                                       .run_dir = node.dir,
                                       .node = "n1",
                                       .incarnation = 100,
                                       .slab = node.slab,
                                       .grants = node.grants};
    assert_int_equal(bt_serve_local_create(&lc, &node.local, err, sizeof(err)), BT_OK);
    child_wait(&p, "attached inc=0000000000000064");
    assert_int_equal(node_reserve(&node, SESSION, 11, 1, 2, 48, 0), BT_OK);
    child_say(&p, "open 11 1 w");
    assert_non_null(strstr(child_wait(&p, "opened 11"), "status=OK"));
    struct bt_serve_local *second = NULL; /* one kvstore a run_dir */
    assert_int_equal(bt_serve_local_create(&lc, &second, err, sizeof(err)), BT_ERR_EXISTS);
    assert_non_null(strstr(err, node.dir));
    struct bt_grants_stats stats;
    bt_grants_stats(node.grants, &stats);
    assert_int_equal(stats.workers, 1);
    child_quit(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(write_and_read_on_one_node, setup, teardown),
        cmocka_unit_test_setup_teardown(open_waits_for_its_reservation, setup, teardown),
        cmocka_unit_test_setup_teardown(puts_write_back, setup, teardown),
        cmocka_unit_test_setup_teardown(leased_blocks_stay, setup, teardown),
        cmocka_unit_test_setup_teardown(leases_are_bounded, setup, teardown),
        cmocka_unit_test_setup_teardown(killed_reader_keeps_its_leases_for_a_quarantine, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(killed_writer_is_quarantined, setup, teardown),
        cmocka_unit_test_setup_teardown(killed_writer_still_reserved, setup, teardown),
        cmocka_unit_test_setup_teardown(killed_writer_leaves_whole_chunks, setup, teardown),
        cmocka_unit_test_setup_teardown(stopped_worker_keeps_its_slots, setup, teardown),
        cmocka_unit_test_setup_teardown(hung_worker_is_killed_not_robbed, setup, teardown),
        cmocka_unit_test_setup_teardown(old_leases_are_recalled, setup, teardown),
        cmocka_unit_test_setup_teardown(hung_reader_is_killed, setup, teardown),
        cmocka_unit_test_setup_teardown(stopped_putter_keeps_its_slot, setup, teardown),
        cmocka_unit_test_setup_teardown(stopped_putter_is_killed, setup, teardown),
        cmocka_unit_test_setup_teardown(closed_socket_proves_nothing, setup, teardown),
        cmocka_unit_test_setup_teardown(other_incarnation_frees_nothing, setup, teardown),
        cmocka_unit_test_setup_teardown(refusals, setup, teardown),
        cmocka_unit_test_setup_teardown(a_stranger_at_the_socket, setup, teardown),
        cmocka_unit_test_setup_teardown(reconnect, setup, teardown),
    };
    signal(SIGPIPE, SIG_IGN);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
