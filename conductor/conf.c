/* The configuration table of baton-conductor. */
#include "conductor/conf.h"

#include <stdio.h>
#include <string.h>

#include "common/engine/model_config.h"
#include "common/policy/sched/sched.h"
#include "common/token/token.h"
#include "common/trace/trace.h"
#include "conductor/front/front.h"
#include "conductor/sched_conf.h"

#define ROW(member) offsetof(struct bt_conductor_conf, member)

static const struct bt_conf_row rows[] = {
    {.key = "conductor.name",
     .type = BT_CONF_STR,
     .offset = ROW(name),
     .doc = "Name in the cluster. Default: conductor-<node.id>.",
     .when = "when two conductors run on one node."},
    {.key = "conductor.http.listen",
     .type = BT_CONF_ADDR,
     .offset = ROW(http.listen),
     .def = "127.0.0.1:8000",
     .doc = "host:port of the OpenAI API, /health and /metrics; port 0 takes any free one.",
     .when = "set 0.0.0.0:8000, or the address of the proxy's side, when clients are on other "
             "machines."},
    {.key = "conductor.http.body_max",
     .type = BT_CONF_SIZE,
     .offset = ROW(http.body_max),
     .def = "4MiB",
     .min = 1024,
     .max = 1 << 30,
     .doc = "Largest request body; a larger one gets 413. All bodies together may have four "
            "times as much, at least 256MiB; more gets 503.",
     .when = "raise it when clients send prompts of more than a million tokens, or many prompts "
             "at once."},
    {.key = "conductor.http.conns_max",
     .type = BT_CONF_INT,
     .offset = ROW(http.conns_max),
     .def = "4096",
     .min = 1,
     .max = 1000000,
     .doc = "Connections at once; more get 503, and 429 where one client has more than its "
            "share.",
     .when = "raise it, and the limit of open files, when more clients stay connected."},
    {.key = "conductor.http.answers_max",
     .type = BT_CONF_SIZE,
     .offset = ROW(http.answers_max),
     .def = "512MiB",
     .min = 16 << 20,
     .max = 1ll << 40,
     .doc = "Memory for answers until clients have read them: generated text, logprobs of "
            "prompts. A quarter is for unsent output; beyond it the slowest reader is cut off. "
            "When the rest is used up, new requests get 503.",
     .when = "raise it when clients ask for logprobs of long prompts; lower it on a host with "
             "less than 4 GiB."},
    {.key = "conductor.http.allowed_origins",
     .type = BT_CONF_STR,
     .offset = ROW(http.allowed_origins),
     .def = "*",
     .doc = "Origins (scheme://host[:port], separated by commas) whose pages may use the API "
            "from a browser. *: any; empty: none.",
     .when = "set your pages' origins, or nothing, when the API has no keys and browsers reach "
             "it."},
    {.key = "conductor.http.tls",
     .type = BT_CONF_STR,
     .offset = ROW(http.tls),
     .doc = "Directory with tls.crt and tls.key (PEM, the key with mode 0600 or 0640): clients use "
            "HTTPS. With client-ca.crt in it, every client needs a certificate of that CA that "
            "revoked.txt, if it is there, does not list. Replaced files are read within seconds.",
     .when = "set it when clients are on other machines and no proxy does TLS for them."},
    {.key = "conductor.api_keys_file",
     .type = BT_CONF_STR,
     .offset = ROW(api_keys_file),
     .doc = "File of API keys, one a line: digests (batonctl key add) with their scopes, end, "
            "tenant and limits; mode 0600 or 0640. Read again within seconds. With it, requests, "
            "/metrics and batonctl need a key; docs/OPERATING.md explains the lines.",
     .when = "set it when more than one client uses the cluster."},
    {.key = "conductor.answer_form",
     .type = BT_CONF_STR,
     .offset = ROW(answer_form),
     .def = "auto",
     .doc = "How the model writes tool calls and reasoning. auto: as its chat template does; none: "
            "answers are one text; or a form of calls (hermes, llama3, mistral, mistral-list, "
            "deepseek-v3, deepseek-v3.1, kimi, qwen-xml, glm-xml), one of reasoning (think, "
            "think-brackets, think-triangles, think-seed), or both with a comma between them.",
     .when = "when calls or reasoning of a model appear in its text."},
    {.key = "conductor.access_log",
     .type = BT_CONF_STR,
     .offset = ROW(access_log),
     .def = "off",
     .doc = "Which HTTP responses get a line ev=access in the log: off, all, or a random share "
            "(above 0, below 1) and all of status 5xx. The lines name client addresses.",
     .when = "when you must be able to find out later who sent which request."},
    {.key = "conductor.max_running",
     .type = BT_CONF_INT,
     .offset = ROW(max_running),
     .def = "1024",
     .min = 1,
     .max = 1000000,
     .doc = "Requests that workers have at once; more wait.",
     .when = "raise it when all workers together have more than 1024 places (engine.max_slots)."},
    {.key = "conductor.max_waiting",
     .type = BT_CONF_INT,
     .offset = ROW(max_waiting),
     .def = "1024",
     .min = 0,
     .max = 1000000,
     .doc = "Requests (each prompt is one) that may wait for a place or for KV memory; more "
            "get 429. One tenant may have at most half of them.",
     .when = "lower it when clients would rather have 429 at once than wait."},
    {.key = "conductor.queue_timeout_ms",
     .type = BT_CONF_MS,
     .offset = ROW(queue_timeout_ms),
     .def = "60s",
     .max = 86400000,
     .doc = "How long a request may wait for a place or for KV memory before it gets 503. 0: no "
            "limit.",
     .when = "set it to what your clients wait at most."},
    {.key = "conductor.stall_ms",
     .type = BT_CONF_MS,
     .offset = ROW(stall_ms),
     .def = "10s",
     .min = 100,
     .max = 86400000,
     .hidden = true,
     .doc = "A worker that finishes nothing for this time, and for longer than predicted, counts "
            "as hanging: its requests are planned again. 10 s is far above any step and below a "
            "client's patience."},
    {.key = "conductor.request_timeout_ms",
     .type = BT_CONF_MS,
     .offset = ROW(request_timeout_ms),
     .def = "0",
     .max = 86400000,
     .doc = "Time limit of a request; then it gets 504. 0: none.",
     .when = "when a request that runs away must end, whatever the client does."},
    {.key = "conductor.drain_ms",
     .type = BT_CONF_MS,
     .offset = ROW(drain_ms),
     .def = "30s",
     .max = 86400000,
     .doc = "After SIGTERM and conductor.drain_grace_ms, open requests have this time to finish.",
     .when = "set it to the longest answer you want to finish; raise the unit's TimeoutStopSec= "
             "with it."},
    {.key = "conductor.drain_grace_ms",
     .type = BT_CONF_MS,
     .offset = ROW(drain_grace_ms),
     .def = "5s",
     .max = 3600000,
     .doc = "After SIGTERM the conductor serves as before for this time, but /health says 503, "
            "so that load balancers stop using it before it refuses connections.",
     .when = "set it to the time in which your load balancer's checks fail; 0 without one."},
    {.key = "conductor.index_blocks",
     .type = BT_CONF_INT,
     .offset = ROW(index_blocks),
     .def = "1048576",
     .min = 1024,
     .max = 1e9,
     .doc = "Size of the index of cached prefixes, in entries of 32 bytes. An entry stands for one "
            "block; in an index of more than 4194304 entries, for 512 tokens in a row. A prefix "
            "that does not fit is computed again.",
     .when = "raise it when baton_index_refused_total rises."},
    {.key = "model.max_len",
     .type = BT_CONF_INT,
     .offset = ROW(max_model_len),
     .def = "0",
     .min = 0,
     .max = 100000000,
     .doc = "Tokens of prompt and answer together, at most the model's own limit. 0: that limit.",
     .when = "lower it when longer requests than you want to serve come in."},
    {.key = "sched.policy",
     .type = BT_CONF_STR,
     .offset = ROW(policy),
     .def = "baton",
     .reload = true,
     .doc = "How workers are chosen. baton: where the first token is predicted earliest, with "
            "a prefix fetched from other nodes or beside a decode worker's rows if that is "
            "faster. For comparison: kvcache (Mooncake's Algorithm 1), cache-aware (where the "
            "prefix is), random, round-robin, least-load.",
     .when = "only to compare policies."},
    {.key = "sched.admission",
     .type = BT_CONF_STR,
     .offset = ROW(admission),
     .def = "priced",
     .reload = true,
     .doc = "Which requests are refused because they would miss an objective: none; early (by "
            "the load at arrival); predict (by the load expected at the end of the prefill); "
            "priced (as predict; while prefill workers have a queue, only shorter prefills are "
            "admitted: the longer the queue, the shorter).",
     .when = "set none when your clients prefer a late answer to 429."},
    {.key = "sched.ttft_objective_ms",
     .type = BT_CONF_MS,
     .offset = ROW(ttft_objective_ms),
     .def = "0",
     .max = 86400000,
     .reload = true,
     .doc = "A request whose predicted time to first token is longer gets 429. 0: none. The "
            "header x-slo-ttft-ms replaces it.",
     .when = "set the longest wait for a first token that your clients accept."},
    {.key = "sched.tbt_objective_ms",
     .type = BT_CONF_MS,
     .offset = ROW(tbt_objective_ms),
     .def = "0",
     .max = 86400000,
     .reload = true,
     .doc = "A request whose predicted time between tokens (mean of the longest tenth) is "
            "longer gets 429. Decode workers take prompts beside their rows within it. 0: "
            "none. The header x-slo-tbt-ms replaces it.",
     .when = "set the longest gap between tokens that your clients accept."},
    {.key = "sched.replica_bytes_per_s",
     .type = BT_CONF_SIZE,
     .offset = ROW(replica_bytes_per_s),
     .def = "0",
     .max = 1e13,
     .doc = "Bytes a second that this conductor may spend on copies of hot prefixes ahead of "
            "need: one copy for each 16 uses within a minute. Copies take at most a quarter of "
            "the slots. 0: none.",
     .when = "when very many requests share few prefixes and the network has room."},
    {.key = "sched.roles",
     .type = BT_CONF_STR,
     .offset = ROW(roles),
     .def = "fixed",
     .doc = "fixed: only batonctl role changes the role of a worker. auto: one conductor also "
            "does, when one role is short of workers for minutes and the other has enough "
            "without that worker. A role that an operator has set stays. The same on all "
            "conductors.",
     .when = "set auto when the share of prefill and decode work changes over the day."},
    {.key = "sched.roles_window_ms",
     .type = BT_CONF_MS,
     .offset = ROW(roles_window_ms),
     .def = "60s",
     .min = 1000,
     .max = 86400000,
     .hidden = true,
     .doc = "sched.roles auto: the load is averaged over windows of this length; a role changes "
            "after two such windows in a row."},
    {.key = "sched.role_move_ms",
     .type = BT_CONF_MS,
     .offset = ROW(role_move_ms),
     .def = "5s",
     .max = 86400000,
     .hidden = true,
     .doc = "A worker whose role changes has this time to finish its requests. The rest is then "
            "planned again on other workers that can take it."},
};

