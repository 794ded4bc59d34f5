/* The view of the cluster: hello checks, incarnations, membership, silence, block events. */
#include "tests/unit/conductor_fixture.h"

static uint32_t planned_workers(struct fixture *f)
{
    struct bt_view_snapshot s;
    bt_view_snapshot(f->view, NULL, 0, &s);
    return s.snap.n_workers;
}

static uint32_t planned_kvstores(struct fixture *f)
{
    struct bt_view_snapshot s;
    bt_view_snapshot(f->view, NULL, 0, &s);
    return s.snap.n_kvstores;
}

/* What /metrics says. */
static double metric(struct fixture *f, const char *name)
{
    char line[64];
    struct bt_buf text;
    bt_buf_init(&text);
    bt_metrics_render(f->metrics, &text);
    bt_buf_append(&text, "", 1);
    snprintf(line, sizeof(line), "\n%s ", name);
    const char *at = strstr(text.data, line);
    assert_non_null(at);
    double value = strtod(at + strlen(line), NULL);
    bt_buf_cleanup(&text);
    return value;
}

static void test_hello(void **state)
{
    (void)state;
    struct fixture f;
    fixture_init(&f);
    fixture_start(&f);
    struct fake *good = fake_add(&f, "decode", "good", "n1");
    struct fake *layout = fake_add(&f, "decode", "other-layout", "n1");
    struct fake *inc = fake_add(&f, "kvstore", "other-incarnation", "n1");
    layout->hello_layout = 78;
    inc->hello_incarnation = 5;
    until(&f, fake_up(good) && layout->sessions >= 1 && inc->sessions >= 1);
    pass(&f, 100);
    assert_false(fake_up(layout));
    assert_false(fake_up(inc));
    assert_int_equal(planned_workers(&f), 1);
    assert_int_equal(planned_kvstores(&f), 0);
    /* Put right, they are taken in: refusal is not for ever. */
    layout->hello_layout = 77;
    inc->hello_incarnation = inc->incarnation;
    pass_until(&f, fake_up(layout) && fake_up(inc));
    assert_int_equal(planned_workers(&f), 2);
    fixture_cleanup(&f);
}

/* By what this conductor has sent it, at the speed that it has shown, or by what the worker said
 * last, where that is more: others send it prompts too. */
