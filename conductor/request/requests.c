/* All requests of a conductor: routing of messages to requests, the clock
 * tick, metrics. Loop thread. */
#include "conductor/request/requests.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/sha256.h"
#include "common/log/log.h"
#include "conductor/request/request_priv.h"

#define TICK_MS        50
#define MOVES_PER_TICK 4
#define FREE_NS        2000000ull /* of a tick: requests that are over */
#define LOSE_NS        2000000ull /* of a turn of the loop: flights of lost daemons */

const char *const bt_plan_reasons[BT_PLAN_REASONS] = {"apart",
                                                      "short_tail",
                                                      "no_prefill_worker",
                                                      "no_decode_worker",
                                                      "larger_than_slab",
                                                      "background",
                                                      "mixed",
                                                      "spare"};
#define REASONS_EITHER 5 /* from here on plans of both kinds have them */

static struct bt_request *request_of(struct bt_list *l)
{
    return BT_CONTAINER_OF(l, struct bt_request, link);
}

static struct bt_lane *lane_of(struct bt_list *l)
{
    return BT_CONTAINER_OF(l, struct bt_lane, link);
}

/* ---- keys of tenants ---- */

static void hmac_sha256(const uint8_t *key, size_t key_len, const void *a, size_t a_len,
                        const void *b, size_t b_len, uint8_t out[BT_SHA256_LEN])
{
    uint8_t block[64] = {0}, pad[64];
    if (key_len > sizeof(block)) {
        bt_sha256(key, key_len, block);
    } else if (key_len != 0) {
        memcpy(block, key, key_len);
    }
    for (size_t i = 0; i < sizeof(pad); i++) {
        pad[i] = block[i] ^ 0x36;
    }
    struct bt_sha256 *h = bt_sha256_create();
    bt_sha256_update(h, pad, sizeof(pad));
    bt_sha256_update(h, a, a_len);
    bt_sha256_update(h, b, b_len);
    bt_sha256_finish(h, out);
    for (size_t i = 0; i < sizeof(pad); i++) {
        pad[i] = block[i] ^ 0x5c;
    }
    h = bt_sha256_create();
    bt_sha256_update(h, pad, sizeof(pad));
    bt_sha256_update(h, out, BT_SHA256_LEN);
    bt_sha256_finish(h, out);
}

void bt_requests_salted_root(const struct bt_kv_key *root, const uint8_t *secret, size_t secret_len,
                             const char *tenant, const char *cache_salt, struct bt_kv_key *out)
{
    /* Lengths go in, so that ("ab", "c") and ("a", "bc") differ. */
    struct bt_buf text;
    bt_buf_init(&text);
    bt_buf_printf(&text, "%zu:%s", tenant != NULL ? strlen(tenant) : 0,
                  tenant != NULL ? tenant : "");
    const char *salt = cache_salt != NULL ? cache_salt : "";
    uint8_t mac[BT_SHA256_LEN];
    hmac_sha256(secret, secret_len, text.data, text.len, salt, strlen(salt), mac);
    bt_buf_cleanup(&text);
    static const char label[] = "baton salted root 1";
    struct bt_sha256 *h = bt_sha256_create();
    bt_sha256_update(h, label, sizeof(label));
    bt_sha256_update(h, root->b, sizeof(root->b));
    bt_sha256_update(h, mac, sizeof(mac));
    bt_sha256_finish(h, out->b);
}

/* ---- one request ---- */

static void spec_cleanup(struct bt_gen_spec *s)
{
    bt_tokens_cleanup(&s->prompt);
    for (size_t i = 0; s->stop != NULL && s->stop[i] != NULL; i++) {
        free(s->stop[i]);
    }
    free(s->stop);
    free((void *)s->sampling.bias_ids);
    free((void *)s->sampling.bias);
    free(s->tenant);
    free(s->cache_salt);
    free(s->id);
}

static bool spec_valid(const struct bt_requests *rs, const struct bt_gen_spec *s)
{
    if (s->prompt.n == 0 || s->prompt.n > UINT32_MAX / 2 || s->n > CHOICES_MAX ||
        (s->max_tokens == 0 && !s->prompt_logprobs)) {
        return false;
    }
    for (size_t i = 0; rs->conf.vocab != 0 && i < s->prompt.n; i++) {
        if (s->prompt.ids[i] >= rs->conf.vocab) {
            return false;
        }
    }
    return true;
}

