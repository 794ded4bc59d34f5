/* Tests of the chat-template interpreter: recorded chats, vectors made by Jinja 3.1 from templates
 * of ours, what is refused and where, limits, mutated templates. Runs in the repository root. */
#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/philox.h"
#include "common/token/token.h"

#define CHAT_TEMPLATES "tests/golden/chat-templates"
#define MODEL          "deploy/models/shakespeare-llama-6m"

static json_t *load(const char *path)
{
    json_error_t je;
    json_t *j = json_load_file(path, JSON_ALLOW_NUL, &je);
    if (j == NULL) {
        fail_msg("%s: %s", path, je.text);
    }
    return j;
}

static bt_status_t render(const char *source, const char *context, struct bt_buf *out, char *err)
{
    struct bt_template *t = NULL;
    err[0] = '\0';
    bt_status_t st = bt_template_compile(source, &t, err, 512);
    if (st == BT_OK) {
        st = bt_template_render(t, context, out, err, 512);
    }
    bt_template_destroy(t);
    return st;
}

static void test_chat_vectors(void **state)
{
    (void)state;
    json_t *all = load("tests/golden/chat.json");
    struct bt_template *t = NULL;
    char err[512] = "";
    if (bt_template_load(MODEL, &t, err, sizeof(err)) != BT_OK) {
        fail_msg("%s", err);
    }
    assert_true(json_array_size(all) >= 3);
    for (size_t i = 0; i < json_array_size(all); i++) {
        const json_t *v = json_array_get(all, i);
        json_t *context = json_object();
        json_object_set(context, "messages", json_object_get(v, "messages"));
        json_object_set_new(context, "add_generation_prompt", json_true());
        char *text = json_dumps(context, 0);
        struct bt_buf out;
        bt_buf_init(&out);
        assert_int_equal(bt_template_render(t, text, &out, err, sizeof(err)), BT_OK);
        assert_string_equal(out.data, json_string_value(json_object_get(v, "text")));
        bt_buf_cleanup(&out);
        free(text);
        json_decref(context);
    }
    bt_template_destroy(t);
    json_decref(all);
}

/* Each vector is a template with the text that Jinja gives, or with the error that it raises. */
static void test_jinja_vectors(void **state)
{
    (void)state;
    json_t *all = load("tests/golden/template.json");
    const json_t *vectors = json_object_get(all, "vectors");
    assert_true(json_array_size(vectors) > 500);
    unsigned wrong = 0;
    for (size_t i = 0; i < json_array_size(vectors); i++) {
        const json_t *v = json_array_get(vectors, i), *own = json_object_get(v, "context");
        const json_t *want = json_object_get(v, "text");
        const char *source = json_string_value(json_object_get(v, "template"));
        char *context = json_dumps(own != NULL ? own : json_object_get(all, "context"), 0);
        char err[512];
        struct bt_buf out;
        bt_buf_init(&out);
        bt_status_t st = render(source, context, &out, err);
        bool same = want == NULL ? st != BT_OK && strlen(err) > 0
                                 : st == BT_OK && out.len == json_string_length(want) &&
                                       memcmp(out.data, json_string_value(want), out.len) == 0;
        if (!same) {
            wrong++;
            print_error("vector %zu: %s\n want: %s\n  got: %s %s\n", i, source,
                        want == NULL ? "an error" : json_string_value(want),
                        out.data == NULL ? "" : out.data, err);
        }
        bt_buf_cleanup(&out);
        free(context);
    }
    assert_int_equal(wrong, 0);
    json_decref(all);
}

static struct bt_template *compile_file(const char *name)
{
    char path[256], err[512] = "";
    struct bt_buf source;
    struct bt_template *t = NULL;
    snprintf(path, sizeof(path), CHAT_TEMPLATES "/%s", name);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    bt_buf_init(&source);
    source.len = fread(bt_buf_reserve(&source, 1 << 16), 1, (1 << 16) - 1, f);
    source.data[source.len] = '\0';
    fclose(f);
    if (bt_template_compile(source.data, &t, err, sizeof(err)) != BT_OK) {
        fail_msg("%s: %s", path, err);
    }
    bt_buf_cleanup(&source);
    return t;
}