static void test_queue(void **state)
{
    (void)state;
    struct fixture f;
    fixture_init(&f);
    fixture_start(&f);
    struct fake *p = fake_add(&f, "prefill", "p", "n1");
    until(&f, fake_up(p));
    struct bt_session *s = session_of_fake(p);
    struct bt_view_snapshot v;
    static const double ago_ms[] = {0, 4000, 12000};
    for (int slow = 1; slow <= 2; slow++) {
        for (size_t i = 0; i < BT_ARRAY_LEN(ago_ms); i++) {
            struct bt_sched_prompt x = {.len = 1000, .alone_ms = 10000};
            struct bt_sched_pace pace = bt_session_pace(s);
            assert_null(pace.cost); /* it has not said any */
            bt_sched_backlog_add(&s->peer.own.backlog, &x, &pace,
                                 bt_mono_ns() - (uint64_t)(ago_ms[i] * 1e6));
            s->peer.learned.slow = slow;
            bt_view_snapshot(f.view, NULL, 0, &v);
            double want = BT_MAX(10000 - ago_ms[i] / slow, 0);
            assert_true(v.workers[0].queue.ms <= want && v.workers[0].queue.ms > want - 1500);
            assert_null(v.workers[0].queue.ahead);
            bt_sched_backlog_done(&s->peer.own.backlog, &x, &pace, bt_mono_ns());
        }
    }
    s->peer.learned.slow = 1;
    double token_ns[] = {0, 0, 0, 0};
    Baton__StepCost cost = BATON__STEP_COST__INIT;
    cost.base_ns = 1e12;
    cost.token_ns = token_ns;
    cost.n_token_ns = BT_ARRAY_LEN(token_ns);
    cost.steps = 1;
    cost.experts_ns = 2;
    cost.missed = 0.75;
    p->load.cost = &cost;
    p->load.chunk_tokens = 512;
    p->load.max_rows = 2048;
    until(&f, s->load.cost != NULL);
    /* Steps of 1,000 s, whoever is in them: the second prompt waits for the first one's, the third
     * is beside it. */
    struct bt_sched_prompt x[3];
    struct bt_sched_pace pace = bt_session_pace(s);
    assert_true(pace.cost != NULL && pace.max_rows == 2048 && pace.chunk_tokens == 512);
    assert_true(pace.cost->experts_ns == 2 && pace.cost->missed == 0.75);
    for (int i = 0; i < 3; i++) {
        x[i] = (struct bt_sched_prompt){.len = 100, .alone_ms = 1e6};
        bt_sched_own_prompt(&s->peer.own, &x[i], &pace, bt_mono_ns());
    }
    bt_view_snapshot(f.view, NULL, 0, &v);
    assert_true(v.workers[0].queue.ms <= 2e6 && v.workers[0].queue.ms > 2e6 - 60e3);
    assert_ptr_equal(v.workers[0].queue.ahead, &s->peer.own.backlog.ahead);
    assert_true(v.workers[0].queue.ahead_past_ms >= 0 && v.workers[0].queue.ahead_past_ms < 60e3);
    bt_view_overtake(&v, -1); /* all of that goes behind */
    assert_true(v.workers[0].queue.ms == 0);
    assert_null(v.workers[0].queue.ahead);
    p->load.queue_ms = 9e6; /* others' conductors have more there */
    until(&f, s->load.queue_ms == 9e6);
    bt_view_snapshot(f.view, NULL, 0, &v);
    assert_true(v.workers[0].queue.ms > 9e6 - 60e3 && v.workers[0].queue.ms <= 9e6);
    assert_true(v.workers[0].queue.ahead_past_ms < -6e6); /* which is in front */
    for (int i = 0; i < 3; i++) {
        bt_sched_own_prompt_done(&s->peer.own, &x[i], &pace, bt_mono_ns());
    }
    fixture_cleanup(&f);
}

/* What is still in prefill is shown apart from the rows: its context is not read yet. */
static void test_coming(void **state)
{
    (void)state;
    struct fixture f;
    fixture_init(&f);
    fixture_start(&f);
    struct fake *d = fake_add(&f, "decode", "d", "n1");
    d->load.kv_tokens = 1000;
    until(&f, fake_up(d));
    struct bt_session *s = session_of_fake(d);
    until(&f, s->load.kv_tokens == 1000);
    struct bt_view_snapshot v;
    s->peer.own.rows = 5;
    s->peer.own.kv_tokens = 5000;
    bt_view_snapshot(f.view, NULL, 0, &v);
    assert_int_equal(v.workers[0].rows.kv_tokens, 1000);
    assert_int_equal(v.workers[0].rows.own_coming, 5);
    assert_int_equal(v.workers[0].rows.own_coming_tokens, 5000);
    s->peer.own.decoding = 2;
    s->peer.own.decoding_kv = 1500;
    bt_view_snapshot(f.view, NULL, 0, &v);
    assert_int_equal(v.workers[0].rows.kv_tokens, 1500);
    assert_int_equal(v.workers[0].rows.own_coming, 3);
    assert_int_equal(v.workers[0].rows.own_coming_tokens, 3500);
    fixture_cleanup(&f);
}

