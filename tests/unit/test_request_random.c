/* Many requests on workers and kvstores that fail at random: every request ends, and those that
 * succeed have got the right tokens in order, whatever happened in between.
 *
 * BATON_TEST_SEED=N repeats the choices of a run; messages cross differently all the same. */
#define MAX_SEEN 256 /* between two looks: a starved process finds many messages at once */

#include "tests/unit/request_fixture.h"

#define REQUESTS 500
#define AT_ONCE  24
#define CHOICES  3
#define JOBS_MAX 4096
#define FAULT    3 /* one step of so many is a fault */
#define VALUES   100
#define FIRST    300 /* token i of an answer is FIRST + i % VALUES */

struct player { /* a client */
    struct bt_request *r;
    bool prompt_wanted, prompt_seen, cancelled;
    uint32_t n, max_tokens, tokens[CHOICES], finishes;
    int dones, errors, http;
};

struct job { /* what a worker or kvstore has to say of a submission */
    struct fake *k;
    int session;
    struct seen_submit s;
    bool over, flow;
    uint32_t prompt_said, said[CHOICES]; /* tokens, by choice */
    bool prefill_said;
};

struct game {
    struct trio x;
    uint64_t seed;
    struct player players[REQUESTS];
    struct job jobs[JOBS_MAX];
    uint32_t n_players, n_jobs;
    bool calm; /* no more faults */
};

static uint32_t draw(struct game *g, uint32_t n)
{
    g->seed = g->seed * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)((g->seed >> 33) % n);
}

/* ---- clients ---- */

static void on_prompt(void *arg, const struct bt_gen_token *tokens, size_t n)
{
    struct player *p = arg;
    assert_true(p->prompt_wanted && !p->prompt_seen);
    p->prompt_seen = true;
    for (size_t i = 1; i < n; i++) {
        assert_true(tokens[i].logprob == -(float)i);
    }
}
static void on_delta(void *arg, const struct bt_gen_delta *d)
{
    struct player *p = arg;
    assert_true(p->prompt_seen || !p->prompt_wanted);
    for (size_t i = 0; i < d->n_tokens; i++) {
        assert_int_equal(d->tokens[i].id, FIRST + p->tokens[d->choice]++ % VALUES);
    }
}
static void on_finish(void *arg, uint32_t choice, bt_finish_t reason, const char *stop)
{
    struct player *p = arg;
    assert_true(reason == BT_FINISH_LENGTH && stop == NULL);
    assert_int_equal(p->tokens[choice], p->max_tokens);
    p->finishes++;
}
static void on_done(void *arg, const struct bt_gen_usage *u)
{
    struct player *p = arg;
    assert_int_equal(p->finishes, p->n);
    assert_int_equal(u->completion_tokens, p->n * p->max_tokens);
    p->dones++;
    p->r = NULL;
}
static void on_error(void *arg, int http, const char *message, uint32_t retry_after_s)
{
    struct player *p = arg;
    (void)retry_after_s;
    assert_true(message[0] != '\0');
    p->errors++;
    p->http = http;
    p->r = NULL;
}

static void begin(struct game *g)
{
    static const struct bt_gen_ops ops = {.on_prompt = on_prompt,
                                          .on_delta = on_delta,
                                          .on_finish = on_finish,
                                          .on_done = on_done,
                                          .on_error = on_error};
    struct player *p = &g->players[g->n_players++];
    p->prompt_wanted = draw(g, 3) == 0;
    p->n = p->prompt_wanted && draw(g, 3) == 0 ? 1 : 1 + draw(g, CHOICES);
    p->max_tokens = p->prompt_wanted && p->n == 1 && draw(g, 2) == 0 ? 0 : 1 + draw(g, 6);
    struct bt_gen_spec s = spec_of(10 + draw(g, 60), p->max_tokens);
    s.n = p->n;
    s.prompt_logprobs = p->prompt_wanted;
    s.no_cache = draw(g, 4) == 0;
    s.priority = (int32_t)draw(g, 3);
    p->r = bt_request_start(g->x.f.rs, &s, &ops, p);
}

/* ---- workers and kvstores ---- */

static void add_job(struct game *g, struct fake *k, const struct seen_submit *s, bool flow)
{
    for (uint32_t i = 0; i < g->n_jobs; i++) { /* places of those that are over are used again */
        if (g->jobs[i].over) {
            g->jobs[i] = (struct job){.k = k, .session = k->sessions, .s = *s, .flow = flow};
            return;
        }
    }
    assert_true(g->n_jobs < JOBS_MAX);
    g->jobs[g->n_jobs++] = (struct job){.k = k, .session = k->sessions, .s = *s, .flow = flow};
}

