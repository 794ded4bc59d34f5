/* batonctl status, nodes, blocks, version. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "admin.pb-c.h"
#include "common/base/base.h"
#include "common/base/sha256.h"
#include "common/etcd/roles.h"
#include "conductor/ctl/ctl.h"
#include "conductor/ctl/table.h"

Baton__AdminStatus *bt_ctl_status_of(const struct bt_ctl *c)
{
    const Baton__AdminStatusRequest q = BATON__ADMIN_STATUS_REQUEST__INIT;
    return bt_ctl_ask(c, "/baton.Admin/Status", &q.base, &baton__admin_status__descriptor);
}

static const char *member_state(const Baton__Member *m)
{
    switch (m->state) {
    case BATON__MEMBER_STATE__STARTING: return "starting";
    case BATON__MEMBER_STATE__READY: return "ready";
    case BATON__MEMBER_STATE__DRAINING: return "draining";
    case _BATON__MEMBER_STATE_IS_INT_SIZE:
    default: return "unknown";
    }
}

const char *bt_ctl_state_of(const Baton__AdminNode *n)
{
    return n->draining ? "draining" : member_state(n->member);
}

/* null: the worker reports nothing. */
static json_t *mixed_json(const Baton__MixedSteps *m)
{
    return m == NULL ? json_null()
                     : json_pack("{s:f,s:f}", "step_ms", m->step_ms, "gap_ms", m->gap_ms);
}

static json_t *load_json(const Baton__WorkerLoad *l)
{
    return l == NULL
               ? json_null()
               : json_pack("{s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:f,s:f,s:I,s:o}", "running",
                           (json_int_t)l->running, "waiting", (json_int_t)l->waiting, "pages_total",
                           (json_int_t)l->pages_total, "pages_free", (json_int_t)l->pages_free,
                           "slots_total", (json_int_t)l->slots_total, "slots_free",
                           (json_int_t)l->slots_free, "queued_prefill_tokens",
                           (json_int_t)l->queued_prefill_tokens, "prefill_tokens_per_s",
                           l->prefill_tokens_per_s, "step_ms", l->step_ms, "max_model_len",
                           (json_int_t)l->max_model_len, "mixed", mixed_json(l->mixed));
}

static json_t *pool_json(const Baton__PoolLoad *p)
{
    return p == NULL
               ? json_null()
               : json_pack("{s:I,s:I,s:I,s:I,s:I,s:I}", "slots_total", (json_int_t)p->slots_total,
                           "slots_free", (json_int_t)p->slots_free, "slots_writing",
                           (json_int_t)p->slots_writing, "slots_sealed",
                           (json_int_t)p->slots_sealed, "slots_quarantine",
                           (json_int_t)p->slots_quarantine, "leases", (json_int_t)p->leases);
}

/* null: not a worker, or (for next_role) the role does not change. */
static json_t *role_json(const char *kind, uint32_t role)
{
    bool worker = bt_roles_of_kind(kind) != 0;
    return worker && role != 0 ? json_string(bt_roles_name(role)) : json_null();
}

/* An older daemon does not report its model's name. */
static bool is_misnamed(const Baton__AdminStatus *s, const Baton__Member *m)
{
    return m->model[0] != '\0' && strcmp(m->model, s->model_id) != 0;
}

static json_t *misnamed_json(const Baton__AdminStatus *s)
{
    json_t *list = json_array();
    for (size_t i = 0; i < s->n_nodes; i++) {
        const Baton__Member *m = s->nodes[i]->member;
        if (is_misnamed(s, m)) {
            json_array_append_new(list, json_pack("{s:s,s:s,s:s,s:s}", "kind", m->kind, "name",
                                                  m->name, "node", m->node, "model", m->model));
        }
    }
    return list;
}

static void print_misnamed(const Baton__AdminStatus *s)
{
    size_t n = 0;
    for (size_t i = 0; i < s->n_nodes; i++) {
        n += is_misnamed(s, s->nodes[i]->member);
    }
    if (n != 0) {
        printf("warning    %zu member%s another name for the model; give all the same "
               "model.served_name:\n",
               n, n == 1 ? " has" : "s have");
    }
    for (size_t i = 0; i < s->n_nodes; i++) {
        const Baton__Member *m = s->nodes[i]->member;
        if (is_misnamed(s, m)) {
            printf("           %s %s on %s: %s\n", m->kind, m->name, m->node, m->model);
        }
    }
}

