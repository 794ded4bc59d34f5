/* Multi-head latent attention in config.json (DeepSeek-V2, 2.1). */
#include <stdio.h>
#include <string.h>

#include "common/engine/model_read.h"

static uint32_t size(struct bt_model_reader *r, const char *name, uint32_t hi, uint32_t multiple,
                     bool required)
{
    uint32_t n = (uint32_t)bt_model_int(r, name, 1, hi, required, 0);
    if (n % multiple != 0) {
        bt_model_fail(r, BT_ERR_UNSUPPORTED, "%s: %u; supported are multiples of %u up to %u", name,
                      n, multiple, hi);
    }
    return n;
}

/* Keys that repeat a number which other keys give. */
static void check_repeated(struct bt_model_reader *r, const char *name, uint32_t value,
                           const char *is)
{
    if (bt_model_int(r, name, 1, 1 << 20, false, value) != value) {
        bt_model_fail(r, BT_ERR_UNSUPPORTED, "%s: only the value of %s, %u, is supported", name, is,
                      value);
    }
}

void bt_model_read_mla(struct bt_model_reader *r, struct bt_model_config *c,
                       const struct bt_model_arch *a)
{
    struct bt_model_mla *m = &c->mla;
    m->kv_rank = size(r, "kv_lora_rank", 8192, 16, true);
    m->q_rank = size(r, "q_lora_rank", 1 << 16, 8, false);
    m->nope = size(r, "qk_nope_head_dim", 256, 16, true);
    m->rope = size(r, "qk_rope_head_dim", 256, 16, true);
    m->v = size(r, "v_head_dim", 256, 16, true);
    c->head_dim = m->nope + m->rope;
    if (r->status == BT_OK && c->head_dim > 256) {
        bt_model_fail(r, BT_ERR_UNSUPPORTED,
                      "qk_nope_head_dim + qk_rope_head_dim: %u; supported are up to 256",
                      c->head_dim);
    }
    /* transformers writes RoPE's part as head_dim. */
    check_repeated(r, "head_dim", m->rope, "qk_rope_head_dim");
    check_repeated(r, "qk_head_dim", c->head_dim, "qk_nope_head_dim + qk_rope_head_dim");
    check_repeated(r, "num_key_value_heads", c->heads, "num_attention_heads");
    c->rope_pairs = bt_model_bool(r, "rope_interleave", true);
    if (!c->rope_pairs && a->family == BT_FAMILY_DEEPSEEK_V2) {
        bt_model_fail(r, BT_ERR_UNSUPPORTED, "rope_interleave: only true is supported for %s",
                      a->name);
    }
    c->n_mtp = (uint32_t)bt_model_int(r, "num_nextn_predict_layers", 0, 64, false, 0);
}

bt_status_t bt_model_take_mtp(struct bt_model_config *c, const char *dir, char *err, size_t err_cap)
{
    if (c->n_mtp == 0) {
        snprintf(err, err_cap,
                 "%s/config.json: num_nextn_predict_layers names no MTP layer; set model.mtp to "
                 "false in all daemons",
                 dir);
        return BT_ERR_UNSUPPORTED;
    }
    c->mtp = true;
    return BT_OK;
}
