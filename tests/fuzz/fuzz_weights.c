/* libFuzzer: model.safetensors, or an index and one shard. The first byte chooses; the rest is the
 * JSON header (its length is written before it as it is, or as the next eight bytes say), and
 * behind a zero byte the data. The index, if there is one, stands before the header and names the
 * shard "s". A tensor that is given out lies inside its file. */
#include <stdlib.h>
#include <string.h>

#include "common/engine/safetensors.h"
#include "tests/fuzz/rig.h"

static const char *const names[] = {"a", "model.embed_tokens.weight", "model.norm.weight",
                                    "model.layers.0.self_attn.q_proj.weight"};

static void use(const struct bt_weights *w)
{
    const struct bt_tensor *t;
    uint8_t digest[32], sum = 0;
    char err[512];
    for (size_t i = 0; i < BT_ARRAY_LEN(names); i++) {
        t = bt_weights_find(w, names[i]);
        if (t != NULL) {
            for (uint64_t k = 0; k < t->bytes; k++) { /* each of them can be read */
                sum ^= t->data[k];
            }
            struct bt_weights_wish wish = {.name = names[i],
                                           .rows = t->n_dims > 1 ? (uint32_t)t->dims[0] : 0,
                                           .cols = (uint32_t)t->dims[t->n_dims > 1 ? 1 : 0],
                                           .dir = "d",
                                           .architecture = "a",
                                           .layers = 2};
            if (t->n_dims > 0 && bt_weights_want(w, &wish, &t, err, sizeof(err)) == BT_OK) {
                uint64_t n = (uint64_t)(wish.rows > 0 ? wish.rows : 1) * wish.cols;
                float *out = bt_malloc(BT_MIN(n, (uint64_t)64) * sizeof(float) + 1);
                bt_tensor_values(t, n - BT_MIN(n, (uint64_t)64), BT_MIN(n, (uint64_t)64),
                                 BT_TENSOR_F32, out);
                free(out);
            }
        }
    }
    (void)bt_weights_unused(w, 2, 1);
    bt_weights_digest(w, digest);
    (void)sum;
}

/* Writes a file of a JSON header of n bytes, which says that it has `len`, and the rest as data. */
static void write_tensors(const char *name, uint64_t len, const uint8_t *json, size_t n,
                          const uint8_t *rest, size_t n_rest)
{
    uint8_t *file = bt_malloc(sizeof(len) + n + n_rest);
    memcpy(file, &len, sizeof(len));
    memcpy(file + sizeof(len), json, n);
    memcpy(file + sizeof(len) + n, rest, n_rest);
    (void)rig_file(name, file, sizeof(len) + n + n_rest);
    free(file);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct bt_weights *w = NULL;
    char err[512] = "";
    if (size < 10) {
        return 0;
    }
    rig_reset();
    bool index = data[0] % 4 == 3, raw = data[0] % 4 == 2;
    const uint8_t *end = data + size, *at = data + (raw ? 9 : 1);
    uint64_t said;
    memcpy(&said, data + 1, sizeof(said));
    if (index) {
        size_t n = strnlen((const char *)at, (size_t)(end - at));
        (void)rig_file("model.safetensors.index.json", at, n);
        at += BT_MIN(n + 1, (size_t)(end - at));
        rig_no_file("model.safetensors");
    }
    size_t n = strnlen((const char *)at, (size_t)(end - at));
    const uint8_t *rest = at + BT_MIN(n + 1, (size_t)(end - at));
    write_tensors(index ? "s" : "model.safetensors", raw ? said : n, at, n, rest,
                  (size_t)(end - rest));
    bt_status_t st = bt_weights_open(rig_dir(), &w, err, sizeof(err));
    if (st == BT_OK) {
        use(w);
        bt_weights_close(w);
    } else {
        BT_ASSERT(err[0] != '\0' && w == NULL);
    }
    return 0;
}
