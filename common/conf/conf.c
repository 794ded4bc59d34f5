/* Command line, environment, file and defaults: their precedence, and the message for each
 * mistake. */
#include "common/conf/conf.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/conf/conf_priv.h"
#include "common/conf/secret.h"
#include "common/log/last_words.h"

#define SETS_MAX       256
#define NAME_MAX_BYTES 128

struct args {
    const char *file;
    bool check, check_values; /* --check; --check=values: without checks of this host */
    bool print_values;
    const char *sets[SETS_MAX];
    size_t n_sets;
};

/* Arguments of bt_conf_main, for bt_conf_reload. */
static char *last_file;
static struct args last_args;
static void *last_conf; /* a copy with the file's values, as daemons replace names in theirs */

static void usage_error(const struct bt_conf_schema *s, const char *what, const char *arg)
{
    bt_conf_say("baton-%s: %s%s%s; try --help", s->daemon, what, arg != NULL ? " " : "",
                arg != NULL ? arg : "");
}

/* Returns false if the process must end with *code. */
static bool parse_args(const struct bt_conf_schema *s, int argc, char **argv, struct args *a,
                       int *code)
{
    *code = 2;
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i], *eq;
        bool takes = strcmp(arg, "--config") == 0 || strcmp(arg, "--set") == 0;
        if (takes && i + 1 >= argc) {
            usage_error(s, "a value is missing after", arg);
            return false;
        }
        if (strcmp(arg, "--config") == 0) {
            a->file = argv[++i];
        } else if (strncmp(arg, "--config=", 9) == 0) {
            a->file = arg + 9;
        } else if (strcmp(arg, "--set") == 0 || strncmp(arg, "--set=", 6) == 0) {
            const char *kv = arg[5] == '=' ? arg + 6 : argv[++i];
            eq = strchr(kv, '=');
            if (eq == NULL || a->n_sets == SETS_MAX) {
                usage_error(s, "--set needs KEY=VALUE, not", kv);
                return false;
            }
            a->sets[a->n_sets++] = kv;
        } else if (strcmp(arg, "--check") == 0) {
            a->check = true;
        } else if (strcmp(arg, "--check=values") == 0) {
            a->check = a->check_values = true;
        } else if (strcmp(arg, "--print-values") == 0) {
            a->print_values = true;
        } else {
            *code = 0;
            if (strcmp(arg, "--help") == 0 || strcmp(arg, "-h") == 0) {
                bt_conf_print_help(s);
            } else if (strcmp(arg, "--version") == 0) {
                printf("baton-%s %s\n", s->daemon, bt_version());
            } else if (strcmp(arg, "--print-example") == 0) {
                bt_conf_print_example(s);
            } else if (strcmp(arg, "--print-docs") == 0) {
                bt_conf_print_docs(s, false);
            } else if (strcmp(arg, "--print-docs=common") == 0) {
                bt_conf_print_docs(s, true);
            } else {
                *code = 2;
                usage_error(s, "unknown option", arg);
            }
            return false;
        }
    }
    return true;
}

struct pass {
    void *conf;
    bool ok, missing; /* missing: a key that has no default */
};

static void set_default(void *arg, const struct bt_conf_row *row)
{
    struct pass *p = arg;
    char err[256];
    if (row->def != NULL) {
        /* A failure is an error in the table. */
        BT_ASSERT(bt_conf_set(row, p->conf, row->def, err, sizeof(err)));
    }
}

static void set_from_env(void *arg, const struct bt_conf_row *row)
{
    struct pass *p = arg;
    char name[128], err[256];
    bt_conf_env_name(row->key, name, sizeof(name));
    const char *v = bt_conf_env(name);
    if (v != NULL && !bt_conf_set(row, p->conf, v, err, sizeof(err))) {
        bt_conf_say("environment: %s: %s", name, err);
        p->ok = false;
    }
}

