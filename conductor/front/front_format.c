/* OpenAI's response formats. What load generators rely on (notes of their sources): events are
 * "data: {json}\n\n"; every event has id, object, created, model; the first event with choices is
 * the first token (so no event with only a role comes before it); usage comes only if asked for,
 * in an event whose choices are empty; the last line is "data: [DONE]". */
#include "conductor/front/front_format.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void front_answer_init(struct front_answer *a, const struct front_options *opt,
                       const struct bt_tokenizer *tok, const char *id, const char *model,
                       uint64_t created_s, uint32_t n_prompt, bool timings)
{
    *a = (struct front_answer){.opt = *opt, .tok = tok, .n_prompt = n_prompt, .timings = timings};
    a->choices = bt_calloc(opt->n, sizeof(a->choices[0]));
    const char *object = !opt->chat    ? "text_completion"
                         : opt->stream ? "chat.completion.chunk"
                                       : "chat.completion";
    bt_buf_printf(&a->prefix, "{\"id\":\"%s\",\"object\":\"%s\",\"created\":%llu,\"model\":", id,
                  object, (unsigned long long)created_s);
    front_put_cstr(&a->prefix, model);
}

void front_answer_cleanup(struct front_answer *a)
{
    for (uint32_t i = 0; i < a->opt.n; i++) {
        struct front_choice *c = &a->choices[i];
        bt_buf_cleanup(&c->text);
        for (int k = 0; k < LP_PARTS; k++) {
            bt_buf_cleanup(&c->lp[k]);
        }
        free(c->stop_string);
    }
    free(a->choices);
    bt_buf_cleanup(&a->prefix);
    bt_buf_cleanup(&a->piece);
    bt_buf_cleanup(&a->names);
    *a = (struct front_answer){0};
}

/* ---- logprobs ---- */

/* Bytes of a token into a->piece. */
static void load_piece(struct front_answer *a, uint32_t id)
{
    bt_buf_clear(&a->piece);
    if (bt_tokenizer_piece(a->tok, id, &a->piece) != BT_OK) {
        bt_buf_clear(&a->piece); /* an id outside the tokenizer (padding rows): no text */
    }
    bt_buf_reserve(&a->piece, 0);
}

static bool is_utf8(const char *s, size_t len)
{
    for (size_t i = 0; i < len;) {
        size_t n = front_utf8_len(s + i, len - i);
        if (n == 0) {
            return false;
        }
        i += n;
    }
    return true;
}

/* A token's name: its text; "bytes:\xNN..." where that is no text by itself (as OpenAI's own API
 * writes it, so that two such tokens keep different names); or its id if so asked. Loads piece. */
static void put_token(struct front_answer *a, uint32_t id, struct bt_buf *out)
{
    load_piece(a, id);
    if (a->opt.tokens_as_ids) {
        bt_buf_printf(out, "\"token_id:%u\"", id);
    } else if (is_utf8(a->piece.data, a->piece.len)) {
        front_put_str(out, a->piece.data, a->piece.len);
    } else {
        bt_buf_puts(out, "\"bytes:");
        for (size_t i = 0; i < a->piece.len; i++) {
            bt_buf_printf(out, "\\\\x%02x", (unsigned char)a->piece.data[i]);
        }
        bt_buf_puts(out, "\"");
    }
}

static void put_comma(struct bt_buf *out)
{
    if (out->len > 0) {
        bt_buf_puts(out, ",");
    }
}

/* {"token": logprob, ...}: the most likely ones, and the chosen one if it is not among them. Two
 * ids may share their text (a special token and its spelling); the likelier one is told, because a
 * JSON object must not repeat a key. */
static void put_top_dict(struct front_answer *a, const struct bt_gen_token *t, struct bt_buf *out)
{
    size_t from[BT_ENGINE_MAX_TOP + 2]; /* where each name begins in a->names */
    uint32_t n = 0, n_top = BT_MIN(t->n_top, BT_ENGINE_MAX_TOP);
    bool chosen = false;
    bt_buf_clear(&a->names);
    bt_buf_puts(out, "{");
    for (uint32_t i = 0; i <= n_top; i++) {
        bool top = i < n_top;
        if (!top && chosen) {
            break;
        }
        uint32_t id = top ? t->top_id[i] : t->id;
        chosen = chosen || id == t->id;
        from[n] = a->names.len;
        put_token(a, id, &a->names);
        const char *name = a->names.data + from[n];
        size_t len = a->names.len - from[n];
        bool seen = false;
        for (uint32_t k = 0; k < n && !seen; k++) {
            seen = from[k + 1] - from[k] == len && memcmp(a->names.data + from[k], name, len) == 0;
        }
        if (seen) {
            a->names.len = from[n];
            continue;
        }
        bt_buf_puts(out, n == 0 ? "" : ",");
        bt_buf_append(out, name, len);
        bt_buf_puts(out, ":");
        front_put_float(out, top ? t->top_logprob[i] : t->logprob);
        from[++n] = a->names.len;
    }
    bt_buf_puts(out, "}");
}

