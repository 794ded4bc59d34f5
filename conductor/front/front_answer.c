/* The parts of an answer that are kept; see front_answer.h. */
#include "conductor/front/front_answer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/sha256.h"
#include "conductor/front/front_format.h"

const struct bt_front_format *bt_front_format_of(const struct bt_front_options *opt)
{
    static const struct bt_front_format *const formats[FRONT_APIS] = {
        [FRONT_API_COMPLETIONS] = &bt_front_format_completions,
        [FRONT_API_CHAT] = &bt_front_format_chat,
        [FRONT_API_MESSAGES] = &bt_front_format_messages,
        [FRONT_API_RESPONSES] = &bt_front_format_responses};
    return formats[opt->api];
}

/* Adds a piece of a reply. Copies its text. Until the delta is complete, the text's position is an
 * offset. */
static void add_bit(void *arg, const struct bt_reply_bit *b)
{
    struct bt_front_bits *bits = arg;
    if (bits->n == bits->cap) {
        bits->cap = bits->cap == 0 ? 8 : bits->cap * 2;
        bits->list = bt_realloc(bits->list, bits->cap * sizeof(bits->list[0]));
    }
    bits->list[bits->n++] = *b;
    bt_buf_append(&bits->text, b->text, b->len);
}

void bt_front_answer_init(struct bt_front_answer *a, struct bt_front_generation *gen,
                          const struct bt_tokenizer *tok, const char *id, const char *model,
                          uint64_t created_s, bool timings, bool plan)
{
    *a = (struct bt_front_answer){.format = bt_front_format_of(&gen->opt),
                                  .opt = gen->opt,
                                  .id = id,
                                  .echoed = gen->echoed,
                                  .kinds = gen->kinds,
                                  .timings = timings,
                                  .plan = plan,
                                  .n_prompts = gen->prompts.n,
                                  .n_choices = gen->prompts.n * gen->opt.n,
                                  .names = {.tok = tok,
                                            .as_ids = gen->opt.tokens_as_ids,
                                            .skip_special = gen->opt.skip_special}};
    gen->echoed = (struct bt_buf){0};
    gen->kinds = NULL;
    a->opt.parts.reply.kinds_arg = a->kinds;
    a->choices = bt_calloc(a->n_choices, sizeof(a->choices[0]));
    a->prompts = bt_calloc(a->n_prompts, sizeof(a->prompts[0]));
    for (uint32_t i = 0; i < a->n_prompts; i++) {
        a->prompts[i].n_tokens = (uint32_t)gen->specs[i].prompt.n;
        a->prompts[i].text = gen->prompts.list[i].text;
        gen->prompts.list[i].text = (struct bt_buf){0};
    }
    const struct bt_reply_options *o = &a->opt.parts.reply;
    bool parts = o->tools || o->style.thoughts != BT_THOUGHTS_NONE;
    for (uint32_t i = 0; i < a->n_choices && parts; i++) {
        a->choices[i].reply = bt_reply_create(o, add_bit, &a->bits);
    }
    a->format->init(a, id, model, created_s);
}

static void choice_cleanup(struct bt_front_choice *c)
{
    bt_buf_cleanup(&c->text);
    bt_buf_cleanup(&c->thoughts);
    bt_front_logprobs_cleanup(&c->lp);
    bt_reply_destroy(c->reply);
    for (uint32_t i = 0; i < c->n_calls; i++) {
        bt_buf_cleanup(&c->calls[i].name);
        bt_buf_cleanup(&c->calls[i].arguments);
    }
    free(c->calls);
    free(c->stop_string);
}

static void prompt_cleanup(struct bt_front_answer_prompt *p)
{
    bt_buf_cleanup(&p->text);
    free(p->tokens);
    free(p->ids);
    free(p->lps);
}

bool bt_front_answer_shed(struct bt_front_answer *a)
{
    if (a->n_choices > 0) {
        choice_cleanup(&a->choices[--a->n_choices]);
        return true;
    }
    if (a->n_prompts > 0) {
        prompt_cleanup(&a->prompts[--a->n_prompts]);
        return true;
    }
    return false;
}

