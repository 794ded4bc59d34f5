/* Logprobs of the prompt: once, whole, before the first delta, whatever happens to the workers. */
#include <math.h>

#include "tests/unit/conductor_fixture.h"

#define N 40

/* Two prefill and two decode workers, their kvstores. */
struct cluster {
    struct fixture f;
    struct fake *p[2], *d[2], *k[2];
};

static void cluster_start(struct cluster *x)
{
    fixture_start(&x->f);
    x->k[0] = fake_add(&x->f, "kvstore", "kv-n1", "n1");
    x->k[1] = fake_add(&x->f, "kvstore", "kv-n2", "n2");
    x->p[0] = fake_add(&x->f, "prefill", "p-n1", "n1");
    x->p[1] = fake_add(&x->f, "prefill", "p-n2", "n2");
    x->d[0] = fake_add(&x->f, "decode", "d-n1", "n1");
    x->d[1] = fake_add(&x->f, "decode", "d-n2", "n2");
    for (int i = 0; i < x->f.n_fakes; i++) {
        until(&x->f, fake_up(&x->f.fakes[i]));
    }
}

static void cluster_init(struct cluster *x)
{
    fixture_init(&x->f);
    cluster_start(x);
}

struct reader {
    struct client c; /* first: its callbacks take it */
    struct bt_gen_token prompt[N];
    uint32_t top_id[N][2];
    int prompts;
};

static void reader_prompt(void *arg, const struct bt_gen_token *tokens, size_t n)
{
    struct reader *r = arg;
    assert_int_equal(n, N);
    assert_int_equal(r->c.n_tokens + r->c.finishes + r->c.dones + r->c.errors, 0);
    r->prompts++;
    for (size_t i = 0; i < n; i++) {
        r->prompt[i] = tokens[i];
        for (uint32_t k = 0; k < tokens[i].n_top; k++) {
            r->top_id[i][k] = tokens[i].top_id[k];
        }
    }
}

static void reader_start(struct cluster *x, struct reader *r, uint32_t max_tokens)
{
    static const struct bt_gen_ops ops = {.on_prompt = reader_prompt,
                                          .on_delta = client_delta,
                                          .on_finish = client_finish,
                                          .on_done = client_done,
                                          .on_error = client_error};
    memset(r, 0, sizeof(*r));
    bt_buf_init(&r->c.text);
    struct bt_gen_spec s = spec_of(N, max_tokens);
    s.prompt_logprobs = true;
    s.prompt_top = 2;
    r->c.r = bt_request_start(x->f.rs, &s, &ops, r);
}

/* The worker that has the submission of (epoch, phase). */
static struct fake *placed(struct cluster *x, uint32_t epoch, uint32_t phases,
                           struct seen_submit *out)
{
    for (int i = 0; i < x->f.n_fakes; i++) {
        struct fake *w = &x->f.fakes[i];
        for (int n = 0; n < w->submits; n++) {
            if (w->submit[n].epoch == epoch && w->submit[n].phases == phases) {
                *out = w->submit[n];
                return w;
            }
        }
    }
    return NULL;
}

/* Logprobs -first, -first-1, ... of prompt tokens [first, end); token_off: not this prompt's. */
static void say_prompt(struct fake *w, const struct seen_submit *s, uint32_t first, uint32_t end,
                       uint32_t token_off)
{
    Baton__PromptLogprob item[N], *list[N];
    Baton__Top top[2] = {BATON__TOP__INIT, BATON__TOP__INIT}, *tops[2] = {&top[0], &top[1]};
    top[0].id = 7;
    top[1].id = 8;
    for (uint32_t i = first; i < end; i++) {
        baton__prompt_logprob__init(&item[i]);
        item[i].token = 400 + i + token_off;
        item[i].logprob = -(float)i;
        item[i].n_top = 2;
        item[i].top = tops;
        list[i - first] = &item[i];
    }
    Baton__PromptLogprobs m = BATON__PROMPT_LOGPROBS__INIT;
    m.request = s->request;
    m.epoch = s->epoch;
    m.first = first;
    m.n_tokens = end - first;
    m.tokens = list;
    to_conductor_w(w, BATON__FROM_WORKER__M_PROMPT_LOGPROBS, &m);
}

