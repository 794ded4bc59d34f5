/* Nodes that are emptied, daemons that say they are leaving, and what batonctl sees of requests. */
#include "conductor/request/inspect.h"
#include "tests/unit/request_fixture.h"

/* Node n1 has a prefill worker, n2 and n3 a decode worker each. */
struct cluster {
    struct fixture f;
    struct fake *p, *d[2], *k[3];
};

static void cluster_start(struct cluster *x)
{
    fixture_start(&x->f);
    x->k[0] = fake_add(&x->f, "kvstore", "kv-n1", "n1");
    x->k[1] = fake_add(&x->f, "kvstore", "kv-n2", "n2");
    x->k[2] = fake_add(&x->f, "kvstore", "kv-n3", "n3");
    x->p = fake_add(&x->f, "prefill", "p-n1", "n1");
    x->d[0] = fake_add(&x->f, "decode", "d-n2", "n2");
    x->d[1] = fake_add(&x->f, "decode", "d-n3", "n3");
    all_up(&x->f);
}

static void cluster_init(struct cluster *x)
{
    fixture_init(&x->f);
    cluster_start(x);
}

/* Which of the two has the decode part of the newest plan. */
static int decode_of(const struct cluster *x, uint32_t epoch)
{
    for (int i = 0; i < 2; i++) {
        int n = x->d[i]->submits;
        if (n > 0 && x->d[i]->submit[n - 1].epoch == epoch) {
            return i;
        }
    }
    return -1;
}

static uint64_t begin(struct cluster *x, struct client *c)
{
    struct bt_gen_spec s = spec_of(40, 6);
    client_start(&x->f, c, &s);
    until(&x->f, x->p->submits == 1 && decode_of(x, 1) >= 0);
    uint64_t id = x->p->submit[0].request;
    int d = decode_of(x, 1);
    say_token(x->p, id, 1, 0, 300, BATON__FINISH__NOT_FINISHED);
    say_prefill_done(x->p, id, 1, 0, 0, 0);
    say_ended(x->p, id, 1, BT_OK);
    say_flow_done(x->k[1 + d], id, 1, 0, 0);
    until(&x->f, c->n_tokens == 1);
    say_token(x->d[d], id, 1, 1, 301, BATON__FINISH__NOT_FINISHED);
    until(&x->f, c->n_tokens == 2);
    return id;
}

static void finish_elsewhere(struct cluster *x, struct client *c, uint64_t id, int d)
{
    until(&x->f, x->p->submits == 2 && decode_of(x, 2) == 1 - d);
    assert_int_equal(x->p->submit[1].n_tokens, 42); /* behind what the client has */
    until(&x->f, x->d[d]->cancels == 1 && x->k[1 + d]->releases == 1);
    say_token(x->d[d], id, 1, 2, 666, BATON__FINISH__NOT_FINISHED); /* was on its way */
    say_ended(x->d[d], id, 1, BT_ERR_CANCELLED);
    pass(&x->f, 30);
    say_token(x->p, id, 2, 0, 302, BATON__FINISH__NOT_FINISHED);
    for (uint32_t i = 1; i < 4; i++) {
        say_token(x->d[1 - d], id, 2, i, 302 + i,
                  i == 3 ? BATON__FINISH__LENGTH : BATON__FINISH__NOT_FINISHED);
    }
    say_flow_done(x->k[2 - d], id, 2, 0, 0);
    until(&x->f, c->finishes == 1);
    assert_int_equal(c->n_tokens, 6);
    for (uint32_t i = 0; i < 6; i++) {
        assert_int_equal(c->tokens[i], 300 + i);
    }
}

