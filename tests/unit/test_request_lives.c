/* Complete lives of requests against a model of the cluster (cluster_model.h), with failures at
 * every event: what a client gets is right whatever happens, and nothing is left anywhere.
 *
 *   test_request_lives [SECONDS [SEED]]   2 seconds from seed 1; a failure names its seed, with
 *                                         which it comes again at once */
#include "common/base/clock.h"
#include "common/log/log.h"
#include "tests/unit/cluster_model.h"

#define MODEL_DIR  "deploy/models/shakespeare-llama-6m"
#define LIVES      100 /* of one machine */
#define TOKENS_MAX 8
#define AT_ONCE    24

struct client {
    struct world *w;
    uint32_t life;
    struct bt_request *r; /* NULL: over */
    uint32_t n, max_tokens, got[MODEL_CHOICES], text[MODEL_CHOICES];
    uint32_t tokens[MODEL_CHOICES][TOKENS_MAX];
    bool finished[MODEL_CHOICES], prompt_wanted, prompt_seen, has_stop, leaves_in_callback;
    uint32_t lasts; /* of on_done, on_error, cancelled */
    uint32_t done, error, cancelled;
};

struct world {
    struct model m;
    struct client clients[LIVES];
    uint32_t n_clients, n_open;
    struct bt_metrics *metrics;
    const struct bt_request *stopped; /* by a stop string, in this event */
    uint32_t stopped_choice;
    uint32_t calmness; /* one of so many occasions is a fault */
    uint32_t n_traced, n_records;
};

static struct bt_tokenizer *tok;
static double seconds = 2;
static uint64_t seed_of_run = 1;
static uint32_t text_lengths[TOKENS]; /* bytes of each of the answers' tokens */
static char *stop_text;               /* of one of them */

/* ---- clients ---- */

static void leave(struct client *c)
{
    struct bt_request *r = c->r;
    c->r = NULL;
    c->lasts++;
    c->cancelled++;
    c->w->n_open--;
    bt_machine_cancel(c->w->m.mc, r, c->w->m.now_ns);
}

static void perhaps_leave(struct client *c)
{
    if (c->leaves_in_callback && draw(&c->w->m, 8) == 0) {
        leave(c);
    }
}

static void on_prompt(void *arg, const struct bt_gen_token *tokens, size_t n)
{
    struct client *c = arg;
    struct model *w = &c->w->m;
    model_check(w, c->prompt_wanted && !c->prompt_seen && c->lasts == 0);
    c->prompt_seen = true;
    for (size_t i = 0; i < n; i++) {
        model_check(w, tokens[i].id == prompt_token_of(c->life, (uint32_t)i));
        model_check(w, i == 0 || tokens[i].logprob == -(float)i);
    }
    perhaps_leave(c);
}

/* The one that has the choice; NULL: it is over, and the others have been planned again since. */
static const struct bt_sequence *sequence_of(const struct bt_request *r, uint32_t choice)
{
    const struct bt_sequence *found = NULL;
    const struct bt_list *l;
    bt_list_for_each (l, &r->sequences) {
        const struct bt_sequence *sq = BT_CONTAINER_OF(l, struct bt_sequence, link);
        found = choice >= sq->first && choice - sq->first < sq->n ? sq : found;
    }
    return found;
}

static const uint32_t *tokens_of(struct model *w, uint32_t life, uint32_t choice, uint32_t n)
{
    struct world *x = BT_CONTAINER_OF(w, struct world, m);
    model_check(w, x->clients[life].got[choice] == n);
    return x->clients[life].tokens[choice];
}

static void on_delta(void *arg, const struct bt_gen_delta *d)
{
    struct client *c = arg;
    struct model *w = &c->w->m;
    model_check(w, c->lasts == 0 && d->choice < c->n && !c->finished[d->choice]);
    model_check(w, c->prompt_seen || !c->prompt_wanted);
    model_check(w, d->n_tokens == 1 && c->got[d->choice] < c->max_tokens);
    const struct bt_sequence *sq = sequence_of(c->r, d->choice);
    uint32_t at = c->got[d->choice], epoch = sq != NULL ? sq->epoch : d->tokens[0].id % 2;
    model_check(w, d->tokens[0].id == token_of(c->life, d->choice, at, epoch));
    model_check(w, strnlen(d->text, d->text_len) == d->text_len);
    c->tokens[d->choice][c->got[d->choice]++] = d->tokens[0].id;
    c->text[d->choice] += (uint32_t)d->text_len;
    perhaps_leave(c);
}

