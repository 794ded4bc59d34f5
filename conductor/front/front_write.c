/* Writes long answers in slices; see front_write.h. */
#include "conductor/front/front_write.h"

#include "common/http/http.h"

/* The parts of an answer, in the order in which they are written. A stream's echo ends before
 * STEP_FINISH. */
enum {
    STEP_BEGIN,
    STEP_CHOICE,
    STEP_ECHO, /* the prompt's text */
    STEP_TEXT,
    STEP_TEXT_END,
    STEP_THOUGHTS,       /* reasoning, as a chat's reasoning_content ... */
    STEP_THOUGHTS_AGAIN, /* ... and as its reasoning */
    STEP_CALL,
    STEP_ARGUMENTS,
    STEP_MESSAGE_END,
    STEP_PART, /* of the logprobs: the part's key */
    STEP_PART_PROMPT,
    STEP_PART_OWN,
    STEP_PART_END,
    STEP_FINISH,
    STEP_PROMPT_LOGPROBS,
    STEP_CHOICE_END,
    STEP_USAGE,
    STEP_CHAT_LOGPROBS, /* logprobs of a chat's prompt, behind the choices */
    STEP_EXTRAS,
    STEP_DONE
};

/* What to write of one choice. */
struct source {
    struct bt_front_answer *a;
    struct bt_front_answer_prompt *p;
    const struct bt_front_choice *c; /* of a whole response; NULL: an event */
    const struct bt_buf *text;
    const struct bt_front_logprobs *lp;
    struct bt_front_slice slice;
};

static bool has_prompt(const struct source *s)
{
    return s->a->opt.echo && s->a->opt.logprobs >= 0;
}

/* Writes as much of [w->at, from->len) as there is room for. escaped: as text of a JSON string, cut
 * only between characters. True: all is written. */
static bool put_some(struct source *s, struct bt_front_writer *w, const struct bt_buf *from,
                     bool escaped, struct bt_buf *out)
{
    size_t room = s->slice.until > out->len ? s->slice.until - out->len : 1;
    size_t end = BT_MIN(from->len, w->at + room);
    while (escaped && end < from->len && ((unsigned char)from->data[end] & 0xc0) == 0x80) {
        end++;
    }
    if (escaped) {
        bt_front_put_text(out, from->data != NULL ? from->data + w->at : "", end - w->at);
    } else if (end > w->at) {
        bt_buf_append(out, from->data + w->at, end - w->at);
    }
    w->at = end;
    return end == from->len;
}

static void next(struct bt_front_writer *w, uint8_t step)
{
    w->step = step;
    w->at = 0;
    w->place = (struct bt_front_prompt_place){0};
}

static void put_part_key(struct source *s, struct bt_front_writer *w, struct bt_buf *out)
{
    if (s->a->opt.logprobs < 0) {
        bt_buf_puts(out, ",\"logprobs\":null");
        next(w, STEP_FINISH);
        return;
    }
    bt_buf_puts(out, w->part == 0 ? ",\"logprobs\":{\"" : ",\"");
    bt_buf_puts(out, bt_front_logprobs_part(s->a->opt.chat, w->part));
    bt_buf_puts(out, "\":[");
    next(w, has_prompt(s) ? STEP_PART_PROMPT : STEP_PART_OWN);
}

static void put_part_prompt(struct source *s, struct bt_front_writer *w, struct bt_buf *out)
{
    struct bt_front_answer *a = s->a;
    if (bt_front_logprobs_put_prompt(&a->names, s->p->tokens, s->p->n, (uint32_t)a->opt.logprobs,
                                     &s->p->text, bt_front_prompt_chars(s->p), w->part, &w->place,
                                     &s->slice, out)) {
        bt_buf_puts(out, s->p->n > 0 && s->lp->part[w->part].len > 0 ? "," : "");
        next(w, STEP_PART_OWN);
    }
}

static void end_part(struct source *s, struct bt_front_writer *w, struct bt_buf *out)
{
    bt_buf_puts(out, "]");
    w->part++;
    if (w->part == (s->a->opt.chat ? 1 : LP_PARTS)) {
        bt_buf_puts(out, "}");
        w->part = 0;
        next(w, STEP_FINISH);
    } else {
        next(w, STEP_PART);
    }
}

