/* Requests that wait because kvstores or workers are full: order, one try at a time, limits. */
#include "tests/unit/conductor_fixture.h"

/* One prefill on n1, one decode on n2, their kvstores. */
struct cluster {
    struct fixture f;
    struct fake *p, *d, *ka, *kb;
};

static void cluster_start(struct cluster *x)
{
    fixture_start(&x->f);
    x->ka = fake_add(&x->f, "kvstore", "kvstore-n1", "n1");
    x->kb = fake_add(&x->f, "kvstore", "kvstore-n2", "n2");
    x->p = fake_add(&x->f, "prefill", "prefill-n1-0", "n1");
    x->d = fake_add(&x->f, "decode", "decode-n2-0", "n2");
    until(&x->f, fake_up(x->p) && fake_up(x->d) && fake_up(x->ka) && fake_up(x->kb));
}

static void full(struct cluster *x, bool yes)
{
    x->ka->reserved_status = yes ? BT_ERR_EXHAUSTED : BT_OK;
}

/* The newest try was given its room, and both its messages have arrived: they travel on separate
 * sessions, so the kvstore's may be here well before the worker's. */
static bool placed(const struct cluster *x)
{
    if (x->ka->reserves == 0 || x->p->submits == 0) {
        return false;
    }
    const struct seen_reserve *r = &x->ka->reserve[x->ka->reserves - 1];
    const struct seen_submit *s = &x->p->submit[x->p->submits - 1];
    return r->answer == BT_OK && r->request == s->request && r->epoch == s->epoch;
}

/* Plays both workers of the newest submission to its end. Returns its prompt's length. */
static uint32_t serve_newest(struct cluster *x, struct client *c)
{
    struct seen_submit s = x->p->submit[x->p->submits - 1];
    say_prefill_done(x->p, s.request, s.epoch, 0, 0, 0);
    say_token(x->p, s.request, s.epoch, 0, 300, BATON__FINISH__LENGTH);
    say_ended(x->p, s.request, s.epoch, BT_OK);
    say_ended(x->d, s.request, s.epoch, BT_OK);
    until(&x->f, c->dones == 1);
    return s.n_tokens;
}

