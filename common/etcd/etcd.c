/* etcd's unary calls: put, delete, range, compare-and-swap, revoke; and the choice of the endpoint.
 * Loop's thread; no call blocks, except that bt_etcd_destroy gives pending revocations a moment. */
#include "common/etcd/etcd.h"

#include <stdlib.h>
#include <string.h>

#include "common/etcd/etcd_priv.h"
#include "common/log/log.h"
#include "common/rpc/ranges.h"

#define GOODBYE_MS 500
/* Interval of a repeated log line: an operator who looks at the end of the log sees the cause. */
#define SAY_AGAIN_NS 10000000000ull
/* More than gRPC's longest pause between two attempts to connect (client.c): these come first. */
#define DIAL_AGAIN_NS 2000000000ull

/* ---- endpoints ---- */

/* The part after the scheme, if there is a scheme; *tls_p: the scheme is https. */
static const char *strip_scheme(const char *endpoint, bool *tls_p)
{
    static const char http[] = "http://", https[] = "https://";
    *tls_p = strncmp(endpoint, https, sizeof(https) - 1) == 0;
    return *tls_p                                           ? endpoint + sizeof(https) - 1
           : strncmp(endpoint, http, sizeof(http) - 1) == 0 ? endpoint + sizeof(http) - 1
                                                            : endpoint;
}

bt_status_t bt_etcd_create(struct bt_rpc *rpc, char *const *endpoints, struct bt_tls *tls,
                           struct bt_etcd **e_p)
{
    bool secure;
    size_t n = 0;
    while (endpoints != NULL && endpoints[n] != NULL) {
        (void)strip_scheme(endpoints[n], &secure);
        if (secure && tls == NULL) {
            BT_ERROR("etcd_endpoint", "endpoint=%s remedy=%s", endpoints[n],
                     "give etcd.tls.ca, .cert and .key, or cluster.tls.*");
            return BT_ERR_CONFIG;
        }
        n++;
    }
    if (n == 0) {
        BT_ERROR("etcd_endpoint", "endpoints=0 remedy=%s",
                 "name at least one etcd endpoint as host:port");
        return BT_ERR_INVALID;
    }
    struct bt_etcd *e = bt_calloc(1, sizeof(*e));
    e->rpc = rpc;
    e->loop = bt_rpc_loop(rpc);
    e->reachable = true;
    bt_list_init(&e->leases);
    bt_list_init(&e->watches);
    e->eps = bt_calloc(n, sizeof(e->eps[0]));
    for (size_t i = 0; i < n; i++) {
        char *target = bt_strdup(strip_scheme(endpoints[i], &secure));
        size_t len = strlen(target);
        if (len > 0 && target[len - 1] == '/') {
            target[len - 1] = '\0';
        }
        e->eps[e->n_eps].target = target;
        e->eps[e->n_eps].tls = secure ? tls : NULL;
        bt_status_t st = bt_rpc_channel_create_tls(rpc, target, e->eps[e->n_eps].tls, NULL,
                                                   &e->eps[e->n_eps].ch);
        e->n_eps++;
        if (st != BT_OK) {
            bt_etcd_destroy(e);
            return st;
        }
    }
    *e_p = e;
    return BT_OK;
}

/* A process that ends revokes its leases, so that its names are free at once. The loop does not run
 * any more, so this function waits, but only for a short time. */
static void say_goodbye(struct bt_etcd *e)
{
    for (size_t i = 0; i < e->n_goodbyes && e->reachable; i++) {
        Etcdserverpb__LeaseRevokeRequest req = ETCDSERVERPB__LEASE_REVOKE_REQUEST__INIT;
        uint8_t buf[32];
        void *reply = NULL;
        size_t len;
        req.id = e->goodbyes[i];
        struct bt_rpc_question q = {.target = e->eps[e->cur].target,
                                    .tls = e->eps[e->cur].tls,
                                    .method = "/etcdserverpb.Lease/LeaseRevoke",
                                    .data = buf,
                                    .len = etcdserverpb__lease_revoke_request__pack(&req, buf),
                                    .deadline_ms = GOODBYE_MS};
        int code = bt_rpc_unary_blocking(&q, &reply, &len, NULL, 0);
        free(reply);
        if (code != BT_GRPC_OK && code != BT_GRPC_NOT_FOUND) {
            break; /* etcd is not reachable: the lease will expire */
        }
    }
}

