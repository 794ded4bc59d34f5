/* The request machine as a whole (machine.h): a request from its start until it is freed, daemons'
 * messages to the sequence they are for, and the tick. Pure. */
#include "conductor/request/machine.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "conductor/request/machine_priv.h"

/* Requests that are planned away in one tick from workers that drain or change their role: 80 a
 * second, so that their prompts do not come to the other workers all at once. */
#define MOVES_PER_TICK 4

static struct bt_request *request_of(struct bt_list *l)
{
    return BT_CONTAINER_OF(l, struct bt_request, link);
}

static struct bt_sequence *sequence_of(struct bt_list *l)
{
    return BT_CONTAINER_OF(l, struct bt_sequence, link);
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
    bt_gen_grammar_unref(s->grammar);
    bt_tokens_cleanup(&s->prediction);
    free(s->id);
}

static bool spec_valid(const struct bt_machine *mc, const struct bt_gen_spec *s)
{
    if (s->prompt.n == 0 || s->prompt.n > UINT32_MAX / 2 || s->n > BT_SEQ_CHOICES_MAX ||
        (s->max_tokens == 0 && !s->prompt_logprobs)) {
        return false;
    }
    for (size_t i = 0; mc->conf.vocab != 0 && i < s->prompt.n; i++) {
        if (s->prompt.ids[i] >= mc->conf.vocab) {
            return false;
        }
    }
    return true;
}

struct bt_request *bt_machine_start(struct bt_machine *mc, struct bt_gen_spec *spec,
                                    const struct bt_gen_ops *ops, void *arg, uint64_t now_ns)
{
    mc->now_ns = now_ns;
    struct bt_request *r = bt_calloc(1, sizeof(*r));
    r->mc = mc;
    r->spec = *spec;
    r->spec.priority = bt_request_class(spec->priority);
    memset(spec, 0, sizeof(*spec));
    r->ops = ops;
    r->arg = arg;
    bt_list_init(&r->sequences);
    const char *tenant = r->spec.tenant != NULL ? r->spec.tenant : "";
    r->tenant = bt_hash64(tenant, strlen(tenant), 0);
    r->refuse = spec_valid(mc, &r->spec) ? -1 : BT_REJECT_INVALID;
    r->spec.n = r->refuse >= 0 ? 1 : BT_MAX(r->spec.n, 1u);
    if (r->spec.unseeded) {
        mc->env->random(mc->env_arg, &r->spec.sampling.seed, sizeof(r->spec.sampling.seed));
    }
    if (r->spec.received_ns == 0) {
        r->spec.received_ns = now_ns;
    }
    r->usage.ttft_ms = r->usage.queue_ms = r->usage.prefill_ms = r->usage.decode_ms = -1;
    r->usage.hidden_fraction = r->usage.tbt_ms = -1;
    r->usage.plan.queue_ms = r->usage.plan.prefill_ms = -1;
    r->usage.plan.ttft_ms = r->usage.plan.tbt_ms = -1;
    r->root = mc->conf.root;
    if (r->spec.tenant != NULL || r->spec.cache_salt != NULL) {
        bt_requests_salted_root(&mc->conf.root, mc->secret, mc->conf.secret_len, r->spec.tenant,
                                r->spec.cache_salt, &r->root);
    }
    r->n_unfinished = r->spec.n;
    if (r->spec.prompt_logprobs && r->refuse < 0) {
        r->prompt = bt_prompt_create(&r->spec.prompt, r->spec.prompt_top);
    }
    for (uint32_t i = 0; i < r->spec.n; i++) {
        bt_journal_init(&r->choices[i].journal);
        bt_emit_init(&r->choices[i].emit, mc->tok, &r->spec);
    }
    bt_list_insert_tail(&mc->all, &r->link);
    bt_record_begin(r);
    struct bt_sequence *sq = bt_sequence_create(r, 0, r->spec.n);
    bt_record_waits(sq, NULL, r->spec.received_ns);
    bt_queue_enter(sq);
    return r;
}

