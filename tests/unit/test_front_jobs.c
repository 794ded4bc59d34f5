/* Who is read when: clients take turns, short bodies do not wait for large ones, nobody fills the
 * queue, what nobody waits for stops, and what takes long leaves the loop. The reading threads are
 * held up by tasks that run until they are stopped. Fixture: front_fixture.h. */
#include "tests/unit/front_fixture.h"

#include "conductor/front/front_jobs.h"

#define THREADS 3 /* of front_jobs.c */

/* A task that runs until it is stopped, and says when it runs. */
struct spin {
    struct bt_front_task task;
    bool once; /* it does not wait to be stopped */
    int id;
    _Atomic bool runs;
    bool is_done;
};

static _Atomic int n_ran, ran[16]; /* ids in the order in which they ran */

static void spin_run(const struct bt_front_model *m, struct bt_front_task *t)
{
    struct spin *s = BT_CONTAINER_OF(t, struct spin, task);
    ran[n_ran++] = s->id;
    s->runs = true;
    while (!s->once && !m->watch->stop(m->watch->arg)) {
        usleep(200);
    }
}

static void spin_done(struct bt_front_task *t)
{
    BT_CONTAINER_OF(t, struct spin, task)->is_done = true;
}

static void start_spin(struct spin *s, const char *client, bool large)
{
    s->task.run = spin_run;
    s->task.done = s->task.drop = spin_done;
    s->task.large = large;
    bt_front_task_start_for(front, &s->task, client);
}

static void stop_spin(struct spin *s)
{
    if (bt_front_task_cancel(front, &s->task)) {
        s->is_done = true;
    }
    WAIT_FOR(s->is_done);
}

/* Holds up every thread by a short task of its own client. */
static void block(struct spin s[THREADS])
{
    static const char *const names[THREADS] = {"one", "two", "three"};
    for (int i = 0; i < THREADS; i++) {
        start_spin(&s[i], names[i], false);
        WAIT_FOR(s[i].runs);
    }
}

static void unblock(struct spin s[THREADS])
{
    for (int i = 0; i < THREADS; i++) {
        stop_spin(&s[i]);
    }
}

/* A body that the loop does not read itself. */
static int send_short(void)
{
    struct bt_buf b = {0};
    bt_buf_puts(&b, "{\"prompt\":\"");
    for (int i = 0; i < 1000; i++) {
        bt_buf_puts(&b, "forsooth, ");
    }
    bt_buf_puts(&b, "\"}");
    int fd = send_raw("POST", "/tokenize", "Content-Type: application/json\r\n", b.data, b.len);
    bt_buf_cleanup(&b);
    return fd;
}

static void test_short_ones_do_not_wait_for_large_ones(void **state)
{
    struct spin a = {0}, b = {0}, c = {0};
    (void)state;
    start_spin(&a, "a", true);
    start_spin(&b, "b", true);
    WAIT_FOR(a.runs && b.runs);
    start_spin(&c, "c", true); /* one thread is kept for short ones */
    receive(send_short());
    assert_int_equal(ans.status, 200);
    assert_false(c.runs);
    stop_spin(&a);
    WAIT_FOR(c.runs);
    stop_spin(&b);
    stop_spin(&c);
}

static void test_a_client_has_one_large_one_at_a_time(void **state)
{
    struct spin first = {0}, second = {0}, other = {0};
    (void)state;
    start_spin(&first, "a", true);
    start_spin(&second, "a", true);
    start_spin(&other, "b", true);
    WAIT_FOR(first.runs && other.runs);
    assert_false(second.runs);
    stop_spin(&first);
    WAIT_FOR(second.runs);
    stop_spin(&second);
    stop_spin(&other);
}

static void test_clients_take_turns(void **state)
{
    static const char *const clients[] = {"a", "a", "a", "b", "c", "b"};
    static const int want[] = {0, 3, 4, 1, 5, 2};
    struct spin s[THREADS] = {0}, short_ones[6] = {0};
    (void)state;
    block(s);
    n_ran = 0;
    for (int i = 0; i < 6; i++) {
        short_ones[i].once = true;
        short_ones[i].id = i;
        start_spin(&short_ones[i], clients[i], false);
    }
    stop_spin(&s[0]); /* one thread does them all */
    for (int i = 0; i < 6; i++) {
        WAIT_FOR(short_ones[i].is_done);
    }
    for (int i = 0; i < 6; i++) {
        assert_int_equal(ran[i], want[i]);
    }
    unblock(s);
}