static void on_finish(void *arg, uint32_t choice, bt_finish_t reason, const char *stop_string)
{
    struct client *c = arg;
    struct model *w = &c->w->m;
    bool stops;
    uint32_t length = length_of(c->life, choice, c->max_tokens, &stops), bytes = 0;
    model_check(w, c->lasts == 0 && choice < c->n && !c->finished[choice]);
    model_check(w, c->prompt_seen || !c->prompt_wanted);
    c->finished[choice] = true;
    if (stop_string != NULL) {
        model_check(w, c->has_stop && reason == BT_FINISH_STOP && c->got[choice] <= length);
        if (c->got[choice] < length) { /* its worker goes on: is it told? */
            c->w->stopped = c->r;
            c->w->stopped_choice = choice;
        }
        return;
    }
    model_check(w, c->got[choice] == length);
    model_check(w, reason == (stops && length != 0 ? BT_FINISH_STOP : BT_FINISH_LENGTH));
    for (uint32_t i = 0; i + (reason == BT_FINISH_STOP) < length; i++) {
        bytes += text_lengths[c->tokens[choice][i] - FIRST_TOKEN];
    }
    model_check(w, c->text[choice] == bytes);
    perhaps_leave(c);
}

static void last(struct client *c)
{
    model_check(&c->w->m, c->lasts++ == 0);
    c->r = NULL;
    c->w->n_open--;
}

static void on_done(void *arg, const struct bt_gen_usage *u)
{
    struct client *c = arg;
    uint32_t tokens = 0;
    last(c);
    c->done++;
    for (uint32_t i = 0; i < c->n; i++) {
        model_check(&c->w->m, c->finished[i]);
        tokens += c->got[i];
    }
    model_check(&c->w->m, u->completion_tokens == tokens);
}

static void on_error(void *arg, int http, const char *message, uint32_t retry_after_s)
{
    struct client *c = arg;
    (void)retry_after_s;
    last(c);
    c->error++;
    model_check(&c->w->m, message[0] != '\0');
    model_check(&c->w->m, http == 400 || http == 429 || http == 500 || http == 503 || http == 504);
}

static const struct bt_gen_ops client_ops = {.on_prompt = on_prompt,
                                             .on_delta = on_delta,
                                             .on_finish = on_finish,
                                             .on_done = on_done,
                                             .on_error = on_error};

static void begin(struct world *x)
{
    struct model *w = &x->m;
    struct client *c = &x->clients[x->n_clients];
    c->w = x;
    c->life = x->n_clients++;
    c->prompt_wanted = draw(w, 4) == 0;
    c->n = draw(w, 2) == 0 ? 1 : 1 + draw(w, MODEL_CHOICES);
    c->max_tokens = c->prompt_wanted && c->n == 1 && draw(w, 2) == 0 ? 0 : 1 + draw(w, TOKENS_MAX);
    c->leaves_in_callback = draw(w, 16) == 0;
    c->has_stop = draw(w, 4) == 0;
    struct bt_gen_spec s = {.max_tokens = c->max_tokens,
                            .n = c->n,
                            .skip_special = true,
                            .prompt_logprobs = c->prompt_wanted,
                            .no_cache = draw(w, 4) == 0,
                            .priority = (int32_t)draw(w, 3),
                            .timeout_ms = draw(w, 16) == 0 ? 1 + draw(w, 3000) : 0,
                            .received_ns = w->now_ns,
                            .unseeded = draw(w, 2) == 0,
                            .weight = draw(w, 3)};
    s.prompt.n = s.prompt.cap = 1 + draw(w, MODEL_PROMPT - 1);
    s.prompt.ids = bt_malloc(s.prompt.n * sizeof(uint32_t));
    for (uint32_t i = 0; i < s.prompt.n; i++) {
        s.prompt.ids[i] = prompt_token_of(c->life, i);
    }
    s.trace.sampled = c->life % 2 == 0;
    x->n_traced += s.trace.sampled;
    s.sampling.n_eos = 1; /* its answer may end before max_tokens */
    s.id = bt_sprintf("%u", c->life);
    s.tenant = draw(w, 2) == 0 ? bt_sprintf("tenant-%u", draw(w, 3)) : NULL;
    if (c->has_stop) {
        s.stop = bt_calloc(2, sizeof(*s.stop));
        s.stop[0] = bt_strdup(stop_text);
    }
    x->n_open++;
    c->r = bt_machine_start(w->mc, &s, &client_ops, c, w->now_ns);
}

