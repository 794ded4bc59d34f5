/* Names of schemas ($id, $anchor) and references to them, within the document. */
#include "common/grammar/schema_priv.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Joins a and up to n bytes of b into a C string. A NUL inside ends it, but no URI contains one. */
static const char *join(struct bt_schema *c, const char *a, size_t na, const char *b, size_t nb)
{
    bt_schema_work(c, 1);
    char *s = bt_schema_alloc(c, na + nb + 1);
    memcpy(s, a, na);
    memcpy(s + na, b, nb);
    return s;
}

/* Removes "." and ".." from the path that starts at s (RFC 3986, section 5.2.4). */
static void remove_dots(char *path)
{
    char *in = path, *out = path;
    while (*in) {
        if (strncmp(in, "/./", 3) == 0) {
            in += 2;
        } else if (strcmp(in, "/.") == 0) {
            in[1] = 0;
        } else if (strncmp(in, "/../", 4) == 0 || strcmp(in, "/..") == 0) {
            if (in[3])
                in += 3;
            else
                in[1] = 0;
            while (out > path && *--out != '/')
                ;
        } else {
            do
                *out++ = *in++;
            while (*in && *in != '/');
        }
    }
    *out = 0;
}

static size_t scheme_len(const char *s)
{
    size_t n = strcspn(s, ":/?#");
    return n && s[n] == ':' ? n + 1 : 0;
}

/* Resolves ref, without its fragment, against base (RFC 3986, section 5.2). */
static const char *resolve(struct bt_schema *c, const char *base, const char *ref, size_t n)
{
    const char *r = join(c, ref, n, "", 0);
    if (!*r)
        return base;
    size_t scheme = scheme_len(base), host = scheme;
    if (scheme_len(r) || !*base)
        return r;
    if (base[host] == '/' && base[host + 1] == '/')
        host += 2 + strcspn(base + host + 2, "/?");
    size_t keep = r[0] == '/' ? (r[1] == '/' ? scheme : host) : host;
    char *s;
    if (r[0] == '/') {
        s = (char *)join(c, base, keep, r, n);
    } else {
        size_t dir = host + strcspn(base + host, "?");
        while (dir > host && base[dir - 1] != '/')
            dir--;
        bool opaque = scheme && base[scheme] != '/';
        if (opaque)
            return r;
        if (dir == host && host > scheme) { /* a host without a path */
            const char *slash = join(c, base, host, "/", 1);
            s = (char *)join(c, slash, host + 1, r, n);
        } else {
            s = (char *)join(c, base, dir, r, n);
        }
    }
    remove_dots(s + keep);
    return s;
}

static void add_name(struct bt_schema *c, const char *uri, const struct bt_sj *at, bool dynamic)
{
    c->uris = bt_schema_grow(c, c->uris, c->n_uris, &c->cap_uris, sizeof(*c->uris));
    c->uris[c->n_uris++] = (struct bt_schema_uri){.uri = uri, .at = at, .dynamic = dynamic};
}

static int by_uri(const void *a, const void *b)
{
    const struct bt_schema_uri *x = a, *y = b;
    int d = strcmp(x->uri, y->uri);
    return d ? d : x->at->id < y->at->id ? -1 : x->at->id > y->at->id;
}

static void add_anchor(struct bt_schema *c, const char *base, const struct bt_sj *at,
                       const struct bt_sj *name, bool dynamic)
{
    if (!name || name->type != BT_SJ_STRING)
        return;
    const char *hash = join(c, base, strlen(base), "#", 1);
    add_name(c, join(c, hash, strlen(hash), name->text.s, name->text.n), at, dynamic);
}

static bool is_one_of(struct bt_sj_text key, const char *const *names, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (key.n == strlen(names[i]) && memcmp(key.s, names[i], key.n) == 0)
            return true;
    return false;
}
#define IS_ONE_OF(key, names) is_one_of(key, names, sizeof(names) / sizeof(names[0]))

/* Keywords whose value maps names to schemas, and keywords whose value is a schema or a list of
 * schemas. All other values are data; an $id in them names no schema. */
static const char *const maps[] = {"properties",  "patternProperties", "$defs",
                                   "definitions", "dependentSchemas",  "dependencies"};
static const char *const schemas[] = {"allOf",
                                      "anyOf",
                                      "oneOf",
                                      "not",
                                      "if",
                                      "then",
                                      "else",
                                      "items",
                                      "prefixItems",
                                      "additionalItems",
                                      "contains",
                                      "extends",
                                      "contentSchema",
                                      "propertyNames",
                                      "additionalProperties",
                                      "unevaluatedItems",
                                      "unevaluatedProperties"};

static void add_names(struct bt_schema *c, struct bt_sj *v)
{
    const struct bt_sj *id = bt_sj_get(v, c->draft == 4 ? "id" : "$id");
    if (!id && (c->draft < 2019 || !bt_sj_get(c->root, "$schema")))
        id = bt_sj_get(v, "id");
    if (id && id->type == BT_SJ_STRING && !(c->draft < 2019 && bt_sj_get(v, "$ref"))) {
        size_t n = 0;
        while (n < id->text.n && id->text.s[n] != '#')
            n++;
        if (n || !id->text.n) {
            v->base = resolve(c, v->base, id->text.s, n);
            add_name(c, v->base, v, false);
        }
        if (n + 1 < id->text.n) /* draft-07: "#name" is an anchor */
            add_name(c, join(c, v->base, strlen(v->base), id->text.s + n, id->text.n - n), v,
                     false);
    }
    const struct bt_sj *recursive = bt_sj_get(v, "$recursiveAnchor");
    c->recursive += recursive && recursive->type == BT_SJ_TRUE;
    add_anchor(c, v->base, v, bt_sj_get(v, "$anchor"), false);
    add_anchor(c, v->base, v, bt_sj_get(v, "$dynamicAnchor"), true);
}

