/* Spans, the sampler, the queue and the thread that empties it. The queue is a list under a lock
 * that is held for a few instructions; the thread encodes and sends without it. */
#include "common/trace/trace.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/log/log.h"
#include "common/trace/trace_priv.h"

#define QUEUE_MAX 4096 /* spans that wait or are being sent */
#define BATCH     512  /* spans of one request to the collector, or those of one bt_spans */
#define TRIES     5
#define RETRY_MS  1000 /* doubles with every try */
#define STOP_NS   1000000000ull
#define LOG_NS    60000000000ull /* between two lines about the same */

struct bt_trace {
    struct bt_trace_conf conf;
    bool on;
    char *instance, *node;
    struct bt_trace_sender *sender;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct { /* under lock */
        struct bt_spans *first, **tail;
        uint32_t waiting, all; /* spans: in the list; with those being sent */
        uint64_t oldest_ns;    /* when the first one came; 0: empty */
        bool stop;
    } q;
    _Atomic uint64_t until_ns; /* 0: not stopping */
    uint64_t logged_ns;        /* of the thread */
    struct bt_metric *sent, *full, *refused, *unreachable;
};

/* ---- spans ---- */

struct bt_spans *bt_spans_create(uint32_t cap)
{
    struct bt_spans *s = bt_calloc(1, sizeof(*s) + cap * sizeof(s->at[0]));
    s->cap = cap;
    return s;
}

/* A collector refuses texts that are not UTF-8. */
static void put_text(char *out, const char *text)
{
    size_t n = 0;
    for (; text[n] != '\0' && n + 1 < BT_SPAN_TEXT_MAX; n++) {
        out[n] = text[n] < ' ' || text[n] > '~' ? '?' : text[n];
    }
    out[n] = '\0';
}

struct bt_span *bt_spans_add(struct bt_spans *s, const char *name, bt_span_kind_t kind)
{
    BT_ASSERT(s->n < s->cap);
    struct bt_span *p = &s->at[s->n++];
    put_text(p->name, name);
    p->kind = kind;
    do {
        bt_random(p->span_id, sizeof(p->span_id));
    } while (memcmp(p->span_id, (uint8_t[8]){0}, sizeof(p->span_id)) == 0);
    return p;
}

static struct bt_span_attr *add(struct bt_span *s, const char *key, bt_attr_kind_t kind)
{
    if (s->n_attrs == BT_SPAN_ATTRS_MAX) {
        s->n_lost_attrs++;
        return NULL;
    }
    struct bt_span_attr *a = &s->attrs[s->n_attrs++];
    a->key = key;
    a->kind = kind;
    return a;
}

void bt_span_int(struct bt_span *s, const char *key, int64_t v)
{
    struct bt_span_attr *a = add(s, key, BT_ATTR_INT);
    if (a != NULL) {
        a->number = v;
    }
}

void bt_span_double(struct bt_span *s, const char *key, double v)
{
    struct bt_span_attr *a = add(s, key, BT_ATTR_DOUBLE);
    if (a != NULL) {
        a->real = v;
    }
}

void bt_span_text(struct bt_span *s, const char *key, const char *v)
{
    struct bt_span_attr *a = add(s, key, BT_ATTR_TEXT);
    if (a != NULL) {
        put_text(a->text, v);
    }
}

void bt_span_texts(struct bt_span *s, const char *key, const char *v)
{
    struct bt_span_attr *a = add(s, key, BT_ATTR_TEXTS);
    if (a != NULL) {
        put_text(a->text, v);
    }
}

void bt_span_fail(struct bt_span *s, const char *why)
{
    s->failed = true;
    put_text(s->error, why);
}

/* ---- which requests ---- */

/* By the trace's id, as other services decide with the same sampler: a trace is whole or absent. */
static bool in_ratio(const struct bt_trace_context *c, double ratio)
{
    uint64_t v = 0;
    for (size_t i = 8; i < 16; i++) {
        v = v << 8 | c->trace_id[i];
    }
    return (double)(v >> 1) < ratio * 9223372036854775808.0;
}

