/* Counters, gauges and histograms with bounded labels, rendered as Prometheus text (0.0.4).
 * Registration happens at start on one thread; updates are atomic and come from any thread.
 * Tables (all.def, conductor.def, kvstore.def, worker.def) have the type, unit, labels and meaning
 * of each metric of a daemon. docs/METRICS.md is printed from them, and tests/lint/run checks that
 * every name in the sources has a row. */
#ifndef BT_METRICS_METRICS_H
#define BT_METRICS_METRICS_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/buf.h"

struct bt_metrics; /* the registry of a process */
struct bt_metric;  /* one series (name + label set) */

struct bt_metrics *bt_metrics_create(void);
void bt_metrics_destroy(struct bt_metrics *m);

typedef enum { BT_METRIC_COUNTER, BT_METRIC_GAUGE, BT_METRIC_HISTOGRAM } bt_metric_type_t;

/* name without labels ("baton_pool_slots"), labels as rendered inside braces ("state=\"free\"") or
 * NULL. Series of one name have one type: the one of the name's row, if it has a row; the help text
 * comes from there. The returned series lives as long as the registry. */
struct bt_metric *bt_metrics_counter(struct bt_metrics *m, const char *name, const char *labels);
struct bt_metric *bt_metrics_gauge(struct bt_metrics *m, const char *name, const char *labels);
/* bounds: ascending upper bounds, n of them; +Inf is added. */
struct bt_metric *bt_metrics_histogram(struct bt_metrics *m, const char *name, const char *labels,
                                       const double *bounds, size_t n);

/* name="value" with value escaped as the text format asks; for labels whose value is not ours (a
 * model directory may be called anything). The caller frees. */
char *bt_metrics_label(const char *name, const char *value);

void bt_metric_add(struct bt_metric *s, uint64_t n); /* counter */
/* From now on the counter's value lies at `at`, which may be memory that another process adds to as
 * well; what was counted so far is added to it. NULL: in the registry again, with the value that it
 * has there. While no other thread uses the counter. */
void bt_metric_share(struct bt_metric *s, _Atomic uint64_t *at);
void bt_metric_set(struct bt_metric *s, double v); /* gauge */
void bt_metric_observe(struct bt_metric *s, double v);
double bt_metric_value(const struct bt_metric *s); /* counter or gauge */

/* Appends the exposition text of all series, after what bt_metrics_refresh has asked for. */
void bt_metrics_render(const struct bt_metrics *m, struct bt_buf *out);
/* Appends the tables as Markdown: what docs/METRICS.md says of all daemons. */
void bt_metrics_doc(struct bt_buf *out);
/* fn(arg) brings gauges up to date before each text, on the thread that renders. At most four;
 * fn NULL: arg's is forgotten. */
void bt_metrics_refresh(struct bt_metrics *m, void (*fn)(void *arg), void *arg);

#endif
