/* common/loop and common/metrics: order of timers, posting from threads, removal inside callbacks.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/loop/loop.h"
#include "common/metrics/metrics.h"

static int fired[64], n_fired;
static struct bt_loop *loop;

static void note(void *arg)
{
    fired[n_fired++ % 64] = (int)(intptr_t)arg;
}

static void timers_fire_in_order_and_stop(void **state)
{
    (void)state;
    struct bt_timer t[20] = {{0}};
    n_fired = 0;
    assert_int_equal(bt_loop_create(&loop), BT_OK);
    for (int i = 0; i < 20; i++) {
        bt_timer_start(loop, &t[i], (uint64_t)((i * 7) % 20), 0, note,
                       (void *)(intptr_t)((i * 7) % 20));
    }
    for (int i = 0; i < 20; i++) {
        if ((i * 7) % 20 % 3 == 0) {
            bt_timer_stop(loop, &t[i]);
        }
    }
    uint64_t end = bt_mono_ns() + 60000000000ull;
    while (n_fired < 13 && bt_mono_ns() < end) {
        bt_loop_poll(loop, 100);
    }
    assert_int_equal(n_fired, 13);
    for (int i = 1; i < n_fired; i++) {
        assert_true(fired[i - 1] < fired[i]);
        assert_true(fired[i] % 3 != 0);
    }
    bt_loop_destroy(loop);
}

static struct bt_timer soon;
static void do_soon(void *arg)
{
    bt_timer_start(loop, &soon, 0, 0, note, arg);
}

/* A loop whose turns take longer than a period: the periodic timer is due in each of them, before
 * the one that it starts. */
static void a_timer_that_is_due_is_not_put_off(void **state)
{
    struct bt_timer tick = {0};
    (void)state;
    n_fired = 0;
    soon = (struct bt_timer){0};
    assert_int_equal(bt_loop_create(&loop), BT_OK);
    bt_timer_start(loop, &tick, 1, 1, do_soon, NULL);
    for (int i = 0; i < 20; i++) {
        usleep(3000);
        bt_loop_poll(loop, 0);
    }
    assert_in_range(n_fired, 9, 20); /* started in one turn, it runs in the next */
    bt_timer_stop(loop, &tick);
    bt_timer_stop(loop, &soon);
    bt_loop_destroy(loop);
}

static struct bt_timer periodic;
static void count_and_stop(void *arg)
{
    if (++*(int *)arg == 5) {
        bt_timer_stop(loop, &periodic);
        bt_loop_stop(loop);
    }
}

static void periodic_timer_may_stop_itself(void **state)
{
    (void)state;
    int n = 0;
    assert_int_equal(bt_loop_create(&loop), BT_OK);
    bt_timer_start(loop, &periodic, 1, 1, count_and_stop, &n);
    bt_loop_run(loop);
    assert_int_equal(n, 5);
    bt_loop_destroy(loop);
}

#define POSTS 1000
static struct bt_task tasks[2][POSTS];
static int order_ok = 1, posted_count, last_of[2];
static void on_post(void *arg)
{
    struct bt_task *t = arg;
    int who = t >= tasks[1], i = (int)(t - tasks[who]);
    order_ok &= i == last_of[who]++;
    if (++posted_count == 2 * POSTS) {
        bt_loop_stop(loop);
    }
}
static void *poster(void *arg)
{
    struct bt_task *t = arg;
    for (int i = 0; i < POSTS; i++) {
        t[i].fn = on_post;
        t[i].arg = &t[i];
        bt_loop_post(loop, &t[i]);
    }
    return NULL;
}

static void posts_of_two_threads_arrive_in_order(void **state)
{
    (void)state;
    pthread_t th[2];
    assert_int_equal(bt_loop_create(&loop), BT_OK);
    for (int i = 0; i < 2; i++) {
        pthread_create(&th[i], NULL, poster, tasks[i]);
    }
    bt_loop_run(loop);
    for (int i = 0; i < 2; i++) {
        pthread_join(th[i], NULL);
    }
    assert_true(order_ok);
    bt_loop_destroy(loop);
}

static struct bt_loop_fd *watch[2];
static int calls;
static void delete_both(void *arg, uint32_t events)
{
    (void)arg;
    (void)events;
    calls++;
    bt_loop_fd_del(loop, watch[0]);
    bt_loop_fd_del(loop, watch[1]);
}

