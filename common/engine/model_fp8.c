/* Reads quantization_config. Strict: a setting that would change results and is not known is an
 * error. Runs in the thread that loads a model; only reads files. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "common/engine/model_fp8.h"

#include <jansson.h>
#include <pcre2.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WHOLE UINT32_MAX

struct skip { /* modules that are not fp8 */
    char *name;
    pcre2_code *re; /* or NULL: name, a dotted beginning or a dotted end of the module's */
};

struct bt_model_fp8 {
    struct bt_fp8_form form;
    bool all_linear; /* routers and lm_head, too */
    struct skip *skips;
    size_t n_skips;
};

struct reader {
    const char *dir;
    struct bt_model_fp8 *q;
    char *err;
    size_t err_cap;
};

static bt_status_t refuse(const struct reader *r, bt_status_t st, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static bt_status_t refuse(const struct reader *r, bt_status_t st, const char *fmt, ...)
{
    char text[300];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    snprintf(r->err, r->err_cap, "%.300s/config.json: quantization_config.%s", r->dir, text);
    return st;
}

/* Null, false, 0, an empty string, list or object. */
static bool is_empty(const json_t *v)
{
    return !v || json_is_null(v) || json_is_false(v) ||
           (json_is_number(v) && json_number_value(v) == 0) ||
           (json_is_string(v) && json_string_length(v) == 0) ||
           (json_is_array(v) && json_array_size(v) == 0) ||
           (json_is_object(v) && json_object_size(v) == 0);
}

/* Refuses keys of o that are set and not in `known`, a list that ends with NULL. */
static bt_status_t only(const struct reader *r, const char *where, const json_t *o,
                        const char *const *known)
{
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)o, key, v)
    {
        bool ok = is_empty(v);
        for (size_t i = 0; !ok && known[i]; i++) {
            ok = strcmp(key, known[i]) == 0;
        }
        if (!ok) {
            return refuse(r, BT_ERR_UNSUPPORTED, "%s%.64s: is not supported", where, key);
        }
    }
    return BT_OK;
}

static bool is_text(const json_t *v, const char *text)
{
    return json_is_string(v) && strcmp(json_string_value(v), text) == 0;
}

static bt_status_t add_skip(const struct reader *r, const char *key, const json_t *v)
{
    const char *name = json_string_value(v);
    if (!name || !*name) {
        return refuse(r, BT_ERR_INVALID, "%s: must be a list of module names", key);
    }
    struct bt_model_fp8 *q = r->q;
    struct skip s = {.name = bt_strdup(name)};
    int code = 0;
    size_t at = 0;
    if (strncmp(name, "re:", 3) == 0) {
        s.re = pcre2_compile((PCRE2_SPTR)name + 3, PCRE2_ZERO_TERMINATED, PCRE2_ANCHORED, &code,
                             &at, NULL);
        if (!s.re) {
            free(s.name);
            return refuse(r, BT_ERR_INVALID, "%s: %.64s is not a regular expression", key, name);
        }
    }
    q->skips = bt_realloc(q->skips, (q->n_skips + 1) * sizeof(*q->skips));
    q->skips[q->n_skips++] = s;
    return BT_OK;
}

static bt_status_t read_skips(const struct reader *r, const json_t *o, const char *key)
{
    const json_t *list = json_object_get(o, key);
    if (is_empty(list)) {
        return BT_OK;
    }
    if (!json_is_array(list)) {
        return refuse(r, BT_ERR_INVALID, "%s: must be a list of module names", key);
    }
    bt_status_t st = BT_OK;
    for (size_t i = 0; st == BT_OK && i < json_array_size(list); i++) {
        st = add_skip(r, key, json_array_get(list, i));
    }
    return st;
}

/* [rows, cols] of a block. */
static bt_status_t read_block(const struct reader *r, const char *where, const json_t *o,
                              struct bt_fp8_form *form)
{
    const json_t *rows = json_array_get(o, 0), *cols = json_array_get(o, 1);
    if (!json_is_array(o) || json_array_size(o) != 2 || !json_is_integer(rows) ||
        !json_is_integer(cols) || json_integer_value(rows) < 1 || json_integer_value(cols) < 1 ||
        json_integer_value(rows) > 65536 || json_integer_value(cols) > 65536) {
        return refuse(r, BT_ERR_INVALID, "%s: must be two integers from 1 to 65536", where);
    }
    *form = (struct bt_fp8_form){(uint32_t)json_integer_value(rows),
                                 (uint32_t)json_integer_value(cols)};
    return BT_OK;
}

