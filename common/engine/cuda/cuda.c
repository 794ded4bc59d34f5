/* The CUDA back end: opens a model on one GPU, implements the engine's calls. forward and sample
 * return once their work is enqueued; poll delivers a ticket when the device's event has passed. A
 * CUDA error is sticky: every later call and ticket fails with ERR_DEVICE. Owner thread: the
 * engine's. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/engine/cuda/device.h"
#include "common/engine/cuda/step/latent.h"
#include "common/engine/decoder.h"
#include "common/log/log.h"

#define SPARE_BYTES (1ull << 30) /* left for the driver, graphs and libraries */

bt_status_t bt_cu_fail(struct bt_engine *e, cudaError_t err, const char *what)
{
    if (e->failed == cudaSuccess) {
        e->failed = err;
        snprintf(e->fault, sizeof(e->fault), "%.80s: %.60s", what, cudaGetErrorString(err));
        BT_ERROR("engine_failed", "engine=cuda why=%s", e->fault);
    }
    return BT_ERR_DEVICE;
}

static void cuda_close(struct bt_engine *e)
{
    if (!e) {
        return;
    }
    cudaDeviceSynchronize();
    bt_cu_draw_close(e);
    bt_cu_flows_close(e);
    bt_cu_step_close(e);
    bt_attn_destroy(e->attn);
    bt_attn_destroy(e->wide_attn);
    cudaFree(e->wide);
    cudaFree(e->wide_table);
    bt_cu_gemm_destroy(e->gemm);
    bt_cu_model_cleanup(&e->model);
    bt_cu_slabs_close(e);
    cudaFree(e->kv);
    cudaStream_t streams[] = {e->compute, e->store, e->load};
    for (int i = 0; i < 3; i++) {
        if (streams[i]) {
            cudaStreamDestroy(streams[i]);
        }
    }
    if (e->layer_done) {
        cudaEventDestroy(e->layer_done);
    }
    if (e->host.slots) { /* open got this far before it failed */
        bt_host_cleanup(&e->host);
    }
    free(e);
}

static bt_status_t check_config(const struct bt_engine_config *c, char *err, size_t err_cap)
{
    static const struct bt_engine_limits limits = {
        .name = "cuda", .max_slots = 2048, .max_rows = 65536};
    bt_status_t st = bt_engine_check_config(c, &limits, err, err_cap);
    if (st == BT_OK && c->page_tokens != 16 && c->page_tokens != 32 && c->page_tokens != 64) {
        snprintf(err, err_cap, "engine cuda: kv.block_tokens must be 16, 32 or 64 on a GPU");
        st = BT_ERR_CONFIG;
    }
    if (st == BT_OK && c->mtp) {
        snprintf(err, err_cap,
                 "engine cuda: model.mtp: the MTP layer has no kernels yet; set model.mtp to false "
                 "in all daemons, or engine.device: cpu");
        st = BT_ERR_UNSUPPORTED;
    }
    return st;
}

static bt_status_t open_device(struct bt_engine *e, char *err, size_t err_cap)
{
    int n = 0, least = 0, most = 0;
    struct cudaDeviceProp p;
    cudaError_t ce = cudaGetDeviceCount(&n);
    if (ce != cudaSuccess || n == 0) {
        snprintf(
            err, err_cap,
            "engine cuda: there is no usable GPU: %s; set engine.device: cpu to run without one",
            cudaGetErrorString(ce));
        return BT_ERR_DEVICE;
    }
    ce = cudaGetDevice(&e->device);
    ce = ce == cudaSuccess ? cudaGetDeviceProperties(&p, e->device) : ce;
    if (ce == cudaSuccess && p.major < 8) {
        snprintf(err, err_cap,
                 "engine cuda: %s has compute capability %d.%d, but the kernels need 8.0 or newer; "
                 "set engine.device: cpu to run without a GPU",
                 p.name, p.major, p.minor);
        return BT_ERR_DEVICE;
    }
    ce = ce == cudaSuccess ? cudaDeviceGetStreamPriorityRange(&least, &most) : ce;
    cudaStream_t *streams[] = {&e->compute, &e->store, &e->load};
    for (int i = 0; ce == cudaSuccess && i < 3; i++) {
        ce = cudaStreamCreateWithPriority(streams[i], cudaStreamNonBlocking, i ? least : most);
    }
    ce = ce == cudaSuccess ? cudaEventCreateWithFlags(&e->layer_done, cudaEventDisableTiming) : ce;
    if (ce != cudaSuccess) {
        snprintf(err, err_cap, "engine cuda: %s", cudaGetErrorString(ce));
        return BT_ERR_DEVICE;
    }
    if (e->model.config.mla.kv_rank && !bt_cu_hopper()) {
        snprintf(err, err_cap,
                 "engine cuda: latent attention has kernels for compute capability 9.0 alone (and "
                 "not with BATON_CUDA_PORTABLE=1), and %s has %d.%d; engine.device: cpu runs this "
                 "model",
                 p.name, p.major, p.minor);
        return BT_ERR_UNSUPPORTED;
    }
    return BT_OK;
}

