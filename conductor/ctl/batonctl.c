/* batonctl: asks a conductor's Admin service and prints tables or JSON. Each run makes one blocking
 * call. Exit status: 0 ok, 1 failed (the message says what failed and what helps), 2 usage. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "admin.pb-c.h"
#include "common/base/base.h"
#include "common/base/sha256.h"
#include "common/conf/conf.h"
#include "common/etcd/roles.h"
#include "conductor/ctl/ctl.h"
#include "conductor/ctl/table.h"
#include "conductor/ctl/where.h"

#define BLOCKS_LIMIT 50

static const char usage_text[] =
    "usage: batonctl [--addr HOST:PORT | --dir STATE] [--tls DIR] COMMAND [ARGUMENTS]\n"
    "                [-o json] [--limit N]\n"
    "\n"
    "Commands:\n"
    "  status    does the cluster serve, and what is it doing\n"
    "  nodes     every member: role, node, session, load, pool\n"
    "  blocks    the conductor's index of KV blocks (--limit N, default 50)\n"
    "  requests  open requests: state, age, tokens, workers, epoch\n"
    "            (--limit N, default 50)\n"
    "  explain   REQUEST_ID or --last: why it ran where it did, and which other\n"
    "            workers were considered\n"
    "  drain     NODE: plan nothing more on it and move its requests elsewhere\n"
    "  undrain   NODE: use it again\n"
    "  role      WORKER prefill|decode|both|own: change the role of a running\n"
    "            worker (own: the one it was started with); no request is lost\n"
    "  pin       protect a prompt's cached blocks from eviction for a time, on\n"
    "            every node\n"
    "  unpin     PIN_ID: end a pin\n"
    "  pins      what is pinned, for how long, and where it is protected\n"
    "  version   versions of batonctl and of the conductor\n"
    "\n"
    "Options:\n"
    "  --addr HOST:PORT  gRPC address of a conductor; otherwise --dir, then the\n"
    "                    environment's BATON_ADDR, then the default --dir\n"
    "  --dir STATE       state directory of a local cluster, which has its address\n"
    "                    and certificates (${XDG_RUNTIME_DIR:-/tmp}/baton-UID)\n"
    "  --tls DIR         ca.crt, admin.crt and admin.key in DIR are the cluster's CA\n"
    "                    and the certificate to show; otherwise BATON_TLS, then the\n"
    "                    local cluster's tls/\n"
    "  --force           with drain and role: even if it is the last worker with\n"
    "                    that role\n"
    "  -o, --output json|table\n"
    "  -h, --help; --version\n"
    "\n"
    "Options of pin (one of the first five, and --ttl):\n"
    "  --prompt TEXT; --prompt-file FILE   a prompt as of /v1/completions\n"
    "                                      (-: standard input)\n"
    "  --tokens-file FILE                  its token ids\n"
    "  --chat-file FILE                    messages as of /v1/chat/completions, JSON\n"
    "  --request REQUEST_ID                the prompt of one of the conductor's last\n"
    "                                      requests\n"
    "  --ttl TIME                          90s, 30m, 1h, 7d; a second pin of the same\n"
    "                                      blocks sets a new time\n"
    "  --tenant NAME; --api-key-file FILE  the tenant whose cache has the prompt\n"
    "                                      (only if the conductor asks for API keys)\n"
    "  --cache-salt TEXT                   the cache_salt of the requests that use it\n"
    "  --label TEXT                        for people who read 'batonctl pins'\n"
    "\n"
    "Exit status: 0 ok, 1 failed, 2 usage.\n";

int bt_ctl_usage(const char *what, const char *arg)
{
    fprintf(stderr, "batonctl: %s%s%s\nTry 'batonctl --help'.\n", what, arg != NULL ? ": " : "",
            arg != NULL ? arg : "");
    return 2;
}

static Baton__AdminStatus *get_status(const struct bt_ctl *c)
{
    const Baton__AdminStatusRequest q = BATON__ADMIN_STATUS_REQUEST__INIT;
    return bt_ctl_ask(c, "/baton.Admin/Status", &q.base, &baton__admin_status__descriptor);
}

/* ---- output ---- */

