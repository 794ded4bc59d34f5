/* The CPU back end: opens a model, implements the engine's calls. forward and sample finish inside
 * their calls; tickets are delivered by poll. Owner thread: the engine's. */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/engine/cpu/cpu_priv.h"
#include "common/engine/cpu/pages.h"
#include "common/engine/decoder.h"
#include "common/engine/host_calls.h"

#define KV_BYTES_DEF (1ull << 30)
/* Rows of one attention item of MLA: with them, queries and results of 576 and 512 columns take
 * about 1 MB, which stays in the second-level cache. */
#define MLA_ROWS 192

static uint32_t usable_cores(void)
{
    cpu_set_t set;
    return sched_getaffinity(0, sizeof(set), &set) == 0 ? (uint32_t)BT_MAX(CPU_COUNT(&set), 1) : 1;
}

static void cpu_close(struct bt_engine *e)
{
    if (!e) {
        return;
    }
    bt_cpu_model_cleanup(&e->model);
    bt_gemm_destroy(e->gemm);
    bt_host_cleanup(&e->host);
    free(e->inv_freq);
    free(e->rope);
    free(e->tokens);
    free(e->items);
    free(e->kept);
    free(e->x);
    free(e->y);
    free(e->y2);
    free(e->a);
    free(e->a2);
    free(e->ae);
    free(e->q);
    free(e->head_out);
    free(e->head_act);
    free(e->uses);
    free(e->by_expert);
    free(e->first_use);
    free(e->sum);
    free(e->scratch);
    free(e->logits);
    bt_cpu_dola_cleanup(e);
    bt_cpu_mtp_cleanup(e);
    free(e);
}

static bt_status_t check_config(const struct bt_engine_config *c, char *err, size_t err_cap)
{
    static const struct bt_engine_limits limits = {
        .name = "cpu", .max_slots = 65536, .max_rows = 65536};
    bt_status_t st = bt_engine_check_config(c, &limits, err, err_cap);
    if (st == BT_OK && c->threads > 1024) {
        snprintf(err, err_cap, "engine cpu: engine.threads must be 0 to 1024");
        st = BT_ERR_CONFIG;
    }
    return st;
}

static const struct bt_cpu_kernels *kernels_for(bt_cpu_isa_t isa)
{
    switch (isa) {
    case BT_ISA_AMX:
    case BT_ISA_AVX512_BF16: return &bt_cpu_kernels_avx512_bf16;
    case BT_ISA_AVX512: return &bt_cpu_kernels_avx512;
    case BT_ISA_AVX2: return &bt_cpu_kernels_avx2;
    case BT_ISA_BASE: break;
    }
    return &bt_cpu_kernels_base;
}

static void *buffer(size_t rows, size_t cols, size_t item)
{
    size_t bytes = rows * cols * item;
    void *p = bt_pages_alloc(bytes);
    if (p) {
        /* Products also read the rows behind a step's last row: they must be finite. */
        memset(p, 0, bytes);
    }
    return p;
}

/* Heads of one attention item: those of a KV head. MLA has one KV head for all, so they are
 * divided: the largest divisor of their number up to `most`. */
static uint32_t attn_group(const struct bt_model_config *c, uint32_t most)
{
    uint32_t group = c->mla.kv_rank ? BT_MIN(c->heads, most) : c->heads / c->kv_heads;
    while (c->heads % group != 0) {
        group--;
    }
    return group;
}

static bool open_attention(struct bt_engine *e, size_t rows)
{
    const struct bt_model_config *c = &e->model.config;
    const struct bt_model_mla *m = &c->mla;
    bool mla = m->kv_rank != 0;
    uint32_t d = mla ? m->kv_rank + m->rope : c->head_dim, vd = mla ? m->kv_rank : d;
    bool amx = bt_gemm_isa() == BT_ISA_AMX && d % 32 == 0 && vd % 32 == 0;
    e->attn = amx ? bt_cpu_attn_amx : e->k->attn;
    e->attn_rows = !amx ? BT_CPU_ROWS_MAX : mla ? MLA_ROWS : BT_CPU_AMX_ROWS;
    e->attn_group = attn_group(c, BT_CPU_ROWS_MAX);
    e->scratch_bytes =
        BT_ALIGN_UP(amx ? bt_cpu_attn_amx_scratch(d, vd) : bt_cpu_attn_scratch(d, vd), (size_t)64);
    e->scratch = buffer((size_t)e->threads, e->scratch_bytes, 1);
    if (mla) {
        size_t act = bt_cpu_act_bytes(e->k, rows, BT_MAX(m->kv_rank, m->nope), 2);
        e->head_act_elems = act / 2;
        e->head_act = buffer(c->heads, act, 1);
        e->head_out_floats = rows * BT_MAX(m->kv_rank, m->v);
        e->head_out = buffer((size_t)e->threads, e->head_out_floats, 4);
        e->q = buffer(rows, (size_t)c->heads * d, 4);
    }
    uint32_t rope = bt_model_rope_dim(c);
    e->inv_freq = bt_malloc(rope / 2 * sizeof(float));
    e->rope = malloc(c->gpt2 ? 1 : (size_t)c->max_model_len * rope * sizeof(float));
    if (!c->gpt2) {
        bt_model_rope_inv_freq(c, e->inv_freq);
    }
    return e->scratch && e->rope && (!mla || (e->head_act && e->head_out && e->q));
}

