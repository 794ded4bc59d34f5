/* Reuse statistics by class and age. See learn.h. Pure, one owner thread. */
#include "common/policy/evict/learn.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define AGES       56  /* ranges of age, two an octave */
#define FINE       4   /* steps of the level table in each of them */
#define WATCH      16u /* a sampled use is watched for this many turnovers of the cache */
#define SAMPLES    (1u << 20)
#define SAMPLES_LO (1u << 16)
#define REFRESH_LO 512u
/* Fitted on the first halves of the traces (docs/measurements/2026-11-pool.md). */
#define DECAY   0.97 /* decay of the counts at each quarter of a turnover */
#define PRIOR   0.02 /* assumed chance of a reuse in a range of ages without data ... */
#define PRIOR_N 20.0 /* ... with the weight of this many observed blocks */
/* Runs of reuses from which on a class's own data outweighs the common curve. */
#define CLASS_RUNS 5.0
/* Ranges on each side over which a class is compared with the common curve. */
#define CLASS_SPAN 4
#define POOL_FROM  24 /* range of ages from 4,096 ticks on, where the reuse rate must not rise */
#define CHANCE_MAX 0.95
/* A chain is reused as a whole, so its reuses are one event. Reuses belong to one run if they
 * follow each other within this many uses, at similar ages and in one class. */
#define RUN_GAP      64u
#define LENGTH_PRIOR 10.0 /* assumed reuses in a run ... */
#define LENGTH_LIKE  1.0  /* ... with the weight of this many observed runs */
#define RUN_AGES     16u  /* ages are similar if they differ by at most this fraction */
#define NONE         UINT32_MAX

struct sample {
    uint32_t hash, tick, next;
    uint8_t cls;
    bool live;
};

struct counts {
    double reused[AGES], lost[AGES];
};

struct bt_learn {
    struct sample *ring; /* ordered by tick, from head on */
    uint32_t *buckets;
    uint32_t n_ring, head, mask, keep_below, period, next_refresh, turnover;
    uint32_t n_used; /* entries of the ring that have ever held a sample */
    bool primed;
    struct counts c[BT_LEARN_CLASSES];
    double runs[AGES]; /* number of runs that the reuses of all classes belong to */
    struct {
        uint32_t tick, age, gap; /* of the run's last reuse; the next one must come within gap */
        uint8_t cls;
    } run;
    double width[AGES]; /* ticks */
    uint16_t levels[BT_LEARN_CLASSES][AGES * FINE];
};

/* The fine step of an age: its range is 2 log2(age), and each range has FINE steps. */
static uint32_t fine_of(uint32_t age)
{
    age = BT_MAX(age, 1u);
    uint32_t e = 31u - (uint32_t)__builtin_clz(age);
    uint32_t frac = e >= 3 ? age >> (e - 3) & 7 : age << (3 - e) & 7;
    return BT_MIN(e * 8 + frac, (uint32_t)AGES * FINE - 1);
}

static uint32_t range_of(uint32_t age)
{
    return fine_of(age) / FINE;
}

static double range_from(uint32_t i) /* first age of range i, as in fine_of */
{
    return i == 0 ? 0 : ldexp(i % 2 == 0 ? 1 : 1.5, (int)(i / 2));
}

/* ---- from counts to levels ---- */

/* The chance of a reuse in each range, over all classes. at_risk, reused: [AGES]. */
static void common_curve(const struct bt_learn *l, const double *at_risk, const double *reused,
                         double *chance)
{
    double seen[AGES], exposed[AGES];
    uint32_t start[AGES], n = 0;
    for (uint32_t i = 0; i < AGES; i++) { /* smoothed over the neighbouring ranges */
        double r = 0, e = 0;
        for (uint32_t j = i > 0 ? i - 1 : 0; j <= BT_MIN(i + 1, AGES - 1u); j++) {
            r += reused[j];
            e += at_risk[j];
        }
        chance[i] = BT_MIN((r + PRIOR * PRIOR_N) / (e + PRIOR_N), CHANCE_MAX);
        if (i < POOL_FROM) {
            continue;
        }
        /* Few old blocks are reused, and long chains are reused as one, so peaks at high ages are
         * random. Neighbours in the wrong order are averaged (isotonic regression). */
        start[n] = i;
        seen[n] = chance[i] * (e + PRIOR_N);
        exposed[n] = (e + PRIOR_N) * l->width[i];
        for (n++; n > 1 && seen[n - 1] * exposed[n - 2] > seen[n - 2] * exposed[n - 1]; n--) {
            seen[n - 2] += seen[n - 1];
            exposed[n - 2] += exposed[n - 1];
        }
    }
    for (uint32_t k = 0; k < n; k++) {
        for (uint32_t i = start[k]; i < (k + 1 < n ? start[k + 1] : AGES); i++) {
            chance[i] = BT_MIN(seen[k] / exposed[k] * l->width[i], CHANCE_MAX);
        }
    }
}

