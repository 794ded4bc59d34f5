/* The YAML file: maps, lists and scalars only; every mistake is reported with file and line. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <yaml.h>

#include "common/base/file.h"
#include "common/conf/conf_priv.h"

#define DEPTH_MAX 8
#define FILE_MAX  (1 << 20)

struct reader {
    const struct bt_conf_schema *schema;
    const char *path;
    void *conf;
    bool ok;
    yaml_parser_t parser;
    char key[DEPTH_MAX][64];
    unsigned depth;
    const struct bt_conf_row *seen[256];
    size_t n_seen;
};

__attribute__((format(printf, 3, 4))) static void complain(struct reader *r, size_t line,
                                                           const char *fmt, ...)
{
    char text[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    bt_conf_say("%.200s:%zu: %s", r->path, line + 1, text);
    r->ok = false;
}

static bool next(struct reader *r, yaml_event_t *ev)
{
    if (!yaml_parser_parse(&r->parser, ev)) {
        BT_ASSERT(r->parser.error != YAML_MEMORY_ERROR);
        const char *what = r->parser.problem != NULL ? r->parser.problem : "cannot be read";
        complain(r, r->parser.problem_mark.line, "not valid YAML: %s%s", what,
                 strstr(what, "cannot start any token") != NULL
                     ? " (YAML takes spaces, no tabs; values with special characters in quotes)"
                     : "");
        return false;
    }
    return true;
}

static void full_key(const struct reader *r, char *out, size_t cap)
{
    size_t n = 0;
    out[0] = '\0';
    for (unsigned i = 0; i < r->depth && n < cap; i++) {
        n += (size_t)snprintf(out + n, cap - n, "%s%s", i > 0 ? "." : "", r->key[i]);
    }
}

static bool is_section(const struct reader *r, const char *key)
{
    size_t n = strlen(key);
    for (size_t t = 0; r->schema->tables[t] != NULL; t++) {
        for (size_t i = 0; i < r->schema->table_lens[t]; i++) {
            const char *k = r->schema->tables[t][i].key;
            if (n != 0 && strncmp(k, key, n) == 0 && k[n] == '.') {
                return true;
            }
        }
    }
    return false;
}

/* Finds the row of the current key. Unknown and repeated keys get a message. */
static const struct bt_conf_row *row_here(struct reader *r, size_t line)
{
    char key[DEPTH_MAX * 64];
    full_key(r, key, sizeof(key));
    const struct bt_conf_row *row = bt_conf_find(r->schema, key);
    if (row == NULL) {
        if (is_section(r, key)) {
            complain(r, line, "%s is a section, not a value: write its keys below it, indented",
                     key);
            return NULL;
        }
        char why[400];
        bt_conf_unknown_text(r->schema, key, why, sizeof(why));
        complain(r, line, "%s", why);
        return NULL;
    }
    for (size_t i = 0; i < r->n_seen; i++) {
        if (r->seen[i] == row) {
            complain(r, line, "%s is given twice", key);
            return NULL;
        }
    }
    if (r->n_seen < BT_ARRAY_LEN(r->seen)) {
        r->seen[r->n_seen++] = row;
    }
    return row;
}

/* "section:" without keys, as in a file whose keys are all commented out. */
static bool empty_section(const struct reader *r, const yaml_event_t *ev)
{
    char key[DEPTH_MAX * 64];
    if (ev->data.scalar.length != 0 || ev->data.scalar.style != YAML_PLAIN_SCALAR_STYLE) {
        return false;
    }
    full_key(r, key, sizeof(key));
    return is_section(r, key);
}

static void scalar(struct reader *r, const yaml_event_t *ev)
{
    char err[256];
    if (empty_section(r, ev)) {
        return;
    }
    const struct bt_conf_row *row = row_here(r, ev->start_mark.line);
    if (row != NULL && strlen((const char *)ev->data.scalar.value) != ev->data.scalar.length) {
        complain(r, ev->start_mark.line, "%s: the value contains a NUL character", row->key);
    } else if (row != NULL && row->type == BT_CONF_LIST && !row->one_is_list) {
        complain(r, ev->start_mark.line, "%s: this key needs a list: write [item, item]", row->key);
    } else if (row != NULL &&
               !bt_conf_set(row, r->conf, (const char *)ev->data.scalar.value, err, sizeof(err))) {
        complain(r, ev->start_mark.line, "%s: %s", row->key, err);
    }
}

