/* Chat templates: finds one in a model's directory, compiles it, renders it. A compiled template
 * never changes; each render has its own arena. The only I/O is reading the two files at load. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/token/jinja/jinja.h"
#include "common/token/token_priv.h"

#define FILE_MAX ((size_t)16 << 20)

struct bt_template {
    struct bt_j_arena arena;
    struct bt_j_nodes body;
    locale_t locale;
    json_t *tokens; /* bos_token and its like; NULL if not loaded from a directory */
    char *text;
    struct bt_template *with_tools; /* renders requests with tools; NULL: this one does */
};

#define MORE_TOKENS "additional_special_tokens"
static const char *const token_names[] = {"bos_token", "eos_token", "unk_token", "pad_token",
                                          "sep_token", "cls_token", "mask_token"};

/* A separate function because of setjmp: data that is used after the jump is reached through
 * `c`. */
static bool try_compile(struct bt_j_compile *c, const char *source, size_t len,
                        struct bt_j_nodes *body)
{
    if (setjmp(c->fail) != 0) {
        return false;
    }
    bt_j_lex(c, source, len);
    *body = bt_j_parse(c);
    return true;
}

static bt_status_t compile(const char *source, size_t len, struct bt_template **t_p, char *err,
                           size_t err_cap)
{
    if (err_cap > 0) {
        snprintf(err, err_cap, "chat template: more than %zu bytes, or too complex", J_SOURCE_MAX);
    }
    if (len > J_SOURCE_MAX) {
        return BT_ERR_TOO_LARGE;
    }
    if (!bt_utf8_valid(source, len)) {
        snprintf(err, err_cap, "chat template: not UTF-8");
        return BT_ERR_INVALID;
    }
    struct bt_template *t = bt_calloc(1, sizeof(*t));
    struct bt_j_compile *c = bt_calloc(1, sizeof(*c));
    t->arena.max = J_ARENA_MAX;
    t->arena.oom = &c->fail;
    t->locale = newlocale(LC_CTYPE_MASK, "C.UTF-8", (locale_t)0);
    *c = (struct bt_j_compile){
        .arena = &t->arena, .status = BT_ERR_TOO_LARGE, .err = err, .err_cap = err_cap};
    bt_status_t st = try_compile(c, source, len, &t->body) ? BT_OK : c->status;
    t->arena.oom = NULL;
    t->text = bt_sprintf("%.*s", (int)len, source);
    free(c);
    if (st != BT_OK) {
        bt_template_destroy(t);
        return st;
    }
    if (err_cap > 0) {
        err[0] = '\0';
    }
    *t_p = t;
    return BT_OK;
}

bt_status_t bt_template_compile(const char *source, struct bt_template **t_p, char *err,
                                size_t err_cap)
{
    return compile(source, strlen(source), t_p, err, err_cap);
}

void bt_template_destroy(struct bt_template *t)
{
    if (t == NULL) {
        return;
    }
    bt_j_arena_cleanup(&t->arena);
    if (t->locale != (locale_t)0) {
        freelocale(t->locale);
    }
    json_decref(t->tokens);
    bt_template_destroy(t->with_tools);
    free(t->text);
    free(t);
}

const char *bt_template_text(const struct bt_template *t, bool tools)
{
    return tools && t->with_tools != NULL ? t->with_tools->text : t->text;
}

/* Reads bos_token and so on: a string, or an object with its "content". */
static json_t *special_tokens(const json_t *config)
{
    json_t *out = json_object();
    for (size_t i = 0; i < BT_ARRAY_LEN(token_names); i++) {
        json_t *v = json_object_get(config, token_names[i]);
        if (json_is_object(v)) {
            v = json_object_get(v, "content");
        }
        if (json_is_string(v)) {
            json_object_set(out, token_names[i], v);
        }
    }
    json_t *more = json_object_get(config, MORE_TOKENS);
    if (json_is_array(more)) {
        json_object_set(out, MORE_TOKENS, more);
    }
    return out;
}

/* The entry of this name in a list of templates; NULL: there is none. */
static const json_t *named_template(const json_t *list, const char *name)
{
    const json_t *v = NULL;
    for (size_t i = 0; i < json_array_size(list) && v == NULL; i++) {
        const json_t *one = json_array_get(list, i);
        const char *its = json_string_value(json_object_get(one, "name"));
        if (its != NULL && strcmp(its, name) == 0) {
            v = json_object_get(one, "template");
        }
    }
    return v;
}