static void take_cancel(struct game *g, struct fake *k, const struct seen_pair *c)
{
    for (uint32_t i = 0; i < g->n_jobs; i++) {
        struct job *j = &g->jobs[i];
        bool it = !j->over && !j->flow && j->k == k && j->s.request == c->request;
        if (!it || (c->one_choice ? j->s.epoch != c->epoch : j->s.epoch > c->epoch)) {
            continue;
        }
        if (!c->one_choice) {
            j->over = true;
            say_ended(k, j->s.request, j->s.epoch, BT_ERR_CANCELLED);
        }
    }
}

static void collect(struct game *g)
{
    for (int i = 0; i < g->x.f.n_fakes; i++) {
        struct fake *k = &g->x.f.fakes[i];
        for (int n = 0; n < k->submits; n++) {
            add_job(g, k, &k->submit[n], false);
        }
        for (int n = 0; n < k->reserves; n++) {
            const struct seen_reserve *v = &k->reserve[n];
            struct seen_submit s = {.request = v->request, .epoch = v->epoch};
            if (v->role == BATON__GRANT_ROLE__RECEIVE && v->answer == BT_OK) {
                add_job(g, k, &s, true);
            }
        }
        for (int n = 0; n < k->cancels; n++) {
            take_cancel(g, k, &k->cancel[n]);
        }
        assert_true(k->submits < MAX_SEEN && k->reserves < MAX_SEEN && k->cancels < MAX_SEEN);
        k->submits = k->reserves = k->cancels = k->releases = 0;
        k->reserved_status = !g->calm && draw(g, 40) == 0 ? BT_ERR_EXHAUSTED : BT_OK;
    }
}

static void say_prompt_part(struct game *g, struct job *j)
{
    uint32_t first = BT_MAX(j->prompt_said, 1u), left = j->s.n_tokens - first;
    uint32_t n = 1 + draw(g, left);
    Baton__PromptLogprob item[512], *list[512];
    for (uint32_t i = 0; i < n; i++) {
        baton__prompt_logprob__init(&item[i]);
        item[i].token = j->s.tokens[first + i];
        item[i].logprob = -(float)(first + i);
        list[i] = &item[i];
    }
    Baton__PromptLogprobs m = BATON__PROMPT_LOGPROBS__INIT;
    m.request = j->s.request;
    m.epoch = j->s.epoch;
    m.first = first;
    m.n_tokens = n;
    m.tokens = list;
    to_conductor_w(j->k, BATON__FROM_WORKER__M_PROMPT_LOGPROBS, &m);
    j->prompt_said = first + n;
}

/* Says the next token of one of the job's choices. False: it has said all that are its. */
static bool say_next_token(struct game *g, struct job *j)
{
    const struct seen_submit *s = &j->s;
    uint32_t from = draw(g, s->n);
    for (uint32_t i = 0; i < s->n; i++) {
        uint32_t c = (from + i) % s->n;
        /* The prefill worker says the first choice's first token, the decode worker the rest. */
        uint32_t begin_at = s->phases == BATON__PHASES__DECODE && c == 0 ? 1 : 0;
        uint32_t end = s->phases == BATON__PHASES__PREFILL ? (c == 0 ? BT_MIN(1u, s->max_new) : 0)
                                                           : s->max_new;
        j->said[c] = BT_MAX(j->said[c], begin_at);
        if (j->said[c] < end) {
            uint32_t at = j->said[c]++;
            uint32_t have = s->n_tokens - s->n_prompt; /* of the answer, before this plan */
            say_choice(j->k, s->request, s->epoch, s->choice + c, at, FIRST + (have + at) % VALUES,
                       at + 1 == s->max_new ? BATON__FINISH__LENGTH : BATON__FINISH__NOT_FINISHED);
            return true;
        }
    }
    return false;
}

static void step_job(struct game *g, struct job *j)
{
    if (j->k->stream == NULL || j->k->server == NULL || j->session != j->k->sessions) {
        j->over = true; /* its session broke */
    } else if (j->flow) {
        say_flow_done(j->k, j->s.request, j->s.epoch, 0, 0);
        j->over = true;
    } else if (j->s.prompt_logprobs && j->prompt_said < j->s.n_tokens && j->s.n_tokens > 1) {
        say_prompt_part(g, j);
    } else if (say_next_token(g, j)) {
        return;
    } else if (j->s.phases != BATON__PHASES__DECODE && !j->prefill_said) {
        j->prefill_said = true;
        say_prefill_done(j->k, j->s.request, j->s.epoch, 0, 0, 0);
    } else {
        say_ended(j->k, j->s.request, j->s.epoch, BT_OK);
        j->over = true;
    }
}