void bt_etcd_destroy(struct bt_etcd *e)
{
    if (e == NULL) {
        return;
    }
    e->dying = true;
    while (!bt_list_empty(&e->watches)) {
        bt_etcd_watch_end(e->watches.next);
    }
    while (!bt_list_empty(&e->leases)) {
        bt_etcd_lease_end(e->leases.next);
    }
    say_goodbye(e);
    for (size_t i = 0; i < e->n_eps; i++) {
        bt_rpc_channel_destroy(e->eps[i].ch); /* pending calls end with ERR_CANCELLED */
    }
    for (size_t i = 0; i < e->n_eps; i++) {
        free(e->eps[i].target);
    }
    free(e->eps);
    free(e);
}

struct bt_loop *bt_etcd_loop(const struct bt_etcd *e)
{
    return e->loop;
}

void bt_etcd_note(struct bt_etcd *e, size_t ep, bool failed, const char *why)
{
    if (e->dying) {
        return;
    }
    uint64_t now = bt_mono_ns();
    if (failed && e->reachable) {
        BT_WARN("etcd_unreachable", "endpoint=%s why=%s", e->eps[ep].target, why);
        e->lost_ns = e->said_ns = e->dialed_ns = now;
    } else if (failed && now - e->said_ns >= SAY_AGAIN_NS) {
        BT_WARN("etcd_waiting", "seconds=%u endpoint=%s endpoints=%zu why=%s remedy=%s",
                (unsigned)((now - e->lost_ns) / 1000000000u), e->eps[ep].target, e->n_eps, why,
                "waiting for etcd: start it, or correct etcd.endpoints");
        e->said_ns = now;
    } else if (!failed && !e->reachable) {
        BT_INFO("etcd_reachable", "endpoint=%s", e->eps[ep].target);
    }
    e->reachable = !failed;
    if (failed && now - e->dialed_ns >= DIAL_AGAIN_NS) {
        for (size_t i = 0; i < e->n_eps; i++) {
            bt_rpc_channel_dial_again(e->eps[i].ch);
        }
        e->dialed_ns = now;
    }
    if (failed && ep == e->cur) {
        e->cur = (e->cur + 1) % e->n_eps;
    }
}

static bt_status_t status_of(int code)
{
    switch (code) {
    case BT_GRPC_OK: return BT_OK;
    case BT_GRPC_CANCELLED: return BT_ERR_CANCELLED;
    case BT_GRPC_INVALID_ARGUMENT: return BT_ERR_INVALID;
    case BT_GRPC_DEADLINE: return BT_ERR_TIMEOUT;
    case BT_GRPC_NOT_FOUND: return BT_ERR_NOT_FOUND;
    case BT_GRPC_EXHAUSTED: return BT_ERR_EXHAUSTED;
    case BT_GRPC_UNIMPLEMENTED: return BT_ERR_UNSUPPORTED;
    case BT_GRPC_UNAVAILABLE: return BT_ERR_UNAVAILABLE;
    default: return BT_ERR_INTERNAL;
    }
}

uint64_t bt_etcd_backoff(uint64_t *ms_p)
{
    uint64_t now = BT_MAX(*ms_p, (uint64_t)BT_ETCD_BACKOFF_MIN_MS);
    *ms_p = BT_MIN(now * 2, (uint64_t)BT_ETCD_BACKOFF_MAX_MS);
    return now;
}

/* ---- one unary call ---- */

