/* Takes a model's answer apart, see reply.h. Text waits in `in` while it may be the beginning of
 * a marker. All other text is taken byte by byte, so the result does not depend on where the
 * text was cut. The text of a possible call is kept in `raw` until its name and the beginning of
 * its arguments are known. From then on, arguments leave as they arrive. */
#include <stdlib.h>

#include "conductor/reply/reply_priv.h"

#define NAME_MAX 256 /* bytes of a function's name and of what the form writes around it */
#define NO_END   UINT64_MAX
/* An incomplete character before a token becomes up to three U+FFFD of 3 bytes each. */
#define MARK_LATE 9

enum state {
    TEXT,
    THOUGHTS,
    HEAD,         /* after the marker of a call */
    OBJECT,       /* in {"name":...} */
    XML,          /* in a call with elements */
    NAME,         /* in a name that a marker ends */
    CALL_ID,      /* after the name: an id, which is ignored */
    BEFORE_VALUE, /* after the marker that ends the name */
    SECOND_NAME,  /* DeepSeek V3, when the first name was "function" */
    FENCE,        /* DeepSeek V3: the arguments are a block of code */
    VALUE,        /* in the arguments */
    BROKEN,       /* in arguments that are not JSON, up to the next marker */
    BETWEEN       /* after a call */
};

struct bt_reply {
    struct bt_reply_options o;
    const struct bt_reply_form *form;
    const char *think, *thought; /* markers of reasoning; NULL: none */
    void (*bit)(void *arg, const struct bt_reply_bit *b);
    void *arg;
    enum state state;
    bool lead; /* only white space has come since the beginning, the reasoning or a call */
    /* only white space has come since the beginning, so reasoning or a call without a marker may
     * come */
    bool first;
    bool after_thoughts; /* the newlines that follow still belong to the reasoning */
    bool listed;         /* in an array of calls */
    bool committed;      /* the name of the open call was given out */
    bool has_arguments;  /* some arguments of the open call were given out */
    bool complete;       /* the answer is complete: no text follows */
    bool turned;         /* a step has taken no byte but has changed the state of xml */
    uint32_t calls;
    uint64_t at;           /* bytes taken */
    uint64_t thoughts_end; /* see bt_reply_thoughts_end */
    struct bt_buf marks;   /* uint64_t: the places of tokens that are markers, from `at` on */
    struct bt_buf in;      /* text that was not taken yet */
    struct bt_buf space;   /* white space that is given out only if text follows */
    struct bt_buf raw;     /* the text of a call that is not committed yet */
    struct bt_buf name, arguments;
    struct bt_buf out; /* collected text of one kind */
    enum bt_reply_kind out_kind;
    uint32_t out_call;
    struct bt_json_scan scan;
    struct bt_reply_object object;
    struct bt_reply_xml xml;
};

/* ---- output ---- */

static void send(struct bt_reply *r, enum bt_reply_kind kind, uint32_t call, const char *p,
                 size_t n)
{
    struct bt_reply_bit b = {kind, call, p, n};
    if (n > 0 && !(r->o.one_call && kind >= BT_REPLY_CALL && call > 0)) {
        r->bit(r->arg, &b);
    }
}

static void flush(struct bt_reply *r)
{
    send(r, r->out_kind, r->out_call, r->out.data, r->out.len);
    bt_buf_clear(&r->out);
}

static void put(struct bt_reply *r, enum bt_reply_kind kind, const char *p, size_t n)
{
    uint32_t call = r->calls > 0 ? r->calls - 1 : 0;
    if (r->out_kind != kind || r->out_call != call) {
        flush(r);
        r->out_kind = kind;
        r->out_call = call;
    }
    if (n > 0) {
        bt_buf_append(&r->out, p, n);
    }
    r->has_arguments |= kind == BT_REPLY_ARGUMENTS && n > 0;
}

static void put_arguments(struct bt_reply *r)
{
    put(r, BT_REPLY_ARGUMENTS, r->arguments.data, r->arguments.len);
    bt_buf_clear(&r->arguments);
}

static void put_space(struct bt_reply *r, enum bt_reply_kind kind)
{
    size_t from = 0;
    while (r->after_thoughts && from < r->space.len && r->space.data[from] == '\n') {
        from++;
    }
    if (from < r->space.len) {
        put(r, kind, r->space.data + from, r->space.len - from);
    }
    bt_buf_clear(&r->space);
    r->after_thoughts = false;
}