static void test_a_drained_node_is_left(void **state)
{
    (void)state;
    struct cluster x;
    cluster_init(&x);
    struct client c;
    uint64_t id = begin(&x, &c);
    int d = decode_of(&x, 1);
    assert_int_equal(bt_requests_on_node(x.f.rs, x.d[d]->node), 1);
    bt_view_node_set(x.f.view, x.d[d]->node, true);
    finish_elsewhere(&x, &c, id, d);
    until(&x.f, c.dones == 1);
    assert_int_equal(c.usage.replans, 0); /* nothing has failed */
    assert_int_equal(bt_requests_on_node(x.f.rs, x.d[d]->node), 0);
    /* New ones go elsewhere too, until it is used again. */
    for (int i = 0; i < 8; i++) {
        struct client o;
        struct bt_gen_spec s = spec_of(40, 1);
        int n = x.p->submits;
        client_start(&x.f, &o, &s);
        until(&x.f, x.p->submits == n + 1);
        bt_request_cancel(o.r);
        client_cleanup(&o);
    }
    assert_int_equal(x.d[d]->submits, 1);
    bt_view_node_set(x.f.view, x.d[d]->node, false);
    assert_false(session_of_fake(x.d[d])->draining);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

/* The prefill side's node may be drained once its part is done: nothing of the request is there. */
static void test_a_finished_part_does_not_move(void **state)
{
    (void)state;
    struct cluster x;
    cluster_init(&x);
    struct client c;
    uint64_t id = begin(&x, &c);
    bt_view_node_set(x.f.view, "n1", true);
    pass(&x.f, 300);
    assert_int_equal(x.d[0]->submits + x.d[1]->submits, 1);
    say_token(x.d[decode_of(&x, 1)], id, 1, 2, 302, BATON__FINISH__STOP);
    until(&x.f, c.finishes == 1);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

static void test_stays_when_nobody_else_could(void **state)
{
    (void)state;
    struct cluster x;
    cluster_init(&x);
    struct client c;
    uint64_t id = begin(&x, &c);
    int d = decode_of(&x, 1);
    bt_view_node_set(x.f.view, "n1", true);
    bt_view_node_set(x.f.view, "n2", true);
    bt_view_node_set(x.f.view, "n3", true);
    pass(&x.f, 1300);
    assert_int_equal(x.p->submits, 1);
    assert_int_equal(x.d[d]->cancels, 0);
    /* Somebody comes: it moves. */
    bt_view_node_set(x.f.view, "n1", false);
    bt_view_node_set(x.f.view, x.d[1 - d]->node, false);
    finish_elsewhere(&x, &c, id, d);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

static uint32_t submits(const struct cluster *x)
{
    return (uint32_t)(x->p->submits + x->d[0]->submits + x->d[1]->submits);
}

/* With every worker on drained nodes new requests wait, and are refused with the cause. With a role
 * drained the other one does all. */
static void test_drained_workers_get_nothing_new(void **state)
{
    (void)state;
    struct cluster x;
    fixture_init(&x.f);
    x.f.rc.no_worker_ms = 700;
    cluster_start(&x);
    const char *why = NULL;
    char text[512];
    assert_false(bt_view_drain_takes_last(x.f.view, "n2", text, sizeof(text)));
    bt_view_node_set(x.f.view, "n2", true);
    assert_true(bt_view_drain_takes_last(x.f.view, "n3", text, sizeof(text)));
    assert_non_null(strstr(
        text,
        "draining n3 would stop the last worker for decode (d-n3), and the other workers (1)"));
    assert_non_null(strstr(text, "--force"));
    assert_true(bt_view_drain_takes_last(x.f.view, "n1", text, sizeof(text)));
    assert_non_null(strstr(text, "the last worker for prefill (p-n1)"));
    bt_view_node_set(x.f.view, "n3", true);
    assert_true(bt_view_drain_takes_last(x.f.view, "n1", text, sizeof(text)));
    assert_non_null(strstr(text, "new requests would get 503"));
    struct client c[3];
    struct bt_gen_spec s = spec_of(40, 6);
    client_start(&x.f, &c[0], &s);
    until(&x.f, x.p->submits == 1);
    assert_int_equal(x.p->submit[0].phases, BATON__PHASES__BOTH);
    assert_true(bt_requests_serving(x.f.rs, NULL));
    bt_view_node_set(x.f.view, "n1", true);
    assert_false(bt_requests_serving(x.f.rs, &why));
    assert_non_null(strstr(why, "batonctl undrain"));
    for (int i = 1; i < 3; i++) {
        s = spec_of(40, 6);
        s.received_ns = 0;
        client_start(&x.f, &c[i], &s);
        if (i == 1) { /* refused in the end */
            pass_until(&x.f, c[1].errors == 1);
            assert_int_equal(c[1].http, 503);
            assert_non_null(strstr(c[1].message, "batonctl undrain"));
            assert_true(c[1].retry_after_s > 0);
        }
    }
    pass(&x.f, 100); /* the other one waits */
    assert_int_equal(submits(&x), 1);
    assert_int_equal(c[0].errors + c[2].errors, 0); /* what runs stays */
    bt_view_node_set(x.f.view, "n1", false);
    until(&x.f, x.p->submits == 2);
    for (int i = 0; i < 3; i++) {
        if (i != 1) {
            bt_request_cancel(c[i].r);
        }
        client_cleanup(&c[i]);
    }
    fixture_cleanup(&x.f);
}

/* SIGTERM: the worker says so in etcd and goes on until it is empty. */
static void test_a_leaving_worker_is_left(void **state)
{
    (void)state;
    struct cluster x;
    cluster_init(&x);
    struct client c;
    uint64_t id = begin(&x, &c);
    int d = decode_of(&x, 1);
    fake_register(x.d[d], BATON__MEMBER_STATE__DRAINING);
    finish_elsewhere(&x, &c, id, d);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

static void see(void *arg, const struct bt_request_info *info)
{
    struct bt_request_info *out = arg;
    *out = *info;
}

static void test_what_can_be_seen(void **state)
{
    (void)state;
    struct cluster x;
    cluster_init(&x);
    assert_null(bt_requests_explain(x.f.rs, NULL));
    struct client c;
    uint64_t id = begin(&x, &c);
    struct bt_request_info info = {0};
    bt_requests_each(x.f.rs, see, &info);
    assert_string_equal(info.id, "cmpl-test");
    assert_true(info.wire_id == id);
    assert_string_equal(info.state, "decoding");
    assert_string_equal(info.prefill, "p-n1");
    assert_int_equal(info.tokens, 2);
    assert_int_equal(info.prompt_tokens, 40);
    assert_int_equal(info.epoch, 1);
    const struct bt_explanation *e = bt_requests_explain(x.f.rs, "cmpl-test");
    assert_non_null(e);
    assert_ptr_equal(e, bt_requests_explain(x.f.rs, NULL));
    char hex[17];
    snprintf(hex, sizeof(hex), "%016llx", (unsigned long long)id);
    assert_ptr_equal(e, bt_requests_explain(x.f.rs, hex));
    assert_null(bt_requests_explain(x.f.rs, "cmpl-other"));
    assert_true(e->planned && !e->both && e->epoch == 1 && e->n_tokens == 40);
    assert_int_equal(e->n_listed, 3);
    assert_string_equal(e->candidates[0].name, "p-n1");
    /* The ring forgets the oldest and keeps one plan a request. */
    bt_request_cancel(c.r);
    for (int i = 0; i < 130; i++) {
        struct client o;
        struct bt_gen_spec s = spec_of(20, 1);
        char o_id[32];
        snprintf(o_id, sizeof(o_id), "cmpl-%d", i);
        free(s.id);
        s.id = bt_strdup(o_id);
        client_start(&x.f, &o, &s);
        until(&x.f, bt_requests_explain(x.f.rs, o_id) != NULL);
        bt_request_cancel(o.r);
        client_cleanup(&o);
    }
    assert_null(bt_requests_explain(x.f.rs, "cmpl-test"));
    assert_string_equal(bt_requests_explain(x.f.rs, NULL)->id, "cmpl-129");
    assert_non_null(bt_requests_explain(x.f.rs, "cmpl-100"));
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_drained_node_is_left),
        cmocka_unit_test(test_a_finished_part_does_not_move),
        cmocka_unit_test(test_stays_when_nobody_else_could),
        cmocka_unit_test(test_drained_workers_get_nothing_new),
        cmocka_unit_test(test_a_leaving_worker_is_left),
        cmocka_unit_test(test_what_can_be_seen),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
