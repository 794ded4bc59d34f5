/* The logprobs of a prompt's tokens while they arrive, in order and in pieces. No I/O. */
#ifndef BT_CONDUCTOR_PROMPT_H
#define BT_CONDUCTOR_PROMPT_H

#include "conductor/request/request.h"

struct bt_prompt;

/* top: most likely tokens kept for each, 0..BT_ENGINE_MAX_TOP. */
struct bt_prompt *bt_prompt_create(const struct bt_tokens *prompt, uint32_t top);
void bt_prompt_destroy(struct bt_prompt *p); /* NULL is fine */
/* A new plan: its worker begins again with the second token. */
void bt_prompt_begin(struct bt_prompt *p);
struct bt_prompt_logprob { /* a worker's report about one of the tokens */
    uint32_t token, rank;  /* rank among all tokens, from 1; 0: not told */
    float logprob;
    uint32_t n_top;
    const uint32_t *top_id;
    const float *top_logprob;
};
/* at[n]: the positions from first on. False: not the next positions, or beyond this prompt. */
bool bt_prompt_add(struct bt_prompt *p, const struct bt_prompt_logprob *at, uint32_t first,
                   uint32_t n) BT_MUST_CHECK;
bool bt_prompt_complete(const struct bt_prompt *p);
/* [n tokens of the prompt]; the first has no logprob (NaN) and no top. Valid as long as p. */
const struct bt_gen_token *bt_prompt_tokens(const struct bt_prompt *p);

#endif
