/* Configuration: one table per daemon describes every key; the table parses YAML, checks ranges,
 * prints help, an example file and docs/CONFIG.md. The only place that reads the environment. */
#ifndef BT_CONF_CONF_H
#define BT_CONF_CONF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "common/base/base.h"

typedef enum {
    BT_CONF_STR,   /* char *            : NULL or heap string owned by the struct */
    BT_CONF_INT,   /* int64_t           */
    BT_CONF_SIZE,  /* uint64_t bytes    : "64MiB", "1GB", "4096" */
    BT_CONF_MS,    /* uint64_t ms       : "500ms", "2s", "1m"; without a unit ms */
    BT_CONF_FLOAT, /* double            */
    BT_CONF_BOOL,  /* bool              : true|false */
    BT_CONF_ADDR,  /* char *            : as STR, but host:port or [v6]:port, port 0 to 65535 */
    BT_CONF_LIST,  /* char **           : NULL-terminated, from a YAML list or a comma-separated
                      --set */
} bt_conf_type_t;

struct bt_conf_row {
    const char *key; /* dotted: "kv.block_tokens" */
    bt_conf_type_t type;
    size_t offset;   /* of the member in the daemon's configuration struct */
    const char *def; /* default as text, NULL: none (string stays NULL) */
    double min, max; /* for numbers; both 0: no limit */
    bool required;
    bool reload;      /* SIGHUP applies it */
    bool one_is_list; /* of a list: a plain value is a list of one (or comma-separated) */
    bool hidden; /* only tests and benchmarks set it: not in help, example and docs/CONFIG.md */
    const char *doc;
    const char *when; /* a sentence: when an operator changes it; NULL only if hidden */
};

/* A key that earlier versions had. An operator's file that still sets it gets an error. */
struct bt_conf_removed {
    const char *key;
    /* what replaces the key, and what to do: "it is always 8; remove the key" */
    const char *advice;
};

struct bt_conf_schema {
    const char
        *daemon; /* "kvstore": the binary is baton-kvstore, the file /etc/baton/kvstore.yaml */
    const char *summary;
    const struct bt_conf_row *const *tables; /* NULL-terminated list of tables ... */
    const size_t *table_lens;                /* ... and their lengths */
    size_t conf_size;
    const char *const *main_keys;          /* NULL-terminated: what most operators set first */
    const struct bt_conf_removed *removed; /* ends with a row whose key is NULL; NULL: none */
    /* Checks across keys, also for --check; NULL: none. False: err says key, fault and remedy. */
    bool (*check)(const void *conf, char *err, size_t err_cap);
    /* For --check: checks on this host what the configuration names (the model, devices, folders).
     * model.path is a readable directory then. NULL: nothing to check. On false, err gives the key,
     * the fault and the remedy. */
    bool (*look)(const void *conf, char *err, size_t err_cap);
    /* Describes the effect of a checked conf in lines of text, for --check; NULL: nothing. */
    void (*describe)(const void *conf, char *text, size_t cap);
};

/* Keys that every daemon has. Must be the first member of each daemon's struct. */
struct bt_conf_common {
    char *cluster_name;                                        /* cluster.name */
    char *node_id;                                             /* node.id */
    char *cluster_tls_ca, *cluster_tls_cert, *cluster_tls_key; /* cluster.tls.*: files, or NULL */
    char *cluster_tls_revoked; /* cluster.tls.revoked: file, or NULL */
    char **etcd_endpoints;     /* etcd.endpoints: host:port, https:// before it for TLS */
    char *etcd_tls_ca, *etcd_tls_cert, *etcd_tls_key; /* etcd.tls.*: NULL: as cluster.tls.* */
    char *run_dir;                                    /* run_dir: UNIX sockets and pid files */
    char *model_path;                                 /* model.path */
    char *model_served_name;                          /* model.served_name or NULL */
    char *model_load_format;                          /* model.load_format: auto|dummy */
    char *model_activations;                          /* model.activations: split|bf16-mlp */
    bool engine_deterministic;                        /* engine.deterministic */
    char *model_quantize;                             /* model.quantize: none|fp8 */
    char *model_kv_dtype;                             /* model.kv_dtype: f16|fp8 */
    bool model_mtp;                                   /* model.mtp */
    int64_t kv_block_tokens;                          /* kv.block_tokens */
    int64_t kv_flow_chunk_tokens; /* kv.flow_chunk_tokens: tokens of one (chunk, layer) flow item */
    char *kv_salt_file;  /* kv.salt_file: cluster secret for tenant salts, NULL: fixed empty */
    char *rpc_listen;    /* rpc.listen host:port, port 0 = any free */
    char *rpc_advertise; /* rpc.advertise: what peers dial; NULL: the bound address */
    char *http_listen;   /* http.listen: /health and /metrics of this daemon (conductor: its API) */
    char *log_level;     /* log.level error|warn|info|debug */
    char *log_format;    /* log.format logfmt|json */
};
extern const struct bt_conf_row bt_conf_common_rows[];
extern const size_t bt_conf_common_len;

