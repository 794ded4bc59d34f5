/* RoPE: its parameters in config.json, in the older and the newer form, and the frequencies that
 * they say. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/engine/model_read.h"
#include "common/engine/model_refused.h"

/* Refuses RoPE parameters that would be ignored: a separate set for each kind of layer, and scaling
 * without a named type. */
static void check_rope(struct bt_model_reader *r, const char *where, const json_t *o, bool has_type)
{
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)o, key, v)
    {
        if (json_is_object(v)) {
            bt_model_fail(r, BT_ERR_UNSUPPORTED,
                          "%s.%.64s: supported is one set of parameters for all layers", where,
                          key);
        } else if (!has_type && strcmp(key, "rope_theta") != 0 &&
                   strcmp(key, "partial_rotary_factor") != 0) {
            bt_model_fail(
                r, BT_ERR_INVALID,
                "%s.rope_type: missing beside %.64s; supported are default, linear, llama3, yarn",
                where, key);
        }
    }
}

struct rope {
    bt_rope_kind_t kind;
    double theta, factor, low, high, original_len;
    double scale, scale_all; /* of cosines and sines; of all products of queries and keys */
    bool truncate;
};

static bool same_rope(const struct rope *a, const struct rope *b)
{
    return a->kind == b->kind && a->theta == b->theta && a->factor == b->factor &&
           a->low == b->low && a->high == b->high && a->original_len == b->original_len &&
           a->scale == b->scale && a->scale_all == b->scale_all && a->truncate == b->truncate;
}

/* `type` is the older name of `rope_type`; a file may have both. */
static const char *rope_type(struct bt_model_reader *r, const char *where, const json_t *o)
{
    const char *type = bt_model_str(r, o, "rope_type", NULL),
               *older = bt_model_str(r, o, "type", NULL);
    if (type != NULL && older != NULL && strcmp(type, older) != 0) {
        bt_model_fail(r, BT_ERR_INVALID, "%s: rope_type is %.32s and type is %.32s; leave one out",
                      where, type, older);
    }
    return type != NULL ? type : older;
}

/* How much longer sequences sharpen attention (YaRN, 3.3). */
static double magnitude(double factor, double m)
{
    return factor <= 1 ? 1.0 : 0.1 * m * log(factor) + 1.0;
}

/* beta_fast, beta_slow and truncate have the defaults of the paper. mscale or mscale_all_dim alone
 * is refused, because DeepSeek's code and transformers give it different meanings; an mscale of 1
 * is the default of both. */
static void read_yarn(struct bt_model_reader *r, const char *where, const json_t *o,
                      const struct bt_model_config *c, struct rope *p)
{
    p->kind = BT_ROPE_YARN;
    p->factor = bt_model_num(r, o, "factor", 1.0, 1e6, true, 1.0);
    p->high = bt_model_num(r, o, "beta_fast", 1e-6, 1e6, false, 32);
    p->low = bt_model_num(r, o, "beta_slow", 1e-6, 1e6, false, 1);
    p->original_len = bt_model_num(r, o, "original_max_position_embeddings", 1, 1 << 24, false,
                                   (double)c->max_model_len);
    double given = bt_model_num(r, o, "attention_factor", 1e-6, 1e6, false, 0);
    double m = bt_model_num(r, o, "mscale", 0, 1e3, false, 0);
    double all = bt_model_num(r, o, "mscale_all_dim", 0, 1e3, false, 0);
    const json_t *truncate = bt_model_field(o, "truncate");
    if (truncate && !json_is_boolean(truncate)) {
        bt_model_fail(r, BT_ERR_INVALID, "%s.truncate: must be true or false", where);
    }
    p->truncate = !truncate || json_is_true(truncate);
    if (p->high < p->low) {
        bt_model_fail(r, BT_ERR_INVALID, "%s.beta_fast: must not be below beta_slow", where);
    }
    if (p->theta <= 1) {
        bt_model_fail(r, BT_ERR_INVALID, "%s.rope_theta: must be above 1 for yarn", where);
    }
    if (given == 0 && (m == 0) != (all == 0) && m != 1) {
        bt_model_fail(r, BT_ERR_UNSUPPORTED,
                      "%s.%s: is not supported alone; accepted are mscale and mscale_all_dim "
                      "together, or attention_factor",
                      where, m != 0 ? "mscale" : "mscale_all_dim");
    }
    p->scale = given != 0           ? given
               : m != 0 && all != 0 ? magnitude(p->factor, m) / magnitude(p->factor, all)
                                    : magnitude(p->factor, 1);
    p->scale_all = all != 0 ? magnitude(p->factor, all) : 1;
}