static void test_membership(void **state)
{
    (void)state;
    struct fixture f;
    fixture_init(&f);
    fixture_start(&f);
    struct fake *d = fake_add(&f, "decode", "d", "n1");
    struct fake *k = fake_add(&f, "kvstore", "k", "n1");
    until(&f, fake_up(d) && fake_up(k));
    struct bt_view_snapshot s;
    bt_view_snapshot(f.view, NULL, 0, &s);
    assert_int_equal(s.workers[0].kvstore, 0);
    assert_ptr_equal(s.worker[0], &session_of_fake(d)->peer);
    assert_int_equal(s.workers[0].capacity.slots, 16);
    assert_int_equal(s.kvstores[0].slots_free, 1000);
    fake_register(d, BATON__MEMBER_STATE__DRAINING); /* no new work, but the session stays */
    assert_int_equal(planned_workers(&f), 0);
    assert_true(fake_up(d));
    fake_register(d, BATON__MEMBER_STATE__STARTING);
    assert_int_equal(planned_workers(&f), 0);
    fake_register(d, BATON__MEMBER_STATE__READY);
    assert_int_equal(planned_workers(&f), 1);
    assert_int_equal(d->sessions, 1);
    /* Gone from etcd, though the session works: nothing new, and it may finish what it has. */
    bt_view_member_down(f.view, "decode", "d");
    assert_int_equal(planned_workers(&f), 0);
    pass(&f, 200);
    assert_true(fake_up(d));
    fake_register(d, BATON__MEMBER_STATE__READY); /* its lease was only late */
    assert_int_equal(planned_workers(&f), 1);
    assert_int_equal(d->sessions, 1);
    /* Gone from etcd and broken: forgotten. */
    bt_view_member_down(f.view, "decode", "d");
    fake_kill(d);
    until(&f, session_of_fake(d) == NULL);
    bt_view_member_down(f.view, "decode", "d"); /* unknown: nothing to do */
    fixture_cleanup(&f);
}

static double misnamed(struct fixture *f)
{
    return metric(f, "baton_members_misnamed");
}

/* Another model.served_name is told of, and is no reason to send nothing there. */
static void test_served_names(void **state)
{
    (void)state;
    struct fixture f;
    fixture_init(&f);
    fixture_start(&f);
    struct fake *d = fake_add(&f, "decode", "d", "n1");
    struct fake *k = fake_add(&f, "kvstore", "k", "n1");
    until(&f, fake_up(d) && fake_up(k)); /* they do not say: older ones */
    assert_true(misnamed(&f) == 0);
    d->model = "shop/7b";
    k->model = "shop";
    fake_register(d, BATON__MEMBER_STATE__READY);
    fake_register(k, BATON__MEMBER_STATE__READY);
    fake_register(k, BATON__MEMBER_STATE__READY);
    assert_true(misnamed(&f) == 1);
    d->model = "Shop/7b";
    fake_register(d, BATON__MEMBER_STATE__READY);
    assert_true(misnamed(&f) == 2);
    assert_int_equal(planned_workers(&f), 1);
    k->model = "shop/7b";
    fake_register(k, BATON__MEMBER_STATE__READY);
    assert_true(misnamed(&f) == 1);
    bt_view_member_down(f.view, "decode", "d");
    fake_kill(d);
    until(&f, session_of_fake(d) == NULL);
    assert_true(misnamed(&f) == 0);
    fixture_cleanup(&f);
}

static void test_restart(void **state)
{
    (void)state;
    struct fixture f;
    fixture_init(&f);
    fixture_start(&f);
    struct fake *d = fake_add(&f, "decode", "d", "n1");
    until(&f, fake_up(d));
    fake_kill(d);
    until(&f, !fake_up(d));
    assert_int_equal(planned_workers(&f), 0);
    /* Same incarnation, same port (the network came back): dialled again without being told. */
    fake_listen(d);
    until(&f, fake_up(d));
    assert_int_equal(d->sessions, 2);
    /* A new incarnation, told by etcd while the old session still seems to be fine. */
    d->incarnation = d->hello_incarnation = 4242;
    fake_register(d, BATON__MEMBER_STATE__READY);
    assert_false(fake_up(d));
    until(&f, fake_up(d) && d->sessions == 3);
    assert_int_equal(session_of_fake(d)->member->incarnation, 4242);
    fixture_cleanup(&f);
}

