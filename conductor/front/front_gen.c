/* A generation in flight. It connects one HTTP request with the machine's requests, one for each
 * prompt. It ends in one of three ways: with the last on_done, with the first on_error, or when the
 * client leaves.
 *
 * An event of a stream begins when its delta arrives. It is completed when the next delta arrives,
 * when it turns out to be the last one, or at the end of the loop's turn. So the last token and its
 * finish_reason are in one event. With a thousand prompts, starting or cancelling requests and
 * freeing answers take long, so they are done in slices. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/sha256.h"
#include "common/log/log.h"
#include "conductor/front/front_elements.h"
#include "conductor/front/front_gen.h"
#include "conductor/front/front_jobs.h"

static void run_responses(const struct bt_front_model *m, struct bt_front_job *j)
{
    j->ok = bt_front_parse_generation(m, FRONT_API_RESPONSES, j->body, j->len, &j->gen, &j->e);
}

/* Limit of array elements in an answer for the logprobs of its prompts: about 1 GiB of text. The
 * loop writes that much in slices, in half a minute. */
#define ANSWER_NAMES_MAX 64000000ull
/* The memory of a prompt and of a choice besides their text: the structures of a request and of an
 * answer. */
#define PROMPT_BYTES 4096
#define CHOICE_BYTES 512

/* ---- the end ---- */

static void on_dead_timer(void *arg);

/* Frees the specs that were not started. The machine owns the started ones. */
static void specs_free(struct bt_front_gen *g)
{
    struct bt_front_generation rest = {.specs = g->specs};
    rest.prompts.n = g->n_parts;
    rest.prompts.list = bt_calloc(g->n_parts, sizeof(rest.prompts.list[0]));
    bt_front_generation_cleanup(&rest);
}

/* Frees one of g's large parts, or g itself. Returns true if g is freed. */
static bool gen_shed(struct bt_front_gen *g)
{
    struct bt_front *f = g->f;
    if (bt_front_answer_shed(&g->a)) {
        return false;
    }
    bt_list_remove(&g->link);
    bt_front_room_give_back(&f->room, &g->hold);
    bt_front_answer_cleanup(&g->a);
    bt_front_out_cleanup(g);
    specs_free(g);
    free(g);
    return true;
}

/* Called when nothing refers to g any more. The loop frees its memory in slices. */
static void gen_free(struct bt_front_gen *g)
{
    struct bt_front *f = g->f;
    bt_list_remove(&g->link);
    bt_list_remove(&g->pending);
    bt_list_remove(&g->starting);
    bt_list_remove(&g->ending);
    for (uint32_t i = 0; i < g->n_parts; i++) {
        if (g->parts[i].tokens > 0) { /* the client has left, or the request has failed */
            bt_front_keys_charge(f->keys, g->tenant, g->parts[i].tokens);
        }
    }
    bt_front_keys_end(f->keys, g->tenant, g->n_generations);
    f->n_gens--;
    bt_metric_set(f->m.open, f->n_gens);
    if (bt_list_empty(&f->dead)) {
        bt_timer_start(f->loop, &f->dead_timer, 0, 0, on_dead_timer, f);
    }
    bt_list_insert_tail(&f->dead, &g->link);
}

static void free_dead(struct bt_front *f, uint64_t until_ns)
{
    while (!bt_list_empty(&f->dead) && bt_mono_ns() < until_ns) {
        (void)gen_shed(BT_CONTAINER_OF(f->dead.next, struct bt_front_gen, link));
    }
}

static void on_dead_timer(void *arg)
{
    struct bt_front *f = arg;
    free_dead(f, bt_mono_ns() + BT_LOOP_SLICE_NS);
    if (!bt_list_empty(&f->dead)) {
        bt_timer_start(f->loop, &f->dead_timer, 0, 0, on_dead_timer, f);
    }
}

static void on_ending_timer(void *arg);

/* The loop cancels the parts later. There may be a thousand of them, and this function may be
 * called while the machine iterates over its requests. */
void bt_front_gen_close(struct bt_front_gen *g)
{
    struct bt_front *f = g->f;
    g->closed = true;
    bt_list_remove(&g->starting);
    bt_list_remove(&g->pending);
    if (g->n_live == 0 && g->req == NULL) {
        gen_free(g);
        return;
    }
    if (g->n_live > 0 && bt_list_empty(&g->ending)) {
        if (bt_list_empty(&f->ending)) {
            bt_timer_start(f->loop, &f->ending_timer, 0, 0, on_ending_timer, f);
        }
        bt_list_insert_tail(&f->ending, &g->ending);
    }
}

