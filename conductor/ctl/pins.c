/* batonctl pin, unpin, pins. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "admin.pb-c.h"
#include "common/base/buf.h"
#include "common/base/sha256.h"
#include "conductor/ctl/ctl.h"
#include "conductor/ctl/table.h"

#define FILE_BYTES_MAX (8u << 20) /* far below the limit of a gRPC message */

/* ---- options ---- */

/* Reads "90s", "30m", "1h" or "7d". Returns 0 for any other text. */
static uint64_t parse_ttl(const char *text)
{
    static const struct {
        const char *unit;
        uint64_t ms;
    } units[] = {{"ms", 1}, {"s", 1000}, {"m", 60000}, {"h", 3600000}, {"d", 86400000}};
    char *end = NULL;
    double v = text[0] >= '0' && text[0] <= '9' ? strtod(text, &end) : 0;
    for (size_t i = 0; v > 0 && v < 1e6 && i < BT_ARRAY_LEN(units); i++) {
        if (strcmp(end, units[i].unit) == 0) {
            return (uint64_t)(v * (double)units[i].ms);
        }
    }
    return 0;
}

static int sources(const struct bt_ctl *c)
{
    int n = 0;
    for (int i = BT_CTL_PROMPT; i <= BT_CTL_REQUEST; i++) {
        n += c->opt[i] != NULL;
    }
    return n;
}

/* ---- what to pin ---- */

/* Returns a whole file ("-": standard input), with a NUL behind it. NULL: a message was printed. */
static char *read_file(const char *path, size_t *len_p)
{
    bool in = strcmp(path, "-") == 0;
    FILE *f = in ? stdin : fopen(path, "re");
    if (f == NULL) {
        fprintf(stderr, "batonctl: %s: %s\n", path, strerror(errno));
        return NULL;
    }
    char *data = bt_malloc(FILE_BYTES_MAX + 1);
    *len_p = fread(data, 1, FILE_BYTES_MAX + 1, f);
    const char *why = ferror(f) != 0            ? "cannot be read"
                      : *len_p == 0             ? "is empty"
                      : *len_p > FILE_BYTES_MAX ? "is larger than 8 MiB"
                                                : NULL;
    if (!in) {
        (void)fclose(f);
    }
    if (why != NULL) {
        fprintf(stderr, "batonctl: %s %s\n", path, why);
        free(data);
        return NULL;
    }
    data[*len_p] = '\0';
    return data;
}

static json_t *text_body(const char *text, size_t len, const char *from)
{
    json_t *v = json_stringn(text, len);
    if (v == NULL) {
        fprintf(stderr, "batonctl: %s is not UTF-8; token ids go with --tokens-file\n", from);
        return NULL;
    }
    return json_pack("{s:o}", "prompt", v);
}

/* Reads numbers with white space or commas between them, or a JSON array of numbers. */
static json_t *tokens_body(char *text, const char *path)
{
    json_t *ids = json_array();
    char *save = NULL;
    for (char *w = strtok_r(text, " \t\r\n,[]", &save); w != NULL;
         w = strtok_r(NULL, " \t\r\n,[]", &save)) {
        char *end = NULL;
        unsigned long id = w[0] >= '0' && w[0] <= '9' ? strtoul(w, &end, 10) : 0;
        if (end == NULL || *end != '\0' || id > UINT32_MAX) {
            fprintf(stderr, "batonctl: %s: '%.40s' is not a token id\n", path, w);
            json_decref(ids);
            return NULL;
        }
        json_array_append_new(ids, json_integer((json_int_t)id));
    }
    return json_pack("{s:o}", "prompt", ids);
}

/* Reads a request's body, or only its messages. Unless the body says otherwise, the prompt ends
 * behind the last message: the text with which the template begins an answer is not a prefix of a
 * longer conversation. */
static json_t *chat_body(const char *text, size_t len, const char *path)
{
    json_error_t e;
    json_t *v = json_loadb(text, len, 0, &e);
    if (v == NULL) {
        fprintf(stderr, "batonctl: %s: line %d: %s\n", path, e.line, e.text);
        return NULL;
    }
    if (json_is_array(v)) {
        v = json_pack("{s:o}", "messages", v);
    }
    if (!json_is_array(json_object_get(v, "messages"))) {
        fprintf(stderr,
                "batonctl: %s: neither an array of messages nor an object with \"messages\", as of "
                "/v1/chat/completions\n",
                path);
        json_decref(v);
        return NULL;
    }
    json_object_del(v, "model"); /* the cluster serves one model; its name is not part of the
                                  * prompt */
    if (json_object_get(v, "add_generation_prompt") == NULL) {
        json_object_set_new(v, "add_generation_prompt", json_false());
    }
    return v;
}

