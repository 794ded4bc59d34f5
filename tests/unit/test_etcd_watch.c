/* Watches of the etcd client against an etcd that breaks off, compacts, forgets or repeats itself;
 * the role table. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "common/etcd/roles.h"
#include "etcd_answers.h"

/* ---- watches ---- */

struct seen {
    uint32_t puts, deletes, synced;
    char key[20], value[20], gone[20];
    int64_t revision;
    struct bt_etcd_watch *stop_in; /* stopped inside the next callback */
};

static void perhaps_stop(struct seen *x)
{
    if (x->stop_in != NULL) {
        bt_etcd_watch_stop(x->stop_in);
        x->stop_in = NULL;
    }
}

static void on_key(void *arg, const struct bt_etcd_kv *kv)
{
    struct seen *x = arg;
    x->puts++;
    x->revision = kv->mod_revision;
    snprintf(x->key, sizeof(x->key), "%s", kv->key);
    snprintf(x->value, sizeof(x->value), "%.*s", (int)kv->value_len, (const char *)kv->value);
    perhaps_stop(x);
}

static void on_gone(void *arg, const char *key)
{
    struct seen *x = arg;
    x->deletes++;
    snprintf(x->gone, sizeof(x->gone), "%s", key);
    perhaps_stop(x);
}

static void on_synced(void *arg)
{
    ((struct seen *)arg)->synced++;
}

static const struct bt_etcd_watch_ops watch_ops = {
    .on_put = on_key, .on_delete = on_gone, .on_synced = on_synced};

/* The listing: n keys "p/0", "p/1", ... with these revisions; 0: that one is not there. */
static void list(int64_t revision, const int64_t *revisions, uint32_t n)
{
    static const char *const names[] = {"p/0", "p/1", "p/2", "p/3"};
    Etcdserverpb__RangeResponse r = ETCDSERVERPB__RANGE_RESPONSE__INIT;
    Etcdserverpb__ResponseHeader h = header_of(revision);
    Etcdserverpb__KeyValue kvs[4], *at[4];
    r.header = &h;
    r.kvs = at;
    for (uint32_t i = 0; i < n; i++) {
        if (revisions[i] != 0) {
            kvs[i] = kv_of(names[i], "v", revisions[i]);
            at[r.n_kvs++] = &kvs[i];
        }
    }
    ea_reply(0, EA_RANGE, &r);
}

/* From where the watch is followed, of the last request. */
static int64_t followed_from(uint32_t opened)
{
    struct ea_stream *x = &EA.ends[0].watch;
    UNTIL(x->opened == opened && x->heard == opened);
    Etcdserverpb__WatchRequest *q = etcdserverpb__watch_request__unpack(NULL, x->len, x->last);
    assert_non_null(q);
    int64_t from = q->create_request->start_revision;
    assert_memory_equal(q->create_request->key.data, "p/", 2);
    assert_memory_equal(q->create_request->range_end.data, "p0", 2);
    etcdserverpb__watch_request__free_unpacked(q, NULL);
    return from;
}

static void say(int64_t revision, bool created, bool canceled, int64_t compacted)
{
    Etcdserverpb__WatchResponse r = ETCDSERVERPB__WATCH_RESPONSE__INIT;
    Etcdserverpb__ResponseHeader h = header_of(revision);
    r.header = revision != 0 ? &h : NULL;
    r.created = created;
    r.canceled = canceled;
    r.compact_revision = compacted;
    ea_send(&EA.ends[0].watch, &r);
}

static void say_event(const char *key, int64_t revision, bool deleted)
{
    Etcdserverpb__WatchResponse r = ETCDSERVERPB__WATCH_RESPONSE__INIT;
    Etcdserverpb__ResponseHeader h = header_of(revision);
    Etcdserverpb__Event ev = ETCDSERVERPB__EVENT__INIT, none = ETCDSERVERPB__EVENT__INIT;
    Etcdserverpb__Event *evs[] = {&none, &ev}; /* one without a key is passed over */
    Etcdserverpb__KeyValue kv = kv_of(key, "new", revision);
    ev.kv = &kv;
    ev.type =
        deleted ? ETCDSERVERPB__EVENT__EVENT_TYPE__DELETE : ETCDSERVERPB__EVENT__EVENT_TYPE__PUT;
    r.header = &h;
    r.n_events = 2;
    r.events = evs;
    ea_send(&EA.ends[0].watch, &r);
}

