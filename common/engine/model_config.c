/* Reads config.json and generation_config.json of a Hugging Face model directory. Runs in the
 * thread that starts the daemon; only reads files. Strict: a number that is missing, of the wrong
 * type or out of range is an error that names the file, the field and the allowed values. */
#include "common/engine/model_config.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/base/buf.h"
#include "common/base/sha256.h"
#include "common/engine/model_refused.h"
#include "common/engine/safetensors.h"

#define CONFIG_BYTES_MAX (16u << 20)

/* What an architecture adds to the common decoder (RMSNorm, RoPE, GQA, SwiGLU). */
static const struct arch {
    const char *name;
    bool qkv_bias, qk_norm;
    bool window;          /* has sliding_window */
    bool window_switched; /* the window applies only if use_sliding_window is true */
} archs[] = {
    {"LlamaForCausalLM", false, false, false, false},
    {"MistralForCausalLM", false, false, true, false},
    {"Qwen2ForCausalLM", true, false, true, true},
    {"Qwen3ForCausalLM", false, true, true, true},
};

/* For the whole process: jansson does not distinguish lack of memory from bad JSON, so a client's
 * valid body would be answered with 400. */
static __attribute__((constructor)) void json_memory(void)
{
    json_set_alloc_funcs(bt_malloc, free);
}

struct reader {
    char path[4096];
    json_t *root;
    bt_status_t status; /* of the first error */
    char *err;
    size_t err_cap;
};

static void fail(struct reader *r, bt_status_t status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static void fail(struct reader *r, bt_status_t status, const char *fmt, ...)
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

/* Opens dir/name. A missing file is an error only if `required` is set; otherwise r->root stays
 * NULL. */
static void reader_open(struct reader *r, const char *dir, const char *name, bool required,
                        char *err, size_t err_cap)
{
    *r = (struct reader){.err = err, .err_cap = err_cap};
    if (snprintf(r->path, sizeof(r->path), "%s/%s", dir, name) >= (int)sizeof(r->path)) {
        fail(r, BT_ERR_INVALID, "the path is too long");
        return;
    }
    FILE *f = fopen(r->path, "rb");
    if (!f) {
        if (required || errno != ENOENT) {
            fail(r, errno == ENOENT ? BT_ERR_NOT_FOUND : BT_ERR_IO,
                 "%s; model.path must be a Hugging Face model directory", strerror(errno));
        }
        return;
    }
    struct stat st;
    char *text = NULL;
    if (fstat(fileno(f), &st) != 0 || !S_ISREG(st.st_mode)) {
        fail(r, BT_ERR_INVALID, "not a regular file");
    } else if (st.st_size > (off_t)CONFIG_BYTES_MAX) {
        fail(r, BT_ERR_TOO_LARGE, "%lld bytes, at most %u are read", (long long)st.st_size,
             CONFIG_BYTES_MAX);
    } else {
        text = bt_malloc((size_t)st.st_size + 1);
        size_t n = fread(text, 1, (size_t)st.st_size, f);
        json_error_t je;
        r->root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &je);
        if (!r->root) {
            fail(r, BT_ERR_INVALID, "line %d: not valid JSON: %.160s", je.line, je.text);
        } else if (!json_is_object(r->root)) {
            fail(r, BT_ERR_INVALID, "must hold a JSON object");
        }
    }
    free(text);
    fclose(f);
}

static void reader_close(struct reader *r)
{
    json_decref(r->root);
    r->root = NULL;
}

/* A field that is absent and one that is null mean the same. */
static const json_t *field(const json_t *o, const char *name)
{
    const json_t *v = json_object_get(o, name);
    return v && !json_is_null(v) ? v : NULL;
}

static int64_t get_int(struct reader *r, const char *name, int64_t lo, int64_t hi, bool required,
                       int64_t def)
{
    const json_t *v = field(r->root, name);
    if (!v) {
        if (required) {
            fail(r, BT_ERR_INVALID, "%s: missing; an integer from %lld to %lld is needed", name,
                 (long long)lo, (long long)hi);
        }
        return def;
    }
    if (!json_is_integer(v) || json_integer_value(v) < lo || json_integer_value(v) > hi) {
        fail(r, BT_ERR_INVALID, "%s: must be an integer from %lld to %lld", name, (long long)lo,
             (long long)hi);
        return def;
    }
    return json_integer_value(v);
}

