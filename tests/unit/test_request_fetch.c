/* A prefix that other nodes have: who the prefill side's kvstore is told to fetch it from, at what
 * speed it would be computed, and what an explanation says. */
#include "tests/unit/request_fixture.h"

#include "conductor/request/inspect.h"

#define TOKENS 100u /* six full blocks of 16, and a bit */

struct world {
    struct pair x;
    struct fake *k3, *k4; /* kvstores of nodes without workers */
    uint8_t keys[16 * 32];
    uint64_t seq;
};

/* Announces blocks [first, end) of the prompt. */
static void has_blocks(struct world *w, struct fake *k, uint32_t first, uint32_t end)
{
    uint8_t a[36 * 16] = {0};
    Baton__BlockEvents e = BATON__BLOCK_EVENTS__INIT;
    e.seq = 1;
    e.reset = true;
    e.incarnation = k->incarnation;
    for (uint32_t i = first; i < end; i++, e.added.len += 36) {
        memcpy(a + e.added.len, w->keys + 32 * i, 32);
        a[e.added.len + 32] = (uint8_t)i;
    }
    e.added.data = a;
    until(&w->x.f, k->blocks != NULL);
    send_ok(k->blocks, &e.base);
}

/* One request; its Reserve at the prefill side. It is cancelled then. */
static const struct seen_reserve *run(struct world *w)
{
    struct client c;
    struct fake *ka = w->x.ka;
    int before = ka->reserves, other = w->x.kb->reserves;
    struct bt_gen_spec s = spec_of(TOKENS, 4);
    client_start(&w->x.f, &c, &s);
    until(&w->x.f, ka->reserves == before + 1 && w->x.kb->reserves == other + 1);
    assert_int_equal(w->x.kb->reserve[other].n_sources, 0); /* the hand-off brings all of it */
    bt_request_cancel(c.r);
    client_cleanup(&c);
    return &ka->reserve[before];
}

static void world_init(struct world *w, const struct bt_sched_policy *policy)
{
    memset(w, 0, sizeof(*w));
    fixture_init(&w->x.f);
    w->x.f.rc.policy = policy;
    w->x.f.rc.sched.place.fetch_ratio = 1.5;
    pair_start(&w->x);
    w->x.p->load.prefill_tokens_per_s = 1000;
    fake_heartbeat(w->x.p);
    w->k3 = fake_add(&w->x.f, "kvstore", "kvstore-n3", "n3");
    w->k4 = fake_add(&w->x.f, "kvstore", "kvstore-n4", "n4");
    all_up(&w->x.f);
    until(&w->x.f, session_of_fake(w->x.p)->load.prefill_tokens_per_s == 1000);
    const struct seen_reserve *r = run(w);
    assert_int_equal(r->n_keys, 6);
    assert_int_equal(r->n_sources, 0);
    memcpy(w->keys, r->keys, sizeof(w->keys));
}

static void indexed(struct world *w, size_t replicas)
{
    until(&w->x.f, bt_holders_replicas(bt_view_index(w->x.f.view)) == replicas);
}

static void test_several_sources(void **state)
{
    struct world w;
    (void)state;
    world_init(&w, &bt_sched_baton);
    has_blocks(&w, w.k3, 0, 4);
    has_blocks(&w, w.k4, 2, 6);
    indexed(&w, 8);
    const struct seen_reserve *r = run(&w);
    assert_int_equal(r->role, BATON__GRANT_ROLE__WRITE);
    assert_int_equal(r->n_sources, 2);
    assert_string_equal(r->sources[0].peer, "kvstore-n3"); /* the longest from the start */
    assert_int_equal(r->sources[0].incarnation, w.k3->incarnation);
    assert_int_equal(r->sources[0].n_runs, 1);
    assert_int_equal(r->sources[0].first, 0);
    assert_int_equal(r->sources[0].count, 4);
    assert_string_equal(r->sources[1].peer, "kvstore-n4");
    assert_int_equal(r->sources[1].first, 2);
    assert_int_equal(r->sources[1].count, 4);
    assert_in_range((uint64_t)r->prefill_tokens_per_s, 999, 1001);
    const struct bt_explanation *e = bt_requests_explain(w.x.f.rs, NULL);
    assert_non_null(e);
    assert_int_equal(e->fetch_tokens, 96);
    assert_int_equal(e->cached_tokens, 96);
    assert_int_equal(e->n_sources, 2);
    assert_string_equal(e->sources[1].name, "kvstore-n4");
    assert_int_equal(e->sources[1].blocks, 4);
    fixture_cleanup(&w.x.f);
}

/* The paper's rule knows one holder. */
static void test_one_source(void **state)
{
    struct world w;
    (void)state;
    world_init(&w, &bt_sched_kvcache);
    has_blocks(&w, w.k3, 0, 4);
    has_blocks(&w, w.k4, 4, 6);
    indexed(&w, 6);
    const struct seen_reserve *r = run(&w);
    assert_int_equal(r->n_sources, 1);
    assert_string_equal(r->sources[0].peer, "kvstore-n3");
    assert_int_equal(r->sources[0].count, 4);
    fixture_cleanup(&w.x.f);
}

