/* From tokens to text; see emit.h. */
#include "conductor/request/emit.h"

/* How many prompt tokens the detokenizer gets: enough for a character that the prompt begins and
 * the first generated token ends. */
#define SEED_TOKENS 16

void bt_emit_init(struct bt_emit *e, const struct bt_tokenizer *tok, const struct bt_gen_spec *spec)
{
    e->detok = bt_detok_create(tok, spec->skip_special);
    if (spec->kept != NULL) {
        bt_detok_keep(e->detok, spec->kept->ids, spec->kept->n);
    }
    e->stop = bt_stop_create(spec->stop, spec->include_stop);
    e->include_stop = spec->include_stop;
    e->text_len = 0;
    bt_buf_init(&e->raw);
    size_t n = BT_MIN(spec->prompt.n, (size_t)SEED_TOKENS);
    bt_detok_seed(e->detok, spec->prompt.ids + spec->prompt.n - n, n);
}

void bt_emit_cleanup(struct bt_emit *e)
{
    bt_detok_destroy(e->detok);
    bt_stop_destroy(e->stop);
    bt_buf_cleanup(&e->raw);
    e->detok = NULL;
    e->stop = NULL;
}

static const char *feed(struct bt_emit *e, bool look, struct bt_buf *out)
{
    e->text_len += (uint32_t)e->raw.len;
    if (e->raw.len == 0) {
        return NULL;
    }
    if (!look) {
        bt_stop_pass(e->stop, e->raw.data, e->raw.len, out);
        return NULL;
    }
    return bt_stop_feed(e->stop, e->raw.data, e->raw.len, out);
}

bt_status_t bt_emit_token(struct bt_emit *e, uint32_t token, bool ends_by_id, bool look,
                          struct bt_buf *out, uint32_t *offset_p, const char **stop_p)
{
    *offset_p = e->text_len;
    *stop_p = NULL;
    if (ends_by_id && !e->include_stop) {
        return BT_OK;
    }
    bt_buf_clear(&e->raw);
    bt_status_t st = bt_detok_push(e->detok, token, &e->raw);
    if (st == BT_OK) {
        *stop_p = feed(e, look, out);
    }
    return st;
}

void bt_emit_end(struct bt_emit *e, bool look, struct bt_buf *out, const char **stop_p)
{
    bt_buf_clear(&e->raw);
    bt_detok_flush(e->detok, &e->raw);
    *stop_p = feed(e, look, out);
    if (*stop_p == NULL) {
        bt_stop_flush(e->stop, out);
    }
}
