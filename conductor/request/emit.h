/* From tokens to the text a client gets: incremental detokenizer, then the stop matcher. */
#ifndef BT_CONDUCTOR_EMIT_H
#define BT_CONDUCTOR_EMIT_H

#include "conductor/request/journal.h"
#include "conductor/request/request.h"
#include "conductor/request/stop.h"

struct bt_emit {
    struct bt_detok *detok;
    struct bt_stop *stop;
    struct bt_buf raw; /* scratch memory: the last output of the detokenizer */
    uint32_t text_len; /* bytes the detokenizer has given so far */
    bool include_stop;
};

void bt_emit_init(struct bt_emit *e, const struct bt_tokenizer *tok,
                  const struct bt_gen_spec *spec);
void bt_emit_cleanup(struct bt_emit *e);

/* Takes one token. ends_by_id: it is an EOS id, which ends the text and adds nothing to it. look:
 * search for stop strings (not before min_tokens). Appends the text that became final to out.
 * *offset_p: where the token begins in the text. *stop_p: the stop string that is now complete, or
 * NULL. ERR_INVALID: not a token of this vocabulary. */
bt_status_t bt_emit_token(struct bt_emit *e, uint32_t token, bool ends_by_id, bool look,
                          struct bt_buf *out, uint32_t *offset_p,
                          const char **stop_p) BT_MUST_CHECK;
/* No token follows: appends the text that was held back. It may complete a stop string. */
void bt_emit_end(struct bt_emit *e, bool look, struct bt_buf *out, const char **stop_p);

#endif
