/* Requests of several choices: one submission for all, and after a failure each goes on with its
 * own tokens. */
#include "tests/unit/request_fixture.h"

#define CHOICES 4

struct many {
    struct bt_request *r;
    uint32_t tokens[CHOICES][64], n_tokens[CHOICES];
    struct bt_buf text[CHOICES];
    int finished[CHOICES], dones, errors, http;
    bt_finish_t reason[CHOICES];
    uint32_t cancel_at; /* deltas until the client leaves from inside one; 0: it stays */
    uint32_t deltas;
    struct bt_gen_usage usage;
};

static void many_delta(void *arg, const struct bt_gen_delta *d)
{
    struct many *c = arg;
    assert_true(d->choice < CHOICES);
    assert_int_equal(c->finished[d->choice] + c->dones + c->errors, 0);
    bt_buf_append(&c->text[d->choice], d->text, d->text_len);
    for (size_t i = 0; i < d->n_tokens; i++) {
        c->tokens[d->choice][c->n_tokens[d->choice]++] = d->tokens[i].id;
    }
    if (++c->deltas == c->cancel_at) {
        bt_request_cancel(c->r);
    }
}
static void many_finish(void *arg, uint32_t choice, bt_finish_t reason, const char *stop)
{
    struct many *c = arg;
    (void)stop;
    c->finished[choice]++;
    c->reason[choice] = reason;
}
static void many_done(void *arg, const struct bt_gen_usage *u)
{
    struct many *c = arg;
    c->dones++;
    c->usage = *u;
}
static void many_error(void *arg, int http, const char *message, uint32_t retry_after_s)
{
    struct many *c = arg;
    (void)message;
    (void)retry_after_s;
    c->errors++;
    c->http = http;
}
static const struct bt_gen_ops many_ops = {
    .on_delta = many_delta, .on_finish = many_finish, .on_done = many_done, .on_error = many_error};

static void many_start(struct trio *x, struct many *c, struct bt_gen_spec *s)
{
    memset(c, 0, sizeof(*c));
    c->r = bt_request_start(x->f.rs, s, &many_ops, c);
}
static void many_cleanup(struct many *c)
{
    for (int i = 0; i < CHOICES; i++) {
        bt_buf_cleanup(&c->text[i]);
    }
}

/* The newest plan for (first) choice with more than `above` as its epoch, whole. */
static void wait_plan(struct trio *x, uint32_t choice, uint32_t above, struct placed *p,
                      struct placed *d)
{
    until(&x->f, find_submit(x, BATON__PHASES__PREFILL, choice, above + 1, UINT32_MAX, p) &&
                     find_submit(x, BATON__PHASES__DECODE, choice, above + 1, UINT32_MAX, d) &&
                     p->s.request == d->s.request && p->s.epoch == d->s.epoch);
}

static void begin(struct trio *x, struct many *c, uint32_t n, uint32_t max_tokens, struct placed *p,
                  struct placed *d)
{
    struct bt_gen_spec s = spec_of(40, max_tokens);
    s.n = n;
    many_start(x, c, &s);
    wait_plan(x, 0, 0, p, d);
    assert_int_equal(p->s.n, n);
    assert_int_equal(d->s.n, n);
}

static void say(const struct placed *w, uint32_t choice, uint32_t offset, uint32_t token, bool last)
{
    say_choice(w->w, w->s.request, w->s.epoch, choice, offset, token,
               last ? BATON__FINISH__LENGTH : BATON__FINISH__NOT_FINISHED);
}

