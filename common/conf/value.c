/* Rows and values: converts text to typed members and checks ranges and units. No I/O. */
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/nearest.h"
#include "common/conf/conf_priv.h"

void bt_conf_each(const struct bt_conf_schema *s,
                  void (*fn)(void *arg, const struct bt_conf_row *row), void *arg)
{
    for (size_t t = 0; s->tables[t] != NULL; t++) {
        for (size_t i = 0; i < s->table_lens[t]; i++) {
            fn(arg, &s->tables[t][i]);
        }
    }
}

const struct bt_conf_row *bt_conf_find(const struct bt_conf_schema *s, const char *key)
{
    for (size_t t = 0; s->tables[t] != NULL; t++) {
        for (size_t i = 0; i < s->table_lens[t]; i++) {
            if (strcmp(s->tables[t][i].key, key) == 0) {
                return &s->tables[t][i];
            }
        }
    }
    return NULL;
}

const char *bt_conf_removed_advice(const struct bt_conf_schema *s, const char *key)
{
    for (const struct bt_conf_removed *r = s->removed; r != NULL && r->key != NULL; r++) {
        if (strcmp(r->key, key) == 0) {
            return r->advice;
        }
    }
    return NULL;
}

void bt_conf_unknown_text(const struct bt_conf_schema *s, const char *key, char *out, size_t cap)
{
    const char *advice = bt_conf_removed_advice(s, key);
    const char *near = advice == NULL ? bt_conf_suggest(s, key) : NULL;
    if (advice != NULL) {
        snprintf(out, cap, "the key %s no longer exists: %s", key, advice);
    } else if (near != NULL) {
        snprintf(out, cap, "unknown key %s, did you mean %s?", key, near);
    } else {
        snprintf(out, cap, "unknown key %s", key);
    }
}

const char *bt_conf_suggest(const struct bt_conf_schema *s, const char *key)
{
    const char *best = NULL;
    unsigned best_d = 4; /* a larger distance is not a spelling mistake */
    for (size_t t = 0; s->tables[t] != NULL; t++) {
        for (size_t i = 0; i < s->table_lens[t]; i++) {
            const char *k = s->tables[t][i].key, *last = strrchr(k, '.');
            unsigned d = bt_edit_distance(key, k);
            if (last != NULL && strcmp(key, last + 1) == 0) {
                d = 1; /* the right name, but without its section */
            }
            if (d < best_d && !s->tables[t][i].hidden) {
                best_d = d;
                best = k;
            }
        }
    }
    return best;
}

void bt_conf_env_name(const char *key, char *out, size_t cap)
{
    int n = snprintf(out, cap, "BATON_%s", key);
    for (int i = 6; i < n && (size_t)i + 1 < cap; i++) {
        out[i] = out[i] == '.' ? '_' : (char)toupper((unsigned char)out[i]);
    }
}

const char *bt_conf_suggest_env(const struct bt_conf_schema *s, const char *name)
{
    const char *best = NULL;
    unsigned best_d = 3;
    for (size_t t = 0; s->tables[t] != NULL; t++) {
        for (size_t i = 0; i < s->table_lens[t]; i++) {
            char of[128];
            bt_conf_env_name(s->tables[t][i].key, of, sizeof(of));
            unsigned d = bt_edit_distance(name, of);
            if (d == 0) {
                return NULL;
            }
            if (d < best_d) {
                best_d = d;
                best = s->tables[t][i].key;
            }
        }
    }
    return best;
}

struct unit {
    const char *name;
    double factor;
};
static const struct unit size_units[] = {{"", 1},
                                         {"B", 1},
                                         {"KiB", 1024.0},
                                         {"MiB", 1048576.0},
                                         {"GiB", 1073741824.0},
                                         {"TiB", 0x1p40},
                                         {"KB", 1e3},
                                         {"MB", 1e6},
                                         {"GB", 1e9},
                                         {"TB", 1e12},
                                         {"K", 1024.0},
                                         {"M", 1048576.0},
                                         {"G", 1073741824.0}};
static const struct unit ms_units[] = {{"", 1}, {"ms", 1}, {"s", 1e3}, {"m", 6e4}, {"h", 3.6e6}};

static bool with_unit(const char *text, const struct unit *units, size_t n, double *v_p)
{
    char *end;
    errno = 0;
    double v = strtod(text, &end);
    if (end == text || errno != 0 || !isfinite(v) || v < 0 || !isdigit((unsigned char)text[0])) {
        return false;
    }
    while (*end == ' ') {
        end++;
    }
    for (size_t i = 0; i < n; i++) {
        if (strcmp(end, units[i].name) == 0) {
            *v_p = v * units[i].factor;
            return *v_p < 0x1p63;
        }
    }
    return false;
}

void bt_conf_bound_text(const struct bt_conf_row *row, double v, char *out, size_t cap)
{
    static const struct unit sizes[] = {{"TiB", 0x1p40}, {"TB", 1e12},    {"GiB", 0x1p30},
                                        {"GB", 1e9},     {"MiB", 0x1p20}, {"MB", 1e6},
                                        {"KiB", 1024.0}, {"KB", 1e3},     {"B", 1}};
    static const struct unit times[] = {{"h", 3.6e6}, {"m", 6e4}, {"s", 1e3}, {"ms", 1}};
    bool size = row->type == BT_CONF_SIZE, scaled = size || row->type == BT_CONF_MS;
    const struct unit *u = size ? sizes : times;
    while (scaled && fmod(v, u->factor) != 0) {
        u++; /* the last unit divides every value */
    }
    if (scaled && v != 0) {
        snprintf(out, cap, "%.15g%s", v / u->factor, u->name);
    } else {
        snprintf(out, cap, "%.15g", v);
    }
}

