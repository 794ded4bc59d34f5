/* The kvstore's side of the wire process against a process that lies: this program again, started
 * by the proxy, plays it. A message that does not fit ends the process and nothing else; objects
 * end once it is dead; the next one is started. */
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "kvstore/wire/wx_priv.h"
#include "tests/unit/virtual_clock.h"

#define CASE_FD 201 /* of the parent: which part the process plays */

enum { SINCERE, MUTE, DIES, STAYS, LAST };

/* What the process says once it knows connection, path and flow. */
struct lie {
    const char *name;
    uint32_t type;
    int about;      /* 0: the connection, 1: the path, 2: the receive, 3: nothing that there is */
    size_t n;       /* bytes of body, */
    uint32_t first; /* of which these are the first four */
    bool again;     /* said twice; once is right */
};

static const struct lie lies[] = {
    {"unknown type", 99, 0, 0, 0, false},
    {"a command", BT_WX_M_STOP, 0, 0, 0, false},
    {"unknown object", BT_WX_M_PROVEN, 3, 0, 0, false},
    {"no address", BT_WX_M_READY, 1, 0, 0, false},
    {"an address too long", BT_WX_M_READY, 1, 100000, 0, false},
    {"an address of a connection", BT_WX_M_READY, 0, 8, 0, false},
    {"ready twice", BT_WX_M_READY, 1, 8, 0, true},
    {"proof of a receive", BT_WX_M_PROVEN, 2, 0, 0, false},
    {"proof twice", BT_WX_M_PROVEN, 1, 0, 0, true},
    {"more progress than there is", BT_WX_M_PROGRESS, 2, 4, 9, false},
    {"progress of a path", BT_WX_M_PROGRESS, 1, 4, 1, false},
    {"progress cut", BT_WX_M_PROGRESS, 2, 3, 1, false},
    {"landed without numbers", BT_WX_M_LANDED, 2, 8, 0, false},
    {"landed twice", BT_WX_M_LANDED, 2, sizeof(struct bt_wx_ipc_landed), 0, true},
    {"sent what is received", BT_WX_M_SENT, 2, 0, 0, false},
    {"lost for no reason", BT_WX_M_LOST, 0, 4, 0, false},
    {"lost for a good reason", BT_WX_M_LOST, 0, 4, 1, false},
    {"lost for an unknown reason", BT_WX_M_LOST, 0, 4, 0x80000000u, false},
    {"stopped without being told", BT_WX_M_STOPPED, 2, 0, 0, false},
    {"sent again without being told", BT_WX_M_RESENT, 1, 0, 0, false},
    {"a card that was not asked for", BT_WX_M_CARD_STARTED, 0, 8, 0, false},
    {"a card that there is not", BT_WX_M_CARD_STARTED, 0, 8, 77, false},
    {"half a card", BT_WX_M_CARD_STARTED, 0, 3, 0, false},
    {"a pong with something", BT_WX_M_PONG, 0, 1, 0, false},
};

/* ---- the process ---- */

static void say(struct bt_wx_pipe *p, uint32_t type, uint32_t handle, const void *body, size_t n)
{
    bt_wx_pipe_put(p, (bt_wx_ipc_type_t)type, handle, &(struct iovec){(void *)(uintptr_t)body, n},
                   1);
}

static void lie_about(struct bt_wx_pipe *p, const struct lie *l, const uint32_t *handles)
{
    static uint8_t body[100000];
    memcpy(body, &l->first, sizeof(l->first));
    for (int i = 0; i < (l->again ? 2 : 1); i++) {
        say(p, l->type, handles[l->about], body, l->n);
    }
}

/* Whatever the kvstore has done to signals, its process begins without. */
static bool signals_are_as_usual(void)
{
    sigset_t blocked;
    struct sigaction usr2;
    return sigprocmask(SIG_BLOCK, NULL, &blocked) == 0 && !sigismember(&blocked, SIGUSR1) &&
           sigaction(SIGUSR2, NULL, &usr2) == 0 && usr2.sa_handler == SIG_DFL;
}

