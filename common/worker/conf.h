/* Configuration of baton-prefill and baton-decode. */
#ifndef BT_WORKER_CONF_H
#define BT_WORKER_CONF_H

#include "common/conf/conf.h"

/* Values that no operator needs to choose. */
enum {
    /* Sessions with conductors at once. A cluster has a few conductors; a restarted one has two
     * sessions until the silence of the old one shows, after 2 s. */
    BT_WORKER_SESSIONS_MAX = 64,
    /* A worker with a new role offers it after this time although requests of the old role still
     * run. Conductors take theirs back after sched.role_move_ms; twelve times its default bounds a
     * conductor that does not. */
    BT_WORKER_ROLE_WAIT_MS = 60000
};

struct bt_worker_conf {
    struct bt_conf_common common;
    char *engine_device;
    int64_t engine_threads;
    int64_t engine_pages;
    uint64_t engine_mem;
    int64_t engine_max_slots;
    int64_t engine_max_rows;
    int64_t engine_mixed_prompt_tokens;
    uint64_t engine_mixed_step_ms, engine_mixed_gap_ms;
    uint64_t engine_calibrate_ms;
    char *name;         /* bt_worker_conf_name sets it */
    char *kvstore_user; /* NULL: root or the worker's own */
    int64_t index;
    int64_t max_requests;
    uint64_t drain_ms;
    bool writeback;
    int64_t writeback_max;
    char *speculate;
};

/* Schema of "prefill" or "decode". */
const struct bt_conf_schema *bt_worker_schema(bool decode);
/* Sets name to <kind>-<node.id>-<worker.index>. */
void bt_worker_conf_name(struct bt_worker_conf *c, const char *kind);

#endif