static void break_stream(void)
{
    bt_rpc_stream_close(EA.ends[0].watch.s, BT_GRPC_UNAVAILABLE, "scripted", true);
    EA.ends[0].watch.s = NULL;
}

static void test_a_watch(void **state)
{
    struct seen x = {0};
    (void)state;
    struct bt_etcd_watch *w = bt_etcd_watch_start(EA.e, "p/", &watch_ops, &x);
    ea_refuse(0, EA_RANGE, BT_GRPC_EXHAUSTED); /* asked again */
    ea_garbage(0, EA_RANGE);
    assert_int_equal(x.synced, 0);
    list(20, (int64_t[]){5, 6, 7}, 3);
    UNTIL(x.synced == 1);
    assert_true(x.puts == 3 && x.deletes == 0 && x.revision == 7);
    assert_int_equal(followed_from(1), 21);
    say(20, true, false, 0);
    say_event("p/1", 22, false);
    UNTIL(x.puts == 4);
    assert_string_equal(x.key, "p/1");
    assert_string_equal(x.value, "new");
    say_event("p/1", 22, false); /* known already */
    say_event("p/1", 21, true);  /* older than what is known */
    say_event("p/9", 23, true);  /* never known */
    say_event("p/0", 24, true);
    UNTIL(x.deletes == 1);
    assert_string_equal(x.gone, "p/0");
    assert_int_equal(x.puts, 4);
    break_stream(); /* it goes on behind the last event */
    assert_int_equal(followed_from(2), 25);
    say(24, true, false, 0);
    say(40, false, false, 0); /* nothing of ours up to there */
    say_event("p/3", 41, false);
    UNTIL(x.puts == 5);
    say(40, false, false, 0); /* ... which does not go back */
    break_stream();
    assert_int_equal(followed_from(3), 42);
    say(60, true, false, 0); /* to have begun is no progress */
    break_stream();
    assert_int_equal(followed_from(4), 42);
    say(0, false, false, 0); /* without a header: none either */
    break_stream();
    assert_int_equal(followed_from(5), 42);
    bt_etcd_watch_stop(w);
}

/* What cannot be followed is listed again: what differs is told, and no more. */
static void test_listed_again(void **state)
{
    struct seen x = {0};
    (void)state;
    struct bt_etcd_watch *w = bt_etcd_watch_start(EA.e, "p/", &watch_ops, &x);
    list(20, (int64_t[]){5, 6, 7}, 3);
    UNTIL(x.synced == 1);
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(followed_from(1 + i), 21);
        if (i == 0) {
            say(100, false, false, 50); /* compacted */
        } else if (i == 1) {
            say(100, false, true, 0); /* ended by etcd */
        } else if (i == 2) {
            say(19, true, false, 0); /* of an etcd that has lost what we have seen */
        } else {
            assert_int_equal(bt_rpc_stream_send(EA.ends[0].watch.s, "\xff\xff", 2), BT_OK);
        }
        list(20, (int64_t[]){5, 6, 7}, 3);
        UNTIL(x.synced == 2 + i);
        assert_true(x.puts == 3 && x.deletes == 0);
    }
    assert_int_equal(followed_from(5), 21);
    say(20, true, false, 0); /* of the same age: it goes on */
    say(100, false, false, 50);
    list(110, (int64_t[]){0, 6, 105, 106}, 4);
    UNTIL(x.synced == 6);
    assert_true(x.puts == 5 && x.deletes == 1);
    assert_string_equal(x.gone, "p/0");
    assert_string_equal(x.key, "p/3");
    assert_int_equal(followed_from(6), 111);
    bt_etcd_watch_stop(w);
}

