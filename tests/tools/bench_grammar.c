/* Compiles grammars and forces documents through them, token by token, for baton-bench grammar and
 * for tests. usage: baton-bench-grammar TOKENIZER_DIR
 *
 * Each line of standard input is a JSON object:
 *   kind   number of enum bt_grammar_kind       text   the spec
 *   docs   [text]: each is encoded, every mask is asked for, and every token is accepted
 *   walks  number of random texts to make, each token drawn from the mask; after walk_tokens tokens
 *          those that close something are preferred; seed
 * Each is answered by a line: status, error, compile_us, masks (the time of each mask and accept in
 * us, of all documents), docs [{ok, at: bytes before the first refused token, why, slowest: bytes
 * before the token with the slowest mask, slowest_us}], walks [{text, ended}]. Times are CPU times
 * of this thread. A mask that contradicts accept ends the program. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/grammar/grammar.h"
#include "common/token/token.h"

struct bench {
    struct bt_tokenizer *tok;
    struct bt_grammar_vocab *v;
    struct bt_grammar_token *tokens;
    struct bt_buf bytes; /* of all tokens */
    uint32_t vocab, eos;
    uint32_t *by_bytes; /* [n_plain] plain tokens, sorted */
    uint32_t n_plain, longest;
    uint32_t *mask;
    uint64_t random;
};

static void die(const char *what, const char *why)
{
    fprintf(stderr, "baton-bench-grammar: %s: %s\n", what, why);
    exit(1);
}

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return 1e6 * (double)t.tv_sec + 1e-3 * (double)t.tv_nsec;
}

/* ---- vocabulary ---- */
static int by_bytes(const void *x, const void *y, void *arg)
{
    const struct bench *b = arg;
    const struct bt_grammar_token *s = &b->tokens[*(const uint32_t *)x];
    const struct bt_grammar_token *t = &b->tokens[*(const uint32_t *)y];
    int c = memcmp(s->bytes, t->bytes, BT_MIN(s->n, t->n));
    return c != 0 ? c : s->n < t->n ? -1 : s->n > t->n;
}

/* The plain token of these bytes. */
static bool find(const struct bench *b, const char *p, uint32_t n, uint32_t *id_p)
{
    uint32_t lo = 0, hi = b->n_plain;
    while (lo < hi) {
        uint32_t mid = (lo + hi) / 2;
        const struct bt_grammar_token *t = &b->tokens[b->by_bytes[mid]];
        int c = memcmp(p, t->bytes, BT_MIN(n, t->n));
        c = c != 0 ? c : n < t->n ? -1 : n > t->n;
        if (c == 0) {
            *id_p = b->by_bytes[mid];
            return true;
        }
        lo = c > 0 ? mid + 1 : lo;
        hi = c < 0 ? mid : hi;
    }
    return false;
}

static void load(struct bench *b, const char *dir)
{
    static const char *const eos[] = {"<|end_of_text|>",      "<|endoftext|>", "<|im_end|>",
                                      "<|eot_id|>",           "</s>",          "<eos>",
                                      "<｜end▁of▁sentence｜>"};
    char err[512] = "";
    if (bt_tokenizer_load(dir, &b->tok, err, sizeof(err)) != BT_OK) {
        die(dir, err);
    }
    b->vocab = bt_tokenizer_vocab(b->tok);
    b->tokens = calloc(b->vocab, sizeof(*b->tokens));
    b->by_bytes = calloc(b->vocab, sizeof(*b->by_bytes));
    b->mask = calloc((b->vocab + 31) / 32, sizeof(*b->mask));
    size_t *at = calloc(b->vocab + 1, sizeof(*at));
    if (b->tokens == NULL || b->by_bytes == NULL || b->mask == NULL || at == NULL) {
        die(dir, "out of memory");
    }
    bt_buf_init(&b->bytes);
    for (uint32_t i = 0; i < b->vocab; i++) {
        at[i] = b->bytes.len;
        if (bt_tokenizer_piece(b->tok, i, &b->bytes) != BT_OK) {
            b->bytes.len = at[i];
        }
        b->tokens[i].n = (uint32_t)(b->bytes.len - at[i]);
        b->tokens[i].special = bt_tokenizer_is_special(b->tok, i);
    }
    for (uint32_t i = 0; i < b->vocab; i++) {
        b->tokens[i].bytes = b->bytes.data + at[i];
        if (b->tokens[i].n > 0 && !b->tokens[i].special) {
            b->by_bytes[b->n_plain++] = i;
            b->longest = BT_MAX(b->longest, b->tokens[i].n);
        }
    }
    free(at);
    qsort_r(b->by_bytes, b->n_plain, sizeof(*b->by_bytes), by_bytes, b);
    bool found = false;
    for (size_t i = 0; i < BT_ARRAY_LEN(eos) && !found; i++) {
        found = bt_tokenizer_find(b->tok, eos[i], &b->eos);
    }
    if (!found) {
        die(dir, "the tokenizer has no token that is known to end a text");
    }
    if (bt_grammar_vocab_create(b->tokens, b->vocab, &b->eos, 1, &b->v) != BT_OK) {
        die(dir, "the vocabulary is refused");
    }
}