static bool sequence(struct reader *r, size_t line)
{
    char *items[BT_CONF_ITEMS_MAX];
    size_t n = 0;
    bool alive = true;
    const struct bt_conf_row *row = row_here(r, line);
    if (row != NULL && row->type != BT_CONF_LIST) {
        complain(r, line, "%s: this key needs one value, not a list", row->key);
        row = NULL;
    }
    for (;;) {
        yaml_event_t ev;
        if (!next(r, &ev)) {
            alive = false;
            break;
        }
        if (ev.type == YAML_SEQUENCE_END_EVENT) {
            yaml_event_delete(&ev);
            break;
        }
        if (ev.type != YAML_SCALAR_EVENT || n == BT_CONF_ITEMS_MAX) {
            complain(r, ev.start_mark.line, "a list may hold up to %d plain values",
                     BT_CONF_ITEMS_MAX);
            yaml_event_delete(&ev);
            alive = false;
            break;
        }
        items[n++] = bt_strdup((const char *)ev.data.scalar.value);
        yaml_event_delete(&ev);
    }
    if (alive && row != NULL) {
        bt_conf_set_list(row, r->conf, (const char *const *)items, n);
    }
    for (size_t i = 0; i < n; i++) {
        free(items[i]);
    }
    return alive;
}

/* Reads the pairs of a mapping after its start event. */
static bool mapping(struct reader *r)
{
    if (r->depth == DEPTH_MAX) {
        complain(r, r->parser.mark.line, "nested too deeply");
        return false;
    }
    for (;;) {
        yaml_event_t ev;
        if (!next(r, &ev)) {
            return false;
        }
        if (ev.type == YAML_MAPPING_END_EVENT) {
            yaml_event_delete(&ev);
            return true;
        }
        if (ev.type != YAML_SCALAR_EVENT) {
            complain(r, ev.start_mark.line, "a key is expected here");
            yaml_event_delete(&ev);
            return false;
        }
        if (ev.data.scalar.length >= sizeof(r->key[0])) {
            complain(r, ev.start_mark.line, "unknown key %.60s...",
                     (const char *)ev.data.scalar.value);
            yaml_event_delete(&ev);
            return false;
        }
        snprintf(r->key[r->depth], sizeof(r->key[0]), "%s", (const char *)ev.data.scalar.value);
        r->depth++;
        yaml_event_delete(&ev);
        if (!next(r, &ev)) {
            return false;
        }
        bool alive = true;
        if (ev.type == YAML_SCALAR_EVENT) {
            scalar(r, &ev);
        } else if (ev.type == YAML_SEQUENCE_START_EVENT) {
            alive = sequence(r, ev.start_mark.line);
        } else if (ev.type == YAML_MAPPING_START_EVENT) {
            alive = mapping(r);
        } else {
            complain(r, ev.start_mark.line, "anchors and aliases are not supported");
            alive = false;
        }
        yaml_event_delete(&ev);
        r->depth--;
        if (!alive) {
            return false;
        }
    }
}

static bool document(struct reader *r)
{
    bool alive = true;
    yaml_event_t ev;
    while (alive && next(r, &ev)) {
        yaml_event_type_t t = ev.type;
        size_t line = ev.start_mark.line;
        bool empty = t == YAML_SCALAR_EVENT && ev.data.scalar.length == 0;
        yaml_event_delete(&ev);
        if (t == YAML_STREAM_END_EVENT) {
            return true;
        }
        if (t == YAML_MAPPING_START_EVENT) {
            alive = mapping(r);
        } else if (t == YAML_SEQUENCE_START_EVENT || (t == YAML_SCALAR_EVENT && !empty)) {
            complain(r, line, "the file must be a mapping of keys to values");
            return false;
        }
    }
    return false;
}

bool bt_conf_read_file(const struct bt_conf_schema *s, const char *path, void *conf, bool *whole_p)
{
    struct stat st;
    *whole_p = false;
    const char *why;
    FILE *f = bt_file_open(path, &st, &why);
    if (f == NULL) {
        bt_conf_say("%s: cannot be read: %s", path, why);
        return false;
    }
    if (st.st_size > FILE_MAX) {
        bt_conf_say("%s: is larger than 1 MiB", path);
        fclose(f);
        return false;
    }
    struct reader r = {.schema = s, .path = path, .conf = conf, .ok = true};
    BT_ASSERT(yaml_parser_initialize(&r.parser));
    yaml_parser_set_input_file(&r.parser, f);
    *whole_p = document(&r);
    yaml_parser_delete(&r.parser);
    fclose(f);
    return *whole_p && r.ok;
}