static double get_num(struct reader *r, const json_t *o, const char *name, double lo, double hi,
                      bool required, double def)
{
    const json_t *v = field(o, name);
    if (!v) {
        if (required) {
            fail(r, BT_ERR_INVALID, "%s: missing; a number from %g to %g is needed", name, lo, hi);
        }
        return def;
    }
    double d = json_number_value(v);
    if (!json_is_number(v) || !(d >= lo && d <= hi)) {
        fail(r, BT_ERR_INVALID, "%s: must be a number from %g to %g", name, lo, hi);
        return def;
    }
    return d;
}

static bool get_bool(struct reader *r, const char *name, bool def)
{
    const json_t *v = field(r->root, name);
    if (v && !json_is_boolean(v)) {
        fail(r, BT_ERR_INVALID, "%s: must be true or false", name);
    }
    return v ? json_is_true(v) : def;
}

static const char *get_str(struct reader *r, const json_t *o, const char *name, const char *def)
{
    const json_t *v = field(o, name);
    if (v && !json_is_string(v)) {
        fail(r, BT_ERR_INVALID, "%s: must be a string", name);
    }
    return v && json_is_string(v) ? json_string_value(v) : def;
}

/* One window for all layers. Models whose layers differ would need a KV group for each kind of
 * layer. */
static void read_window(struct reader *r, struct bt_model_config *c, const struct arch *a)
{
    size_t sliding = 0, n = 0;
    const json_t *types = field(r->root, "layer_types");
    for (; types && n < json_array_size(types); n++) {
        const char *t = json_string_value(json_array_get(types, n));
        if (!t || (strcmp(t, "full_attention") != 0 && strcmp(t, "sliding_attention") != 0)) {
            fail(r, BT_ERR_UNSUPPORTED,
                 "layer_types: entry %zu is not supported; supported are full_attention, "
                 "sliding_attention",
                 n);
            return;
        }
        sliding += t[0] == 's';
    }
    if (sliding != 0 && sliding != n) {
        fail(r, BT_ERR_UNSUPPORTED,
             "layer_types: %zu of %zu layers are sliding_attention; supported are all or none",
             sliding, n);
        return;
    }
    bool on = field(r->root, "sliding_window") &&
              (!a->window_switched || get_bool(r, "use_sliding_window", false));
    if (sliding != 0 && !on) {
        fail(r, BT_ERR_INVALID, "layer_types: sliding_attention without sliding_window");
    } else if (on && !a->window) {
        fail(r, BT_ERR_UNSUPPORTED, "sliding_window: only null is supported for %s", a->name);
    } else if (on && n == 0 && a->window_switched) {
        fail(r, BT_ERR_UNSUPPORTED,
             "use_sliding_window: only false is supported for %s without layer_types", a->name);
    } else if (on && (n == 0 || sliding)) {
        c->window = (uint32_t)get_int(r, "sliding_window", 1, 1 << 24, true, 1);
    }
}

static void read_architecture(struct reader *r, struct bt_model_config *c)
{
    const json_t *list = field(r->root, "architectures");
    const json_t *first = list && json_is_array(list) ? json_array_get(list, 0) : NULL;
    const char *name = json_string_value(first);
    if (!name) {
        fail(r, BT_ERR_INVALID,
             "architectures: missing; must be a list with one name, such as "
             "[\"LlamaForCausalLM\"]");
        return;
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(archs); i++) {
        if (strcmp(name, archs[i].name) == 0) {
            snprintf(c->architecture, sizeof(c->architecture), "%s", name);
            c->qkv_bias = archs[i].qkv_bias;
            c->qk_norm = archs[i].qk_norm;
            read_window(r, c, &archs[i]);
            return;
        }
    }
    char known[256] = "";
    for (size_t i = 0; i < BT_ARRAY_LEN(archs); i++) {
        snprintf(known + strlen(known), sizeof(known) - strlen(known), "%s%s", i ? ", " : "",
                 archs[i].name);
    }
    fail(r, BT_ERR_UNSUPPORTED, "architectures: %.64s is not supported; supported are %s", name,
         known);
}

