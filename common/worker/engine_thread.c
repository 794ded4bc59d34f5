/* The engine thread: opens the model, then takes commands from the control thread, launches steps
 * and polls tickets. The only thread that calls the engine. It sleeps on its ring's eventfd when
 * nothing is in flight. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/engine/model_config.h"
#include "common/log/log.h"
#include "common/worker/core.h"

#define EVENTS_MAX 64

void bt_wcore_emit(struct bt_wcore *c, const struct bt_wout *o)
{
    while (!bt_ring_push(&c->out, o)) {
        usleep(50);
    }
}

void bt_wcore_ticket(struct bt_wcore *c, bt_engine_ticket_t t, int kind, void *ptr)
{
    BT_ASSERT(t != 0 && c->tickets.n < c->tickets.max);
    struct bt_wticket *w = &c->tickets.of[c->tickets.n++];
    w->ticket = t;
    w->kind = kind;
    w->ptr = ptr;
}

void bt_wcore_fatal(struct bt_wcore *c, bt_status_t st, const char *what)
{
    if (c->fatal) {
        return;
    }
    c->fatal = true;
    struct bt_wout o = {.kind = BT_WOUT_FATAL, .status = BT_ERR_DEVICE};
    snprintf(o.detail, sizeof(o.detail), "engine %s failed in %s: %s", c->vt->name, what,
             bt_status_text(st));
    BT_ERROR("engine_failed", "what=%s status=%s", what, bt_status_name(st));
    bt_wcore_emit(c, &o);
}

/* ---- opening ---- */

static void on_progress(void *arg, const char *what, double fraction)
{
    struct bt_wcore *c = arg;
    struct bt_wout o = {.kind = BT_WOUT_PROGRESS};
    o.u.fraction = fraction;
    snprintf(o.detail, sizeof(o.detail), "%s", what);
    bt_wcore_emit(c, &o);
}

static bt_status_t open_engine(struct bt_wcore *c, char *err, size_t cap)
{
    const struct bt_worker_conf *conf = c->conf;
    const struct bt_conf_common *cc = &conf->common;
    bt_status_t st = bt_model_root_key(
        cc->model_path,
        &(struct bt_model_settings){.load_format = cc->model_load_format,
                                    .activations = cc->model_activations,
                                    .quantize = cc->model_quantize,
                                    .kv_dtype = cc->model_kv_dtype,
                                    .deterministic = cc->engine_deterministic,
                                    .mtp = cc->model_mtp,
                                    .block_tokens = (uint32_t)cc->kv_block_tokens},
        &c->layout, &c->root, err, cap);
    if (st != BT_OK) {
        return st;
    }
    struct bt_engine_config ec = {
        .size = sizeof(ec),
        .model_dir = cc->model_path,
        .load_format = cc->model_load_format,
        .activations = cc->model_activations,
        .quantize = cc->model_quantize,
        .deterministic = cc->engine_deterministic,
        .kv_dtype = cc->model_kv_dtype,
        .mtp = cc->model_mtp,
        .threads = (uint32_t)conf->engine_threads,
        .page_tokens = (uint32_t)cc->kv_block_tokens,
        .pages = (uint32_t)conf->engine_pages,
        .max_slots = (uint32_t)conf->engine_max_slots,
        .max_rows = (uint32_t)conf->engine_max_rows,
        .mem_limit = conf->engine_mem,
        .rank = 0,
        .ranks = 1,
        .progress = on_progress,
        .progress_arg = c,
    };
    st = c->vt->open(&ec, &c->eng, &c->info, err, cap);
    if (st != BT_OK) {
        return st;
    }
    const struct bt_kv_layout *l = &c->info->layout;
    if (l->layout_id != c->layout.layout_id || l->page_tokens != c->layout.page_tokens) {
        snprintf(err, cap,
                 "engine %s lays out KV as %016llx, model and kv.block_tokens ask for %016llx: use "
                 "another engine.device",
                 c->vt->name, (unsigned long long)l->layout_id,
                 (unsigned long long)c->layout.layout_id);
        return BT_ERR_MISMATCH;
    }
    bool model = strchr(conf->speculate, '/') != NULL;
    if (bt_spec_kind(conf->speculate) == BT_SPEC_MTP && !(c->info->caps & BT_ENGINE_CAP_MTP)) {
        snprintf(err, cap,
                 "worker.speculate: the %s engine has no drafts of an MTP layer; use suffix, or "
                 "engine.device: cpu",
                 c->vt->name);
        return BT_ERR_UNSUPPORTED;
    }
    return model ? bt_wdraft_open(c, conf->speculate, err, cap) : BT_OK;
}

