/* Writes SVG plots: axes with round ticks, a line for each curve, a legend. */
#include <math.h>
#include <stdlib.h>

#include "conductor/sim/output.h"
#include "conductor/sim/report.h"

#define WIDTH  760
#define HEIGHT 360
#define LEFT   70
#define RIGHT  20
#define TOP    40
#define BOTTOM 50
#define MARKED 32   /* a curve with at most this many points shows them */
#define POINTS 1500 /* of a curve: more than there are pixels */

static const char *const colours[] = {"#1b6ca8", "#d1495b", "#3a7d44", "#8d6a9f",
                                      "#d98324", "#5c6672", "#2a9d8f", "#9a6324"};

static double largest(const struct bt_sim_curve *c, uint32_t n, bool x)
{
    double m = 0;
    for (uint32_t k = 0; k < n; k++) {
        for (uint32_t i = 0; i < c[k].n; i++) {
            m = BT_MAX(m, x ? c[k].x[i] : c[k].y[i]);
        }
    }
    return m > 0 ? m : 1;
}

/* The distance of ticks: 1, 2 or 5 times a power of ten, about five up to max. */
static double tick_of(double max)
{
    double p = pow(10, floor(log10(max / 5)));
    double m = max / 5 / p;
    return p * (m > 5 ? 10 : m > 2 ? 5 : m > 1 ? 2 : 1);
}

static double px(double v, double max)
{
    return LEFT + v / max * (WIDTH - LEFT - RIGHT);
}

static double py(double v, double max)
{
    return HEIGHT - BOTTOM - v / max * (HEIGHT - TOP - BOTTOM);
}

static void axes(FILE *f, const char *x_label, const char *y_label, double mx, double my)
{
    for (double v = 0, t = tick_of(mx); v <= mx * 1.0001; v += t) {
        fprintf(f, "<text x='%.1f' y='%d' text-anchor='middle'>%g</text>\n", px(v, mx),
                HEIGHT - BOTTOM + 18, v);
    }
    for (double v = 0, t = tick_of(my); v <= my * 1.0001; v += t) {
        fprintf(f, "<line x1='%d' x2='%d' y1='%.1f' y2='%.1f' stroke='#ddd'/>\n", LEFT,
                WIDTH - RIGHT, py(v, my), py(v, my));
        fprintf(f, "<text x='%d' y='%.1f' text-anchor='end'>%g</text>\n", LEFT - 6, py(v, my) + 4,
                v);
    }
    fprintf(f, "<text x='%d' y='%d' text-anchor='middle'>%s</text>\n", (LEFT + WIDTH - RIGHT) / 2,
            HEIGHT - 10, x_label);
    fprintf(f, "<text transform='translate(16 %d) rotate(-90)' text-anchor='middle'>%s</text>\n",
            (TOP + HEIGHT - BOTTOM) / 2, y_label);
}