/* Whole chat templates over whole conversations, as rendered by Jinja in transformers' set-up
 * (tests/tools/make_chat_vectors.py). What raise_exception() said must reach the client. */
static void test_chat_templates(void **state)
{
    (void)state;
    json_t *all = load(CHAT_TEMPLATES "/vectors.json");
    const json_t *contexts = json_object_get(all, "contexts");
    const json_t *vectors = json_object_get(all, "vectors");
    struct bt_template *t = NULL;
    const char *name = "";
    unsigned wrong = 0, raised = 0;
    for (size_t i = 0; i < json_array_size(vectors); i++) {
        const json_t *v = json_array_get(vectors, i), *want = json_object_get(v, "text");
        const char *message = json_string_value(json_object_get(v, "error"));
        const char *file = json_string_value(json_object_get(v, "template"));
        size_t n = (size_t)json_integer_value(json_object_get(v, "context"));
        char *context = json_dumps(json_array_get(contexts, n), 0), err[512] = "";
        if (strcmp(file, name) != 0) {
            bt_template_destroy(t);
            t = compile_file(file);
            name = file;
        }
        struct bt_buf out;
        bt_buf_init(&out);
        bt_status_t st = bt_template_render(t, context, &out, err, sizeof(err));
        bool same = want == NULL ? st == BT_ERR_INVALID && (message == NULL || strstr(err, message))
                                 : st == BT_OK && out.len == json_string_length(want) &&
                                       memcmp(out.data, json_string_value(want), out.len) == 0;
        if (!same) {
            wrong++;
            print_error("%s, context %zu: %s\n want: %s\n  got: %.*s %s\n", name, n,
                        bt_status_name(st),
                        want != NULL ? json_string_value(want)
                        : message    ? message
                                     : "an error",
                        (int)out.len, out.data == NULL ? "" : out.data, st == BT_OK ? "" : err);
        }
        raised += message != NULL;
        bt_buf_cleanup(&out);
        free(context);
    }
    bt_template_destroy(t);
    assert_true(json_array_size(vectors) > 200 && raised > 10);
    assert_int_equal(wrong, 0);
    json_decref(all);
}

static void test_refused_when_compiled(void **state)
{
    (void)state;
    static const struct {
        const char *source, *word;
        bt_status_t status;
    } cases[] = {
        {"a\n{{ x|nosuch }}", "line 2: the filter \"nosuch\"", BT_ERR_UNSUPPORTED},
        {"{{ x is\nstrange }}", "test \"strange\"", BT_ERR_UNSUPPORTED},
        {"\n\n{{ x.strange() }}", "line 3: the method .strange()", BT_ERR_UNSUPPORTED},
        {"{{ strange() }}", "the function strange()", BT_ERR_UNSUPPORTED},
        {"{% include 'x' %}", "include", BT_ERR_UNSUPPORTED},
        {"{% import 'x' as y %}", "import", BT_ERR_UNSUPPORTED},
        {"{% block x %}{% endblock %}", "block", BT_ERR_UNSUPPORTED},
        {"{% do x %}", "do", BT_ERR_UNSUPPORTED},
        {"{% for a in b recursive %}{% endfor %}", "recursive", BT_ERR_UNSUPPORTED},
        {"{{ x|map('nosuch')|list }}", "nosuch", BT_ERR_UNSUPPORTED},
        {"{{ x|selectattr('a', 'nosuch')|list }}", "nosuch", BT_ERR_UNSUPPORTED},
        {"{% if x %}\n{{ y }}", "endif", BT_ERR_INVALID},
        {"{{ x", "line 1", BT_ERR_INVALID},
        {"\xff", "UTF-8", BT_ERR_INVALID},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        struct bt_template *t = NULL;
        char err[512] = "";
        bt_status_t st = bt_template_compile(cases[i].source, &t, err, sizeof(err));
        if (st != cases[i].status || strstr(err, cases[i].word) == NULL) {
            fail_msg("%s: %s \"%s\"", cases[i].source, bt_status_name(st), err);
        }
        assert_null(t);
    }
}