void bt_trace_begin(const struct bt_trace *t, const char *traceparent, struct bt_trace_context *out)
{
    *out = (struct bt_trace_context){0};
    if (t == NULL || !t->on) {
        return;
    }
    if (traceparent == NULL || !bt_traceparent_read(traceparent, out)) {
        bt_random(out->trace_id, sizeof(out->trace_id));
        out->trace_id[0] |= 1; /* never all zero */
    } else if (t->conf.parent_based) {
        return; /* as the client says */
    }
    out->sampled = t->conf.sample == BT_SAMPLE_ON ||
                   (t->conf.sample == BT_SAMPLE_RATIO && in_ratio(out, t->conf.ratio));
}

/* ---- the queue ---- */

void bt_trace_offer(struct bt_trace *t, struct bt_spans *spans)
{
    uint32_t n = spans->n;
    pthread_mutex_lock(&t->lock);
    bool fits = t->on && n != 0 && t->q.all + n <= QUEUE_MAX;
    if (fits) {
        spans->next = NULL;
        *t->q.tail = spans;
        t->q.tail = &spans->next;
        t->q.waiting += n;
        t->q.all += n;
        if (t->q.oldest_ns == 0) {
            t->q.oldest_ns = bt_mono_ns();
        }
        if (t->q.waiting == n || t->q.waiting >= BATCH) {
            pthread_cond_signal(&t->changed);
        }
    }
    pthread_mutex_unlock(&t->lock);
    if (!fits) {
        bt_metric_add(t->full, n);
        free(spans);
    }
}

static uint32_t free_list(struct bt_spans *list)
{
    uint32_t n = 0;
    for (struct bt_spans *next; list != NULL; list = next) {
        next = list->next;
        n += list->n;
        free(list);
    }
    return n;
}

/* Waits until ns, or until the daemon ends. With the lock. */
static void wait_until(struct bt_trace *t, uint64_t ns)
{
    struct timespec ts = {.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};
    (void)pthread_cond_timedwait(&t->changed, &t->lock, &ts);
}

/* The next spans to send. NULL: the daemon ends and there are none. */
static struct bt_spans *take(struct bt_trace *t)
{
    pthread_mutex_lock(&t->lock);
    while (!t->q.stop && t->q.waiting < BATCH) {
        uint64_t due = t->q.oldest_ns + t->conf.delay_ms * 1000000;
        if (t->q.waiting == 0) {
            pthread_cond_wait(&t->changed, &t->lock);
        } else if (bt_mono_ns() >= due) {
            break;
        } else {
            wait_until(t, due);
        }
    }
    struct bt_spans *list = t->q.first, **end = &list;
    uint32_t n = 0;
    while (*end != NULL && (n == 0 || n + (*end)->n <= BATCH)) {
        n += (*end)->n;
        end = &(*end)->next;
    }
    t->q.first = *end;
    *end = NULL;
    t->q.waiting -= n;
    if (t->q.first == NULL) {
        t->q.tail = &t->q.first;
        t->q.oldest_ns = 0;
    }
    pthread_mutex_unlock(&t->lock);
    return list;
}

/* The spans are sent or lost: there is room for others. */
static void done(struct bt_trace *t, struct bt_spans *list, struct bt_metric *m)
{
    uint32_t n = free_list(list);
    bt_metric_add(m, n);
    pthread_mutex_lock(&t->lock);
    t->q.all -= n;
    pthread_mutex_unlock(&t->lock);
}

static void tell(struct bt_trace *t, const char *why)
{
    uint64_t now = bt_mono_ns();
    if (t->logged_ns == 0 || now - t->logged_ns > LOG_NS) {
        t->logged_ns = now;
        BT_WARN("trace_not_sent", "endpoint=%s why=%s remedy=%s", t->conf.shown, why,
                "start the collector, or correct OTEL_EXPORTER_OTLP_ENDPOINT; requests are served "
                "as before, their traces are lost");
    }
}

/* True: the daemon ends. */
static bool pause_ms(struct bt_trace *t, uint64_t ms)
{
    uint64_t until = bt_mono_ns() + ms * 1000000;
    pthread_mutex_lock(&t->lock);
    while (!t->q.stop && bt_mono_ns() < until) {
        wait_until(t, until);
    }
    bool stop = t->q.stop;
    pthread_mutex_unlock(&t->lock);
    return stop;
}

/* Sends one batch. If the collector is away, there are a few tries. Meanwhile the queue fills and
 * further spans are lost, so no other thread waits. */
