/* libFuzzer: what models write, taken apart. Three bytes choose the options and where the text is
 * cut; the rest is the text. However it is cut, the same bits come out; a call has a name before
 * arguments, and memory follows the text. Build and run: tests/fuzz/run reply --seconds 60 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "conductor/reply/reply.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct taken { /* all bits, with what belongs together in one piece */
    struct bt_buf text;
    enum bt_reply_kind kind;
    uint32_t call, calls;
    bool any, one_call;
};

static void on_bit(void *arg, const struct bt_reply_bit *b)
{
    struct taken *t = arg;
    BT_ASSERT(b->len > 0);
    if (!t->any || t->kind != b->kind || t->call != b->call || b->kind == BT_REPLY_CALL) {
        bt_buf_printf(&t->text, "%s%d.%u:", t->any ? "\n" : "", (int)b->kind, b->call);
    }
    if (b->kind == BT_REPLY_CALL) {
        BT_ASSERT(b->call == t->calls);
        t->calls++;
    }
    BT_ASSERT(b->kind != BT_REPLY_ARGUMENTS || (t->calls > 0 && b->call == t->calls - 1));
    BT_ASSERT(!t->one_call || t->calls <= 1);
    bt_buf_append(&t->text, b->text, b->len);
    t->kind = b->kind;
    t->call = b->call;
    t->any = true;
}

/* Pieces of 1 to `most` bytes; 0: all at once. */
static uint64_t take(const struct bt_reply_options *o, const char *text, size_t n, size_t most,
                     struct taken *t)
{
    *t = (struct taken){.one_call = o->one_call};
    struct bt_reply *r = bt_reply_create(o, on_bit, t);
    for (size_t at = 0, k = 1; at < n; k++) {
        size_t len = most == 0 ? n : 1 + k * 7 % most;
        len = BT_MIN(len, n - at);
        bt_reply_feed(r, text + at, len);
        at += len;
        BT_ASSERT(bt_reply_held(r) <= 4096 + 16 * n);
    }
    bt_reply_end(r);
    uint64_t end = bt_reply_thoughts_end(r);
    BT_ASSERT(bt_reply_calls(r) == t->calls);
    BT_ASSERT(end <= n || end == UINT64_MAX);
    bt_reply_destroy(r);
    return end;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct taken whole, cut;
    if (size < 3) {
        return 0;
    }
    const struct bt_reply_options o = {
        .style = {.tools = (enum bt_reply_tools)(data[0] % BT_TOOLS_STYLES),
                  .thoughts = (enum bt_reply_thoughts)(data[1] % BT_THOUGHTS_STYLES)},
        .tools = (data[0] & 0x80) == 0,
        .one_call = (data[1] & 0x20) != 0,
        .thinks = (data[1] & 0x40) != 0,
        .keep_thoughts = (data[1] & 0x80) != 0};
    const char *text = (const char *)data + 3;
    uint64_t a = take(&o, text, size - 3, 0, &whole),
             b = take(&o, text, size - 3, 1 + data[2] % 32, &cut);
    BT_ASSERT(a == b && whole.text.len == cut.text.len &&
              bt_compare(whole.text.data, cut.text.data, whole.text.len) == 0);
    bt_buf_cleanup(&whole.text);
    bt_buf_cleanup(&cut.text);
    return 0;
}