int bt_ctl_print_json(json_t *j)
{
    int rc = json_dumpf(j, stdout, JSON_INDENT(1) | JSON_PRESERVE_ORDER);
    putchar('\n');
    json_decref(j);
    return rc == 0 ? 0 : 1;
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

static int cmd_status(const struct bt_ctl *c)
{
    Baton__AdminStatus *s = get_status(c);
    if (s == NULL) {
        return 1;
    }
    int rc = 0;
    if (c->json) {
        rc = bt_ctl_print_json(json_pack(
            "{s:s,s:s,s:s,s:s,s:b,s:s,s:I,s:I,s:I,s:I,s:I,s:o,s:o}", "cluster", s->cluster,
            "conductor", s->conductor, "version", s->version, "model_id", s->model_id, "serving",
            s->serving, "reason", s->reason, "requests_running", (json_int_t)s->requests_running,
            "requests_waiting", (json_int_t)s->requests_waiting, "requests_total",
            (json_int_t)s->requests_total, "replanned_total", (json_int_t)s->replanned_total,
            "nodes", (json_int_t)s->n_nodes, "misnamed", misnamed_json(s), "scheduling",
            scheduling_json(s)));
    } else {
        printf("cluster    %s\nconductor  %s (%s)\nmodel      %s\nserving    %s%s%s\n"
               "requests   %u running, %u waiting, %" PRIu64 " in all, %" PRIu64 " re-planned\n"
               "members    %zu\n",
               s->cluster, s->conductor, c->addr, s->model_id, s->serving ? "yes" : "no",
               s->reason[0] != '\0' ? ": " : "", s->reason, s->requests_running,
               s->requests_waiting, s->requests_total, s->replanned_total, s->n_nodes);
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

static void node_row(struct bt_ctl_table *t, const Baton__AdminNode *n)
{
    const Baton__Member *m = n->member;
    bool dialled = strcmp(m->kind, "conductor") != 0;
    bt_ctl_table_cell(t, "%s", m->kind);
    bt_ctl_table_cell(t, "%s", m->name);
    bt_ctl_table_cell(t, "%s", m->node);
    role_cell(t, n);
    bt_ctl_table_cell(t, "%s", n->draining ? "draining" : member_state(m));
    bt_ctl_table_cell(t, "%s", !dialled ? "-" : n->session_up ? "up" : "down");
    bt_ctl_table_cell(t, "%s", m->rpc);
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

static int cmd_nodes(const struct bt_ctl *c)
{
    Baton__AdminStatus *s = get_status(c);
    if (s == NULL) {
        return 1;
    }
    int rc = 0;
    if (c->json) {
        json_t *list = json_array();
        for (size_t i = 0; i < s->n_nodes; i++) {
            json_array_append_new(list, node_json(s->nodes[i]));
        }
        rc = bt_ctl_print_json(list);
    } else {
        static const char *const head[] = {"KIND",    "NAME", "NODE", "ROLE", "STATE",
                                           "SESSION", "RPC",  "BUSY", "FREE", "MIXED"};
        struct bt_ctl_table t;
        bt_ctl_table_init(&t, head, BT_ARRAY_LEN(head));
        for (size_t i = 0; i < s->n_nodes; i++) {
            node_row(&t, s->nodes[i]);
        }
        bt_ctl_table_print(&t, stdout);
        bt_ctl_table_cleanup(&t);
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

static void blocks_table(const Baton__AdminBlocks *b)
{
    printf("%" PRIu64 " blocks of %u tokens, %" PRIu64 " replicas\n", b->blocks, b->block_tokens,
           b->replicas);
    if (b->n_list == 0) {
        return;
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
    bt_ctl_table_print(&t, stdout);
    bt_ctl_table_cleanup(&t);
    if (b->n_list < b->blocks) {
        printf("(%zu of %" PRIu64 " shown; --limit N shows more)\n", b->n_list, b->blocks);
    }
}

static int cmd_blocks(const struct bt_ctl *c)
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
        blocks_table(b);
    }
    baton__admin_blocks__free_unpacked(b, NULL);
    return rc;
}

static int cmd_version(const struct bt_ctl *c)
{
    Baton__AdminStatus *s = get_status(c);
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

/* ---- command line ---- */

const char *bt_ctl_option_value(int argc, char **argv, int *i, const char *name)
{
    size_t n = strlen(name);
    if (strncmp(argv[*i], name, n) == 0 && argv[*i][n] == '=') {
        return argv[*i] + n + 1;
    }
    return *i + 1 < argc ? argv[++*i] : NULL;
}

bool bt_ctl_is_option(const char *arg, const char *name)
{
    size_t n = strlen(name);
    return strncmp(arg, name, n) == 0 && (arg[n] == '\0' || (n > 2 && arg[n] == '='));
}

/* 0: continue; otherwise exit with the returned value - 1. */
static int parse_option(struct bt_ctl *c, int argc, char **argv, int *i)
{
    const char *arg = argv[*i], *v;
    if (bt_ctl_is_option(arg, "--addr")) {
        v = bt_ctl_option_value(argc, argv, i, "--addr");
        if (v == NULL || strchr(v, ':') == NULL || strlen(v) >= sizeof(c->addr)) {
            return bt_ctl_usage("--addr needs HOST:PORT", v) + 1;
        }
        snprintf(c->addr, sizeof(c->addr), "%s", v);
        return 0;
    }
    if (bt_ctl_is_option(arg, "--dir")) {
        c->state_dir = bt_ctl_option_value(argc, argv, i, "--dir");
        return c->state_dir != NULL ? 0 : bt_ctl_usage("--dir needs a folder", NULL) + 1;
    }
    if (bt_ctl_is_option(arg, "--tls")) {
        c->tls_dir = bt_ctl_option_value(argc, argv, i, "--tls");
        return c->tls_dir != NULL ? 0 : bt_ctl_usage("--tls needs a folder", NULL) + 1;
    }
    if (bt_ctl_is_option(arg, "-o") || bt_ctl_is_option(arg, "--output")) {
        v = bt_ctl_option_value(argc, argv, i, arg[1] == 'o' ? "-o" : "--output");
        if (v == NULL || (strcmp(v, "json") != 0 && strcmp(v, "table") != 0)) {
            return bt_ctl_usage("-o needs json or table", v) + 1;
        }
        c->json = strcmp(v, "json") == 0;
        return 0;
    }
    if (bt_ctl_is_option(arg, "--limit")) {
        v = bt_ctl_option_value(argc, argv, i, "--limit");
        char *end = NULL;
        unsigned long n = v != NULL ? strtoul(v, &end, 10) : 0;
        if (v == NULL || v[0] < '0' || v[0] > '9' || *end != '\0' || n > 10000) {
            return bt_ctl_usage("--limit needs a number from 0 to 10000", v) + 1;
        }
        c->limit = (uint32_t)n;
        return 0;
    }
    if (strcmp(arg, "--force") == 0) {
        c->force = true;
        return 0;
    }
    if (strcmp(arg, "--last") == 0) {
        c->last = true;
        return 0;
    }
    int leave = bt_ctl_pin_option(c, argc, argv, i);
    return leave >= 0 ? leave : bt_ctl_usage("unknown option", arg) + 1;
}

static int command(int argc, char **argv)
{
    static const struct {
        const char *name;
        int (*run)(const struct bt_ctl *c);
        const char *arg; /* name of its argument; NULL: none */
        const char *arg2;
    } commands[] = {
        {"status", cmd_status, NULL, NULL},        {"nodes", cmd_nodes, NULL, NULL},
        {"blocks", cmd_blocks, NULL, NULL},        {"version", cmd_version, NULL, NULL},
        {"requests", bt_ctl_requests, NULL, NULL}, {"explain", bt_ctl_explain, "REQUEST_ID", NULL},
        {"drain", bt_ctl_drain, "NODE", NULL},     {"undrain", bt_ctl_undrain, "NODE", NULL},
        {"role", bt_ctl_role, "WORKER", "ROLE"},   {"pin", bt_ctl_pin, NULL, NULL},
        {"unpin", bt_ctl_unpin, "PIN_ID", NULL},   {"pins", bt_ctl_pins, NULL, NULL}};
    struct bt_ctl c = {.limit = BLOCKS_LIMIT};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "-h") == 0 || strcmp(argv[i], "--help") == 0) {
            fputs(usage_text, stdout);
            return 0;
        }
        if (strcmp(argv[i], "--version") == 0) {
            printf("batonctl %s\n", bt_version());
            return 0;
        }
        if (argv[i][0] == '-') {
            int leave = parse_option(&c, argc, argv, &i);
            if (leave != 0) {
                return leave - 1;
            }
        } else if (c.command != NULL && c.arg2 != NULL) {
            return bt_ctl_usage("unexpected argument after the command and its arguments", argv[i]);
        } else if (c.command != NULL && c.arg != NULL) {
            c.arg2 = argv[i];
        } else if (c.command != NULL) {
            c.arg = argv[i];
        } else {
            c.command = argv[i];
        }
    }
    if (c.command == NULL || strcmp(c.command, "help") == 0) {
        fputs(usage_text, c.command == NULL ? stderr : stdout);
        return c.command == NULL ? 2 : 0;
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(commands); i++) {
        if (strcmp(commands[i].name, c.command) != 0) {
            continue;
        }
        bool last = c.last && commands[i].run == bt_ctl_explain;
        if (c.arg != NULL && (commands[i].arg == NULL || last)) {
            return bt_ctl_usage("this command takes no such argument", c.arg);
        }
        if (c.arg2 != NULL && commands[i].arg2 == NULL) {
            return bt_ctl_usage("this command takes no such argument", c.arg2);
        }
        if (c.last && !last) {
            return bt_ctl_usage("--last is an option of explain, not of this command", c.command);
        }
        if (c.force && commands[i].run != bt_ctl_drain && commands[i].run != bt_ctl_role) {
            return bt_ctl_usage("--force is an option of drain and role, not of this command",
                                c.command);
        }
        if (c.pin.given != NULL && commands[i].run != bt_ctl_pin) {
            return bt_ctl_usage("this option works only with pin", c.pin.given);
        }
        bool empty = c.arg == NULL || c.arg[0] == '\0'; /* "$ID" in a script that has no id */
        if (empty && commands[i].arg != NULL && !last) {
            return bt_ctl_usage("this command needs an argument", commands[i].arg);
        }
        if (c.arg2 == NULL && commands[i].arg2 != NULL) {
            return bt_ctl_usage("this command needs a second argument", commands[i].arg2);
        }
        int rc = bt_ctl_find_conductor(&c) ? commands[i].run(&c) : 1;
        bt_tls_release(c.tls);
        return rc;
    }
    return bt_ctl_usage("unknown command", c.command);
}

int main(int argc, char **argv)
{
    return bt_end_of_output("batonctl", command(argc, argv));
}
