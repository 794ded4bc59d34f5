/* Hazards by bucket of lengths, combined with those of a parent curve. Pure: see survival.h. */
#include "common/policy/sched/survival.h"

#include <math.h>
#include <string.h>

#define B           BT_SURVIVAL_BUCKETS
#define LEAN        3.0f             /* weight of the parent's estimate, in requests */
#define KEEP        (1 - 1 / 512.0f) /* a curve describes about its last 512 requests */
#define PRIOR_RATE  (1.0 / BT_SURVIVAL_ANSWER_TOKENS) /* chance of each token to be the last */
#define CLASS_LEAST 128u                              /* shorter prompts are one class */

/* First length of bucket b: 1, 2, 3, 4, 6, 8, 12 ... */
static uint32_t first_of(uint32_t b)
{
    if (b < 3) {
        return b + 1;
    }
    return (b % 2 != 0 ? 2u : 3u) << ((b - 1) / 2);
}

static double width_of(uint32_t b)
{
    return b + 1 < B ? first_of(b + 1) - first_of(b) : first_of(b);
}

static uint32_t bucket_of(uint32_t n)
{
    if (n < 4) {
        return n > 0 ? n - 1 : 0;
    }
    uint32_t log = 31 - (uint32_t)__builtin_clz(n);
    uint32_t b = 2 * log - 1 + (n >> (log - 1) & 1);
    return BT_MIN(b, (uint32_t)(B - 1));
}

struct bt_survival_key bt_survival_key(uint64_t tenant_hash, uint32_t prompt_tokens)
{
    uint32_t b = bucket_of(prompt_tokens), least = bucket_of(CLASS_LEAST);
    uint32_t c = b > least ? BT_MIN(b - least, (uint32_t)BT_SURVIVAL_CLASSES - 1) : 0;
    uint64_t h = tenant_hash * 0x9e3779b97f4a7c15ull;
    return (struct bt_survival_key){(uint32_t)(h >> 58) % BT_SURVIVAL_TENANTS, c};
}

void bt_survival_init(struct bt_sched_survival *s)
{
    memset(s, 0, sizeof(*s));
    for (uint32_t b = 0; b < B; b++) {
        s->prior[b] = (float)(1 - exp(-width_of(b) * PRIOR_RATE));
    }
}

/* Moves a request from the bucket where it was reported to a later one. A request inside a bucket
 * counts as half of the bucket in the mean (Cutler and Ederer, J. Chronic Diseases 1958), one that
 * has left it as all of it. */
static void go_on(struct bt_survival_curve *c, uint32_t told, uint32_t bucket)
{
    c->reached[0] += told == 0 ? 0.5f : 0;
    for (uint32_t b = bucket_of(told + 1); b < bucket; b++) {
        c->reached[b] += 0.5f;
        c->reached[b + 1] += 0.5f;
    }
}

static void note(struct bt_survival_curve *c, uint32_t told, uint32_t n, bool whole)
{
    uint32_t last = bucket_of(n);
    for (uint32_t b = 0; b < B; b++) { /* the weight fades, not the ratio */
        c->reached[b] *= KEEP;
        c->ended[b] *= KEEP;
    }
    go_on(c, told, last);
    if (whole) { /* a request that was cut off was in the bucket and did not end there */
        c->reached[last] += 0.5f;
        c->ended[last]++;
    }
}

void bt_survival_reach(struct bt_sched_survival *s, struct bt_survival_key k, uint32_t told,
                       uint32_t n)
{
    if (n <= told) {
        return;
    }
    uint32_t now = bt_survival_bucket(n);
    go_on(&s->any, told, now);
    go_on(&s->all[k.prompt_class], told, now);
    go_on(&s->of[k.tenant][k.prompt_class], told, now);
}

void bt_survival_note(struct bt_sched_survival *s, struct bt_survival_key k, uint32_t told,
                      uint32_t n, bool whole)
{
    if (n == 0) {
        return;
    }
    note(&s->any, told, n, whole);
    note(&s->all[k.prompt_class], told, n, whole);
    note(&s->of[k.tenant][k.prompt_class], told, n, whole);
}