/* Reports an environment variable of a key that no longer exists. True: it was one. */
static bool say_removed_env(const struct bt_conf_schema *s, const char *name)
{
    for (const struct bt_conf_removed *r = s->removed; r != NULL && r->key != NULL; r++) {
        char of[128];
        bt_conf_env_name(r->key, of, sizeof(of));
        if (strcmp(of, name) == 0) {
            bt_conf_say("environment: %s is ignored: the key %s no longer exists: %s", name, r->key,
                        r->advice);
            return true;
        }
    }
    return false;
}

/* Other programs use BATON_... too (batonctl, baton-local, other daemons on this host). So a name
 * without a key is not an error, but a name that is nearly a key's gets a warning. */
static void look_for_misspelt(const struct bt_conf_schema *s)
{
    for (char **e = environ; *e != NULL; e++) {
        char name[128];
        size_t n = strcspn(*e, "=");
        if (strncmp(*e, "BATON_", 6) != 0 || n >= sizeof(name)) {
            continue;
        }
        snprintf(name, sizeof(name), "%.*s", (int)n, *e);
        if (say_removed_env(s, name)) {
            continue;
        }
        const char *key = bt_conf_suggest_env(s, name);
        if (key != NULL) {
            char meant[128];
            bt_conf_env_name(key, meant, sizeof(meant));
            bt_conf_say("environment: %s is not a key and is ignored; did you mean %s?", name,
                        meant);
        }
    }
}

static void check_required(void *arg, const struct bt_conf_row *row)
{
    struct pass *p = arg;
    if (!row->required) {
        return;
    }
    bool missing = false;
    if (row->type == BT_CONF_STR || row->type == BT_CONF_ADDR) {
        const char *v = *(char **)((char *)p->conf + row->offset);
        missing = v == NULL || v[0] == '\0';
    } else if (row->type == BT_CONF_LIST) {
        char **v = *(char ***)((char *)p->conf + row->offset);
        missing = v == NULL || v[0] == NULL;
    }
    if (missing) {
        bt_conf_say("%s is required: set it in the file or with --set %s=...", row->key, row->key);
        p->ok = false;
        p->missing = true;
    }
}

static bool apply_sets(const struct bt_conf_schema *s, const struct args *a, void *conf)
{
    bool ok = true;
    for (size_t i = 0; i < a->n_sets; i++) {
        char key[128], err[256];
        const char *eq = strchr(a->sets[i], '=');
        snprintf(key, sizeof(key), "%.*s", (int)(eq - a->sets[i]), a->sets[i]);
        const struct bt_conf_row *row = bt_conf_find(s, key);
        if (row == NULL) {
            char why[400];
            bt_conf_unknown_text(s, key, why, sizeof(why));
            bt_conf_say("--set: %s", why);
            ok = false;
        } else if (!bt_conf_set(row, conf, eq + 1, err, sizeof(err))) {
            bt_conf_say("--set: %s: %s", key, err);
            ok = false;
        }
    }
    return ok;
}

static bool check_endpoints(char *const *list)
{
    if (list == NULL || list[0] == NULL) {
        bt_conf_say("etcd.endpoints is empty: name at least one host:port");
        return false;
    }
    bool ok = true;
    for (size_t i = 0; list[i] != NULL; i++) {
        bool tls = strncmp(list[i], "https://", 8) == 0;
        if (!bt_conf_is_addr(list[i] + (tls ? 8 : 0))) {
            bt_conf_say("etcd.endpoints: \"%.80s\" is not host:port or https://host:port (no path)",
                        list[i]);
            ok = false;
        }
    }
    return ok;
}

/* A file that is empty, too long or readable by all users cannot be a secret. */
static bool check_secret(const char *key, const char *path)
{
    struct bt_secret s;
    char err[512];
    if (path == NULL) {
        return true;
    }
    bool good = bt_conf_secret_read(path, &s, err, sizeof(err)) == BT_OK;
    explicit_bzero(&s, sizeof(s));
    if (!good) {
        bt_conf_say("%s: %s", key, err);
    }
    return good;
}

