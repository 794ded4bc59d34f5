/* A generation in flight: between one HTTP request and the requests of the machine behind it, one
 * for each prompt. It ends in one of three ways: the last on_done, the first on_error, or the
 * client's leaving. A stream's event is begun when its delta comes and completed when the next one
 * comes, when it turns out to be the last, or at the end of the loop's turn: so the last token and
 * its finish_reason share an event. What one turn makes leaves as one write. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/sha256.h"
#include "common/log/log.h"
#include "conductor/front/front_echo.h"

struct front_part { /* one prompt's request */
    struct front_gen *g;
    struct bt_request *r;    /* NULL: over */
    struct front_echo *echo; /* the prompt's logprobs are being written, or NULL */
};

struct front_gen {
    struct bt_front *f;
    struct bt_list link;     /* in f->gens */
    struct bt_list pending;  /* in f->pending while events wait for the turn's end */
    struct bt_http_req *req; /* NULL: the error is told, the other requests wait in f->ending */
    struct front_answer a;
    struct bt_buf events;
    bool open; /* the last of events is not completed yet */
    uint32_t event_choice;
    bool started; /* the stream's header is out */
    struct bt_gen_usage usage;
    uint32_t n_parts, n_running;
    char tenant[33]; /* "": none */
    char id[48];
    struct front_part parts[];
};

static void gen_free(struct front_gen *g)
{
    for (uint32_t i = 0; i < g->n_parts; i++) {
        if (g->parts[i].echo != NULL) {
            front_echo_forget(g->parts[i].echo);
        }
    }
    bt_list_remove(&g->link);
    bt_list_remove(&g->pending);
    g->f->n_gens--;
    bt_metric_set(g->f->m.open, g->f->n_gens);
    front_answer_cleanup(&g->a);
    bt_buf_cleanup(&g->events);
    free(g);
}

static void cancel_parts(struct front_gen *g)
{
    for (uint32_t i = 0; i < g->n_parts; i++) {
        if (g->parts[i].r != NULL) {
            bt_request_cancel(g->parts[i].r);
        }
    }
}

/* ---- streams ---- */

static void complete_event(struct front_gen *g)
{
    if (g->open) {
        g->open = false;
        front_event_end(&g->a, g->event_choice, &g->events);
    }
}

/* The plan of one prompt's request, under the id that it is explained by. */
static void add_plan(const struct front_part *p, const struct bt_gen_plan *plan)
{
    const struct front_gen *g = p->g;
    char id[64];
    if (g->n_parts == 1) {
        snprintf(id, sizeof(id), "%s", g->id);
    } else {
        snprintf(id, sizeof(id), "%s-%u", g->id, (unsigned)(p - g->parts));
    }
    front_plan_header(g->req, id, plan);
}

static void send_events(struct front_gen *g)
{
    complete_event(g);
    bt_list_remove(&g->pending);
    if (g->events.len == 0) {
        return;
    }
    if (!g->started) {
        g->started = true;
        front_common_headers(g->f, g->req);
        if (g->a.plan && g->parts[0].r != NULL) { /* of several prompts the first */
            add_plan(&g->parts[0], &bt_request_usage(g->parts[0].r)->plan);
        }
        bt_http_add_header(g->req, "Cache-Control", "no-cache");
        bt_http_start(g->req, 200, "text/event-stream");
        front_count(g->f, 200);
    }
    bt_http_write(g->req, g->events.data, g->events.len);
    bt_buf_clear(&g->events);
}

static void flush_pending(void *arg)
{
    struct bt_front *f = arg;
    while (!bt_list_empty(&f->pending)) {
        send_events(BT_CONTAINER_OF(f->pending.next, struct front_gen, pending));
    }
}

/* An event of choice has been begun in g->events. */
static void event_begun(struct front_gen *g, uint32_t choice)
{
    struct bt_front *f = g->f;
    g->open = true;
    g->event_choice = choice;
    if (bt_list_empty(&g->pending)) {
        if (bt_list_empty(&f->pending)) {
            bt_timer_start(f->loop, &f->pending_timer, 0, 0, flush_pending, f);
        }
        bt_list_insert_tail(&f->pending, &g->pending);
    }
}

