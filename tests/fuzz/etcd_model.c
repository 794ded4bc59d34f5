/* What etcd would answer, of the calls that common/etcd makes. */
#include "tests/fuzz/etcd_model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void model_init(struct model *m)
{
    m->n_keys = m->n_history = m->n_leases = m->n_watches = 0;
    m->revision = 1;
    m->compacted = 0;
    m->term = 2;
    m->next_lease = 100;
}

struct model_key *model_find(struct model *m, const char *key)
{
    for (uint32_t i = 0; i < m->n_keys; i++) {
        if (strcmp(m->keys[i].key, key) == 0) {
            return &m->keys[i];
        }
    }
    return NULL;
}

/* The oldest goes, as if it were compacted, when there is no room. */
static void remember(struct model *m, const struct model_key *k, bool deleted)
{
    if (m->n_history == MODEL_HISTORY) {
        m->compacted = BT_MAX(m->compacted, m->history[0].k.mod);
        m->n_history--;
        memmove(&m->history[0], &m->history[1], m->n_history * sizeof(m->history[0]));
    }
    m->history[m->n_history++] = (struct model_event){.deleted = deleted, .k = *k};
}

static bool has_lease(const struct model *m, int64_t id)
{
    for (uint32_t i = 0; i < m->n_leases; i++) {
        if (m->leases[i].id == id) {
            return true;
        }
    }
    return false;
}

bool model_put(struct model *m, const char *key, const void *value, size_t len, int64_t lease)
{
    struct model_key *k = model_find(m, key);
    if (len > MODEL_VALUE || strlen(key) >= MODEL_TEXT || (lease != 0 && !has_lease(m, lease)) ||
        (k == NULL && m->n_keys == MODEL_KEYS)) {
        return false;
    }
    m->revision++;
    if (k == NULL) {
        k = &m->keys[m->n_keys++];
        *k = (struct model_key){.created = m->revision};
        snprintf(k->key, sizeof(k->key), "%s", key);
    }
    bt_copy(k->value, value, len);
    k->len = len;
    k->mod = m->revision;
    k->lease = lease;
    remember(m, k, false);
    return true;
}

static void delete_at(struct model *m, uint32_t i)
{
    struct model_key gone = {.mod = ++m->revision};
    memcpy(gone.key, m->keys[i].key, sizeof(gone.key));
    m->keys[i] = m->keys[--m->n_keys];
    remember(m, &gone, true);
}

void model_delete(struct model *m, const char *key)
{
    struct model_key *k = model_find(m, key);
    if (k != NULL) {
        delete_at(m, (uint32_t)(k - m->keys));
    }
}

void model_revoke(struct model *m, int64_t lease)
{
    for (uint32_t i = 0; i < m->n_leases; i++) {
        if (m->leases[i].id == lease) {
            m->leases[i] = m->leases[--m->n_leases];
            break;
        }
    }
    for (uint32_t i = 0; i < m->n_keys;) {
        if (m->keys[i].lease == lease) {
            delete_at(m, i);
        } else {
            i++;
        }
    }
}

void model_compact(struct model *m)
{
    m->compacted = m->revision;
    m->n_history = 0;
}

/* ---- answers ---- */

static Etcdserverpb__ResponseHeader header_of(const struct model *m)
{
    Etcdserverpb__ResponseHeader h = ETCDSERVERPB__RESPONSE_HEADER__INIT;
    h.revision = m->revision;
    h.raft_term = m->term;
    return h;
}

static Etcdserverpb__KeyValue kv_of(const struct model_key *k)
{
    Etcdserverpb__KeyValue kv = ETCDSERVERPB__KEY_VALUE__INIT;
    kv.key = (ProtobufCBinaryData){.data = (uint8_t *)(uintptr_t)k->key, .len = strlen(k->key)};
    kv.value = (ProtobufCBinaryData){.data = (uint8_t *)(uintptr_t)k->value, .len = k->len};
    kv.create_revision = k->created;
    kv.mod_revision = k->mod;
    kv.lease = k->lease;
    return kv;
}

static void text_of(const ProtobufCBinaryData *b, char out[MODEL_TEXT])
{
    size_t n = BT_MIN(b->len, (size_t)MODEL_TEXT - 1);
    bt_copy(out, b->data, n);
    out[n] = '\0';
}

static void reply(struct bt_rpc *rpc, const ProtobufCMessage *msg)
{
    size_t n = protobuf_c_message_get_packed_size(msg);
    uint8_t *buf = bt_malloc(n + 1);
    protobuf_c_message_pack(msg, buf);
    fake_rpc_answer(rpc, 0, BT_GRPC_OK, buf, n);
    free(buf);
}

