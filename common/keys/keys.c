/* Parses and searches API keys; see keys.h. Pure. */
#include "common/keys/keys.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "common/base/map.h"

#define LINE_BYTES_MAX 512
#define DIGEST_WORD    "sha256:"

static const struct {
    const char *name;
    double min, max;
    size_t offset; /* SIZE_MAX: priority, the only term that is not a double */
} terms[] = {{"rps", 1e-6, 1e9, offsetof(struct bt_keys_terms, requests_per_s)},
             {"tokens_per_s", 1e-3, 1e12, offsetof(struct bt_keys_terms, tokens_per_s)},
             {"concurrency", 1, 1e6, offsetof(struct bt_keys_terms, concurrency)},
             {"weight", 1e-3, 1e6, offsetof(struct bt_keys_terms, weight)},
             {"priority", INT32_MIN, INT32_MAX, SIZE_MAX},
             {"slo_ttft_ms", 1e-3, 86400000, offsetof(struct bt_keys_terms, slo_ttft_ms)},
             {"slo_tbt_ms", 1e-3, 86400000, offsetof(struct bt_keys_terms, slo_tbt_ms)}};

static const struct {
    const char *name;
    uint32_t bit;
} scopes[] = {
    {"inference", BT_KEYS_INFERENCE}, {"metrics", BT_KEYS_METRICS}, {"admin", BT_KEYS_ADMIN}};

/* While a text is parsed. */
struct reading {
    struct bt_keys *k;
    struct bt_map *digests, *ids, *tenants; /* of the keys so far */
};

/* ---- words ---- */

bool bt_keys_name_good(const char *name)
{
    size_t n = strlen(name);
    return n > 0 && n <= BT_KEYS_NAME_BYTES && strcmp(name, "-") != 0 &&
           strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == n;
}

bool bt_keys_scopes_read(const char *text, uint32_t *scopes_p, char *err, size_t cap)
{
    uint32_t bits = 0;
    for (const char *at = text;; at++) {
        size_t len = strcspn(at, ","), i = 0;
        while (i < BT_ARRAY_LEN(scopes) &&
               (strlen(scopes[i].name) != len || strncmp(scopes[i].name, at, len) != 0)) {
            i++;
        }
        if (i == BT_ARRAY_LEN(scopes)) {
            snprintf(err, cap, "scopes=%.60s: give one or more of inference, metrics, admin", text);
            return false;
        }
        bits |= scopes[i].bit;
        at += len;
        if (*at == '\0') {
            *scopes_p = bits;
            return true;
        }
    }
}

void bt_keys_scopes_put(uint32_t bits, struct bt_buf *out)
{
    const char *comma = "";
    for (size_t i = 0; i < BT_ARRAY_LEN(scopes); i++) {
        if ((bits & scopes[i].bit) != 0) {
            bt_buf_printf(out, "%s%s", comma, scopes[i].name);
            comma = ",";
        }
    }
}

bool bt_keys_time_read(const char *text, uint64_t *s_p)
{
    static const char form[] = "dddd-dd-ddTdd:dd:ddZ";
    size_t n = strlen(text);
    if (n != sizeof(form) - 1 && n != 10) {
        return false;
    }
    for (size_t i = 0; i < n; i++) {
        bool digit = text[i] >= '0' && text[i] <= '9';
        if (form[i] == 'd' ? !digit : text[i] != form[i]) {
            return false;
        }
    }
    struct tm tm = {
        .tm_year = atoi(text) - 1900, .tm_mon = atoi(text + 5) - 1, .tm_mday = atoi(text + 8)};
    if (n > 10) {
        tm.tm_hour = atoi(text + 11);
        tm.tm_min = atoi(text + 14);
        tm.tm_sec = atoi(text + 17);
    }
    struct tm same = tm;
    time_t s = timegm(&same);
    /* timegm accepts a 31st of February and moves it to March. */
    if (s <= 0 || same.tm_mon != tm.tm_mon || same.tm_mday != tm.tm_mday ||
        same.tm_hour != tm.tm_hour || same.tm_min != tm.tm_min || same.tm_sec != tm.tm_sec) {
        return false;
    }
    *s_p = (uint64_t)s;
    return true;
}

void bt_keys_time_put(uint64_t s, char out[32])
{
    time_t t = (time_t)s;
    struct tm tm;
    gmtime_r(&t, &tm);
    strftime(out, 32, "%Y-%m-%dT%H:%M:%SZ", &tm);
}