void bt_front_gen_note(const struct bt_front_gen *g)
{
    struct bt_front_note *note = bt_front_note(g->req);
    if (note == NULL) {
        return;
    }
    note->completion_tokens = g->usage.completion_tokens; /* of prompts that have ended */
    for (uint32_t i = 0; i < g->n_parts; i++) {
        note->completion_tokens += g->parts[i].tokens;
    }
}

void bt_front_gen_answered(struct bt_front_gen *g)
{
    g->req = NULL;
    bt_front_gen_close(g);
}

/* Returns false if the time is over and some parts are not cancelled yet. */
static bool cancel_parts(struct bt_front_gen *g, uint64_t until_ns)
{
    for (uint32_t i = 0; i < g->n_started && g->n_live > 0; i++) {
        struct bt_request *r = g->parts[i].r;
        if (r == NULL) {
            continue;
        }
        if (bt_mono_ns() >= until_ns) {
            return false;
        }
        g->parts[i].r = NULL;
        g->n_live--;
        bt_request_cancel(r);
    }
    return true;
}

static void end_some(struct bt_front *f, uint64_t until_ns)
{
    while (!bt_list_empty(&f->ending)) {
        struct bt_front_gen *g = BT_CONTAINER_OF(f->ending.next, struct bt_front_gen, ending);
        if (!cancel_parts(g, until_ns)) {
            return;
        }
        bt_list_remove(&g->ending);
        if (g->req == NULL) {
            gen_free(g);
        }
    }
}

static void on_ending_timer(void *arg)
{
    struct bt_front *f = arg;
    end_some(f, bt_mono_ns() + BT_LOOP_SLICE_NS);
    if (!bt_list_empty(&f->ending)) {
        bt_timer_start(f->loop, &f->ending_timer, 0, 0, on_ending_timer, f);
    }
}

void bt_front_gen_end_all(struct bt_front *f)
{
    end_some(f, UINT64_MAX);
    free_dead(f, UINT64_MAX);
    bt_timer_stop(f->loop, &f->pending_timer);
    bt_timer_stop(f->loop, &f->starting_timer);
    bt_timer_stop(f->loop, &f->ending_timer);
    bt_timer_stop(f->loop, &f->dead_timer);
}

static void on_gone(void *arg)
{
    struct bt_front_gen *g = arg;
    bt_metric_add(g->f->m.gone, 1);
    if (!g->closed) {
        bt_front_gen_note(g);
    }
    bt_front_gen_answered(g);
}

/* Called when g uses more memory. Returns false if it may not; then g has ended. */
static bool has_room(struct bt_front_gen *g)
{
    struct bt_front_error e = {0};
    size_t bytes = g->base + g->a.held + g->queued + g->events.len;
    if (g->queued + g->events.len > FRONT_QUEUED_MAX) {
        bt_front_out_slow(g, g->queued + g->events.len);
        return false;
    }
    if (bt_front_room_grow(&g->f->room, &g->hold, bytes, &e)) {
        return true;
    }
    bt_front_out_error(g, &e, NULL, NULL);
    return false;
}

/* ---- callbacks of the request machine ---- */

static uint32_t prompt_of(const struct bt_front_part *p)
{
    return (uint32_t)(p - p->g->parts);
}

static uint32_t choice_of(const struct bt_front_part *p, uint32_t choice)
{
    BT_ASSERT(choice < p->g->a.opt.n);
    return prompt_of(p) * p->g->a.opt.n + choice;
}

static void on_prompt(void *arg, const struct bt_gen_token *tokens, size_t n)
{
    struct bt_front_part *p = arg;
    if (!p->g->closed) {
        bt_front_answer_prompt(&p->g->a, prompt_of(p), tokens, n);
    }
}

