/* Inside common/conf: parsing of values, shared by the file reader and the command line. */
#ifndef BT_CONF_PRIV_H
#define BT_CONF_PRIV_H

#include "common/base/buf.h"
#include "common/conf/conf.h"

const struct bt_conf_row *bt_conf_find(const struct bt_conf_schema *s, const char *key);
/* Calls fn for each row of the schema. */
void bt_conf_each(const struct bt_conf_schema *s,
                  void (*fn)(void *arg, const struct bt_conf_row *row), void *arg);
/* The advice about a key that the schema no longer has; NULL: it never had it. */
const char *bt_conf_removed_advice(const struct bt_conf_schema *s, const char *key);
/* Writes why key is not one of the schema's: it was removed, or is misspelt. */
void bt_conf_unknown_text(const struct bt_conf_schema *s, const char *key, char *out, size_t cap);
/* Nearest key of the schema by edit distance, NULL if none is near. Hidden keys are never near. */
const char *bt_conf_suggest(const struct bt_conf_schema *s, const char *key);
/* Sets the member from text. On false, err gives the fault and the allowed range. */
bool bt_conf_set(const struct bt_conf_row *row, void *conf, const char *text, char *err,
                 size_t err_cap);
/* BATON_KV_BLOCK_TOKENS of kv.block_tokens. */
void bt_conf_env_name(const char *key, char *out, size_t cap);
/* The key whose environment variable was probably meant by name; NULL: name is one, or none is
 * near. */
const char *bt_conf_suggest_env(const struct bt_conf_schema *s, const char *name);
/* A limit of the row as an operator would write it: 64KiB, 2s, 0.5. */
void bt_conf_bound_text(const struct bt_conf_row *row, double v, char *out, size_t cap);
/* Sets a LIST member from n strings. */
void bt_conf_set_list(const struct bt_conf_row *row, void *conf, const char *const *items,
                      size_t n);
/* Reads the YAML file; errors "FILE:LINE: ..." on stderr. *whole_p: it was read to its end. */
bool bt_conf_read_file(const struct bt_conf_schema *s, const char *path, void *conf, bool *whole_p);
void bt_conf_print_help(const struct bt_conf_schema *s);
void bt_conf_print_example(const struct bt_conf_schema *s);
/* "key: value" for each key; nothing behind the colon: it is not set. A list has commas. */
void bt_conf_print_values(const struct bt_conf_schema *s, const void *conf);
/* The daemon's section of docs/CONFIG.md without the keys that all daemons have; common: only
 * those. */
void bt_conf_print_docs(const struct bt_conf_schema *s, bool common);

#define BT_CONF_ITEMS_MAX 64 /* values of a list */

/* Whether text is host:port or [v6]:port with a port from 0 to 65535. */
bool bt_conf_is_addr(const char *text);
/* Prints one message to stderr: a line of at most 512 bytes. Control characters (from a file or an
 * argument) become '?'. */
void bt_conf_say(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* Looks at what conf names on this host. False: said each fault on stderr. */
bool bt_conf_look(const struct bt_conf_schema *s, const void *conf) BT_MUST_CHECK;

#endif
