/* The reference of the API; see front_reference.h. Pure. */
#include "conductor/front/front_reference.h"

#include <stdio.h>
#include <string.h>

#include "conductor/front/front_fields.h"
#include "conductor/front/front_json.h"

/* Routes whose fields stand in one list. */
#define BODIES (FRONT_COMPLETION | FRONT_CHAT | FRONT_TOKENIZE | FRONT_DETOKENIZE)

static const char *const answers[] = {
    [FRONT_USED] = "supported", [FRONT_HARMLESS] = "no effect", [FRONT_REFUSED] = "refused"};

/* ---- words about a field ---- */

static void put_schema_words(struct bt_buf *out, const json_t *schema)
{
    const json_t *type = json_object_get(schema, "type"), *any = json_object_get(schema, "anyOf");
    size_t n = BT_MAX(json_array_size(type), json_array_size(any));
    if (json_object_get(schema, "$ref") != NULL) {
        bt_buf_puts(out, "object");
    } else if (json_is_string(type) && strcmp(json_string_value(type), "array") == 0) {
        const json_t *items = json_object_get(schema, "items");
        const char *of = json_string_value(json_object_get(items, "type"));
        bt_buf_printf(out, "list of %ss",
                      of == NULL                 ? "object"
                      : strcmp(of, "array") == 0 ? "list"
                                                 : of);
    } else if (json_is_string(type)) {
        bt_buf_puts(out, json_string_value(type));
    }
    for (size_t i = 0; i < n; i++) {
        bt_buf_puts(out, i > 0 ? " or " : "");
        if (any != NULL) {
            put_schema_words(out, json_array_get(any, i));
        } else {
            bt_buf_puts(out, json_string_value(json_array_get(type, i)));
        }
    }
}

/* Appends the type of a supported field: "list of integers". */
static void put_type(struct bt_buf *out, const struct bt_front_field *f)
{
    char text[768];
    snprintf(text, sizeof(text), "{%s}", f->schema);
    json_t *schema = json_loads(text, 0, NULL);
    BT_ASSERT(schema != NULL); /* the table has only complete schemas */
    put_schema_words(out, schema);
    json_decref(schema);
}

static bool same_text(const char *a, const char *b)
{
    return a == b || (a != NULL && b != NULL && strcmp(a, b) == 0);
}

/* Do two fields share a line of the list about these objects? They are of the same objects and have
 * the same answer, type and text. */
static bool same_line(const struct bt_front_field *a, const struct bt_front_field *b, uint64_t of)
{
    return a->answer == b->answer && (a->objects & of) == (b->objects & of) &&
           strcmp(a->why, b->why) == 0 && same_text(a->schema, b->schema) &&
           same_text(bt_front_field_neutral(a), bt_front_field_neutral(b));
}

/* Appends the names of all fields in the line of field i. False: an earlier field's line has
 * them. */
static bool put_names(struct bt_buf *out, size_t i, uint64_t of)
{
    const struct bt_front_field *f = bt_front_field_at(i), *o;
    for (size_t k = 0; k < i; k++) {
        if (same_line(bt_front_field_at(k), f, of)) {
            return false;
        }
    }
    bt_buf_printf(out, "`%s`", f->name);
    for (size_t k = i + 1; (o = bt_front_field_at(k)) != NULL; k++) {
        if (same_line(f, o, of)) {
            bt_buf_printf(out, ", `%s`", o->name);
        }
    }
    return true;
}

/* Appends the routes of a field of BODIES; nothing for a field of completions and chat. */
static void put_routes_of(struct bt_buf *out, const struct bt_front_field *f)
{
    static const struct {
        uint64_t kind;
        const char *name;
    } names[] = {{FRONT_COMPLETION, "completions"},
                 {FRONT_CHAT, "chat"},
                 {FRONT_TOKENIZE, "tokenize"},
                 {FRONT_DETOKENIZE, "detokenize"}};
    const char *before = "";
    if ((f->objects & BODIES) == (FRONT_COMPLETION | FRONT_CHAT)) {
        return;
    }
    for (size_t k = 0; k < BT_ARRAY_LEN(names); k++) {
        if (f->objects & names[k].kind) {
            bt_buf_printf(out, "%s%s", before, names[k].name);
            before = ", ";
        }
    }
}

