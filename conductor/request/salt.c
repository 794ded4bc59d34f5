/* Roots of tenants' block chains: they keep a tenant from finding what another tenant has cached.
 * Pure. */
#include <string.h>

#include "common/base/sha256.h"
#include "conductor/request/requests.h"

static void hmac_sha256(const uint8_t *key, size_t key_len, const void *a, size_t a_len,
                        const void *b, size_t b_len, uint8_t out[BT_SHA256_LEN])
{
    uint8_t block[64] = {0}, pad[64];
    if (key_len > sizeof(block)) {
        bt_sha256(key, key_len, block);
    } else if (key_len != 0) {
        memcpy(block, key, key_len);
    }
    for (size_t i = 0; i < sizeof(pad); i++) {
        pad[i] = block[i] ^ 0x36;
    }
    struct bt_sha256 *h = bt_sha256_create();
    bt_sha256_update(h, pad, sizeof(pad));
    bt_sha256_update(h, a, a_len);
    bt_sha256_update(h, b, b_len);
    bt_sha256_finish(h, out);
    for (size_t i = 0; i < sizeof(pad); i++) {
        pad[i] = block[i] ^ 0x5c;
    }
    h = bt_sha256_create();
    bt_sha256_update(h, pad, sizeof(pad));
    bt_sha256_update(h, out, BT_SHA256_LEN);
    bt_sha256_finish(h, out);
}

void bt_requests_salted_root(const struct bt_kv_key *root, const uint8_t *secret, size_t secret_len,
                             const char *tenant, const char *cache_salt, struct bt_kv_key *out)
{
    /* The text has the lengths too, so that ("ab", "c") and ("a", "bc") differ. */
    struct bt_buf text;
    bt_buf_init(&text);
    bt_buf_printf(&text, "%zu:%s", tenant != NULL ? strlen(tenant) : 0,
                  tenant != NULL ? tenant : "");
    const char *salt = cache_salt != NULL ? cache_salt : "";
    uint8_t mac[BT_SHA256_LEN];
    hmac_sha256(secret, secret_len, text.data, text.len, salt, strlen(salt), mac);
    bt_buf_cleanup(&text);
    static const char label[] = "baton salted root 1";
    struct bt_sha256 *h = bt_sha256_create();
    bt_sha256_update(h, label, sizeof(label));
    bt_sha256_update(h, root->b, sizeof(root->b));
    bt_sha256_update(h, mac, sizeof(mac));
    bt_sha256_finish(h, out->b);
}
