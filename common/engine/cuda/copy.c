/* Flows on the device: copies between pages and the mapped slab, on streams of their own; events
 * order them with the layers of a step. A page's bytes on the device are those of its slab block,
 * so a whole block is one copy. The stream's callback raises the word of a STORE after its copies.
 * Owner thread: the engine's; the callback runs on a thread of the driver. */
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/engine/cuda/cuda_priv.h"
#include "common/engine/cuda/ranges.h"

struct tail { /* the bytes behind the last token of a partial block's segment, to be set to zero */
    uint8_t *at;
    size_t plane, used, planes;
};

struct raise { /* the argument of the callback */
    bt_flow_word_t *word;
    uint32_t epoch, progress;
    void (*bell)(void *);
    void *bell_arg;
    uint32_t n_tails;
    struct tail tails[];
};

/* Makes a LOAD flow's events at its first use: one for each of its last items, by item %
 * n_layers. */
static bt_status_t load_events(struct bt_engine *e, uint32_t flow)
{
    cudaEvent_t **events = &e->load_events[flow - 1];
    uint32_t layers = e->host.info.layout.n_layers;
    if (*events) {
        return BT_OK;
    }
    *events = bt_calloc(layers, sizeof(cudaEvent_t));
    for (uint32_t l = 0; l < layers; l++) {
        BT_CU_TRY(e, cudaEventCreateWithFlags(&(*events)[l], cudaEventDisableTiming));
    }
    return BT_OK;
}

static cudaEvent_t *events_of(const struct bt_engine *e, const struct bt_host_flow *f)
{
    return e->load_events[f - e->host.flows];
}

bt_status_t bt_cu_flow_open(struct bt_engine *e, int dir, int prio, bt_flow_word_t *word,
                            uint32_t epoch, void (*bell)(void *), void *bell_arg, uint32_t *flow_p)
{
    (void)prio; /* loads and stores have one stream each, without priorities */
    uint32_t flow = 0;
    e->use.asked_ns = bt_mono_ns();
    bt_status_t st = bt_host_flow_open(&e->host, dir, word, epoch, bell, bell_arg, &flow);
    if (st != BT_OK) {
        return st;
    }
    st = dir == BT_ENGINE_LOAD ? load_events(e, flow) : BT_OK;
    if (st != BT_OK) {
        bt_cu_flow_free(e, flow);
        return st;
    }
    *flow_p = flow;
    return BT_OK;
}

bt_status_t bt_cu_flow_add(struct bt_engine *e, uint32_t flow, const struct bt_engine_block *b,
                           uint32_t n)
{
    return bt_host_flow_add(&e->host, flow, b, n);
}

static void CUDART_CB raise_word(void *arg)
{
    struct raise *r = arg;
    for (uint32_t i = 0; i < r->n_tails; i++) {
        const struct tail *t = &r->tails[i];
        for (size_t p = 0; p < t->planes; p++) {
            memset(t->at + p * t->plane + t->used, 0, t->plane - t->used);
        }
    }
    if (r->word) {
        bt_flow_raise(r->word, r->epoch, r->progress);
    }
    if (r->bell) {
        r->bell(r->bell_arg);
    }
    free(r);
}

/* Copies that are given to the driver in one call: a call for each would take longer than the
 * copy. */
struct pile {
    void *to[256];
    const void *from[256];
    size_t bytes[256];
    size_t n;
};

static bt_status_t pile_send(struct bt_engine *e, struct pile *p, int dir)
{
    struct cudaMemcpyAttributes how = {.srcAccessOrder = cudaMemcpySrcAccessOrderStream,
                                       .flags = cudaMemcpyFlagPreferOverlapWithCompute};
    size_t first = 0, n = p->n;
    p->n = 0;
    if (n) {
        BT_CU_TRY(e, cudaMemcpyBatchAsync(p->to, p->from, p->bytes, n, &how, &first, 1,
                                          dir == BT_ENGINE_LOAD ? e->load : e->store));
    }
    return BT_OK;
}