/* Where the rows' drafts come from. */
static void open_drafts(struct bt_wcore *c)
{
    bool can = (c->info->caps & BT_ENGINE_CAP_DRAFTS) != 0;
    bt_spec_kind_t kind = c->spec.model.eng ? BT_SPEC_MODEL : bt_spec_kind(c->conf->speculate);
    c->spec.kind = can ? kind : BT_SPEC_OFF;
    c->max_tokens = c->max_slots;
    if (c->spec.kind != BT_SPEC_OFF) {
        uint32_t drafts = BT_MIN(c->max_slots * BT_SPEC_MAX, c->info->max_drafts);
        c->max_tokens = BT_MAX(BT_MIN(c->max_rows, c->max_slots + drafts), c->max_slots);
        bt_spec_rates_init(&c->spec.rates);
        c->spec.rows = bt_calloc(BT_WORKER_DRAFT_ROWS, sizeof(c->spec.rows[0]));
        c->spec.seqs = bt_calloc(BT_WORKER_DRAFT_ROWS, sizeof(c->spec.seqs[0]));
    }
    if (c->spec.kind != BT_SPEC_OFF && (c->info->caps & BT_ENGINE_CAP_MTP)) {
        struct bt_wmtp *m = &c->spec.mtp;
        m->slots = bt_calloc(BT_WORKER_DRAFT_ROWS, sizeof(m->slots[0]));
        m->counts = bt_calloc(BT_WORKER_DRAFT_ROWS, sizeof(m->counts[0]));
        m->seqs = bt_calloc(BT_WORKER_DRAFT_ROWS, sizeof(m->seqs[0]));
        m->outs =
            bt_calloc((size_t)BT_WORKER_DRAFT_ROWS * BT_WORKER_MTP_DRAFTS, sizeof(m->outs[0]));
    }
}

/* Allocates all memory of the steps, sized by the engine's limits. */
static void allocate(struct bt_wcore *c)
{
    bt_list_init(&c->reqs.queue);
    bt_list_init(&c->reqs.active);
    bt_list_init(&c->reqs.waiting);
    bt_list_init(&c->reqs.closing);
    bt_list_init(&c->kept_prompts);
    bt_list_init(&c->puts.draining);
    c->block_tokens = c->layout.page_tokens;
    c->max_slots = c->info->max_slots;
    c->max_rows = c->info->max_rows;
    open_drafts(c);
    c->pages = bt_page_pool_create(c->info->pages);
    c->free_slots = bt_calloc(c->max_slots, sizeof(c->free_slots[0]));
    for (uint32_t i = 0; i < c->max_slots; i++) {
        c->free_slots[c->n_free_slots++] = c->max_slots - 1 - i;
    }
    c->batch.seqs = bt_calloc(c->max_slots, sizeof(c->batch.seqs[0]));
    c->seq_reqs = bt_calloc(c->max_slots, sizeof(c->seq_reqs[0]));
    c->step.places = bt_calloc(c->max_slots, sizeof(c->step.places[0]));
    c->step.reqs = bt_calloc(c->max_slots, sizeof(c->step.reqs[0]));
    c->step.rows = bt_calloc(c->max_slots, sizeof(c->step.rows[0]));
    c->step.erows = bt_calloc(c->max_slots, sizeof(c->step.erows[0]));
    /* At most one per slot, whatever is configured: an engine has as many flows as slots. */
    c->puts.max = BT_MIN((uint32_t)c->conf->writeback_max, c->max_slots);
    c->puts.all = c->puts.max + c->max_slots;
    c->puts.put = bt_calloc(c->puts.all, sizeof(c->puts.put[0]));
    /* Open tickets: at most four for a request (slot, three flows), one for each further slot of
     * its beams, one for a put, two for a step. */
    c->tickets.max = 4 * (uint32_t)c->conf->max_requests + 4 * c->max_slots + c->puts.all + 8;
    c->tickets.of = bt_calloc(c->tickets.max, sizeof(c->tickets.of[0]));
    uint32_t blocks = BT_DIV_UP(c->info->max_model_len, c->block_tokens) + 1;
    c->blocks = bt_calloc(blocks, sizeof(c->blocks[0]));
    for (uint32_t i = 0; i < BT_WORKER_TOKEN_BUFS; i++) {
        c->tokens.bufs[i].t = bt_calloc(c->max_tokens, sizeof(c->tokens.bufs[i].t[0]));
    }
    c->tokens.after = bt_calloc(2 * (size_t)c->max_slots, sizeof(c->tokens.after[0]));
    bt_wmask_init(&c->masks, c->max_tokens, c->info->vocab);
    c->batch.cost = &c->speed.fit.cost;
    c->batch.lim.max_rows = c->max_rows;
    c->batch.lim.block_tokens = c->block_tokens;
    c->batch.lim.mixed = (c->info->caps & BT_ENGINE_CAP_MIXED) != 0;
}

