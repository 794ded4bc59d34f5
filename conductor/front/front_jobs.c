/* The front's reading threads; see front_jobs.h. Each client has a queue of tasks, and clients take
 * turns. Finished tasks come back in one list. One lock guards everything, and an eventfd wakes the
 * loop. Each thread has a tokenizer handle of its own, because encoding needs scratch memory. */
#include "conductor/front/front_jobs.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define FINISH_NS 2000000ull /* of a turn of the loop: to answer finished tasks */
/* The loop reads a body within these limits itself. A thread reads any other body. */
#define INLINE_BYTES (8 * 1024) /* ~1 ms of tokenizing */
#define INLINE_STEPS 65536      /* of a template: ~2 ms */
#define INLINE_TEXT  (4 * INLINE_BYTES)
#define QUEUED_MAX   64   /* bodies that are being read or wait ... */
#define BRIEF_MAX    1024 /* ... of more than INLINE_BYTES; and of up to INLINE_BYTES */
/* One thread takes only short bodies. Two threads also take large bodies, of different clients. */
#define THREADS    3
#define LARGE_MAX  (THREADS - 1)   /* large bodies read at once */
#define CLIENT_MAX (LARGE_MAX - 1) /* large bodies of one client */
/* Tokenizing takes up to 0.3 s per MiB (docs/measurements/2026-11-path.md), and a template at most
 * a second. The limits are several times that, for a busy host. */
#define READ_S         5
#define READ_S_PER_MIB 2
/* Most steps of a template, in proportion to the body: a message of 30 bytes costs ~200. */
#define STEPS          1000000u
#define STEPS_PER_BYTE 8

struct bt_front_client { /* a client with tasks that wait or run */
    struct bt_list link; /* in front_jobs.clients; the first in the list has the next turn */
    char name[FRONT_CLIENT_LEN];
    struct bt_list todo[2]; /* tasks: short, large */
    uint32_t n_running, n_large;
    uint32_t n_brief; /* of those that wait or run */
};

struct worker {
    struct front_jobs *q;
    struct bt_front_model model; /* the thread's */
    struct bt_tokenizer *tok;    /* shares the loop's tables */
    struct bt_token_watch watch;
    struct bt_front_task *task; /* that is running */
    pthread_t thread;
    bool running; /* thread was started */
};

struct front_jobs {
    struct worker workers[THREADS];
    int wake_fd;
    struct bt_loop_fd *wake_w;
    uint32_t open[2];    /* loop: bodies that are not finished: others, brief ones */
    struct bt_list done; /* loop: tasks to finish, in this order */
    struct bt_timer done_timer;

    pthread_mutex_t lock; /* guards the fields below, and the tasks' links and clients */
    pthread_cond_t more;
    struct bt_list clients, ready;
    uint32_t n_large; /* large tasks that are running */
    _Atomic bool stopping;
};

static void job_free(struct bt_front_job *j)
{
    bt_front_generation_cleanup(&j->gen);
    bt_buf_cleanup(&j->out);
    free(j->copy);
    free(j);
}

/* On the loop: answers, if the client is still there. */
static void finish(struct bt_front_job *j)
{
    if (j->req != NULL) {
        bt_http_on_gone(j->req, NULL, NULL); /* done may set a callback of its own */
        bt_http_body_done(j->req);
        if (j->ok) {
            j->done(j);
        } else {
            bt_front_respond_error(j->f, j->req, &j->e);
        }
    }
    job_free(j);
}

/* Runs in slices: sixty-four answers may be ready at once, each with megabytes or a thousand
 * prompts. */
static void finish_some(void *arg)
{
    struct bt_front *f = arg;
    struct front_jobs *q = f->jobs;
    uint64_t until_ns = bt_loop_until(f->loop, FINISH_NS);
    while (!bt_list_empty(&q->done) && bt_mono_ns() < until_ns) {
        struct bt_front_task *t = BT_CONTAINER_OF(q->done.next, struct bt_front_task, link);
        bt_list_remove(&t->link);
        t->done(t);
    }
    if (!bt_list_empty(&q->done)) {
        bt_timer_start(f->loop, &q->done_timer, 0, 0, finish_some, f);
    }
}

static void on_ready(void *arg, uint32_t events)
{
    struct bt_front *f = arg;
    struct front_jobs *q = f->jobs;
    uint64_t n;
    (void)events;
    if (read(q->wake_fd, &n, sizeof(n)) < 0) {
        BT_ASSERT(errno == EAGAIN || errno == EINTR);
    }
    bool idle = bt_list_empty(&q->done);
    pthread_mutex_lock(&q->lock);
    while (!bt_list_empty(&q->ready)) {
        struct bt_list *first = q->ready.next;
        bt_list_remove(first);
        bt_list_insert_tail(&q->done, first);
    }
    pthread_mutex_unlock(&q->lock);
    if (idle) {
        finish_some(f);
    }
}

