/* The API keys of a front: reads their file (common/keys has its form), reads it again when it
 * changes, says which key a request has, and keeps the limits of tenants. Limits and what is in
 * flight belong to the tenant, so they outlive a new file. Loop thread. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

#include "common/base/file.h"
#include "common/base/map.h"
#include "common/conf/conf.h"
#include "common/conf/watch.h"
#include "common/policy/sched/share.h"
#include "conductor/front/front_priv.h"

#define UNIT_BYTES (256 * 1024)
#define DEBT_S     60 /* seconds of its rate that a request may take beyond a full bucket */

struct tenant {
    char name[BT_KEYS_NAME_BYTES + 1];
    struct bt_keys_terms terms;
    struct bt_sched_bucket requests, tokens;
    uint64_t in_flight; /* generations */
    uint64_t owner;     /* its number */
};

struct bt_front_keys {
    char *path;
    struct bt_keys *set;
    struct bt_conf_stamp stamp;
    /* By name, zeros behind it. Tenants stay when their keys are removed: requests may still run.
     */
    struct bt_map *tenants;
    uint64_t n_owners;
};

/* ---- the file ---- */

/* Reads and parses the file. NULL: err says what is wrong and where. stamp_p is set in any case. */
static struct bt_keys *read_file(const char *path, struct bt_conf_stamp *stamp_p, char *err,
                                 size_t cap)
{
    struct stat st;
    struct bt_keys *set = NULL;
    const char *what = NULL;
    FILE *file = bt_file_open(path, &st, &what);
    char why[400], *text = NULL;
    size_t n = 0;
    memset(stamp_p, 0, sizeof(*stamp_p));
    if (file != NULL) {
        bt_conf_stamp_of(&st, stamp_p);
        if (!bt_conf_secret_private(&st, why, sizeof(why))) {
            what = why;
        } else if ((uint64_t)st.st_size > BT_KEYS_FILE_MAX) {
            what = "larger than 8 MiB";
        }
    }
    if (file != NULL && what == NULL) {
        (void)setvbuf(file, NULL, _IONBF, 0); /* no second copy of keys in memory */
        text = bt_malloc((size_t)st.st_size + 1);
        n = fread(text, 1, (size_t)st.st_size, file);
        what = ferror(file) != 0 ? strerror(errno) : NULL;
    }
    if (what != NULL) {
        snprintf(err, cap, "conductor.api_keys_file: %s: %s", path, what);
    } else if (bt_keys_parse(text, n, &set, why, sizeof(why)) != BT_OK) {
        snprintf(err, cap, "conductor.api_keys_file: %s:%s", path, why);
    } else if (set->n == 0) {
        bt_keys_destroy(set);
        set = NULL;
        snprintf(err, cap,
                 "conductor.api_keys_file: %s: contains no key; make one with "
                 "batonctl key add, or remove conductor.api_keys_file",
                 path);
    }
    free(text);
    if (file != NULL) {
        fclose(file);
    }
    return set;
}

static struct tenant *find(const struct bt_front_keys *k, const char *tenant)
{
    char name[BT_KEYS_NAME_BYTES + 1] = "";
    if (k == NULL || tenant == NULL || strlen(tenant) >= sizeof(name)) {
        return NULL;
    }
    memcpy(name, tenant, strlen(tenant));
    return bt_map_get(k->tenants, name);
}

/* A bucket gets another rate; what is left in it, or owed, stays. */
static void set_rate(struct bt_sched_bucket *b, double per_s, double burst, double now_ms)
{
    double level = b->level;
    bool had = b->per_s > 0;
    if (had && b->per_s == per_s) {
        return;
    }
    bt_sched_bucket_init(b, per_s, burst, now_ms);
    b->level = had ? BT_MIN(level, b->level) : b->level;
}

/* The first key of a tenant says its terms. A client may send one second's requests at once, and
 * ten seconds' tokens, because prompts are long. */
static void take_tenants(struct bt_front_keys *k)
{
    double now_ms = (double)bt_mono_ns() / 1e6;
    struct bt_map *seen = bt_map_create(BT_KEYS_NAME_BYTES + 1);
    for (size_t i = 0; i < k->set->n; i++) {
        const struct bt_key *key = &k->set->all[i];
        char name[BT_KEYS_NAME_BYTES + 1] = "";
        memcpy(name, key->tenant, strlen(key->tenant));
        if (bt_map_put(seen, name, k) != NULL) {
            continue;
        }
        struct tenant *t = bt_map_get(k->tenants, name);
        if (t == NULL) {
            t = bt_calloc(1, sizeof(*t));
            memcpy(t->name, name, sizeof(name));
            t->owner = ++k->n_owners;
            bt_map_put(k->tenants, name, t);
        }
        t->terms = key->terms;
        set_rate(&t->requests, t->terms.requests_per_s, t->terms.requests_per_s, now_ms);
        set_rate(&t->tokens, t->terms.tokens_per_s, 10 * t->terms.tokens_per_s, now_ms);
    }
    bt_map_destroy(seen);
}