/* ---- callbacks of the request machine ---- */

static uint32_t prompt_of(const struct front_part *p)
{
    return (uint32_t)(p - p->g->parts);
}

static uint32_t choice_of(const struct front_part *p, uint32_t choice)
{
    BT_ASSERT(choice < p->g->a.opt.n);
    return prompt_of(p) * p->g->a.opt.n + choice;
}

static void on_echo_taken(void *arg)
{
    struct front_part *p = arg;
    p->echo = NULL;
    if (p->r != NULL) { /* else it has failed meanwhile */
        bt_request_prompt_taken(p->r);
    }
}

static bool on_prompt(void *arg, const struct bt_gen_token *tokens, size_t n)
{
    struct front_part *p = arg;
    struct front_gen *g = p->g;
    if (g->req != NULL) {
        p->echo = front_echo_start(g->f, &g->a, prompt_of(p), tokens, n, on_echo_taken, p);
    }
    return p->echo == NULL;
}

static void on_delta(void *arg, const struct bt_gen_delta *d)
{
    struct front_part *p = arg;
    struct front_gen *g = p->g;
    if (g->req == NULL) {
        return;
    }
    complete_event(g);
    front_answer_delta(&g->a, choice_of(p, d->choice), d, &g->events);
    if (g->a.opt.stream) {
        event_begun(g, choice_of(p, d->choice));
    }
}

static void on_finish(void *arg, uint32_t of_prompt, bt_finish_t reason, const char *stop_string)
{
    struct front_part *p = arg;
    struct front_gen *g = p->g;
    if (g->req == NULL) {
        return;
    }
    uint32_t choice = choice_of(p, of_prompt);
    if (g->a.opt.stream && !(g->open && g->event_choice == choice)) {
        complete_event(g);
        front_event_empty(&g->a, choice, &g->events);
        event_begun(g, choice);
    }
    front_answer_finish(&g->a, choice, reason, stop_string);
    complete_event(g);
}

static double larger(double a, double b)
{
    return a > b ? a : b;
}

/* Usage of several prompts: counts add up, times are those of the slowest. */
static void add_usage(struct bt_gen_usage *sum, const struct bt_gen_usage *u, bool first)
{
    if (first) {
        *sum = *u;
        return;
    }
    sum->prompt_tokens += u->prompt_tokens;
    sum->completion_tokens += u->completion_tokens;
    sum->cached_tokens += u->cached_tokens;
    sum->kv_bytes += u->kv_bytes;
    sum->kv_segments += u->kv_segments;
    sum->replans += u->replans;
    sum->ttft_ms = larger(sum->ttft_ms, u->ttft_ms);
    sum->queue_ms = larger(sum->queue_ms, u->queue_ms);
    sum->prefill_ms = larger(sum->prefill_ms, u->prefill_ms);
    sum->decode_ms = larger(sum->decode_ms, u->decode_ms);
    sum->tbt_ms = larger(sum->tbt_ms, u->tbt_ms);
    sum->hidden_fraction = -1; /* of one transfer only */
}

static void on_done(void *arg, const struct bt_gen_usage *u)
{
    struct front_part *p = arg;
    struct front_gen *g = p->g;
    p->r = NULL;
    add_usage(&g->usage, u, g->n_running == g->n_parts);
    g->n_running--;
    front_keys_charge(g->f->keys, g->tenant[0] != '\0' ? g->tenant : NULL, u->completion_tokens);
    if (g->req == NULL || g->n_running > 0) {
        return;
    }
    if (g->a.opt.stream) {
        complete_event(g);
        front_events_last(&g->a, &g->usage, &g->events);
        send_events(g);
        bt_http_end(g->req);
    } else {
        front_whole(&g->a, &g->usage, &g->events);
        if (g->a.plan) {
            add_plan(&g->parts[0], &g->usage.plan);
        }
        front_respond(g->f, g->req, 200, "application/json", &g->events);
    }
    gen_free(g);
}