static void test_silence(void **state)
{
    (void)state;
    struct fixture f;
    fixture_init_silence(&f, SILENCE_MS);
    fixture_start(&f);
    struct fake *d = fake_add(&f, "decode", "d", "n1");
    until(&f, fake_up(d));
    clock_stop();
    pass(&f, 1000); /* longer than the bound: heartbeats keep it up */
    assert_true(fake_up(d));
    assert_int_equal(d->sessions, 1);
    d->mute = true;
    pass_until(&f, !bt_session_up(session_of_fake(d)));
    clock_go_on();
    /* While it hangs it accepts, but says no hello: never up. */
    until(&f, d->sessions >= 2);
    pass(&f, 300);
    assert_false(bt_session_up(session_of_fake(d)));
    d->mute = false;
    until(&f, fake_up(d));
    fixture_cleanup(&f);
}

static void test_garbage(void **state)
{
    (void)state;
    struct fixture f;
    fixture_init(&f);
    fixture_start(&f);
    struct fake *d = fake_add(&f, "decode", "d", "n1");
    struct fake *k = fake_add(&f, "kvstore", "k", "n1");
    until(&f, fake_up(d) && fake_up(k) && k->blocks != NULL);
    assert_int_equal(bt_rpc_stream_send(d->stream, "\xff\xff\xff\xff", 4), BT_OK);
    until(&f, d->sessions == 2 && fake_up(d)); /* broken, and dialled again */
    fake_hello(d);                             /* a second hello */
    until(&f, d->sessions == 3 && fake_up(d));
    Baton__BlockEvents e = BATON__BLOCK_EVENTS__INIT;
    e.added.data = (uint8_t *)"short";
    e.added.len = 5;
    send_ok(k->blocks, &e.base);
    until(&f, k->sessions == 2 && fake_up(k));
    fixture_cleanup(&f);
}

/* ---- block events ---- */

static void events(struct fake *k, uint64_t seq, bool reset, const char *added, const char *removed)
{
    uint8_t a[36 * 16], r[32 * 16];
    Baton__BlockEvents e = BATON__BLOCK_EVENTS__INIT;
    e.seq = seq;
    e.reset = reset;
    e.incarnation = k->incarnation;
    memset(a, 0, sizeof(a));
    memset(r, 0, sizeof(r));
    for (size_t i = 0; added[i] != '\0'; i++, e.added.len += 36) {
        a[36 * i] = (uint8_t)added[i];
        a[36 * i + 32] = (uint8_t)(added[i] - 'a');
    }
    for (size_t i = 0; removed[i] != '\0'; i++, e.removed.len += 32) {
        r[32 * i] = (uint8_t)removed[i];
    }
    e.added.data = a;
    e.removed.data = r;
    assert_true(k->credit > 0);
    k->credit--;
    send_ok(k->blocks, &e.base);
}

static double index_metric(struct fixture *f)
{
    return metric(f, "baton_index_blocks");
}

/* How many of "abcd..." the index says kvstore k has. */
static uint32_t match(struct fixture *f, struct fake *k)
{
    struct bt_kv_key keys[8];
    memset(keys, 0, sizeof(keys));
    for (int i = 0; i < 8; i++) {
        keys[i].b[0] = (uint8_t)('a' + i);
    }
    struct bt_view_snapshot s;
    bt_view_snapshot(f->view, keys, 8, &s);
    for (uint32_t i = 0; i < s.snap.n_kvstores; i++) {
        if (s.kvstore[i] == &session_of_fake(k)->peer) {
            return s.kvstores[i].match_blocks;
        }
    }
    return 0;
}