static json_t *node_json(const Baton__AdminNode *n)
{
    const Baton__Member *m = n->member;
    char incarnation[17];
    snprintf(incarnation, sizeof(incarnation), "%016" PRIx64, m->incarnation);
    return json_pack("{s:s,s:s,s:s,s:o,s:o,s:s,s:I,s:s,s:s,s:s,s:s,s:s,s:s,s:b,s:b,s:I,s:o,s:o}",
                     "kind", m->kind, "name", m->name, "node", m->node, "role",
                     role_json(m->kind, n->role), "next_role", role_json(m->kind, m->next_role),
                     "incarnation", incarnation, "pid", (json_int_t)m->pid, "rpc", m->rpc, "http",
                     m->http, "state", member_state(m), "version", m->version, "device", m->device,
                     "model", m->model, "draining", n->draining, "session_up", n->session_up,
                     "silence_ms", (json_int_t)n->silence_ms, "load", load_json(n->load), "pool",
                     pool_json(n->pool));
}

/* null: an older conductor does not report it. */
static json_t *scheduling_json(const Baton__AdminStatus *s)
{
    return s->policy[0] == '\0'
               ? json_null()
               : json_pack("{s:s,s:s,s:f,s:f,s:o}", "policy", s->policy, "admission", s->admission,
                           "ttft_objective_ms", s->ttft_objective_ms, "tbt_objective_ms",
                           s->tbt_objective_ms, "mixed", mixed_json(s->mixed));
}

static void print_ms(const char *what, double ms)
{
    if (ms > 0) {
        printf("%s %g ms", what, ms);
    } else {
        printf("%s none", what);
    }
}

static void print_scheduling(const Baton__AdminStatus *s)
{
    if (s->policy[0] == '\0') {
        return;
    }
    printf("scheduling %s, %s;", s->policy, s->admission);
    print_ms(" objectives: first token", s->ttft_objective_ms);
    print_ms(", between tokens", s->tbt_objective_ms);
    if (s->mixed != NULL && s->mixed->step_ms > 0) {
        printf("; prompts beside rows in steps of %g ms", s->mixed->step_ms);
    }
    putchar('\n');
}

static json_t *starting_json(const Baton__AdminStatus *s)
{
    json_t *list = json_array();
    for (size_t i = 0; i < s->n_starting; i++) {
        const Baton__Starting *x = s->starting[i];
        json_array_append_new(list, json_pack("{s:s,s:s,s:s,s:s,s:s,s:I}", "kind", x->kind, "name",
                                              x->name, "node", x->node, "http", x->http, "what",
                                              x->what, "percent", (json_int_t)x->percent));
    }
    return list;
}

int bt_ctl_status(const struct bt_ctl *c)
{
    Baton__AdminStatus *s = bt_ctl_status_of(c);
    if (s == NULL) {
        return 1;
    }
    int rc = 0;
    if (c->json) {
        rc = bt_ctl_print_json(json_pack(
            "{s:s,s:s,s:s,s:s,s:b,s:s,s:I,s:I,s:I,s:I,s:I,s:o,s:o,s:o}", "cluster", s->cluster,
            "conductor", s->conductor, "version", s->version, "model_id", s->model_id, "serving",
            s->serving, "reason", s->reason, "requests_running", (json_int_t)s->requests_running,
            "requests_waiting", (json_int_t)s->requests_waiting, "requests_total",
            (json_int_t)s->requests_total, "replanned_total", (json_int_t)s->replanned_total,
            "nodes", (json_int_t)s->n_nodes, "misnamed", misnamed_json(s), "scheduling",
            scheduling_json(s), "starting", starting_json(s)));
    } else {
        printf("cluster    %s\nconductor  %s (%s)\nmodel      %s\nserving    %s%s%s\n"
               "requests   %u running, %u waiting, %" PRIu64 " in all, %" PRIu64 " re-planned\n"
               "members    %zu\n",
               s->cluster, s->conductor, c->addr, s->model_id, s->serving ? "yes" : "no",
               s->reason[0] != '\0' ? ": " : "", s->reason, s->requests_running,
               s->requests_waiting, s->requests_total, s->replanned_total, s->n_nodes);
        if (s->n_starting != 0) {
            printf("starting   %zu; 'batonctl nodes' shows how far they are\n", s->n_starting);
        }
        print_scheduling(s);
        print_misnamed(s);
    }
    baton__admin_status__free_unpacked(s, NULL);
    return rc;
}

