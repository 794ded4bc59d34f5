/* common/conf: precedence, ranges, units, and that every mistake is named with its place. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/conf/daemon.h"
#include "tests/unit/conf_rig.h"

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
static const struct bt_conf_schema schema = {.daemon = "kvstore",
                                             .summary = "A test.",
                                             .tables = tables,
                                             .table_lens = lens,
                                             .conf_size = sizeof(struct conf)};

static struct conf c;

/* Runs bt_conf_main; returns what it returned. */
static bool run(int *code, int argc, char **argv)
{
    rig_listen();
    bool ok = bt_conf_main(&schema, argc, argv, &c, code);
    rig_heard();
    return ok;
}
#define RUN(code, ...)                                                                             \
    run(code, (int)BT_ARRAY_LEN(((char *[]){__VA_ARGS__})), (char *[]){__VA_ARGS__})

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
        {"node: {id: a}\nmodel: {path: [m]}\n", ":2: model.path: this key needs one value"},
        {"node: {id: a}\nmodel: {path: m}\netcd: {endpoints: x}\n", "this key needs a list"},
        {"model: {path: m}\n", "node.id is required"},
        {"node: {id: a\n", "not valid YAML"},
        {"- a\n- b\n", ":1: the file must be a mapping"},
        {"node: {id: a}\nmodel: {path: m}\nlog: {level: loud}\n", "log.level: \"loud\""},
        /* what is not one of the subset's: aliases cannot grow, merges and tags mean nothing */
        {"node: {id: &x a}\nmodel: {path: *x}\n", ":2: anchors and aliases are not supported"},
        {"a: &a [x,x]\nb: &b [*a,*a]\nc: [*b,*b]\n", ":1: unknown key a"},
        {"etcd: {endpoints: [[a, b]]}\n", ":1: a list may hold up to 64 plain values"},
        {"node: {id: a}\nmodel: {path: m}\n<<: {log: {level: info}}\n", "unknown key <<"},
        {"node: {[a]: b}\n", ":1: a key is expected here"},
        {"a: {a: {a: {a: {a: {a: {a: {a: {a: b}}}}}}}}\n", ":1: nested too deeply"},
        {"node: {id: \"a\\0b\"}\nmodel: {path: m}\n", ":1: node.id: the value contains a NUL"},
        {"\"no\\e[31mde\": {id: a}\n", "unknown key no?[31mde"},
        {"node: {id: a}\n\tmodel: {path: m}\n",
         ":2: not valid YAML: found character that cannot start any token (YAML takes spaces"},
        {"node: {id: a}\nmodel: {path: m}\n\xff\n", "not valid YAML"},
        {"node: {id: a}\nmodel: {path: m}\nkv: 7\n", ":3: kv is a section, not a value"},
        {"node: a\n", ":1: node is a section, not a value"},
        /* units, types and ranges */
        {"node: {id: a}\nmodel: {path: m}\nkvstore: {slab_bytes: 1e400}\n", "is not a size"},
        {"node: {id: a}\nmodel: {path: m}\nkvstore: {slab_bytes: nan}\n", "is not a size"},
        {"node: {id: a}\nmodel: {path: m}\nkvstore: {slab_bytes: 4KiBB}\n", "such as 4096, 64MiB"},
        {"node: {id: a}\nmodel: {path: m}\nkvstore: {slab_bytes: 1}\n", "allowed: 4KiB to"},
        {"node: {id: a}\nmodel: {path: m}\nkvstore: {reclaim_ms: 3 days}\n", "is not a time"},
        {"node: {id: a}\nmodel: {path: m}\nkvstore: {transit_max: inf}\n", "is not a number"},
        {"node: {id: a}\nmodel: {path: m}\nkvstore: {transit_max: 1.5}\n", "allowed: 0 to 1"},
        {"node: {id: a}\nmodel: {path: m}\nkv: {block_tokens: 0}\n", "allowed: 1 to 1024"},
        {"node: {id: a}\nmodel: {path: m}\nkv: {block_tokens: 16.5}\n", "is not a whole number"},
        {"node: {id: a}\nmodel: {path: m}\nkv: {block_tokens: 99999999999999999999}\n",
         "is not a whole number"},
        {"node: {id: a}\nmodel: {path: m}\nkv: {flow_chunk_tokens: 100}\n",
         "not a multiple of kv.block_tokens"},
        {"node: {id: ''}\nmodel: {path: m}\n", "node.id is required"},
        /* names are parts of etcd's keys, of certificates and of files */
        {"node: {id: a/b}\nmodel: {path: m}\n", "node.id: \"a/b\" is not a valid name"},
        {"node: {id: -a}\nmodel: {path: m}\n", "node.id: \"-a\" is not a valid name"},
        {"node: {id: 'a b'}\nmodel: {path: m}\n", "node.id: \"a b\" is not a valid name"},
        {"node: {id: a}\nmodel: {path: m}\ncluster: {name: ''}\n",
         "cluster.name: \"\" is not a valid name"},
        {"node: {id: a}\nmodel: {path: m}\nrun_dir: run\n", "run_dir: \"run\" does not begin"},
        {"node: {id: a}\nmodel: {path: m, load_format: gguf}\n", "\"gguf\" is not auto or dummy"},
        {"node: {id: a}\nmodel: {path: m, activations: f8}\n", "\"f8\" is not split or bf16-mlp"},
        {"node: {id: a}\nmodel: {path: m, kv_dtype: fp4}\n", "\"fp4\" is not f16 or fp8"},
        /* addresses */
        {"node: {id: a}\nmodel: {path: m}\nrpc: {listen: 127.0.0.1:65536}\n",
         ":3: rpc.listen: \"127.0.0.1:65536\" is not host:port"},
        {"node: {id: a}\nmodel: {path: m}\nrpc: {listen: localhost}\n", "is not host:port"},
        {"node: {id: a}\nmodel: {path: m}\nrpc: {listen: '::1:80'}\n", "is not host:port"},
        {"node: {id: a}\nmodel: {path: m}\nrpc: {advertise: ':80'}\n", "is not host:port"},
        {"node: {id: a}\nmodel: {path: m}\nhttp: {listen: 'a b:80'}\n", "is not host:port"},
        {"node: {id: a}\nmodel: {path: m}\nhttp: {listen: 'a:-1'}\n", "is not host:port"},
        {"node: {id: a}\nmodel: {path: m}\netcd: {endpoints: []}\n", "etcd.endpoints is empty"},
        {"node: {id: a}\nmodel: {path: m}\netcd: {endpoints: ['http://h:2379']}\n",
         "\"http://h:2379\" is not host:port or https://host:port"},
        {"node: {id: a}\nmodel: {path: m}\ncluster: {tls: {ca: a, key: b}}\n",
         "cluster.tls.cert is missing"},
        {"node: {id: a}\nmodel: {path: m}\netcd: {tls: {cert: a}}\n",
         "cert and key belong together"},
        {"node: {id: a}\nmodel: {path: m}\netcd: {endpoints: ['https://h:1']}\n",
         "https://h:1 needs etcd.tls.ca"},
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

