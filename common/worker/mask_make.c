/* The masks of one row: its matcher and its budget of reasoning catch up with the row's tokens,
 * then say what may follow. Runs on a mask thread while the engine thread leaves the row alone. */
#include <string.h>

#include "common/worker/mask.h"
#include "common/worker/request.h"

#define FORCED_BYTES 128 /* of text that is looked ahead: 16 drafts have fewer, mostly */
#define FORCED_LEAST 4   /* with less there is hardly a token to try */

/* What a row has of its constraints: its own, and copies that go on by drafts. */
struct place {
    const struct bt_wgrammar *g;
    const struct bt_wvocab *v;
    struct bt_matcher *m; /* NULL: no grammar */
    struct bt_wthoughts thoughts;
};

static bool has_budget(const struct place *p)
{
    return p->g->thoughts.n_force > 0;
}

static bt_status_t take(struct place *p, uint32_t token)
{
    bt_status_t st = p->m != NULL ? bt_matcher_accept(p->m, token) : BT_OK;
    if (st == BT_OK && has_budget(p)) {
        bt_wthoughts_take(&p->thoughts, &p->g->thoughts, p->v->vocab, token);
    }
    return st;
}

/* Goes on to the row's last known token. Those that another worker or an earlier epoch has drawn
 * come from outside: they may be wrong. */
static bt_status_t catch_up(struct place *p, const struct bt_wreq *r)
{
    const uint32_t *tokens = r->tokens + r->sub->n_prompt;
    uint32_t n = r->len - r->sub->n_prompt;
    bt_status_t st = BT_OK;
    while (st == BT_OK && p->m != NULL && bt_matcher_tokens(p->m) < n) {
        st = bt_matcher_accept(p->m, tokens[bt_matcher_tokens(p->m)]);
    }
    while (has_budget(p) && p->thoughts.n_tokens < n) {
        bt_wthoughts_take(&p->thoughts, &p->g->thoughts, p->v->vocab, tokens[p->thoughts.n_tokens]);
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

/* The rest of the tokens that end the reasoning. */
static uint32_t rest_of_end(const struct place *p, uint32_t *tokens)
{
    const struct bt_wthoughts_rule *rule = &p->g->thoughts;
    if (bt_wthoughts_next(&p->thoughts, rule) == BT_WTHOUGHTS_FREE) {
        return 0;
    }
    uint32_t from = p->thoughts.n_forced;
    uint32_t n = BT_MIN(rule->n_force - from, (uint32_t)BT_SPEC_MAX + 1);
    memcpy(tokens, &rule->force[from], n * sizeof(tokens[0]));
    return n;
}

/* What must follow `at` known tokens and drafts, if it is more than a token or two. */
static void look_ahead(const struct place *p, uint32_t at, struct bt_wmatch *match)
{
    char text[FORCED_BYTES];
    match->forced_at = at;
    match->n_forced = rest_of_end(p, match->forced);
    if (match->n_forced > 0 || p->m == NULL || p->v->tok == NULL) {
        return;
    }
    size_t n = bt_matcher_forced(p->m, text, sizeof(text));
    if (n >= FORCED_LEAST) {
        match->n_forced =
            bt_wvocab_tokens(p->v, text, n, match->forced, BT_ARRAY_LEN(match->forced));
    }
}

/* The mask of what may follow; known: tokens of the answer so far. */
static bt_status_t mask(const struct place *p, uint32_t known, uint32_t *bits, uint32_t words)
{
    if (p->m == NULL) {
        memset(bits, 0xff, words * sizeof(*bits));
    } else {
        bt_status_t st = bt_matcher_mask(p->m, bits);
        if (st != BT_OK) {
            return st;
        }
        if (known < p->g->min_new) {
            forbid_end(p->v, bits, words);
        }
    }
    uint32_t next = bt_wthoughts_next(&p->thoughts, &p->g->thoughts);
    if (next != BT_WTHOUGHTS_FREE && (bits[next / 32] & 1u << next % 32) != 0) {
        memset(bits, 0, words * sizeof(*bits));
        bits[next / 32] = 1u << next % 32;
    }
    return BT_OK;
}

bt_status_t bt_wmask_make(const struct bt_wmask_job *j, const struct bt_wvocab *v, uint32_t *bits,
                          uint32_t words)
{
    struct bt_wreq *r = j->r;
    const struct bt_wgrammar *g = r->sub->grammar;
    uint32_t known = r->len - r->sub->n_prompt, n = 0;
    if (r->match.matcher == NULL && g->grammar != NULL) {
        r->match.matcher = bt_matcher_create(g->grammar, v->vocab);
        if (r->match.matcher == NULL) {
            return BT_ERR_EXHAUSTED;
        }
    }
    struct place p = {g, v, r->match.matcher, r->match.thoughts};
    bt_status_t st = catch_up(&p, r);
    r->match.thoughts = p.thoughts;
    while (st == BT_OK) {
        st = mask(&p, known + n, bits + (size_t)(j->at + n) * words, words);
        if (st != BT_OK || n == j->n_draft || ends(v, j->drafts[n])) {
            break;
        }
        st = take(&p, j->drafts[n]);
        if (st == BT_ERR_INVALID) { /* this draft is not drawn: nor are those behind it */
            st = BT_OK;
            break;
        }
        n += st == BT_OK;
    }
    if (st == BT_OK) {
        look_ahead(&p, r->len + n, &r->match);
    }
    for (uint32_t i = n + 1; st == BT_OK && i <= j->n_draft; i++) {
        memset(bits + (size_t)(j->at + i) * words, 0xff, words * sizeof(*bits));
    }
    if (p.m != NULL) {
        bt_matcher_rollback(p.m, n);
    }
    return st;
}