/* All keys of a set must be given, or none. */
static bool check_tls(const struct bt_conf_common *c)
{
    size_t n =
        (c->cluster_tls_ca != NULL) + (c->cluster_tls_cert != NULL) + (c->cluster_tls_key != NULL);
    bool ok = true;
    if (n != 0 && n != 3) {
        bt_conf_say("cluster.tls: %s is missing: give ca, cert and key, or none of them",
                    c->cluster_tls_ca == NULL     ? "cluster.tls.ca"
                    : c->cluster_tls_cert == NULL ? "cluster.tls.cert"
                                                  : "cluster.tls.key");
        ok = false;
    }
    if ((c->etcd_tls_cert != NULL) != (c->etcd_tls_key != NULL)) {
        bt_conf_say("etcd.tls: cert and key belong together: give both, or neither");
        ok = false;
    }
    if (c->cluster_tls_revoked != NULL && n == 0) {
        bt_conf_say("cluster.tls.revoked: it needs cluster.tls.ca, cert and key");
        ok = false;
    }
    bool certified = c->etcd_tls_cert != NULL || c->cluster_tls_cert != NULL;
    for (size_t i = 0; ok && c->etcd_endpoints != NULL && c->etcd_endpoints[i] != NULL; i++) {
        bool tls = strncmp(c->etcd_endpoints[i], "https://", 8) == 0;
        if (tls && ((c->etcd_tls_ca == NULL && c->cluster_tls_ca == NULL) || !certified)) {
            bt_conf_say("etcd.endpoints: %.80s needs etcd.tls.ca, .cert and .key, or cluster.tls.*",
                        c->etcd_endpoints[i]);
            ok = false;
        }
    }
    return ok;
}

bool bt_conf_name_good(const char *key, const char *name, char *err, size_t cap)
{
    size_t n = strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-");
    if (n == 0 || n > NAME_MAX_BYTES || name[n] != '\0' || !isalnum((unsigned char)name[0])) {
        snprintf(
            err, cap,
            "%s: \"%.140s\" is not a valid name: use 1 to %d letters, digits and the signs . _ "
            "-, starting with a letter or digit",
            key, name, NAME_MAX_BYTES);
        return false;
    }
    return true;
}

static bool check_names(const struct bt_conf_common *c)
{
    char err[300];
    bool ok = true;
    if (!bt_conf_name_good("cluster.name", c->cluster_name, err, sizeof(err))) {
        bt_conf_say("%s", err);
        ok = false;
    }
    if (!bt_conf_name_good("node.id", c->node_id, err, sizeof(err))) {
        bt_conf_say("%s", err);
        ok = false;
    }
    if (c->run_dir[0] != '/') {
        bt_conf_say("run_dir: \"%.200s\" does not begin with /", c->run_dir);
        ok = false;
    }
    return ok;
}

