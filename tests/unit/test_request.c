/* The request machine against scripted workers and kvstores: the normal path, every way to end, and
 * messages that cross, come twice or come too late. */
#include "tests/unit/request_fixture.h"

/* Starts a request and waits until both workers have it. Returns its id. */
static uint64_t start(struct pair *x, struct client *c, uint32_t n_prompt, uint32_t max_tokens)
{
    struct bt_gen_spec s = spec_of(n_prompt, max_tokens);
    int p = x->p->submits, d = x->d->submits;
    client_start(&x->f, c, &s);
    until(&x->f, x->p->submits == p + 1 && x->d->submits == d + 1);
    return x->p->submit[p].request;
}

static void check_text(struct fixture *f, const struct client *c, const uint32_t *ids, size_t n)
{
    struct bt_buf want;
    bt_buf_init(&want);
    assert_int_equal(bt_tokenizer_decode(f->tok, ids, n, true, &want), BT_OK);
    assert_int_equal(c->text.len, want.len);
    if (want.len != 0) {
        assert_memory_equal(c->text.data, want.data, want.len);
    }
    bt_buf_cleanup(&want);
}

static void test_disaggregated(void **state)
{
    (void)state;
    struct pair x;
    pair_init(&x);
    assert_true(bt_requests_serving(x.f.rs, NULL));
    struct client c;
    uint64_t id = start(&x, &c, 40, 4);
    until(&x.f, x.ka->reserves == 1 && x.kb->reserves == 1);
    const struct seen_submit *p = &x.p->submit[0], *d = &x.d->submit[0];
    assert_int_equal(p->phases, BATON__PHASES__PREFILL);
    assert_int_equal(d->phases, BATON__PHASES__DECODE);
    assert_true(d->request == id && p->epoch == 1 && d->epoch == 1);
    assert_int_equal(p->n_tokens, 40);
    assert_int_equal(p->n_prompt, 40);
    assert_int_equal(p->max_new, 4);
    assert_int_equal(p->seed, 4711);
    assert_int_equal(p->tokens[39], 439);
    assert_int_equal(x.ka->reserve[0].role, BATON__GRANT_ROLE__WRITE);
    assert_int_equal(x.kb->reserve[0].role, BATON__GRANT_ROLE__RECEIVE);
    assert_int_equal(x.kb->reserve[0].n_keys, 2); /* 40 tokens: two full blocks of 16 */
    assert_int_equal(x.kb->reserve[0].n_tokens, 40);
    assert_string_equal(x.kb->reserve[0].peer, "kvstore-n1");
    assert_int_equal(x.kb->reserve[0].peer_incarnation, x.ka->incarnation);

    say_token(x.p, id, 1, 0, 300, BATON__FINISH__NOT_FINISHED);
    pass(&x.f, 20); /* its prefill took 10 ms of that */
    uint64_t t0 = bt_real_ns();
    say_prefill_done(x.p, id, 1, 16, t0 - 10000000, t0);
    say_ended(x.p, id, 1, BT_OK);
    until(&x.f, c.n_tokens == 1);
    say_flow_done(x.kb, id, 1, t0 - 4000000, t0 + 1000000);
    until(&x.f, x.ka->releases == 1); /* landed: the sender's slots are free while D generates */
    assert_int_equal(x.kb->releases, 0);
    say_token(x.d, id, 1, 1, 301, BATON__FINISH__NOT_FINISHED);
    say_token(x.d, id, 1, 2, 302, BATON__FINISH__NOT_FINISHED);
    say_token(x.d, id, 1, 3, 303, BATON__FINISH__LENGTH);
    until(&x.f, c.dones == 1);
    assert_int_equal(c.reason, BT_FINISH_LENGTH);
    assert_false(c.has_stop);
    const uint32_t ids[] = {300, 301, 302, 303};
    check_text(&x.f, &c, ids, 4);
    assert_int_equal(c.usage.prompt_tokens, 40);
    assert_int_equal(c.usage.completion_tokens, 4);
    assert_int_equal(c.usage.cached_tokens, 16);
    assert_int_equal(c.usage.kv_bytes, 8192);
    assert_int_equal(c.usage.kv_segments, 6);
    assert_true(c.usage.hidden_fraction > 0.79 && c.usage.hidden_fraction < 0.81);
    assert_true(c.usage.prefill_ms > 9.9 && c.usage.prefill_ms < 10.1);
    assert_true(c.usage.ttft_ms >= 0);
    assert_int_equal(c.usage.replans, 0);
    assert_string_equal(c.usage.prefill, "prefill-n1-0");
    assert_string_equal(c.usage.decode, "decode-n2-0");
    /* The decode worker has not ended yet: its kvstore keeps the grant, nobody is cancelled. */
    pass(&x.f, 100);
    assert_int_equal(x.kb->releases, 0);
    assert_int_equal(open_requests(&x.f), 1);
    say_ended(x.d, id, 1, BT_OK);
    until(&x.f, x.kb->releases == 1 && open_requests(&x.f) == 0);
    pass(&x.f, 50);
    assert_int_equal(x.p->cancels + x.d->cancels, 0);
    assert_int_equal(x.ka->releases, 1); /* once each */
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

static void test_crossing_tokens(void **state)
{
    (void)state;
    struct pair x;
    pair_init(&x);
    struct client c;
    uint64_t id = start(&x, &c, 5, 3);
    say_token(x.d, id, 1, 1, 301, BATON__FINISH__NOT_FINISHED);
    say_token(x.d, id, 1, 2, 302, BATON__FINISH__LENGTH);
    say_ended(x.d, id, 1, BT_OK); /* even its end comes before the first token */
    pass(&x.f, 50);
    assert_int_equal(c.n_tokens, 0);
    assert_int_equal(x.d->submits, 1); /* and is no reason to plan again */
    say_prefill_done(x.p, id, 1, 0, 0, 0);
    say_token(x.p, id, 1, 0, 300, BATON__FINISH__NOT_FINISHED);
    say_token(x.p, id, 1, 0, 999, BATON__FINISH__NOT_FINISHED); /* twice */
    until(&x.f, c.finishes == 1);
    assert_int_equal(c.n_tokens, 3);
    assert_int_equal(c.tokens[0], 300);
    assert_int_equal(c.tokens[2], 302);
    assert_int_equal(c.dones, 0); /* the transfer's numbers are still to come */
    say_flow_done(x.kb, id, 1, 0, 0);
    until(&x.f, c.dones == 1);
    assert_true(c.usage.hidden_fraction < 0); /* nothing moved: not known */
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

static void test_first_token_ends(void **state)
{
    (void)state;
    struct pair x;
    pair_init(&x);
    struct client c;
    uint64_t id = start(&x, &c, 20, 1);
    say_token(x.p, id, 1, 0, 300, BATON__FINISH__LENGTH);
    until(&x.f, c.finishes == 1 && x.d->cancels == 1); /* nothing to decode */
    assert_int_equal(x.p->cancels, 0);                 /* it stores what it has computed */
    pass(&x.f, 50);
    assert_int_equal(c.dones, 0);
    say_prefill_done(x.p, id, 1, 16, 0, 0); /* usage is true although it came late */
    until(&x.f, c.dones == 1);
    assert_int_equal(c.usage.cached_tokens, 16);
    assert_int_equal(c.usage.completion_tokens, 1);
    say_ended(x.p, id, 1, BT_OK);
    say_ended(x.d, id, 1, BT_ERR_CANCELLED);
    until(&x.f, open_requests(&x.f) == 0 && x.ka->releases == 1 && x.kb->releases == 1);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

static void test_eos(void **state)
{
    (void)state;
    struct pair x;
    pair_init(&x);
    struct client c;
    uint64_t id = start(&x, &c, 5, 100);
    say_prefill_done(x.p, id, 1, 0, 0, 0);
    say_token(x.p, id, 1, 0, 300, BATON__FINISH__NOT_FINISHED);
    say_flow_done(x.kb, id, 1, 0, 0);
    say_token(x.d, id, 1, 1, 301, BATON__FINISH__STOP); /* whatever its text: it only ends */
    until(&x.f, c.dones == 1);
    assert_int_equal(c.reason, BT_FINISH_STOP);
    assert_false(c.has_stop);
    const uint32_t ids[] = {300};
    check_text(&x.f, &c, ids, 1);
    assert_int_equal(c.usage.completion_tokens, 2);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

/* Ids of a text, of which the test needs at least three. */
static void encode(struct fixture *f, const char *text, struct bt_tokens *t)
{
    memset(t, 0, sizeof(*t));
    assert_int_equal(bt_tokenizer_encode(f->tok, text, strlen(text), false, t), BT_OK);
    assert_true(t->n >= 3);
}

static void test_stop_string(void **state)
{
    (void)state;
    struct pair x;
    pair_init(&x);
    struct bt_tokens t;
    encode(&x.f, "The king is dead, long live the king of the realm", &t);
    struct bt_gen_spec s = spec_of(20, 200);
    s.stop = bt_calloc(3, sizeof(char *));
    s.stop[0] = bt_strdup("live t");
    s.stop[1] = bt_strdup("never");
    struct client c;
    client_start(&x.f, &c, &s);
    until(&x.f, x.d->submits == 1 && x.p->submits == 1);
    uint64_t id = x.p->submit[0].request;
    say_prefill_done(x.p, id, 1, 0, 0, 0);
    say_flow_done(x.kb, id, 1, 0, 0);
    say_token(x.p, id, 1, 0, t.ids[0], BATON__FINISH__NOT_FINISHED);
    for (uint32_t i = 1; i < t.n; i++) { /* the worker knows nothing of strings and goes on */
        say_token(x.d, id, 1, i, t.ids[i], BATON__FINISH__NOT_FINISHED);
    }
    until(&x.f, c.dones == 1 && x.d->cancels == 1);
    assert_int_equal(c.reason, BT_FINISH_STOP);
    assert_string_equal(c.stop, "live t");
    assert_string_equal(c.text.data, "The king is dead, long ");
    /* Billed: up to the token that completed it. */
    uint32_t n = 0;
    struct bt_buf sofar;
    bt_buf_init(&sofar);
    while (sofar.data == NULL || strstr(sofar.data, "live t") == NULL) {
        n++;
        bt_buf_clear(&sofar);
        assert_int_equal(bt_tokenizer_decode(x.f.tok, t.ids, n, true, &sofar), BT_OK);
    }
    assert_int_equal(c.usage.completion_tokens, n);
    assert_int_equal(c.n_tokens, (int)n);
    for (int i = 1; i < c.n_tokens; i++) {
        assert_true(c.offsets[i] > c.offsets[i - 1]);
    }
    assert_true(n < t.n);
    bt_buf_cleanup(&sofar);
    bt_tokens_cleanup(&t);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

/* A stop string's beginning is held back, and given when the text ends otherwise. */
static void test_held_back(void **state)
{
    (void)state;
    struct pair x;
    pair_init(&x);
    struct bt_tokens t;
    encode(&x.f, "Now is the winter", &t);
    struct bt_gen_spec s = spec_of(20, (uint32_t)t.n);
    s.stop = bt_calloc(2, sizeof(char *));
    s.stop[0] = bt_strdup("is the winter of");
    struct client c;
    client_start(&x.f, &c, &s);
    until(&x.f, x.d->submits == 1 && x.p->submits == 1);
    uint64_t id = x.p->submit[0].request;
    say_prefill_done(x.p, id, 1, 0, 0, 0);
    say_flow_done(x.kb, id, 1, 0, 0);
    say_token(x.p, id, 1, 0, t.ids[0], BATON__FINISH__NOT_FINISHED);
    for (uint32_t i = 1; i + 1 < t.n; i++) {
        say_token(x.d, id, 1, i, t.ids[i], BATON__FINISH__NOT_FINISHED);
    }
    until(&x.f, c.n_tokens == (int)t.n - 1);
    assert_string_equal(c.text.data, "Now ");
    say_token(x.d, id, 1, (uint32_t)t.n - 1, t.ids[t.n - 1], BATON__FINISH__LENGTH);
    until(&x.f, c.dones == 1);
    assert_int_equal(c.reason, BT_FINISH_LENGTH);
    assert_string_equal(c.text.data, "Now is the winter");
    bt_tokens_cleanup(&t);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

static void test_both(void **state)
{
    (void)state;
    struct pair x;
    fixture_init(&x.f);
    fixture_start(&x.f);
    x.kb = fake_add(&x.f, "kvstore", "kvstore-n2", "n2");
    x.d = fake_add(&x.f, "decode", "decode-n2-0", "n2");
    until(&x.f, fake_up(x.d) && fake_up(x.kb));
    struct client c;
    struct bt_gen_spec s = spec_of(20, 2);
    client_start(&x.f, &c, &s);
    until(&x.f, x.d->submits == 1 && x.kb->reserves == 1);
    uint64_t id = x.d->submit[0].request;
    assert_int_equal(x.d->submit[0].phases, BATON__PHASES__BOTH);
    assert_int_equal(x.kb->reserve[0].role, BATON__GRANT_ROLE__WRITE);
    say_token(x.d, id, 1, 0, 300, BATON__FINISH__NOT_FINISHED);
    say_prefill_done(x.d, id, 1, 0, 0, 0);
    say_token(x.d, id, 1, 1, 301, BATON__FINISH__LENGTH);
    until(&x.f, c.dones == 1);
    assert_int_equal(c.usage.kv_bytes, 0);
    say_ended(x.d, id, 1, BT_OK);
    until(&x.f, open_requests(&x.f) == 0 && x.kb->releases == 1);
    assert_int_equal(x.d->cancels, 0);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

static void test_cancel(void **state)
{
    (void)state;
    struct pair x;
    pair_init(&x);
    struct client c;
    uint64_t id = start(&x, &c, 20, 50);
    say_token(x.p, id, 1, 0, 300, BATON__FINISH__NOT_FINISHED);
    until(&x.f, c.n_tokens == 1);
    bt_request_cancel(c.r);
    until(&x.f,
          x.p->cancels == 1 && x.d->cancels == 1 && x.ka->releases == 1 && x.kb->releases == 1);
    assert_true(x.d->cancel[0].request == id && x.d->cancel[0].epoch == 1);
    assert_true(x.kb->release[0].request == id && x.kb->release[0].epoch == 1);
    say_token(x.d, id, 1, 1, 301, BATON__FINISH__LENGTH); /* was under way */
    say_ended(x.p, id, 1, BT_OK);
    pass(&x.f, 100);
    assert_int_equal(open_requests(&x.f), 1); /* one worker has not said that it is quiet */
    say_ended(x.d, id, 1, BT_ERR_CANCELLED);
    until(&x.f, open_requests(&x.f) == 0);
    assert_int_equal(c.n_tokens, 1);
    assert_int_equal(c.finishes + c.dones + c.errors, 0); /* nobody listens any more */
    assert_int_equal(x.ka->releases + x.kb->releases, 2);

    client_cleanup(&c);
    /* From inside a callback. */
    id = start(&x, &c, 20, 50);
    c.cancel_in_delta = true;
    say_token(x.p, id, 1, 0, 300, BATON__FINISH__LENGTH);
    until(&x.f, x.d->cancels == 2);
    assert_int_equal(c.n_tokens, 1);
    assert_int_equal(c.finishes + c.dones + c.errors, 0);
    client_cleanup(&c);

    /* Before it was planned. */
    struct bt_gen_spec s = spec_of(20, 50);
    client_start(&x.f, &c, &s);
    bt_request_cancel(c.r);
    pass(&x.f, 100);
    assert_int_equal(x.p->submits, 2);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

static void test_never_ended(void **state)
{
    (void)state;
    struct pair x;
    fixture_init(&x.f);
    x.f.rc.ended_ms = 200;
    pair_start(&x);
    struct client c;
    (void)start(&x, &c, 20, 50);
    uint64_t left_ns = bt_mono_ns();
    bt_request_cancel(c.r);
    until(&x.f, open_requests(&x.f) == 0); /* a silent worker cannot hold it for ever */
    assert_true(bt_mono_ns() - left_ns >= 200000000ull);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

static void test_tenants(void **state)
{
    (void)state;
    struct bt_kv_key root, a, b, other;
    memset(&root, 3, sizeof(root));
    const uint8_t *k = (const uint8_t *)"secret";
    bt_requests_salted_root(&root, k, 6, "t1", NULL, &a);
    bt_requests_salted_root(&root, k, 6, "t1", NULL, &b);
    assert_memory_equal(&a, &b, sizeof(a));
    bt_requests_salted_root(&root, k, 6, "t2", NULL, &b);
    assert_memory_not_equal(&a, &b, sizeof(a));
    bt_requests_salted_root(&root, k, 6, "t1", "x", &b);
    assert_memory_not_equal(&a, &b, sizeof(a));
    bt_requests_salted_root(&root, k, 5, "t1", NULL, &b);
    assert_memory_not_equal(&a, &b, sizeof(a));
    bt_requests_salted_root(&root, k, 6, "ab", "c", &a);
    bt_requests_salted_root(&root, k, 6, "a", "bc", &b);
    assert_memory_not_equal(&a, &b, sizeof(a));
    memset(&other, 4, sizeof(other));
    bt_requests_salted_root(&other, k, 6, "ab", "c", &b);
    assert_memory_not_equal(&a, &b, sizeof(a));

    struct pair x;
    pair_init(&x);
    struct client c[3];
    for (int i = 0; i < 3; i++) {
        struct bt_gen_spec s = spec_of(20, 5);
        s.cache_salt = i > 0 ? bt_strdup("salt") : NULL;
        s.unseeded = true;
        client_start(&x.f, &c[i], &s);
        until(&x.f, x.p->submits == i + 1);
        client_cleanup(&c[i]);
    }
    assert_memory_equal(x.p->submit[0].root, x.f.rc.root.b, 32);
    assert_memory_not_equal(x.p->submit[1].root, x.f.rc.root.b, 32);
    assert_memory_equal(x.p->submit[1].root, x.p->submit[2].root, 32);
    assert_true(x.p->submit[0].seed != x.p->submit[1].seed); /* drawn */
    fixture_cleanup(&x.f);
}

static void test_admission(void **state)
{
    (void)state;
    struct pair x;
    fixture_init(&x.f);
    x.f.rc.max_running = 1;
    x.f.rc.max_waiting = 1;
    pair_start(&x);
    struct client a, b, c;
    uint64_t id = start(&x, &a, 20, 1);
    struct bt_gen_spec s = spec_of(20, 1);
    client_start(&x.f, &b, &s);
    s = spec_of(20, 1);
    client_start(&x.f, &c, &s);
    until(&x.f, c.errors == 1);
    assert_int_equal(c.http, 429);
    assert_true(c.retry_after_s > 0);
    pass(&x.f, 100);
    assert_int_equal(x.p->submits, 1);
    struct bt_requests_stats st;
    bt_requests_stats(x.f.rs, &st);
    assert_int_equal(st.waiting, 1);
    say_token(x.p, id, 1, 0, 300, BATON__FINISH__LENGTH);
    until(&x.f, x.p->submits == 2); /* its place is free as soon as the client has all */
    /* The queue has room again. */
    struct client d;
    s = spec_of(20, 1);
    client_start(&x.f, &d, &s);
    pass(&x.f, 50);
    assert_int_equal(d.errors, 0);
    /* Draining: new ones are refused, the others go on. */
    bt_requests_drain(x.f.rs);
    struct client e;
    s = spec_of(20, 1);
    client_start(&x.f, &e, &s);
    until(&x.f, e.errors == 1);
    assert_int_equal(e.http, 503);
    assert_int_equal(b.errors + d.errors, 0);
    assert_false(bt_requests_serving(x.f.rs, NULL));
    bt_requests_destroy(x.f.rs); /* whatever is open ends with an error, exactly once */
    x.f.rs = NULL;
    assert_int_equal(b.errors, 1);
    assert_int_equal(d.errors, 1);
    assert_int_equal(b.http, 503);
    client_cleanup(&a);
    client_cleanup(&b);
    client_cleanup(&c);
    client_cleanup(&d);
    client_cleanup(&e);
    fixture_cleanup(&x.f);
}

static void test_bad_specs(void **state)
{
    (void)state;
    struct pair x;
    pair_init(&x);
    for (int i = 0; i < 4; i++) {
        struct bt_gen_spec s = spec_of(3, 5);
        s.prompt.n = i == 0 ? 0 : 3;
        s.prompt.ids[1] = i == 1 ? x.f.rc.vocab : 5;
        s.max_tokens = i == 2 ? 0 : 5;
        s.n = i == 3 ? 17 : 1;
        struct client c;
        client_start(&x.f, &c, &s);
        until(&x.f, c.errors == 1);
        assert_int_equal(c.http, 400);
        client_cleanup(&c);
    }
    struct client c;
    struct bt_gen_spec s = spec_of(300, 5);
    x.p->load.max_model_len = x.d->load.max_model_len = 200;
    fake_heartbeat(x.p);
    fake_heartbeat(x.d);
    until(&x.f, session_of_fake(x.p)->load.max_model_len == 200 &&
                    session_of_fake(x.d)->load.max_model_len == 200);
    client_start(&x.f, &c, &s);
    until(&x.f, c.errors == 1);
    assert_int_equal(c.http, 400); /* fits nowhere */
    until(&x.f, open_requests(&x.f) == 0);
    assert_int_equal(x.p->submits, 0);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

static void test_no_worker(void **state)
{
    (void)state;
    struct pair x;
    fixture_init(&x.f);
    x.f.rc.no_worker_ms = 300;
    fixture_start(&x.f);
    const char *why = NULL;
    assert_false(bt_requests_serving(x.f.rs, &why));
    assert_non_null(why);
    struct client c;
    struct bt_gen_spec s = spec_of(20, 5);
    uint64_t start_ns = bt_mono_ns();
    client_start(&x.f, &c, &s);
    until(&x.f, c.errors == 1);
    assert_true(bt_mono_ns() - start_ns >= 300000000ull); /* one might have come up */
    assert_int_equal(c.http, 503);
    assert_int_equal(c.retry_after_s, 1);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

/* One that waits gets the first worker that comes. */
static void test_first_worker(void **state)
{
    (void)state;
    struct pair x;
    fixture_init(&x.f);
    fixture_start(&x.f);
    struct client c;
    struct bt_gen_spec s = spec_of(20, 5);
    client_start(&x.f, &c, &s);
    pass(&x.f, 50);
    x.kb = fake_add(&x.f, "kvstore", "kvstore-n2", "n2");
    x.d = fake_add(&x.f, "decode", "decode-n2-0", "n2");
    until(&x.f, x.d->submits == 1);
    assert_int_equal(c.errors, 0);
    bt_request_cancel(c.r);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

static void test_deadline(void **state)
{
    (void)state;
    struct pair x;
    pair_init(&x);
    struct client c;
    struct bt_gen_spec s = spec_of(20, 5);
    s.timeout_ms = 1000;
    clock_stop(); /* it does not pass before the workers have the request */
    client_start(&x.f, &c, &s);
    until(&x.f, x.p->submits == 1 && x.d->submits == 1);
    pass_until(&x.f, c.errors == 1);
    assert_int_equal(c.http, 504);
    until(&x.f,
          x.p->cancels == 1 && x.d->cancels == 1 && x.ka->releases == 1 && x.kb->releases == 1);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

/* After the first token the limit holds as well, and nothing of the request stays anywhere. */
static void test_deadline_in_the_middle(void **state)
{
    (void)state;
    struct pair x;
    pair_init(&x);
    struct client c;
    struct bt_gen_spec s = spec_of(10, 50);
    s.timeout_ms = 1500;
    clock_stop(); /* it does not pass before the first token */
    client_start(&x.f, &c, &s);
    until(&x.f, x.p->submits == 1 && x.d->submits == 1);
    uint64_t id = x.p->submit[0].request;
    say_token(x.p, id, 1, 0, 300, BATON__FINISH__NOT_FINISHED);
    until(&x.f, c.n_tokens == 1);
    pass_until(&x.f, c.errors == 1);
    assert_int_equal(c.http, 504);
    clock_go_on();
    until(&x.f,
          x.p->cancels == 1 && x.d->cancels == 1 && x.ka->releases == 1 && x.kb->releases == 1);
    say_token(x.d, id, 1, 1, 301, BATON__FINISH__NOT_FINISHED);
    say_ended(x.p, id, 1, BT_ERR_CANCELLED);
    say_ended(x.d, id, 1, BT_ERR_CANCELLED);
    until(&x.f, open_requests(&x.f) == 0);
    assert_int_equal(c.n_tokens, 1);
    assert_int_equal(c.finishes + c.dones, 0);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_disaggregated),
        cmocka_unit_test(test_crossing_tokens),
        cmocka_unit_test(test_first_token_ends),
        cmocka_unit_test(test_eos),
        cmocka_unit_test(test_stop_string),
        cmocka_unit_test(test_held_back),
        cmocka_unit_test(test_both),
        cmocka_unit_test(test_cancel),
        cmocka_unit_test(test_never_ended),
        cmocka_unit_test(test_tenants),
        cmocka_unit_test(test_admission),
        cmocka_unit_test(test_bad_specs),
        cmocka_unit_test(test_no_worker),
        cmocka_unit_test(test_first_worker),
        cmocka_unit_test(test_deadline),
        cmocka_unit_test(test_deadline_in_the_middle),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