/* Adds segments [from, to) of a block: they are contiguous on both sides. */
static bt_status_t pile_run(struct bt_engine *e, struct pile *p, const struct bt_engine_block *b,
                            uint32_t from, uint32_t to, int dir)
{
    const struct bt_kv_layout *l = &e->host.info.layout;
    uint32_t bytes;
    uint64_t off = bt_kv_segment(l, from, &bytes), end = bt_kv_segment(l, to - 1, &bytes) + bytes;
    uint8_t *slab = (uint8_t *)b->mem + off;
    uint8_t *page = (uint8_t *)e->kv + (size_t)b->page * l->block_bytes + off;
    bt_status_t st = BT_OK;
    for (uint64_t at = 0, n; st == BT_OK && at < end - off; at += n) {
        n = bt_cu_slab_run(e, slab + at, end - off - at);
        p->to[p->n] = (dir == BT_ENGINE_LOAD ? page : slab) + at;
        p->from[p->n] = (dir == BT_ENGINE_LOAD ? slab : page) + at;
        p->bytes[p->n++] = n;
        st = p->n == BT_ARRAY_LEN(p->to) ? pile_send(e, p, dir) : BT_OK;
    }
    return st;
}

static void add_tails(const struct bt_engine *e, const struct bt_engine_block *b, uint32_t from,
                      uint32_t to, struct raise *r)
{
    const struct bt_kv_layout *l = &e->host.info.layout;
    const struct bt_kv_group *g = &l->groups[0];
    size_t row = bt_kv_row_bytes(g), planes = bt_kv_planes(g);
    for (uint32_t layer = from; layer < to; layer++) {
        uint32_t bytes;
        uint8_t *at = (uint8_t *)b->mem + bt_kv_segment(l, layer, &bytes);
        r->tails[r->n_tails++] = (struct tail){at, row * l->page_tokens, row * b->toks, planes};
        if (g->scale_off) {
            r->tails[r->n_tails++] =
                (struct tail){at + g->scale_off, l->page_tokens, b->toks, planes};
        }
    }
}

/* Enqueues the copies of items [done, end). */
static bt_status_t copy_items(struct bt_engine *e, struct bt_host_flow *f, uint32_t end)
{
    uint32_t layers = e->host.info.layout.n_layers, full = e->host.info.layout.page_tokens;
    uint32_t n_tails = 0;
    for (uint32_t i = f->first; i < f->n && f->blocks[i].seq < end; i++) {
        n_tails += f->blocks[i].toks < full ? layers * 2 : 0; /* values and scales */
    }
    struct raise *r = bt_malloc(sizeof(*r) + n_tails * sizeof(r->tails[0]));
    *r = (struct raise){f->word, f->epoch, end, f->bell, f->bell_arg, 0};
    bt_status_t st = BT_OK;
    struct pile p;
    p.n = 0;
    uint32_t step = f->dir == BT_ENGINE_LOAD ? 1 : end - f->done;
    uint32_t at = f->first < f->n ? BT_MAX(f->done, f->blocks[f->first].seq) : end;
    for (; st == BT_OK && at < end; at += step) {
        uint32_t stop = BT_MIN(end, at + step);
        for (uint32_t i = f->first; st == BT_OK && i < f->n && f->blocks[i].seq < stop; i++) {
            const struct bt_engine_block *b = &f->blocks[i];
            uint32_t from = BT_MAX(b->seq, at), to = BT_MIN(b->seq + layers, stop);
            if (from >= to) {
                continue;
            }
            st = pile_run(e, &p, b, from - b->seq, to - b->seq, f->dir);
            if (f->dir == BT_ENGINE_STORE && b->toks < full) {
                add_tails(e, b, from - b->seq, to - b->seq, r);
            }
        }
        st = st == BT_OK ? pile_send(e, &p, f->dir) : st;
        if (st == BT_OK && f->dir == BT_ENGINE_LOAD) {
            cudaError_t ce = cudaEventRecord(events_of(e, f)[at % layers], e->load);
            st = ce == cudaSuccess ? BT_OK : bt_cu_fail(e, ce, "event of a load");
        }
    }
    bt_host_flow_done(&e->host, f, end);
    if (st != BT_OK || f->dir == BT_ENGINE_LOAD) {
        free(r);
        return st;
    }
    BT_CU_TRY(e, cudaLaunchHostFunc(e->store, raise_word, r));
    return BT_OK;
}

/* Gives items [done, end) to the copy stream. LOAD: one item at a time, with an event after
 * each. */