static json_t *make_body(const struct bt_ctl *c)
{
    const char *prompt = c->opt[BT_CTL_PROMPT], *prompt_file = c->opt[BT_CTL_PROMPT_FILE],
               *tokens_file = c->opt[BT_CTL_TOKENS_FILE];
    const char *path = prompt_file != NULL   ? prompt_file
                       : tokens_file != NULL ? tokens_file
                                             : c->opt[BT_CTL_CHAT_FILE];
    size_t len = 0;
    if (prompt != NULL) {
        return text_body(prompt, strlen(prompt), "--prompt");
    }
    char *text = read_file(path, &len);
    json_t *body = text == NULL          ? NULL
                   : prompt_file != NULL ? text_body(text, len, path)
                   : tokens_file != NULL ? tokens_body(text, path)
                                         : chat_body(text, len, path);
    free(text);
    return body;
}

/* Makes the tenant that a conductor would make of an API key: 32 hex digits. False: a message was
 * printed. */
static bool tenant_of_key(const char *path, char tenant[33])
{
    size_t len = 0;
    uint8_t digest[BT_SHA256_LEN];
    char *text = read_file(path, &len);
    if (text == NULL) {
        return false;
    }
    size_t from = strspn(text, " \t\r\n"), n = strcspn(text + from, " \t\r\n");
    bt_sha256(text + from, n, digest);
    bt_hex(digest, 16, tenant);
    explicit_bzero(text, len);
    free(text);
    if (n == 0) {
        fprintf(stderr, "batonctl: %s contains no key\n", path);
    }
    return n > 0;
}

/* ---- output ---- */

static void time_text(uint64_t s, char *out, size_t cap)
{
    if (s >= 172800) {
        snprintf(out, cap, "%" PRIu64 "d%" PRIu64 "h", s / 86400, s % 86400 / 3600);
    } else if (s >= 3600) {
        snprintf(out, cap, "%" PRIu64 "h%02" PRIu64 "m", s / 3600, s % 3600 / 60);
    } else if (s >= 60) {
        snprintf(out, cap, "%" PRIu64 "m%02" PRIu64 "s", s / 60, s % 60);
    } else {
        snprintf(out, cap, "%" PRIu64 "s", s);
    }
}

