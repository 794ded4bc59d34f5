/* Failures of workers and kvstores under a request: re-planning, stale epochs, the limits of it. */
#include "conductor/request/inspect.h"
#include "tests/unit/request_fixture.h"

#include <unistd.h>

static void wait_plan(struct trio *x, uint32_t epoch, struct placed *p, struct placed *d)
{
    until(&x->f, find_submit(x, BATON__PHASES__PREFILL, 0, epoch, epoch, p) &&
                     find_submit(x, BATON__PHASES__DECODE, 0, epoch, epoch, d));
}

static bool planned(struct trio *x, uint32_t epoch)
{
    struct placed any;
    return find_submit(x, BATON__PHASES__PREFILL, 0, epoch, epoch, &any) ||
           find_submit(x, BATON__PHASES__DECODE, 0, epoch, epoch, &any) ||
           find_submit(x, BATON__PHASES__BOTH, 0, epoch, epoch, &any);
}

static uint64_t begin(struct trio *x, struct client *c, uint32_t max_tokens, struct placed *p,
                      struct placed *d)
{
    struct bt_gen_spec s = spec_of(40, max_tokens);
    client_start(&x->f, c, &s);
    wait_plan(x, 1, p, d);
    return p->s.request;
}

/* ... on two nodes: on one they share its kvstore. Ties are drawn, so it takes some tries. */
static uint64_t begin_apart(struct trio *x, struct client *c, uint32_t max_tokens, struct placed *p,
                            struct placed *d)
{
    uint64_t id = begin(x, c, max_tokens, p, d);
    while (p->kv == d->kv) {
        bt_request_cancel(c->r);
        say_ended(p->w, id, 1, BT_OK);
        say_ended(d->w, id, 1, BT_OK);
        until(&x->f, open_requests(&x->f) == 0);
        client_cleanup(c);
        for (int i = 0; i < x->f.n_fakes; i++) {
            x->f.fakes[i].submits = 0;
        }
        id = begin(x, c, max_tokens, p, d);
    }
    return id;
}