static uint32_t count_chars(const struct bt_buf *piece)
{
    uint32_t n = 0;
    for (size_t i = 0; i < piece->len; i++) {
        n += ((unsigned char)piece->data[i] & 0xc0) != 0x80;
    }
    return n;
}

static void add_completion_token(struct front_answer *a, struct front_choice *c,
                                 const struct bt_gen_token *t)
{
    for (int k = 0; k < LP_PARTS; k++) {
        put_comma(&c->lp[k]);
    }
    front_put_float(&c->lp[LP_LOGPROBS], t->logprob);
    put_top_dict(a, t, &c->lp[LP_TOP]);
    bt_buf_printf(&c->lp[LP_OFFSETS], "%u", c->chars);
    put_token(a, t->id, &c->lp[LP_TOKENS]);
    if (!(a->opt.skip_special && bt_tokenizer_is_special(a->tok, t->id))) {
        c->chars += count_chars(&a->piece); /* put_token has loaded it */
    }
}

static void put_chat_token(struct front_answer *a, uint32_t id, float logprob, struct bt_buf *out)
{
    bt_buf_puts(out, "{\"token\":");
    put_token(a, id, out);
    bt_buf_puts(out, ",\"logprob\":");
    front_put_float(out, logprob);
    bt_buf_puts(out, ",\"bytes\":[");
    for (size_t i = 0; i < a->piece.len; i++) {
        bt_buf_printf(out, i == 0 ? "%u" : ",%u", (unsigned char)a->piece.data[i]);
    }
    bt_buf_puts(out, "]");
}

static void add_chat_token(struct front_answer *a, struct front_choice *c,
                           const struct bt_gen_token *t)
{
    struct bt_buf *out = &c->lp[LP_TOKENS];
    put_comma(out);
    put_chat_token(a, t->id, t->logprob, out);
    bt_buf_puts(out, ",\"top_logprobs\":[");
    for (uint32_t i = 0; i < t->n_top; i++) {
        bt_buf_puts(out, i == 0 ? "" : ",");
        put_chat_token(a, t->top_id[i], t->top_logprob[i], out);
        bt_buf_puts(out, "}");
    }
    bt_buf_puts(out, "]}");
}

static void add_tokens(struct front_answer *a, struct front_choice *c, const struct bt_gen_delta *d)
{
    c->tokens += (uint32_t)d->n_tokens;
    for (size_t i = 0; i < d->n_tokens && a->opt.logprobs >= 0; i++) {
        if (a->opt.chat) {
            add_chat_token(a, c, &d->tokens[i]);
        } else {
            add_completion_token(a, c, &d->tokens[i]);
        }
    }
}

/* ,"logprobs":... of what the choice has gathered; streams gather anew for each event. */
static void put_logprobs(struct front_answer *a, struct front_choice *c, struct bt_buf *out)
{
    static const char *const names[] = {"tokens", "token_logprobs", "top_logprobs", "text_offset"};
    if (a->opt.logprobs < 0) {
        bt_buf_puts(out, ",\"logprobs\":null");
        return;
    }
    int parts = a->opt.chat ? 1 : LP_PARTS;
    bt_buf_puts(out, ",\"logprobs\":{");
    for (int k = 0; k < parts; k++) {
        bt_buf_printf(out, "%s\"%s\":[", k == 0 ? "" : ",", a->opt.chat ? "content" : names[k]);
        bt_buf_append(out, c->lp[k].data, c->lp[k].len);
        bt_buf_puts(out, "]");
        bt_buf_clear(&c->lp[k]);
    }
    bt_buf_puts(out, "}");
}

/* ---- usage ---- */

static void put_usage(struct front_answer *a, uint32_t completion, const struct bt_gen_usage *u,
                      struct bt_buf *out)
{
    bt_buf_printf(out,
                  "\"usage\":{\"prompt_tokens\":%u,\"completion_tokens\":%u,\"total_tokens\":%u",
                  a->n_prompt, completion, a->n_prompt + completion);
    if (u != NULL) {
        bt_buf_printf(out, ",\"prompt_tokens_details\":{\"cached_tokens\":%u}", u->cached_tokens);
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
        front_put_known(out, times[i].v);
    }
    bt_buf_puts(out, ",\"prefill\":");
    front_put_str(out, u->prefill, strnlen(u->prefill, sizeof(u->prefill)));
    bt_buf_puts(out, ",\"decode\":");
    front_put_str(out, u->decode, strnlen(u->decode, sizeof(u->decode)));
    bt_buf_puts(out, "}");
}

static uint32_t all_tokens(const struct front_answer *a)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < a->opt.n; i++) {
        n += a->choices[i].tokens;
    }
    return n;
}