/* Allocates one layer of the longest sequence in f16: prefill attention reads e4m3 pages through
 * it. */
static bt_status_t open_wide(struct bt_engine *e, char *err, size_t err_cap)
{
    const struct bt_model_config *c = &e->model.config;
    uint32_t tokens = e->host.info.layout.page_tokens, rows = c->kv_heads * 2 * tokens;
    e->wide_pages = e->host.max_pages_of_slot + e->host.info.max_rows / tokens;
    size_t bytes = (size_t)e->wide_pages * rows * c->head_dim * 2;
    int32_t *ids = bt_malloc(e->wide_pages * sizeof(*ids));
    for (uint32_t i = 0; i < e->wide_pages; i++) {
        ids[i] = (int32_t)i;
    }
    cudaError_t ce = cudaMalloc(&e->wide, bytes);
    ce = ce == cudaSuccess ? cudaMalloc((void **)&e->wide_table, e->wide_pages * 4) : ce;
    ce = ce == cudaSuccess
             ? cudaMemcpy(e->wide_table, ids, e->wide_pages * 4, cudaMemcpyHostToDevice)
             : ce;
    free(ids);
    const struct bt_attn_pool pool = {.kv = e->wide,
                                      .rows = (uint64_t)e->wide_pages * rows,
                                      .page_rows = rows,
                                      .page_tokens = tokens,
                                      .heads = c->heads,
                                      .kv_heads = c->kv_heads,
                                      .head_dim = c->head_dim,
                                      .type = BT_CU_F16,
                                      .out_type = e->model.e4m3_attention ? BT_CU_F16 : BT_CU_BF16,
                                      .scale = c->attn_scale,
                                      .window = c->window};
    ce = ce == cudaSuccess ? bt_attn_create(&pool, 1, &e->wide_attn) : ce;
    if (ce != cudaSuccess) {
        snprintf(err, err_cap,
                 "engine: %zu bytes of f16 pages beside fp8 KV: %s; lower the model's "
                 "max_position_embeddings",
                 bytes, cudaGetErrorString(ce));
        return BT_ERR_NO_MEMORY;
    }
    return BT_OK;
}