static const char *const main_keys[] = {"conductor.http.listen",
                                        "conductor.api_keys_file",
                                        "sched.ttft_objective_ms",
                                        "sched.tbt_objective_ms",
                                        "rpc.listen",
                                        NULL};

static const struct bt_conf_removed removed[] = {
    {"conductor.http.body_total",
     "it is 4 x conductor.http.body_max, at least 256MiB; remove the line"},
    {"conductor.index_extent_tokens",
     "it is 512 where conductor.index_blocks is above 4194304; remove the line"},
    {"conductor.max_overtaking", "it is always 64; remove the line"},
    {"conductor.max_replans", "it is always 8; remove the line"},
    {"conductor.no_worker_ms", "it is always 7s; remove the line"},
    {"conductor.ended_ms", "it is always 30s; remove the line"},
    {"sched.local_prefill_tokens",
     "set sched.tbt_objective_ms instead: decode workers then compute a prompt where that gives an "
     "earlier first token; remove the line"},
    {"sched.length_quantile", "it is always 0.9; remove the line"},
    {"sched.tbt_margin", "it is always 0.95; remove the line"},
    {"sched.fetch_ratio", "it is always 1.5; remove the line"},
    {"sched.work_price", "it is always 1; remove the line"},
    {"sched.demand_price", "it is always 0.4; remove the line"},
    {"sched.work_weight", "it is always 0.5; remove the line"},
    {"sched.mixed_step_share",
     "it is always 0.75; remove the line, or set engine.mixed_step_ms on workers that should take "
     "shorter steps"},
    {"sched.mixed_gap_share", "it is always 0.95; remove the line"},
    {"sched.pack_share", "it is always 0.75; remove the line"},
    {"sched.prior_prefill_tokens_per_s", "workers measure their speed; remove the line"},
    {"sched.prior_step_ms", "workers measure their steps; remove the line"},
    {"sched.link_bytes_per_s", "kvstores measure their links; remove the line"},
    {"sched.replica_uses", "it is always 16; remove the line"},
    {NULL, NULL},
};

