/* The results of a run: figures, tables, plots. */
#ifndef BT_CONDUCTOR_SIM_REPORT_H
#define BT_CONDUCTOR_SIM_REPORT_H

#include <stdio.h>

#include "conductor/sim/sim.h"

struct bt_sim_quantiles {
    double mean, p50, p90, p99, max;
};

struct bt_sim_summary {
    uint32_t n, outcomes[BT_SIM_OUTCOMES];
    struct bt_sim_quantiles ttft_ms, tbt_ms; /* of those served; tbt of those with two tokens */
    uint32_t good;                           /* served within both objectives */
    uint32_t bound;       /* upper bound of good with any scheduler; set by the caller */
    double goodput;       /* good requests a second, over the time of the arrivals */
    double hit_ratio;     /* tokens of prompts that were not computed */
    double fetched_ratio; /* ... that came from other nodes */
    double ssd_ratio;     /* ... that lay on the node's own SSD alone */
    double prefill_busy;  /* share of the nodes' time until the last arrival */
    double swing;         /* standard deviation of the decode load over the samples */
    double phase;         /* correlation of prefill and decode load; near -1: in turns */
};

void bt_sim_summarize(const struct bt_sim_result *r, const struct bt_sim_options *o,
                      struct bt_sim_summary *s);
void bt_sim_print(FILE *f, const struct bt_sim_result *r, const struct bt_sim_summary *s);
/* One line a request. */
void bt_sim_write_requests(FILE *f, const struct bt_sim_result *r);
/* One line a sample. */
void bt_sim_write_series(FILE *f, const struct bt_sim_result *r);

struct bt_sim_curve {
    const char *label;
    const double *x, *y;
    uint32_t n;
};
/* An SVG line plot, up to eight curves; axes from 0. */
void bt_sim_plot(FILE *f, const char *title, const char *x_label, const char *y_label,
                 const struct bt_sim_curve *curves, uint32_t n);
/* Writes ttft.svg, tbt.svg, load.svg, replicas.svg and series.csv into a folder, which is made.
 * BT_ERR_INVALID: err names the first file that could not be written; it is removed. */
bt_status_t bt_sim_write_plots(const char *folder, const struct bt_sim_result *r, char *err,
                               size_t err_cap);

#endif
