/* The masks of one row: its matcher catches up with the row's tokens, then says what may follow.
 * Runs on a mask thread while the engine thread leaves the row alone. */
#include <string.h>

#include "common/worker/mask.h"
#include "common/worker/request.h"

#define FORCED_BYTES 128 /* of text that is looked ahead: 16 drafts have fewer, mostly */
#define FORCED_LEAST 4   /* with less there is hardly a token to try */

/* Goes on to the row's last known token. Those that another worker or an earlier epoch has drawn
 * come from outside: they may be wrong. */
static bt_status_t catch_up(struct bt_matcher *m, const struct bt_wreq *r)
{
    uint32_t n = r->len - r->sub->n_prompt;
    bt_status_t st = BT_OK;
    while (st == BT_OK && bt_matcher_tokens(m) < n) {
        st = bt_matcher_accept(m, r->tokens[r->sub->n_prompt + bt_matcher_tokens(m)]);
    }
    return st;
}

/* The answer shall have min_new tokens. Where the grammar allows nothing but its end, it ends. */
static void forbid_end(const struct bt_wvocab *v, uint32_t *bits, uint32_t words)
{
    const uint32_t *eos = v->eos;
    uint32_t had[BT_ENGINE_MAX_EOS], any = 0;
    for (uint32_t i = 0; i < v->n_eos; i++) {
        had[i] = bits[eos[i] / 32] & 1u << eos[i] % 32;
        bits[eos[i] / 32] &= ~(1u << eos[i] % 32);
    }
    for (uint32_t i = 0; i < words; i++) {
        any |= bits[i];
    }
    for (uint32_t i = 0; i < v->n_eos && any == 0; i++) {
        bits[eos[i] / 32] |= had[i];
    }
}

static bool ends(const struct bt_wvocab *v, uint32_t token)
{
    bool is = false;
    for (uint32_t i = 0; i < v->n_eos; i++) {
        is |= v->eos[i] == token;
    }
    return is;
}

/* What must follow `at` known tokens and drafts, if it is more than a token or two. */
static void look_ahead(struct bt_matcher *m, const struct bt_wvocab *v, uint32_t at,
                       struct bt_wmatch *match)
{
    char text[FORCED_BYTES];
    size_t n = v->tok != NULL ? bt_matcher_forced(m, text, sizeof(text)) : 0;
    match->forced_at = at;
    match->n_forced =
        n < FORCED_LEAST ? 0
                         : bt_wvocab_tokens(v, text, n, match->forced, BT_ARRAY_LEN(match->forced));
}

bt_status_t bt_wmask_make(const struct bt_wmask_job *j, const struct bt_wvocab *v, uint32_t *bits,
                          uint32_t words)
{
    struct bt_wreq *r = j->r;
    const struct bt_wgrammar *g = r->sub->grammar;
    uint32_t known = r->len - r->sub->n_prompt, n = 0;
    if (r->match.matcher == NULL) {
        r->match.matcher = bt_matcher_create(g->grammar, v->vocab);
    }
    struct bt_matcher *m = r->match.matcher;
    if (m == NULL) {
        return BT_ERR_EXHAUSTED;
    }
    bt_status_t st = catch_up(m, r);
    while (st == BT_OK) {
        uint32_t *row = bits + (size_t)(j->at + n) * words;
        st = bt_matcher_mask(m, row);
        if (st == BT_OK && known + n < g->min_new) {
            forbid_end(v, row, words);
        }
        if (st != BT_OK || n == j->n_draft || ends(v, j->drafts[n])) {
            break;
        }
        st = bt_matcher_accept(m, j->drafts[n]);
        if (st == BT_ERR_INVALID) { /* this draft is not drawn: nor are those behind it */
            st = BT_OK;
            break;
        }
        n += st == BT_OK;
    }
    if (st == BT_OK) {
        look_ahead(m, v, r->len + n, &r->match);
    }
    for (uint32_t i = n + 1; st == BT_OK && i <= j->n_draft; i++) {
        memset(bits + (size_t)(j->at + i) * words, 0xff, words * sizeof(*bits));
    }
    bt_matcher_rollback(m, n);
    return st;
}
