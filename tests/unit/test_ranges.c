/* Ranges of protocol fields: every field has one, what is out of it is refused in words that name
 * message, field, value and range, and no extreme value ends a kvstore that is told it by a worker
 * in the middle of its work. */
#include "kv_node.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include "common/slab/local.h"
#include "reflect.h"

#define SESSION ((void *)&node)

static struct node node;

/* ---- the tables ---- */

static const ProtobufCMessageDescriptor *seen[256];
static unsigned n_seen;

static void every_field_of(const ProtobufCMessageDescriptor *d)
{
    for (unsigned i = 0; i < n_seen; i++) {
        if (seen[i] == d) {
            return;
        }
    }
    assert_true(n_seen < BT_ARRAY_LEN(seen));
    seen[n_seen++] = d;
    for (unsigned i = 0; i < d->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &d->fields[i];
        bool message = f->type == PROTOBUF_C_TYPE_MESSAGE;
        bool repeated = f->label == PROTOBUF_C_LABEL_REPEATED;
        if (message) {
            every_field_of(f->descriptor);
        }
        if (message && !repeated) {
            continue;
        }
        const struct bt_range *r = bt_range_of(d, f->name);
        if (r == NULL) {
            fail_msg("%s.%s has no range: give it one in common/rpc/*.def", d->short_name, f->name);
        }
        bool text = f->type == PROTOBUF_C_TYPE_STRING || f->type == PROTOBUF_C_TYPE_BYTES;
        assert_int_equal(r->kind == BT_RANGE_LENGTH, text);
        assert_int_equal(r->kind == BT_RANGE_MESSAGES, message);
        assert_true(!repeated || r->count_max > 0);
    }
}

static void every_field_has_a_range(void **state)
{
    const ProtobufCMessageDescriptor *d;
    (void)state;
    n_seen = 0;
    for (size_t i = 0; (d = bt_range_root(i)) != NULL; i++) {
        every_field_of(d);
    }
    assert_true(n_seen > 100);
}

static void a_refusal_names_field_value_and_range(void **state)
{
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    Baton__LocalPut p = BATON__LOCAL_PUT__INIT;
    uint8_t key[33] = {0};
    char text[256] = "";
    (void)state;
    m.m_case = BATON__LOCAL_MSG__M_PUT;
    m.put = &p;
    p.key = (ProtobufCBinaryData){.data = key, .len = 32};
    assert_int_equal(bt_message_check(&m.base, text, sizeof(text)), BT_OK);
    p.depth = UINT32_MAX;
    assert_int_equal(bt_message_check(&m.base, text, sizeof(text)), BT_ERR_PEER_PROTOCOL);
    assert_string_equal(text, "LocalPut.depth is 4294967295, allowed are 0 to 16777216");
    p.depth = 0;
    p.key.len = 33;
    assert_int_equal(bt_message_check(&m.base, text, sizeof(text)), BT_ERR_PEER_PROTOCOL);
    assert_non_null(strstr(text, "LocalPut.key has 33 bytes"));

    Baton__MixedSteps steps = BATON__MIXED_STEPS__INIT;
    steps.step_ms = 0.0 / 0.0;
    assert_int_equal(bt_message_check(&steps.base, text, sizeof(text)), BT_ERR_PEER_PROTOCOL);
    assert_non_null(strstr(text, "MixedSteps.step_ms"));

    Baton__LocalAttached a = BATON__LOCAL_ATTACHED__INIT;
    m.m_case = BATON__LOCAL_MSG__M_ATTACHED;
    m.attached = &a;
    a.status = -128;
    assert_int_equal(bt_message_check(&m.base, text, sizeof(text)), BT_ERR_PEER_PROTOCOL);
    assert_string_equal(text, "LocalAttached.status is -128, allowed are -127 to 127");
}

