/* Reads a JSON object of a model directory, field by field. The first error stays and names the
 * file, the field and the allowed values. Only reads files. */
#include "common/engine/model_read.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/base/file.h"

#define CONFIG_BYTES_MAX (16u << 20)

/* For the whole process: jansson does not distinguish lack of memory from bad JSON, so a client's
 * valid body would be answered with 400. */
static __attribute__((constructor)) void json_memory(void)
{
    json_set_alloc_funcs(bt_malloc, free);
}

void bt_model_fail(struct bt_model_reader *r, bt_status_t status, const char *fmt, ...)
{
    if (r->status != BT_OK) {
        return;
    }
    char text[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    r->status = status;
    snprintf(r->err, r->err_cap, "%.300s: %s", r->path, text);
}

void bt_model_reader_open(struct bt_model_reader *r, const char *dir, const char *name,
                          bool required, char *err, size_t err_cap)
{
    *r = (struct bt_model_reader){.err = err, .err_cap = err_cap};
    if (snprintf(r->path, sizeof(r->path), "%s/%s", dir, name) >= (int)sizeof(r->path)) {
        bt_model_fail(r, BT_ERR_INVALID, "the path is too long");
        return;
    }
    const char *why;
    struct stat st;
    FILE *f = bt_file_open(r->path, &st, &why);
    if (!f) {
        if (required || errno != ENOENT) {
            bt_model_fail(r, errno == ENOENT ? BT_ERR_NOT_FOUND : BT_ERR_IO,
                          "%s; model.path must be a Hugging Face model directory", why);
        }
        return;
    }
    char *text = NULL;
    if (st.st_size > (off_t)CONFIG_BYTES_MAX) {
        bt_model_fail(r, BT_ERR_TOO_LARGE, "%lld bytes, at most %u are read", (long long)st.st_size,
                      CONFIG_BYTES_MAX);
    } else {
        text = bt_malloc((size_t)st.st_size + 1);
        size_t n = fread(text, 1, (size_t)st.st_size, f);
        json_error_t je;
        r->root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &je);
        if (!r->root) {
            bt_model_fail(r, BT_ERR_INVALID, "line %d: not valid JSON: %.160s", je.line, je.text);
        } else if (!json_is_object(r->root)) {
            bt_model_fail(r, BT_ERR_INVALID, "must hold a JSON object");
        }
    }
    free(text);
    fclose(f);
}

void bt_model_reader_close(struct bt_model_reader *r)
{
    json_decref(r->root);
    r->root = NULL;
}

const json_t *bt_model_field(const json_t *o, const char *name)
{
    const json_t *v = json_object_get(o, name);
    return v && !json_is_null(v) ? v : NULL;
}

int64_t bt_model_int(struct bt_model_reader *r, const char *name, int64_t lo, int64_t hi,
                     bool required, int64_t def)
{
    const json_t *v = bt_model_field(r->root, name);
    if (!v) {
        if (required) {
            bt_model_fail(r, BT_ERR_INVALID, "%s: missing; an integer from %lld to %lld is needed",
                          name, (long long)lo, (long long)hi);
        }
        return def;
    }
    if (!json_is_integer(v) || json_integer_value(v) < lo || json_integer_value(v) > hi) {
        bt_model_fail(r, BT_ERR_INVALID, "%s: must be an integer from %lld to %lld", name,
                      (long long)lo, (long long)hi);
        return def;
    }
    return json_integer_value(v);
}

double bt_model_num(struct bt_model_reader *r, const json_t *o, const char *name, double lo,
                    double hi, bool required, double def)
{
    const json_t *v = bt_model_field(o, name);
    if (!v) {
        if (required) {
            bt_model_fail(r, BT_ERR_INVALID, "%s: missing; a number from %g to %g is needed", name,
                          lo, hi);
        }
        return def;
    }
    double d = json_number_value(v);
    if (!json_is_number(v) || !(d >= lo && d <= hi)) {
        bt_model_fail(r, BT_ERR_INVALID, "%s: must be a number from %g to %g", name, lo, hi);
        return def;
    }
    return d;
}

bool bt_model_bool(struct bt_model_reader *r, const char *name, bool def)
{
    const json_t *v = bt_model_field(r->root, name);
    if (v && !json_is_boolean(v)) {
        bt_model_fail(r, BT_ERR_INVALID, "%s: must be true or false", name);
    }
    return v ? json_is_true(v) : def;
}

const char *bt_model_str(struct bt_model_reader *r, const json_t *o, const char *name,
                         const char *def)
{
    const json_t *v = bt_model_field(o, name);
    if (v && !json_is_string(v)) {
        bt_model_fail(r, BT_ERR_INVALID, "%s: must be a string", name);
    }
    return v && json_is_string(v) ? json_string_value(v) : def;
}