struct bt_request *bt_request_start(struct bt_requests *rs, struct bt_gen_spec *spec,
                                    const struct bt_gen_ops *ops, void *arg)
{
    struct bt_request *r = bt_calloc(1, sizeof(*r));
    r->rs = rs;
    r->spec = *spec;
    r->spec.priority = bt_request_class(spec->priority);
    memset(spec, 0, sizeof(*spec));
    r->ops = ops;
    r->arg = arg;
    bt_list_init(&r->lanes);
    const char *tenant = r->spec.tenant != NULL ? r->spec.tenant : "";
    r->tenant = bt_hash64(tenant, strlen(tenant), 0);
    r->refuse = spec_valid(rs, &r->spec) ? -1 : REJECT_INVALID;
    r->spec.n = r->refuse >= 0 ? 1 : BT_MAX(r->spec.n, 1u);
    if (r->spec.unseeded) {
        bt_random(&r->spec.sampling.seed, sizeof(r->spec.sampling.seed));
    }
    if (r->spec.received_ns == 0) {
        r->spec.received_ns = bt_mono_ns();
    }
    r->usage.ttft_ms = r->usage.queue_ms = r->usage.prefill_ms = r->usage.decode_ms = -1;
    r->usage.hidden_fraction = r->usage.tbt_ms = -1;
    r->usage.plan.queue_ms = r->usage.plan.prefill_ms = -1;
    r->usage.plan.ttft_ms = r->usage.plan.tbt_ms = -1;
    r->root = rs->conf.root;
    if (r->spec.tenant != NULL || r->spec.cache_salt != NULL) {
        bt_requests_salted_root(&rs->conf.root, rs->secret, rs->conf.secret_len, r->spec.tenant,
                                r->spec.cache_salt, &r->root);
    }
    r->n_unfinished = r->spec.n;
    if (r->spec.prompt_logprobs && r->refuse < 0) {
        r->prompt = bt_prompt_create(&r->spec.prompt, r->spec.prompt_top);
    }
    for (uint32_t i = 0; i < r->spec.n; i++) {
        bt_journal_init(&r->choices[i].journal);
        bt_emit_init(&r->choices[i].emit, rs->tok, &r->spec);
    }
    bt_list_insert_tail(&rs->all, &r->link);
    bt_requests_enter(bt_lane_create(r, 0, r->spec.n));
    return r;
}

static void request_destroy(struct bt_request *r)
{
    struct bt_list *l, *tmp;
    bt_list_for_each_safe (l, tmp, &r->lanes) {
        bt_lane_destroy(lane_of(l));
    }
    bt_list_remove(&r->link);
    for (uint32_t i = 0; i < r->spec.n; i++) {
        bt_emit_cleanup(&r->choices[i].emit);
        free(r->choices[i].gaps_ms);
        bt_journal_cleanup(&r->choices[i].journal);
    }
    bt_prompt_destroy(r->prompt);
    spec_cleanup(&r->spec);
    free(r);
}

/* Before the plan, with the workers, or neither any more: the least advanced of its lanes. */
static bt_lane_state_t state_of(const struct bt_request *r)
{
    bt_lane_state_t least = LANE_FINISHING;
    struct bt_list *l;
    bt_list_for_each (l, &r->lanes) {
        least = BT_MIN(least, lane_of(l)->state);
    }
    return least;
}

/* ---- the tick ---- */

/* True: nothing of the lane is left anywhere. */
static bool tick_lane(struct bt_lane *k)
{
    struct bt_lane_input in = {.now_ns = bt_mono_ns()};
    bt_lane_event(k, EV_TICK, &in);
    struct bt_list *l, *tmp;
    bt_list_for_each_safe (l, tmp, &k->flights) {
        struct bt_flight *f = BT_CONTAINER_OF(l, struct bt_flight, link);
        bt_flight_step(f, in.now_ns);
        if (bt_flight_over(f)) {
            bt_flight_destroy(f);
        }
    }
    return k->state == LANE_FINISHING && bt_list_empty(&k->flights);
}

static void set_gauges(void *arg)
{
    struct bt_requests *rs = arg;
    uint32_t queued = 0, busy = 0;
    struct bt_list *l;
    bt_list_for_each (l, &rs->all) {
        bt_lane_state_t s = state_of(request_of(l));
        queued += s == LANE_WAITING || s == LANE_PLANNING;
        busy += s == LANE_PREFILLING || s == LANE_DECODING;
    }
    bt_metric_set(rs->m.waiting, queued);
    bt_metric_set(rs->m.running, busy);
}

/* After this process itself stood still, what daemons have said meanwhile is not read yet: their
 * silence begins anew. */