static void test_one_prefill_for_all(void **state)
{
    (void)state;
    struct trio x;
    trio_init(&x);
    struct many c;
    struct placed p, d;
    begin(&x, &c, 3, 2, &p, &d);
    uint64_t id = p.s.request;
    say(&p, 0, 0, 300, false);
    say_prefill_done(p.w, id, 1, 0, 0, 0);
    say_ended(p.w, id, 1, BT_OK);
    say_flow_done(d.kv, id, 1, 0, 0);
    until(&x.f, c.n_tokens[0] == 1);
    say(&d, 1, 0, 310, false); /* the forks' first tokens are the decode worker's */
    say(&d, 2, 0, 320, false);
    say(&d, 2, 1, 321, true);
    until(&x.f, c.finished[2] == 1);
    assert_int_equal(c.finished[0] + c.finished[1] + c.dones, 0);
    say(&d, 2, 2, 666, false); /* beyond its end */
    say(&d, 3, 0, 666, false); /* no such choice */
    say(&d, 1, 1, 311, true);
    say(&d, 0, 1, 301, true);
    until(&x.f, c.dones == 1);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(c.n_tokens[i], 2);
        assert_int_equal(c.tokens[i][0], 300 + 10 * i);
        assert_int_equal(c.tokens[i][1], 301 + 10 * i);
        assert_int_equal(c.finished[i], 1);
    }
    assert_int_equal(c.usage.completion_tokens, 6);
    assert_int_equal(c.usage.prompt_tokens, 40);
    assert_int_equal(d.w->cancels, 0);
    say_ended(d.w, id, 1, BT_OK);
    until(&x.f, open_requests(&x.f) == 0);
    many_cleanup(&c);
    fixture_cleanup(&x.f);
}

/* The decode worker dies when one choice has finished, two have different numbers of tokens and
 * one has none: four ways to go on. */
static void test_each_goes_on_by_itself(void **state)
{
    (void)state;
    struct trio x;
    trio_init(&x);
    struct many c;
    struct placed p, d, pk[CHOICES], dk[CHOICES];
    begin(&x, &c, 4, 4, &p, &d);
    uint64_t id = p.s.request;
    say(&p, 0, 0, 300, false);
    say_prefill_done(p.w, id, 1, 0, 0, 0);
    say_ended(p.w, id, 1, BT_OK);
    until(&x.f, c.n_tokens[0] == 1);
    say(&d, 0, 1, 301, false);
    say(&d, 1, 0, 310, false);
    say(&d, 2, 0, 320, true);
    until(&x.f, c.n_tokens[0] == 2 && c.n_tokens[1] == 1 && c.finished[2] == 1);
    fake_kill(d.w);
    static const uint32_t had[CHOICES] = {2, 1, 0, 0};
    for (uint32_t i = 0; i < CHOICES; i++) {
        if (i == 2) {
            continue;
        }
        wait_plan(&x, i, 1, &pk[i], &dk[i]);
        assert_int_equal(pk[i].s.n, 1);
        assert_int_equal(pk[i].s.n_prompt, 40);
        assert_int_equal(pk[i].s.n_tokens, 40 + had[i]);
        assert_int_equal(pk[i].s.max_new, 4 - had[i]);
        assert_true(pk[i].s.seed == p.s.seed && dk[i].s.seed == p.s.seed);
    }
    /* Side by side they need names of their own; a higher epoch of one would free the others. */
    assert_true(pk[0].s.request != pk[1].s.request && pk[1].s.request != pk[3].s.request &&
                pk[0].s.request != pk[3].s.request);
    assert_int_equal(pk[1].s.tokens[40], 310);
    struct placed none;
    assert_false(find_submit(&x, BATON__PHASES__PREFILL, 2, 2, UINT32_MAX,
                             &none)); /* what is finished stays so */
    for (uint32_t i = 0; i < CHOICES; i++) {
        for (uint32_t t = 0; i != 2 && t < 4 - had[i]; t++) {
            say(t == 0 ? &pk[i] : &dk[i], i, t, 300 + 10 * i + had[i] + t, had[i] + t == 3);
        }
        if (i != 2) {
            say_flow_done(dk[i].kv, dk[i].s.request, dk[i].s.epoch, 0, 0);
        }
    }
    until(&x.f, c.dones == 1);
    assert_int_equal(c.errors, 0);
    for (uint32_t i = 0; i < CHOICES; i++) {
        assert_int_equal(c.n_tokens[i], i == 2 ? 1 : 4);
        assert_int_equal(c.finished[i], 1);
        for (uint32_t t = 0; t < c.n_tokens[i]; t++) {
            assert_int_equal(c.tokens[i][t], 300 + 10 * i + t);
        }
    }
    assert_int_equal(c.usage.completion_tokens, 13);
    assert_int_equal(c.usage.replans, 1);
    for (uint32_t i = 0; i < CHOICES; i++) {
        if (i != 2) {
            say_ended(pk[i].w, pk[i].s.request, pk[i].s.epoch, BT_OK);
            say_ended(dk[i].w, dk[i].s.request, dk[i].s.epoch, BT_OK);
        }
    }
    until(&x.f, open_requests(&x.f) == 0);
    many_cleanup(&c);
    fixture_cleanup(&x.f);
}