/* 16 MiB of empty FlowHas would become a gigabyte. */
static void a_message_cannot_take_much_memory(void **state)
{
    enum { BYTES = 16 << 20 };
    uint8_t *raw = malloc(BYTES);
    char text[256] = "";
    (void)state;
    raw[0] = 12 << 3 | 2; /* PeerMsg.lane_end, of the rest's length */
    uint32_t n = BYTES - 5;
    for (int i = 0; i < 4; i++) {
        raw[1 + i] = (uint8_t)((n >> 7 * i & 127) | (i < 3 ? 128 : 0));
    }
    for (uint32_t i = 5; i + 1 < BYTES; i += 2) {
        raw[i] = 2 << 3 | 2; /* LaneEnd.flows */
        raw[i + 1] = 0;
    }
    raw[BYTES - 1] = 0;
    assert_null(bt_peer_unpack(raw, BYTES - 1, text, sizeof(text)));
    n--;
    raw[1] = (uint8_t)((n & 127) | 128);
    assert_null(bt_peer_unpack(raw, BYTES - 1, text, sizeof(text)));
    assert_non_null(strstr(text, "bytes of memory"));
    free(raw);

    Baton__PeerMsg m = BATON__PEER_MSG__INIT;
    Baton__LaneEnd e = BATON__LANE_END__INIT;
    Baton__FlowHas row = BATON__FLOW_HAS__INIT, *rows[BT_RANGE_FLOWS_MAX + 1];
    for (size_t i = 0; i < BT_ARRAY_LEN(rows); i++) {
        rows[i] = &row;
    }
    m.m_case = BATON__PEER_MSG__M_LANE_END;
    m.lane_end = &e;
    e.flows = rows;
    e.n_flows = BT_RANGE_FLOWS_MAX;
    assert_int_equal(bt_message_check(&m.base, text, sizeof(text)), BT_OK);
    e.n_flows++;
    assert_int_equal(bt_message_check(&m.base, text, sizeof(text)), BT_ERR_PEER_PROTOCOL);
    assert_non_null(strstr(text, "LaneEnd.flows has 4097 entries"));
}

/* What a worker, a kvstore, etcd or batonctl may say, with one field too large. */
static void every_protocol_is_held_to_its_table(void **state)
{
    Baton__FromWorker w = BATON__FROM_WORKER__INIT;
    Baton__Tokens step = BATON__TOKENS__INIT;
    Baton__Token t = BATON__TOKEN__INIT, *all[] = {&t};
    Baton__BlockEvents e = BATON__BLOCK_EVENTS__INIT;
    Baton__Pin pin = BATON__PIN__INIT;
    Baton__AdminRoleRequest role = BATON__ADMIN_ROLE_REQUEST__INIT;
    Etcdserverpb__LeaseTimeToLiveResponse lease = ETCDSERVERPB__LEASE_TIME_TO_LIVE_RESPONSE__INIT;
    static uint8_t content[36 * (BT_RANGE_EVENTS_MAX + 1)];
    char text[256] = "";
    (void)state;
    w.m_case = BATON__FROM_WORKER__M_TOKENS;
    w.tokens = &step;
    step.n_tokens = 1;
    step.tokens = all;
    t.logprob = -0.0F / 0.0F; /* of an engine with such logits: refused by nobody */
    assert_int_equal(bt_message_check(&w.base, text, sizeof(text)), BT_OK);
    t.finish = 4;
    assert_int_equal(bt_message_check(&w.base, text, sizeof(text)), BT_ERR_PEER_PROTOCOL);
    assert_string_equal(text, "Token.finish is 4, allowed are 0 to 3");

    e.added = (ProtobufCBinaryData){.data = content, .len = sizeof(content) - 36};
    assert_int_equal(bt_message_check(&e.base, text, sizeof(text)), BT_OK);
    e.added.len += 36;
    assert_int_equal(bt_message_check(&e.base, text, sizeof(text)), BT_ERR_PEER_PROTOCOL);
    assert_non_null(strstr(text, "BlockEvents.added has"));
    e.added.len = 37;
    assert_int_equal(bt_message_check(&e.base, text, sizeof(text)), BT_ERR_PEER_PROTOCOL);

    pin.keys = (ProtobufCBinaryData){.data = content, .len = 32};
    pin.ttl_ms = 1;
    assert_int_equal(bt_message_check(&pin.base, text, sizeof(text)), BT_OK);
    pin.ttl_ms = 0;
    assert_int_equal(bt_message_check(&pin.base, text, sizeof(text)), BT_ERR_PEER_PROTOCOL);
    role.role = 4;
    assert_int_equal(bt_message_check(&role.base, text, sizeof(text)), BT_ERR_PEER_PROTOCOL);
    lease.ttl = -2;
    assert_int_equal(bt_message_check(&lease.base, text, sizeof(text)), BT_ERR_PEER_PROTOCOL);
    assert_non_null(strstr(text, "LeaseTimeToLiveResponse.TTL is -2"));
}