static bool open_experts(struct bt_engine *e, size_t rows)
{
    const struct bt_model_config *c = &e->model.config;
    const struct bt_model_experts *x = &c->experts;
    if (x->n == 0) {
        return true;
    }
    e->uses = bt_calloc(rows * x->used, sizeof(*e->uses));
    e->by_expert = bt_calloc(rows * x->used, sizeof(*e->by_expert));
    e->first_use = bt_calloc(x->n + 1, sizeof(*e->first_use));
    e->sum = buffer(rows, c->hidden, 4);
    return e->sum != NULL;
}

/* Columns of the widest product that is kept in f32. */
static size_t widest_product(const struct bt_engine *e)
{
    const struct bt_model_config *c = &e->model.config;
    const struct bt_model_experts *x = &c->experts;
    size_t q = (size_t)c->heads * c->head_dim, kv = (size_t)c->kv_heads * c->head_dim;
    size_t in = BT_MAX(BT_MAX(c->intermediate, x->intermediate), x->shared);
    size_t most = c->mla.kv_rank ? BT_MAX(BT_MAX(q, (size_t)c->mla.q_rank),
                                          (size_t)c->mla.kv_rank + c->mla.rope)
                                 : q + 2 * kv;
    most = BT_MAX(most, (size_t)x->n);
    most = BT_MAX(most, x->n ? (size_t)c->hidden : 0);
    most = BT_MAX(most, c->gpt2 ? in : 0);
    return bt_gemm_fuses(e->gemm) ? most : BT_MAX(most, 2 * in);
}

static bt_status_t open_buffers(struct bt_engine *e, const struct bt_engine_config *conf, char *err,
                                size_t err_cap)
{
    const struct bt_model_config *c = &e->model.config;
    uint32_t most = bt_cpu_step_rows(e);
    size_t rows = bt_gemm_rows(most);
    uint32_t in = BT_MAX(BT_MAX(c->intermediate, c->experts.intermediate), c->experts.shared);
    uint32_t o = c->heads * (c->mla.kv_rank ? c->mla.v : c->head_dim);
    bool fuses = bt_gemm_fuses(e->gemm), ok = open_attention(e, rows) && open_experts(e, rows) &&
                                              (!c->mtp || bt_cpu_mtp_open(e, rows));
    e->tokens = bt_calloc(most, sizeof(*e->tokens));
    e->items = bt_calloc(most, sizeof(*e->items));
    e->kept = bt_calloc(most, sizeof(*e->kept));
    e->x = buffer(rows, c->hidden, 4);
    e->y = buffer(rows, widest_product(e), 4);
    e->y2 = fuses ? NULL : buffer(rows, c->hidden, 4);
    e->a = buffer(bt_cpu_act_bytes(e->k, rows, BT_MAX(o, c->hidden), 2), 1, 1);
    e->a2 = buffer(bt_cpu_act_bytes(e->k, rows, in, e->mlp_acts), 1, 1);
    uint32_t other = BT_MAX(c->experts.n ? c->hidden : 0, c->mla.q_rank);
    e->ae = other ? buffer(bt_cpu_act_bytes(e->k, rows, other, 2), 1, 1) : NULL;
    if (!ok || !e->x || !e->y || !(fuses || e->y2) || !e->a || !e->a2 || (other && !e->ae)) {
        snprintf(err, err_cap, "engine: no memory for steps of %u tokens; lower engine.max_rows",
                 conf->max_rows);
        return BT_ERR_NO_MEMORY;
    }
    return BT_OK;
}

