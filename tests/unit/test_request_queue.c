/* Requests that wait because kvstores or workers are full: order, one try at a time, limits. */
#define MAX_FAKES 22 /* more than a request remembers */

#include "conductor/request/inspect.h"
#include "tests/unit/request_fixture.h"

static void full(struct pair *x, bool yes)
{
    x->ka->reserved_status = yes ? BT_ERR_EXHAUSTED : BT_OK;
}

/* The newest try was given its room, and both its messages have arrived: they travel on separate
 * sessions, so the kvstore's may be here well before the worker's. */
static bool placed(const struct pair *x)
{
    if (x->ka->reserves == 0 || x->p->submits == 0) {
        return false;
    }
    const struct seen_reserve *r = &x->ka->reserve[x->ka->reserves - 1];
    const struct seen_submit *s = &x->p->submit[x->p->submits - 1];
    return r->answer == BT_OK && r->request == s->request && r->epoch == s->epoch;
}

static uint32_t waiting(struct pair *x)
{
    struct bt_requests_stats st;
    bt_requests_stats(x->f.rs, &st);
    return st.waiting;
}

/* Prompt lengths of the tries that were given their room, in that order, as far as both messages of
 * each have arrived. Returns their number. */
static uint32_t served(const struct pair *x, uint32_t *n_tokens, uint32_t max)
{
    uint32_t n = 0;
    for (int i = 0; i < x->ka->reserves; i++) {
        const struct seen_reserve *r = &x->ka->reserve[i];
        for (int j = 0; j < x->p->submits && r->answer == BT_OK && n < max; j++) {
            const struct seen_submit *s = &x->p->submit[j];
            if (s->request == r->request && s->epoch == r->epoch) {
                n_tokens[n++] = s->n_tokens;
            }
        }
    }
    return n;
}

/* Plays both workers of the newest submission to its end. Returns its prompt's length. */
static uint32_t serve_newest(struct pair *x, struct client *c)
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
    struct pair x;
    fixture_init(&x.f);
    pair_start(&x);
    full(&x, true);
    struct client c;
    struct bt_gen_spec s = spec_of(40, 1);
    client_start(&x.f, &c, &s);
    until(&x.f, x.ka->reserves >= 3); /* tried, and tried again */
    until(&x.f, waiting(&x) == 1);
    struct bt_requests_stats st;
    bt_requests_stats(x.f.rs, &st);
    assert_int_equal(st.replanned, 0); /* full is not broken */
    /* A refused try holds nothing anywhere. */
    until(&x.f, x.ka->releases >= x.ka->reserves - 1 && x.kb->releases >= x.kb->reserves - 1);
    full(&x, false);
    until(&x.f, placed(&x));
    int n = x.ka->reserves;
    pass(&x.f, 200);
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
    struct pair x;
    fixture_init(&x.f);
    pair_start(&x);
    full(&x, true);
    struct client c[N];
    for (uint32_t i = 0; i < N; i++) {
        struct bt_gen_spec s = spec_of(100 - i, 1);
        client_start(&x.f, &c[i], &s);
        until(&x.f, x.ka->releases >= 1); /* the first was refused */
    }
    pass(&x.f, 1200);
    assert_true(x.p->submits < 16); /* five at a time would be many more */
    for (int i = 0; i < x.p->submits; i++) {
        assert_int_equal(x.p->submit[i].n_tokens, 100);
    }
    full(&x, false);
    uint32_t n_tokens[N + 1];
    until(&x.f,
          served(&x, n_tokens, N + 1) == N); /* each that got its room lets the next one try */
    for (uint32_t i = 0; i < N; i++) {
        assert_int_equal(n_tokens[i], 100 - i);
    }
    for (int i = 0; i < N; i++) {
        bt_request_cancel(c[i].r);
        client_cleanup(&c[i]);
    }
    fixture_cleanup(&x.f);
}

/* Who has filled the room is not served for all that he has sent before another gets any; what
 * found no room costs nothing: however often the large one is tried, it keeps its turn. */
