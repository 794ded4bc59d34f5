/* n, best_of and beam search; see front_search.h. The fields are vLLM's; best_of beside beam search
 * is its older name for the number of beams. */
#include "conductor/front/front_search.h"

#include <string.h>

/* true, false or "never". */
static bool take_early_stopping(const json_t *root, struct bt_gen_spec *spec,
                                struct bt_front_error *e)
{
    const json_t *v = json_object_get(root, "early_stopping");
    const char *s = json_string_value(v);
    if (s != NULL ? strcmp(s, "never") != 0
                  : !(v == NULL || json_is_null(v) || json_is_boolean(v))) {
        return bt_front_fail(e, 400, "early_stopping", "invalid_value",
                             "'early_stopping' must be true, false or \"never\"");
    }
    spec->beams.stop = s != NULL         ? BT_BEAM_NEVER
                       : json_is_true(v) ? BT_BEAM_FULL
                                         : BT_BEAM_HEURISTIC;
    return true;
}

bool bt_front_take_choices(const json_t *root, struct bt_gen_spec *spec,
                           struct bt_front_options *opt, struct bt_front_error *e)
{
    int64_t n = 1;
    bool beams = false;
    spec->beams.length_penalty = 1;
    if (!bt_front_get_int(root, "n", 1, FRONT_N_MAX, &n, e)) {
        return false;
    }
    int64_t best = n;
    if (!bt_front_get_int(root, "best_of", 1, FRONT_N_MAX, &best, e) ||
        !bt_front_get_bool(root, "use_beam_search", &beams, e) ||
        !bt_front_get_num(root, "length_penalty", -BT_BEAM_PENALTY_MAX, false, BT_BEAM_PENALTY_MAX,
                          &spec->beams.length_penalty, e) ||
        !take_early_stopping(root, spec, e)) {
        return false;
    }
    if (best < n) {
        return bt_front_fail(e, 400, "best_of", "invalid_value",
                             "'best_of' is %lld, but 'n' is %lld; 'best_of' must be at least 'n'",
                             (long long)best, (long long)n);
    }
    if (best > n && opt->stream && !beams) {
        return bt_front_fail(e, 400, "best_of", "invalid_value",
                             "'best_of' above 'n' cannot be combined with 'stream': only the end "
                             "shows which choices are the best");
    }
    if (!beams && spec->beams.length_penalty != 1) {
        return bt_front_fail(e, 400, "length_penalty", "invalid_value",
                             "'length_penalty' needs 'use_beam_search': true");
    }
    spec->beams.width = beams ? (uint32_t)best : 0;
    opt->n = (uint32_t)(beams ? n : best);
    opt->n_best = best > n && !beams ? (uint32_t)n : 0;
    return true;
}

/* A number that the client gave and that is none of the two. */
static bool other_than(const json_t *root, const char *key, double a, double b)
{
    const json_t *v = json_object_get(root, key);
    double d = json_number_value(v);
    return json_is_number(v) && d != a && d != b;
}

/* What would change the answer of a sampled request and means nothing here. */
static const char *senseless(const json_t *root, const struct bt_gen_spec *spec, const char **why_p)
{
    const struct bt_engine_params *s = &spec->sampling;
    *why_p = "beam search does not sample";
    if (other_than(root, "temperature", 0, 1)) {
        return "temperature";
    }
    if (other_than(root, "top_p", 1, 1)) {
        return "top_p";
    }
    if (other_than(root, "top_k", 0, -1)) {
        return "top_k";
    }
    if (other_than(root, "min_p", 0, 0)) {
        return "min_p";
    }
    if (other_than(root, "typical_p", 1, 1)) {
        return "typical_p";
    }
    if (other_than(root, "xtc_probability", 0, 0)) {
        return "xtc_probability";
    }
    *why_p = "beams are chosen by the model's own logprobs";
    if (s->repetition_penalty != 1) { /* also if it is the model's */
        *why_p = "beams are chosen by the model's own logprobs; set it to 1";
        return "repetition_penalty";
    }
    if (s->frequency_penalty != 0) {
        return "frequency_penalty";
    }
    if (s->presence_penalty != 0) {
        return "presence_penalty";
    }
    if (s->n_bias > 0) {
        return "logit_bias";
    }
    *why_p = "beams end by token ids; use stop_token_ids";
    return spec->stop != NULL ? "stop" : NULL;
}

static bool finish_search(const json_t *root, struct bt_gen_spec *spec, struct bt_front_error *e)
{
    const char *why, *what = senseless(root, spec, &why);
    uint32_t tops = bt_beam_tops(spec->beams.width, spec->sampling.n_eos);
    if (what != NULL) {
        return bt_front_fail(
            e, 400, what, "unsupported_parameter",
            "'%s' cannot be combined with 'use_beam_search' (%s); leave one of them out", what,
            why);
    }
    if (spec->grammar != NULL || spec->thoughts.n_force > 0) {
        return bt_front_fail(e, 400, "use_beam_search", "unsupported_parameter",
                             "'use_beam_search' cannot be combined with a schema, a grammar, "
                             "forced tools or a budget of reasoning; leave one of them out");
    }
    if (tops > BT_ENGINE_MAX_TOP) {
        return bt_front_fail(
            e, 400, "best_of", "invalid_value",
            "%u beams and %u ids that end an answer (the model's and 'stop_token_ids') are "
            "together more than %d; use fewer beams ('best_of' or 'n')",
            spec->beams.width, spec->sampling.n_eos, BT_ENGINE_MAX_TOP);
    }
    return true;
}

bool bt_front_finish_choices(const json_t *root, int64_t max, struct bt_gen_spec *spec,
                             struct bt_front_options *opt, struct bt_front_error *e)
{
    spec->n = opt->n;
    if (spec->beams.width > 0 && !finish_search(root, spec, e)) {
        return false;
    }
    if (max == 0) { /* only the prompt is wanted */
        spec->beams.width = 0;
    }
    if (opt->n_best > 0 && spec->sampling.logprobs < 0) {
        spec->sampling.logprobs = 0;
    }
    return true;
}