static void free_all(struct bt_wcore *c)
{
    while (c->pages != NULL && !bt_list_empty(&c->puts.draining)) {
        bt_wcore_drained(c, BT_CONTAINER_OF(c->puts.draining.next, struct bt_wreq, link));
    }
    bt_wdraft_close(c);
    if (c->eng != NULL) {
        c->vt->close(c->eng);
        c->eng = NULL;
    }
    bt_page_pool_destroy(c->pages);
    free(c->free_slots);
    free(c->batch.seqs);
    free(c->seq_reqs);
    free(c->step.places);
    free(c->step.reqs);
    free(c->step.rows);
    free(c->step.erows);
    free(c->puts.put);
    free(c->tickets.of);
    free(c->blocks);
    for (uint32_t i = 0; i < BT_WORKER_TOKEN_BUFS; i++) {
        free(c->tokens.bufs[i].t);
    }
    free(c->tokens.after);
    free(c->spec.rows);
    free(c->spec.seqs);
    free(c->spec.mtp.slots);
    free(c->spec.mtp.counts);
    free(c->spec.mtp.seqs);
    free(c->spec.mtp.outs);
    bt_wmask_cleanup(&c->masks);
}

/* ---- running ---- */

static void dispatch(struct bt_wcore *c, const struct bt_wticket *w,
                     const struct bt_engine_event *ev)
{
    if (ev->status == BT_ERR_DEVICE) {
        bt_wcore_fatal(c, ev->status, "a ticket");
        return;
    }
    switch (w->kind) {
    case BT_WT_FORWARD:
    case BT_WT_SAMPLE: bt_wcore_step_event(c, w->kind, ev); break;
    case BT_WT_SLOT: bt_wcore_slot_ticket(c, w->ptr); break;
    case BT_WT_FLOW: {
        struct bt_wreq *r = w->ptr;
        if (ev->status != BT_OK && ev->status != BT_ERR_CANCELLED) {
            bt_wcore_end(c, r, ev->status, "copy between pages and slab: %s",
                         bt_status_text(ev->status));
        }
        bt_wcore_flow_ticket(c, r);
        break;
    }
    case BT_WT_PUT:
        if (ev->status != BT_OK) {
            ((struct bt_wput *)w->ptr)->failed = true;
        }
        bt_wback_ticket(c, w->ptr);
        break;
    }
}

static bool take_ticket(struct bt_wcore *c, bt_engine_ticket_t t, struct bt_wticket *w)
{
    for (uint32_t i = 0; i < c->tickets.n; i++) {
        if (c->tickets.of[i].ticket == t) {
            *w = c->tickets.of[i];
            c->tickets.n--;
            memmove(&c->tickets.of[i], &c->tickets.of[i + 1],
                    (c->tickets.n - i) * sizeof(c->tickets.of[0]));
            return true;
        }
    }
    return false;
}

uint32_t bt_wcore_poll(struct bt_wcore *c, uint32_t timeout_us)
{
    struct bt_engine_event ev[EVENTS_MAX];
    uint32_t n = c->vt->poll(c->eng, ev, EVENTS_MAX, timeout_us);
    for (uint32_t i = 0; i < n && !c->fatal; i++) {
        struct bt_wticket w;
        bool known = take_ticket(c, ev[i].ticket, &w);
        if (known) {
            dispatch(c, &w, &ev[i]);
        }
        if (!known || w.kind != BT_WT_FORWARD || !bt_wcore_step_holds(c, ev[i].ticket)) {
            c->vt->release(c->eng, ev[i].ticket);
        }
    }
    return n;
}