struct call {
    struct bt_etcd *e;
    const char *method;
    uint8_t *body;
    size_t len;
    uint64_t due_ns;
    size_t ep, tries;
    bt_etcd_raw_fn fn;
    void *arg;
};

static void on_reply(void *arg, int code, const char *detail, const void *data, size_t len);

static void send_call(struct call *c, uint64_t ms)
{
    c->ep = c->e->cur;
    c->tries++;
    bt_rpc_unary(c->e->eps[c->ep].ch, c->method, c->body, c->len, ms, on_reply, c);
}

static void on_reply(void *arg, int code, const char *detail, const void *data, size_t len)
{
    struct call *c = arg;
    bool failed = code == BT_GRPC_UNAVAILABLE || code == BT_GRPC_DEADLINE;
    if (c->e->dying) {
        code = BT_GRPC_CANCELLED;
    } else {
        bt_etcd_note(c->e, c->ep, failed, detail);
        uint64_t now = bt_mono_ns();
        if (code == BT_GRPC_UNAVAILABLE && c->tries < c->e->n_eps && c->due_ns > now + 1000000) {
            send_call(c, (c->due_ns - now) / 1000000);
            return;
        }
        if (!failed && code != BT_GRPC_OK && code != BT_GRPC_NOT_FOUND) {
            BT_WARN("etcd_refused", "method=%s code=%d why=%s", c->method, code, detail);
        }
    }
    c->fn(c->arg, status_of(code), data, len);
    free(c->body);
    free(c);
}

void bt_etcd_call(struct bt_etcd *e, const char *method, const ProtobufCMessage *req,
                  bt_etcd_raw_fn fn, void *arg)
{
    struct call *c = bt_calloc(1, sizeof(*c));
    c->e = e;
    c->method = method;
    c->len = protobuf_c_message_get_packed_size(req);
    c->body = bt_malloc(c->len);
    protobuf_c_message_pack(req, c->body);
    c->due_ns = bt_mono_ns() + BT_ETCD_DEADLINE_MS * 1000000ull;
    c->fn = fn;
    c->arg = arg;
    send_call(c, BT_ETCD_DEADLINE_MS);
}

/* ---- bytes ---- */

uint8_t *bt_etcd_prefix_end(const char *prefix, size_t *len_p)
{
    size_t n = strlen(prefix);
    uint8_t *end = bt_malloc(n + 1);
    memcpy(end, prefix, n);
    while (n > 0 && end[n - 1] == 0xff) {
        n--;
    }
    if (n > 0) {
        end[n - 1]++;
    } else {
        end[n++] = 0; /* in etcd this means "all keys from key on" */
    }
    *len_p = n;
    return end;
}

ProtobufCBinaryData bt_etcd_bytes(const void *data, size_t len)
{
    return (ProtobufCBinaryData){.data = (uint8_t *)data, .len = len};
}

bool bt_etcd_kv_open(const Etcdserverpb__KeyValue *pb, struct bt_etcd_kv *kv)
{
    if (pb == NULL || memchr(pb->key.data == NULL ? (uint8_t *)"" : pb->key.data, 0,
                             pb->key.data == NULL ? 1 : pb->key.len) != NULL) {
        return false;
    }
    char *key = bt_malloc(pb->key.len + 1);
    bt_copy(key, pb->key.data, pb->key.len);
    key[pb->key.len] = '\0';
    *kv = (struct bt_etcd_kv){.key = key,
                              .value = pb->value.data,
                              .value_len = pb->value.len,
                              .mod_revision = pb->mod_revision,
                              .lease = pb->lease};
    return true;
}

void bt_etcd_kv_close(struct bt_etcd_kv *kv)
{
    free((char *)kv->key);
}

/* ---- put, delete, range, compare-and-swap ---- */

struct op {
    bt_etcd_put_fn put;
    bt_etcd_range_fn range;
    bt_etcd_cas_fn cas;
    bt_etcd_swap_fn swap;
    void *arg;
    char *key;
};

