/* What rendering a chat template costs: whatever grows with the size of a client's values is
 * charged against the render's limit of steps. The operations are those of the interpreter's own
 * tables, so that a new one is tried as well. Also: many bindings, and stopping a render. */
#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/token/token.h"

#define BYTES  65536
#define ITEMS  4096
#define TIMES  16    /* each operation is done so often */
#define BUDGET 24000 /* steps: less than TIMES readings of a value, more than binding it */

enum { TEXTS = 5, LISTS = 4, DICTS = 1, VALUES = TEXTS + LISTS + DICTS };
enum { KIND_STR, KIND_LIST, KIND_DICT, KINDS };
static const char *const kind_names[] = {"str", "list", "dict"};

static json_t *contexts[VALUES];

static int kind_of(int value)
{
    return value < TEXTS ? KIND_STR : value < TEXTS + LISTS ? KIND_LIST : KIND_DICT;
}

static int make_contexts(void **state)
{
    static const char *const patterns[TEXTS] = {"a", "A", "1", " ", "a "};
    (void)state;
    for (int i = 0; i < VALUES; i++) {
        json_t *v = i < TEXTS ? NULL : i < TEXTS + LISTS ? json_array() : json_object();
        char text[BYTES], key[16];
        for (size_t k = 0; i < TEXTS && k < BYTES; k++) {
            text[k] = patterns[i][k % strlen(patterns[i])];
        }
        v = v == NULL ? json_stringn(text, BYTES) : v;
        for (int k = 0; i >= TEXTS && k < ITEMS; k++) {
            snprintf(key, sizeof(key), "k%d", k);
            if (i == TEXTS) {
                json_array_append_new(v, json_integer(k));
            } else if (i == TEXTS + 1) {
                json_array_append_new(v, json_string(key));
            } else if (i == TEXTS + 2) {
                json_array_append_new(v, json_pack("{s:i}", "a", k));
            } else if (i == TEXTS + 3) {
                json_array_append_new(v, json_pack("[s,i]", key, k));
            } else {
                json_object_set_new(v, key, json_integer(k));
            }
        }
        contexts[i] = json_pack("{s:o}", "v", v);
    }
    return 0;
}

static int free_contexts(void **state)
{
    (void)state;
    for (int i = 0; i < VALUES; i++) {
        json_decref(contexts[i]);
    }
    return 0;
}

enum outcome { UNKNOWN, WRONG, DONE, EXHAUSTED }; /* WRONG: a type error or the like */

static enum outcome run(const char *source, const json_t *context, uint64_t steps)
{
    struct bt_template *t = NULL;
    char err[512];
    if (bt_template_compile(source, &t, err, sizeof(err)) != BT_OK) {
        return UNKNOWN;
    }
    struct bt_buf out;
    bt_buf_init(&out);
    bt_status_t st = bt_template_render_object(t, context, steps, NULL, &out, err, sizeof(err));
    bt_buf_cleanup(&out);
    bt_template_destroy(t);
    return st == BT_OK ? DONE : st == BT_ERR_EXHAUSTED ? EXHAUSTED : WRONG;
}

/* TIMES evaluations of an expression of v. */
static enum outcome repeat(const char *expression, int value)
{
    char source[256];
    snprintf(source, sizeof(source), "{%% for i in range(%d) %%}{%% set x = %s %%}{%% endfor %%}",
             TIMES, expression);
    return run(source, contexts[value], BUDGET);
}

/* What costs the same whatever the size. */
static const char *const flat[KINDS] = {
    [KIND_STR] = " attr d default safe string boolean callable defined false filter float integer "
                 "iterable mapping none number sequence test true undefined range strftime_now ",
    [KIND_LIST] = " attr count d default first last length boolean callable defined eq equalto "
                  "false filter float integer iterable mapping ne none number sameas sequence "
                  "string test true undefined append range strftime_now ",
    [KIND_DICT] = " attr count d default length boolean callable defined eq equalto false filter "
                  "float integer iterable mapping ne none number sameas sequence string test true "
                  "undefined get pop range strftime_now "};

