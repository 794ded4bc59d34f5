/* Beam search keeps the `width` most likely beginnings of an answer (beams), and makes each of them
 * longer, one token in each turn. The result equals that of transformers' generate with num_beams
 * (4.50 and newer): score = sum of logprobs / length ^ length_penalty. The length counts generated
 * tokens, including the one that ends the answer.
 *
 * A search has `width` places, one for each beam. In a turn the caller computes the next row of
 * every place for which bt_beam_wants is true, and passes that row's most likely tokens to
 * bt_beam_put. When all rows are there, bt_beam_choose makes the next beams and reports from which
 * place each of them continues. If beams continue the one at a place, one of them stays at that
 * place. Pure; the caller owns the memory. */
#ifndef BT_SEARCH_BEAM_H
#define BT_SEARCH_BEAM_H

#include "common/base/base.h"
#include "common/engine/sampling.h"

#define BT_BEAM_WIDTH_MAX   BT_ENGINE_CHOICES_MAX
#define BT_BEAM_PENALTY_MAX 10 /* limit of length_penalty, positive or negative */

/* When a search ends before its longest answer. It always needs `width` answers. It then ends
 * ... */
typedef enum {
    /* ... when the best beam, if it ended now, would not be among these answers */
    BT_BEAM_HEURISTIC,
    BT_BEAM_FULL,  /* ... at once */
    BT_BEAM_NEVER, /* ... when no beam can get among these answers, at any length */
    BT_BEAM_STOPS
} bt_beam_stop_t;

struct bt_beam_conf {
    uint32_t width; /* 1 to BT_BEAM_WIDTH_MAX; 0: the request is no beam search */
    uint32_t n;     /* number of best answers that the request wants; at most width */
    float length_penalty;
    bt_beam_stop_t stop;
    uint32_t min_new; /* an answer must have so many tokens before an id may end it */
    uint32_t n_top;   /* number of alternatives that the search keeps for each token */
};

struct bt_beam_token {
    uint32_t token;
    float logprob;
    uint32_t n_top;
    const uint32_t *top_id; /* [n_top] sorted by logprob, the highest first */
    const float *top_logprob;
};

struct bt_beam_search;

/* Returns how many of a row's most likely tokens the search needs, if n_eos ids end an answer. A
 * row has at most BT_ENGINE_MAX_TOP. */
uint32_t bt_beam_tops(uint32_t width, uint32_t n_eos);
/* Returns the bytes of a search for answers of at most max_new tokens. */
size_t bt_beam_bytes(const struct bt_beam_conf *conf, uint32_t max_new);
/* mem: bt_beam_bytes bytes, zeroed, aligned for uint64_t. mem, eos[n_eos] and conf must live as
 * long as the search. */
struct bt_beam_search *bt_beam_init(void *mem, const struct bt_beam_conf *conf, uint32_t max_new,
                                    const uint32_t *eos, uint32_t n_eos);

/* Returns whether this turn still needs the row of the place. Before the first bt_beam_choose only
 * place 0 has a row: that of the prompt's last token. */
bool bt_beam_wants(const struct bt_beam_search *s, uint32_t place);
/* Passes the row of a place: its n most likely tokens, the highest logprob first. Returns false if
 * n is smaller than the search needs. */
bool bt_beam_put(struct bt_beam_search *s, uint32_t place, const uint32_t *ids,
                 const float *logprobs, uint32_t n) BT_MUST_CHECK;
/* Returns whether all rows of this turn are there. */
bool bt_beam_ready(const struct bt_beam_search *s);
/* Makes the next beams. The beam at `place` continues the one that was at from[place]. Returns
 * false if the search is over; from is not set then. */
bool bt_beam_choose(struct bt_beam_search *s, uint32_t *from);

uint32_t bt_beam_len(const struct bt_beam_search *s); /* tokens of each beam */
/* last token of the beam */
const uint32_t *bt_beam_last(const struct bt_beam_search *s, uint32_t place);
/* Writes the bt_beam_len tokens of the beam at place. */
void bt_beam_path(const struct bt_beam_search *s, uint32_t place, uint32_t *tokens);

/* After the end of the search: opens answer i; the best answer is 0. Returns its length. *by_eos_p:
 * whether an id ended it. bt_beam_answer_token reads the answer that was opened last. */
uint32_t bt_beam_answer(struct bt_beam_search *s, uint32_t i, bool *by_eos_p);
/* Returns token number `at` of the open answer. */
void bt_beam_answer_token(const struct bt_beam_search *s, uint32_t at, struct bt_beam_token *out);

#endif