static void a_watcher_removed_in_its_turn_is_not_called(void **state)
{
    (void)state;
    int a[2], b[2];
    assert_int_equal(pipe(a) | pipe(b), 0);
    assert_int_equal(bt_loop_create(&loop), BT_OK);
    watch[0] = bt_loop_fd_add(loop, a[0], EPOLLIN, delete_both, NULL);
    watch[1] = bt_loop_fd_add(loop, b[0], EPOLLIN, delete_both, NULL);
    assert_int_equal(write(a[1], "x", 1) + write(b[1], "x", 1), 2);
    bt_loop_poll(loop, 100);
    bt_loop_poll(loop, 0);
    assert_int_equal(calls, 1);
    bt_loop_destroy(loop);
    for (int i = 0; i < 2; i++) {
        close(a[i]);
        close(b[i]);
    }
}

static void on_usr1(void *arg, int signo)
{
    *(int *)arg = signo;
    bt_loop_stop(loop);
}

static void signals_arrive_on_the_loop(void **state)
{
    (void)state;
    int got = 0;
    assert_int_equal(bt_loop_create(&loop), BT_OK);
    bt_loop_on_signal(loop, SIGUSR1, on_usr1, &got);
    kill(getpid(), SIGUSR1);
    bt_loop_run(loop);
    assert_int_equal(got, SIGUSR1);
    bt_loop_destroy(loop);
}

static void metrics_render_as_prometheus_reads_them(void **state)
{
    (void)state;
    struct bt_metrics *m = bt_metrics_create();
    static const double bounds[] = {0.1, 1};
    struct bt_metric *free_slots = bt_metrics_gauge(m, "baton_pool_slots", "state=\"free\"");
    struct bt_metric *sent = bt_metrics_counter(m, "baton_kv_sent_bytes_total", NULL);
    struct bt_metric *h = bt_metrics_histogram(m, "t_seconds", "m=\"x\"", bounds, 2);
    struct bt_metric *sealed = bt_metrics_gauge(m, "baton_pool_slots", "state=\"sealed\"");
    bt_metric_set(free_slots, 12);
    bt_metric_set(sealed, 0.5);
    bt_metric_add(sent, 1ull << 40);
    char *label = bt_metrics_label("model_name", "a\"b\\c\nd");
    assert_string_equal(label, "model_name=\"a\\\"b\\\\c\\nd\"");
    free(label);
    bt_metric_observe(h, 0.1);
    bt_metric_observe(h, 0.5);
    bt_metric_observe(h, 7);
    struct bt_buf out;
    bt_buf_init(&out);
    bt_metrics_render(m, &out);
    assert_string_equal(out.data, "# HELP baton_pool_slots Slots of the slab by state.\n"
                                  "# TYPE baton_pool_slots gauge\n"
                                  "baton_pool_slots{state=\"free\"} 12\n"
                                  "baton_pool_slots{state=\"sealed\"} 0.5\n"
                                  "# HELP baton_kv_sent_bytes_total KV bytes sent to other nodes.\n"
                                  "# TYPE baton_kv_sent_bytes_total counter\n"
                                  "baton_kv_sent_bytes_total 1099511627776\n"
                                  "# TYPE t_seconds histogram\n"
                                  "t_seconds_bucket{m=\"x\",le=\"0.1\"} 1\n"
                                  "t_seconds_bucket{m=\"x\",le=\"1\"} 2\n"
                                  "t_seconds_bucket{m=\"x\",le=\"+Inf\"} 3\n"
                                  "t_seconds_sum{m=\"x\"} 7.6\n"
                                  "t_seconds_count{m=\"x\"} 3\n");
    bt_buf_cleanup(&out);
    bt_metrics_destroy(m);
}

struct level {
    struct bt_metric *gauge;
    int now;
};

static void take_level(void *arg)
{
    struct level *l = arg;
    bt_metric_set(l->gauge, l->now);
}

/* A counter in memory that another process may map, and back in the registry. */
static void a_counter_elsewhere(void **state)
{
    (void)state;
    _Atomic uint64_t at = 5; /* of an earlier process */
    struct bt_metrics *m = bt_metrics_create();
    struct bt_metric *c = bt_metrics_counter(m, "t_total", NULL);
    bt_metric_add(c, 2);
    bt_metric_share(c, &at);
    assert_int_equal((int)bt_metric_value(c), 7);
    bt_metric_share(c, &at); /* again is nothing */
    bt_metric_add(c, 1);
    atomic_fetch_add(&at, 10); /* the other process */
    assert_int_equal((int)bt_metric_value(c), 18);
    bt_metric_share(c, NULL);
    atomic_store(&at, 0);
    bt_metric_add(c, 1);
    assert_int_equal((int)bt_metric_value(c), 19);
    bt_metrics_destroy(m);
}

