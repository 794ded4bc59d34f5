/* API keys: a file with one key a line ('#' begins a comment). Behind each key come the limits of
 * its tenant. Only SHA-256 digests of keys are kept; they are compared in constant time.
 * tenant=NAME names the tenant. Without a name the digest is the name, and the key is a tenant of
 * its own. Tenants do not share cached prefixes. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

#include "common/base/sha256.h"
#include "common/conf/conf.h"
#include "common/policy/sched/share.h"
#include "conductor/front/front_priv.h"

#define KEY_BYTES_MAX 512
#define UNIT_BYTES    (256 * 1024)
#define DEBT_S        60 /* seconds of its rate that a request may take beyond a full bucket */

#define TENANT_BYTES 32

struct tenant { /* one for each key */
    uint8_t digest[BT_SHA256_LEN];
    char name[TENANT_BYTES + 1]; /* tenant=, else the digest's first half in hex */
    bool has_terms;
    struct bt_front_key_terms terms;
    struct bt_sched_bucket requests, tokens;
    uint64_t in_flight; /* generations */
};

struct bt_front_keys {
    struct tenant *all;
    size_t n;
};

/* ---- the file ---- */

static const struct {
    const char *name;
    double min, max;
    size_t offset; /* SIZE_MAX: priority, the only term that is not a double */
} terms[] = {{"rps", 1e-6, 1e9, offsetof(struct bt_front_key_terms, requests_per_s)},
             {"tokens_per_s", 1e-3, 1e12, offsetof(struct bt_front_key_terms, tokens_per_s)},
             {"concurrency", 1, 1e6, offsetof(struct bt_front_key_terms, concurrency)},
             {"weight", 1e-3, 1e6, offsetof(struct bt_front_key_terms, weight)},
             {"priority", INT32_MIN, INT32_MAX, SIZE_MAX},
             {"slo_ttft_ms", 1e-3, 86400000, offsetof(struct bt_front_key_terms, slo_ttft_ms)},
             {"slo_tbt_ms", 1e-3, 86400000, offsetof(struct bt_front_key_terms, slo_tbt_ms)}};

static bool read_name(const char *name, char out[TENANT_BYTES + 1], char *err, size_t cap)
{
    size_t n = strlen(name);
    if (n == 0 || n > TENANT_BYTES || strcmp(name, "-") == 0 ||
        strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") != n) {
        snprintf(err, cap,
                 "tenant=%.60s: give a name of 1 to %d letters, digits and the signs . _ -", name,
                 TENANT_BYTES);
        return false;
    }
    memcpy(out, name, n + 1);
    return true;
}

/* Reads name=value words; text ends with NUL. False: err says which word is wrong and why. */
static bool read_terms(char *text, struct tenant *x, char *err, size_t cap)
{
    struct bt_front_key_terms *t = &x->terms;
    uint32_t seen = 0;
    char *save = NULL;
    for (char *w = strtok_r(text, " \t", &save); w != NULL; w = strtok_r(NULL, " \t", &save)) {
        size_t name = strcspn(w, "="), i = 0;
        if (strncmp(w, "tenant=", 7) == 0) {
            if (x->name[0] != '\0') {
                snprintf(err, cap, "tenant= occurs twice for one key");
                return false;
            }
            if (!read_name(w + 7, x->name, err, cap)) {
                return false;
            }
            continue;
        }
        while (i < BT_ARRAY_LEN(terms) &&
               (strlen(terms[i].name) != name || strncmp(terms[i].name, w, name) != 0)) {
            i++;
        }
        if (i == BT_ARRAY_LEN(terms) || w[name] != '=') {
            snprintf(err, cap,
                     "'%.40s' is not one of tenant=, rps=, tokens_per_s=, "
                     "concurrency=, weight=, priority=, slo_ttft_ms=, slo_tbt_ms=",
                     w);
            return false;
        }
        if ((seen >> i & 1) != 0) {
            snprintf(err, cap, "%s= occurs twice for one key", terms[i].name);
            return false;
        }
        seen |= 1u << i;
        char *end;
        double v = strtod(w + name + 1, &end);
        bool whole = terms[i].offset == SIZE_MAX ||
                     terms[i].offset == offsetof(struct bt_front_key_terms, concurrency);
        if (end == w + name + 1 || *end != '\0' || !(v >= terms[i].min && v <= terms[i].max) ||
            (whole && v != floor(v))) {
            snprintf(err, cap, "%.60s: give a%s number from %g to %g", w, whole ? " whole" : "",
                     terms[i].min, terms[i].max);
            return false;
        }
        x->has_terms = true;
        if (terms[i].offset == SIZE_MAX) {
            t->priority = (int32_t)v;
        } else {
            memcpy((char *)t + terms[i].offset, &v, sizeof(v));
        }
    }
    return true;
}

