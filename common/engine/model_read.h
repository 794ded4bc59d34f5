/* Within common/engine/: reading a JSON object of a model directory, and the parts of config.json
 * that have files of their own. Only reads files. */
#ifndef BT_ENGINE_MODEL_READ_H
#define BT_ENGINE_MODEL_READ_H

#include <jansson.h>

#include "common/engine/model_config.h"

struct bt_model_reader {
    char path[4096];
    json_t *root;
    bt_status_t status; /* of the first error */
    char *err;
    size_t err_cap;
};

/* Opens dir/name. A missing file is an error only if `required` is set; otherwise root stays
 * NULL. The reader writes its first error to err, of err_cap bytes, which stays the caller's. */
void bt_model_reader_open(struct bt_model_reader *r, const char *dir, const char *name,
                          bool required, char *err, size_t err_cap);
void bt_model_reader_close(struct bt_model_reader *r);
/* Records an error, unless there is one. */
void bt_model_fail(struct bt_model_reader *r, bt_status_t status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* NULL: the field is absent or null, which mean the same. */
const json_t *bt_model_field(const json_t *o, const char *name);
/* A field of the root, or of o; def if there is none and it is not required. Another type or a
 * value outside lo..hi is an error. */
int64_t bt_model_int(struct bt_model_reader *r, const char *name, int64_t lo, int64_t hi,
                     bool required, int64_t def);
double bt_model_num(struct bt_model_reader *r, const json_t *o, const char *name, double lo,
                    double hi, bool required, double def);
bool bt_model_bool(struct bt_model_reader *r, const char *name, bool def);
const char *bt_model_str(struct bt_model_reader *r, const json_t *o, const char *name,
                         const char *def);

/* Fills the fields of RoPE of c, whose sizes are set. */
void bt_model_read_rope(struct bt_model_reader *r, struct bt_model_config *c);

#endif