/* Checks that need more than one row, or a list of allowed words. */
static bool check_common(const struct bt_conf_common *c)
{
    bool ok = check_names(c);
    ok = check_endpoints(c->etcd_endpoints) && ok;
    ok = check_secret("kv.salt_file", c->kv_salt_file) && ok;
    ok = check_tls(c) && ok;
    if ((c->kv_block_tokens & (c->kv_block_tokens - 1)) != 0) {
        bt_conf_say("kv.block_tokens: %lld is not a power of two", (long long)c->kv_block_tokens);
        ok = false;
    }
    if (c->kv_block_tokens > 0 && c->kv_flow_chunk_tokens % c->kv_block_tokens != 0) {
        bt_conf_say("kv.flow_chunk_tokens: %lld is not a multiple of kv.block_tokens (%lld)",
                    (long long)c->kv_flow_chunk_tokens, (long long)c->kv_block_tokens);
        ok = false;
    }
    if (strcmp(c->model_load_format, "auto") != 0 && strcmp(c->model_load_format, "dummy") != 0) {
        bt_conf_say("model.load_format: \"%s\" is not auto or dummy", c->model_load_format);
        ok = false;
    }
    if (strcmp(c->model_activations, "split") != 0 &&
        strcmp(c->model_activations, "bf16-mlp") != 0) {
        bt_conf_say("model.activations: \"%s\" is not split or bf16-mlp", c->model_activations);
        ok = false;
    }
    if (strcmp(c->model_quantize, "none") != 0 && strcmp(c->model_quantize, "fp8") != 0) {
        bt_conf_say("model.quantize: \"%s\" is not none or fp8", c->model_quantize);
        ok = false;
    }
    if (strcmp(c->model_kv_dtype, "f16") != 0 && strcmp(c->model_kv_dtype, "fp8") != 0) {
        bt_conf_say("model.kv_dtype: \"%s\" is not f16 or fp8", c->model_kv_dtype);
        ok = false;
    }
    static const char *const levels[] = {"error", "warn", "info", "debug"};
    bool known = false;
    for (size_t i = 0; i < BT_ARRAY_LEN(levels); i++) {
        known |= strcmp(c->log_level, levels[i]) == 0;
    }
    if (!known) {
        bt_conf_say("log.level: \"%s\" is not error, warn, info or debug", c->log_level);
        ok = false;
    }
    if (strcmp(c->log_format, "logfmt") != 0 && strcmp(c->log_format, "json") != 0) {
        bt_conf_say("log.format: \"%s\" is not logfmt or json", c->log_format);
        ok = false;
    }
    return ok;
}

static bool check_daemon(const struct bt_conf_schema *s, const void *conf)
{
    char err[512] = "";
    if (s->check == NULL || s->check(conf, err, sizeof(err))) {
        return true;
    }
    bt_conf_say("%s", err);
    return false;
}

/* Sets defaults, file (NULL: none), environment and --set, then checks everything. False: a message
 * on stderr says why. */
static bool fill(const struct bt_conf_schema *s, const struct args *a, const char *file, void *conf)
{
    memset(conf, 0, s->conf_size);
    struct pass p = {.conf = conf, .ok = true};
    bool whole = true;
    bt_conf_each(s, set_default, &p);
    if (file != NULL && !bt_conf_read_file(s, file, conf, &whole)) {
        p.ok = false;
    }
    if (!whole) {
        return false; /* a key that seems missing may be in the part that could not be read */
    }
    bt_conf_each(s, set_from_env, &p);
    if (!apply_sets(s, a, conf)) {
        p.ok = false;
    }
    bt_conf_each(s, check_required, &p);
    struct bt_conf_common *c = conf;
    c->kv_flow_chunk_tokens = BT_MAX(c->kv_flow_chunk_tokens, c->kv_block_tokens);
    if (p.missing && file == NULL) {
        bt_conf_say("no configuration file was read: there is no /etc/baton/%s.yaml, and --config "
                    "names none (--print-example prints one)",
                    s->daemon);
    }
    return p.ok && check_common(conf) && check_daemon(s, conf);
}

bool bt_conf_main(const struct bt_conf_schema *s, int argc, char **argv, void *conf, int *exit_code)
{
    bt_log_last_words(); /* logs a crash in a library while the file is read */
    struct args a = {0};
    char path[256];
    memset(conf, 0, s->conf_size);
    if (!parse_args(s, argc, argv, &a, exit_code)) {
        return false;
    }
    snprintf(path, sizeof(path), "/etc/baton/%s.yaml", s->daemon);
    bool want_file = a.file != NULL || access(path, F_OK) == 0;
    const char *file = !want_file ? NULL : a.file != NULL ? a.file : path;
    look_for_misspelt(s);
    if (!fill(s, &a, file, conf)) {
        *exit_code = 2;
        bt_conf_cleanup(s, conf);
        return false;
    }
    if (a.check && !a.check_values && !bt_conf_look(s, conf)) {
        *exit_code = 2;
        bt_conf_cleanup(s, conf);
        return false;
    }
    if (a.check) {
        char text[2048] = "";
        if (s->describe != NULL) {
            s->describe(conf, text, sizeof(text));
        }
        printf("baton-%s: the configuration is good\n%s", s->daemon, text);
        *exit_code = 0;
        bt_conf_cleanup(s, conf);
        return false;
    }
    if (a.print_values) {
        bt_conf_print_values(s, conf);
        *exit_code = 0;
        bt_conf_cleanup(s, conf);
        return false;
    }
    free(last_file);
    last_file = file != NULL ? bt_strdup(file) : NULL;
    last_args = a;
    last_conf = bt_malloc(s->conf_size);
    if (!fill(s, &a, file, last_conf)) { /* the file was changed between the two readings */
        *exit_code = 2;
        bt_conf_cleanup(s, conf);
        return false;
    }
    return true;
}