/* A tenant's limits must stand at its first key. False: err says so. */
static bool join_tenant(const struct bt_front_keys *k, struct tenant *x, char *err, size_t cap)
{
    if (x->name[0] == '\0') {
        bt_hex(x->digest, TENANT_BYTES / 2, x->name);
    }
    for (size_t i = 0; i < k->n; i++) {
        if (memcmp(k->all[i].digest, x->digest, sizeof(x->digest)) == 0) {
            snprintf(err, cap, "this key is listed twice; remove one of the two lines");
            return false;
        }
        if (strcmp(k->all[i].name, x->name) == 0 && x->has_terms) {
            snprintf(err, cap,
                     "two keys of tenant %s have limits; give them with its first key only",
                     x->name);
            return false;
        }
    }
    return true;
}

/* Reads one line of n bytes, with its line end, and overwrites it. False: err says what is
 * wrong. */
static bool read_line(struct bt_front_keys *k, char *line, size_t n, char *err, size_t cap)
{
    if (memchr(line, '\0', n) != NULL) {
        snprintf(err, cap, "a key holds a NUL");
        return false;
    }
    while (n > 0 && strchr(" \t\r\n", line[n - 1]) != NULL) {
        n--;
    }
    line[n] = '\0';
    char *key = line + strspn(line, " \t");
    size_t len = strcspn(key, " \t");
    if (*key == '\0' || *key == '#') {
        return true;
    }
    if (n > KEY_BYTES_MAX) {
        snprintf(err, cap, "a line is longer than %d bytes", KEY_BYTES_MAX);
        return false;
    }
    struct tenant t = {.terms = {.priority = INT32_MIN}};
    bt_sha256(key, len, t.digest);
    if (!read_terms(key + len, &t, err, cap) || !join_tenant(k, &t, err, cap)) {
        return false;
    }
    double now_ms = (double)bt_mono_ns() / 1e6;
    /* A client may send one second's requests at once, and ten seconds' tokens, because prompts are
     * long. */
    bt_sched_bucket_init(&t.requests, t.terms.requests_per_s, t.terms.requests_per_s, now_ms);
    bt_sched_bucket_init(&t.tokens, t.terms.tokens_per_s, 10 * t.terms.tokens_per_s, now_ms);
    k->all = bt_realloc(k->all, (k->n + 1) * sizeof(k->all[0]));
    k->all[k->n++] = t;
    return true;
}

/* Reads all lines and wipes the keys from the buffer. False: err names the line and what is
 * wrong. */