static const struct bt_conf_row *const tables[] = {bt_conf_common_rows, rows, NULL};

static bool routable(const char *listen)
{
    return strncmp(listen, "0.0.0.0:", 8) == 0 || strncmp(listen, "[::]:", 5) == 0;
}

static bool check(const void *conf, char *err, size_t err_cap)
{
    const struct bt_conductor_conf *c = conf;
    double share;
    if (strcmp(c->roles, "fixed") != 0 && strcmp(c->roles, "auto") != 0) {
        snprintf(err, err_cap, "sched.roles: '%s' is unknown; use fixed or auto", c->roles);
        return false;
    }
    if (bt_sched_policy_find(c->policy) == NULL) {
        snprintf(err, err_cap, "sched.policy: there is no '%s'; use %s", c->policy,
                 bt_sched_policy_names);
        return false;
    }
    const struct bt_sched_admission *a = bt_sched_admission_find(c->admission);
    if (a == NULL || a->at_decode) {
        /* late also asks after the prefill, for comparison: only baton-sim does that. */
        snprintf(err, err_cap,
                 "sched.admission: there is no '%s' here; use none, early, predict or priced",
                 c->admission);
        return false;
    }
    if (bt_front_check_origins(c->http.allowed_origins, err, err_cap) != BT_OK ||
        bt_front_check_form(c->answer_form, err, err_cap) != BT_OK ||
        bt_front_check_tls(bt_conductor_tls(c), err, err_cap) != BT_OK ||
        bt_front_check_keys(c->api_keys_file, err, err_cap) != BT_OK ||
        bt_trace_check(err, err_cap) != BT_OK ||
        bt_front_access_share(c->access_log, &share, err, err_cap) != BT_OK) {
        return false;
    }
    if (c->name != NULL && !bt_conf_name_good("conductor.name", c->name, err, err_cap)) {
        return false;
    }
    if (routable(c->common.rpc_listen) && c->common.rpc_advertise == NULL) {
        snprintf(err, err_cap,
                 "rpc.listen: %s is every address of this host; set rpc.advertise to the one that "
                 "others dial",
                 c->common.rpc_listen);
        return false;
    }
    return true;
}