/* Allocates the pages last, with the memory that the limit or the device has left. */
static bt_status_t open_pages(struct bt_engine *e, const struct bt_engine_config *conf, char *err,
                              size_t err_cap)
{
    const struct bt_model_config *c = &e->model.config;
    struct bt_engine_info *info = &e->host.info;
    const struct bt_kv_group *g = &info->layout.groups[0];
    size_t free_bytes = 0, total, block = info->layout.block_bytes, row = bt_kv_row_bytes(g);
    cudaError_t ce = cudaMemGetInfo(&free_bytes, &total);
    uint64_t room = free_bytes > SPARE_BYTES ? free_bytes - SPARE_BYTES : 0;
    uint64_t limit = conf->mem_limit ? BT_MIN(room, conf->mem_limit) : room;
    uint64_t fit = limit / block, spare = BT_HOST_SPARE;
    uint64_t pages = conf->pages ? conf->pages : fit > spare ? fit - spare : 0;
    pages = BT_MIN(pages, (uint64_t)INT32_MAX * row / block - spare);
    uint64_t all = pages + spare;
    if (ce != cudaSuccess || pages == 0 || all * block > room) {
        snprintf(err, err_cap,
                 "engine: %llu KV pages of %zu bytes do not fit the %zu bytes that the GPU has "
                 "free after weights and steps; lower engine.pages",
                 (unsigned long long)(pages ? all : 1 + spare), block, free_bytes);
        return BT_ERR_NO_MEMORY;
    }
    info->pages = (uint32_t)pages;
    ce = cudaMalloc(&e->kv, all * block);
    /* Positions that no token has written must be finite numbers, so that copies of partial pages
     * are. */
    ce = ce == cudaSuccess ? cudaMemset(e->kv, 0, all * block) : ce;
    e->page_rows = (uint32_t)(block / row);
    e->pool = (struct bt_attn_pool){.kv = e->kv,
                                    .rows = all * block / row,
                                    .page_rows = e->page_rows,
                                    .page_tokens = conf->page_tokens,
                                    .heads = c->heads,
                                    .kv_heads = c->kv_heads,
                                    .head_dim = c->head_dim,
                                    .type = e->e4m3 ? BT_CU_E4M3 : BT_CU_F16,
                                    .scale_row = (uint32_t)(g->scale_off / row),
                                    .out_type = e->model.e4m3_attention ? BT_CU_F16 : BT_CU_BF16,
                                    .scale = c->attn_scale,
                                    .window = c->window,
                                    .segment = e->deterministic ? BT_CU_SEGMENT : 0,
                                    .items = info->max_rows + e->max_batch};
    ce = ce != cudaSuccess ? ce
         : e->latent       ? bt_cu_latent_open_pages(e)
                           : bt_attn_create(&e->pool, e->max_batch, &e->attn);
    /* The memory is set on the default stream, for which the engine's streams do not wait. */
    ce = ce == cudaSuccess ? cudaDeviceSynchronize() : ce;
    if (ce == cudaErrorInvalidValue) {
        snprintf(err, err_cap,
                 "%s/config.json: %u heads over %u KV heads of %u: the cuda engine has attention "
                 "for head_dim 64, 128, 256 and up to 16 heads per KV head, fewer where a block "
                 "has less than 160 KiB of shared memory",
                 conf->model_dir, c->heads, c->kv_heads, c->head_dim);
        return BT_ERR_UNSUPPORTED;
    }
    if (ce != cudaSuccess) {
        snprintf(err, err_cap, "engine: memory for %u KV pages: %s", info->pages,
                 cudaGetErrorString(ce));
        return BT_ERR_NO_MEMORY;
    }
    return BT_OK;
}

/* Checks that the kernels support the model, before the engine reads large files. */
static bt_status_t check_model(const struct bt_engine_config *conf, const struct bt_model_config *c,
                               char *err, size_t err_cap)
{
    if (c->mla.kv_rank) {
        return bt_cu_latent_check(conf, c, err, err_cap);
    }
    if (c->head_dim != 64 && c->head_dim != 128 && c->head_dim != 256) {
        snprintf(err, err_cap,
                 "%s/config.json: head_dim is %u: the cuda engine has attention for 64, 128 and "
                 "256; engine.device: cpu runs this model",
                 conf->model_dir, c->head_dim);
        return BT_ERR_UNSUPPORTED;
    }
    if (c->kv_heads == 0 || c->heads % c->kv_heads || c->heads / c->kv_heads > 16) {
        snprintf(err, err_cap,
                 "%s/config.json: %u heads over %u KV heads: the cuda engine has attention for 1 "
                 "to 16 heads per KV head; engine.device: cpu runs this model",
                 conf->model_dir, c->heads, c->kv_heads);
        return BT_ERR_UNSUPPORTED;
    }
    return BT_OK;
}

/* Checks that this device's kernels support the model's experts. */
static bt_status_t check_experts(const struct bt_engine_config *conf,
                                 const struct bt_model_config *c, char *err, size_t err_cap)
{
    const struct bt_cu_experts x = bt_cu_experts_of(c);
    if (!bt_cu_has_experts(c) ||
        (x.always * x.inter == c->experts.shared && bt_cu_experts_fits(&x))) {
        return BT_OK;
    }
    snprintf(
        err, err_cap,
        "%s/config.json: %u experts of %u x %u, %u of them used, in %u groups, and a shared one "
        "of %u: on a Hopper GPU the cuda engine has kernels for up to %u experts with a "
        "hidden_size that is a multiple of 16, up to %u used (with the shared one), %u groups, "
        "and shared experts that are a whole number of experts wide; engine.device: cpu runs "
        "this model",
        conf->model_dir, c->experts.n, c->hidden, x.inter, c->experts.used, x.groups,
        c->experts.shared, BT_CU_EXPERTS_MAX, BT_CU_EXPERTS_USED_MAX, BT_CU_EXPERTS_GROUPS_MAX);
    return BT_ERR_UNSUPPORTED;
}

