/* Within front/: bodies into values and answers, off the loop where that takes long. Megabytes of
 * text take a second to tokenize; on the loop's thread every stream would stand still, and the
 * workers' heartbeats with them. Several threads read. Clients (API keys, or addresses without
 * keys) take turns, a short body never waits for a large one, and one client cannot fill the queue.
 * A body is read for a limited time, and no longer than its client waits for it. */
#ifndef BT_CONDUCTOR_FRONT_JOBS_H
#define BT_CONDUCTOR_FRONT_JOBS_H

#include "conductor/front/front_priv.h"

#define FRONT_CLIENT_LEN 64
/* A shorter body takes ~50 ms at most: any thread may read it. */
#define FRONT_LARGE_BYTES (256 * 1024)

struct bt_front_client; /* front_jobs.c */

/* Work for a thread, embedded in what it is about. */
struct bt_front_task {
    struct bt_list link;
    struct bt_front_client *client; /* whose turn it takes, until it has run */
    bool waits;                     /* for a thread */
    bool large;                     /* takes longer than a short body's time */
    uint32_t limit_s;               /* it is stopped when it has run so long; 0: never */
    uint64_t until_ns;
    bool late;         /* it has been stopped for that reason */
    _Atomic bool gone; /* its client is gone: it is not run, or stops */
    /* On a thread, with the thread's model. */
    void (*run)(const struct bt_front_model *m, struct bt_front_task *t);
    /* On the loop, behind run. Frees it. */
    void (*done)(struct bt_front_task *t);
    /* Instead of done, when the front ends: frees it. */
    void (*drop)(struct bt_front_task *t);
};

struct bt_front_job {
    struct bt_front_task task;
    struct bt_front *f;
    struct bt_http_req *req; /* loop only; NULL: the client has left */
    /* Fills ok and either e, or gen or out. Runs on the loop or on a reading thread, with the model
     * of that thread, and again from the beginning if a bound of the model ended it: touches j's
     * body and results only. */
    void (*run)(const struct bt_front_model *m, struct bt_front_job *j);
    /* Loop: answers j->req from the results, if they are ok. */
    void (*done)(struct bt_front_job *j);
    const char *body;
    size_t len;
    char *copy; /* of the body, when the request may go before the job is done */
    const char *tenant;
    char tenant_text[33];
    char client[FRONT_CLIENT_LEN];
    struct bt_front_headers headers; /* generations; loop only */
    bool ok;
    struct bt_front_error e;
    struct bt_front_generation gen;
    uint64_t n_tokens; /* that were counted, where gen is not used */
    struct bt_buf out;
};

/* What reading its body counts; the rest is 0. j->req is there. */
struct bt_front_work bt_front_work_of(const struct bt_front_job *j);
/* Starts the threads. err: what the machine lacks. */
bt_status_t bt_front_jobs_create(struct bt_front *f, char *err, size_t err_cap) BT_MUST_CHECK;
/* Every connection is closed already. Stops the jobs that run. */
void bt_front_jobs_destroy(struct bt_front *f);
/* Queues t behind the conductor's own tasks. */
void bt_front_task_start(struct bt_front *f, struct bt_front_task *t);
/* Puts t into the queue of a client. */
void bt_front_task_start_for(struct bt_front *f, struct bt_front_task *t, const char *client);
/* Cancels t. True: it had not begun, and the caller owns it again; otherwise done is called when
 * it has stopped. */
bool bt_front_task_cancel(struct bt_front *f, struct bt_front_task *t);
/* headers: as read already, NULL where there are none to read. Runs a job for req: at once if its
 * body is short and read quickly, else in turn on a thread. Too many of this client in the queue:
 * 429. tenant may be NULL: its address tells the client. */
void bt_front_job_start(struct bt_front *f, struct bt_http_req *req, const char *tenant,
                        const struct bt_front_headers *headers,
                        void (*run)(const struct bt_front_model *m, struct bt_front_job *j),
                        void (*done)(struct bt_front_job *j));

#endif