/* ---- the machine's actions ---- */

static uint32_t life_of(const struct bt_request *r)
{
    return (uint32_t)strtoul(bt_request_spec(r)->id, NULL, 10);
}

static void call(struct world *x, struct bt_action *a)
{
    void *arg;
    bool is_last = a->type == BT_ACT_CLIENT_DONE || a->type == BT_ACT_CLIENT_ERROR;
    const struct bt_gen_ops *ops = bt_request_client(a->r, &arg, is_last);
    if (ops == NULL) {
        return;
    }
    model_check(&x->m, ((struct client *)arg)->r == a->r);
    if (a->type == BT_ACT_CLIENT_DELTA) {
        a->delta.d.tokens = &a->delta.t;
        ops->on_delta(arg, &a->delta.d);
    } else if (a->type == BT_ACT_CLIENT_FINISH) {
        ops->on_finish(arg, a->finish.choice, a->finish.reason, a->finish.stop_string);
    } else if (a->type == BT_ACT_CLIENT_PROMPT) {
        ops->on_prompt(arg, bt_prompt_tokens(a->prompt.tokens), bt_request_spec(a->r)->prompt.n);
    } else if (a->type == BT_ACT_CLIENT_DONE) {
        ops->on_done(arg, a->done.usage);
    } else {
        ops->on_error(arg, a->error.http, a->error.text, a->error.retry_after_s);
    }
}

/* A choice is over by a stop string: its worker, if it lives and goes on, is told. */
static void check_stopped(struct world *x, bool cancels)
{
    if (x->stopped != NULL && !cancels) {
        const struct bt_sequence *sq = sequence_of(x->stopped, x->stopped_choice);
        const struct bt_flight *f =
            sq != NULL ? BT_CONTAINER_OF(sq->flights.prev, struct bt_flight, link) : NULL;
        model_check(&x->m, sq == NULL || bt_list_empty(&sq->flights) || f->decode == NULL ||
                               f->decode_ended || f->decode_cancelled);
    }
    x->stopped = NULL;
}

/* The record of a traced request: once, with stages within its life, and each of its tokens in one
 * of them. */
static void check_record(struct world *x, const struct bt_action *a)
{
    const struct bt_record *rec = a->traced.record;
    uint32_t tokens = 0, planned = 0;
    x->n_records++;
    for (uint32_t i = 0; i < rec->n; i++) {
        const struct bt_stage *s = &rec->at[i];
        model_check(&x->m, rec->received_ns <= s->start_ns && s->start_ns <= s->end_ns &&
                               s->end_ns <= rec->ended_ns);
        tokens += s->kind == BT_STAGE_DECODE ? s->tokens : 0;
        planned += s->kind == BT_STAGE_PLAN;
    }
    model_check(&x->m, rec->lost > 0 || tokens == bt_request_usage(a->r)->completion_tokens);
    model_check(&x->m, rec->n <= BT_STAGES_MAX && (planned > 0 || rec->first_ns == 0));
}

static void apply(struct world *x)
{
    struct bt_action a;
    bool cancels = false;
    while (bt_machine_action(x->m.mc, &a)) {
        cancels = cancels || a.type == BT_ACT_CANCEL;
        if (a.type == BT_ACT_SUBMIT) {
            model_order(&x->m, &a, life_of(a.submit.plan.r));
        } else if (a.type == BT_ACT_RESERVE) {
            model_order(&x->m, &a, life_of(a.reserve.plan.r));
        } else if (a.r == NULL) {
            model_order(&x->m, &a, 0);
        } else if (a.type == BT_ACT_TRACED) {
            check_record(x, &a);
        } else {
            call(x, &a);
        }
        bt_action_cleanup(&a);
    }
    check_stopped(x, cancels);
}