/* Keys with the prefix; one key if range_end is empty. */
static size_t select_keys(const struct model *m, const char *key, bool prefix,
                          Etcdserverpb__KeyValue *kvs, Etcdserverpb__KeyValue **list)
{
    size_t n = 0;
    for (uint32_t i = 0; i < m->n_keys; i++) {
        const char *k = m->keys[i].key;
        if (prefix ? strncmp(k, key, strlen(key)) == 0 : strcmp(k, key) == 0) {
            kvs[n] = kv_of(&m->keys[i]);
            list[n] = &kvs[n];
            n++;
        }
    }
    return n;
}

static void fill_range(const struct model *m, const Etcdserverpb__RangeRequest *q,
                       Etcdserverpb__RangeResponse *r, Etcdserverpb__KeyValue *kvs,
                       Etcdserverpb__KeyValue **list)
{
    char key[MODEL_TEXT];
    text_of(&q->key, key);
    r->n_kvs = select_keys(m, key, q->range_end.len > 0, kvs, list);
    r->kvs = list;
    r->count = (int64_t)r->n_kvs;
}

static void answer_range(struct model *m, struct bt_rpc *rpc, const Etcdserverpb__RangeRequest *q)
{
    Etcdserverpb__KeyValue kvs[MODEL_KEYS], *list[MODEL_KEYS];
    Etcdserverpb__ResponseHeader h = header_of(m);
    Etcdserverpb__RangeResponse r = ETCDSERVERPB__RANGE_RESPONSE__INIT;
    r.header = &h;
    fill_range(m, q, &r, kvs, list);
    reply(rpc, &r.base);
}

static void answer_put(struct model *m, struct bt_rpc *rpc, const Etcdserverpb__PutRequest *q)
{
    char key[MODEL_TEXT];
    text_of(&q->key, key);
    if (!model_put(m, key, q->value.data, q->value.len, q->lease)) {
        fake_rpc_answer(rpc, 0, BT_GRPC_NOT_FOUND, NULL, 0);
        return;
    }
    Etcdserverpb__ResponseHeader h = header_of(m);
    Etcdserverpb__PutResponse r = ETCDSERVERPB__PUT_RESPONSE__INIT;
    r.header = &h;
    reply(rpc, &r.base);
}

/* One comparison of a revision, one put, else one range: what bt_etcd_cas asks for. */
static void answer_txn(struct model *m, struct bt_rpc *rpc, const Etcdserverpb__TxnRequest *q)
{
    Etcdserverpb__KeyValue kvs[MODEL_KEYS], *list[MODEL_KEYS];
    Etcdserverpb__RangeResponse range = ETCDSERVERPB__RANGE_RESPONSE__INIT;
    Etcdserverpb__PutResponse put = ETCDSERVERPB__PUT_RESPONSE__INIT;
    Etcdserverpb__ResponseOp op = ETCDSERVERPB__RESPONSE_OP__INIT, *ops[] = {&op};
    Etcdserverpb__TxnResponse r = ETCDSERVERPB__TXN_RESPONSE__INIT;
    const Etcdserverpb__PutRequest *p = q->success[0]->request_put;
    char key[MODEL_TEXT];
    text_of(&q->compare[0]->key, key);
    struct model_key *k = model_find(m, key);
    r.succeeded = q->compare[0]->mod_revision == (k != NULL ? k->mod : 0);
    if (r.succeeded && !model_put(m, key, p->value.data, p->value.len, p->lease)) {
        fake_rpc_answer(rpc, 0, BT_GRPC_NOT_FOUND, NULL, 0); /* of the lease */
        return;
    }
    op.response_case = r.succeeded ? ETCDSERVERPB__RESPONSE_OP__RESPONSE_RESPONSE_PUT
                                   : ETCDSERVERPB__RESPONSE_OP__RESPONSE_RESPONSE_RANGE;
    if (r.succeeded) {
        op.response_put = &put;
    } else {
        fill_range(m, q->failure[0]->request_range, &range, kvs, list);
        op.response_range = &range;
    }
    Etcdserverpb__ResponseHeader h = header_of(m);
    r.header = &h;
    r.n_responses = 1;
    r.responses = ops;
    reply(rpc, &r.base);
}

static void answer_delete(struct model *m, struct bt_rpc *rpc,
                          const Etcdserverpb__DeleteRangeRequest *q)
{
    Etcdserverpb__DeleteRangeResponse r = ETCDSERVERPB__DELETE_RANGE_RESPONSE__INIT;
    char key[MODEL_TEXT];
    text_of(&q->key, key);
    model_delete(m, key);
    Etcdserverpb__ResponseHeader h = header_of(m);
    r.header = &h;
    reply(rpc, &r.base);
}

