/* Beam search: keeps the `width` most likely beginnings of an answer, and makes each of them one
 * token longer at a time. What it finds equals transformers' generate with num_beams (4.50 and
 * newer): score = sum of logprobs / length ^ length_penalty, where the length counts generated
 * tokens with the one that ends the answer.
 *
 * A search has `width` places, each of a beam. One turn: the caller computes the next row of every
 * place that bt_beam_wants and gives its most likely tokens (bt_beam_put). When all are there,
 * bt_beam_choose makes the next beams and says from which place each of them continues. A beam that
 * has a successor keeps its place. PURE; memory is the caller's. */
#ifndef BT_SEARCH_BEAM_H
#define BT_SEARCH_BEAM_H

#include "common/base/base.h"
#include "common/engine/sampling.h"

#define BT_BEAM_WIDTH_MAX   BT_ENGINE_CHOICES_MAX
#define BT_BEAM_PENALTY_MAX 10 /* of either sign */

/* When may a search end before the longest answer? Not before it has `width` answers; then ... */
typedef enum {
    BT_BEAM_HEURISTIC, /* ... when the best beam, if it ended now, would not be one of them */
    BT_BEAM_FULL,      /* ... at once */
    BT_BEAM_NEVER,     /* ... when no beam can become one of them, at any length */
    BT_BEAM_STOPS
} bt_beam_stop_t;

struct bt_beam_conf {
    uint32_t width; /* 1 to BT_BEAM_WIDTH_MAX; 0 elsewhere: no search */
    uint32_t n;     /* answers that are wanted, the best ones; at most width */
    float length_penalty;
    bt_beam_stop_t stop;
    uint32_t min_new; /* an answer ends by an id only behind so many tokens */
    uint32_t n_top;   /* alternatives that are kept with each token */
};

struct bt_beam_token {
    uint32_t token;
    float logprob;
    uint32_t n_top;
    const uint32_t *top_id; /* [n_top] by falling logprob */
    const float *top_logprob;
};

struct bt_beam_search;

/* How many of a row's most likely tokens the search needs, with n_eos ids that end an answer. At
 * most BT_ENGINE_MAX_TOP can be had. */
uint32_t bt_beam_tops(uint32_t width, uint32_t n_eos);
/* Bytes of a search for answers of at most max_new tokens. */
size_t bt_beam_bytes(const struct bt_beam_conf *conf, uint32_t max_new);
/* mem: bt_beam_bytes of it, zeroed, aligned for uint64_t. eos[n_eos] and conf must stay. */
struct bt_beam_search *bt_beam_init(void *mem, const struct bt_beam_conf *conf, uint32_t max_new,
                                    const uint32_t *eos, uint32_t n_eos);

/* Does this turn still lack the row of this place? Before the first choice only place 0 has one:
 * the row of the prompt's last token. */
bool bt_beam_wants(const struct bt_beam_search *s, uint32_t place);
/* Gives the row of a place: its n most likely tokens, by falling logprob. False: these are fewer
 * than the search needs. */
bool bt_beam_put(struct bt_beam_search *s, uint32_t place, const uint32_t *ids,
                 const float *logprobs, uint32_t n) BT_MUST_CHECK;
/* Is every row of this turn there? */
bool bt_beam_ready(const struct bt_beam_search *s);
/* Makes the next beams. from[place]: the place whose beam the one at `place` continues; if another
 * place continues it as well, it is the place itself for one of them. False: the search is over,
 * from is not set. */
bool bt_beam_choose(struct bt_beam_search *s, uint32_t *from);

uint32_t bt_beam_len(const struct bt_beam_search *s); /* tokens of each beam */
const uint32_t *bt_beam_last(const struct bt_beam_search *s, uint32_t place); /* token */
/* Writes the tokens of the beam at place: bt_beam_len of them. */
void bt_beam_path(const struct bt_beam_search *s, uint32_t place, uint32_t *tokens);

/* When it is over: answer i, by falling score. The length; by_eos_p: does an id end it? Tokens of
 * this answer can be read until another one is opened. */
uint32_t bt_beam_answer(struct bt_beam_search *s, uint32_t i, bool *by_eos_p);
/* Token `at` of the answer that was opened last. */
void bt_beam_answer_token(const struct bt_beam_search *s, uint32_t at, struct bt_beam_token *out);

#endif