static void note_standstill(struct bt_requests *rs)
{
    uint64_t limit_ms = BT_MAX(rs->conf.stall_ms / 2, 4 * TICK_MS);
    uint64_t now = bt_mono_ns();
    if (bt_stood_still(&rs->ticked_ns, now, limit_ms * 1000000)) {
        rs->awake_ns = now;
    }
}

static void on_tick(void *arg)
{
    struct bt_requests *rs = arg;
    rs->moves_left = MOVES_PER_TICK;
    note_standstill(rs);
    uint64_t until_ns = bt_mono_ns() + FREE_NS;
    struct bt_list *l, *tmp, *kl;
    bt_list_for_each_safe (l, tmp, &rs->all) {
        struct bt_request *r = request_of(l);
        bool over = true;
        bt_list_for_each (kl, &r->lanes) { /* a lane that is over stays as long as its request */
            over = tick_lane(lane_of(kl)) && over;
        }
        if (over && r->ops == NULL && bt_mono_ns() < until_ns) {
            request_destroy(r);
        } else if (over && r->ops == NULL) { /* soon: a thousand may have ended at once */
            bt_timer_start(rs->loop, &rs->tick, 1, TICK_MS, on_tick, rs);
        }
    }
    bt_requests_rate(rs, bt_mono_ns());
    bt_expect_learn(rs, bt_mono_ns());
    bt_requests_kick(rs);
}

/* ---- what the sessions say ---- */

static struct bt_lane *current(struct bt_requests *rs, uint64_t id, uint32_t epoch)
{
    struct bt_lane *k = bt_map_get(rs->map, &id);
    if (k == NULL || k->epoch != epoch) {
        bt_metric_add(rs->m.stale, 1);
        return NULL;
    }
    return k;
}

/* An event of the current epoch. Only usage numbers matter once the flight is over. */
static void dispatch(struct bt_requests *rs, uint64_t id, uint32_t epoch, bt_lane_event_t ev,
                     struct bt_session *s, const void *msg)
{
    struct bt_lane *k = current(rs, id, epoch);
    if (k == NULL) {
        return;
    }
    bool numbers = ev == EV_PREFILL_DONE || ev == EV_FLOW_DONE;
    if (k->flight == NULL ? !(numbers && k->state == LANE_SETTLING)
                          : !bt_flight_uses(k->flight, s)) {
        bt_metric_add(rs->m.stale, 1);
        return;
    }
    struct bt_lane_input in = {s, k->flight, msg, bt_mono_ns()};
    bt_lane_event(k, ev, &in);
}

static void on_ended_msg(struct bt_requests *rs, struct bt_session *s, const Baton__Ended *e)
{
    struct bt_lane *k = bt_map_get(rs->map, &e->request);
    if (k == NULL) {
        return;
    }
    struct bt_list *l, *tmp;
    bt_list_for_each_safe (l, tmp, &k->flights) {
        struct bt_flight *f = BT_CONTAINER_OF(l, struct bt_flight, link);
        if (f->epoch == e->epoch && bt_flight_uses(f, s)) {
            struct bt_lane_input in = {s, f, e, bt_mono_ns()};
            bt_lane_event(k, EV_ENDED, &in);
            return;
        }
    }
}

static void on_worker(void *arg, struct bt_session *s, const Baton__FromWorker *m)
{
    struct bt_requests *rs = arg;
    if (m->m_case == BATON__FROM_WORKER__M_TOKENS) {
        for (size_t i = 0; i < m->tokens->n_tokens; i++) {
            const Baton__Token *t = m->tokens->tokens[i];
            dispatch(rs, t->request, t->epoch, EV_TOKEN, s, t);
        }
    } else if (m->m_case == BATON__FROM_WORKER__M_PROMPT_LOGPROBS) {
        const Baton__PromptLogprobs *p = m->prompt_logprobs;
        dispatch(rs, p->request, p->epoch, EV_PROMPT, s, p);
    } else if (m->m_case == BATON__FROM_WORKER__M_PREFILL_DONE) {
        const Baton__PrefillDone *p = m->prefill_done;
        dispatch(rs, p->request, p->epoch, EV_PREFILL_DONE, s, p);
    } else if (m->m_case == BATON__FROM_WORKER__M_RECEIVED) {
        struct bt_lane *k = current(rs, m->received->request, m->received->epoch);
        if (k != NULL && k->flight != NULL) {
            k->progress_ns = bt_mono_ns();
            bt_flight_received(k->flight, s);
        }
    } else if (m->m_case == BATON__FROM_WORKER__M_ENDED) {
        on_ended_msg(rs, s, m->ended);
    }
}

