/* libFuzzer: bodies of the API. The first byte chooses the route and how the model writes calls;
 * whatever is accepted must be within the limits that the request machine relies on. Build and run:
 * tests/fuzz/run front_parse 60 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "conductor/front/front_parse.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerInitialize(int *argc, char ***argv);

#define MODEL "deploy/models/shakespeare-llama-6m"

static struct bt_model_config config;
static const struct bt_tokens none;
static struct bt_front_model model = {.id = "m",
                                      .max_model_len = 256,
                                      .config = &config,
                                      .kept_thoughts = &none,
                                      .kept_tools = &none,
                                      .thoughts_end = &none};

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    static struct bt_tokenizer *tok;
    static struct bt_template *tmpl;
    char err[256];
    (void)argc;
    (void)argv;
    if (bt_tokenizer_load(MODEL, &tok, err, sizeof(err)) != BT_OK ||
        bt_template_load(MODEL, &tmpl, err, sizeof(err)) != BT_OK ||
        bt_model_config_load(MODEL, &config, err, sizeof(err)) != BT_OK) {
        fprintf(stderr, "%s\n", err);
        exit(1);
    }
    model.tok = tok;
    model.tmpl = tmpl;
    return 0;
}

static void check_spec(const struct bt_gen_spec *s, const struct bt_front_options *o)
{
    BT_ASSERT(s->prompt.n >= 1 && s->prompt.n <= 256);
    for (size_t i = 0; i < s->prompt.n; i++) {
        BT_ASSERT(s->prompt.ids[i] < config.vocab);
    }
    BT_ASSERT(s->max_tokens >= 1 || (o->echo && s->prompt_logprobs));
    BT_ASSERT(s->max_tokens + s->prompt.n <= 256 && s->prompt_top <= BT_ENGINE_MAX_TOP);
    BT_ASSERT(s->n >= 1 && s->n <= FRONT_N_MAX && s->n == o->n);
    BT_ASSERT(s->sampling.temperature == 0 || s->sampling.temperature >= 0.01f);
    BT_ASSERT(s->sampling.top_p > 0 && s->sampling.top_p <= 1);
    BT_ASSERT(s->sampling.min_p >= 0 && s->sampling.min_p <= 1);
    BT_ASSERT(s->sampling.repetition_penalty > 0 && isfinite(s->sampling.repetition_penalty));
    BT_ASSERT(s->sampling.logprobs >= -1 && s->sampling.logprobs <= BT_ENGINE_MAX_TOP);
    BT_ASSERT(s->sampling.n_eos <= BT_ENGINE_MAX_EOS && s->sampling.min_new <= 256);
    for (size_t i = 0; s->stop != NULL && s->stop[i] != NULL; i++) {
        BT_ASSERT(i < 16 && s->stop[i][0] != '\0');
    }
}

static void check_generation(const struct bt_front_generation *g)
{
    BT_ASSERT(g->prompts.n >= 1 && g->prompts.n * g->opt.n <= FRONT_ANSWER_CHOICES_MAX);
    BT_ASSERT(g->opt.n_stop_ids <= BT_ENGINE_MAX_EOS && g->opt.prompt_logprobs >= -1);
    for (uint32_t i = 0; i < g->prompts.n; i++) {
        check_spec(&g->specs[i], &g->opt);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct bt_front_error e = {0};
    struct bt_tokens ids = {0};
    struct bt_front_generation gen;
    bool strings, ok;
    static const enum bt_front_api apis[] = {[0] = FRONT_API_COMPLETIONS,
                                             [1] = FRONT_API_CHAT,
                                             [4] = FRONT_API_MESSAGES,
                                             [5] = FRONT_API_RESPONSES};
    if (size == 0) {
        return 0;
    }
    uint8_t route = data[0] % 7, style = data[0] / 7;
    model.style = (struct bt_front_style){
        .reply = {.tools = (enum bt_reply_tools)(style % BT_TOOLS_STYLES),
                  .thoughts = style > 18 ? BT_THOUGHTS_TAGS : BT_THOUGHTS_NONE},
        .takes_tools = true,
        .text_arguments = style % 2 == 1};
    switch (route) {
    case 2: ok = bt_front_parse_tokenize(&model, data + 1, size - 1, &ids, &strings, &e); break;
    case 3: ok = bt_front_parse_detokenize(&model, data + 1, size - 1, &ids, &e); break;
    case 6:
        ok = bt_front_parse_count(&model, FRONT_API_MESSAGES, data + 1, size - 1, &ids, &e);
        break;
    default:
        ok = bt_front_parse_generation(&model, apis[route], data + 1, size - 1, &gen, &e);
        if (ok) {
            check_generation(&gen);
            bt_front_generation_cleanup(&gen);
        }
    }
    BT_ASSERT(ok || (e.http >= 400 && e.http < 500 && e.message[0] != '\0'));
    if (!ok) {
        struct bt_buf out = {0};
        json_error_t je;
        bt_front_error_json(&e, &out);
        json_t *j = json_loads(out.data, JSON_REJECT_DUPLICATES, &je);
        BT_ASSERT(j != NULL);
        json_decref(j);
        bt_buf_cleanup(&out);
    }
    bt_tokens_cleanup(&ids);
    return 0;
}