/* Appends what the server does with the field, and the accepted values of a refused field. */
static void put_why(struct bt_buf *out, const struct bt_front_field *f)
{
    const char *neutral = bt_front_field_neutral(f);
    bt_buf_printf(out, "%s%s%s", f->why, neutral != NULL ? "; accepted: " : "",
                  neutral != NULL ? neutral : "");
}

/* ---- lists, as Markdown and as rows of a page ---- */

struct line { /* of a list of fields */
    struct bt_buf names, notes, why;
    enum bt_front_use answer;
};

static void line_init(struct line *l)
{
    bt_buf_init(&l->names);
    bt_buf_init(&l->notes);
    bt_buf_init(&l->why);
}

static void line_cleanup(struct line *l)
{
    bt_buf_cleanup(&l->names);
    bt_buf_cleanup(&l->notes);
    bt_buf_cleanup(&l->why);
}

/* Fills the line that begins with field i. False: field i is not of these objects, or in an earlier
 * line. */
static bool take_line(struct line *l, size_t i, uint64_t of)
{
    const struct bt_front_field *f = bt_front_field_at(i);
    bt_buf_clear(&l->names);
    bt_buf_clear(&l->notes);
    bt_buf_clear(&l->why);
    if ((f->objects & of) == 0 || !put_names(&l->names, i, of)) {
        return false;
    }
    l->answer = f->answer;
    if (f->answer == FRONT_USED) {
        put_type(&l->notes, f);
    }
    struct bt_buf routes;
    bt_buf_init(&routes);
    if (of == BODIES) {
        put_routes_of(&routes, f);
    }
    bt_buf_printf(&l->notes, "%s%s", l->notes.len > 0 && routes.len > 0 ? "; " : "",
                  routes.len > 0 ? routes.data : "");
    bt_buf_cleanup(&routes);
    put_why(&l->why, f);
    return true;
}

static void markdown_line(struct bt_buf *out, const struct line *l, bool with_answer)
{
    bt_buf_printf(out, "- %s", l->names.data);
    const char *answer = with_answer && l->answer != FRONT_USED ? answers[l->answer] : "";
    if (l->notes.len > 0 || answer[0] != '\0') {
        bt_buf_printf(out, " (%s%s)", l->notes.len > 0 ? l->notes.data : "", answer);
    }
    bt_buf_printf(out, ": %s\n", l->why.data);
}

static const char *key_note(const struct bt_front_route *r)
{
    return r->scope == 0                 ? " (needs no key)"
           : r->scope == BT_KEYS_METRICS ? " (needs the scope metrics)"
           : r->scope == BT_KEYS_ADMIN   ? " (needs the scope admin)"
                                         : "";
}

static void markdown_routes(const struct bt_front_route *routes, size_t n, struct bt_buf *out)
{
    bt_buf_puts(out, "## Endpoints\n\n");
    for (size_t i = 0; i < n; i++) {
        bt_buf_printf(out, "- `%s %s%s`%s: %s\n", routes[i].post ? "POST" : "GET", routes[i].path,
                      routes[i].rest, key_note(&routes[i]), routes[i].summary);
    }
    bt_buf_puts(out, "\nAny other path gets 404 with this list, another method 405 with the "
                     "methods that there are.\n\n");
}

