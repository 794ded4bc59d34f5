/* Block keys: SHA-256 chains. Pure. */
#include "common/kv/key.h"

#include <assert.h>
#include <string.h>

#include "common/base/map.h"
#include "common/base/sha256.h"

static_assert(sizeof(struct bt_kv_key) == BT_SHA256_LEN, "a key is a digest");

/* Adds one type-length-value; with lengths, neighbouring fields cannot be confused. */
static void tlv(struct bt_sha256 *h, uint8_t type, const void *p, uint32_t n)
{
    uint8_t head[5] = {type, (uint8_t)n, (uint8_t)(n >> 8), (uint8_t)(n >> 16), (uint8_t)(n >> 24)};
    bt_sha256_update(h, head, sizeof(head));
    if (n > 0) {
        bt_sha256_update(h, p, n);
    }
}

void bt_kv_root_key(const struct bt_kv_root *r, struct bt_kv_key *key_p)
{
    static const uint8_t version = 1;
    uint32_t block_tokens = r->layout->page_tokens;
    struct bt_sha256 *h = bt_sha256_create();
    tlv(h, 0, &version, sizeof(version));
    tlv(h, 1, r->weights_digest, sizeof(r->weights_digest));
    tlv(h, 2, r->architecture, (uint32_t)strlen(r->architecture));
    tlv(h, 3, &r->layout->layout_id, sizeof(r->layout->layout_id));
    tlv(h, 4, &block_tokens, sizeof(block_tokens));
    tlv(h, 5, r->rope, (uint32_t)strlen(r->rope));
    tlv(h, 6, NULL, 0); /* was an adapter's name; keys in slabs and on SSDs count on the field */
    tlv(h, 7, r->salt, r->salt_len);
    if (r->rounds && r->rounds[0]) { /* without rounds the keys are as before there were any */
        tlv(h, 8, r->rounds, (uint32_t)strlen(r->rounds));
    }
    /* KV dtype and window are part of the layout, so they are in its id. */
    bt_sha256_finish(h, key_p->b);
}

void bt_kv_key_next(const struct bt_kv_key *parent, const uint32_t *tokens, uint32_t n,
                    struct bt_kv_key *key_p)
{
    struct bt_sha256 *h = bt_sha256_create();
    bt_sha256_update(h, parent->b, sizeof(parent->b));
    bt_sha256_update(h, tokens, (size_t)n * sizeof(tokens[0])); /* only for little-endian hosts */
    bt_sha256_finish(h, key_p->b);
}

uint32_t bt_kv_keys(const struct bt_kv_key *root, const uint32_t *tokens, uint32_t n,
                    uint32_t block_tokens, struct bt_kv_key *keys)
{
    uint32_t blocks = n / block_tokens;
    const struct bt_kv_key *parent = root;
    for (uint32_t i = 0; i < blocks; i++) {
        bt_kv_key_next(parent, tokens + (size_t)i * block_tokens, block_tokens, &keys[i]);
        parent = &keys[i];
    }
    return blocks;
}

uint32_t bt_kv_tenant_tag(const char *name)
{
    if (name[0] == '\0') {
        return 0;
    }
    uint32_t tag = (uint32_t)(bt_hash64(name, strlen(name), 0) >> 32);
    return tag == 0 || tag == UINT32_MAX ? 1 : tag;
}