static void test_blocks(void **state)
{
    (void)state;
    struct fixture f;
    fixture_init(&f);
    fixture_start(&f);
    struct fake *k1 = fake_add(&f, "kvstore", "k1", "n1");
    struct fake *k2 = fake_add(&f, "kvstore", "k2", "n2");
    until(&f, fake_up(k1) && fake_up(k2) && k1->credit > 0 && k2->credit > 0);
    events(k1, 1, true, "abc", "");
    events(k1, 4, false, "d", "");
    events(k2, 900, true, "ab", "");
    until(&f, match(&f, k1) == 4 && match(&f, k2) == 2);
    events(k1, 5, false, "", "c");
    until(&f, match(&f, k1) == 2);
    events(k1, 6, false, "ce", "");
    until(&f, match(&f, k1) == 5);
    /* Deltas were lost: what is known of it is forgotten, the other kvstore's is not. */
    events(k1, 20, false, "f", "");
    until(&f, match(&f, k1) == 0);
    assert_int_equal(match(&f, k2), 2);
    events(k1, 30, true, "abcdef", ""); /* the resync */
    until(&f, match(&f, k1) == 6);
    events(k1, 36, false, "g", "");
    until(&f, match(&f, k1) == 7);
    assert_true(index_metric(&f) == 7);
    /* Its session breaks: nothing of it is believed any more. */
    fake_kill(k1);
    until(&f, !fake_up(k1));
    size_t it = 0;
    uint8_t key[8];
    uint32_t depth, n = 0, ids[8], holders;
    while (bt_holders_next(bt_view_index(f.view), &it, SIZE_MAX, key, &depth, ids, 8, &holders)) {
        n++;
    }
    assert_int_equal(n, 2);
    assert_string_equal(bt_view_kvstore_name(f.view, session_of_fake(k2)->kv_id), "k2");
    until(&f, index_metric(&f) == 2); /* although no event comes any more */
    fixture_cleanup(&f);
}

/* Credit is given back, so that events never stop; and events of somebody else are refused. */
static void test_credit(void **state)
{
    (void)state;
    struct fixture f;
    fixture_init(&f);
    fixture_start(&f);
    struct fake *k = fake_add(&f, "kvstore", "k", "n1");
    until(&f, fake_up(k) && k->credit > 0);
    uint32_t first = k->credit;
    assert_in_range(first, 2, 1000);
    for (uint32_t i = 0; i < 5 * first; i++) {
        until(&f, k->credit > 0);
        events(k, i + 1, i == 0, i % 2 == 0 ? "a" : "", i % 2 == 0 ? "" : "a");
    }
    until(&f, k->credit >= first / 2);
    assert_true(k->credit <= first);
    k->incarnation++; /* as if a message of another incarnation had got in */
    events(k, 5 * first + 1, false, "b", "");
    k->incarnation--;
    until(&f, k->sessions == 2 && fake_up(k));
    assert_int_equal(match(&f, k), 0);
    fixture_cleanup(&f);
}

/* To forget what a kvstore had costs a sweep of the index. One that has that done again and again
 * gets its credit back when the sweeps are over, and others are not slowed down by it. */
static void test_resets_wait_for_the_sweep(void **state)
{
    (void)state;
    struct fixture f;
    fixture_init_index(&f, 10000, 4u << 20, 1); /* some ten beats of sweeping */
    fixture_start(&f);
    struct fake *k1 = fake_add(&f, "kvstore", "k1", "n1");
    struct fake *k2 = fake_add(&f, "kvstore", "k2", "n2");
    until(&f, fake_up(k1) && fake_up(k2) && k1->credit > 0 && k2->credit > 0);
    uint32_t first = k1->credit;
    uint64_t seq = 1;
    while (k1->credit > 0) {
        events(k1, seq++, true, "a", "");
    }
    for (uint32_t i = 0; i < 2 * first; i++) {
        until(&f, k2->credit > 0);
        events(k2, i + 1, i == 0, i % 2 == 0 ? "a" : "", i % 2 == 0 ? "" : "a");
    }
    until(&f, match(&f, k1) == 1);
    pass(&f, 100);
    assert_int_equal(k1->credit, 0);
    until(&f, k1->credit > 0);
    events(k1, seq, false, "b", "");
    until(&f, match(&f, k1) == 2);
    fixture_cleanup(&f);
}