static struct op *op_new(void *arg)
{
    struct op *o = bt_calloc(1, sizeof(*o));
    o->arg = arg;
    return o;
}

static void on_put(void *arg, bt_status_t st, const void *data, size_t len)
{
    struct op *o = arg;
    (void)data;
    (void)len;
    if (o->put != NULL) {
        o->put(o->arg, st);
    }
    free(o);
}

void bt_etcd_put(struct bt_etcd *e, const char *key, const void *value, size_t len, int64_t lease,
                 bt_etcd_put_fn done, void *arg)
{
    Etcdserverpb__PutRequest req = ETCDSERVERPB__PUT_REQUEST__INIT;
    struct op *o = op_new(arg);
    o->put = done;
    req.key = bt_etcd_bytes(key, strlen(key));
    req.value = bt_etcd_bytes(value, len);
    req.lease = lease;
    bt_etcd_call(e, "/etcdserverpb.KV/Put", &req.base, on_put, o);
}

void bt_etcd_delete(struct bt_etcd *e, const char *key, bt_etcd_put_fn done, void *arg)
{
    Etcdserverpb__DeleteRangeRequest req = ETCDSERVERPB__DELETE_RANGE_REQUEST__INIT;
    struct op *o = op_new(arg);
    o->put = done;
    req.key = bt_etcd_bytes(key, strlen(key));
    bt_etcd_call(e, "/etcdserverpb.KV/DeleteRange", &req.base, on_put, o);
}

static void on_range(void *arg, bt_status_t st, const void *data, size_t len)
{
    struct op *o = arg;
    struct bt_etcd_kv *kvs = NULL;
    size_t n = 0;
    int64_t revision = 0;
    Etcdserverpb__RangeResponse *r = NULL;
    if (st == BT_OK) {
        char why[256] = "the answer has no header";
        r = bt_range_response_unpack(data, len, why, sizeof(why));
        if (r == NULL || r->header == NULL) {
            BT_WARN("etcd_bad_reply", "what=range len=%zu why=%s", len, why);
            st = BT_ERR_PEER_PROTOCOL;
        } else {
            revision = r->header->revision;
            kvs = bt_calloc(r->n_kvs + 1, sizeof(kvs[0]));
            for (size_t i = 0; i < r->n_kvs; i++) {
                n += bt_etcd_kv_open(r->kvs[i], &kvs[n]);
            }
        }
    }
    o->range(o->arg, st, kvs, n, revision);
    for (size_t i = 0; i < n; i++) {
        bt_etcd_kv_close(&kvs[i]);
    }
    free(kvs);
    if (r != NULL) {
        etcdserverpb__range_response__free_unpacked(r, NULL);
    }
    free(o);
}

void bt_etcd_range_prefix(struct bt_etcd *e, const char *prefix, bt_etcd_range_fn done, void *arg)
{
    Etcdserverpb__RangeRequest req = ETCDSERVERPB__RANGE_REQUEST__INIT;
    struct op *o = op_new(arg);
    size_t end_len;
    uint8_t *end = bt_etcd_prefix_end(prefix, &end_len);
    o->range = done;
    /* etcd does not allow an empty key: "\0" is the first key. */
    req.key = bt_etcd_bytes(prefix, prefix[0] == '\0' ? 1 : strlen(prefix));
    req.range_end = bt_etcd_bytes(end, end_len);
    bt_etcd_call(e, "/etcdserverpb.KV/Range", &req.base, on_range, o);
    free(end);
}