static void role_cell(struct bt_ctl_table *t, const Baton__AdminNode *n)
{
    const Baton__Member *m = n->member;
    if (bt_roles_of_kind(m->kind) == 0) {
        bt_ctl_table_cell(t, "-");
    } else if (m->next_role != 0) {
        bt_ctl_table_cell(t, "%s>%s", bt_roles_name(n->role), bt_roles_name(m->next_role));
    } else {
        bt_ctl_table_cell(t, "%s", bt_roles_name(n->role));
    }
}

/* The limits of mixed steps in force at a worker. */
static void mixed_cell(struct bt_ctl_table *t, const Baton__MixedSteps *m)
{
    if (m == NULL || !(m->step_ms > 0)) {
        bt_ctl_table_cell(t, "-");
    } else {
        bt_ctl_table_cell(t, "%g ms", m->step_ms);
    }
}

size_t bt_ctl_print_starting(const Baton__AdminStatus *s)
{
    static const char *const head[] = {"STARTING", "NAME", "NODE", "HTTP", "DONE", "WHAT"};
    struct bt_ctl_table t;
    size_t n = s->n_starting;
    if (n == 0) {
        return 0;
    }
    bt_ctl_table_init(&t, head, BT_ARRAY_LEN(head));
    for (size_t i = 0; i < n; i++) {
        const Baton__Starting *x = s->starting[i];
        bt_ctl_table_cell(&t, "%s", x->kind);
        bt_ctl_table_cell(&t, "%s", x->name);
        bt_ctl_table_cell(&t, "%s", x->node);
        bt_ctl_table_cell(&t, "%s", x->http);
        bt_ctl_table_cell(&t, "%u%%", x->percent);
        bt_ctl_table_cell(&t, "%s", x->what);
    }
    putchar('\n');
    bt_ctl_table_print(&t, stdout);
    bt_ctl_table_cleanup(&t);
    return n + 2;
}

static int kind_rank(const char *kind)
{
    static const char *const kinds[] = {"conductor", "prefill", "decode", "kvstore"};
    int i = 0;
    while (i < (int)BT_ARRAY_LEN(kinds) && strcmp(kinds[i], kind) != 0) {
        i++;
    }
    return i;
}

static int compare_nodes(const void *a, const void *b)
{
    const Baton__Member *x = (*(Baton__AdminNode *const *)a)->member,
                        *y = (*(Baton__AdminNode *const *)b)->member;
    int by = kind_rank(x->kind) - kind_rank(y->kind);
    by = by != 0 ? by : strverscmp(x->node, y->node);
    return by != 0 ? by : strverscmp(x->name, y->name);
}

void bt_ctl_sort_nodes(Baton__AdminStatus *s)
{
    qsort(s->nodes, s->n_nodes, sizeof(*s->nodes), compare_nodes);
}

static void node_row(struct bt_ctl_table *t, const Baton__AdminNode *n)
{
    const Baton__Member *m = n->member;
    bool dialled = strcmp(m->kind, "conductor") != 0;
    bt_ctl_table_cell(t, "%s", m->kind);
    bt_ctl_table_cell(t, "%s", m->name);
    bt_ctl_table_cell(t, "%s", m->node);
    role_cell(t, n);
    bt_ctl_table_cell(t, "%s", bt_ctl_state_of(n));
    bt_ctl_table_cell(t, "%s", !dialled ? "-" : n->session_up ? "up" : "down");
    bt_ctl_table_cell(t, "%s", m->rpc);
    bt_ctl_table_cell(t, "%s", m->http);
    if (n->load != NULL) {
        bt_ctl_table_cell(t, "%u+%u", n->load->running, n->load->waiting);
        bt_ctl_table_cell(t, "%u/%u pages", n->load->pages_free, n->load->pages_total);
        mixed_cell(t, n->load->mixed);
    } else if (n->pool != NULL) {
        bt_ctl_table_cell(t, "%u sealed", n->pool->slots_sealed);
        bt_ctl_table_cell(t, "%u/%u slots", n->pool->slots_free, n->pool->slots_total);
        bt_ctl_table_cell(t, "-");
    } else {
        bt_ctl_table_cell(t, "-");
        bt_ctl_table_cell(t, "-");
        bt_ctl_table_cell(t, "-");
    }
}

