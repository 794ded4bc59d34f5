/* Inside common/trace: the configuration, the encoding, the connection to the collector. */
#ifndef BT_TRACE_TRACE_PRIV_H
#define BT_TRACE_TRACE_PRIV_H

#include <stdatomic.h>

#include "common/base/buf.h"
#include "common/trace/trace.h"

typedef enum { BT_SAMPLE_ON, BT_SAMPLE_OFF, BT_SAMPLE_RATIO } bt_sample_t;

struct bt_trace_conf {
    char *url;      /* of the collector's traces; NULL: off */
    char *shown;    /* the same for logs, without the part behind '?' */
    char **headers; /* "name: value"; NULL-terminated */
    char *service;
    bt_sample_t sample;
    bool parent_based; /* the client's decision counts, where there is one */
    double ratio;      /* RATIO: share of traces */
    uint64_t delay_ms; /* the longest that a span waits for others */
    uint64_t timeout_ms;
};

/* ---- trace_conf.c ---- */
/* Reads the environment. Status as bt_trace_create. */
bt_status_t bt_trace_conf_read(struct bt_trace_conf *c, char *err, size_t err_cap) BT_MUST_CHECK;
void bt_trace_conf_cleanup(struct bt_trace_conf *c);

/* ---- otlp.c ---- */
/* Appends an ExportTraceServiceRequest of all spans of the list. */
void bt_otlp_encode(const struct bt_spans *list, const char *service, const char *instance,
                    const char *node, struct bt_buf *out);

/* ---- trace_send.c ---- */
struct bt_trace_sender;
typedef enum {
    BT_SENT,
    BT_SEND_LATER,   /* the collector is not there, or asks to come again */
    BT_SEND_REFUSED, /* it will never take this */
    BT_SEND_STOPPED  /* the time to stop has come */
} bt_send_result_t;
/* NULL: there is no libcurl that can be used; err says what to do. conf outlives it. */
struct bt_trace_sender *bt_trace_sender_create(const struct bt_trace_conf *conf, char *err,
                                               size_t err_cap);
void bt_trace_sender_destroy(struct bt_trace_sender *s);
/* Posts body. why: what went wrong, unless SENT. *wait_ms_p: how long the collector asks to wait,
 * or 0. until_ns: gives up then (bt_mono_ns); 0: no limit but the configured one. */
bt_send_result_t bt_trace_send(struct bt_trace_sender *s, const void *body, size_t len,
                               _Atomic uint64_t *until_ns, char *why, size_t cap,
                               uint64_t *wait_ms_p);
/* Ends the wait of a bt_trace_send under way, so that it reads until_ns again. Any thread. */
void bt_trace_sender_wake(struct bt_trace_sender *s);

#endif