static void check_prompt(const struct reader *r)
{
    assert_int_equal(r->prompts, 1);
    assert_true(isnan(r->prompt[0].logprob));
    assert_int_equal(r->prompt[0].n_top, 0);
    for (uint32_t i = 1; i < N; i++) {
        assert_int_equal(r->prompt[i].id, 400 + i);
        assert_true(r->prompt[i].logprob == -(float)i);
        assert_int_equal(r->prompt[i].n_top, 2);
        assert_int_equal(r->top_id[i][0], 7);
        assert_int_equal(r->top_id[i][1], 8);
    }
}

static void test_before_the_first_delta(void **state)
{
    (void)state;
    struct cluster x;
    cluster_init(&x);
    struct reader r;
    reader_start(&x, &r, 3);
    struct seen_submit s, sd;
    struct fake *p, *d;
    until(&x.f, (p = placed(&x, 1, BATON__PHASES__PREFILL, &s)) != NULL &&
                    (d = placed(&x, 1, BATON__PHASES__DECODE, &sd)) != NULL);
    assert_true(s.prompt_logprobs && !sd.prompt_logprobs);
    assert_int_equal(s.prompt_top, 2);
    say_prompt(p, &s, 1, 30, 0);
    say_token(p, s.request, 1, 0, 300, BATON__FINISH__NOT_FINISHED);
    say_token(d, s.request, 1, 1, 301, BATON__FINISH__NOT_FINISHED);
    pass(&x.f, 50);
    assert_int_equal(r.prompts + r.c.n_tokens, 0); /* tokens wait */
    say_prompt(p, &s, 30, N, 0);
    until(&x.f, r.c.n_tokens == 2);
    check_prompt(&r);
    say_prefill_done(p, s.request, 1, 0, 0, 0);
    say_token(d, s.request, 1, 2, 302, BATON__FINISH__LENGTH);
    until(&x.f, r.c.finishes == 1);
    assert_int_equal(r.c.tokens[2], 302);
    client_cleanup(&r.c);
    fixture_cleanup(&x.f);
}

static void test_nothing_but_the_prompt(void **state)
{
    (void)state;
    struct cluster x;
    cluster_init(&x);
    struct reader r;
    reader_start(&x, &r, 0);
    struct seen_submit s;
    struct fake *p;
    until(&x.f, (p = placed(&x, 1, BATON__PHASES__PREFILL, &s)) != NULL);
    assert_int_equal(s.max_new, 0);
    say_prompt(p, &s, 1, N, 0);
    say_prefill_done(p, s.request, 1, 0, 0, 0);
    until(&x.f, r.c.dones == 1);
    check_prompt(&r);
    assert_int_equal(r.c.finishes, 1);
    assert_int_equal(r.c.reason, BT_FINISH_LENGTH);
    assert_int_equal(r.c.usage.completion_tokens, 0);
    assert_int_equal(r.c.usage.prompt_tokens, N);
    assert_true(r.c.usage.ttft_ms >= 0);
    /* No decode worker and one kvstore only; nobody is cancelled. */
    assert_int_equal(x.d[0]->submits + x.d[1]->submits, 0);
    assert_int_equal(x.k[0]->reserves + x.k[1]->reserves, 1);
    say_ended(p, s.request, 1, BT_OK);
    until(&x.f, open_requests(&x.f) == 0);
    until(&x.f, x.k[0]->releases + x.k[1]->releases == 1);
    assert_int_equal(p->cancels, 0);
    client_cleanup(&r.c);
    fixture_cleanup(&x.f);
}

