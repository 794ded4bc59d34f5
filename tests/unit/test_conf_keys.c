/* The keys of all daemons: every key accepts its limits and refuses what is beyond them, words that
 * it does not know, and values of another type; every removed key is answered with what to do. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <unistd.h>

#include "common/conf/conf_priv.h"
#include "common/worker/conf.h"
#include "conductor/conf.h"
#include "kvstore/conf.h"
#include "tests/unit/conf_rig.h"

#define KEYS_MAX   70 /* of all daemons together */
#define HIDDEN_MAX 32 /* set by tests and benchmarks only */

static union {
    struct bt_conf_common common;
    struct bt_conductor_conf conductor;
    struct bt_kvstore_conf kvstore;
    struct bt_worker_conf worker;
} conf;

static const struct bt_conf_schema *schema_of(size_t i)
{
    const struct bt_conf_schema *all[] = {bt_conductor_schema(), bt_worker_schema(false),
                                          bt_worker_schema(true), &bt_kvstore_schema};
    return i < BT_ARRAY_LEN(all) ? all[i] : NULL;
}

/* Starts a daemon's configuration with one more --set (NULL: none) and the file (NULL: none), as
 * far as --check=values goes. Returns the exit status; err has what came to stderr. */
static int start(const struct bt_conf_schema *s, const char *set, const char *file)
{
    char *argv[] = {"x",     "--check=values",       "--set",    "node.id=a",
                    "--set", "model.path=m",         "--config", path,
                    "--set", (char *)(uintptr_t)set, NULL};
    int code = -1;
    write_file(file != NULL ? file : "");
    rig_listen();
    bool ok = bt_conf_main(s, set != NULL ? 10 : 8, argv, &conf, &code);
    rig_heard();
    assert_false(ok);
    return code;
}

/* `--set key=value` must fail and the text must name the key (of certificates: their section, as
 * they are checked together) and say why. */
static void refused(const struct bt_conf_schema *s, const char *key, const char *value,
                    const char *why)
{
    char set[256], named[101];
    snprintf(set, sizeof(set), "%s=%s", key, value);
    assert_int_equal(start(s, set, NULL), 2);
    const char *tls = strstr(key, ".tls.");
    snprintf(named, sizeof(named), "%.*s", tls != NULL ? (int)(tls - key) + 4 : 100, key);
    if (strstr(err, named) == NULL || strstr(err, why) == NULL) {
        fail_msg("%s: wanted \"%s\" in: %s", set, why, err);
    }
}

static void accepted(const struct bt_conf_row *r, double v)
{
    char text[64], why[256] = "";
    snprintf(text, sizeof(text), "%.15g", v);
    if (!bt_conf_set(r, &conf, text, why, sizeof(why))) {
        fail_msg("%s=%s: %s", r->key, text, why);
    }
}

static void number_within_its_limits(const struct bt_conf_schema *s, const struct bt_conf_row *r)
{
    char text[64];
    bool whole = r->type != BT_CONF_FLOAT;
    assert_true(r->max > r->min); /* no number is without limits */
    accepted(r, r->min);
    accepted(r, r->max);
    double more = whole ? r->max + 1 : r->max + fmax(1e-9, fabs(r->max) * 1e-6);
    snprintf(text, sizeof(text), "%.17g", more);
    if (whole) {
        snprintf(text, sizeof(text), "%.0f", more);
    }
    refused(s, r->key, text, "out of range");
    if (r->min > 0) {
        snprintf(text, sizeof(text), "%.17g", whole ? r->min - 1 : r->min / 2);
        refused(s, r->key, text, "out of range");
    } else {
        refused(s, r->key, "-1", "-1");
    }
    refused(s, r->key, "many", "\"many\" is not");
}

static void limits_hold(void **state)
{
    (void)state;
    const struct bt_conf_schema *s;
    size_t n = 0;
    for (size_t d = 0; (s = schema_of(d)) != NULL; d++) {
        for (size_t t = 0; s->tables[t] != NULL; t++) {
            for (size_t i = 0; i < s->table_lens[t]; i++) {
                const struct bt_conf_row *r = &s->tables[t][i];
                switch (r->type) {
                case BT_CONF_INT:
                case BT_CONF_SIZE:
                case BT_CONF_MS:
                case BT_CONF_FLOAT: number_within_its_limits(s, r); break;
                case BT_CONF_BOOL: refused(s, r->key, "maybe", "is not true or false"); break;
                case BT_CONF_ADDR: refused(s, r->key, "nowhere", "is not host:port"); break;
                case BT_CONF_STR:
                case BT_CONF_LIST: continue; /* words_and_files_are_checked */
                }
                n++;
            }
        }
    }
    assert_true(n > 50);
}

