/* Within front/: request bodies into checked values. Pure but for the tokenizer and the chat
 * template that front_prompt.c calls. */
#ifndef BT_CONDUCTOR_FRONT_PARSE_H
#define BT_CONDUCTOR_FRONT_PARSE_H

#include "conductor/front/front_prompt.h"
#include "conductor/request/request.h"

enum bt_front_api {
    FRONT_API_COMPLETIONS,
    FRONT_API_CHAT,
    FRONT_API_MESSAGES,  /* Anthropic's */
    FRONT_API_RESPONSES, /* OpenAI's */
    FRONT_APIS
};

struct bt_front_options { /* options of one answer that are not part of its specs */
    enum bt_front_api api;
    bool chat; /* of messages: every API but completions */
    bool stream, include_usage, continuous_usage;
    bool tokens_as_ids;      /* "token_id:123" in logprobs */
    bool echo;               /* every choice begins with its prompt */
    int32_t logprobs;        /* as in bt_engine_params */
    int32_t prompt_logprobs; /* the field of that name: -1: none, else the n most likely */
    bool skip_special;
    struct bt_front_chat parts; /* chat: what the answer is taken apart into */
    uint32_t n;                 /* choices of each prompt */
    uint32_t n_best;            /* of these, so many are the answer; 0: all */
    uint32_t n_stop_ids;        /* stop_token_ids: the one that ended a choice is its stop_reason */
    uint32_t stop_ids[BT_ENGINE_MAX_EOS];
};

/* A parsed body: one request for the machine per prompt. Choice k of prompt i is the answer's
 * choice i * opt.n + k. */
struct bt_front_generation {
    struct bt_front_options opt;
    struct bt_front_prompts prompts; /* their ids have moved into the specs */
    struct bt_buf echoed;            /* Responses: members that the answer repeats */
    json_t *kinds; /* of the tools' arguments (front_elements.h); NULL: they are JSON anyway */
    struct bt_gen_spec *specs; /* [prompts.n], everything but id, received_ns, timeout_ms, tenant */
};

/* False: e is set, g holds nothing. */
bool bt_front_parse_generation(const struct bt_front_model *m, enum bt_front_api api,
                               const void *body, size_t len, struct bt_front_generation *g,
                               struct bt_front_error *e);
void bt_front_generation_cleanup(struct bt_front_generation *g);

/* POST /tokenize: prompt, or messages + add_generation_prompt. */
bool bt_front_parse_tokenize(const struct bt_front_model *m, const void *body, size_t len,
                             struct bt_tokens *out, bool *want_strings_p, struct bt_front_error *e);
/* The prompt of a generation's body, whose other fields are only checked for their names. */
bool bt_front_parse_prompt(const struct bt_front_model *m, const void *body, size_t len,
                           struct bt_tokens *out, struct bt_front_error *e);
/* POST /v1/messages/count_tokens and /v1/responses/input_tokens: the prompt of a body of api. */
bool bt_front_parse_count(const struct bt_front_model *m, enum bt_front_api api, const void *body,
                          size_t len, struct bt_tokens *out, struct bt_front_error *e);
/* POST /detokenize: tokens. */
bool bt_front_parse_detokenize(const struct bt_front_model *m, const void *body, size_t len,
                               struct bt_tokens *out, struct bt_front_error *e);

#endif
