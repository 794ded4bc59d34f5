/* What the client of a generation receives. Short answers are one write, and a stream's events of
 * one turn are one write. Long whole answers, and streams that echo their prompts, are pulled: they
 * are made as fast as the client reads them. Loop thread. */
#include <stdio.h>
#include <stdlib.h>

#include "common/log/log.h"
#include "conductor/front/front_gen.h"

#define LONG_BYTES (256 * 1024) /* a text up to this length is one write */
#define PENDING_NS 2000000ull   /* of a turn of the loop: to send streams' events */

struct front_piece {
    struct bt_list link;
    bool echo;           /* an event with a prompt in it; else plain bytes */
    struct bt_buf bytes; /* echo: the text behind the prompt */
    size_t at;           /* how many of the bytes are sent */
    struct bt_front_logprobs lp;
    struct bt_front_writer writer;
};

static void piece_free(struct front_piece *p)
{
    bt_list_remove(&p->link);
    bt_buf_cleanup(&p->bytes);
    bt_front_logprobs_cleanup(&p->lp);
    free(p);
}

void bt_front_out_cleanup(struct bt_front_gen *g)
{
    while (!bt_list_empty(&g->queue)) {
        piece_free(BT_CONTAINER_OF(g->queue.next, struct front_piece, link));
    }
    bt_buf_cleanup(&g->events);
}

/* Adds the plan of one prompt's request as a header, with the id that `batonctl explain` knows. */
static void add_plan(const struct bt_front_part *p, const struct bt_gen_plan *plan)
{
    const struct bt_front_gen *g = p->g;
    char id[64];
    if (g->n_parts == 1) {
        snprintf(id, sizeof(id), "%s", g->id);
    } else {
        snprintf(id, sizeof(id), "%s-%u", g->id, (unsigned)(p - g->parts));
    }
    bt_front_plan_header(g->req, id, plan);
}

/* ---- streams ---- */

static struct front_piece *push(struct bt_front_gen *g)
{
    struct front_piece *p = bt_calloc(1, sizeof(*p));
    bt_list_insert_tail(&g->queue, &p->link);
    return p;
}

static void push_events(struct bt_front_gen *g)
{
    if (g->events.len > 0) {
        struct front_piece *p = push(g);
        p->bytes = g->events;
        g->queued += p->bytes.len;
        g->events = (struct bt_buf){0};
    }
}

static void append_some(struct front_piece *p, struct bt_buf *out)
{
    size_t n = BT_MIN(p->bytes.len - p->at, (size_t)BT_HTTP_PIECE);
    bt_buf_append(out, p->bytes.data + p->at, n);
    p->at += n;
}

static bt_http_pull_t pull_stream(void *arg, struct bt_buf *out)
{
    struct bt_front_gen *g = arg;
    while (!bt_list_empty(&g->queue)) {
        struct front_piece *p = BT_CONTAINER_OF(g->queue.next, struct front_piece, link);
        if (p->echo) {
            if (!g->a.format->echo(&g->a, &p->bytes, &p->lp, &p->writer, out)) {
                return BT_HTTP_MORE;
            }
        } else {
            append_some(p, out);
        }
        if (p->echo || p->at == p->bytes.len) {
            g->queued -= p->bytes.len;
            piece_free(p);
        }
        if (out->len >= BT_HTTP_PIECE) {
            return BT_HTTP_MORE;
        }
    }
    if (!g->closed) {
        return BT_HTTP_WAIT;
    }
    if (g->last_due && !g->a.format->last(&g->a, &g->usage, &g->writer, out)) {
        return BT_HTTP_MORE;
    }
    bt_front_gen_answered(g);
    return BT_HTTP_END;
}

static bool is_pulled(const struct bt_front_gen *g)
{
    return g->a.opt.echo || g->a.format->pulled;
}

static void start_stream(struct bt_front_gen *g)
{
    g->started = true;
    bt_front_common_headers(g->f, g->req);
    if (g->a.plan && g->parts[0].r != NULL) { /* with several prompts, the first one's plan */
        add_plan(&g->parts[0], &bt_request_usage(g->parts[0].r)->plan);
    }
    bt_http_add_header(g->req, "Cache-Control", "no-cache");
    bt_http_start(g->req, 200, "text/event-stream");
    bt_front_count(g->f, 200);
    g->pulled = is_pulled(g);
    if (g->pulled) {
        bt_http_pull(g->req, pull_stream, g);
    }
}