static void good_addresses(void **state)
{
    (void)state;
    static const char *const good[] = {"127.0.0.1:0", "[::1]:65535", "host.name:80",
                                       "[fe80::1%e0]:1", "0.0.0.0:8000"};
    for (size_t i = 0; i < BT_ARRAY_LEN(good); i++) {
        int code = -1;
        char set[64];
        snprintf(set, sizeof(set), "rpc.listen=%s", good[i]);
        assert_false(RUN(&code, "x", "--set", "node.id=a", "--set", "model.path=m", "--set", set,
                         "--check=values"));
        assert_int_equal(code, 0);
    }
}

/* What came in is shown without control characters and cut, in a line of at most 512 bytes. */
static void messages_are_short_and_plain(void **state)
{
    (void)state;
    int code = -1;
    char *big = malloc(100001);
    memset(big, 'k', 100000);
    big[100000] = '\0';
    memcpy(big, "--set=", 6);
    assert_false(RUN(&code, "x", big)); /* no = */
    assert_int_equal(code, 2);
    assert_true(strlen(err) <= 513);
    big[50] = '=';
    assert_false(RUN(&code, "x", big));
    assert_int_equal(code, 2);
    for (char *line = strtok(err, "\n"); line != NULL; line = strtok(NULL, "\n")) {
        assert_true(strlen(line) <= 512);
    }
    assert_false(RUN(&code, "x", "--fro\x1b[31mb\nnicate"));
    assert_int_equal(code, 2);
    assert_null(strchr(err, '\x1b'));
    assert_non_null(strstr(err, "unknown option --fro?[31mb?nicate"));
    FILE *f = fopen(path, "w"); /* a key of 900 letters, then a file beyond the limit */
    fprintf(f, "%.900s: 1\n", big + 60);
    fclose(f);
    assert_false(RUN(&code, "x", "--config", path));
    assert_non_null(strstr(err, ":1: unknown key kkk"));
    assert_true(strlen(err) < 2048);
    f = fopen(path, "w");
    for (int i = 0; i < 11; i++) {
        fputs(big, f);
    }
    fclose(f);
    assert_false(RUN(&code, "x", "--config", path));
    assert_non_null(strstr(err, "larger than 1 MiB"));
    free(big);
}