static void read_shape(struct reader *r, struct bt_model_config *c)
{
    c->vocab = (uint32_t)get_int(r, "vocab_size", 2, 1 << 24, true, 2);
    c->hidden = (uint32_t)get_int(r, "hidden_size", 1, 1 << 20, true, 1);
    c->intermediate = (uint32_t)get_int(r, "intermediate_size", 1, 1 << 22, true, 1);
    c->layers = (uint32_t)get_int(r, "num_hidden_layers", 1, 1024, true, 1);
    c->heads = (uint32_t)get_int(r, "num_attention_heads", 1, 4096, true, 1);
    c->kv_heads = (uint32_t)get_int(r, "num_key_value_heads", 1, 4096, false, c->heads);
    c->head_dim = (uint32_t)get_int(r, "head_dim", 1, 1024, false, 0);
    c->max_model_len = (uint32_t)get_int(r, "max_position_embeddings", 1, 1 << 24, true, 1);
    c->norm_eps = (float)get_num(r, r->root, "rms_norm_eps", 1e-12, 0.1, false, 1e-6);
    c->tie_embeddings = get_bool(r, "tie_word_embeddings", false);
    if (r->status != BT_OK) {
        return;
    }
    if (c->head_dim == 0) {
        if (c->hidden % c->heads != 0) {
            fail(r, BT_ERR_INVALID,
                 "num_attention_heads: %u does not divide hidden_size %u, and "
                 "there is no head_dim",
                 c->heads, c->hidden);
            return;
        }
        c->head_dim = c->hidden / c->heads;
    }
    if (c->heads % c->kv_heads != 0) {
        fail(r, BT_ERR_INVALID, "num_key_value_heads: %u does not divide num_attention_heads %u",
             c->kv_heads, c->heads);
    }
    if (c->head_dim % 16 != 0 || c->head_dim > 256) {
        fail(r, BT_ERR_UNSUPPORTED, "head_dim: %u; supported are multiples of 16 up to 256",
             c->head_dim);
    }
    if (c->hidden % 8 != 0 || c->intermediate % 8 != 0) {
        fail(r, BT_ERR_UNSUPPORTED,
             "hidden_size %u and intermediate_size %u must be multiples "
             "of 8",
             c->hidden, c->intermediate);
    }
}

/* Refuses settings that the engine does not implement: it would ignore them and compute wrong
 * results. */
static void read_restrictions(struct reader *r, const struct bt_model_config *c)
{
    static const char *const norms[] = {"qk_norm", "use_qk_norm", "qk_layernorm"};
    const char *act = get_str(r, r->root, "hidden_act", "silu");
    act = get_str(r, r->root, "hidden_activation", act);
    if (strcmp(act, "silu") != 0) {
        fail(r, BT_ERR_UNSUPPORTED, "hidden_act: %.32s is not supported; supported is silu", act);
    }
    if (get_bool(r, "attention_bias", c->qkv_bias) != c->qkv_bias) {
        fail(r, BT_ERR_UNSUPPORTED, "attention_bias: only %s is supported for %s",
             c->qkv_bias ? "true" : "false", c->architecture);
    }
    if (get_bool(r, "mlp_bias", false)) {
        fail(r, BT_ERR_UNSUPPORTED, "mlp_bias: only false is supported");
    }
    if (field(r->root, "quantization_config")) {
        fail(r, BT_ERR_UNSUPPORTED,
             "quantization_config: quantized weights are not supported; "
             "use the bf16 model");
    }
    const json_t *types = field(r->root, "layer_types");
    if (types && json_array_size(types) != c->layers) {
        fail(r, BT_ERR_INVALID, "layer_types: %zu entries for %u layers (num_hidden_layers)",
             json_array_size(types), c->layers);
    }
    if (get_int(r, "v_head_dim", 1, 1 << 20, false, c->head_dim) != c->head_dim) {
        fail(r, BT_ERR_UNSUPPORTED, "v_head_dim: only the value of head_dim, %u, is supported",
             c->head_dim);
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(norms); i++) {
        if (get_bool(r, norms[i], c->qk_norm) != c->qk_norm) {
            fail(r, BT_ERR_UNSUPPORTED, "%s: only %s is supported for %s", norms[i],
                 c->qk_norm ? "true" : "false", c->architecture);
        }
    }
    char why[256];
    if (!bt_model_follows(r->root, BT_MODEL_CONFIG, why, sizeof(why))) {
        fail(r, BT_ERR_UNSUPPORTED, "%s", why);
    }
    const char *dt = get_str(r, r->root, "torch_dtype", NULL);
    dt = get_str(r, r->root, "dtype", dt);
    if (dt && strcmp(dt, "bfloat16") != 0 && strcmp(dt, "float16") != 0 &&
        strcmp(dt, "float32") != 0) {
        fail(r, BT_ERR_UNSUPPORTED,
             "dtype: %.32s is not supported; supported are bfloat16, "
             "float16, float32",
             dt);
    }
}