static void test_tenants_take_turns_for_room(void **state)
{
    (void)state;
    static const struct {
        const char *tenant;
        uint32_t tokens;
    } in[] = {{"a", 140}, {"a", 41}, {"a", 42}, {"b", 43}, {"b", 44}};
    static const uint32_t order[] = {140, 43, 44, 41, 42};
    enum { N = BT_ARRAY_LEN(in) };
    struct pair x;
    fixture_init(&x.f);
    pair_start(&x);
    full(&x, true);
    struct client c[N];
    for (uint32_t i = 0; i < N; i++) {
        struct bt_gen_spec s = spec_of(in[i].tokens, 1);
        s.tenant = bt_strdup(in[i].tenant);
        client_start(&x.f, &c[i], &s);
        until(&x.f, x.ka->releases >= 1 && waiting(&x) == i + 1);
    }
    pass_until(&x.f, x.ka->reserves >= 5);
    for (int i = 0; i < x.p->submits; i++) {
        assert_int_equal(x.p->submit[i].n_tokens, 140);
    }
    full(&x, false);
    uint32_t n_tokens[N + 1];
    until(&x.f, served(&x, n_tokens, N + 1) == N);
    for (uint32_t i = 0; i < N; i++) {
        assert_int_equal(n_tokens[i], order[i]);
    }
    for (int i = 0; i < N; i++) {
        bt_request_cancel(c[i].r);
        client_cleanup(&c[i]);
    }
    fixture_cleanup(&x.f);
}

/* What others give back is tried at once, not at the next pause's end: no time passes meanwhile. */
static void test_release_wakes(void **state)
{
    (void)state;
    struct pair x;
    fixture_init(&x.f);
    pair_start(&x);
    struct client a, b;
    struct bt_gen_spec s = spec_of(40, 1);
    client_start(&x.f, &a, &s);
    until(&x.f, x.p->submits == 1 && x.d->submits == 1 && x.ka->reserves == 1);
    uint64_t id = x.p->submit[0].request;
    full(&x, true);
    s = spec_of(60, 1);
    client_start(&x.f, &b, &s);
    pass_until(&x.f, x.ka->reserves >= 7); /* the pauses have grown to their longest: 500 ms */
    int n = x.ka->reserves;
    clock_stop();
    full(&x, false);
    settle(&x.f);
    assert_int_equal(x.ka->reserves, n);
    say_prefill_done(x.p, id, 1, 0, 0, 0);
    say_token(x.p, id, 1, 0, 300, BATON__FINISH__LENGTH);
    say_ended(x.p, id, 1, BT_OK);
    say_ended(x.d, id, 1, BT_OK);
    until(&x.f, a.dones == 1 && placed(&x) && x.p->submit[x.p->submits - 1].n_tokens == 60);
    clock_go_on();
    until(&x.f, released(x.ka, id, 1) && released(x.kb, id, 1));
    serve_newest(&x, &b);
    client_cleanup(&a);
    client_cleanup(&b);
    fixture_cleanup(&x.f);
}

/* Room elsewhere is taken at once. */
static void test_elsewhere_first(void **state)
{
    (void)state;
    struct pair x;
    fixture_init(&x.f);
    pair_start(&x);
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
    struct pair x;
    fixture_init(&x.f);
    x.f.rc.max_waiting = 2;
    x.f.rc.queue_timeout_ms = 1500;
    pair_start(&x);
    full(&x, true);
    clock_stop(); /* so that it does not pass before all three have come */
    struct client c[3] = {0};
    for (int i = 0; i < 3; i++) {
        struct bt_gen_spec s = spec_of(40, 1);
        client_start(&x.f, &c[i], &s);
        until(&x.f, x.ka->releases >= 1); /* the first was refused: all wait behind it */
    }
    until(&x.f, c[2].errors == 1);
    assert_int_equal(c[2].http, 429);
    assert_true(c[2].retry_after_s >= 1);
    assert_int_equal(c[0].errors + c[1].errors, 0);
    pass(&x.f, 1400);
    assert_int_equal(c[0].errors + c[1].errors, 0);
    pass_until(&x.f, c[0].errors == 1 && c[1].errors == 1);
    clock_go_on();
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
    until(&x.f, session_of_fake(x.p)->load.pages_total == 3 &&
                    session_of_fake(x.d)->load.pages_total == 3);
    struct bt_gen_spec s = spec_of(100, 1);
    client_start(&x.f, &c[0], &s);
    until(&x.f, c[0].errors == 1);
    assert_int_equal(c[0].http, 400);
    client_cleanup(&c[0]);
    fixture_cleanup(&x.f);
}

/* One place: by class first, then the tenant that has had less, then arrival. A full queue lets one
 * of a lower class go for one of a higher. */