/* One client gets half of the 64 places; another one finds room. */
static void test_nobody_fills_the_queue(void **state)
{
    struct spin s[THREADS] = {0};
    int fds[40];
    (void)state;
    block(s);
    for (int i = 0; i < 32; i++) {
        fds[i] = send_short();
    }
    WAIT_FOR(bt_front_open(front) == 32);
    for (int i = 32; i < 40; i++) {
        receive(send_short());
        assert_int_equal(ans.status, 429);
        assert_non_null(strstr(ans.body, "is already reading 32 large requests of this client"));
        assert_non_null(strstr(ans.head, "Retry-After: 1"));
    }
    close(fds[31]); /* its place is free although nothing was read yet */
    WAIT_FOR(bt_front_open(front) == 31);
    fds[31] = send_short();
    WAIT_FOR(bt_front_open(front) == 32);
    unblock(s);
    for (int i = 0; i < 32; i++) {
        receive(fds[i]);
        assert_int_equal(ans.status, 200);
    }
}

static void test_time_limit(void **state)
{
    struct spin s = {.task = {.limit_s = 1}};
    (void)state;
    start_spin(&s, "a", true);
    WAIT_FOR(s.is_done);
    assert_true(s.task.late);
}

/* A short body whose template costs much is not rendered on the loop. */
static void test_expensive_templates_leave_the_loop(void **state)
{
    static const char body[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"ROMEO\"}]}";
    static const char *const sources[] = {
        "{% for i in range(100000) %}{% endfor %}{{ messages[0].content }}",
        "{{ 'x' * 40000 }}{{ messages[0].content }}", /* cheap, but long */
    };
    char err[256];
    for (size_t i = 0; i < BT_ARRAY_LEN(sources); i++) {
        struct bt_template *t = NULL;
        struct spin s[THREADS] = {0};
        teardown(state);
        assert_int_equal(bt_template_compile(sources[i], &t, err, sizeof(err)), BT_OK);
        open_front(NULL, t);
        block(s);
        int fd = send_raw("POST", "/tokenize", "Content-Type: application/json\r\n", body,
                          sizeof(body) - 1);
        WAIT_FOR(bt_front_open(front) == 1);
        unblock(s);
        receive(fd);
        assert_int_equal(ans.status, 200);
        teardown(state);
        bt_template_destroy(t);
        setup(state);
    }
}

/* Stopping: neither a client that leaves nor the front's end waits for what is read. */
static uint64_t longest_ns;
static int n_slow_done;

static void on_tick(void *arg, const struct bt_loop_tick *t)
{
    (void)arg;
    longest_ns = BT_MAX(longest_ns, t->cpu_ns);
}

static void slow_done(struct bt_front_task *t)
{
    struct timespec at, from;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &from);
    do {
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &at);
    } while ((at.tv_sec - from.tv_sec) * 1000000000l + at.tv_nsec - from.tv_nsec < 1000000);
    n_slow_done++;
    spin_done(t);
}

/* Many that are ready at once are answered in several turns of the loop. */
static void test_ready_ones_take_several_turns(void **state)
{
    static struct spin s[64];
    (void)state;
    memset(s, 0, sizeof(s));
    n_slow_done = 0;
    for (int i = 0; i < (int)BT_ARRAY_LEN(s); i++) {
        s[i].once = true;
        s[i].id = i % 16;
        n_ran = 0;
        s[i].task = (struct bt_front_task){.run = spin_run, .done = slow_done, .drop = spin_done};
        bt_front_task_start_for(front, &s[i].task, "a");
        while (!s[i].runs) {
            usleep(100);
        }
    }
    usleep(10000); /* the last one is given back */
    longest_ns = 0;
    bt_loop_watch(loop, on_tick, NULL);
    WAIT_FOR(n_slow_done == (int)BT_ARRAY_LEN(s));
    bt_loop_watch(loop, NULL, NULL);
    assert_true(longest_ns < BT_LOOP_SLOW_NS);
}

static void test_ends_while_tasks_run(void **state)
{
    static struct spin s[THREADS];
    (void)state;
    memset(s, 0, sizeof(s));
    block(s);
    int fd = send_short();
    WAIT_FOR(bt_front_open(front) == 1);
    bt_front_destroy(front); /* tasks that run are stopped, those that wait are dropped */
    front = NULL;
    for (int i = 0; i < THREADS; i++) {
        assert_true(s[i].is_done);
    }
    close(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define T(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)
        T(test_short_ones_do_not_wait_for_large_ones),
        T(test_a_client_has_one_large_one_at_a_time),
        T(test_clients_take_turns),
        T(test_nobody_fills_the_queue),
        T(test_time_limit),
        T(test_expensive_templates_leave_the_loop),
        T(test_ready_ones_take_several_turns),
        T(test_ends_while_tasks_run),
    };
    return cmocka_run_group_tests(tests, load_model, unload_model);
}