/* Reads NAME=VALUE of a term. False: err says what is wrong. */
static bool read_term(const char *w, struct bt_key *x, uint32_t *seen, char *err, size_t cap)
{
    size_t name = strcspn(w, "="), i = 0;
    while (i < BT_ARRAY_LEN(terms) &&
           (strlen(terms[i].name) != name || strncmp(terms[i].name, w, name) != 0)) {
        i++;
    }
    if (i == BT_ARRAY_LEN(terms) || w[name] != '=') {
        snprintf(err, cap,
                 "'%.40s' is not one of tenant=, rps=, tokens_per_s=, concurrency=, weight=, "
                 "priority=, slo_ttft_ms=, slo_tbt_ms=, id=, scopes=, expires=, revoked=",
                 w);
        return false;
    }
    if ((*seen >> i & 1) != 0) {
        snprintf(err, cap, "%s= occurs twice for one key", terms[i].name);
        return false;
    }
    *seen |= 1u << i;
    char *end;
    double v = strtod(w + name + 1, &end);
    bool whole = terms[i].offset == SIZE_MAX ||
                 terms[i].offset == offsetof(struct bt_keys_terms, concurrency);
    if (end == w + name + 1 || *end != '\0' || !(v >= terms[i].min && v <= terms[i].max) ||
        (whole && v != floor(v))) {
        snprintf(err, cap, "%.60s: give a%s number from %g to %g", w, whole ? " whole" : "",
                 terms[i].min, terms[i].max);
        return false;
    }
    x->has_terms = true;
    if (terms[i].offset == SIZE_MAX) {
        x->terms.priority = (int32_t)v;
    } else {
        memcpy((char *)&x->terms + terms[i].offset, &v, sizeof(v));
    }
    return true;
}

static bool read_name(const char *word, const char *name, char out[BT_KEYS_NAME_BYTES + 1],
                      char *err, size_t cap)
{
    if (out[0] != '\0') {
        snprintf(err, cap, "%s= occurs twice for one key", word);
        return false;
    }
    if (!bt_keys_name_good(name)) {
        snprintf(err, cap, "%s=%.60s: give a name of 1 to %d letters, digits and the signs . _ -",
                 word, name, BT_KEYS_NAME_BYTES);
        return false;
    }
    memcpy(out, name, strlen(name) + 1);
    return true;
}

static bool read_time(const char *word, const char *text, uint64_t *s_p, char *err, size_t cap)
{
    if (*s_p != 0) {
        snprintf(err, cap, "%s= occurs twice for one key", word);
        return false;
    }
    if (!bt_keys_time_read(text, s_p)) {
        snprintf(err, cap, "%s=%.40s: give a time in UTC as 2027-01-31 or 2027-01-31T12:00:00Z",
                 word, text);
        return false;
    }
    return true;
}

/* Reads the words behind a key; text ends with NUL. False: err says which word is wrong and why. */
static bool read_words(char *text, struct bt_key *x, char *err, size_t cap)
{
    uint32_t seen = 0;
    char *save = NULL;
    for (char *w = strtok_r(text, " \t", &save); w != NULL; w = strtok_r(NULL, " \t", &save)) {
        bool ok;
        if (strncmp(w, "tenant=", 7) == 0) {
            ok = read_name("tenant", w + 7, x->tenant, err, cap);
        } else if (strncmp(w, "id=", 3) == 0) {
            ok = read_name("id", w + 3, x->id, err, cap);
        } else if (strncmp(w, "scopes=", 7) == 0) {
            ok = x->scopes == 0 ? bt_keys_scopes_read(w + 7, &x->scopes, err, cap) : false;
            if (!ok && x->scopes != 0) {
                snprintf(err, cap, "scopes= occurs twice for one key");
            }
        } else if (strncmp(w, "expires=", 8) == 0) {
            ok = read_time("expires", w + 8, &x->expires_s, err, cap);
        } else if (strncmp(w, "revoked=", 8) == 0) {
            ok = read_time("revoked", w + 8, &x->revoked_s, err, cap);
        } else {
            ok = read_term(w, x, &seen, err, cap);
        }
        if (!ok) {
            return false;
        }
    }
    return true;
}

/* ---- lines ---- */

