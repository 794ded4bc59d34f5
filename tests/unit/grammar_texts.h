/* For the unit tests of grammars: a vocabulary of single bytes, and tables of texts that a grammar
 * takes or does not take. */
#ifndef BT_TESTS_GRAMMAR_TEXTS_H
#define BT_TESTS_GRAMMAR_TEXTS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "common/base/buf.h"
#include "common/grammar/grammar.h"

/* All bytes are tokens; so are three special texts and the end. */
static const char *const specials[] = {"<call>", "</call>", "</think>"};
#define N_SPECIAL 3u
#define EOS       (256u + N_SPECIAL)
static struct bt_grammar_vocab *vocab;

static int setup(void **state)
{
    (void)state;
    static uint8_t bytes[256];
    struct bt_grammar_token t[EOS + 1];
    for (uint32_t i = 0; i < 256; i++) {
        bytes[i] = (uint8_t)i;
        t[i] = (struct bt_grammar_token){.bytes = &bytes[i], .n = 1};
    }
    for (uint32_t i = 0; i < N_SPECIAL; i++) {
        t[256 + i] = (struct bt_grammar_token){
            .bytes = specials[i], .n = (uint32_t)strlen(specials[i]), .special = true};
    }
    t[EOS] = (struct bt_grammar_token){.bytes = "<eos>", .n = 5, .special = true};
    const uint32_t eos = EOS;
    return bt_grammar_vocab_create(t, EOS + 1, &eos, 1, &vocab) != BT_OK;
}

static int teardown(void **state)
{
    (void)state;
    bt_grammar_vocab_destroy(vocab);
    return 0;
}

static bt_status_t compile(enum bt_grammar_kind kind, const char *text, struct bt_grammar **g_p,
                           char *err, size_t err_cap)
{
    const struct bt_grammar_spec spec = {.kind = kind, .text = text, .len = strlen(text)};
    return bt_grammar_compile(&spec, g_p, err, err_cap);
}

/* Whether g takes the text as a whole; '\1' to '\3' in it are the special tokens. The masks must
 * say the same as accept. */
static bool takes(struct bt_grammar *g, const char *text)
{
    struct bt_matcher *m = bt_matcher_create(g, vocab);
    uint32_t mask[(EOS + 32) / 32];
    bool ok = true;
    for (size_t i = 0; ok && i <= strlen(text); i++) {
        uint32_t c = (uint8_t)text[i];
        uint32_t id = c == 0 ? EOS : c <= N_SPECIAL ? 255 + c : c;
        assert_int_equal(bt_matcher_mask(m, mask), BT_OK);
        ok = bt_matcher_accept(m, id) == BT_OK;
        assert_int_equal(ok, mask[id >> 5] >> (id & 31) & 1);
    }
    bt_matcher_destroy(m);
    return ok;
}

/* A grammar's text, texts that it takes, and texts that it does not take. */
struct row {
    const char *text, *yes[9], *no[9];
};

static void check_rows(enum bt_grammar_kind kind, const struct row *rows, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        char err[512] = "";
        struct bt_grammar *g = NULL;
        if (compile(kind, rows[i].text, &g, err, sizeof(err)) != BT_OK) {
            fail_msg("%s: %s", rows[i].text, err);
        }
        for (size_t k = 0; k < BT_ARRAY_LEN(rows->yes) && rows[i].yes[k] != NULL; k++) {
            if (!takes(g, rows[i].yes[k])) {
                fail_msg("%s\nshould take: %s", rows[i].text, rows[i].yes[k]);
            }
        }
        for (size_t k = 0; k < BT_ARRAY_LEN(rows->no) && rows[i].no[k] != NULL; k++) {
            if (takes(g, rows[i].no[k])) {
                fail_msg("%s\nshould not take: %s", rows[i].text, rows[i].no[k]);
            }
        }
        bt_grammar_unref(g);
    }
}

/* Grammars that must not compile, and a part of each error's text. */
struct error {
    const char *text;
    bt_status_t status;
    const char *part;
};

static void check_errors(enum bt_grammar_kind kind, const struct error *rows, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        char err[512] = "";
        struct bt_grammar *g = NULL;
        bt_status_t st = compile(kind, rows[i].text, &g, err, sizeof(err));
        if (st != rows[i].status || strstr(err, rows[i].part) == NULL) {
            fail_msg("%s: %s: '%s'", rows[i].text, bt_status_name(st), err);
        }
    }
}

#endif