void bt_front_answer_cleanup(struct bt_front_answer *a)
{
    while (bt_front_answer_shed(a)) {
    }
    free(a->choices);
    free(a->prompts);
    bt_buf_cleanup(&a->prefix);
    bt_buf_cleanup(&a->echoed);
    json_decref(a->kinds);
    bt_front_items_cleanup(&a->items);
    bt_front_script_cleanup(&a->script);
    bt_front_names_cleanup(&a->names);
    free(a->bits.list);
    bt_buf_cleanup(&a->bits.text);
    *a = (struct bt_front_answer){0};
}

void bt_front_put_call_id(const char *prefix, const struct bt_front_answer *a,
                          const struct bt_front_item *item, struct bt_buf *out)
{
    bt_buf_printf(out, "\"%s_%s_%u\"", prefix, a->id + strlen(a->format->id_prefix), item->call);
}

struct bt_front_answer_prompt *bt_front_prompt_of(struct bt_front_answer *a, uint32_t choice)
{
    return &a->prompts[choice / a->opt.n];
}

size_t bt_front_prompt_bytes(size_t n_tokens, uint32_t n_top)
{
    return n_tokens * (sizeof(struct bt_gen_token) + n_top * (sizeof(uint32_t) + sizeof(float)));
}

void bt_front_answer_prompt(struct bt_front_answer *a, uint32_t prompt,
                            const struct bt_gen_token *tokens, size_t n)
{
    struct bt_front_answer_prompt *p = &a->prompts[prompt];
    size_t at = 0, n_top = 0;
    BT_ASSERT(p->tokens == NULL);
    for (size_t i = 0; i < n; i++) {
        n_top += tokens[i].n_top;
    }
    p->n = n;
    p->tokens = bt_malloc((n + 1) * sizeof(*p->tokens));
    p->ids = bt_malloc((n_top + 1) * sizeof(*p->ids));
    p->lps = bt_malloc((n_top + 1) * sizeof(*p->lps));
    for (size_t i = 0; i < n; i++) {
        struct bt_gen_token *t = &p->tokens[i];
        *t = tokens[i];
        if (t->n_top > 0) {
            memcpy(p->ids + at, t->top_id, t->n_top * sizeof(*p->ids));
            memcpy(p->lps + at, t->top_logprob, t->n_top * sizeof(*p->lps));
        }
        t->top_id = p->ids + at;
        t->top_logprob = p->lps + at;
        at += t->n_top;
    }
}

uint32_t bt_front_prompt_chars(struct bt_front_answer_prompt *p)
{
    if (p->chars == 0) {
        p->chars = bt_front_count_chars(p->text.data, p->text.len);
    }
    return p->chars;
}

bool bt_front_echo_due(const struct bt_front_answer *a, uint32_t choice)
{
    return a->opt.stream && a->opt.echo && !a->choices[choice].begun;
}

static struct bt_front_choice *touch(struct bt_front_answer *a, uint32_t choice)
{
    BT_ASSERT(choice < a->n_choices);
    struct bt_front_choice *c = &a->choices[choice];
    if (!c->begun && a->opt.echo) { /* text_offset continues behind the prompt */
        c->chars = bt_front_prompt_chars(bt_front_prompt_of(a, choice));
    }
    c->begun = true;
    return c;
}

static size_t logprobs_bytes(const struct bt_front_logprobs *lp)
{
    size_t n = 0;
    for (int k = 0; k < LP_PARTS; k++) {
        n += lp->part[k].cap;
    }
    return n;
}

static void add_tokens(struct bt_front_answer *a, struct bt_front_choice *c,
                       const struct bt_gen_delta *d)
{
    c->tokens += (uint32_t)d->n_tokens;
    if (d->n_tokens > 0) {
        c->last_id = d->tokens[d->n_tokens - 1].id;
    }
    for (size_t i = 0; i < d->n_tokens; i++) {
        c->logprob += d->tokens[i].logprob;
    }
    for (size_t i = 0; i < d->n_tokens && a->opt.logprobs >= 0; i++) {
        bt_front_logprobs_add(&c->lp, a->opt.chat, &a->names, &d->tokens[i],
                              (uint32_t)a->opt.logprobs, &c->chars);
    }
}

