/* DoLa (Chuang et al. 2023): which layers `dola_layers` names. As in transformers, "low" and "high"
 * mean every second layer of the lower or the upper half.
 *
 * Contrastive search (Su et al. 2022): `penalty_alpha` with `top_k`. It does not sample, so fields
 * about sampling are refused. It needs the hidden states of its whole prompt, which are not in the
 * KV cache. So one worker computes the prompt and generates. */
#include "conductor/front/front_contrast.h"

#include <string.h>

#include "conductor/front/front_json.h"

/* In deep models the halves are the first and the last HALF layers. */
#define DEEP 40
#define HALF 20

static void add_every_second(struct bt_engine_params *s, uint32_t from, uint32_t end)
{
    for (uint32_t i = from; i < end && s->n_dola < BT_ENGINE_DOLA_MAX; i += 2) {
        s->dola[s->n_dola++] = (uint16_t)i;
    }
}

/* If the model uses its embedding also as its head (tied embeddings), the head undoes the
 * embedding. Then the embedding itself says nothing about the next token, and the layers right
 * behind it say little. */
static void add_low(const struct bt_model_config *c, struct bt_engine_params *s)
{
    uint32_t half = c->layers > DEEP ? HALF : c->layers / 2;
    uint32_t first = !c->tie_embeddings ? 0 : c->layers > 2 ? 2 : c->layers == 2 ? 1 : 0;
    add_every_second(s, first, half);
    if (s->n_dola == 0) { /* the model has few layers */
        s->dola[s->n_dola++] = (uint16_t)BT_MIN(first, c->layers - 1);
    }
}

static void add_high(const struct bt_model_config *c, struct bt_engine_params *s)
{
    add_every_second(s, c->layers > DEEP ? c->layers - HALF : c->layers / 2, c->layers);
}

static bool take_list(const struct bt_model_config *c, const json_t *v, struct bt_engine_params *s,
                      struct bt_front_error *e)
{
    if (json_array_size(v) == 0 || json_array_size(v) > BT_ENGINE_DOLA_MAX) {
        return bt_front_fail(e, 400, "dola_layers", "invalid_value",
                             "'dola_layers' has %zu layers; allowed: 1 to %d", json_array_size(v),
                             BT_ENGINE_DOLA_MAX);
    }
    for (size_t i = 0; i < json_array_size(v); i++) {
        const json_t *layer = json_array_get(v, i);
        json_int_t n = json_integer_value(layer);
        if (!json_is_integer(layer) || n < 0 || n >= (json_int_t)c->layers) {
            return bt_front_fail(e, 400, "dola_layers", "invalid_value",
                                 "'dola_layers[%zu]' must be a layer: an integer from 0, the "
                                 "embedding, to %u, which enters the last layer",
                                 i, c->layers - 1);
        }
        s->dola[s->n_dola++] = (uint16_t)n;
    }
    return true;
}

static bool take_dola(const struct bt_model_config *c, const json_t *root,
                      struct bt_engine_params *s, struct bt_front_error *e)
{
    const json_t *v = json_object_get(root, "dola_layers");
    const char *name = json_string_value(v);
    if (v == NULL || json_is_null(v)) {
        return true;
    }
    if (json_is_array(v)) {
        return take_list(c, v, s, e);
    }
    if (name != NULL && strcmp(name, "low") == 0) {
        add_low(c, s);
    } else if (name != NULL && strcmp(name, "high") == 0) {
        add_high(c, s);
    } else {
        return bt_front_fail(e, 400, "dola_layers", "invalid_value",
                             "'dola_layers' must be \"low\", \"high\" or a list of layers");
    }
    return true;
}

static bool clash(const char *field, const char *why, struct bt_front_error *e)
{
    return bt_front_fail(e, 400, field, "unsupported_parameter",
                         "'%s' cannot be combined with 'penalty_alpha': contrastive search %s; "
                         "leave one of them out",
                         field, why);
}

/* The client's fields override the defaults of the model's generation_config.json. */
static bool take_alpha(const json_t *root, uint32_t n, struct bt_gen_spec *spec,
                       struct bt_front_error *e)
{
    static const struct {
        const char *name;
        double neutral;
    } draws[] = {
        {"temperature", 0}, {"top_p", 1}, {"min_p", 0}, {"typical_p", 1}, {"xtc_probability", 0}};
    struct bt_engine_params *s = &spec->sampling;
    if (!bt_front_get_num(root, "penalty_alpha", 0, false, 1, &s->penalty_alpha, e)) {
        return false;
    }
    if (!(s->penalty_alpha > 0)) {
        return true;
    }
    if (!bt_front_has(root, "top_k") || s->top_k < 2 || s->top_k > BT_ENGINE_CANDIDATES) {
        return bt_front_fail(e, 400, "top_k", "invalid_value",
                             "'penalty_alpha' needs 'top_k', the number of candidates: 2 to %d",
                             BT_ENGINE_CANDIDATES);
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(draws); i++) {
        if (bt_front_has(root, draws[i].name) &&
            json_number_value(json_object_get(root, draws[i].name)) != draws[i].neutral) {
            return clash(draws[i].name, "does not sample", e);
        }
    }
    if (n > 1) {
        return clash("n", "has only one answer", e);
    }
    if (s->n_dola > 0) {
        return clash("dola_layers", "is another search", e);
    }
    if (bt_front_asked_for(json_object_get(root, "use_beam_search"))) {
        return clash("use_beam_search", "is another search", e);
    }
    s->temperature = 0;
    s->top_p = 1;
    s->min_p = 0;
    spec->no_cache = true;
    return true;
}

bool bt_front_take_contrast(const struct bt_front_model *m, const json_t *root, uint32_t n,
                            struct bt_gen_spec *spec, struct bt_front_error *e)
{
    if (!take_dola(m->config, root, &spec->sampling, e)) {
        return false;
    }
    if (spec->sampling.n_dola > 0 && bt_front_asked_for(json_object_get(root, "use_beam_search"))) {
        return bt_front_fail(
            e, 400, "use_beam_search", "unsupported_parameter",
            "'use_beam_search' cannot be combined with 'dola_layers'; leave one of them out");
    }
    return take_alpha(root, n, spec, e);
}