/* ---- what must hold after every event ---- */

/* When all has landed, the sending side's grant is given back, by the next tick at the latest. */
static void check_landed(struct model *w)
{
    struct bt_list *l, *kl;
    bt_list_for_each (l, &w->mc->all) {
        bt_list_for_each (kl, &BT_CONTAINER_OF(l, struct bt_request, link)->sequences) {
            const struct bt_sequence *sq = BT_CONTAINER_OF(kl, struct bt_sequence, link);
            const struct bt_flight *f = sq->flight;
            model_check(w, f == NULL || f->same_kv || !f->prefill_ended || f->prefill_released ||
                               !model_landed(w, sq->id, f->epoch));
        }
    }
}

struct sums {
    uint32_t waiting, planning, starved, active, late;
    uint32_t rows[MODEL_PEERS], coming[MODEL_PEERS];
    uint64_t tokens[MODEL_PEERS], kv[MODEL_PEERS];
};

static void add_flight(struct model *w, const struct bt_flight *f, struct sums *s)
{
    model_check(w, f->epoch != 0 && f->epoch <= f->sequence->epoch);
    model_check(w, f->reserved <= (f->same_kv ? 1 : 2));
    model_check(w, f->wind != BT_FLIGHT_ACTIVE || f->sequence->flight == f);
    if (f->prefill != NULL) {
        s->tokens[model_peer_of(f->prefill) - w->peers] += f->own_tokens;
    }
    if (f->decode != NULL && !f->decode_ended) {
        uint32_t at = (uint32_t)(model_peer_of(f->decode) - w->peers);
        s->rows[at] += f->own_rows;
        s->kv[at] += f->own_kv;
        s->coming[at] += f->decoding ? 0 : f->own_rows;
    }
}

static void add_sequence(struct model *w, const struct bt_sequence *sq, struct sums *s)
{
    bool queued = !bt_list_empty(&sq->queue);
    uint32_t flights = 0;
    const struct bt_list *l;
    bt_list_for_each (l, &sq->flights) {
        add_flight(w, BT_CONTAINER_OF(l, struct bt_flight, link), s);
        flights++;
    }
    s->waiting += sq->state == BT_SEQ_WAITING;
    s->starved += queued && sq->starved;
    s->planning += sq->state == BT_SEQ_PLANNING && queued && !sq->starved;
    bool probe = w->mc->queues.probe == sq;
    model_check(w, queued || probe || sq->state >= BT_SEQ_PREFILLING);
    model_check(w, !queued || sq->state <= BT_SEQ_PLANNING);
    model_check(w, sq->r->ended || sq->state != BT_SEQ_FINISHING || sq->r->n_unfinished == 0 ||
                       sq->r->sequences.next != sq->r->sequences.prev);
    model_check(w, !bt_sequence_running(sq) || sq->flight != NULL);
    if (bt_sequence_running(sq) && sq->r->spec.max_tokens != 0) { /* who is to go on is there */
        const struct bt_flight *f = sq->flight;
        model_check(w, !f->decode_ended || (!f->both && !f->got_first) || sq->r->prompt != NULL);
        model_check(w, !f->prefill_ended || f->got_first || f->both);
    }
    model_check(w, sq->flight == NULL || flights != 0);
}

static uint32_t length_of_list(const struct bt_list *list)
{
    uint32_t n = 0;
    const struct bt_list *l;
    bt_list_for_each (l, list) {
        n++;
    }
    return n;
}