static bt_status_t read_fp8(const struct reader *r, const json_t *o)
{
    static const char *const known[] = {"quant_method", "activation_scheme",      "fmt",
                                        "scale_fmt",    "weight_block_size",      "ignored_layers",
                                        "dequantize",   "modules_to_not_convert", NULL};
    const json_t *fmt = json_object_get(o, "fmt"), *block = json_object_get(o, "weight_block_size");
    bt_status_t st = only(r, "", o, known);
    if (st == BT_OK && !is_empty(fmt) && !is_text(fmt, "e4m3")) {
        return refuse(r, BT_ERR_UNSUPPORTED, "fmt: supported is e4m3");
    }
    if (st == BT_OK && !is_empty(block)) {
        st = read_block(r, "weight_block_size", block, &r->q->form);
    }
    st = st == BT_OK ? read_skips(r, o, "modules_to_not_convert") : st;
    return st == BT_OK ? read_skips(r, o, "ignored_layers") : st;
}

static bt_status_t read_group_weights(const struct reader *r, const json_t *w)
{
    static const char *const known[] = {"num_bits",        "type",    "strategy", "symmetric",
                                        "block_structure", "dynamic", "observer", "observer_kwargs",
                                        "scale_dtype",     NULL};
    const char *where = "config_groups.weights.";
    const json_t *bits = json_object_get(w, "num_bits"), *type = json_object_get(w, "type"),
                 *strategy = json_object_get(w, "strategy");
    bt_status_t st = only(r, where, w, known);
    if (st != BT_OK) {
        return st;
    }
    if (!json_is_integer(bits) || json_integer_value(bits) != 8 || !is_text(type, "float")) {
        return refuse(r, BT_ERR_UNSUPPORTED, "%snum_bits, type: supported are 8 and float", where);
    }
    if (json_is_false(json_object_get(w, "symmetric")) ||
        json_is_true(json_object_get(w, "dynamic"))) {
        return refuse(r, BT_ERR_UNSUPPORTED, "%ssymmetric, dynamic: supported are true and false",
                      where);
    }
    if (is_text(strategy, "channel")) {
        r->q->form = (struct bt_fp8_form){1, WHOLE};
    } else if (is_text(strategy, "block")) {
        return read_block(r, "config_groups.weights.block_structure",
                          json_object_get(w, "block_structure"), &r->q->form);
    } else if (!is_text(strategy, "tensor")) {
        return refuse(r, BT_ERR_UNSUPPORTED, "%sstrategy: supported are tensor, channel, block",
                      where);
    }
    return BT_OK;
}

/* One group, for all linear layers. */
static bt_status_t read_group(const struct reader *r, const json_t *groups)
{
    static const char *const known[] = {"targets", "weights", "input_activations", "format", NULL};
    const char *name;
    json_t *g = NULL, *v;
    json_object_foreach((json_t *)groups, name, v)
    {
        g = v;
    }
    if (!json_is_object(groups) || json_object_size(groups) != 1 || !json_is_object(g)) {
        return refuse(r, BT_ERR_UNSUPPORTED, "config_groups: supported is one group");
    }
    const json_t *targets = json_object_get(g, "targets"), *w = json_object_get(g, "weights");
    bt_status_t st = only(r, "config_groups.", g, known);
    if (st == BT_OK &&
        (json_array_size(targets) != 1 || !is_text(json_array_get(targets, 0), "Linear"))) {
        st = refuse(r, BT_ERR_UNSUPPORTED, "config_groups.targets: supported is [\"Linear\"]");
    }
    if (st == BT_OK && !json_is_object(w)) {
        st = refuse(r, BT_ERR_INVALID, "config_groups.weights: must be an object");
    }
    return st == BT_OK ? read_group_weights(r, w) : st;
}

static bt_status_t read_compressed(const struct reader *r, const json_t *o)
{
    static const char *const known[] = {"quant_method",
                                        "format",
                                        "config_groups",
                                        "ignore",
                                        "quantization_status",
                                        "global_compression_ratio",
                                        "version",
                                        NULL};
    bt_status_t st = only(r, "", o, known);
    if (st == BT_OK && !is_text(json_object_get(o, "format"), "float-quantized")) {
        st = refuse(r, BT_ERR_UNSUPPORTED, "format: supported is float-quantized");
    }
    r->q->all_linear = true;
    st = st == BT_OK ? read_group(r, json_object_get(o, "config_groups")) : st;
    return st == BT_OK ? read_skips(r, o, "ignore") : st;
}

