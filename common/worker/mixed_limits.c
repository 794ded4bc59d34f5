/* How long steps with prompts beside rows may be. The smallest limit of this worker's configuration
 * and of the conductors with sessions counts, so that the rows of every conductor keep their
 * objective. Control thread; the engine thread reads the current limits at each step. */
#include <math.h>

#include "common/log/log.h"
#include "common/worker/control.h"

#define MOST_MS 60000.0

static uint64_t ns_of(double ms)
{
    return isfinite(ms) && ms > 0 ? (uint64_t)ceil(1e6 * BT_MIN(ms, MOST_MS)) : 0;
}

/* The smaller of two limits; 0 means no limit. */
static uint64_t smaller(uint64_t a, uint64_t b)
{
    return a == 0 || b == 0 ? BT_MAX(a, b) : BT_MIN(a, b);
}

void bt_wmixed_told(struct bt_wsession *s, const Baton__MixedSteps *m)
{
    s->mixed =
        m != NULL ? (struct bt_wmixed){ns_of(m->step_ms), ns_of(m->gap_ms)} : (struct bt_wmixed){0};
}

bool bt_wmixed_apply(struct bt_wctl *w)
{
    struct bt_wmixed x = {1000000 * w->conf.engine_mixed_step_ms,
                          1000000 * w->conf.engine_mixed_gap_ms};
    struct bt_list *it;
    bt_list_for_each (it, &w->sessions) {
        const struct bt_wsession *s = BT_CONTAINER_OF(it, struct bt_wsession, link);
        if (bt_rpc_session_met(&s->rpc)) {
            x.step_ns = smaller(x.step_ns, s->mixed.step_ns);
            x.gap_ns = smaller(x.gap_ns, s->mixed.gap_ns);
        }
    }
    x.gap_ns = x.step_ns != 0 ? x.gap_ns : 0;
    uint64_t step_ns = atomic_exchange(&w->core.mixed_step_ns, x.step_ns);
    uint64_t gap_ns = atomic_exchange(&w->core.mixed_gap_ns, x.gap_ns);
    bt_metric_set(w->stats->mixed[0], 1e-9 * (double)x.step_ns);
    bt_metric_set(w->stats->mixed[1], 1e-9 * (double)x.gap_ns);
    if (step_ns == x.step_ns && gap_ns == x.gap_ns) {
        return false;
    }
    BT_INFO("mixed_steps", "step_ms=%.1f gap_ms=%.1f", 1e-6 * (double)x.step_ns,
            1e-6 * (double)x.gap_ns);
    return true;
}