/* The template's text: a string, or the entry "default" of a list. */
static bt_status_t pick_template(const json_t *config, const json_t **text_p,
                                 const struct bt_token_err *e)
{
    const json_t *v = json_object_get(config, "chat_template");
    if (json_is_array(v)) {
        v = named_template(v, "default");
        if (v == NULL) {
            return bt_token_fail(e, BT_ERR_NOT_FOUND, "chat_template has no entry \"default\"");
        }
    }
    if (v == NULL || json_is_null(v)) {
        return bt_token_fail(e, BT_ERR_NOT_FOUND,
                             "no chat_template (and no chat_template.jinja beside it)");
    }
    if (!json_is_string(v)) {
        return bt_token_fail(e, BT_ERR_INVALID,
                             "chat_template must be a string or a list of {name, template}");
    }
    *text_p = v;
    return BT_OK;
}

/* Compiles the template for requests with tools, if the model has one. */
static bt_status_t load_with_tools(const char *dir, const json_t *config, struct bt_template *t,
                                   char *err, size_t err_cap)
{
    const json_t *v = named_template(json_object_get(config, "chat_template"), "tool_use");
    if (json_is_string(v)) {
        return compile(json_string_value(v), json_string_length(v), &t->with_tools, err, err_cap);
    }
    char *path = bt_sprintf("%s/additional_chat_templates/tool_use.jinja", dir);
    struct bt_token_err e = {path, err, err_cap};
    struct bt_buf file;
    bt_buf_init(&file);
    bt_status_t st = bt_token_read_file(path, J_SOURCE_MAX, &file, &e);
    if (st == BT_OK) {
        st = compile(file.data == NULL ? "" : file.data, file.len, &t->with_tools, err, err_cap);
    } else if (st == BT_ERR_NOT_FOUND) {
        st = BT_OK;
        err[0] = '\0';
    }
    bt_buf_cleanup(&file);
    free(path);
    return st;
}

bt_status_t bt_template_load(const char *dir, struct bt_template **t_p, char *err, size_t err_cap)
{
    char *jinja_path = bt_sprintf("%s/chat_template.jinja", dir);
    char *config_path = bt_sprintf("%s/tokenizer_config.json", dir);
    struct bt_token_err ej = {jinja_path, err, err_cap}, ec = {config_path, err, err_cap};
    struct bt_buf jinja, file;
    bt_buf_init(&jinja);
    bt_buf_init(&file);
    json_t *config = NULL;
    const json_t *text = NULL;
    json_error_t je;
    bt_status_t st = bt_token_read_file(jinja_path, J_SOURCE_MAX, &jinja, &ej);
    bool own_file = st == BT_OK;
    if (st == BT_OK || st == BT_ERR_NOT_FOUND) {
        st = bt_token_read_file(config_path, FILE_MAX, &file, &ec);
        if (st == BT_OK) {
            /* Only strings are used. Integers are read as reals, since transformers writes
             * "model_max_length": 1000000000000000019884624838656 for an unknown length. */
            config =
                json_loadb(file.data == NULL ? "" : file.data, file.len,
                           JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | JSON_DECODE_INT_AS_REAL, &je);
            if (config == NULL) {
                st = bt_token_fail(&ec, BT_ERR_INVALID, "line %d column %d: %s", je.line, je.column,
                                   je.text);
            }
        } else if (st == BT_ERR_NOT_FOUND && own_file) {
            st = BT_OK; /* a template without special tokens */
        }
    }
    if (st == BT_OK && !own_file) {
        st = pick_template(config, &text, &ec);
    }
    struct bt_template *t = NULL;
    if (st == BT_OK) {
        st = own_file
                 ? compile(jinja.data == NULL ? "" : jinja.data, jinja.len, &t, err, err_cap)
                 : compile(json_string_value(text), json_string_length(text), &t, err, err_cap);
    }
    if (st == BT_OK) {
        t->tokens = special_tokens(config);
        st = load_with_tools(dir, config, t, err, err_cap);
        if (st == BT_OK) {
            *t_p = t;
        } else {
            bt_template_destroy(t);
        }
    }
    json_decref(config);
    bt_buf_cleanup(&jinja);
    bt_buf_cleanup(&file);
    free(jinja_path);
    free(config_path);
    return st;
}