static bool is_listed(const char *list, const char *word)
{
    char name[64];
    snprintf(name, sizeof(name), " %s ", word);
    return strstr(list, name) != NULL;
}

/* Tries one word with all values and with the arguments from `first` on; how much of it is charged
 * too little. */
static int check_word(const char *form, const char *word, size_t first)
{
    static const char *const args[] = {
        "",         "()",       "('a')",     "('a', 'b')",      "('b', 'c')",
        "(2)",      "(v)",      "('upper')", "(attribute='a')", "('a', 'string')",
        "(v, 'a')", "(0, v)",   "('a', 2)",  "(100000, ' ')",   "(i)",
        "(4095)",   "('k4095')"};
    enum outcome best[KINDS] = {UNKNOWN, UNKNOWN, UNKNOWN};
    int missing = 0;
    for (int value = 0; value < VALUES; value++) {
        enum outcome *b = &best[kind_of(value)];
        for (size_t a = first; a < BT_ARRAY_LEN(args) && *b != EXHAUSTED; a++) {
            char expression[128];
            snprintf(expression, sizeof(expression), form, word, args[a]);
            enum outcome o = repeat(expression, value);
            *b = o > *b ? o : *b;
        }
    }
    enum outcome any = UNKNOWN;
    for (int k = 0; k < KINDS; k++) {
        any = best[k] > any ? best[k] : any;
        if (best[k] == DONE && !is_listed(flat[k], word)) {
            print_error("%s of a large %s is not charged by its size\n", word, kind_names[k]);
            missing++;
        }
    }
    if (any == WRONG &&
        !is_listed(" cycle changed raise_exception abs round divisibleby even odd ", word)) {
        print_error("%s: no arguments here suit it; add some\n", word);
        missing++;
    }
    return missing;
}

static void test_every_operation_is_charged(void **state)
{
    static const struct {
        enum bt_template_word kind;
        const char *form;
    } tables[] = {
        {BT_TEMPLATE_FILTERS, "v|%s%s"},
        {BT_TEMPLATE_TESTS, "v is %s%s"},
        {BT_TEMPLATE_METHODS, "v.%s%s"},
        {BT_TEMPLATE_FUNCTIONS, "%s%s"},
    };
    int missing = 0;
    (void)state;
    for (size_t t = 0; t < BT_ARRAY_LEN(tables); t++) {
        const char *word;
        for (size_t i = 0; (word = bt_template_word(tables[t].kind, i)) != NULL; i++) {
            missing += check_word(tables[t].form, word, t >= 2);
        }
    }
    assert_int_equal(missing, 0);
}

static void test_every_operator_is_charged(void **state)
{
    static const struct {
        int value;
        const char *expression;
    } cases[] = {
        {0, "v ~ 'a'"},     {0, "v + 'a'"},      {0, "v * 2"},       {0, "v == v"},
        {0, "v < v ~ 'a'"}, {0, "'b' in v"},     {0, "v[1:]"},       {0, "v[::-1]"},
        {0, "v[-1]"},       {0, "v % ()"},       {0, "{v: 1}"},      {0, "v.a"},
        {0, "[v][0][9]"},   {5, "v + v"},        {5, "v * 2"},       {5, "v == v[:]"},
        {5, "v < v + [1]"}, {5, "'b' in v"},     {5, "v[1:]"},       {5, "v[::-1]"},
        {5, "v ~ 1"},       {5, "dict(*v)"},     {8, "dict(v)"},     {9, "dict(**v)"},
        {9, "v ~ 1"},       {9, "v == dict(v)"}, {9, "v|list == 1"}, {5, "{(v[0], v): 1}"},
    };
    (void)state;
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        enum outcome o = repeat(cases[i].expression, cases[i].value);
        bool constant = strcmp(cases[i].expression, "v.a") == 0;
        bool wrong = strcmp(cases[i].expression, "{(v[0], v): 1}") == 0 ||
                     strcmp(cases[i].expression, "dict(*v)") == 0;
        if (o != (constant ? DONE : wrong ? WRONG : EXHAUSTED)) {
            fail_msg("%s of value %d: %d", cases[i].expression, cases[i].value, (int)o);
        }
    }
}

