/* The Admin service; see admin.h. Loop thread. */
#include "conductor/admin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "admin.pb-c.h"
#include "common/rpc/pb.h"
#include "common/rpc/ranges.h"
#include "conductor/admin_role.h"
#include "conductor/request/inspect.h"

#define LIST_MAX 10000u /* blocks of one answer */

struct bt_admin {
    struct bt_view *view;
    struct bt_requests *rs;
    struct bt_admin_config conf;
    struct bt_admin_role role;
};

static uint32_t silence_ms(const struct bt_session *s, uint64_t now_ns)
{
    uint64_t heard_ns = s->rpc.core.heard_ns;
    return heard_ns != 0 && now_ns > heard_ns ? (uint32_t)((now_ns - heard_ns) / 1000000) : 0;
}

struct pool { /* a kvstore's pool with the rates of its links, which the session keeps apart */
    Baton__PoolLoad load;
    Baton__LinkRate rates[BT_SCHED_LINKS_MAX], *links[BT_SCHED_LINKS_MAX];
};

static void fill_pool(struct pool *p, const struct bt_session *s)
{
    p->load = s->pool;
    p->load.links = p->links;
    for (p->load.n_links = 0; p->load.n_links < s->n_links; p->load.n_links++) {
        const struct bt_sched_link *l = &s->links[p->load.n_links];
        Baton__LinkRate *r = p->links[p->load.n_links] = &p->rates[p->load.n_links];
        baton__link_rate__init(r);
        r->incarnation = l->incarnation;
        r->slab_bytes_per_s = l->slab_bytes_per_s;
        r->ssd_bytes_per_s = l->ssd_bytes_per_s;
    }
}

/* pool: of a session that has one. */
static void fill_node(Baton__AdminNode *n, struct bt_session *s, struct pool *pool, uint64_t now_ns)
{
    baton__admin_node__init(n);
    n->member = s->member;
    n->draining = s->draining;
    n->role = (s->prefill ? BT_ROLES_PREFILL : 0) | (s->decode ? BT_ROLES_DECODE : 0);
    n->session_up = bt_session_up(s);
    n->silence_ms = silence_ms(s, now_ns);
    n->load = s->has_load ? &s->load : NULL;
    if (s->has_pool) {
        fill_pool(pool, s);
        n->pool = &pool->load;
    }
}

static void fill_scheduling(Baton__AdminStatus *st, const struct bt_requests_config *rc,
                            Baton__MixedSteps *mixed)
{
    baton__mixed_steps__init(mixed);
    mixed->step_ms = rc->sched.mixed.step_ms;
    mixed->gap_ms = rc->sched.mixed.gap_ms;
    st->policy = (char *)rc->policy->name;
    st->admission = (char *)rc->admission->name;
    st->ttft_objective_ms = rc->sched.objective.ttft_ms;
    st->tbt_objective_ms = rc->sched.objective.tbt_ms;
    st->mixed = mixed;
}

/* Uses an answer: sends it to batonctl, or writes it as JSON. */
typedef void (*use_fn)(void *arg, const ProtobufCMessage *m);

static void reply(void *call, const ProtobufCMessage *m)
{
    bt_rpc_call_reply_pb(call, m);
}

static void put_json(void *out, const ProtobufCMessage *m)
{
    bt_pb_json(m, out);
}