/* ... and a kvstore that does not wait for its credit is given up. */
static void test_no_events_without_credit(void **state)
{
    (void)state;
    struct fixture f;
    fixture_init_index(&f, 10000, 4u << 20, 1);
    fixture_start(&f);
    struct fake *k = fake_add(&f, "kvstore", "k", "n1");
    until(&f, fake_up(k) && k->credit > 0);
    for (uint32_t i = 0; i < 300 && k->blocks != NULL; i++) {
        k->credit = 1;
        events(k, 1, true, "a", "");
    }
    until(&f, k->sessions == 2 && fake_up(k));
    fixture_cleanup(&f);
}

/* The plan follows the blocks. */
static void test_plan_follows_blocks(void **state)
{
    (void)state;
    struct fixture f;
    fixture_init(&f);
    fixture_start(&f);
    struct fake *k[2] = {fake_add(&f, "kvstore", "k1", "n1"), fake_add(&f, "kvstore", "k2", "n2")};
    struct fake *p[2] = {fake_add(&f, "prefill", "p1", "n1"), fake_add(&f, "prefill", "p2", "n2")};
    struct fake *d = fake_add(&f, "decode", "d1", "n1");
    for (int i = 0; i < f.n_fakes; i++) {
        f.fakes[i].load.prefill_tokens_per_s = 1000;
    }
    until(&f, fake_up(k[0]) && fake_up(k[1]) && fake_up(p[0]) && fake_up(p[1]) && fake_up(d));
    until(&f, k[0]->credit > 0 && k[1]->credit > 0);
    for (int holder = 0; holder < 2; holder++) {
        /* The keys of the prompt's full blocks, as a kvstore would have sealed them. */
        struct bt_gen_spec s = spec_of(100, 2);
        for (uint32_t i = 0; i < 100; i++) {
            s.prompt.ids[i] += (uint32_t)holder;
        }
        struct bt_kv_key keys[6];
        assert_int_equal(bt_kv_keys(&f.rc.root, s.prompt.ids, 100, BLOCK_TOKENS, keys), 6);
        uint8_t added[6 * 36] = {0};
        for (uint32_t i = 0; i < 6; i++) {
            memcpy(added + i * 36, keys[i].b, 32);
            added[i * 36 + 32] = (uint8_t)i;
        }
        Baton__BlockEvents e = BATON__BLOCK_EVENTS__INIT;
        e.reset = true;
        e.seq = 1;
        e.added.data = added;
        e.added.len = sizeof(added);
        size_t before = bt_holders_keys(bt_view_index(f.view));
        send_ok(k[holder]->blocks, &e.base);
        until(&f, bt_holders_keys(bt_view_index(f.view)) == before + 6);
        struct client c;
        int n = p[holder]->submits;
        client_start(&f, &c, &s);
        until(&f, p[holder]->submits == n + 1 || p[!holder]->submits > holder);
        assert_int_equal(p[holder]->submits, n + 1);
        bt_request_cancel(c.r);
        client_cleanup(&c);
    }
    fixture_cleanup(&f);
}

/* More blocks than the index is to have: those that are known stay, and what was refused counts. */
static void test_full_index(void **state)
{
    (void)state;
    struct fixture f;
    fixture_init(&f);
    fixture_start(&f);
    struct fake *k = fake_add(&f, "kvstore", "k", "n1");
    until(&f, fake_up(k) && k->credit > 0);
    static uint8_t added[(INDEX_KEYS + 3) * 36];
    for (uint32_t i = 0; i < INDEX_KEYS + 3; i++) {
        memcpy(added + (size_t)i * 36, &i, sizeof(i));
    }
    Baton__BlockEvents e = BATON__BLOCK_EVENTS__INIT;
    e.reset = true;
    e.seq = 1;
    e.added.data = added;
    e.added.len = sizeof(added);
    send_ok(k->blocks, &e.base);
    until(&f, bt_holders_keys(bt_view_index(f.view)) == INDEX_KEYS);
    struct bt_buf text;
    bt_buf_init(&text);
    bt_metrics_render(f.metrics, &text);
    bt_buf_append(&text, "", 1);
    assert_non_null(strstr(text.data, "\nbaton_index_refused_total 3\n"));
    bt_buf_cleanup(&text);
    fixture_cleanup(&f);
}

