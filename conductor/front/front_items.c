/* Items of an answer, and long texts made of them; see front_items.h. Pure. */
#include "conductor/front/front_items.h"

#include <stdlib.h>
#include <string.h>

#include "common/http/http.h"
#include "conductor/front/front_json.h"

struct bt_front_item *bt_front_items_last(const struct bt_front_items *items)
{
    return items->open ? &items->list[items->n - 1] : NULL;
}

static struct bt_front_item *push(struct bt_front_items *items, const struct bt_reply_bit *bit)
{
    if (items->n == items->cap) {
        items->cap = items->cap == 0 ? 4 : 2 * items->cap;
        items->list = bt_realloc(items->list, items->cap * sizeof(items->list[0]));
    }
    struct bt_front_item *item = &items->list[items->n++];
    *item = (struct bt_front_item){.kind = bit->kind, .call = bit->call};
    if (bit->kind == BT_REPLY_CALL) {
        item->name = bt_sprintf("%.*s", (int)bit->len, bit->text);
        items->bytes += bit->len;
    }
    items->bytes += sizeof(*item);
    items->open = true;
    return item;
}

bool bt_front_items_begins(const struct bt_front_items *items, const struct bt_reply_bit *bit)
{
    const struct bt_front_item *last = bt_front_items_last(items);
    bool more = last != NULL && last->kind == bit->kind;
    return bit->kind == BT_REPLY_CALL || (bit->kind != BT_REPLY_ARGUMENTS && bit->len > 0 && !more);
}

struct bt_front_item *bt_front_items_of(struct bt_front_items *items,
                                        const struct bt_reply_bit *bit)
{
    if (bt_front_items_begins(items, bit)) {
        return push(items, bit);
    }
    struct bt_front_item *last = bt_front_items_last(items);
    bool of_call = bit->kind == BT_REPLY_ARGUMENTS;
    bool fits = last != NULL && last->kind == (of_call ? BT_REPLY_CALL : bit->kind) &&
                (!of_call || last->call == bit->call);
    return fits && bit->len > 0 ? last : NULL;
}

static void add(struct bt_front_items *items, struct bt_buf *to, const char *text, size_t len)
{
    size_t before = to->cap;
    bt_buf_append(to, text, len);
    items->bytes += to->cap - before;
}

void bt_front_items_text(struct bt_front_items *items, struct bt_front_item *item, const char *text,
                         size_t len)
{
    add(items, &item->text, text, len);
}

void bt_front_items_logprobs(struct bt_front_items *items, struct bt_front_item *item,
                             const struct bt_buf *more)
{
    if (more->len > 0) {
        add(items, &item->logprobs, ",", item->logprobs.len > 0);
        add(items, &item->logprobs, more->data, more->len);
    }
}

void bt_front_items_cleanup(struct bt_front_items *items)
{
    for (uint32_t i = 0; i < items->n; i++) {
        free(items->list[i].name);
        bt_buf_cleanup(&items->list[i].text);
        bt_buf_cleanup(&items->list[i].logprobs);
    }
    free(items->list);
    *items = (struct bt_front_items){0};
}

/* ---- long texts ---- */

static void push_span(struct bt_front_script *s, const struct bt_buf *from, size_t len,
                      bool escaped)
{
    if (len == 0) {
        return;
    }
    if (s->n == s->cap) {
        s->cap = s->cap == 0 ? 16 : 2 * s->cap;
        s->spans = bt_realloc(s->spans, s->cap * sizeof(s->spans[0]));
    }
    s->spans[s->n++] = (struct bt_front_span){from, len, escaped};
}

/* Makes a span of the script's own text since the last span. */
static void mark(struct bt_front_script *s)
{
    push_span(s, NULL, s->own.len - s->marked, false);
    s->marked = s->own.len;
}

void bt_front_script_string(struct bt_front_script *s, const struct bt_buf *text)
{
    bt_buf_puts(&s->own, "\"");
    mark(s);
    push_span(s, text, text->len, true);
    bt_buf_puts(&s->own, "\"");
}

void bt_front_script_raw(struct bt_front_script *s, const struct bt_buf *text)
{
    mark(s);
    push_span(s, text, text->len, false);
}

/* The end of a piece of about n bytes. It does not cut a character. */
static size_t end_of(const char *text, size_t at, size_t len, size_t n)
{
    size_t end = BT_MIN(len, at + n);
    while (end < len && ((unsigned char)text[end] & 0xc0) == 0x80) {
        end++;
    }
    return end;
}

bool bt_front_script_write(struct bt_front_script *s, struct bt_buf *out)
{
    size_t until = out->len + BT_HTTP_PIECE;
    mark(s);
    while (s->span < s->n && out->len < until) {
        const struct bt_front_span *p = &s->spans[s->span];
        const char *text = p->from != NULL ? p->from->data : s->own.data + s->own_at;
        size_t end = end_of(text, s->at, p->len, until - out->len);
        if (p->escaped) {
            bt_front_put_text(out, text + s->at, end - s->at);
        } else {
            bt_buf_append(out, text + s->at, end - s->at);
        }
        s->at = end;
        if (s->at == p->len) {
            s->own_at += p->from == NULL ? p->len : 0;
            s->span++;
            s->at = 0;
        }
    }
    return s->span == s->n;
}

void bt_front_script_cleanup(struct bt_front_script *s)
{
    bt_buf_cleanup(&s->own);
    free(s->spans);
    *s = (struct bt_front_script){0};
}
