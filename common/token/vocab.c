/* The vocabulary: all token strings in one pool, hash tables from strings to ids, the table of
 * merges, and the byte-level alphabet of GPT-2. Filled at load, read-only afterwards. */
#include <stdlib.h>
#include <string.h>

#include "common/base/map.h"
#include "common/token/token_priv.h"

/* Bytes that represent themselves; the other 68 are written as U+0100 and following, in order. */
static bool byte_is_plain(unsigned b)
{
    return (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
}

int bt_char_to_byte(uint32_t cp)
{
    if (cp < 0x100) {
        return byte_is_plain(cp) ? (int)cp : -1;
    }
    if (cp <= 0x120) {
        return (int)(cp - 0x100);
    }
    if (cp <= 0x142) {
        return (int)(cp - 0x121 + 0x7f);
    }
    return cp == 0x143 ? 0xad : -1;
}

void bt_vocab_cleanup(struct bt_vocab *v)
{
    bt_buf_cleanup(&v->pool);
    free(v->content);
    free(v->bytes);
    free(v->flags);
    free(v->by_content.slots);
    free(v->by_bytes.slots);
    free(v->merges);
    memset(v, 0, sizeof(*v));
}

void bt_vocab_reserve(struct bt_vocab *v, uint32_t n)
{
    if (n <= v->n) {
        return;
    }
    v->content = bt_realloc(v->content, n * sizeof(*v->content));
    v->bytes = bt_realloc(v->bytes, n * sizeof(*v->bytes));
    v->flags = bt_realloc(v->flags, n);
    memset(v->content + v->n, 0, (n - v->n) * sizeof(*v->content));
    memset(v->bytes + v->n, 0, (n - v->n) * sizeof(*v->bytes));
    memset(v->flags + v->n, 0, n - v->n);
    v->n = n;
}

static struct bt_str_ref pool_add(struct bt_vocab *v, const char *s, size_t len)
{
    struct bt_str_ref ref = {(uint32_t)v->pool.len, (uint32_t)len};
    bt_buf_append(&v->pool, s, len);
    return ref;
}

void bt_vocab_put(struct bt_vocab *v, uint32_t id, const char *s, size_t len, uint8_t flags)
{
    bt_vocab_reserve(v, id + 1);
    BT_ASSERT((v->flags[id] & BT_TOK_PRESENT) == 0);
    v->content[id] = v->bytes[id] = pool_add(v, s, len);
    v->flags[id] = (uint8_t)(flags | BT_TOK_PRESENT);
}

static const char *ref_str(const struct bt_vocab *v, struct bt_str_ref r)
{
    return v->pool.data + r.off;
}

static void table_init(struct bt_id_table *t, size_t n)
{
    size_t cap = 16;
    while (cap < n * 2) {
        cap *= 2;
    }
    t->slots = bt_calloc(cap, sizeof(*t->slots));
    t->mask = (uint32_t)(cap - 1);
}

static uint32_t *table_slot(const struct bt_vocab *v, const struct bt_id_table *t,
                            const struct bt_str_ref *refs, const char *s, size_t len)
{
    uint32_t i = (uint32_t)bt_hash64(s, len, 0) & t->mask;
    while (t->slots[i] != 0) {
        struct bt_str_ref r = refs[t->slots[i] - 1];
        if (r.len == len && memcmp(ref_str(v, r), s, len) == 0) {
            break;
        }
        i = (i + 1) & t->mask;
    }
    return &t->slots[i];
}

/* Replaces a token in the byte alphabet with the bytes that it represents. */
static void to_bytes(struct bt_vocab *v, uint32_t id)
{
    struct bt_str_ref r = v->content[id];
    char *raw = bt_malloc(r.len + 1);
    size_t n = 0;
    const char *p = ref_str(v, r), *end = p + r.len;
    while (p < end) {
        uint32_t cp;
        size_t k = bt_utf8_decode(p, end, &cp);
        int byte = k == 0 ? -1 : bt_char_to_byte(cp);
        if (byte < 0) { /* the character represents itself */
            free(raw);
            return;
        }
        raw[n++] = (char)byte;
        p += k;
    }
    v->flags[id] |= BT_TOK_ALPHABET;
    if (n != r.len) {
        v->bytes[id] = pool_add(v, raw, n);
    }
    free(raw);
}

bool bt_vocab_index(struct bt_vocab *v, bool byte_level, uint32_t *dup_p)
{
    table_init(&v->by_content, v->n);
    for (uint32_t id = 0; id < v->n; id++) {
        if ((v->flags[id] & BT_TOK_PRESENT) == 0) {
            continue;
        }
        uint32_t *slot = table_slot(v, &v->by_content, v->content, ref_str(v, v->content[id]),
                                    v->content[id].len);
        if (*slot != 0) {
            *dup_p = id;
            return false;
        }
        *slot = id + 1;
    }
    memset(v->byte_id, 0xff, sizeof(v->byte_id));
    if (!byte_level) {
        return true;
    }
    table_init(&v->by_bytes, v->n);
    for (uint32_t id = 0; id < v->n; id++) {
        if ((v->flags[id] & BT_TOK_PRESENT) == 0) {
            continue;
        }
        to_bytes(v, id);
        if ((v->flags[id] & BT_TOK_ALPHABET) == 0 || (v->flags[id] & BT_TOK_MODEL) == 0) {
            continue;
        }
        struct bt_str_ref r = v->bytes[id];
        *table_slot(v, &v->by_bytes, v->bytes, ref_str(v, r), r.len) = id + 1;
        if (r.len == 1) {
            v->byte_id[(uint8_t)*ref_str(v, r)] = id;
        }
    }
    return true;
}

uint32_t bt_vocab_find(const struct bt_vocab *v, const char *s, size_t len)
{
    return *table_slot(v, &v->by_content, v->content, s, len) - 1; /* 0 - 1 = BT_TOKEN_NONE */
}

uint32_t bt_vocab_find_bytes(const struct bt_vocab *v, const char *s, size_t len)
{
    return *table_slot(v, &v->by_bytes, v->bytes, s, len) - 1;
}

void bt_vocab_merges_init(struct bt_vocab *v, size_t n)
{
    size_t cap = 16;
    while (cap < n * 2) {
        cap *= 2;
    }
    v->merges = bt_malloc(cap * sizeof(*v->merges));
    for (size_t i = 0; i < cap; i++) {
        v->merges[i] = (struct bt_merge){.pair = UINT64_MAX};
    }
    v->merge_mask = (uint32_t)(cap - 1);
}

static struct bt_merge *merge_slot(const struct bt_vocab *v, uint64_t pair)
{
    uint64_t h = pair * 0x9e3779b97f4a7c15ull;
    uint32_t i = (uint32_t)(h >> 32) & v->merge_mask;
    while (v->merges[i].pair != UINT64_MAX && v->merges[i].pair != pair) {
        i = (i + 1) & v->merge_mask;
    }
    return &v->merges[i];
}

void bt_vocab_merge_put(struct bt_vocab *v, uint32_t left, uint32_t right, uint32_t rank,
                        uint32_t id)
{
    uint64_t pair = (uint64_t)left << 32 | right;
    *merge_slot(v, pair) = (struct bt_merge){.pair = pair, .rank = rank, .id = id};
}

const struct bt_merge *bt_vocab_merge_get(const struct bt_vocab *v, uint32_t left, uint32_t right)
{
    const struct bt_merge *m = merge_slot(v, (uint64_t)left << 32 | right);
    return m->pair == UINT64_MAX ? NULL : m;
}