static void test_waits_for_room(void **state)
{
    (void)state;
    struct cluster x;
    fixture_init(&x.f);
    cluster_start(&x);
    full(&x, true);
    struct client c;
    struct bt_gen_spec s = spec_of(40, 1);
    client_start(&x.f, &c, &s);
    until(&x.f, x.ka->reserves >= 3); /* tried, and tried again */
    struct bt_requests_stats st;
    until(&x.f, (bt_requests_stats(x.f.rs, &st), st.waiting == 1));
    assert_int_equal(st.replanned, 0); /* full is not broken */
    /* A refused try holds nothing anywhere. */
    until(&x.f, x.ka->releases >= x.ka->reserves - 1 && x.kb->releases >= x.kb->reserves - 1);
    full(&x, false);
    until(&x.f, placed(&x));
    int n = x.ka->reserves;
    spin(&x.f, 200);
    assert_int_equal(x.ka->reserves, n); /* it has its room: no further try */
    serve_newest(&x, &c);
    assert_int_equal(c.errors, 0);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

/* Many wait: only the first is tried, and they are served in order of arrival although the later
 * ones are smaller. */
static void test_order_and_no_herd(void **state)
{
    (void)state;
    enum { N = 5 };
    struct cluster x;
    fixture_init(&x.f);
    cluster_start(&x);
    full(&x, true);
    struct client c[N];
    for (uint32_t i = 0; i < N; i++) {
        struct bt_gen_spec s = spec_of(100 - i, 1);
        client_start(&x.f, &c[i], &s);
        until(&x.f, i > 0 || x.p->submits >= 2);
    }
    spin(&x.f, 1200);
    assert_true(x.p->submits < 16); /* five at a time would be many more */
    for (int i = 0; i < x.p->submits; i++) {
        assert_int_equal(x.p->submit[i].n_tokens, 100);
    }
    x.p->submits = x.d->submits = x.ka->reserves = x.kb->reserves = 0;
    full(&x, false);
    until(&x.f, x.p->submits == N); /* each that got its room lets the next one try */
    for (uint32_t i = 0; i < N; i++) {
        assert_int_equal(x.p->submit[i].n_tokens, 100 - i);
    }
    for (int i = 0; i < N; i++) {
        bt_request_cancel(c[i].r);
        client_cleanup(&c[i]);
    }
    fixture_cleanup(&x.f);
}

/* What others give back is tried at once, not at the next pause's end. */
static void test_release_wakes(void **state)
{
    (void)state;
    struct cluster x;
    fixture_init(&x.f);
    cluster_start(&x);
    struct client a, b;
    struct bt_gen_spec s = spec_of(40, 1);
    client_start(&x.f, &a, &s);
    until(&x.f, x.p->submits == 1);
    struct seen_submit first = x.p->submit[0];
    full(&x, true);
    s = spec_of(60, 1);
    client_start(&x.f, &b, &s);
    spin(&x.f, 1500); /* the pauses have grown to their longest */
    full(&x, false);
    say_prefill_done(x.p, first.request, 1, 0, 0, 0);
    say_token(x.p, first.request, 1, 0, 300, BATON__FINISH__LENGTH);
    say_ended(x.p, first.request, 1, BT_OK);
    say_ended(x.d, first.request, 1, BT_OK);
    uint64_t start = bt_mono_ns();
    until(&x.f, a.dones == 1 && x.ka->releases > 0 && placed(&x));
    assert_true(bt_mono_ns() - start < 5000000000ull);
    serve_newest(&x, &b);
    client_cleanup(&a);
    client_cleanup(&b);
    fixture_cleanup(&x.f);
}

/* Room elsewhere is taken at once. */
static void test_elsewhere_first(void **state)
{
    (void)state;
    struct cluster x;
    fixture_init(&x.f);
    cluster_start(&x);
    struct fake *k = fake_add(&x.f, "kvstore", "kvstore-n3", "n3");
    struct fake *p = fake_add(&x.f, "prefill", "prefill-n3-0", "n3");
    until(&x.f, fake_up(k) && fake_up(p));
    full(&x, true);
    struct client c[6];
    for (int i = 0; i < 6; i++) {
        struct bt_gen_spec s = spec_of(40, 1);
        client_start(&x.f, &c[i], &s);
        until(&x.f, p->submits == i + 1); /* whichever was asked first */
    }
    assert_true(x.ka->reserves <= 6);
    for (int i = 0; i < 6; i++) {
        bt_request_cancel(c[i].r);
        client_cleanup(&c[i]);
    }
    fixture_cleanup(&x.f);
}

static void test_limits(void **state)
{
    (void)state;
    struct cluster x;
    fixture_init(&x.f);
    x.f.rc.max_waiting = 2;
    x.f.rc.queue_timeout_ms = 800;
    cluster_start(&x);
    full(&x, true);
    struct client c[3];
    for (int i = 0; i < 3; i++) {
        struct bt_gen_spec s = spec_of(40, 1);
        client_start(&x.f, &c[i], &s);
        spin(&x.f, 30);
    }
    until(&x.f, c[2].errors == 1);
    assert_int_equal(c[2].http, 429);
    assert_true(c[2].retry_after_s >= 1);
    assert_int_equal(c[0].errors + c[1].errors, 0);
    until(&x.f, c[0].errors == 1 && c[1].errors == 1);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(c[i].http, i < 2 ? 503 : 429);
        assert_true(c[i].retry_after_s >= 1);
        client_cleanup(&c[i]);
    }
    assert_non_null(strstr(c[0].message, "conductor.queue_timeout_ms"));
    until(&x.f, x.ka->releases == x.ka->reserves && x.kb->releases == x.kb->reserves);
    /* One that can never fit is told so at once: 1,000 slots are all that there is. */
    full(&x, false);
    x.p->load.pages_total = x.d->load.pages_total = 3;
    spin(&x.f, 200);
    struct bt_gen_spec s = spec_of(100, 1);
    client_start(&x.f, &c[0], &s);
    until(&x.f, c[0].errors == 1);
    assert_int_equal(c[0].http, 400);
    client_cleanup(&c[0]);
    fixture_cleanup(&x.f);
}

/* Those who wait for room while the last worker dies: all are told within the time for that. */
static void test_room_and_nobody_left(void **state)
{
    (void)state;
    struct cluster x;
    fixture_init(&x.f);
    x.f.rc.no_worker_ms = 400;
    cluster_start(&x);
    full(&x, true);
    struct client c[3];
    for (int i = 0; i < 3; i++) {
        struct bt_gen_spec s = spec_of(40, 1);
        client_start(&x.f, &c[i], &s);
    }
    until(&x.f, x.ka->reserves >= 2);
    fake_kill(x.p);
    fake_kill(x.d);
    uint64_t start = bt_mono_ns();
    until(&x.f, c[0].errors + c[1].errors + c[2].errors == 3);
    assert_true(bt_mono_ns() - start < 3000000000ull);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(c[i].http, 503);
        client_cleanup(&c[i]);
    }
    fixture_cleanup(&x.f);
}

/* A worker that is full (its queue) is treated as a full kvstore is. */
static void test_full_worker(void **state)
{
    (void)state;
    struct cluster x;
    fixture_init(&x.f);
    cluster_start(&x);
    struct client c;
    struct bt_gen_spec s = spec_of(40, 1);
    client_start(&x.f, &c, &s);
    for (uint32_t epoch = 1; epoch <= 3; epoch++) {
        until(&x.f, x.p->submits == (int)epoch);
        say_ended(x.p, x.p->submit[0].request, epoch, BT_ERR_EXHAUSTED);
    }
    until(&x.f, x.p->submits == 4 && placed(&x));
    serve_newest(&x, &c);
    assert_int_equal(c.usage.replans, 0);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_waits_for_room), cmocka_unit_test(test_order_and_no_herd),
        cmocka_unit_test(test_release_wakes),  cmocka_unit_test(test_elsewhere_first),
        cmocka_unit_test(test_limits),         cmocka_unit_test(test_room_and_nobody_left),
        cmocka_unit_test(test_full_worker),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