static void play(int argc, char **argv)
{
    char path[64];
    struct bt_wx_pipe pipe;
    struct bt_wx_child_fds fds;
    struct bt_wx_ipc_msg m;
    long parent;
    uint32_t what = 0, handles[4] = {0, 0, 0, 4711};
    snprintf(path, sizeof(path), "/proc/%s/fd/%d", argv[2], CASE_FD);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    BT_ASSERT(fd >= 0 && pread(fd, &what, sizeof(what), 0) == sizeof(what));
    BT_ASSERT(bt_wx_child_args(argc, argv, &parent, &fds) && getppid() == (pid_t)parent);
    BT_ASSERT(signals_are_as_usual());
    bt_wx_pipe_init(&pipe, fds.sock);
    for (;;) {
        struct pollfd pfd = {.fd = fds.sock, .events = POLLIN};
        (void)poll(&pfd, 1, -1);
        if (bt_wx_pipe_read(&pipe) == BT_ERR_PEER_LOST) {
            _exit(0);
        }
        while (bt_wx_pipe_next(&pipe, &m) == BT_OK) {
            struct bt_wx_ipc_card card;
            if (m.type == BT_WX_M_CARD && bt_wx_ipc_take(&m, &card, sizeof(card))) {
                say(&pipe, BT_WX_M_CARD_STARTED, 0, &card, sizeof(card));
            } else if (m.type == BT_WX_M_PING && what != MUTE) {
                say(&pipe, BT_WX_M_PONG, 0, NULL, 0);
            } else if (m.type == BT_WX_M_OPEN_CONN) {
                handles[0] = m.handle;
            } else if (m.type == BT_WX_M_OPEN_PATH) {
                handles[1] = m.handle;
            } else if (m.type == BT_WX_M_ADD_RECV && what >= LAST) {
                handles[2] = m.handle;
                lie_about(&pipe, &lies[what - LAST], handles);
            } else if (m.type == BT_WX_M_ADD_RECV && what == DIES) {
                abort();
            } else if (m.type == BT_WX_M_STOP) {
                say(&pipe, BT_WX_M_STOPPED, m.handle, NULL, 0);
            } else if (m.type == BT_WX_M_QUIT && what == STAYS) {
                say(&pipe, BT_WX_M_PONG, 0, NULL, 0);
            } else if (m.type == BT_WX_M_QUIT) {
                BT_ASSERT(bt_wx_pipe_flush(&pipe) == BT_OK);
                exit(0);
            }
        }
        BT_ASSERT(bt_wx_pipe_flush(&pipe) != BT_ERR_PEER_LOST);
    }
}

/* ---- the kvstore ---- */

static struct {
    struct bt_loop *loop;
    struct bt_slab *slab;
    struct bt_kv_layout layout;
    struct bt_metrics *metrics;
    struct bt_wx_config conf;
    struct bt_wx *x;
    struct bt_wx_conn conn;
    struct bt_wx_path path;
    struct bt_wx_recv recv;
    uint32_t slot;
    struct bt_kv_key name;
    bt_flow_word_t word;
    uint32_t conn_ev, path_ev, recv_ev;
    int part;
} K;

static void on_event(void *arg, struct bt_wx_obj *o, uint32_t ev)
{
    (void)arg;
    *(o == &K.conn.obj ? &K.conn_ev : o == &K.path.obj ? &K.path_ev : &K.recv_ev) |= ev;
}

static void part(uint32_t what)
{
    assert_int_equal(pwrite(K.part, &what, sizeof(what), 0), sizeof(what));
}

static int setup(void **state)
{
    char err[512], path[96];
    struct bt_kv_key root = {{1}};
    struct bt_metric **list[BT_WX_COUNTERS];
    (void)state;
    memset(&K, 0, sizeof(K));
    assert_int_equal(bt_kv_layout_gqa(16, 2, 1, 64, BT_DT_BF16, 0, &K.layout), BT_OK);
    snprintf(path, sizeof(path), "/dev/shm/baton-unit-proxy-%d", (int)getpid());
    struct bt_slab_spec spec = {
        .path = path, .bytes = 1 << 20, .layout = &K.layout, .root = &root, .incarnation = 1};
    assert_int_equal(bt_slab_create(&spec, NULL, NULL, &K.slab, err, sizeof(err)), BT_OK);
    unlink(path);
    K.part = memfd_create("part", MFD_CLOEXEC);
    assert_int_equal(dup3(K.part, CASE_FD, O_CLOEXEC), CASE_FD);
    part(SINCERE);
    clock_skip_stalls();
    assert_int_equal(bt_loop_create(&K.loop), BT_OK);
    K.metrics = bt_metrics_create();
    K.conf = (struct bt_wx_config){.slab = K.slab,
                                   .layout = &K.layout,
                                   .bytes_in_flight_max = 1 << 20,
                                   .n_cards = 1,
                                   .loop = K.loop,
                                   .on_event = on_event};
    uint32_t n = bt_wx_counters(&K.conf, list);
    for (uint32_t i = 0; i < n; i++) {
        snprintf(err, sizeof(err), "i=\"%u\"", i);
        *list[i] = bt_metrics_counter(K.metrics, "counters", err);
    }
    K.conf.process_restarts = bt_metrics_counter(K.metrics, "losses", NULL);
    K.x = bt_wx_create(&K.conf);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    bt_wx_destroy(K.x);
    bt_loop_poll(K.loop, 0);
    bt_loop_destroy(K.loop);
    bt_metrics_destroy(K.metrics);
    bt_slab_unmap(K.slab);
    free(K.path.address);
    close(K.part);
    close(CASE_FD);
    return 0;
}