/* Refuses RoPE parameters that would be ignored: a separate set for each kind of layer, and scaling
 * without a named type. */
static void check_rope(struct reader *r, const char *where, const json_t *o, bool has_type)
{
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)o, key, v)
    {
        if (json_is_object(v)) {
            fail(r, BT_ERR_UNSUPPORTED,
                 "%s.%.64s: supported is one set of parameters for all layers", where, key);
        } else if (!has_type && strcmp(key, "rope_theta") != 0 &&
                   strcmp(key, "partial_rotary_factor") != 0) {
            fail(r, BT_ERR_INVALID,
                 "%s.rope_type: missing beside %.64s; supported are default, linear, llama3", where,
                 key);
        }
    }
}

struct rope {
    bt_rope_kind_t kind;
    double theta, factor, low, high, original_len;
};

static bool same_rope(const struct rope *a, const struct rope *b)
{
    return a->kind == b->kind && a->theta == b->theta && a->factor == b->factor &&
           a->low == b->low && a->high == b->high && a->original_len == b->original_len;
}

/* `type` is the older name of `rope_type`; a file may have both. */
static const char *rope_type(struct reader *r, const char *where, const json_t *o)
{
    const char *type = get_str(r, o, "rope_type", NULL), *older = get_str(r, o, "type", NULL);
    if (type != NULL && older != NULL && strcmp(type, older) != 0) {
        fail(r, BT_ERR_INVALID, "%s: rope_type is %.32s and type is %.32s; leave one out", where,
             type, older);
    }
    return type != NULL ? type : older;
}

/* Reads one object with RoPE parameters. theta: used if the object has none. */
static struct rope read_rope_object(struct reader *r, const char *where, const json_t *o,
                                    double theta)
{
    struct rope p = {.kind = BT_ROPE_DEFAULT, .theta = theta};
    char why[256];
    if (!json_is_object(o)) {
        fail(r, BT_ERR_INVALID, "%s: must be an object or null", where);
        return p;
    }
    const char *type = rope_type(r, where, o);
    check_rope(r, where, o, type != NULL);
    if (!bt_model_follows(o, BT_MODEL_ROPE, why, sizeof(why))) {
        fail(r, BT_ERR_UNSUPPORTED, "%s.%s", where, why);
    }
    p.theta = get_num(r, o, "rope_theta", 1.0, 1e12, false, theta);
    if (type == NULL || strcmp(type, "default") == 0) {
        p.kind = BT_ROPE_DEFAULT;
    } else if (strcmp(type, "linear") == 0) {
        p.kind = BT_ROPE_LINEAR;
        p.factor = get_num(r, o, "factor", 1.0, 1e6, true, 1.0);
    } else if (strcmp(type, "llama3") == 0) {
        p.kind = BT_ROPE_LLAMA3;
        p.factor = get_num(r, o, "factor", 1.0, 1e6, true, 1.0);
        p.low = get_num(r, o, "low_freq_factor", 1e-6, 1e6, true, 1.0);
        p.high = get_num(r, o, "high_freq_factor", 1e-6, 1e6, true, 4.0);
        p.original_len = get_num(r, o, "original_max_position_embeddings", 1, 1 << 24, true, 8192);
        if (p.high <= p.low) {
            fail(r, BT_ERR_INVALID, "%s.high_freq_factor: must be above low_freq_factor", where);
        }
    } else {
        fail(r, BT_ERR_UNSUPPORTED,
             "%s.rope_type: %.32s is not supported; supported are default, "
             "linear, llama3",
             where, type);
    }
    if (get_num(r, o, "partial_rotary_factor", 0, 1, false, 1.0) != 1.0) {
        fail(r, BT_ERR_UNSUPPORTED, "%s.partial_rotary_factor: only 1 is supported", where);
    }
    return p;
}

/* Newer files have rope_parameters {rope_theta, rope_type, ...}; older ones rope_theta beside
 * rope_scaling {rope_type or type, factor, ...}. A file may have both forms, for old and new
 * readers; then their values must be equal. */