static void on_kvstore(void *arg, struct bt_session *s, const Baton__FromKvstore *m)
{
    struct bt_requests *rs = arg;
    if (m->m_case == BATON__FROM_KVSTORE__M_RESERVED) {
        dispatch(rs, m->reserved->request, m->reserved->epoch, EV_RESERVED, s, m->reserved);
    } else if (m->m_case == BATON__FROM_KVSTORE__M_FLOW_DONE) {
        dispatch(rs, m->flow_done->request, m->flow_done->epoch, EV_FLOW_DONE, s, m->flow_done);
    } else if (m->m_case == BATON__FROM_KVSTORE__M_GRANT_FAILED) {
        dispatch(rs, m->grant_failed->request, m->grant_failed->epoch, EV_GRANT_FAILED, s,
                 m->grant_failed);
    } else if (m->m_case == BATON__FROM_KVSTORE__M_REPLICATED) {
        bt_replicate_answer(rs, s, m->replicated);
    }
}

static void on_up(void *arg, struct bt_session *s)
{
    bt_list_remove(&s->own_lost); /* it is dialled when all its flights have been told */
    bt_requests_room(arg);
    bt_requests_kick(arg);
}

/* Thousands of requests may be planned again, each with a line in the log and messages to others:
 * a slice of them in each turn of the loop. Until a flight is told it stands as it is: what its
 * other daemons say counts, its request may end or be cancelled, and what is sent to the lost one
 * goes nowhere. A flight leaves own_flights when it is told, so it is told once. */
static void lose_some(void *arg)
{
    struct bt_requests *rs = arg;
    uint64_t until_ns = bt_loop_until(rs->loop, LOSE_NS);
    while (!bt_list_empty(&rs->lost)) {
        struct bt_session *s = BT_CONTAINER_OF(rs->lost.next, struct bt_session, own_lost);
        if (bt_list_empty(&s->own_flights)) {
            bt_list_remove(&s->own_lost);
            continue;
        }
        if (bt_mono_ns() >= until_ns) {
            bt_timer_start(rs->loop, &rs->lost_timer, 0, 0, lose_some, rs);
            return;
        }
        struct bt_flight *f = BT_CONTAINER_OF(s->own_flights.next, struct bt_flight_use, link)->f;
        struct bt_lane_input in = {s, f, NULL, bt_mono_ns()};
        bt_lane_event(f->lane, EV_LOST, &in);
        BT_ASSERT(!bt_flight_uses(f, s));
    }
}

static void on_down(void *arg, struct bt_session *s, const char *why)
{
    struct bt_requests *rs = arg;
    (void)why;
    bt_replicate_lost(rs, s);
    if (!bt_list_empty(&s->own_flights)) {
        bt_list_insert_tail(&rs->lost, &s->own_lost);
        bt_timer_start(rs->loop, &rs->lost_timer, 0, 0, lose_some, rs);
    }
}

/* ---- life ---- */

static void register_latencies(struct bt_requests *rs)
{
    /* The buckets of the dashboards that read these names. */
    static const double ttft[] = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
                                  1,     2.5,   5,    7.5,  10,   20,   40,   80,  160,  640, 2560};
    static const double itl[] = {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
                                 0.75, 1,     2.5,  5,     7.5, 10,   20,  40,  80};
    static const double e2e[] = {0.3, 0.5, 0.8, 1,  1.5, 2,   2.5, 5,   10,   15,  20,
                                 30,  40,  50,  60, 120, 240, 480, 960, 1920, 7680};
    static const double queue[] = {0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100};
    struct bt_metrics *m = rs->metrics;
    rs->m.queue = bt_metrics_histogram(m, "vllm:request_queue_time_seconds", rs->labels,
                                       "From the request's last byte to the start of its prefill.",
                                       queue, BT_ARRAY_LEN(queue));
    rs->m.ttft = bt_metrics_histogram(m, "vllm:time_to_first_token_seconds", rs->labels,
                                      "From the request's last byte to its first token.", ttft,
                                      BT_ARRAY_LEN(ttft));
    rs->m.itl = bt_metrics_histogram(m, "vllm:inter_token_latency_seconds", rs->labels,
                                     "Between two tokens of a request, re-plans included.", itl,
                                     BT_ARRAY_LEN(itl));
    rs->m.e2e =
        bt_metrics_histogram(m, "vllm:e2e_request_latency_seconds", rs->labels,
                             "From the request's last byte to its end.", e2e, BT_ARRAY_LEN(e2e));
}