enum place {
    AT_SCHEMA, /* a schema or a list of schemas */
    AT_MAP,    /* schemas by name */
    AT_DATA
};

static void walk(struct bt_schema *c, struct bt_sj *v, const char *base, enum place place)
{
    v->base = base;
    if (v->type != BT_SJ_OBJECT && v->type != BT_SJ_ARRAY)
        return;
    if (v->type == BT_SJ_OBJECT && place == AT_SCHEMA)
        add_names(c, v);
    for (uint32_t i = 0; i < v->n; i++) {
        struct bt_sj *m = v->items[i];
        enum place inner = place == AT_DATA ? AT_DATA : AT_SCHEMA;
        if (v->type == BT_SJ_OBJECT && place == AT_SCHEMA && !IS_ONE_OF(m->key, schemas))
            inner = IS_ONE_OF(m->key, maps) ? AT_MAP : AT_DATA;
        walk(c, m, v->base, inner);
    }
}

void bt_schema_names(struct bt_schema *c)
{
    add_name(c, "", c->root, false);
    walk(c, c->values[c->root->id], "", AT_SCHEMA);
    qsort(c->uris, c->n_uris, sizeof(*c->uris), by_uri);
}

static const struct bt_sj *find(struct bt_schema *c, const char *uri, uint32_t *same)
{
    uint32_t lo = 0, hi = c->n_uris;
    while (lo < hi) {
        uint32_t mid = (lo + hi) / 2;
        if (strcmp(c->uris[mid].uri, uri) < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    *same = 0;
    while (lo + *same < c->n_uris && strcmp(c->uris[lo + *same].uri, uri) == 0)
        ++*same;
    return *same ? c->uris[lo].at : NULL;
}

/* Decodes %XX in a fragment, in place. */
static void unpercent(char *s)
{
    char *out = s;
    for (; *s; s++) {
        char hex[3] = {0};
        if (*s == '%' && s[1] && s[2]) {
            memcpy(hex, s + 1, 2);
            char *end;
            long v = strtol(hex, &end, 16);
            if (*end == 0 && v > 0) {
                *out++ = (char)v;
                s += 2;
                continue;
            }
        }
        *out++ = *s;
    }
    *out = 0;
}

static const struct bt_sj *follow(const struct bt_sj *v, char *pointer)
{
    while (v && *pointer) {
        char *part = ++pointer, *out = part;
        size_t n = strcspn(part, "/");
        pointer = part + n;
        for (size_t i = 0; i < n; i++) {
            if (part[i] == '~' && i + 1 < n && (part[i + 1] == '0' || part[i + 1] == '1'))
                *out++ = part[++i] == '0' ? '~' : '/';
            else
                *out++ = part[i];
        }
        uint32_t len = (uint32_t)(out - part);
        if (v->type == BT_SJ_OBJECT) {
            v = bt_sj_get_n(v, part, len);
        } else if (v->type == BT_SJ_ARRAY) {
            uint64_t at = 0;
            for (uint32_t i = 0; i < len && at < v->n; i++)
                at = part[i] >= '0' && part[i] <= '9' ? at * 10 + (uint64_t)(part[i] - '0') : v->n;
            v = len && at < v->n ? v->items[at] : NULL;
        } else {
            v = NULL;
        }
    }
    return v;
}

/* Returns how many schemas of the document have this dynamic anchor. */
static uint32_t dynamic_count(struct bt_schema *c, const char *anchor)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < c->n_uris; i++) {
        const char *hash = strchr(c->uris[i].uri, '#');
        n += hash && c->uris[i].dynamic && strcmp(hash + 1, anchor) == 0;
    }
    return n;
}

const struct bt_sj *bt_schema_deref(struct bt_schema *c, const struct bt_sj *ref, bool dynamic)
{
    if (ref->type != BT_SJ_STRING)
        bt_schema_fail(c, BT_ERR_INVALID, ref, "a reference is a string");
    size_t n = 0;
    while (n < ref->text.n && ref->text.s[n] != '#')
        n++;
    const char *base = resolve(c, ref->up->base ? ref->up->base : "", ref->text.s, n);
    uint32_t from = n + 1 < ref->text.n ? (uint32_t)n + 1 : ref->text.n;
    char *fragment = (char *)join(c, ref->text.s + from, ref->text.n - from, "", 0);
    unpercent(fragment);
    uint32_t same;
    const struct bt_sj *at;
    if (*fragment && *fragment != '/') {
        const char *hash = join(c, base, strlen(base), "#", 1);
        at = find(c, join(c, hash, strlen(hash), fragment, strlen(fragment)), &same);
        if (dynamic && dynamic_count(c, fragment) > 1)
            bt_schema_fail(c, BT_ERR_UNSUPPORTED, ref,
                           "the meaning of $dynamicRef depends on the path to it; use $ref");
    } else {
        at = find(c, base, &same);
        if (!at && !*base)
            at = c->root;
        if (at)
            at = follow(at, fragment);
    }
    if (!at)
        bt_schema_fail(
            c, n ? BT_ERR_UNSUPPORTED : BT_ERR_INVALID, ref,
            "the document has no schema \"%.200s\"; put it under $defs and refer to it by "
            "\"#/$defs/NAME\"",
            ref->text.s);
    return at;
}
