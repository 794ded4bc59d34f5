/* Within front/: what is kept of an answer until its client has it, and the table of output
 * formats: how each API writes an answer. Text is built into buffers; nothing is sent here. Pure
 * except for the tokenizer. */
#ifndef BT_CONDUCTOR_FRONT_ANSWER_H
#define BT_CONDUCTOR_FRONT_ANSWER_H

#include "conductor/front/front_items.h"
#include "conductor/front/front_logprobs.h"
#include "conductor/front/front_parse.h"

enum bt_front_end { FRONT_RUNS, FRONT_STOP, FRONT_LENGTH, FRONT_CALLS }; /* why a choice ended */

struct bt_front_call { /* of a choice that is kept */
    struct bt_buf name, arguments;
};
#define FRONT_CALL_ID 32 /* bytes of the id of a call, with its NUL */

struct bt_front_choice {
    struct bt_buf text;          /* what was generated so far, where it is kept */
    struct bt_front_logprobs lp; /* ... its logprobs; streams: of the next event */
    uint32_t chars;              /* characters of the text up to the next token, for text_offset */
    uint32_t tokens, last_id;
    double logprob;          /* of all its tokens, where they have logprobs */
    uint32_t thought_tokens; /* ... of its reasoning */
    struct bt_reply *reply;  /* takes the text apart; NULL: it is content only */
    struct bt_buf thoughts;  /* as text: the reasoning */
    struct bt_front_call *calls;
    uint32_t n_calls, calls_cap;
    bool begun, role_sent;
    enum bt_front_end end;
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

/* Pieces of a choice in the order in which they came; scratch. */
struct bt_front_bits {
    struct bt_reply_bit *list; /* texts are in `text` once all are there */
    size_t n, cap;
    struct bt_buf text;
};

struct bt_front_answer {
    const struct bt_front_format *format;
    struct bt_front_options opt;
    struct bt_front_names names;
    bool timings, plan;     /* the client asked for these objects */
    bool begun;             /* the first events of a stream are written */
    uint32_t cached_tokens; /* of the prompt, as far as known */
    uint64_t sequence;      /* number of the next event, where they have numbers */
    const char *id;         /* the generation's */
    struct bt_buf prefix;   /* the beginning of every object: {"id":... */
    struct bt_buf echoed;   /* members that repeat the request */
    json_t *kinds;          /* of the arguments of calls; NULL: they are JSON anyway */
    uint32_t n_prompts, n_choices;
    uint32_t left_out_thoughts; /* reasoning tokens of choices that best_of leaves out */
    struct bt_front_answer_prompt *prompts;
    struct bt_front_choice *choices; /* choice k of prompt i at i * opt.n + k */
    struct bt_front_items items;     /* formats that keep the answer as items */
    struct bt_front_script script;   /* ... and write it so: what is written last */
    size_t held;                     /* bytes that its choices and items take */
    struct bt_front_bits bits;       /* of the delta that is being written */
};

/* ---- formats ---- */

struct bt_front_writer; /* front_write.h: a position in a long text */

/* How one API writes answers. Functions append to out; NULL where an API has no such thing. */
struct bt_front_format {
    const char *id_prefix;
    bool pulled; /* its streams may have long events, which are sent as fast as they are read */
    void (*init)(struct bt_front_answer *a, const char *id, const char *model, uint64_t created_s);
    /* Whole responses: keeps the bits of a delta. */
    void (*keep)(struct bt_front_answer *a, uint32_t choice, const struct bt_reply_bit *bits,
                 size_t n);
    /* Streams: what precedes all other events. */
    void (*begin)(struct bt_front_answer *a, struct bt_buf *out);
    /* Streams: the events of one delta, whose text was taken apart into bits. The last one may stay
     * open until `complete`, so that it can tell why the choice has ended. n 0: a choice begins
     * with a token that has no text yet; bits NULL: it ends without further text. */
    void (*delta)(struct bt_front_answer *a, uint32_t choice, const struct bt_reply_bit *bits,
                  size_t n, struct bt_buf *out);
    void (*complete)(struct bt_front_answer *a, uint32_t choice, struct bt_buf *out);
    /* Streams: an error in place of what is missing. `last` is not called then. */
    void (*error)(struct bt_front_answer *a, const struct bt_front_error *e, struct bt_buf *out);
    /* The rest are written in slices: each call continues at w. True: it is complete. */
    /* Streams: an event that begins with the prompt, then text and lp, up to where `complete`
     * continues. */
    bool (*echo)(struct bt_front_answer *a, const struct bt_buf *text,
                 const struct bt_front_logprobs *lp, struct bt_front_writer *w, struct bt_buf *out);
    /* Streams: what follows the last choice. */
    bool (*last)(struct bt_front_answer *a, const struct bt_gen_usage *u, struct bt_front_writer *w,
                 struct bt_buf *out);
    /* A whole response. */
    bool (*whole)(struct bt_front_answer *a, const struct bt_gen_usage *u,
                  struct bt_front_writer *w, struct bt_buf *out);
};

const struct bt_front_format *bt_front_format_of(const struct bt_front_options *opt);

/* ---- answers ---- */

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
 * bt_front_begin_echo and the format's echo make the event, not bt_front_answer_delta or _empty. */
bool bt_front_echo_due(const struct bt_front_answer *a, uint32_t choice);
/* Takes the delta (NULL: none) of the event that the echo begins: appends its text and logprobs to
 * the caller's buffers. */
void bt_front_begin_echo(struct bt_front_answer *a, uint32_t choice, const struct bt_gen_delta *d,
                         struct bt_buf *text, struct bt_front_logprobs *lp);
/* Takes a delta; choice is the answer's (d->choice counts within its prompt). Streams: appends its
 * events to out; false: it has none, because its text is held back. Whole responses: keeps it, out
 * is not used. */
bool bt_front_answer_delta(struct bt_front_answer *a, uint32_t choice, const struct bt_gen_delta *d,
                           struct bt_buf *out);
/* The choice's text is complete. Streams: true if text was held back until now, and its events were
 * appended to out. */
bool bt_front_answer_flush(struct bt_front_answer *a, uint32_t choice, struct bt_buf *out);
/* The id of a call: "call_..."; the same for the same answer, choice and call. */
void bt_front_call_id(const struct bt_front_answer *a, uint32_t choice, uint32_t call,
                      char id[FRONT_CALL_ID]);
/* Tokens of the reasoning of all choices. */
uint32_t bt_front_thought_tokens(const struct bt_front_answer *a);
/* Streams: begins the event of a choice that ends without further text. */
void bt_front_answer_empty(struct bt_front_answer *a, uint32_t choice, struct bt_buf *out);
/* Whole responses, when all choices are complete: leaves out those that best_of does not return. */
void bt_front_answer_select(struct bt_front_answer *a);
void bt_front_answer_finish(struct bt_front_answer *a, uint32_t choice, bt_finish_t reason,
                            const char *stop_string);

#endif