static void request_destroy(struct bt_request *r)
{
    struct bt_list *l, *tmp;
    bt_list_for_each_safe (l, tmp, &r->sequences) {
        bt_sequence_destroy(sequence_of(l));
    }
    bt_list_remove(&r->link);
    for (uint32_t i = 0; i < r->spec.n; i++) {
        bt_emit_cleanup(&r->choices[i].emit);
        free(r->choices[i].gaps_ms);
        bt_journal_cleanup(&r->choices[i].journal);
    }
    bt_prompt_destroy(r->prompt);
    bt_record_destroy(r->record);
    spec_cleanup(&r->spec);
    free(r);
}

/* The state of the least advanced sequence of the request. */
static bt_sequence_state_t state_of(const struct bt_request *r)
{
    bt_sequence_state_t least = BT_SEQ_FINISHING;
    struct bt_list *l;
    bt_list_for_each (l, &r->sequences) {
        least = BT_MIN(least, sequence_of(l)->state);
    }
    return least;
}

/* ---- the tick ---- */

/* True: no daemon has anything of the sequence any more. */
static bool tick_sequence(struct bt_sequence *sq, uint64_t now_ns)
{
    struct bt_sequence_input in = {.now_ns = now_ns};
    bt_sequence_event(sq, BT_EV_TICK, &in);
    struct bt_list *l, *tmp;
    bt_list_for_each_safe (l, tmp, &sq->flights) {
        struct bt_flight *f = BT_CONTAINER_OF(l, struct bt_flight, link);
        bt_flight_step(f, now_ns);
        if (bt_flight_over(f)) {
            bt_flight_destroy(f);
        }
    }
    return sq->state == BT_SEQ_FINISHING && bt_list_empty(&sq->flights);
}

/* After this process itself stood still, messages of that time are not yet read. So the time since
 * each daemon's last message counts from now. */
static void note_standstill(struct bt_machine *mc, uint64_t now_ns)
{
    uint64_t limit_ms = BT_MAX(mc->conf.stall_ms / 2, 4 * BT_MACHINE_TICK_MS);
    if (now_ns > mc->ticked_ns && now_ns - mc->ticked_ns > limit_ms * 1000000) {
        mc->awake_ns = now_ns;
    }
    mc->ticked_ns = now_ns;
}

void bt_machine_tick(struct bt_machine *mc, uint64_t now_ns, uint64_t wall_ns)
{
    mc->now_ns = now_ns;
    mc->moves_left = MOVES_PER_TICK;
    note_standstill(mc, now_ns);
    mc->wall_ns = wall_ns;
    struct bt_list *l, *tmp, *kl;
    bt_list_for_each_safe (l, tmp, &mc->all) {
        struct bt_request *r = request_of(l);
        bool over = true;
        bt_list_for_each (kl, &r->sequences) { /* a sequence that is over stays as long as its
                                                * request */
            over = tick_sequence(sequence_of(kl), now_ns) && over;
        }
        if (over && r->ops == NULL) {
            bt_list_remove(&r->link);
            bt_list_insert_tail(&mc->over, &r->link);
        }
    }
    bt_queue_rate(mc, now_ns);
    bt_expect_learn(mc, now_ns);
    bt_queue_kick(mc);
}

bool bt_machine_free(struct bt_machine *mc)
{
    BT_ASSERT(mc->actions.first == mc->actions.n);
    if (bt_list_empty(&mc->over)) {
        return false;
    }
    request_destroy(request_of(mc->over.next));
    return true;
}

/* ---- what daemons say ---- */

static void stale(struct bt_machine *mc)
{
    bt_metric_add(mc->m.stale, 1);
}

/* Takes Ended for the current plan or for an older one: an old plan has to end too. */
static void take_ended(struct bt_sequence *sq, struct bt_sequence_input *in)
{
    struct bt_list *l;
    bt_list_for_each (l, &sq->flights) {
        in->flight = BT_CONTAINER_OF(l, struct bt_flight, link);
        if (in->flight->epoch == in->ev->epoch && bt_flight_uses(in->flight, in->peer)) {
            bt_sequence_event(sq, BT_EV_ENDED, in);
            return;
        }
    }
}

