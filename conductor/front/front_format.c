/* OpenAI's response formats. Load generators rely on the following (notes of their sources): an
 * event is "data: {json}\n\n"; every event has id, object, created, model; the first event with
 * choices has the first token, so no event with only a role comes before it; usage comes only if
 * asked for, in an event whose choices are empty; the last line is "data: [DONE]". */
#include "conductor/front/front_format.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void bt_front_answer_init(struct bt_front_answer *a, struct bt_front_generation *gen,
                          const struct bt_tokenizer *tok, const char *id, const char *model,
                          uint64_t created_s, bool timings, bool plan)
{
    *a = (struct bt_front_answer){.opt = gen->opt,
                                  .timings = timings,
                                  .plan = plan,
                                  .n_prompts = gen->prompts.n,
                                  .n_choices = gen->prompts.n * gen->opt.n,
                                  .names = {.tok = tok,
                                            .as_ids = gen->opt.tokens_as_ids,
                                            .skip_special = gen->opt.skip_special}};
    a->choices = bt_calloc(a->n_choices, sizeof(a->choices[0]));
    a->prompts = bt_calloc(a->n_prompts, sizeof(a->prompts[0]));
    for (uint32_t i = 0; i < a->n_prompts; i++) {
        a->prompts[i].n_tokens = (uint32_t)gen->specs[i].prompt.n;
        a->prompts[i].text = gen->prompts.list[i].text;
        gen->prompts.list[i].text = (struct bt_buf){0};
    }
    const char *object = !a->opt.chat    ? "text_completion"
                         : a->opt.stream ? "chat.completion.chunk"
                                         : "chat.completion";
    bt_buf_printf(&a->prefix, "{\"id\":\"%s\",\"object\":\"%s\",\"created\":%llu,\"model\":", id,
                  object, (unsigned long long)created_s);
    bt_front_put_cstr(&a->prefix, model);
}

static void choice_cleanup(struct bt_front_choice *c)
{
    bt_buf_cleanup(&c->text);
    bt_front_logprobs_cleanup(&c->lp);
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
    bt_front_names_cleanup(&a->names);
    *a = (struct bt_front_answer){0};
}

struct bt_front_answer_prompt *bt_front_prompt_of(struct bt_front_answer *a, uint32_t choice)
{
    return &a->prompts[choice / a->opt.n];
}

/* ---- usage ---- */

static void put_usage(uint32_t prompt, uint32_t completion, const struct bt_gen_usage *u,
                      struct bt_buf *out)
{
    bt_buf_puts(out, "\"usage\":{\"prompt_tokens\":");
    bt_front_put_uint(out, prompt);
    bt_buf_puts(out, ",\"completion_tokens\":");
    bt_front_put_uint(out, completion);
    bt_buf_puts(out, ",\"total_tokens\":");
    bt_front_put_uint(out, (uint64_t)prompt + completion);
    if (u != NULL) {
        bt_buf_puts(out, ",\"prompt_tokens_details\":{\"cached_tokens\":");
        bt_front_put_uint(out, u->cached_tokens);
        bt_buf_puts(out, "}");
    }
    bt_buf_puts(out, "}");
}

static void put_timings(const struct bt_gen_usage *u, struct bt_buf *out)
{
    const struct {
        const char *name;
        double v;
    } times[] = {{"ttft_ms", u->ttft_ms},
                 {"queue_ms", u->queue_ms},
                 {"prefill_ms", u->prefill_ms},
                 {"decode_ms", u->decode_ms},
                 {"hidden_fraction", u->hidden_fraction}};
    bt_buf_printf(out,
                  "\"timings\":{\"prompt_tokens\":%u,\"completion_tokens\":%u,\"cached_tokens\":%u,"
                  "\"kv_bytes\":%llu,\"kv_segments\":%llu,\"replans\":%u",
                  u->prompt_tokens, u->completion_tokens, u->cached_tokens,
                  (unsigned long long)u->kv_bytes, (unsigned long long)u->kv_segments, u->replans);
    for (size_t i = 0; i < BT_ARRAY_LEN(times); i++) {
        bt_buf_printf(out, ",\"%s\":", times[i].name);
        bt_front_put_known(out, times[i].v);
    }
    bt_buf_puts(out, ",\"prefill\":");
    bt_front_put_str(out, u->prefill, strnlen(u->prefill, sizeof(u->prefill)));
    bt_buf_puts(out, ",\"decode\":");
    bt_front_put_str(out, u->decode, strnlen(u->decode, sizeof(u->decode)));
    bt_buf_puts(out, "}");
}

