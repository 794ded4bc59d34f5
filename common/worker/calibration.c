/* The cost of a step before the worker has computed any: a prior by the model's size and the kind
 * of device, then a few steps at the start, which also warm the engine up. Engine thread. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/engine/model_config.h"
#include "common/engine/model_fp8.h"
#include "common/log/log.h"
#include "common/worker/core.h"

/* ---- prior ---- */

/* The two slopes of the roofline as powers of ten: bytes per second from memory, operations per
 * second. */
struct bt_wmachine {
    double bytes_per_s, flops;
};
static const struct bt_wmachine cpu = {10e9, 100e9}, gpu = {2e12, 300e12};

void bt_wcost_prior(struct bt_wcore *c)
{
    struct bt_model_config m;
    char err[256];
    const struct bt_wmachine *x = strncmp(c->info->device, "cpu", 3) == 0 ? &cpu : &gpu;
    /* Parameters that every token uses, that one token uses, and of all experts; attention's
     * operations for a pair of tokens, of a prompt and of a single token. */
    const char *path = c->conf->common.model_path;
    double each = 2, dense = 1e6, used = 1e6, experts = 0, missed = 0, pair = 1e3, single = 1e3;
    if (bt_model_config_load(path, &m, err, sizeof(err)) == BT_OK) {
        struct bt_model_size s;
        bt_model_count(&m, &s);
        dense = (double)s.dense;
        /* Bytes of a parameter. */
        each -= x == &gpu && bt_model_stays_fp8(&m) && !c->conf->common.engine_deterministic &&
                        bt_model_is_fp8(path, c->conf->common.model_quantize)
                    ? (double)(s.weights + s.embed - s.wide) / (double)s.weights
                    : 0;
        used = dense + (double)s.expert * m.experts.used * s.expert_layers;
        experts = (double)s.expert * m.experts.n * s.expert_layers;
        missed = m.experts.n ? 1 - (double)m.experts.used / m.experts.n : 0;
        single = 2 * (double)s.latent_pair;
        /* The CPU engine computes prompts with latents, too (common/engine/README.md). */
        pair = x == &cpu ? single : 2 * (double)s.pair;
    }
    double kv_token = (double)c->layout.block_bytes / c->layout.page_tokens;
    struct bt_batch_cost prior = {
        .base_ns = 1e5 + 1e9 * each * dense / x->bytes_per_s,
        .token_ns = BT_BATCH_TOKEN_NS(1e9 * 2 * used / x->flops),
        .kv_ns = 1e9 * BT_MAX(kv_token / x->bytes_per_s, single / x->flops),
        .attn_ns = 1e9 * pair / x->flops,
        .experts_ns = 1e9 * each * experts / x->bytes_per_s,
        .missed = missed,
    };
    bt_batch_fit_init(&c->speed.fit, &prior);
}

/* ---- calibration ---- */

#define REPEATS 3 /* of each shape; the first run warms up */

struct bt_wcalibration {
    struct bt_wcore *c;
    uint64_t until_ns;
    uint32_t *tokens, *pages; /* [deepest], [pages of all rows] */
};

/* Waits for the ticket `want`; releases all others but `keep`. */
static bool wait_for(struct bt_wcore *c, bt_engine_ticket_t want, bt_engine_ticket_t keep)
{
    struct bt_engine_event ev[8];
    bool seen = false, ok = true;
    while (!seen) {
        uint32_t n = c->vt->poll(c->eng, ev, BT_ARRAY_LEN(ev), 1000);
        for (uint32_t i = 0; i < n; i++) {
            seen = seen || ev[i].ticket == want;
            ok = ok && ev[i].status == BT_OK;
            if (ev[i].ticket != keep) {
                c->vt->release(c->eng, ev[i].ticket);
            }
        }
    }
    return ok;
}

/* One step of `rows` rows of n tokens, each behind `depth` earlier tokens. */
static bool step(const struct bt_wcalibration *t, uint32_t rows, uint32_t depth, uint32_t n,
                 double *ns_p)
{
    struct bt_wcore *c = t->c;
    struct bt_engine_row *e = c->step.erows;
    bt_engine_ticket_t fwd = 0, sample = 0;
    for (uint32_t i = 0; i < rows; i++) {
        e[i] = (struct bt_engine_row){
            .slot = i, .pos = depth, .n = n, .tokens = t->tokens + depth, .flags = BT_ROW_SAMPLE};
    }
    struct bt_engine_batch batch = {.n_rows = rows, .rows = e};
    uint64_t start = bt_mono_ns();
    if (c->vt->forward(c->eng, &batch, &fwd) != BT_OK) {
        return false;
    }
    if (c->vt->sample(c->eng, fwd, NULL, &sample) != BT_OK) {
        (void)wait_for(c, fwd, 0);
        return false;
    }
    bool ok = wait_for(c, sample, fwd);
    *ns_p = (double)(bt_mono_ns() - start);
    c->vt->release(c->eng, fwd);
    return ok;
}