bt_status_t bt_front_keys_load(const char *path, struct bt_front_keys **keys_p, char *err,
                               size_t err_cap)
{
    struct bt_conf_stamp stamp;
    struct bt_keys *set = read_file(path, &stamp, err, err_cap);
    if (set == NULL) {
        return BT_ERR_CONFIG;
    }
    struct bt_front_keys *k = bt_calloc(1, sizeof(*k));
    k->path = bt_strdup(path);
    k->set = set;
    k->stamp = stamp;
    k->tenants = bt_map_create(BT_KEYS_NAME_BYTES + 1);
    take_tenants(k);
    *keys_p = k;
    return BT_OK;
}

bt_status_t bt_front_check_keys(const char *path, char *err, size_t err_cap)
{
    struct bt_conf_stamp stamp;
    struct bt_keys *set = path != NULL ? read_file(path, &stamp, err, err_cap) : NULL;
    bool ok = path == NULL || set != NULL;
    bt_keys_destroy(set);
    return ok ? BT_OK : BT_ERR_CONFIG;
}

void bt_front_keys_destroy(struct bt_front_keys *k)
{
    if (k == NULL) {
        return;
    }
    size_t it = 0;
    struct tenant *t;
    while ((t = bt_map_next(k->tenants, &it, NULL)) != NULL) {
        free(t);
    }
    bt_map_destroy(k->tenants);
    bt_keys_destroy(k->set);
    free(k->path);
    free(k);
}

/* Keys that are no longer in the file, as far as `now` is concerned. */
static size_t missing(const struct bt_keys *before, const struct bt_keys *now)
{
    struct bt_map *have = bt_map_create(BT_SHA256_LEN);
    size_t n = 0;
    for (size_t i = 0; i < now->n; i++) {
        bt_map_put(have, now->all[i].digest, have);
    }
    for (size_t i = 0; i < before->n; i++) {
        n += bt_map_get(have, before->all[i].digest) == NULL;
    }
    bt_map_destroy(have);
    return n;
}

void bt_front_keys_say(const struct bt_front_keys *k)
{
    size_t plain = 0;
    for (size_t i = 0; i < k->set->n; i++) {
        plain += k->set->all[i].plain;
    }
    if (plain > 0) {
        BT_WARN("keys_plain", "keys=%zu file=%s remedy=%s", plain, k->path,
                "the file has these keys themselves, so its readers can use them; make new ones "
                "with batonctl key add, which stores digests");
    }
}

void bt_front_keys_look(struct bt_front_keys *k)
{
    struct bt_conf_stamp now;
    bt_conf_stamp_read(k->path, &now);
    if (memcmp(&now, &k->stamp, sizeof(now)) == 0) {
        return;
    }
    char err[700];
    struct bt_keys *set = read_file(k->path, &k->stamp, err, sizeof(err));
    if (set == NULL) {
        k->stamp = now; /* said once for each state of the file, also if it cannot be opened */
        BT_WARN("audit", "who=file what=keys_reload target=%s result=failed why=%s remedy=%s",
                k->path, err, "the conductor keeps the keys that it read before");
        return;
    }
    size_t added = missing(set, k->set), removed = missing(k->set, set), revoked = 0;
    for (size_t i = 0; i < set->n; i++) {
        revoked += set->all[i].revoked_s != 0;
    }
    bt_keys_destroy(k->set);
    k->set = set;
    take_tenants(k);
    BT_INFO("audit",
            "who=file what=keys_reload target=%s result=ok keys=%zu added=%zu removed=%zu "
            "revoked=%zu",
            k->path, set->n, added, removed, revoked);
    bt_front_keys_say(k);
}

/* ---- who asks ---- */

/* The key that a request shows; headers that are absent are NULL. False: none, or not one. */
static bool shown(const struct bt_front_credentials *c, const char **key_p)
{
    const char *key = NULL, *all[] = {NULL, c->x_api_key, c->api_key};
    if (c->authorization != NULL) {
        if (strncasecmp(c->authorization, "Bearer ", 7) != 0) {
            return false;
        }
        all[0] = c->authorization + 7 + strspn(c->authorization + 7, " ");
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(all); i++) {
        if (all[i] != NULL && key != NULL && strcmp(all[i], key) != 0) {
            return false;
        }
        key = all[i] != NULL ? all[i] : key;
    }
    *key_p = key;
    return key != NULL;
}

