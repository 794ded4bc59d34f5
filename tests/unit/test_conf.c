/* common/conf: precedence, ranges, units, and that every mistake is named with its place. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/conf/conf.h"

struct conf {
    struct bt_conf_common common;
    uint64_t slab_bytes, reclaim_ms;
    bool routable;
    double transit;
};
static const struct bt_conf_row rows[] = {
    {.key = "kvstore.slab_bytes",
     .type = BT_CONF_SIZE,
     .offset = offsetof(struct conf, slab_bytes),
     .def = "64MiB",
     .min = 4096,
     .max = 0x1p50,
     .doc = "Slab."},
    {.key = "kvstore.reclaim_ms",
     .type = BT_CONF_MS,
     .offset = offsetof(struct conf, reclaim_ms),
     .def = "30s",
     .doc = "Reclaim."},
    {.key = "kvstore.wire.allow_routable",
     .type = BT_CONF_BOOL,
     .offset = offsetof(struct conf, routable),
     .def = "false",
     .doc = "Routable."},
    {.key = "kvstore.transit_max",
     .type = BT_CONF_FLOAT,
     .offset = offsetof(struct conf, transit),
     .def = "0.5",
     .min = 0,
     .max = 1,
     .doc = "Share."},
};
static const struct bt_conf_row *const tables[] = {bt_conf_common_rows, rows, NULL};
static size_t lens[2];
static const struct bt_conf_schema schema = {"kvstore", "A test.",           tables,
                                             lens,      sizeof(struct conf), NULL};

static char dir[] = "/tmp/baton-test-conf-XXXXXX", path[64], err_path[64];
static struct conf c;
static char err[4096];

/* Runs bt_conf_main with stderr captured; returns what it returned. */
static bool run(int *code, int argc, char **argv)
{
    fflush(stderr);
    int saved = dup(2);
    assert_non_null(freopen(err_path, "w", stderr));
    bool ok = bt_conf_main(&schema, argc, argv, &c, code);
    fflush(stderr);
    dup2(saved, 2);
    close(saved);
    FILE *f = fopen(err_path, "r");
    size_t n = fread(err, 1, sizeof(err) - 1, f);
    err[n] = '\0';
    fclose(f);
    return ok;
}
#define RUN(code, ...)                                                                             \
    run(code, (int)BT_ARRAY_LEN(((char *[]){__VA_ARGS__})), (char *[]){__VA_ARGS__})

static void write_file(const char *text)
{
    FILE *f = fopen(path, "w");
    fputs(text, f);
    fclose(f);
}

static void file_then_environment_then_set(void **state)
{
    (void)state;
    int code = -1;
    write_file("node: {id: n1}\nmodel:\n  path: /m\nkv:\n  block_tokens: 32\n"
               "etcd: {endpoints: ['a:1', \"b:2\"]}\nkvstore:\n  slab_bytes: 1GiB\n"
               "  wire:\n    allow_routable: true\n");
    setenv("BATON_KV_BLOCK_TOKENS", "16", 1);
    assert_true(RUN(&code, "x", "--config", path, "--set", "kvstore.reclaim_ms=2s"));
    unsetenv("BATON_KV_BLOCK_TOKENS");
    assert_string_equal(c.common.node_id, "n1");
    assert_int_equal(c.common.kv_block_tokens, 16);
    assert_int_equal(c.slab_bytes, 1ull << 30);
    assert_int_equal(c.reclaim_ms, 2000);
    assert_true(c.routable);
    assert_string_equal(c.common.etcd_endpoints[1], "b:2");
    assert_null(c.common.etcd_endpoints[2]);
    bt_conf_cleanup(&schema, &c);
}

struct mistake {
    const char *file, *expect;
};
static void mistakes_are_named_with_file_and_line(void **state)
{
    (void)state;
    static const struct mistake table[] = {
        {"node: {id: a}\nmodel: {path: m}\nkv:\n  block_token: 16\n",
         ":4: unknown key kv.block_token, did you mean kv.block_tokens?"},
        {"node: {id: a}\nmodel: {path: m}\nkv: {block_tokens: 48}\n",
         "kv.block_tokens: 48 is not a power of two"},
        {"node: {id: a}\nmodel: {path: m}\nkv: {block_tokens: many}\n",
         ":3: kv.block_tokens: \"many\" is not a whole number"},
        {"node: {id: a}\nmodel: {path: m}\nkv: {block_tokens: 4096}\n",
         "out of range, allowed: 1 to 1024"},
        {"node: {id: a}\nmodel: {path: m}\nkvstore: {slab_bytes: 12XB}\n",
         ":3: kvstore.slab_bytes: \"12XB\" is not a size"},
        {"node: {id: a}\nmodel: {path: m}\nkvstore: {slab_bytes: -1}\n", "is not a size"},
        {"node: {id: a}\nmodel: {path: m}\nkvstore: {wire: {allow_routable: yes}}\n",
         "\"yes\" is not true or false"},
        {"node: {id: a}\nmodel: {path: m}\nnode: {id: b}\n", ":3: node.id is given twice"},
        {"node: {id: a}\nmodel: {path: [m]}\n", ":2: model.path: one value is wanted"},
        {"node: {id: a}\nmodel: {path: m}\netcd: {endpoints: x}\n", "a list is wanted"},
        {"model: {path: m}\n", "node.id is required"},
        {"node: {id: a\n", "not valid YAML"},
        {"- a\n- b\n", ":1: the file must be a mapping"},
        {"node: {id: a}\nmodel: {path: m}\nlog: {level: loud}\n", "log.level: \"loud\""},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(table); i++) {
        int code = -1;
        write_file(table[i].file);
        assert_false(RUN(&code, "x", "--config", path));
        assert_int_equal(code, 2);
        if (strstr(err, table[i].expect) == NULL) {
            fail_msg("row %zu: wanted \"%s\" in: %s", i, table[i].expect, err);
        }
    }
}

static void bad_files_and_options_are_refused(void **state)
{
    (void)state;
    int code = -1;
    assert_false(RUN(&code, "x", "--config", "/nonexistent.yaml"));
    assert_int_equal(code, 2);
    assert_non_null(strstr(err, "No such file"));
    assert_false(RUN(&code, "x", "--config", dir));
    assert_non_null(strstr(err, "is a directory"));
    assert_false(RUN(&code, "x", "--frobnicate"));
    assert_non_null(strstr(err, "unknown option --frobnicate"));
    assert_false(RUN(&code, "x", "--set", "kv.blocktokens=4"));
    assert_non_null(strstr(err, "did you mean kv.block_tokens?"));
    assert_false(RUN(&code, "x", "--set"));
    assert_int_equal(code, 2);
}

static void check_says_good_and_ends(void **state)
{
    (void)state;
    int code = -1;
    write_file("node: {id: a}\nmodel: {path: m}\n");
    assert_false(RUN(&code, "x", "--config", path, "--check"));
    assert_int_equal(code, 0);
}

static int setup(void **state)
{
    (void)state;
    lens[0] = bt_conf_common_len;
    lens[1] = BT_ARRAY_LEN(rows);
    if (mkdtemp(dir) == NULL) {
        return -1;
    }
    snprintf(path, sizeof(path), "%s/c.yaml", dir);
    snprintf(err_path, sizeof(err_path), "%s/err", dir);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    unlink(path);
    unlink(err_path);
    return rmdir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(file_then_environment_then_set),
        cmocka_unit_test(mistakes_are_named_with_file_and_line),
        cmocka_unit_test(bad_files_and_options_are_refused),
        cmocka_unit_test(check_says_good_and_ends),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