static void start_card(void)
{
    char err[512] = "";
    bt_status_t st = bt_wx_card_start(K.x, 0, true, err, sizeof(err));
    if (st != BT_OK) {
        fail_msg("%s", err);
    }
}

static void open_all(void)
{
    memset(&K.conn, 0, sizeof(K.conn));
    memset(&K.path, 0, sizeof(K.path));
    memset(&K.recv, 0, sizeof(K.recv));
    K.conn_ev = K.path_ev = K.recv_ev = 0;
    K.conn.obj.kind = BT_WX_CONN;
    K.conn.heard_at = &K.conn.heard;
    K.path.obj.kind = BT_WX_PATH;
    K.path.conn = &K.conn;
    K.recv.obj.kind = BT_WX_RECV;
    K.recv.conn = &K.conn;
    K.recv.shape = (struct bt_flow_shape){16, 16, 16, 2};
    K.recv.slots = &K.slot;
    K.recv.names = &K.name;
    K.recv.word = &K.word;
    K.recv.epoch = 1;
    bt_wx_command(K.x, &K.conn.obj, BT_WX_CMD_OPEN);
    bt_wx_command(K.x, &K.path.obj, BT_WX_CMD_OPEN);
    bt_wx_command(K.x, &K.recv.obj, BT_WX_CMD_ADD);
}

static bool until(const uint32_t *events, uint32_t ev)
{
    uint64_t end = bt_mono_ns() + 20000000000ull;
    while (!(*events & ev) && bt_mono_ns() < end) {
        bt_loop_poll(K.loop, 10);
    }
    return (*events & ev) != 0;
}

static void stop_all(void)
{
    bt_wx_command(K.x, &K.recv.obj, BT_WX_CMD_STOP);
    bt_wx_command(K.x, &K.path.obj, BT_WX_CMD_STOP);
    bt_wx_command(K.x, &K.conn.obj, BT_WX_CMD_STOP);
    assert_true(until(&K.recv_ev, BT_WX_EV_STOPPED));
    assert_true(until(&K.path_ev, BT_WX_EV_STOPPED));
    assert_true(until(&K.conn_ev, BT_WX_EV_STOPPED));
    free(K.path.address);
    K.path.address = NULL;
}

static void wait_for_process(pid_t other_than)
{
    uint64_t end = bt_mono_ns() + 20000000000ull;
    while (K.x->proxy->process.pid == 0 || K.x->proxy->process.pid == other_than) {
        bt_loop_poll(K.loop, 10);
        assert_true(bt_mono_ns() < end);
    }
}

static void objects_live_and_end(void **state)
{
    (void)state;
    start_card();
    pid_t pid = K.x->proxy->process.pid;
    open_all();
    assert_ptr_not_equal(K.conn.heard_at, &K.conn.heard); /* counted where the process sees it */
    stop_all();
    assert_ptr_equal(K.conn.heard_at, &K.conn.heard);
    for (uint32_t i = 0; i < BT_WX_HEARD; i++) { /* and the place is free for another session */
        assert_false(K.x->proxy->heard_taken[i]);
    }
    assert_int_equal(K.conn_ev | K.recv_ev | K.path_ev, BT_WX_EV_STOPPED);
    assert_int_equal(K.x->proxy->process.pid, pid);
    assert_int_equal((int)bt_metric_value(K.conf.process_restarts), 0);
}