static void put_name(struct bt_buf *out, const char *key, const char *name, size_t max)
{
    bt_buf_printf(out, "\"%s\":", key);
    if (name[0] != '\0') {
        bt_front_put_str(out, name, strnlen(name, max));
    } else {
        bt_buf_puts(out, "null");
    }
}

static void put_ms(struct bt_buf *out, const char *key, double ms)
{
    bt_buf_printf(out, "\"%s\":", key);
    bt_front_put_known(out, ms);
}

/* Writes the predicted times of the request's first plan, and the actual times. */
static void put_plan(const struct bt_gen_usage *u, struct bt_buf *out)
{
    const struct bt_gen_plan *p = &u->plan;
    const struct {
        const char *name;
        double ttft_ms, tbt_ms, queue_ms, prefill_ms;
        uint32_t cached;
    } both[] = {{"predicted", p->ttft_ms, p->tbt_ms, p->queue_ms, p->prefill_ms, p->cached_tokens},
                {"actual", u->ttft_ms, u->tbt_ms, u->queue_ms, u->prefill_ms, u->cached_tokens}};
    bt_buf_puts(out, "\"plan\":{");
    put_name(out, "prefill", p->prefill, sizeof(p->prefill));
    bt_buf_puts(out, ",");
    put_name(out, "decode", p->decode, sizeof(p->decode));
    bt_buf_puts(out, ",");
    put_name(out, "source", p->source, sizeof(p->source));
    bt_buf_puts(out, ",");
    put_name(out, "reason", p->reason, sizeof(p->reason));
    bt_buf_printf(out, ",\"fetch_tokens\":%u", p->fetch_tokens);
    for (size_t i = 0; i < BT_ARRAY_LEN(both); i++) {
        bt_buf_printf(out, ",\"%s\":{\"cached_tokens\":%u,", both[i].name, both[i].cached);
        put_ms(out, "ttft_ms", both[i].ttft_ms);
        bt_buf_puts(out, ",");
        put_ms(out, "tbt_ms", both[i].tbt_ms);
        bt_buf_puts(out, ",");
        put_ms(out, "queue_ms", both[i].queue_ms);
        bt_buf_puts(out, ",");
        put_ms(out, "prefill_ms", both[i].prefill_ms);
        bt_buf_puts(out, "}");
    }
    bt_buf_printf(out, ",\"replans\":%u,", u->replans);
    put_name(out, "again", u->again, sizeof(u->again));
    bt_buf_puts(out, ",\"served_by\":{"); /* workers of the last plan */
    put_name(out, "prefill", u->prefill, sizeof(u->prefill));
    bt_buf_puts(out, ",");
    put_name(out, "decode", u->decode, sizeof(u->decode));
    bt_buf_puts(out, "}}");
}

void bt_front_put_usage(const struct bt_gen_usage *u, struct bt_buf *out)
{
    put_usage(u->prompt_tokens, u->completion_tokens, u, out);
}

/* Writes what a request may ask for besides its usage. */
void bt_front_put_extras(const struct bt_front_answer *a, const struct bt_gen_usage *u,
                         struct bt_buf *out)
{
    if (a->timings) {
        bt_buf_puts(out, ",");
        put_timings(u, out);
    }
    if (a->plan) {
        bt_buf_puts(out, ",");
        put_plan(u, out);
    }
}

/* ---- choices ---- */

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
    for (size_t i = 0; i < d->n_tokens && a->opt.logprobs >= 0; i++) {
        bt_front_logprobs_add(&c->lp, a->opt.chat, &a->names, &d->tokens[i],
                              (uint32_t)a->opt.logprobs, &c->chars);
    }
}

/* Writes ,"logprobs":... */
static void put_logprobs(struct bt_front_answer *a, struct bt_front_choice *c, struct bt_buf *out)
{
    if (a->opt.logprobs < 0) {
        bt_buf_puts(out, ",\"logprobs\":null");
    } else {
        bt_buf_puts(out, ",\"logprobs\":");
        bt_front_logprobs_put(&c->lp, a->opt.chat, out);
    }
}

