/* Byte-pair encoding of one word: the pair of lowest rank merges first, the leftmost among equals
 * (Sennrich et al. 2016, with ranks as in GPT-2). A heap of candidates over a linked list keeps a
 * word of n symbols at O(n log n). Scratch and cache belong to the tokenizer's one user thread. */
#include <stdlib.h>
#include <string.h>

#include "common/base/map.h"
#include "common/token/token_priv.h"

#define SCRATCH_KEEP 4096 /* symbols kept between words */

void bt_bpe_cleanup(struct bt_bpe *b)
{
    free(b->symbols);
    free(b->heap);
    free(b->cache);
    memset(b, 0, sizeof(*b));
}

void bt_bpe_trim(struct bt_bpe *b)
{
    if (b->symbols_cap > SCRATCH_KEEP) {
        free(b->symbols);
        b->symbols = NULL;
        b->symbols_cap = 0;
    }
    if (b->heap_cap > SCRATCH_KEEP) {
        free(b->heap);
        b->heap = NULL;
        b->heap_cap = 0;
    }
}

void bt_tokens_push(struct bt_tokens *t, uint32_t id)
{
    if (t->n == t->cap) {
        t->cap = t->cap == 0 ? 64 : t->cap * 2;
        t->ids = bt_realloc(t->ids, t->cap * sizeof(*t->ids));
    }
    t->ids[t->n++] = id;
}

void bt_tokens_cleanup(struct bt_tokens *t)
{
    free(t->ids);
    *t = (struct bt_tokens){0};
}

static bool cand_less(const struct bt_bpe_cand *a, const struct bt_bpe_cand *b)
{
    return a->rank < b->rank || (a->rank == b->rank && a->pos < b->pos);
}

