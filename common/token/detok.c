/* Incremental detokenizer: holds back bytes that may still become a character. Used by the one
 * thread of its tokenizer. */
#include <stdlib.h>

#include "common/token/token_priv.h"

struct bt_detok {
    const struct bt_tokenizer *t;
    bool skip_special;
    bool first;           /* no token's text was returned yet */
    const uint32_t *kept; /* special tokens that are not skipped */
    size_t n_kept;
    struct bt_buf tail; /* at most 3 bytes between calls */
};

struct bt_detok *bt_detok_create(const struct bt_tokenizer *t, bool skip_special)
{
    struct bt_detok *d = bt_calloc(1, sizeof(*d));
    d->t = t;
    d->skip_special = skip_special;
    d->first = true;
    return d;
}

void bt_detok_keep(struct bt_detok *d, const uint32_t *ids, size_t n)
{
    d->kept = ids;
    d->n_kept = n;
}

static bool skipped(const struct bt_detok *d, uint32_t id)
{
    if (!d->skip_special || !bt_tokenizer_is_special(d->t, id)) {
        return false;
    }
    for (size_t i = 0; i < d->n_kept; i++) {
        if (d->kept[i] == id) {
            return false;
        }
    }
    return true;
}

void bt_detok_destroy(struct bt_detok *d)
{
    if (d != NULL) {
        bt_buf_cleanup(&d->tail);
        free(d);
    }
}

bt_status_t bt_detok_push(struct bt_detok *d, uint32_t id, struct bt_buf *out)
{
    if (id >= bt_tokenizer_vocab(d->t)) {
        return BT_ERR_INVALID;
    }
    if (skipped(d, id)) {
        return BT_OK;
    }
    size_t at = d->tail.len;
    bt_status_t st = bt_tokenizer_piece(d->t, id, &d->tail);
    BT_ASSERT(st == BT_OK);
    if (d->first && d->t->decoder.strip_first && d->tail.len > at && d->tail.data[at] == ' ') {
        bt_buf_consume(&d->tail, 1); /* at is 0: nothing was held back before */
    }
    d->first = false;
    size_t keep = bt_utf8_append_lossy(out, d->tail.data, d->tail.len, false);
    bt_buf_consume(&d->tail, d->tail.len - keep);
    return BT_OK;
}

void bt_detok_seed(struct bt_detok *d, const uint32_t *ids, size_t n)
{
    struct bt_buf gone;
    bt_buf_init(&gone);
    for (size_t i = 0; i < n; i++) {
        (void)!bt_detok_push(d, ids[i], &gone); /* an unknown id in a prompt has no text */
    }
    bt_buf_cleanup(&gone);
}

void bt_detok_flush(struct bt_detok *d, struct bt_buf *out)
{
    bt_utf8_append_lossy(out, d->tail.data, d->tail.len, true);
    bt_buf_clear(&d->tail);
    d->first = true;
}
