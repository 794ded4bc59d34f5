/* How many tokens a request will still generate: survival estimates (Kaplan and Meier, JASA 1958)
 * per tenant and class of prompt length, from requests that have ended. An answer that was cut off
 * (by its limit or its client) counts up to there. The fewer requests of a tenant have ended, the
 * more its estimates follow those of all tenants; so do those of a class follow those of all
 * prompts. Running requests count as well; otherwise only short answers would be known at first. A
 * plain value in the caller's memory, about 310 KiB. PURE. */
#ifndef BT_POLICY_SCHED_SURVIVAL_H
#define BT_POLICY_SCHED_SURVIVAL_H

#include "common/base/base.h"

/* The mean length of an answer as long as nothing is known. */
#define BT_SURVIVAL_ANSWER_TOKENS 256u

#define BT_SURVIVAL_BUCKETS 32 /* of lengths: 1, 2, 3, 4, 6, 8, 12, 16 ... 65536 and above */
#define BT_SURVIVAL_CLASSES 19 /* prompts below 192, 256, 384, 512 ... 64k tokens, longer ones */
#define BT_SURVIVAL_TENANTS 64 /* by hash: two tenants may share an entry */

struct bt_survival_curve {
    float reached[BT_SURVIVAL_BUCKETS]; /* requests that have reached the bucket; a request inside
                                           it counts half */
    float ended[BT_SURVIVAL_BUCKETS];   /* requests that ended in it by themselves; both fade */
};

struct bt_sched_survival {
    float prior[BT_SURVIVAL_BUCKETS]; /* chance to end in the bucket, as long as nothing is known */
    struct bt_survival_curve any, all[BT_SURVIVAL_CLASSES];
    struct bt_survival_curve of[BT_SURVIVAL_TENANTS][BT_SURVIVAL_CLASSES];
};

/* Which curve a request belongs to. tenant: any hash, the same for one tenant. */
struct bt_survival_key {
    uint32_t tenant, prompt_class;
};
struct bt_survival_key bt_survival_key(uint64_t tenant_hash, uint32_t prompt_tokens);

/* Nothing is known: each token is the last one with the same chance. */
void bt_survival_init(struct bt_sched_survival *s);
/* A request has generated n tokens and continues; `told` of them were reported before (0: none). */
void bt_survival_reach(struct bt_sched_survival *s, struct bt_survival_key k, uint32_t told,
                       uint32_t n);
/* A request has ended after n tokens, of which bt_survival_reach has reported `told`. whole: it
 * ended by itself (an EOS, a stop string). */
void bt_survival_note(struct bt_sched_survival *s, struct bt_survival_key k, uint32_t told,
                      uint32_t n, bool whole);

/* The q-quantile of the tokens that a request still generates; it has generated n of at most
 * max_new. */
uint32_t bt_survival_quantile(const struct bt_sched_survival *s, struct bt_survival_key k,
                              uint32_t n, uint32_t max_new, double q);
/* The mean of the same. */
double bt_survival_mean(const struct bt_sched_survival *s, struct bt_survival_key k, uint32_t n,
                        uint32_t max_new);
/* The means for many requests: rest[b] is that of a request which reaches bucket b. A request that
 * has generated n tokens is in bt_survival_bucket(n). */
void bt_survival_rest(const struct bt_sched_survival *s, struct bt_survival_key k, uint32_t max_new,
                      double rest[BT_SURVIVAL_BUCKETS]);
/* The bucket of the token after n tokens. */
uint32_t bt_survival_bucket(uint32_t n);

#endif