void bt_front_out_complete(struct bt_front_gen *g)
{
    if (g->open) {
        g->open = false;
        g->a.format->complete(&g->a, g->event_choice, &g->events);
    }
}

static void send_events(struct bt_front_gen *g)
{
    bt_front_out_complete(g);
    bt_list_remove(&g->pending);
    size_t unsent = g->started && !g->pulled ? bt_http_req_unsent(g->req) + g->events.len : 0;
    if (unsent > FRONT_UNSENT_MAX && !g->closed) {
        bt_front_out_slow(g, unsent);
        return;
    }
    if (g->events.len == 0 && bt_list_empty(&g->queue)) {
        return;
    }
    if (!g->started) {
        start_stream(g);
    }
    if (g->pulled) {
        push_events(g);
        bt_http_resume(g->req);
    } else {
        bt_http_write(g->req, g->events.data, g->events.len);
        bt_buf_clear(&g->events);
    }
}

/* Runs in slices: thousands of streams may have a token each. */
static void flush_pending(void *arg)
{
    struct bt_front *f = arg;
    uint64_t until_ns = bt_loop_until(f->loop, PENDING_NS);
    while (!bt_list_empty(&f->pending) && bt_mono_ns() < until_ns) {
        struct bt_front_gen *g = BT_CONTAINER_OF(f->pending.next, struct bt_front_gen, pending);
        send_events(g);
    }
    if (!bt_list_empty(&f->pending)) {
        bt_timer_start(f->loop, &f->pending_timer, 0, 0, flush_pending, f);
    }
}

void bt_front_out_begun(struct bt_front_gen *g, uint32_t choice)
{
    struct bt_front *f = g->f;
    g->open = true;
    g->event_choice = choice;
    if (bt_list_empty(&g->pending)) {
        if (f->pending_timer.heap_pos == 0) {
            bt_timer_start(f->loop, &f->pending_timer, 0, 0, flush_pending, f);
        }
        bt_list_insert_tail(&f->pending, &g->pending);
    }
}

void bt_front_out_echo(struct bt_front_gen *g, uint32_t choice, const struct bt_gen_delta *d)
{
    push_events(g);
    struct front_piece *p = push(g);
    p->echo = true;
    p->writer.choice = choice;
    bt_front_begin_echo(&g->a, choice, d, &p->bytes, &p->lp);
    g->queued += p->bytes.len;
    bt_front_out_begun(g, choice);
}

void bt_front_out_stream_end(struct bt_front_gen *g, bool all)
{
    bt_front_out_complete(g);
    g->closed = true;
    bt_front_gen_note(g);
    g->last_due = all;
    if (!is_pulled(g)) { /* short last events share a write with those before them */
        g->last_due = all && !g->a.format->last(&g->a, &g->usage, &g->writer, &g->events);
    }
    send_events(g);
    if (g->pulled) {
        bt_http_resume(g->req); /* pull the rest */
        bt_front_gen_close(g);
    } else if (g->last_due) {
        g->pulled = true;
        bt_http_pull(g->req, pull_stream, g);
        bt_front_gen_close(g);
    } else {
        bt_http_end(g->req);
        bt_front_gen_answered(g);
    }
}

/* ---- whole responses ---- */

static bt_http_pull_t pull_whole(void *arg, struct bt_buf *out)
{
    struct bt_front_gen *g = arg;
    if (!g->a.format->whole(&g->a, &g->usage, &g->writer, out)) {
        return BT_HTTP_MORE;
    }
    bt_front_gen_answered(g);
    return BT_HTTP_END;
}

void bt_front_out_whole(struct bt_front_gen *g)
{
    struct bt_http_req *req = g->req;
    struct bt_buf *out = &g->events;
    g->closed = true;
    bt_front_gen_note(g);
    if (g->a.plan) {
        add_plan(&g->parts[0], &g->usage.plan);
    }
    if (g->a.format->whole(&g->a, &g->usage, &g->writer, out)) {
        bt_front_respond(g->f, req, 200, FRONT_JSON_TYPE, out);
        bt_front_gen_answered(g);
        return;
    }
    g->started = g->pulled = true;
    bt_front_common_headers(g->f, req);
    bt_front_count(g->f, 200);
    bt_http_start(req, 200, FRONT_JSON_TYPE);
    bt_http_write(req, out->data, out->len);
    bt_buf_cleanup(out);
    bt_http_pull(req, pull_whole, g);
}

