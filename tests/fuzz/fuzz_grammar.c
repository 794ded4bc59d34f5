/* libFuzzer: grammars and the texts that they allow. The first byte is the kind of the spec, the
 * second chooses the tokens of a walk, the rest is the spec's text. What is refused has a reason.
 * Where it compiles: a mask is never empty before the end, it has exactly the tokens that the
 * matcher accepts, a rollback comes back to the same mask, forced text is accepted, and a text of a
 * JSON schema is JSON. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/grammar/grammar.h"
#include "tests/fuzz/rig.h"

#define STEPS 40u
#define VOCAB 300u
#define WORDS ((VOCAB + 31) / 32)
#define EOS   (VOCAB - 1)

static const char *const pieces[] = {
    "{\"", "\":",   "\": ", "\",", "\", \"", "\"}", "\"},{\"", "\"]", "[\"",     "],[", "},{",
    ", ",  ": ",    "\n  ", "[]",  "{}",     "10",  "1.0",     "e1",  "tr",      "ue",  "false",
    "nul", "\\u00", "ab",   "aa",  "name",   "\"a", "a\"",     "<t",  "\xc3\xa9"};

static struct bt_grammar_token tokens[VOCAB];
static struct bt_grammar_vocab *vocab;

static void make_vocab(void)
{
    static uint8_t bytes[256];
    static const uint32_t eos = EOS;
    for (uint32_t i = 0; i < VOCAB; i++) {
        const char *piece = i >= 256 && i - 256 < BT_ARRAY_LEN(pieces) ? pieces[i - 256] : "";
        tokens[i] = (struct bt_grammar_token){piece, (uint32_t)strlen(piece), false};
        if (i < 256) {
            bytes[i] = (uint8_t)i;
            tokens[i] = (struct bt_grammar_token){&bytes[i], 1, false};
        }
    }
    tokens[EOS - 1] = (struct bt_grammar_token){"<tool_call>", 11, true};
    tokens[EOS] = (struct bt_grammar_token){"</s>", 4, true};
    bt_status_t st = bt_grammar_vocab_create(tokens, VOCAB, &eos, 1, &vocab);
    BT_ASSERT(st == BT_OK);
}

static uint32_t draw(uint32_t *state, uint32_t n)
{
    *state = *state * 1664525u + 1013904223u;
    return (*state >> 8) % n;
}

static bool has(const uint32_t *mask, uint32_t id)
{
    return mask[id >> 5] >> (id & 31) & 1;
}

/* A token that the mask has, or one that it lacks; VOCAB: none. Now and then one that ends
 * something. */
static uint32_t pick(const uint32_t *mask, uint32_t *state, bool want)
{
    static const char ends[] = "\"}],0";
    uint32_t from = draw(state, VOCAB);
    for (uint32_t i = 0; want && draw(state, 2) && i < sizeof(ends) - 1; i++) {
        if (has(mask, (uint8_t)ends[i])) {
            return (uint8_t)ends[i];
        }
    }
    for (uint32_t i = 0; i < VOCAB; i++) {
        uint32_t id = (from + i) % VOCAB;
        if (has(mask, id) == want) {
            return id;
        }
    }
    return VOCAB;
}

/* Whether the matcher has exactly this mask; a limit counts as yes. */
static void same_mask(struct bt_matcher *m, const uint32_t *mask)
{
    uint32_t again[WORDS];
    bt_status_t st = bt_matcher_mask(m, again);
    BT_ASSERT(st == BT_ERR_EXHAUSTED || (st == BT_OK && memcmp(mask, again, sizeof(again)) == 0));
}

static void check_end(enum bt_grammar_kind kind, const char *text, size_t n)
{
    if (kind == BT_GRAMMAR_JSON_SCHEMA || kind == BT_GRAMMAR_JSON_OBJECT) {
        json_error_t e;
        json_t *v = json_loadb(text, n, JSON_DECODE_ANY | JSON_ALLOW_NUL, &e);
        /* jansson has no numbers beyond a double */
        BT_ASSERT(v != NULL || json_error_code(&e) == json_error_numeric_overflow);
        BT_ASSERT(v == NULL || kind == BT_GRAMMAR_JSON_SCHEMA || json_is_object(v));
        json_decref(v);
    }
}

static void walk(struct bt_grammar *g, enum bt_grammar_kind kind, uint32_t seed)
{
    struct bt_matcher *m = bt_matcher_create(g, vocab);
    uint32_t mask[WORDS], state = seed * 2654435761u;
    char text[STEPS * 16];
    size_t len = 0;
    for (uint32_t i = 0; m != NULL && i < STEPS; i++) {
        if (bt_matcher_mask(m, mask) != BT_OK) {
            break;
        }
        uint32_t yes = pick(mask, &state, true), no = pick(mask, &state, false);
        BT_ASSERT(yes < VOCAB); /* a mask is empty */
        bool may = false;
        bt_status_t end = bt_matcher_may_end(m, &may);
        BT_ASSERT(end == BT_ERR_EXHAUSTED || (end == BT_OK && may == has(mask, EOS)));
        if (no < VOCAB) {
            bt_status_t st = bt_matcher_accept(m, no);
            BT_ASSERT(st == BT_ERR_INVALID || st == BT_ERR_EXHAUSTED);
        }
        char forced[32];
        size_t n = bt_matcher_forced(m, forced, sizeof(forced));
        if (n > 0) {
            bt_status_t st = bt_matcher_accept_bytes(m, forced, n);
            BT_ASSERT(st == BT_OK || st == BT_ERR_EXHAUSTED);
            if (st == BT_OK) {
                bt_matcher_rollback(m, 1);
                same_mask(m, mask);
            }
        }
        bt_status_t st = bt_matcher_accept(m, yes);
        BT_ASSERT(st == BT_OK || st == BT_ERR_EXHAUSTED);
        if (st != BT_OK) {
            break;
        }
        if (draw(&state, 4) == 0) {
            bt_matcher_rollback(m, 1);
            same_mask(m, mask);
            st = bt_matcher_accept(m, yes);
            BT_ASSERT(st == BT_OK || st == BT_ERR_EXHAUSTED);
            if (st != BT_OK) {
                break;
            }
        }
        if (yes == EOS) {
            check_end(kind, text, len);
            break;
        }
        memcpy(text + len, tokens[yes].bytes, tokens[yes].n);
        len += tokens[yes].n;
    }
    bt_matcher_destroy(m);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2 || size > 4000) {
        return 0;
    }
    rig_reset();
    if (vocab == NULL) {
        make_vocab();
    }
    enum bt_grammar_kind kind = (enum bt_grammar_kind)(1 + data[0] % 6);
    struct bt_grammar_spec spec = {kind, (const char *)data + 2, size - 2};
    struct bt_grammar *g = NULL;
    char err[300] = "";
    bt_status_t st = bt_grammar_compile(&spec, &g, err, sizeof(err));
    if (st != BT_OK) {
        BT_ASSERT(err[0] != '\0' && g == NULL);
        BT_ASSERT(st == BT_ERR_INVALID || st == BT_ERR_UNSUPPORTED || st == BT_ERR_EXHAUSTED);
        return 0;
    }
    for (uint32_t i = 0; i < 3; i++) {
        walk(g, kind, data[1] * 4u + i);
    }
    bt_grammar_unref(g);
    return 0;
}
