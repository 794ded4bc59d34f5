/* The configuration table of both workers, and the checks across keys. */
#include "common/worker/conf.h"

#include <stdio.h>
#include <string.h>

#include "common/engine/model_config.h"

#define ROW(member) offsetof(struct bt_worker_conf, member)

static const struct bt_conf_row rows[] = {
    {.key = "engine.device",
     .type = BT_CONF_STR,
     .offset = ROW(engine_device),
     .def = "auto",
     .doc = "auto (cuda if a device answers, else cpu), cpu, cuda, or null (computes nothing: for "
            "benchmarks of everything around the engine)."},
    {.key = "engine.threads",
     .type = BT_CONF_INT,
     .offset = ROW(engine_threads),
     .def = "0",
     .min = 0,
     .max = 1024,
     .doc = "Compute threads of the CPU engine; 0: as many as this process may use."},
    {.key = "engine.pages",
     .type = BT_CONF_INT,
     .offset = ROW(engine_pages),
     .def = "0",
     .min = 0,
     .max = 100000000,
     .doc = "KV pages of the engine (kv.block_tokens tokens each); 0: as many as fit engine.mem."},
    {.key = "engine.mem",
     .type = BT_CONF_SIZE,
     .offset = ROW(engine_mem),
     .def = "256MiB",
     .min = 1 << 20,
     .max = 1e15,
     .doc = "Memory for KV pages when engine.pages is 0."},
    {.key = "engine.max_slots",
     .type = BT_CONF_INT,
     .offset = ROW(engine_max_slots),
     .def = "64",
     .min = 1,
     .max = 65536,
     .doc = "Sequences in the engine at once."},
    {.key = "engine.max_rows",
     .type = BT_CONF_INT,
     .offset = ROW(engine_max_rows),
     .def = "2048",
     .min = 1,
     .max = 1048576,
     .doc = "Tokens of one engine step, prompt chunks and single tokens together. At least "
            "kv.block_tokens and engine.max_slots."},
    {.key = "engine.mixed_prompt_tokens",
     .type = BT_CONF_INT,
     .offset = ROW(engine_mixed_prompt_tokens),
     .def = "256",
     .min = 0,
     .max = 1048576,
     .doc = "Most prompt tokens in a step that also generates, where its time is not bounded "
            "(engine.mixed_step_ms): bounds what a prompt adds to the others' token gaps. 0: no "
            "bound."},
    {.key = "engine.mixed_step_ms",
     .type = BT_CONF_MS,
     .offset = ROW(engine_mixed_step_ms),
     .def = "0",
     .max = 60000,
     .reload = true,
     .doc =
         "A limit of this worker's own: how long a step that also generates may last, by the cost "
         "that the worker has fitted to its own steps: it takes as many prompt tokens as that "
         "allows, one block at least. Of a worker of the role decode also a step while a row is on "
         "its way to it. The smallest of this and of what conductors say (their "
         "sched.mixed_step_share of the objective between tokens) is in force. 0: it has none. "
         "Where nobody says anything engine.mixed_prompt_tokens counts."},
    {.key = "engine.mixed_gap_ms",
     .type = BT_CONF_MS,
     .offset = ROW(engine_mixed_gap_ms),
     .def = "0",
     .max = 60000,
     .reload = true,
     .doc =
         "Likewise: in a step that a row joins whose prompt was computed elsewhere, prompt tokens "
         "make what it has waited and the step together no longer than this, so that its first gap "
         "is no longer than others. Conductors say sched.mixed_gap_share. 0: it has no limit."},
    {.key = "engine.calibrate_ms",
     .type = BT_CONF_MS,
     .offset = ROW(engine_calibrate_ms),
     .def = "2s",
     .min = 0,
     .max = 60000,
     .doc =
         "At start the engine computes some steps, for at most about so long: they warm it up, and "
         "the conductor's predictions begin with what they took. 0: none."},
    {.key = "worker.name",
     .type = BT_CONF_STR,
     .offset = ROW(name),
     .doc = "Name in the cluster; by default <role>-<node.id>-<worker.index>."},
    {.key = "worker.index",
     .type = BT_CONF_INT,
     .offset = ROW(index),
     .def = "0",
     .min = 0,
     .max = 1023,
     .doc = "Tells workers of the same role on one node apart."},
    {.key = "worker.max_requests",
     .type = BT_CONF_INT,
     .offset = ROW(max_requests),
     .def = "1024",
     .min = 1,
     .max = 65536,
     .doc =
         "Sequences (choices of requests) in this worker at once, waiting ones included; more are "
         "refused."},
    {.key = "worker.max_sessions",
     .type = BT_CONF_INT,
     .offset = ROW(max_sessions),
     .def = "64",
     .min = 1,
     .max = 4096,
     .doc = "Sessions with conductors at once; more are refused."},
    {.key = "worker.drain_ms",
     .type = BT_CONF_MS,
     .offset = ROW(drain_ms),
     .def = "30s",
     .max = 86400000,
     .doc = "After SIGTERM running requests have this long to finish; then they end with "
            "'unavailable' and the conductor plans them again."},
    {.key = "worker.role_wait_ms",
     .type = BT_CONF_MS,
     .offset = ROW(role_wait_ms),
     .def = "60s",
     .max = 86400000,
     .doc =
         "A worker that is given another role (batonctl role) offers it when what it has of the "
         "old one has ended or was planned elsewhere, at the latest after so long: the rest goes "
         "on beside it."},
    {.key = "worker.writeback",
     .type = BT_CONF_BOOL,
     .offset = ROW(writeback),
     .def = "true",
     .doc = "Full blocks of generated text go back to the pool."},
    {.key = "worker.writeback_max",
     .type = BT_CONF_INT,
     .offset = ROW(writeback_max),
     .def = "64",
     .min = 1,
     .max = 4096,
     .doc = "Blocks on their way back to the pool at once."},
};