void bt_front_reference_markdown(const struct bt_front_route *routes, size_t n, struct bt_buf *out)
{
    struct line l;
    const struct bt_front_object_doc *o;
    line_init(&l);
    markdown_routes(routes, n, out);
    bt_buf_puts(out, "## Bodies\n\nThe routes are `POST /v1/completions`, `/v1/chat/completions`, "
                     "`/tokenize` and `/detokenize`. A field without a route is of "
                     "completions and chat.\n\n");
    for (int answer = FRONT_USED; answer <= FRONT_REFUSED; answer++) {
        bt_buf_printf(out, "**%s:**\n\n", answers[answer]);
        for (size_t i = 0; bt_front_field_at(i) != NULL; i++) {
            if ((int)bt_front_field_at(i)->answer == answer && take_line(&l, i, BODIES)) {
                markdown_line(out, &l, false);
            }
        }
        bt_buf_puts(out, "\n");
    }
    for (size_t k = 0; (o = bt_front_object_at(k)) != NULL; k++) {
        if (o->kind & BODIES) {
            continue;
        }
        bt_buf_printf(out, "## %s\n\n", o->title);
        for (size_t i = 0; bt_front_field_at(i) != NULL; i++) {
            if (take_line(&l, i, o->kind)) {
                markdown_line(out, &l, true);
            }
        }
        bt_buf_puts(out, "\n");
    }
    line_cleanup(&l);
}

void bt_front_put_html(struct bt_buf *out, const char *text)
{
    bool code = false;
    for (const char *p = text; *p != '\0'; p++) {
        switch (*p) {
        case '`':
            bt_buf_puts(out, code ? "</code>" : "<code>");
            code = !code;
            break;
        case '<': bt_buf_puts(out, "&lt;"); break;
        case '>': bt_buf_puts(out, "&gt;"); break;
        case '&': bt_buf_puts(out, "&amp;"); break;
        case '"': bt_buf_puts(out, "&quot;"); break;
        default: bt_buf_append(out, p, 1); break;
        }
    }
    bt_buf_puts(out, code ? "</code>" : "");
}

static void page_cell(struct bt_buf *out, const char *class, const char *text)
{
    bt_buf_printf(out, "<td class=\"%s\">", class);
    bt_front_put_html(out, text);
    bt_buf_puts(out, "</td>");
}

static void page_table(struct bt_buf *out, struct line *l, uint64_t of)
{
    static const char *const classes[] = {"used", "harmless", "refused"};
    bt_buf_puts(out, "<table><thead><tr><th>Field</th><th>Type</th><th>Answer</th><th>Meaning</th>"
                     "</tr></thead><tbody>\n");
    for (size_t i = 0; bt_front_field_at(i) != NULL; i++) {
        if (!take_line(l, i, of)) {
            continue;
        }
        bt_buf_puts(out, "<tr>");
        page_cell(out, "name", l->names.data);
        page_cell(out, "type", l->notes.len > 0 ? l->notes.data : "");
        page_cell(out, classes[l->answer], answers[l->answer]);
        page_cell(out, "why", l->why.data);
        bt_buf_puts(out, "</tr>\n");
    }
    bt_buf_puts(out, "</tbody></table>\n");
}

/* The scope of the key that a route needs where the server has keys. */
static const char *key_name(const struct bt_front_route *r)
{
    return r->scope == 0                 ? "not needed"
           : r->scope == BT_KEYS_METRICS ? "metrics"
           : r->scope == BT_KEYS_ADMIN   ? "admin"
                                         : "inference";
}

static void page_routes(const struct bt_front_route *routes, size_t n, struct bt_buf *out)
{
    bt_buf_puts(out, "<table><thead><tr><th>Method</th><th>Path</th><th>Key</th><th>What it does"
                     "</th></tr></thead><tbody>\n");
    for (size_t i = 0; i < n; i++) {
        struct bt_buf path;
        bt_buf_init(&path);
        bt_buf_printf(&path, "`%s%s`", routes[i].path, routes[i].rest);
        bt_buf_puts(out, "<tr>");
        page_cell(out, "type", routes[i].post ? "POST" : "GET");
        page_cell(out, "name", path.data);
        page_cell(out, "type", key_name(&routes[i]));
        page_cell(out, "why", routes[i].summary);
        bt_buf_puts(out, "</tr>\n");
        bt_buf_cleanup(&path);
    }
    bt_buf_puts(out, "</tbody></table>\n");
}

