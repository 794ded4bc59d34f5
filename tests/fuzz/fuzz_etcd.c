/* libFuzzer: etcd's side of everything that a daemon keeps there: members, its own registration, a
 * job with one owner, roles, pins (the conductor's table). The tape chooses what etcd does: it
 * answers, sends events, compacts its history, loses leases, ends streams, is away, or (if the
 * first byte is odd) says anything at all. Nothing may crash or leak; the owner of a watch hears of
 * a key's end only if it has heard of the key. With an honest etcd, once it has answered all, the
 * tables are those of etcd. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/etcd/member.h"
#include "common/etcd/owner.h"
#include "common/etcd/roles.h"
#include "conductor/pin_table.h"
#include "tests/fuzz/etcd_model.h"
#include "tests/fuzz/message.h"
#include "tests/fuzz/rig.h"

#define ROOT   "/baton/c/"
#define STEPS  96
#define SETTLE 400

static const char *const member_keys[] = {ROOT "members/prefill/p1", ROOT "members/decode/d1",
                                          ROOT "members/kvstore/k1", ROOT "members/prefill/p2",
                                          ROOT "members/prefill/me"};
static const char *const other_keys[] = {ROOT "members/prefill/",
                                         ROOT "members/x",
                                         ROOT "members/a/b/c",
                                         ROOT "roles",
                                         ROOT "roles2",
                                         ROOT "settings",
                                         ROOT "job",
                                         ROOT "pins/00000000000000aa",
                                         ROOT "pins/00000000000000bb",
                                         ROOT "pins/xyz"};

static struct {
    struct bt_loop *loop;
    struct bt_rpc *rpc;
    struct bt_etcd *e;
    struct bt_member *self;
    struct bt_member_table *table;
    struct bt_roles_watch *roles;
    struct bt_owner *owner;
    struct bt_pin_table *pins;
    /* what the owners were told */
    bool up[BT_ARRAY_LEN(member_keys)];
    uint64_t incarnations[BT_ARRAY_LEN(member_keys)];
    uint64_t roles_epoch;
    bool refused, owns;
    uint32_t asked, answered; /* pins */
} x;
static struct model model; /* large: model_init sets what counts */

/* ---- what the owners hear ---- */

static int which(const char *kind, const char *name)
{
    char key[512];
    snprintf(key, sizeof(key), ROOT "members/%.200s/%.200s", kind, name);
    for (size_t i = 0; i < BT_ARRAY_LEN(member_keys); i++) {
        if (strcmp(key, member_keys[i]) == 0) {
            return (int)i;
        }
    }
    return -1;
}

static void on_up(void *arg, const Baton__Member *m)
{
    int i = which(m->kind, m->name);
    (void)arg;
    if (i >= 0) {
        x.up[i] = true;
        x.incarnations[i] = m->incarnation;
    }
}

static void on_down(void *arg, const char *kind, const char *name)
{
    int i = which(kind, name);
    (void)arg;
    if (i >= 0) {
        x.up[i] = false;
    }
}

static void on_roles(void *arg, const Baton__RoleTable *t, int64_t revision)
{
    (void)arg;
    (void)revision;
    x.roles_epoch = t->epoch;
    uint32_t role = bt_roles_given(t, "prefill", "p1", 7);
    BT_ASSERT(role <= BT_ROLES_BOTH);
}

static void on_refused(void *arg, bt_status_t st, const char *why)
{
    (void)arg;
    BT_ASSERT(st != BT_OK && why[0] != '\0');
    x.refused = true;
}

static void on_owner(void *arg, int64_t epoch)
{
    (void)arg;
    (void)epoch;
    BT_ASSERT(!x.owns);
    x.owns = true;
}

static void on_lost(void *arg)
{
    (void)arg;
    BT_ASSERT(x.owns);
    x.owns = false;
}

static void on_pin(void *arg, bt_status_t st, const struct bt_pin_info *info, const char *why)
{
    (void)arg;
    BT_ASSERT((st == BT_OK) == (info != NULL) && (st == BT_OK || why[0] != '\0'));
    x.answered++;
}

