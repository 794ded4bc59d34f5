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

/* Reads one object with RoPE parameters. theta: used if the object has none. */
static struct rope read_rope_object(struct bt_model_reader *r, const char *where, const json_t *o,
                                    double theta)
{
    struct rope p = {.kind = BT_ROPE_DEFAULT, .theta = theta};
    char why[256];
    if (!json_is_object(o)) {
        bt_model_fail(r, BT_ERR_INVALID, "%s: must be an object or null", where);
        return p;
    }
    const char *type = rope_type(r, where, o);
    check_rope(r, where, o, type != NULL);
    if (!bt_model_follows(o, BT_MODEL_ROPE, why, sizeof(why))) {
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
    } else {
        bt_model_fail(r, BT_ERR_UNSUPPORTED,
                      "%s.rope_type: %.32s is not supported; supported are default, "
                      "linear, llama3",
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
void bt_model_read_rope(struct bt_model_reader *r, struct bt_model_config *c)
{
    const json_t *newer = bt_model_field(r->root, "rope_parameters"),
                 *older = bt_model_field(r->root, "rope_scaling");
    double top = bt_model_num(r, r->root, "rope_theta", 1.0, 1e12, false, 10000.0);
    struct rope p = {.kind = BT_ROPE_DEFAULT, .theta = top};
    if (older) {
        p = read_rope_object(r, "rope_scaling", older, top);
    }
    if (newer) {
        struct rope q = read_rope_object(r, "rope_parameters", newer, top);
        bool has_theta =
            bt_model_field(r->root, "rope_theta") || (older && bt_model_field(older, "rope_theta"));
        p.theta = has_theta ? p.theta : q.theta;
        if (older && !same_rope(&p, &q)) {
            bt_model_fail(
                r, BT_ERR_INVALID,
                "rope_scaling: does not say the same as rope_parameters; remove the one that does "
                "not belong to these weights");
        }
        p = q;
    }
    if (bt_model_field(r->root, "rope_theta") && p.theta != top) {
        bt_model_fail(r, BT_ERR_INVALID,
                      "rope_theta: is %g, and %g in %s; remove the one that is wrong", top, p.theta,
                      newer ? "rope_parameters" : "rope_scaling");
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
    snprintf(c->rope_text, sizeof(c->rope_text),
             "kind=%d theta=%.17g dim=%u factor=%.17g low=%.17g high=%.17g len=%.17g",
             (int)c->rope_kind, c->rope_theta, c->head_dim, c->rope_factor, c->rope_low,
             c->rope_high, c->rope_original_len);
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