/* Has the message no content, but something else? */
static bool is_null(const struct source *s)
{
    return s->c != NULL && s->text->len == 0 && (s->c->n_calls > 0 || s->c->thoughts.len > 0);
}

static void put_thoughts(struct source *s, struct bt_front_writer *w, struct bt_buf *out)
{
    bool again = w->step == STEP_THOUGHTS_AGAIN;
    uint8_t after = again ? STEP_CALL : STEP_THOUGHTS_AGAIN;
    if (s->c == NULL || s->c->thoughts.len == 0) {
        next(w, after);
        return;
    }
    if (w->at == 0) {
        bt_buf_puts(out, again ? ",\"reasoning\":\"" : ",\"reasoning_content\":\"");
    }
    if (put_some(s, w, &s->c->thoughts, true, out)) {
        bt_buf_puts(out, "\"");
        next(w, after);
    }
}

static void put_call(struct source *s, struct bt_front_writer *w, struct bt_buf *out)
{
    if (s->c == NULL || w->call == s->c->n_calls) {
        bt_buf_puts(out, w->call > 0 ? "]" : "");
        w->call = 0;
        next(w, STEP_MESSAGE_END);
        return;
    }
    const struct bt_buf *name = &s->c->calls[w->call].name;
    bt_buf_puts(out, w->call == 0 ? ",\"tool_calls\":[{" : ",{");
    bt_front_put_call_head(s->a, w->choice, w->call, name->data, name->len, out);
    next(w, STEP_ARGUMENTS);
}

static void put_arguments(struct source *s, struct bt_front_writer *w, struct bt_buf *out)
{
    if (put_some(s, w, &s->c->calls[w->call].arguments, true, out)) {
        bt_buf_puts(out, "\"}}");
        w->call++;
        next(w, STEP_CALL);
    }
}

/* STEP_ECHO to STEP_PART_END: the steps that whole responses and events have in common. */
static void step_choice(struct source *s, struct bt_front_writer *w, struct bt_buf *out)
{
    switch (w->step) {
    case STEP_ECHO:
        if (!s->a->opt.echo || put_some(s, w, &s->p->text, true, out)) {
            next(w, STEP_TEXT);
        }
        return;
    case STEP_TEXT:
        if (put_some(s, w, s->text, true, out)) {
            next(w, STEP_TEXT_END);
        }
        return;
    case STEP_TEXT_END:
        bt_buf_puts(out, is_null(s) ? "" : "\"");
        next(w, STEP_THOUGHTS);
        return;
    case STEP_THOUGHTS:
    case STEP_THOUGHTS_AGAIN: put_thoughts(s, w, out); return;
    case STEP_CALL: put_call(s, w, out); return;
    case STEP_ARGUMENTS: put_arguments(s, w, out); return;
    case STEP_MESSAGE_END:
        bt_buf_puts(out, s->a->opt.chat ? "}" : "");
        next(w, STEP_PART);
        return;
    case STEP_PART: put_part_key(s, w, out); return;
    case STEP_PART_PROMPT: put_part_prompt(s, w, out); return;
    case STEP_PART_OWN:
        if (put_some(s, w, &s->lp->part[w->part], false, out)) {
            next(w, STEP_PART_END);
        }
        return;
    default: end_part(s, w, out); return;
    }
}

/* Writes the field prompt_logprobs: of a choice, or of a chat answer. */
static void put_prompt_logprobs(struct source *s, struct bt_front_writer *w, struct bt_buf *out)
{
    struct bt_front_answer *a = s->a;
    uint8_t after = w->step == STEP_PROMPT_LOGPROBS ? STEP_CHOICE_END : STEP_EXTRAS;
    if (a->opt.prompt_logprobs < 0 || a->opt.chat != (after == STEP_EXTRAS)) {
        next(w, after);
        return;
    }
    if (w->place.token == 0) {
        bt_buf_puts(out, s->p->n > 0 ? ",\"prompt_logprobs\":[" : ",\"prompt_logprobs\":null");
    }
    if (bt_front_prompt_logprobs_put(&a->names, s->p->tokens, s->p->n,
                                     (uint32_t)a->opt.prompt_logprobs, &w->place, &s->slice, out)) {
        bt_buf_puts(out, s->p->n > 0 ? "]" : "");
        next(w, after);
    }
}