/* ---- start and end ---- */

static void start(void)
{
    static const struct bt_member_table_ops table_ops = {.on_up = on_up, .on_down = on_down};
    static const struct bt_member_ops self_ops = {.on_refused = on_refused};
    static const struct bt_owner_ops owner_ops = {.on_owner = on_owner, .on_lost = on_lost};
    char *endpoints[] = {(char *)(uintptr_t) "a:1", (char *)(uintptr_t) "http://b:2/", NULL};
    struct bt_loop *loop = x.loop;
    memset(&x.rpc, 0, sizeof(x) - offsetof(__typeof__(x), rpc));
    if (loop == NULL) {
        BT_ASSERT(bt_loop_create(&x.loop) == BT_OK);
    }
    model_init(&model);
    x.rpc = fake_rpc_create(x.loop);
    BT_ASSERT(bt_etcd_create(x.rpc, endpoints, NULL, &x.e) == BT_OK);
    Baton__Member self = BATON__MEMBER__INIT;
    Baton__ClusterSettings settings = BATON__CLUSTER_SETTINGS__INIT;
    self.kind = (char *)(uintptr_t) "prefill";
    self.name = (char *)(uintptr_t) "me";
    self.node = (char *)(uintptr_t) "n1";
    self.incarnation = 77;
    settings.block_tokens = 16;
    x.self = bt_member_join(x.e, "c", &self, &settings, &self_ops, NULL);
    x.table = bt_member_watch(x.e, "c", NULL, &table_ops, NULL);
    x.roles = bt_roles_watch_start(x.e, "c", on_roles, NULL);
    x.owner = bt_owner_start(x.e, ROOT "job", "me", 5, &owner_ops, NULL);
    x.pins = bt_pin_table_create(x.e, "c");
}

static void finish(void)
{
    bt_pin_table_destroy(x.pins);
    bt_owner_stop(x.owner);
    bt_roles_watch_stop(x.roles);
    bt_member_unwatch(x.table);
    bt_member_leave(x.self);
    bt_etcd_destroy(x.e);
    bt_rpc_destroy(x.rpc);
    BT_ASSERT(x.asked == x.answered); /* each call once */
    bt_loop_poll(x.loop, 0);
}

/* ---- what happens ---- */

static const char *key_of(struct tape *t)
{
    uint32_t i = tape_below(t, BT_ARRAY_LEN(member_keys) + BT_ARRAY_LEN(other_keys));
    return i < BT_ARRAY_LEN(member_keys) ? member_keys[i]
                                         : other_keys[i - BT_ARRAY_LEN(member_keys)];
}

/* A value that belongs to the key, more or less. */
static void put(struct tape *t)
{
    const char *key = key_of(t);
    Baton__Member m = BATON__MEMBER__INIT;
    struct message_arena a = {0};
    uint8_t buf[MODEL_VALUE];
    ProtobufCMessage *msg = &m.base;
    char kind[32] = "prefill", name[32] = "p1";
    if (strstr(key, "members/") != NULL) {
        (void)sscanf(key, ROOT "members/%31[^/]/%31s", kind, name);
        m.kind = kind;
        m.name = tape_one_in(t, 16) ? kind : name;
        m.node = (char *)(uintptr_t) "n1";
        m.incarnation = tape_u8(t) + 1u;
        m.state = tape_u8(t) % 3;
    } else {
        msg = message_make(&a,
                           strstr(key, "roles") != NULL      ? &baton__role_table__descriptor
                           : strstr(key, "settings") != NULL ? &baton__cluster_settings__descriptor
                                                             : &baton__pin__descriptor,
                           t, NULL, NULL);
    }
    size_t n = protobuf_c_message_get_packed_size(msg);
    if (n <= sizeof(buf)) {
        protobuf_c_message_pack(msg, buf);
        if (tape_one_in(t, 8) && n > 0) {
            buf[tape_u8(t) % n] ^= tape_u8(t);
        }
        /* Nobody writes the job's key under our lease but us. */
        bool lasts = model.n_leases == 0 || strcmp(key, ROOT "job") == 0 || !tape_one_in(t, 3);
        int64_t lease = lasts ? 0 : model.leases[0].id;
        (void)model_put(&model, key, buf, n, lease);
    }
    message_free(&a);
}

