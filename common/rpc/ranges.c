/* Unpacks messages with limited memory, and checks their fields with the help of protobuf-c's
 * descriptors. The tables are matched to the descriptors once, on first use. Any thread. */
#include "common/rpc/ranges.h"

#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "common/rpc/pb.h"

/* Limit of memory for each byte of a message. An empty message of 2 bytes needs about 100 bytes in
 * protobuf-c, including its memory while unpacking. Real messages need less than 16 for each byte:
 * lists of small numbers 4, a FlowHas 12. */
#define GROWTH_MAX 24
#define GROWTH_MIN (64u << 10)
#define BYTES_MAX  (64u << 20)

#define MESSAGES_MAX 256 /* at most half of them are used; a power of two */
#define DEPTH_MAX    8

/* The address of the member's name; it compiles only if the message has such a member. */
#define FIELD_OF(type, m, f) .message = &#m[0 * sizeof(((type *)NULL)->f)], .field = #f
#define FIELD(m, f)          FIELD_OF(Baton__##m, m, f)
#define ANY(m, f)            {FIELD(m, f), .kind = BT_RANGE_ANY},
#define NUMBERS(m, f, count, lo, hi)                                                               \
    {FIELD(m, f), .kind = BT_RANGE_NUMBER, .min = (lo), .max = (hi), .count_max = (count)},
#define NUMBER(m, f, lo, hi) NUMBERS(m, f, 0, lo, hi)
#define REALS(m, f, count, lo, hi)                                                                 \
    {FIELD(m, f), .kind = BT_RANGE_REAL, .real_min = (lo), .real_max = (hi), .count_max = (count)},
#define REAL(m, f, lo, hi) REALS(m, f, 0, lo, hi)
#define LENGTHS(m, f, count, lo, hi, of)                                                           \
    {FIELD(m, f),  .kind = BT_RANGE_LENGTH, .min = (lo), .max = (hi),                              \
     .unit = (of), .count_max = (count)},
#define LENGTH(m, f, lo, hi, of) LENGTHS(m, f, 0, lo, hi, of)
#define MESSAGES(m, f, count)    {FIELD(m, f), .kind = BT_RANGE_MESSAGES, .count_max = (count)},

static const struct bt_range table[] = {
#include "common/rpc/admin.def"
#include "common/rpc/cluster.def"
#include "common/rpc/local.def"
#include "common/rpc/peer.def"
#include "common/rpc/session.def"
#undef FIELD
#define FIELD(m, f) FIELD_OF(Etcdserverpb__##m, m, f)
#include "common/rpc/etcd.def"
};

#define ROOT(name, type, of) &of##__descriptor,
static const ProtobufCMessageDescriptor *const roots[] = {BT_RANGE_ROOTS(ROOT)};

/* ---- the tables, matched to the descriptors ---- */

struct joined {
    const ProtobufCMessageDescriptor *message;
    const struct bt_range **ranges; /* [field] */
};

/* A hash table by the descriptor's address, with linear probing. */
static struct joined joined[MESSAGES_MAX];
static uint32_t n_joined;
static pthread_once_t once = PTHREAD_ONCE_INIT;

const ProtobufCMessageDescriptor *bt_range_root(size_t i)
{
    return i < BT_ARRAY_LEN(roots) ? roots[i] : NULL;
}

const struct bt_range *bt_range_of(const ProtobufCMessageDescriptor *message, const char *field)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(table); i++) {
        if (strcmp(table[i].message, message->short_name) == 0 &&
            strcasecmp(table[i].field, field) == 0) { /* etcd's names are in small letters in C */
            return &table[i];
        }
    }
    return NULL;
}

/* The message's entry, or the free one for it. */
static struct joined *place_of(const ProtobufCMessageDescriptor *message)
{
    size_t i = (uintptr_t)message / sizeof(*message);
    while (joined[i % MESSAGES_MAX].message != NULL &&
           joined[i % MESSAGES_MAX].message != message) {
        i++;
    }
    return &joined[i % MESSAGES_MAX];
}

static const struct bt_range **ranges_of(const ProtobufCMessageDescriptor *message)
{
    return place_of(message)->ranges;
}

static void join(const ProtobufCMessageDescriptor *message)
{
    struct joined *j = place_of(message);
    if (j->message != NULL) {
        return;
    }
    BT_ASSERT(++n_joined <= MESSAGES_MAX / 2);
    j->message = message;
    j->ranges = bt_calloc(message->n_fields + 1, sizeof(struct bt_range *));
    for (unsigned i = 0; i < message->n_fields; i++) {
        j->ranges[i] = bt_range_of(message, message->fields[i].name);
    }
    for (unsigned i = 0; i < message->n_fields; i++) {
        if (message->fields[i].type == PROTOBUF_C_TYPE_MESSAGE) {
            join(message->fields[i].descriptor);
        }
    }
}