/* The number of reuses in a run at the ages around each range. reused: [AGES], of all classes. */
static void run_lengths(const struct bt_learn *l, const double *reused, double *length)
{
    for (int i = 0; i < AGES; i++) {
        double n = LENGTH_LIKE * LENGTH_PRIOR, runs = LENGTH_LIKE;
        for (int j = BT_MAX(0, i - CLASS_SPAN); j <= BT_MIN(AGES - 1, i + CLASS_SPAN); j++) {
            n += reused[j];
            runs += l->runs[j];
        }
        length[i] = n / runs;
    }
}

/* The common curve, scaled by the class's own reuses at the ages around. length: of runs. */
static void class_curve(const double *common, const double *at_risk, const double *reused,
                        const double *length, double *chance)
{
    for (int i = 0; i < AGES; i++) {
        double seen = CLASS_RUNS * length[i], expected = seen;
        for (int j = BT_MAX(0, i - CLASS_SPAN); j <= BT_MIN(AGES - 1, i + CLASS_SPAN); j++) {
            seen += reused[j];
            expected += at_risk[j] * common[j];
        }
        chance[i] = BT_MIN(common[i] * seen / expected, CHANCE_MAX);
    }
}

/* log2 of the best rate of hits from keeping a block from the middle of range a on. */
static double log_value(const struct bt_learn *l, const double *chance, uint32_t a)
{
    double alive = 1, hits = 0, time = 0, best = 0;
    for (uint32_t j = a; j < AGES; j++) {
        double part = j == a ? 0.5 : 1, p = chance[j] * part;
        hits += alive * p;
        time += alive * (1 - p / 2) * l->width[j] * part;
        alive *= 1 - p;
        best = BT_MAX(best, hits / time);
    }
    return log2(BT_MAX(best, 0x1p-45));
}

static void fill_levels(struct bt_learn *l, uint32_t cls, const double *chance)
{
    double v[AGES];
    for (uint32_t a = 0; a < AGES; a++) {
        v[a] = log_value(l, chance, a);
    }
    for (uint32_t f = 0; f < AGES * FINE; f++) { /* v[a] is the value in the middle of its range */
        double x = BT_MAX((f + 0.5) / FINE - 0.5, 0);
        uint32_t a = BT_MIN((uint32_t)x, AGES - 2u);
        double part = BT_MIN(x - a, 1), at = v[a] * (1 - part) + v[a + 1] * part;
        double level = (at + 46) * BT_LEARN_OCTAVE;
        l->levels[cls][f] = (uint16_t)BT_MAX(0, BT_MIN(level, BT_LEARN_LEVELS - 1.0));
    }
}

static void refresh(struct bt_learn *l, uint32_t now, double decay)
{
    static const struct counts nothing;
    struct counts watched[BT_LEARN_CLASSES]; /* lost: ages of samples that are still watched */
    double risk[BT_LEARN_CLASSES][AGES], all_risk[AGES] = {0}, all_reused[AGES] = {0};
    double common[AGES], chance[AGES], length[AGES];
    for (uint32_t k = 0; k < BT_LEARN_CLASSES; k++) {
        watched[k] = nothing;
    }
    for (uint32_t i = 0; i < l->n_used; i++) {
        if (l->ring[i].live) {
            watched[l->ring[i].cls].lost[range_of(now - l->ring[i].tick)]++;
        }
    }
    for (uint32_t k = 0; k < BT_LEARN_CLASSES; k++) {
        double later = 0; /* samples that were watched for longer than range i */
        for (uint32_t i = AGES; i-- > 0;) {
            double lost = l->c[k].lost[i] + watched[k].lost[i];
            risk[k][i] = later + l->c[k].reused[i] + lost / 2;
            later += l->c[k].reused[i] + lost;
            all_risk[i] += risk[k][i];
            all_reused[i] += l->c[k].reused[i];
        }
    }
    common_curve(l, all_risk, all_reused, common);
    run_lengths(l, all_reused, length);
    uint32_t like = NONE; /* a class without data uses the common curve */
    for (uint32_t k = 0; k < BT_LEARN_CLASSES; k++) {
        if (risk[k][0] > 0 || like == NONE) { /* every sample is at risk in the youngest range */
            class_curve(common, risk[k], l->c[k].reused, length, chance);
            fill_levels(l, k, chance);
            like = risk[k][0] > 0 ? like : k;
        } else {
            memcpy(l->levels[k], l->levels[like], sizeof(l->levels[k]));
        }
        for (uint32_t i = 0; i < AGES; i++) {
            l->c[k].reused[i] *= decay;
            l->c[k].lost[i] *= decay;
        }
    }
    for (uint32_t i = 0; i < AGES; i++) {
        l->runs[i] *= decay;
    }
}