static const ProtobufCMessageDescriptor *answer_to(const char *method)
{
    return strstr(method, "Range") != NULL && strstr(method, "Delete") == NULL
               ? &etcdserverpb__range_response__descriptor
           : strstr(method, "Txn") != NULL        ? &etcdserverpb__txn_response__descriptor
           : strstr(method, "LeaseGrant") != NULL ? &etcdserverpb__lease_grant_response__descriptor
           : strstr(method, "TimeToLive") != NULL
               ? &etcdserverpb__lease_time_to_live_response__descriptor
           : strstr(method, "KeepAlive") != NULL
               ? &etcdserverpb__lease_keep_alive_response__descriptor
           : strstr(method, "Watch") != NULL ? &etcdserverpb__watch_response__descriptor
                                             : &etcdserverpb__put_response__descriptor;
}

/* Keys are ours, so that what etcd says of them means something. */
static bool hostile_field(void *arg, struct message_arena *a, ProtobufCMessage *m,
                          const ProtobufCFieldDescriptor *f, struct tape *t)
{
    (void)arg;
    if (strcmp(f->name, "key") == 0 && !tape_one_in(t, 6)) {
        const char *key = key_of(t);
        message_set_bytes(a, m, f, key, strlen(key));
        return true;
    }
    if (strcmp(f->name, "value") == 0 && model.n_keys > 0 && tape_one_in(t, 2)) {
        const struct model_key *k = &model.keys[tape_below(t, model.n_keys)];
        message_set_bytes(a, m, f, k->value, k->len);
        return true;
    }
    if (strcmp(f->name, "ID") == 0 && model.n_leases > 0 && tape_one_in(t, 2)) {
        message_set_number(m, f, (uint64_t)model.leases[model.n_leases - 1].id);
        return true;
    }
    return false;
}

static void lie(struct tape *t)
{
    struct message_arena a = {0};
    uint32_t calls = fake_rpc_calls(x.rpc), streams = fake_rpc_streams(x.rpc);
    if (calls + streams == 0) {
        return;
    }
    uint32_t i = tape_below(t, calls + streams);
    struct bt_rpc_stream *s = i < calls ? NULL : fake_rpc_stream(x.rpc, i - calls);
    const char *method = s != NULL ? fake_rpc_stream_method(s) : fake_rpc_call(x.rpc, i).method;
    ProtobufCMessage *m = message_make(&a, answer_to(method), t, hostile_field, NULL);
    size_t n = protobuf_c_message_get_packed_size(m);
    uint8_t *buf = bt_malloc(n + 1);
    protobuf_c_message_pack(m, buf);
    if (n > 0 && tape_one_in(t, 8)) {
        buf[tape_below(t, (uint32_t)n)] ^= tape_u8(t);
        n -= tape_one_in(t, 4);
    }
    if (s != NULL) {
        fake_rpc_deliver(s, buf, n, 0);
    } else {
        fake_rpc_answer(x.rpc, i, BT_GRPC_OK, buf, n);
    }
    free(buf);
    message_free(&a);
}

static void fail_one(struct tape *t)
{
    static const int codes[] = {BT_GRPC_UNAVAILABLE, BT_GRPC_DEADLINE, BT_GRPC_NOT_FOUND,
                                BT_GRPC_INTERNAL, BT_GRPC_OK};
    uint32_t calls = fake_rpc_calls(x.rpc), streams = fake_rpc_streams(x.rpc);
    int code = codes[tape_u8(t) % BT_ARRAY_LEN(codes)];
    if (calls + streams == 0) {
        return;
    }
    uint32_t i = tape_below(t, calls + streams);
    if (i < calls) {
        fake_rpc_answer(x.rpc, i, code == BT_GRPC_OK ? BT_GRPC_UNAVAILABLE : code, NULL, 0);
    } else {
        struct bt_rpc_stream *s = fake_rpc_stream(x.rpc, i - calls);
        /* NOT_FOUND ends a lease: an honest etcd says so only if it is gone. */
        fake_rpc_end(s, code == BT_GRPC_NOT_FOUND ? BT_GRPC_UNAVAILABLE : code, "the tape");
    }
}

