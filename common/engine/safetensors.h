/* The weight files of a model directory: model.safetensors, or the shards that
 * model.safetensors.index.json names. They are mapped read-only, and checked completely before
 * anything uses them: a tensor that a caller gets is within its file and has exactly shape x dtype
 * bytes. */
#ifndef BT_ENGINE_SAFETENSORS_H
#define BT_ENGINE_SAFETENSORS_H

#include "common/base/base.h"
#include "common/engine/model_fp8.h"

#define BT_TENSOR_MAX_DIMS 8

typedef enum {
    BT_TENSOR_BF16 = 0,
    BT_TENSOR_F32 = 1,
    BT_TENSOR_F16 = 2,
    BT_TENSOR_F8 = 3, /* e4m3, with scales */
    BT_TENSOR_OTHER = 4
} bt_tensor_dtype_t;

struct bt_tensor {
    char *name;
    const char *file; /* base name */
    bt_tensor_dtype_t dtype;
    char dtype_name[12];
    uint32_t n_dims;
    uint64_t dims[BT_TENSOR_MAX_DIMS];
    const uint8_t *data;
    uint64_t bytes;
    uint64_t begin; /* in the file's data area */
    bool used;      /* bt_weights_want has found it */
    /* For an F8 matrix that bt_weights_want has found: its scales, one for each block, row of
     * blocks by row of blocks. */
    const struct bt_tensor *scale;
    uint32_t block_rows, block_cols;
    bool not_finite; /* of an F8 matrix: one of its numbers that bt_tensor_values has made */
};

struct bt_weights;

static inline float bt_f32_of_bf16(uint16_t b)
{
    uint32_t u = (uint32_t)b << 16;
    float f;
    __builtin_memcpy(&f, &u, 4);
    return f;
}

/* To nearest, ties to even; not a number stays one. */
static inline uint16_t bt_bf16_of_f32(float f)
{
    uint32_t u;
    __builtin_memcpy(&u, &f, 4);
    return (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? 0x7fc0
                                                    : (u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

/* ERR_NOT_FOUND: no weight file or a shard is missing; ERR_INVALID / ERR_TOO_LARGE: err names file,
 * tensor and offset. */
bt_status_t bt_weights_open(const char *dir, struct bt_weights **w_p, char *err,
                            size_t err_cap) BT_MUST_CHECK;
void bt_weights_close(struct bt_weights *w);
/* NULL if there is no tensor of that name. Valid until close. */
const struct bt_tensor *bt_weights_find(const struct bt_weights *w, const char *name);
struct bt_weights_wish { /* a tensor that a model's configuration asks for */
    const char *name;
    uint32_t rows, cols;           /* [rows, cols], or [cols] where rows is 0 */
    const struct bt_fp8_form *fp8; /* it must be F8 with scales of this form; NULL: 16 or 32 bits */
    const char *dir, *architecture; /* of the model, for the message; so are its layers */
    uint32_t layers;
};
/* Finds the tensor, and its scales if it is F8; valid until close. ERR_INVALID: it is missing or
 * has another shape, or a scale is not finite. ERR_UNSUPPORTED: its dtype is not supported, or
 * differs from that of the wish. err names directory or file, tensor and the expected form. */
bt_status_t bt_weights_want(const struct bt_weights *w, const struct bt_weights_wish *wish,
                            const struct bt_tensor **t_p, char *err, size_t err_cap) BT_MUST_CHECK;
/* A weight or bias of a decoder that was not asked for; NULL: there is none. These do not count: a
 * head beside a tied embedding, the `mtp` layers behind the first `layers`, and what GPT-2 derives
 * from its shape. */
const struct bt_tensor *bt_weights_unused(const struct bt_weights *w, uint32_t layers,
                                          uint32_t mtp);
/* An F8 matrix with a number that is not finite, among those that bt_tensor_values has made; NULL:
 * there is none. */
const struct bt_tensor *bt_weights_not_finite(const struct bt_weights *w);
/* Returns whether most values of matrices are F16 or F32, which bf16 cannot represent. */
bool bt_weights_wide(const struct bt_weights *w);
/* Asks the kernel to read all of t ahead of its use. */
void bt_tensor_ahead(const struct bt_tensor *t);
/* Values [from, from + n) of t as F32 or BF16 (rounded to nearest even), or as its own dtype (F8:
 * the numbers without their scales), to out, on several threads where there are many. t: of a dtype
 * that bt_weights_want lets through. */
void bt_tensor_values(const struct bt_tensor *t, uint64_t from, size_t n, bt_tensor_dtype_t as,
                      void *out);
#define BT_WEIGHTS_PIECE (16u << 20)
/* SHA-256 over all files, by name: name, NUL, size as u64 little-endian, and the SHA-256 of each
 * piece of 16 MiB (the last one shorter), so that several threads can share the work. */
void bt_weights_digest(const struct bt_weights *w, uint8_t out[32]);

#endif