static const struct bt_conf_row *const tables[] = {bt_conf_common_rows, rows, NULL};

static bool check(const void *conf, char *err, size_t cap)
{
    const struct bt_worker_conf *c = conf;
    static const char *const devices[] = {"auto", "cpu", "cuda", "null"};
    bool known = false;
    for (size_t i = 0; i < BT_ARRAY_LEN(devices); i++) {
        known = known || strcmp(c->engine_device, devices[i]) == 0;
    }
    if (!known) {
        snprintf(err, cap, "engine.device: '%.40s' is unknown; use auto, cpu, cuda or null",
                 c->engine_device);
        return false;
    }
    int64_t block = c->common.kv_block_tokens;
    if (c->engine_max_rows < block || c->engine_max_rows < c->engine_max_slots) {
        snprintf(err, cap,
                 "engine.max_rows: %lld is too small; use at least kv.block_tokens (%lld) and "
                 "engine.max_slots (%lld)",
                 (long long)c->engine_max_rows, (long long)block, (long long)c->engine_max_slots);
        return false;
    }
    return c->name == NULL || bt_conf_name_good("worker.name", c->name, err, cap);
}

static bool look(const void *conf, char *err, size_t err_cap)
{
    const struct bt_worker_conf *c = conf;
    struct bt_model_config model;
    return bt_model_config_load(c->common.model_path, &model, err, err_cap) == BT_OK;
}

const struct bt_conf_schema *bt_worker_schema(bool decode)
{
    static size_t lens[2];
    static struct bt_conf_schema schemas[2];
    lens[0] = bt_conf_common_len;
    lens[1] = BT_ARRAY_LEN(rows);
    struct bt_conf_schema *s = &schemas[decode];
    s->daemon = decode ? "decode" : "prefill";
    s->summary = decode ? "Takes a prompt's KV from the node's pool and generates."
                        : "Computes prompts and hands their KV to the node's pool.";
    s->tables = tables;
    s->table_lens = lens;
    s->conf_size = sizeof(struct bt_worker_conf);
    s->check = check;
    s->look = look;
    return s;
}

void bt_worker_conf_name(struct bt_worker_conf *c, const char *kind)
{
    if (c->name == NULL) {
        c->name = bt_sprintf("%s-%s-%lld", kind, c->common.node_id, (long long)c->index);
    }
}