static void answer_lease(struct model *m, struct bt_rpc *rpc, const char *verb, const void *data,
                         size_t len)
{
    Etcdserverpb__ResponseHeader h = header_of(m);
    if (strcmp(verb, "LeaseGrant") == 0) {
        Etcdserverpb__LeaseGrantRequest *q =
            etcdserverpb__lease_grant_request__unpack(NULL, len, data);
        Etcdserverpb__LeaseGrantResponse r = ETCDSERVERPB__LEASE_GRANT_RESPONSE__INIT;
        BT_ASSERT(q != NULL);
        if (m->n_leases == MODEL_LEASES) {
            model_revoke(m, m->leases[0].id);
        }
        m->leases[m->n_leases].ttl = r.ttl = q->ttl;
        m->leases[m->n_leases++].id = r.id = m->next_lease++;
        r.header = &h;
        reply(rpc, &r.base);
        etcdserverpb__lease_grant_request__free_unpacked(q, NULL);
        return;
    }
    if (strcmp(verb, "LeaseRevoke") == 0) {
        Etcdserverpb__LeaseRevokeRequest *q =
            etcdserverpb__lease_revoke_request__unpack(NULL, len, data);
        Etcdserverpb__LeaseRevokeResponse r = ETCDSERVERPB__LEASE_REVOKE_RESPONSE__INIT;
        BT_ASSERT(q != NULL);
        model_revoke(m, q->id);
        r.header = &h;
        reply(rpc, &r.base);
        etcdserverpb__lease_revoke_request__free_unpacked(q, NULL);
        return;
    }
    Etcdserverpb__LeaseTimeToLiveRequest *q =
        etcdserverpb__lease_time_to_live_request__unpack(NULL, len, data);
    Etcdserverpb__LeaseTimeToLiveResponse r = ETCDSERVERPB__LEASE_TIME_TO_LIVE_RESPONSE__INIT;
    BT_ASSERT(q != NULL);
    r.header = &h;
    r.id = q->id;
    r.ttl = -1;
    for (uint32_t i = 0; i < m->n_leases; i++) {
        if (m->leases[i].id == q->id) {
            r.grantedttl = m->leases[i].ttl;
            r.ttl = r.grantedttl / 2;
        }
    }
    reply(rpc, &r.base);
    etcdserverpb__lease_time_to_live_request__free_unpacked(q, NULL);
}

void model_answer(struct model *m, struct bt_rpc *rpc)
{
    if (fake_rpc_calls(rpc) == 0) {
        return;
    }
    struct fake_rpc_call c = fake_rpc_call(rpc, 0);
    const char *verb = strrchr(c.method, '/') + 1;
    if (strcmp(verb, "Range") == 0) {
        Etcdserverpb__RangeRequest *q = etcdserverpb__range_request__unpack(NULL, c.len, c.data);
        BT_ASSERT(q != NULL);
        answer_range(m, rpc, q);
        etcdserverpb__range_request__free_unpacked(q, NULL);
    } else if (strcmp(verb, "Put") == 0) {
        Etcdserverpb__PutRequest *q = etcdserverpb__put_request__unpack(NULL, c.len, c.data);
        BT_ASSERT(q != NULL);
        answer_put(m, rpc, q);
        etcdserverpb__put_request__free_unpacked(q, NULL);
    } else if (strcmp(verb, "Txn") == 0) {
        Etcdserverpb__TxnRequest *q = etcdserverpb__txn_request__unpack(NULL, c.len, c.data);
        BT_ASSERT(q != NULL && q->n_compare == 1 && q->n_success == 1 && q->n_failure == 1);
        answer_txn(m, rpc, q);
        etcdserverpb__txn_request__free_unpacked(q, NULL);
    } else if (strcmp(verb, "DeleteRange") == 0) {
        Etcdserverpb__DeleteRangeRequest *q =
            etcdserverpb__delete_range_request__unpack(NULL, c.len, c.data);
        BT_ASSERT(q != NULL);
        answer_delete(m, rpc, q);
        etcdserverpb__delete_range_request__free_unpacked(q, NULL);
    } else {
        answer_lease(m, rpc, verb, c.data, c.len);
    }
}

/* ---- streams ---- */

static void deliver(struct bt_rpc_stream *s, const ProtobufCMessage *msg)
{
    size_t n = protobuf_c_message_get_packed_size(msg);
    uint8_t *buf = bt_malloc(n + 1);
    protobuf_c_message_pack(msg, buf);
    fake_rpc_deliver(s, buf, n, 0);
    free(buf);
}