/* No choice has a token yet: one prefill for all again. */
static void test_together_while_none_has_begun(void **state)
{
    (void)state;
    struct trio x;
    trio_init(&x);
    struct many c;
    struct placed p, d, p2, d2;
    begin(&x, &c, 3, 1, &p, &d);
    fake_kill(p.w);
    wait_plan(&x, 0, 1, &p2, &d2);
    assert_int_equal(p2.s.n, 3);
    assert_int_equal(p2.s.epoch, 2);
    assert_true(p2.s.request == p.s.request);
    bt_request_cancel(c.r);
    say_ended(p2.w, p2.s.request, 2, BT_OK);
    say_ended(d2.w, p2.s.request, 2, BT_OK);
    say_ended(d.w, p.s.request, 1, BT_OK);
    until(&x.f, open_requests(&x.f) == 0);
    many_cleanup(&c);
    fixture_cleanup(&x.f);
}

/* The second worker under the same request dies with two of its choices on board: that is the
 * second death, not the third; the request ends for all choices, once. */
static void test_two_deaths(void **state)
{
    (void)state;
    struct trio x;
    trio_init(&x);
    struct many c;
    struct placed p, d, p0, d0, p1, d1;
    begin(&x, &c, 2, 50, &p, &d);
    say(&p, 0, 0, 300, false);
    say(&d, 0, 1, 301, false);
    until(&x.f, c.n_tokens[0] == 2); /* so that it is known to have begun */
    fake_kill(d.w);
    wait_plan(&x, 0, 1, &p0, &d0);
    wait_plan(&x, 1, 1, &p1, &d1);
    assert_int_equal(c.errors, 0);
    say(&p0, 0, 0, 302, false);
    say(&d0, 0, 1, 303, false);
    until(&x.f, c.n_tokens[0] == 4);
    fake_kill(d0.w);
    until(&x.f, c.errors == 1);
    assert_int_equal(c.http, 500);
    pass(&x.f, 200);
    struct placed none;
    assert_false(find_submit(&x, BATON__PHASES__PREFILL, 0, 3, UINT32_MAX, &none));
    assert_false(find_submit(&x, BATON__PHASES__PREFILL, 1, 3, UINT32_MAX, &none));
    assert_int_equal(c.dones, 0);
    many_cleanup(&c);
    fixture_cleanup(&x.f);
}

/* Nobody is left: the choices wait side by side for a plan, and the first whose patience is over
 * ends all of them. */
static void test_nobody_left(void **state)
{
    (void)state;
    struct trio x;
    fixture_init(&x.f);
    x.f.rc.no_worker_ms = 300;
    fixture_start(&x.f);
    x.k[0] = fake_add(&x.f, "kvstore", "kv-n1", "n1");
    x.p[0] = fake_add(&x.f, "prefill", "p-n1", "n1");
    x.d[0] = fake_add(&x.f, "decode", "d-n1", "n1");
    all_up(&x.f);
    struct many c;
    struct bt_gen_spec s = spec_of(40, 50);
    s.n = 3;
    many_start(&x, &c, &s);
    until(&x.f, x.p[0]->submits == 1 && x.d[0]->submits == 1);
    uint64_t id = x.p[0]->submit[0].request;
    say_token(x.p[0], id, 1, 0, 300, BATON__FINISH__NOT_FINISHED);
    say_token(x.d[0], id, 1, 1, 301, BATON__FINISH__NOT_FINISHED);
    until(&x.f, c.n_tokens[0] == 2);
    fake_kill(x.p[0]);
    fake_kill(x.d[0]);
    until(&x.f, c.errors == 1);
    assert_int_equal(c.http, 503);
    until(&x.f, open_requests(&x.f) == 0);
    assert_int_equal(c.errors + c.dones, 1);
    many_cleanup(&c);
    fixture_cleanup(&x.f);
}