static void command(struct bt_wcore *c, struct bt_wcmd *cmd)
{
    struct bt_wreq *r = cmd->req;
    switch (cmd->kind) {
    case BT_WCMD_SUBMIT: bt_wcore_submit(c, r); break;
    case BT_WCMD_OPENED: bt_wgrant_opened(c, cmd); break;
    case BT_WCMD_TRAILER:
        if (r->stage == BT_WREQ_LANDING) {
            r->role->landed(c, r, cmd->u.trailer.first_token, cmd->u.trailer.finished);
        }
        break;
    case BT_WCMD_TAIL: c->prefill->tail(c, r, cmd->u.tail); break;
    case BT_WCMD_COMPILED: bt_wmask_compiled(c, r, cmd->status, cmd->detail); break;
    case BT_WCMD_MASK_MADE: bt_wmask_made(c, r, cmd->u.ahead); break;
    case BT_WCMD_CANCEL:
        bt_wcore_end(c, r, cmd->status == BT_OK ? BT_ERR_CANCELLED : cmd->status, "%s",
                     cmd->detail);
        break;
    case BT_WCMD_CANCEL_CHOICE: bt_wcore_end_choice(c, r); break;
    case BT_WCMD_REVOKE:
        if (r->grant.open || r->stage == BT_WREQ_OPENING) {
            bt_wcore_end(c, r, cmd->status, "the kvstore has revoked its grant: %s", cmd->detail);
        }
        break;
    case BT_WCMD_ATTACHED: bt_wcore_attached(c, cmd->u.slab); break;
    case BT_WCMD_DETACHED: bt_wcore_detached(c); break;
    case BT_WCMD_PUT_SLOT:
        bt_wback_slot(c, cmd->u.put.id, cmd->status, cmd->u.put.slot, cmd->u.put.generation);
        break;
    case BT_WCMD_LEASED: bt_wlease_answered(c, cmd); break;
    case BT_WCMD_RECALL: bt_wlease_recalled(c, cmd->u.lease.id); break;
    case BT_WCMD_FORGET: bt_wcore_forget(c, r); break;
    case BT_WCMD_STOP: c->stop = true; break;
    }
}

/* held: a step waits for a buffer. The control thread may have returned one before this thread set
 * `sleeping`, so look again. */
static void sleep_on_ring(struct bt_wcore *c, bool held)
{
    if (!bt_ring_arm(&c->in)) {
        return;
    }
    if (held && bt_wcore_may_step(c)) {
        bt_ring_disarm(&c->in);
        return;
    }
    struct pollfd p = {.fd = c->in.efd, .events = POLLIN};
    /* Answers have a time limit. */
    int n = poll(&p, 1, c->leases.n_asked + c->puts.n > 0 ? 10 : 1000);
    BT_ASSERT(n >= 0 || errno == EINTR);
    bt_ring_disarm(&c->in);
}

static void run(struct bt_wcore *c)
{
    struct bt_wcmd cmd;
    while (!c->stop) {
        while (bt_ring_pop(&c->in, &cmd)) {
            command(c, &cmd);
        }
        if (c->fatal) {
            /* The engine has failed: the control thread has been told and will end the process. */
            sleep_on_ring(c, false);
            continue;
        }
        /* Send ends and closes before the next step: an engine without a device may spend the whole
         * step inside launch. */
        while (c->tickets.n > 0 && !c->fatal && bt_wcore_poll(c, 0) > 0) {
        }
        bool busy = c->step.active, held = !busy && !bt_wcore_may_step(c);
        bt_wlease_tick(c);
        if (!busy) {
            bt_wcore_admit(c);
            busy = !c->fatal && !held && bt_wcore_launch(c);
        }
        bt_wload_publish(c);
        if (c->tickets.n > 0 && !c->fatal) {
            bt_wcore_poll(c, 500);
        } else if (!busy && !c->fatal && !c->stop) {
            sleep_on_ring(c, held);
        }
    }
}

void *bt_wcore_thread(void *arg)
{
    struct bt_wcore *c = arg;
    char err[BT_WORKER_DETAIL] = "";
    struct bt_wout o = {.kind = BT_WOUT_READY};
    o.status = open_engine(c, err, sizeof(err));
    if (o.status == BT_OK) {
        allocate(c);
        bt_wcost_prior(c);
        bt_wcost_calibrate(c);
        atomic_store(&c->stats->load.pages_total, c->info->pages);
        atomic_store(&c->stats->load.slots_total, c->max_slots);
        bt_wload_publish(c);
    } else {
        o.kind = BT_WOUT_FAILED;
        memcpy(o.detail, err, sizeof(o.detail));
    }
    bt_wcore_emit(c, &o);
    if (o.kind == BT_WOUT_READY) {
        run(c);
    }
    free_all(c);
    atomic_store(&c->exited, true);
    bt_ring_wake(&c->out);
    return NULL;
}