static void test_errors_name_the_line(void **state)
{
    (void)state;
    struct bt_buf out;
    char err[512];
    bt_buf_init(&out);
    assert_int_equal(render("a\n\n{{ raise_exception('roles ' ~ n) }}", "{\"n\":7}", &out, err),
                     BT_ERR_INVALID);
    assert_string_equal(err, "chat template line 3: roles 7");
    assert_int_equal(render("\n{{ a.b }}", "{}", &out, err), BT_ERR_INVALID);
    assert_non_null(strstr(err, "line 1: 'a' is undefined") == NULL
                        ? strstr(err, "line 2: 'a' is undefined")
                        : err);
    assert_int_equal(render("x", "[]", &out, err), BT_ERR_INVALID);
    assert_int_equal(render("x", "{", &out, err), BT_ERR_INVALID);
    assert_int_equal(out.len, 0); /* nothing half done */
    bt_buf_cleanup(&out);
}

static void test_limits(void **state)
{
    (void)state;
    static const char *const sources[] = {
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for a in range(100) %}{% set ns.s = ns.s ~ ns.s %}"
        "{% endfor %}",
        "{{ 'x' * 100000000000 }}",
        "{{ [1] * 100000000000 }}",
        "{{ ('x' * 1000000)|replace('', 'y' * 1000000) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% set l = [1] %}{% if l.append(l) %}{% endif %}{{ l }}",
        "{% set l = [1] %}{% if l.append(l) %}{% endif %}{{ l|tojson }}",
        "{% set l = [] %}{% for a in range(100000) %}{% for b in range(1000) %}{% if "
        "l.append('abcdefgh' ~ b) %}{% endif %}{% endfor %}{% endfor %}",
        "{% for a in range(100000) %}{{ 'x' * 100000 }}{% endfor %}",
        "{{ 2 ** 64 }}",
        "{{ 9223372036854775807 + 1 }}",
        "{{ 'x'.ljust(1000000000000) }}",
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(sources); i++) {
        struct bt_buf out;
        char err[512];
        bt_buf_init(&out);
        bt_status_t st = render(sources[i], "{}", &out, err);
        if ((st != BT_ERR_INVALID && st != BT_ERR_EXHAUSTED) || strlen(err) == 0) {
            fail_msg("%s: %s", sources[i], bt_status_name(st));
        }
        bt_buf_cleanup(&out);
    }
    struct bt_template *t = NULL;
    char err[512], *deep = malloc(200001);
    for (int i = 0; i < 100000; i++) {
        deep[i] = '(';
        deep[100000 + i] = ')';
    }
    deep[0] = deep[1] = '{';
    deep[199999] = deep[199998] = '}';
    deep[200000] = '\0';
    assert_int_equal(bt_template_compile(deep, &t, err, sizeof(err)), BT_ERR_UNSUPPORTED);
    memset(deep, '[', 100000);
    memset(deep + 100000, ']', 100000);
    struct bt_buf out;
    bt_buf_init(&out);
    assert_int_equal(render("x", deep, &out, err), BT_ERR_INVALID);
    bt_buf_cleanup(&out);
    free(deep);
}

/* A long conversation renders well within the limits. */
static void test_long_chat(void **state)
{
    (void)state;
    json_t *context = json_object(), *messages = json_array();
    char *big = malloc(1 << 20);
    memset(big, 'a', 1 << 20);
    for (int i = 0; i < 2000; i++) {
        json_array_append_new(messages, json_pack("{s:s,s:s}", "role", i % 2 ? "assistant" : "user",
                                                  "content", " some words of a turn "));
    }
    json_array_append_new(
        messages, json_pack("{s:s,s:s%}", "role", "user", "content", big, (size_t)(1 << 20)));
    json_object_set_new(context, "messages", messages);
    char *text = json_dumps(context, 0), err[512];
    struct bt_template *t = NULL;
    struct bt_buf out;
    bt_buf_init(&out);
    assert_int_equal(bt_template_load(MODEL, &t, err, sizeof(err)), BT_OK);
    assert_int_equal(bt_template_render(t, text, &out, err, sizeof(err)), BT_OK);
    assert_true(out.len > (1 << 20) + 2000 * 60);
    bt_buf_cleanup(&out);
    bt_template_destroy(t);
    json_decref(context);
    free(text);
    free(big);
}