static bool allowed(const struct bench *b, uint32_t id)
{
    return b->mask[id >> 5] >> (id & 31) & 1;
}

/* ---- documents ---- */
/* Accepts a token if the mask has it. Returns whether. */
static bool step(struct bench *b, struct bt_matcher *m, uint32_t id, json_t *masks,
                 const char **why)
{
    double from = now_us();
    bt_status_t st = bt_matcher_mask(m, b->mask);
    double mask_us = now_us() - from;
    if (st != BT_OK) {
        *why = bt_status_name(st);
        return false;
    }
    bool may = allowed(b, id);
    from = now_us();
    st = bt_matcher_accept(m, id);
    if (may != (st == BT_OK)) {
        if (st != BT_ERR_INVALID && st != BT_OK) {
            *why = bt_status_name(st);
            return false;
        }
        die("a mask and accept do not agree about a token",
            may ? "only the mask allows it" : "the mask forbids it");
    }
    json_array_append_new(masks, json_real(mask_us + now_us() - from));
    *why = id == b->eos ? "the end" : "a token";
    return may;
}

/* As the tokenizer cuts it. One that changes texts (a space before the first word) is not asked
 * again: then always the longest token. */
static void encode(struct bench *b, const char *text, size_t len, struct bt_tokens *out)
{
    struct bt_buf back;
    bt_buf_init(&back);
    bt_status_t st = bt_tokenizer_encode(b->tok, text, len, false, out);
    for (size_t i = 0; i < out->n; i++) {
        bt_buf_append(&back, b->tokens[out->ids[i]].bytes, b->tokens[out->ids[i]].n);
    }
    if (st != BT_OK || back.len != len || bt_compare(back.data, text, len) != 0) {
        bt_tokens_cleanup(out);
        out->ids = bt_calloc(len + 1, sizeof(*out->ids));
        out->n = 0;
        for (size_t i = 0, n; i < len; i += n) {
            n = BT_MIN(len - i, b->longest);
            while (n > 0 && !find(b, text + i, (uint32_t)n, &out->ids[out->n])) {
                n--;
            }
            if (n == 0) {
                die("a document", "the vocabulary lacks a byte of it");
            }
            out->n++;
        }
    }
    bt_buf_cleanup(&back);
}

static json_t *force(struct bench *b, struct bt_grammar *g, const char *text, size_t len,
                     json_t *masks)
{
    struct bt_tokens ids = {0};
    encode(b, text, len, &ids);
    struct bt_matcher *m = bt_matcher_create(g, b->v);
    if (m == NULL) {
        die("a matcher", "out of memory");
    }
    size_t i = 0, bytes = 0, slowest = 0;
    double most = 0;
    const char *why = "";
    bool ok = true;
    for (; ok && i < ids.n; i++) {
        ok = step(b, m, ids.ids[i], masks, &why);
        double us = json_real_value(json_array_get(masks, json_array_size(masks) - 1));
        slowest = ok && us > most ? bytes : slowest;
        most = ok ? BT_MAX(us, most) : most;
        bytes += ok ? b->tokens[ids.ids[i]].n : 0;
    }
    ok = ok && step(b, m, b->eos, masks, &why);
    bt_matcher_destroy(m);
    bt_tokens_cleanup(&ids);
    return json_pack("{s:b,s:I,s:s,s:I,s:f}", "ok", ok, "at", (json_int_t)bytes, "why",
                     ok ? "" : why, "slowest", (json_int_t)slowest, "slowest_us", most);
}

/* ---- random texts ---- */
static uint32_t draw(struct bench *b, uint32_t n)
{
    b->random ^= b->random << 13;
    b->random ^= b->random >> 7;
    b->random ^= b->random << 17;
    return (uint32_t)(b->random % n);
}

static bool closes(const struct bt_grammar_token *t)
{
    for (uint32_t i = 0; i < t->n; i++) {
        if (strchr("\"}] \n", ((const char *)t->bytes)[i]) == NULL) {
            return false;
        }
    }
    return t->n > 0 && !t->special;
}

/* A token of the mask: any, or while the text is to end one that closes something. */
static uint32_t pick(struct bench *b, bool end)
{
    uint32_t n = 0, n_close = 0, any = UINT32_MAX, close = UINT32_MAX;
    if (end && allowed(b, b->eos)) {
        return b->eos;
    }
    for (uint32_t id = 0; id < b->vocab; id++) {
        if (!allowed(b, id)) {
            continue;
        }
        if (draw(b, ++n) == 0) {
            any = id;
        }
        if (closes(&b->tokens[id]) && draw(b, ++n_close) == 0) {
            close = id;
        }
    }
    return close != UINT32_MAX && draw(b, 8) < (end ? 7 : 2) ? close : any;
}

