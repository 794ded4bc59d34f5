/* The configuration table of both workers, and the checks across keys. */
#include "common/worker/conf.h"

#include <stdio.h>
#include <string.h>

#include "common/engine/model_config.h"
#include "common/spec/spec.h"

#define ROW(member) offsetof(struct bt_worker_conf, member)

static const struct bt_conf_row rows[] = {
    {.key = "engine.device",
     .type = BT_CONF_STR,
     .offset = ROW(engine_device),
     .def = "auto",
     .doc = "auto (cuda if a device answers, else cpu), cpu, cuda, or null (computes nothing, "
            "for benchmarks).",
     .when = "set cuda so that a worker without its GPU does not start, rather than serve "
             "slowly."},
    {.key = "engine.threads",
     .type = BT_CONF_INT,
     .offset = ROW(engine_threads),
     .def = "0",
     .min = 0,
     .max = 1024,
     .doc = "Compute threads of the CPU engine; 0: as many as this process may use.",
     .when = "when several CPU workers share a machine: give each its part of the cores."},
    {.key = "engine.pages",
     .type = BT_CONF_INT,
     .offset = ROW(engine_pages),
     .def = "0",
     .min = 0,
     .max = 100000000,
     .hidden = true,
     .doc = "KV pages of the engine, kv.block_tokens tokens each; 0: as many as fit in engine.mem. "
            "Tests set it to fill an engine with a known number of blocks."},
    {.key = "engine.mem",
     .type = BT_CONF_SIZE,
     .offset = ROW(engine_mem),
     .def = "256MiB",
     .min = 1 << 20,
     .max = 1e15,
     .doc = "Memory for KV pages.",
     .when = "always on a GPU: what is free after the weights and about 4 GiB for steps "
             "(docs/OPERATING.md)."},
    {.key = "engine.max_slots",
     .type = BT_CONF_INT,
     .offset = ROW(engine_max_slots),
     .def = "64",
     .min = 1,
     .max = 65536,
     .doc = "Sequences in the engine at once.",
     .when = "raise it on GPUs while the time between tokens stays within your objective."},
    {.key = "engine.max_rows",
     .type = BT_CONF_INT,
     .offset = ROW(engine_max_rows),
     .def = "2048",
     .min = 1,
     .max = 1048576,
     .doc = "Tokens (not sequences) of one engine step: those of prompt chunks, and one of "
            "each sequence that generates. At least kv.block_tokens and engine.max_slots.",
     .when = "raise it when prompts are long and the GPU is not busy; it costs memory for the "
             "step."},
    {.key = "engine.mixed_prompt_tokens",
     .type = BT_CONF_INT,
     .offset = ROW(engine_mixed_prompt_tokens),
     .def = "256",
     .min = 0,
     .max = 1048576,
     .hidden = true,
     .doc = "Most prompt tokens in a step that also generates, where no objective limits the time "
            "of the step. 256 tokens of an 8B model take an H200 about as long (6 ms) as a step of "
            "64 rows. Operators set sched.tbt_objective_ms instead, which limits the time itself. "
            "0: no limit."},
    {.key = "engine.mixed_step_ms",
     .type = BT_CONF_MS,
     .offset = ROW(engine_mixed_step_ms),
     .def = "0",
     .max = 60000,
     .reload = true,
     .hidden = true,
     .doc =
         "This worker's own time limit for a step that computes prompts and also generates. The "
         "worker predicts the time from its earlier steps; at least one block of a prompt goes in. "
         "The smallest of this and the conductors' limits applies. 0: no limit of its own. "
         "Conductors derive theirs from sched.tbt_objective_ms; tests set it without a conductor."},
    {.key = "engine.mixed_gap_ms",
     .type = BT_CONF_MS,
     .offset = ROW(engine_mixed_gap_ms),
     .def = "0",
     .max = 60000,
     .reload = true,
     .hidden = true,
     .doc =
         "This worker's own time limit for a step that a row joins whose prompt was computed on "
         "another worker, together with the time that the row has waited. 0: no limit of its own."},
    {.key = "engine.calibrate_ms",
     .type = BT_CONF_MS,
     .offset = ROW(engine_calibrate_ms),
     .def = "2s",
     .min = 0,
     .max = 60000,
     .hidden = true,
     .doc = "At start the engine computes some steps, for at most about this time. They warm it "
            "up, and the conductor's first predictions use their durations. 2 s is little beside "
            "the loading of weights. 0 computes none, for tests with an engine of their own."},
    {.key = "worker.index",
     .type = BT_CONF_INT,
     .offset = ROW(index),
     .def = "0",
     .min = 0,
     .max = 1023,
     .doc = "Number of this worker among those of its role on one node. Its name is "
            "<role>-<node.id>-<worker.index>.",
     .when = "when a node has two workers of a role: 0, 1, ..."},
    {.key = "worker.kvstore_user",
     .type = BT_CONF_STR,
     .offset = ROW(kvstore_user),
     .doc = "User (name or number) that runs this node's kvstore, which gets the KV of all "
            "requests. Default: only root or the worker's own user may.",
     .when = "when the kvstore runs as another user than the workers."},
    {.key = "worker.max_requests",
     .type = BT_CONF_INT,
     .offset = ROW(max_requests),
     .def = "1024",
     .min = 1,
     .max = 65536,
     .hidden = true,
     .doc = "Sequences (choices of requests) in this worker at once, waiting ones included; more "
            "are refused, and the conductor tries another worker. Rings and tickets have this "
            "size from the start; 1024 is conductor.max_running of a conductor."},
    {.key = "worker.drain_ms",
     .type = BT_CONF_MS,
     .offset = ROW(drain_ms),
     .def = "30s",
     .max = 86400000,
     .doc = "After SIGTERM running requests have this time to finish; then the conductor plans "
            "them again on other workers.",
     .when = "set it to the longest answer you want to finish in place; raise the unit's "
             "TimeoutStopSec= with it."},
    {.key = "worker.speculate",
     .type = BT_CONF_STR,
     .offset = ROW(speculate),
     .def = "suffix",
     .doc = "Where drafts come from: tokens that a step tries behind each row's next one, so that "
            "it may give several. They never change an answer. suffix: the longest end of the text "
            "that occurred in it before; ngram: its last three tokens; mtp: the model's own MTP "
            "layer (model.mtp); a directory: a small model with the same tokens, whose KV takes "
            "engine.pages of its own size; off: no drafts. A step has "
            "drafts only where they make it faster by the worker's own measurements. Requests may "
            "choose with the field speculation, unless it is off here. On a GPU a draft model "
            "needs engine.mem or engine.pages, so that memory is left for it.",
     .when = "off if every step must take the same time."},
    {.key = "worker.writeback",
     .type = BT_CONF_BOOL,
     .offset = ROW(writeback),
     .def = "true",
     .hidden = true,
     .doc = "Full blocks of generated text go back to the pool. Off: the next turn of a "
            "conversation computes the last answer again."},
    {.key = "worker.writeback_max",
     .type = BT_CONF_INT,
     .offset = ROW(writeback_max),
     .def = "64",
     .min = 1,
     .max = 4096,
     .hidden = true,
     .doc = "Blocks on their way back to the pool at once, at most engine.max_slots. 64 blocks of "
            "64 tokens of an 8B model are 512 MiB, more than a network needs in flight."},
};