static void put_file(const char *dir, const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    if (text == NULL) {
        unlink(path);
        return;
    }
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void test_load_forms(void **state)
{
    (void)state;
    char dir[] = "/tmp/test_template_XXXXXX", err[512];
    assert_non_null(mkdtemp(dir));
    static const struct {
        const char *config, *jinja, *want;
        bt_status_t status;
    } cases[] = {
        {"{\"bos_token\":{\"content\":\"<s>\"},\"chat_template\":\"{{ bos_token }}!\"}", NULL,
         "<s>!", BT_OK},
        {"{\"bos_token\":\"<b>\",\"chat_template\":[{\"name\":\"rag\",\"template\":\"r\"},"
         "{\"name\":\"default\",\"template\":\"{{ bos_token }}d\"}]}",
         NULL, "<b>d", BT_OK},
        {"{\"eos_token\":null,\"chat_template\":\"old\"}", "new{{ eos_token }}", "new", BT_OK},
        {NULL, "alone", "alone", BT_OK},
        {"{\"model_max_length\":1000000000000000019884624838656,\"eos_token\":\"</s>\","
         "\"chat_template\":\"{{ eos_token }}\"}",
         NULL, "</s>", BT_OK}, /* transformers' word for "not known" */
        {"{\"chat_template\":[{\"name\":\"rag\",\"template\":\"r\"}]}", NULL, "default",
         BT_ERR_NOT_FOUND},
        {"{}", NULL, "chat_template", BT_ERR_NOT_FOUND},
        {"{\"chat_template\":5}", NULL, "chat_template", BT_ERR_INVALID},
        {"{", NULL, "line 1", BT_ERR_INVALID},
        {NULL, NULL, "tokenizer_config.json", BT_ERR_NOT_FOUND},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        put_file(dir, "tokenizer_config.json", cases[i].config);
        put_file(dir, "chat_template.jinja", cases[i].jinja);
        struct bt_template *t = NULL;
        struct bt_buf out;
        bt_buf_init(&out);
        bt_status_t st = bt_template_load(dir, &t, err, sizeof(err));
        assert_int_equal(st, cases[i].status);
        if (st == BT_OK) {
            assert_int_equal(bt_template_render(t, "{}", &out, err, sizeof(err)), BT_OK);
            assert_string_equal(out.data, cases[i].want);
        } else {
            assert_non_null(strstr(err, cases[i].want));
        }
        bt_buf_cleanup(&out);
        bt_template_destroy(t);
    }
    put_file(dir, "tokenizer_config.json", NULL);
    put_file(dir, "chat_template.jinja", NULL);
    rmdir(dir);
}

/* Requests with tools have a template of their own, in a list or in a folder. */
static void test_load_for_tools(void **state)
{
    (void)state;
    char dir[] = "/tmp/test_template_XXXXXX", err[512], folder[128];
    assert_non_null(mkdtemp(dir));
    snprintf(folder, sizeof(folder), "%s/additional_chat_templates", dir);
    static const struct {
        const char *config, *jinja, *without, *with;
        bt_status_t status;
    } cases[] = {
        {"{\"chat_template\":\"one\"}", NULL, "one", "one", BT_OK},
        {"{\"bos_token\":\"<b>\",\"chat_template\":[{\"name\":\"tool_use\",\"template\":"
         "\"{{ bos_token }}t{{ tools[0] }}\"},{\"name\":\"default\",\"template\":\"d\"}]}",
         NULL, "d", "<b>t1", BT_OK},
        {"{\"chat_template\":\"one\"}", "two", "one", "two", BT_OK},
        {"{\"chat_template\":\"one\"}", "{% two", NULL, "line 1", BT_ERR_INVALID},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        struct bt_template *t = NULL;
        struct bt_buf out;
        bt_buf_init(&out);
        put_file(dir, "tokenizer_config.json", cases[i].config);
        if (cases[i].jinja != NULL) {
            (void)mkdir(folder, 0700);
            put_file(folder, "tool_use.jinja", cases[i].jinja);
        }
        assert_int_equal(bt_template_load(dir, &t, err, sizeof(err)), cases[i].status);
        if (cases[i].status == BT_OK) {
            assert_int_equal(bt_template_render(t, "{\"tools\":[]}", &out, err, sizeof(err)),
                             BT_OK);
            assert_string_equal(out.data, cases[i].without);
            bt_buf_clear(&out);
            assert_int_equal(bt_template_render(t, "{\"tools\":[1]}", &out, err, sizeof(err)),
                             BT_OK);
            assert_string_equal(out.data, cases[i].with);
            assert_string_equal(bt_template_text(t, false), cases[i].without);
        } else {
            assert_non_null(strstr(err, cases[i].with));
        }
        bt_buf_cleanup(&out);
        bt_template_destroy(t);
    }
    put_file(dir, "tokenizer_config.json", NULL);
    put_file(folder, "tool_use.jinja", NULL);
    rmdir(folder);
    rmdir(dir);
}

static void test_strftime_now(void **state)
{
    (void)state;
    struct bt_buf out;
    char err[512], want[32];
    time_t now = time(NULL);
    struct tm tm;
    localtime_r(&now, &tm);
    strftime(want, sizeof(want), "%Y", &tm);
    bt_buf_init(&out);
    assert_int_equal(render("{{ strftime_now('%Y') }}", "{}", &out, err), BT_OK);
    assert_int_equal(strlen(out.data), 4);
    assert_true(atoi(out.data) == atoi(want) || atoi(out.data) == atoi(want) + 1);
    bt_buf_cleanup(&out);
}

/* Mutated templates: any answer is right but a crash, a hang or a leak. */
static void test_mutated(void **state)
{
    (void)state;
    json_t *all = load("tests/golden/template.json");
    const json_t *vectors = json_object_get(all, "vectors");
    char *context = json_dumps(json_object_get(all, "context"), 0);
    for (uint32_t seed = 0; seed < 3000; seed++) {
        uint32_t key[2] = {seed, 1}, c[4] = {0}, r[4];
        bt_philox4x32(key, c, r);
        const json_t *v = json_array_get(vectors, r[0] % json_array_size(vectors));
        char *source = strdup(json_string_value(json_object_get(v, "template"))), err[512];
        size_t len = strlen(source);
        for (uint32_t k = 0; k <= seed % 3 && len > 0; k++) {
            c[0]++;
            bt_philox4x32(key, c, r);
            size_t at = r[0] % len;
            if (r[1] % 3 == 0) {
                memmove(source + at, source + at + 1, len - at);
                len--;
            } else {
                source[at] = "{}%#()[]|.-+*/'\"\\ \n0a,:=~<i"[r[2] % 28];
            }
        }
        struct bt_buf out;
        bt_buf_init(&out);
        bt_status_t st = render(source, context, &out, err);
        assert_true(st == BT_OK || strlen(err) > 0);
        bt_buf_cleanup(&out);
        free(source);
    }
    free(context);
    json_decref(all);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chat_vectors),
        cmocka_unit_test(test_jinja_vectors),
        cmocka_unit_test(test_chat_templates),
        cmocka_unit_test(test_refused_when_compiled),
        cmocka_unit_test(test_errors_name_the_line),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_long_chat),
        cmocka_unit_test(test_load_forms),
        cmocka_unit_test(test_load_for_tools),
        cmocka_unit_test(test_strftime_now),
        cmocka_unit_test(test_mutated),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
