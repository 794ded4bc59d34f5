/* Within front/: request bodies into checked values. Pure but for the tokenizer and the chat
 * template it calls. */
#ifndef BT_CONDUCTOR_FRONT_PARSE_H
#define BT_CONDUCTOR_FRONT_PARSE_H

#include "common/engine/model_config.h"
#include "conductor/front/front_json.h"
#include "conductor/request/request.h"

struct front_model { /* what parsing needs to know of the served model */
    const char *id;
    uint32_t max_model_len;
    const struct bt_model_config *config;
    const struct bt_tokenizer *tok;
    const struct bt_template *tmpl; /* NULL: none */
    uint32_t
        piece_max; /* bytes of the longest token; 0: texts are tokenized whatever their length */
};

struct front_options { /* of one generation, beside its bt_gen_spec: how the answer looks */
    bool chat, stream, include_usage, continuous_usage;
    bool tokens_as_ids; /* "token_id:123" in logprobs */
    int32_t logprobs;   /* as in bt_engine_params */
    bool skip_special;
    uint32_t n;
};

/* Fills spec (everything but id, received_ns, timeout_ms, tenant) and opt. False: e is set, spec
 * holds nothing. */
bool front_parse_generation(const struct front_model *m, bool chat, const void *body, size_t len,
                            struct bt_gen_spec *spec, struct front_options *opt,
                            struct front_error *e);
void front_spec_cleanup(struct bt_gen_spec *spec);

/* POST /tokenize: prompt, or messages + add_generation_prompt. */
bool front_parse_tokenize(const struct front_model *m, const void *body, size_t len,
                          struct bt_tokens *out, bool *want_strings_p, struct front_error *e);
/* POST /detokenize: tokens. */
bool front_parse_detokenize(const struct front_model *m, const void *body, size_t len,
                            struct bt_tokens *out, struct front_error *e);

#endif