/* ---- the samples ---- */

struct bt_learn *bt_learn_create(uint32_t n_slots)
{
    struct bt_learn *l = bt_calloc(1, sizeof(*l));
    uint64_t uses = (uint64_t)BT_MAX(n_slots, 1u) * WATCH;
    for (l->n_ring = SAMPLES_LO; l->n_ring < SAMPLES && l->n_ring < uses; l->n_ring *= 2) {
    }
    l->keep_below = uses <= l->n_ring ? UINT32_MAX : (uint32_t)(l->n_ring * 0x1p32 / (double)uses);
    /* Number of sampled uses. */
    l->run.gap = (uint32_t)BT_MIN(RUN_GAP * 0x1p32 / l->keep_below, 0x1p31);
    l->mask = l->n_ring - 1;
    l->ring = bt_calloc(l->n_ring, sizeof(*l->ring));
    l->buckets = bt_malloc(l->n_ring * sizeof(*l->buckets));
    for (uint32_t i = 0; i < l->n_ring; i++) {
        l->buckets[i] = NONE;
    }
    for (uint32_t i = 0; i < AGES; i++) {
        l->width[i] = range_from(i + 1) - range_from(i);
    }
    l->turnover = BT_MAX(n_slots, 4 * REFRESH_LO);
    l->period = REFRESH_LO;
    refresh(l, 0, 1);
    return l;
}

void bt_learn_destroy(struct bt_learn *l)
{
    if (l != NULL) {
        free(l->ring);
        free(l->buckets);
        free(l);
    }
}

static uint32_t spread(uint32_t hash)
{
    return (uint32_t)(hash * 0x9e3779b97f4a7c15ull >> 32);
}

/* The link that points to sample i. */
static uint32_t *link_to(struct bt_learn *l, uint32_t i)
{
    uint32_t *at = &l->buckets[l->ring[i].hash & l->mask];
    while (*at != i) {
        at = &l->ring[*at].next;
    }
    return at;
}

/* Counts a reuse at this age in class cls, and a new run if it does not belong to the last one. */
static void note_run(struct bt_learn *l, uint32_t now, uint32_t age, uint8_t cls)
{
    uint32_t apart = age > l->run.age ? age - l->run.age : l->run.age - age;
    if (now - l->run.tick > l->run.gap || apart > age / RUN_AGES + 4 || cls != l->run.cls) {
        l->runs[range_of(age)]++;
    }
    l->run.tick = now;
    l->run.age = age;
    l->run.cls = cls;
}

/* Stops watching sample i. reused: its key was used again. */
static void end_sample(struct bt_learn *l, uint32_t i, uint32_t now, bool reused)
{
    struct sample *s = &l->ring[i];
    struct counts *c = &l->c[s->cls];
    (reused ? c->reused : c->lost)[range_of(now - s->tick)]++;
    if (reused) {
        note_run(l, now, now - s->tick, s->cls);
    }
    *link_to(l, i) = s->next;
    s->live = false;
}

/* Computes new levels if they are due: soon for the first time, later every quarter of a
 * turnover. */
static void refresh_if_due(struct bt_learn *l, uint32_t now)
{
    if (!l->primed) {
        l->next_refresh = now + l->period;
        l->primed = true;
    }
    if ((int32_t)(now - l->next_refresh) < 0) {
        return;
    }
    refresh(l, now, pow(DECAY, 4.0 * l->period / l->turnover));
    l->period = BT_MIN(2 * l->period, BT_MAX(l->turnover / 4, REFRESH_LO));
    l->next_refresh = now + l->period;
}

void bt_learn_use(struct bt_learn *l, uint32_t hash, uint32_t cls, uint32_t now)
{
    BT_ASSERT(cls < BT_LEARN_CLASSES);
    refresh_if_due(l, now);
    if (spread(hash) > l->keep_below) {
        return;
    }
    uint32_t *bucket = &l->buckets[hash & l->mask];
    for (uint32_t i = *bucket; i != NONE; i = l->ring[i].next) {
        if (l->ring[i].hash == hash) {
            end_sample(l, i, now, true);
            break;
        }
    }
    if (l->ring[l->head].live) {
        end_sample(l, l->head, now, false);
    }
    l->ring[l->head] = (struct sample){hash, now, *bucket, (uint8_t)cls, true};
    *bucket = l->head;
    l->n_used = BT_MAX(l->n_used, l->head + 1);
    l->head = (l->head + 1) & l->mask;
}

uint32_t bt_learn_level(const struct bt_learn *l, uint32_t cls, uint32_t age)
{
    return l->levels[cls][fine_of(age)];
}