void front_gen_end_all(struct bt_front *f)
{
    while (!bt_list_empty(&f->ending)) {
        struct front_gen *g = BT_CONTAINER_OF(f->ending.next, struct front_gen, link);
        cancel_parts(g);
        gen_free(g);
    }
}

static void on_ending_timer(void *arg)
{
    front_gen_end_all(arg);
}

/* One prompt failed: so does the answer. The others are cancelled from the loop, because the
 * machine may be walking over its requests while it calls here. */
static void on_error(void *arg, int http, const char *message, uint32_t retry_after_s)
{
    struct front_part *p = arg;
    struct front_gen *g = p->g;
    struct bt_front *f = g->f;
    struct front_error e = {.retry_after_s = retry_after_s};
    struct bt_gen_plan plan = p->r != NULL ? bt_request_usage(p->r)->plan : (struct bt_gen_plan){0};
    p->r = NULL;
    g->n_running--;
    if (g->req == NULL) {
        return;
    }
    front_fail(&e, http, NULL, NULL, "%s", message);
    complete_event(g);
    if (g->started || g->events.len > 0) { /* tokens are out: an error event, and no [DONE] */
        bt_buf_puts(&g->events, "data: ");
        front_error_json(&e, &g->events);
        bt_buf_puts(&g->events, "\n\n");
        send_events(g);
        bt_http_end(g->req);
    } else {
        if (g->a.plan) {
            add_plan(p, &plan);
        }
        front_respond_error(f, g->req, &e);
    }
    g->req = NULL;
    if (g->n_running == 0) {
        gen_free(g);
        return;
    }
    bt_list_remove(&g->link);
    bt_list_insert_tail(&f->ending, &g->link);
    bt_timer_start(f->loop, &f->ending_timer, 0, 0, on_ending_timer, f);
}

static const struct bt_gen_ops gen_ops = {
    .on_prompt = on_prompt,
    .on_delta = on_delta,
    .on_finish = on_finish,
    .on_done = on_done,
    .on_error = on_error,
};

static void on_gone(void *arg)
{
    struct front_gen *g = arg;
    bt_metric_add(g->f->m.gone, 1);
    cancel_parts(g);
    gen_free(g);
}

/* ---- the beginning ---- */

/* What its headers ask for, within what its key allows. */
static void take_terms(struct bt_gen_spec *s, const struct front_key_terms *t,
                       const struct front_wishes *w)
{
    s->priority = w->has_priority ? w->priority : s->priority;
    s->slo_ttft_ms = w->slo_ttft_ms;
    s->slo_tbt_ms = w->slo_tbt_ms;
    if (t != NULL) {
        s->priority = BT_MAX(s->priority, t->priority);
        s->weight = t->weight;
        s->slo_ttft_ms = s->slo_ttft_ms > 0 ? s->slo_ttft_ms : t->slo_ttft_ms;
        s->slo_tbt_ms = s->slo_tbt_ms > 0 ? s->slo_tbt_ms : t->slo_tbt_ms;
    }
}

static void start(struct front_gen *g, struct front_generation *gen, const char *id,
                  const char *tenant, const struct front_wishes *w)
{
    for (uint32_t i = 0; i < g->n_parts; i++) {
        struct bt_gen_spec *s = &gen->specs[i];
        s->id = g->n_parts == 1 ? bt_strdup(id) : bt_sprintf("%s-%u", id, i);
        s->tenant = tenant != NULL ? bt_strdup(tenant) : NULL;
        s->received_ns = bt_http_received_ns(g->req);
        s->timeout_ms = g->f->request_timeout_ms;
        take_terms(s, front_keys_terms(g->f->keys, tenant), w);
        BT_DEBUG("generation_started", "req=%s prompt_tokens=%zu max_tokens=%u n=%u stream=%d",
                 s->id, s->prompt.n, s->max_tokens, s->n, g->a.opt.stream);
        struct front_part *p = &g->parts[i];
        p->g = g;
        p->r = bt_request_start(g->f->rs, s, &gen_ops, p);
        *s = (struct bt_gen_spec){0};
    }
}

