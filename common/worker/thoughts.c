/* The budget of reasoning, token by token; see thoughts.h. A reasoning begins at the beginning of
 * the answer, but for white space, and it ends once: so does conductor/reply see it. */
#include "common/worker/thoughts.h"

#include <string.h>

/* A character that is cut off at the end of the budget may take so many more tokens. */
#define REST_MAX 3

enum stage { BEGINNING, BEFORE, WITHIN, FORCING, OVER };

/* Goes on by a byte; returns how many bytes of the marker are there now. */
static uint8_t match(const struct bt_wmarker *m, uint8_t n, char c)
{
    if (m->text[n] == c) {
        return (uint8_t)(n + 1);
    }
    /* The longest end of what was there, and c, with which the marker begins. */
    for (uint8_t k = n; k > 0; k--) {
        if (m->text[k - 1] == c && memcmp(m->text, m->text + n - (k - 1), k - 1u) == 0) {
            return k;
        }
    }
    return 0;
}

static bool is_space(char c)
{
    return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

static void count_rest(struct bt_wthoughts *t, uint8_t c)
{
    if ((c & 0xc0) == 0x80) {
        t->rest = (uint8_t)(t->rest - (t->rest > 0));
    } else {
        t->rest = c >= 0xf0 ? 3 : c >= 0xe0 ? 2 : c >= 0xc0 ? 1 : 0;
    }
}

static void go_within(struct bt_wthoughts *t, const struct bt_wthoughts_rule *rule)
{
    t->stage = rule->budget == 0 ? FORCING : WITHIN;
}

static void before(struct bt_wthoughts *t, const struct bt_wthoughts_rule *rule,
                   const struct bt_grammar_token *token, uint32_t id)
{
    if (rule->open.id != BT_WMARKER_AS_TEXT && id == rule->open.id) {
        go_within(t, rule);
        return;
    }
    const char *bytes = token->bytes;
    for (uint32_t i = 0; i < token->n; i++) {
        bool text = rule->open.id == BT_WMARKER_AS_TEXT;
        if (text && bytes[i] == rule->open.text[t->opened]) {
            if (++t->opened == rule->open.len) {
                go_within(t, rule);
                return;
            }
        } else if (t->opened > 0 || !is_space(bytes[i])) {
            t->stage = OVER; /* the answer has no reasoning */
            return;
        }
    }
}

static void within(struct bt_wthoughts *t, const struct bt_wthoughts_rule *rule,
                   const struct bt_grammar_token *token, uint32_t id)
{
    const char *bytes = token->bytes;
    t->n_thought++;
    for (uint32_t k = 0; k < rule->n_ends; k++) {
        const struct bt_wmarker *m = &rule->ends[k];
        bool text = m->id == BT_WMARKER_AS_TEXT, ends = id == m->id;
        for (uint32_t i = 0; text && !ends && i < token->n; i++) {
            t->matched[k] = match(m, t->matched[k], bytes[i]);
            ends = t->matched[k] == m->len;
        }
        if (ends) {
            t->stage = OVER;
            return;
        }
    }
    for (uint32_t i = 0; i < token->n; i++) {
        count_rest(t, (uint8_t)bytes[i]);
    }
    if (t->n_thought >= rule->budget && (t->rest == 0 || t->n_thought - rule->budget >= REST_MAX)) {
        t->stage = FORCING;
    }
}

static void begin(struct bt_wthoughts *t, const struct bt_wthoughts_rule *rule)
{
    t->stage = BEFORE;
    if (rule->begun) {
        go_within(t, rule);
    }
}

void bt_wthoughts_take(struct bt_wthoughts *t, const struct bt_wthoughts_rule *rule,
                       const struct bt_grammar_vocab *v, uint32_t token)
{
    struct bt_grammar_token its = bt_grammar_vocab_token(v, token);
    t->n_tokens++;
    if (t->stage == BEGINNING) {
        begin(t, rule);
    }
    if (t->stage == BEFORE) {
        before(t, rule, &its, token);
    } else if (t->stage == WITHIN) {
        within(t, rule, &its, token);
    } else if (t->stage == FORCING) {
        /* Another token is here only if the grammar has forbidden the forced one, or if another
         * worker did not follow the rule: the answer stays as it is. */
        bool right = token == rule->force[t->n_forced];
        t->n_forced += right;
        t->stage = !right || t->n_forced == rule->n_force ? OVER : FORCING;
    }
}

uint32_t bt_wthoughts_next(const struct bt_wthoughts *t, const struct bt_wthoughts_rule *rule)
{
    struct bt_wthoughts now = *t;
    if (rule->n_force == 0) {
        return BT_WTHOUGHTS_FREE;
    }
    if (now.stage == BEGINNING) {
        begin(&now, rule);
    }
    return now.stage == FORCING ? rule->force[now.n_forced] : BT_WTHOUGHTS_FREE;
}

bool bt_wthoughts_over(const struct bt_wthoughts *t)
{
    return t->stage == OVER;
}
