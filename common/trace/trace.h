/* Traces for OpenTelemetry: takes finished spans and sends them to a collector over OTLP/HTTP, from
 * a thread of its own. It never blocks its user: what does not fit into the queue, and what the
 * collector does not take, is lost and counted. OpenTelemetry's environment variables configure it
 * (docs/OPERATING.md); without an endpoint it is off. */
#ifndef BT_TRACE_TRACE_H
#define BT_TRACE_TRACE_H

#include <stddef.h>

#include "common/base/base.h"
#include "common/metrics/metrics.h"
#include "common/trace/context.h"

struct bt_trace;

#define BT_SPAN_ATTRS_MAX 24
#define BT_SPAN_TEXT_MAX  96

typedef enum { BT_ATTR_INT, BT_ATTR_DOUBLE, BT_ATTR_TEXT, BT_ATTR_TEXTS } bt_attr_kind_t;

struct bt_span_attr {
    const char *key; /* static */
    bt_attr_kind_t kind;
    union {
        int64_t number;
        double real;
        char text[BT_SPAN_TEXT_MAX]; /* TEXTS: a list of this one */
    };
};

typedef enum { BT_SPAN_INTERNAL = 1, BT_SPAN_SERVER = 2 } bt_span_kind_t;

struct bt_span {
    uint8_t trace_id[16], span_id[8], parent_id[8];
    bool has_parent, failed;
    bt_span_kind_t kind;
    char name[BT_SPAN_TEXT_MAX];
    char error[BT_SPAN_TEXT_MAX]; /* if it failed */
    uint64_t start_ns, end_ns;    /* wall clock */
    uint32_t n_attrs, n_lost_attrs;
    struct bt_span_attr attrs[BT_SPAN_ATTRS_MAX];
};

/* Spans that end together, those of one request; heap. */
struct bt_spans {
    struct bt_spans *next;
    uint32_t n, cap;
    struct bt_span at[];
};
struct bt_spans *bt_spans_create(uint32_t cap);
/* A new span with a random id, behind the others, which must be fewer than cap. */
struct bt_span *bt_spans_add(struct bt_spans *s, const char *name, bt_span_kind_t kind);
/* Attributes; those beyond BT_SPAN_ATTRS_MAX are counted as lost. Texts are cut, and what is not
 * printable ASCII becomes '?', because other daemons may have sent it. */
void bt_span_int(struct bt_span *s, const char *key, int64_t v);
void bt_span_double(struct bt_span *s, const char *key, double v);
void bt_span_text(struct bt_span *s, const char *key, const char *v);
void bt_span_texts(struct bt_span *s, const char *key, const char *v); /* a list of one text */
void bt_span_fail(struct bt_span *s, const char *why);

/* Looks whether bt_trace_create can use the environment. ERR_CONFIG: as there. */
bt_status_t bt_trace_check(char *err, size_t err_cap) BT_MUST_CHECK;
/* Reads the environment and, if it names an endpoint, starts the thread. ERR_CONFIG: err names the
 * variable, what is wrong with it and what it may be, or that libcurl is lacking. ERR_IO: no
 * thread. instance: the daemon's name; node: its host. metrics outlive it. */
bt_status_t bt_trace_create(const char *instance, const char *node, struct bt_metrics *metrics,
                            struct bt_trace **trace_p, char *err, size_t err_cap) BT_MUST_CHECK;
/* Sends what is there, for a second at most, and ends the thread. NULL: nothing. */
void bt_trace_destroy(struct bt_trace *t);

/* Decides whether a request is traced. traceparent: its header, or NULL; one that is not valid is
 * ignored. t NULL or off: it is not. */
void bt_trace_begin(const struct bt_trace *t, const char *traceparent,
                    struct bt_trace_context *out);
/* Takes the spans, which it frees. Any thread. */
void bt_trace_offer(struct bt_trace *t, struct bt_spans *spans);

#endif