/* protobuf-c unpacks 0x81 0x00 as the tag of an unknown field 0, packs it as 0x01, and does not
 * unpack that: a kvstore that keeps a Reserve for later, packed, must not have it. */
static void fields_of_a_stranger_are_dropped(void **state)
{
    static const uint8_t unknown[] = {0x81, 0x00, 1, 2, 3, 4, 5, 6, 7, 8};
    uint8_t raw[64], again[64];
    char why[256] = "";
    size_t n = 0;
    (void)state;
    raw[n++] = 3 << 3 | 2; /* ToKvstore.reserve */
    raw[n++] = 2 + sizeof(unknown) + 2 + sizeof(unknown);
    raw[n++] = 2 << 3; /* .epoch */
    raw[n++] = 7;
    memcpy(raw + n, unknown, sizeof(unknown));
    n += sizeof(unknown);
    raw[n++] = 12 << 3 | 2; /* .sources, one with such a field */
    raw[n++] = sizeof(unknown);
    memcpy(raw + n, unknown, sizeof(unknown));
    n += sizeof(unknown);
    memcpy(raw + n, unknown, sizeof(unknown)); /* and one beside the Reserve */
    n += sizeof(unknown);
    Baton__ToKvstore *m = bt_to_kvstore_unpack(raw, n, why, sizeof(why));
    assert_non_null(m);
    assert_int_equal(m->base.n_unknown_fields, 0);
    assert_int_equal(m->reserve->base.n_unknown_fields, 0);
    assert_int_equal(m->reserve->epoch, 7);
    assert_int_equal(m->reserve->n_sources, 1);
    assert_int_equal(m->reserve->sources[0]->base.n_unknown_fields, 0);
    n = baton__reserve__pack(m->reserve, again);
    Baton__Reserve *copy = baton__reserve__unpack(NULL, n, again);
    assert_non_null(copy);
    baton__reserve__free_unpacked(copy, NULL);
    baton__to_kvstore__free_unpacked(m, NULL);
}

/* ---- a live kvstore ---- */

static struct {
    int sock, pidfd;
    uint64_t request, probe, put;
    uint32_t ended, answered;
} worker;

static void send_packet(const Baton__LocalMsg *m, int fd)
{
    static uint8_t buf[BT_LOCAL_MSG_MAX + 65536];
    size_t len = baton__local_msg__get_packed_size(m);
    if (len > BT_LOCAL_MSG_MAX) {
        return; /* no packet has room for it */
    }
    struct iovec iov = {buf, baton__local_msg__pack(m, buf)};
    union {
        struct cmsghdr align;
        char buf[CMSG_SPACE(sizeof(int))];
    } u;
    memset(&u, 0, sizeof(u));
    struct msghdr mh = {.msg_iov = &iov, .msg_iovlen = 1};
    if (fd >= 0) {
        mh.msg_control = u.buf;
        mh.msg_controllen = sizeof(u.buf);
        struct cmsghdr *c = CMSG_FIRSTHDR(&mh);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &fd, sizeof(int));
    }
    while (sendmsg(worker.sock, &mh, MSG_NOSIGNAL) < 0 && errno == EAGAIN) {
        bt_loop_poll(node.loop, 1);
    }
}