/* Names that a client binds are found by their hash: each costs a few steps, however many there are
 * and however often they are looked up. */
static void test_many_bindings(void **state)
{
    enum { N = 100000 };
    json_t *context = json_object();
    (void)state;
    for (int i = 0; i < N; i++) {
        char key[16];
        snprintf(key, sizeof(key), "k%d", i);
        json_object_set_new(context, key, json_integer(i));
    }
    const char *source =
        "{% for i in range(50000) %}{% if k99999 != 99999 %}x{% endif %}{% endfor %}";
    assert_int_equal(run(source, context, 40 * N), DONE);
    assert_int_equal(run("x", context, N / 2), EXHAUSTED); /* but not for nothing */
    json_t *one = json_pack("{s:O}", "v", context);
    source =
        "{% set n = namespace(d=dict(v)) %}{% for k in v %}{% if n.d.pop(k) != v[k] %}x"
        "{% endif %}{% if loop.index > 40 %}{% break %}{% endif %}{% endfor %}{{ n.d|length }}";
    assert_int_equal(run(source, one, 0), DONE);
    json_decref(one);
    json_decref(context);
}

/* 1, 1.0 and true are one key; what was taken out is gone, also from the index. */
static void test_keys_of_dicts(void **state)
{
    static const char source[] =
        "{% set d = {} %}{% for i in range(100) %}{% set x = d.update({i: i}) %}"
        "{% set x = d.update({'s%d' % i: i, (i, 's'): i}) %}{% endfor %}"
        "{{ d[7.0] }},{{ d[true] }},{{ d['s42'] }},{{ d[(9, 's')] }},{{ d|length }},{{ d.pop(50) "
        "}},"
        "{{ 50 in d }},{{ d['s99'] }},{{ d.get(none, 'no') }},{% set x = d.update({none: 3}) %}"
        "{{ d[none] }},{{ d.update({50: 'again'}) }},{{ (d|list)[-1] }},{{ d[50] }}";
    struct bt_template *t = NULL;
    char err[512] = "";
    struct bt_buf out;
    json_t *context = json_object();
    (void)state;
    bt_buf_init(&out);
    assert_int_equal(bt_template_compile(source, &t, err, sizeof(err)), BT_OK);
    if (bt_template_render_object(t, context, 0, NULL, &out, err, sizeof(err)) != BT_OK) {
        fail_msg("%s", err);
    }
    assert_string_equal(out.data, "7,1,42,9,300,50,False,99,no,3,None,50,again");
    bt_buf_cleanup(&out);
    bt_template_destroy(t);
    json_decref(context);
}

static bool stop_third(void *arg)
{
    return ++*(int *)arg == 3;
}

static void test_stopped(void **state)
{
    struct bt_template *t = NULL;
    char err[512] = "";
    struct bt_buf out;
    int asked = 0;
    const struct bt_token_watch watch = {stop_third, &asked};
    json_t *context = json_object();
    (void)state;
    bt_buf_init(&out);
    assert_int_equal(bt_template_compile("{% for a in range(99999) %}{% for b in range(99999) %}"
                                         "{% endfor %}{% endfor %}",
                                         &t, err, sizeof(err)),
                     BT_OK);
    assert_int_equal(bt_template_render_object(t, context, 0, &watch, &out, err, sizeof(err)),
                     BT_ERR_CANCELLED);
    assert_int_equal(asked, 3);
    assert_int_equal(bt_template_render_object(t, context, 100000, &watch, &out, err, sizeof(err)),
                     BT_ERR_EXHAUSTED);
    assert_true(asked > 10); /* and went on */
    assert_non_null(strstr(err, "more than 100000 steps"));
    assert_int_equal(out.len, 0);
    bt_buf_cleanup(&out);
    bt_template_destroy(t);
    json_decref(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_operation_is_charged),
        cmocka_unit_test(test_every_operator_is_charged),
        cmocka_unit_test(test_many_bindings),
        cmocka_unit_test(test_keys_of_dicts),
        cmocka_unit_test(test_stopped),
    };
    return cmocka_run_group_tests(tests, make_contexts, free_contexts);
}