/* For a daemon's `look`. bt_conf_look_dir: whether path is a directory that can be read (write: and
 * written). bt_conf_look_parent: whether path exists, or can be made in the directory above it.
 * bt_conf_look_listen: whether this host can listen on the host of host:port (NULL: nothing to
 * check). On false, a text on stderr gives the key, the fault and the remedy. */
bool bt_conf_look_dir(const char *key, const char *path, bool write) BT_MUST_CHECK;
bool bt_conf_look_parent(const char *key, const char *path, bool write) BT_MUST_CHECK;
bool bt_conf_look_listen(const char *key, const char *addr) BT_MUST_CHECK;
/* Returns whether a daemon could listen on host:port now. why: the reason why not, with the remedy.
 * It is also set if the port was in use only a moment ago. */
bool bt_conf_listen_why(const char *addr, char *why, size_t cap);
/* If path exists, checks that it is a directory that only this user can write
 * (bt_conf_dir_private). */
bool bt_conf_look_own(const char *key, const char *path) BT_MUST_CHECK;

struct stat;
/* Checks a file with a secret: it must belong to this user or root, and must not be readable for
 * everybody or writable for its group. On false, why gives the fault and the remedy. PostgreSQL has
 * the same rules for its keys. */
bool bt_conf_secret_private(const struct stat *st, char *why, size_t cap) BT_MUST_CHECK;
/* Checks a directory in which a daemon keeps its files. OK: it is not a symbolic link, belongs to
 * this user or root, and no other user can write to it. ERR_NOT_FOUND: it does not exist.
 * ERR_CONFIG, ERR_IO: why gives the fault and the remedy. */
bt_status_t bt_conf_dir_private(const char *path, char *why, size_t cap) BT_MUST_CHECK;

/* The user of the machine that text names, by name or number. False: err says so of key. */
bool bt_conf_user(const char *key, const char *text, uid_t *uid_p, char *err,
                  size_t err_cap) BT_MUST_CHECK;

/* Returns whether the name can be part of etcd's keys, certificates, files and metrics: 1 to 128
 * letters, digits and the signs . _ -, beginning with a letter or digit. On false, err says so and
 * names the key. */
bool bt_conf_name_good(const char *key, const char *name, char *err, size_t err_cap) BT_MUST_CHECK;

/* Parses the command line ([--config FILE] [--check] [--set k=v]... [--help] [--version]
 * [--print-values] [--print-example] [--print-docs[=common]]), then the file (default
 * /etc/baton/<daemon>.yaml, which may be absent if every required key is --set), then --set.
 * Environment: BATON_<KEY WITH _> overrides the file and yields to --set. Prints errors as
 * "FILE:LINE: key: what, and the remedy" to stderr. Returns true if the daemon is to go on; false
 * with *exit_code set (0 after --help,
 * --check,
 * --version, --print-*; 2 on an error). conf is caller memory of conf_size bytes. */
bool bt_conf_main(const struct bt_conf_schema *schema, int argc, char **argv, void *conf,
                  int *exit_code) BT_MUST_CHECK;
/* Reads file, environment and --set of the last bt_conf_main again and applies the rows marked
 * reload; of other rows that have changed it says on stderr that they wait for the next start.
 * ERR_CONFIG: there are mistakes, which were printed as by bt_conf_main, and nothing has changed;
 * ERR_NOT_FOUND: there was no file. */
bt_status_t bt_conf_reload(const struct bt_conf_schema *schema, void *conf) BT_MUST_CHECK;
void bt_conf_cleanup(const struct bt_conf_schema *schema, void *conf);

/* Environment variable name (only common/conf calls getenv); NULL if unset. */
const char *bt_conf_env(const char *name);

#endif
