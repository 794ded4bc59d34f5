/* The masks of one row: its matcher and its budget of reasoning catch up with the row's tokens,
 * then say what may follow. Runs on a mask thread while the engine thread leaves the row alone. */
#include <string.h>

#include "common/worker/mask.h"
#include "common/worker/request.h"

#define FORCED_BYTES 128 /* of text that is looked ahead: 16 drafts have fewer, mostly */
#define FORCED_LEAST 4   /* with less there is hardly a token to try */

/* Work that the masks of an answer may take in all, in units of bt_matcher_limit: 1 s, and 10 ms
 * for each token. Few grammars come near it. */
#define WORK_FIRST 100000000ull
#define WORK_TOKEN 1000000ull

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

/* Moves the matcher to the last of n tokens behind the prompt. Tokens that another worker or an
 * earlier epoch has drawn come from outside, so they may be wrong. */
static bt_status_t follow(struct bt_matcher *m, const uint32_t *tokens, uint32_t n)
{
    bt_status_t st = BT_OK;
    while (st == BT_OK && bt_matcher_tokens(m) < n) {
        st = bt_matcher_work(m) > WORK_FIRST + n * WORK_TOKEN
                 ? BT_ERR_EXHAUSTED
                 : bt_matcher_accept(m, tokens[bt_matcher_tokens(m)]);
    }
    return st;
}

static bt_status_t catch_up(struct place *p, const uint32_t *tokens, uint32_t n)
{
    bt_status_t st = p->m != NULL ? follow(p->m, tokens, n) : BT_OK;
    while (has_budget(p) && p->thoughts.n_tokens < n) {
        bt_wthoughts_take(&p->thoughts, &p->g->thoughts, p->v->vocab, tokens[p->thoughts.n_tokens]);
    }
    return st;
}

/* Forbids the end of an answer that has fewer than min_new tokens. If the grammar allows nothing
 * else, the answer ends all the same. */
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

/* Finds the text that must follow `at` tokens, known ones and drafts. One or two tokens are not
 * worth a draft. */
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

/* What the grammar allows behind `known` tokens of the answer. */
static bt_status_t allowed(struct bt_matcher *m, const struct bt_wgrammar *g,
                           const struct bt_wvocab *v, uint32_t known, uint32_t *bits,
                           uint32_t words)
{
    bt_status_t st = bt_matcher_mask(m, bits);
    if (st == BT_OK && known < g->min_new) {
        forbid_end(v, bits, words);
    }
    return st;
}

/* The mask of what may follow; known: tokens of the answer so far. ahead: what the grammar allows,
 * if that was made ahead. */
static bt_status_t mask(const struct place *p, uint32_t known, const struct bt_wahead *ahead,
                        uint32_t *bits, uint32_t words)
{
    bt_status_t st = BT_OK;
    if (p->m == NULL) {
        memset(bits, 0xff, words * sizeof(*bits));
    } else if (ahead != NULL && ahead->n == known && ahead->bits != NULL) {
        memcpy(bits, ahead->bits, words * sizeof(*bits));
    } else {
        st = allowed(p->m, p->g, p->v, known, bits, words);
    }
    uint32_t next = bt_wthoughts_next(&p->thoughts, &p->g->thoughts);
    if (st == BT_OK && next != BT_WTHOUGHTS_FREE && (bits[next / 32] & 1u << next % 32) != 0) {
        memset(bits, 0, words * sizeof(*bits));
        bits[next / 32] = 1u << next % 32;
    }
    return st;
}

/* Lets the calls of m, which may be NULL, use what is left of a step's work. */
static void limit(struct bt_matcher *m, uint64_t begun)
{
    if (m != NULL) {
        uint64_t used = bt_matcher_work(m) - begun;
        bt_matcher_limit(m, (uint32_t)(BT_WMASK_STEP_WORK - BT_MIN(used, BT_WMASK_STEP_WORK)));
    }
}

bt_status_t bt_wmask_make(struct bt_wmask_job *j, const struct bt_wvocab *v, uint32_t *bits,
                          uint32_t words)
{
    struct bt_wreq *r = j->r;
    const struct bt_wgrammar *g = r->sub->grammar;
    uint32_t known = r->len - r->sub->n_prompt, n = 0;
    if (r->match.matcher == NULL && g->grammar != NULL) {
        r->match.matcher = bt_matcher_create(g->grammar, v->vocab);
    }
    struct place p = {g, v, r->match.matcher, r->match.thoughts};
    uint64_t begun = p.m != NULL ? bt_matcher_work(p.m) : 0;
    bits += (size_t)j->at * words;
    limit(p.m, begun);
    bt_status_t st = catch_up(&p, r->tokens + r->sub->n_prompt, known);
    r->match.thoughts = p.thoughts;
    st = st == BT_OK ? mask(&p, known, r->match.ahead, bits, words) : st;
    j->n_made = st == BT_OK;
    while (st == BT_OK && n < j->n_draft && !ends(v, j->drafts[n])) {
        limit(p.m, begun);
        st = take(&p, j->drafts[n]);
        if (st == BT_ERR_INVALID) { /* this draft is not drawn: nor are those behind it */
            st = BT_OK;
            break;
        }
        if (st == BT_OK) {
            limit(p.m, begun);
            n++;
            st = mask(&p, known + n, NULL, bits + (size_t)n * words, words);
            j->n_made += st == BT_OK;
        }
    }
    if (st == BT_OK) {
        limit(p.m, begun);
        look_ahead(&p, r->len + n, &r->match);
    }
    for (uint32_t i = j->n_made; i <= j->n_draft; i++) {
        memset(bits + (size_t)i * words, st == BT_OK ? 0xff : 0, words * sizeof(*bits));
    }
    if (p.m != NULL) {
        bt_matcher_rollback(p.m, n);
    }
    return st;
}

void bt_wahead_make(struct bt_wahead *a, const struct bt_wgrammar *g, const struct bt_wvocab *v,
                    uint32_t words)
{
    if (a->matcher == NULL) {
        a->matcher = bt_matcher_create(g->grammar, v->vocab);
    }
    bt_matcher_limit(a->matcher, UINT32_MAX);
    a->status = follow(a->matcher, a->tokens, a->n);
    if (a->status == BT_OK && a->bits != NULL) {
        a->status = allowed(a->matcher, g, v, a->n, a->bits, words);
    }
}