/* ---- markers ---- */

/* Returns whether the marker should be a token, but no such token stands here. */
static bool is_only_text(const struct bt_reply *r, const char *marker)
{
    const struct bt_reply_tokens *t = r->o.tokens;
    bool token = false;
    for (uint32_t i = 0; t != NULL && i < t->n; i++) {
        token |= strcmp(t->marker[i], marker) == 0;
    }
    const uint64_t *marks = (const uint64_t *)(const void *)r->marks.data;
    for (size_t i = 0; token && i < r->marks.len / sizeof(*marks); i++) {
        token = !(r->at >= marks[i] && r->at <= marks[i] + MARK_LATE);
    }
    return token;
}

enum bt_found bt_reply_begins(const struct bt_reply *r, const char *p, size_t n, const char *marker)
{
    size_t len = marker != NULL ? strlen(marker) : 0;
    if (len == 0 || memcmp(p, marker, BT_MIN(n, len)) != 0 || is_only_text(r, marker)) {
        return FOUND_NOT;
    }
    return n >= len ? FOUND : r->complete ? FOUND_NOT : FOUND_PART;
}

unsigned bt_reply_kinds(const struct bt_reply *r, const struct bt_buf *function, const char *key,
                        size_t key_len)
{
    return r->o.kinds != NULL
               ? r->o.kinds(r->o.kinds_arg, function->data, function->len, key, key_len)
               : BT_REPLY_IS_ANY;
}

/* Returns which marker the text begins with, -1: none. *part_p: the text may still become a
 * marker. */
static int marker_at(const struct bt_reply *r, const char *p, size_t n, const char *const *markers,
                     int n_markers, bool *part_p)
{
    *part_p = false;
    for (int i = 0; i < n_markers; i++) {
        enum bt_found f = bt_reply_begins(r, p, n, markers[i]);
        if (f == FOUND) {
            return i;
        }
        *part_p |= f == FOUND_PART;
    }
    return -1;
}

/* ---- states ----
 * A step takes bytes from p[0..n), n > 0, and returns how many. 0: it needs more, or has changed
 * the state. */