static bool read_lines(struct bt_front_keys *k, FILE *file, const char *path, char *err, size_t cap)
{
    char *line = NULL, why[256];
    size_t room = 0;
    ssize_t n;
    bool ok = true;
    for (uint32_t no = 1; ok && (n = getline(&line, &room, file)) > 0; no++) {
        size_t bom = no == 1 && n >= 3 && memcmp(line, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
        ok = read_line(k, line + bom, (size_t)n - bom, why, sizeof(why));
        if (!ok) {
            snprintf(err, cap, "conductor.api_keys_file: %s:%u: %s", path, no, why);
        }
        explicit_bzero(line, room);
    }
    free(line);
    return ok;
}

bt_status_t bt_front_keys_load(const char *path, struct bt_front_keys **keys_p, char *err,
                               size_t err_cap)
{
    struct stat st;
    struct bt_front_keys *k = bt_calloc(1, sizeof(*k));
    FILE *file = fopen(path, "re");
    const char *what = NULL;
    char why[200];
    if (file == NULL) {
        what = strerror(errno);
    } else if (fstat(fileno(file), &st) != 0 || !S_ISREG(st.st_mode)) {
        what = "not a regular file";
    } else if (!bt_conf_secret_private(&st, why, sizeof(why))) {
        what = why;
    }
    bool ok = what == NULL && read_lines(k, file, path, err, err_cap);
    if (ok && k->n == 0) {
        what = "contains no key; write one key a line, or remove conductor.api_keys_file";
    }
    if (what != NULL) {
        snprintf(err, err_cap, "conductor.api_keys_file: %s: %s", path, what);
    }
    if (file != NULL) {
        fclose(file);
    }
    if (!ok || what != NULL) {
        bt_front_keys_destroy(k);
        return BT_ERR_CONFIG;
    }
    *keys_p = k;
    return BT_OK;
}

bt_status_t bt_front_check_keys(const char *path, char *err, size_t err_cap)
{
    struct bt_front_keys *k = NULL;
    bt_status_t st = path != NULL ? bt_front_keys_load(path, &k, err, err_cap) : BT_OK;
    bt_front_keys_destroy(k);
    return st;
}

void bt_front_keys_destroy(struct bt_front_keys *k)
{
    if (k != NULL) {
        free(k->all);
        free(k);
    }
}

bool bt_front_keys_check(const struct bt_front_keys *k, const char *authorization,
                         const char *api_key, char tenant[33])
{
    uint8_t mine[BT_SHA256_LEN];
    const char *key = api_key;
    if (authorization != NULL) {
        if (strncasecmp(authorization, "Bearer ", 7) != 0) {
            return false;
        }
        key = authorization + 7 + strspn(authorization + 7, " ");
    }
    if (key == NULL || (api_key != NULL && strcmp(key, api_key) != 0)) {
        return false;
    }
    bt_sha256(key, strlen(key), mine);
    const struct tenant *found = NULL;
    for (size_t i = 0; i < k->n; i++) { /* always all keys and all their bytes: constant time */
        uint8_t differ = 0;
        for (size_t b = 0; b < BT_SHA256_LEN; b++) {
            differ |= (uint8_t)(mine[b] ^ k->all[i].digest[b]);
        }
        found = differ == 0 ? &k->all[i] : found;
    }
    if (found != NULL) {
        memcpy(tenant, found->name, sizeof(found->name));
    }
    return found != NULL;
}

/* ---- terms ---- */

static struct tenant *find(const struct bt_front_keys *k, const char *tenant)
{
    if (k == NULL || tenant == NULL) {
        return NULL;
    }
    for (size_t i = 0; i < k->n; i++) {
        if (strcmp(k->all[i].name, tenant) == 0) {
            return &k->all[i];
        }
    }
    return NULL;
}

const char *bt_front_keys_tenant(const struct bt_front_keys *k, const char *name)
{
    const struct tenant *t = find(k, name);
    for (size_t i = 0; t == NULL && k != NULL && i < k->n; i++) {
        char digest[33];
        bt_hex(k->all[i].digest, 16, digest);
        t = strcmp(digest, name) == 0 ? &k->all[i] : NULL;
    }
    return t != NULL ? t->name : NULL;
}

uint64_t bt_front_keys_owner(const struct bt_front_keys *k, const char *tenant)
{
    const struct tenant *t = find(k, tenant);
    return t != NULL ? (uint64_t)(t - k->all) + 1 : 0;
}

const struct bt_front_key_terms *bt_front_keys_terms(const struct bt_front_keys *k,
                                                     const char *tenant)
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
                         "this API key's limit of %g %s is reached; there is room in %u s", limit,
                         what, s);
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
