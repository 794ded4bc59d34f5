/* SHA-256 through OpenSSL's one-shot and streaming interface. */
#ifndef BT_BASE_SHA256_H
#define BT_BASE_SHA256_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define BT_SHA256_LEN 32

struct bt_sha256;

void bt_sha256(const void *p, size_t n, uint8_t out[BT_SHA256_LEN]);
struct bt_sha256 *bt_sha256_create(void);
void bt_sha256_update(struct bt_sha256 *h, const void *p, size_t n);
/* Writes the digest and destroys h. */
void bt_sha256_finish(struct bt_sha256 *h, uint8_t out[BT_SHA256_LEN]);
/* HMAC-SHA256. */
void bt_hmac_sha256(const void *key, size_t key_len, const void *p, size_t n,
                    uint8_t out[BT_SHA256_LEN]);
/* Returns whether n bytes are equal. The time does not depend on their values. */
bool bt_hmac_equal(const void *a, const void *b, size_t n);
/* Lower-case hexadecimal of n bytes into out[2n+1]. */
void bt_hex(const void *p, size_t n, char *out);

#endif