/* Everything that is counted is what is there. */
static void check_all(struct world *x)
{
    struct model *w = &x->m;
    const struct bt_queues *q = &w->mc->queues;
    struct sums s = {0};
    struct bt_list *l, *kl;
    bt_list_for_each (l, &w->mc->all) {
        const struct bt_request *r = BT_CONTAINER_OF(l, struct bt_request, link);
        s.active += r->counted;
        s.late += r->counted && r->late;
        model_check(w, r->ended || r->ops != NULL);
        bt_list_for_each (kl, &r->sequences) {
            add_sequence(w, BT_CONTAINER_OF(kl, struct bt_sequence, link), &s);
        }
    }
    model_check(w, s.waiting == q->n_waiting && s.waiting == length_of_list(&q->waiting));
    model_check(w, s.starved == q->n_starved && s.starved == length_of_list(&q->starved));
    model_check(w, s.planning == length_of_list(&q->planning));
    model_check(w, s.active == q->n_active && s.late == q->n_late);
    for (uint32_t i = 0; i < MODEL_PEERS; i++) {
        const struct bt_peer *p = &w->peers[i].p;
        model_check(w, p->own.rows == s.rows[i] && p->own.prefill_tokens == s.tokens[i]);
        model_check(w, p->own.kv_tokens == s.kv[i]);
        model_check(w, p->own.decoding == s.rows[i] - s.coming[i]);
    }
}

/* ---- faults ---- */

static struct model_job *any_job(struct model *w, struct model_peer *p)
{
    struct model_job *j = p->n_jobs != 0 ? &p->jobs[draw(w, p->n_jobs)] : NULL;
    return j != NULL && !j->over && !j->silent ? j : NULL;
}

/* A token that is none of this choice, comes twice, or far ahead of one that is missing. */
static void say_odd_token(struct model *w, struct model_peer *p, const struct model_job *j)
{
    struct model_said *s = model_say(p, j, BT_EV_TOKEN);
    uint32_t c = draw(w, j->n), how = draw(w, 5);
    s->ev.token.choice = j->choice + c;
    s->token = (struct bt_journal_entry){.epoch = j->epoch, .token = FIRST_TOKEN};
    if (how == 0) {
        s->ev.token.offset = BT_JOURNAL_WINDOW + 100;
    } else if (how == 1) {
        s->token.token = UINT32_MAX;
    } else if (how == 2) {
        s->ev.token.choice = j->choice + j->n;
    } else if (how == 3) {
        s->token.finish = BT_TOKEN_ERROR;
    } else if (j->said[c] != 0 && j->phases != BT_PHASES_DECODE) { /* again */
        s->ev.token.offset = j->said[c] - 1;
        s->token.token =
            token_of(j->life, j->choice + c, j->n_tokens - j->n_prompt + j->said[c] - 1, j->epoch);
    } else {
        s->token.epoch = s->ev.epoch = j->epoch - 1; /* of an old plan */
    }
}

static void break_job(struct model *w, struct model_peer *p, struct model_job *j)
{
    static const int32_t statuses[] = {BT_ERR_DEVICE,      BT_ERR_EXHAUSTED, BT_ERR_INTERNAL,
                                       BT_ERR_UNAVAILABLE, BT_ERR_PEER_LOST, BT_OK};
    int32_t status = statuses[draw(w, BT_ARRAY_LEN(statuses))];
    uint32_t how = draw(w, 6);
    if (how == 0) {
        j->silent = true;
    } else if (how == 1 && !j->is_grant) {
        say_odd_token(w, p, j);
    } else if (!j->is_grant) {
        model_end(p, j, status);
    } else {
        model_say(p, j, BT_EV_GRANT_FAILED)->ev.status = status;
        j->over = true;
    }
}

static void fault(struct world *x)
{
    struct model *w = &x->m;
    struct model_peer *p = &w->peers[draw(w, MODEL_PEERS)];
    struct client *c = &x->clients[draw(w, x->n_clients)];
    struct model_job *j = any_job(w, p);
    uint32_t how = draw(w, 24);
    if (how == 0 && p->up) {
        model_break(w, p);
        p->departed = draw(w, 4) == 0;
    } else if (how == 1) {
        p->leaving = draw(w, 3) == 0;
    } else if (how == 2) {
        p->gives_up = draw(w, 3) == 0;
    } else if (how == 3 && c->r != NULL) {
        leave(c);
    } else if (how == 4) {
        w->now_ns += draw(w, 3000) * 1000000ull; /* this process stood still */
    } else if (how < 12 && j != NULL) {
        break_job(w, p, j);
    }
}

/* ---- a machine's life ---- */

