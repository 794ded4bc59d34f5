/* Drives an engine through engine.h for tests: sequences with their pages, steps, results. */
#ifndef BT_TESTS_GOLDEN_DRIVE_H
#define BT_TESTS_GOLDEN_DRIVE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/engine/engine.h"

#ifdef __SANITIZE_ADDRESS__
/* The leak checker of GCC 12 crashes on thread-local memory of libraries loaded later (oneDNN,
 * libgomp) unless it is told not to look for it. */
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
    return "intercept_tls_get_addr=0";
}
#endif

struct drive {
    const struct bt_engine_vtable *vt;
    struct bt_engine *e;
    const struct bt_engine_info *info;
    uint32_t next_page; /* pages are handed out one after another */
};

static inline struct bt_engine_params drive_greedy(int32_t logprobs)
{
    return (struct bt_engine_params){
        .top_p = 1.0f, .repetition_penalty = 1.0f, .logprobs = logprobs};
}

static const char *drive_quantize; /* model.quantize of engines to come; NULL: none */
static bool drive_deterministic;   /* engine.deterministic of engines to come */
static const char *drive_kv_dtype; /* model.kv_dtype of engines to come; NULL: f16 */
static bool drive_mtp;             /* model.mtp of engines to come */

static inline void drive_open_with(struct drive *d, const char *name, const char *model,
                                   const char *load_format, uint32_t page_tokens,
                                   const char *activations)
{
    char err[1024] = "";
    memset(d, 0, sizeof(*d));
    if (bt_engine_load(name, &d->vt, err, sizeof(err)) != BT_OK) {
        fail_msg("%s", err);
    }
    const struct bt_engine_config c = {.size = sizeof(c),
                                       .model_dir = model,
                                       .load_format = load_format,
                                       .threads = 2,
                                       .page_tokens = page_tokens,
                                       .pages = 4096 * 16 / page_tokens,
                                       .max_slots = 32,
                                       .max_rows = 2048,
                                       .ranks = 1,
                                       .activations = activations,
                                       .quantize = drive_quantize,
                                       .deterministic = drive_deterministic,
                                       .kv_dtype = drive_kv_dtype,
                                       .mtp = drive_mtp};
    if (d->vt->open(&c, &d->e, &d->info, err, sizeof(err)) != BT_OK) {
        fail_msg("%s", err);
    }
}

/* With activations of two parts, which come nearest to f32. */
static inline void drive_open_as(struct drive *d, const char *name, const char *model,
                                 const char *load_format, uint32_t page_tokens)
{
    drive_open_with(d, name, model, load_format, page_tokens, "split");
}

static inline void drive_open(struct drive *d, const char *name, const char *model,
                              uint32_t page_tokens)
{
    drive_open_as(d, name, model, "auto", page_tokens);
}

static inline void drive_close(struct drive *d)
{
    d->vt->close(d->e);
}

/* Opens a slot with pages for n + more tokens. */
static inline void drive_slot(struct drive *d, uint32_t slot, const struct bt_engine_params *p,
                              const uint32_t *tokens, uint32_t n, uint32_t more)
{
    uint32_t count = BT_DIV_UP(n + more, d->info->layout.page_tokens);
    assert_true(d->next_page + count <= d->info->pages);
    uint32_t *pages = malloc(count * sizeof(*pages));
    for (uint32_t i = 0; i < count; i++) { /* not consecutive, not rising */
        pages[i] = d->next_page + (count - 1 - i);
    }
    d->next_page += count;
    assert_int_equal(d->vt->slot_open(d->e, slot, p, tokens, n, n), BT_OK);
    assert_int_equal(d->vt->slot_pages(d->e, slot, 0, pages, count), BT_OK);
    free(pages);
}

/* Polls until `ticket` is there; other events are released. */
static inline struct bt_engine_event drive_wait(struct drive *d, bt_engine_ticket_t ticket)
{
    for (int i = 0; i < 1000; i++) {
        struct bt_engine_event ev;
        if (d->vt->poll(d->e, &ev, 1, 10000) == 0) {
            continue;
        }
        if (ev.ticket == ticket) {
            return ev;
        }
        d->vt->release(d->e, ev.ticket);
    }
    fail_msg("ticket %llu never came", (unsigned long long)ticket);
    return (struct bt_engine_event){0};
}

static inline void drive_slot_close(struct drive *d, uint32_t slot)
{
    bt_engine_ticket_t quiet;
    assert_int_equal(d->vt->slot_close(d->e, slot, &quiet), BT_OK);
    assert_int_equal(drive_wait(d, quiet).status, BT_OK);
    d->vt->release(d->e, quiet);
}

/* One step; out has room for the SAMPLE rows. Returns their number. */
static inline uint32_t drive_step(struct drive *d, const struct bt_engine_row *rows, uint32_t n,
                                  struct bt_engine_out *out)
{
    const struct bt_engine_batch b = {.n_rows = n, .rows = rows};
    bt_engine_ticket_t fwd, smp;
    assert_int_equal(d->vt->forward(d->e, &b, &fwd), BT_OK);
    assert_int_equal(d->vt->sample(d->e, fwd, NULL, &smp), BT_OK);
    struct bt_engine_event ev = drive_wait(d, smp);
    assert_int_equal(ev.status, BT_OK);
    if (ev.n_out) {
        memcpy(out, ev.out, ev.n_out * sizeof(*out));
    }
    d->vt->release(d->e, fwd);
    d->vt->release(d->e, smp);
    return ev.n_out;
}

/* Prefills tokens[from..n) in steps of `chunk`, samples after the last. */
static inline struct bt_engine_out drive_prefill(struct drive *d, uint32_t slot,
                                                 const uint32_t *tokens, uint32_t from, uint32_t n,
                                                 uint32_t chunk)
{
    struct bt_engine_out out = {0};
    for (uint32_t at = from; at < n; at += chunk) {
        uint32_t m = BT_MIN(chunk, n - at);
        const struct bt_engine_row row = {.slot = slot,
                                          .pos = at,
                                          .n = m,
                                          .tokens = tokens + at,
                                          .flags = at + m == n ? BT_ROW_SAMPLE : 0};
        drive_step(d, &row, 1, &out);
    }
    return out;
}

/* One decode step of a slot. */
static inline struct bt_engine_out drive_decode(struct drive *d, uint32_t slot)
{
    struct bt_engine_out out = {0};
    const struct bt_engine_row row = {
        .slot = slot, .pos = BT_ENGINE_POS_NEXT, .n = 1, .flags = BT_ROW_SAMPLE};
    assert_int_equal(drive_step(d, &row, 1, &out), 1);
    return out;
}

#endif