static void heap_push(struct bt_bpe *b, struct bt_bpe_cand c)
{
    if (b->heap_n == b->heap_cap) {
        b->heap_cap = b->heap_cap == 0 ? 256 : b->heap_cap * 2;
        b->heap = bt_realloc(b->heap, b->heap_cap * sizeof(*b->heap));
    }
    size_t i = b->heap_n++;
    while (i > 0 && cand_less(&c, &b->heap[(i - 1) / 2])) {
        b->heap[i] = b->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    b->heap[i] = c;
}

static struct bt_bpe_cand heap_pop(struct bt_bpe *b)
{
    struct bt_bpe_cand top = b->heap[0], last = b->heap[--b->heap_n];
    size_t i = 0, child;
    while ((child = 2 * i + 1) < b->heap_n) {
        if (child + 1 < b->heap_n && cand_less(&b->heap[child + 1], &b->heap[child])) {
            child++;
        }
        if (!cand_less(&b->heap[child], &last)) {
            break;
        }
        b->heap[i] = b->heap[child];
        i = child;
    }
    b->heap[i] = last;
    return top;
}

static void push_pair(struct bt_bpe *b, const struct bt_vocab *v, int32_t pos)
{
    int32_t next = pos < 0 ? -1 : b->symbols[pos].next;
    if (next < 0) {
        return;
    }
    uint32_t left = b->symbols[pos].id, right = b->symbols[next].id;
    const struct bt_merge *m = bt_vocab_merge_get(v, left, right);
    if (m != NULL) {
        heap_push(b, (struct bt_bpe_cand){m->rank, pos, left, right});
    }
}

static size_t add_symbol(struct bt_bpe *b, size_t n, uint32_t id)
{
    if (n == b->symbols_cap) {
        b->symbols_cap = b->symbols_cap == 0 ? 256 : b->symbols_cap * 2;
        b->symbols = bt_realloc(b->symbols, b->symbols_cap * sizeof(*b->symbols));
    }
    b->symbols[n] =
        (struct bt_bpe_symbol){.id = id, .prev = (int32_t)n - 1, .next = (int32_t)n + 1, .len = 1};
    return n + 1;
}

/* Adds a character that the vocabulary lacks: as its bytes, as the unknown token, or not at all (as
 * the reference implementation does). */
static size_t add_unknown(struct bt_bpe *b, const struct bt_vocab *v, size_t n, const char *p,
                          size_t len)
{
    if (b->byte_fallback) {
        bool all = true;
        for (size_t i = 0; i < len; i++) {
            all = all && v->byte_id[(uint8_t)p[i]] != BT_TOKEN_NONE;
        }
        if (all) {
            for (size_t i = 0; i < len; i++) {
                n = add_symbol(b, n, v->byte_id[(uint8_t)p[i]]);
            }
            return n;
        }
    }
    if (b->unk_id == BT_TOKEN_NONE || (b->fuse_unk && n > 0 && b->symbols[n - 1].id == b->unk_id)) {
        return n;
    }
    return add_symbol(b, n, b->unk_id);
}

static size_t split_symbols(struct bt_bpe *b, const struct bt_vocab *v, const char *word,
                            size_t len)
{
    size_t n = 0;
    if (b->byte_level) {
        for (size_t i = 0; i < len; i++) {
            uint32_t id = v->byte_id[(uint8_t)word[i]];
            n = id != BT_TOKEN_NONE ? add_symbol(b, n, id) : add_unknown(b, v, n, word + i, 1);
        }
        return n;
    }
    for (size_t i = 0; i < len;) {
        uint32_t cp;
        size_t k = bt_utf8_decode(word + i, word + len, &cp);
        BT_ASSERT(k > 0);
        uint32_t id = bt_vocab_find(v, word + i, k);
        if (id != BT_TOKEN_NONE && (v->flags[id] & BT_TOK_MODEL) != 0) {
            n = add_symbol(b, n, id);
        } else {
            n = add_unknown(b, v, n, word + i, k);
        }
        i += k;
    }
    return n;
}

static void merge_all(struct bt_bpe *b, const struct bt_vocab *v, size_t n)
{
    b->symbols[n - 1].next = -1;
    b->heap_n = 0;
    for (size_t i = 0; i + 1 < n; i++) {
        push_pair(b, v, (int32_t)i);
    }
    for (size_t k = 1; b->heap_n > 0; k++) {
        if (k % BT_LOOK == 0 && bt_token_stopped(b->watch)) {
            return; /* bt_tokenizer_encode checks again, and drops the word */
        }
        struct bt_bpe_cand c = heap_pop(b);
        struct bt_bpe_symbol *l = &b->symbols[c.pos];
        if (l->len == 0 || l->next < 0 || l->id != c.left || b->symbols[l->next].id != c.right) {
            continue; /* one of the two was merged already */
        }
        struct bt_bpe_symbol *r = &b->symbols[l->next];
        l->id = bt_vocab_merge_get(v, c.left, c.right)->id;
        r->len = 0;
        l->next = r->next;
        if (l->next >= 0) {
            b->symbols[l->next].prev = c.pos;
        }
        push_pair(b, v, l->prev);
        push_pair(b, v, c.pos);
    }
}

void bt_bpe_encode_word(struct bt_bpe *b, const struct bt_vocab *v, const char *word, size_t len,
                        struct bt_tokens *out)
{
    struct bt_word_entry *entry = NULL;
    if (len <= sizeof(entry->word)) {
        entry = &b->cache[bt_hash64(word, len, 1) & (BT_WORD_CACHE - 1)];
        if (entry->len == len && memcmp(entry->word, word, len) == 0) {
            for (uint8_t i = 0; i < entry->n; i++) {
                bt_tokens_push(out, entry->ids[i]);
            }
            return;
        }
    }
    size_t before = out->n;
    uint32_t whole = BT_TOKEN_NONE;
    if (b->ignore_merges) {
        whole = b->byte_level ? bt_vocab_find_bytes(v, word, len) : bt_vocab_find(v, word, len);
        if (whole != BT_TOKEN_NONE && (v->flags[whole] & BT_TOK_MODEL) == 0) {
            whole = BT_TOKEN_NONE;
        }
    }
    if (whole != BT_TOKEN_NONE) {
        bt_tokens_push(out, whole);
    } else {
        size_t n = split_symbols(b, v, word, len);
        if (n > 0) {
            merge_all(b, v, n);
        }
        for (int32_t i = n > 0 ? 0 : -1; i >= 0; i = b->symbols[i].next) {
            bt_tokens_push(out, b->symbols[i].id);
        }
    }
    size_t made = out->n - before;
    if (entry != NULL && made <= BT_ARRAY_LEN(entry->ids)) {
        entry->len = (uint8_t)len;
        entry->n = (uint8_t)made;
        memcpy(entry->word, word, len);
        memcpy(entry->ids, out->ids + before, made * sizeof(uint32_t));
    }
}