int bt_ctl_nodes(const struct bt_ctl *c)
{
    Baton__AdminStatus *s = bt_ctl_status_of(c);
    if (s == NULL) {
        return 1;
    }
    int rc = 0;
    bt_ctl_sort_nodes(s);
    if (c->json) {
        json_t *list = json_array();
        for (size_t i = 0; i < s->n_nodes; i++) {
            json_array_append_new(list, node_json(s->nodes[i]));
        }
        rc = bt_ctl_print_json(list);
    } else {
        static const char *const head[] = {"KIND", "NAME", "NODE", "ROLE", "STATE", "SESSION",
                                           "RPC",  "HTTP", "BUSY", "FREE", "MIXED"};
        struct bt_ctl_table t;
        bt_ctl_table_init(&t, head, BT_ARRAY_LEN(head));
        for (size_t i = 0; i < s->n_nodes; i++) {
            node_row(&t, s->nodes[i]);
        }
        rc = bt_ctl_print_table(c, &t);
        (void)bt_ctl_print_starting(s);
    }
    baton__admin_status__free_unpacked(s, NULL);
    return rc;
}

static json_t *blocks_json(const Baton__AdminBlocks *b)
{
    json_t *list = json_array();
    for (size_t i = 0; i < b->n_list; i++) {
        char key[65] = "";
        if (b->list[i]->key.len <= 32) {
            bt_hex(b->list[i]->key.data, b->list[i]->key.len, key);
        }
        json_t *at = json_array();
        for (size_t k = 0; k < b->list[i]->n_kvstores; k++) {
            json_array_append_new(at, json_string(b->list[i]->kvstores[k]));
        }
        json_array_append_new(list, json_pack("{s:s,s:I,s:o}", "key", key, "depth",
                                              (json_int_t)b->list[i]->depth, "kvstores", at));
    }
    return json_pack("{s:I,s:I,s:I,s:o}", "blocks", (json_int_t)b->blocks, "replicas",
                     (json_int_t)b->replicas, "block_tokens", (json_int_t)b->block_tokens, "list",
                     list);
}

static int blocks_table(const struct bt_ctl *c, const Baton__AdminBlocks *b)
{
    printf("%" PRIu64 " blocks of %u tokens, %" PRIu64 " replicas\n", b->blocks, b->block_tokens,
           b->replicas);
    if (b->n_list == 0) {
        return 0;
    }
    static const char *const head[] = {"KEY", "DEPTH", "KVSTORES"};
    struct bt_ctl_table t;
    bt_ctl_table_init(&t, head, BT_ARRAY_LEN(head));
    for (size_t i = 0; i < b->n_list; i++) {
        char key[65] = "";
        if (b->list[i]->key.len <= 32) {
            bt_hex(b->list[i]->key.data, b->list[i]->key.len, key);
        }
        char at[512] = "";
        for (size_t k = 0; k < b->list[i]->n_kvstores; k++) {
            size_t used = strlen(at);
            snprintf(at + used, sizeof(at) - used, "%s%s", k != 0 ? " " : "",
                     b->list[i]->kvstores[k]);
        }
        bt_ctl_table_cell(&t, "%.16s", key);
        bt_ctl_table_cell(&t, "%u", b->list[i]->depth);
        bt_ctl_table_cell(&t, "%s", at);
    }
    int rc = bt_ctl_print_table(c, &t);
    if (b->n_list < b->blocks) {
        printf("(%zu of %" PRIu64 " shown; --limit N shows more)\n", b->n_list, b->blocks);
    }
    return rc;
}

int bt_ctl_blocks(const struct bt_ctl *c)
{
    Baton__AdminBlocksRequest q = BATON__ADMIN_BLOCKS_REQUEST__INIT;
    q.limit = c->limit;
    Baton__AdminBlocks *b =
        bt_ctl_ask(c, "/baton.Admin/Blocks", &q.base, &baton__admin_blocks__descriptor);
    if (b == NULL) {
        return 1;
    }
    int rc = 0;
    if (c->json) {
        rc = bt_ctl_print_json(blocks_json(b));
    } else {
        rc = blocks_table(c, b);
    }
    baton__admin_blocks__free_unpacked(b, NULL);
    return rc;
}

int bt_ctl_version(const struct bt_ctl *c)
{
    Baton__AdminStatus *s = bt_ctl_status_of(c);
    if (s == NULL) {
        if (!c->json) {
            printf("batonctl   %s\n", bt_version());
        }
        return 1;
    }
    int rc = 0;
    if (c->json) {
        rc = bt_ctl_print_json(
            json_pack("{s:s,s:s}", "batonctl", bt_version(), "conductor", s->version));
    } else {
        printf("batonctl   %s\nconductor  %s\n", bt_version(), s->version);
    }
    baton__admin_status__free_unpacked(s, NULL);
    return rc;
}
