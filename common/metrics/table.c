/* The tables of all metrics, and the document that is printed from them. Pure. */
#include "common/metrics/table.h"

#include <string.h>

#include "common/base/base.h"

#define COUNTER   BT_METRIC_COUNTER
#define GAUGE     BT_METRIC_GAUGE
#define HISTOGRAM BT_METRIC_HISTOGRAM

#define BT_METRIC(name, type, unit, labels, help) {name, type, unit, labels, help},
static const struct bt_metric_row conductor[] = {
#include "common/metrics/conductor.def"
};
static const struct bt_metric_row worker[] = {
#include "common/metrics/worker.def"
};
static const struct bt_metric_row kvstore[] = {
#include "common/metrics/kvstore.def"
};
static const struct bt_metric_row all[] = {
#include "common/metrics/all.def"
};
#undef BT_METRIC

static const struct table {
    const char *title;
    const struct bt_metric_row *rows;
    size_t n;
} tables[] = {
    {"baton-conductor", conductor, BT_ARRAY_LEN(conductor)},
    {"baton-prefill, baton-decode", worker, BT_ARRAY_LEN(worker)},
    {"baton-kvstore", kvstore, BT_ARRAY_LEN(kvstore)},
    {"Every daemon, with certificates", all, BT_ARRAY_LEN(all)},
};

const char *const bt_metric_type_names[] = {"counter", "gauge", "histogram"};

const struct bt_metric_row *bt_metric_row(const char *name)
{
    for (size_t t = 0; t < BT_ARRAY_LEN(tables); t++) {
        for (size_t i = 0; i < tables[t].n; i++) {
            if (strcmp(tables[t].rows[i].name, name) == 0) {
                return &tables[t].rows[i];
            }
        }
    }
    return NULL;
}

void bt_metrics_doc(struct bt_buf *out)
{
    for (size_t t = 0; t < BT_ARRAY_LEN(tables); t++) {
        bt_buf_printf(
            out, "## %s\n\n| metric | type | unit | labels | meaning |\n|---|---|---|---|---|\n",
            tables[t].title);
        for (size_t i = 0; i < tables[t].n; i++) {
            const struct bt_metric_row *r = &tables[t].rows[i];
            bt_buf_printf(out, "| `%s` | %s | %s | %s | %s |\n", r->name,
                          bt_metric_type_names[r->type], r->unit, r->labels, r->help);
        }
        bt_buf_puts(out, t + 1 < BT_ARRAY_LEN(tables) ? "\n" : "");
    }
}