static void make_status(struct bt_admin *a, use_fn use, void *arg)
{
    struct bt_requests_stats stats;
    bt_requests_stats(a->rs, &stats);
    const char *why = NULL;
    Baton__AdminStatus st = BATON__ADMIN_STATUS__INIT;
    st.cluster = (char *)a->conf.cluster;
    st.conductor = (char *)a->conf.name;
    st.version = (char *)bt_version();
    st.model_id = (char *)a->conf.model_id;
    st.serving = bt_requests_serving(a->rs, &why);
    st.reason = (char *)(why != NULL ? why : "");
    st.requests_running = stats.running;
    st.requests_waiting = stats.waiting;
    st.requests_total = stats.total;
    st.replanned_total = stats.replanned;
    Baton__MixedSteps mixed;
    fill_scheduling(&st, bt_requests_config(a->rs), &mixed);
    size_t n = 0, n_pools = 0;
    struct bt_list *l;
    bt_list_for_each (l, bt_view_sessions(a->view)) {
        n++;
        n_pools += BT_CONTAINER_OF(l, struct bt_session, link)->has_pool;
    }
    Baton__AdminNode *nodes = bt_calloc(n + 1, sizeof(*nodes));
    st.nodes = bt_calloc(n + 1, sizeof(Baton__AdminNode *));
    struct pool *pools = bt_calloc(n_pools + 1, sizeof(*pools));
    n_pools = 0;
    uint64_t now = bt_mono_ns();
    bt_list_for_each (l, bt_view_sessions(a->view)) {
        st.nodes[st.n_nodes] = &nodes[st.n_nodes];
        struct bt_session *s = BT_CONTAINER_OF(l, struct bt_session, link);
        fill_node(st.nodes[st.n_nodes++], s, &pools[n_pools], now);
        n_pools += s->has_pool;
    }
    size_t starting = a->conf.starting != NULL ? bt_starting_count(a->conf.starting) : 0;
    st.starting = bt_calloc(starting + 1, sizeof(Baton__Starting *));
    for (; st.n_starting < starting; st.n_starting++) {
        st.starting[st.n_starting] =
            (Baton__Starting *)(uintptr_t)bt_starting_at(a->conf.starting, st.n_starting);
    }
    use(arg, &st.base);
    free(st.starting);
    free(st.nodes);
    free(nodes);
    free(pools);
}

static void on_status(void *arg, struct bt_rpc_call *call, const void *data, size_t len)
{
    char text[256];
    Baton__AdminStatusRequest *q = bt_admin_status_request_unpack(data, len, text, sizeof(text));
    if (q == NULL) {
        bt_rpc_call_reply(call, BT_GRPC_INVALID_ARGUMENT, text, NULL, 0);
        return;
    }
    baton__admin_status_request__free_unpacked(q, NULL);
    make_status(arg, reply, call);
}

/* Limits of one answer. The index may have a hundred million places, and a block may have as many
 * holders as there are nodes. The limits keep the time to make an answer to some milliseconds. The
 * counts show what is left out. */
#define LISTED_HOLDERS 64     /* of one block */
#define LISTED_NAMES   40000u /* of all */
#define LISTED_PLACES  2000000u

struct block_list {
    Baton__AdminBlock *blocks;
    uint8_t (*keys)[8];
    char **names;
    size_t n_names, at; /* at: place in the index */
};

static bool list_block(struct bt_admin *a, struct block_list *x, uint32_t i)
{
    uint32_t depth, n, ids[LISTED_HOLDERS];
    size_t most = BT_MIN(LISTED_NAMES - x->n_names, (size_t)LISTED_HOLDERS);
    if (most == 0 || !bt_holders_next(bt_view_index(a->view), &x->at, LISTED_PLACES, x->keys[i],
                                      &depth, ids, (uint32_t)most, &n)) {
        return false;
    }
    Baton__AdminBlock *b = &x->blocks[i];
    baton__admin_block__init(b);
    b->key.data = x->keys[i];
    b->key.len = sizeof(x->keys[i]);
    b->depth = depth;
    b->holders = n;
    b->kvstores = x->names + x->n_names;
    for (uint32_t k = 0; k < BT_MIN(n, (uint32_t)most); k++) {
        const char *name = bt_view_kvstore_name(a->view, ids[k]);
        if (name != NULL) {
            b->kvstores[b->n_kvstores++] = (char *)name;
        }
    }
    x->n_names += b->n_kvstores;
    return true;
}

