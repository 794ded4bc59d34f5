/* Finds added tokens in a text: the leftmost one, and there the longest, with a search in a sorted
 * list that is narrowed byte by byte. Pure after bt_added_index. */
#include <stdlib.h>
#include <string.h>

#include "common/token/token_priv.h"

void bt_added_cleanup(struct bt_added_set *s)
{
    bt_buf_cleanup(&s->pool);
    free(s->items);
    pcre2_code_free(s->word);
    *s = (struct bt_added_set){0};
}

void bt_added_put(struct bt_added_set *s, struct bt_added item, const char *match, size_t len)
{
    if (s->n == s->cap) {
        s->cap = s->cap == 0 ? 16 : s->cap * 2;
        s->items = bt_realloc(s->items, s->cap * sizeof(*s->items));
    }
    item.match = (struct bt_str_ref){(uint32_t)s->pool.len, (uint32_t)len};
    bt_buf_append(&s->pool, match, len);
    s->items[s->n++] = item;
}

static int compare(const void *a, const void *b, void *pool)
{
    const struct bt_added *x = a, *y = b;
    size_t n = BT_MIN(x->match.len, y->match.len);
    int c = memcmp((char *)pool + x->match.off, (char *)pool + y->match.off, n);
    return c != 0 ? c : (x->match.len > y->match.len) - (x->match.len < y->match.len);
}

void bt_added_index(struct bt_added_set *s)
{
    if (s->n > 0) {
        qsort_r(s->items, s->n, sizeof(*s->items), compare, s->pool.data);
        int code;
        PCRE2_SIZE off;
        s->word =
            pcre2_compile((PCRE2_SPTR) "\\A[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\p{Join_Control}]",
                          PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &code, &off, NULL);
        BT_ASSERT(s->word != NULL);
    }
    size_t i = 0;
    for (unsigned b = 0; b <= 256; b++) {
        while (i < s->n && (uint8_t)s->pool.data[s->items[i].match.off] < b) {
            i++;
        }
        s->first[b] = (uint32_t)i;
    }
}

static int byte_at(const struct bt_added_set *s, size_t item, size_t depth)
{
    struct bt_str_ref r = s->items[item].match;
    return depth < r.len ? (uint8_t)s->pool.data[r.off + depth] : -1;
}

/* First item in [lo, hi) whose byte at `depth` is at least `want`. */
static size_t lower_bound(const struct bt_added_set *s, size_t lo, size_t hi, size_t depth,
                          int want)
{
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (byte_at(s, mid, depth) < want) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo;
}

/* The longest item that text begins with, or NULL. */
static const struct bt_added *longest(const struct bt_added_set *s, const char *text, size_t len)
{
    const struct bt_added *best = NULL;
    size_t lo = s->first[(uint8_t)text[0]], hi = s->first[(uint8_t)text[0] + 1];
    for (size_t depth = 1; lo < hi; depth++) {
        if (byte_at(s, lo, depth) < 0) {
            best = &s->items[lo];
        }
        if (depth == len) {
            break;
        }
        int want = (uint8_t)text[depth];
        lo = lower_bound(s, lo, hi, depth, want);
        hi = lower_bound(s, lo, hi, depth, want + 1);
    }
    return best;
}

static bool is_word(const struct bt_added_set *s, const char *p, size_t n)
{
    pcre2_match_data *data = pcre2_match_data_create(1, NULL);
    BT_ASSERT(data != NULL);
    int rc = pcre2_match(s->word, (PCRE2_SPTR)p, n, 0, PCRE2_NO_UTF_CHECK, data, NULL);
    pcre2_match_data_free(data);
    return rc >= 0;
}

static size_t char_before(const char *text, size_t at)
{
    size_t i = at - 1;
    while (i > 0 && ((uint8_t)text[i] & 0xc0) == 0x80) {
        i--;
    }
    return i;
}

static bool stands_alone(const struct bt_added_set *s, const char *text, size_t len, size_t start,
                         size_t end)
{
    if (start > 0) {
        size_t before = char_before(text, start);
        if (is_word(s, text + before, start - before)) {
            return false;
        }
    }
    return end == len || !is_word(s, text + end, len - end);
}

bool bt_added_next(const struct bt_added_set *s, const char *text, size_t len, size_t *from,
                   size_t done, struct bt_added_hit *hit)
{
    for (size_t i = *from; s->n > 0 && i < len; i++) {
        const struct bt_added *a = longest(s, text + i, len - i);
        if (a == NULL) {
            continue;
        }
        size_t start = i, end = i + a->match.len;
        *from = end;
        if (a->single_word && !stands_alone(s, text, len, start, end)) {
            i = end - 1;
            continue;
        }
        uint32_t cp;
        while (a->lstrip && start > done) {
            size_t before = char_before(text, start);
            if (bt_utf8_decode(text + before, text + start, &cp) == 0 || !bt_utf8_is_space(cp)) {
                break;
            }
            start = before;
        }
        for (size_t k; a->rstrip && (k = bt_utf8_decode(text + end, text + len, &cp)) > 0 &&
                       bt_utf8_is_space(cp);) {
            end += k;
        }
        *hit = (struct bt_added_hit){BT_MAX(start, done), BT_MAX(end, done), a->id};
        *from = BT_MAX(*from, end);
        return true;
    }
    *from = len;
    return false;
}