static json_t *walk(struct bench *b, struct bt_grammar *g, uint32_t most)
{
    struct bt_matcher *m = bt_matcher_create(g, b->v);
    struct bt_buf text;
    bt_buf_init(&text);
    bool ended = false;
    for (uint32_t i = 0; i < 8 * most && !ended; i++) {
        bt_status_t st = m != NULL ? bt_matcher_mask(m, b->mask) : BT_ERR_EXHAUSTED;
        uint32_t id = st == BT_OK ? pick(b, i >= most) : UINT32_MAX;
        if (st == BT_ERR_EXHAUSTED) {
            break;
        }
        if (id == UINT32_MAX || bt_matcher_accept(m, id) != BT_OK) {
            die("a walk", id == UINT32_MAX ? "a mask is empty" : "a token of the mask is refused");
        }
        ended = id == b->eos;
        if (!ended) {
            bt_buf_append(&text, b->tokens[id].bytes, b->tokens[id].n);
        }
    }
    json_t *s = json_stringn(text.data != NULL ? text.data : "", text.len);
    if (s == NULL && ended) {
        die("a walk", "the text is not UTF-8");
    }
    json_t *out = json_pack("{s:o,s:b}", "text", s != NULL ? s : json_string(""), "ended", ended);
    bt_buf_cleanup(&text);
    bt_matcher_destroy(m);
    return out;
}

/* ---- lines ---- */
static json_t *answer(struct bench *b, const json_t *job)
{
    const json_t *text = json_object_get(job, "text"), *docs = json_object_get(job, "docs");
    struct bt_grammar_spec spec = {
        .kind = (enum bt_grammar_kind)json_integer_value(json_object_get(job, "kind")),
        .text = json_string_value(text),
        .len = json_string_length(text)};
    char err[1024] = "";
    struct bt_grammar *g = NULL;
    double from = now_us();
    bt_status_t st = bt_grammar_compile(&spec, &g, err, sizeof(err));
    json_t *out =
        json_pack("{s:s,s:s,s:f,s:[],s:[],s:[]}", "status", bt_status_name(st), "error",
                  st == BT_OK ? "" : err, "compile_us", now_us() - from, "masks", "docs", "walks");
    if (out == NULL) {
        die("an answer", "an error text is not UTF-8");
    }
    if (st != BT_OK) {
        return out;
    }
    for (size_t i = 0; i < json_array_size(docs); i++) {
        const json_t *d = json_array_get(docs, i);
        json_array_append_new(json_object_get(out, "docs"),
                              force(b, g, json_string_value(d), json_string_length(d),
                                    json_object_get(out, "masks")));
    }
    b->random = 0x9e3779b97f4a7c15ull ^ (uint64_t)json_integer_value(json_object_get(job, "seed"));
    json_int_t walks = json_integer_value(json_object_get(job, "walks"));
    json_int_t most = json_integer_value(json_object_get(job, "walk_tokens"));
    for (json_int_t i = 0; i < walks; i++) {
        json_array_append_new(json_object_get(out, "walks"), walk(b, g, (uint32_t)most));
    }
    bt_grammar_unref(g);
    return out;
}

static const char help[] =
    "usage: baton-bench-grammar TOKENIZER_DIR\n"
    "\n"
    "Compiles grammars and forces documents through them, token by token.\n"
    "`baton-bench grammar` runs it; start that one.\n"
    "\n"
    "Each line of standard input is a JSON object with these fields:\n"
    "  kind         1 JSON schema, 2 JSON object, 3 regular expression, 4 choices,\n"
    "               5 GBNF, 6 tags\n"
    "  text         the grammar\n"
    "  docs         documents to force through it\n"
    "  walks        how many random texts to make; also walk_tokens, seed\n"
    "Each line is answered by one: status, error, times, docs and walks.\n";

int main(int argc, char **argv)
{
    struct bench b = {0};
    char *line = NULL;
    size_t cap = 0;
    ssize_t n;
    if (argc == 2 && strcmp(argv[1], "--help") == 0) {
        fputs(help, stdout);
        return 0;
    }
    if (argc != 2) {
        fputs("usage: baton-bench-grammar TOKENIZER_DIR\n", stderr);
        return 2;
    }
    load(&b, argv[1]);
    while ((n = getline(&line, &cap, stdin)) > 0) {
        json_error_t e;
        json_t *job = json_loadb(line, (size_t)n, JSON_ALLOW_NUL, &e);
        if (job == NULL) {
            die("a line of standard input", e.text);
        }
        json_t *out = answer(&b, job);
        if (json_dumpf(out, stdout, JSON_COMPACT) != 0 || putchar('\n') == EOF ||
            fflush(stdout) != 0) {
            die("standard output", "cannot be written");
        }
        json_decref(out);
        json_decref(job);
    }
    free(line);
    bt_grammar_vocab_destroy(b.v);
    bt_buf_cleanup(&b.bytes);
    free(b.tokens);
    free(b.by_bytes);
    free(b.mask);
    bt_tokenizer_destroy(b.tok);
    return 0;
}