/* An index of extents has the last block of each, and finds prefixes of whole extents. */
static void test_extents(void **state)
{
    (void)state;
    static uint8_t added[10 * 36];
    struct bt_kv_key keys[10];
    struct fixture f;
    fixture_init_index(&f, 10000, INDEX_KEYS, 4);
    fixture_start(&f);
    struct fake *k = fake_add(&f, "kvstore", "k", "n1");
    until(&f, fake_up(k) && k->credit > 0);
    for (uint32_t i = 0; i < BT_ARRAY_LEN(keys); i++) {
        memset(keys[i].b, (int)i + 1, sizeof(keys[i].b));
        memcpy(added + (size_t)i * 36, keys[i].b, sizeof(keys[i].b));
        memcpy(added + (size_t)i * 36 + 32, &i, sizeof(i));
    }
    Baton__BlockEvents e = BATON__BLOCK_EVENTS__INIT;
    e.reset = true;
    e.seq = 1;
    e.added.data = added;
    e.added.len = sizeof(added);
    send_ok(k->blocks, &e.base);
    until(&f, bt_holders_keys(bt_view_index(f.view)) == 2);
    for (uint32_t n = 0; n <= BT_ARRAY_LEN(keys); n++) {
        struct bt_view_snapshot s;
        bt_view_snapshot(f.view, keys, n, &s);
        assert_int_equal(s.snap.n_kvstores, 1);
        assert_int_equal(s.kvstores[0].match_blocks, n / 4 * 4);
    }
    fixture_cleanup(&f);
}

/* What a worker says of its classes, whoever sent them: a request waits for those before it, and
 * for what is under way; rows behind it would make way. */
static void test_classes_of_workers(void **state)
{
    (void)state;
    struct fixture f;
    fixture_init(&f);
    fixture_start(&f);
    struct fake *k = fake_add(&f, "decode", "d", "n1");
    Baton__ClassLoad class[2] = {BATON__CLASS_LOAD__INIT, BATON__CLASS_LOAD__INIT};
    Baton__ClassLoad *classes[] = {&class[0], &class[1]};
    class[0].priority = -5;
    class[0].queue_ms = 10000;
    class[0].rows = 4;
    class[0].pages = 20;
    class[1].priority = INT16_MAX; /* as far as workers tell classes apart */
    class[1].queue_ms = 30000;
    class[1].rows = 9;
    class[1].pages = 60;
    class[1].waiting = 3;
    class[1].landing = 2;
    k->load.queue_ms = 60000; /* of which 20000 are in the step under way */
    k->load.running = 13;
    k->load.waiting = 3;
    k->load.landing = 2;
    k->load.classes = classes;
    k->load.n_classes = 2;
    until(&f, fake_up(k));
    struct bt_session *s = session_of_fake(k);
    until(&f, s->said.classes.n == 2 && s->load.queue_ms == 60000);
    static const struct {
        int32_t priority;
        double queue_ms;
        uint32_t waiting, rows, pages;
    } want[] = {{INT32_MAX, 60000, 1, 0, 0},
                {INT16_MAX, 60000, 1, 0, 0},
                {-5, 30000, 0, 9, 60}, /* late rows that are still to land are no rows */
                {-6, 20000, 0, 13, 80},
                {INT32_MIN, 20000, 0, 13, 80}};
    struct bt_view_snapshot v;
    for (size_t i = 0; i < BT_ARRAY_LEN(want); i++) {
        bt_view_snapshot(f.view, NULL, 0, &v);
        bt_view_overtake(&v, want[i].priority);
        const struct bt_sched_worker *w = &v.workers[0];
        assert_true(w->queue.ms <= want[i].queue_ms && w->queue.ms > want[i].queue_ms - 15000);
        assert_true(w->queue.ms + w->queue.late_ms <= 60000 &&
                    w->queue.ms + w->queue.late_ms > 45000);
        assert_int_equal(w->rows.waiting, want[i].waiting);
        assert_int_equal(w->rows.yield, want[i].rows);
        assert_int_equal(w->rows.yield_pages, want[i].pages);
        assert_int_equal(w->rows.running, 13); /* a step has all of them */
    }
    /* Of our own no heartbeat may have told yet. */
    bt_classes_join(&s->peer.own.classes, 7)->rows += 12;
    bt_view_snapshot(f.view, NULL, 0, &v);
    bt_view_overtake(&v, 6);
    assert_int_equal(v.workers[0].rows.yield, 12);
    bt_classes_leave(&s->peer.own.classes, 7);
    k->load.n_classes = 0; /* an older worker: everybody waits for everybody */
    until(&f, s->said.classes.n == 0);
    bt_view_snapshot(f.view, NULL, 0, &v);
    bt_view_overtake(&v, -6);
    assert_true(v.workers[0].queue.ms > 45000);
    assert_int_equal(v.workers[0].rows.yield, 0);
    fixture_cleanup(&f);
}