/* Waits for the answer of kind `kind` to `id`; false: the kvstore has ended the session. */
static bool wait_answer(Baton__LocalMsg__MCase kind, uint64_t id)
{
    static uint8_t buf[BT_LOCAL_MSG_MAX];
    char why[256];
    for (uint64_t end = bt_mono_ns() + 60000000000ull; bt_mono_ns() < end;) {
        ssize_t n = recv(worker.sock, buf, sizeof(buf), MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN)) {
            worker.ended++;
            return false;
        }
        if (n < 0) {
            bt_loop_poll(node.loop, 1);
            continue;
        }
        Baton__LocalMsg *m = bt_local_unpack(buf, (size_t)n, why, sizeof(why));
        if (m == NULL) {
            fail_msg("the kvstore itself said: %s", why);
        }
        bool it =
            m->m_case == kind && (kind == BATON__LOCAL_MSG__M_LEASED     ? m->leased->lease == id
                                  : kind == BATON__LOCAL_MSG__M_PUT_SLOT ? m->put_slot->put == id
                                                                         : true);
        baton__local_msg__free_unpacked(m, NULL);
        if (it) {
            worker.answered++;
            return true;
        }
    }
    fail_msg("neither an answer nor an end");
    return false;
}

/* Attaches and opens a grant as its writer: the state in which messages mean most. */
static void worker_begin(void)
{
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    Baton__LocalAttach a = BATON__LOCAL_ATTACH__INIT;
    Baton__LocalOpen o = BATON__LOCAL_OPEN__INIT;
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    worker.sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int room = BT_LOCAL_MSG_MAX;
    setsockopt(worker.sock, SOL_SOCKET, SO_SNDBUF, &room, sizeof(room));
    snprintf(sa.sun_path, sizeof(sa.sun_path), "%s/kvstore.sock", node.dir);
    assert_int_equal(connect(worker.sock, (struct sockaddr *)&sa, sizeof(sa)), 0);
    a.version = 1;
    a.name = "w";
    a.incarnation = 7; /* the same: what it held is given back a second later */
    a.layout_id = node.layout.layout_id;
    a.root_key = (ProtobufCBinaryData){.data = node.root.b, .len = 32};
    m.m_case = BATON__LOCAL_MSG__M_ATTACH;
    m.attach = &a;
    send_packet(&m, worker.pidfd);
    assert_true(wait_answer(BATON__LOCAL_MSG__M_ATTACHED, 0));
    node_reserve(&node, SESSION, ++worker.request, 1, 1, 48, 0);
    o.request = worker.request;
    o.epoch = 1;
    o.mode = BATON__LOCAL_MODE__WRITER;
    m.m_case = BATON__LOCAL_MSG__M_OPEN;
    m.open = &o;
    send_packet(&m, -1);
    assert_true(wait_answer(BATON__LOCAL_MSG__M_OPENED, 0));
}

static void worker_end(void)
{
    close(worker.sock);
    bt_grants_release(node.grants, SESSION, worker.request, 1);
}

/* A lease of a key that nobody has is answered at once: whatever was said before it was handled. */
static bool still_there(void)
{
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    Baton__LocalLease l = BATON__LOCAL_LEASE__INIT;
    uint8_t key[32] = "nobody";
    l.lease = 1000000 + ++worker.probe;
    l.keys = (ProtobufCBinaryData){.data = key, .len = 32};
    m.m_case = BATON__LOCAL_MSG__M_LEASE;
    m.lease = &l;
    send_packet(&m, -1);
    return wait_answer(BATON__LOCAL_MSG__M_LEASED, l.lease);
}

