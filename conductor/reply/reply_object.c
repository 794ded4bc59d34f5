/* Reads {"name": ..., "arguments": {...}} byte by byte; see reply_priv.h. The name may come behind
 * the arguments. Arguments may be an object, or a string that holds one. Other keys are skipped. */
#include "conductor/reply/reply_priv.h"

#define WORD_MAX 64  /* bytes of a key that matters */
#define NAME_MAX 256 /* bytes of a function's name */

enum { FIRST_KEY, NEXT_KEY, KEY, COLON, BEFORE_VALUE, STRING, NESTED, SCALAR, AFTER };
enum { KEY_OTHER, KEY_NAME, KEY_ARGUMENTS };

void bt_reply_object_init(struct bt_reply_object *o, bool strict)
{
    bt_buf_clear(&o->name);
    bt_buf_clear(&o->word);
    o->state = FIRST_KEY;
    o->key = KEY_OTHER;
    o->strict = strict;
    o->text = o->has_name = o->has_arguments = false;
}

void bt_reply_object_cleanup(struct bt_reply_object *o)
{
    bt_buf_cleanup(&o->name);
    bt_buf_cleanup(&o->word);
}

bool bt_reply_object_in_arguments(const struct bt_reply_object *o)
{
    return o->key == KEY_ARGUMENTS && o->state >= STRING && o->state <= SCALAR;
}

static bool is_space(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

static enum bt_scan go(struct bt_reply_object *o, int state)
{
    o->state = (uint8_t)state;
    return BT_SCAN_MORE;
}

static bool is_word(const struct bt_buf *b, const char *word)
{
    return b->len == strlen(word) && memcmp(b->data, word, b->len) == 0;
}

/* The key is complete. Returns false if an object with this key is not a call. */
static bool take_key(struct bt_reply_object *o)
{
    const struct bt_buf *w = &o->word;
    bool is_name = w->len > 0 && is_word(w, "name");
    bool is_arguments = w->len > 0 && (is_word(w, "arguments") || is_word(w, "parameters"));
    o->key = is_name && !o->has_name             ? KEY_NAME
             : is_arguments && !o->has_arguments ? KEY_ARGUMENTS
                                                 : KEY_OTHER;
    return !o->strict || is_name || is_arguments ||
           (w->len > 0 && (is_word(w, "type") || is_word(w, "id")));
}

static enum bt_scan begin_value(struct bt_reply_object *o, char c, struct bt_buf *arguments)
{
    bool nested = c == '{' || c == '[';
    if (c == '"') {
        o->string = (struct bt_json_string){0};
        o->has_arguments |= o->key == KEY_ARGUMENTS;
        return go(o, STRING);
    }
    if (o->key == KEY_NAME || (!nested && memchr(",}]:", c, 4) != NULL)) {
        return BT_SCAN_BAD;
    }
    if (nested) {
        bt_json_scan_init(&o->scan);
        (void)bt_json_scan(&o->scan, c);
    }
    if (o->key == KEY_ARGUMENTS) {
        o->has_arguments = true;
        bt_buf_append(arguments, &c, 1);
    }
    return go(o, nested ? NESTED : SCALAR);
}

static enum bt_scan in_string(struct bt_reply_object *o, char c, struct bt_buf *arguments)
{
    size_t before = o->name.len + o->word.len;
    struct bt_buf *to = o->key == KEY_ARGUMENTS ? arguments
                        : o->key == KEY_NAME    ? &o->name
                                                : &o->word;
    if (to != arguments && before > NAME_MAX) {
        if (o->key == KEY_NAME) {
            return BT_SCAN_BAD;
        }
        bt_buf_clear(&o->word);
    }
    if (bt_json_string(&o->string, c, to) == BT_SCAN_DONE) {
        o->has_name |= o->key == KEY_NAME && o->name.len > 0;
        return go(o, AFTER);
    }
    return BT_SCAN_MORE;
}

static enum bt_scan in_nested(struct bt_reply_object *o, char c, struct bt_buf *arguments)
{
    enum bt_scan s = bt_json_scan(&o->scan, c);
    if (s == BT_SCAN_BAD) {
        return s;
    }
    if (o->key == KEY_ARGUMENTS) {
        bt_buf_append(arguments, &c, 1);
    }
    return s == BT_SCAN_DONE ? go(o, AFTER) : BT_SCAN_MORE;
}

static enum bt_scan in_key(struct bt_reply_object *o, char c)
{
    if (o->word.len > WORD_MAX) {
        return BT_SCAN_BAD; /* no model writes such keys into a call */
    }
    if (bt_json_string(&o->string, c, &o->word) == BT_SCAN_MORE) {
        return BT_SCAN_MORE;
    }
    return take_key(o) ? go(o, COLON) : BT_SCAN_BAD;
}

static enum bt_scan end_of_object(const struct bt_reply_object *o)
{
    return o->has_name && (o->has_arguments || !o->strict) ? BT_SCAN_DONE : BT_SCAN_BAD;
}

enum bt_scan bt_reply_object_feed(struct bt_reply_object *o, char c, struct bt_buf *arguments)
{
    switch (o->state) {
    case KEY: return in_key(o, c);
    case STRING: return in_string(o, c, arguments);
    case NESTED: return in_nested(o, c, arguments);
    case SCALAR:
        if (!is_space(c) && c != ',' && c != '}') {
            if (o->key == KEY_ARGUMENTS) {
                bt_buf_append(arguments, &c, 1);
            }
            return BT_SCAN_MORE;
        }
        o->state = AFTER;
        break;
    default: break;
    }
    if (is_space(c)) {
        return BT_SCAN_MORE;
    }
    switch (o->state) {
    case FIRST_KEY:
    case NEXT_KEY:
        if (c == '"') {
            bt_buf_clear(&o->word);
            o->string = (struct bt_json_string){0};
            return go(o, KEY);
        }
        return c == '}' && o->state == FIRST_KEY ? end_of_object(o) : BT_SCAN_BAD;
    case COLON: return c == ':' ? go(o, BEFORE_VALUE) : BT_SCAN_BAD;
    case BEFORE_VALUE: return begin_value(o, c, arguments);
    default: return c == ',' ? go(o, NEXT_KEY) : c == '}' ? end_of_object(o) : BT_SCAN_BAD;
    }
}