/* Memory that the kernel could give without swapping; UINT64_MAX: unknown. */
static uint64_t free_memory(void)
{
    FILE *f = fopen("/proc/meminfo", "r");
    unsigned long long kb = 0;
    char line[256];
    bool found = false;
    while (f && !found && fgets(line, sizeof(line), f)) {
        found = sscanf(line, "MemAvailable: %llu kB", &kb) == 1;
    }
    if (f) {
        fclose(f);
    }
    return found ? (uint64_t)kb * 1024 : UINT64_MAX;
}

/* Checks that the kernels support the model. */
static bt_status_t check_model(const struct bt_model_config *c, const char *dir, char *err,
                               size_t err_cap)
{
    const struct bt_model_mla *m = &c->mla;
    char what[128] = "";
    if (m->kv_rank == 0 && c->heads / c->kv_heads > BT_CPU_ROWS_MAX) {
        snprintf(what, sizeof(what),
                 "num_key_value_heads: more than %d query heads for one KV head", BT_CPU_ROWS_MAX);
    } else if (m->kv_rank && (m->kv_rank % 16 || m->nope % 16 || m->v % 16 || m->rope % 16)) {
        snprintf(what, sizeof(what),
                 "kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim and v_head_dim that are not "
                 "multiples of 16");
    } else if (c->mtp && c->hidden % 16) {
        snprintf(what, sizeof(what), "model.mtp with a hidden_size that is not a multiple of 16");
    } else if (c->experts.n > BT_CPU_EXPERTS_MAX) {
        snprintf(what, sizeof(what), "more than %d experts", BT_CPU_EXPERTS_MAX);
    }
    if (what[0] == 0) {
        return BT_OK;
    }
    snprintf(err, err_cap, "%s/config.json: the cpu engine does not support %s", dir, what);
    return BT_ERR_UNSUPPORTED;
}

/* Chooses the form of the products' inputs: f32 without bf16 units. Otherwise bf16, in two parts
 * where one cannot represent the values, as those of fp8 with its scales. */
static struct bt_engine_bytes bytes_of(const struct bt_engine_config *conf, bt_cpu_isa_t isa)
{
    bool wide = bt_decoder_exceeds_bf16(conf);
    return (struct bt_engine_bytes){
        .fp8 = 4, .other = wide || isa < BT_ISA_AVX512_BF16 ? 4 : 2, .embed = wide ? 4 : 2};
}

static bt_status_t open_model(struct bt_engine *e, const struct bt_engine_config *conf, char *err,
                              size_t err_cap)
{
    struct bt_model_config *c = &e->model.config;
    const bt_cpu_isa_t isa = bt_gemm_isa();
    bt_status_t st = bt_model_config_load(conf->model_dir, c, err, err_cap);
    if (st != BT_OK) {
        return st;
    }
    if (conf->mtp) {
        st = bt_model_take_mtp(c, conf->model_dir, err, err_cap);
    }
    st = st == BT_OK ? check_model(c, conf->model_dir, err, err_cap) : st;
    if (st == BT_OK) {
        st = bt_engine_check_fits(conf, c, bytes_of(conf, isa), free_memory(), "machine", err,
                                  err_cap);
    }
    if (st != BT_OK) {
        return st;
    }
    struct bt_engine_info info = {.size = sizeof(info),
                                  .abi = BT_ENGINE_ABI,
                                  .vocab = c->vocab,
                                  .max_model_len = c->max_model_len,
                                  .pages = conf->pages,
                                  .max_slots = conf->max_slots,
                                  .max_rows = conf->max_rows,
                                  .max_drafts = conf->max_rows};
    st = bt_model_kv_layout(c, conf->kv_dtype, conf->page_tokens, &info.layout);
    if (st == BT_OK && info.layout.groups[0].scale_off) {
        snprintf(err, err_cap,
                 "engine cpu: model.kv_dtype must be f16 for %s; only the cuda engine has %s for "
                 "it",
                 c->architecture, conf->kv_dtype);
        return BT_ERR_UNSUPPORTED;
    }
    if (st != BT_OK) {
        snprintf(err, err_cap, "kv.block_tokens %u: no KV layout for this model",
                 conf->page_tokens);
        return st;
    }
    info.hidden_bytes = c->hidden * (uint32_t)sizeof(float);
    e->k = kernels_for(isa);
    st = bt_host_init(&e->host, &info, conf->mem_limit ? conf->mem_limit : KV_BYTES_DEF, err,
                      err_cap);
    e->host.hidden = c->hidden;
    if (st == BT_OK) {
        st = bt_ids_load(conf->model_dir, info.vocab, &e->host.ids, err, err_cap);
    }
    if (st == BT_OK) {
        st = bt_gemm_create((uint32_t)e->threads, isa, &e->gemm, err, err_cap);
    }
    if (st == BT_OK) {
        st = bt_cpu_model_load(&e->model, e->gemm, e->mlp_acts, conf, err, err_cap);
    }
    return st == BT_OK ? open_buffers(e, conf, err, err_cap) : st;
}

