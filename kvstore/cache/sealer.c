/* The seal thread. It touches slot data and CRC rows through bt_pool_segment_crc only; jobs go in
 * under a lock and come back the same way with an eventfd that wakes the loop. */
#include "kvstore/cache/sealer.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "common/base/list.h"

struct job {
    struct bt_list link;
    bt_sealer_done_fn done;
    void *arg;
    uint32_t n;
    uint32_t *slots;
    struct bt_kv_key *names;
};

struct bt_sealer {
    struct bt_loop *loop;
    struct bt_pool *pool;
    uint32_t n_layers;
    pthread_t thread;
    pthread_mutex_t lock; /* of todo, ready, stop */
    pthread_cond_t wake;
    struct bt_list todo, ready;
    bool stop;
    int efd;
    struct bt_loop_fd *w;
};

static void job_free(struct job *j)
{
    free(j->slots);
    free(j->names);
    free(j);
}

static struct job *take(struct bt_list *l)
{
    if (bt_list_empty(l)) {
        return NULL;
    }
    struct job *j = BT_CONTAINER_OF(l->next, struct job, link);
    bt_list_remove(&j->link);
    return j;
}

static void *seal_thread(void *arg)
{
    struct bt_sealer *s = arg;
    pthread_mutex_lock(&s->lock);
    while (!s->stop) {
        struct job *j = take(&s->todo);
        if (j == NULL) {
            pthread_cond_wait(&s->wake, &s->lock);
            continue;
        }
        pthread_mutex_unlock(&s->lock);
        for (uint32_t i = 0; i < j->n; i++) {
            for (uint32_t l = 0; l < s->n_layers; l++) {
                bt_pool_segment_crc(s->pool, j->slots[i], l, &j->names[i]);
            }
        }
        pthread_mutex_lock(&s->lock);
        bt_list_insert_tail(&s->ready, &j->link);
        uint64_t one = 1;
        ssize_t n = write(s->efd, &one, sizeof(one));
        (void)n; /* the counter cannot be full */
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static void on_ready(void *arg, uint32_t events)
{
    struct bt_sealer *s = arg;
    uint64_t n;
    (void)events;
    if (read(s->efd, &n, sizeof(n)) < 0) {
        return;
    }
    for (;;) {
        pthread_mutex_lock(&s->lock);
        struct job *j = take(&s->ready);
        pthread_mutex_unlock(&s->lock);
        if (j == NULL) {
            return;
        }
        j->done(j->arg);
        job_free(j);
    }
}

bt_status_t bt_sealer_create(struct bt_loop *loop, struct bt_pool *pool, uint32_t n_layers,
                             struct bt_sealer **s_p)
{
    struct bt_sealer *s = bt_calloc(1, sizeof(*s));
    s->loop = loop;
    s->pool = pool;
    s->n_layers = n_layers;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->wake, NULL);
    bt_list_init(&s->todo);
    bt_list_init(&s->ready);
    s->efd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (s->efd < 0 || pthread_create(&s->thread, NULL, seal_thread, s) != 0) {
        if (s->efd >= 0) {
            close(s->efd);
        }
        free(s);
        return BT_ERR_IO;
    }
    s->w = bt_loop_fd_add(loop, s->efd, EPOLLIN, on_ready, s);
    *s_p = s;
    return BT_OK;
}

void bt_sealer_destroy(struct bt_sealer *s)
{
    if (s == NULL) {
        return;
    }
    pthread_mutex_lock(&s->lock);
    s->stop = true;
    pthread_cond_signal(&s->wake);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    bt_loop_fd_del(s->loop, s->w);
    close(s->efd);
    for (struct job *j; (j = take(&s->todo)) != NULL || (j = take(&s->ready)) != NULL;) {
        job_free(j);
    }
    pthread_cond_destroy(&s->wake);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

void bt_sealer_submit(struct bt_sealer *s, const uint32_t *slots, const struct bt_kv_key *names,
                      uint32_t n, bt_sealer_done_fn done, void *arg)
{
    struct job *j = bt_calloc(1, sizeof(*j));
    j->done = done;
    j->arg = arg;
    j->n = n;
    j->slots = bt_malloc(n * sizeof(*j->slots) + 1);
    j->names = bt_malloc(n * sizeof(*j->names) + 1);
    memcpy(j->slots, slots, n * sizeof(*j->slots));
    memcpy(j->names, names, n * sizeof(*j->names));
    pthread_mutex_lock(&s->lock);
    bt_list_insert_tail(&s->todo, &j->link);
    pthread_cond_signal(&s->wake);
    pthread_mutex_unlock(&s->lock);
}
