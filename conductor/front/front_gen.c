/* A generation in flight: between one HTTP request and one request of the machine behind it. It
 * ends in one of three ways: on_done, on_error, or the client's leaving. A stream's event is
 * begun when its delta comes and completed when the next one comes, when it turns out to be the
 * last, or at the end of the loop's turn: so the last token and its finish_reason share an event.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/sha256.h"
#include "common/log/log.h"
#include "conductor/front/front_priv.h"

struct front_gen {
    struct bt_front *f;
    struct bt_list link, pending; /* in f->gens; in f->pending while event holds an open event */
    struct bt_http_req *req;
    struct bt_request *r;
    struct front_answer a;
    struct bt_buf event;
    uint32_t event_choice;
    bool started; /* the stream's header is out */
};

static void gen_free(struct front_gen *g)
{
    bt_list_remove(&g->link);
    bt_list_remove(&g->pending);
    g->f->n_gens--;
    bt_metric_set(g->f->m.open, g->f->n_gens);
    front_answer_cleanup(&g->a);
    bt_buf_cleanup(&g->event);
    free(g);
}

/* ---- streams ---- */

static void send_event(struct front_gen *g)
{
    if (!g->started) {
        g->started = true;
        front_common_headers(g->req);
        bt_http_add_header(g->req, "Cache-Control", "no-cache");
        bt_http_start(g->req, 200, "text/event-stream");
        front_count(g->f, 200);
    }
    bt_http_write(g->req, g->event.data, g->event.len);
    bt_buf_clear(&g->event);
}

static void complete_event(struct front_gen *g)
{
    if (!bt_list_empty(&g->pending)) {
        bt_list_remove(&g->pending);
        front_event_end(&g->a, g->event_choice, &g->event);
        send_event(g);
    }
}

void front_gen_flush_pending(void *arg)
{
    struct bt_front *f = arg;
    while (!bt_list_empty(&f->pending)) {
        complete_event(BT_CONTAINER_OF(f->pending.next, struct front_gen, pending));
    }
}

static void begin_event(struct front_gen *g, uint32_t choice)
{
    struct bt_front *f = g->f;
    if (bt_list_empty(&f->pending)) {
        bt_timer_start(f->loop, &f->pending_timer, 0, 0, front_gen_flush_pending, f);
    }
    g->event_choice = choice;
    bt_list_insert_tail(&f->pending, &g->pending);
}

/* ---- callbacks of the request machine ---- */

static void on_delta(void *arg, const struct bt_gen_delta *d)
{
    struct front_gen *g = arg;
    if (g->a.opt.stream) {
        complete_event(g);
    }
    front_answer_delta(&g->a, d, &g->event);
    if (g->a.opt.stream) {
        begin_event(g, d->choice);
    }
}

static void on_finish(void *arg, uint32_t choice, bt_finish_t reason, const char *stop_string)
{
    struct front_gen *g = arg;
    if (g->a.opt.stream && (bt_list_empty(&g->pending) || g->event_choice != choice)) {
        complete_event(g);
        front_event_empty(&g->a, choice, &g->event);
        begin_event(g, choice);
    }
    front_answer_finish(&g->a, choice, reason, stop_string);
    if (g->a.opt.stream) {
        complete_event(g);
    }
}

static void on_done(void *arg, const struct bt_gen_usage *u)
{
    struct front_gen *g = arg;
    if (g->a.opt.stream) {
        complete_event(g);
        front_events_last(&g->a, u, &g->event);
        send_event(g);
        bt_http_end(g->req);
    } else {
        front_whole(&g->a, u, &g->event);
        front_respond(g->f, g->req, 200, "application/json", &g->event);
    }
    gen_free(g);
}

static void on_error(void *arg, int http, const char *message, uint32_t retry_after_s)
{
    struct front_gen *g = arg;
    struct front_error e = {.retry_after_s = retry_after_s};
    front_fail(&e, http, NULL, NULL, "%s", message);
    complete_event(g);
    if (g->started) { /* the status is out: an error event, and no [DONE] */
        bt_buf_puts(&g->event, "data: ");
        front_error_json(&e, &g->event);
        bt_buf_puts(&g->event, "\n\n");
        bt_http_write(g->req, g->event.data, g->event.len);
        bt_http_end(g->req);
    } else {
        front_respond_error(g->f, g->req, &e);
    }
    gen_free(g);
}

static const struct bt_gen_ops gen_ops = {
    .on_delta = on_delta,
    .on_finish = on_finish,
    .on_done = on_done,
    .on_error = on_error,
};

static void on_gone(void *arg)
{
    struct front_gen *g = arg;
    bt_metric_add(g->f->m.gone, 1);
    bt_request_cancel(g->r);
    gen_free(g);
}

/* ---- the beginning ---- */

void front_generate(struct bt_front *f, struct bt_http_req *req, bool chat, const char *tenant)
{
    struct bt_gen_spec spec;
    struct front_options opt;
    struct front_error e = {0};
    size_t len;
    const void *body = bt_http_body(req, &len);
    if (f->draining) {
        front_fail(&e, 503, NULL, NULL, "this conductor is shutting down");
        e.retry_after_s = 1;
        front_respond_error(f, req, &e);
        return;
    }
    if (!front_parse_generation(&f->model, chat, body, len, &spec, &opt, &e)) {
        front_respond_error(f, req, &e);
        return;
    }
    uint8_t random[12];
    char hex[2 * sizeof(random) + 1];
    bt_random(random, sizeof(random));
    bt_hex(random, sizeof(random), hex);
    spec.id = bt_sprintf("%s-%s", chat ? "chatcmpl" : "cmpl", hex);
    spec.tenant = tenant != NULL ? bt_strdup(tenant) : NULL;
    spec.received_ns = bt_http_received_ns(req);
    spec.timeout_ms = f->request_timeout_ms;

    const char *timings = bt_http_header(req, "x-baton-timings");
    struct front_gen *g = bt_calloc(1, sizeof(*g));
    g->f = f;
    g->req = req;
    bt_list_insert_tail(&f->gens, &g->link);
    bt_list_init(&g->pending);
    bt_metric_set(f->m.open, ++f->n_gens);
    front_answer_init(&g->a, &opt, f->model.tok, spec.id, f->model_id, bt_real_ns() / 1000000000ull,
                      (uint32_t)spec.prompt.n, timings != NULL && strcmp(timings, "1") == 0);
    BT_DEBUG("generation_started", "req=%s prompt_tokens=%zu max_tokens=%u stream=%d", spec.id,
             spec.prompt.n, spec.max_tokens, opt.stream);
    bt_http_on_gone(req, on_gone, g);
    g->r = bt_request_start(f->rs, &spec, &gen_ops, g);
}