/* Every lie ends the process; what it had is lost, then stopped; another one works. */
static void lies_end_the_process(void **state)
{
    teardown(state);
    for (size_t i = 0; i < BT_ARRAY_LEN(lies); i++) {
        setup(NULL);
        start_card();
        pid_t pid = K.x->proxy->process.pid;
        part(SINCERE); /* of the next one */
        (void)kill(pid, SIGKILL);
        part((uint32_t)(LAST + i));
        wait_for_process(pid);
        pid = K.x->proxy->process.pid;
        /* It is told at once which cards the one before it had. */
        assert_true(K.x->proxy->cards[0].asked || K.x->proxy->cards[0].started);
        uint64_t end = bt_mono_ns() + 20000000000ull;
        while (!K.x->proxy->cards[0].started) { /* it has read its part */
            bt_loop_poll(K.loop, 10);
            assert_true(bt_mono_ns() < end);
        }
        part(SINCERE);
        open_all();
        if (!until(&K.conn_ev, BT_WX_EV_LOST) || strstr(K.conn.why, "wire process") == NULL) {
            fail_msg("%s: is believed", lies[i].name);
        }
        assert_int_equal(K.conn.lost, BT_ERR_PEER_LOST);
        stop_all();
        assert_true(bt_flow_read(&K.word, 1) <= 2);
        wait_for_process(pid);
        assert_int_equal((int)bt_metric_value(K.conf.process_restarts), 2);
        open_all();
        stop_all();
        assert_int_equal(K.conn_ev & BT_WX_EV_LOST, 0);
        teardown(NULL);
    }
    setup(NULL);
}

static void a_death_is_told_when_nobody_writes(void **state)
{
    (void)state;
    part(DIES);
    start_card();
    pid_t pid = K.x->proxy->process.pid;
    part(SINCERE);
    open_all();
    bt_wx_command(K.x, &K.recv.obj, BT_WX_CMD_STOP); /* its answer is its death */
    assert_true(until(&K.recv_ev, BT_WX_EV_STOPPED));
    assert_true(until(&K.conn_ev, BT_WX_EV_LOST));
    assert_int_equal(kill(pid, 0), -1); /* reaped */
    assert_non_null(strstr(K.conn.why, "signal 6"));
    struct bt_wx_conn late = {.obj.kind = BT_WX_CONN, .heard_at = &late.heard};
    K.conn_ev = 0;
    if (K.x->proxy->process.pid == 0) { /* it is away: what is opened now is lost at once */
        bt_wx_command(K.x, &late.obj, BT_WX_CMD_OPEN);
        bt_wx_command(K.x, &late.obj, BT_WX_CMD_STOP);
        assert_int_equal(late.obj.handle, 0);
    }
    bt_wx_command(K.x, &K.path.obj, BT_WX_CMD_STOP);
    bt_wx_command(K.x, &K.conn.obj, BT_WX_CMD_STOP);
    assert_true(until(&K.path_ev, BT_WX_EV_STOPPED));
    assert_true(until(&K.conn_ev, BT_WX_EV_STOPPED));
    wait_for_process(pid);
    bt_loop_poll(K.loop, 0); /* the late one's events */
    open_all();
    stop_all();
}

static void silence_ends_it(void **state)
{
    (void)state;
    part(MUTE);
    start_card();
    pid_t pid = K.x->proxy->process.pid;
    part(SINCERE);
    open_all();
    uint64_t began = bt_mono_ns();
    assert_true(until(&K.conn_ev, BT_WX_EV_LOST));
    assert_in_range(bt_mono_ns() - began, 1500000000ull, 6000000000ull);
    stop_all();
    wait_for_process(pid);
}

/* The kvstore's end is not kept up for ever by one that does not go; what it had ends with it. */
/* While bt_wx_destroy waits, its limit passes. */
static void *limit_passes(void *arg)
{
    (void)arg;
    usleep(300000);
    clock_jump(10000);
    return NULL;
}

static void one_that_stays_is_killed(void **state)
{
    pthread_t passing;
    (void)state;
    part(STAYS);
    start_card();
    pid_t pid = K.x->proxy->process.pid;
    open_all();
    bt_wx_command(K.x, &K.recv.obj, BT_WX_CMD_STOP);
    bt_wx_command(K.x, &K.path.obj, BT_WX_CMD_STOP);
    bt_wx_command(K.x, &K.conn.obj, BT_WX_CMD_STOP);
    assert_int_equal(pthread_create(&passing, NULL, limit_passes, NULL), 0);
    bt_wx_destroy(K.x);
    assert_int_equal(pthread_join(passing, NULL), 0);
    assert_int_equal(K.recv_ev & K.path_ev & K.conn_ev, BT_WX_EV_STOPPED);
    assert_int_equal(kill(pid, 0), -1);
    bt_loop_poll(K.loop, 0);
    K.x = bt_wx_create(&K.conf);
}