void bt_front_reference_page(const struct bt_front_route *routes, size_t n, struct bt_buf *out)
{
    struct line l;
    const struct bt_front_object_doc *o;
    line_init(&l);
    bt_buf_puts(out,
                "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">"
                "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">"
                "<title>Baton: API reference</title>"
                "<link rel=\"icon\" href=\"/ui/icon.svg\">"
                "<link rel=\"stylesheet\" href=\"/ui/reference.css\"></head><body><main>\n"
                "<p class=\"links\"><a href=\"/\">Baton</a> <a href=\"/ui\">Cluster page</a> "
                "<a href=\"/openapi.json\">OpenAPI</a></p>\n<h1>API reference</h1>\n"
                "<p><b>supported</b>: read and checked. <b>no effect</b>: accepted with any value, "
                "because it cannot change the generated text. <b>refused</b>: it would change the "
                "answer, and this server does not support it; it may be null or neutral, otherwise "
                "the answer is 400. "
                "Any other field gets 400 with its name. <code>null</code> is the same as leaving "
                "a field out.</p>\n<h2>Endpoints</h2>\n");
    page_routes(routes, n, out);
    bt_buf_puts(out, "<h2>Bodies of completions, chat, tokenize and detokenize</h2>\n<p>A field "
                     "without a route is of completions and chat.</p>\n");
    page_table(out, &l, BODIES);
    for (size_t k = 0; (o = bt_front_object_at(k)) != NULL; k++) {
        if ((o->kind & BODIES) == 0) {
            bt_buf_puts(out, "<h2>");
            bt_front_put_html(out, o->title);
            bt_buf_puts(out, "</h2>\n");
            page_table(out, &l, o->kind);
        }
    }
    bt_buf_puts(out, "</main></body></html>\n");
    line_cleanup(&l);
}

void bt_front_reference_paths(const struct bt_front_route *routes, size_t n, struct bt_buf *out)
{
    for (size_t i = 0; i < n; i++) {
        bt_buf_printf(out, "%s%s%s", i > 0 ? ", " : "", routes[i].path, routes[i].rest);
    }
}

/* ---- OpenAPI ---- */

static void put_member(struct bt_buf *out, const char *name, const char *value)
{
    bt_front_put_cstr(out, name);
    bt_buf_puts(out, ":");
    bt_front_put_cstr(out, value);
}

static void put_property(struct bt_buf *out, const struct bt_front_field *f)
{
    bt_front_put_cstr(out, f->name);
    bt_buf_puts(out, ":{");
    if (f->answer == FRONT_USED) {
        put_member(out, "description", f->why);
        bt_buf_printf(out, ",\"anyOf\":[{%s},{\"type\":\"null\"}]}", f->schema);
    } else {
        char text[256];
        snprintf(text, sizeof(text), "No effect: %s", f->why);
        put_member(out, "description", text);
        bt_buf_puts(out, "}");
    }
}

static void put_required(struct bt_buf *out, const char *names)
{
    const char *before = ",\"required\":[";
    for (const char *p = names; *p != '\0'; p += strspn(p, " ")) {
        size_t n = strcspn(p, " ");
        bt_buf_puts(out, before);
        bt_front_put_str(out, p, n);
        before = ",";
        p += n;
    }
    bt_buf_puts(out, names[0] != '\0' ? "]" : "");
}

static void put_component(struct bt_buf *out, const struct bt_front_object_doc *o)
{
    const struct bt_front_field *f;
    const char *before = "";
    bt_front_put_cstr(out, o->component);
    bt_buf_puts(out, ":{\"type\":\"object\",\"properties\":{");
    for (size_t i = 0; (f = bt_front_field_at(i)) != NULL; i++) {
        if ((f->objects & o->kind) && f->answer != FRONT_REFUSED) {
            bt_buf_puts(out, before);
            put_property(out, f);
            before = ",";
        }
    }
    bt_buf_puts(out, "}");
    put_required(out, o->required);
    bt_buf_puts(out, ",\"additionalProperties\":false,\"x-refused\":{");
    before = "";
    for (size_t i = 0; (f = bt_front_field_at(i)) != NULL; i++) {
        if ((f->objects & o->kind) && f->answer == FRONT_REFUSED) {
            bt_buf_puts(out, before);
            put_member(out, f->name, f->why);
            before = ",";
        }
    }
    bt_buf_puts(out, "}}");
}