static bt_status_t open_model(struct bt_engine *e, const struct bt_engine_config *conf, char *err,
                              size_t err_cap)
{
    struct bt_model_config *c = &e->model.config;
    struct bt_engine_info info = {.size = sizeof(info),
                                  .abi = BT_ENGINE_ABI,
                                  .caps = BT_ENGINE_CAP_MIXED | BT_ENGINE_CAP_DRAFTS |
                                          BT_ENGINE_CAP_HIDDEN,
                                  .vocab = c->vocab,
                                  .max_model_len = c->max_model_len,
                                  .pages = 1, /* host memory for pages, which is not used */
                                  .max_slots = conf->max_slots,
                                  .max_rows = conf->max_rows,
                                  .max_drafts = bt_cu_most_drafts(conf->max_slots, conf->max_rows),
                                  .hidden_bytes = c->hidden * (uint32_t)sizeof(float)};
    bt_status_t st = bt_model_kv_layout(c, conf->kv_dtype, conf->page_tokens, &info.layout);
    if (st != BT_OK || info.layout.n_groups != 1) {
        snprintf(err, err_cap,
                 "kv.block_tokens %u, model.kv_dtype %s: no KV layout of one group for this model",
                 conf->page_tokens, conf->kv_dtype ? conf->kv_dtype : "f16");
        return st != BT_OK ? st : BT_ERR_UNSUPPORTED;
    }
    e->e4m3 = info.layout.groups[0].dtype == BT_DT_FP8_E4M3;
    e->deterministic = conf->deterministic;
    info.caps |= e->deterministic ? BT_ENGINE_CAP_EXACT : 0u;
    st = e->deterministic ? bt_cu_check_invariant(e, err, err_cap) : BT_OK;
    st = st == BT_OK ? bt_host_init(&e->host, &info, 0, err, err_cap) : st;
    if (st == BT_OK) {
        st = bt_ids_load(conf->model_dir, info.vocab, &e->host.ids, err, err_cap);
    }
    if (st != BT_OK) {
        return st;
    }
    e->max_batch = conf->max_slots + info.max_drafts;
    e->load_events = bt_calloc(e->host.n_flows, sizeof(*e->load_events));
    if (bt_cu_gemm_create(&e->gemm) != cudaSuccess || bt_cu_draw_open(e) != BT_OK) {
        snprintf(err, err_cap, "engine cuda: cuBLASLt or memory for results: %s", e->fault);
        return BT_ERR_DEVICE;
    }
    size_t free_bytes = 0, total;
    bool fp8 =
        !e->deterministic && bt_cu_gemm_e4m3_fits(16, BT_CU_WEIGHT_BLOCK) && bt_model_stays_fp8(c);
    if (cudaMemGetInfo(&free_bytes, &total) == cudaSuccess) {
        const struct bt_engine_bytes bytes = {.fp8 = fp8 ? 1 : 2, .other = 2, .embed = 2};
        st = bt_engine_check_fits(conf, &e->model.config, bytes, free_bytes, "GPU", err, err_cap);
    }
    st = st == BT_OK ? bt_cu_model_load(e, conf, err, err_cap) : st;
    st = st == BT_OK ? bt_cu_step_open(e, err, err_cap) : st;
    if (st == BT_OK && bt_cu_draw_check(e) != BT_OK) {
        snprintf(err, err_cap, "engine cuda: trial of the sampler: %s", e->fault);
        return BT_ERR_DEVICE;
    }
    st = st == BT_OK && e->e4m3 && !e->latent ? open_wide(e, err, err_cap) : st;
    e->group_room = e->latent ? bt_cu_latent_room(e) : e->wide_pages;
    st = st == BT_OK ? open_pages(e, conf, err, err_cap) : st;
    st = st == BT_OK ? bt_cu_choose_wide(e, err, err_cap) : st;
    if (st == BT_OK && conf->slab && bt_cu_slab_pin(e, conf->slab, conf->slab_bytes) != BT_OK) {
        snprintf(err, err_cap,
                 "engine: cannot pin the slab's %llu bytes: %s; raise the limit on locked memory "
                 "(LimitMEMLOCK)",
                 (unsigned long long)conf->slab_bytes, e->fault);
        return BT_ERR_DEVICE;
    }
    return st;
}

