/* Within front/: writes the long parts of an answer in slices: whole responses, and events of
 * streams that begin with an echoed prompt. A writer is a position in the answer. Each call
 * continues there and appends about BT_HTTP_PIECE bytes, in a fraction of a millisecond. A prompt
 * is formatted again for each choice; its text is never kept. Pure except for the tokenizer. */
#ifndef BT_CONDUCTOR_FRONT_WRITE_H
#define BT_CONDUCTOR_FRONT_WRITE_H

#include "conductor/front/front_format.h"

struct bt_front_writer { /* zero: at the beginning */
    uint8_t step;        /* STEP_* of front_write.c */
    uint8_t part;        /* LP_*, of the logprobs */
    uint32_t choice, call;
    size_t at;                          /* bytes of the text that are written */
    struct bt_front_prompt_place place; /* in an array of the prompt's */
};

/* A whole response of completions or chat. True: it is complete. */
bool bt_front_write_whole(struct bt_front_answer *a, const struct bt_gen_usage *u,
                          struct bt_front_writer *w, struct bt_buf *out);
/* A stream's event of w->choice up to where finish_reason goes: the prompt, then text and lp. True:
 * it is complete. */
bool bt_front_write_echo(struct bt_front_answer *a, const struct bt_buf *text,
                         const struct bt_front_logprobs *lp, struct bt_front_writer *w,
                         struct bt_buf *out);

#endif