/* The chance that a request which has reached bucket b ends in it. */
static double hazard(const struct bt_sched_survival *s, struct bt_survival_key k, uint32_t b)
{
    const struct bt_survival_curve *all = &s->all[k.prompt_class],
                                   *own = &s->of[k.tenant][k.prompt_class];
    double h = (s->any.ended[b] + LEAN * s->prior[b]) / (s->any.reached[b] + LEAN);
    h = (all->ended[b] + LEAN * h) / (all->reached[b] + LEAN);
    return (own->ended[b] + LEAN * h) / (own->reached[b] + LEAN);
}

/* For a request that may generate up to len tokens in bucket b: returns their mean; *stay_p is the
 * chance not to end in them. Each token of a bucket has the same chance to be the last. */
static double within(const struct bt_sched_survival *s, struct bt_survival_key k, uint32_t b,
                     double len, double *stay_p, double *ends_p)
{
    double width = width_of(b), stays = 1 - hazard(s, k, b);
    if (stays < 1e-6) { /* all end in the bucket: the prior says more of a single token */
        stays = BT_MAX(stays, BT_MIN(exp(-width * PRIOR_RATE), 1e-6));
    }
    *stay_p = pow(stays, 1 / width);
    *ends_p = 1 - (len == width ? stays : pow(*stay_p, len)); /* usually len == width: no pow */
    return *stay_p < 1 ? *ends_p / (1 - *stay_p) : len;
}

/* Walks over the rest of the buckets from length n + 1 on. Stops at max_new, or when less than 1 -
 * q of the requests are left. mean_p may be NULL. */
static uint32_t walk(const struct bt_sched_survival *s, struct bt_survival_key k, uint32_t n,
                     uint32_t max_new, double q, double *mean_p)
{
    double alive = 1, mean = 0;
    uint32_t at = n; /* tokens generated so far on this walk */
    while (at < max_new) {
        uint32_t b = bucket_of(at + 1);
        uint32_t end = b + 1 < B ? first_of(b + 1) - 1 : UINT32_MAX;
        uint32_t to = BT_MIN(end, max_new);
        double stay, ends, len = to - at;
        mean += alive * within(s, k, b, len, &stay, &ends);
        double after = alive * (1 - ends);
        if (mean_p == NULL && after <= 1 - q) {
            double more = stay < 1 ? log((1 - q) / alive) / log(stay) : len;
            return at + (uint32_t)BT_MIN(BT_MAX(ceil(more), 1.0), len) - n;
        }
        alive = after;
        at = to;
    }
    if (mean_p != NULL) {
        *mean_p = mean;
    }
    return max_new > n ? max_new - n : 0;
}

uint32_t bt_survival_quantile(const struct bt_sched_survival *s, struct bt_survival_key k,
                              uint32_t n, uint32_t max_new, double q)
{
    return walk(s, k, n, max_new, q, NULL);
}

double bt_survival_mean(const struct bt_sched_survival *s, struct bt_survival_key k, uint32_t n,
                        uint32_t max_new)
{
    double mean = 0;
    (void)walk(s, k, n, max_new, 1, &mean);
    return mean;
}

void bt_survival_rest(const struct bt_sched_survival *s, struct bt_survival_key k, uint32_t max_new,
                      double rest[BT_SURVIVAL_BUCKETS])
{
    double after = 0; /* the mean of a request that reaches the next bucket */
    for (uint32_t b = B; b-- > 0;) {
        uint32_t first = first_of(b);
        double stay, ends, len = first > max_new ? 0 : BT_MIN(width_of(b), max_new - first + 1);
        double in = within(s, k, b, len, &stay, &ends);
        after = in + (1 - ends) * after;
        rest[b] = after;
    }
}

uint32_t bt_survival_bucket(uint32_t n)
{
    return bucket_of(n < UINT32_MAX ? n + 1 : n); /* bucket of the next token */
}
