/* Token ids for parts of the conductor that are not HTTP clients (admin_pins.c). The reading
 * threads make them. */
#include <stdlib.h>
#include <string.h>

#include "conductor/front/front_jobs.h"

struct tokens_task {
    struct bt_front_task task;
    char *body;
    size_t len;
    bool ok;
    struct bt_tokens ids;
    struct bt_front_error e;
    void (*done)(void *arg, const struct bt_tokens *ids, const char *why);
    void *arg;
};

static struct tokens_task *task_of(struct bt_front_task *t)
{
    return BT_CONTAINER_OF(t, struct tokens_task, task);
}

static void run(const struct bt_front_model *m, struct bt_front_task *task)
{
    struct tokens_task *t = task_of(task);
    t->ok = bt_front_parse_prompt(m, t->body, t->len, &t->ids, &t->e);
}

static void finish(struct tokens_task *t, const char *why)
{
    t->done(t->arg, why == NULL ? &t->ids : NULL, why);
    bt_tokens_cleanup(&t->ids);
    free(t->body);
    free(t);
}

static void done(struct bt_front_task *task)
{
    struct tokens_task *t = task_of(task);
    finish(t, t->ok ? NULL : t->e.message);
}

static void drop(struct bt_front_task *task)
{
    finish(task_of(task), "this conductor is stopping; use another one");
}

void bt_front_tokens(struct bt_front *f, const void *body, size_t len,
                     void (*done_fn)(void *arg, const struct bt_tokens *ids, const char *why),
                     void *arg)
{
    struct tokens_task *t = bt_calloc(1, sizeof(*t));
    t->body = bt_malloc(len + 1);
    memcpy(t->body, body, len);
    t->len = len;
    t->done = done_fn;
    t->arg = arg;
    t->task.run = run;
    t->task.done = done;
    t->task.drop = drop;
    t->task.large = len > FRONT_LARGE_BYTES;
    bt_front_task_start(f, &t->task);
}

const char *bt_front_tenant(const struct bt_front *f, const char *name)
{
    return bt_front_keys_tenant(f->keys, name);
}

bool bt_front_has_keys(const struct bt_front *f)
{
    return f->keys != NULL;
}
