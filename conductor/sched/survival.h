/* How many tokens a request will still generate: survival estimates (Kaplan and Meier, JASA 1958)
 * per tenant and class of prompt length, from requests that have ended. One that was cut off (its
 * limit, its client) counts as far as it came. Estimates of a tenant lean on those of all until it
 * has ended some. A plain value in the caller's memory, about 70 KiB. PURE. */
#ifndef BT_CONDUCTOR_SCHED_SURVIVAL_H
#define BT_CONDUCTOR_SCHED_SURVIVAL_H

#include "common/base/base.h"

#define BT_SURVIVAL_BUCKETS 32 /* of lengths: 1, 2, 3, 4, 6, 8, 12, 16 ... 65536 and above */
#define BT_SURVIVAL_CLASSES 4  /* prompts to 256, 2k, 16k tokens, longer ones */
#define BT_SURVIVAL_TENANTS 64 /* by hash: two may share a place */

struct bt_survival_curve {
    float reached[BT_SURVIVAL_BUCKETS]; /* requests that came into the bucket ... */
    float ended[BT_SURVIVAL_BUCKETS];   /* ... and ended in it by themselves; both fade */
};

struct bt_sched_survival {
    struct bt_survival_curve all[BT_SURVIVAL_CLASSES];
    struct bt_survival_curve of[BT_SURVIVAL_TENANTS][BT_SURVIVAL_CLASSES];
};

/* Which curve a request belongs to. tenant: any hash, the same for one tenant. */
struct bt_survival_key {
    uint32_t tenant, prompt_class;
};
struct bt_survival_key bt_survival_key(uint64_t tenant_hash, uint32_t prompt_tokens);

/* Nothing is known: lengths as if each token were the last with one chance in 256. */
void bt_survival_init(struct bt_sched_survival *s);
/* A request is over after n tokens. whole: it ended by itself (an EOS, a stop string). */
void bt_survival_note(struct bt_sched_survival *s, struct bt_survival_key k, uint32_t n,
                      bool whole);

/* Tokens still to come of a request that has generated n of at most max_new, so that with
 * probability q there will not be more. */
uint32_t bt_survival_quantile(const struct bt_sched_survival *s, struct bt_survival_key k,
                              uint32_t n, uint32_t max_new, double q);
/* ... in the mean. */
double bt_survival_mean(const struct bt_sched_survival *s, struct bt_survival_key k, uint32_t n,
                        uint32_t max_new);

#endif