static bool in_range(const struct bt_conf_row *row, double v, const char *text, char *err,
                     size_t cap)
{
    if ((row->min != 0 || row->max != 0) && (v < row->min || v > row->max)) {
        char min[40], max[40];
        bt_conf_bound_text(row, row->min, min, sizeof(min));
        bt_conf_bound_text(row, row->max, max, sizeof(max));
        snprintf(err, cap, "%.80s is out of range, allowed: %s to %s", text, min, max);
        return false;
    }
    return true;
}

void bt_conf_set_list(const struct bt_conf_row *row, void *conf, const char *const *items, size_t n)
{
    char ***list_p = (char ***)((char *)conf + row->offset);
    for (char **i = *list_p; i != NULL && *i != NULL; i++) {
        free(*i);
    }
    free(*list_p);
    *list_p = bt_calloc(n + 1, sizeof(char *));
    for (size_t i = 0; i < n; i++) {
        (*list_p)[i] = bt_strdup(items[i]);
    }
}

static bool set_comma_list(const struct bt_conf_row *row, void *conf, const char *text, char *err,
                           size_t cap)
{
    const char *items[BT_CONF_ITEMS_MAX];
    size_t n = 0;
    char *copy = bt_strdup(text), *save = NULL;
    bool ok = true;
    for (char *p = strtok_r(copy, ", ", &save); p != NULL && ok; p = strtok_r(NULL, ", ", &save)) {
        ok = n < BT_ARRAY_LEN(items);
        if (ok) {
            items[n++] = p;
        }
    }
    if (ok) {
        bt_conf_set_list(row, conf, items, n);
    } else {
        snprintf(err, cap, "a list may hold up to %d values", BT_CONF_ITEMS_MAX);
    }
    free(copy);
    return ok;
}

bool bt_conf_is_addr(const char *text)
{
    const char *colon = strrchr(text, ':');
    size_t host = colon == NULL ? 0 : (size_t)(colon - text);
    size_t digits = colon == NULL ? 0 : strspn(colon + 1, "0123456789");
    if (host == 0 || digits == 0 || digits > 5 || colon[1 + digits] != '\0' ||
        strtol(colon + 1, NULL, 10) > UINT16_MAX) {
        return false;
    }
    bool v6 = text[0] == '[';
    if (v6 ? text[host - 1] != ']' : memchr(text, ':', host) != NULL) {
        return false;
    }
    for (size_t i = 0; i < host; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c <= ' ' || c == 0x7f || c == '/') {
            return false;
        }
    }
    return true;
}

void bt_conf_say(const char *fmt, ...)
{
    char line[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof(line), fmt, ap);
    va_end(ap);
    for (char *p = line; *p != '\0'; p++) {
        if ((unsigned char)*p < ' ' || *p == 0x7f) {
            *p = '?';
        }
    }
    fprintf(stderr, "%s\n", line);
}

static bool set_int(const struct bt_conf_row *row, void *at, const char *text, char *err,
                    size_t cap)
{
    char *end;
    errno = 0;
    long long v = strtoll(text, &end, 10);
    if (end == text || *end != '\0' || errno != 0) {
        snprintf(err, cap, "\"%.80s\" is not a whole number", text);
        return false;
    }
    if (!in_range(row, (double)v, text, err, cap)) {
        return false;
    }
    *(int64_t *)at = v;
    return true;
}

static bool set_number(const struct bt_conf_row *row, void *at, const char *text, char *err,
                       size_t cap)
{
    double v = 0;
    bool ok;
    const char *want;
    if (row->type == BT_CONF_SIZE) {
        ok = with_unit(text, size_units, BT_ARRAY_LEN(size_units), &v);
        want = "a size such as 4096, 64MiB or 2GB";
    } else if (row->type == BT_CONF_MS) {
        ok = with_unit(text, ms_units, BT_ARRAY_LEN(ms_units), &v);
        want = "a time such as 500ms, 2s or 1m";
    } else {
        char *end;
        errno = 0;
        v = strtod(text, &end);
        ok = end != text && *end == '\0' && errno == 0 && isfinite(v);
        want = "a number";
    }
    if (!ok) {
        snprintf(err, cap, "\"%.80s\" is not %s", text, want);
        return false;
    }
    if (!in_range(row, v, text, err, cap)) {
        return false;
    }
    if (row->type == BT_CONF_FLOAT) {
        *(double *)at = v;
    } else {
        *(uint64_t *)at = (uint64_t)v;
    }
    return true;
}

bool bt_conf_set(const struct bt_conf_row *row, void *conf, const char *text, char *err, size_t cap)
{
    void *at = (char *)conf + row->offset;
    switch (row->type) {
    case BT_CONF_ADDR:
        if (!bt_conf_is_addr(text)) {
            snprintf(err, cap, "\"%.80s\" is not host:port or [v6]:port with a port up to 65535",
                     text);
            return false;
        }
        /* fall through */
    case BT_CONF_STR:
        free(*(char **)at);
        *(char **)at = bt_strdup(text);
        return true;
    case BT_CONF_INT: return set_int(row, at, text, err, cap);
    case BT_CONF_SIZE:
    case BT_CONF_MS:
    case BT_CONF_FLOAT: return set_number(row, at, text, err, cap);
    case BT_CONF_BOOL:
        if (strcmp(text, "true") != 0 && strcmp(text, "false") != 0) {
            snprintf(err, cap, "\"%.80s\" is not true or false", text);
            return false;
        }
        *(bool *)at = text[0] == 't';
        return true;
    case BT_CONF_LIST: return set_comma_list(row, conf, text, err, cap);
    }
    return false;
}