static void register_errors(struct bt_requests *rs)
{
    static const double bounds[] = {0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 1, 2, 5};
    static const char help[] =
        "Predictions of plans against what happened: the difference over the actual time. Requests "
        "that were planned again are not in it.";
    rs->m.ttft_error = bt_metrics_histogram(rs->metrics, "baton_plan_error_ratio", "of=\"ttft\"",
                                            help, bounds, BT_ARRAY_LEN(bounds));
    rs->m.tbt_error = bt_metrics_histogram(rs->metrics, "baton_plan_error_ratio", "of=\"tbt\"",
                                           help, bounds, BT_ARRAY_LEN(bounds));
}

static void register_reasons(struct bt_requests *rs)
{
    static const char *const success[SUCCESS_REASONS] = {"stop", "length", "abort", "error"};
    static const char *const reject[REJECT_REASONS] = {"queue_full", "draining",   "no_worker",
                                                       "too_large",  "overloaded", "no_room",
                                                       "invalid",    "deadline",   "failed"};
    char l[256];
    for (size_t i = 0; i < SUCCESS_REASONS; i++) {
        snprintf(l, sizeof(l), "%s,finished_reason=\"%s\"", rs->labels, success[i]);
        rs->m.finished[i] = bt_metrics_counter(rs->metrics, "vllm:request_success_total", l,
                                               "Requests by how they ended.");
    }
    for (size_t i = 0; i < REJECT_REASONS; i++) {
        snprintf(l, sizeof(l), "reason=\"%s\"", reject[i]);
        rs->m.rejected[i] = bt_metrics_counter(rs->metrics, "baton_requests_rejected_total", l,
                                               "Requests answered with an error, by its reason.");
    }
    for (size_t i = 0; i < BT_PLAN_REASONS; i++) {
        for (int local = 0; local < 2; local++) {
            bool has = i >= REASONS_EITHER || local == (i != 0);
            snprintf(l, sizeof(l), "kind=\"%s\",reason=\"%s\"", local ? "local" : "disaggregated",
                     bt_plan_reasons[i]);
            rs->m.plan[local][i] =
                has ? bt_metrics_counter(rs->metrics, "baton_plan_total", l,
                                         "Plans: prefill and decode apart, or one worker for both.")
                    : NULL;
        }
    }
    rs->m.fetch_plans =
        bt_metrics_counter(rs->metrics, "baton_plan_fetches_total", NULL,
                           "Plans that have a prefix fetched from other nodes' kvstores.");
    rs->m.fetch_tokens = bt_metrics_counter(rs->metrics, "baton_plan_fetch_tokens_total", NULL,
                                            "Prompt tokens of these that are to be fetched.");
    rs->m.places_short = bt_metrics_counter(
        rs->metrics, "baton_plan_places_short_total", NULL,
        "Plans apart whose prompt a decode worker would have computed sooner beside its rows, if "
        "its places (engine.max_slots) lasted.");
}

static void register_metrics(struct bt_requests *rs)
{
    struct bt_metrics *m = rs->metrics;
    register_latencies(rs);
    register_errors(rs);
    register_reasons(rs);
    rs->m.running =
        bt_metrics_gauge(m, "vllm:num_requests_running", rs->labels, "Requests that workers have.");
    rs->m.waiting = bt_metrics_gauge(m, "vllm:num_requests_waiting", rs->labels,
                                     "Requests that wait for a place or a worker.");
    rs->m.prompt = bt_metrics_counter(m, "vllm:prompt_tokens_total", rs->labels,
                                      "Prompt tokens of requests that got a first token.");
    rs->m.generation = bt_metrics_counter(m, "vllm:generation_tokens_total", rs->labels,
                                          "Tokens given to clients.");
    rs->m.cached = bt_metrics_counter(m, "vllm:prompt_tokens_cached_total", rs->labels,
                                      "Prompt tokens whose KV was not computed again.");
    rs->m.replanned = bt_metrics_counter(m, "baton_requests_replanned_total", NULL,
                                         "Plans made again after a failure.");
    rs->m.stuck = bt_metrics_counter(m, "baton_requests_stuck_total", NULL,
                                     "Requests that nothing moved though their workers live.");
    rs->m.moved = bt_metrics_counter(m, "baton_requests_moved_total", NULL,
                                     "Plans made again because a node or daemon is leaving.");
    rs->m.stale = bt_metrics_counter(m, "baton_stale_messages_total", NULL,
                                     "Messages dropped: of an older epoch, or had already.");
    rs->m.ended_late = bt_metrics_counter(m, "baton_requests_never_ended_total", NULL,
                                          "Submissions whose worker never said that it ended.");
}