/* ---- faults ---- */

static void restart(struct game *g, struct fake *k)
{
    (void)g;
    fake_kill(k);
    k->stream = k->blocks = NULL;
    fake_drop(k);
    k->incarnation += 100;
    k->hello_incarnation = k->incarnation;
    k->submits = k->reserves = k->cancels = k->releases = 0;
    fake_listen(k);
    fake_register(k, BATON__MEMBER_STATE__READY);
}

static void fault(struct game *g)
{
    static const int32_t statuses[] = {BT_ERR_DEVICE,      BT_ERR_EXHAUSTED, BT_ERR_INTERNAL,
                                       BT_ERR_UNAVAILABLE, BT_ERR_PEER_LOST, BT_OK};
    struct fake *k = &g->x.f.fakes[draw(g, (uint32_t)g->x.f.n_fakes)];
    struct job *j = g->n_jobs != 0 ? &g->jobs[draw(g, g->n_jobs)] : NULL;
    uint32_t how = draw(g, 12);
    if (how == 0 && draw(g, 3) == 0) {
        restart(g, k);
    } else if (how == 1) {
        bt_view_node_set(g->x.f.view, k->node, draw(g, 2) == 0);
    } else if (how == 2) {
        struct player *p = &g->players[draw(g, g->n_players)];
        if (p->r != NULL) {
            bt_request_cancel(p->r);
            p->r = NULL;
            p->cancelled = true;
        }
    } else if (j != NULL && !j->over && j->k->stream != NULL && j->session == j->k->sessions) {
        int32_t status = statuses[draw(g, BT_ARRAY_LEN(statuses))];
        if (!j->flow && how < 9) { /* ends early, with an error or without */
            say_ended(j->k, j->s.request, j->s.epoch, status);
        } else if (j->flow && how < 9) {
            say_grant_failed(j->k, j->s.request, j->s.epoch, status);
        } /* else it is forgotten */
        j->over = true;
    }
}

static void step(struct game *g)
{
    collect(g);
    for (uint32_t i = 0; i < 8 && g->n_jobs != 0; i++) {
        struct job *j = &g->jobs[draw(g, g->n_jobs)];
        if (!j->over) {
            step_job(g, j);
        }
    }
    if (!g->calm && draw(g, FAULT) == 0) {
        fault(g);
    }
    bt_loop_poll(g->x.f.loop, 1);
}

static uint32_t open_players(const struct game *g)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < g->n_players; i++) {
        n += g->players[i].r != NULL;
    }
    return n;
}

static void test_every_request_ends(void **state)
{
    (void)state;
    struct game *g = bt_calloc(1, sizeof(*g));
    const char *seed = getenv("BATON_TEST_SEED");
    g->seed = seed != NULL ? strtoull(seed, NULL, 10) : 1;
    fixture_init(&g->x.f);
    g->x.f.rc.stall_ms = 500; /* finds what was forgotten */
    g->x.f.rc.settle_ms = 500;
    g->x.f.rc.ended_ms = 1000;
    trio_start(&g->x);
    uint64_t end = bt_mono_ns() + 2 * WAIT_MS * 1000000ull;
    while (g->n_players < REQUESTS || open_players(g) != 0 || open_requests(&g->x.f) != 0) {
        if (g->n_players < REQUESTS && open_players(g) < AT_ONCE) {
            begin(g);
        }
        if (g->n_players == REQUESTS && !g->calm) { /* from now on nothing fails */
            g->calm = true;
            for (int i = 0; i < 3; i++) {
                bt_view_node_set(g->x.f.view, g->x.k[i]->node, false);
            }
        }
        step(g);
        if (bt_mono_ns() > end) {
            fail_msg("%u clients and %u requests are still open", open_players(g),
                     open_requests(&g->x.f));
        }
    }
    uint32_t dones = 0, errors = 0, cancelled = 0;
    for (uint32_t i = 0; i < g->n_players; i++) {
        const struct player *p = &g->players[i];
        dones += (uint32_t)p->dones;
        errors += (uint32_t)p->errors;
        cancelled += p->cancelled;
    }
    struct bt_requests_stats st;
    bt_requests_stats(g->x.f.rs, &st);
    printf("# %u done, %u failed, %u cancelled, %llu planned again\n", dones, errors, cancelled,
           (unsigned long long)st.replanned);
    assert_int_equal(dones + errors + cancelled, REQUESTS);
    assert_true(dones != 0 && st.replanned != 0);
    fixture_cleanup(&g->x.f);
    free(g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_every_request_ends)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
