/* Within front/: what is kept of an answer until its client has received it, and the table of
 * output formats, which says how each API writes an answer. The functions append text to buffers
 * and send nothing. Pure except for the tokenizer. */
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
    /* splits the text into reasoning, calls and content; NULL: all is content */
    struct bt_reply *reply;
    struct bt_buf thoughts; /* as text: the reasoning */
    struct bt_front_call *calls;
    uint32_t n_calls, calls_cap;
    bool begun, role_sent;
    enum bt_front_end end;
    char *stop_string;
    bool stop_by_id; /* last_id is one of stop_token_ids */
};

/* A prompt with several choices is kept once, and written for each of them. */
struct bt_front_answer_prompt {
    uint32_t n_tokens;
    struct bt_buf text; /* echo */
    /* length of the text in characters, after bt_front_prompt_chars has counted it */
    uint32_t chars;
    size_t n;                    /* number of tokens; 0 until the logprobs have arrived */
    struct bt_gen_token *tokens; /* tokens with logprobs; their top arrays are in ids and lps */
    uint32_t *ids;
    float *lps;
};

/* The pieces of a choice in the order in which they arrived; scratch memory. */
struct bt_front_bits {
    struct bt_reply_bit *list; /* texts are offsets until all pieces have arrived */
    size_t n, cap;
    struct bt_buf text;
};

struct bt_front_answer {
    const struct bt_front_format *format;
    struct bt_front_options opt;
    struct bt_front_names names;
    bool timings, plan;     /* the client asked for these objects */
    bool begun;             /* the first events of a stream are written */
    uint32_t cached_tokens; /* cached tokens of the prompts known so far */
    uint64_t sequence;      /* number of the next event, in formats that number events */
    const char *id;         /* id of the generation */
    struct bt_buf prefix;   /* the beginning of every object: {"id":... */
    struct bt_buf echoed;   /* members that repeat the request */
    json_t *kinds; /* kinds of the arguments of calls; NULL: the model writes arguments as JSON */
    uint32_t n_prompts, n_choices;
    uint32_t left_out_thoughts; /* reasoning tokens of choices that best_of leaves out */
    struct bt_front_answer_prompt *prompts;
    struct bt_front_choice *choices; /* choice k of prompt i at i * opt.n + k */
    struct bt_front_items items;     /* formats that keep the answer as items */
    struct bt_front_script script;   /* ... and the text that they write last */
    size_t held;                     /* bytes that the choices and items use */
    struct bt_front_bits bits;       /* of the delta that is being written */
};

/* ---- formats ---- */

struct bt_front_writer; /* front_write.h: a position in a long text */

/* How one API writes answers. The functions append to out. NULL: the API has nothing of this
 * kind. */
struct bt_front_format {
    const char *id_prefix;
    /* its streams may have long events, which are written as fast as the client reads them */
    bool pulled;
    void (*init)(struct bt_front_answer *a, const char *id, const char *model, uint64_t created_s);
    /* Whole responses: keeps the pieces of a delta. */
    void (*keep)(struct bt_front_answer *a, uint32_t choice, const struct bt_reply_bit *bits,
                 size_t n);
    /* Streams: writes what precedes all other events. */
    void (*begin)(struct bt_front_answer *a, struct bt_buf *out);
    /* Streams: writes the events of one delta. The last event may stay open until `complete`, so
     * that it can say why the choice ended. n == 0: the choice begins with a token that has no text
     * yet. bits == NULL: it ends without further text. */
    void (*delta)(struct bt_front_answer *a, uint32_t choice, const struct bt_reply_bit *bits,
                  size_t n, struct bt_buf *out);
    void (*complete)(struct bt_front_answer *a, uint32_t choice, struct bt_buf *out);
    /* Streams: writes an error instead of the missing rest. `last` is not called after it. */
    void (*error)(struct bt_front_answer *a, const struct bt_front_error *e, struct bt_buf *out);
    /* The following functions write in slices: each call continues at w, and returns true when all
     * is written. */
    /* Streams: an event that begins with the prompt, followed by text and lp. `complete` ends
     * it. */
    bool (*echo)(struct bt_front_answer *a, const struct bt_buf *text,
                 const struct bt_front_logprobs *lp, struct bt_front_writer *w, struct bt_buf *out);
    /* Streams: everything behind the last choice. */
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
/* Frees one of the large parts. Returns false if none was left. So the loop can free large answers
 * over several turns. */
bool bt_front_answer_shed(struct bt_front_answer *a);
void bt_front_answer_cleanup(struct bt_front_answer *a);

/* The bytes that the logprobs of a prompt will use, with n_top alternatives for each token. */
size_t bt_front_prompt_bytes(size_t n_tokens, uint32_t n_top);
/* Copies a prompt's own logprobs. Call it before the first delta of its choices. */
void bt_front_answer_prompt(struct bt_front_answer *a, uint32_t prompt,
                            const struct bt_gen_token *tokens, size_t n);
struct bt_front_answer_prompt *bt_front_prompt_of(struct bt_front_answer *a, uint32_t choice);
uint32_t bt_front_prompt_chars(struct bt_front_answer_prompt *p); /* length of its text */
/* Streams: returns whether the next event of the choice begins with the prompt (echo). Then
 * bt_front_begin_echo and the format's echo make the event, instead of bt_front_answer_delta or
 * _empty. */
bool bt_front_echo_due(const struct bt_front_answer *a, uint32_t choice);
/* Reads the delta (NULL: none) of the event that the echo begins. Appends its text and logprobs to
 * the caller's buffers. */
void bt_front_begin_echo(struct bt_front_answer *a, uint32_t choice, const struct bt_gen_delta *d,
                         struct bt_buf *text, struct bt_front_logprobs *lp);
/* Reads a delta. choice counts within the answer (d->choice counts within its prompt). Streams:
 * appends its events to out; false: there are none yet, because the text is held back. Whole
 * responses: keeps the delta and does not use out. */
bool bt_front_answer_delta(struct bt_front_answer *a, uint32_t choice, const struct bt_gen_delta *d,
                           struct bt_buf *out);
/* The choice's text is complete. Streams: returns true if text was held back until now; its events
 * are in out. */
bool bt_front_answer_flush(struct bt_front_answer *a, uint32_t choice, struct bt_buf *out);
/* The id of a call: "call_...". It is always the same for the same answer, choice and call. */
void bt_front_call_id(const struct bt_front_answer *a, uint32_t choice, uint32_t call,
                      char id[FRONT_CALL_ID]);
/* The number of reasoning tokens of all choices. */
uint32_t bt_front_thought_tokens(const struct bt_front_answer *a);
/* Streams: begins the event of a choice that ends without further text. */
void bt_front_answer_empty(struct bt_front_answer *a, uint32_t choice, struct bt_buf *out);
/* Whole responses: when all choices are complete, removes those that best_of does not return. */
void bt_front_answer_select(struct bt_front_answer *a);
void bt_front_answer_finish(struct bt_front_answer *a, uint32_t choice, bt_finish_t reason,
                            const char *stop_string);

#endif