static void gauges_are_of_the_moment_they_are_asked_for(void **state)
{
    (void)state;
    struct bt_metrics *m = bt_metrics_create();
    struct level l = {.gauge = bt_metrics_gauge(m, "level", NULL)};
    bt_metrics_refresh(m, take_level, &l);
    for (l.now = 1; l.now < 4; l.now++) {
        struct bt_buf out;
        char want[32];
        bt_buf_init(&out);
        bt_metrics_render(m, &out);
        snprintf(want, sizeof(want), "\nlevel %d\n", BT_MIN(l.now, 2));
        assert_non_null(strstr(out.data, want));
        bt_buf_cleanup(&out);
        if (l.now == 2) { /* its owner goes */
            bt_metrics_refresh(m, NULL, &l);
        }
    }
    bt_metrics_destroy(m);
}

/* ---- how long a turn takes ---- */

static void burn(uint64_t ns)
{
    struct timespec t;
    uint64_t from = 0, now = 0;
    do { /* time of this thread, whatever else the machine does */
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
        now = (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
        from = from == 0 ? now : from;
    } while (now - from < ns);
}

static struct bt_loop_tick last_tick;

static void on_turn(void *arg, const struct bt_loop_tick *t)
{
    (void)arg;
    last_tick = *t;
}

static void on_burn(void *arg)
{
    (void)arg;
    burn(6000000);
}

static void on_sleep(void *arg)
{
    (void)arg;
    usleep(6000);
}

static void a_turn_is_measured(void **state)
{
    struct bt_timer timer = {0};
    (void)state;
    assert_int_equal(bt_loop_create(&loop), BT_OK);
    bt_loop_watch(loop, on_turn, NULL);
    bt_timer_start(loop, &timer, 0, 0, on_burn, NULL);
    bt_loop_poll(loop, 100);
    assert_true(last_tick.cpu_ns >= 6000000 && last_tick.wall_ns >= 6000000);
    bt_timer_start(loop, &timer, 0, 0, on_sleep, NULL);
    bt_loop_poll(loop, 100);
    assert_true(last_tick.wall_ns >= 6000000 && last_tick.cpu_ns < last_tick.wall_ns);
    bt_loop_watch(loop, NULL, NULL);
    bt_loop_destroy(loop);
}

/* Timers that are due at once, as dials of thousands of sessions are: in order, over some turns. */
static int burnt;

static void on_burn_in_order(void *arg)
{
    assert_int_equal((intptr_t)arg, burnt);
    burnt++;
    burn(1000000);
}

static void due_timers_take_several_turns(void **state)
{
    static struct bt_timer timers[60];
    (void)state;
    memset(timers, 0, sizeof(timers));
    burnt = 0;
    assert_int_equal(bt_loop_create(&loop), BT_OK);
    bt_loop_watch(loop, on_turn, NULL);
    for (int i = 0; i < (int)BT_ARRAY_LEN(timers); i++) {
        bt_timer_start(loop, &timers[i], 0, 0, on_burn_in_order, (void *)(intptr_t)i);
        usleep(1); /* due one after the other */
    }
    for (int turns = 0; burnt < (int)BT_ARRAY_LEN(timers); turns++) {
        int before = burnt;
        bt_loop_poll(loop, 100);
        assert_true(burnt > before && turns < (int)BT_ARRAY_LEN(timers));
        assert_true(last_tick.cpu_ns < BT_LOOP_SLOW_NS);
    }
    bt_loop_watch(loop, NULL, NULL);
    bt_loop_destroy(loop);
}

#define LONG_TASKS 40
static int long_tasks_run, timer_runs;

static void on_long_task(void *arg)
{
    assert_int_equal((intptr_t)arg, long_tasks_run);
    long_tasks_run++;
    burn(1000000);
}

static void on_period(void *arg)
{
    (void)arg;
    timer_runs++;
}

/* Forty tasks of a millisecond that were posted at once: timers go on among them, in order. */
static void posted_tasks_leave_time_for_others(void **state)
{
    struct bt_timer timer = {0};
    struct bt_task many[LONG_TASKS] = {0}, late = {.fn = on_long_task, .arg = (void *)LONG_TASKS};
    (void)state;
    assert_int_equal(bt_loop_create(&loop), BT_OK);
    bt_timer_start(loop, &timer, 1, 1, on_period, NULL);
    for (intptr_t i = 0; i < LONG_TASKS; i++) {
        many[i].fn = on_long_task;
        many[i].arg = (void *)i;
        bt_loop_post(loop, &many[i]);
    }
    bt_loop_poll(loop, 100);
    assert_true(long_tasks_run < LONG_TASKS);
    bt_loop_post(loop, &late);
    while (long_tasks_run < LONG_TASKS + 1) {
        bt_loop_poll(loop, 1000);
    }
    assert_true(timer_runs >= 3);
    bt_timer_stop(loop, &timer);
    bt_loop_destroy(loop);
}

static void test_stood_still(void **state)
{
    (void)state;
    uint64_t last = 0;
    assert_false(bt_stood_still(&last, 5000, 1000)); /* no look before */
    assert_false(bt_stood_still(&last, 6000, 1000));
    assert_true(bt_stood_still(&last, 7001, 1000));
    assert_false(bt_stood_still(&last, 7001, 1000)); /* said once */
    assert_false(bt_stood_still(&last, 6999, 1000));
}

static uint64_t slice_ns(int *policy_p, int *nice_p)
{
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
        uint32_t util_min, util_max;
    } a = {.size = sizeof(a)};
    assert_int_equal(syscall(SYS_sched_getattr, 0, &a, sizeof(a), 0), 0);
    *policy_p = (int)a.policy;
    *nice_p = a.nice;
    return a.runtime;
}