static void ask(struct tape *t)
{
    struct bt_kv_key keys[3];
    struct bt_pin_spec spec = {.keys = keys, .n = 1 + tape_u8(t) % 3, .label = "l", .tenant = ""};
    switch (tape_u8(t) % 5) {
    case 0:
    case 1:
        memset(keys, 0, sizeof(keys));
        keys[spec.n - 1].b[7] = tape_bool(t) ? 0xaa : 0xcc;
        spec.ttl_ms = 1000u * (1 + tape_u8(t));
        x.asked++;
        bt_pin_table_pin(x.pins, &spec, on_pin, NULL);
        break;
    case 2:
        x.asked++;
        bt_pin_table_unpin(x.pins, tape_bool(t) ? 0xaa : 0xbb, on_pin, NULL);
        break;
    case 3: bt_member_set_state(x.self, (Baton__MemberState)(tape_u8(t) % 3)); break;
    default: bt_member_set_role(x.self, tape_u8(t) % 4, tape_u8(t) % 4, tape_u8(t)); break;
    }
}

static void look(void)
{
    size_t it = 0;
    struct bt_pin_info info;
    for (uint32_t n = 0; bt_pin_table_next(x.pins, &it, &info); n++) {
        BT_ASSERT(info.pin != NULL && n < 1000);
    }
}

static void step(struct tape *t, bool hostile)
{
    switch (tape_u8(t) % 14) {
    case 0:
    case 1:
    case 2: model_answer(&model, x.rpc); break;
    case 3:
    case 4: (void)model_serve(&model, x.rpc, 1 + tape_u8(t) % 8); break;
    case 5:
    case 6: put(t); break;
    case 7: model_delete(&model, key_of(t)); break;
    case 8: rig_pass_ms(tape_u8(t) * 50u); break;
    case 9: fail_one(t); break;
    case 10:
        if (model.n_leases > 0) {
            model_revoke(&model, model.leases[tape_u8(t) % model.n_leases].id);
        }
        break;
    case 11: model_compact(&model); break;
    case 12: ask(t); break;
    default:
        if (hostile) {
            lie(t);
        }
        break;
    }
    bt_loop_poll(x.loop, 0);
    look();
}

/* An honest etcd that has answered everything: the tables are its own. */
static void settle(void)
{
    for (int quiet = 0, i = 0; quiet < 30 && i < SETTLE; i++) {
        bool any = fake_rpc_calls(x.rpc) > 0;
        model_answer(&model, x.rpc);
        any = model_serve(&model, x.rpc, 8) || any;
        rig_pass_ms(200);
        bt_loop_poll(x.loop, 0);
        quiet = any ? 0 : quiet + 1;
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(member_keys); i++) {
        const struct model_key *k = model_find(&model, member_keys[i]);
        Baton__Member *m = k != NULL ? baton__member__unpack(NULL, k->len, k->value) : NULL;
        int same = m != NULL ? which(m->kind, m->name) : -1;
        if (k == NULL) {
            BT_ASSERT(!x.up[i]);
        } else if (same == (int)i) { /* else it is no member, and the last one may stand */
            BT_ASSERT(x.up[i] && x.incarnations[i] == m->incarnation);
        }
        if (m != NULL) {
            baton__member__free_unpacked(m, NULL);
        }
    }
    const struct model_key *job = model_find(&model, ROOT "job");
    BT_ASSERT(!x.owns || (job != NULL && job->len == 2 && memcmp(job->value, "me", 2) == 0));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct tape t = tape_of(data, size);
    bool hostile = tape_bool(&t);
    rig_reset();
    start();
    for (int i = 0; i < STEPS && tape_left(&t) > 0; i++) {
        step(&t, hostile);
    }
    if (!hostile) {
        settle();
    }
    finish();
    return 0;
}