/* Streams: writes, once, what precedes all events. */
static void begin(struct bt_front_answer *a, struct bt_buf *out)
{
    if (!a->begun && a->format->begin != NULL) {
        a->format->begin(a, out);
    }
    a->begun = true;
}

/* ---- the parts of a choice ---- */

/* The bytes that a choice uses, without its logprobs. */
static size_t choice_bytes(const struct bt_front_choice *c)
{
    size_t n = c->text.cap + c->thoughts.cap + c->calls_cap * sizeof(c->calls[0]);
    n += c->reply != NULL ? bt_reply_held(c->reply) : 0;
    return n + (c->n_calls > 0 ? c->calls[c->n_calls - 1].arguments.cap : 0);
}

/* Turns the offsets of texts into pointers, and removes reasoning that the client does not want. */
static void settle(const struct bt_front_answer *a, struct bt_front_bits *bits)
{
    size_t at = 0, n = 0;
    for (size_t i = 0; i < bits->n; i++) {
        bits->list[i].text = bits->text.data + at;
        at += bits->list[i].len;
        if (bits->list[i].kind != BT_REPLY_REASONING || !a->opt.parts.hides_thoughts) {
            bits->list[n++] = bits->list[i];
        }
    }
    bits->n = n;
}

/* Keeps or writes the bits. empty: also if there are none. Returns false if nothing was written. */
static bool give(struct bt_front_answer *a, uint32_t choice, const struct bt_reply_bit *bits,
                 size_t n, bool empty, struct bt_buf *out)
{
    if (!a->opt.stream) {
        a->format->keep(a, choice, bits, n);
        return false;
    }
    if (n == 0 && !empty) {
        return false;
    }
    begin(a, out);
    a->format->delta(a, choice, bits, n, out);
    return true;
}

/* Splits a delta's text into a->bits: content, reasoning and calls. */
static void take_apart(struct bt_front_answer *a, struct bt_front_choice *c,
                       const struct bt_gen_delta *d)
{
    a->bits.n = 0;
    bt_buf_clear(&a->bits.text);
    if (d == NULL) {
        bt_reply_end(c->reply);
    } else {
        for (size_t i = 0; i < d->n_tokens; i++) {
            bt_reply_token(c->reply, d->tokens[i].id, d->tokens[i].text_offset);
        }
        bt_reply_feed(c->reply, d->text, d->text_len);
    }
    uint64_t end = bt_reply_thoughts_end(c->reply);
    for (size_t i = 0; d != NULL && i < d->n_tokens; i++) {
        c->thought_tokens += d->tokens[i].text_offset < end;
    }
    c->thought_tokens = end == 0 ? 0 : c->thought_tokens;
    settle(a, &a->bits);
}

bool bt_front_answer_delta(struct bt_front_answer *a, uint32_t choice, const struct bt_gen_delta *d,
                           struct bt_buf *out)
{
    bool first = !a->choices[choice].begun;
    struct bt_front_choice *c = touch(a, choice);
    size_t before = choice_bytes(c) + logprobs_bytes(&c->lp) + a->items.bytes;
    bool written;
    add_tokens(a, c, d);
    if (c->reply != NULL) {
        take_apart(a, c, d);
        written = give(a, choice, a->bits.list, a->bits.n, first, out);
    } else {
        const struct bt_reply_bit all = {BT_REPLY_TEXT, 0, d->text, d->text_len};
        written = give(a, choice, &all, 1, false, out);
    }
    size_t after = choice_bytes(c) + logprobs_bytes(&c->lp) + a->items.bytes;
    a->held += after > before ? after - before : 0;
    return written;
}

