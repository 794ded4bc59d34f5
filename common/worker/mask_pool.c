/* The threads of constrained output; see mask.h. Compiling threads take grammars from a list,
 * tenants in turn. The slow thread makes masks that take too long for a step. Mask threads take the
 * rows of a step from an array: one step at a time, as the engine thread waits for all of them. One
 * lock guards both; nobody holds it while it works. */
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "common/worker/mask.h"
#include "common/worker/stats.h"

/* A hostile grammar occupies a compiling thread for 100 ms. With two threads other grammars wait
 * less. */
#define COMPILERS 2
#define SLOW      1
#define TURNS     256 /* tenants that are told apart, by their number */
/* A mask takes about 50 us and a step of 64 rows 8 ms on a GPU, so a quarter of a large machine's
 * cores is enough. */
#define MAKERS_MAX  8
#define CORES_MAKER 4
/* Memory for compiled grammars. Grammars in use stay even beyond it. */
#define CACHE_BYTES ((size_t)256 << 20)

struct bt_wmask_pool {
    struct bt_wmask_pool_conf conf;
    pthread_t threads[COMPILERS + SLOW + MAKERS_MAX];
    uint32_t n_threads, n_makers;
    struct bt_grammar_cache *cache;
    struct bt_wvocab vocab; /* constant once `known` */
    char vocab_why[BT_WMASK_DETAIL];
    bt_status_t vocab_status;

    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t more, slow, work, ready;
    struct bt_list grammars, aheads;
    uint64_t turn, turns[TURNS]; /* when a tenant's grammar was last taken */
    bool reading, known;         /* the vocabulary */
    struct bt_wmask_job *jobs;
    uint32_t n_jobs, next, n_done;
    uint32_t from, n_begun; /* the step's first job; how many jobs began before one was too late */
    bool missed;            /* a job of this step did not begin */
    uint64_t until_ns;      /* no job but the first begins later; 0: no limit yet */
    uint32_t *bits, words;
    bool stop;
};

/* ---- a submission's grammar ---- */

struct bt_wgrammar *bt_wgrammar_create(enum bt_grammar_kind kind, const void *text, size_t len)
{
    struct bt_wgrammar *g = bt_calloc(1, sizeof(*g));
    g->refs = 1;
    g->kind = kind;
    g->text = bt_malloc(len + 1);
    g->len = len;
    if (len > 0) {
        memcpy(g->text, text, len);
    }
    g->text[len] = '\0';
    bt_list_init(&g->link);
    return g;
}

void bt_wgrammar_unref(struct bt_wgrammar *g)
{
    if (g != NULL && --g->refs == 0) {
        bt_wahead_destroy(g->first);
        bt_grammar_unref(g->grammar);
        free(g->text);
        free(g);
    }
}

struct bt_wahead *bt_wahead_create(const uint32_t *tokens, uint32_t n, uint32_t words)
{
    struct bt_wahead *a = bt_calloc(1, sizeof(*a));
    a->n = n;
    a->tokens = bt_calloc(n + 1, sizeof(a->tokens[0]));
    a->bits = words > 0 ? bt_calloc(words, sizeof(a->bits[0])) : NULL;
    bt_copy(a->tokens, tokens, n * sizeof(a->tokens[0]));
    bt_list_init(&a->link);
    return a;
}

void bt_wahead_destroy(struct bt_wahead *a)
{
    if (a != NULL) {
        bt_matcher_destroy(a->matcher);
        bt_wgrammar_unref(a->grammar);
        free(a->tokens);
        free(a->bits);
        free(a);
    }
}

/* ---- compiling threads ---- */

static void read_vocabulary(struct bt_wmask_pool *p)
{
    uint64_t t0 = bt_mono_ns();
    p->vocab_status = bt_wvocab_load(p->conf.model_path, p->conf.vocab, &p->vocab, p->vocab_why,
                                     sizeof(p->vocab_why));
    if (p->vocab_status == BT_OK) {
        BT_INFO("vocabulary", "tokens=%u ms=%.1f", p->conf.vocab,
                (double)(bt_mono_ns() - t0) / 1e6);
    } else {
        BT_WARN("no_vocabulary", "status=%s why=%s", bt_status_name(p->vocab_status), p->vocab_why);
    }
}