static void join_all(void)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(roots); i++) {
        join(roots[i]);
    }
}

/* ---- one field ---- */

struct walk {
    char *text;
    size_t cap;
    uint32_t depth;
};

static bool refuse(const struct walk *w, const ProtobufCMessageDescriptor *m,
                   const ProtobufCFieldDescriptor *f, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
static bool refuse(const struct walk *w, const ProtobufCMessageDescriptor *m,
                   const ProtobufCFieldDescriptor *f, const char *fmt, ...)
{
    char what[160];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof(what), fmt, ap);
    va_end(ap);
    snprintf(w->text, w->cap, "%s.%s %s", m->short_name, f->name, what);
    return false;
}

static bool is_signed(ProtobufCType t)
{
    return t == PROTOBUF_C_TYPE_INT32 || t == PROTOBUF_C_TYPE_SINT32 ||
           t == PROTOBUF_C_TYPE_SFIXED32 || t == PROTOBUF_C_TYPE_INT64 ||
           t == PROTOBUF_C_TYPE_SINT64 || t == PROTOBUF_C_TYPE_SFIXED64 ||
           t == PROTOBUF_C_TYPE_ENUM;
}

static bool check_number(const struct walk *w, const ProtobufCMessageDescriptor *m,
                         const ProtobufCFieldDescriptor *f, const struct bt_range *r, const void *v)
{
    bool small = bt_pb_size(f->type) == 4;
    if (is_signed(f->type)) {
        int64_t x = small ? *(const int32_t *)v : *(const int64_t *)v;
        return (x >= r->min && (x < 0 || (uint64_t)x <= r->max)) ||
               refuse(w, m, f, "is %lld, allowed are %lld to %llu", (long long)x, (long long)r->min,
                      (unsigned long long)r->max);
    }
    uint64_t x = small ? *(const uint32_t *)v : *(const uint64_t *)v;
    return ((r->min <= 0 || x >= (uint64_t)r->min) && x <= r->max) ||
           refuse(w, m, f, "is %llu, allowed are %lld to %llu", (unsigned long long)x,
                  (long long)r->min, (unsigned long long)r->max);
}

static bool check_real(const struct walk *w, const ProtobufCMessageDescriptor *m,
                       const ProtobufCFieldDescriptor *f, const struct bt_range *r, const void *v)
{
    double x = f->type == PROTOBUF_C_TYPE_FLOAT ? (double)*(const float *)v : *(const double *)v;
    return (x >= r->real_min && x <= r->real_max) ||
           refuse(w, m, f, "is %g, allowed are %g to %g", x, r->real_min, r->real_max);
}

static bool check_length(const struct walk *w, const ProtobufCMessageDescriptor *m,
                         const ProtobufCFieldDescriptor *f, const struct bt_range *r, const void *v)
{
    size_t n;
    if (f->type == PROTOBUF_C_TYPE_BYTES) {
        n = ((const ProtobufCBinaryData *)v)->len;
    } else {
        const char *s = *(const char *const *)v;
        n = s != NULL ? strlen(s) : 0;
    }
    return (n >= (uint64_t)r->min && n <= r->max && n % r->unit == 0) ||
           refuse(w, m, f, "has %zu bytes, allowed are %lld to %llu, in multiples of %u", n,
                  (long long)r->min, (unsigned long long)r->max, r->unit);
}

static bool check_message(const struct walk *w, const ProtobufCMessage *msg);

static bool check_value(const struct walk *w, const ProtobufCMessageDescriptor *m,
                        const ProtobufCFieldDescriptor *f, const struct bt_range *r, const void *v)
{
    switch (r->kind) {
    case BT_RANGE_NUMBER: return check_number(w, m, f, r, v);
    case BT_RANGE_REAL: return check_real(w, m, f, r, v);
    case BT_RANGE_LENGTH: return check_length(w, m, f, r, v);
    case BT_RANGE_MESSAGES: return check_message(w, *(ProtobufCMessage *const *)v);
    case BT_RANGE_ANY: break;
    }
    return true;
}