static void on_delta(void *arg, const struct bt_gen_delta *d)
{
    struct bt_front_part *p = arg;
    struct bt_front_gen *g = p->g;
    p->tokens += d->n_tokens;
    if (g->closed) {
        return;
    }
    uint32_t choice = choice_of(p, d->choice);
    g->a.cached_tokens = bt_request_usage(p->r)->cached_tokens;
    bt_front_out_complete(g);
    if (bt_front_echo_due(&g->a, choice)) {
        bt_front_out_echo(g, choice, d);
    } else {
        if (bt_front_answer_delta(&g->a, choice, d, &g->events)) {
            bt_front_out_begun(g, choice);
        }
    }
    (void)has_room(g);
}

/* Sends the text of the choice that was held back. */
static void flush_choice(struct bt_front_gen *g, uint32_t choice)
{
    struct bt_buf held;
    bt_buf_init(&held);
    if (bt_front_answer_flush(&g->a, choice, &held)) {
        bt_front_out_complete(g);
        bt_buf_append(&g->events, held.data, held.len);
        bt_front_out_begun(g, choice);
    }
    bt_buf_cleanup(&held);
}

static void on_finish(void *arg, uint32_t of_prompt, bt_finish_t reason, const char *stop_string)
{
    struct bt_front_part *p = arg;
    struct bt_front_gen *g = p->g;
    if (g->closed) {
        return;
    }
    uint32_t choice = choice_of(p, of_prompt);
    flush_choice(g, choice);
    if (g->a.opt.stream && !(g->open && g->event_choice == choice)) {
        bt_front_out_complete(g);
        if (bt_front_echo_due(&g->a, choice)) {
            bt_front_out_echo(g, choice, NULL);
        } else {
            bt_front_answer_empty(&g->a, choice, &g->events);
            bt_front_out_begun(g, choice);
        }
    }
    bt_front_answer_finish(&g->a, choice, reason, stop_string);
    bt_front_out_complete(g);
    (void)has_room(g);
}

static double larger(double a, double b)
{
    return a > b ? a : b;
}

/* Adds the usage of several prompts. Counts are summed; times are those of the slowest prompt. */
static void add_usage(struct bt_gen_usage *sum, const struct bt_gen_usage *u, bool first)
{
    if (first) {
        *sum = *u;
        return;
    }
    sum->prompt_tokens += u->prompt_tokens;
    sum->completion_tokens += u->completion_tokens;
    sum->cached_tokens += u->cached_tokens;
    sum->predicted_tokens += u->predicted_tokens;
    sum->accepted_tokens += u->accepted_tokens;
    sum->kv_bytes += u->kv_bytes;
    sum->kv_segments += u->kv_segments;
    sum->replans += u->replans;
    sum->ttft_ms = larger(sum->ttft_ms, u->ttft_ms);
    sum->queue_ms = larger(sum->queue_ms, u->queue_ms);
    sum->prefill_ms = larger(sum->prefill_ms, u->prefill_ms);
    sum->decode_ms = larger(sum->decode_ms, u->decode_ms);
    sum->tbt_ms = larger(sum->tbt_ms, u->tbt_ms);
    sum->hidden_fraction = -1; /* a fraction describes one transfer only */
}

static void part_over(struct bt_front_part *p)
{
    p->r = NULL;
    p->g->n_live--;
    p->g->n_running--;
}

static void on_done(void *arg, const struct bt_gen_usage *u)
{
    struct bt_front_part *p = arg;
    struct bt_front_gen *g = p->g;
    add_usage(&g->usage, u, g->n_running == g->n_parts);
    part_over(p);
    p->tokens = 0;
    bt_front_keys_charge(g->f->keys, g->tenant, u->completion_tokens);
    if (g->closed || g->n_running > 0) {
        return;
    }
    if (g->a.opt.stream) {
        bt_front_out_stream_end(g, true);
    } else {
        bt_front_answer_select(&g->a);
        bt_front_out_whole(g);
    }
}

/* When one prompt fails, the whole answer fails. */
static void on_error(void *arg, int http, const char *message, uint32_t retry_after_s)
{
    struct bt_front_part *p = arg;
    struct bt_front_gen *g = p->g;
    struct bt_front_error e = {.retry_after_s = retry_after_s};
    struct bt_gen_plan plan = p->r != NULL ? bt_request_usage(p->r)->plan : (struct bt_gen_plan){0};
    part_over(p);
    if (g->closed) {
        return;
    }
    bt_front_fail(&e, http, NULL, NULL, "%s", message);
    bt_front_out_error(g, &e, p, &plan);
}