static void test_once_over_replans(void **state)
{
    (void)state;
    struct cluster x;
    cluster_init(&x);
    struct reader r;
    reader_start(&x, &r, 3);
    struct seen_submit s, s2, s3;
    struct fake *p, *p2, *d2;
    until(&x.f, (p = placed(&x, 1, BATON__PHASES__PREFILL, &s)) != NULL);
    say_prompt(p, &s, 1, 20, 0);
    pass(&x.f, 50);
    say_ended(p, s.request, 1, BT_ERR_DEVICE);
    until(&x.f, (p2 = placed(&x, 2, BATON__PHASES__PREFILL, &s2)) != NULL &&
                    (d2 = placed(&x, 2, BATON__PHASES__DECODE, &s3)) != NULL);
    assert_true(s2.prompt_logprobs);
    say_prompt(p2, &s2, 1, N, 0);
    say_token(p2, s.request, 2, 0, 300, BATON__FINISH__NOT_FINISHED);
    until(&x.f, r.c.n_tokens == 1);
    check_prompt(&r);
    /* What the client has is not asked for again. */
    fake_kill(d2);
    until(&x.f, placed(&x, 3, BATON__PHASES__PREFILL, &s3) != NULL);
    assert_false(s3.prompt_logprobs);
    assert_int_equal(s3.n_tokens, N + 1);
    bt_request_cancel(r.c.r);
    assert_int_equal(r.prompts, 1);
    client_cleanup(&r.c);
    fixture_cleanup(&x.f);
}

/* The prompt's logprobs come last: tokens, numbers and ends of all workers come before them and are
 * no failure. */
static void test_prompt_comes_last(void **state)
{
    (void)state;
    struct cluster x;
    cluster_init(&x);
    struct reader r;
    reader_start(&x, &r, 3);
    struct seen_submit s, sd;
    struct fake *p, *d;
    until(&x.f, (p = placed(&x, 1, BATON__PHASES__PREFILL, &s)) != NULL &&
                    (d = placed(&x, 1, BATON__PHASES__DECODE, &sd)) != NULL);
    say_prompt(p, &s, 1, 30, 0);
    say_token(p, s.request, 1, 0, 300, BATON__FINISH__NOT_FINISHED);
    say_token(d, s.request, 1, 1, 301, BATON__FINISH__NOT_FINISHED);
    say_token(d, s.request, 1, 2, 302, BATON__FINISH__LENGTH);
    say_ended(d, s.request, 1, BT_OK);
    pass(&x.f, 100);
    assert_int_equal(r.prompts, 0);
    assert_int_equal(r.c.n_tokens + r.c.finishes + r.c.dones + r.c.errors, 0);
    say_prompt(p, &s, 30, N, 0);
    until(&x.f, r.c.n_tokens == 3);
    check_prompt(&r);
    assert_int_equal(r.c.finishes, 1);
    say_prefill_done(p, s.request, 1, 0, 0, 0);
    say_ended(p, s.request, 1, BT_OK);
    say_flow_done(x.k[0]->node == d->node ? x.k[0] : x.k[1], s.request, 1, 0, 0);
    until(&x.f, r.c.dones == 1);
    assert_int_equal(r.c.usage.replans, 0);
    client_cleanup(&r.c);
    fixture_cleanup(&x.f);
}

/* Only the prompt is wanted: once it is there nothing that happens to the worker is missed. */
static void test_nothing_but_the_prompt_later(void **state)
{
    (void)state;
    for (int how = 0; how < 2; how++) {
        struct cluster x;
        cluster_init(&x);
        struct reader r;
        reader_start(&x, &r, 0);
        struct seen_submit s;
        struct fake *p;
        until(&x.f, (p = placed(&x, 1, BATON__PHASES__PREFILL, &s)) != NULL);
        say_prompt(p, &s, 1, N, 0);
        until(&x.f, r.prompts == 1);
        if (how == 0) {
            say_prefill_done(p, s.request, 1, 0, 0, 0);
            say_ended(p, s.request, 1, BT_OK);
        } else {
            fake_kill(p);
        }
        until(&x.f, r.c.dones == 1);
        check_prompt(&r);
        assert_int_equal(r.c.usage.replans, 0);
        client_cleanup(&r.c);
        fixture_cleanup(&x.f);
    }
}

/* ... and the numbers of usage are waited for as behind tokens: not for ever. */
static void test_nothing_but_the_prompt_without_numbers(void **state)
{
    (void)state;
    struct cluster x;
    fixture_init(&x.f);
    x.f.rc.settle_ms = 200;
    x.f.rc.stall_ms = 400;
    cluster_start(&x);
    clock_stop();
    struct reader r;
    reader_start(&x, &r, 0);
    struct seen_submit s;
    struct fake *p;
    until(&x.f, (p = placed(&x, 1, BATON__PHASES__PREFILL, &s)) != NULL);
    say_prompt(p, &s, 1, N, 0);
    pass_until(&x.f, r.c.dones + r.c.errors != 0);
    assert_int_equal(r.c.errors, 0);
    assert_int_equal(r.c.usage.replans, 0);
    check_prompt(&r);
    client_cleanup(&r.c);
    fixture_cleanup(&x.f);
}

