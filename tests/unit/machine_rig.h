/* The request machine (machine.h) with a prefill and a decode worker, and a kvstore of each, that
 * say what the test tells them. The time is a number. Include after cmocka.h. */
#ifndef BT_TESTS_MACHINE_RIG_H
#define BT_TESTS_MACHINE_RIG_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "conductor/request/machine.h"
#include "conductor/request/sources.h"

#define MODEL_DIR "deploy/models/shakespeare-llama-6m"
#define MS        1000000ull
#define WALL      7000000000ull /* the wall clock is so far ahead */
#define START     5000000000ull
#define TOKEN     300

enum { PREFILL, DECODE, KV_P, KV_D, PEERS };

struct order {
    bt_action_type_t type;
    uint32_t to;
    uint64_t id;
    uint32_t epoch;
};

static struct {
    struct bt_machine *mc;
    struct bt_metrics *metrics;
    struct bt_peer peers[PEERS];
    struct bt_sched_worker workers[2];
    struct bt_sched_kvstore kvstores[2];
    struct bt_peer *worker_of[2], *kvstore_of[2];
    bool up[PEERS], nobody;
    uint32_t running; /* as workers say */
    uint64_t load_ns, output_ns;
    uint64_t now_ns, random;
    struct order orders[100];
    uint32_t n_orders;
    uint64_t id; /* of the last Submit */
    uint32_t epoch;
    struct {
        uint32_t n_tokens, max_new, n;
    } submit; /* what it said */
    /* the client */
    struct bt_request *r;
    uint32_t n_delta, n_finish, n_done, n_error;
    bt_finish_t finish;
    struct bt_gen_usage usage;
    int http;
    uint32_t retry_s;
    char text[300];
    struct bt_record *record; /* of the last traced request */
} T;

static struct bt_tokenizer *tok;

/* ---- what the machine asks ---- */

static inline void snapshot(void *arg, const struct bt_kv_key *keys, uint32_t n_keys,
                            int32_t priority, struct bt_view_snapshot *out)
{
    uint32_t n = T.nobody ? 0 : 2;
    (void)arg;
    (void)keys;
    (void)n_keys;
    (void)priority;
    *out = (struct bt_view_snapshot){
        .snap = {.workers = T.workers, .n_workers = n, .kvstores = T.kvstores, .n_kvstores = n},
        .workers = T.workers,
        .kvstores = T.kvstores,
        .worker = T.worker_of,
        .kvstore = T.kvstore_of};
}

static inline void facts(void *arg, const struct bt_peer *p, struct bt_peer_facts *out)
{
    static const struct bt_classes none;
    (void)arg;
    *out = (struct bt_peer_facts){.up = T.up[p - T.peers],
                                  .classes = &none,
                                  .pace = {.max_rows = UINT32_MAX, .slow = 1},
                                  .output_ns = T.output_ns,
                                  .load_ns = T.load_ns,
                                  .running = T.running,
                                  .slots_free = 10,
                                  .pages_free = 1000,
                                  .pages_total = 1000};
}

static inline void sources(void *arg, const struct bt_view_snapshot *v,
                           const struct bt_sched_plan *plan, const struct bt_kv_key *keys,
                           uint32_t n_keys, uint32_t n, struct bt_sources *out)
{
    (void)arg;
    (void)v;
    (void)keys;
    (void)n_keys;
    (void)n;
    assert_int_equal(plan->prefix.fetch_tokens, 0);
    memset(out, 0, sizeof(*out));
}

static inline uint32_t spread(void *arg, const struct bt_view_snapshot *v,
                              const struct bt_kv_key *keys, uint32_t n)
{
    (void)arg;
    (void)v;
    (void)keys;
    (void)n;
    return 0;
}

static inline void random_bytes(void *arg, void *out, size_t n)
{
    (void)arg;
    memset(out, 0, n);
    T.random++;
    memcpy(out, &T.random, BT_MIN(n, sizeof(T.random)));
}

/* ---- what the client hears ---- */

static inline void on_delta(void *arg, const struct bt_gen_delta *d)
{
    (void)arg;
    (void)d;
    T.n_delta++;
}
static inline void on_finish(void *arg, uint32_t choice, bt_finish_t reason, const char *stop)
{
    (void)arg;
    (void)choice;
    (void)stop;
    T.n_finish++;
    T.finish = reason;
}
static inline void on_done(void *arg, const struct bt_gen_usage *u)
{
    (void)arg;
    T.n_done++;
    T.usage = *u;
    T.r = NULL;
}
static inline void on_error(void *arg, int http, const char *message, uint32_t retry_after_s)
{
    (void)arg;
    T.n_error++;
    T.http = http;
    T.retry_s = retry_after_s;
    snprintf(T.text, sizeof(T.text), "%s", message);
    T.r = NULL;
}
static const struct bt_gen_ops client = {
    .on_delta = on_delta, .on_finish = on_finish, .on_done = on_done, .on_error = on_error};