static void test_nothing_is_fetched(void **state)
{
    struct world w;
    (void)state;
    /* cache-aware goes where a prefix is, and moves none */
    world_init(&w, &bt_sched_cache_aware);
    has_blocks(&w, w.k3, 0, 6);
    indexed(&w, 6);
    assert_int_equal(run(&w)->n_sources, 0);
    fixture_cleanup(&w.x.f);
    /* it is here already */
    world_init(&w, &bt_sched_baton);
    has_blocks(&w, w.k3, 0, 6);
    has_blocks(&w, w.x.ka, 0, 6);
    indexed(&w, 12);
    assert_int_equal(run(&w)->n_sources, 0);
    fixture_cleanup(&w.x.f);
}

/* The holder leaves: it is not named any more. */
static void test_lost_holder(void **state)
{
    struct world w;
    (void)state;
    world_init(&w, &bt_sched_baton);
    has_blocks(&w, w.k3, 0, 6);
    has_blocks(&w, w.k4, 0, 6);
    indexed(&w, 12);
    assert_int_equal(run(&w)->n_sources, 2);
    fake_kill(w.k3);
    until(&w.x.f, !fake_up(w.k3));
    const struct seen_reserve *r = run(&w);
    assert_int_equal(r->n_sources, 1);
    assert_string_equal(r->sources[0].peer, "kvstore-n4");
    fixture_cleanup(&w.x.f);
}

static void say_replicated(struct fake *k, uint64_t id, uint32_t blocks)
{
    Baton__Replicated r = BATON__REPLICATED__INIT;
    r.id = id;
    r.blocks = blocks;
    to_conductor_k(k, BATON__FROM_KVSTORE__M_REPLICATED, &r);
}

/* A prefix that is used again and again gets a copy on the other node that can prefill, one order
 * at a time, within the budget. */
static void test_hot_prefixes_are_copied(void **state)
{
    (void)state;
    struct world w;
    memset(&w, 0, sizeof(w));
    fixture_init(&w.x.f);
    w.x.f.rc.replica_bytes_per_s = 1e9;
    w.x.f.rc.replica_uses = 4;
    pair_start(&w.x);
    w.k3 = fake_add(&w.x.f, "kvstore", "kvstore-n3", "n3");
    struct fake *p3 = fake_add(&w.x.f, "prefill", "prefill-n3-0", "n3");
    all_up(&w.x.f);
    p3->load.queued_prefill_tokens = 5000000; /* nobody is sent there */
    until(&w.x.f, session_of_fake(p3)->load.queued_prefill_tokens == 5000000);
    const struct seen_reserve *r = run(&w);
    memcpy(w.keys, r->keys, sizeof(w.keys));
    has_blocks(&w, w.x.ka, 0, 6);
    indexed(&w, 6);
    for (int i = 0; i < 3; i++) {
        (void)run(&w);
    }
    assert_int_equal(w.k3->replicates, 0); /* three uses */
    (void)run(&w);
    until(&w.x.f, w.k3->replicates == 1);
    const struct seen_replicate *o = &w.k3->replicate[0];
    assert_int_equal(o->n_keys, 6);
    assert_memory_equal(o->first_key, w.keys, 32);
    assert_int_equal(o->n_sources, 1);
    assert_string_equal(o->peer, "kvstore-n1");
    (void)run(&w);
    (void)run(&w);
    assert_int_equal(w.k3->replicates, 1); /* it is at it */
    say_replicated(w.k3, o->id + 1, 6);    /* not ours */
    (void)run(&w);
    assert_int_equal(w.k3->replicates, 1);
    say_replicated(w.k3, o->id, 0); /* nothing came of it: tried again */
    pass(&w.x.f, 100);
    (void)run(&w);
    until(&w.x.f, w.k3->replicates == 2);
    say_replicated(w.k3, w.k3->replicate[1].id, 6);
    has_blocks(&w, w.k3, 0, 6);
    indexed(&w, 12);
    for (int i = 0; i < 4; i++) {
        (void)run(&w);
    }
    assert_int_equal(w.k3->replicates, 2); /* every node that prefills has it */
    assert_int_equal(w.x.ka->replicates + w.x.kb->replicates, 0);
    fixture_cleanup(&w.x.f);
}

/* Not more than the budget, and none without one. */
static void test_copies_have_a_budget(void **state)
{
    (void)state;
    for (int has = 0; has <= 1; has++) {
        struct world w;
        memset(&w, 0, sizeof(w));
        fixture_init(&w.x.f);
        w.x.f.rc.replica_bytes_per_s = has; /* a byte a second: a prefix in a day or so */
        w.x.f.rc.replica_uses = 2;
        pair_start(&w.x);
        w.k3 = fake_add(&w.x.f, "kvstore", "kvstore-n3", "n3");
        struct fake *p3 = fake_add(&w.x.f, "prefill", "prefill-n3-0", "n3");
        all_up(&w.x.f);
        p3->load.queued_prefill_tokens = 5000000;
        until(&w.x.f, session_of_fake(p3)->load.queued_prefill_tokens == 5000000);
        const struct seen_reserve *r = run(&w);
        memcpy(w.keys, r->keys, sizeof(w.keys));
        has_blocks(&w, w.x.ka, 0, 6);
        indexed(&w, 6);
        for (int i = 0; i < 6; i++) {
            (void)run(&w);
        }
        pass(&w.x.f, 100);
        assert_int_equal(w.k3->replicates, 0);
        fixture_cleanup(&w.x.f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hot_prefixes_are_copied), cmocka_unit_test(test_copies_have_a_budget),
        cmocka_unit_test(test_several_sources),         cmocka_unit_test(test_one_source),
        cmocka_unit_test(test_nothing_is_fetched),      cmocka_unit_test(test_lost_holder),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
