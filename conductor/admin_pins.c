/* Pins of the Admin service; see admin_pins.h. A prompt is tokenized like a request's prompt, and
 * its whole blocks get the keys that the request machine would give them. The table of pins writes
 * them to etcd. Loop thread. */
#include "conductor/admin_pins.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "admin.pb-c.h"
#include "common/rpc/pb.h"
#include "common/rpc/ranges.h"
#include "conductor/request/inspect.h"

#define TTL_MIN_MS 1000ull
#define TTL_MAX_MS (366ull * 24 * 3600 * 1000)
#define NAME_BYTES 64 /* of a label, of a tenant */

struct bt_admin_pins {
    struct bt_admin_pins_config c;
};

struct pin_call { /* waits for the tokenizer, then for etcd */
    struct bt_admin_pins *a;
    struct bt_rpc_call *call;
    Baton__AdminPinRequest *q; /* NULL: an unpin */
    char *tenant;              /* whose prompt it is; NULL: of all tenants */
};

static void refuse(struct bt_rpc_call *call, int code, const char *why)
{
    bt_rpc_call_reply(call, code, why, NULL, 0);
}

/* ---- answers ---- */

struct pin_reply {
    Baton__AdminPin m;
    char id[17];
    Baton__AdminPinAt *at;
    Baton__AdminPinAt **list;
};

static const Baton__PinState *state_of(const struct bt_session *s, uint64_t id)
{
    for (size_t i = 0; s->pins != NULL && i < s->pins->n_pins; i++) {
        if (s->pins->pins[i]->id == id) {
            return s->pins->pins[i];
        }
    }
    return NULL;
}

static void fill(const struct bt_admin_pins *a, const struct bt_pin_info *x, struct pin_reply *r)
{
    struct bt_list *l;
    size_t n = 0;
    baton__admin_pin__init(&r->m);
    snprintf(r->id, sizeof(r->id), "%016" PRIx64, x->pin->id);
    r->m.id = r->id;
    r->m.label = x->pin->label;
    r->m.tenant = x->pin->tenant;
    r->m.tokens = x->pin->tokens;
    r->m.blocks = x->blocks;
    r->m.created_ns = x->pin->created_ns;
    r->m.left_ms = x->left_ms;
    r->m.renewed = x->renewed;
    bt_list_for_each (l, bt_view_sessions(a->c.view)) {
        n += state_of(BT_CONTAINER_OF(l, struct bt_session, link), x->pin->id) != NULL;
    }
    r->at = bt_calloc(n + 1, sizeof(*r->at));
    r->m.at = r->list = bt_calloc(n + 1, sizeof(Baton__AdminPinAt *));
    bt_list_for_each (l, bt_view_sessions(a->c.view)) {
        const struct bt_session *s = BT_CONTAINER_OF(l, struct bt_session, link);
        const Baton__PinState *state = state_of(s, x->pin->id);
        if (state != NULL) {
            Baton__AdminPinAt *at = r->list[r->m.n_at] = &r->at[r->m.n_at];
            baton__admin_pin_at__init(at);
            at->kvstore = s->member->name;
            at->state = (Baton__PinState *)state;
            r->m.n_at++;
        }
    }
}

static void reply_cleanup(struct pin_reply *r)
{
    free(r->at);
    free(r->list);
}

static void call_free(struct pin_call *p)
{
    if (p->q != NULL) {
        baton__admin_pin_request__free_unpacked(p->q, NULL);
    }
    free(p->tenant);
    free(p);
}

static void on_written(void *arg, bt_status_t st, const struct bt_pin_info *x, const char *why)
{
    struct pin_call *p = arg;
    if (st != BT_OK) {
        refuse(p->call, st == BT_ERR_NOT_FOUND ? BT_GRPC_NOT_FOUND : BT_GRPC_FAILED_PRECONDITION,
               why);
    } else {
        struct pin_reply r = {0};
        fill(p->a, x, &r);
        bt_rpc_call_reply_pb(p->call, &r.m.base);
        reply_cleanup(&r);
    }
    call_free(p);
}

/* ---- pin ---- */