static bt_status_t cpu_open(const struct bt_engine_config *conf, struct bt_engine **e_p,
                            const struct bt_engine_info **info_p, char *err, size_t err_cap)
{
    bt_status_t st = check_config(conf, err, err_cap);
    if (st != BT_OK) {
        return st;
    }
    struct bt_engine *e = bt_calloc(1, sizeof(*e));
    e->mlp_acts = conf->activations && strcmp(conf->activations, "split") == 0 ? 2 : 1;
    e->threads = (int)(conf->threads ? conf->threads : usable_cores());
    st = open_model(e, conf, err, err_cap);
    if (st != BT_OK) {
        cpu_close(e);
        return st;
    }
    if (conf->deterministic && !bt_gemm_exact(e->gemm)) {
        snprintf(err, err_cap,
                 "engine.deterministic: the cpu engine is deterministic on processors with AVX512 "
                 "only; set it to false, or use another host");
        cpu_close(e);
        return BT_ERR_UNSUPPORTED;
    }
    struct bt_engine_info *info = &e->host.info;
    info->caps = BT_ENGINE_CAP_MIXED | BT_ENGINE_CAP_DRAFTS | BT_ENGINE_CAP_HIDDEN |
                 (bt_gemm_exact(e->gemm) ? BT_ENGINE_CAP_EXACT : 0u) |
                 (conf->mtp ? BT_ENGINE_CAP_MTP : 0u);
    snprintf(info->device, sizeof(info->device), "cpu %s %s %d thread%s", e->k->name,
             bt_gemm_isa() == BT_ISA_AMX ? "amx"
             : e->k->bf16                ? "bf16"
                                         : "f32",
             e->threads, e->threads == 1 ? "" : "s");
    *e_p = e;
    *info_p = info;
    return BT_OK;
}

static bt_status_t cpu_forward(struct bt_engine *e, const struct bt_engine_batch *b,
                               bt_engine_ticket_t *fwd_p)
{
    uint32_t n, n_sample;
    if (e->failed) {
        return BT_ERR_DEVICE;
    }
    bt_status_t st = bt_host_check_batch(&e->host, b, &n, &n_sample);
    if (st != BT_OK) {
        return st;
    }
    uint64_t t0 = bt_mono_ns();
    struct bt_host_ticket *t =
        bt_host_ticket_new(&e->host, (size_t)bt_gemm_rows(n_sample) * e->host.info.vocab);
    t->forward = true;
    st = bt_cpu_forward(e, b, n, t);
    e->failed |= st == BT_ERR_DEVICE;
    bt_pace_wait(&e->host.pace);
    t->run_us = (float)(bt_mono_ns() - t0) * 1e-3f;
    *fwd_p = t->id;
    bt_host_ticket_done(&e->host, t, st);
    return BT_OK;
}

static bt_status_t cpu_sample(struct bt_engine *e, bt_engine_ticket_t fwd, const uint32_t *mask,
                              bt_engine_ticket_t *out_p)
{
    return bt_host_sample(&e->host, fwd, mask, bt_cpu_contrast_cosines, e, out_p);
}

static bt_status_t cpu_draft(struct bt_engine *e, const uint32_t *slots, uint32_t n, uint32_t k,
                             struct bt_engine_out *outs, uint32_t *counts)
{
    if (e->failed) {
        return BT_ERR_DEVICE;
    }
    if (!e->model.config.mtp) {
        return BT_ERR_UNSUPPORTED;
    }
    bt_status_t st = bt_cpu_draft(e, slots, n, k, outs, counts);
    e->failed |= st == BT_ERR_DEVICE;
    return st;
}

static const struct bt_engine_vtable vtable = {
    .abi = BT_ENGINE_ABI,
    .name = "cpu",
    .open = cpu_open,
    .close = cpu_close,
    BT_HOST_CALLS,
    .forward = cpu_forward,
    .sample = cpu_sample,
    .draft = cpu_draft,
};

const struct bt_engine_vtable *bt_engine_plugin(uint32_t abi)
{
    return abi == BT_ENGINE_ABI ? &vtable : NULL;
}
