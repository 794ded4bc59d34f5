/* Block keys: a SHA-256 chain over blocks of token ids, rooted in everything that decides what the
 * bytes of a block mean. Two blocks have equal keys only if their KV is interchangeable. Pure. */
#ifndef BT_KV_KEY_H
#define BT_KV_KEY_H

#include "common/base/base.h"
#include "common/kv/layout.h"

struct bt_kv_key {
    uint8_t b[32];
};

#define BT_KV_SOURCES_MAX 8 /* kvstores from which one prefix is fetched */

struct bt_kv_root {             /* all of it enters the root hash as type-length-value */
    uint8_t weights_digest[32]; /* SHA-256 over the weight files */
    const char *architecture;   /* "LlamaForCausalLM" */
    const struct bt_kv_layout *layout;
    const char *rope;   /* canonical text of the RoPE parameters */
    const char *rounds; /* what rounds KV in a way of its own ("bf16-mlp"); "" where nothing does */
    const uint8_t *salt; /* tenant salt, HMAC(secret, tenant); salt_len 0: shared */
    uint32_t salt_len;
};

/* Root of all chains of a (model, layout, tenant). Format version 1. */
void bt_kv_root_key(const struct bt_kv_root *root, struct bt_kv_key *key_p);

/* key of block i = SHA-256(parent key || token ids as u32 little-endian); n is the block length. */
void bt_kv_key_next(const struct bt_kv_key *parent, const uint32_t *tokens, uint32_t n,
                    struct bt_kv_key *key_p);

/* Keys of all full blocks of tokens[0..n): writes n / block_tokens keys, returns that number. */
uint32_t bt_kv_keys(const struct bt_kv_key *root, const uint32_t *tokens, uint32_t n,
                    uint32_t block_tokens, struct bt_kv_key *keys);

/* The tag that is stored with a tenant's blocks. 0 for "", that is no tenant; a name has neither 0
 * nor UINT32_MAX. */
uint32_t bt_kv_tenant_tag(const char *name);

#endif