/* Reads one object with RoPE parameters. theta: used if the object has none. */
static struct rope read_rope_object(struct bt_model_reader *r, const char *where, const json_t *o,
                                    double theta, const struct bt_model_config *c)
{
    struct rope p = {.kind = BT_ROPE_DEFAULT, .theta = theta, .scale = 1, .scale_all = 1};
    char why[256];
    if (!json_is_object(o)) {
        bt_model_fail(r, BT_ERR_INVALID, "%s: must be an object or null", where);
        return p;
    }
    const char *type = rope_type(r, where, o);
    check_rope(r, where, o, type != NULL);
    bool yarn = type != NULL && strcmp(type, "yarn") == 0;
    if (!bt_model_follows(o, BT_MODEL_ROPE, yarn ? BT_MODEL_OWN_YARN : 0, why, sizeof(why))) {
        bt_model_fail(r, BT_ERR_UNSUPPORTED, "%s.%s", where, why);
    }
    p.theta = bt_model_num(r, o, "rope_theta", 1.0, 1e12, false, theta);
    if (type == NULL || strcmp(type, "default") == 0) {
        p.kind = BT_ROPE_DEFAULT;
    } else if (strcmp(type, "linear") == 0) {
        p.kind = BT_ROPE_LINEAR;
        p.factor = bt_model_num(r, o, "factor", 1.0, 1e6, true, 1.0);
    } else if (strcmp(type, "llama3") == 0) {
        p.kind = BT_ROPE_LLAMA3;
        p.factor = bt_model_num(r, o, "factor", 1.0, 1e6, true, 1.0);
        p.low = bt_model_num(r, o, "low_freq_factor", 1e-6, 1e6, true, 1.0);
        p.high = bt_model_num(r, o, "high_freq_factor", 1e-6, 1e6, true, 4.0);
        p.original_len =
            bt_model_num(r, o, "original_max_position_embeddings", 1, 1 << 24, true, 8192);
        if (p.high <= p.low) {
            bt_model_fail(r, BT_ERR_INVALID, "%s.high_freq_factor: must be above low_freq_factor",
                          where);
        }
    } else if (yarn) {
        read_yarn(r, where, o, c, &p);
    } else {
        bt_model_fail(r, BT_ERR_UNSUPPORTED,
                      "%s.rope_type: %.32s is not supported; supported are default, "
                      "linear, llama3, yarn",
                      where, type);
    }
    if (bt_model_num(r, o, "partial_rotary_factor", 0, 1, false, 1.0) != 1.0) {
        bt_model_fail(r, BT_ERR_UNSUPPORTED, "%s.partial_rotary_factor: only 1 is supported",
                      where);
    }
    return p;
}

/* Newer files have rope_parameters {rope_theta, rope_type, ...}; older ones rope_theta beside
 * rope_scaling {rope_type or type, factor, ...}. A file may have both forms, for old and new
 * readers; then their values must be equal. */