/* ---- the threads ---- */

static bool stop_asked(void *arg)
{
    struct worker *w = arg;
    struct bt_front_task *t = w->task;
    t->late = t->late || (t->until_ns > 0 && bt_mono_ns() > t->until_ns);
    return t->gone || t->late || w->q->stopping;
}

/* Takes the next task; clients take turns. NULL: none may run now. Call with the lock held. */
static struct bt_front_task *take_task(struct front_jobs *q)
{
    for (struct bt_list *l = q->clients.next; l != &q->clients; l = l->next) {
        struct bt_front_client *c = BT_CONTAINER_OF(l, struct bt_front_client, link);
        bool may_large = q->n_large < LARGE_MAX && c->n_large < CLIENT_MAX;
        bool large = bt_list_empty(&c->todo[0]);
        if (bt_list_empty(&c->todo[large]) || (large && !may_large)) {
            continue;
        }
        struct bt_front_task *t = BT_CONTAINER_OF(c->todo[large].next, struct bt_front_task, link);
        bt_list_remove(&t->link);
        t->waits = false;
        c->n_running++;
        c->n_large += large;
        q->n_large += large;
        bt_list_remove(&c->link); /* the other clients have their turns first */
        bt_list_insert_tail(&q->clients, &c->link);
        return t;
    }
    return NULL;
}

static void forget_client(struct bt_front_client *c)
{
    if (c->n_running == 0 && bt_list_empty(&c->todo[0]) && bt_list_empty(&c->todo[1])) {
        bt_list_remove(&c->link);
        free(c);
    }
}

static void give_back(struct front_jobs *q, struct bt_front_task *t)
{
    const uint64_t one = 1;
    t->client->n_running--;
    t->client->n_large -= t->large;
    t->client->n_brief -= t->brief;
    q->n_large -= t->large;
    forget_client(t->client);
    t->client = NULL;
    bt_list_insert_tail(&q->ready, &t->link);
    ssize_t n = write(q->wake_fd, &one, sizeof(one));
    BT_ASSERT(n == (ssize_t)sizeof(one));
    if (t->large) {
        pthread_cond_broadcast(&q->more); /* a waiting large task may now be allowed */
    }
}

static void *thread_main(void *arg)
{
    struct worker *w = arg;
    struct front_jobs *q = w->q;
    pthread_mutex_lock(&q->lock);
    while (!q->stopping) {
        struct bt_front_task *t = take_task(q);
        if (t == NULL) {
            pthread_cond_wait(&q->more, &q->lock);
            continue;
        }
        pthread_mutex_unlock(&q->lock);
        w->task = t;
        t->until_ns = t->limit_s > 0 ? bt_mono_ns() + t->limit_s * 1000000000ull : 0;
        if (!t->gone) {
            t->run(&w->model, t);
        }
        pthread_mutex_lock(&q->lock);
        give_back(q, t);
    }
    pthread_mutex_unlock(&q->lock);
    return NULL;
}

struct bt_front_work bt_front_work_of(const struct bt_front_job *j)
{
    bool chunked = bt_http_header(j->req, "transfer-encoding") != NULL;
    return (struct bt_front_work){.body_bytes = j->len, .body_announced = chunked ? 0 : j->len};
}

/* ---- starting one ---- */

/* Call with the lock held. */
static struct bt_front_client *client_of(struct front_jobs *q, const char *name)
{
    for (struct bt_list *l = q->clients.next; l != &q->clients; l = l->next) {
        struct bt_front_client *c = BT_CONTAINER_OF(l, struct bt_front_client, link);
        if (strcmp(c->name, name) == 0) {
            return c;
        }
    }
    struct bt_front_client *c = bt_calloc(1, sizeof(*c));
    snprintf(c->name, sizeof(c->name), "%s", name);
    bt_list_init(&c->todo[0]);
    bt_list_init(&c->todo[1]);
    bt_list_insert_tail(&q->clients, &c->link);
    return c;
}

void bt_front_task_start_for(struct bt_front *f, struct bt_front_task *t, const char *client)
{
    struct front_jobs *q = f->jobs;
    pthread_mutex_lock(&q->lock);
    t->client = client_of(q, client);
    t->client->n_brief += t->brief;
    t->waits = true;
    bt_list_insert_tail(&t->client->todo[t->large], &t->link);
    pthread_cond_signal(&q->more);
    pthread_mutex_unlock(&q->lock);
}