/* An editor's white space at the end is not of the secret, and all daemons must leave it out alike:
 * what they tell etcd is its hash. */
static void a_secret_ends_before_white_space(void **state)
{
    (void)state;
    static struct bt_secret a, b;
    char why[256] = "";
    write_file("se cret");
    assert_int_equal(chmod(path, 0600), 0);
    assert_int_equal(bt_conf_secret_read(path, &a, why, sizeof(why)), BT_OK);
    assert_int_equal(a.len, 7);
    assert_memory_equal(a.bytes, "se cret", 7);
    write_file("se cret \r\n\n");
    assert_int_equal(bt_conf_secret_read(path, &b, why, sizeof(why)), BT_OK);
    assert_int_equal(b.id_len, BT_SHA256_LEN);
    assert_memory_equal(a.id, b.id, BT_SHA256_LEN);

    struct bt_conf_common common = {.kv_salt_file = path};
    assert_true(bt_conf_secret_id(&common, &b));
    assert_int_equal(b.len, 0); /* wiped */
    assert_memory_equal(a.id, b.id, BT_SHA256_LEN);
    common.kv_salt_file = NULL;
    assert_true(bt_conf_secret(&common, &b));
    assert_int_equal(b.len + b.id_len, 0);
    common.kv_salt_file = dir;
    assert_false(bt_conf_secret(&common, &b));
}

static void addresses_and_names(void **state)
{
    (void)state;
    static const struct {
        const char *model, *id;
    } table[] = {{"llama", "llama"}, {"/m/llama", "llama"}, {"/m/llama//", "llama"}};
    for (size_t i = 0; i < BT_ARRAY_LEN(table); i++) {
        struct bt_conf_common common = {.model_path = (char *)(uintptr_t)table[i].model};
        char *id = bt_conf_model_id(&common);
        assert_string_equal(id, table[i].id);
        free(id);
        common.model_served_name = (char *)(uintptr_t) "shop";
        id = bt_conf_model_id(&common);
        assert_string_equal(id, "shop");
        free(id);
    }
    char *addr = bt_conf_dialled("[::1]:0", NULL, 7001);
    assert_string_equal(addr, "[::1]:7001");
    free(addr);
    addr = bt_conf_dialled("0.0.0.0:0", "n1:7", 7001);
    assert_string_equal(addr, "n1:7");
    free(addr);
}

