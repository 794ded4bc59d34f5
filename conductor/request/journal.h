/* The journal of one choice: the tokens the client has been given, in order. It accepts a token
 * only for the current epoch, and hands tokens out only at the next offset. Tokens that overtook an
 * earlier one (the first comes from the prefill worker, the rest from the decode worker, over two
 * connections) wait in a small window. No I/O. */
#ifndef BT_CONDUCTOR_JOURNAL_H
#define BT_CONDUCTOR_JOURNAL_H

#include "common/base/base.h"
#include "common/engine/sampling.h"

/* Tokens that may be ahead of a missing one. A fast decode worker is dozens of steps ahead before a
 * busy prefill worker has sent its token. */
#define BT_JOURNAL_WINDOW 4096

/* The finish state that a worker reports with a token. ERROR: it is not a token; Ended gives the
 * reason. */
typedef enum { BT_TOKEN_GOES_ON, BT_TOKEN_STOP, BT_TOKEN_LENGTH, BT_TOKEN_ERROR } bt_token_finish_t;

struct bt_journal_entry {
    uint32_t epoch;
    uint32_t token;
    float logprob;
    bt_token_finish_t finish;
    uint32_t n_top;
    uint32_t top_id[BT_ENGINE_MAX_TOP];
    float top_logprob[BT_ENGINE_MAX_TOP];
};

struct bt_journal {
    uint32_t epoch;  /* current plan's; 0 before the first */
    uint32_t base;   /* tokens before this epoch */
    uint32_t n, cap; /* tokens[0..n) were handed out */
    uint32_t *tokens;
    /* Tokens by offset modulo window_cap (a power of two, at most BT_JOURNAL_WINDOW). An entry of
     * epoch 0 is empty. */
    struct bt_journal_entry *window;
    uint32_t window_cap, waiting; /* entries that are filled */
};

void bt_journal_init(struct bt_journal *j);
void bt_journal_cleanup(struct bt_journal *j);
/* A new plan: offsets start again at 0, after the tokens that were handed out. Waiting tokens are
 * dropped. */
void bt_journal_begin(struct bt_journal *j, uint32_t epoch);
/* A new plan that makes the answer again from its beginning: the tokens that were handed out come
 * once more, and are ERR_EXISTS. */
void bt_journal_again(struct bt_journal *j, uint32_t epoch);
/* Puts a token. offset counts from the submission of e->epoch. OK: kept, see bt_journal_take.
 * ERR_STALE: another epoch. ERR_EXISTS: it was there already. ERR_EXHAUSTED: too far ahead of a
 * missing token. */
bt_status_t bt_journal_put(struct bt_journal *j, uint32_t offset,
                           const struct bt_journal_entry *e) BT_MUST_CHECK;
/* Takes the token at the next offset into the journal. NULL: not there (yet). The entry (but its
 * epoch, which is cleared) is valid until the next put. */
const struct bt_journal_entry *bt_journal_take(struct bt_journal *j);

#endif