static bt_status_t read_cas(struct op *o, const Etcdserverpb__TxnResponse *r,
                            struct bt_etcd_kv *cur)
{
    if (r == NULL || r->header == NULL) {
        return BT_ERR_PEER_PROTOCOL;
    }
    *cur = (struct bt_etcd_kv){.key = bt_strdup(o->key)};
    if (r->succeeded) {
        cur->mod_revision = r->header->revision; /* the revision that the put has created */
        return BT_OK;
    }
    if (r->n_responses != 1 ||
        r->responses[0]->response_case != ETCDSERVERPB__RESPONSE_OP__RESPONSE_RESPONSE_RANGE) {
        return BT_ERR_PEER_PROTOCOL;
    }
    const Etcdserverpb__RangeResponse *range = r->responses[0]->response_range;
    if (range->n_kvs > 0) {
        cur->value = range->kvs[0]->value.data;
        cur->value_len = range->kvs[0]->value.len;
        cur->mod_revision = range->kvs[0]->mod_revision;
        cur->lease = range->kvs[0]->lease;
    }
    return BT_OK;
}

static void on_cas(void *arg, bt_status_t st, const void *data, size_t len)
{
    struct op *o = arg;
    struct bt_etcd_kv cur = {0};
    Etcdserverpb__TxnResponse *r = NULL;
    if (st == BT_OK) {
        char why[256] = "its parts do not match the request";
        r = bt_txn_response_unpack(data, len, why, sizeof(why));
        st = read_cas(o, r, &cur);
        if (st != BT_OK) {
            BT_WARN("etcd_bad_reply", "what=compare_and_swap len=%zu why=%s", len, why);
        }
    }
    o->cas(o->arg, st, st == BT_OK && r->succeeded, st == BT_OK ? &cur : NULL);
    bt_etcd_kv_close(&cur);
    if (r != NULL) {
        etcdserverpb__txn_response__free_unpacked(r, NULL);
    }
    free(o->key);
    free(o);
}

static void has_revision(Etcdserverpb__Compare *cmp, const char *key, int64_t revision)
{
    etcdserverpb__compare__init(cmp);
    cmp->result = ETCDSERVERPB__COMPARE__COMPARE_RESULT__EQUAL;
    cmp->target = ETCDSERVERPB__COMPARE__COMPARE_TARGET__MOD;
    cmp->key = bt_etcd_bytes(key, strlen(key));
    cmp->target_union_case = ETCDSERVERPB__COMPARE__TARGET_UNION_MOD_REVISION;
    cmp->mod_revision = revision;
}

void bt_etcd_cas(struct bt_etcd *e, const char *key, int64_t expect, const void *value, size_t len,
                 int64_t lease, bt_etcd_cas_fn done, void *arg)
{
    struct op *o = op_new(arg);
    o->cas = done;
    o->key = bt_strdup(key);

    Etcdserverpb__Compare cmp, *cmps[] = {&cmp};
    has_revision(&cmp, key, expect);

    Etcdserverpb__PutRequest put = ETCDSERVERPB__PUT_REQUEST__INIT;
    put.key = cmp.key;
    put.value = bt_etcd_bytes(value, len);
    put.lease = lease;
    Etcdserverpb__RequestOp then = ETCDSERVERPB__REQUEST_OP__INIT, *thens[] = {&then};
    then.request_case = ETCDSERVERPB__REQUEST_OP__REQUEST_REQUEST_PUT;
    then.request_put = &put;

    Etcdserverpb__RangeRequest get = ETCDSERVERPB__RANGE_REQUEST__INIT;
    get.key = cmp.key;
    Etcdserverpb__RequestOp or = ETCDSERVERPB__REQUEST_OP__INIT, *ors[] = {& or };
    or.request_case = ETCDSERVERPB__REQUEST_OP__REQUEST_REQUEST_RANGE;
    or.request_range = &get;

    Etcdserverpb__TxnRequest req = ETCDSERVERPB__TXN_REQUEST__INIT;
    req.n_compare = req.n_success = req.n_failure = 1;
    req.compare = cmps;
    req.success = thens;
    req.failure = ors;
    bt_etcd_call(e, "/etcdserverpb.KV/Txn", &req.base, on_cas, o);
}