static const struct bt_gen_ops gen_ops = {
    .on_prompt = on_prompt,
    .on_delta = on_delta,
    .on_finish = on_finish,
    .on_done = on_done,
    .on_error = on_error,
};

/* ---- the beginning ---- */

/* Applies what the headers ask for, within the limits of the key. It runs twice, because a request
 * may be refused before its body is parsed, and because the body may contain the priority, which
 * the key also limits. */
static void take_terms(struct bt_gen_spec *s, const struct bt_keys_terms *t,
                       const struct bt_front_headers *h)
{
    s->priority = h->has_priority ? h->priority : s->priority;
    s->slo_ttft_ms = h->slo_ttft_ms;
    s->slo_tbt_ms = h->slo_tbt_ms;
    if (t != NULL) {
        s->priority = BT_MAX(s->priority, t->priority);
        s->weight = t->weight;
        s->slo_ttft_ms = s->slo_ttft_ms > 0 ? s->slo_ttft_ms : t->slo_ttft_ms;
        s->slo_tbt_ms = s->slo_tbt_ms > 0 ? s->slo_tbt_ms : t->slo_tbt_ms;
    }
}

static void start_part(struct bt_front_gen *g)
{
    struct bt_front *f = g->f;
    uint32_t i = g->n_started++;
    const char *tenant = g->tenant[0] != '\0' ? g->tenant : NULL;
    struct bt_gen_spec *s = &g->specs[i];
    s->id = g->n_parts == 1 ? bt_strdup(g->id) : bt_sprintf("%s-%u", g->id, i);
    s->tenant = tenant != NULL ? bt_strdup(tenant) : NULL;
    s->received_ns = bt_http_received_ns(g->req);
    s->timeout_ms = f->request_timeout_ms;
    s->trace = g->trace;
    s->operation = g->a.opt.chat ? "chat" : "text_completion";
    take_terms(s, bt_front_keys_terms(f->keys, tenant), &g->headers);
    BT_DEBUG("generation_started", "req=%s id=%s prompt_tokens=%zu max_tokens=%u n=%u stream=%d",
             s->id, bt_http_request_id(g->req), s->prompt.n, s->max_tokens, s->n, g->a.opt.stream);
    struct bt_front_part *p = &g->parts[i];
    p->g = g;
    g->n_live++;
    p->r = bt_request_start(f->rs, s, &gen_ops, p);
    *s = (struct bt_gen_spec){0};
}

/* Starts parts of waiting generations, for one slice of time. */
static void start_some(void *arg)
{
    struct bt_front *f = arg;
    uint64_t until_ns = bt_mono_ns() + BT_LOOP_SLICE_NS;
    while (!bt_list_empty(&f->starting)) {
        struct bt_front_gen *g = BT_CONTAINER_OF(f->starting.next, struct bt_front_gen, starting);
        while (g->n_started < g->n_parts) {
            start_part(g);
            if (g->n_started < g->n_parts && bt_mono_ns() >= until_ns) {
                bt_timer_start(f->loop, &f->starting_timer, 0, 0, start_some, f);
                return;
            }
        }
        bt_list_remove(&g->starting);
    }
}

static void run_completion(const struct bt_front_model *m, struct bt_front_job *j)
{
    j->ok = bt_front_parse_generation(m, FRONT_API_COMPLETIONS, j->body, j->len, &j->gen, &j->e);
}

static void run_chat(const struct bt_front_model *m, struct bt_front_job *j)
{
    j->ok = bt_front_parse_generation(m, FRONT_API_CHAT, j->body, j->len, &j->gen, &j->e);
}

static void run_messages(const struct bt_front_model *m, struct bt_front_job *j)
{
    j->ok = bt_front_parse_generation(m, FRONT_API_MESSAGES, j->body, j->len, &j->gen, &j->e);
}

/* The number of array elements that the answer will have for the prompts' logprobs. */
static uint64_t names_of(const struct bt_front_generation *gen, uint64_t prompt_tokens)
{
    const struct bt_front_options *o = &gen->opt;
    uint64_t names = 0;
    if (o->echo && o->logprobs >= 0) {
        names += prompt_tokens * o->n * (4 + (uint64_t)o->logprobs);
    }
    if (o->prompt_logprobs >= 0) {
        names += prompt_tokens * (o->chat ? 1 : o->n) * (1 + (uint64_t)o->prompt_logprobs);
    }
    return names;
}