/* Takes messages of the current epoch only. When the flight is over, only the numbers for the usage
 * matter. */
static void take_current(struct bt_machine *mc, struct bt_sequence *sq,
                         struct bt_sequence_input *in)
{
    bt_event_type_t type = in->ev->type;
    if (sq == NULL || sq->epoch != in->ev->epoch) {
        stale(mc);
        return;
    }
    in->flight = sq->flight;
    if (type == BT_EV_RECEIVED) {
        if (sq->flight != NULL) {
            sq->progress_ns = in->now_ns;
            bt_flight_received(sq->flight, in->peer);
        }
        return;
    }
    bool numbers = type == BT_EV_PREFILL_DONE || type == BT_EV_FLOW_DONE;
    bool settles = numbers && sq->state == BT_SEQ_SETTLING;
    if (sq->flight == NULL ? !settles : !bt_flight_uses(sq->flight, in->peer)) {
        stale(mc);
        return;
    }
    bt_sequence_event(sq, type, in);
}

void bt_machine_event(struct bt_machine *mc, const struct bt_event *ev, uint64_t now_ns)
{
    BT_ASSERT(ev->type < BT_EV_MESSAGES);
    mc->now_ns = now_ns;
    if (ev->type == BT_EV_REPLICATED) {
        bt_replicate_answer(mc, ev);
        return;
    }
    struct bt_sequence *sq = bt_map_get(mc->map, &ev->request);
    struct bt_sequence_input in = {.peer = ev->from, .ev = ev, .now_ns = now_ns};
    if (ev->type != BT_EV_ENDED) {
        take_current(mc, sq, &in);
    } else if (sq != NULL) {
        take_ended(sq, &in);
    }
}

void bt_machine_up(struct bt_machine *mc, struct bt_peer *p)
{
    p->learned = (struct bt_sched_learned){0};
    bt_queue_room(mc);
    bt_queue_kick(mc);
}

void bt_machine_down(struct bt_machine *mc, struct bt_peer *p)
{
    bt_replicate_lost(mc, p);
    if (!bt_list_empty(&p->own_flights)) {
        bt_list_insert_tail(&mc->lost, &p->own_lost);
    }
}

/* Tells one flight that its daemon is lost. Thousands of requests may have to be planned again,
 * each with a line in the log and messages to other daemons, so the caller does this in slices.
 * Until its turn a flight stays as it is: messages of its other daemons count, its request may end
 * or be cancelled, and messages to the lost daemon are dropped. A flight leaves own_flights here,
 * so this happens once. */
bool bt_machine_lose(struct bt_machine *mc, uint64_t now_ns)
{
    mc->now_ns = now_ns;
    if (bt_list_empty(&mc->lost)) {
        return false;
    }
    struct bt_peer *p = BT_CONTAINER_OF(mc->lost.next, struct bt_peer, own_lost);
    struct bt_flight *f = BT_CONTAINER_OF(p->own_flights.next, struct bt_flight_use, link)->f;
    struct bt_sequence_input in = {.peer = p, .flight = f, .now_ns = now_ns};
    bt_sequence_event(f->sequence, BT_EV_LOST, &in);
    BT_ASSERT(!bt_flight_uses(f, p));
    return true;
}

/* ---- all of them ---- */

static void set_gauges(void *arg)
{
    struct bt_machine *mc = arg;
    struct bt_requests_stats s;
    bt_machine_stats(mc, &s);
    bt_metric_set(mc->m.waiting, s.waiting);
    bt_metric_set(mc->m.running, s.running);
}

