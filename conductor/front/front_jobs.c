/* The front's second thread; see front_jobs.h. Jobs go to it and come back in two lists under one
 * lock; an eventfd tells the loop. The thread has a tokenizer handle of its own: encoding needs
 * scratch memory.
 */
#include "conductor/front/front_jobs.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define INLINE_BYTES (8 * 1024) /* ~1 ms of tokenizing */
#define QUEUED_MAX   64

struct front_jobs {
    struct front_model model; /* the thread's */
    struct bt_tokenizer *tok; /* shares the loop's tables */
    pthread_t thread;
    bool running; /* thread was started */
    int wake_fd;
    struct bt_loop_fd *wake_w;
    uint32_t open; /* loop: bodies that have not come back */

    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t more;
    struct front_task *todo, **todo_tail, *ready, **ready_tail;
    bool stopping;
};

static void job_free(struct front_job *j)
{
    front_generation_cleanup(&j->gen);
    bt_buf_cleanup(&j->out);
    free(j->copy);
    free(j);
}

/* Loop: the answer, if somebody still waits for it. */
static void finish(struct front_job *j)
{
    if (j->req != NULL) {
        bt_http_on_gone(j->req, NULL, NULL); /* done may set its own */
        bt_http_body_done(j->req);
        if (j->ok) {
            j->done(j);
        } else {
            front_respond_error(j->f, j->req, &j->e);
        }
    }
    job_free(j);
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
    pthread_mutex_lock(&q->lock);
    struct front_task *t = q->ready;
    q->ready = NULL;
    q->ready_tail = &q->ready;
    pthread_mutex_unlock(&q->lock);
    while (t != NULL) {
        struct front_task *next = t->next;
        t->done(t);
        t = next;
    }
}

static void *thread_main(void *arg)
{
    struct front_jobs *q = arg;
    const uint64_t one = 1;
    pthread_mutex_lock(&q->lock);
    for (;;) {
        while (q->todo == NULL && !q->stopping) {
            pthread_cond_wait(&q->more, &q->lock);
        }
        if (q->stopping) {
            break;
        }
        struct front_task *t = q->todo;
        q->todo = t->next;
        q->todo_tail = q->todo == NULL ? &q->todo : q->todo_tail;
        pthread_mutex_unlock(&q->lock);
        if (!t->gone) {
            t->run(&q->model, t);
        }
        t->next = NULL;
        pthread_mutex_lock(&q->lock);
        *q->ready_tail = t;
        q->ready_tail = &t->next;
        ssize_t n = write(q->wake_fd, &one, sizeof(one));
        BT_ASSERT(n == (ssize_t)sizeof(one));
    }
    pthread_mutex_unlock(&q->lock);
    return NULL;
}

struct front_work front_work_of(const struct front_job *j)
{
    bool chunked = bt_http_header(j->req, "transfer-encoding") != NULL;
    return (struct front_work){.body_bytes = j->len, .body_announced = chunked ? 0 : j->len};
}

/* ---- starting one ---- */

static void on_gone(void *arg)
{
    struct front_job *j = arg;
    bt_metric_add(j->f->m.gone, 1);
    j->req = NULL;
    j->task.gone = true;
}

void front_task_start(struct bt_front *f, struct front_task *t)
{
    struct front_jobs *q = f->jobs;
    t->next = NULL;
    pthread_mutex_lock(&q->lock);
    *q->todo_tail = t;
    q->todo_tail = &t->next;
    pthread_cond_signal(&q->more);
    pthread_mutex_unlock(&q->lock);
}

static void job_run(const struct front_model *m, struct front_task *t)
{
    struct front_job *j = BT_CONTAINER_OF(t, struct front_job, task);
    j->run(m, j);
}

static void job_done(struct front_task *t)
{
    struct front_job *j = BT_CONTAINER_OF(t, struct front_job, task);
    j->f->jobs->open--;
    j->f->n_jobs--;
    finish(j);
}

static void job_drop(struct front_task *t)
{
    job_free(BT_CONTAINER_OF(t, struct front_job, task));
}

static void enqueue(struct front_jobs *q, struct front_job *j)
{
    j->body = j->copy = bt_http_take_body(j->req, &j->len);
    bt_http_on_gone(j->req, on_gone, j);
    q->open++;
    j->f->n_jobs++;
    j->task.run = job_run;
    j->task.done = job_done;
    j->task.drop = job_drop;
    front_task_start(j->f, &j->task);
}

void front_job_start(struct bt_front *f, struct bt_http_req *req, const char *tenant,
                     void (*run)(const struct front_model *m, struct front_job *j),
                     void (*done)(struct front_job *j))
{
    struct front_job *j = bt_calloc(1, sizeof(*j));
    j->f = f;
    j->req = req;
    j->run = run;
    j->done = done;
    j->body = bt_http_body(req, &j->len);
    if (tenant != NULL) {
        memcpy(j->tenant_text, tenant, strnlen(tenant, sizeof(j->tenant_text) - 1));
        j->tenant = j->tenant_text;
    }
    if (j->len <= INLINE_BYTES) {
        run(&f->model, j);
        finish(j);
    } else if (f->jobs->open >= QUEUED_MAX) {
        front_fail(&j->e, 429, NULL, NULL, "%d large requests are being read already", QUEUED_MAX);
        j->e.retry_after_s = 1;
        finish(j);
    } else {
        enqueue(f->jobs, j);
    }
}

/* ---- life ---- */

bt_status_t front_jobs_create(struct bt_front *f, char *err, size_t err_cap)
{
    struct front_jobs *q = bt_calloc(1, sizeof(*q));
    json_object_seed(0); /* before a second thread makes objects */
    f->jobs = q;
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->more, NULL);
    q->todo_tail = &q->todo;
    q->ready_tail = &q->ready;
    q->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (q->wake_fd < 0) {
        snprintf(err, err_cap, "no eventfd; raise the limit of open files");
        return BT_ERR_IO;
    }
    q->tok = bt_tokenizer_share(f->model.tok);
    q->model = f->model;
    q->model.tok = q->tok;
    q->wake_w = bt_loop_fd_add(f->loop, q->wake_fd, EPOLLIN, on_ready, f);
    q->running = pthread_create(&q->thread, NULL, thread_main, q) == 0;
    if (!q->running) {
        snprintf(err, err_cap, "no thread could be started; raise the limit of tasks");
        return BT_ERR_EXHAUSTED;
    }
    return BT_OK;
}

static void drop_all(struct front_task *t)
{
    while (t != NULL) {
        struct front_task *next = t->next;
        t->drop(t);
        t = next;
    }
}

void front_jobs_destroy(struct bt_front *f)
{
    struct front_jobs *q = f->jobs;
    if (q == NULL) {
        return;
    }
    if (q->running) {
        pthread_mutex_lock(&q->lock);
        q->stopping = true;
        pthread_cond_signal(&q->more);
        pthread_mutex_unlock(&q->lock);
        pthread_join(q->thread, NULL);
    }
    drop_all(q->todo);
    drop_all(q->ready);
    if (q->wake_w != NULL) {
        bt_loop_fd_del(f->loop, q->wake_w);
    }
    if (q->wake_fd >= 0) {
        close(q->wake_fd);
    }
    bt_tokenizer_destroy(q->tok);
    pthread_cond_destroy(&q->more);
    pthread_mutex_destroy(&q->lock);
    free(q);
    f->jobs = NULL;
}