/* ---- ends of another kind ---- */

void bt_front_out_error(struct bt_front_gen *g, const struct bt_front_error *e,
                        const struct bt_front_part *p, const struct bt_gen_plan *plan)
{
    bt_front_out_complete(g);
    if (g->started || g->events.len > 0 || !bt_list_empty(&g->queue)) {
        g->a.format->error(&g->a, e, &g->events);
        bt_front_out_stream_end(g, false);
        return;
    }
    g->closed = true;
    bt_front_gen_note(g);
    if (g->a.plan && plan != NULL) {
        add_plan(p, plan);
    }
    bt_front_respond_error(g->f, g->req, e);
    bt_front_gen_answered(g);
}

/* Drops events that the client has not begun to get. */
static void drop_events(struct bt_front_gen *g)
{
    struct bt_list *next, *it = g->queue.next;
    for (; it != &g->queue; it = next) {
        struct front_piece *p = BT_CONTAINER_OF(it, struct front_piece, link);
        next = it->next;
        if (it != g->queue.next || (!p->echo && p->at == 0)) {
            g->queued -= p->bytes.len;
            piece_free(p);
        }
    }
    bt_front_out_complete(g);
    bt_buf_clear(&g->events);
}

void bt_front_out_slow(struct bt_front_gen *g, size_t unsent)
{
    struct bt_front_error e = {0};
    drop_events(g);
    bt_metric_add(g->f->m.slow, 1);
    BT_INFO("http_slow_reader", "id=%s unsent=%zu", g->id, unsent);
    bt_front_fail(&e, 500, NULL, "slow_reader",
                  "the client has not read %zu KiB of this stream, so it ends here; read faster, "
                  "ask for fewer choices or logprobs, or leave 'stream' out",
                  unsent / 1024);
    bt_front_out_error(g, &e, NULL, NULL);
}

/* ---- long texts that are there already ---- */

struct front_text {
    struct bt_front *f;
    struct bt_front_hold hold;
    struct bt_buf body;
    size_t at;
};

static void text_free(struct front_text *t)
{
    t->f->n_jobs--;
    bt_front_room_give_back(&t->f->room, &t->hold);
    bt_buf_cleanup(&t->body);
    free(t);
}

static bt_http_pull_t pull_text(void *arg, struct bt_buf *out)
{
    struct front_text *t = arg;
    size_t n = BT_MIN(t->body.len - t->at, (size_t)BT_HTTP_PIECE);
    bt_buf_append(out, t->body.data + t->at, n);
    t->at += n;
    if (t->at < t->body.len) {
        return BT_HTTP_MORE;
    }
    text_free(t);
    return BT_HTTP_END;
}

static void on_text_gone(void *arg)
{
    struct front_text *t = arg;
    bt_metric_add(t->f->m.gone, 1);
    text_free(t);
}

void bt_front_respond_long(struct bt_front *f, struct bt_http_req *req, const char *tenant,
                           struct bt_buf *body)
{
    struct bt_front_error e = {0};
    if (body->len <= LONG_BYTES) {
        bt_front_respond(f, req, 200, FRONT_JSON_TYPE, body);
        return;
    }
    char peer[BT_HTTP_PEER_LEN];
    bt_http_peer(req, peer);
    uint64_t owner = bt_front_room_owner(tenant, peer);
    if (!bt_front_room_fits(&f->room, owner, body->len, &e)) {
        bt_front_respond_error(f, req, &e);
        return;
    }
    struct front_text *t = bt_calloc(1, sizeof(*t));
    t->f = f;
    f->n_jobs++;
    t->body = *body;
    *body = (struct bt_buf){0};
    bt_front_room_take(&f->room, &t->hold, owner, t->body.len);
    bt_front_common_headers(f, req);
    bt_front_count(f, 200);
    bt_http_on_gone(req, on_text_gone, t);
    bt_http_start_sized(req, 200, FRONT_JSON_TYPE, t->body.len);
    bt_http_pull(req, pull_text, t);
}