static void send_batch(struct bt_trace *t, struct bt_spans *list)
{
    struct bt_buf body;
    bt_buf_init(&body);
    bt_otlp_encode(list, t->conf.service, t->instance, t->node, &body);
    struct bt_metric *m = t->unreachable;
    for (uint32_t i = 0; i < TRIES; i++) {
        char why[512];
        uint64_t wait_ms;
        bt_send_result_t r =
            bt_trace_send(t->sender, body.data, body.len, &t->until_ns, why, sizeof(why), &wait_ms);
        if (r == BT_SENT || r == BT_SEND_REFUSED) {
            m = r == BT_SENT ? t->sent : t->refused;
        }
        if (r == BT_SENT) {
            break;
        }
        tell(t, why);
        if (r != BT_SEND_LATER || i + 1 == TRIES ||
            pause_ms(t, BT_MAX(wait_ms, (uint64_t)RETRY_MS << i))) {
            break;
        }
    }
    bt_buf_cleanup(&body);
    done(t, list, m);
}

static void *run(void *arg)
{
    struct bt_trace *t = arg;
    struct bt_spans *list;
    while ((list = take(t)) != NULL) {
        send_batch(t, list);
    }
    return NULL;
}

/* ---- life ---- */

static void init_queue(struct bt_trace *t)
{
    pthread_condattr_t mono;
    (void)pthread_condattr_init(&mono);
    (void)pthread_condattr_setclock(&mono, CLOCK_MONOTONIC);
    (void)pthread_mutex_init(&t->lock, NULL);
    (void)pthread_cond_init(&t->changed, &mono);
    (void)pthread_condattr_destroy(&mono);
    t->q.tail = &t->q.first;
}

static bt_status_t start(struct bt_trace *t, char *err, size_t err_cap)
{
    t->sender = bt_trace_sender_create(&t->conf, err, err_cap);
    if (t->sender == NULL) {
        return BT_ERR_CONFIG;
    }
    t->on = pthread_create(&t->thread, NULL, run, t) == 0;
    if (!t->on) {
        snprintf(err, err_cap, "the thread that sends traces does not start");
        return BT_ERR_IO;
    }
    (void)pthread_setname_np(t->thread, "trace");
    BT_INFO("trace", "endpoint=%s service=%s", t->conf.shown, t->conf.service);
    return BT_OK;
}

bt_status_t bt_trace_create(const char *instance, const char *node, struct bt_metrics *metrics,
                            struct bt_trace **trace_p, char *err, size_t err_cap)
{
    struct bt_trace *t = bt_calloc(1, sizeof(*t));
    init_queue(t);
    static const char name[] = "baton_trace_spans_total";
    t->sent = bt_metrics_counter(metrics, name, "result=\"sent\"");
    t->full = bt_metrics_counter(metrics, name, "result=\"queue_full\"");
    t->refused = bt_metrics_counter(metrics, name, "result=\"refused\"");
    t->unreachable = bt_metrics_counter(metrics, name, "result=\"unreachable\"");
    t->instance = bt_strdup(instance);
    t->node = bt_strdup(node);
    bt_status_t st = bt_trace_conf_read(&t->conf, err, err_cap);
    if (st == BT_OK && t->conf.url != NULL) {
        st = start(t, err, err_cap);
    }
    if (st != BT_OK) {
        bt_trace_destroy(t);
        return st;
    }
    *trace_p = t;
    return BT_OK;
}

void bt_trace_destroy(struct bt_trace *t)
{
    if (t == NULL) {
        return;
    }
    if (t->on) {
        atomic_store(&t->until_ns, bt_mono_ns() + STOP_NS);
        pthread_mutex_lock(&t->lock);
        t->q.stop = true;
        pthread_cond_signal(&t->changed);
        pthread_mutex_unlock(&t->lock);
        bt_trace_sender_wake(t->sender);
        (void)pthread_join(t->thread, NULL);
    }
    (void)free_list(t->q.first);
    bt_trace_sender_destroy(t->sender);
    bt_trace_conf_cleanup(&t->conf);
    pthread_cond_destroy(&t->changed);
    pthread_mutex_destroy(&t->lock);
    free(t->instance);
    free(t->node);
    free(t);
}