static void make_round(struct world *x)
{
    struct model *w = &x->m;
    uint32_t turns = draw(w, 12); /* then no time is left */
    bt_machine_round(w->mc, w->now_ns);
    apply(x);
    for (uint32_t i = 0; i < turns && bt_machine_place(w->mc, w->now_ns); i++) {
        apply(x);
    }
    for (uint32_t i = 0; i < turns && bt_machine_plan(w->mc, w->now_ns); i++) {
        apply(x);
    }
    bt_machine_probe(w->mc, w->now_ns);
    apply(x);
}

static void step(struct world *x)
{
    struct model *w = &x->m;
    struct model_peer *p = &w->peers[draw(w, MODEL_PEERS)];
    w->steps++;
    uint32_t how = draw(w, 16);
    if (how < 6) {
        (void)model_hear(w, p);
    } else if (how < 9) {
        model_take_order(w, p);
    } else if (how < 12) {
        struct model_job *j = any_job(w, p);
        if (j != NULL) {
            model_progress(w, p, j, x->clients[j->life].max_tokens);
        }
    } else if (how == 12) {
        model_return(w, p);
        while (w->calm && bt_machine_lose(w->mc, w->now_ns)) {
            apply(x);
        }
        (void)bt_machine_lose(w->mc, w->now_ns);
    } else if (how == 13 && bt_machine_wants_round(w->mc)) {
        make_round(x);
    } else if (how == 14 && draw(w, 8) == 0) {
        w->now_ns += (1 + draw(w, 60)) * 1000000ull;
        bt_machine_tick(w->mc, w->now_ns, w->now_ns + 77);
        apply(x);
        check_landed(w);
        (void)bt_machine_free(w->mc);
    } else if (how == 15 && !w->calm && x->n_clients != 0 && draw(w, x->calmness) == 0) {
        fault(x);
    }
    w->now_ns += draw(w, 20000);
    apply(x);
    if (draw(w, 8) == 0) {
        check_all(x);
    }
}

static struct bt_requests_config config_of(struct model *w)
{
    static const struct bt_sched_policy *const policies[] = {
        &bt_sched_cache_aware, &bt_sched_random, &bt_sched_round_robin, &bt_sched_baton};
    return (struct bt_requests_config){.policy = policies[draw(w, BT_ARRAY_LEN(policies))],
                                       .sched = {.prior.prefill_tokens_per_s = 1000,
                                                 .prior.step_ms = 20,
                                                 .prior.link_bytes_per_s = 1e9,
                                                 .place.fetch_ratio = draw(w, 2),
                                                 .objective.ttft_ms = draw(w, 3) == 0 ? 500 : 0,
                                                 .late.wait_ms = draw(w, 2) * 300},
                                       .max_running = 6 + draw(w, 20),
                                       .max_waiting = 4 + draw(w, 20),
                                       .max_overtaking = draw(w, 4),
                                       .no_worker_ms = 500,
                                       .queue_timeout_ms = draw(w, 2) * 2000,
                                       .stall_ms = 500,
                                       .settle_ms = 300,
                                       .ended_ms = 1000,
                                       .max_replans = 3 + draw(w, 6),
                                       .role_move_ms = 200,
                                       .replica_bytes_per_s = draw(w, 2) * 1e9,
                                       .replica_uses = 2,
                                       .block_tokens = 16,
                                       .token_bytes = 3072,
                                       .vocab = bt_tokenizer_vocab(tok),
                                       .model_name = "m"};
}

/* Nothing is left anywhere: no request, no grant, no job that goes on. */
static void check_end(struct world *x)
{
    struct model *w = &x->m;
    struct bt_requests_stats st;
    bt_machine_stats(w->mc, &st);
    model_check(w, st.open == 0 && bt_map_count(w->mc->map) == 0);
    model_check(w, x->n_records == x->n_traced);
    for (uint32_t i = 0; i < MODEL_PEERS; i++) {
        struct model_peer *p = &w->peers[i];
        while (p->orders.first != p->orders.n) {
            model_take_order(w, p);
        }
        for (uint32_t k = 0; k < p->n_jobs; k++) {
            model_check(w, !p->jobs[k].is_grant);
            model_check(w, p->jobs[k].over || p->jobs[k].cancelled);
        }
        model_check(w, bt_list_empty(&p->p.own_flights));
    }
}