/* Keys with text: what is refused, and why. A key with any text (a path that a start looks at, a
 * name in the API) is in `free_text`. */
static const struct {
    const char *key, *value, *why;
} words[] = {
    {"cluster.name", "a/b", "is not a valid name"},
    {"node.id", "a b", "is not a valid name"},
    {"cluster.tls.ca", "f", "is missing"},
    {"cluster.tls.cert", "f", "is missing"},
    {"cluster.tls.key", "f", "is missing"},
    {"cluster.tls.revoked", "f", "needs"},
    {"etcd.endpoints", "http://h:1", "is not host:port"},
    {"etcd.tls.cert", "f", "both"},
    {"etcd.tls.key", "f", "both"},
    {"run_dir", "run", "does not begin with /"},
    {"model.path", "", "is required"},
    {"model.load_format", "gguf", "is not auto or dummy"},
    {"model.activations", "f8", "is not split or bf16-mlp"},
    {"model.quantize", "int4", "is not none or fp8"},
    {"engine.deterministic", "maybe", "is not true or false"},
    {"model.kv_dtype", "fp4", "is not f16 or fp8"},
    {"model.mtp", "2", "is not true or false"},
    {"kv.salt_file", "/nonexistent", "cannot be read"},
    {"log.level", "loud", "is not error"},
    {"log.format", "xml", "is not logfmt"},
    {"conductor.name", "a b", "is not a valid name"},
    {"conductor.http.allowed_origins", "nonsense", ""},
    {"conductor.http.tls", "/nonexistent", "No such file"},
    {"conductor.api_keys_file", "/nonexistent", ""},
    {"conductor.answer_form", "xml", "is not a known form of answers"},
    {"conductor.access_log", "most", ""},
    {"sched.policy", "best", "there is no"},
    {"sched.admission", "late", "there is no"},
    {"sched.roles", "any", "unknown"},
    {"engine.device", "tpu", "unknown"},
    {"worker.speculate", "medusa", "unknown"},
    {"worker.speculate", "mtp", "needs model.mtp"},
    {"worker.kvstore_user", "no-such-user", ""},
    {"kvstore.eviction", "fifo", "is none of"},
    {"kvstore.wire.listen", "8.8.8.8", ""},
    {"kvstore.wire.transport", "udp", "is neither"},
    {"kvstore.quota.tenants", "*=2", "write NAME=SHARE"},
    {"kvstore.ssd.write_policy", "never", "is none of"},
};
static const char *const free_text[] = {"etcd.tls.ca", "model.served_name", "kvstore.slab_path",
                                        "kvstore.ssd.path"};

static bool is_free_text(const char *key)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(free_text); i++) {
        if (strcmp(free_text[i], key) == 0) {
            return true;
        }
    }
    return false;
}

static void words_are_checked(void **state)
{
    (void)state;
    const struct bt_conf_schema *s;
    for (size_t d = 0; (s = schema_of(d)) != NULL; d++) {
        for (size_t t = 0; s->tables[t] != NULL; t++) {
            for (size_t i = 0; i < s->table_lens[t]; i++) {
                const struct bt_conf_row *r = &s->tables[t][i];
                if ((r->type != BT_CONF_STR && r->type != BT_CONF_LIST) || is_free_text(r->key)) {
                    continue;
                }
                size_t w = 0;
                while (w < BT_ARRAY_LEN(words) && strcmp(words[w].key, r->key) != 0) {
                    w++;
                }
                if (w == BT_ARRAY_LEN(words)) {
                    fail_msg("%s: add a value that it refuses", r->key);
                }
                refused(s, r->key, words[w].value, words[w].why);
            }
        }
    }
}