/* Checks what the conductor needs before the weights: the configuration and the tokenizer. */
static bool look(const void *conf, char *err, size_t err_cap)
{
    const struct bt_conductor_conf *c = conf;
    struct bt_model_config model;
    struct bt_tokenizer *tok = NULL;
    bool listen = bt_conf_look_listen("conductor.http.listen", c->http.listen);
    if (bt_model_config_load(c->common.model_path, &model, err, err_cap) != BT_OK ||
        bt_tokenizer_load(c->common.model_path, &tok, err, err_cap) != BT_OK) {
        return false;
    }
    bt_tokenizer_destroy(tok);
    return listen;
}

const struct bt_conf_schema *bt_conductor_schema(void)
{
    static size_t lens[2];
    static struct bt_conf_schema schema;
    lens[0] = bt_conf_common_len;
    lens[1] = BT_ARRAY_LEN(rows);
    schema.daemon = "conductor";
    schema.summary = "Takes requests (OpenAI API) and plans them over prefill and decode workers.";
    schema.tables = tables;
    schema.table_lens = lens;
    schema.conf_size = sizeof(struct bt_conductor_conf);
    schema.main_keys = main_keys;
    schema.removed = removed;
    schema.check = check;
    schema.look = look;
    schema.describe = bt_sched_conf_describe;
    return &schema;
}