static bt_status_t flow_advance(struct bt_engine *e, struct bt_host_flow *f, uint32_t end)
{
    if (end <= f->done) {
        return BT_OK;
    }
    bt_cu_range_push(f->dir == BT_ENGINE_LOAD ? "flow load" : "flow store", end);
    bt_status_t st = copy_items(e, f, end);
    bt_cu_range_pop();
    return st;
}

static bt_status_t load_advance(struct bt_engine *e, struct bt_host_flow *f)
{
    return flow_advance(e, f, bt_host_flow_loadable(&e->host, f));
}

void bt_cu_flow_free(struct bt_engine *e, uint32_t flow)
{
    bt_host_flow_free(&e->host.flows[flow - 1]);
}

void bt_cu_flows_close(struct bt_engine *e)
{
    for (uint32_t i = 0; e->load_events && i < e->host.n_flows; i++) {
        cudaEvent_t *events = e->load_events[i];
        for (uint32_t l = 0; events && l < e->host.info.layout.n_layers; l++) {
            cudaEventDestroy(events[l]);
        }
        free(events);
    }
    free(e->load_events);
}

/* Gives waiting tickets their event as soon as their items are enqueued. */
void bt_cu_flows_advance(struct bt_engine *e)
{
    for (uint32_t i = 0; i < e->host.n_flows; i++) {
        struct bt_host_flow *f = &e->host.flows[i];
        if (f->used && f->dir == BT_ENGINE_LOAD && e->failed == cudaSuccess) {
            (void)load_advance(e, f);
        }
    }
    struct bt_list *l, *tmp;
    bt_list_for_each_safe (l, tmp, &e->waiting) {
        struct bt_host_ticket *t = BT_CONTAINER_OF(l, struct bt_host_ticket, link);
        struct bt_host_flow *f = bt_host_flow_of(&e->host, t->flow);
        struct bt_cu_work *w;
        if (f && !bt_host_flow_passed(f, t->seq) && e->failed == cudaSuccess) {
            continue;
        }
        bt_list_remove(&t->link);
        if (bt_cu_work_add(e, t, BT_CU_QUIET, e->load, &w) != BT_OK) {
            bt_host_ticket_done(&e->host, t, BT_ERR_DEVICE);
        } else {
            w->flow = f && t->close_flow ? t->flow : 0;
            t->status = f ? BT_OK : BT_ERR_CANCELLED;
        }
    }
}

bt_status_t bt_cu_flow_release(struct bt_engine *e, uint32_t flow, uint32_t seq,
                               bt_engine_ticket_t *done_p)
{
    struct bt_host_flow *f = bt_host_flow_of(&e->host, flow);
    if (!f || f->closing) {
        return BT_ERR_INVALID;
    }
    struct bt_host_ticket *t = bt_host_ticket_new(&e->host, 0);
    *done_p = t->id;
    if (f->dir == BT_ENGINE_LOAD) {
        t->flow = flow;
        t->seq = seq;
        bt_list_insert_tail(&e->waiting, &t->link);
        bt_cu_flows_advance(e);
        return BT_OK;
    }
    /* The copies must wait for everything that earlier forwards write. */
    cudaError_t ce = cudaEventRecord(e->layer_done, e->compute);
    ce = ce == cudaSuccess ? cudaStreamWaitEvent(e->store, e->layer_done, 0) : ce;
    bt_status_t st = ce == cudaSuccess ? flow_advance(e, f, seq) : bt_cu_fail(e, ce, "a release");
    st = st == BT_OK ? bt_cu_work_add(e, t, BT_CU_QUIET, e->store, NULL) : st;
    if (st != BT_OK) {
        bt_host_ticket_done(&e->host, t, st);
    }
    return BT_OK;
}