static const char *const main_keys[] = {"engine.device",   "engine.mem",   "engine.max_slots",
                                        "engine.max_rows", "worker.index", NULL};

static const struct bt_conf_removed removed[] = {
    {"worker.name", "the name is <role>-<node.id>-<worker.index>; set worker.index instead"},
    {"worker.max_sessions", "it is always 64; remove the line"},
    {"worker.role_wait_ms", "it is always 60s; remove the line"},
    {NULL, NULL},
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
    bt_spec_kind_t drafts = bt_spec_kind(c->speculate);
    bool model = strchr(c->speculate, '/') != NULL;
    if (!model && (drafts == BT_SPEC_AUTO || drafts == BT_SPEC_MODEL || drafts == BT_SPEC_KINDS)) {
        snprintf(err, cap,
                 "worker.speculate: '%.40s' is unknown; use off, suffix, ngram, mtp or the "
                 "directory of a draft model (with a slash)",
                 c->speculate);
        return false;
    }
    if (drafts == BT_SPEC_MTP && !c->common.model_mtp) {
        snprintf(err, cap, "worker.speculate: mtp needs model.mtp: true, in all daemons");
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
    uid_t uid;
    if (c->kvstore_user != NULL &&
        !bt_conf_user("worker.kvstore_user", c->kvstore_user, &uid, err, cap)) {
        return false;
    }
    return true;
}

static bool look(const void *conf, char *err, size_t err_cap)
{
    const struct bt_worker_conf *c = conf;
    struct bt_model_config model;
    return bt_model_config_load(c->common.model_path, &model, err, err_cap) == BT_OK &&
           (strchr(c->speculate, '/') == NULL ||
            bt_model_config_load(c->speculate, &model, err, err_cap) == BT_OK);
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
    s->main_keys = main_keys;
    s->removed = removed;
    s->check = check;
    s->look = look;
    return s;
}

void bt_worker_conf_name(struct bt_worker_conf *c, const char *kind)
{
    c->name = bt_sprintf("%s-%s-%lld", kind, c->common.node_id, (long long)c->index);
}
