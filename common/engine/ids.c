/* Which ids have a token, from tokenizer.json; see ids.h. Reads one file and has no other effect.
 * The conductor's tokenizer (common/token) checks the whole file. */
#include "common/engine/ids.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/base/file.h"

struct marks {
    struct bt_ids *ids;
    uint32_t vocab;
    bool good;
};

static void mark(struct marks *m, const json_t *id)
{
    json_int_t v = json_integer_value(id);
    if (!json_is_integer(id) || v < 0) {
        m->good = false;
    } else if (v < (json_int_t)m->vocab) { /* the conductor rejects a tokenizer with larger ids */
        uint32_t *word = &m->ids->known[v / 32], bit = 1u << (v % 32);
        m->ids->n += (*word & bit) == 0;
        m->ids->end = BT_MAX(m->ids->end, (uint32_t)v + 1);
        *word |= bit;
    }
}

static bool mark_all(struct marks *m, const json_t *root)
{
    json_t *vocab = json_object_get(json_object_get(root, "model"), "vocab"), *id;
    const json_t *added = json_object_get(root, "added_tokens");
    const char *key;
    m->good = json_is_object(vocab);
    json_object_foreach(vocab, key, id)
    {
        mark(m, id);
    }
    for (size_t i = 0; i < json_array_size(added); i++) {
        mark(m, json_object_get(json_array_get(added, i), "id"));
    }
    return m->good && m->ids->n > 0;
}

bt_status_t bt_ids_load(const char *dir, uint32_t vocab, struct bt_ids *ids, char *err,
                        size_t err_cap)
{
    json_error_t je;
    *ids = (struct bt_ids){.n = vocab, .end = vocab};
    char *path = bt_sprintf("%s/tokenizer.json", dir);
    const char *why;
    struct stat sb;
    FILE *f = bt_file_open(path, &sb, &why);
    if (f == NULL) {
        bt_status_t st = errno == ENOENT ? BT_OK : BT_ERR_IO;
        snprintf(err, err_cap, "%.300s: %s", path, why);
        free(path);
        return st;
    }
    json_t *root = json_loadf(f, JSON_ALLOW_NUL, &je);
    fclose(f);
    *ids = (struct bt_ids){.known = bt_calloc(BT_DIV_UP(vocab, 32u), sizeof(uint32_t))};
    struct marks m = {.ids = ids, .vocab = vocab};
    bool good = root != NULL && mark_all(&m, root);
    json_decref(root);
    if (!good) {
        snprintf(err, err_cap, "%.300s: %s", path,
                 root == NULL ? je.text : "model.vocab and added_tokens must have ids");
        bt_ids_cleanup(ids);
    } else if (ids->n == vocab) {
        free(ids->known);
        ids->known = NULL;
    }
    free(path);
    return good ? BT_OK : BT_ERR_INVALID;
}

/* The vocabulary of dir as {"token": id}, added tokens included; NULL: err says why. */
static json_t *vocab_of(const char *dir, char *err, size_t err_cap)
{
    json_error_t je = {.text = ""};
    char *path = bt_sprintf("%s/tokenizer.json", dir);
    json_t *root = json_load_file(path, JSON_ALLOW_NUL, &je), *all = NULL;
    json_t *vocab = json_object_get(json_object_get(root, "model"), "vocab");
    const json_t *added = json_object_get(root, "added_tokens");
    if (json_is_object(vocab)) {
        all = json_copy(vocab);
        for (size_t i = 0; i < json_array_size(added); i++) {
            const json_t *t = json_array_get(added, i);
            const char *text = json_string_value(json_object_get(t, "content"));
            if (text != NULL) {
                json_object_set(all, text, json_object_get(t, "id"));
            }
        }
    } else {
        snprintf(err, err_cap, "%.300s: %s", path, root == NULL ? je.text : "no model.vocab");
    }
    json_decref(root);
    free(path);
    return all;
}

bt_status_t bt_ids_same(const char *dir, const char *other, char *err, size_t err_cap)
{
    json_t *a = vocab_of(dir, err, err_cap), *b = a ? vocab_of(other, err, err_cap) : NULL;
    bt_status_t st = a && b ? BT_OK : BT_ERR_INVALID;
    if (st == BT_OK && !json_equal(a, b)) {
        snprintf(err, err_cap, "%.200s and %.200s: their tokenizers have different tokens", dir,
                 other);
        st = BT_ERR_MISMATCH;
    }
    json_decref(a);
    json_decref(b);
    return st;
}

void bt_ids_cleanup(struct bt_ids *ids)
{
    free(ids->known);
    *ids = (struct bt_ids){0};
}
