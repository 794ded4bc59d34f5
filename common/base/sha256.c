/* SHA-256 over OpenSSL's EVP, hexadecimal. Any thread. */
#include "common/base/sha256.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <assert.h>

#include "common/base/base.h"

static_assert(sizeof(struct bt_sha256 *) == sizeof(EVP_MD_CTX *), "an alias of OpenSSL's context");

void bt_sha256(const void *p, size_t n, uint8_t out[BT_SHA256_LEN])
{
    unsigned len = 0;
    BT_ASSERT(EVP_Digest(p, n, out, &len, EVP_sha256(), NULL) == 1 && len == BT_SHA256_LEN);
}

struct bt_sha256 *bt_sha256_create(void)
{
    EVP_MD_CTX *c = EVP_MD_CTX_new();
    BT_ASSERT(c != NULL && EVP_DigestInit_ex(c, EVP_sha256(), NULL) == 1);
    return (struct bt_sha256 *)c;
}

void bt_sha256_update(struct bt_sha256 *h, const void *p, size_t n)
{
    BT_ASSERT(EVP_DigestUpdate((EVP_MD_CTX *)h, p, n) == 1);
}

void bt_sha256_finish(struct bt_sha256 *h, uint8_t out[BT_SHA256_LEN])
{
    unsigned len = 0;
    BT_ASSERT(EVP_DigestFinal_ex((EVP_MD_CTX *)h, out, &len) == 1 && len == BT_SHA256_LEN);
    EVP_MD_CTX_free((EVP_MD_CTX *)h);
}

void bt_hmac_sha256(const void *key, size_t key_len, const void *p, size_t n,
                    uint8_t out[BT_SHA256_LEN])
{
    unsigned len = 0;
    BT_ASSERT(HMAC(EVP_sha256(), key, (int)key_len, p, n, out, &len) != NULL &&
              len == BT_SHA256_LEN);
}

bool bt_hmac_equal(const void *a, const void *b, size_t n)
{
    return CRYPTO_memcmp(a, b, n) == 0;
}

void bt_hex(const void *p, size_t n, char *out)
{
    static const char digits[] = "0123456789abcdef";
    const uint8_t *b = p;
    for (size_t i = 0; i < n; i++) {
        out[2 * i] = digits[b[i] >> 4];
        out[2 * i + 1] = digits[b[i] & 15];
    }
    out[2 * n] = '\0';
}
