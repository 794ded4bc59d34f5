/* Within front/: logprobs as OpenAI's two APIs and vLLM's prompt_logprobs write them. Text is built
 * into buffers. Pure but for the tokenizer. */
#ifndef BT_CONDUCTOR_FRONT_LOGPROBS_H
#define BT_CONDUCTOR_FRONT_LOGPROBS_H

#include "conductor/front/front_json.h"
#include "conductor/request/request.h"

struct bt_front_names { /* how an answer names tokens */
    const struct bt_tokenizer *tok;
    bool as_ids;                /* "token_id:123" */
    bool skip_special;          /* special tokens do not appear in the text */
    struct bt_buf piece, names; /* scratch */
};
void bt_front_names_cleanup(struct bt_front_names *n);

enum { LP_TOKENS, LP_LOGPROBS, LP_TOP, LP_OFFSETS, LP_PARTS };

/* Logprobs of a choice so far: the insides of the JSON arrays. Chat uses the first only. */
struct bt_front_logprobs {
    struct bt_buf part[LP_PARTS];
};
void bt_front_logprobs_cleanup(struct bt_front_logprobs *lp);

/* Appends a generated token with its top n_top. chars: characters of the text before it, raised
 * by its own (completions' text_offset). */
void bt_front_logprobs_add(struct bt_front_logprobs *lp, bool chat, struct bt_front_names *names,
                           const struct bt_gen_token *t, uint32_t n_top, uint32_t *chars);
/* Appends the `logprobs` object of the tokens since the last call. */
void bt_front_logprobs_put(struct bt_front_logprobs *lp, bool chat, struct bt_buf *out);
/* The key of one of its arrays. */
const char *bt_front_logprobs_part(bool chat, int part);

/* ---- a prompt's own logprobs: long, so they are written in slices ---- */

/* What one call may still append. */
struct bt_front_slice {
    size_t until;   /* stop when out has this many bytes */
    uint32_t names; /* names of tokens written so far */
};
#define FRONT_SLICE_NAMES 512u /* a fraction of a millisecond */
static inline bool front_slice_has_room(const struct bt_front_slice *s, const struct bt_buf *out)
{
    return s->names < FRONT_SLICE_NAMES && out->len < s->until;
}

struct bt_front_prompt_place { /* how far an array was written */
    size_t token;
    size_t bytes; /* length of the echoed text up to the next token */
    uint32_t chars;
};
/* Completions: appends the inside of one array (LP_TOKENS...) from *at on. text: the prompt as it
 * is echoed, `all` characters long; offsets of generated tokens begin after it. True: the array is
 * complete. */
bool bt_front_logprobs_put_prompt(struct bt_front_names *names, const struct bt_gen_token *tokens,
                                  size_t n, uint32_t n_top, const struct bt_buf *text, uint32_t all,
                                  int part, struct bt_front_prompt_place *at,
                                  struct bt_front_slice *slice, struct bt_buf *out);
/* The inside of vLLM's `prompt_logprobs`: null, {"token id": {"logprob", "rank",
 * "decoded_token"}, ...}, ... True: it is complete. */
bool bt_front_prompt_logprobs_put(struct bt_front_names *names, const struct bt_gen_token *tokens,
                                  size_t n, uint32_t n_top, struct bt_front_prompt_place *at,
                                  struct bt_front_slice *slice, struct bt_buf *out);
/* Characters of UTF-8 text. */
uint32_t bt_front_count_chars(const char *s, size_t len);

#endif