static void pin(struct pin_call *p, const struct bt_kv_key *keys, uint32_t n, uint32_t tokens,
                const char *tenant)
{
    if (n == 0) {
        char why[200];
        snprintf(why, sizeof(why),
                 "the prompt has %u tokens, less than one block of %u (kv.block_tokens): nothing "
                 "of it is ever cached, so there is nothing to pin",
                 tokens, p->a->c.block_tokens);
        refuse(p->call, BT_GRPC_INVALID_ARGUMENT, why);
        call_free(p);
        return;
    }
    struct bt_pin_spec spec = {.keys = keys,
                               .n = n,
                               .tokens = tokens,
                               .ttl_ms = p->q->ttl_ms,
                               .label = p->q->label,
                               .tenant = tenant};
    bt_pin_table_pin(p->a->c.pins, &spec, on_written, p);
}

static void on_tokens(void *arg, const struct bt_tokens *ids, const char *why)
{
    struct pin_call *p = arg;
    const struct bt_admin_pins_config *c = &p->a->c;
    if (ids == NULL) {
        refuse(p->call, BT_GRPC_INVALID_ARGUMENT, why);
        call_free(p);
        return;
    }
    const char *tenant = p->tenant;
    const char *salt = p->q->cache_salt[0] != '\0' ? p->q->cache_salt : NULL;
    struct bt_kv_key root = c->root;
    if (tenant != NULL || salt != NULL) {
        bt_requests_salted_root(&c->root, c->secret, c->secret_len, tenant, salt, &root);
    }
    uint32_t n = (uint32_t)(ids->n / c->block_tokens);
    struct bt_kv_key *keys = bt_calloc(n + 1, sizeof(*keys));
    if (n > 0) {
        (void)bt_kv_keys(&root, ids->ids, (uint32_t)ids->n, c->block_tokens, keys);
    }
    pin(p, keys, n, (uint32_t)ids->n, tenant != NULL ? tenant : "");
    free(keys);
}

static void pin_request(struct pin_call *p)
{
    const struct bt_explanation *e = bt_requests_explain(p->a->c.requests, p->q->request);
    if (e == NULL) {
        char why[320];
        snprintf(why, sizeof(why),
                 "%.100s is not among the last 128 requests that this conductor planned; give the "
                 "\"id\" of the answer and name the conductor that served it with --addr, or pin "
                 "the prompt itself",
                 p->q->request);
        refuse(p->call, BT_GRPC_NOT_FOUND, why);
        call_free(p);
        return;
    }
    pin(p, e->keys, e->n_keys, e->prompt_tokens, e->tenant);
}

/* NULL: it can be tried. text: for a reason with numbers. */
static const char *fault(const struct bt_admin_pins *a, const Baton__AdminPinRequest *q, char *text,
                         size_t cap)
{
    if (q->ttl_ms < TTL_MIN_MS || q->ttl_ms > TTL_MAX_MS) {
        return "a pin needs a time to live from 1s to 366d (--ttl); pin again to renew it";
    }
    if (strlen(q->label) > NAME_BYTES || strlen(q->tenant) > NAME_BYTES) {
        snprintf(text, cap, "the label or the tenant is longer than %d bytes", NAME_BYTES);
        return text;
    }
    if (strlen(q->cache_salt) > BT_GEN_SALT_BYTES_MAX) {
        snprintf(text, cap, "the cache salt is longer than %d bytes (--cache-salt)",
                 BT_GEN_SALT_BYTES_MAX);
        return text;
    }
    for (const char *c = q->label; *c != '\0'; c++) {
        if ((unsigned char)*c < 0x20 || *c == 0x7f) { /* labels are shown on terminals */
            return "the label has a control character; give one line of text (--label)";
        }
    }
    if ((q->body.len == 0) == (q->request[0] == '\0')) {
        return "say what to pin: either a prompt or the id of a request";
    }
    if (q->request[0] != '\0' && (q->tenant[0] != '\0' || q->cache_salt[0] != '\0')) {
        return "--request already determines the tenant and the cache salt; leave out --tenant, "
               "--api-key-file and --cache-salt";
    }
    if (q->body.len != 0 && q->tenant[0] == '\0' && bt_front_has_keys(a->c.front)) {
        return "this cluster keeps a separate cache for each tenant (conductor.api_keys_file); "
               "name the tenant with --api-key-file or --tenant, or pin a --request";
    }
    if (q->tenant[0] != '\0' && bt_front_tenant(a->c.front, q->tenant) == NULL) {
        return "no API key of this cluster belongs to that tenant; give a tenant= of "
               "conductor.api_keys_file";
    }
    return NULL;
}