void bt_sim_plot(FILE *f, const char *title, const char *x_label, const char *y_label,
                 const struct bt_sim_curve *curves, uint32_t n)
{
    double mx = largest(curves, n, true), my = largest(curves, n, false);
    fprintf(f,
            "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 %d %d' "
            "font-family='sans-serif' font-size='12'>\n<rect width='%d' height='%d' "
            "fill='white'/>\n<text x='%d' y='18' font-size='14'>%s</text>\n",
            WIDTH, HEIGHT, WIDTH, HEIGHT, LEFT, title);
    axes(f, x_label, y_label, mx, my);
    for (uint32_t k = 0; k < n; k++) {
        const char *colour = colours[k % BT_ARRAY_LEN(colours)];
        fprintf(f, "<polyline fill='none' stroke='%s' stroke-width='1.2' points='", colour);
        uint32_t each = curves[k].n / POINTS + 1;
        for (uint32_t i = 0; i < curves[k].n; i += each) {
            fprintf(f, "%.1f,%.1f ", px(curves[k].x[i], mx), py(curves[k].y[i], my));
        }
        fprintf(f, "'/>\n");
        /* a single point makes no line */
        for (uint32_t i = 0; i < curves[k].n && curves[k].n <= MARKED; i++) {
            fprintf(f, "<circle cx='%.1f' cy='%.1f' r='2' fill='%s'/>\n", px(curves[k].x[i], mx),
                    py(curves[k].y[i], my), colour);
        }
        fprintf(f, "<text x='%u' y='34' fill='%s'>%s</text>\n",
                LEFT + k * BT_MIN(160u, (WIDTH - LEFT - RIGHT) / n), colour, curves[k].label);
    }
    fputs("</svg>\n", f);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

struct folder {
    const char *path;
    char *err;
    size_t cap;
};

static bool plot_into(const struct folder *to, const char *name, const char *title,
                      const char *x_label, const char *y_label, const struct bt_sim_curve *curves,
                      uint32_t n)
{
    struct bt_sim_output o;
    if (bt_sim_output_open(&o, to->path, name, to->err, to->cap) != BT_OK) {
        return false;
    }
    bt_sim_plot(o.f, title, x_label, y_label, curves, n);
    return bt_sim_output_close(&o, to->err, to->cap) == BT_OK;
}

/* Plots the share of served requests at or below each value. */
static bool plot_share(const struct folder *to, const char *name, const struct bt_sim_result *r,
                       bool ttft)
{
    double *x = bt_malloc((r->n + 1) * sizeof(*x)), *y = bt_malloc((r->n + 1) * sizeof(*y));
    uint32_t n = 1; /* starts at share 0, so that one request is a line too */
    for (uint32_t i = 0; i < r->n; i++) {
        const struct bt_sim_record *q = &r->records[i];
        if (q->outcome == BT_SIM_SERVED && (ttft || q->tbt_ms > 0)) {
            x[n++] = ttft ? q->ttft_ms / 1e3 : q->tbt_ms;
        }
    }
    qsort(x + 1, n - 1, sizeof(*x), by_value);
    for (uint32_t i = 0; i < n; i++) {
        y[i] = (double)i / BT_MAX(n - 1, 1u);
    }
    x[0] = n > 1 ? x[1] : 0;
    struct bt_sim_curve c = {ttft ? "time to first token" : "time between tokens", x, y,
                             n > 1 ? n : 0};
    bool ok = plot_into(to, name, ttft ? "Time to first token" : "Time between tokens",
                        ttft ? "s" : "ms", "share of requests", &c, 1);
    free(x);
    free(y);
    return ok;
}

static bool plot_load(const struct folder *to, const struct bt_sim_result *r)
{
    double *v = bt_malloc((r->n_samples + 1) * 3 * sizeof(*v));
    uint32_t n = r->n_samples;
    double *x = v, *p = v + n, *d = v + 2 * n;
    for (uint32_t i = 0; i < n; i++) {
        x[i] = r->samples[i].at_ms / 1e3;
        p[i] = r->samples[i].prefill_load;
        d[i] = r->samples[i].decode_load;
    }
    struct bt_sim_curve c[] = {{"prefill: queue / TTFT objective", x, p, n},
                               {"", x, p, 0},
                               {"decode: step / TBT objective", x, d, n}};
    bool ok = plot_into(to, "load.svg", "Load of both stages", "s", "share of the objective", c, 3);
    free(v);
    return ok;
}

static bool write_series(const struct folder *to, const struct bt_sim_result *r)
{
    struct bt_sim_output o;
    if (bt_sim_output_open(&o, to->path, "series.csv", to->err, to->cap) != BT_OK) {
        return false;
    }
    bt_sim_write_series(o.f, r);
    return bt_sim_output_close(&o, to->err, to->cap) == BT_OK;
}

/* Plots how many blocks all nodes cache together: what exceeds the number of different blocks is
 * replicas. */
static bool plot_replicas(const struct folder *to, const struct bt_sim_result *r)
{
    double *x = bt_malloc((r->n_samples + 1) * 2 * sizeof(*x)), *y = x + r->n_samples + 1;
    for (uint32_t i = 0; i < r->n_samples; i++) {
        x[i] = r->samples[i].at_ms / 1e3;
        y[i] = (double)r->samples[i].replicas;
    }
    struct bt_sim_curve c = {"blocks in all caches", x, y, r->n_samples};
    bool ok = plot_into(to, "replicas.svg", "Blocks and replicas", "s", "blocks", &c, 1);
    free(x);
    return ok;
}

bt_status_t bt_sim_write_plots(const char *folder, const struct bt_sim_result *r, char *err,
                               size_t err_cap)
{
    const struct folder to = {folder, err, err_cap};
    bool ok = plot_share(&to, "ttft.svg", r, true) && plot_share(&to, "tbt.svg", r, false) &&
              plot_load(&to, r) && write_series(&to, r) && plot_replicas(&to, r);
    return ok ? BT_OK : BT_ERR_INVALID;
}