static bt_status_t cuda_open(const struct bt_engine_config *conf, struct bt_engine **e_p,
                             const struct bt_engine_info **info_p, char *err, size_t err_cap)
{
    bt_status_t st = check_config(conf, err, err_cap);
    if (st != BT_OK) {
        return st;
    }
    struct bt_engine *e = bt_calloc(1, sizeof(*e));
    bt_list_init(&e->work);
    bt_list_init(&e->idle);
    bt_list_init(&e->waiting);
    bt_list_init(&e->slabs);
    st = bt_model_config_load(conf->model_dir, &e->model.config, err, err_cap);
    st = st == BT_OK ? check_model(conf, &e->model.config, err, err_cap) : st;
    st = st == BT_OK ? open_device(e, err, err_cap) : st;
    st = st == BT_OK ? check_experts(conf, &e->model.config, err, err_cap) : st;
    st = st == BT_OK ? open_model(e, conf, err, err_cap) : st;
    if (st != BT_OK) {
        cuda_close(e);
        return st;
    }
    struct cudaDeviceProp p;
    struct bt_engine_info *info = &e->host.info;
    if (e->sampler.host_only) { /* the host does not see early logits */
        info->caps &= ~(uint32_t)BT_ENGINE_CAP_HIDDEN;
    }
    snprintf(info->device, sizeof(info->device), "cuda %.60s",
             cudaGetDeviceProperties(&p, e->device) == cudaSuccess ? p.name : "?");
    *e_p = e;
    *info_p = info;
    return BT_OK;
}

/* ---- slots ---- */

static bt_status_t cuda_slot_open(struct bt_engine *e, uint32_t slot,
                                  const struct bt_engine_params *p, const uint32_t *tokens,
                                  uint32_t n, uint32_t n_prompt)
{
    if (p->n_bias > BT_CU_BIAS_MAX) {
        return BT_ERR_TOO_LARGE;
    }
    e->use.asked_ns = bt_mono_ns();
    bt_status_t st = bt_host_slot_open(&e->host, slot, p, tokens, n, n_prompt);
    if (st == BT_OK && (p->n_dola || p->penalty_alpha > 0)) {
        st = p->n_dola ? bt_cu_dola_open(e) : bt_cu_contrast_open(e, slot, p->hidden_max);
        if (st != BT_OK) {
            bt_host_slot_undo(&e->host, slot);
        }
    }
    if (st != BT_OK) {
        return st;
    }
    e->sampler.pending[slot] = 0;
    return bt_cu_draw_slot(e, slot, p, tokens, n, n_prompt);
}

/* In the compute stream's order: earlier forwards see the old ids, later ones the new. The source
 * is pageable memory, so the driver copies it within the call. */
static bt_status_t send_pages(struct bt_engine *e, uint32_t slot, uint32_t first, uint32_t n)
{
    int32_t ids[512];
    for (uint32_t at = 0; at < n; at += BT_ARRAY_LEN(ids)) {
        uint32_t m = BT_MIN(n - at, (uint32_t)BT_ARRAY_LEN(ids));
        for (uint32_t i = 0; i < m; i++) {
            uint32_t page = e->host.slots[slot].pages[first + at + i];
            ids[i] = page ? (int32_t)page - 1 : 0;
        }
        int32_t *to = e->table + (size_t)slot * e->host.max_pages_of_slot + first + at;
        BT_CU_TRY(e, cudaMemcpyAsync(to, ids, m * 4, cudaMemcpyHostToDevice, e->compute));
    }
    return BT_OK;
}