static void run_completion(const struct front_model *m, struct front_job *j)
{
    j->ok = front_parse_generation(m, false, j->body, j->len, &j->gen, &j->e);
}

static void run_chat(const struct front_model *m, struct front_job *j)
{
    j->ok = front_parse_generation(m, true, j->body, j->len, &j->gen, &j->e);
}

static void on_parsed(struct front_job *j)
{
    struct bt_front *f = j->f;
    uint8_t random[12];
    char hex[2 * sizeof(random) + 1], id[sizeof(hex) + 16];
    bt_random(random, sizeof(random));
    bt_hex(random, sizeof(random), hex);
    snprintf(id, sizeof(id), "%s-%s", j->gen.opt.chat ? "chatcmpl" : "cmpl", hex);

    struct front_wishes w;
    uint64_t prompt_tokens = 0;
    for (uint32_t i = 0; i < j->gen.prompts.n; i++) {
        prompt_tokens += j->gen.specs[i].prompt.n;
    }
    if (!front_wishes_read(j->req, &w, &j->e) ||
        !front_keys_admit(f->keys, j->tenant, prompt_tokens, &j->e)) {
        front_respond_error(f, j->req, &j->e);
        return;
    }
    uint32_t n = j->gen.prompts.n;
    struct front_gen *g = bt_calloc(1, sizeof(*g) + n * sizeof(g->parts[0]));
    g->f = f;
    g->req = j->req;
    g->n_parts = g->n_running = n;
    snprintf(g->tenant, sizeof(g->tenant), "%s", j->tenant != NULL ? j->tenant : "");
    snprintf(g->id, sizeof(g->id), "%s", id);
    bt_list_insert_tail(&f->gens, &g->link);
    bt_list_init(&g->pending);
    bt_metric_set(f->m.open, ++f->n_gens);
    front_answer_init(&g->a, &j->gen, f->model.tok, id, f->model_id, bt_real_ns() / 1000000000ull,
                      w.timings, w.plan);
    bt_http_on_gone(g->req, on_gone, g);
    start(g, &j->gen, id, j->tenant, &w);
}

/* Before its body is looked at. A wish that is wrong is told when it is read in earnest. */
static bool turned_away(struct bt_front *f, struct bt_http_req *req, const char *tenant,
                        struct front_error *e)
{
    struct front_wishes w;
    struct front_error wrong = {0};
    struct bt_gen_spec s = {0};
    char why[192];
    size_t len;
    const char *body = bt_http_body(req, &len);
    if (!front_wishes_read(req, &w, &wrong)) {
        return false;
    }
    take_terms(&s, front_keys_terms(f->keys, tenant), &w);
    struct bt_gen_terms t = {.received_ns = bt_http_received_ns(req),
                             .knows_priority = w.has_priority || len == 0 ||
                                               memmem(body, len, "\"priority\"", 10) == NULL,
                             .priority = s.priority,
                             .slo_ttft_ms = s.slo_ttft_ms,
                             .slo_tbt_ms = s.slo_tbt_ms,
                             .body_bytes = len};
    if (!bt_requests_turn_away(f->rs, &t, why, sizeof(why), &e->retry_after_s)) {
        return false;
    }
    front_fail(e, 429, NULL, NULL, "%s", why);
    return true;
}

static void generate(struct bt_front *f, struct bt_http_req *req, const char *tenant,
                     void (*run)(const struct front_model *m, struct front_job *j))
{
    struct front_error e = {.retry_after_s = 1};
    if (f->draining) {
        front_fail(&e, 503, NULL, NULL, "this conductor is shutting down");
        front_respond_error(f, req, &e);
    } else if (turned_away(f, req, tenant, &e)) {
        front_respond_error(f, req, &e);
    } else {
        front_job_start(f, req, tenant, run, on_parsed);
    }
}

void front_post_completions(struct bt_front *f, struct bt_http_req *req, const char *tenant)
{
    generate(f, req, tenant, run_completion);
}

void front_post_chat(struct bt_front *f, struct bt_http_req *req, const char *tenant)
{
    generate(f, req, tenant, run_chat);
}