static void on_swap(void *arg, bt_status_t st, const void *data, size_t len)
{
    struct op *o = arg;
    Etcdserverpb__TxnResponse *r = NULL;
    if (st == BT_OK) {
        char why[256];
        r = bt_txn_response_unpack(data, len, why, sizeof(why));
        if (r == NULL) {
            st = BT_ERR_PEER_PROTOCOL;
            BT_WARN("etcd_bad_reply", "what=swap len=%zu why=%s", len, why);
        }
    }
    o->swap(o->arg, st, st == BT_OK && r->succeeded);
    if (r != NULL) {
        etcdserverpb__txn_response__free_unpacked(r, NULL);
    }
    free(o);
}

void bt_etcd_swap(struct bt_etcd *e, const struct bt_etcd_expect *expects, size_t n_expects,
                  const struct bt_etcd_set *sets, size_t n_sets, bt_etcd_swap_fn done, void *arg)
{
    Etcdserverpb__Compare cmp[BT_ETCD_SWAP_MAX], *cmps[BT_ETCD_SWAP_MAX];
    Etcdserverpb__PutRequest put[BT_ETCD_SWAP_MAX];
    Etcdserverpb__RequestOp then[BT_ETCD_SWAP_MAX], *thens[BT_ETCD_SWAP_MAX];
    struct op *o = op_new(arg);
    BT_ASSERT(n_expects <= BT_ETCD_SWAP_MAX && n_sets <= BT_ETCD_SWAP_MAX);
    o->swap = done;
    for (size_t i = 0; i < n_expects; i++) {
        has_revision(&cmp[i], expects[i].key, expects[i].revision);
        cmps[i] = &cmp[i];
    }
    for (size_t i = 0; i < n_sets; i++) {
        etcdserverpb__put_request__init(&put[i]);
        put[i].key = bt_etcd_bytes(sets[i].key, strlen(sets[i].key));
        put[i].value = bt_etcd_bytes(sets[i].value, sets[i].len);
        etcdserverpb__request_op__init(&then[i]);
        then[i].request_case = ETCDSERVERPB__REQUEST_OP__REQUEST_REQUEST_PUT;
        then[i].request_put = &put[i];
        thens[i] = &then[i];
    }
    Etcdserverpb__TxnRequest req = ETCDSERVERPB__TXN_REQUEST__INIT;
    req.n_compare = n_expects;
    req.compare = cmps;
    req.n_success = n_sets;
    req.success = thens;
    bt_etcd_call(e, "/etcdserverpb.KV/Txn", &req.base, on_swap, o);
}

/* ---- revoke ---- */

struct revoke {
    struct bt_etcd *e;
    int64_t lease;
};

static void on_revoked(void *arg, bt_status_t st, const void *data, size_t len)
{
    struct revoke *r = arg;
    (void)data;
    (void)len;
    if (st != BT_ERR_CANCELLED) { /* cancelled: bt_etcd_destroy has revoked it */
        for (size_t i = 0; i < r->e->n_goodbyes; i++) {
            if (r->e->goodbyes[i] == r->lease) {
                r->e->goodbyes[i] = r->e->goodbyes[--r->e->n_goodbyes];
                break;
            }
        }
    }
    free(r);
}

void bt_etcd_revoke(struct bt_etcd *e, int64_t lease)
{
    if (e->n_goodbyes < BT_ETCD_GOODBYES_MAX) {
        e->goodbyes[e->n_goodbyes++] = lease;
    }
    if (e->dying) {
        return;
    }
    Etcdserverpb__LeaseRevokeRequest req = ETCDSERVERPB__LEASE_REVOKE_REQUEST__INIT;
    struct revoke *r = bt_calloc(1, sizeof(*r));
    *r = (struct revoke){.e = e, .lease = lease};
    req.id = lease;
    bt_etcd_call(e, "/etcdserverpb.Lease/LeaseRevoke", &req.base, on_revoked, r);
}
