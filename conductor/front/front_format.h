/* Within front/: what a generation's client reads: SSE chunks and whole responses in OpenAI's
 * formats. Text is built into buffers; nothing is sent here. Pure but for the tokenizer. */
#ifndef BT_CONDUCTOR_FRONT_FORMAT_H
#define BT_CONDUCTOR_FRONT_FORMAT_H

#include "conductor/front/front_parse.h"

enum { LP_TOKENS, LP_LOGPROBS, LP_TOP, LP_OFFSETS, LP_PARTS }; /* chat uses the first only */

struct front_choice {
    struct bt_buf text;         /* whole responses only */
    struct bt_buf lp[LP_PARTS]; /* the insides of the JSON arrays of logprobs so far */
    uint32_t chars;             /* characters of the text up to the next token, for text_offset */
    uint32_t tokens;
    bool role_sent;
    const char *finish; /* "stop", "length"; NULL while it runs */
    char *stop_string;
};

struct front_answer {
    struct front_options opt;
    const struct bt_tokenizer *tok;
    bool timings; /* the client asked for the timings object */
    uint32_t n_prompt;
    struct bt_buf prefix;         /* {"id":...,"object":...,"created":...,"model":... */
    struct bt_buf piece, names;   /* scratch */
    struct front_choice *choices; /* [opt.n] */
};

void front_answer_init(struct front_answer *a, const struct front_options *opt,
                       const struct bt_tokenizer *tok, const char *id, const char *model,
                       uint64_t created_s, uint32_t n_prompt, bool timings);
void front_answer_cleanup(struct front_answer *a);

/* Takes a delta. Streams: appends the beginning of its event to out, up to where finish_reason
 * goes. Whole responses: keeps it, out is not used. */
void front_answer_delta(struct front_answer *a, const struct bt_gen_delta *d, struct bt_buf *out);
void front_answer_finish(struct front_answer *a, uint32_t choice, bt_finish_t reason,
                         const char *stop_string);
/* Streams: completes the event begun in out by front_answer_delta or _empty. */
void front_event_end(struct front_answer *a, uint32_t choice, struct bt_buf *out);
/* Streams: begins an event without text, for a finish_reason that comes alone. */
void front_event_empty(struct front_answer *a, uint32_t choice, struct bt_buf *out);
/* Streams: the events behind the last choice: usage and timings if asked for, then [DONE]. */
void front_events_last(struct front_answer *a, const struct bt_gen_usage *u, struct bt_buf *out);
/* Whole responses. */
void front_whole(struct front_answer *a, const struct bt_gen_usage *u, struct bt_buf *out);

#endif