static bt_status_t cuda_slot_pages(struct bt_engine *e, uint32_t slot, uint32_t first,
                                   const uint32_t *pages, uint32_t n)
{
    bt_status_t st = bt_host_slot_pages(&e->host, slot, first, pages, n);
    return st == BT_OK ? send_pages(e, slot, first, n) : st;
}

/* If a forward that is still on the device waits for its sample, samples the fork along with it. */
static void fork_running(struct bt_engine *e, uint32_t from, uint32_t to)
{
    struct bt_list *l;
    bt_list_for_each (l, &e->work) {
        struct bt_host_ticket *t = BT_CONTAINER_OF(l, struct bt_cu_work, link)->t;
        for (uint32_t i = 0; t->forward && !t->sampled && i < t->n_sample; i++) {
            if (t->samples[i].slot == from) {
                struct bt_host_sample s = t->samples[i];
                s.slot = to;
                s.draft = BT_HOST_NO_DRAFT;
                bt_host_ticket_sample(t, &s);
                break;
            }
        }
    }
}

static bt_status_t cuda_slot_fork(struct bt_engine *e, uint32_t from, uint32_t to, uint32_t choice)
{
    if (from < e->host.info.max_slots && e->sampler.pending[from]) {
        bt_cu_work_advance(e, true); /* the fork's tokens include the one that is being drawn */
    }
    bt_status_t st = bt_host_slot_fork(&e->host, from, to, choice);
    if (st != BT_OK) {
        return st;
    }
    e->sampler.pending[to] = 0;
    fork_running(e, from, to);
    st = bt_cu_draw_fork(e, from, to);
    return st != BT_OK ? st : send_pages(e, to, 0, e->host.max_pages_of_slot);
}

static bt_status_t cuda_page_copy(struct bt_engine *e, uint32_t from, uint32_t to, uint32_t toks)
{
    const struct bt_kv_layout *l = &e->host.info.layout;
    if (from >= e->host.info.pages || to >= e->host.info.pages || toks > l->page_tokens) {
        return BT_ERR_INVALID;
    }
    if (from != to && toks) {
        BT_CU_TRY(e, cudaMemcpyAsync((uint8_t *)e->kv + (size_t)to * l->block_bytes,
                                     (uint8_t *)e->kv + (size_t)from * l->block_bytes,
                                     l->block_bytes, cudaMemcpyDeviceToDevice, e->compute));
    }
    return BT_OK;
}

static bt_status_t cuda_slot_accept(struct bt_engine *e, uint32_t slot, uint32_t token)
{
    if (slot < e->host.info.max_slots && e->sampler.pending[slot]) {
        bt_cu_work_advance(e, true);
    }
    bt_status_t st = bt_host_slot_accept(&e->host, slot, token);
    return st == BT_OK ? bt_cu_draw_accept(e, slot, token) : st;
}

static bt_status_t cuda_slot_close(struct bt_engine *e, uint32_t slot, bt_engine_ticket_t *quiet_p)
{
    bt_status_t st = bt_host_slot_close(&e->host, slot, quiet_p);
    if (st != BT_OK) {
        return st;
    }
    bt_cu_contrast_drop(e, slot);
    /* The slot is quiet only when the device has done everything enqueued so far. */
    struct bt_host_ticket *t = BT_CONTAINER_OF(e->host.done.prev, struct bt_host_ticket, link);
    bt_list_remove(&t->link);
    if (bt_cu_work_add(e, t, BT_CU_QUIET, e->compute, NULL) != BT_OK) {
        bt_host_ticket_done(&e->host, t, BT_ERR_DEVICE);
    }
    return BT_OK;
}

/* ---- steps ---- */

/* Rows that continue from a token that the host has not drawn yet must wait for it, and so must
 * those of a sequence whose drafts the host has not accepted yet: it does not know how long the
 * sequence is. */
static void settle(struct bt_engine *e, const struct bt_engine_batch *b)
{
    struct bt_list *l;
    bool host = false, drafts = false;
    bt_list_for_each (l, &e->work) {
        const struct bt_cu_work *w = BT_CONTAINER_OF(l, struct bt_cu_work, link);
        host |= w->kind == BT_CU_HOST_SAMPLE;
        drafts |= w->kind == BT_CU_DRAW && w->drafts;
    }
    for (uint32_t r = 0; (host || drafts) && r < b->n_rows; r++) {
        const struct bt_engine_row *row = &b->rows[r];
        bool known = row->slot < e->host.info.max_slots; /* else the batch is refused below */
        if ((host && !row->tokens) || (drafts && known && e->sampler.pending[row->slot])) {
            bt_cu_work_advance(e, true);
            return;
        }
    }
}