static void test_classes_and_tenants(void **state)
{
    (void)state;
    struct pair x;
    fixture_init(&x.f);
    x.f.rc.max_running = 1;
    x.f.rc.max_waiting = 5;
    pair_start(&x);
    static const struct {
        const char *tenant;
        int32_t priority;
    } in[] = {{"a", 0}, {"a", 0}, {"a", 0}, {"b", 0}, {"a", 5}, {"c", -1}, {"b", 1}};
    static const uint32_t order[] = {0, 5, 3, 1, 2, 6}; /* by number above */
    struct client c[BT_ARRAY_LEN(in)];
    for (uint32_t i = 0; i < BT_ARRAY_LEN(in); i++) {
        struct bt_gen_spec s = spec_of(40 + i, 1); /* lengths tell them apart */
        s.tenant = bt_strdup(in[i].tenant);
        s.priority = in[i].priority;
        client_start(&x.f, &c[i], &s);
        if (i == 0) {
            until(&x.f, placed(&x)); /* has the place, and its tenant the tokens */
        }
    }
    until(&x.f, c[4].errors == 1); /* "b" of class 1 came to a full queue */
    assert_int_equal(c[4].http, 429);
    for (uint32_t i = 0; i < BT_ARRAY_LEN(order); i++) {
        until(&x.f, x.p->submits == (int)i + 1 && placed(&x));
        assert_int_equal(serve_newest(&x, &c[order[i]]), 40 + order[i]);
    }
    for (uint32_t i = 0; i < BT_ARRAY_LEN(in); i++) {
        assert_int_equal(c[i].errors, i == 4);
        client_cleanup(&c[i]);
    }
    fixture_cleanup(&x.f);
}

/* Plays the workers of the submission whose prompt has so many tokens to its end. */
static void serve_one(struct pair *x, uint32_t n_tokens, struct client *c)
{
    for (int i = 0; i < x->p->submits; i++) {
        const struct seen_submit *s = &x->p->submit[i];
        if (s->n_tokens == n_tokens) {
            say_prefill_done(x->p, s->request, s->epoch, 0, 0, 0);
            say_token(x->p, s->request, s->epoch, 0, 300, BATON__FINISH__LENGTH);
            say_ended(x->p, s->request, s->epoch, BT_OK);
            say_ended(x->d, s->request, s->epoch, BT_OK);
        }
    }
    until(&x->f, c->dones == 1);
}

/* Two places and two more for those of higher classes than ones that have them: a higher class does
 * not wait for lower ones, an equal one does, and there are never more than both together. */
static void test_places_for_higher_classes(void **state)
{
    (void)state;
    struct pair x;
    fixture_init(&x.f);
    x.f.rc.max_running = 2;
    x.f.rc.max_overtaking = 2;
    pair_start(&x);
    static const int32_t class[] = {5, 5, 3, 3, 3, -1, 5};
    enum { LOW, LOW2, OVER, OVER2, THIRD, HIGHEST, LAST, N };
    struct client c[N];
    for (uint32_t i = 0; i < N; i++) {
        struct bt_gen_spec s = spec_of(40 + i, 1); /* lengths tell them apart */
        s.priority = class[i];
        client_start(&x.f, &c[i], &s);
        until(&x.f, x.p->submits == (int)BT_MIN(i + 1, 4u) && placed(&x));
    }
    until(&x.f, waiting(&x) == 3);    /* all four places are taken, whatever class comes */
    serve_one(&x, 40 + LOW, &c[LOW]); /* three run, one of them of a class below 3: */
    until(&x.f, x.p->submits == 5 && placed(&x));
    assert_int_equal(x.p->submit[4].n_tokens, 40 + HIGHEST); /* passes that one and both of 3 */
    serve_one(&x, 40 + OVER, &c[OVER]);
    serve_one(&x, 40 + HIGHEST, &c[HIGHEST]);
    until(&x.f, x.p->submits == 6 && placed(&x)); /* 5 and 3 run: one more of 3 passes the 5 */
    assert_int_equal(x.p->submit[5].n_tokens, 40 + THIRD);
    pass(&x.f, 100);
    assert_int_equal(x.p->submits, 6); /* three run: LAST waits for two of them */
    serve_one(&x, 40 + OVER2, &c[OVER2]);
    pass(&x.f, 100);
    assert_int_equal(x.p->submits, 6);
    serve_one(&x, 40 + THIRD, &c[THIRD]);
    until(&x.f, x.p->submits == 7 && placed(&x));
    serve_one(&x, 40 + LOW2, &c[LOW2]);
    serve_one(&x, 40 + LAST, &c[LAST]);
    for (uint32_t i = 0; i < N; i++) {
        assert_int_equal(c[i].errors, 0);
        client_cleanup(&c[i]);
    }
    fixture_cleanup(&x.f);
}

