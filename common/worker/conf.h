/* Configuration of baton-prefill and baton-decode. */
#ifndef BT_WORKER_CONF_H
#define BT_WORKER_CONF_H

#include "common/conf/conf.h"

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
    char *name;
    int64_t index;
    int64_t max_requests;
    int64_t max_sessions;
    uint64_t drain_ms, role_wait_ms;
    bool writeback;
    int64_t writeback_max;
};

/* Schema of "prefill" or "decode". */
const struct bt_conf_schema *bt_worker_schema(bool decode);
/* Fills name where none is given: <kind>-<node.id>-<worker.index>. */
void bt_worker_conf_name(struct bt_worker_conf *c, const char *kind);

#endif
