/* The rows of the tables of metrics (all.def, conductor.def, kvstore.def, worker.def). */
#ifndef BT_METRICS_TABLE_H
#define BT_METRICS_TABLE_H

#include "common/metrics/metrics.h"

struct bt_metric_row {
    const char *name;
    bt_metric_type_t type;
    const char *unit;   /* "": a plain number */
    const char *labels; /* names, with ", " between them; "": none */
    const char *help;
};

extern const char *const bt_metric_type_names[]; /* by bt_metric_type_t */

/* The row of this name. NULL: it has none. */
const struct bt_metric_row *bt_metric_row(const char *name);

#endif