/* kv.salt_file: what is no secret must not pass for one. */
static void secrets_are_looked_at(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        mode_t mode;
        int code;
        const char *expect;
    } table[] = {
        {"secret\n", 0600, 0, ""},
        {"secret\n", 0640, 0, ""},
        {"secret\n", 0644, 2, "open to everybody (mode 0644): chmod 0600 it, or 0640"},
        {"secret\n", 0660, 2, "open to writes of its group (mode 0660): chmod 0600 it"},
        {"", 0600, 2, "1 to 4096 bytes"},
        {" \r\n\n", 0600, 2, "1 to 4096 bytes"},
        {NULL, 0600, 2, "1 to 4096 bytes"},
    };
    char set[128], big[5000];
    memset(big, 's', sizeof(big) - 1);
    big[sizeof(big) - 1] = '\0';
    for (size_t i = 0; i < BT_ARRAY_LEN(table); i++) {
        int code = -1;
        write_file(table[i].text == NULL ? big : table[i].text);
        assert_int_equal(chmod(path, table[i].mode), 0);
        snprintf(set, sizeof(set), "kv.salt_file=%s", path);
        assert_false(RUN(&code, "x", "--set", "node.id=a", "--set", "model.path=m", "--set", set,
                         "--check=values"));
        assert_int_equal(code, table[i].code);
        assert_non_null(strstr(err, table[i].expect));
    }
    int code = -1;
    assert_int_equal(chmod(path, 0644), 0);
    snprintf(set, sizeof(set), "kv.salt_file=%s", dir);
    assert_false(RUN(&code, "x", "--set", "node.id=a", "--set", "model.path=m", "--set", set));
    assert_int_equal(code, 2);
    assert_non_null(strstr(err, "it is a directory"));
    assert_false(RUN(&code, "x", "--set", "node.id=a", "--set", "model.path=m", "--set",
                     "kv.salt_file=/nonexistent"));
    assert_non_null(strstr(err, "/nonexistent cannot be read: No such file"));
}

static void lists_have_a_limit(void **state)
{
    (void)state;
    int code = -1;
    char set[1024] = "etcd.endpoints=a:1";
    for (int i = 0; i < 64; i++) {
        strcat(set, ",a:1");
    }
    assert_false(RUN(&code, "x", "--set", "node.id=a", "--set", "model.path=m", "--set", set));
    assert_int_equal(code, 2);
    assert_non_null(strstr(err, "up to 64 values"));
}

static void the_environment_is_checked_too(void **state)
{
    (void)state;
    int code = -1;
    setenv("BATON_KV_BLOCK_TOKENS", "lots", 1);
    assert_false(RUN(&code, "x", "--set", "node.id=a", "--set", "model.path=m"));
    unsetenv("BATON_KV_BLOCK_TOKENS");
    assert_int_equal(code, 2);
    assert_non_null(strstr(err, "BATON_KV_BLOCK_TOKENS: \"lots\""));
    /* A misspelt name is told of; what belongs to others is not. */
    setenv("BATON_KV_BLOCK_TOKEN", "16", 1);
    setenv("BATON_ADDR", "x", 1);
    assert_false(RUN(&code, "x", "--set", "node.id=a", "--set", "model.path=m", "--check=values"));
    unsetenv("BATON_KV_BLOCK_TOKEN");
    unsetenv("BATON_ADDR");
    assert_int_equal(code, 0);
    assert_string_equal(
        err, "environment: BATON_KV_BLOCK_TOKEN is not a key and is ignored; did you mean "
             "BATON_KV_BLOCK_TOKENS?\n");
}

static void check_says_good_and_ends(void **state)
{
    (void)state;
    int code = -1;
    write_file("node: {id: a}\nmodel: {path: m}\n");
    assert_false(RUN(&code, "x", "--config", path, "--check=values"));
    assert_int_equal(code, 0);
}