/* What the worker would really say, so that one field at a time is wrong. */
static void make_valid(ProtobufCMessage *inner)
{
    for (unsigned i = 0; i < inner->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &inner->descriptor->fields[i];
        if (strcmp(f->name, "request") == 0) {
            reflect_number(inner, f, worker.request);
        } else if (strcmp(f->name, "epoch") == 0 || strcmp(f->name, "mode") == 0) {
            reflect_number(inner, f, 1);
        } else if (strcmp(f->name, "key") == 0 || strcmp(f->name, "keys") == 0) {
            memcpy(reflect_content, &worker.put, sizeof(worker.put));
            reflect_length(inner, f, 32);
        } else if (strcmp(f->name, "n_tokens") == 0) {
            reflect_number(inner, f, NODE_BT);
        } else if (strcmp(f->name, "put") == 0 || strcmp(f->name, "lease") == 0) {
            reflect_number(inner, f, ++worker.put);
        }
    }
}

/* A put is sealed only when it is done: that is where a wrong depth did its harm. */
static bool finish_put(uint64_t id)
{
    Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
    Baton__LocalPutDone d = BATON__LOCAL_PUT_DONE__INIT;
    d.put = id;
    m.m_case = BATON__LOCAL_MSG__M_PUT_DONE;
    m.put_done = &d;
    send_packet(&m, -1);
    return still_there();
}

static void extremes_of(const ProtobufCFieldDescriptor *which,
                        const ProtobufCFieldDescriptor *field)
{
    for (unsigned i = 0; i < REFLECT_EXTREMES; i++) {
        Baton__LocalMsg m = BATON__LOCAL_MSG__INIT;
        ProtobufCMessage *inner = reflect_new(which->descriptor);
        make_valid(inner);
        uint64_t put = worker.put;
        reflect_put(&m.base, which, inner);
        bool ok = reflect_extreme(inner, field, i);
        if (ok) {
            send_packet(&m, -1);
        }
        free(inner);
        if (ok && (!still_there() || !finish_put(put))) {
            worker_end();
            worker_begin();
        }
    }
}

static void no_extreme_value_ends_a_kvstore(void **state)
{
    const ProtobufCMessageDescriptor *d = &baton__local_msg__descriptor;
    struct bt_grants_stats s;
    (void)state;
    memset(&worker, 0, sizeof(worker));
    node_start(&node, 1000, 600000); /* nobody is killed: the worker is this process */
    worker.pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    assert_true(worker.pidfd >= 0);
    worker_begin();
    for (unsigned i = 0; i < d->n_fields; i++) {
        const ProtobufCMessageDescriptor *inner = d->fields[i].descriptor;
        assert_int_equal(d->fields[i].type, PROTOBUF_C_TYPE_MESSAGE);
        for (unsigned k = 0; k < inner->n_fields; k++) {
            extremes_of(&d->fields[i], &inner->fields[k]);
        }
    }
    assert_true(worker.ended > 50);     /* what is out of range ends the session, */
    assert_true(worker.answered > 200); /* what is in it is served */
    worker_end();
    for (uint64_t end = bt_mono_ns() + 60000000000ull; bt_mono_ns() < end;) {
        bt_grants_stats(node.grants, &s);
        if (s.puts == 0) {
            break;
        }
        bt_loop_poll(node.loop, 20);
    }
    close(worker.pidfd);
    node_stop(&node);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_field_has_a_range),
        cmocka_unit_test(a_refusal_names_field_value_and_range),
        cmocka_unit_test(every_protocol_is_held_to_its_table),
        cmocka_unit_test(a_message_cannot_take_much_memory),
        cmocka_unit_test(fields_of_a_stranger_are_dropped),
        cmocka_unit_test(no_extreme_value_ends_a_kvstore),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