/* The sequence must end where the grammar does. */
static bool has_ends(const struct bt_wvocab *v, struct bt_wgrammar *g)
{
    for (uint32_t i = 0; i < v->n_eos; i++) {
        bool has = false;
        for (uint32_t k = 0; k < g->n_stop; k++) {
            has |= g->stop[k] == v->eos[i];
        }
        if (!has) {
            snprintf(g->detail, sizeof(g->detail),
                     "sampling.stop_ids lacks the model's end-of-text token %u: an answer with a "
                     "grammar needs it",
                     v->eos[i]);
            return false;
        }
    }
    if (v->n_eos == 0) {
        snprintf(g->detail, sizeof(g->detail),
                 "the model has no end-of-text token (eos_token_id): no answer can end by a "
                 "grammar");
    }
    return v->n_eos > 0;
}

static void compile(struct bt_wmask_pool *p, struct bt_wgrammar *g)
{
    uint64_t t0 = bt_mono_ns();
    const struct bt_grammar_spec spec = {.kind = g->kind, .text = g->text, .len = g->len};
    if (p->vocab_status != BT_OK) { /* of this machine: another worker may do it */
        g->status = BT_ERR_UNAVAILABLE;
        snprintf(g->detail, sizeof(g->detail), "this worker cannot constrain answers: %.150s",
                 p->vocab_why);
    } else if (g->kind == BT_GRAMMAR_ANY) { /* a budget of reasoning needs the vocabulary only */
        g->status = BT_OK;
    } else if (!has_ends(&p->vocab, g)) {
        g->status = BT_ERR_INVALID;
    } else {
        g->status =
            bt_grammar_cache_get(p->cache, &spec, &g->grammar, g->detail, sizeof(g->detail));
        bt_metric_observe(p->conf.stats->compile_time, (double)(bt_mono_ns() - t0) / 1e9);
    }
    if (g->status == BT_OK && g->first != NULL) {
        bt_wahead_make(g->first, g, &p->vocab, BT_DIV_UP(p->conf.vocab, 32u));
    }
    free(g->text);
    g->text = NULL;
}

static void on_task(void *arg)
{
    struct bt_wgrammar *g = arg;
    g->done(g->arg, g);
}

/* The next grammar: of the tenant that has waited longest for its turn. */
static struct bt_wgrammar *take_grammar(struct bt_wmask_pool *p)
{
    struct bt_wgrammar *best = NULL;
    struct bt_list *l;
    bt_list_for_each (l, &p->grammars) {
        struct bt_wgrammar *g = BT_CONTAINER_OF(l, struct bt_wgrammar, link);
        if (best == NULL || p->turns[g->tenant % TURNS] < p->turns[best->tenant % TURNS]) {
            best = g;
        }
    }
    p->turns[best->tenant % TURNS] = ++p->turn;
    bt_list_remove(&best->link);
    return best;
}