void bt_model_read_rope(struct bt_model_reader *r, struct bt_model_config *c,
                        const struct bt_model_arch *a)
{
    const json_t *newer = bt_model_field(r->root, "rope_parameters"),
                 *older = bt_model_field(r->root, "rope_scaling");
    double top = bt_model_num(r, r->root, "rope_theta", 1.0, 1e12, false, 10000.0);
    struct rope p = {.kind = BT_ROPE_DEFAULT, .theta = top, .scale = 1, .scale_all = 1};
    if (older) {
        p = read_rope_object(r, "rope_scaling", older, top, c);
    }
    if (newer) {
        struct rope q = read_rope_object(r, "rope_parameters", newer, top, c);
        bool has_theta =
            bt_model_field(r->root, "rope_theta") || (older && bt_model_field(older, "rope_theta"));
        p.theta = has_theta ? p.theta : q.theta;
        if (older && !same_rope(&p, &q)) {
            bt_model_fail(
                r, BT_ERR_INVALID,
                "rope_scaling: contradicts rope_parameters; remove the one that does not belong "
                "to these weights");
        }
        p = q;
    }
    if (bt_model_field(r->root, "rope_theta") && p.theta != top) {
        bt_model_fail(r, BT_ERR_INVALID,
                      "rope_theta: is %g, and %g in %s; remove the one that is wrong", top, p.theta,
                      newer ? "rope_parameters" : "rope_scaling");
    }
    if (a->family == BT_FAMILY_MIXTRAL && !bt_model_field(r->root, "rope_theta") &&
        !(older && bt_model_field(older, "rope_theta")) &&
        !(newer && bt_model_field(newer, "rope_theta"))) {
        bt_model_fail(r, BT_ERR_INVALID, "rope_theta: missing; a number from 1 to 1e+12 is needed");
    }
    if (bt_model_num(r, r->root, "partial_rotary_factor", 0, 1, false, 1.0) != 1.0) {
        bt_model_fail(r, BT_ERR_UNSUPPORTED, "partial_rotary_factor: only 1 is supported");
    }
    c->rope_kind = p.kind;
    c->rope_theta = p.theta;
    c->rope_factor = p.factor;
    c->rope_low = p.low;
    c->rope_high = p.high;
    c->rope_original_len = p.original_len;
    c->rope_truncate = p.truncate;
    c->rope_scale = (float)p.scale;
    if (c->mla.kv_rank) { /* as published with DeepSeek-V2 */
        c->attn_scale *= (float)(p.scale_all * p.scale_all);
    }
    int n = snprintf(c->rope_text, sizeof(c->rope_text),
                     "kind=%d theta=%.17g dim=%u factor=%.17g low=%.17g high=%.17g len=%.17g",
                     (int)c->rope_kind, c->rope_theta, bt_model_rope_dim(c), c->rope_factor,
                     c->rope_low, c->rope_high, c->rope_original_len);
    if (c->rope_kind == BT_ROPE_YARN) {
        snprintf(c->rope_text + n, sizeof(c->rope_text) - (size_t)n, " truncate=%d scale=%.9g",
                 c->rope_truncate, (double)c->rope_scale);
    }
}

/* The index, not whole, of the frequency that turns `turns` times within the original length. */
static double index_of_turns(const struct bt_model_config *c, double turns)
{
    return bt_model_rope_dim(c) * log(c->rope_original_len / (turns * 2 * M_PI)) /
           (2 * log(c->rope_theta));
}

/* The borders of YaRN's ramp, as indices of frequencies. */
static void yarn_ramp(const struct bt_model_config *c, double *low_p, double *high_p)
{
    double low = index_of_turns(c, c->rope_high), high = index_of_turns(c, c->rope_low);
    if (c->rope_truncate) {
        low = floor(low);
        high = ceil(high);
    }
    low = fmax(low, 0);
    high = fmin(high, bt_model_rope_dim(c) - 1.0);
    *low_p = low;
    *high_p = low == high ? high + 0.001 : high; /* a step, without a division by 0 */
}

void bt_model_rope_inv_freq(const struct bt_model_config *c, float *inv_freq)
{
    double ramp_low = 0, ramp_high = 1;
    uint32_t dim = bt_model_rope_dim(c);
    if (c->rope_kind == BT_ROPE_YARN) {
        yarn_ramp(c, &ramp_low, &ramp_high);
    }
    for (uint32_t i = 0; i < dim / 2; i++) {
        double f = 1.0 / pow(c->rope_theta, 2.0 * i / dim);
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
        if (c->rope_kind == BT_ROPE_YARN) {
            double s = fmin(fmax((i - ramp_low) / (ramp_high - ramp_low), 0), 1);
            f = s * f / c->rope_factor + (1.0 - s) * f;
        }
        inv_freq[i] = (float)f;
    }
}