static void read_rope(struct reader *r, struct bt_model_config *c)
{
    const json_t *newer = field(r->root, "rope_parameters"),
                 *older = field(r->root, "rope_scaling");
    double top = get_num(r, r->root, "rope_theta", 1.0, 1e12, false, 10000.0);
    struct rope p = {.kind = BT_ROPE_DEFAULT, .theta = top};
    if (older) {
        p = read_rope_object(r, "rope_scaling", older, top);
    }
    if (newer) {
        struct rope q = read_rope_object(r, "rope_parameters", newer, top);
        bool has_theta = field(r->root, "rope_theta") || (older && field(older, "rope_theta"));
        p.theta = has_theta ? p.theta : q.theta;
        if (older && !same_rope(&p, &q)) {
            fail(r, BT_ERR_INVALID,
                 "rope_scaling: contradicts rope_parameters; remove the one that does not belong "
                 "to these weights");
        }
        p = q;
    }
    if (field(r->root, "rope_theta") && p.theta != top) {
        fail(r, BT_ERR_INVALID, "rope_theta: is %g, and %g in %s; remove the one that is wrong",
             top, p.theta, newer ? "rope_parameters" : "rope_scaling");
    }
    if (get_num(r, r->root, "partial_rotary_factor", 0, 1, false, 1.0) != 1.0) {
        fail(r, BT_ERR_UNSUPPORTED, "partial_rotary_factor: only 1 is supported");
    }
    c->rope_kind = p.kind;
    c->rope_theta = p.theta;
    c->rope_factor = p.factor;
    c->rope_low = p.low;
    c->rope_high = p.high;
    c->rope_original_len = p.original_len;
    snprintf(c->rope_text, sizeof(c->rope_text),
             "kind=%d theta=%.17g dim=%u factor=%.17g low=%.17g high=%.17g len=%.17g",
             (int)c->rope_kind, c->rope_theta, c->head_dim, c->rope_factor, c->rope_low,
             c->rope_high, c->rope_original_len);
}

static void read_token_ids(struct reader *r, struct bt_model_config *c)
{
    if (field(r->root, "bos_token_id")) {
        c->bos = (uint32_t)get_int(r, "bos_token_id", 0, (int64_t)c->vocab - 1, true, 0);
    }
    const json_t *eos = field(r->root, "eos_token_id");
    if (!eos) {
        return;
    }
    size_t n = json_is_array(eos) ? json_array_size(eos) : 1;
    if (n > BT_ARRAY_LEN(c->eos)) {
        fail(r, BT_ERR_INVALID, "eos_token_id: %zu ids, at most %zu are supported", n,
             BT_ARRAY_LEN(c->eos));
        return;
    }
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_is_array(eos) ? json_array_get(eos, i) : eos;
        if (!json_is_integer(v) || json_integer_value(v) < 0 ||
            json_integer_value(v) >= (json_int_t)c->vocab) {
            fail(r, BT_ERR_INVALID,
                 "eos_token_id: must be an id below vocab_size %u, or a list "
                 "of such",
                 c->vocab);
            return;
        }
        c->eos[i] = (uint32_t)json_integer_value(v);
    }
    c->n_eos = (uint32_t)n;
}

static bt_status_t read_generation(const char *dir, struct bt_model_config *c, char *err,
                                   size_t err_cap)
{
    c->temperature = c->top_p = c->min_p = c->repetition_penalty = -1.0f;
    c->top_k = -1;
    char why[256];
    struct reader r;
    reader_open(&r, dir, "generation_config.json", false, err, err_cap);
    if (r.status == BT_OK && r.root) {
        read_token_ids(&r, c);
        c->temperature = (float)get_num(&r, r.root, "temperature", 0, 100, false, -1);
        c->top_p = (float)get_num(&r, r.root, "top_p", 0, 1, false, -1);
        c->min_p = (float)get_num(&r, r.root, "min_p", 0, 1, false, -1);
        c->repetition_penalty =
            (float)get_num(&r, r.root, "repetition_penalty", 1e-3, 1e3, false, -1);
        c->max_new_tokens = (uint32_t)get_int(&r, "max_new_tokens", 1, INT32_MAX, false, 0);
        c->top_k = (int32_t)get_int(&r, "top_k", -1, 1 << 24, false, -1);
        if (!bt_model_follows(r.root, BT_MODEL_GENERATION, why, sizeof(why))) {
            fail(&r, BT_ERR_UNSUPPORTED, "%s; remove it if clients may do without", why);
        }
    }
    reader_close(&r);
    return r.status;
}