const struct bt_key *bt_front_keys_check(const struct bt_front_keys *k,
                                         const struct bt_front_credentials *c, uint32_t scope,
                                         struct bt_front_error *e)
{
    const char *secret = NULL;
    char when[32];
    const struct bt_key *key =
        shown(c, &secret) ? bt_keys_find(k->set, secret, strlen(secret)) : NULL;
    if (key == NULL) {
        bt_front_fail(e, 401, NULL, "invalid_api_key",
                      "a valid API key is required: Authorization: Bearer KEY, x-api-key: KEY, or "
                      "api-key: KEY; if several are sent, they must be the same");
        e->refusal = secret == NULL ? "no_key" : "unknown_key";
        return NULL;
    }
    bt_key_state_t state = bt_key_state(key, bt_real_ns() / 1000000000);
    if (state != BT_KEY_VALID) {
        bool expired = state == BT_KEY_EXPIRED;
        bt_keys_time_put(expired ? key->expires_s : key->revoked_s, when);
        bt_front_fail(e, 401, NULL, "invalid_api_key",
                      "this API key (id %s) %s %s; ask the operator for a new one", key->id,
                      expired ? "expired at" : "was revoked at", when);
        e->refusal = expired ? "expired_key" : "revoked_key";
        return NULL;
    }
    if ((key->scopes & scope) != scope) {
        struct bt_buf has, needs;
        bt_buf_init(&has);
        bt_buf_init(&needs);
        bt_keys_scopes_put(key->scopes, &has);
        bt_keys_scopes_put(scope, &needs);
        bt_front_fail(e, 403, NULL, "insufficient_scope",
                      "this API key (id %s) has the scope %s, but this route needs the scope %s; "
                      "use another key, or ask the operator for the scope",
                      key->id, has.data, needs.data);
        e->refusal = "missing_scope";
        e->scope = scope;
        bt_buf_cleanup(&has);
        bt_buf_cleanup(&needs);
        return NULL;
    }
    return key;
}

/* ---- terms ---- */

const char *bt_front_keys_tenant(const struct bt_front_keys *k, const char *name)
{
    for (size_t i = 0; k != NULL && i < k->set->n; i++) {
        const struct bt_key *key = &k->set->all[i];
        char digest[33];
        bt_hex(key->digest, 16, digest);
        if (strcmp(key->tenant, name) == 0 || strcmp(digest, name) == 0) {
            return key->tenant;
        }
    }
    return NULL;
}

uint64_t bt_front_keys_owner(const struct bt_front_keys *k, const char *tenant)
{
    const struct tenant *t = find(k, tenant);
    return t != NULL ? t->owner : 0;
}

const struct bt_keys_terms *bt_front_keys_terms(const struct bt_front_keys *k, const char *tenant)
{
    const struct tenant *t = find(k, tenant);
    return t != NULL ? &t->terms : NULL;
}

/* How many requests a body counts as (rps=). Reading 256 KiB takes about as long as 60,000 tokens
 * of text. */
static double units_of(uint64_t bytes)
{
    return (double)BT_MAX((bytes + UNIT_BYTES - 1) / UNIT_BYTES, (uint64_t)1);
}

static bool wait_for(struct bt_front_error *e, const char *what, double limit, double wait_ms)
{
    uint32_t s = wait_ms > 1e9 ? 1000000 : (uint32_t)(wait_ms / 1e3) + 1;
    *e = (struct bt_front_error){.retry_after_s = s};
    return bt_front_fail(e, 429, NULL, "rate_limit_exceeded",
                         "this API key's limit of %g %s is reached; try again in %u s", limit, what,
                         s);
}

/* Is the request too large for this limit ever? A request may take more than is left, and the key's
 * next requests wait until that debt is paid back. So the size alone is a reason to refuse only if
 * paying back takes longer than DEBT_S. True: e is set. */
static bool never(struct bt_front_error *e, const char *what, const struct bt_sched_bucket *b,
                  double least, double n, const char *term)
{
    double most = BT_MAX(b->burst + DEBT_S * b->per_s, least);
    if (b->per_s <= 0 || n <= most) {
        return false;
    }
    bt_front_fail(e, 400, NULL, "exceeds_key_limit",
                  "this request counts as %.0f %s; with %s=%g this API key may send %.0f at once; "
                  "send smaller requests",
                  n, what, term, b->per_s, floor(most));
    return true;
}