/* ---- turning it ---- */

static inline void tell_client(struct bt_action *a)
{
    void *arg;
    bool last = a->type == BT_ACT_CLIENT_DONE || a->type == BT_ACT_CLIENT_ERROR;
    const struct bt_gen_ops *ops = bt_request_client(a->r, &arg, last);
    if (ops == NULL) {
        return;
    }
    if (a->type == BT_ACT_CLIENT_DELTA) {
        ops->on_delta(arg, &a->delta.d);
    } else if (a->type == BT_ACT_CLIENT_FINISH) {
        ops->on_finish(arg, a->finish.choice, a->finish.reason, a->finish.stop_string);
    } else if (a->type == BT_ACT_CLIENT_DONE) {
        ops->on_done(arg, a->done.usage);
    } else if (a->type == BT_ACT_CLIENT_ERROR) {
        ops->on_error(arg, a->error.http, a->error.text, a->error.retry_after_s);
    }
}

static inline void apply(void)
{
    struct bt_action a;
    while (bt_machine_action(T.mc, &a)) {
        if (a.to != NULL) {
            assert_true(T.n_orders < BT_ARRAY_LEN(T.orders));
            T.orders[T.n_orders++] =
                (struct order){a.type, (uint32_t)(a.to - T.peers), a.id, a.epoch};
            if (a.type == BT_ACT_SUBMIT) {
                T.id = a.id;
                T.epoch = a.epoch;
                T.submit.n_tokens = a.submit.plan.n_tokens;
                T.submit.max_new = a.submit.max_new;
                T.submit.n = a.submit.n;
            }
        } else if (a.type == BT_ACT_TRACED) {
            bt_record_destroy(T.record);
            T.record = a.traced.record;
            a.traced.record = NULL;
        } else {
            tell_client(&a);
        }
        bt_action_cleanup(&a);
    }
}

/* Everything that is to be done now. */
static inline void turn(void)
{
    for (uint32_t i = 0; i < 10 && bt_machine_wants_round(T.mc); i++) {
        bt_machine_round(T.mc, T.now_ns);
        apply();
        while (bt_machine_place(T.mc, T.now_ns)) {
            apply();
        }
        while (bt_machine_plan(T.mc, T.now_ns)) {
            apply();
        }
        bt_machine_probe(T.mc, T.now_ns);
        apply();
    }
}

static inline void tick(void)
{
    bt_machine_tick(T.mc, T.now_ns, T.now_ns + WALL);
    apply();
    turn();
    while (bt_machine_free(T.mc)) {
    }
}

/* Time passes, a tick each 50 ms and one at the end. Workers have finished something meanwhile. */
static inline void pass(uint64_t ms)
{
    uint64_t end = T.now_ns + ms * MS;
    while (T.now_ns < end) {
        T.now_ns = BT_MIN(T.now_ns + BT_MACHINE_TICK_MS * MS, end);
        tick();
    }
}

/* A plan that is made again is made after a pause. */
static inline void until_planned(uint32_t epoch)
{
    for (uint32_t i = 0; i < 1000 && T.epoch != epoch; i++) {
        pass(5);
    }
    assert_int_equal(T.epoch, epoch);
}

static inline void say(const struct bt_event *ev)
{
    bt_machine_event(T.mc, ev, T.now_ns);
    apply();
    turn();
}

static inline void say_status(bt_event_type_t type, uint32_t from, int32_t status, const char *why)
{
    say(&(struct bt_event){.type = type,
                           .from = &T.peers[from],
                           .request = T.id,
                           .epoch = T.epoch,
                           .status = status,
                           .detail = why});
}

static inline void say_token(uint32_t from, uint32_t offset, bt_token_finish_t finish)
{
    struct bt_journal_entry e = {.epoch = T.epoch, .token = TOKEN + offset, .finish = finish};
    say(&(struct bt_event){.type = BT_EV_TOKEN,
                           .from = &T.peers[from],
                           .request = T.id,
                           .epoch = T.epoch,
                           .token = {.offset = offset, .at = &e}});
}

/* start_ns, end_ns: on the clock of tests, not the wall. */
static inline void say_prefilled(uint32_t cached, uint64_t start_ns, uint64_t end_ns)
{
    say(&(struct bt_event){.type = BT_EV_PREFILL_DONE,
                           .from = &T.peers[PREFILL],
                           .request = T.id,
                           .epoch = T.epoch,
                           .prefill_done = {cached, start_ns + WALL, end_ns + WALL}});
}

static inline void say_flow(uint64_t first_ns, uint64_t last_ns)
{
    say(&(struct bt_event){.type = BT_EV_FLOW_DONE,
                           .from = &T.peers[KV_D],
                           .request = T.id,
                           .epoch = T.epoch,
                           .flow_done = {first_ns + WALL, last_ns + WALL, 8192, 8}});
}

