/* Opens the files of the SSD tier, at once or with retries on a thread. The thread uses only the
 * result of bt_ssd_files_open; the control thread takes the result over when the thread has
 * ended. */
#include "kvstore/ssd/opener.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define LAST_TRY 5u /* from this try on an unreadable index is replaced by an empty one */

struct bt_ssd_opener {
    struct bt_ssd_files_config c;
    struct bt_loop *loop;
    struct bt_timer timer;
    uint64_t wait_ms;
    uint32_t tries;
    pthread_t thread;
    bool running; /* the thread must be joined */
    int efd;      /* readable when the thread has ended */
    struct bt_loop_fd *w;
    bt_status_t st;
    struct bt_ssd_files files;
    void (*opened)(void *arg, struct bt_ssd_files *f);
    void *arg;
};

static void on_record(void *arg, uint32_t pos, const struct bt_ssd_entry *e, uint32_t tenant)
{
    struct bt_ssd_files *f = arg;
    if (f->n_found == f->found_cap) {
        f->found_cap = BT_MAX(1024u, f->found_cap * 2);
        f->found = bt_realloc(f->found, f->found_cap * sizeof(*f->found));
    }
    f->found[f->n_found++] = (struct bt_ssd_found){pos, tenant, *e};
}

bt_status_t bt_ssd_files_open(const struct bt_ssd_files_config *c, bool last_try,
                              struct bt_ssd_files *f_p, char *err, size_t err_cap)
{
    struct bt_ssd_files f = {0};
    const struct bt_slab_super *su = c->super;
    uint64_t start = bt_mono_ns();
    bt_status_t st = bt_ssd_file_open(c->path, c->bytes, su->slot_bytes, &f.file, err, err_cap);
    if (st != BT_OK) {
        return st;
    }
    struct bt_ssd_db_config dc = c->db;
    char *folder = bt_sprintf("%s/index", c->path);
    dc.path = folder;
    dc.data_fd = f.file.fd;
    dc.identity = (struct bt_ssd_identity){.slot_bytes = f.file.slot_bytes,
                                           .block_bytes = su->block_bytes,
                                           .layout_id = su->layout_id};
    memcpy(dc.identity.file_uuid, f.file.uuid, sizeof(dc.identity.file_uuid));
    memcpy(dc.identity.root_key, su->root_key, sizeof(dc.identity.root_key));
    st = bt_ssd_db_load(&dc, last_try, on_record, &f, &f.db, err, err_cap);
    free(folder);
    if (st != BT_OK) {
        free(f.found);
        bt_ssd_file_close(&f.file);
        return st;
    }
    f.ms = (bt_mono_ns() - start) / 1000000;
    *f_p = f;
    return BT_OK;
}

static void on_time(void *arg);

static void again(struct bt_ssd_opener *o)
{
    bt_timer_start(o->loop, &o->timer, o->wait_ms, 0, on_time, o);
    o->wait_ms = BT_MIN(o->wait_ms * 2, (uint64_t)BT_SSD_RETRY_MAX_MS);
}

static void *open_thread(void *arg)
{
    struct bt_ssd_opener *o = arg;
    char err[512]; /* not logged: the first attempt has logged it */
    o->st = bt_ssd_files_open(&o->c, ++o->tries >= LAST_TRY, &o->files, err, sizeof(err));
    uint64_t one = 1;
    ssize_t n = write(o->efd, &one, sizeof(one));
    (void)n; /* the counter cannot be full */
    return NULL;
}

static void on_ended(void *arg, uint32_t events)
{
    struct bt_ssd_opener *o = arg;
    uint64_t n;
    (void)events;
    if (read(o->efd, &n, sizeof(n)) != (ssize_t)sizeof(n)) {
        return;
    }
    pthread_join(o->thread, NULL);
    o->running = false;
    if (o->st == BT_OK) {
        o->opened(o->arg, &o->files); /* may destroy o */
    } else {
        again(o);
    }
}

static void on_time(void *arg)
{
    struct bt_ssd_opener *o = arg;
    o->running = pthread_create(&o->thread, NULL, open_thread, o) == 0;
    if (!o->running) {
        again(o);
    }
}

struct bt_ssd_opener *bt_ssd_opener_start(const struct bt_ssd_files_config *c, uint64_t first_ms,
                                          void (*opened)(void *arg, struct bt_ssd_files *f),
                                          void *arg)
{
    struct bt_ssd_opener *o = bt_calloc(1, sizeof(*o));
    o->c = *c;
    o->loop = c->db.loop;
    o->wait_ms = first_ms;
    o->opened = opened;
    o->arg = arg;
    o->efd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    BT_ASSERT(o->efd >= 0);
    o->w = bt_loop_fd_add(o->loop, o->efd, EPOLLIN, on_ended, o);
    again(o);
    return o;
}

void bt_ssd_opener_destroy(struct bt_ssd_opener *o)
{
    if (o == NULL) {
        return;
    }
    bt_timer_stop(o->loop, &o->timer);
    if (o->running) {
        pthread_join(o->thread, NULL);
        if (o->st == BT_OK) {
            bt_ssd_db_close(o->files.db);
            bt_ssd_file_close(&o->files.file);
            free(o->files.found);
        }
    }
    bt_loop_fd_del(o->loop, o->w);
    close(o->efd);
    free(o);
}