static json_t *pin_json(const Baton__AdminPin *p)
{
    json_t *at = json_array();
    char expires[32] = "";
    time_t t = (time_t)(bt_real_ns() / 1000000000 + p->left_ms / 1000);
    struct tm tm;
    (void)strftime(expires, sizeof(expires), "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&t, &tm));
    for (size_t i = 0; i < p->n_at; i++) {
        const Baton__PinState *s = p->at[i]->state;
        json_array_append_new(at, json_pack("{s:s,s:I,s:I,s:I,s:I}", "kvstore", p->at[i]->kvstore,
                                            "slab_blocks", (json_int_t)s->slab_blocks, "ssd_blocks",
                                            (json_int_t)s->ssd_blocks, "slab_beyond",
                                            (json_int_t)s->slab_beyond, "ssd_beyond",
                                            (json_int_t)s->ssd_beyond));
    }
    return json_pack("{s:s,s:s,s:s,s:I,s:I,s:s,s:I,s:o}", "id", p->id, "label", p->label, "tenant",
                     p->tenant, "tokens", (json_int_t)p->tokens, "blocks", (json_int_t)p->blocks,
                     "expires", expires, "seconds_left", (json_int_t)(p->left_ms / 1000), "at", at);
}

static void at_text(const Baton__AdminPin *p, char *out, size_t cap)
{
    size_t used = 0;
    out[0] = '\0';
    for (size_t i = 0; i < p->n_at && used < cap; i++) {
        const Baton__PinState *s = p->at[i]->state;
        used += (size_t)snprintf(out + used, cap - used, "%s%s: slab %u", i != 0 ? "; " : "",
                                 p->at[i]->kvstore, s->slab_blocks);
        if (used < cap && s->ssd_blocks + s->ssd_beyond > 0) {
            used += (size_t)snprintf(out + used, cap - used, ", ssd %u", s->ssd_blocks);
        }
        if (used < cap && s->slab_beyond + s->ssd_beyond > 0) {
            used += (size_t)snprintf(out + used, cap - used, ", beyond pin_max %u+%u",
                                     s->slab_beyond, s->ssd_beyond);
        }
    }
    if (p->n_at == 0) {
        snprintf(out, cap, "not cached anywhere yet");
    }
}

static int pins_table(const struct bt_ctl *c, const Baton__AdminPins *a)
{
    static const char *const head[] = {"ID",     "LABEL", "TENANT",   "TOKENS",
                                       "BLOCKS", "LEFT",  "PROTECTED"};
    struct bt_ctl_table t;
    bt_ctl_table_init(&t, head, BT_ARRAY_LEN(head));
    for (size_t i = 0; i < a->n_list; i++) {
        const Baton__AdminPin *p = a->list[i];
        char left[32], at[1024];
        time_text(p->left_ms / 1000, left, sizeof(left));
        at_text(p, at, sizeof(at));
        bt_ctl_table_cell(&t, "%s", p->id);
        bt_ctl_table_cell(&t, "%s", p->label[0] != '\0' ? p->label : "-");
        bt_ctl_table_cell(&t, "%s", p->tenant[0] != '\0' ? p->tenant : "-");
        bt_ctl_table_cell(&t, "%u", p->tokens);
        bt_ctl_table_cell(&t, "%u", p->blocks);
        bt_ctl_table_cell(&t, "%s", left);
        bt_ctl_table_cell(&t, "%s", at);
    }
    int rc = bt_ctl_print_table(c, &t);
    return rc;
}

/* Prints and frees the reply to a pin or an unpin. NULL: the error was printed before. */
static int show(const struct bt_ctl *c, Baton__AdminPin *p, bool unpinned)
{
    if (p == NULL) {
        return 1;
    }
    int rc = 0;
    if (c->json) {
        json_t *j = pin_json(p);
        json_object_set_new(j, unpinned ? "unpinned" : "renewed",
                            json_boolean(unpinned || p->renewed));
        rc = bt_ctl_print_json(j);
    } else if (unpinned) {
        printf("unpinned %s: its %u blocks can be evicted\n", p->id, p->blocks);
    } else {
        char left[32];
        time_text((p->left_ms + 500) / 1000, left, sizeof(left));
        printf("%s %s: %u blocks of a prompt of %u tokens, for %s\n",
               p->renewed ? "renewed" : "pinned", p->id, p->blocks, p->tokens, left);
    }
    baton__admin_pin__free_unpacked(p, NULL);
    return rc;
}

/* ---- commands ---- */

int bt_ctl_pin(const struct bt_ctl *c)
{
    const char *ttl = c->opt[BT_CTL_TTL], *named = c->opt[BT_CTL_TENANT],
               *key_file = c->opt[BT_CTL_API_KEY_FILE], *label = c->opt[BT_CTL_LABEL],
               *salt = c->opt[BT_CTL_CACHE_SALT], *request = c->opt[BT_CTL_REQUEST];
    Baton__AdminPinRequest q = BATON__ADMIN_PIN_REQUEST__INIT;
    char tenant[33] = "";
    if (sources(c) != 1) {
        return bt_ctl_usage(
            "pin needs one of --prompt, --prompt-file, --tokens-file, --chat-file, --request",
            NULL);
    }
    if (ttl == NULL || (q.ttl_ms = parse_ttl(ttl)) == 0) {
        return bt_ctl_usage("pin needs --ttl with a time such as 90s, 30m, 1h or 7d", ttl);
    }
    if (named != NULL && key_file != NULL) {
        return bt_ctl_usage("--tenant and --api-key-file both name the tenant; give one of them",
                            NULL);
    }
    if (key_file != NULL && !tenant_of_key(key_file, tenant)) {
        return 1;
    }
    char *text = NULL;
    if (request == NULL) {
        json_t *body = make_body(c);
        if (body == NULL) {
            return 1;
        }
        text = json_dumps(body, JSON_COMPACT);
        json_decref(body);
        q.body.data = (uint8_t *)text;
        q.body.len = strlen(text);
    } else {
        q.request = (char *)request;
    }
    q.label = (char *)(label != NULL ? label : "");
    q.tenant = (char *)(named != NULL ? named : tenant);
    q.cache_salt = (char *)(salt != NULL ? salt : "");
    Baton__AdminPin *p = bt_ctl_ask(c, "/baton.Admin/Pin", &q.base, &baton__admin_pin__descriptor);
    free(text);
    return show(c, p, false);
}

int bt_ctl_unpin(const struct bt_ctl *c)
{
    Baton__AdminUnpinRequest q = BATON__ADMIN_UNPIN_REQUEST__INIT;
    q.id = (char *)c->arg;
    return show(c, bt_ctl_ask(c, "/baton.Admin/Unpin", &q.base, &baton__admin_pin__descriptor),
                true);
}

int bt_ctl_pins(const struct bt_ctl *c)
{
    Baton__AdminPinsRequest q = BATON__ADMIN_PINS_REQUEST__INIT;
    Baton__AdminPins *a =
        bt_ctl_ask(c, "/baton.Admin/Pins", &q.base, &baton__admin_pins__descriptor);
    if (a == NULL) {
        return 1;
    }
    int rc = 0;
    if (c->json) {
        json_t *list = json_array();
        for (size_t i = 0; i < a->n_list; i++) {
            json_array_append_new(list, pin_json(a->list[i]));
        }
        rc = bt_ctl_print_json(list);
    } else if (a->n_list == 0) {
        printf("nothing is pinned\n");
    } else {
        rc = pins_table(c, a);
    }
    baton__admin_pins__free_unpacked(a, NULL);
    return rc;
}