/* Returns whether the answer is possible, and whether there is memory for what it certainly needs
 * (*bytes_p). */
static bool fits(struct bt_front *f, const struct bt_front_generation *gen, uint64_t owner,
                 uint64_t prompt_tokens, size_t *bytes_p, struct bt_front_error *e)
{
    uint64_t names = names_of(gen, prompt_tokens);
    if (names > ANSWER_NAMES_MAX) {
        return bt_front_fail(
            e, 400, NULL, NULL,
            "this answer would contain %llu million parts of prompt logprobs, but at most %llu "
            "million are allowed; lower 'n' or 'logprobs', or send fewer prompts",
            (unsigned long long)names / 1000000, ANSWER_NAMES_MAX / 1000000);
    }
    size_t bytes = gen->echoed.len + bt_front_kinds_bytes(gen->kinds) +
                   gen->prompts.n * (PROMPT_BYTES + (size_t)gen->opt.n * CHOICE_BYTES);
    for (uint32_t i = 0; i < gen->prompts.n; i++) {
        const struct bt_gen_spec *s = &gen->specs[i];
        bytes += gen->prompts.list[i].text.len;
        bytes += s->prompt_logprobs ? bt_front_prompt_bytes(s->prompt.n, s->prompt_top) : 0;
        bytes += i == 0 && s->grammar != NULL ? s->grammar->len : 0; /* all prompts share it */
    }
    *bytes_p = bytes;
    return bt_front_room_fits(&f->room, owner, bytes, e);
}

/* Returns false if the body has more prompts than can run and wait at once. */
static bool places(const struct bt_front *f, const struct bt_front_job *j, struct bt_front_error *e)
{
    uint32_t most = bt_requests_prompts_max(f->rs, j->tenant != NULL);
    return j->gen.prompts.n <= most ||
           bt_front_fail(e, 400, "prompt", "invalid_value",
                         "'prompt' has %u prompts; at most %u %s can run and wait here at once "
                         "(conductor.max_running, conductor.max_waiting)",
                         j->gen.prompts.n, most, j->tenant != NULL ? "of one API key" : "requests");
}

static struct bt_front_gen *gen_create(struct bt_front_job *j)
{
    struct bt_front *f = j->f;
    uint8_t random[12];
    char hex[2 * sizeof(random) + 1];
    uint32_t n = j->gen.prompts.n;
    struct bt_front_gen *g = bt_calloc(1, sizeof(*g) + n * sizeof(g->parts[0]));
    bt_random(random, sizeof(random));
    bt_hex(random, sizeof(random), hex);
    snprintf(g->id, sizeof(g->id), "%s%s", bt_front_format_of(&j->gen.opt)->id_prefix, hex);
    snprintf(g->tenant, sizeof(g->tenant), "%s", j->tenant != NULL ? j->tenant : "");
    g->f = f;
    g->req = j->req;
    g->headers = j->headers;
    g->n_parts = g->n_running = n;
    bt_list_init(&g->pending);
    bt_list_init(&g->starting);
    bt_list_init(&g->ending);
    bt_list_init(&g->queue);
    bt_list_insert_tail(&f->gens, &g->link);
    bt_metric_set(f->m.open, ++f->n_gens);
    bt_front_answer_init(&g->a, &j->gen, f->model.tok, g->id, f->model_id,
                         bt_real_ns() / 1000000000ull, j->headers.timings, j->headers.plan);
    bt_requests_trace(f->rs, g->headers.traceparent[0] != '\0' ? g->headers.traceparent : NULL,
                      &g->trace);
    g->specs = j->gen.specs;
    j->gen.specs = NULL;
    bt_http_on_gone(g->req, on_gone, g);
    return g;
}

static bool headers_valid(struct bt_front_job *j)
{
    if (!j->headers.valid) {
        j->e = j->headers.wrong;
    }
    return j->headers.valid;
}

/* Counts a constrained generation, and returns the kind of its grammar. All its specs have the
 * same. */
static const char *constrained(struct bt_front_gen *g)
{
    const struct bt_gen_grammar *of = g->specs[0].grammar;
    if (of == NULL) {
        return NULL;
    }
    bt_metric_add(g->f->m.constrained[of->kind], 1);
    return bt_front_grammar_name(of->kind);
}

