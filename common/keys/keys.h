/* API keys as a text: one key a line, '#' begins a comment. A line is the key's SHA-256 digest
 * (sha256: and 64 hexadecimal digits) and words NAME=VALUE behind it:
 *
 *     sha256:9f86... id=ci scopes=inference,metrics expires=2027-01-31T00:00:00Z tenant=acme rps=5
 *
 * A line may also have the key itself instead of its digest. Pure: text and time are arguments.
 *
 * Digests are plain SHA-256. A key has 256 random bits, so nobody can try all keys, and a slow hash
 * (bcrypt) would protect nothing more: it only makes guessable passwords expensive to guess. It
 * would cost 0.1 s of CPU for each request, which is a denial of service. */
#ifndef BT_KEYS_KEYS_H
#define BT_KEYS_KEYS_H

#include "common/base/base.h"
#include "common/base/buf.h"
#include "common/base/sha256.h"

#define BT_KEYS_NAME_BYTES 32    /* of an id, of a tenant */
#define BT_KEYS_MAX        10000 /* keys of a file: each request is compared with all of them */
#define BT_KEYS_FILE_MAX   (8u << 20)
/* A new key: BT_KEYS_PREFIX and 64 hexadecimal digits. */
#define BT_KEYS_PREFIX       "bt-"
#define BT_KEYS_SECRET_BYTES (sizeof(BT_KEYS_PREFIX) + 64)

enum { BT_KEYS_INFERENCE = 1, BT_KEYS_METRICS = 2, BT_KEYS_ADMIN = 4 }; /* scopes, bits */

struct bt_keys_terms {                   /* limits and objectives of a tenant */
    double requests_per_s, tokens_per_s; /* 0: no limit */
    double concurrency;                  /* generations in flight; 0: no limit */
    double weight;                       /* share against other tenants; 0: 1 */
    int32_t priority;                    /* the highest class that its requests may have */
    double slo_ttft_ms, slo_tbt_ms;      /* 0: the configuration's */
};

struct bt_key {
    uint8_t digest[BT_SHA256_LEN];
    char id[BT_KEYS_NAME_BYTES + 1];     /* for people and logs; no secret */
    char tenant[BT_KEYS_NAME_BYTES + 1]; /* tenant=, else the digest's first half in hex */
    uint32_t scopes;
    uint64_t expires_s, revoked_s; /* since 1970; 0: never */
    bool plain;                    /* the file has the key itself */
    bool has_terms;
    uint32_t line; /* in the text, from 1 on */
    struct bt_keys_terms terms;
};

struct bt_keys {
    struct bt_key *all;
    size_t n;
};

/* Parses len bytes, of which the last may lack its line end, and overwrites them with zeros, as
 * they may have keys. ERR_INVALID: err begins with the number of the wrong line and ": ". A
 * tenant's terms stand at its first key. */
bt_status_t bt_keys_parse(char *text, size_t len, struct bt_keys **keys_p, char *err,
                          size_t err_cap) BT_MUST_CHECK;
void bt_keys_destroy(struct bt_keys *k); /* NULL is allowed */

/* The key with this secret; NULL: none. The time does not depend on which key it is, nor on how
 * much of a key is right. Revoked and expired keys are found, too. */
const struct bt_key *bt_keys_find(const struct bt_keys *k, const char *secret, size_t len);

typedef enum { BT_KEY_VALID, BT_KEY_EXPIRED, BT_KEY_REVOKED } bt_key_state_t;
bt_key_state_t bt_key_state(const struct bt_key *key, uint64_t now_s);

/* Returns whether it has 1 to BT_KEYS_NAME_BYTES letters, digits and the signs . _ -, and is not
 * "-". */
bool bt_keys_name_good(const char *name);
/* Reads a comma-separated list of scopes. False: err says what is wrong. */
bool bt_keys_scopes_read(const char *text, uint32_t *scopes_p, char *err, size_t err_cap);
/* Appends the names of the scopes: "inference,metrics". */
void bt_keys_scopes_put(uint32_t scopes, struct bt_buf *out);
/* Reads 2027-01-31 or 2027-01-31T12:00:00Z (UTC). False: it is neither. */
bool bt_keys_time_read(const char *text, uint64_t *s_p);
/* The same as text: 2027-01-31T12:00:00Z. */
void bt_keys_time_put(uint64_t s, char out[32]);

#endif