/* Stopped inside a callback nothing more comes, of this message neither. */
static void test_stopped_inside(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 3; i++) {
        struct seen x = {0};
        uint32_t opened = EA.ends[0].watch.opened;
        struct bt_etcd_watch *w = bt_etcd_watch_start(EA.e, "p/", &watch_ops, &x);
        if (i == 0) { /* of three keys */
            x.stop_in = w;
            list(20, (int64_t[]){5, 6, 7}, 3);
            UNTIL(x.puts == 1);
        } else if (i == 1) { /* before the answer */
            UNTIL(EA.ends[0].methods[EA_RANGE].n_calls == 1);
            bt_etcd_watch_stop(w);
            list(20, (int64_t[]){5, 6, 7}, 3);
        } else { /* at one of two that are gone */
            list(20, (int64_t[]){5, 6, 7}, 3);
            UNTIL(x.synced == 1);
            UNTIL(EA.ends[0].watch.opened == opened + 1 && EA.ends[0].watch.s != NULL);
            say(100, false, false, 50);
            x.stop_in = w;
            list(20, (int64_t[]){0, 0, 7}, 3);
            UNTIL(x.deletes == 1);
        }
        struct ea_got g = {0};
        bt_etcd_put(EA.e, "k", "v", 1, 0, ea_on_put, &g);
        ea_refuse(0, EA_PUT, BT_GRPC_OK);
        UNTIL(g.n == 1);
        assert_int_equal(x.puts, i == 0 ? 1 : i == 1 ? 0 : 3);
        assert_int_equal(x.deletes, i == 2);
        assert_int_equal(x.synced, i == 2);
    }
    bt_etcd_watch_stop(NULL);
}

/* ---- roles ---- */

static void test_roles(void **state)
{
    uint32_t role = 9;
    (void)state;
    assert_int_equal(bt_roles_of_kind("prefill"), BT_ROLES_PREFILL);
    assert_int_equal(bt_roles_of_kind("decode"), BT_ROLES_DECODE);
    assert_int_equal(bt_roles_of_kind("kvstore"), 0);
    static const char *const names[] = {"none", "prefill", "decode", "both", "none"};
    for (uint32_t i = 0; i < 5; i++) {
        assert_string_equal(bt_roles_name(i), names[i]);
        assert_int_equal(bt_roles_parse(names[i], &role), i != 0 && i != 4);
        assert_int_equal(role, i != 4 ? i : 0);
    }
    assert_true(bt_roles_parse("own", &role) && role == 0);
    assert_false(bt_roles_parse("owner", &role));
    Baton__RoleEntry e[2] = {BATON__ROLE_ENTRY__INIT, BATON__ROLE_ENTRY__INIT};
    Baton__RoleEntry *entries[] = {&e[0], &e[1]};
    Baton__RoleTable t = BATON__ROLE_TABLE__INIT;
    e[0].worker = e[1].worker = (char *)(uintptr_t) "w";
    e[0].kind = (char *)(uintptr_t) "prefill";
    e[1].kind = (char *)(uintptr_t) "decode";
    e[0].role = BT_ROLES_DECODE;
    e[1].role = 4 + BT_ROLES_BOTH; /* with a bit of a newer release */
    e[0].incarnation = 5;
    t.n_entries = 2;
    t.entries = entries;
    assert_int_equal(bt_roles_given(&t, "prefill", "w", 5), BT_ROLES_DECODE);
    assert_int_equal(bt_roles_given(&t, "prefill", "w", 6), 0); /* another process */
    assert_int_equal(bt_roles_given(&t, "prefill", "w", 0), BT_ROLES_DECODE);
    assert_int_equal(bt_roles_given(&t, "prefill", "v", 5), 0);
    assert_int_equal(bt_roles_given(&t, "decode", "w", 77), BT_ROLES_BOTH);
    assert_int_equal(bt_roles_given(&t, "kvstore", "w", 77), 0);
}

#define T1(f) cmocka_unit_test_setup_teardown(f, ea_one, ea_stop)

int main(void)
{
    const struct CMUnitTest tests[] = {
        T1(test_a_watch),
        T1(test_listed_again),
        T1(test_stopped_inside),
        cmocka_unit_test(test_roles),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