static void *my_slice(void *arg)
{
    int policy, nice;
    *(uint64_t *)arg = slice_ns(&policy, &nice);
    return NULL;
}

static void *short_slices(void *arg)
{
    int policy, nice, policy_now, nice_now;
    uint64_t before = slice_ns(&policy, &nice), now, child = 0;
    (void)arg;
    bt_loop_short_slices(200);
    now = slice_ns(&policy_now, &nice_now);
    assert_int_equal(policy_now, policy);
    assert_int_equal(nice_now, nice);
    assert_true(now == 200000 || now == before); /* the latter: the kernel has no such thing */
    pthread_t t;
    assert_int_equal(pthread_create(&t, NULL, my_slice, &child), 0);
    pthread_join(t, NULL);
    assert_true(child == before || nice < 0);
    return NULL;
}

static void short_slices_are_the_thread_s_own(void **state)
{
    pthread_t t;
    (void)state;
    assert_int_equal(pthread_create(&t, NULL, short_slices, NULL), 0);
    pthread_join(t, NULL);
}

/* A shell's limit of open files is raised to the hard one; a file that may not grow is an error. */
static void process_limits(void **state)
{
    struct rlimit before, low, after;
    (void)state;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    low = before;
    low.rlim_cur = 64;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
    uint64_t files = bt_loop_process_limits();
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &after), 0);
    assert_int_equal(after.rlim_cur, files);
    assert_true(files == before.rlim_max || files >= 1048576);
    assert_int_equal(after.rlim_max, before.rlim_max);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);

    struct rlimit unlimited, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &unlimited), 0);
    small = unlimited;
    small.rlim_cur = 4096;
    FILE *f = tmpfile();
    assert_non_null(f);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    int rc = ftruncate(fileno(f), 8192), why = errno; /* SIGXFSZ would end us */
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &unlimited), 0);
    assert_int_equal(rc, -1);
    assert_int_equal(why, EFBIG);
    fclose(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(short_slices_are_the_thread_s_own),
        cmocka_unit_test(test_stood_still),
        cmocka_unit_test(a_turn_is_measured),
        cmocka_unit_test(due_timers_take_several_turns),
        cmocka_unit_test(posted_tasks_leave_time_for_others),
        cmocka_unit_test(process_limits),
        cmocka_unit_test(timers_fire_in_order_and_stop),
        cmocka_unit_test(a_timer_that_is_due_is_not_put_off),
        cmocka_unit_test(periodic_timer_may_stop_itself),
        cmocka_unit_test(posts_of_two_threads_arrive_in_order),
        cmocka_unit_test(a_watcher_removed_in_its_turn_is_not_called),
        cmocka_unit_test(signals_arrive_on_the_loop),
        cmocka_unit_test(metrics_render_as_prometheus_reads_them),
        cmocka_unit_test(a_counter_elsewhere),
        cmocka_unit_test(gauges_are_of_the_moment_they_are_asked_for),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