static void begin_choice(const struct source *s, struct bt_front_writer *w, struct bt_buf *out)
{
    bt_buf_puts(out, w->choice == 0 ? "{\"index\":" : ",{\"index\":");
    bt_front_put_uint(out, w->choice);
    bt_buf_puts(out, !s->a->opt.chat ? ",\"text\":\""
                     : is_null(s)    ? ",\"message\":{\"role\":\"assistant\",\"content\":null"
                                     : ",\"message\":{\"role\":\"assistant\",\"content\":\"");
    next(w, STEP_ECHO);
}

static void end_choice(const struct source *s, struct bt_front_writer *w, struct bt_buf *out)
{
    bt_buf_puts(out, "}");
    w->choice++;
    if (w->choice == s->a->n_choices) {
        w->choice = 0;
        next(w, STEP_USAGE);
    } else {
        next(w, STEP_CHOICE);
    }
}

static void step_whole(struct source *s, const struct bt_gen_usage *u, struct bt_front_writer *w,
                       struct bt_buf *out)
{
    const struct bt_front_answer *a = s->a;
    switch (w->step) {
    case STEP_BEGIN:
        bt_buf_append(out, a->prefix.data, a->prefix.len);
        bt_buf_puts(out, ",\"choices\":[");
        next(w, STEP_CHOICE);
        return;
    case STEP_CHOICE: begin_choice(s, w, out); return;
    case STEP_FINISH:
        bt_front_put_finish(&a->choices[w->choice], out);
        next(w, STEP_PROMPT_LOGPROBS);
        return;
    case STEP_PROMPT_LOGPROBS:
    case STEP_CHAT_LOGPROBS: put_prompt_logprobs(s, w, out); return;
    case STEP_CHOICE_END: end_choice(s, w, out); return;
    case STEP_USAGE:
        bt_buf_puts(out, "],");
        bt_front_put_usage(a, u, out);
        next(w, STEP_CHAT_LOGPROBS);
        return;
    case STEP_EXTRAS:
        bt_front_put_extras(a, u, out);
        bt_buf_puts(out, "}");
        next(w, STEP_DONE);
        return;
    default: step_choice(s, w, out); return;
    }
}

static void of_choice(struct source *s, uint32_t choice)
{
    s->p = bt_front_prompt_of(s->a, choice);
    s->c = &s->a->choices[choice];
    s->text = &s->c->text;
    s->lp = &s->a->choices[choice].lp;
}

bool bt_front_write_whole(struct bt_front_answer *a, const struct bt_gen_usage *u,
                          struct bt_front_writer *w, struct bt_buf *out)
{
    struct source s = {.a = a, .slice = {.until = out->len + BT_HTTP_PIECE}};
    while (w->step != STEP_DONE && front_slice_has_room(&s.slice, out)) {
        of_choice(&s, w->choice);
        step_whole(&s, u, w, out);
    }
    return w->step == STEP_DONE;
}

bool bt_front_write_echo(struct bt_front_answer *a, const struct bt_buf *text,
                         const struct bt_front_logprobs *lp, struct bt_front_writer *w,
                         struct bt_buf *out)
{
    struct source s = {.a = a,
                       .p = bt_front_prompt_of(a, w->choice),
                       .text = text,
                       .lp = lp,
                       .slice = {.until = out->len + BT_HTTP_PIECE}};
    if (w->step == STEP_BEGIN) {
        bt_front_put_event_head(a, w->choice, out);
        next(w, STEP_ECHO);
    }
    while (w->step < STEP_FINISH && front_slice_has_room(&s.slice, out)) {
        step_choice(&s, w, out);
    }
    return w->step >= STEP_FINISH;
}