void bt_front_task_start(struct bt_front *f, struct bt_front_task *t)
{
    bt_front_task_start_for(f, t, "");
}

bool bt_front_task_cancel(struct bt_front *f, struct bt_front_task *t)
{
    struct front_jobs *q = f->jobs;
    t->gone = true;
    pthread_mutex_lock(&q->lock);
    bool waited = t->waits;
    if (waited) {
        t->waits = false;
        bt_list_remove(&t->link);
        t->client->n_brief -= t->brief;
        forget_client(t->client);
        t->client = NULL;
    }
    pthread_mutex_unlock(&q->lock);
    return waited;
}

static void job_run(const struct bt_front_model *m, struct bt_front_task *t)
{
    struct bt_front_job *j = BT_CONTAINER_OF(t, struct bt_front_job, task);
    struct bt_front_model bounded = *m;
    bounded.template_steps = STEPS + (uint64_t)STEPS_PER_BYTE * j->len;
    j->run(&bounded, j);
    if (!j->ok && t->late) {
        bt_front_fail(
            &j->e, 503, NULL, NULL,
            "reading this body of %zu bytes took longer than %u s, the limit for its size; "
            "send less at once, or try again when the server is less busy",
            j->len, t->limit_s);
        j->e.retry_after_s = 1;
    }
}

static void job_done(struct bt_front_task *t)
{
    struct bt_front_job *j = BT_CONTAINER_OF(t, struct bt_front_job, task);
    j->f->jobs->open[t->brief]--;
    j->f->n_jobs--;
    finish(j);
}

static void on_gone(void *arg)
{
    struct bt_front_job *j = arg;
    bt_metric_add(j->f->m.gone, 1);
    j->req = NULL;
    if (bt_front_task_cancel(j->f, &j->task)) {
        job_done(&j->task);
    }
}

static void job_drop(struct bt_front_task *t)
{
    job_free(BT_CONTAINER_OF(t, struct bt_front_job, task));
}

/* Its grammar or template takes long, not its length. */
static bool is_brief(const struct bt_front_job *j)
{
    return j->len <= INLINE_BYTES;
}

static void enqueue(struct front_jobs *q, struct bt_front_job *j)
{
    j->body = j->copy = bt_http_take_body(j->req, &j->len);
    bt_http_on_gone(j->req, on_gone, j);
    j->task.brief = is_brief(j);
    q->open[j->task.brief]++;
    j->f->n_jobs++;
    j->task.run = job_run;
    j->task.done = job_done;
    j->task.drop = job_drop;
    j->task.large = j->len > FRONT_LARGE_BYTES;
    j->task.limit_s = READ_S + (uint32_t)(j->len * READ_S_PER_MIB >> 20);
    bt_front_task_start_for(j->f, &j->task, j->client);
}

/* How many bodies of this client are being read or wait: brief ones, or others. */
static uint32_t open_of(struct front_jobs *q, const char *client, bool brief)
{
    uint32_t n = 0;
    pthread_mutex_lock(&q->lock);
    for (struct bt_list *l = q->clients.next; l != &q->clients; l = l->next) {
        const struct bt_front_client *c = BT_CONTAINER_OF(l, struct bt_front_client, link);
        if (strcmp(c->name, client) == 0) {
            n = c->n_running;
            for (int i = 0; i < 2; i++) {
                for (struct bt_list *t = c->todo[i].next; t != &c->todo[i]; t = t->next) {
                    n++;
                }
            }
            n = brief ? c->n_brief : n - c->n_brief;
        }
    }
    pthread_mutex_unlock(&q->lock);
    return n;
}

/* May this client put another body into the queue? It may have as many places as are free for
 * others: a single client half of all places, two clients a third each, and so on. */
static bool has_room(struct front_jobs *q, struct bt_front_job *j)
{
    bool brief = is_brief(j);
    uint32_t most = brief ? BRIEF_MAX : QUEUED_MAX, mine = open_of(q, j->client, brief);
    uint32_t left = most - BT_MIN(q->open[brief], most);
    if (mine < left) {
        return true;
    }
    j->ok = false;
    j->e.retry_after_s = 1;
    return bt_front_fail(
        &j->e, 429, NULL, NULL,
        "this server is already reading %u %s requests of this client. It reads %u of that kind at "
        "once and keeps some places for other clients; try again later",
        mine, brief ? "constrained or chat" : "large", most);
}