static void *compiler_main(void *arg)
{
    struct bt_wmask_pool *p = arg;
    bt_loop_low_priority();
    pthread_mutex_lock(&p->lock);
    if (!p->reading) {
        p->reading = true;
        pthread_mutex_unlock(&p->lock);
        read_vocabulary(p);
        pthread_mutex_lock(&p->lock);
        p->known = true;
        pthread_cond_broadcast(&p->more);
    }
    while (!p->stop) {
        if (!p->known || bt_list_empty(&p->grammars)) {
            pthread_cond_wait(&p->more, &p->lock);
            continue;
        }
        struct bt_wgrammar *g = take_grammar(p);
        pthread_mutex_unlock(&p->lock);
        if (g->refs == 1) { /* its submission has ended */
            bt_wgrammar_unref(g);
        } else {
            compile(p, g);
            bt_loop_post(p->conf.loop, &g->task);
        }
        pthread_mutex_lock(&p->lock);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

void bt_wmask_pool_compile(struct bt_wmask_pool *p, struct bt_wgrammar *g)
{
    g->refs++;
    g->task = (struct bt_task){.fn = on_task, .arg = g};
    pthread_mutex_lock(&p->lock);
    bt_list_insert_tail(&p->grammars, &g->link);
    pthread_cond_signal(&p->more);
    pthread_mutex_unlock(&p->lock);
}

/* ---- the slow thread ---- */

static void on_made(void *arg)
{
    struct bt_wahead *a = arg;
    a->pool->conf.made(a->pool->conf.arg, a);
}

static struct bt_wahead *take_ahead(struct bt_wmask_pool *p)
{
    struct bt_wahead *best = NULL;
    struct bt_list *l;
    bt_list_for_each (l, &p->aheads) {
        struct bt_wahead *a = BT_CONTAINER_OF(l, struct bt_wahead, link);
        if (best == NULL || bt_matcher_work(a->matcher) < bt_matcher_work(best->matcher)) {
            best = a;
        }
    }
    bt_list_remove(&best->link);
    return best;
}

static void *slow_main(void *arg)
{
    struct bt_wmask_pool *p = arg;
    bt_loop_low_priority();
    pthread_mutex_lock(&p->lock);
    while (!p->stop) {
        if (bt_list_empty(&p->aheads)) {
            pthread_cond_wait(&p->slow, &p->lock);
            continue;
        }
        struct bt_wahead *a = take_ahead(p);
        pthread_mutex_unlock(&p->lock);
        uint64_t t0 = bt_mono_ns();
        bt_wahead_make(a, a->grammar, &p->vocab, BT_DIV_UP(p->conf.vocab, 32u));
        bt_metric_observe(p->conf.stats->mask_time, (double)(bt_mono_ns() - t0) / 1e9);
        bt_loop_post(p->conf.loop, &a->task);
        pthread_mutex_lock(&p->lock);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

void bt_wmask_pool_slow(struct bt_wmask_pool *p, struct bt_wahead *a)
{
    a->pool = p;
    a->task = (struct bt_task){.fn = on_made, .arg = a};
    pthread_mutex_lock(&p->lock);
    bt_list_insert_tail(&p->aheads, &a->link);
    pthread_cond_signal(&p->slow);
    pthread_mutex_unlock(&p->lock);
}

/* ---- mask threads ---- */

static void make(struct bt_wmask_pool *p, const struct bt_wvocab *v, struct bt_wmask_job *j,
                 uint32_t *bits, uint32_t words)
{
    uint64_t t0 = bt_mono_ns();
    j->status = bt_wmask_make(j, v, bits, words);
    bt_metric_observe(p->conf.stats->mask_time, (double)(bt_mono_ns() - t0) / 1e9);
}

static void one_done(struct bt_wmask_pool *p)
{
    if (++p->n_done == p->n_jobs) {
        pthread_cond_signal(&p->ready);
    }
}

/* Job j was too late for this step. The next step begins with such a job. */
static void not_begun(struct bt_wmask_pool *p, struct bt_wmask_job *j)
{
    j->status = BT_AGAIN;
    j->n_made = 0;
    p->missed = true;
    memset(p->bits + (size_t)j->at * p->words, 0, (j->n_draft + 1) * p->words * sizeof(*p->bits));
    one_done(p);
}

static void *maker_main(void *arg)
{
    struct bt_wmask_pool *p = arg;
    struct bt_wvocab mine = {0};
    bt_loop_short_slices(BT_LOOP_SLICE_US); /* the engine waits for this thread */
    pthread_mutex_lock(&p->lock);
    while (!p->stop) {
        if (p->next == p->n_jobs) {
            pthread_cond_wait(&p->work, &p->lock);
            continue;
        }
        struct bt_wmask_job *j = &p->jobs[(p->from + p->next++) % p->n_jobs];
        j->begun = j->must || p->next == 1 || p->until_ns == 0 || bt_mono_ns() < p->until_ns;
        if (!j->begun) {
            not_begun(p, j);
            continue;
        }
        p->n_begun += !p->missed;
        pthread_mutex_unlock(&p->lock);
        if (mine.vocab == NULL) { /* there is one: a grammar was compiled */
            mine = bt_wvocab_share(&p->vocab);
        }
        make(p, &mine, j, p->bits, p->words);
        pthread_mutex_lock(&p->lock);
        one_done(p);
    }
    pthread_mutex_unlock(&p->lock);
    bt_wvocab_give_back(&mine);
    return NULL;
}

void bt_wmask_pool_start(struct bt_wmask_pool *p, struct bt_wmask_job *jobs, uint32_t n,
                         uint32_t *bits, uint32_t words)
{
    pthread_mutex_lock(&p->lock);
    BT_ASSERT(p->n_done == p->n_jobs);
    p->jobs = jobs;
    p->n_jobs = n;
    p->next = p->n_done = 0;
    p->until_ns = 0;
    p->from = (p->from + p->n_begun) % n; /* those that have not begun are the first */
    p->n_begun = 0;
    p->missed = false;
    p->bits = bits;
    p->words = words;
    for (uint32_t i = 0; i < BT_MIN(n, p->n_makers); i++) {
        pthread_cond_signal(&p->work);
    }
    pthread_mutex_unlock(&p->lock);
}

void bt_wmask_pool_wait(struct bt_wmask_pool *p, uint64_t wait_ns)
{
    pthread_mutex_lock(&p->lock);
    p->until_ns = bt_mono_ns() + wait_ns;
    while (p->n_done < p->n_jobs) {
        pthread_cond_wait(&p->ready, &p->lock);
    }
    pthread_mutex_unlock(&p->lock);
}

/* ---- life ---- */

static uint32_t makers(void)
{
    cpu_set_t set;
    int cores = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
    return (uint32_t)BT_MIN(BT_MAX(cores / CORES_MAKER, 1), MAKERS_MAX);
}

static void *(*main_of(uint32_t i))(void *)
{
    return i < COMPILERS ? compiler_main : i < COMPILERS + SLOW ? slow_main : maker_main;
}

static bool start(struct bt_wmask_pool *p, void *(*fn)(void *))
{
    bool ok = pthread_create(&p->threads[p->n_threads], NULL, fn, p) == 0;
    p->n_threads += ok;
    return ok;
}

struct bt_wmask_pool *bt_wmask_pool_create(const struct bt_wmask_pool_conf *conf)
{
    struct bt_wmask_pool *p = bt_calloc(1, sizeof(*p));
    bool ok = true;
    p->conf = *conf;
    p->n_makers = makers();
    p->cache = bt_grammar_cache_create(CACHE_BYTES);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->more, NULL);
    pthread_cond_init(&p->slow, NULL);
    pthread_cond_init(&p->work, NULL);
    pthread_cond_init(&p->ready, NULL);
    bt_list_init(&p->grammars);
    bt_list_init(&p->aheads);
    for (uint32_t i = 0; i < COMPILERS + SLOW + p->n_makers && ok; i++) {
        ok = start(p, main_of(i));
    }
    if (!ok) {
        bt_wmask_pool_destroy(p);
        return NULL;
    }
    return p;
}

void bt_wmask_pool_destroy(struct bt_wmask_pool *p)
{
    if (p == NULL) {
        return;
    }
    pthread_mutex_lock(&p->lock);
    p->stop = true;
    pthread_cond_broadcast(&p->more);
    pthread_cond_broadcast(&p->slow);
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->lock);
    for (uint32_t i = 0; i < p->n_threads; i++) {
        pthread_join(p->threads[i], NULL);
    }
    while (!bt_list_empty(&p->grammars)) {
        struct bt_wgrammar *g = BT_CONTAINER_OF(p->grammars.next, struct bt_wgrammar, link);
        bt_list_remove(&g->link);
        bt_wgrammar_unref(g);
    }
    while (!bt_list_empty(&p->aheads)) {
        struct bt_wahead *a = BT_CONTAINER_OF(p->aheads.next, struct bt_wahead, link);
        bt_list_remove(&a->link);
        bt_wahead_destroy(a);
    }
    bt_wvocab_cleanup(&p->vocab);
    bt_grammar_cache_destroy(p->cache);
    pthread_cond_destroy(&p->more);
    pthread_cond_destroy(&p->slow);
    pthread_cond_destroy(&p->work);
    pthread_cond_destroy(&p->ready);
    pthread_mutex_destroy(&p->lock);
    free(p);
}