struct bt_machine *bt_machine_create(const struct bt_machine_env *env, void *env_arg,
                                     const struct bt_tokenizer *tok,
                                     const struct bt_requests_config *conf,
                                     struct bt_metrics *metrics, uint64_t now_ns, uint64_t wall_ns)
{
    struct bt_machine *mc = bt_calloc(1, sizeof(*mc));
    mc->env = env;
    mc->env_arg = env_arg;
    mc->now_ns = mc->ticked_ns = now_ns;
    mc->wall_ns = wall_ns;
    mc->tok = tok;
    mc->conf = *conf;
    mc->metrics = metrics;
    mc->labels = bt_metrics_label("model_name", conf->model_name);
    mc->conf.model_name = NULL;
    mc->conf.secret = NULL;
    mc->secret = bt_malloc(conf->secret_len + 1);
    if (conf->secret_len != 0) {
        memcpy(mc->secret, conf->secret, conf->secret_len);
    }
    mc->map = bt_map_create(sizeof(uint64_t));
    bt_list_init(&mc->all);
    bt_list_init(&mc->over);
    bt_buf_init(&mc->actions.text);
    bt_list_init(&mc->queues.waiting);
    bt_list_init(&mc->queues.planning);
    bt_list_init(&mc->queues.starved);
    bt_list_init(&mc->lost);
    mc->explained = bt_explain_create();
    if (mc->conf.admission == NULL) {
        mc->conf.admission = &bt_sched_admit_priced;
    }
    bt_expect_init(mc, now_ns);
    bt_machine_register(mc);
    bt_replicate_init(mc, now_ns);
    bt_metrics_refresh(metrics, set_gauges, mc);
    return mc;
}

void bt_machine_stop(struct bt_machine *mc, uint64_t now_ns)
{
    mc->now_ns = now_ns;
    mc->draining = true;
    struct bt_list *l;
    bt_list_for_each (l, &mc->all) {
        if (!request_of(l)->ended) {
            bt_request_fail(request_of(l), BT_REJECT_DRAINING, 503, 1,
                            "this conductor is being stopped");
        }
    }
}

void bt_machine_destroy(struct bt_machine *mc)
{
    BT_ASSERT(mc->actions.first == mc->actions.n);
    bt_metrics_refresh(mc->metrics, NULL, mc);
    while (!bt_list_empty(&mc->lost)) {
        bt_list_remove(mc->lost.next);
    }
    while (!bt_list_empty(&mc->all)) {
        request_destroy(request_of(mc->all.next));
    }
    while (bt_machine_free(mc)) {
    }
    free(mc->actions.list);
    bt_buf_cleanup(&mc->actions.text);
    bt_map_destroy(mc->map);
    bt_explain_destroy(mc->explained);
    free(mc->secret);
    free(mc->labels);
    free(mc);
}

void bt_machine_set_sched(struct bt_machine *mc, const struct bt_sched_policy *policy,
                          const struct bt_sched_admission *admission,
                          const struct bt_sched_params *sched)
{
    BT_ASSERT(policy != NULL && admission != NULL);
    mc->conf.policy = policy;
    mc->conf.admission = admission;
    mc->conf.sched = *sched;
    memset(mc->gates, 0, sizeof(mc->gates)); /* their answers are of the old policy */
}

const struct bt_requests_config *bt_machine_config(const struct bt_machine *mc)
{
    return &mc->conf;
}

void bt_machine_drain(struct bt_machine *mc)
{
    mc->draining = true;
}

bool bt_machine_draining(const struct bt_machine *mc)
{
    return mc->draining;
}

void bt_machine_stats(const struct bt_machine *mc, struct bt_requests_stats *out)
{
    *out = mc->done;
    out->refused = (uint64_t)(bt_metric_value(mc->m.rejected[BT_REJECT_QUEUE_FULL]) +
                              bt_metric_value(mc->m.rejected[BT_REJECT_OVERLOADED]));
    out->prompt_tokens = (uint64_t)bt_metric_value(mc->m.prompt);
    out->cached_tokens = (uint64_t)bt_metric_value(mc->m.cached);
    out->tokens = (uint64_t)bt_metric_value(mc->m.generation);
    out->total = mc->total;
    out->replanned = mc->replanned;
    struct bt_list *l;
    bt_list_for_each (l, &mc->over) {
        out->open++;
    }
    bt_list_for_each (l, &mc->all) {
        bt_sequence_state_t s = state_of(request_of(l));
        out->open++;
        out->waiting += s == BT_SEQ_WAITING || s == BT_SEQ_PLANNING;
        out->running += s == BT_SEQ_PREFILLING || s == BT_SEQ_DECODING;
    }
}
