/* The metric registry and its Prometheus text form. Registration on one thread, updates on any. */
#include "common/metrics/metrics.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/base.h"
#include "common/metrics/table.h"

struct bt_metric {
    struct bt_metric *next; /* in order of registration */
    char *name, *labels;
    const char *help; /* of its row; NULL: it has none */
    bt_metric_type_t type;
    _Atomic uint64_t *count; /* counter: value; histogram: observations. Usually points to
                                own_count */
    _Atomic uint64_t own_count;
    _Atomic uint64_t bits; /* gauge: value; histogram: sum; as the bits of a double */
    size_t n_bounds;
    double *bounds;
    _Atomic uint64_t *buckets; /* not cumulative; [n_bounds] is +Inf */
};

struct bt_metrics {
    struct bt_metric *first, **tail;
    struct {
        void (*fn)(void *arg);
        void *arg;
    } refresh[4];
};

struct bt_metrics *bt_metrics_create(void)
{
    struct bt_metrics *m = bt_calloc(1, sizeof(*m));
    m->tail = &m->first;
    return m;
}

void bt_metrics_destroy(struct bt_metrics *m)
{
    if (m == NULL) {
        return;
    }
    for (struct bt_metric *s = m->first, *next; s != NULL; s = next) {
        next = s->next;
        free(s->name);
        free(s->labels);
        free(s->bounds);
        free((void *)s->buckets);
        free(s);
    }
    free(m);
}

static struct bt_metric *add(struct bt_metrics *m, bt_metric_type_t type, const char *name,
                             const char *labels)
{
    struct bt_metric *s = bt_calloc(1, sizeof(*s));
    s->type = type;
    s->count = &s->own_count;
    s->name = bt_strdup(name);
    s->labels = bt_strdup(labels == NULL ? "" : labels);
    const struct bt_metric_row *row = bt_metric_row(name);
    BT_ASSERT(row == NULL || row->type == type);
    s->help = row != NULL ? row->help : NULL;
    /* Series of one name must be adjacent in the text format. */
    struct bt_metric *after = NULL;
    for (struct bt_metric *i = m->first; i != NULL; i = i->next) {
        if (strcmp(i->name, name) == 0) {
            BT_ASSERT(i->type == type && strcmp(i->labels, s->labels) != 0);
            after = i;
        }
    }
    if (after != NULL && after->next != NULL) {
        s->next = after->next;
        after->next = s;
    } else {
        *m->tail = s;
        m->tail = &s->next;
    }
    return s;
}

struct bt_metric *bt_metrics_counter(struct bt_metrics *m, const char *name, const char *labels)
{
    return add(m, BT_METRIC_COUNTER, name, labels);
}

struct bt_metric *bt_metrics_gauge(struct bt_metrics *m, const char *name, const char *labels)
{
    return add(m, BT_METRIC_GAUGE, name, labels);
}

struct bt_metric *bt_metrics_histogram(struct bt_metrics *m, const char *name, const char *labels,
                                       const double *bounds, size_t n)
{
    struct bt_metric *s = add(m, BT_METRIC_HISTOGRAM, name, labels);
    s->n_bounds = n;
    s->bounds = bt_calloc(n + 1, sizeof(double));
    memcpy(s->bounds, bounds, n * sizeof(double));
    s->buckets = bt_calloc(n + 1, sizeof(s->buckets[0]));
    return s;
}

char *bt_metrics_label(const char *name, const char *value)
{
    size_t n = strlen(name), at = n + 2;
    char *label = bt_malloc(n + 2 * strlen(value) + 4);
    memcpy(label, name, n);
    memcpy(label + n, "=\"", 2);
    for (const char *c = value; *c != '\0'; c++) {
        if (*c == '"' || *c == '\\' || *c == '\n') {
            label[at++] = '\\';
        }
        label[at++] = *c == '\n' ? 'n' : *c;
    }
    memcpy(label + at, "\"", 2);
    return label;
}

static double from_bits(uint64_t b)
{
    double v;
    memcpy(&v, &b, sizeof(v));
    return v;
}

static uint64_t to_bits(double v)
{
    uint64_t b;
    memcpy(&b, &v, sizeof(b));
    return b;
}

void bt_metric_add(struct bt_metric *s, uint64_t n)
{
    atomic_fetch_add_explicit(s->count, n, memory_order_relaxed);
}