static inline uint32_t ordered(bt_action_type_t type, uint32_t to)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < T.n_orders; i++) {
        n += T.orders[i].type == type && T.orders[i].to == to && T.orders[i].id == T.id &&
             T.orders[i].epoch == T.epoch;
    }
    return n;
}

static inline struct bt_gen_spec spec_of(uint32_t n_prompt, uint32_t max_tokens)
{
    struct bt_gen_spec s = {.max_tokens = max_tokens, .n = 1};
    s.prompt.n = s.prompt.cap = n_prompt;
    s.prompt.ids = bt_calloc(n_prompt + 1, sizeof(uint32_t));
    for (uint32_t i = 0; i < n_prompt; i++) {
        s.prompt.ids[i] = TOKEN;
    }
    s.id = bt_strdup("cmpl-1");
    return s;
}

static inline void begin_spec(struct bt_gen_spec s)
{
    T.n_delta = T.n_finish = T.n_done = T.n_error = 0;
    T.r = bt_machine_start(T.mc, &s, &client, NULL, T.now_ns);
    apply();
    turn();
}

/* A request of 40 prompt tokens, two blocks and a half. */
static inline void begin(uint32_t max_tokens)
{
    begin_spec(spec_of(40, max_tokens));
}

static inline double metric(const char *series)
{
    struct bt_buf b;
    char line[200];
    bt_buf_init(&b);
    bt_metrics_render(T.metrics, &b);
    bt_buf_append(&b, "", 1);
    snprintf(line, sizeof(line), "\n%s ", series);
    const char *at = strstr((const char *)b.data, line);
    double v = at != NULL ? strtod(at + strlen(line), NULL) : -1;
    bt_buf_cleanup(&b);
    return v;
}

static inline double rejected(const char *reason)
{
    char series[100];
    snprintf(series, sizeof(series), "baton_requests_rejected_total{reason=\"%s\"}", reason);
    return metric(series);
}

static inline struct bt_requests_stats stats(void)
{
    struct bt_requests_stats s;
    bt_machine_stats(T.mc, &s);
    return s;
}

/* ---- a machine ---- */

static inline struct bt_requests_config config(void)
{
    return (struct bt_requests_config){.policy = &bt_sched_cache_aware,
                                       .sched = {.prior.prefill_tokens_per_s = 1000,
                                                 .prior.step_ms = 20,
                                                 .prior.link_bytes_per_s = 1e9},
                                       .max_running = 4,
                                       .max_waiting = 8,
                                       .no_worker_ms = 500,
                                       .queue_timeout_ms = 2000,
                                       .stall_ms = 1000,
                                       .settle_ms = 300,
                                       .ended_ms = 700,
                                       .max_replans = 3,
                                       .block_tokens = 16,
                                       .token_bytes = 100,
                                       .vocab = TOKEN + 50,
                                       .model_name = "m"};
}

static inline void create(const struct bt_requests_config *conf)
{
    static const struct bt_machine_env env = {.snapshot = snapshot,
                                              .facts = facts,
                                              .sources = sources,
                                              .spread = spread,
                                              .random = random_bytes,
                                              .extent_blocks = 1};
    static const char *const names[] = {"p", "d", "kv-p", "kv-d"};
    memset(&T, 0, sizeof(T));
    T.now_ns = START;
    for (uint32_t i = 0; i < PEERS; i++) {
        struct bt_peer *p = &T.peers[i];
        p->kind = i == PREFILL ? "prefill" : i == DECODE ? "decode" : "kvstore";
        p->name = names[i];
        p->node = i % 2 == 0 ? "n0" : "n1";
        p->incarnation = 100 + i;
        bt_list_init(&p->own_flights);
        bt_list_init(&p->own_lost);
        bt_sched_own_init(&p->own);
        T.up[i] = true;
    }
    for (uint32_t i = 0; i < 2; i++) {
        T.workers[i] = (struct bt_sched_worker){.kvstore = i, .prefill = i == 0, .decode = i == 1};
        T.kvstores[i] = (struct bt_sched_kvstore){.slots_total = 100, .slots_free = 100};
        T.worker_of[i] = &T.peers[PREFILL + i];
        T.kvstore_of[i] = &T.peers[KV_P + i];
    }
    T.metrics = bt_metrics_create();
    T.mc = bt_machine_create(&env, NULL, tok, conf, T.metrics, T.now_ns, T.now_ns + WALL);
}

static inline int start(void **state)
{
    struct bt_requests_config conf = config();
    (void)state;
    create(&conf);
    return 0;
}

static inline int stop(void **state)
{
    (void)state;
    bt_machine_stop(T.mc, T.now_ns);
    apply();
    bt_machine_destroy(T.mc);
    bt_metrics_destroy(T.metrics);
    bt_record_destroy(T.record);
    return 0;
}

/* All daemons of the plan have ended, as they were told or by themselves. */
static inline void all_end(void)
{
    say_status(BT_EV_ENDED, PREFILL, BT_OK, NULL);
    say_status(BT_EV_ENDED, DECODE, BT_OK, NULL);
}

#endif