static void on_pin(void *arg, struct bt_rpc_call *call, const void *data, size_t len)
{
    struct bt_admin_pins *a = arg;
    char text[256];
    Baton__AdminPinRequest *q = bt_admin_pin_request_unpack(data, len, text, sizeof(text));
    const char *why = q != NULL ? fault(a, q, text, sizeof(text)) : text;
    if (q != NULL) {
        bt_admin_gate_target(call, "%s%s tenant=%s ttl_ms=%" PRIu64 " label=%s",
                             q->request[0] != '\0' ? "request=" : "prompt", q->request, q->tenant,
                             q->ttl_ms, q->label);
    }
    if (why != NULL) {
        refuse(call, BT_GRPC_INVALID_ARGUMENT, why);
        if (q != NULL) {
            baton__admin_pin_request__free_unpacked(q, NULL);
        }
        return;
    }
    struct pin_call *p = bt_calloc(1, sizeof(*p));
    p->a = a;
    p->call = call;
    p->q = q;
    p->tenant = q->tenant[0] != '\0' ? bt_strdup(bt_front_tenant(a->c.front, q->tenant)) : NULL;
    if (q->request[0] != '\0') {
        pin_request(p);
    } else {
        bt_front_tokens(a->c.front, q->body.data, q->body.len, on_tokens, p);
    }
}

/* ---- unpin and pins ---- */

static void on_unpin(void *arg, struct bt_rpc_call *call, const void *data, size_t len)
{
    struct bt_admin_pins *a = arg;
    char why[256];
    Baton__AdminUnpinRequest *q = bt_admin_unpin_request_unpack(data, len, why, sizeof(why));
    char *end = NULL;
    uint64_t id = q != NULL ? strtoull(q->id, &end, 16) : 0;
    bt_admin_gate_target(call, "pin=%s", q != NULL ? q->id : "");
    if (q == NULL || strlen(q->id) != 16 || *end != '\0') {
        refuse(call, BT_GRPC_INVALID_ARGUMENT,
               "unpin needs the id of a pin, 16 hex digits as 'batonctl pins' shows them");
    } else {
        struct pin_call *p = bt_calloc(1, sizeof(*p));
        p->a = a;
        p->call = call;
        bt_pin_table_unpin(a->c.pins, id, on_written, p);
    }
    if (q != NULL) {
        baton__admin_unpin_request__free_unpacked(q, NULL);
    }
}

static void on_pins(void *arg, struct bt_rpc_call *call, const void *data, size_t len)
{
    struct bt_admin_pins *a = arg;
    char why[256];
    Baton__AdminPinsRequest *q = bt_admin_pins_request_unpack(data, len, why, sizeof(why));
    if (q == NULL) {
        refuse(call, BT_GRPC_INVALID_ARGUMENT, why);
        return;
    }
    baton__admin_pins_request__free_unpacked(q, NULL);
    Baton__AdminPins m = BATON__ADMIN_PINS__INIT;
    struct bt_pin_info x;
    size_t it = 0, n = 0;
    while (bt_pin_table_next(a->c.pins, &it, &x)) {
        n++;
    }
    struct pin_reply *all = bt_calloc(n + 1, sizeof(*all));
    m.list = bt_calloc(n + 1, sizeof(Baton__AdminPin *));
    m.block_tokens = a->c.block_tokens;
    for (it = 0; m.n_list < n && bt_pin_table_next(a->c.pins, &it, &x);) {
        fill(a, &x, &all[m.n_list]);
        m.list[m.n_list] = &all[m.n_list].m;
        m.n_list++;
    }
    bt_rpc_call_reply_pb(call, &m.base);
    for (size_t i = 0; i < m.n_list; i++) {
        reply_cleanup(&all[i]);
    }
    free(m.list);
    free(all);
}

struct bt_admin_pins *bt_admin_pins_create(struct bt_admin_gate *gate,
                                           const struct bt_admin_pins_config *conf)
{
    struct bt_admin_pins *a = bt_calloc(1, sizeof(*a));
    a->c = *conf;
    bt_admin_gate_serve(gate, "Pin", on_pin, a);
    bt_admin_gate_serve(gate, "Unpin", on_unpin, a);
    bt_admin_gate_serve(gate, "Pins", on_pins, a);
    return a;
}

void bt_admin_pins_destroy(struct bt_admin_pins *a)
{
    free(a);
}