static void bind_all(struct bt_j_render *r, const json_t *object)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)object, key, value)
    {
        bt_j_scope_set(r, r->scope, j_cstr(key), bt_j_from_json(r, value));
    }
}

/* A separate function because of setjmp: data that is used after the jump is reached through
 * `r`. */
static bool try_render(struct bt_j_render *r, const struct bt_template *t, const json_t *context,
                       struct bt_j_sb *out)
{
    if (setjmp(r->fail) != 0) {
        return false;
    }
    struct bt_j_scope *root = bt_j_alloc(&r->arena, sizeof(*root));
    r->scope = root;
    r->out = out;
    /* transformers always passes these */
    bt_j_scope_set(r, root, j_cstr("tools"), bt_j_none());
    bt_j_scope_set(r, root, j_cstr("documents"), bt_j_none());
    bt_j_scope_set(r, root, j_cstr("add_generation_prompt"), bt_j_bool(false));
    if (t->tokens != NULL) {
        bind_all(r, t->tokens);
    }
    bind_all(r, context);
    bt_j_exec(r, json_array_size(json_object_get(context, "tools")) > 0 && t->with_tools != NULL
                     ? &t->with_tools->body
                     : &t->body);
    return true;
}

bt_status_t bt_template_render_object(const struct bt_template *t, const struct json_t *context,
                                      uint64_t max_steps, const struct bt_token_watch *watch,
                                      struct bt_buf *out, char *err, size_t err_cap)
{
    struct bt_j_sb *text = bt_calloc(1, sizeof(*text));
    struct bt_j_render *r = bt_calloc(1, sizeof(*r));
    r->arena.max = J_ARENA_MAX;
    r->arena.oom = &r->fail;
    r->status = BT_ERR_EXHAUSTED;
    r->err = err;
    r->err_cap = err_cap;
    r->locale = t->locale;
    r->work_max = J_STEP * (max_steps > 0 ? BT_MIN(max_steps, (uint64_t)J_STEPS_MAX) : J_STEPS_MAX);
    if (watch != NULL) {
        r->stop = watch->stop;
        r->stop_arg = watch->arg;
    }
    if (err_cap > 0) {
        snprintf(err, err_cap, "chat template: needs more than %zu MiB", J_ARENA_MAX >> 20);
    }
    bt_status_t st = BT_OK;
    if (try_render(r, t, context, text)) {
        bt_buf_append(out, text->p, text->n);
        if (err_cap > 0) {
            err[0] = '\0';
        }
    } else {
        st = r->status;
    }
    bt_j_arena_cleanup(&r->arena);
    free(r);
    free(text);
    return st;
}

bt_status_t bt_template_render(const struct bt_template *t, const char *context_json,
                               struct bt_buf *out, char *err, size_t err_cap)
{
    json_error_t je;
    json_t *context = json_loads(context_json, JSON_ALLOW_NUL, &je);
    if (!json_is_object(context)) {
        snprintf(err, err_cap, "chat template: the context is not a JSON object: %s",
                 context == NULL ? je.text : "another type");
        json_decref(context);
        return BT_ERR_INVALID;
    }
    bt_status_t st = bt_template_render_object(t, context, 0, NULL, out, err, err_cap);
    json_decref(context);
    return st;
}

const char *bt_template_word(enum bt_template_word kind, size_t i)
{
    switch (kind) {
    case BT_TEMPLATE_FILTERS: return bt_j_filter_name(i);
    case BT_TEMPLATE_TESTS: return bt_j_test_name(i);
    case BT_TEMPLATE_METHODS: return bt_j_method_name(i);
    case BT_TEMPLATE_FUNCTIONS: return bt_j_global_name(i);
    case BT_TEMPLATE_TOKENS: break;
    }
    return i < BT_ARRAY_LEN(token_names)    ? token_names[i]
           : i == BT_ARRAY_LEN(token_names) ? MORE_TOKENS
                                            : NULL;
}