/* It died while it stored a CRC, and before it read a wake-up: nobody waits for that CRC any more,
 * and the next process can be woken. */
static void what_it_was_doing(void **state)
{
    enum { STORING_OTHER = 3 }; /* crcs.c */
    (void)state;
    bt_wx_destroy(K.x);
    K.conf.crcs = bt_slab_crcs_create(K.slab, &K.layout);
    K.x = bt_wx_create(&K.conf);
    start_card();
    pid_t pid = K.x->proxy->process.pid;
    _Atomic uint8_t *marks =
        mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, bt_slab_crcs_fd(K.conf.crcs), 0);
    assert_true(marks != MAP_FAILED);
    marks[0] = STORING_OTHER;
    atomic_store(&K.x->proxy->board->bell.woken, true);
    assert_int_equal(kill(pid, SIGKILL), 0);
    wait_for_process(pid);
    assert_int_not_equal(marks[0], STORING_OTHER);
    assert_false(atomic_load(&K.x->proxy->board->bell.woken));
    (void)bt_slab_crcs_get(K.conf.crcs, 0, 0, &K.name);
    assert_true(bt_slab_crcs_known(K.conf.crcs, 0, 0));
    munmap((void *)(uintptr_t)marks, 4096);
    bt_wx_destroy(K.x);
    bt_slab_crcs_destroy(K.conf.crcs);
    K.conf.crcs = NULL;
    K.x = bt_wx_create(&K.conf);
}

static size_t descriptors(void)
{
    DIR *d = opendir("/proc/self/fd");
    size_t n = 0;
    assert_non_null(d);
    while (readdir(d) != NULL) {
        n++;
    }
    closedir(d);
    return n;
}

/* Mappings of memory that a wire process has as well. */
static size_t shared_mappings(void)
{
    FILE *f = fopen("/proc/self/maps", "r");
    char line[512];
    size_t n = 0;
    assert_non_null(f);
    while (fgets(line, sizeof(line), f) != NULL) {
        n += strstr(line, "/memfd:") != NULL;
    }
    fclose(f);
    return n;
}

/* Descriptors and shared memory of a wire process, and of the one after it, end with the wire; what
 * was counted stays readable. */
static void nothing_is_left_open(void **state)
{
    struct bt_metric **list[BT_WX_COUNTERS];
    uint32_t n = bt_wx_counters(&K.conf, list);
    size_t fds = 0, maps = 0;
    (void)state;
    for (int round = 0; round < 3; round++) { /* the first one also opens what stays */
        start_card();
        pid_t pid = K.x->proxy->process.pid;
        open_all();
        stop_all();
        assert_int_equal(kill(pid, SIGKILL), 0);
        wait_for_process(pid);
        bt_wx_destroy(K.x);
        bt_loop_poll(K.loop, 0);
        for (uint32_t i = 0; i < n; i++) {
            assert_true(bt_metric_value(*list[i]) >= 0);
        }
        if (round > 0) {
            assert_int_equal(descriptors(), fds);
            assert_int_equal(shared_mappings(), maps);
        }
        fds = descriptors();
        maps = shared_mappings();
        K.x = bt_wx_create(&K.conf);
    }
}

int main(int argc, char **argv)
{
    if (argc > 2 && strcmp(argv[1], BT_WX_CHILD_ARG) == 0) {
        play(argc, argv);
    }
    sigset_t usr1;
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    BT_ASSERT(sigprocmask(SIG_BLOCK, &usr1, NULL) == 0 && signal(SIGUSR2, SIG_IGN) != SIG_ERR);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(objects_live_and_end, setup, teardown),
        cmocka_unit_test_setup_teardown(lies_end_the_process, setup, teardown),
        cmocka_unit_test_setup_teardown(a_death_is_told_when_nobody_writes, setup, teardown),
        cmocka_unit_test_setup_teardown(silence_ends_it, setup, teardown),
        cmocka_unit_test_setup_teardown(one_that_stays_is_killed, setup, teardown),
        cmocka_unit_test_setup_teardown(what_it_was_doing, setup, teardown),
        cmocka_unit_test_setup_teardown(nothing_is_left_open, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