bool bt_front_answer_flush(struct bt_front_answer *a, uint32_t choice, struct bt_buf *out)
{
    if (a->choices[choice].reply == NULL) {
        return false;
    }
    take_apart(a, touch(a, choice), NULL);
    return give(a, choice, a->bits.list, a->bits.n, false, out);
}

void bt_front_call_id(const struct bt_front_answer *a, uint32_t choice, uint32_t call,
                      char id[FRONT_CALL_ID])
{
    static const char letters[] = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    uint8_t digest[BT_SHA256_LEN];
    char text[96];
    int n = snprintf(text, sizeof(text), "%s %u %u", a->id, choice, call);
    bt_sha256(text, (size_t)n, digest);
    size_t at = (size_t)snprintf(id, FRONT_CALL_ID, "call_");
    for (size_t i = 0; i < 24; i++) {
        id[at++] = letters[digest[i] % (sizeof(letters) - 1)];
    }
    id[at] = '\0';
}

uint32_t bt_front_thought_tokens(const struct bt_front_answer *a)
{
    uint32_t n = a->left_out_thoughts;
    for (uint32_t i = 0; i < a->n_choices; i++) {
        n += a->choices[i].thought_tokens;
    }
    return n;
}

void bt_front_answer_empty(struct bt_front_answer *a, uint32_t choice, struct bt_buf *out)
{
    (void)touch(a, choice);
    begin(a, out);
    a->format->delta(a, choice, NULL, 0, out);
}

void bt_front_begin_echo(struct bt_front_answer *a, uint32_t choice, const struct bt_gen_delta *d,
                         struct bt_buf *text, struct bt_front_logprobs *lp)
{
    struct bt_front_choice *c = touch(a, choice);
    if (d != NULL) {
        add_tokens(a, c, d);
        bt_buf_append(text, d->text, d->text_len);
        *lp = c->lp;
        c->lp = (struct bt_front_logprobs){0};
    }
}

void bt_front_answer_finish(struct bt_front_answer *a, uint32_t choice, bt_finish_t reason,
                            const char *stop_string)
{
    struct bt_front_choice *c = touch(a, choice);
    bool calls = c->reply != NULL && bt_reply_calls(c->reply) > 0;
    c->end = reason == BT_FINISH_LENGTH ? FRONT_LENGTH : calls ? FRONT_CALLS : FRONT_STOP;
    free(c->stop_string);
    c->stop_string = stop_string != NULL ? bt_strdup(stop_string) : NULL;
    for (uint32_t i = 0; i < a->opt.n_stop_ids && reason == BT_FINISH_STOP; i++) {
        c->stop_by_id |= stop_string == NULL && a->opt.stop_ids[i] == c->last_id;
    }
}

/* Returns whether a's mean logprob is higher than b's. NaN is lower than every number. */
static bool is_better(const struct bt_front_choice *a, const struct bt_front_choice *b)
{
    double x = a->logprob / BT_MAX(a->tokens, 1u), y = b->logprob / BT_MAX(b->tokens, 1u);
    return x > y || (x == x && y != y);
}

/* Sorts c[n] by mean logprob, the highest first; equal ones keep their order. */
static void sort_choices(struct bt_front_choice *c, uint32_t n)
{
    for (uint32_t i = 1; i < n; i++) {
        struct bt_front_choice moved = c[i];
        uint32_t at = i;
        for (; at > 0 && is_better(&moved, &c[at - 1]); at--) {
            c[at] = c[at - 1];
        }
        c[at] = moved;
    }
}

void bt_front_answer_select(struct bt_front_answer *a)
{
    uint32_t n = a->opt.n, best = a->opt.n_best;
    if (best == 0) {
        return;
    }
    for (uint32_t p = 0; p < a->n_prompts; p++) {
        struct bt_front_choice *of = &a->choices[p * n];
        sort_choices(of, n);
        for (uint32_t i = best; i < n; i++) {
            a->left_out_thoughts += of[i].thought_tokens;
            choice_cleanup(&of[i]);
        }
        memmove(&a->choices[p * best], of, best * sizeof(of[0]));
    }
    a->opt.n = best;
    a->n_choices = a->n_prompts * best;
}