static void each_key_is_explained_and_they_are_few(void **state)
{
    (void)state;
    const struct bt_conf_schema *s;
    const char *seen[256];
    size_t n = 0, shown = 0;
    for (size_t d = 0; (s = schema_of(d)) != NULL; d++) {
        for (size_t t = 0; s->tables[t] != NULL; t++) {
            for (size_t i = 0; i < s->table_lens[t]; i++) {
                const struct bt_conf_row *r = &s->tables[t][i];
                bool again = false;
                for (size_t k = 0; k < n; k++) {
                    again = again || strcmp(seen[k], r->key) == 0;
                }
                assert_true(r->doc != NULL && strlen(r->doc) >= 9);
                assert_int_equal(r->when == NULL, r->hidden);
                assert_true(r->when == NULL || r->when[strlen(r->when) - 1] == '.');
                if (!again) {
                    seen[n++] = r->key;
                    shown += !r->hidden;
                }
            }
        }
        size_t n_main = 0;
        while (s->main_keys[n_main] != NULL) {
            assert_non_null(bt_conf_find(s, s->main_keys[n_main++]));
        }
        assert_int_equal(n_main, 5);
    }
    if (shown > KEYS_MAX || n - shown > HIDDEN_MAX) {
        fail_msg("%zu keys (at most %d) and %zu hidden ones (at most %d)", shown, KEYS_MAX,
                 n - shown, HIDDEN_MAX);
    }
}

/* "a.b.c" as one line of a file: "a: {b: {c: 1}}". */
static void in_yaml(const char *key, char *out, size_t cap)
{
    size_t n = 0, depth = 0;
    for (; *key != '\0' && n + 8 < cap; key++) {
        if (*key == '.') {
            n += (size_t)snprintf(out + n, cap - n, ": {");
            depth++;
        } else {
            out[n++] = *key;
        }
    }
    snprintf(out + n, cap - n, ": 1%.*s\n", (int)depth, "}}}}");
}

/* In a file, in --set and in the environment. */
static void removed_keys_are_answered(void **state)
{
    (void)state;
    const struct bt_conf_schema *s;
    for (size_t d = 0; (s = schema_of(d)) != NULL; d++) {
        for (const struct bt_conf_removed *r = s->removed; r->key != NULL; r++) {
            char file[256], name[128];
            assert_null(bt_conf_find(s, r->key));
            refused(s, r->key, "1", r->advice);
            in_yaml(r->key, file, sizeof(file));
            assert_int_equal(start(s, NULL, file), 2);
            assert_non_null(strstr(err, ":1: the key "));
            assert_non_null(strstr(err, r->advice));
            bt_conf_env_name(r->key, name, sizeof(name));
            setenv(name, "1", 1);
            assert_int_equal(start(s, NULL, NULL), 0); /* another daemon of this host may know it */
            unsetenv(name);
            assert_non_null(strstr(err, r->advice));
        }
    }
}

/* Each may have half of what the others leave. */
static void three_clients_may_send_the_largest_body(void **state)
{
    (void)state;
    assert_int_equal(bt_conductor_body_total(4 << 20), 256 << 20);
    for (uint64_t body = 1024; body <= 1 << 30; body *= 2) {
        uint64_t left = bt_conductor_body_total(body);
        for (int client = 0; client < 3; client++) {
            assert_true(body <= left - body);
            left -= body;
        }
    }
}

/* Extents are whole blocks, and few only in large indexes. */
static void large_indexes_have_extents(void **state)
{
    (void)state;
    assert_int_equal(bt_conductor_extent_blocks(1048576, 64), 1);
    assert_int_equal(bt_conductor_extent_blocks(4194304, 16), 1);
    assert_int_equal(bt_conductor_extent_blocks(4194305, 64), 8);
    assert_int_equal(bt_conductor_extent_blocks(1000000000, 1), 512);
    assert_int_equal(bt_conductor_extent_blocks(1000000000, 1024), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(limits_hold),
        cmocka_unit_test(words_are_checked),
        cmocka_unit_test(each_key_is_explained_and_they_are_few),
        cmocka_unit_test(removed_keys_are_answered),
        cmocka_unit_test(large_indexes_have_extents),
        cmocka_unit_test(three_clients_may_send_the_largest_body),
    };
    return cmocka_run_group_tests(tests, rig_setup, rig_teardown);
}