static void stop(struct world *x)
{
    bt_machine_stop(x->m.mc, x->m.now_ns);
    apply(x);
}

static struct world *run_machine(uint64_t seed)
{
    struct world *x = bt_calloc(1, sizeof(*x));
    struct model *w = &x->m;
    model_init(w, seed);
    w->tokens_of = tokens_of;
    struct bt_requests_config conf = config_of(w);
    x->metrics = bt_metrics_create();
    x->calmness = 1 + draw(w, 30);
    w->mc = bt_machine_create(&model_env, w, tok, &conf, x->metrics, w->now_ns, w->now_ns + 77);
    uint32_t lives = draw(w, 8) == 0 ? draw(w, LIVES) : LIVES;
    bool stops = lives < LIVES;
    struct bt_requests_stats st = {.open = 1};
    while (x->n_clients < lives || (!stops && st.open != 0)) {
        if (x->n_clients < lives && x->n_open < AT_ONCE && draw(w, 8) == 0) {
            begin(x);
            apply(x);
        }
        if (x->n_clients == lives && !w->calm) { /* from now on nothing fails */
            w->calm = true;
            for (uint32_t i = 0; i < MODEL_PEERS; i++) {
                w->peers[i].leaving = w->peers[i].gives_up = w->peers[i].departed = false;
            }
        }
        step(x);
        model_check(w, w->steps < 3000000);
        bt_machine_stats(w->mc, &st);
    }
    if (stops) {
        stop(x);
    } else {
        check_end(x);
    }
    for (uint32_t i = 0; i < x->n_clients; i++) {
        model_check(w, x->clients[i].lasts == 1);
    }
    bt_machine_destroy(w->mc);
    bt_metrics_destroy(x->metrics);
    model_cleanup(w);
    return x;
}

static void learn_texts(void)
{
    struct bt_buf b;
    bt_buf_init(&b);
    for (uint32_t i = 0; i < TOKENS; i++) {
        struct bt_detok *d = bt_detok_create(tok, true);
        uint32_t before = prompt_token_of(0, 0);
        bt_buf_clear(&b);
        bt_detok_seed(d, &before, 1);
        assert_int_equal(bt_detok_push(d, FIRST_TOKEN + i, &b), BT_OK);
        bt_detok_flush(d, &b);
        text_lengths[i] = (uint32_t)b.len;
        if (i == TOKENS / 2) {
            stop_text = bt_malloc(b.len + 1);
            memcpy(stop_text, b.data, b.len);
            stop_text[b.len] = '\0';
        }
        bt_detok_destroy(d);
    }
    bt_buf_cleanup(&b);
    assert_true(stop_text != NULL && stop_text[0] != '\0');
}

static void test_every_life_ends_well(void **state)
{
    (void)state;
    char err[256] = "";
    bt_log_init("test", "n0", BT_LOG_ERROR - 1, false); /* nothing: all of it fails on purpose */
    assert_int_equal(bt_tokenizer_load(MODEL_DIR, &tok, err, sizeof(err)), BT_OK);
    learn_texts();
    uint64_t end_ns = bt_mono_ns() + (uint64_t)(seconds * 1e9), lives = 0;
    uint32_t done = 0, error = 0, cancelled = 0;
    uint64_t seed = seed_of_run;
    do {
        struct world *x = run_machine(seed++);
        lives += x->n_clients;
        for (uint32_t i = 0; i < x->n_clients; i++) {
            done += x->clients[i].done;
            error += x->clients[i].error;
            cancelled += x->clients[i].cancelled;
        }
        free(x);
    } while (bt_mono_ns() < end_ns);
    printf("# %llu lives: %u done, %u failed, %u cancelled\n", (unsigned long long)lives, done,
           error, cancelled);
    assert_true(done > lives / 4 && error != 0 && cancelled != 0);
    free(stop_text);
    bt_tokenizer_destroy(tok);
}

int main(int argc, char **argv)
{
    seconds = argc > 1 ? strtod(argv[1], NULL) : seconds;
    seed_of_run = argc > 2 ? strtoull(argv[2], NULL, 10) : seed_of_run;
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_every_life_ends_well)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