/* Workers hear how long steps with prompts beside rows may be, with the hello and whenever it
 * changes; what one says is in force is what the scheduler counts on, and of one that says nothing
 * it counts on none. */
static void test_mixed_steps(void **state)
{
    (void)state;
    struct fixture f;
    fixture_init(&f);
    fixture_start(&f);
    bt_view_set_mixed(f.view, 75, 95);
    struct fake *k = fake_add(&f, "decode", "d", "n1");
    k->hello_layout++; /* by the hello: it is never up */
    until(&f, k->told_step_ms == 75 && k->told_gap_ms == 95);
    assert_false(bt_session_up(session_of_fake(k)));
    struct fake *d = fake_add(&f, "decode", "d2", "n2");
    Baton__MixedSteps in_force = BATON__MIXED_STEPS__INIT;
    in_force.step_ms = 60;
    in_force.gap_ms = 80;
    d->load.mixed = &in_force;
    until(&f, fake_up(d));
    struct bt_session *s = session_of_fake(d);
    struct bt_view_snapshot v;
    until(&f, s->has_load && s->said.mixed_step_ms == 60);
    bt_view_snapshot(f.view, NULL, 0, &v);
    assert_true(v.workers[0].speed.mixed_step_ms == 60 && v.workers[0].speed.mixed_gap_ms == 80);
    bt_view_set_mixed(f.view, 30, 38);
    until(&f, d->told_step_ms == 30 && d->told_gap_ms == 38);
    in_force.step_ms = 0; /* none */
    until(&f, s->said.mixed_step_ms < 0);
    in_force.step_ms = 30;
    until(&f, s->said.mixed_step_ms == 30);
    d->load.mixed = NULL; /* an older release */
    until(&f, s->said.mixed_step_ms < 0);
    bt_view_snapshot(f.view, NULL, 0, &v);
    assert_true(v.workers[0].speed.mixed_step_ms < 0);
    bt_view_set_mixed(f.view, 0, 0);
    until(&f, d->told_step_ms == 0);
    fixture_cleanup(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_full_index),
        cmocka_unit_test(test_extents),
        cmocka_unit_test(test_mixed_steps),
        cmocka_unit_test(test_classes_of_workers),
        cmocka_unit_test(test_hello),
        cmocka_unit_test(test_membership),
        cmocka_unit_test(test_queue),
        cmocka_unit_test(test_coming),
        cmocka_unit_test(test_served_names),
        cmocka_unit_test(test_restart),
        cmocka_unit_test(test_silence),
        cmocka_unit_test(test_garbage),
        cmocka_unit_test(test_blocks),
        cmocka_unit_test(test_resets_wait_for_the_sweep),
        cmocka_unit_test(test_no_events_without_credit),
        cmocka_unit_test(test_credit),
        cmocka_unit_test(test_plan_follows_blocks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