bt_status_t bt_cu_flow_close(struct bt_engine *e, uint32_t flow, bool abort_,
                             bt_engine_ticket_t *quiet_p)
{
    struct bt_host_flow *f = bt_host_flow_of(&e->host, flow);
    if (!f || f->closing) {
        return BT_ERR_INVALID;
    }
    struct bt_host_ticket *t = bt_host_ticket_new(&e->host, 0);
    *quiet_p = t->id;
    f->closing = true;
    /* The items that were added are still loaded. */
    if (f->dir == BT_ENGINE_LOAD && !abort_ && f->first < f->n) {
        t->flow = flow;
        t->seq = f->blocks[f->n - 1].seq + e->host.info.layout.n_layers;
        t->close_flow = true;
        bt_list_insert_tail(&e->waiting, &t->link);
        bt_cu_flows_advance(e);
        return BT_OK;
    }
    f->n = f->first;
    struct bt_list *l, *tmp;
    bt_list_for_each_safe (l, tmp, &e->waiting) { /* ends waits for items that will never come */
        struct bt_host_ticket *w = BT_CONTAINER_OF(l, struct bt_host_ticket, link);
        if (w->flow == flow) {
            bt_host_ticket_done(&e->host, w, BT_ERR_CANCELLED);
        }
    }
    struct bt_cu_work *w;
    if (bt_cu_work_add(e, t, BT_CU_QUIET, f->dir == BT_ENGINE_LOAD ? e->load : e->store, &w) !=
        BT_OK) {
        bt_host_ticket_done(&e->host, t, BT_ERR_DEVICE);
        return BT_OK;
    }
    w->flow = flow;
    return BT_OK;
}

bt_status_t bt_cu_layer_wait(struct bt_engine *e, const struct bt_engine_batch *b, uint32_t layer)
{
    uint64_t end = 0;
    uint32_t layers = e->host.info.layout.n_layers;
    for (uint32_t i = 0; i < b->n_rows; i++) {
        const struct bt_engine_at *at = &b->rows[i].wait;
        struct bt_host_flow *f = at->flow ? bt_host_flow_of(&e->host, at->flow) : NULL;
        if (!f || f->dir != BT_ENGINE_LOAD) {
            continue;
        }
        bt_status_t st = load_advance(e, f);
        while (st == BT_OK && !bt_host_flow_passed(f, at->seq + layer + 1)) {
            uint64_t now = bt_mono_ns();
            end = end ? end : now + BT_HOST_WAIT_NS;
            if (now > end) {
                return BT_ERR_TIMEOUT;
            }
            nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
            st = load_advance(e, f);
        }
        if (st != BT_OK) {
            return st;
        }
        if (f->done > at->seq + layer) {
            BT_CU_TRY(
                e, cudaStreamWaitEvent(e->compute, events_of(e, f)[(at->seq + layer) % layers], 0));
        }
    }
    return BT_OK;
}

/* Makes the store stream wait for the present work of the compute stream. Done once per layer. */
static bt_status_t store_after_compute(struct bt_engine *e, bool *asked)
{
    if (!*asked) {
        BT_CU_TRY(e, cudaEventRecord(e->layer_done, e->compute));
        BT_CU_TRY(e, cudaStreamWaitEvent(e->store, e->layer_done, 0));
        *asked = true;
    }
    return BT_OK;
}

bt_status_t bt_cu_layer_fire(struct bt_engine *e, const struct bt_engine_batch *b, uint32_t layer)
{
    bool asked = false;
    bt_status_t st = BT_OK;
    for (uint32_t i = 0; st == BT_OK && i < b->n_rows; i++) {
        const struct bt_engine_at *at = &b->rows[i].fire;
        struct bt_host_flow *f = at->flow ? bt_host_flow_of(&e->host, at->flow) : NULL;
        /* A step may have two chunks of one flow. Then the second chunk's items wait for all layers
         * of the first, as the word counts items in order. */
        if (f && bt_host_flow_next(f) >= at->seq + layer) {
            st = store_after_compute(e, &asked);
            st = st == BT_OK ? flow_advance(e, f, at->seq + layer + 1) : st;
        }
    }
    return st;
}

bt_status_t bt_cu_step_end(struct bt_engine *e, const struct bt_engine_batch *b)
{
    bool asked = false;
    bt_status_t st = BT_OK;
    for (uint32_t i = 0; i < b->n_rows; i++) {
        const struct bt_engine_row *r = &b->rows[i];
        struct bt_host_flow *f = r->fire.flow ? bt_host_flow_of(&e->host, r->fire.flow) : NULL;
        uint32_t end = r->fire.seq + e->host.info.layout.n_layers;
        if (st == BT_OK && f && f->done < end) {
            st = store_after_compute(e, &asked);
            st = st == BT_OK ? flow_advance(e, f, end) : st;
        }
        e->host.slots[r->slot].next_pos = bt_host_row_pos(&e->host, r) + r->n;
    }
    return st;
}