static void test_decode_lost(void **state)
{
    (void)state;
    struct trio x;
    trio_init(&x);
    struct client c;
    struct placed p, d, p2, d2;
    uint64_t id = begin(&x, &c, 6, &p, &d);
    say_prefill_done(p.w, id, 1, 16, 0, 0);
    say_token(p.w, id, 1, 0, 300, BATON__FINISH__NOT_FINISHED);
    say_ended(p.w, id, 1, BT_OK);
    say_flow_done(d.kv, id, 1, 0, 0);
    say_token(d.w, id, 1, 1, 301, BATON__FINISH__NOT_FINISHED);
    say_token(d.w, id, 1, 2, 302, BATON__FINISH__NOT_FINISHED);
    until(&x.f, c.n_tokens == 3);
    fake_kill(d.w);
    wait_plan(&x, 2, &p2, &d2);
    assert_ptr_not_equal(d2.w, d.w);
    /* Prompt and what the client has, as tokens; what is prompt is said beside them. */
    assert_int_equal(p2.s.n_tokens, 43);
    assert_int_equal(p2.s.n_prompt, 40);
    assert_int_equal(p2.s.tokens[39], 439);
    assert_int_equal(p2.s.tokens[40], 300);
    assert_int_equal(p2.s.tokens[42], 302);
    assert_int_equal(p2.s.max_new, 3);
    assert_int_equal(d2.s.n_tokens, 43);
    assert_true(p2.s.seed == p.s.seed && d2.s.seed == p.s.seed);
    until(&x.f, released(d.kv, id, 1) && released(p.kv, id, 1)); /* both kvstores live */
    /* The old epoch still talks: dropped. */
    struct bt_requests_stats st;
    say_token(p.w, id, 1, 3, 666, BATON__FINISH__NOT_FINISHED);
    say_token(p2.w, id, 2, 0, 303, BATON__FINISH__NOT_FINISHED);
    until(&x.f, c.n_tokens == 4);
    say_prefill_done(p2.w, id, 2, 32, 0, 0);
    say_flow_done(d2.kv, id, 2, 0, 0);
    say_token(d2.w, id, 2, 0, 667, BATON__FINISH__NOT_FINISHED); /* had it already */
    say_token(d2.w, id, 2, 1, 304, BATON__FINISH__NOT_FINISHED);
    say_token(d2.w, id, 2, 2, 305, BATON__FINISH__LENGTH);
    until(&x.f, c.dones == 1);
    assert_int_equal(c.errors, 0);
    assert_int_equal(c.n_tokens, 6);
    for (uint32_t i = 0; i < 6; i++) {
        assert_int_equal(c.tokens[i], 300 + i);
    }
    assert_int_equal(c.usage.completion_tokens, 6);
    assert_int_equal(c.usage.prompt_tokens, 40);
    assert_int_equal(c.usage.cached_tokens, 16); /* the first plan's: the rest was its own work */
    assert_int_equal(c.usage.replans, 1);
    /* Why, for the client and for whoever asks; the first plan had no such reason. */
    assert_non_null(strstr(c.usage.again, "was lost"));
    assert_string_equal(bt_requests_explain(x.f.rs, NULL)->again, c.usage.again);
    assert_int_equal(bt_requests_explain(x.f.rs, NULL)->actual.tokens, 6);
    bt_requests_stats(x.f.rs, &st);
    assert_int_equal(st.replanned, 1);
    say_ended(p2.w, id, 2, BT_OK);
    say_ended(d2.w, id, 2, BT_OK);
    until(&x.f, open_requests(&x.f) == 0);
    until(&x.f, released(d2.kv, id, 2) && released(p2.kv, id, 2));
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

static void forget_submits(struct trio *x)
{
    for (int i = 0; i < x->f.n_fakes; i++) {
        x->f.fakes[i].submits = 0;
    }
}

/* A worker whose tokens nobody can read is gone around: its requests are not lost with it. */
static void test_token_without_a_text(void **state)
{
    static const uint32_t bad[] = {1u << 24, INT32_MAX};
    (void)state;
    struct trio x;
    trio_init(&x);
    struct client c;
    struct placed p, d, p2, d2;
    uint64_t id = begin(&x, &c, 3, &p, &d);
    say_prefill_done(p.w, id, 1, 0, 0, 0);
    say_token(p.w, id, 1, 0, 300, BATON__FINISH__NOT_FINISHED);
    say_flow_done(d.kv, id, 1, 0, 0);
    until(&x.f, c.n_tokens == 1);
    say_token(d.w, id, 1, 1, bad[0], BATON__FINISH__NOT_FINISHED);
    wait_plan(&x, 2, &p2, &d2);
    assert_ptr_not_equal(d2.w, d.w);
    assert_int_equal(c.n_tokens, 1);
    assert_non_null(strstr(bt_requests_explain(x.f.rs, NULL)->again, "tokenizer does not have"));
    say_token(p2.w, id, 2, 0, 301, BATON__FINISH__NOT_FINISHED);
    say_flow_done(d2.kv, id, 2, 0, 0);
    say_token(d2.w, id, 2, 1, 302, BATON__FINISH__LENGTH);
    until(&x.f, c.dones == 1);
    assert_int_equal(c.errors, 0);
    assert_int_equal(c.n_tokens, 3);
    client_cleanup(&c);
    /* Where every worker says such things, the request ends, and the error names the reason. */
    forget_submits(&x);
    id = begin(&x, &c, 3, &p, &d);
    for (uint32_t epoch = 1; c.errors == 0; epoch++) {
        pass_until(&x.f, c.errors == 1 ||
                             find_submit(&x, BATON__PHASES__PREFILL, 0, epoch, epoch, &p) ||
                             find_submit(&x, BATON__PHASES__BOTH, 0, epoch, epoch, &p));
        if (c.errors == 0) {
            say_token(p.w, id, epoch, 0, bad[1], BATON__FINISH__NOT_FINISHED);
        }
        assert_true(epoch < 20);
    }
    assert_int_equal(c.http, 500);
    assert_non_null(strstr(c.message, "a token id that the tokenizer does not have"));
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

/* Times of a worker whose clock is wrong, or that lies, are not longer than the request's life. */
static void test_times_of_another_age(void **state)
{
    static const uint64_t start[] = {1, UINT64_MAX - 1, 1};
    static const uint64_t last[] = {UINT64_MAX, UINT64_MAX, 2};
    (void)state;
    struct trio x;
    trio_init(&x);
    for (size_t i = 0; i < BT_ARRAY_LEN(start); i++) {
        struct client c;
        struct placed p, d;
        uint64_t id = begin(&x, &c, 2, &p, &d);
        say_prefill_done(p.w, id, 1, UINT32_MAX >> 4, start[i], last[i]);
        say_token(p.w, id, 1, 0, 300, BATON__FINISH__NOT_FINISHED);
        say_flow_done(d.kv, id, 1, 0, UINT64_MAX);
        say_token(d.w, id, 1, 1, 301, BATON__FINISH__LENGTH);
        until(&x.f, c.dones == 1);
        assert_int_equal(c.usage.cached_tokens, 40);
        assert_true(c.usage.prefill_ms < 60000);
        assert_true(c.usage.queue_ms < 60000);
        client_cleanup(&c);
        forget_submits(&x);
    }
    fixture_cleanup(&x.f);
}

static void test_prefill_lost(void **state)
{
    (void)state;
    struct trio x;
    trio_init(&x);
    struct client c;
    struct placed p, d, p2, d2;
    uint64_t id = begin(&x, &c, 6, &p, &d);
    fake_kill(p.w);
    wait_plan(&x, 2, &p2, &d2);
    assert_ptr_not_equal(p2.w, p.w);
    assert_int_equal(p2.s.n_tokens, 40);
    until(&x.f, cancelled(d.w, id, 1) && released(p.kv, id, 1) && released(d.kv, id, 1));
    /* The decode worker of the old plan may be the new one's as well. */
    say_ended(d.w, id, 1, BT_ERR_CANCELLED);
    say_token(p2.w, id, 2, 0, 300, BATON__FINISH__STOP);
    say_prefill_done(p2.w, id, 2, 0, 0, 0);
    until(&x.f, c.dones == 1);
    say_ended(p2.w, id, 2, BT_OK);
    until(&x.f, cancelled(d2.w, id, 2));
    say_ended(d2.w, id, 2, BT_OK);
    until(&x.f, open_requests(&x.f) == 0);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

/* After the hand-off the prefill side may go: nothing of the request is there any more. */
static void test_prefill_lost_late(void **state)
{
    (void)state;
    struct trio x;
    trio_init(&x);
    struct client c;
    struct placed p, d;
    uint64_t id = begin_apart(&x, &c, 3, &p, &d);
    say_token(p.w, id, 1, 0, 300, BATON__FINISH__NOT_FINISHED);
    say_prefill_done(p.w, id, 1, 0, 0, 0);
    say_ended(p.w, id, 1, BT_OK);
    say_flow_done(d.kv, id, 1, 0, 0);
    until(&x.f, c.n_tokens == 1 && released(p.kv, id, 1));
    struct fake *kv = p.kv;
    fake_kill(p.w);
    fake_kill(kv);
    until(&x.f, !bt_session_up(session_of_fake(p.w)) && !bt_session_up(session_of_fake(kv)));
    say_token(d.w, id, 1, 1, 301, BATON__FINISH__NOT_FINISHED);
    say_token(d.w, id, 1, 2, 302, BATON__FINISH__LENGTH);
    until(&x.f, c.dones == 1);
    assert_int_equal(c.usage.replans, 0);
    pass(&x.f, 50);
    assert_false(planned(&x, 2));
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

/* The KV has landed and the decode worker is done with its tokens, but the first one, which the
 * prefill worker sends, was lost with it. */
static void test_prefill_lost_with_the_first_token(void **state)
{
    (void)state;
    struct trio x;
    trio_init(&x);
    struct client c;
    struct placed p, d, p2, d2;
    uint64_t id = begin_apart(&x, &c, 3, &p, &d);
    say_flow_done(d.kv, id, 1, 0, 0);
    say_token(d.w, id, 1, 1, 301, BATON__FINISH__NOT_FINISHED);
    say_token(d.w, id, 1, 2, 302, BATON__FINISH__LENGTH);
    say_ended(d.w, id, 1, BT_OK);
    pass(&x.f, 100);
    assert_int_equal(c.n_tokens, 0);
    fake_kill(p.w);
    wait_plan(&x, 2, &p2, &d2);
    assert_ptr_not_equal(p2.w, p.w);
    say_token(p2.w, id, 2, 0, 300, BATON__FINISH__STOP);
    until(&x.f, c.finishes == 1);
    assert_int_equal(c.n_tokens, 1);
    bt_request_cancel(c.r);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

static void test_two_deaths(void **state)
{
    (void)state;
    struct trio x;
    trio_init(&x);
    struct client c;
    struct placed p, d, p2, d2;
    uint64_t id = begin(&x, &c, 50, &p, &d);
    say_token(p.w, id, 1, 0, 300, BATON__FINISH__NOT_FINISHED);
    say_token(d.w, id, 1, 1, 301, BATON__FINISH__NOT_FINISHED);
    until(&x.f, c.n_tokens == 2); /* so that it is known to have begun */
    fake_kill(d.w);
    wait_plan(&x, 2, &p2, &d2);
    say_token(p2.w, id, 2, 0, 302, BATON__FINISH__NOT_FINISHED);
    say_token(d2.w, id, 2, 1, 303, BATON__FINISH__NOT_FINISHED);
    until(&x.f, c.n_tokens == 4);
    fake_kill(d2.w);
    until(&x.f, c.errors == 1);
    assert_int_equal(c.http, 500);
    assert_int_equal(c.dones + c.finishes, 0);
    until(&x.f, cancelled(p2.w, id, 2) && released(p2.kv, id, 2) && released(d2.kv, id, 2));
    pass(&x.f, 200);
    assert_false(planned(&x, 3)); /* never on a third */
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

/* Received is the first that a worker says. */
static void wait_received(struct trio *x, struct fake *w, uint64_t since_ns)
{
    until(&x->f, session_of_fake(w)->output_ns >= since_ns);
}

/* A kvstore tells of its worker's death before the worker's own session breaks: it counts all the
 * same, and once, although the request has left that plan by then. */
static void test_two_deaths_told_by_kvstores(void **state)
{
    (void)state;
    struct trio x;
    trio_init(&x);
    struct client c;
    struct placed p, d, p2, d2;
    uint64_t now_ns = bt_mono_ns();
    uint64_t id = begin(&x, &c, 50, &p, &d);
    say_token(p.w, id, 1, 0, 300, BATON__FINISH__NOT_FINISHED);
    until(&x.f, c.n_tokens == 1);
    wait_received(&x, d.w, now_ns);
    say_grant_failed(d.kv, id, 1, BT_ERR_INTERNAL);
    now_ns = bt_mono_ns();
    wait_plan(&x, 2, &p2, &d2);
    assert_true(d2.w != d.w && fake_up(d.w));
    fake_kill(d.w);
    until(&x.f, !fake_up(d.w));
    say_token(p2.w, id, 2, 0, 301, BATON__FINISH__NOT_FINISHED);
    until(&x.f, c.n_tokens == 2);
    assert_int_equal(c.errors, 0);
    wait_received(&x, d2.w, now_ns);
    say_grant_failed(d2.kv, id, 2, BT_ERR_INTERNAL);
    until(&x.f, planned(&x, 3));
    fake_kill(d2.w);
    until(&x.f, c.errors == 1);
    assert_int_equal(c.http, 500);
    assert_non_null(strstr(c.message, "two workers were lost"));
    pass(&x.f, 200);
    assert_false(planned(&x, 4));
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

/* ... but a worker that had ended the request before it was lost does not count. */
static void test_lost_after_the_end(void **state)
{
    (void)state;
    struct trio x;
    trio_init(&x);
    struct client c;
    struct placed p, d, p2, d2;
    uint64_t id = begin(&x, &c, 50, &p, &d);
    for (uint32_t epoch = 1; epoch <= 2; epoch++) {
        say_token(p.w, id, epoch, 0, 300, BATON__FINISH__NOT_FINISHED);
        until(&x.f, c.n_tokens == (int)epoch);
        say_ended(d.w, id, epoch, BT_ERR_IO);
        wait_plan(&x, epoch + 1, &p2, &d2);
        fake_kill(d.w);
        until(&x.f, !fake_up(d.w));
        p = p2;
        d = d2;
    }
    say_token(p.w, id, 3, 0, 300, BATON__FINISH__STOP);
    say_prefill_done(p.w, id, 3, 0, 0, 0);
    until(&x.f, c.dones == 1);
    assert_int_equal(c.usage.replans, 2);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

/* Workers that were dead before the request reached them were not killed by it. */
static void test_dead_already(void **state)
{
    (void)state;
    struct trio x;
    trio_init(&x);
    struct client c;
    struct placed p, d, p2, d2, p3, d3;
    for (int i = 0; i < 3; i++) {
        x.d[i]->deaf = true;
    }
    uint64_t id = begin(&x, &c, 50, &p, &d);
    fake_kill(d.w);
    wait_plan(&x, 2, &p2, &d2);
    fake_kill(d2.w);
    wait_plan(&x, 3, &p3, &d3);
    assert_int_equal(c.errors, 0);
    say_token(p3.w, id, 3, 0, 300, BATON__FINISH__STOP);
    say_prefill_done(p3.w, id, 3, 0, 0, 0);
    until(&x.f, c.dones == 1);
    assert_int_equal(c.usage.replans, 2);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

/* A whole node goes at once, prefill and decode of the request with it: that is one failure. */
static void test_node_lost(void **state)
{
    (void)state;
    struct trio x;
    fixture_init(&x.f);
    fixture_start(&x.f);
    x.k[0] = fake_add(&x.f, "kvstore", "kv-n1", "n1");
    x.p[0] = fake_add(&x.f, "prefill", "p-n1", "n1");
    x.d[0] = fake_add(&x.f, "decode", "d-n1", "n1");
    all_up(&x.f);
    struct client c;
    struct bt_gen_spec s = spec_of(40, 2);
    client_start(&x.f, &c, &s);
    until(&x.f, x.p[0]->submits == 1 && x.d[0]->submits == 1 && x.k[0]->reserves == 1);
    pass(&x.f, 50);
    assert_int_equal(x.k[0]->reserves, 1); /* one grant for both */
    assert_int_equal(x.k[0]->reserve[0].role, BATON__GRANT_ROLE__WRITE);
    x.k[1] = fake_add(&x.f, "kvstore", "kv-n2", "n2");
    x.p[1] = fake_add(&x.f, "prefill", "p-n2", "n2");
    x.d[1] = fake_add(&x.f, "decode", "d-n2", "n2");
    all_up(&x.f);
    fake_kill(x.p[0]);
    fake_kill(x.d[0]);
    fake_kill(x.k[0]);
    until(&x.f, x.p[1]->submits == 1 && x.d[1]->submits == 1);
    uint64_t id = x.p[1]->submit[0].request;
    assert_int_equal(x.p[1]->submit[0].epoch, 2);
    say_prefill_done(x.p[1], id, 2, 0, 0, 0);
    say_token(x.p[1], id, 2, 0, 300, BATON__FINISH__NOT_FINISHED);
    say_token(x.d[1], id, 2, 1, 301, BATON__FINISH__LENGTH);
    until(&x.f, c.dones == 1);
    assert_int_equal(c.usage.replans, 1);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

/* A worker that stops (no message, stream open) is noticed by its silence. */
static void test_silence(void **state)
{
    (void)state;
    struct trio x;
    fixture_init_silence(&x.f, SILENCE_MS);
    trio_start(&x);
    clock_stop(); /* nobody else is silent for so long */
    struct client c;
    struct placed p, d, p2, d2;
    uint64_t id = begin(&x, &c, 50, &p, &d);
    say_token(p.w, id, 1, 0, 300, BATON__FINISH__NOT_FINISHED);
    until(&x.f, c.n_tokens == 1);
    d.w->mute = true;
    int old = d.w->sessions;
    pass_until(&x.f, planned(&x, 2));
    wait_plan(&x, 2, &p2, &d2);
    assert_ptr_not_equal(d2.w, d.w);
    clock_go_on();
    /* It wakes up: the old stream is gone, a new session comes up, and nothing is disturbed. */
    d.w->mute = false;
    until(&x.f, fake_up(d.w) && d.w->stream != NULL && d.w->sessions > old);
    say_token(d.w, id, 1, 1, 666, BATON__FINISH__NOT_FINISHED);
    say_token(d.w, id, 2, 0, 667, BATON__FINISH__NOT_FINISHED); /* not its request any more */
    say_prefill_done(p2.w, id, 2, 0, 0, 0);
    say_token(p2.w, id, 2, 0, 301, BATON__FINISH__STOP);
    until(&x.f, c.dones == 1);
    assert_int_equal(c.n_tokens, 2);
    assert_int_equal(c.tokens[1], 301);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

/* The session lives and heartbeats come, but the worker finishes nothing. */
static void test_stall(void **state)
{
    (void)state;
    struct trio x;
    fixture_init(&x.f);
    x.f.rc.stall_ms = 1000;
    trio_start(&x);
    clock_stop(); /* only pass() lets it go by */
    struct client c;
    struct placed p, d, p2, d2;
    uint64_t id = begin(&x, &c, 50, &p, &d);
    say_token(p.w, id, 1, 0, 300, BATON__FINISH__NOT_FINISHED);
    until(&x.f, c.n_tokens == 1); /* from here on it is the decode worker's turn */
    pass_until(&x.f, planned(&x, 2));
    wait_plan(&x, 2, &p2, &d2);
    assert_ptr_not_equal(d2.w, d.w);
    until(&x.f, cancelled(d.w, id, 1));
    bt_request_cancel(c.r);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

/* Everything stands still (a paused virtual machine): nobody could say anything meanwhile. */
static void test_standstill_is_no_stall(void **state)
{
    (void)state;
    struct trio x;
    fixture_init(&x.f);
    x.f.rc.stall_ms = 600;
    trio_start(&x);
    clock_stop();
    struct client c;
    struct placed p, d;
    uint64_t id = begin(&x, &c, 3, &p, &d);
    say_token(p.w, id, 1, 0, 300, BATON__FINISH__NOT_FINISHED);
    say_prefill_done(p.w, id, 1, 0, 0, 0);
    until(&x.f, c.n_tokens == 1);
    settle(&x.f); /* all that was said is read */
    clock_jump(900);
    pass(&x.f, 100);
    say_token(d.w, id, 1, 1, 301, BATON__FINISH__NOT_FINISHED);
    until(&x.f, c.n_tokens == 2);
    assert_int_equal(bt_request_usage(c.r)->replans, 0);
    bt_request_cancel(c.r);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

/* Every worker sends something, but nothing of a request that is open. */
static void chatter(struct trio *x)
{
    for (int i = 0; i < 3; i++) {
        say_token(x->d[i], 1, 1, 0, 300, BATON__FINISH__NOT_FINISHED);
        if (i < 2) {
            say_token(x->p[i], 1, 1, 0, 300, BATON__FINISH__NOT_FINISHED);
        }
    }
    pass(&x->f, PASS_STEP_MS);
}

#define chatter_until(x, cond)                                                                     \
    do {                                                                                           \
        for (int chatters_ = 0; !(cond); chatters_++) {                                            \
            if (chatters_ * PASS_STEP_MS > 120000) {                                               \
                fail_msg("two minutes passed without: %s", #cond);                                 \
            }                                                                                      \
            chatter(x);                                                                            \
        }                                                                                          \
    } while (0)

/* The worker takes the request, serves others, and never comes back to this one. */
static void test_forgotten(void **state)
{
    (void)state;
    struct trio x;
    fixture_init(&x.f);
    x.f.rc.stall_ms = 500;
    trio_start(&x);
    clock_stop();
    struct client c;
    struct placed p, d, p2, d2, p3, d3;
    uint64_t id = begin(&x, &c, 50, &p, &d);
    chatter_until(&x, planned(&x, 2)); /* forgotten by the prefill worker */
    wait_plan(&x, 2, &p2, &d2);
    assert_ptr_not_equal(p2.w, p.w);
    say_token(p2.w, id, 2, 0, 300,
              BATON__FINISH__NOT_FINISHED); /* progress: it has two tries again */
    until(&x.f, c.n_tokens == 1);
    chatter_until(&x, planned(&x, 3)); /* ... by the decode worker */
    wait_plan(&x, 3, &p3, &d3);
    assert_ptr_not_equal(d3.w, d2.w);
    assert_int_equal(p3.s.n_tokens, 41);
    chatter_until(&x, c.errors == 1); /* ... and again, with nothing in between */
    assert_int_equal(c.http, 500);
    assert_non_null(strstr(c.message, "in two attempts in a row"));
    assert_non_null(strstr(c.message, "first_token"));
    assert_int_equal(c.n_tokens, 1);
    assert_false(planned(&x, 4));
    struct bt_buf text;
    bt_buf_init(&text);
    bt_metrics_render(x.f.metrics, &text);
    assert_non_null(strstr(text.data, "\nbaton_requests_stuck_total 3\n"));
    bt_buf_cleanup(&text);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

/* Both workers say that they have requests, and output goes on. Whose places are all taken may let
 * a request wait for as long as that takes; whose are not has forgotten it. */
static void test_forgotten_by_a_busy_worker(void **state)
{
    (void)state;
    struct trio x;
    fixture_init(&x.f);
    x.f.rc.stall_ms = 10;
    trio_start(&x);
    for (int i = 0; i < 2; i++) {
        x.p[i]->load.prefill_tokens_per_s = 250; /* 100 tokens: 400 ms, so 810 ms to stall */
        x.p[i]->load.running = x.p[i]->load.waiting = 1;
    }
    struct bt_session *s0 = session_of_fake(x.p[0]), *s1 = session_of_fake(x.p[1]);
    until(&x.f, s0->load.waiting == 1 && s1->load.waiting == 1);
    clock_stop();
    struct client c[2];
    for (int i = 0; i < 2; i++) {
        struct bt_gen_spec s = spec_of(100, 5);
        client_start(&x.f, &c[i], &s);
    }
    until(&x.f, x.p[0]->submits == 1 && x.p[1]->submits == 1); /* the second goes to the free one */
    x.p[1]->load.slots_free = 8;
    chatter_until(&x, x.p[0]->submits == 2);
    assert_true(cancelled(x.p[1], x.p[1]->submit[0].request, 1));
    assert_false(cancelled(x.p[0], x.p[0]->submit[0].request, 1));
    assert_true(x.p[0]->submit[1].request == x.p[1]->submit[0].request);
    assert_int_equal(x.p[0]->submit[1].epoch, 2);
    for (int i = 0; i < 2; i++) {
        bt_request_cancel(c[i].r);
        client_cleanup(&c[i]);
    }
    fixture_cleanup(&x.f);
}

static void test_statuses(void **state)
{
    (void)state;
    struct trio x;
    trio_init(&x);
    struct client c;
    struct placed p, d, p2, d2;
    /* The node's fault: elsewhere. */
    uint64_t id = begin(&x, &c, 50, &p, &d);
    say_ended(p.w, id, 1, BT_ERR_DEVICE);
    wait_plan(&x, 2, &p2, &d2);
    assert_ptr_not_equal(p2.w, p.w);
    /* No room: elsewhere too, but that is no failure. */
    say_ended(p2.w, id, 2, BT_ERR_EXHAUSTED);
    struct placed p3, d3;
    wait_plan(&x, 3, &p3, &d3);
    /* The transfer is lost behind the first token: planned again with it. */
    say_token(p3.w, id, 3, 0, 300, BATON__FINISH__NOT_FINISHED);
    until(&x.f, c.n_tokens == 1);
    say_grant_failed(d3.kv, id, 3, BT_ERR_PEER_LOST);
    struct placed p4, d4;
    wait_plan(&x, 4, &p4, &d4);
    assert_int_equal(p4.s.n_tokens, 41);
    struct bt_requests_stats st;
    bt_requests_stats(x.f.rs, &st);
    assert_int_equal(st.replanned, 2);
    /* An old failure comes again: nobody listens. */
    say_grant_failed(d3.kv, id, 3, BT_ERR_PEER_LOST);
    say_ended(p.w, id, 1, BT_ERR_INVALID);
    pass(&x.f, 100);
    assert_int_equal(c.errors, 0);
    /* The request's own fault: told to the client. */
    say_ended(p4.w, id, 4, BT_ERR_INVALID);
    until(&x.f, c.errors == 1);
    assert_int_equal(c.http, 400);
    assert_non_null(strstr(c.message, "scripted"));
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

/* A hand-off failed, says the receiving kvstore: at its peer, which the next plan goes around, or
 * by a fault of its own. */
static void test_grant_failed(void **state)
{
    (void)state;
    for (int peer = 0; peer < 2; peer++) {
        struct trio x;
        trio_init(&x);
        struct client c;
        struct placed p, d, p2, d2;
        uint64_t id = begin_apart(&x, &c, 50, &p, &d);
        say_grant_failed(d.kv, id, 1, peer ? BT_ERR_PEER_LOST : BT_ERR_DEVICE);
        wait_plan(&x, 2, &p2, &d2);
        const struct fake *bad = peer ? p.kv : d.kv;
        assert_true(p2.kv != bad && d2.kv != bad);
        assert_int_equal(c.errors, 0);
        bt_request_cancel(c.r);
        client_cleanup(&c);
        fixture_cleanup(&x.f);
    }
}

/* The client has its tokens, and the numbers of usage are on their way from both sides: whoever is
 * lost now has taken them along, and nobody waits for them. */
static void test_lost_while_settling(void **state)
{
    (void)state;
    struct trio x;
    trio_init(&x);
    struct client c;
    struct placed p, d;
    uint64_t id = begin_apart(&x, &c, 2, &p, &d);
    say_token(p.w, id, 1, 0, 300, BATON__FINISH__NOT_FINISHED);
    say_token(d.w, id, 1, 1, 301, BATON__FINISH__LENGTH);
    until(&x.f, c.finishes == 1);
    assert_int_equal(c.dones, 0); /* PrefillDone and FlowDone are missing */
    fake_kill(p.w);
    until(&x.f, !fake_up(p.w));
    assert_int_equal(c.dones, 0);
    fake_kill(d.kv);
    until(&x.f, c.dones == 1);
    assert_int_equal(c.n_tokens, 2);
    assert_int_equal(c.usage.completion_tokens, 2);
    assert_int_equal(c.usage.replans, 0);
    say_ended(d.w, id, 1, BT_OK);
    until(&x.f, open_requests(&x.f) == 0);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

/* A decode worker that says it has ended, without the last token. */
static void test_ended_short(void **state)
{
    (void)state;
    struct trio x;
    trio_init(&x);
    struct client c;
    struct placed p, d, p2, d2;
    uint64_t id = begin(&x, &c, 50, &p, &d);
    say_token(p.w, id, 1, 0, 300, BATON__FINISH__NOT_FINISHED);
    until(&x.f, c.n_tokens == 1);
    say_ended(d.w, id, 1, BT_OK);
    wait_plan(&x, 2, &p2, &d2);
    assert_int_equal(p2.s.n_tokens, 41);
    say_ended(p2.w, id, 2, BT_OK); /* and a prefill worker that forgets its token */
    struct placed p3, d3;
    wait_plan(&x, 3, &p3, &d3);
    bt_request_cancel(c.r);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

static void test_replans_are_bounded(void **state)
{
    (void)state;
    struct trio x;
    fixture_init(&x.f);
    x.f.rc.max_replans = 2;
    trio_start(&x);
    struct client c;
    struct placed p, d;
    uint64_t id = begin(&x, &c, 50, &p, &d);
    for (uint32_t epoch = 1; epoch <= 3; epoch++) {
        wait_plan(&x, epoch, &p, &d);
        say_ended(p.w, id, epoch, BT_ERR_IO);
    }
    until(&x.f, c.errors == 1);
    assert_int_equal(c.http, 500);
    assert_non_null(strstr(c.message, "scripted"));
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

/* Tokens from somebody who is not in the plan, of requests that do not exist, of choices that were
 * not asked for. */
static void test_strangers(void **state)
{
    (void)state;
    struct trio x;
    trio_init(&x);
    struct client c;
    struct placed p, d;
    uint64_t id = begin(&x, &c, 50, &p, &d);
    for (int i = 0; i < 3; i++) {
        if (x.d[i] != d.w) {
            say_token(x.d[i], id, 1, 0, 666, BATON__FINISH__STOP);
            say_ended(x.d[i], id, 1, BT_ERR_DEVICE);
        }
    }
    say_token(d.w, id + 1, 1, 0, 666, BATON__FINISH__STOP);
    say_token(d.w, id, 7, 0, 666, BATON__FINISH__STOP);
    say_ended(d.w, id, 7, BT_ERR_DEVICE);
    pass(&x.f, 100);
    assert_int_equal(c.n_tokens, 0);
    assert_false(planned(&x, 2));
    say_token(d.w, id, 1, 5000, 666, BATON__FINISH__STOP); /* far ahead: a broken worker */
    wait_plan(&x, 2, &p, &d);
    say_token(p.w, id, 2, 0, 1u << 30, BATON__FINISH__NOT_FINISHED); /* no such token */
    until(&x.f, planned(&x, 3));
    assert_int_equal(c.errors, 0);
    bt_request_cancel(c.r);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_decode_lost),
        cmocka_unit_test(test_token_without_a_text),
        cmocka_unit_test(test_times_of_another_age),
        cmocka_unit_test(test_prefill_lost),
        cmocka_unit_test(test_prefill_lost_late),
        cmocka_unit_test(test_prefill_lost_with_the_first_token),
        cmocka_unit_test(test_two_deaths),
        cmocka_unit_test(test_two_deaths_told_by_kvstores),
        cmocka_unit_test(test_lost_after_the_end),
        cmocka_unit_test(test_dead_already),
        cmocka_unit_test(test_node_lost),
        cmocka_unit_test(test_silence),
        cmocka_unit_test(test_stall),
        cmocka_unit_test(test_standstill_is_no_stall),
        cmocka_unit_test(test_forgotten),
        cmocka_unit_test(test_forgotten_by_a_busy_worker),
        cmocka_unit_test(test_statuses),
        cmocka_unit_test(test_grant_failed),
        cmocka_unit_test(test_lost_while_settling),
        cmocka_unit_test(test_ended_short),
        cmocka_unit_test(test_replans_are_bounded),
        cmocka_unit_test(test_strangers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