static bt_status_t read_config(const struct reader *r, const json_t *o)
{
    const json_t *method = json_object_get(o, "quant_method");
    if (!json_is_object(o)) {
        return refuse(r, BT_ERR_INVALID, "quant_method: quantization_config must be an object");
    }
    if (is_text(method, "fp8")) {
        return read_fp8(r, o);
    }
    if (is_text(method, "compressed-tensors")) {
        return read_compressed(r, o);
    }
    return refuse(r, BT_ERR_UNSUPPORTED,
                  "quant_method: %.32s is not supported; supported are fp8 and compressed-tensors, "
                  "or the 16-bit model",
                  json_is_string(method) ? json_string_value(method) : "missing");
}

bt_status_t bt_model_fp8_load(const char *dir, struct bt_model_fp8 **q_p, char *err, size_t err_cap)
{
    char *path = bt_sprintf("%s/config.json", dir);
    json_error_t je;
    json_t *root = json_load_file(path, JSON_REJECT_DUPLICATES, &je);
    free(path);
    *q_p = NULL;
    if (!root) {
        snprintf(err, err_cap, "%.300s/config.json: %.160s", dir, je.text);
        return BT_ERR_INVALID;
    }
    const json_t *o = json_object_get(root, "quantization_config");
    bt_status_t st = BT_OK;
    if (o && !json_is_null(o)) {
        struct reader r = {.dir = dir, .err = err, .err_cap = err_cap};
        r.q = bt_calloc(1, sizeof(*r.q));
        r.q->form = (struct bt_fp8_form){WHOLE, WHOLE};
        st = read_config(&r, o);
        if (st == BT_OK) {
            *q_p = r.q;
        } else {
            bt_model_fp8_destroy(r.q);
        }
    }
    json_decref(root);
    return st;
}

void bt_model_fp8_destroy(struct bt_model_fp8 *q)
{
    for (size_t i = 0; q && i < q->n_skips; i++) {
        free(q->skips[i].name);
        pcre2_code_free(q->skips[i].re);
    }
    if (q) {
        free(q->skips);
    }
    free(q);
}

bt_status_t bt_model_fp8_check_quantize(const char *dir, char *err, size_t err_cap)
{
    struct bt_model_fp8 *q;
    bt_status_t st = bt_model_fp8_load(dir, &q, err, err_cap);
    if (st == BT_OK && q) {
        snprintf(err, err_cap,
                 "%.300s/config.json: model.quantize is fp8, but quantization_config says that the "
                 "weights are fp8 already; remove model.quantize in all daemons",
                 dir);
        st = BT_ERR_UNSUPPORTED;
    }
    bt_model_fp8_destroy(q);
    return st;
}

bool bt_model_is_fp8(const char *dir, const char *quantize)
{
    struct bt_model_fp8 *q = NULL;
    char err[64];
    bool is = (quantize && strcmp(quantize, "fp8") == 0) ||
              (bt_model_fp8_load(dir, &q, err, sizeof(err)) == BT_OK && q);
    bt_model_fp8_destroy(q);
    return is;
}

/* Returns whether `part` is the module's whole name, or the text before or after one of its
 * dots. */
static bool names(const char *part, const char *module, size_t n)
{
    size_t m = strlen(part);
    if (m > n) {
        return false;
    }
    return (strncmp(module, part, m) == 0 && (m == n || module[m] == '.')) ||
           (strncmp(module + n - m, part, m) == 0 && (m == n || module[n - m - 1] == '.'));
}

static bool matches(const struct skip *s, const char *module, size_t n)
{
    if (!s->re) {
        return names(s->name, module, n);
    }
    pcre2_match_data *data = pcre2_match_data_create(1, NULL);
    int rc = pcre2_match(s->re, (PCRE2_SPTR)module, n, 0, 0, data, NULL);
    pcre2_match_data_free(data);
    return rc >= 0;
}

const struct bt_fp8_form *bt_model_fp8_form(const struct bt_model_fp8 *q, const char *name,
                                            bt_fp8_role_t role)
{
    static const char weight[] = ".weight";
    size_t n = strlen(name), end = sizeof(weight) - 1;
    if (!q || role == BT_FP8_OF_NONE || (role != BT_FP8_OF_LAYER && !q->all_linear) || n <= end ||
        strcmp(name + n - end, weight) != 0) {
        return NULL;
    }
    for (size_t i = 0; i < q->n_skips; i++) {
        if (matches(&q->skips[i], name, n - end)) {
            return NULL;
        }
    }
    return &q->form;
}