static void on_blocks(void *arg, struct bt_rpc_call *call, const void *data, size_t len)
{
    struct bt_admin *a = arg;
    char why[256];
    Baton__AdminBlocksRequest *q = bt_admin_blocks_request_unpack(data, len, why, sizeof(why));
    if (q == NULL) {
        bt_rpc_call_reply(call, BT_GRPC_INVALID_ARGUMENT, why, NULL, 0);
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
    struct block_list list = {.blocks = bt_calloc(limit + 1, sizeof(*list.blocks)),
                              .keys = bt_calloc(limit + 1, sizeof(*list.keys)),
                              .names = bt_calloc(LISTED_NAMES, sizeof(*list.names))};
    while (r.n_list < limit && list_block(a, &list, (uint32_t)r.n_list)) {
        r.list[r.n_list] = &list.blocks[r.n_list];
        r.n_list++;
    }
    bt_rpc_call_reply_pb(call, &r.base);
    free(list.blocks);
    free(list.keys);
    free(list.names);
    free(r.list);
}

/* ---- requests ---- */

struct request_list {
    Baton__AdminRequests reply;
    Baton__AdminRequest *items;
    uint32_t limit;
};

static void add_request(void *arg, const struct bt_request_info *in)
{
    struct request_list *x = arg;
    x->reply.total++;
    if (x->reply.n_list == x->limit) {
        return;
    }
    Baton__AdminRequest *r = &x->items[x->reply.n_list];
    baton__admin_request__init(r);
    r->id = (char *)in->id; /* valid until the loop's next turn */
    r->wire_id = in->wire_id;
    r->state = (char *)in->state;
    r->age_ms = in->age_ms;
    r->choice = in->choice;
    r->n = in->n;
    r->prompt_tokens = in->prompt_tokens;
    r->tokens = in->tokens;
    r->epoch = in->epoch;
    r->replans = in->replans;
    r->prefill = (char *)in->prefill;
    r->decode = (char *)in->decode;
    x->reply.list[x->reply.n_list++] = r;
}

static void make_requests(struct bt_admin *a, uint32_t limit, use_fn use, void *arg)
{
    struct request_list x = {.reply = BATON__ADMIN_REQUESTS__INIT, .limit = limit};
    x.items = bt_calloc(x.limit + 1, sizeof(*x.items));
    x.reply.list = bt_calloc(x.limit + 1, sizeof(*x.reply.list));
    bt_requests_each(a->rs, add_request, &x);
    use(arg, &x.reply.base);
    free(x.reply.list);
    free(x.items);
}

static void on_requests(void *arg, struct bt_rpc_call *call, const void *data, size_t len)
{
    char why[256];
    Baton__AdminRequestsRequest *q = bt_admin_requests_request_unpack(data, len, why, sizeof(why));
    if (q == NULL) {
        bt_rpc_call_reply(call, BT_GRPC_INVALID_ARGUMENT, why, NULL, 0);
        return;
    }
    uint32_t limit = BT_MIN(q->limit, LIST_MAX);
    baton__admin_requests_request__free_unpacked(q, NULL);
    make_requests(arg, limit, reply, call);
}

/* ---- explain ---- */

static void fill_outcome(Baton__AdminOutcome *o, const struct bt_explanation *e)
{
    o->error = (char *)e->actual.error;
    o->cached_tokens = e->actual.cached_tokens;
    o->tokens = e->actual.tokens;
    o->replans = e->actual.replans;
    o->ttft_ms = e->actual.ttft_ms;
    o->tbt_ms = e->actual.tbt_ms;
    o->queue_ms = e->actual.queue_ms;
    o->prefill_ms = e->actual.prefill_ms;
    o->planned_ms = e->actual.planned_ms;
    o->decode_ms = e->actual.decode_ms;
    o->flow_from_ms = e->actual.flow_from_ms;
    o->flow_to_ms = e->actual.flow_to_ms;
    o->kv_bytes = e->actual.kv_bytes;
    o->hidden_fraction = e->actual.hidden_fraction;
    o->in_time = e->actual.in_time;
}

/* Fills in everything except the lists and the outcome. */
static void fill_explanation(Baton__AdminExplanation *x, const struct bt_explanation *e)
{
    baton__admin_explanation__init(x);
    x->id = (char *)e->id;
    x->wire_id = e->wire_id;
    x->epoch = e->epoch;
    x->received_ns = e->received_ns;
    x->planned_ns = e->planned_ns;
    x->prefill = (char *)e->prefill;
    x->decode = (char *)e->decode;
    x->tokens = e->n_tokens;
    x->cached_tokens = e->cached_tokens;
    x->choices = e->n_choices;
    x->planned = e->planned;
    x->both = e->both;
    x->draining = e->draining;
    x->reason = (char *)e->reason;
    x->meaning = (char *)e->meaning;
    x->again = (char *)e->again;
    x->ttft_ms = e->ttft_ms;
    x->tbt_ms = e->tbt_ms;
    x->queue_ms = e->queue_ms;
    x->prefill_ms = e->prefill_ms;
    x->fetch_tokens = e->fetch_tokens;
    x->candidates_total = e->n_candidates;
}

static void make_explanation(const struct bt_explanation *e, use_fn use, void *arg)
{
    Baton__AdminCandidate items[BT_EXPLAIN_CANDIDATES], *list[BT_EXPLAIN_CANDIDATES];
    Baton__AdminExplanation x;
    fill_explanation(&x, e);
    Baton__AdminOutcome outcome = BATON__ADMIN_OUTCOME__INIT;
    if (e->actual.over) {
        fill_outcome(&outcome, e);
        x.outcome = &outcome;
    }
    Baton__AdminSource source[BT_EXPLAIN_SOURCES], *sources[BT_EXPLAIN_SOURCES];
    x.sources = sources;
    for (; x.n_sources < e->n_sources; x.n_sources++) {
        Baton__AdminSource *s = sources[x.n_sources] = &source[x.n_sources];
        baton__admin_source__init(s);
        s->kvstore = (char *)e->sources[x.n_sources].name;
        s->blocks = e->sources[x.n_sources].blocks;
    }
    x.candidates = list;
    for (uint32_t i = 0; i < e->n_listed; i++) {
        const struct bt_sched_candidate *c = &e->candidates[i].c;
        baton__admin_candidate__init(&items[i]);
        items[i].worker = (char *)e->candidates[i].name;
        items[i].node = (char *)e->candidates[i].node;
        items[i].for_prefill = c->use == BT_SCHED_FOR_PREFILL;
        items[i].chosen = c->chosen;
        items[i].verdict = (char *)c->verdict;
        items[i].cached_tokens = c->cached_tokens;
        items[i].queue_ms = c->queue_ms;
        items[i].ttft_ms = c->ttft_ms;
        items[i].tbt_ms = c->tbt_ms;
        items[i].load = c->load;
        list[x.n_candidates++] = &items[i];
    }
    use(arg, &x.base);
}

/* NULL: why says that the request is not known (any more). */
static const struct bt_explanation *find_explanation(struct bt_admin *a, const char *id, char *why,
                                                     size_t cap)
{
    const struct bt_explanation *e = bt_requests_explain(a->rs, id[0] != '\0' ? id : NULL);
    if (e == NULL) {
        snprintf(why, cap, "%.100s%s", id,
                 id[0] != '\0' ? " is not among the last 128 requests that this conductor "
                                 "planned; give the \"id\" of the answer or req= of a log line, "
                                 "and name the conductor that served the request with --addr"
                               : "this conductor has not planned any request yet");
    }
    return e;
}

static void on_explain(void *arg, struct bt_rpc_call *call, const void *data, size_t len)
{
    struct bt_admin *a = arg;
    char why[320];
    Baton__AdminExplainRequest *q = bt_admin_explain_request_unpack(data, len, why, sizeof(why));
    if (q == NULL) {
        bt_rpc_call_reply(call, BT_GRPC_INVALID_ARGUMENT, why, NULL, 0);
        return;
    }
    bt_admin_gate_target(call, "%s", q->id);
    const struct bt_explanation *e = find_explanation(a, q->id, why, sizeof(why));
    if (e != NULL) {
        make_explanation(e, reply, call);
    } else {
        bt_rpc_call_reply(call, BT_GRPC_NOT_FOUND, why, NULL, 0);
    }
    baton__admin_explain_request__free_unpacked(q, NULL);
}

/* ---- the same as JSON, for the web page ---- */

#define PAGE_REQUESTS 500u /* open requests of one answer */
#define PAGE_RECENT   128u

static void make_recent(struct bt_admin *a, use_fn use, void *arg)
{
    Baton__AdminExplanation *items = bt_calloc(PAGE_RECENT, sizeof(*items));
    Baton__AdminOutcome *outcomes = bt_calloc(PAGE_RECENT, sizeof(*outcomes));
    Baton__AdminExplanation *list[PAGE_RECENT];
    Baton__AdminRecent r = BATON__ADMIN_RECENT__INIT;
    const struct bt_explanation *e;
    r.list = list;
    while (r.n_list < PAGE_RECENT && (e = bt_requests_recent(a->rs, (uint32_t)r.n_list)) != NULL) {
        Baton__AdminExplanation *x = list[r.n_list] = &items[r.n_list];
        fill_explanation(x, e);
        if (e->actual.over) {
            x->outcome = &outcomes[r.n_list];
            baton__admin_outcome__init(x->outcome);
            fill_outcome(x->outcome, e);
        }
        r.n_list++;
    }
    use(arg, &r.base);
    free(outcomes);
    free(items);
}

int bt_admin_page(void *arg, const char *what, struct bt_buf *out, char *why, size_t cap)
{
    static const char explain[] = "explain/";
    struct bt_admin *a = arg;
    if (strcmp(what, "status") == 0) {
        make_status(a, put_json, out);
        return 200;
    }
    if (strcmp(what, "requests") == 0) {
        bt_buf_puts(out, "{\"open\":");
        make_requests(a, PAGE_REQUESTS, put_json, out);
        bt_buf_puts(out, ",\"recent\":");
        make_recent(a, put_json, out);
        bt_buf_puts(out, "}");
        return 200;
    }
    if (strcmp(what, "history") == 0 && a->conf.history != NULL) {
        bt_history_make(a->conf.history, put_json, out);
        return 200;
    }
    if (strncmp(what, explain, strlen(explain)) != 0) {
        snprintf(why, cap, "there is no '%.64s'", what);
        return 404;
    }
    const struct bt_explanation *e = find_explanation(a, what + strlen(explain), why, cap);
    if (e == NULL) {
        return 404;
    }
    make_explanation(e, put_json, out);
    return 200;
}

/* ---- drain ---- */

struct drain_call { /* waits for etcd */
    struct bt_admin *a;
    struct bt_rpc_call *call;
    char *node;
    bool draining;
};

/* Returns whether there is a worker with its kvstore on a node that is not drained. A worker of
 * either role can do both phases. */
static bool others_could(struct bt_admin *a, const char *node)
{
    struct bt_view_snapshot v;
    bt_view_snapshot(a->view, NULL, 0, &v);
    for (uint32_t i = 0; i < v.snap.n_workers; i++) {
        if (v.workers[i].kvstore != BT_SCHED_NONE && !v.workers[i].draining &&
            strcmp(v.worker[i]->node, node) != 0) {
            return true;
        }
    }
    return false;
}

static void on_drain_written(void *arg, bt_status_t st, const char *refused)
{
    struct drain_call *d = arg;
    struct bt_admin *a = d->a;
    if (refused != NULL) {
        bt_rpc_call_reply(d->call, BT_GRPC_FAILED_PRECONDITION, refused, NULL, 0);
    } else if (st != BT_OK) {
        char why[256];
        snprintf(why, sizeof(why),
                 "etcd did not accept the change of node %.100s (%s), so nothing has changed; "
                 "check that etcd runs",
                 d->node, bt_status_name(st));
        bt_rpc_call_reply(d->call, BT_GRPC_FAILED_PRECONDITION, why, NULL, 0);
    } else {
        bt_view_node_set(a->view, d->node, d->draining); /* as the watch will do later */
        Baton__AdminDrain r = BATON__ADMIN_DRAIN__INIT;
        r.node = d->node;
        r.draining = d->draining;
        r.requests = bt_requests_on_node(a->rs, d->node);
        r.stays = d->draining && !others_could(a, d->node);
        size_t cap = 0;
        struct bt_list *l;
        bt_list_for_each (l, bt_view_sessions(a->view)) {
            cap++;
        }
        r.members = bt_calloc(cap + 1, sizeof(char *));
        bt_list_for_each (l, bt_view_sessions(a->view)) {
            const Baton__Member *m = BT_CONTAINER_OF(l, struct bt_session, link)->member;
            if (strcmp(m->node, d->node) == 0 && strcmp(m->kind, "conductor") != 0) {
                r.members[r.n_members++] = bt_sprintf("%s/%s", m->kind, m->name);
            }
        }
        bt_rpc_call_reply_pb(d->call, &r.base);
        for (size_t i = 0; i < r.n_members; i++) {
            free(r.members[i]);
        }
        free(r.members);
    }
    free(d->node);
    free(d);
}

/* True: the node can be drained or undrained. False: why says the reason and which nodes
 * there are. */
static bool node_known(struct bt_admin *a, const char *node, char *why, size_t cap)
{
    int n = snprintf(why, cap, "no worker or kvstore is on a node '%.64s'; there are:", node);
    struct bt_list *l;
    bt_list_for_each (l, bt_view_sessions(a->view)) {
        const struct bt_session *s = BT_CONTAINER_OF(l, struct bt_session, link);
        if (s->kind == BT_SESSION_OTHER) {
            continue;
        }
        if (strcmp(s->member->node, node) == 0) {
            return true;
        }
        char one[80];
        snprintf(one, sizeof(one), " %.70s", s->member->node);
        size_t len = strlen(one);
        const char *seen = strstr(why + n, one);
        bool whole = seen != NULL && (seen[len] == ' ' || seen[len] == '\0');
        if (!whole && strlen(why) + len < cap) {
            strcat(why, one);
        }
    }
    return bt_view_node_draining(a->view, node); /* a drained node's daemons may be gone by now */
}

static void drain(struct bt_admin *a, struct bt_rpc_call *call, const Baton__AdminDrainRequest *q)
{
    struct drain_call *d = bt_calloc(1, sizeof(*d));
    d->a = a;
    d->call = call;
    d->node = bt_strdup(q->node);
    d->draining = !q->undrain;
    if (d->draining) {
        bt_view_drain(a->view, d->node, q->force, on_drain_written, d);
    } else {
        bt_view_undrain(a->view, d->node, on_drain_written, d);
    }
}

static void on_drain(void *arg, struct bt_rpc_call *call, const void *data, size_t len)
{
    struct bt_admin *a = arg;
    char why[512];
    Baton__AdminDrainRequest *q = bt_admin_drain_request_unpack(data, len, why, sizeof(why));
    if (q != NULL) {
        bt_admin_gate_target(call, "node=%s%s%s", q->node, q->undrain ? " undrain" : "",
                             q->force ? " force" : "");
    }
    if (q == NULL) {
        bt_rpc_call_reply(call, BT_GRPC_INVALID_ARGUMENT, why, NULL, 0);
    } else if (q->node[0] == '\0' || strchr(q->node, '/') != NULL) {
        bt_rpc_call_reply(call, BT_GRPC_INVALID_ARGUMENT,
                          "drain needs the name of a node, as 'batonctl nodes' shows it", NULL, 0);
    } else if (!node_known(a, q->node, why, sizeof(why))) {
        bt_rpc_call_reply(call, BT_GRPC_NOT_FOUND, why, NULL, 0);
    } else {
        drain(a, call, q);
    }
    if (q != NULL) {
        baton__admin_drain_request__free_unpacked(q, NULL);
    }
}

struct bt_admin *bt_admin_create(struct bt_admin_gate *gate, struct bt_view *view,
                                 struct bt_requests *rs, const struct bt_admin_config *conf)
{
    struct bt_admin *a = bt_calloc(1, sizeof(*a));
    a->view = view;
    a->rs = rs;
    a->conf = *conf;
    bt_admin_gate_serve(gate, "Status", on_status, a);
    bt_admin_gate_serve(gate, "Blocks", on_blocks, a);
    bt_admin_gate_serve(gate, "Requests", on_requests, a);
    bt_admin_gate_serve(gate, "Explain", on_explain, a);
    bt_admin_gate_serve(gate, "Drain", on_drain, a);
    a->role = (struct bt_admin_role){.view = view, .rs = rs};
    bt_admin_role_register(gate, &a->role);
    return a;
}

void bt_admin_leave_view(struct bt_admin *a)
{
    a->conf.starting = NULL;
    a->view = NULL;
}

void bt_admin_destroy(struct bt_admin *a)
{
    free(a);
}