/* Reads a short body on the loop. False: that takes too long on the loop. */
static bool run_inline(struct bt_front_job *j)
{
    struct bt_front_model bounded = j->f->model;
    bounded.template_steps = INLINE_STEPS;
    bounded.text_bytes = INLINE_TEXT;
    bounded.on_loop = true;
    j->run(&bounded, j);
    if (j->ok || !j->e.beyond) {
        return true;
    }
    j->e = (struct bt_front_error){0};
    bt_buf_clear(&j->out);
    return false;
}

void bt_front_job_start(struct bt_front *f, struct bt_http_req *req, const char *tenant,
                        const struct bt_front_headers *headers,
                        void (*run)(const struct bt_front_model *m, struct bt_front_job *j),
                        void (*done)(struct bt_front_job *j))
{
    struct bt_front_job *j = bt_calloc(1, sizeof(*j));
    j->f = f;
    j->req = req;
    j->run = run;
    j->done = done;
    j->headers = headers != NULL ? *headers : (struct bt_front_headers){0};
    j->body = bt_http_body(req, &j->len);
    if (tenant != NULL) {
        memcpy(j->tenant_text, tenant, strnlen(tenant, sizeof(j->tenant_text) - 1));
        j->tenant = j->tenant_text;
        snprintf(j->client, sizeof(j->client), "key %s", j->tenant);
    } else {
        char peer[BT_HTTP_PEER_LEN];
        bt_http_peer(req, peer);
        snprintf(j->client, sizeof(j->client), "peer %s", peer);
    }
    if (j->len <= INLINE_BYTES && run_inline(j)) {
        finish(j);
    } else if (!has_room(f->jobs, j)) {
        finish(j);
    } else {
        enqueue(f->jobs, j);
    }
}

/* ---- life ---- */

bt_status_t bt_front_jobs_create(struct bt_front *f, char *err, size_t err_cap)
{
    struct front_jobs *q = bt_calloc(1, sizeof(*q));
    json_object_seed(0); /* before a second thread makes JSON objects */
    f->jobs = q;
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->more, NULL);
    bt_list_init(&q->clients);
    bt_list_init(&q->ready);
    bt_list_init(&q->done);
    q->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (q->wake_fd < 0) {
        snprintf(err, err_cap, "no eventfd; raise the limit of open files");
        return BT_ERR_IO;
    }
    q->wake_w = bt_loop_fd_add(f->loop, q->wake_fd, EPOLLIN, on_ready, f);
    for (int i = 0; i < THREADS; i++) {
        struct worker *w = &q->workers[i];
        w->q = q;
        w->tok = bt_tokenizer_share(f->model.tok);
        w->watch = (struct bt_token_watch){stop_asked, w};
        bt_tokenizer_watch(w->tok, &w->watch);
        w->model = f->model;
        w->model.tok = w->tok;
        w->model.watch = &w->watch;
        w->running = pthread_create(&w->thread, NULL, thread_main, w) == 0;
        if (!w->running) {
            snprintf(err, err_cap, "no thread could be started; raise the limit of tasks");
            return BT_ERR_EXHAUSTED;
        }
    }
    return BT_OK;
}

static void drop_all(struct bt_list *tasks)
{
    while (!bt_list_empty(tasks)) {
        struct bt_front_task *t = BT_CONTAINER_OF(tasks->next, struct bt_front_task, link);
        bt_list_remove(&t->link);
        t->drop(t);
    }
}

void bt_front_jobs_destroy(struct bt_front *f)
{
    struct front_jobs *q = f->jobs;
    if (q == NULL) {
        return;
    }
    pthread_mutex_lock(&q->lock);
    q->stopping = true;
    pthread_cond_broadcast(&q->more);
    pthread_mutex_unlock(&q->lock);
    for (int i = 0; i < THREADS; i++) {
        if (q->workers[i].running) {
            pthread_join(q->workers[i].thread, NULL);
        }
        bt_tokenizer_destroy(q->workers[i].tok);
    }
    while (!bt_list_empty(&q->clients)) {
        struct bt_front_client *c = BT_CONTAINER_OF(q->clients.next, struct bt_front_client, link);
        drop_all(&c->todo[0]);
        drop_all(&c->todo[1]);
        forget_client(c);
    }
    drop_all(&q->ready);
    drop_all(&q->done);
    bt_timer_stop(f->loop, &q->done_timer);
    if (q->wake_w != NULL) {
        bt_loop_fd_del(f->loop, q->wake_w);
    }
    if (q->wake_fd >= 0) {
        close(q->wake_fd);
    }
    pthread_cond_destroy(&q->more);
    pthread_mutex_destroy(&q->lock);
    free(q);
    f->jobs = NULL;
}