static bool keep_alive(struct model *m, struct bt_rpc_stream *s)
{
    size_t len;
    const void *data = fake_rpc_sent(s, &len);
    if (data == NULL) {
        return false;
    }
    Etcdserverpb__LeaseKeepAliveRequest *q =
        etcdserverpb__lease_keep_alive_request__unpack(NULL, len, data);
    Etcdserverpb__LeaseKeepAliveResponse r = ETCDSERVERPB__LEASE_KEEP_ALIVE_RESPONSE__INIT;
    Etcdserverpb__ResponseHeader h = header_of(m);
    BT_ASSERT(q != NULL);
    r.header = &h;
    r.id = q->id;
    r.ttl = has_lease(m, q->id) ? 5 : 0;
    etcdserverpb__lease_keep_alive_request__free_unpacked(q, NULL);
    fake_rpc_sent_done(s);
    deliver(s, &r.base);
    return true;
}

/* Takes the request of a watch that has none yet, and says that it is made. */
static bool begin_watch(struct model *m, struct bt_rpc_stream *s)
{
    size_t len;
    const void *data = fake_rpc_sent(s, &len);
    if (data == NULL || m->n_watches == MODEL_WATCHES) {
        return false;
    }
    Etcdserverpb__WatchRequest *q = etcdserverpb__watch_request__unpack(NULL, len, data);
    BT_ASSERT(q != NULL &&
              q->request_union_case == ETCDSERVERPB__WATCH_REQUEST__REQUEST_UNION_CREATE_REQUEST);
    struct model_watch *w = &m->watches[m->n_watches++];
    w->stream = s;
    w->next = q->create_request->start_revision;
    text_of(&q->create_request->key, w->prefix);
    etcdserverpb__watch_request__free_unpacked(q, NULL);
    fake_rpc_sent_done(s);
    Etcdserverpb__WatchResponse r = ETCDSERVERPB__WATCH_RESPONSE__INIT;
    Etcdserverpb__ResponseHeader h = header_of(m);
    r.header = &h;
    r.created = true;
    deliver(s, &r.base);
    return true;
}

static bool send_events(struct model *m, struct model_watch *w, uint32_t max)
{
    Etcdserverpb__KeyValue kvs[MODEL_HISTORY];
    Etcdserverpb__Event events[MODEL_HISTORY], *list[MODEL_HISTORY];
    Etcdserverpb__WatchResponse r = ETCDSERVERPB__WATCH_RESPONSE__INIT;
    Etcdserverpb__ResponseHeader h = header_of(m);
    r.header = &h;
    if (w->next <= m->compacted) {
        r.compact_revision = m->compacted + 1;
        r.canceled = true;
        w->next = INT64_MAX; /* etcd says it once */
        deliver(w->stream, &r.base);
        return true;
    }
    for (uint32_t i = 0; i < m->n_history && r.n_events < max; i++) {
        const struct model_event *e = &m->history[i];
        if (e->k.mod < w->next || strncmp(e->k.key, w->prefix, strlen(w->prefix)) != 0) {
            continue;
        }
        Etcdserverpb__Event *ev = &events[r.n_events];
        etcdserverpb__event__init(ev);
        kvs[r.n_events] = kv_of(&e->k);
        ev->kv = &kvs[r.n_events];
        ev->type = e->deleted ? ETCDSERVERPB__EVENT__EVENT_TYPE__DELETE
                              : ETCDSERVERPB__EVENT__EVENT_TYPE__PUT;
        list[r.n_events++] = ev;
        w->next = e->k.mod + 1;
    }
    r.events = list;
    if (r.n_events > 0) {
        deliver(w->stream, &r.base);
    }
    return r.n_events > 0;
}

static void forget_watches(struct model *m, const struct bt_rpc *rpc)
{
    for (uint32_t i = 0; i < m->n_watches;) {
        if (fake_rpc_stands(rpc, m->watches[i].stream)) {
            i++;
        } else {
            m->watches[i] = m->watches[--m->n_watches];
        }
    }
}

bool model_serve(struct model *m, struct bt_rpc *rpc, uint32_t max)
{
    bool any = false;
    forget_watches(m, rpc);
    for (uint32_t i = 0; i < fake_rpc_streams(rpc); i++) {
        struct bt_rpc_stream *s = fake_rpc_stream(rpc, i);
        bool lease = strstr(fake_rpc_stream_method(s), "KeepAlive") != NULL;
        any = (lease ? keep_alive(m, s) : begin_watch(m, s)) || any;
    }
    for (uint32_t i = 0; i < m->n_watches; i++) {
        if (fake_rpc_stands(rpc, m->watches[i].stream)) {
            any = send_events(m, &m->watches[i], max) || any;
        }
    }
    return any;
}
