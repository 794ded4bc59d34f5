/* Within front/: answers in OpenAI's formats: what is kept of an answer, and the events of streams.
 * front_write.h writes whole responses and echoed prompts, which may be long. Text is built into
 * buffers; nothing is sent here. Pure except for the tokenizer. */
#ifndef BT_CONDUCTOR_FRONT_FORMAT_H
#define BT_CONDUCTOR_FRONT_FORMAT_H

#include "conductor/front/front_logprobs.h"
#include "conductor/front/front_parse.h"

struct bt_front_choice {
    struct bt_buf text;          /* whole responses: what was generated so far */
    struct bt_front_logprobs lp; /* ... its logprobs; streams: of the next event */
    uint32_t chars;              /* characters of the text up to the next token, for text_offset */
    uint32_t tokens, last_id;
    bool begun, role_sent;
    const char *finish; /* "stop", "length"; NULL while it runs */
    char *stop_string;
    bool stop_by_id; /* last_id is one of stop_token_ids */
};

/* A prompt is kept once, also if it has several choices, and is written for each of them. */
struct bt_front_answer_prompt {
    uint32_t n_tokens;
    struct bt_buf text;          /* echo */
    uint32_t chars;              /* length of text in characters, once it was asked for */
    size_t n;                    /* number of tokens; 0 until the logprobs have come */
    struct bt_gen_token *tokens; /* with its logprobs; their top arrays in ids and lps */
    uint32_t *ids;
    float *lps;
};

struct bt_front_answer {
    struct bt_front_options opt;
    struct bt_front_names names;
    bool timings, plan;   /* the client asked for these objects */
    struct bt_buf prefix; /* {"id":...,"object":...,"created":...,"model":... */
    uint32_t n_prompts, n_choices;
    struct bt_front_answer_prompt *prompts;
    struct bt_front_choice *choices; /* choice k of prompt i at i * opt.n + k */
    size_t held;                     /* bytes that its prompts and choices take */
};

/* Takes the texts of gen's prompts. */
void bt_front_answer_init(struct bt_front_answer *a, struct bt_front_generation *gen,
                          const struct bt_tokenizer *tok, const char *id, const char *model,
                          uint64_t created_s, bool timings, bool plan);
/* Frees one of the large parts; false: none was left. Large answers are freed over several turns of
 * the loop. */
bool bt_front_answer_shed(struct bt_front_answer *a);
void bt_front_answer_cleanup(struct bt_front_answer *a);

/* Bytes that the logprobs of a prompt will take, with n_top alternatives for each token. */
size_t bt_front_prompt_bytes(size_t n_tokens, uint32_t n_top);
/* Keeps a prompt's own logprobs, before its choices' first delta. Copies. */
void bt_front_answer_prompt(struct bt_front_answer *a, uint32_t prompt,
                            const struct bt_gen_token *tokens, size_t n);
struct bt_front_answer_prompt *bt_front_prompt_of(struct bt_front_answer *a, uint32_t choice);
uint32_t bt_front_prompt_chars(struct bt_front_answer_prompt *p); /* of its text */
/* Streams: true if the next event of the choice begins with the prompt (echo). Then
 * bt_front_begin_echo and front_write.h make the event, not bt_front_answer_delta or
 * bt_front_event_empty. */
bool bt_front_echo_due(const struct bt_front_answer *a, uint32_t choice);
/* Takes the delta (NULL: none) of the event that the echo begins: appends its text and logprobs to
 * the caller's buffers. */
void bt_front_begin_echo(struct bt_front_answer *a, uint32_t choice, const struct bt_gen_delta *d,
                         struct bt_buf *text, struct bt_front_logprobs *lp);
/* Takes a delta; choice is the answer's (d->choice counts within its prompt). Streams: appends the
 * beginning of its event to out, up to where finish_reason goes. Whole responses: keeps it, out is
 * not used. */
void bt_front_answer_delta(struct bt_front_answer *a, uint32_t choice, const struct bt_gen_delta *d,
                           struct bt_buf *out);
void bt_front_answer_finish(struct bt_front_answer *a, uint32_t choice, bt_finish_t reason,
                            const char *stop_string);
/* Streams: completes the event begun in out by bt_front_answer_delta or _empty. */
void bt_front_event_end(struct bt_front_answer *a, uint32_t choice, struct bt_buf *out);
/* Streams: begins an event without text, for a finish_reason that comes alone. */
void bt_front_event_empty(struct bt_front_answer *a, uint32_t choice, struct bt_buf *out);
/* Streams: the events after the last choice: usage and timings if asked for, then [DONE]. */
void bt_front_events_last(struct bt_front_answer *a, const struct bt_gen_usage *u,
                          struct bt_buf *out);

/* ---- for front_write.c ---- */

/* data: {...,"choices":[{"index":...,"text":" */
void bt_front_put_event_head(struct bt_front_answer *a, uint32_t choice, struct bt_buf *out);
/* ,"finish_reason":...,"stop_reason":... */
void bt_front_put_finish(const struct bt_front_choice *c, struct bt_buf *out);
/* "usage":{...} and what else the request has asked for. prompt_logprobs is left out. */
void bt_front_put_usage(const struct bt_gen_usage *u, struct bt_buf *out);
void bt_front_put_extras(const struct bt_front_answer *a, const struct bt_gen_usage *u,
                         struct bt_buf *out);

#endif
