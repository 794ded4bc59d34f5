/* libFuzzer: config.json and, behind a zero byte, generation_config.json of a model. What is
 * accepted is within the limits that engines and the KV layout rely on. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/engine/model_config.h"
#include "tests/fuzz/rig.h"

static void check_experts(const struct bt_model_config *c)
{
    const struct bt_model_experts *e = &c->experts;
    struct bt_model_size s;
    bt_model_count(c, &s);
    BT_ASSERT(s.weights >= s.dense && s.expert_layers <= c->layers);
    BT_ASSERT(s.wide > 0 && s.wide <= s.dense + s.embed && s.embed <= s.wide);
    BT_ASSERT(s.pair > 0 && s.latent_pair > 0 && (c->mla.kv_rank || s.latent_pair == s.pair));
    if (e->n == 0) {
        BT_ASSERT(s.weights == s.dense && s.expert_layers == 0);
        return;
    }
    BT_ASSERT(e->n <= 1024 && e->used > 0 && e->used <= 32 && e->intermediate > 0);
    BT_ASSERT(e->groups > 0 && e->n % e->groups == 0 && e->groups_used <= e->groups);
    BT_ASSERT(e->used <= e->n / e->groups * e->groups_used);
    BT_ASSERT(e->groups == 1 || e->n / e->groups >= e->group_best);
    BT_ASSERT(isfinite(e->scale) && e->scale > 0);
}

static void check(const struct bt_model_config *c)
{
    check_experts(c);
    BT_ASSERT(isfinite(c->attn_scale) && c->attn_scale > 0);
    BT_ASSERT(isfinite(c->rope_scale) && c->rope_scale > 0);
    BT_ASSERT(!c->mla.kv_rank || (c->mla.nope + c->mla.rope == c->head_dim && c->mla.v > 0));
    BT_ASSERT(c->vocab > 0 && c->hidden > 0 && c->intermediate > 0 && c->layers > 0);
    BT_ASSERT(c->heads > 0 && c->kv_heads > 0 && c->heads % c->kv_heads == 0);
    BT_ASSERT(c->head_dim > 0 && c->head_dim % 2 == 0 && c->max_model_len > 0);
    BT_ASSERT(isfinite(c->norm_eps) && c->norm_eps > 0);
    BT_ASSERT(isfinite(c->rope_theta) && c->rope_theta > 0);
    BT_ASSERT(c->n_eos <= BT_ARRAY_LEN(c->eos) && strlen(c->rope_text) < sizeof(c->rope_text));
    for (uint32_t i = 0; i < c->n_eos; i++) {
        BT_ASSERT(c->eos[i] < c->vocab);
    }
    BT_ASSERT(c->bos == UINT32_MAX || c->bos < c->vocab);
    BT_ASSERT(c->temperature < 0 || isfinite(c->temperature));
    BT_ASSERT(c->top_p <= 1 && c->min_p <= 1);
    uint32_t half = bt_model_rope_dim(c) / 2;
    float *freq = bt_malloc(half * sizeof(float));
    bt_model_rope_inv_freq(c, freq);
    for (uint32_t i = 0; i < half; i++) {
        BT_ASSERT(isfinite(freq[i]) && freq[i] >= 0);
    }
    free(freq);
    struct bt_kv_layout l;
    static const char *const kinds[] = {"f16", "fp8"};
    for (int i = 0; i < 2; i++) {
        if (bt_model_kv_layout(c, kinds[i], 16, &l) == BT_OK) {
            uint32_t bytes;
            uint64_t at = bt_kv_segment(&l, l.n_layers - 1, &bytes);
            const struct bt_kv_group *g = &l.groups[0];
            BT_ASSERT(at + bytes <= l.block_bytes && l.n_layers == c->layers);
            BT_ASSERT((uint64_t)bt_kv_planes(g) * bt_kv_row_bytes(g) * l.page_tokens <= bytes);
            BT_ASSERT(!g->rope || (g->rope == c->mla.rope && bt_kv_latent(g) == c->mla.kv_rank));
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct bt_model_config c;
    char err[512] = "";
    rig_reset();
    size_t n = strnlen((const char *)data, size);
    (void)rig_file("config.json", data, n);
    (void)rig_file("generation_config.json", data + BT_MIN(n + 1, size),
                   size - BT_MIN(n + 1, size));
    if (bt_model_config_load(rig_dir(), &c, err, sizeof(err)) == BT_OK) {
        check(&c);
        struct bt_kv_layout l;
        struct bt_kv_key root;
        bt_status_t st = bt_model_root_key(rig_dir(),
                                           &(struct bt_model_settings){.load_format = "dummy",
                                                                       .activations = "split",
                                                                       .kv_dtype = "f16",
                                                                       .block_tokens = 16},
                                           &l, &root, err, sizeof(err));
        BT_ASSERT(st == BT_OK || err[0] != '\0');
    } else {
        BT_ASSERT(err[0] != '\0');
    }
    return 0;
}