static void on_parsed(struct bt_front_job *j)
{
    struct bt_front *f = j->f;
    struct bt_front_work work = bt_front_work_of(j);
    char peer[BT_HTTP_PEER_LEN];
    bt_http_peer(j->req, peer);
    uint64_t owner = bt_front_room_owner(j->tenant, peer);
    size_t bytes = 0;
    work.generations =
        (uint64_t)j->gen.prompts.n * BT_MAX(j->gen.opt.n, j->gen.specs[0].beams.width);
    work.context = f->model.max_model_len;
    for (uint32_t i = 0; i < j->gen.prompts.n; i++) {
        work.prompt_tokens += j->gen.specs[i].prompt.n;
    }
    if (!headers_valid(j) || !places(f, j, &j->e) ||
        !fits(f, &j->gen, owner, work.prompt_tokens, &bytes, &j->e) ||
        !bt_front_keys_admit(f->keys, j->tenant, &work, &j->e)) {
        bt_front_respond_error(f, j->req, &j->e);
        return;
    }
    struct bt_front_gen *g = gen_create(j);
    g->n_generations = (uint32_t)work.generations;
    struct bt_front_note *note = bt_front_note(j->req);
    if (note != NULL) {
        snprintf(note->generation, sizeof(note->generation), "%s", g->id);
        note->prompt_tokens = work.prompt_tokens;
        note->grammar = constrained(g);
    }
    g->base = bytes;
    bt_front_room_take(&f->room, &g->hold, owner, bytes);
    bool idle = bt_list_empty(&f->starting);
    bt_list_insert_tail(&f->starting, &g->starting);
    if (idle) {
        start_some(f);
    }
}

/* Checks, before the body is parsed, whether the request must be refused. A wrong header is
 * reported later, after errors of the body.
 *
 * The priority decides whether the queue has room, and the body may contain the priority. But
 * parsing the body only to refuse it would cost what this check saves. So if the word "priority"
 * does not occur in a body, the priority is that of the header and the key. Otherwise it is not
 * known here, and the queue decides later. */
static bool turned_away(struct bt_front *f, struct bt_http_req *req, const char *tenant,
                        const struct bt_front_headers *h, struct bt_front_error *e)
{
    struct bt_gen_spec s = {0};
    char why[192];
    size_t len;
    const char *body = bt_http_body(req, &len);
    if (!h->valid) {
        return false;
    }
    take_terms(&s, bt_front_keys_terms(f->keys, tenant), h);
    struct bt_gen_terms t = {.received_ns = bt_http_received_ns(req),
                             .tenant = tenant,
                             .knows_priority = h->has_priority || len == 0 ||
                                               memmem(body, len, "\"priority\"", 10) == NULL,
                             .priority = s.priority,
                             .slo_ttft_ms = s.slo_ttft_ms,
                             .slo_tbt_ms = s.slo_tbt_ms};
    if (!bt_requests_turn_away(f->rs, &t, why, sizeof(why), &e->retry_after_s)) {
        return false;
    }
    bt_front_fail(e, 429, NULL, NULL, "%s", why);
    return true;
}

static void generate(struct bt_front *f, struct bt_http_req *req, const char *tenant,
                     void (*run)(const struct bt_front_model *m, struct bt_front_job *j))
{
    struct bt_front_error e = {.retry_after_s = 1};
    struct bt_front_headers h;
    bt_front_headers_read(req, &h);
    if (f->draining) {
        bt_front_fail(&e, 503, NULL, NULL, "this conductor is shutting down");
        bt_front_respond_error(f, req, &e);
    } else if (turned_away(f, req, tenant, &h, &e)) {
        bt_front_respond_error(f, req, &e);
    } else {
        bt_front_job_start(f, req, tenant, &h, run, on_parsed);
    }
}

void bt_front_post_completions(struct bt_front *f, struct bt_http_req *req, const char *tenant)
{
    generate(f, req, tenant, run_completion);
}

void bt_front_post_chat(struct bt_front *f, struct bt_http_req *req, const char *tenant)
{
    generate(f, req, tenant, run_chat);
}

void bt_front_post_messages(struct bt_front *f, struct bt_http_req *req, const char *tenant)
{
    generate(f, req, tenant, run_messages);
}

void bt_front_post_responses(struct bt_front *f, struct bt_http_req *req, const char *tenant)
{
    generate(f, req, tenant, run_responses);
}
