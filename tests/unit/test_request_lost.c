/* A worker is lost under thousands of requests: they are planned again over many turns of the loop,
 * each once, whatever happens to them and to the worker meanwhile. Fixture: request_fixture.h. */
#include "conductor/request/inspect.h"
#include "tests/unit/request_fixture.h"

#include <unistd.h>

#define N 4000

struct seen { /* of a lane, by its wire id */
    bool was_there, cancelled;
    uint32_t replans, epoch;
    char prefill[32], decode[32];
};

static struct client clients[N];
static struct seen before[N], after[N];
static uint32_t n_seen;
static uint64_t longest_ns;

static void on_tick(void *arg, const struct bt_loop_tick *t)
{
    (void)arg;
    longest_ns = BT_MAX(longest_ns, t->cpu_ns);
}

static void see(void *arg, const struct bt_request_info *in)
{
    struct seen *to = arg;
    uint32_t i = (uint32_t)atoi(in->id);
    assert_true(i < N);
    to[i].was_there = true;
    to[i].replans = in->replans;
    to[i].epoch = in->epoch;
    snprintf(to[i].prefill, sizeof(to[i].prefill), "%s", in->prefill);
    snprintf(to[i].decode, sizeof(to[i].decode), "%s", in->decode);
    n_seen += strcmp(in->state, "prefilling") == 0;
}

static uint32_t running(struct fixture *f, struct seen *to)
{
    n_seen = 0;
    memset(to, 0, N * sizeof(to[0]));
    bt_requests_each(f->rs, see, to);
    return n_seen;
}

static void start_all(struct fixture *f)
{
    for (int i = 0; i < N; i++) {
        struct bt_gen_spec s = spec_of(20, 4);
        free(s.id);
        s.id = bt_sprintf("%d", i);
        client_start(f, &clients[i], &s);
    }
}

static bool used(const struct seen *s, const struct fake *w)
{
    return strcmp(s->prefill, w->name) == 0 || strcmp(s->decode, w->name) == 0;
}

static void come_back(struct fake *k)
{
    k->incarnation += 100;
    k->hello_incarnation = k->incarnation;
    fake_listen(k);
    fake_register(k, BATON__MEMBER_STATE__READY);
}

/* Some are told, some requests end before they are, and the worker is back before all are. */
static void test_each_is_planned_again_once(void **state)
{
    (void)state;
    struct trio x;
    struct bt_requests_stats st;
    fixture_init(&x.f);
    x.f.rc.max_running = x.f.rc.max_waiting = N;
    trio_start(&x);
    start_all(&x.f);
    until(&x.f, running(&x.f, before) == N);
    struct fake *w = x.d[0];
    struct bt_session *s = session_of_fake(w);
    uint64_t old = w->incarnation;
    uint32_t lost = 0, ended = 0;
    for (int i = 0; i < N; i++) {
        lost += used(&before[i], w);
    }
    assert_true(lost > N / 10);
    bt_loop_watch(x.f.loop, on_tick, NULL);
    fake_kill(w);
    until(&x.f, !bt_session_up(s));
    come_back(w);
    /* Every third ends before it is told, or after that. */
    for (int i = 0; i < N; i += 3) {
        before[i].cancelled = true;
        bt_request_cancel(clients[i].r);
        ended++;
    }
    bt_requests_stats(x.f.rs, &st);
    assert_true(st.replanned < lost); /* there is something left to be told */
    assert_true(s->member->incarnation == old && !bt_list_empty(&s->peer.own_flights));
    longest_ns = 0;
    until(&x.f, fake_up(w)); /* when all have been told */
    until(&x.f, running(&x.f, after) == N - ended);
    bt_loop_watch(x.f.loop, NULL, NULL);
    assert_true(s->member->incarnation == w->incarnation);
    assert_true(longest_ns < BT_LOOP_SLOW_NS);
    for (int i = 0; i < N; i++) {
        if (!before[i].cancelled) {
            uint32_t again = used(&before[i], w);
            assert_int_equal(after[i].replans, again);
            assert_int_equal(after[i].epoch, 1 + again);
            assert_int_equal(clients[i].errors, 0);
        }
        client_cleanup(&clients[i]);
    }
    fixture_cleanup(&x.f);
}

/* The view forgets a daemon that has left only when nothing refers to it. */
static void test_left_and_forgotten(void **state)
{
    (void)state;
    struct trio x;
    fixture_init(&x.f);
    x.f.rc.max_running = x.f.rc.max_waiting = N;
    trio_start(&x);
    start_all(&x.f);
    until(&x.f, running(&x.f, before) == N);
    for (int i = 0; i < 3; i++) {
        struct fake *const node[] = {x.k[0], x.d[0], x.p[0]};
        bt_view_member_down(x.f.view, node[i]->kind, node[i]->name);
        fake_kill(node[i]);
    }
    until(&x.f, session_of_fake(x.d[0]) == NULL && session_of_fake(x.p[0]) == NULL &&
                    session_of_fake(x.k[0]) == NULL);
    until(&x.f, running(&x.f, after) == N);
    for (int i = 0; i < N; i++) {
        bool again = used(&before[i], x.d[0]) || used(&before[i], x.p[0]);
        assert_true(!again || after[i].replans > 0);
        assert_false(used(&after[i], x.d[0]) || used(&after[i], x.p[0]));
        client_cleanup(&clients[i]);
    }
    fixture_cleanup(&x.f);
}

/* The conductor ends while they are being told. */
static void test_end_meanwhile(void **state)
{
    (void)state;
    struct trio x;
    fixture_init(&x.f);
    x.f.rc.max_running = x.f.rc.max_waiting = N;
    trio_start(&x);
    start_all(&x.f);
    until(&x.f, running(&x.f, before) == N);
    struct bt_session *s = session_of_fake(x.d[0]);
    fake_kill(x.d[0]);
    until(&x.f, !bt_session_up(s));
    assert_false(bt_list_empty(&s->peer.own_flights));
    fixture_cleanup(&x.f);
    for (int i = 0; i < N; i++) {
        assert_int_equal(clients[i].errors, 1);
        client_cleanup(&clients[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_is_planned_again_once),
        cmocka_unit_test(test_left_and_forgotten),
        cmocka_unit_test(test_end_meanwhile),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
