/* Which ids of a model have a token. Embeddings often have more rows than the tokenizer has tokens
 * (rounded up for the hardware): such an id has no text, so no back end may draw it. Read once when
 * an engine opens, then only read; any thread. */
#ifndef BT_ENGINE_IDS_H
#define BT_ENGINE_IDS_H

#include "common/base/base.h"

struct bt_ids {
    uint32_t *known; /* bits [vocab / 32 rounded up] of ids with a token; NULL: all have one */
    uint32_t n, end; /* how many have one, and the last such id plus 1; vocab where known is NULL */
};

/* Reads the ids in dir/tokenizer.json. Without that file every id counts as known (benchmarks that
 * have weights only). ERR_INVALID, ERR_IO: err names the file and the fault. */
bt_status_t bt_ids_load(const char *dir, uint32_t vocab, struct bt_ids *ids, char *err,
                        size_t err_cap) BT_MUST_CHECK;
/* Returns whether the tokenizer.json of both models give each id the same token. ERR_MISMATCH: no.
 * ERR_INVALID: a file cannot be read. err gives the reason. */
bt_status_t bt_ids_same(const char *dir, const char *other, char *err,
                        size_t err_cap) BT_MUST_CHECK;
void bt_ids_cleanup(struct bt_ids *ids);

static inline bool bt_ids_bit(const uint32_t *known, uint32_t id)
{
    return known == NULL || (known[id / 32] >> (id % 32) & 1) != 0;
}

#endif