void bt_metric_share(struct bt_metric *s, _Atomic uint64_t *at)
{
    BT_ASSERT(s->type == BT_METRIC_COUNTER);
    _Atomic uint64_t *to = at != NULL ? at : &s->own_count;
    uint64_t v = atomic_load(s->count);
    if (to != s->count) {
        if (at == NULL) {
            atomic_store(&s->own_count, 0);
        }
        atomic_fetch_add_explicit(to, v, memory_order_relaxed);
        s->count = to;
    }
}

void bt_metric_set(struct bt_metric *s, double v)
{
    atomic_store_explicit(&s->bits, to_bits(v), memory_order_relaxed);
}

void bt_metric_observe(struct bt_metric *s, double v)
{
    size_t i = 0;
    while (i < s->n_bounds && v > s->bounds[i]) {
        i++;
    }
    atomic_fetch_add_explicit(&s->buckets[i], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(s->count, 1, memory_order_relaxed);
    uint64_t old = atomic_load_explicit(&s->bits, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&s->bits, &old, to_bits(from_bits(old) + v),
                                                  memory_order_relaxed, memory_order_relaxed)) {
    }
}

double bt_metric_value(const struct bt_metric *s)
{
    return s->type == BT_METRIC_COUNTER
               ? (double)atomic_load_explicit(s->count, memory_order_relaxed)
               : from_bits(atomic_load_explicit(&s->bits, memory_order_relaxed));
}

static void put_number(struct bt_buf *out, double v)
{
    if (isinf(v)) {
        bt_buf_puts(out, v > 0 ? "+Inf" : "-Inf");
    } else if (v == floor(v) && fabs(v) < 1e15) {
        bt_buf_printf(out, "%.0f", v);
    } else {
        bt_buf_printf(out, "%.9g", v);
    }
}

static void put_series(struct bt_buf *out, const struct bt_metric *s, const char *suffix,
                       const char *extra)
{
    bt_buf_printf(out, "%s%s", s->name, suffix);
    if (s->labels[0] != '\0' || extra[0] != '\0') {
        bt_buf_printf(out, "{%s%s%s}", s->labels,
                      s->labels[0] != '\0' && extra[0] != '\0' ? "," : "", extra);
    }
    bt_buf_puts(out, " ");
}

static void render_histogram(struct bt_buf *out, const struct bt_metric *s)
{
    uint64_t sum = 0;
    char le[48];
    for (size_t i = 0; i <= s->n_bounds; i++) {
        sum += atomic_load_explicit(&s->buckets[i], memory_order_relaxed);
        if (i == s->n_bounds) {
            strcpy(le, "le=\"+Inf\"");
        } else {
            snprintf(le, sizeof(le), "le=\"%g\"", s->bounds[i]);
        }
        put_series(out, s, "_bucket", le);
        bt_buf_printf(out, "%llu\n", (unsigned long long)sum);
    }
    put_series(out, s, "_sum", "");
    put_number(out, from_bits(atomic_load_explicit(&s->bits, memory_order_relaxed)));
    put_series((bt_buf_puts(out, "\n"), out), s, "_count", "");
    /* The total of the buckets, so that count and +Inf are equal while other threads observe. */
    bt_buf_printf(out, "%llu\n", (unsigned long long)sum);
}

void bt_metrics_refresh(struct bt_metrics *m, void (*fn)(void *arg), void *arg)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(m->refresh); i++) {
        if (fn != NULL ? m->refresh[i].fn == NULL : m->refresh[i].arg == arg) {
            m->refresh[i].fn = fn;
            m->refresh[i].arg = fn != NULL ? arg : NULL;
            return;
        }
    }
    BT_ASSERT(fn == NULL);
}

void bt_metrics_render(const struct bt_metrics *m, struct bt_buf *out)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(m->refresh); i++) {
        if (m->refresh[i].fn != NULL) {
            m->refresh[i].fn(m->refresh[i].arg);
        }
    }
    const char *last = "";
    for (const struct bt_metric *s = m->first; s != NULL; s = s->next) {
        if (strcmp(last, s->name) != 0) {
            if (s->help != NULL) {
                bt_buf_printf(out, "# HELP %s %s\n", s->name, s->help);
            }
            bt_buf_printf(out, "# TYPE %s %s\n", s->name, bt_metric_type_names[s->type]);
            last = s->name;
        }
        if (s->type == BT_METRIC_HISTOGRAM) {
            render_histogram(out, s);
        } else {
            put_series(out, s, "", "");
            put_number(out, bt_metric_value(s));
            bt_buf_puts(out, "\n");
        }
    }
}