struct bt_requests *bt_requests_create(struct bt_loop *loop, struct bt_view *view,
                                       const struct bt_tokenizer *tok,
                                       const struct bt_requests_config *conf,
                                       struct bt_metrics *metrics)
{
    static const struct bt_view_ops ops = {
        .on_up = on_up, .on_down = on_down, .on_worker = on_worker, .on_kvstore = on_kvstore};
    struct bt_requests *rs = bt_calloc(1, sizeof(*rs));
    rs->loop = loop;
    rs->view = view;
    rs->tok = tok;
    rs->conf = *conf;
    rs->metrics = metrics;
    rs->labels = bt_metrics_label("model_name", conf->model_name);
    rs->conf.model_name = NULL;
    rs->conf.secret = NULL;
    rs->secret = bt_malloc(conf->secret_len + 1);
    if (conf->secret_len != 0) {
        memcpy(rs->secret, conf->secret, conf->secret_len);
    }
    rs->map = bt_map_create(sizeof(uint64_t));
    bt_list_init(&rs->all);
    bt_list_init(&rs->waiting);
    bt_list_init(&rs->planning);
    bt_list_init(&rs->starved);
    bt_list_init(&rs->lost);
    rs->explained = bt_explain_create();
    if (!(rs->conf.length_quantile > 0)) {
        rs->conf.length_quantile = 0.9;
    }
    bt_expect_init(rs, bt_mono_ns());
    register_metrics(rs);
    bt_replicate_init(rs, bt_mono_ns());
    bt_metrics_refresh(metrics, set_gauges, rs);
    bt_view_set_ops(view, &ops, rs);
    bt_timer_start(loop, &rs->tick, TICK_MS, TICK_MS, on_tick, rs);
    return rs;
}

void bt_requests_destroy(struct bt_requests *rs)
{
    if (rs == NULL) {
        return;
    }
    rs->draining = true;
    struct bt_list *l, *tmp;
    bt_list_for_each_safe (l, tmp, &rs->all) {
        struct bt_request *r = request_of(l);
        if (r->ops != NULL) {
            bt_request_fail(r, REJECT_DRAINING, 503, 1, "this conductor is being stopped");
        }
    }
    bt_metrics_refresh(rs->metrics, NULL, rs);
    bt_timer_stop(rs->loop, &rs->tick);
    bt_timer_stop(rs->loop, &rs->pump);
    bt_timer_stop(rs->loop, &rs->lost_timer);
    while (!bt_list_empty(&rs->lost)) {
        bt_list_remove(rs->lost.next);
    }
    bt_view_set_ops(rs->view, NULL, NULL);
    bt_list_for_each_safe (l, tmp, &rs->all) {
        request_destroy(request_of(l));
    }
    bt_map_destroy(rs->map);
    bt_explain_destroy(rs->explained);
    free(rs->secret);
    free(rs->labels);
    free(rs);
}

void bt_requests_set_sched(struct bt_requests *rs, const struct bt_sched_policy *policy,
                           const struct bt_sched_admission *admission,
                           const struct bt_sched_params *sched)
{
    rs->conf.policy = policy;
    rs->conf.admission = admission;
    rs->conf.sched = *sched;
}

const struct bt_requests_config *bt_requests_config(const struct bt_requests *rs)
{
    return &rs->conf;
}

void bt_requests_drain(struct bt_requests *rs)
{
    rs->draining = true;
}

void bt_requests_stats(const struct bt_requests *rs, struct bt_requests_stats *out)
{
    memset(out, 0, sizeof(*out));
    out->total = rs->total;
    out->replanned = rs->replanned;
    struct bt_list *l;
    bt_list_for_each (l, &rs->all) {
        bt_lane_state_t s = state_of(request_of(l));
        out->open++;
        out->waiting += s == LANE_WAITING || s == LANE_PLANNING;
        out->running += s == LANE_PREFILLING || s == LANE_DECODING;
    }
}

bool bt_requests_serving(const struct bt_requests *rs, const char **why_p)
{
    if (rs->draining) {
        if (why_p != NULL) {
            *why_p = "this conductor is being stopped";
        }
        return false;
    }
    return bt_view_serving(rs->view, why_p);
}