/* The same, with sequences that it opens and closes. */
static bool sample_step(const struct bt_wcalibration *t, uint32_t rows, uint32_t depth, uint32_t n,
                        double *ns_p)
{
    struct bt_wcore *c = t->c;
    uint32_t per = BT_DIV_UP(depth + n, c->block_tokens), opened = 0;
    struct bt_engine_params greedy = {
        .top_p = 1, .repetition_penalty = 1, .logprobs = -1, .seed = 1};
    if (bt_page_pool_get(c->pages, rows * per, t->pages) != BT_OK) {
        return false;
    }
    bool ok = true;
    for (; ok && opened < rows; opened++) {
        if (c->vt->slot_open(c->eng, opened, &greedy, t->tokens, depth + n, depth + n) != BT_OK) {
            ok = false;
            break;
        }
        ok = c->vt->slot_pages(c->eng, opened, 0, t->pages + (size_t)opened * per, per) == BT_OK;
    }
    ok = ok && step(t, rows, depth, n, ns_p);
    for (uint32_t i = 0; i < opened; i++) {
        bt_engine_ticket_t quiet;
        if (c->vt->slot_close(c->eng, i, &quiet) != BT_OK || !wait_for(c, quiet, 0)) {
            return false; /* the engine has failed: its pages must not be reused */
        }
    }
    bt_page_pool_put(c->pages, t->pages, rows * per);
    return ok;
}

/* Measures a shape if there is room and, by the cost known so far, time for it. false: the engine
 * has failed. */
static bool try_shape(struct bt_wcalibration *t, uint32_t rows, uint32_t depth, uint32_t n)
{
    struct bt_wcore *c = t->c;
    bool prompt = n > 1;
    struct bt_batch_work w = {.tokens = (double)rows * n,
                              .kv = prompt ? 0 : (double)rows * depth,
                              .attn = prompt ? (double)rows * n * (depth + n / 2.0) : 0,
                              .prompt = prompt};
    uint32_t pages = rows * BT_DIV_UP(depth + n, c->block_tokens);
    if (n == 0 || rows == 0 || rows > c->max_slots || (uint64_t)rows * n > c->max_rows ||
        depth + n >= c->info->max_model_len || pages > c->info->pages) {
        return true;
    }
    double ns, best = INFINITY;
    int seen = 0;
    for (; seen < REPEATS; seen++) {
        double guess = bt_batch_work_ns(&c->speed.fit.cost, &w);
        uint64_t now = bt_mono_ns();
        if (now >= t->until_ns || guess > (double)(t->until_ns - now)) {
            break;
        }
        if (!sample_step(t, rows, depth, n, &ns)) {
            return false;
        }
        best = BT_MIN(best, ns);
    }
    /* Only the shortest run of a shape counts: other programs may delay single runs while the
     * machine starts. The fit would treat such a delay as a property of the device until later
     * steps correct it. */
    for (int i = 1; i < seen; i++) {
        (void)bt_batch_fit_step(&c->speed.fit, &w, best);
    }
    return true;
}

void bt_wcost_calibrate(struct bt_wcore *c)
{
    uint64_t start = bt_mono_ns();
    if (c->conf->engine_calibrate_ms == 0) {
        return;
    }
    uint32_t block = c->block_tokens, top = c->max_rows;
    uint32_t deep = (BT_MIN(c->info->max_model_len, 4 * top) - 1) / block * block;
    struct bt_wcalibration t = {.c = c,
                                .until_ns = start + c->conf->engine_calibrate_ms * 1000000,
                                .tokens = bt_calloc((size_t)deep + top + 1, sizeof(*t.tokens)),
                                .pages = bt_calloc(c->info->pages, sizeof(*t.pages))};
    for (uint32_t i = 0; i < deep + top + 1; i++) {
        t.tokens[i] = (uint32_t)(i * 2654435761u >> 8) % c->info->vocab;
    }
    uint32_t rows = BT_MIN(c->max_slots, top);
    bool ok = try_shape(&t, 1, block, 1) && try_shape(&t, 1, 0, block) &&
              try_shape(&t, BT_MIN(rows, 8u), block, 1) && try_shape(&t, 1, 0, top / 4) &&
              try_shape(&t, 1, 0, BT_MIN(top, 256u)) && try_shape(&t, 1, 0, BT_MIN(top, 64u)) &&
              try_shape(&t, 1, 0, top) && try_shape(&t, rows, block, 1) &&
              try_shape(&t, 1, deep > top ? deep - top : 0, top) &&
              try_shape(&t, 1, BT_MAX(deep, 1u) - 1, 1);
    if (ok) {
        BT_INFO("calibrated",
                "ms=%.0f steps=%llu base_us=%.1f token_us=%.2f kv_ns=%.3f attn_ns=%.4f "
                "experts_us=%.1f",
                (double)(bt_mono_ns() - start) / 1e6,
                (unsigned long long)(c->speed.fit.seen[0].steps + c->speed.fit.seen[1].steps),
                c->speed.fit.cost.base_ns / 1e3,
                c->speed.fit.cost.token_ns[BT_BATCH_SEGMENTS - 1] / 1e3, c->speed.fit.cost.kv_ns,
                c->speed.fit.cost.attn_ns, c->speed.fit.cost.experts_ns / 1e3);
    } else {
        BT_WARN("calibration_failed", "engine=%s why=%s", c->vt->name,
                "a step failed; the first predictions use a rough cost of steps instead");
    }
    free(t.tokens);
    free(t.pages);
}
