/* Within front/: prompts and chat messages of a request into token ids. Pure but for the tokenizer
 * and the chat template it calls. */
#ifndef BT_CONDUCTOR_FRONT_PROMPT_H
#define BT_CONDUCTOR_FRONT_PROMPT_H

#include "common/engine/model_config.h"
#include "common/engine/sampling.h"
#include "common/token/token.h"
#include "conductor/front/front_tools.h"

#define FRONT_N_MAX              BT_ENGINE_CHOICES_MAX /* choices of a prompt */
#define FRONT_ANSWER_CHOICES_MAX 1024                  /* choices of all prompts of a request */

struct bt_grammar_cache;

struct bt_front_model { /* what parsing needs to know of the served model */
    const char *id;
    uint32_t max_model_len;
    const struct bt_model_config *config;
    const struct bt_tokenizer *tok;
    const struct bt_template *tmpl; /* NULL: none */
    struct bt_front_style style;
    /* Special tokens that stay in the text of answers: markers of reasoning, and of calls too. */
    const struct bt_tokens *kept_thoughts, *kept_tools;
    const struct bt_tokens *thoughts_end; /* what ends a reasoning; empty: nothing does */
    /* Limits of reading one body; no limit where they are NULL or 0. */
    const struct bt_token_watch *watch; /* stops the template; tok has its own */
    uint64_t template_steps;
    size_t text_bytes; /* of a text to tokenize */
    bool on_loop;      /* what may take long is left to a reading thread (bt_front_error.beyond) */
    struct bt_grammar_cache *grammars; /* NULL: compiled grammars are not kept */
    uint32_t
        piece_max; /* bytes of the longest token; 0: texts are tokenized whatever their length */
};

struct bt_front_prompt {
    struct bt_tokens ids;
    struct bt_buf text; /* the text that `echo` gives back; empty unless asked for */
};

struct bt_front_prompts {
    struct bt_front_prompt *list;
    uint32_t n;
};
void bt_front_prompts_cleanup(struct bt_front_prompts *p);

/* Reads `prompt` of completions: a string, token ids, or a list of either. with_text: also fills
 * text; ids become text without special tokens if skip_special. False: e is set; the caller cleans
 * up. */
bool bt_front_take_prompts(const struct bt_front_model *m, const json_t *root, bool with_text,
                           bool skip_special, struct bt_front_prompts *out,
                           struct bt_front_error *e);
struct bt_front_chat { /* what the answer to a chat will be taken apart into */
    struct bt_reply_options reply;
    bool hides_thoughts; /* they are left out of the answer */
    bool may_think;      /* the answer may have a reasoning, or begins inside it */
    int64_t budget;      /* tokens of the reasoning; -1: any number */
};

/* Applies the chat template to `messages` and tools. Also reads add_generation_prompt,
 * continue_final_message, chat_template_kwargs and what is asked for of the reasoning.
 * The caller cleans tools up, in any case. */
bool bt_front_take_chat(const struct bt_front_model *m, const json_t *root, struct bt_tokens *out,
                        struct bt_front_chat *chat, struct bt_front_tools *tools,
                        struct bt_front_error *e);
/* Reads `prediction` of a chat, into the tokens of its text; none: out stays empty. */
bool bt_front_take_prediction(const struct bt_front_model *m, const json_t *root,
                              struct bt_tokens *out, struct bt_front_error *e);
/* Token ids of a JSON array; key names it in errors. */
bool bt_front_take_ids(const struct bt_front_model *m, const char *key, const json_t *list,
                       struct bt_tokens *out, struct bt_front_error *e);

#endif