/* Not this prompt's tokens, a hole, or an end without them: another worker is asked. */
static void test_broken_workers(void **state)
{
    (void)state;
    struct cluster x;
    cluster_init(&x);
    struct reader r;
    reader_start(&x, &r, 3);
    struct seen_submit s;
    for (uint32_t epoch = 1; epoch <= 4; epoch++) {
        struct fake *p;
        until(&x.f, (p = placed(&x, epoch, BATON__PHASES__PREFILL, &s)) != NULL);
        if (epoch == 1) {
            say_prompt(p, &s, 1, 20, 1);
        } else if (epoch == 2) {
            say_prompt(p, &s, 2, 20, 0);
        } else if (epoch == 3) {
            say_prompt(p, &s, 1, 20, 0);
            say_token(p, s.request, epoch, 0, 300, BATON__FINISH__NOT_FINISHED);
            say_ended(p, s.request, epoch, BT_OK);
        }
    }
    assert_int_equal(r.prompts + r.c.n_tokens + r.c.errors, 0);
    bt_request_cancel(r.c.r);
    client_cleanup(&r.c);
    fixture_cleanup(&x.f);
}

/* The prefill worker is lost while a part of the prompt's logprobs is missing. What the decode side
 * has by then does not matter: only a prefill worker computes the rest. */
static void test_prompt_missing_when_prefill_is_lost(void **state)
{
    (void)state;
    for (int how = 0; how < 3; how++) { /* the decode worker runs; has ended; the KV has landed */
        struct cluster x;
        cluster_init(&x);
        struct reader r;
        reader_start(&x, &r, 3);
        struct seen_submit s, s2, sd;
        struct fake *p, *p2, *d;
        until(&x.f, (p = placed(&x, 1, BATON__PHASES__PREFILL, &s)) != NULL &&
                        (d = placed(&x, 1, BATON__PHASES__DECODE, &sd)) != NULL);
        say_prompt(p, &s, 1, 20, 0);
        say_token(p, s.request, 1, 0, 300, BATON__FINISH__NOT_FINISHED);
        if (how < 2) {
            say_token(d, s.request, 1, 1, 301, BATON__FINISH__NOT_FINISHED);
        }
        if (how == 1) {
            say_token(d, s.request, 1, 2, 302, BATON__FINISH__LENGTH);
            say_ended(d, s.request, 1, BT_OK);
        }
        if (how == 2) {
            say_flow_done(x.k[0]->node == d->node ? x.k[0] : x.k[1], s.request, 1, 0, 0);
        }
        pass(&x.f, 100);
        assert_int_equal(r.prompts + r.c.n_tokens, 0);
        fake_kill(p);
        until(&x.f, (p2 = placed(&x, 2, BATON__PHASES__PREFILL, &s2)) != NULL);
        assert_ptr_not_equal(p2, p);
        assert_true(s2.prompt_logprobs);
        say_prompt(p2, &s2, 1, N, 0);
        say_token(p2, s.request, 2, 0, 300, BATON__FINISH__STOP);
        until(&x.f, r.c.finishes == 1);
        check_prompt(&r);
        assert_int_equal(r.c.n_tokens, 1);
        bt_request_cancel(r.c.r);
        client_cleanup(&r.c);
        fixture_cleanup(&x.f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_before_the_first_delta),
        cmocka_unit_test(test_nothing_but_the_prompt),
        cmocka_unit_test(test_once_over_replans),
        cmocka_unit_test(test_broken_workers),
        cmocka_unit_test(test_prompt_comes_last),
        cmocka_unit_test(test_prompt_missing_when_prefill_is_lost),
        cmocka_unit_test(test_nothing_but_the_prompt_later),
        cmocka_unit_test(test_nothing_but_the_prompt_without_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