static bool check_field(const struct walk *w, const ProtobufCMessage *msg,
                        const ProtobufCFieldDescriptor *f, const struct bt_range *r)
{
    const ProtobufCMessageDescriptor *m = msg->descriptor;
    const uint8_t *base = (const uint8_t *)msg;
    bool message = f->type == PROTOBUF_C_TYPE_MESSAGE;
    if ((f->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) != 0 &&
        *(const uint32_t *)(const void *)(base + f->quantifier_offset) != f->id) {
        return true; /* the oneof's memory belongs to another field */
    }
    if (message && f->label != PROTOBUF_C_LABEL_REPEATED) {
        const ProtobufCMessage *sub = *(ProtobufCMessage *const *)(const void *)(base + f->offset);
        return sub == NULL || check_message(w, sub);
    }
    if (r == NULL) {
        return refuse(w, m, f, "has no range in common/rpc");
    }
    if (f->label != PROTOBUF_C_LABEL_REPEATED) {
        return check_value(w, m, f, r, base + f->offset);
    }
    size_t n = *(const size_t *)(const void *)(base + f->quantifier_offset);
    const uint8_t *v = *(const uint8_t *const *)(const void *)(base + f->offset);
    if (n > r->count_max) {
        return refuse(w, m, f, "has %zu entries, allowed are %u", n, r->count_max);
    }
    for (size_t i = 0; i < n; i++) {
        if (!check_value(w, m, f, r, v + i * bt_pb_size(f->type))) {
            return false;
        }
    }
    return true;
}

static bool check_message(const struct walk *w, const ProtobufCMessage *msg)
{
    struct walk inner = {.text = w->text, .cap = w->cap, .depth = w->depth + 1};
    const ProtobufCMessageDescriptor *m = msg->descriptor;
    const struct bt_range **ranges = ranges_of(m);
    if (ranges == NULL || inner.depth > DEPTH_MAX) {
        snprintf(w->text, w->cap, "%s is not expected here", m->short_name);
        return false;
    }
    for (unsigned i = 0; i < m->n_fields; i++) {
        if (!check_field(&inner, msg, &m->fields[i], ranges[i])) {
            return false;
        }
    }
    return true;
}

static bt_status_t check(const ProtobufCMessage *msg, char *text, size_t cap)
{
    struct walk w = {.text = text, .cap = cap};
    BT_ASSERT(pthread_once(&once, join_all) == 0);
    return check_message(&w, msg) ? BT_OK : BT_ERR_PEER_PROTOCOL;
}

/* ---- unpacking ---- */

struct budget {
    size_t left;
    bool over;
};

static void *take(void *arg, size_t n)
{
    struct budget *b = arg;
    if (n > b->left) {
        b->over = true;
        return NULL; /* protobuf-c stops, and frees what it has made */
    }
    b->left -= n;
    return bt_malloc(BT_MAX(n, (size_t)1));
}

static void give(void *arg, void *p)
{
    (void)arg;
    free(p);
}

ProtobufCMessage *bt_message_unpack(const ProtobufCMessageDescriptor *d, const void *data,
                                    size_t len, char *text, size_t cap)
{
    size_t most = len < BYTES_MAX / GROWTH_MAX ? GROWTH_MIN + GROWTH_MAX * len : BYTES_MAX;
    struct budget b = {.left = most};
    ProtobufCAllocator a = {.alloc = take, .free = give, .allocator_data = &b};
    ProtobufCMessage *m = protobuf_c_message_unpack(d, &a, len, data);
    if (m == NULL) {
        snprintf(text, cap,
                 b.over ? "%s of %zu bytes would take more than %zu bytes of memory"
                        : "%s of %zu bytes cannot be unpacked",
                 d->short_name, len, most);
        return NULL;
    }
    if (check(m, text, cap) != BT_OK) {
        protobuf_c_message_free_unpacked(m, NULL);
        return NULL;
    }
    bt_pb_forget_unknown(m); /* parts of the message are packed again and stored */
    return m;
}

void *bt_message_copy(const ProtobufCMessage *m)
{
    size_t len = protobuf_c_message_get_packed_size(m);
    uint8_t *bytes = bt_malloc(len + 1);
    protobuf_c_message_pack(m, bytes);
    ProtobufCMessage *copy = protobuf_c_message_unpack(m->descriptor, NULL, len, bytes);
    free(bytes);
    BT_ASSERT(copy != NULL);
    return copy;
}

/* ---- by protocol ---- */

#define UNPACK(name, type, of)                                                                     \
    type *bt_##name##_unpack(const void *data, size_t len, char *text, size_t cap)                 \
    {                                                                                              \
        return (type *)(void *)bt_message_unpack(&of##__descriptor, data, len, text, cap);         \
    }
BT_RANGE_ROOTS(UNPACK)

bt_status_t bt_message_check(const ProtobufCMessage *m, char *text, size_t cap)
{
    return check(m, text, cap);
}