static int digit_of(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

static bool read_digest(const char *word, size_t len, struct bt_key *x, char *err, size_t cap)
{
    size_t skip = sizeof(DIGEST_WORD) - 1;
    bool good = len == skip + 2 * (size_t)BT_SHA256_LEN;
    for (size_t i = 0; good && i < BT_SHA256_LEN; i++) {
        int high = digit_of(word[skip + 2 * i]), low = digit_of(word[skip + 2 * i + 1]);
        good = high >= 0 && low >= 0;
        x->digest[i] = (uint8_t)(high << 4 | low);
    }
    if (!good) {
        snprintf(err, cap, "sha256: is not followed by 64 hexadecimal digits");
    }
    return good;
}

/* Gives names to a key that has none, and compares it with the keys before it. False: err says what
 * does not fit. */
static bool join(struct reading *r, struct bt_key *x, char *err, size_t cap)
{
    char hex[2 * BT_SHA256_LEN + 1], id[BT_KEYS_NAME_BYTES + 1] = "",
                                                             tenant[BT_KEYS_NAME_BYTES + 1] = "";
    bt_hex(x->digest, sizeof(x->digest), hex);
    if (x->tenant[0] == '\0') {
        snprintf(x->tenant, sizeof(x->tenant), "%.*s", BT_KEYS_NAME_BYTES, hex);
    }
    if (x->id[0] == '\0') {
        snprintf(x->id, sizeof(x->id), "%.12s", hex);
    }
    x->scopes = x->scopes != 0 ? x->scopes : BT_KEYS_INFERENCE;
    memcpy(id, x->id, strlen(x->id)); /* map keys have one size: zeros behind the text */
    memcpy(tenant, x->tenant, strlen(x->tenant));
    if (bt_map_put(r->digests, x->digest, r) != NULL) {
        snprintf(err, cap, "this key is listed twice; remove one of the two lines");
        return false;
    }
    if (bt_map_put(r->ids, id, r) != NULL) {
        snprintf(err, cap, "two keys have the id %s; give each its own", x->id);
        return false;
    }
    if (bt_map_put(r->tenants, tenant, r) != NULL && x->has_terms) {
        snprintf(err, cap, "two keys of tenant %s have limits; give them with its first key only",
                 x->tenant);
        return false;
    }
    return true;
}

/* Reads one line of n bytes, behind which there is a byte to overwrite. False: err says what is
 * wrong. */
static bool read_line(struct reading *r, char *line, size_t n, uint32_t number, char *err,
                      size_t cap)
{
    if (memchr(line, '\0', n) != NULL) {
        snprintf(err, cap, "a key contains a NUL character");
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
    if (n > LINE_BYTES_MAX) {
        snprintf(err, cap, "a line is longer than %d bytes", LINE_BYTES_MAX);
        return false;
    }
    if (r->k->n == BT_KEYS_MAX) {
        snprintf(err, cap, "there are more than %d keys; remove those that were revoked",
                 BT_KEYS_MAX);
        return false;
    }
    struct bt_key x = {.line = number, .terms = {.priority = INT32_MIN}};
    x.plain = strncmp(key, DIGEST_WORD, sizeof(DIGEST_WORD) - 1) != 0;
    if (x.plain) {
        bt_sha256(key, len, x.digest);
    } else if (!read_digest(key, len, &x, err, cap)) {
        return false;
    }
    if (!read_words(key + len, &x, err, cap) || !join(r, &x, err, cap)) {
        return false;
    }
    r->k->all = bt_realloc(r->k->all, (r->k->n + 1) * sizeof(r->k->all[0]));
    r->k->all[r->k->n++] = x;
    return true;
}

bt_status_t bt_keys_parse(char *text, size_t len, struct bt_keys **keys_p, char *err, size_t cap)
{
    struct reading r = {.k = bt_calloc(1, sizeof(*r.k)),
                        .digests = bt_map_create(BT_SHA256_LEN),
                        .ids = bt_map_create(BT_KEYS_NAME_BYTES + 1),
                        .tenants = bt_map_create(BT_KEYS_NAME_BYTES + 1)};
    char *last = NULL, why[256];
    bool ok = true;
    size_t at = len >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0 ? 3 : 0; /* an editor's mark */
    for (uint32_t number = 1; ok && at < len; number++) {
        char *line = text + at, *end = memchr(line, '\n', len - at);
        size_t n = end != NULL ? (size_t)(end - line) : len - at;
        if (end == NULL) { /* read_line writes behind the line */
            line = last = bt_malloc(n + 1);
            memcpy(last, text + at, n);
        }
        ok = read_line(&r, line, n, number, why, sizeof(why));
        if (!ok) {
            snprintf(err, cap, "%u: %s", number, why);
        }
        if (last != NULL) {
            explicit_bzero(last, n);
        }
        at += n + 1;
    }
    free(last);
    explicit_bzero(text, len);
    bt_map_destroy(r.digests);
    bt_map_destroy(r.ids);
    bt_map_destroy(r.tenants);
    if (!ok) {
        bt_keys_destroy(r.k);
        return BT_ERR_INVALID;
    }
    *keys_p = r.k;
    return BT_OK;
}

void bt_keys_destroy(struct bt_keys *k)
{
    if (k != NULL) {
        free(k->all);
        free(k);
    }
}

/* ---- use ---- */

const struct bt_key *bt_keys_find(const struct bt_keys *k, const char *secret, size_t len)
{
    uint8_t mine[BT_SHA256_LEN];
    const struct bt_key *found = NULL;
    bt_sha256(secret, len, mine);
    for (size_t i = 0; i < k->n; i++) { /* always all keys */
        found = bt_hmac_equal(mine, k->all[i].digest, sizeof(mine)) ? &k->all[i] : found;
    }
    return found;
}

bt_key_state_t bt_key_state(const struct bt_key *key, uint64_t now_s)
{
    if (key->revoked_s != 0) {
        return BT_KEY_REVOKED;
    }
    return key->expires_s != 0 && now_s >= key->expires_s ? BT_KEY_EXPIRED : BT_KEY_VALID;
}
