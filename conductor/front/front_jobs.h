/* Within front/: bodies into values and answers, off the loop where that takes long. Megabytes of
 * text take a second to tokenize; on the loop's thread every stream would stand still, and the
 * workers' heartbeats with them. */
#ifndef BT_CONDUCTOR_FRONT_JOBS_H
#define BT_CONDUCTOR_FRONT_JOBS_H

#include "conductor/front/front_priv.h"

/* Work for the thread, embedded in what it is about. */
struct front_task {
    struct front_task *next;
    _Atomic bool gone; /* nobody wants it any more: it need not be run */
    /* On the thread, with the thread's model. */
    void (*run)(const struct front_model *m, struct front_task *t);
    /* On the loop, behind run. Frees it. */
    void (*done)(struct front_task *t);
    /* Instead of done, when the front ends: frees it. */
    void (*drop)(struct front_task *t);
};

struct front_job {
    struct front_task task;
    struct bt_front *f;
    struct bt_http_req *req; /* loop only; NULL: the client has left */
    /* Fills ok and either e, or gen or out. Runs on the loop or on the jobs' thread, with the model
     * of that thread: touches j's body and results only. */
    void (*run)(const struct front_model *m, struct front_job *j);
    /* Loop: answers j->req from the results, if they are ok. */
    void (*done)(struct front_job *j);
    const char *body;
    size_t len;
    char *copy; /* of the body, when the request may go before the job is done */
    const char *tenant;
    char tenant_text[33];
    bool ok;
    struct front_error e;
    struct front_generation gen;
    uint64_t n_tokens; /* that were counted, where gen is not used */
    struct bt_buf out;
};

/* What reading its body counts; the rest is 0. j->req is there. */
struct front_work front_work_of(const struct front_job *j);
/* Starts the thread. err: what the machine lacks. */
bt_status_t front_jobs_create(struct bt_front *f, char *err, size_t err_cap) BT_MUST_CHECK;
/* Every connection is closed already. Waits for the job that runs. */
void front_jobs_destroy(struct bt_front *f);
/* Puts t behind what the thread has to do. */
void front_task_start(struct bt_front *f, struct front_task *t);
/* Runs a job for req: at once if its body is small, else in turn on the thread. Too many in the
 * queue: 429. tenant may be NULL. */
void front_job_start(struct bt_front *f, struct bt_http_req *req, const char *tenant,
                     void (*run)(const struct front_model *m, struct front_job *j),
                     void (*done)(struct front_job *j));

#endif