/* A stop string ends one choice: its worker is told, and goes on with the other, which ends by
 * itself. */
static void test_stop_string_of_one(void **state)
{
    (void)state;
    struct trio x;
    trio_init(&x);
    struct bt_tokens ids = {0};
    assert_int_equal(bt_tokenizer_encode(x.f.tok, " the end", 8, false, &ids), BT_OK);
    assert_true(ids.n >= 1 && ids.n < 20);
    struct bt_gen_spec s = spec_of(40, 30);
    s.n = 2;
    s.stop = bt_calloc(2, sizeof(char *));
    s.stop[0] = bt_strdup("the end");
    struct many c;
    many_start(&x, &c, &s);
    struct placed p, d;
    wait_plan(&x, 0, 0, &p, &d);
    say(&p, 0, 0, 300, false);
    until(&x.f, c.n_tokens[0] == 1);
    uint32_t at = 0;
    for (size_t i = 0; i < ids.n; i++) {
        say(&d, 1, at++, ids.ids[i], false);
    }
    say(&d, 1, at++, 666, false);
    until(&x.f, c.finished[1] == 1);
    assert_int_equal(c.reason[1], BT_FINISH_STOP);
    until(&x.f, d.w->cancels == 1);
    const struct seen_pair *told = &d.w->cancel[0];
    assert_true(told->request == p.s.request && told->epoch == 1);
    assert_true(told->one_choice && told->choice == 1);
    pass(&x.f, 50);
    assert_int_equal(c.n_tokens[1], ids.n);
    say(&d, 0, 1, 301, true);
    until(&x.f, c.finished[0] == 1);
    pass(&x.f, 50);
    assert_int_equal(d.w->cancels + p.w->cancels, 1);
    say_prefill_done(p.w, p.s.request, 1, 0, 0, 0);
    say_flow_done(d.kv, p.s.request, 1, 0, 0);
    until(&x.f, c.dones == 1);
    assert_int_equal(c.usage.completion_tokens, 2 + ids.n);
    bt_tokens_cleanup(&ids);
    many_cleanup(&c);
    fixture_cleanup(&x.f);
}

static void test_client_leaves_in_a_delta(void **state)
{
    (void)state;
    struct trio x;
    trio_init(&x);
    struct many c;
    struct placed p, d, p0, d0, p1, d1;
    begin(&x, &c, 2, 50, &p, &d);
    say(&p, 0, 0, 300, false);
    until(&x.f, c.n_tokens[0] == 1);
    fake_kill(d.w);
    wait_plan(&x, 0, 1, &p0, &d0);
    wait_plan(&x, 1, 1, &p1, &d1);
    c.cancel_at = c.deltas + 1;
    say(&p1, 1, 0, 310, false);
    until(&x.f, c.n_tokens[1] == 1);
    say(&p0, 0, 0, 666, false);
    say_ended(p0.w, p0.s.request, p0.s.epoch, BT_OK);
    say_ended(d0.w, p0.s.request, p0.s.epoch, BT_OK);
    say_ended(p1.w, p1.s.request, p1.s.epoch, BT_OK);
    say_ended(d1.w, p1.s.request, p1.s.epoch, BT_OK);
    say_ended(p.w, p.s.request, 1, BT_OK);
    until(&x.f, open_requests(&x.f) == 0);
    assert_int_equal(c.n_tokens[0], 1);
    assert_int_equal(c.dones + c.errors, 0);
    many_cleanup(&c);
    fixture_cleanup(&x.f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_prefill_for_all),
        cmocka_unit_test(test_each_goes_on_by_itself),
        cmocka_unit_test(test_together_while_none_has_begun),
        cmocka_unit_test(test_two_deaths),
        cmocka_unit_test(test_nobody_left),
        cmocka_unit_test(test_stop_string_of_one),
        cmocka_unit_test(test_client_leaves_in_a_delta),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