static bt_status_t reload(const char *text)
{
    write_file(text);
    rig_listen();
    bt_status_t st = bt_conf_reload(&schema, &c);
    rig_heard();
    return st;
}

#define GOOD "node: {id: a}\nmodel: {path: m}\nlog: {level: info}\n"

static void a_reload_is_checked_and_keeps_the_order(void **state)
{
    (void)state;
    int code = -1;
    write_file(GOOD);
    assert_true(RUN(&code, "x", "--config", path, "--set", "kvstore.reclaim_ms=2s"));
    assert_int_equal(reload("node: {id: a}\nmodel: {path: m}\nlog: {level: debug}\n"), BT_OK);
    assert_string_equal(c.common.log_level, "debug");
    assert_string_equal(err, ""); /* what --set said still stands and has not changed */
    /* mistakes change nothing: in a row that is reloaded, in another, across rows */
    assert_int_equal(reload("node: {id: a}\nmodel: {path: m}\nlog: {level: loud}\n"),
                     BT_ERR_CONFIG);
    assert_non_null(strstr(err, "log.level: \"loud\" is not"));
    assert_int_equal(reload(GOOD "kvstore: {slab_bytes: 1}\n"), BT_ERR_CONFIG);
    assert_int_equal(reload(GOOD "kv: {block_tokens: 48}\n"), BT_ERR_CONFIG);
    assert_int_equal(reload("log: {level: info}\n"), BT_ERR_CONFIG); /* node.id is gone */
    assert_string_equal(c.common.log_level, "debug");
    /* what waits for the next start is named, and waits */
    assert_int_equal(reload(GOOD "kvstore: {slab_bytes: 1GiB, reclaim_ms: 5s}\n"
                                 "etcd: {endpoints: ['a:1', 'b:2']}\n"),
                     BT_OK);
    assert_non_null(strstr(err, ": kvstore.slab_bytes has changed; that takes effect at the next"));
    assert_non_null(strstr(err, ": etcd.endpoints has changed"));
    assert_null(strstr(err, "reclaim_ms")); /* --set wins over the file */
    assert_int_equal(c.slab_bytes, 64ull << 20);
    assert_string_equal(c.common.log_level, "info");
    /* a row that is gone has its default again */
    assert_int_equal(reload("node: {id: a}\nmodel: {path: m}\nlog: {level: warn}\n"), BT_OK);
    assert_int_equal(reload("node: {id: a}\nmodel: {path: m}\n"), BT_OK);
    assert_string_equal(c.common.log_level, "info");
    bt_conf_cleanup(&schema, &c);
    assert_int_equal(bt_conf_reload(&schema, &c), BT_ERR_NOT_FOUND);
    /* --set wins over a file that is read again, too */
    assert_true(RUN(&code, "x", "--config", path, "--set", "log.level=error"));
    assert_int_equal(reload(GOOD), BT_OK);
    assert_string_equal(c.common.log_level, "error");
    bt_conf_cleanup(&schema, &c);
}

static int setup(void **state)
{
    lens[0] = bt_conf_common_len;
    lens[1] = BT_ARRAY_LEN(rows);
    return rig_setup(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(file_then_environment_then_set),
        cmocka_unit_test(mistakes_are_named_with_file_and_line),
        cmocka_unit_test(bad_files_and_options_are_refused),
        cmocka_unit_test(check_says_good_and_ends),
        cmocka_unit_test(good_addresses),
        cmocka_unit_test(messages_are_short_and_plain),
        cmocka_unit_test(secrets_are_looked_at),
        cmocka_unit_test(a_secret_ends_before_white_space),
        cmocka_unit_test(addresses_and_names),
        cmocka_unit_test(lists_have_a_limit),
        cmocka_unit_test(the_environment_is_checked_too),
        cmocka_unit_test(a_reload_is_checked_and_keeps_the_order),
    };
    return cmocka_run_group_tests(tests, setup, rig_teardown);
}