/* ---- the API ---- */

static void event_begin(struct front_answer *a, uint32_t choice, const char *text, size_t len,
                        struct bt_buf *out)
{
    struct front_choice *c = &a->choices[choice];
    bt_buf_puts(out, "data: ");
    bt_buf_append(out, a->prefix.data, a->prefix.len);
    bt_buf_printf(out, ",\"choices\":[{\"index\":%u,", choice);
    if (!a->opt.chat) {
        bt_buf_puts(out, "\"text\":");
        front_put_str(out, text, len);
    } else {
        bt_buf_puts(out, "\"delta\":{");
        bt_buf_puts(out, c->role_sent ? "" : "\"role\":\"assistant\",");
        bt_buf_puts(out, "\"content\":");
        front_put_str(out, text, len);
        bt_buf_puts(out, "}");
        c->role_sent = true;
    }
}

void front_answer_delta(struct front_answer *a, const struct bt_gen_delta *d, struct bt_buf *out)
{
    BT_ASSERT(d->choice < a->opt.n);
    struct front_choice *c = &a->choices[d->choice];
    add_tokens(a, c, d);
    if (a->opt.stream) {
        event_begin(a, d->choice, d->text, d->text_len, out);
        put_logprobs(a, c, out);
    } else {
        bt_buf_append(&c->text, d->text, d->text_len);
    }
}

void front_event_empty(struct front_answer *a, uint32_t choice, struct bt_buf *out)
{
    event_begin(a, choice, "", 0, out);
    bt_buf_puts(out, ",\"logprobs\":null");
}

void front_answer_finish(struct front_answer *a, uint32_t choice, bt_finish_t reason,
                         const char *stop_string)
{
    BT_ASSERT(choice < a->opt.n);
    struct front_choice *c = &a->choices[choice];
    c->finish = reason == BT_FINISH_LENGTH ? "length" : "stop";
    free(c->stop_string);
    c->stop_string = stop_string != NULL ? bt_strdup(stop_string) : NULL;
}

/* ,"finish_reason":...,"stop_reason":...} */
static void put_finish(const struct front_choice *c, struct bt_buf *out)
{
    if (c->finish == NULL) {
        bt_buf_puts(out, ",\"finish_reason\":null,\"stop_reason\":null}");
        return;
    }
    bt_buf_printf(out, ",\"finish_reason\":\"%s\",\"stop_reason\":", c->finish);
    if (c->stop_string != NULL) {
        front_put_cstr(out, c->stop_string);
    } else {
        bt_buf_puts(out, "null");
    }
    bt_buf_puts(out, "}");
}

void front_event_end(struct front_answer *a, uint32_t choice, struct bt_buf *out)
{
    put_finish(&a->choices[choice], out);
    bt_buf_puts(out, "]");
    if (a->opt.continuous_usage) {
        bt_buf_puts(out, ",");
        put_usage(a, all_tokens(a), NULL, out); /* cached tokens are known at the end only */
    } else if (a->opt.include_usage) {
        bt_buf_puts(out, ",\"usage\":null");
    }
    bt_buf_puts(out, "}\n\n");
}

void front_events_last(struct front_answer *a, const struct bt_gen_usage *u, struct bt_buf *out)
{
    if (a->opt.include_usage || a->timings) {
        bt_buf_puts(out, "data: ");
        bt_buf_append(out, a->prefix.data, a->prefix.len);
        bt_buf_puts(out, ",\"choices\":[]");
        if (a->opt.include_usage) {
            bt_buf_puts(out, ",");
            put_usage(a, u->completion_tokens, u, out);
        }
        if (a->timings) {
            bt_buf_puts(out, ",");
            put_timings(u, out);
        }
        bt_buf_puts(out, "}\n\n");
    }
    bt_buf_puts(out, "data: [DONE]\n\n");
}

void front_whole(struct front_answer *a, const struct bt_gen_usage *u, struct bt_buf *out)
{
    bt_buf_append(out, a->prefix.data, a->prefix.len);
    bt_buf_puts(out, ",\"choices\":[");
    for (uint32_t i = 0; i < a->opt.n; i++) {
        struct front_choice *c = &a->choices[i];
        bt_buf_printf(out, "%s{\"index\":%u,", i == 0 ? "" : ",", i);
        bt_buf_puts(out,
                    a->opt.chat ? "\"message\":{\"role\":\"assistant\",\"content\":" : "\"text\":");
        front_put_str(out, c->text.data, c->text.len);
        bt_buf_puts(out, a->opt.chat ? "}" : "");
        put_logprobs(a, c, out);
        put_finish(c, out);
    }
    bt_buf_puts(out, "],");
    put_usage(a, u->completion_tokens, u, out);
    if (a->timings) {
        bt_buf_puts(out, ",");
        put_timings(u, out);
    }
    bt_buf_puts(out, "}");
}
