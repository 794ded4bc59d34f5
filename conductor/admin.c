/* The Admin service; see admin.h. Loop thread. */
#include "conductor/admin.h"

#include <stdlib.h>

#include "admin.pb-c.h"
#include "common/rpc/pb.h"

#define LIST_MAX 10000u /* blocks of one answer */

struct bt_admin {
    struct bt_view *view;
    struct bt_requests *rs;
    struct bt_admin_config conf;
};

static uint32_t silence_ms(const struct bt_session *s, uint64_t now_ns)
{
    return s->rx_ns != 0 && now_ns > s->rx_ns ? (uint32_t)((now_ns - s->rx_ns) / 1000000) : 0;
}

static void fill_node(Baton__AdminNode *n, struct bt_session *s, uint64_t now_ns)
{
    baton__admin_node__init(n);
    n->member = s->member;
    n->session_up = s->state == BT_SESSION_UP;
    n->silence_ms = silence_ms(s, now_ns);
    n->load = s->has_load ? &s->load : NULL;
    n->pool = s->has_pool ? &s->pool : NULL;
}

static void on_status(void *arg, struct bt_rpc_call *call, const void *data, size_t len)
{
    struct bt_admin *a = arg;
    Baton__AdminStatusRequest *q = baton__admin_status_request__unpack(NULL, len, data);
    if (q == NULL) {
        bt_rpc_call_reply(call, BT_GRPC_INVALID_ARGUMENT, "malformed AdminStatusRequest", NULL, 0);
        return;
    }
    baton__admin_status_request__free_unpacked(q, NULL);
    struct bt_requests_stats stats;
    bt_requests_stats(a->rs, &stats);
    const char *why = NULL;
    Baton__AdminStatus st = BATON__ADMIN_STATUS__INIT;
    st.cluster = (char *)a->conf.cluster;
    st.conductor = (char *)a->conf.name;
    st.version = (char *)BT_VERSION;
    st.model_id = (char *)a->conf.model_id;
    st.serving = bt_requests_serving(a->rs, &why);
    st.reason = (char *)(why != NULL ? why : "");
    st.requests_running = stats.running;
    st.requests_waiting = stats.waiting;
    st.requests_total = stats.total;
    st.replanned_total = stats.replanned;
    size_t n = 0;
    struct bt_list *l;
    bt_list_for_each (l, bt_view_sessions(a->view)) {
        n++;
    }
    Baton__AdminNode *nodes = bt_calloc(n + 1, sizeof(*nodes));
    st.nodes = bt_calloc(n + 1, sizeof(Baton__AdminNode *));
    uint64_t now = bt_mono_ns();
    bt_list_for_each (l, bt_view_sessions(a->view)) {
        st.nodes[st.n_nodes] = &nodes[st.n_nodes];
        fill_node(st.nodes[st.n_nodes++], BT_CONTAINER_OF(l, struct bt_session, link), now);
    }
    bt_rpc_call_reply_pb(call, &st.base);
    free(st.nodes);
    free(nodes);
}

/* One listed block and what its message points to. */
struct listed {
    Baton__AdminBlock block;
    struct bt_kv_key key;
    char *kvstores[BT_HOLDERS_KVSTORES_MAX];
};

static bool list_block(struct bt_admin *a, size_t *it, struct listed *b)
{
    const struct bt_kv_key *key;
    const uint64_t *holds;
    uint32_t depth;
    if (!bt_holders_next(bt_view_index(a->view), it, &key, &depth, &holds)) {
        return false;
    }
    baton__admin_block__init(&b->block);
    b->key = *key;
    b->block.key.data = b->key.b;
    b->block.key.len = sizeof(b->key.b);
    b->block.depth = depth;
    b->block.kvstores = b->kvstores;
    for (uint32_t id = 0; id < BT_HOLDERS_KVSTORES_MAX; id++) {
        const char *name =
            (holds[id / 64] >> (id % 64) & 1) != 0 ? bt_view_kvstore_name(a->view, id) : NULL;
        if (name != NULL) {
            b->kvstores[b->block.n_kvstores++] = (char *)name;
        }
    }
    return true;
}

static void on_blocks(void *arg, struct bt_rpc_call *call, const void *data, size_t len)
{
    struct bt_admin *a = arg;
    Baton__AdminBlocksRequest *q = baton__admin_blocks_request__unpack(NULL, len, data);
    if (q == NULL) {
        bt_rpc_call_reply(call, BT_GRPC_INVALID_ARGUMENT, "malformed AdminBlocksRequest", NULL, 0);
        return;
    }
    uint32_t limit = BT_MIN(q->limit, LIST_MAX);
    baton__admin_blocks_request__free_unpacked(q, NULL);
    const struct bt_holders *x = bt_view_index(a->view);
    limit = (uint32_t)BT_MIN((size_t)limit, bt_holders_keys(x));
    Baton__AdminBlocks r = BATON__ADMIN_BLOCKS__INIT;
    r.blocks = bt_holders_keys(x);
    r.replicas = bt_holders_replicas(x);
    r.block_tokens = a->conf.block_tokens;
    r.list = bt_calloc(limit + 1, sizeof(Baton__AdminBlock *));
    size_t it = 0;
    while (r.n_list < limit) {
        struct listed *b = bt_calloc(1, sizeof(*b));
        if (!list_block(a, &it, b)) {
            free(b);
            break;
        }
        r.list[r.n_list++] = &b->block;
    }
    bt_rpc_call_reply_pb(call, &r.base);
    for (size_t i = 0; i < r.n_list; i++) {
        free(BT_CONTAINER_OF(r.list[i], struct listed, block));
    }
    free(r.list);
}

struct bt_admin *bt_admin_create(struct bt_rpc_server *server, struct bt_view *view,
                                 struct bt_requests *rs, const struct bt_admin_config *conf)
{
    struct bt_admin *a = bt_calloc(1, sizeof(*a));
    a->view = view;
    a->rs = rs;
    a->conf = *conf;
    bt_rpc_server_unary(server, "/baton.Admin/Status", on_status, a);
    bt_rpc_server_unary(server, "/baton.Admin/Blocks", on_blocks, a);
    return a;
}

void bt_admin_destroy(struct bt_admin *a)
{
    free(a);
}
