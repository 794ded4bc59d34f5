/* Hash chains over a sequence's tokens. Pure: see match.h. */
#include "common/spec/match.h"

#define SUFFIX_GRAM 2
#define NGRAM_GRAM  3

/* A power of two, between a half and one head for each token. */
static uint32_t heads_for(uint32_t len_max)
{
    uint32_t heads = 64;
    while (heads < len_max / 2 && heads < 1u << 30) {
        heads *= 2;
    }
    return heads;
}

size_t bt_spec_match_bytes(uint32_t len_max)
{
    return sizeof(struct bt_spec_match) + ((size_t)heads_for(len_max) + len_max) * sizeof(uint32_t);
}

void bt_spec_match_init(struct bt_spec_match *m, bt_spec_kind_t kind, uint32_t len_max)
{
    m->len_max = len_max;
    m->mask = heads_for(len_max) - 1;
    m->gram = kind == BT_SPEC_NGRAM ? NGRAM_GRAM : SUFFIX_GRAM;
    m->chain = kind == BT_SPEC_NGRAM ? 1 : BT_SPEC_CHAIN;
    m->n = 0;
}

/* The head of the gram that ends before `end`. The multipliers are odd; the upper bits are mixed
 * best. */
static uint32_t head_of(const struct bt_spec_match *m, const uint32_t *tokens, uint32_t end)
{
    uint64_t h = 0;
    for (uint32_t i = end - m->gram; i < end; i++) {
        h = (h ^ tokens[i]) * 0x9e3779b97f4a7c15ull;
        h ^= h >> 32;
    }
    return (uint32_t)h & m->mask;
}

bool bt_spec_match_extend(struct bt_spec_match *m, const uint32_t *tokens, uint32_t n,
                          uint32_t most)
{
    uint32_t *before = m->links + m->mask + 1;
    uint32_t end = BT_MIN(BT_MIN(n, m->len_max), m->n + BT_MIN(most, UINT32_MAX - m->n));
    for (; m->n < end; m->n++) {
        if (m->n + 1 >= m->gram) {
            uint32_t *head = &m->links[head_of(m, tokens, m->n + 1)];
            before[m->n] = *head;
            *head = m->n + 1;
        }
    }
    return m->n == n;
}

/* How many last tokens of tokens[0, a) and tokens[0, b) are the same; a < b. */
static uint32_t common_suffix(const uint32_t *tokens, uint32_t a, uint32_t b)
{
    uint32_t n = 0, most = BT_MIN(a, (uint32_t)BT_SPEC_MATCH_MAX);
    while (n < most && tokens[a - 1 - n] == tokens[b - 1 - n]) {
        n++;
    }
    return n;
}

void bt_spec_match_find(const struct bt_spec_match *m, const uint32_t *tokens, uint32_t n,
                        uint32_t most, struct bt_spec_draft *d)
{
    const uint32_t *before = m->links + m->mask + 1;
    uint32_t best = 0;
    d->n = d->match = 0;
    if (n < m->gram || m->n != n) {
        return;
    }
    /* the newest place is the end of the sequence itself */
    uint32_t at = before[n - 1];
    for (uint32_t i = 0; i < m->chain && at != 0 && d->match < BT_SPEC_MATCH_MAX; i++) {
        uint32_t len = common_suffix(tokens, at, n);
        /* the other places in this chain only have the same head */
        if (len >= m->gram && len > d->match) {
            d->match = len;
            best = at;
        }
        at = before[at - 1];
    }
    /* At the end of the text the draft continues with its own beginning: a text with a period
     * repeats itself. */
    most = d->match > 0 ? BT_MIN(most, (uint32_t)BT_SPEC_MAX) : 0;
    for (; d->n < most; d->n++) {
        uint32_t from = best + d->n;
        d->tokens[d->n] = from < n ? tokens[from] : d->tokens[from - n];
    }
}
