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

/* What an architecture adds to the common decoder (RMSNorm, RoPE, GQA, SwiGLU), and its own
 * keys. */
struct bt_model_arch {
    const char *name;
    bool qkv_bias, qk_norm;
    bool window;          /* has sliding_window */
    bool window_switched; /* the window applies only if use_sliding_window is true */
    enum bt_model_family {
        BT_FAMILY_DENSE = 0,
        BT_FAMILY_DEEPSEEK_V2 = 1,
        BT_FAMILY_DEEPSEEK_V3 = 2,
        BT_FAMILY_QWEN_MOE = 3,
        BT_FAMILY_MIXTRAL = 4,
        BT_FAMILY_GPT2 = 5
    } family;
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

/* They fill their fields of c. read_shape has set its sizes before. */
void bt_model_read_mla(struct bt_model_reader *r, struct bt_model_config *c,
                       const struct bt_model_arch *a);
void bt_model_read_experts(struct bt_model_reader *r, struct bt_model_config *c,
                           const struct bt_model_arch *a);
void bt_model_read_gpt2(struct bt_model_reader *r, struct bt_model_config *c);
void bt_model_read_rope(struct bt_model_reader *r, struct bt_model_config *c,
                        const struct bt_model_arch *a);

#endif
