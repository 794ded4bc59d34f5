/* Within front/: turns bodies into values and answers, on other threads where that takes long.
 * Tokenizing megabytes of text takes a second. On the loop's thread it would stop all streams and
 * the heartbeats of workers. Several threads read. Clients (API keys, or addresses without keys)
 * take turns, a short body never waits for a large one, and one client cannot fill the queue.
 * Reading a body has a time limit, and stops when its client leaves. */
#ifndef BT_CONDUCTOR_FRONT_JOBS_H
#define BT_CONDUCTOR_FRONT_JOBS_H

#include "conductor/front/front_priv.h"

#define FRONT_CLIENT_LEN 64
/* A body up to this length takes at most about 50 ms, so any thread may read it. */
#define FRONT_LARGE_BYTES (256 * 1024)

struct bt_front_client; /* front_jobs.c */

/* A task for a thread, a member of the struct that it works on. */
struct bt_front_task {
    struct bt_list link;
    struct bt_front_client *client; /* the client whose turn this is, until the task has run */
    bool waits;                     /* for a thread */
    bool large;                     /* may take longer than a short body */
    bool brief;                     /* a few bytes, which take long nevertheless */
    uint32_t limit_s;               /* stopped after this time; 0: never */
    uint64_t until_ns;
    bool late;         /* stopped because of limit_s */
    _Atomic bool gone; /* its client is gone: the task is not run, or stops */
    /* On a thread, with the thread's model. */
    void (*run)(const struct bt_front_model *m, struct bt_front_task *t);
    /* Called on the loop after run. Frees the task. */
    void (*done)(struct bt_front_task *t);
    /* Called instead of done when the front is destroyed: frees the task. */
    void (*drop)(struct bt_front_task *t);
};

struct bt_front_job {
    struct bt_front_task task;
    struct bt_front *f;
    struct bt_http_req *req; /* loop only; NULL: the client has left */
    /* Fills ok and either e, or gen or out. Runs on the loop or on a reading thread, with the model
     * of that thread. It runs again from the beginning if a limit of the model ended it. It may
     * touch only j's body and results. */
    void (*run)(const struct bt_front_model *m, struct bt_front_job *j);
    /* Loop: answers j->req from the results, if they are ok. */
    void (*done)(struct bt_front_job *j);
    const char *body;
    size_t len;
    char *copy; /* copy of the body, if the request may end before the job */
    const char *tenant;
    char tenant_text[33];
    char client[FRONT_CLIENT_LEN];
    struct bt_front_headers headers; /* generations; loop only */
    bool ok;
    struct bt_front_error e;
    struct bt_front_generation gen;
    uint64_t n_tokens; /* number of tokens to charge, where gen is not used */
    struct bt_buf out;
};

/* What the body counts for the limits of the API key; the other members are 0. j->req must be
 * set. */
struct bt_front_work bt_front_work_of(const struct bt_front_job *j);
/* Starts the threads. err says what the machine lacks. */
bt_status_t bt_front_jobs_create(struct bt_front *f, char *err, size_t err_cap) BT_MUST_CHECK;
/* Stops the running jobs. All connections must be closed before. */
void bt_front_jobs_destroy(struct bt_front *f);
/* Queues t after the conductor's own tasks. */
void bt_front_task_start(struct bt_front *f, struct bt_front_task *t);
/* Puts t into the queue of a client. */
void bt_front_task_start_for(struct bt_front *f, struct bt_front_task *t, const char *client);
/* Cancels t. True: it had not begun, and the caller owns it again. False: done is called when it
 * has stopped. */
bool bt_front_task_cancel(struct bt_front *f, struct bt_front_task *t);
/* Runs a job for req: at once if its body is short, else in turn on a thread. headers: those that
 * were read already, or NULL. A client with too many queued jobs gets 429. tenant may be NULL; then
 * the address identifies the client. */
void bt_front_job_start(struct bt_front *f, struct bt_http_req *req, const char *tenant,
                        const struct bt_front_headers *headers,
                        void (*run)(const struct bt_front_model *m, struct bt_front_job *j),
                        void (*done)(struct bt_front_job *j));

#endif
