/* What the front's grammars allow: the grammar of the running request, compiled and asked. Includes
 * the front's fixture. */
#ifndef BT_TESTS_FRONT_GRAMMARS_H
#define BT_TESTS_FRONT_GRAMMARS_H

#include "tests/unit/front_fixture.h"

#include "common/grammar/grammar.h"

/* A vocabulary of single bytes, and an end. */
static struct bt_grammar_vocab *bytes_vocab(void)
{
    static char bytes[256];
    struct bt_grammar_token tokens[257];
    const uint32_t eos = 256;
    struct bt_grammar_vocab *v;
    for (int i = 0; i < 256; i++) {
        bytes[i] = (char)i;
        tokens[i] = (struct bt_grammar_token){.bytes = &bytes[i], .n = 1};
    }
    tokens[256] = (struct bt_grammar_token){.bytes = "<e>", .n = 3, .special = true};
    assert_int_equal(bt_grammar_vocab_create(tokens, 257, &eos, 1, &v), BT_OK);
    return v;
}

/* Does the running request's grammar allow this answer? */
static bool allows(struct bt_grammar_vocab *v, const char *answer)
{
    char err[256] = "";
    const struct bt_gen_grammar *text = now->spec.grammar;
    struct bt_grammar *g;
    assert_non_null(text);
    const struct bt_grammar_spec spec = {(enum bt_grammar_kind)text->kind, text->text, text->len};
    if (bt_grammar_compile(&spec, &g, err, sizeof(err)) != BT_OK) {
        fail_msg("%s: %s", err, text->text);
    }
    struct bt_matcher *m = bt_matcher_create(g, v);
    bool may = false;
    bool ok = bt_matcher_accept_bytes(m, answer, strlen(answer)) == BT_OK &&
              bt_matcher_may_end(m, &may) == BT_OK && may;
    bt_matcher_destroy(m);
    bt_grammar_unref(g);
    return ok;
}

#endif
