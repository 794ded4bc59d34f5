/* The tokens around a text, if tokenizer_config.json defines them instead of tokenizer.json. Called
 * at load. */
#include <stdlib.h>
#include <string.h>

#include "common/token/token_priv.h"

#define FILE_MAX ((size_t)16 << 20)

/* The classes of transformers that make the post-processor from add_bos_token and add_eos_token
 * (update_post_processor), whatever tokenizer.json has. Other classes ignore both keys. */
static bool decides(const json_t *config)
{
    static const char *const classes[] = {"Llama", "CodeLlama", "Gemma", "Cohere"};
    const char *name = json_string_value(json_object_get(config, "tokenizer_class"));
    for (size_t i = 0; name != NULL && i < BT_ARRAY_LEN(classes); i++) {
        size_t n = strlen(classes[i]);
        if (strncmp(name, classes[i], n) == 0 &&
            (strcmp(name + n, "Tokenizer") == 0 || strcmp(name + n, "TokenizerFast") == 0)) {
            return true;
        }
    }
    return false;
}

/* Sets *around to the token that `key` names, or to nothing, as `flag` says. If neither is given,
 * tokenizer.json decides. */
static bt_status_t set(const json_t *config, const char *flag, const char *key,
                       const struct bt_tokenizer *t, struct bt_tokens *around,
                       const struct bt_token_err *e)
{
    const json_t *on = json_object_get(config, flag), *token = json_object_get(config, key);
    if (json_is_object(token)) {
        token = json_object_get(token, "content");
    }
    if (!json_is_boolean(on) || (json_is_true(on) && !json_is_string(token))) {
        return BT_OK;
    }
    uint32_t id = BT_TOKEN_NONE;
    if (json_is_true(on) && !bt_tokenizer_find(t, json_string_value(token), &id)) {
        return bt_token_fail(e, BT_ERR_INVALID,
                             "%s is true, but %s \"%.80s\" is not a token of tokenizer.json", flag,
                             key, json_string_value(token));
    }
    around->n = 0;
    if (id != BT_TOKEN_NONE) {
        bt_tokens_push(around, id);
    }
    return BT_OK;
}

bt_status_t bt_token_around_load(const char *dir, struct bt_tokenizer *t, char *err, size_t err_cap)
{
    char *path = bt_sprintf("%s/tokenizer_config.json", dir);
    struct bt_token_err e = {path, err, err_cap};
    struct bt_buf file;
    json_error_t je;
    bt_buf_init(&file);
    bt_status_t st = bt_token_read_file(path, FILE_MAX, &file, &e);
    if (st == BT_OK) {
        /* Integers are read as reals: model_max_length may be 1e30 (template.c). */
        json_t *config =
            json_loadb(file.data == NULL ? "" : file.data, file.len,
                       JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | JSON_DECODE_INT_AS_REAL, &je);
        if (config == NULL) {
            st = bt_token_fail(&e, BT_ERR_INVALID, "line %d column %d: %s", je.line, je.column,
                               je.text);
        } else if (decides(config)) {
            st = set(config, "add_bos_token", "bos_token", t, &t->prefix, &e);
            if (st == BT_OK) {
                st = set(config, "add_eos_token", "eos_token", t, &t->suffix, &e);
            }
        }
        json_decref(config);
    } else if (st == BT_ERR_NOT_FOUND) {
        st = BT_OK; /* a tokenizer may have tokenizer.json alone */
    }
    bt_buf_cleanup(&file);
    free(path);
    return st;
}
