/* Within front/: what a generation's client reads: SSE chunks and whole responses in OpenAI's
 * formats. Text is built into buffers; nothing is sent here. Pure but for the tokenizer. */
#ifndef BT_CONDUCTOR_FRONT_FORMAT_H
#define BT_CONDUCTOR_FRONT_FORMAT_H

#include "conductor/front/front_logprobs.h"
#include "conductor/front/front_parse.h"

struct front_choice {
    /* Whole responses: the text so far. Streams: what goes before the next event's text (echo). */
    struct bt_buf text;
    struct front_logprobs lp; /* whole responses: all; streams: of the next event */
    uint32_t chars;           /* characters of the text up to the next token, for text_offset */
    uint32_t tokens, last_id;
    bool begun, role_sent;
    const char *finish; /* "stop", "length"; NULL while it runs */
    char *stop_string;
    bool stop_by_id; /* last_id is one of stop_token_ids */
};

struct front_answer_prompt {
    uint32_t n_tokens;
    struct bt_buf text;       /* echo */
    struct front_logprobs lp; /* echo with logprobs */
    struct bt_buf logprobs;   /* the field prompt_logprobs */
};

struct front_answer {
    struct front_options opt;
    struct front_names names;
    bool timings, plan;   /* the client asked for these objects */
    struct bt_buf prefix; /* {"id":...,"object":...,"created":...,"model":... */
    uint32_t n_prompts, n_choices;
    struct front_answer_prompt *prompts;
    struct front_choice *choices; /* choice k of prompt i at i * opt.n + k */
};

/* Takes the texts of gen's prompts. */
void front_answer_init(struct front_answer *a, struct front_generation *gen,
                       const struct bt_tokenizer *tok, const char *id, const char *model,
                       uint64_t created_s, bool timings, bool plan);
void front_answer_cleanup(struct front_answer *a);

/* A prompt's own logprobs in the forms that opt asks for: echo's (text: the prompt as it is
 * echoed) and the field prompt_logprobs. On any thread, with names of its own. */
void front_prompt_format(const struct front_options *opt, struct front_names *names,
                         const struct bt_gen_token *tokens, size_t n, const struct bt_buf *text,
                         struct front_logprobs *lp, struct bt_buf *logprobs);
/* Takes what front_prompt_format made of a prompt, before its choices' first delta. */
void front_answer_prompt(struct front_answer *a, uint32_t prompt, struct front_logprobs *lp,
                         struct bt_buf *logprobs);
/* Takes a delta; choice is the answer's (d->choice counts within its prompt). Streams: appends the
 * beginning of its event to out, up to where finish_reason goes. Whole responses: keeps it, out is
 * not used. */
void front_answer_delta(struct front_answer *a, uint32_t choice, const struct bt_gen_delta *d,
                        struct bt_buf *out);
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