static const char *component_of(uint64_t kind)
{
    const struct bt_front_object_doc *o;
    for (size_t i = 0; (o = bt_front_object_at(i)) != NULL; i++) {
        if (o->kind == kind) {
            return o->component;
        }
    }
    return NULL;
}

static void put_route(struct bt_buf *out, const struct bt_front_route *r)
{
    const char *component = component_of(r->body);
    size_t name = strlen(r->rest);
    bt_buf_printf(out, "\"%s%s\":{\"%s\":{", r->path, r->rest, r->post ? "post" : "get");
    put_member(out, "summary", r->summary);
    if (name > 2) { /* {name} */
        bt_buf_printf(out,
                      ",\"parameters\":[{\"name\":\"%.*s\",\"in\":\"path\",\"required\":true,"
                      "\"schema\":{\"type\":\"string\"}}]",
                      (int)name - 2, r->rest + 1);
    }
    if (component != NULL) {
        bt_buf_printf(out,
                      ",\"requestBody\":{\"required\":true,\"content\":{\"application/json\":{"
                      "\"schema\":{\"$ref\":\"#/components/schemas/%s\"}}}}",
                      component);
    }
    bt_buf_printf(out, ",\"security\":[{}%s]",
                  r->scope == 0 ? "" : ",{\"bearer\":[]},{\"apiKey\":[]}");
    bt_buf_printf(out,
                  ",\"responses\":{\"200\":{\"description\":\"The answer.\",\"content\":{"
                  "\"%s\":{}%s}},\"default\":{\"description\":\"An error.\",\"content\":{"
                  "\"application/json\":{\"schema\":{\"$ref\":\"#/components/schemas/Error\"}"
                  "}}}}}}",
                  r->type, r->generates ? ",\"text/event-stream\":{}" : "");
}

void bt_front_reference_openapi(const struct bt_front_route *routes, size_t n, struct bt_buf *out)
{
    const struct bt_front_object_doc *o;
    bt_buf_puts(out, "{\"openapi\":\"3.1.0\",\"info\":{\"title\":\"Baton\",\"license\":{\"name\":"
                     "\"Apache-2.0\",\"identifier\":\"Apache-2.0\"},");
    put_member(out, "version", bt_version());
    bt_buf_puts(out, "},\"servers\":[{\"url\":\"/\"}],\"paths\":{");
    for (size_t i = 0; i < n; i++) {
        bt_buf_puts(out, i > 0 ? "," : "");
        put_route(out, &routes[i]);
    }
    bt_buf_puts(out, "},\"components\":{\"securitySchemes\":{\"bearer\":{\"type\":\"http\","
                     "\"scheme\":\"bearer\"},\"apiKey\":{\"type\":\"apiKey\",\"in\":\"header\","
                     "\"name\":\"x-api-key\"}},\"schemas\":{\"Error\":{\"type\":\"object\","
                     "\"required\":[\"error\"],\"properties\":{\"error\":{\"type\":\"object\","
                     "\"required\":[\"message\",\"type\"],\"properties\":{"
                     "\"message\":{\"type\":\"string\"},\"type\":{\"type\":\"string\"},"
                     "\"param\":{\"type\":[\"string\",\"null\"]},"
                     "\"code\":{\"type\":[\"string\",\"null\"]}}}}}");
    for (size_t i = 0; (o = bt_front_object_at(i)) != NULL; i++) {
        bt_buf_puts(out, ",");
        put_component(out, o);
    }
    bt_buf_puts(out, "}}}");
}
