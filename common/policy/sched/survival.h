/* How many tokens a request will still generate: survival estimates (Kaplan and Meier, JASA 1958)
 * per tenant and class of prompt length, from requests that have ended. One that was cut off (its
 * limit, its client) counts as far as it came. Estimates of a tenant lean on those of all until it
 * has ended some, and those of a class on those of all prompts. A request counts while it runs:
 * from those that have ended alone only short answers would be known at first. A plain value in the
 * caller's memory, about 310 KiB. PURE. */
#ifndef BT_POLICY_SCHED_SURVIVAL_H
#define BT_POLICY_SCHED_SURVIVAL_H

#include "common/base/base.h"

#define BT_SURVIVAL_BUCKETS 32 /* of lengths: 1, 2, 3, 4, 6, 8, 12, 16 ... 65536 and above */
#define BT_SURVIVAL_CLASSES 19 /* prompts below 192, 256, 384, 512 ... 64k tokens, longer ones */
#define BT_SURVIVAL_TENANTS 64 /* by hash: two may share a place */

struct bt_survival_curve {
    float reached[BT_SURVIVAL_BUCKETS]; /* requests that came into the bucket; who is in it: half */
    float ended[BT_SURVIVAL_BUCKETS];   /* ... and ended in it by themselves; both fade */
};

struct bt_sched_survival {
    float prior[BT_SURVIVAL_BUCKETS]; /* chance to end in the bucket where nothing is known */
    struct bt_survival_curve any, all[BT_SURVIVAL_CLASSES];
    struct bt_survival_curve of[BT_SURVIVAL_TENANTS][BT_SURVIVAL_CLASSES];
};

/* Which curve a request belongs to. tenant: any hash, the same for one tenant. */
struct bt_survival_key {
    uint32_t tenant, prompt_class;
};
struct bt_survival_key bt_survival_key(uint64_t tenant_hash, uint32_t prompt_tokens);

/* Nothing is known: lengths as if each token were the last with one chance in 256. */
void bt_survival_init(struct bt_sched_survival *s);
/* A request that has generated n tokens goes on; `told` of them were told before (0: none). */
void bt_survival_reach(struct bt_sched_survival *s, struct bt_survival_key k, uint32_t told,
                       uint32_t n);
/* A request is over after n tokens, of which `told` were told by bt_survival_reach. whole: it ended
 * by itself (an EOS, a stop string). */
void bt_survival_note(struct bt_sched_survival *s, struct bt_survival_key k, uint32_t told,
                      uint32_t n, bool whole);

/* Tokens still to come of a request that has generated n of at most max_new, so that with
 * probability q there will not be more. */
uint32_t bt_survival_quantile(const struct bt_sched_survival *s, struct bt_survival_key k,
                              uint32_t n, uint32_t max_new, double q);
/* ... in the mean. */
double bt_survival_mean(const struct bt_sched_survival *s, struct bt_survival_key k, uint32_t n,
                        uint32_t max_new);
/* ... for many requests: rest[b] is the mean of one that comes into bucket b, and one that has
 * generated n tokens is in bt_survival_bucket(n). */
void bt_survival_rest(const struct bt_sched_survival *s, struct bt_survival_key k, uint32_t max_new,
                      double rest[BT_SURVIVAL_BUCKETS]);
/* The bucket of the token that comes behind n. */
uint32_t bt_survival_bucket(uint32_t n);

#endif