bool bt_front_keys_admit_body(struct bt_front_keys *k, const char *tenant, uint64_t bytes,
                              bool generates, struct bt_front_error *e)
{
    struct tenant *t = find(k, tenant);
    double now_ms = (double)bt_mono_ns() / 1e6, wait_ms = 0, n = units_of(bytes);
    if (t == NULL) {
        return true;
    }
    if (never(e, "requests (256 KiB of a body are one)", &t->requests, FRONT_N_MAX, n, "rps")) {
        return false;
    }
    double most = t->terms.concurrency;
    if (generates && most > 0 && (double)t->in_flight >= most) {
        return wait_for(e, "generations in flight (concurrency=)", most, 0);
    }
    if (!bt_sched_bucket_take(&t->tokens, now_ms, 0, &wait_ms)) { /* the bucket is in debt */
        return wait_for(e, "tokens a second (tokens_per_s=)", t->terms.tokens_per_s, wait_ms);
    }
    if (!bt_sched_bucket_take(&t->requests, now_ms, n, &wait_ms)) {
        return wait_for(e, "requests a second (rps=; each choice of each prompt is one)",
                        t->terms.requests_per_s, wait_ms);
    }
    return true;
}

bool bt_front_keys_admit(struct bt_front_keys *k, const char *tenant, const struct bt_front_work *w,
                         struct bt_front_error *e)
{
    struct tenant *t = find(k, tenant);
    double now_ms = (double)bt_mono_ns() / 1e6, wait_ms = 0;
    if (t == NULL) {
        return true;
    }
    double most = t->terms.concurrency, taken = units_of(w->body_announced);
    double n = BT_MAX((double)w->generations, units_of(w->body_bytes)),
           tokens = (double)w->prompt_tokens;
    if (never(e, "requests (each choice of each prompt is one)", &t->requests, FRONT_N_MAX, n,
              "rps") ||
        never(e, "prompt tokens", &t->tokens, (double)w->context, tokens, "tokens_per_s")) {
        return false;
    }
    if (most > 0 && (double)w->generations > most) {
        return bt_front_fail(e, 400, NULL, "exceeds_key_limit",
                             "this request asks for %llu generations; with concurrency=%g this API "
                             "key may have as many at once; send smaller requests",
                             (unsigned long long)w->generations, most);
    }
    if (most > 0 && (double)(t->in_flight + w->generations) > most) {
        return wait_for(e, "generations in flight (concurrency=)", most, 0);
    }
    /* First gives back what the body took, so that a request that needs a full bucket finds one. */
    bt_sched_bucket_charge(&t->requests, now_ms, -taken);
    if (!bt_sched_bucket_take(&t->requests, now_ms, n, &wait_ms)) {
        bt_sched_bucket_charge(&t->requests, now_ms, taken); /* reading the body still counts */
        return wait_for(e, "requests a second (rps=; each choice of each prompt is one)",
                        t->terms.requests_per_s, wait_ms + 1e3 * taken / t->requests.per_s);
    }
    if (!bt_sched_bucket_take(&t->tokens, now_ms, tokens, &wait_ms)) {
        bt_sched_bucket_charge(&t->requests, now_ms, taken - n); /* only reading the body counts */
        return wait_for(e, "tokens a second (tokens_per_s=)", t->terms.tokens_per_s, wait_ms);
    }
    t->in_flight += w->generations;
    return true;
}

void bt_front_keys_counted(struct bt_front_keys *k, const char *tenant,
                           const struct bt_front_work *w)
{
    struct tenant *t = find(k, tenant);
    double now_ms = (double)bt_mono_ns() / 1e6;
    if (t != NULL) {
        bt_sched_bucket_charge(&t->requests, now_ms,
                               units_of(w->body_bytes) - units_of(w->body_announced));
        bt_sched_bucket_charge(&t->tokens, now_ms, (double)w->prompt_tokens);
    }
}

void bt_front_keys_end(struct bt_front_keys *k, const char *tenant, uint64_t generations)
{
    struct tenant *t = find(k, tenant);
    if (t != NULL) {
        BT_ASSERT(t->in_flight >= generations);
        t->in_flight -= generations;
    }
}

void bt_front_keys_charge(struct bt_front_keys *k, const char *tenant, uint64_t tokens)
{
    struct tenant *t = find(k, tenant);
    if (t != NULL) {
        bt_sched_bucket_charge(&t->tokens, (double)bt_mono_ns() / 1e6, (double)tokens);
    }
}