static bt_status_t cuda_forward(struct bt_engine *e, const struct bt_engine_batch *b,
                                bt_engine_ticket_t *fwd_p)
{
    uint32_t n, n_sample, singles = 0, drafts = 0;
    if (e->failed != cudaSuccess) {
        return BT_ERR_DEVICE;
    }
    e->use.asked_ns = bt_mono_ns();
    settle(e, b);
    bt_status_t st = bt_host_check_batch(&e->host, b, &n, &n_sample);
    for (uint32_t r = 0; st == BT_OK && r < b->n_rows; r++) {
        const struct bt_engine_row *row = &b->rows[r];
        singles += bt_cu_is_single(row) ? row->n : 0;
        drafts += row->n_draft;
        st = row->n_draft < BT_ATTN_FRESH ? st : BT_ERR_TOO_LARGE;
    }
    if (st == BT_OK &&
        (singles > e->max_batch || n_sample > e->max_batch || drafts > e->host.info.max_drafts)) {
        st = BT_ERR_TOO_LARGE;
    }
    if (st != BT_OK) {
        return st;
    }
    struct bt_host_ticket *t = bt_host_ticket_new(&e->host, 0);
    struct bt_cu_work *w;
    t->forward = true;
    *fwd_p = t->id;
    st = bt_cu_work_add(e, t, BT_CU_FORWARD, e->compute, &w);
    if (st != BT_OK) {
        bt_host_ticket_done(&e->host, t, st);
        return BT_OK;
    }
    cudaError_t ce = cudaEventRecord(w->start, e->compute);
    st = ce == cudaSuccess ? bt_cu_step_run(e, b, n, t) : bt_cu_fail(e, ce, "event");
    ce = cudaEventRecord(w->end, e->compute);
    if (st == BT_OK && ce != cudaSuccess) {
        st = bt_cu_fail(e, ce, "event");
    }
    t->status = st;
    e->logits_of = t->id;
    e->use.launched++;
    return BT_OK;
}

static uint32_t cuda_poll(struct bt_engine *e, struct bt_engine_event *ev, uint32_t max,
                          uint32_t timeout_us)
{
    uint64_t end = bt_mono_ns() + (uint64_t)timeout_us * 1000;
    for (;;) {
        bt_cu_flows_advance(e);
        bt_cu_work_advance(e, false);
        uint32_t n = bt_list_empty(&e->host.done) ? 0 : bt_host_poll(&e->host, ev, max, 0);
        bool idle = bt_list_empty(&e->work) && bt_list_empty(&e->waiting);
        if (n || max == 0 || idle || bt_mono_ns() >= end) {
            return n;
        }
        nanosleep(&(struct timespec){.tv_nsec = 5000}, NULL);
    }
}

static void cuda_release(struct bt_engine *e, bt_engine_ticket_t ticket)
{
    bt_host_release(&e->host, ticket);
}

static const struct bt_engine_vtable vtable = {
    .abi = BT_ENGINE_ABI,
    .name = "cuda",
    .open = cuda_open,
    .close = cuda_close,
    .slab_open = bt_cu_slab_open,
    .slab_close = bt_cu_slab_close,
    .slot_open = cuda_slot_open,
    .slot_pages = cuda_slot_pages,
    .slot_fork = cuda_slot_fork,
    .page_copy = cuda_page_copy,
    .slot_accept = cuda_slot_accept,
    .slot_close = cuda_slot_close,
    .flow_open = bt_cu_flow_open,
    .flow_add = bt_cu_flow_add,
    .flow_release = bt_cu_flow_release,
    .flow_close = bt_cu_flow_close,
    .forward = cuda_forward,
    .sample = bt_cu_sample,
    .poll = cuda_poll,
    .release = cuda_release,
};

const struct bt_engine_vtable *bt_engine_plugin(uint32_t abi)
{
    return abi == BT_ENGINE_ABI ? &vtable : NULL;
}