/* Those who wait for room while the last worker dies: all are told within the time for that. */
static void test_room_and_nobody_left(void **state)
{
    (void)state;
    struct pair x;
    fixture_init(&x.f);
    x.f.rc.no_worker_ms = 400;
    pair_start(&x);
    full(&x, true);
    struct client c[3];
    for (int i = 0; i < 3; i++) {
        struct bt_gen_spec s = spec_of(40, 1);
        client_start(&x.f, &c[i], &s);
    }
    until(&x.f, x.ka->reserves >= 2);
    fake_kill(x.p);
    fake_kill(x.d);
    until(&x.f, c[0].errors + c[1].errors + c[2].errors == 3);
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
    struct pair x;
    fixture_init(&x.f);
    pair_start(&x);
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

static void see_epoch(void *arg, const struct bt_request_info *in)
{
    uint32_t *most = arg;
    *most = BT_MAX(*most, in->epoch);
}

/* How often the request that was planned most often has been planned. */
static uint32_t most_epochs(struct pair *x)
{
    uint32_t most = 0;
    bt_requests_each(x->f.rs, see_epoch, &most);
    return most;
}

/* A kvstore that failed the request before, and has no room now, is tried as slowly as any full
 * one, although the request has nobody else. */
static void test_full_after_a_failure(void **state)
{
    (void)state;
    struct pair x;
    fixture_init(&x.f);
    pair_start(&x);
    struct client c;
    struct bt_gen_spec s = spec_of(40, 1);
    client_start(&x.f, &c, &s);
    until(&x.f, x.ka->reserves == 1 && x.kb->reserves == 1 && x.p->submits == 1);
    full(&x, true);
    say_grant_failed(x.kb, x.p->submit[0].request, 1,
                     BT_ERR_PEER_LOST); /* at its peer, says n2's: that is n1's */
    until(&x.f, x.ka->reserves >= 2);
    pass(&x.f, 1000);
    assert_int_equal(c.errors, 0);
    assert_in_range(most_epochs(&x), 3, 12);
    full(&x, false);
    until(&x.f, placed(&x));
    serve_newest(&x, &c);
    client_cleanup(&c);
    fixture_cleanup(&x.f);
}

/* For ms every prefill worker refuses whatever it is sent. */
static void refuse_all(struct fixture *f, uint64_t ms)
{
    for (uint64_t passed = 0; passed < ms; passed += PASS_STEP_MS) {
        pass(f, PASS_STEP_MS);
        for (int i = 0; i < f->n_fakes; i++) {
            struct fake *w = &f->fakes[i];
            while (w->submits > 0 &&
                   strcmp(w->kind, "prefill") == 0) { /* taken out: a fake remembers a few only */
                const struct seen_submit *s = &w->submit[--w->submits];
                say_ended(w, s->request, s->epoch, BT_ERR_EXHAUSTED);
            }
        }
    }
}

/* Two requests, room at the kvstores, and workers that refuse each of them: that the one has got
 * slots lets the other be tried, again and again, but no faster and faster. With more workers than
 * a request remembers it does not go around among them without a pause. */
static void test_full_workers(void **state)
{
    static const char *const names[] = {"w0", "w1", "w2", "w3", "w4", "w5", "w6", "w7", "w8",
                                        "w9", "wa", "wb", "wc", "wd", "we", "wf", "wg", "wh"};
    (void)state;
    for (int many = 0; many < 2; many++) {
        struct pair x;
        fixture_init(&x.f);
        pair_start(&x);
        for (size_t i = 0; many && i < BT_ARRAY_LEN(names); i++) {
            struct fake *w = fake_add(&x.f, "prefill", names[i], "n1");
            until(&x.f, fake_up(w));
        }
        struct client c[2];
        for (int i = 0; i < 2; i++) {
            struct bt_gen_spec s = spec_of(40, 1);
            client_start(&x.f, &c[i], &s);
        }
        refuse_all(&x.f, 2000);
        assert_int_equal(c[0].errors + c[1].errors, 0);
        assert_in_range(most_epochs(&x), 3, 60);
        for (int i = 0; i < 2; i++) {
            bt_request_cancel(c[i].r);
            client_cleanup(&c[i]);
        }
        fixture_cleanup(&x.f);
    }
}

/* Who would only wait for a refusal gets it at once: where the queue of the prefill worker is too
 * long for any prompt it is not even read, and behind a full kvstore the wait counts too. */
static void test_refused_at_once(void **state)
{
    (void)state;
    struct pair x;
    fixture_init(&x.f);
    pair_start(&x);
    struct bt_gen_terms t = {.received_ns = bt_mono_ns(), .knows_priority = true};
    char why[192] = "";
    uint32_t after = 0;
    assert_false(bt_requests_turn_away(x.f.rs, &t, why, sizeof(why), &after)); /* no objective */
    x.p->load.queued_prefill_tokens = 3000000; /* three seconds of it */
    until(&x.f, session_of_fake(x.p)->load.queued_prefill_tokens == 3000000);
    assert_false(bt_requests_turn_away(x.f.rs, &t, why, sizeof(why), &after));
    t.received_ns = bt_mono_ns();
    t.slo_ttft_ms = 1000;
    assert_true(bt_requests_turn_away(x.f.rs, &t, why, sizeof(why), &after));
    assert_true(after >= 2 && after <= 3);
    assert_non_null(strstr(why, "time to first token"));
    t.received_ns = bt_mono_ns();
    t.slo_ttft_ms = 60000;
    assert_false(bt_requests_turn_away(x.f.rs, &t, why, sizeof(why), &after));
    /* A full kvstore: one is tried again and again; another one with an objective that its turn
     * would miss does not join it. */
    full(&x, true);
    struct client first, second, third;
    struct bt_gen_spec s = spec_of(40, 1);
    client_start(&x.f, &first, &s);
    until(&x.f, x.ka->reserves >= 2 && waiting(&x) == 1);
    int tries = x.ka->reserves;
    s = spec_of(40, 1);
    s.slo_ttft_ms = 1000;
    client_start(&x.f, &second, &s);
    until(&x.f, second.errors == 1);
    assert_int_equal(second.http, 429);
    assert_non_null(strstr(second.message, "time to first token"));
    assert_true(x.ka->reserves <= tries + 8);
    s = spec_of(40, 1);
    s.slo_ttft_ms = 60000;
    client_start(&x.f, &third, &s);
    until(&x.f, waiting(&x) == 2);
    assert_int_equal(third.errors, 0);
    bt_request_cancel(first.r);
    bt_request_cancel(third.r);
    client_cleanup(&first);
    client_cleanup(&second);
    client_cleanup(&third);
    fixture_cleanup(&x.f);
}

/* A worker computes higher classes first, so what lower ones have queued is no reason to refuse. */
static void test_lower_classes_are_not_waited_for(void **state)
{
    (void)state;
    struct pair x;
    fixture_init(&x.f);
    double token_ns[] = {5e7, 5e7, 5e7, 5e7}; /* a prompt of 40 takes two seconds */
    Baton__StepCost cost = BATON__STEP_COST__INIT;
    cost.token_ns = token_ns;
    cost.n_token_ns = BT_ARRAY_LEN(token_ns);
    cost.steps = 100;
    pair_start(&x);
    x.p->load.cost = &cost;
    until(&x.f, session_of_fake(x.p)->load.cost != NULL);
    struct client low[2], equal, higher;
    struct bt_gen_spec s;
    for (int i = 0; i < 2; i++) {
        s = spec_of(40, 1);
        s.priority = 5;
        client_start(&x.f, &low[i], &s);
        until(&x.f, x.p->submits == i + 1);
    }
    struct bt_gen_terms t = {
        .received_ns = bt_mono_ns(), .knows_priority = true, .priority = 5, .slo_ttft_ms = 3000};
    char why[192] = "";
    uint32_t after = 0;
    assert_true(bt_requests_turn_away(x.f.rs, &t, why, sizeof(why), &after));
    t.priority = 4;
    assert_false(bt_requests_turn_away(x.f.rs, &t, why, sizeof(why), &after));
    t.knows_priority = false; /* its body may name a higher one */
    assert_false(bt_requests_turn_away(x.f.rs, &t, why, sizeof(why), &after));
    s = spec_of(40, 1);
    s.slo_ttft_ms = 3000;
    s.priority = 5;
    client_start(&x.f, &equal, &s);
    until(&x.f, equal.errors == 1);
    assert_int_equal(equal.http, 429);
    s = spec_of(40, 1);
    s.slo_ttft_ms = 3000;
    s.priority = -1;
    client_start(&x.f, &higher, &s);
    until(&x.f, x.p->submits == 3);
    assert_int_equal(higher.errors, 0);
    assert_int_equal(x.p->submit[2].priority, -1);
    bt_request_cancel(higher.r);
    client_cleanup(&higher);
    client_cleanup(&equal);
    for (int i = 0; i < 2; i++) {
        bt_request_cancel(low[i].r);
        client_cleanup(&low[i]);
    }
    fixture_cleanup(&x.f);
}

/* How long the queue's wait is follows from requests that were served: refused ones go fast, and
 * would make it look short to those who come next. */
static void test_refused_ones_are_no_progress(void **state)
{
    (void)state;
    struct pair x;
    fixture_init(&x.f);
    x.f.rc.max_waiting = 2;
    pair_start(&x);
    struct client c[32], last[2];
    struct bt_gen_spec s = spec_of(40, 1);
    client_start(&x.f, &c[0], &s);
    until(&x.f, placed(&x));
    serve_newest(&x, &c[0]);
    x.p->load.queued_prefill_tokens = 3000000; /* three seconds of it */
    until(&x.f, session_of_fake(x.p)->load.queued_prefill_tokens == 3000000);
    for (size_t i = 1; i < BT_ARRAY_LEN(c); i++) {
        s = spec_of(40, 1);
        s.slo_ttft_ms = 1000;
        client_start(&x.f, &c[i], &s);
        until(&x.f, c[i].errors == 1);
        assert_int_equal(c[i].http, 429);
    }
    pass(&x.f, 1500); /* the rate is taken every second */
    full(&x, true);
    for (size_t i = 0; i < BT_ARRAY_LEN(last); i++) {
        s = spec_of(40, 1);
        client_start(&x.f, &last[i], &s);
    }
    struct bt_gen_terms t = {.received_ns = bt_mono_ns(), .knows_priority = true};
    char why[192] = "";
    uint32_t after = 0;
    until(&x.f, bt_requests_turn_away(x.f.rs, &t, why, sizeof(why), &after));
    assert_true(after > 1); /* two, at one in more than a second */
    for (size_t i = 0; i < BT_ARRAY_LEN(last); i++) {
        bt_request_cancel(last[i].r);
        client_cleanup(&last[i]);
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(c); i++) {
        client_cleanup(&c[i]);
    }
    fixture_cleanup(&x.f);
}

/* No priority of a client leads into the class of late requests. */
static void test_no_priority_is_late(void **state)
{
    (void)state;
    static const int32_t asked[] = {INT16_MAX - 1, INT16_MAX, INT16_MAX + 1, INT32_MAX};
    struct pair x;
    fixture_init(&x.f);
    pair_start(&x);
    struct client c[BT_ARRAY_LEN(asked)];
    for (uint32_t i = 0; i < BT_ARRAY_LEN(asked); i++) {
        struct bt_gen_spec s = spec_of(40 + i, 1);
        s.priority = asked[i];
        client_start(&x.f, &c[i], &s);
        until(&x.f, x.p->submits == (int)i + 1 && placed(&x));
        assert_int_equal(x.p->submit[i].priority, BT_SCHED_CLASS_LATE - 1);
        assert_false(x.p->submit[i].late);
        serve_one(&x, 40 + i, &c[i]);
        client_cleanup(&c[i]);
    }
    fixture_cleanup(&x.f);
}

/* Whom a queue makes miss the objective is turned away before anything is read only where he could
 * not be served late either: the queue is longer than that may wait, or the policy serves none. */
static void test_late_is_not_never(void **state)
{
    (void)state;
    static const struct {
        const struct bt_sched_policy *policy;
        double late_wait_ms;
        bool away;
    } rows[] = {{&bt_sched_baton, 0, true},
                {&bt_sched_cache_aware, 60000, true},
                {&bt_sched_baton, 2000, true},
                {&bt_sched_baton, 60000, false}};
    for (size_t i = 0; i < BT_ARRAY_LEN(rows); i++) {
        struct pair x;
        fixture_init(&x.f);
        x.f.rc.policy = rows[i].policy;
        x.f.rc.sched.late.wait_ms = rows[i].late_wait_ms;
        pair_start(&x);
        x.p->load.queued_prefill_tokens = 3000000; /* of a million a second */
        until(&x.f, session_of_fake(x.p)->load.queued_prefill_tokens == 3000000);
        struct bt_gen_terms t = {.received_ns = bt_mono_ns(), .slo_ttft_ms = 1000};
        char why[192] = "";
        uint32_t after = 0;
        assert_int_equal(bt_requests_turn_away(x.f.rs, &t, why, sizeof(why), &after), rows[i].away);
        assert_true(!rows[i].away || after >= 1);
        /* What no time is right for may still be served late, by who serves any. */
        bool serves_late = rows[i].policy == &bt_sched_baton && rows[i].late_wait_ms > 0;
        t.slo_ttft_ms = 1e-4;
        t.received_ns = bt_mono_ns();
        assert_int_equal(bt_requests_turn_away(x.f.rs, &t, why, sizeof(why), &after), rows[i].away);
        assert_true(!rows[i].away || (after >= 1) == serves_late);
        fixture_cleanup(&x.f);
    }
}

/* A late request whose prefix another one is computing waits for that: it is not computed twice.
 * One with another prompt does not wait, nor does one that reads no cache. It counts as late. */
static void test_follows(void **state)
{
    (void)state;
    enum { FIRST, FOLLOWER, OTHER, NO_CACHE, N };
    struct pair x;
    fixture_init(&x.f);
    x.f.rc.policy = &bt_sched_baton;
    x.f.rc.sched.objective.ttft_ms = 1000;
    x.f.rc.sched.late.wait_ms = 60000;
    pair_start(&x);
    x.p->load.prefill_tokens_per_s = 10;
    until(&x.f, session_of_fake(x.p)->load.prefill_tokens_per_s == 10);
    /* How much late work is asked for is known some time after the first late request. */
    struct client c[N], early;
    struct bt_gen_spec short_one = spec_of(11, 1);
    client_start(&x.f, &early, &short_one);
    until(&x.f, x.p->submits == 1 && placed(&x));
    serve_one(&x, 11, &early);
    client_cleanup(&early);
    pass(&x.f, 20000);
    for (int i = 0; i < N; i++) {
        struct bt_gen_spec s = spec_of(i == FOLLOWER ? 41 : 40 + 10u * (i > FOLLOWER) + i, 1);
        s.prompt.ids[0] += i == OTHER;
        s.no_cache = i == NO_CACHE;
        client_start(&x.f, &c[i], &s);
        pass(&x.f, 300);
        assert_int_equal(x.p->submits, 1 + (i < FOLLOWER ? 1 : i));
        assert_true(x.p->submit[x.p->submits - 1].late);
    }
    serve_one(&x, 40, &c[FIRST]);
    until(&x.f, x.p->submits == 1 + N && placed(&x));
    assert_int_equal(x.p->submit[N].n_tokens, 41);
    serve_one(&x, 41, &c[FOLLOWER]);
    serve_one(&x, 50 + OTHER, &c[OTHER]);
    serve_one(&x, 50 + NO_CACHE, &c[NO_CACHE]);
    for (int i = 0; i < N; i++) {
        assert_int_equal(c[i].errors, 0);
        client_cleanup(&c[i]);
    }
    fixture_cleanup(&x.f);
}

/* A client that leaves while its request waits for a prefix takes nothing with it. */
static void test_follower_leaves(void **state)
{
    (void)state;
    struct pair x;
    fixture_init(&x.f);
    x.f.rc.policy = &bt_sched_baton;
    x.f.rc.sched.objective.ttft_ms = 1000;
    x.f.rc.sched.late.wait_ms = 60000;
    pair_start(&x);
    x.p->load.prefill_tokens_per_s = 10;
    until(&x.f, session_of_fake(x.p)->load.prefill_tokens_per_s == 10);
    struct client c[2];
    for (uint32_t i = 0; i < 2; i++) {
        struct bt_gen_spec s = spec_of(40 + i, 1);
        s.timeout_ms = i != 0 ? 500 : 0;
        client_start(&x.f, &c[i], &s);
        until(&x.f, x.p->submits == 1);
    }
    until(&x.f, c[1].errors == 1);
    assert_int_equal(x.p->submits, 1);
    serve_one(&x, 40, &c[0]);
    for (int i = 0; i < 2; i++) {
        client_cleanup(&c[i]);
    }
    fixture_cleanup(&x.f);
}

/* One tenant has half of the waiting places and not the last eighth: others find some. */
static void test_shares_of_the_queue(void **state)
{
    (void)state;
    enum { N = 22 };
    struct pair x;
    fixture_init(&x.f);
    x.f.rc.max_running = 1;
    x.f.rc.max_waiting = 16;
    pair_start(&x);
    struct client c[N] = {0};
    /* a's first runs, 8 wait, two are refused; b has 6 more, up to the last eighth, and two are
     * refused; c and d have one each there, and c's second is refused. */
    static const char owner[N + 1] = "aaaaaaaaaaabbbbbbbbccd";
    static const char refused[N + 1] = ".........xx......xx.x.";
    for (uint32_t i = 0; i < N; i++) {
        char tenant[2] = {owner[i], '\0'};
        struct bt_gen_spec s = spec_of(40, 1);
        s.tenant = bt_strdup(tenant);
        client_start(&x.f, &c[i], &s);
        if (i == 0) {
            until(&x.f, placed(&x));
        }
        until(&x.f, refused[i] != 'x' || c[i].errors == 1);
    }
    struct bt_gen_terms t = {
        .received_ns = bt_mono_ns(), .knows_priority = true, .tenant = "a", .priority = 0};
    char why[192] = "";
    uint32_t after = 0;
    assert_true(bt_requests_turn_away(x.f.rs, &t, why, sizeof(why), &after));
    assert_non_null(strstr(why, "of this API key is reached (conductor.max_waiting)"));
    assert_int_equal(bt_requests_prompts_max(x.f.rs, true), 1 + 8);
    assert_int_equal(bt_requests_prompts_max(x.f.rs, false), 1 + 16);
    for (uint32_t i = 0; i < N; i++) {
        assert_int_equal(c[i].errors, refused[i] == 'x');
        if (refused[i] == 'x') {
            assert_int_equal(c[i].http, 429);
            assert_true(c[i].retry_after_s >= 1);
        } else {
            bt_request_cancel(c[i].r);
        }
        client_cleanup(&c[i]);
    }
    fixture_cleanup(&x.f);
}

/* A queue that is full turns away by class, before anything is read. */
static void test_a_full_queue_turns_away(void **state)
{
    (void)state;
    struct pair x;
    fixture_init(&x.f);
    x.f.rc.max_running = 1;
    x.f.rc.max_waiting = 1;
    pair_start(&x);
    struct bt_gen_terms t = {.received_ns = bt_mono_ns(), .knows_priority = true};
    char why[192] = "";
    uint32_t after = 0;
    struct client first, second, third;
    struct bt_gen_spec s = spec_of(40, 1);
    client_start(&x.f, &first, &s);
    until(&x.f, x.p->submits == 1);
    assert_false(bt_requests_turn_away(x.f.rs, &t, why, sizeof(why), &after)); /* it may wait */
    s = spec_of(40, 1);
    s.priority = 3;
    client_start(&x.f, &second, &s);
    until(&x.f, waiting(&x) == 1);
    t.priority = 3;
    assert_true(bt_requests_turn_away(x.f.rs, &t, why, sizeof(why), &after));
    assert_non_null(strstr(why, "conductor.max_waiting"));
    assert_true(after >= 1);
    t.priority = 2; /* would take the other one's place */
    assert_false(bt_requests_turn_away(x.f.rs, &t, why, sizeof(why), &after));
    t.priority = 3;
    t.knows_priority = false;
    assert_false(bt_requests_turn_away(x.f.rs, &t, why, sizeof(why), &after));
    /* One that would miss its objective takes nobody's place. */
    x.p->load.queued_prefill_tokens = 3000000; /* three seconds of it */
    until(&x.f, session_of_fake(x.p)->load.queued_prefill_tokens == 3000000);
    s = spec_of(40, 1);
    s.priority = 2;
    s.slo_ttft_ms = 1000;
    client_start(&x.f, &third, &s);
    until(&x.f, third.errors == 1);
    assert_non_null(strstr(third.message, "time to first token"));
    assert_int_equal(second.errors, 0);
    assert_int_equal(waiting(&x), 1);
    client_cleanup(&third);
    bt_request_cancel(first.r);
    bt_request_cancel(second.r);
    client_cleanup(&first);
    client_cleanup(&second);
    fixture_cleanup(&x.f);
}

static uint32_t running(struct pair *x)
{
    struct bt_requests_stats st;
    bt_requests_stats(x->f.rs, &st);
    return st.running;
}

/* A hundred requests that come at once are not planned in one turn of the loop. */
static void test_many_at_once(void **state)
{
    enum { MANY = 100 };
    (void)state;
    struct pair x;
    static struct client c[MANY];
    fixture_init(&x.f);
    pair_start(&x);
    for (int i = 0; i < MANY; i++) {
        struct bt_gen_spec s = spec_of(1500, 1);
        client_start(&x.f, &c[i], &s);
    }
    until(&x.f, running(&x) > 0);
    assert_true(running(&x) < MANY);
    until(&x.f, running(&x) == MANY);
    for (int i = 0; i < MANY; i++) {
        bt_request_cancel(c[i].r);
        client_cleanup(&c[i]);
    }
    fixture_cleanup(&x.f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_many_at_once),
        cmocka_unit_test(test_waits_for_room),
        cmocka_unit_test(test_order_and_no_herd),
        cmocka_unit_test(test_release_wakes),
        cmocka_unit_test(test_elsewhere_first),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_tenants_take_turns_for_room),
        cmocka_unit_test(test_classes_and_tenants),
        cmocka_unit_test(test_places_for_higher_classes),
        cmocka_unit_test(test_room_and_nobody_left),
        cmocka_unit_test(test_full_worker),
        cmocka_unit_test(test_full_after_a_failure),
        cmocka_unit_test(test_full_workers),
        cmocka_unit_test(test_refused_at_once),
        cmocka_unit_test(test_lower_classes_are_not_waited_for),
        cmocka_unit_test(test_refused_ones_are_no_progress),
        cmocka_unit_test(test_late_is_not_never),
        cmocka_unit_test(test_no_priority_is_late),
        cmocka_unit_test(test_follows),
        cmocka_unit_test(test_follower_leaves),
        cmocka_unit_test(test_shares_of_the_queue),
        cmocka_unit_test(test_a_full_queue_turns_away),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
