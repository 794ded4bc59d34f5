/* Opens the draft model: a second engine of the same kind in this worker. Engine thread. */
#include <stdio.h>
#include <stdlib.h>

#include "common/engine/ids.h"
#include "common/log/log.h"
#include "common/worker/core.h"

/* Tokens of a pass over a prompt. */
#define PROMPT_ROWS 512u

bt_status_t bt_wdraft_open(struct bt_wcore *c, const char *dir, char *err, size_t err_cap)
{
    const struct bt_worker_conf *conf = c->conf;
    struct bt_wdraft *m = &c->spec.model;
    if (!(c->info->caps & BT_ENGINE_CAP_DRAFTS)) {
        snprintf(err, err_cap, "worker.speculate: the %s engine takes no drafts yet; set it to off",
                 c->vt->name);
        return BT_ERR_UNSUPPORTED;
    }
    bt_status_t st = bt_ids_same(conf->common.model_path, dir, err, err_cap);
    if (st != BT_OK) {
        return st;
    }
    const struct bt_engine_config ec = {
        .size = sizeof(ec),
        .model_dir = dir,
        .load_format = conf->common.model_load_format,
        .activations = conf->common.model_activations,
        .threads = (uint32_t)conf->engine_threads,
        .page_tokens = (uint32_t)conf->common.kv_block_tokens,
        .pages = c->info->pages,
        .max_slots = c->info->max_slots,
        .max_rows = BT_MAX(c->info->max_slots * (1 + BT_WORKER_DRAFT_LAG), PROMPT_ROWS),
        .ranks = 1,
    };
    st = c->vt->open(&ec, &m->eng, &m->info, err, err_cap);
    if (st != BT_OK) {
        m->eng = NULL;
        return st;
    }
    if (m->info->vocab != c->info->vocab) {
        snprintf(err, err_cap, "worker.speculate: %.200s has %u tokens, the model has %u", dir,
                 m->info->vocab, c->info->vocab);
        bt_wdraft_close(c);
        return BT_ERR_MISMATCH;
    }
    m->owner = bt_calloc(c->info->max_slots, sizeof(m->owner[0]));
    BT_INFO("draft_model", "path=%s context=%u page_bytes=%llu", dir, m->info->max_model_len,
            (unsigned long long)m->info->layout.block_bytes);
    return BT_OK;
}

void bt_wdraft_close(struct bt_wcore *c)
{
    if (c->spec.model.eng != NULL) {
        c->vt->close(c->spec.model.eng);
        c->spec.model.eng = NULL;
    }
    free(c->spec.model.owner);
    c->spec.model.owner = NULL;
}