static bool is_space(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

static size_t keep(struct bt_reply *r, enum state next, const char *p, size_t n)
{
    bt_buf_append(&r->raw, p, n);
    r->state = next;
    return n;
}

/* The text was no call: it becomes content. */
static size_t fail(struct bt_reply *r)
{
    put_space(r, BT_REPLY_TEXT);
    put(r, BT_REPLY_TEXT, r->raw.data, r->raw.len);
    bt_buf_clear(&r->raw);
    bt_buf_clear(&r->arguments);
    r->lead = r->first = r->listed = false;
    r->state = TEXT;
    return 0;
}

static void begin_call(struct bt_reply *r)
{
    bt_buf_clear(&r->name);
    bt_buf_clear(&r->arguments);
    r->committed = r->has_arguments = false;
}

/* Gives out the name of the call, without white space around it. */
static bool commit(struct bt_reply *r, const struct bt_buf *name)
{
    const char *p = name->data;
    size_t n = name->len;
    if (r->form->numbered) { /* functions.NAME:NUMBER */
        const char *colon = n > 0 ? memrchr(p, ':', n) : NULL;
        n = colon != NULL ? (size_t)(colon - p) : n;
        if (n > 10 && memcmp(p, "functions.", 10) == 0) {
            p += 10;
            n -= 10;
        }
    }
    while (n > 0 && is_space(p[n - 1])) {
        n--;
    }
    if (n == 0) {
        return false;
    }
    r->calls++;
    flush(r);
    send(r, BT_REPLY_CALL, r->calls - 1, p, n);
    bt_buf_clear(&r->raw);
    bt_buf_clear(&r->space);
    r->committed = true;
    r->lead = true;
    r->first = r->after_thoughts = false;
    return true;
}

/* Ends the call. */
static size_t end_call(struct bt_reply *r, size_t taken)
{
    if (r->committed && !r->has_arguments) {
        put(r, BT_REPLY_ARGUMENTS, "{}", 2);
    }
    r->committed = false;
    r->state = BETWEEN;
    return taken;
}

/* Begins a call with elements, at its marker or at its name. */
static size_t begin_xml(struct bt_reply *r, const char *p)
{
    const struct bt_reply_xml_form *f = r->form->xml;
    bt_reply_xml_init(&r->xml, f);
    return keep(r, XML, p, f->call_open != NULL ? strlen(f->call_open) : 0);
}

static size_t step_text(struct bt_reply *r, const char *p, size_t n)
{
    const struct bt_reply_xml_form *xml = r->form->xml;
    const char *const markers[] = {r->o.tools ? r->form->frame.open : NULL,
                                   r->first ? r->think : NULL,
                                   r->o.tools && xml != NULL ? xml->call_open : NULL};
    bool part;
    int at = marker_at(r, p, n, markers, 3, &part);
    if (part) {
        return 0;
    }
    if (at == 1) {
        r->state = THOUGHTS;
        if (r->o.keep_thoughts) {
            put_space(r, BT_REPLY_TEXT);
            put(r, BT_REPLY_TEXT, p, strlen(r->think));
        }
        bt_buf_clear(&r->space);
        r->first = r->lead = true;
        r->thoughts_end = NO_END;
        return strlen(r->think);
    }
    if (r->lead && is_space(p[0])) {
        bt_buf_append(&r->space, p, 1);
        return 1;
    }
    if (r->thoughts_end == NO_END) {
        r->thoughts_end = 0; /* the answer has no reasoning */
    }
    if (at == 0) {
        begin_call(r);
        r->listed = false;
        return keep(r, HEAD, p, strlen(markers[0]));
    }
    if (at == 2) { /* some models leave out the marker of the frame */
        begin_call(r);
        return begin_xml(r, p);
    }
    if (p[0] == '{' && r->o.tools && r->form->bare && r->first) {
        begin_call(r);
        bt_reply_object_init(&r->object, true);
        return keep(r, OBJECT, p, 1);
    }
    put_space(r, BT_REPLY_TEXT);
    r->lead = r->first = false;
    put(r, BT_REPLY_TEXT, p, 1);
    return 1;
}

/* Ends the reasoning. */
static size_t end_thoughts(struct bt_reply *r, size_t taken)
{
    if (r->o.keep_thoughts) {
        put_space(r, BT_REPLY_TEXT);
    }
    bt_buf_clear(&r->space);
    r->thoughts_end = r->at + taken;
    r->state = TEXT;
    r->think = NULL; /* an answer reasons only once */
    r->lead = r->first = r->after_thoughts = true;
    return taken;
}

static size_t step_thoughts(struct bt_reply *r, const char *p, size_t n)
{
    enum bt_reply_kind kind = r->o.keep_thoughts ? BT_REPLY_TEXT : BT_REPLY_REASONING;
    const char *const markers[] = {
        r->thought, r->o.tools && r->form->ends_thoughts ? r->form->frame.open : NULL,
        r->lead && !r->o.keep_thoughts ? r->think : NULL};
    bool part;
    int at = marker_at(r, p, n, markers, 3, &part);
    if (part) {
        return 0;
    }
    if (at == 0) {
        if (r->o.keep_thoughts) {
            put_space(r, BT_REPLY_TEXT);
            put(r, BT_REPLY_TEXT, p, strlen(r->thought));
        }
        size_t taken = end_thoughts(r, strlen(r->thought));
        r->after_thoughts = r->lead = !r->o.keep_thoughts;
        return taken;
    }
    if (at == 1) {
        return end_thoughts(r, 0);
    }
    if (at == 2) { /* the prompt has already opened the reasoning, and the model opens it again */
        return strlen(r->think);
    }
    if (p[0] == '\n' && !(r->o.keep_thoughts && r->lead)) {
        if (!r->lead) {
            bt_buf_append(&r->space, p, 1);
        }
        return 1;
    }
    put_space(r, kind);
    r->lead = false;
    put(r, kind, p, 1);
    return 1;
}

static bool may_be_name(char c)
{
    return c == '_' || c == '-' || c == '.' || c == ':' || c == '/' || (c >= '0' && c <= '9') ||
           (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

static size_t step_head(struct bt_reply *r, const char *p, size_t n)
{
    const struct bt_reply_form *f = r->form;
    bool part;
    if (is_space(p[0])) {
        return keep(r, HEAD, p, 1);
    }
    if (f->frame.call != NULL) {
        int at = marker_at(r, p, n, &f->frame.call, 1, &part);
        return at == 0 ? keep(r, NAME, p, strlen(f->frame.call)) : part ? 0 : fail(r);
    }
    if (f->xml != NULL && f->xml->call_open != NULL) {
        int at = marker_at(r, p, n, &f->xml->call_open, 1, &part);
        return at == 0 ? begin_xml(r, p) : part ? 0 : fail(r);
    }
    if (f->xml != NULL) {
        return may_be_name(p[0]) ? begin_xml(r, p) : fail(r);
    }
    if (p[0] == '{' && f->object) {
        bt_reply_object_init(&r->object, false);
        return keep(r, OBJECT, p, 1);
    }
    if (p[0] == '[' && f->list && !r->listed) {
        r->listed = true;
        return keep(r, HEAD, p, 1);
    }
    if (f->names && !r->listed && may_be_name(p[0])) {
        r->state = NAME;
        return 0;
    }
    return fail(r);
}

static size_t step_object(struct bt_reply *r, const char *p)
{
    struct bt_reply_object *o = &r->object;
    bool inside = bt_reply_object_in_arguments(o);
    enum bt_scan s = bt_reply_object_feed(o, p[0], &r->arguments);
    if (s == BT_SCAN_BAD) {
        if (!r->committed) {
            return fail(r);
        }
        r->state = inside ? BROKEN : BETWEEN;
        return inside ? 0 : end_call(r, 0);
    }
    if (!r->committed) {
        bt_buf_append(&r->raw, p, 1);
        if (o->has_name && (o->has_arguments || s == BT_SCAN_DONE) && !commit(r, &o->name)) {
            r->raw.len--; /* the byte will come again, as text */
            return fail(r);
        }
    }
    if (r->committed) {
        put_arguments(r);
    }
    return s == BT_SCAN_DONE ? end_call(r, 1) : 1;
}

static size_t step_xml(struct bt_reply *r, const char *p, size_t n)
{
    struct bt_reply_xml *x = &r->xml;
    enum bt_scan s = BT_SCAN_MORE;
    size_t taken = 0;
    if (bt_reply_xml_between(x)) { /* the end of the frame may also end the call */
        bool part;
        int at = marker_at(r, p, n, &r->form->frame.close, 1, &part);
        if (part) {
            return 0;
        }
        if (at == 0) {
            bt_reply_xml_end(x, &r->arguments);
            s = BT_SCAN_DONE;
        }
    }
    uint8_t before = x->state;
    if (s == BT_SCAN_MORE) {
        taken = bt_reply_xml_step(x, r, p, n, &r->arguments, &s);
    }
    if (s == BT_SCAN_BAD) {
        if (!r->committed) {
            return fail(r);
        }
        r->state = BROKEN;
        return 0;
    }
    if (!r->committed) {
        bt_buf_append(&r->raw, p, taken);
        if ((x->sure || s == BT_SCAN_DONE) && !commit(r, &x->name)) {
            r->raw.len -= taken;
            return fail(r);
        }
    }
    if (r->committed) {
        put_arguments(r);
    }
    r->turned = taken == 0 && x->state != before;
    return s == BT_SCAN_DONE ? end_call(r, taken) : taken;
}

static size_t step_name(struct bt_reply *r, const char *p, size_t n)
{
    const char *const markers[] = {r->form->frame.name_end,
                                   r->form->names ? BT_REPLY_CALL_ID : NULL};
    bool part;
    int at = marker_at(r, p, n, markers, 2, &part);
    if (part) {
        return 0;
    }
    if (at >= 0) {
        return keep(r, at == 0 ? BEFORE_VALUE : CALL_ID, p, strlen(markers[at]));
    }
    if (r->form->names && p[0] == '{') {
        r->state = BEFORE_VALUE;
        return 0;
    }
    if (r->form->names && !may_be_name(p[0])) {
        return fail(r);
    }
    if (r->name.len > NAME_MAX) {
        return fail(r);
    }
    if (r->name.len > 0 || !is_space(p[0])) {
        bt_buf_append(&r->name, p, 1);
    }
    return keep(r, NAME, p, 1);
}

static size_t step_call_id(struct bt_reply *r, const char *p, size_t n)
{
    bool part;
    int at = marker_at(r, p, n, &r->form->frame.name_end, 1, &part);
    if (at == 0) {
        return keep(r, BEFORE_VALUE, p, strlen(r->form->frame.name_end));
    }
    return part ? 0 : may_be_name(p[0]) || is_space(p[0]) ? keep(r, CALL_ID, p, 1) : fail(r);
}

static size_t begin_value(struct bt_reply *r)
{
    if (!commit(r, &r->name)) {
        return fail(r);
    }
    bt_json_scan_init(&r->scan);
    r->state = VALUE;
    return 0;
}

static size_t step_before_value(struct bt_reply *r, const char *p)
{
    if (p[0] == '{') {
        return begin_value(r);
    }
    if (is_space(p[0])) {
        return keep(r, BEFORE_VALUE, p, 1);
    }
    if (!r->form->fenced) {
        return fail(r);
    }
    bt_buf_clear(&r->name);
    r->state = SECOND_NAME;
    return 0;
}

static size_t step_second_name(struct bt_reply *r, const char *p)
{
    if (r->name.len > NAME_MAX || bt_reply_begins(r, p, 1, r->form->frame.open) != FOUND_NOT) {
        return fail(r);
    }
    if (p[0] != '\n') {
        bt_buf_append(&r->name, p, 1);
    }
    return keep(r, p[0] == '\n' ? FENCE : SECOND_NAME, p, 1);
}

static size_t step_fence(struct bt_reply *r, const char *p)
{
    if (p[0] == '{') {
        return begin_value(r);
    }
    return memchr("`json \n\r\t", p[0], 9) != NULL ? keep(r, FENCE, p, 1) : fail(r);
}

static size_t step_value(struct bt_reply *r, const char *p)
{
    enum bt_scan s = bt_json_scan(&r->scan, p[0]);
    if (s == BT_SCAN_BAD) {
        r->state = BROKEN;
        return 0;
    }
    put(r, BT_REPLY_ARGUMENTS, p, 1);
    return s == BT_SCAN_DONE ? end_call(r, 1) : 1;
}

/* Looks for any marker of a call. */
static int call_marker_at(struct bt_reply *r, const char *p, size_t n, bool *part_p)
{
    const struct bt_reply_frame *f = &r->form->frame;
    const char *const markers[] = {f->open, f->call, f->call_end, f->close,
                                   r->form->xml != NULL ? r->form->xml->call_open : NULL};
    return marker_at(r, p, n, markers, 5, part_p);
}

static size_t step_broken(struct bt_reply *r, const char *p, size_t n)
{
    bool part;
    int at = call_marker_at(r, p, n, &part);
    if (at < 0 && !part) {
        put(r, BT_REPLY_ARGUMENTS, p, 1);
        return 1;
    }
    return part ? 0 : end_call(r, 0);
}

static bool is_between(const struct bt_reply *r, char c)
{
    const char *may = r->form->list && !r->listed ? NULL : r->form->between;
    return may != NULL && memchr(may, c, strlen(may)) != NULL;
}

static size_t step_between(struct bt_reply *r, const char *p, size_t n)
{
    const struct bt_reply_frame *f = &r->form->frame;
    bool part;
    int at = call_marker_at(r, p, n, &part);
    if (part) {
        return 0;
    }
    if (at == 0 || at == 1) {
        begin_call(r);
        r->listed = r->listed && at != 0;
        return keep(r, at == 0 ? HEAD : NAME, p, strlen(at == 0 ? f->open : f->call));
    }
    if (at == 2) {
        return strlen(f->call_end);
    }
    if (at == 3) {
        r->state = TEXT;
        return strlen(f->close);
    }
    if (at == 4) {
        begin_call(r);
        return begin_xml(r, p);
    }
    if (is_space(p[0]) || is_between(r, p[0])) {
        r->listed = r->listed && p[0] != ']';
        return 1;
    }
    if (p[0] == '{' && r->form->object) {
        begin_call(r);
        bt_reply_object_init(&r->object, r->form->bare);
        return keep(r, OBJECT, p, 1);
    }
    r->state = TEXT;
    return 0;
}

static size_t step(struct bt_reply *r, const char *p, size_t n)
{
    switch (r->state) {
    case TEXT: return step_text(r, p, n);
    case THOUGHTS: return step_thoughts(r, p, n);
    case HEAD: return step_head(r, p, n);
    case OBJECT: return step_object(r, p);
    case XML: return step_xml(r, p, n);
    case NAME: return step_name(r, p, n);
    case CALL_ID: return step_call_id(r, p, n);
    case BEFORE_VALUE: return step_before_value(r, p);
    case SECOND_NAME: return step_second_name(r, p);
    case FENCE: return step_fence(r, p);
    case VALUE: return step_value(r, p);
    case BROKEN: return step_broken(r, p, n);
    case BETWEEN: return step_between(r, p, n);
    }
    return n;
}

static void take(struct bt_reply *r)
{
    size_t done = 0;
    while (done < r->in.len) {
        enum state before = r->state;
        size_t n = step(r, r->in.data + done, r->in.len - done);
        if (n == 0 && r->state == before && !r->turned) {
            break; /* a marker may come: wait for more text */
        }
        r->turned = false;
        done += n;
        r->at += n;
    }
    bt_buf_consume(&r->in, done);
}

/* ---- a reply's life ---- */

struct bt_reply *bt_reply_create(const struct bt_reply_options *o,
                                 void (*bit)(void *arg, const struct bt_reply_bit *b), void *arg)
{
    struct bt_reply *r = bt_calloc(1, sizeof(*r));
    r->o = *o;
    r->form = bt_reply_form_of(o->style.tools);
    r->think = bt_reply_thoughts_open(o->style.thoughts);
    r->thought = bt_reply_thoughts_close(o->style.thoughts);
    r->bit = bit;
    r->arg = arg;
    r->lead = r->first = true;
    r->thoughts_end = r->think != NULL ? NO_END : 0;
    r->state = o->thinks && r->think != NULL ? THOUGHTS : TEXT;
    return r;
}

void bt_reply_destroy(struct bt_reply *r)
{
    if (r == NULL) {
        return;
    }
    bt_buf_cleanup(&r->marks);
    bt_buf_cleanup(&r->in);
    bt_buf_cleanup(&r->space);
    bt_buf_cleanup(&r->raw);
    bt_buf_cleanup(&r->name);
    bt_buf_cleanup(&r->arguments);
    bt_buf_cleanup(&r->out);
    bt_reply_object_cleanup(&r->object);
    bt_reply_xml_cleanup(&r->xml);
    free(r);
}

void bt_reply_token(struct bt_reply *r, uint32_t id, uint64_t offset)
{
    const struct bt_reply_tokens *t = r->o.tokens;
    for (uint32_t i = 0; t != NULL && i < t->n; i++) {
        if (t->id[i] == id) {
            bt_buf_append(&r->marks, &offset, sizeof(offset));
            return;
        }
    }
}

/* Forgets the places of tokens whose text was taken. */
static void drop_marks(struct bt_reply *r)
{
    size_t n = 0;
    uint64_t first;
    for (; n < r->marks.len; n += sizeof(first)) {
        memcpy(&first, r->marks.data + n, sizeof(first));
        if (first + MARK_LATE >= r->at) {
            break;
        }
    }
    bt_buf_consume(&r->marks, n);
}

void bt_reply_feed(struct bt_reply *r, const char *text, size_t len)
{
    if (len > 0) {
        bt_buf_append(&r->in, text, len);
        take(r);
        flush(r);
        drop_marks(r);
    }
}

void bt_reply_end(struct bt_reply *r)
{
    r->complete = true;
    take(r);
    if (r->raw.len > 0) {
        (void)fail(r);
    }
    if (r->state == XML) {
        bt_reply_xml_cut(&r->xml, &r->arguments);
        put_arguments(r);
    }
    if (r->state == THOUGHTS) {
        put_space(r, r->o.keep_thoughts ? BT_REPLY_TEXT : BT_REPLY_REASONING);
    } else if (r->calls == 0) {
        put_space(r, BT_REPLY_TEXT);
    }
    if (r->state == TEXT && r->thoughts_end == NO_END) {
        r->thoughts_end = 0;
    }
    flush(r);
}

uint32_t bt_reply_calls(const struct bt_reply *r)
{
    return r->o.one_call ? BT_MIN(r->calls, 1u) : r->calls;
}

uint64_t bt_reply_thoughts_end(const struct bt_reply *r)
{
    return r->thoughts_end;
}

size_t bt_reply_held(const struct bt_reply *r)
{
    return sizeof(*r) + r->marks.cap + r->in.cap + r->space.cap + r->raw.cap + r->name.cap +
           r->arguments.cap + r->out.cap + r->xml.name.cap + r->xml.key.cap + r->xml.value.cap;
}