static bool same_text(const char *a, const char *b)
{
    return a == b || (a != NULL && b != NULL && strcmp(a, b) == 0);
}

static size_t value_bytes(const struct bt_conf_row *row)
{
    switch (row->type) {
    case BT_CONF_BOOL: return sizeof(bool);
    case BT_CONF_FLOAT: return sizeof(double);
    case BT_CONF_INT:
    case BT_CONF_SIZE:
    case BT_CONF_MS: return sizeof(uint64_t);
    case BT_CONF_STR:
    case BT_CONF_ADDR:
    case BT_CONF_LIST: break;
    }
    return sizeof(void *);
}

static bool same_value(const struct bt_conf_row *row, const void *x, const void *y)
{
    if (row->type == BT_CONF_STR || row->type == BT_CONF_ADDR) {
        return same_text(*(char *const *)x, *(char *const *)y);
    }
    if (row->type != BT_CONF_LIST) {
        return memcmp(x, y, value_bytes(row)) == 0;
    }
    char *const *a = *(char **const *)x, *const *b = *(char **const *)y;
    while (a != NULL && b != NULL && *a != NULL && same_text(*a, *b)) {
        a++;
        b++;
    }
    return (a == NULL || *a == NULL) && (b == NULL || *b == NULL);
}

struct change {
    void *conf, *next;
};

/* Puts the old value where the new one was. Rows that are not reloadable keep the value from the
 * start. */
static void take_row(void *arg, const struct bt_conf_row *row)
{
    struct change *c = arg;
    char *now = (char *)c->conf + row->offset, *next = (char *)c->next + row->offset, old[16];
    size_t n = value_bytes(row);
    if (row->reload) {
        memcpy(old, now, n);
        memcpy(now, next, n);
        memcpy(next, old, n);
    } else if (!same_value(row, (char *)last_conf + row->offset, next)) {
        bt_conf_say("%s: %s has changed; that takes effect at the next start", last_file, row->key);
    }
}

static void free_row(void *arg, const struct bt_conf_row *row)
{
    void *at = (char *)arg + row->offset;
    if (row->type == BT_CONF_STR || row->type == BT_CONF_ADDR) {
        free(*(char **)at);
        *(char **)at = NULL;
    } else if (row->type == BT_CONF_LIST) {
        char **list = *(char ***)at;
        for (char **i = list; i != NULL && *i != NULL; i++) {
            free(*i);
        }
        free(list);
        *(char ***)at = NULL;
    }
}

bt_status_t bt_conf_reload(const struct bt_conf_schema *s, void *conf)
{
    if (last_file == NULL) {
        return BT_ERR_NOT_FOUND;
    }
    struct change c = {conf, bt_malloc(s->conf_size)};
    bool ok = fill(s, &last_args, last_file, c.next);
    if (ok) {
        bt_conf_each(s, take_row, &c);
    }
    bt_conf_each(s, free_row, c.next);
    free(c.next);
    return ok ? BT_OK : BT_ERR_CONFIG;
}

void bt_conf_cleanup(const struct bt_conf_schema *s, void *conf)
{
    bt_conf_each(s, free_row, conf);
    if (last_conf != NULL) {
        bt_conf_each(s, free_row, last_conf);
    }
    free(last_conf);
    last_conf = NULL;
    free(last_file);
    last_file = NULL;
}