bt_status_t bt_model_config_load(const char *dir, struct bt_model_config *c_p, char *err,
                                 size_t err_cap)
{
    struct bt_model_config c = {.bos = UINT32_MAX};
    struct reader r;
    reader_open(&r, dir, "config.json", true, err, err_cap);
    if (r.status == BT_OK) {
        read_architecture(&r, &c);
        read_shape(&r, &c);
    }
    if (r.status == BT_OK) {
        read_restrictions(&r, &c);
        read_rope(&r, &c);
        read_token_ids(&r, &c);
    }
    reader_close(&r);
    if (r.status != BT_OK) {
        return r.status;
    }
    bt_status_t st = read_generation(dir, &c, err, err_cap);
    if (st == BT_OK) {
        *c_p = c;
    }
    return st;
}

void bt_model_rope_inv_freq(const struct bt_model_config *c, float *inv_freq)
{
    for (uint32_t i = 0; i < c->head_dim / 2; i++) {
        double f = 1.0 / pow(c->rope_theta, 2.0 * i / c->head_dim);
        if (c->rope_kind == BT_ROPE_LINEAR) {
            f /= c->rope_factor;
        } else if (c->rope_kind == BT_ROPE_LLAMA3) {
            double wave = 2.0 * M_PI / f;
            if (wave > c->rope_original_len / c->rope_low) {
                f /= c->rope_factor;
            } else if (wave >= c->rope_original_len / c->rope_high) {
                double s =
                    (c->rope_original_len / wave - c->rope_low) / (c->rope_high - c->rope_low);
                f = (1.0 - s) * f / c->rope_factor + s * f;
            }
        }
        inv_freq[i] = (float)f;
    }
}

bt_status_t bt_model_kv_layout(const struct bt_model_config *c, const char *kv_dtype,
                               uint32_t page_tokens, struct bt_kv_layout *l)
{
    bool fp8 = kv_dtype && strcmp(kv_dtype, "fp8") == 0;
    if (kv_dtype && !fp8 && strcmp(kv_dtype, "f16") != 0) {
        return BT_ERR_INVALID;
    }
    return bt_kv_layout_gqa(page_tokens, c->layers, c->kv_heads, c->head_dim,
                            fp8 ? BT_DT_FP8_E4M3 : BT_DT_F16, c->window, l);
}

bt_status_t bt_model_weights_digest(const char *dir, const char *load_format, uint8_t out[32],
                                    char *err, size_t err_cap)
{
    if (load_format && strcmp(load_format, "dummy") == 0) {
        struct bt_model_config c;
        bt_status_t st = bt_model_config_load(dir, &c, err, err_cap);
        if (st != BT_OK) {
            return st;
        }
        char *text =
            bt_sprintf("dummy %s %u %u %u %u %u %u %u %d", c.architecture, c.vocab, c.hidden,
                       c.intermediate, c.layers, c.heads, c.kv_heads, c.head_dim, c.tie_embeddings);
        bt_sha256(text, strlen(text), out);
        free(text);
        return BT_OK;
    }
    struct bt_weights *w;
    bt_status_t st = bt_weights_open(dir, &w, err, err_cap);
    if (st != BT_OK) {
        return st;
    }
    bt_weights_digest(w, out);
    bt_weights_close(w);
    return BT_OK;
}

bt_status_t bt_model_root_key(const char *dir, const char *load_format, const char *activations,
                              const char *kv_dtype, uint32_t block_tokens,
                              struct bt_kv_layout *layout_p, struct bt_kv_key *root_p, char *err,
                              size_t err_cap)
{
    struct bt_model_config c;
    struct bt_kv_layout layout;
    struct bt_kv_root root = {0};
    bt_status_t st = bt_model_config_load(dir, &c, err, err_cap);
    if (st != BT_OK) {
        return st;
    }
    st = bt_model_kv_layout(&c, kv_dtype, block_tokens, &layout);
    if (st != BT_OK) {
        snprintf(err, err_cap,
                 "kv.block_tokens %u, model.kv_dtype %s: no KV layout for this model: %s",
                 block_tokens, kv_dtype ? kv_dtype : "f16", bt_status_text(st));
        return st;
    }
    st = bt_model_weights_digest(dir, load_format, root.weights_digest, err, err_cap);
    if (st != BT_OK) {
        return st;
    }
    root.architecture = c.architecture;
    root.layout = &layout;
    root.rope = c.rope_text;
    root.rounds = activations && strcmp(activations, "split") == 0 ? "" : "bf16-mlp";
    bt_kv_root_key(&root, root_p);
    *layout_p = layout;
    return BT_OK;
}