void bt_front_answer_finish(struct bt_front_answer *a, uint32_t choice, bt_finish_t reason,
                            const char *stop_string)
{
    struct bt_front_choice *c = touch(a, choice);
    c->finish = reason == BT_FINISH_LENGTH ? "length" : "stop";
    free(c->stop_string);
    c->stop_string = stop_string != NULL ? bt_strdup(stop_string) : NULL;
    for (uint32_t i = 0; i < a->opt.n_stop_ids && reason == BT_FINISH_STOP; i++) {
        c->stop_by_id |= stop_string == NULL && a->opt.stop_ids[i] == c->last_id;
    }
}

void bt_front_put_finish(const struct bt_front_choice *c, struct bt_buf *out)
{
    if (c->finish == NULL) {
        bt_buf_puts(out, ",\"finish_reason\":null,\"stop_reason\":null");
        return;
    }
    bt_buf_puts(out, ",\"finish_reason\":\"");
    bt_buf_puts(out, c->finish);
    bt_buf_puts(out, "\",\"stop_reason\":");
    if (c->stop_string != NULL) {
        bt_front_put_cstr(out, c->stop_string);
    } else if (c->stop_by_id) {
        bt_front_put_uint(out, c->last_id);
    } else {
        bt_buf_puts(out, "null");
    }
}

/* ---- streams ---- */

void bt_front_put_event_head(struct bt_front_answer *a, uint32_t choice, struct bt_buf *out)
{
    struct bt_front_choice *c = &a->choices[choice];
    bt_buf_puts(out, "data: ");
    bt_buf_append(out, a->prefix.data, a->prefix.len);
    bt_buf_puts(out, ",\"choices\":[{\"index\":");
    bt_front_put_uint(out, choice);
    if (!a->opt.chat) {
        bt_buf_puts(out, ",\"text\":\"");
    } else {
        bt_buf_puts(out, c->role_sent ? ",\"delta\":{\"content\":\""
                                      : ",\"delta\":{\"role\":\"assistant\",\"content\":\"");
        c->role_sent = true;
    }
}

static void event_begin(struct bt_front_answer *a, uint32_t choice, const char *text, size_t len,
                        struct bt_buf *out)
{
    bt_front_put_event_head(a, choice, out);
    bt_front_put_text(out, text, len);
    bt_buf_puts(out, a->opt.chat ? "\"}" : "\"");
}

void bt_front_answer_delta(struct bt_front_answer *a, uint32_t choice, const struct bt_gen_delta *d,
                           struct bt_buf *out)
{
    struct bt_front_choice *c = touch(a, choice);
    size_t before = c->text.cap + logprobs_bytes(&c->lp);
    add_tokens(a, c, d);
    if (a->opt.stream) {
        event_begin(a, choice, d->text, d->text_len, out);
        put_logprobs(a, c, out);
    } else {
        bt_buf_append(&c->text, d->text, d->text_len);
        a->held += c->text.cap + logprobs_bytes(&c->lp) - before;
    }
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

void bt_front_event_empty(struct bt_front_answer *a, uint32_t choice, struct bt_buf *out)
{
    (void)touch(a, choice);
    event_begin(a, choice, "", 0, out);
    bt_buf_puts(out, ",\"logprobs\":null");
}

void bt_front_event_end(struct bt_front_answer *a, uint32_t choice, struct bt_buf *out)
{
    bt_front_put_finish(&a->choices[choice], out);
    bt_buf_puts(out, "}]");
    if (a->opt.continuous_usage) { /* of this choice, without cached tokens: they are known only at
                                    * the end */
        bt_buf_puts(out, ",");
        put_usage(bt_front_prompt_of(a, choice)->n_tokens, a->choices[choice].tokens, NULL, out);
    } else if (a->opt.include_usage) {
        bt_buf_puts(out, ",\"usage\":null");
    }
    bt_buf_puts(out, "}\n\n");
}

void bt_front_events_last(struct bt_front_answer *a, const struct bt_gen_usage *u,
                          struct bt_buf *out)
{
    if (a->opt.include_usage || a->timings || a->plan) {
        bt_buf_puts(out, "data: ");
        bt_buf_append(out, a->prefix.data, a->prefix.len);
        bt_buf_puts(out, ",\"choices\":[]");
        if (a->opt.include_usage) {
            bt_buf_puts(out, ",");
            put_usage(u->prompt_tokens, u->completion_tokens, u, out);
        }
        bt_front_put_extras(a, u, out);
        bt_buf_puts(out, "}\n\n");
    }
    bt_buf_puts(out, "data: [DONE]\n\n");
}
