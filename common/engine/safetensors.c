/* Reader of safetensors files. Runs in whichever thread loads the model. The format: u64
 * little-endian header length, a JSON object {name: {dtype, shape, data_offsets}}, then the data.
 * Files come from outside: every number is checked before it is used as a size or an offset. */
#include "common/engine/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/sha256.h"
#include "common/engine/fp8.h"
#include "common/engine/parallel.h"

#define HEADER_BYTES_MAX 100000000u
#define SHARDS_MAX       1000
#define TENSORS_MAX      1000000u

struct weight_file {
    char *name;
    uint8_t *map;
    uint64_t bytes;
};

struct bt_weights {
    const char *dir;
    struct weight_file *files;
    uint32_t n_files;
    struct bt_tensor *tensors; /* sorted by name once all files are read */
    uint32_t n_tensors, cap_tensors;
    char *err;
    size_t err_cap;
};

static const struct {
    const char *name;
    uint32_t bytes;
    bt_tensor_dtype_t dtype;
} dtypes[] = {
    {"BF16", 2, BT_TENSOR_BF16},  {"F32", 4, BT_TENSOR_F32},    {"F16", 2, BT_TENSOR_F16},
    {"F64", 8, BT_TENSOR_OTHER},  {"I64", 8, BT_TENSOR_OTHER},  {"I32", 4, BT_TENSOR_OTHER},
    {"I16", 2, BT_TENSOR_OTHER},  {"I8", 1, BT_TENSOR_OTHER},   {"U64", 8, BT_TENSOR_OTHER},
    {"U32", 4, BT_TENSOR_OTHER},  {"U16", 2, BT_TENSOR_OTHER},  {"U8", 1, BT_TENSOR_OTHER},
    {"BOOL", 1, BT_TENSOR_OTHER}, {"F8_E4M3", 1, BT_TENSOR_F8}, {"F8_E5M2", 1, BT_TENSOR_OTHER},
};

static bt_status_t fail(struct bt_weights *w, bt_status_t status, const char *file, const char *fmt,
                        ...) __attribute__((format(printf, 4, 5)));
static bt_status_t fail(struct bt_weights *w, bt_status_t status, const char *file, const char *fmt,
                        ...)
{
    char text[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    /* Names come from the file: remove control characters, which could affect terminals and
     * logs. */
    for (char *p = text; *p; p++) {
        if ((unsigned char)*p < 0x20 || *p == 0x7f) {
            *p = '?';
        }
    }
    snprintf(w->err, w->err_cap, "%.300s/%s: %s", w->dir, file, text);
    return status;
}

/* Maps dir/name. *missing_p: the file does not exist (as opposed to: cannot be read). */
static bt_status_t file_map(struct bt_weights *w, const char *name, bool *missing_p)
{
    char *path = bt_sprintf("%s/%s", w->dir, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), e = errno;
    free(path);
    *missing_p = fd < 0 && e == ENOENT;
    if (fd < 0) {
        return fail(w, *missing_p ? BT_ERR_NOT_FOUND : BT_ERR_IO, name, "%s", strerror(e));
    }
    struct stat st;
    void *map = MAP_FAILED;
    bt_status_t status = BT_OK;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        status = fail(w, BT_ERR_INVALID, name, "not a regular file");
    } else if (st.st_size < 8) {
        status = fail(w, BT_ERR_INVALID, name,
                      "%lld bytes: a safetensors file begins with 8 "
                      "bytes of header length; the file is cut off",
                      (long long)st.st_size);
    } else {
        map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map == MAP_FAILED) {
            bt_status_t why = errno == ENOMEM ? BT_ERR_NO_MEMORY : BT_ERR_IO;
            status = fail(w, why, name, "mmap: %s", strerror(errno));
        }
    }
    close(fd);
    if (status != BT_OK) {
        return status;
    }
    w->files = bt_realloc(w->files, (w->n_files + 1) * sizeof(*w->files));
    w->files[w->n_files++] =
        (struct weight_file){.name = bt_strdup(name), .map = map, .bytes = (uint64_t)st.st_size};
    return BT_OK;
}

static bool json_u64(const json_t *v, uint64_t *out)
{
    if (!json_is_integer(v) || json_integer_value(v) < 0) {
        return false;
    }
    *out = (uint64_t)json_integer_value(v);
    return true;
}

/* Fills *t from its header entry; data_bytes is the size of the file's data area. */
static bt_status_t tensor_read(struct bt_weights *w, const struct weight_file *f, const char *name,
                               const json_t *entry, uint64_t data_bytes, struct bt_tensor *t)
{
    const char *dt = json_string_value(json_object_get(entry, "dtype"));
    const json_t *shape = json_object_get(entry, "shape");
    const json_t *offs = json_object_get(entry, "data_offsets");
    if (!dt || !json_is_array(shape) || !json_is_array(offs) || json_array_size(offs) != 2) {
        return fail(w, BT_ERR_INVALID, f->name,
                    "tensor %.128s: dtype, shape or data_offsets "
                    "missing or malformed",
                    name);
    }
    size_t k = 0;
    while (k < BT_ARRAY_LEN(dtypes) && strcmp(dt, dtypes[k].name) != 0) {
        k++;
    }
    if (k == BT_ARRAY_LEN(dtypes)) {
        return fail(w, BT_ERR_INVALID, f->name, "tensor %.128s: unknown dtype %.16s", name, dt);
    }
    t->dtype = dtypes[k].dtype;
    snprintf(t->dtype_name, sizeof(t->dtype_name), "%s", dtypes[k].name);
    if (json_array_size(shape) > BT_TENSOR_MAX_DIMS) {
        return fail(w, BT_ERR_INVALID, f->name, "tensor %.128s: %zu dimensions, at most %d", name,
                    json_array_size(shape), BT_TENSOR_MAX_DIMS);
    }
    uint64_t need = dtypes[k].bytes, begin, end;
    t->n_dims = (uint32_t)json_array_size(shape);
    for (uint32_t i = 0; i < t->n_dims; i++) {
        if (!json_u64(json_array_get(shape, i), &t->dims[i])) {
            return fail(w, BT_ERR_INVALID, f->name, "tensor %.128s: shape[%u] is not a count", name,
                        i);
        }
        if (__builtin_mul_overflow(need, t->dims[i], &need)) {
            return fail(w, BT_ERR_INVALID, f->name, "tensor %.128s: shape x dtype overflows", name);
        }
    }
    if (need == 0) { /* it could have any offset, also inside another tensor */
        return fail(w, BT_ERR_INVALID, f->name, "tensor %.128s: has no elements", name);
    }
    if (!json_u64(json_array_get(offs, 0), &begin) || !json_u64(json_array_get(offs, 1), &end) ||
        begin > end) {
        return fail(w, BT_ERR_INVALID, f->name, "tensor %.128s: data_offsets malformed", name);
    }
    if (end > data_bytes) {
        return fail(w, BT_ERR_INVALID, f->name,
                    "tensor %.128s: data_offsets end at %llu, the file "
                    "has %llu bytes of data; it is cut off or damaged",
                    name, (unsigned long long)end, (unsigned long long)data_bytes);
    }
    if (end - begin != need) {
        return fail(w, BT_ERR_INVALID, f->name,
                    "tensor %.128s: %llu bytes at offset %llu, its "
                    "shape needs %llu",
                    name, (unsigned long long)(end - begin), (unsigned long long)begin,
                    (unsigned long long)need);
    }
    t->begin = begin;
    t->bytes = need;
    t->data = f->map + (f->bytes - data_bytes) + begin;
    t->file = f->name;
    return BT_OK;
}

static int by_begin(const void *a, const void *b)
{
    const struct bt_tensor *x = a, *y = b;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct bt_tensor *)a)->name, ((const struct bt_tensor *)b)->name);
}

/* qsort with a check for t == NULL (nothing to sort), which qsort itself does not allow. */
static void sort(struct bt_tensor *t, uint32_t n, int (*by)(const void *a, const void *b))
{
    if (n > 0) {
        qsort(t, n, sizeof(*t), by);
    }
}

/* The tensors must cover the data area exactly: no overlap, no gap, nothing after the last one. */
static bt_status_t check_cover(struct bt_weights *w, const struct weight_file *f, uint32_t first,
                               uint64_t data_bytes)
{
    uint32_t n = w->n_tensors - first;
    struct bt_tensor *t = n > 0 ? w->tensors + first : NULL; /* without tensors there is no table */
    sort(t, n, by_begin);
    uint64_t at = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (t[i].begin != at) {
            return fail(w, BT_ERR_INVALID, f->name,
                        "tensor %.128s: %s at offset %llu (expected "
                        "%llu)",
                        t[i].name, t[i].begin < at ? "overlaps its neighbour" : "hole",
                        (unsigned long long)t[i].begin, (unsigned long long)at);
        }
        at += t[i].bytes;
    }
    if (at != data_bytes) {
        return fail(w, BT_ERR_INVALID, f->name, "%llu bytes behind the last tensor (offset %llu)",
                    (unsigned long long)(data_bytes - at), (unsigned long long)at);
    }
    return BT_OK;
}

static bt_status_t file_tensors(struct bt_weights *w, const struct weight_file *f,
                                const json_t *header, uint64_t data_bytes)
{
    uint32_t first = w->n_tensors;
    const char *name;
    json_t *entry;
    json_object_foreach((json_t *)header, name, entry)
    {
        if (strcmp(name, "__metadata__") == 0) {
            continue;
        }
        if (w->n_tensors == TENSORS_MAX) {
            return fail(w, BT_ERR_TOO_LARGE, f->name, "more than %u tensors", TENSORS_MAX);
        }
        if (w->n_tensors == w->cap_tensors) {
            w->cap_tensors = BT_MAX(64u, w->cap_tensors * 2);
            w->tensors = bt_realloc(w->tensors, w->cap_tensors * sizeof(*w->tensors));
        }
        struct bt_tensor t = {0};
        bt_status_t st = tensor_read(w, f, name, entry, data_bytes, &t);
        if (st != BT_OK) {
            return st;
        }
        t.name = bt_strdup(name);
        w->tensors[w->n_tensors++] = t;
    }
    return check_cover(w, f, first, data_bytes);
}

static bt_status_t file_read(struct bt_weights *w, const struct weight_file *f)
{
    uint64_t n = 0;
    for (int i = 7; i >= 0; i--) {
        n = n << 8 | f->map[i];
    }
    static const char lfs[] = "version https://git-lfs";
    if (f->bytes > sizeof(lfs) && memcmp(f->map, lfs, sizeof(lfs) - 1) == 0) {
        return fail(w, BT_ERR_INVALID, f->name,
                    "a Git LFS pointer, not the weights; fetch them with 'git lfs pull' in the "
                    "model directory");
    }
    if (n > HEADER_BYTES_MAX) {
        return fail(w, BT_ERR_TOO_LARGE, f->name,
                    "header length %llu, at most %u is allowed; not "
                    "a safetensors file?",
                    (unsigned long long)n, HEADER_BYTES_MAX);
    }
    if (n > f->bytes - 8) {
        return fail(w, BT_ERR_INVALID, f->name,
                    "header length %llu, the file has %llu bytes; it "
                    "is cut off",
                    (unsigned long long)n, (unsigned long long)f->bytes);
    }
    json_error_t je;
    json_t *header = json_loadb((const char *)f->map + 8, (size_t)n, JSON_REJECT_DUPLICATES, &je);
    if (!header || !json_is_object(header)) {
        bool dup = !header && strstr(je.text, "duplicate");
        json_decref(header);
        return fail(w, BT_ERR_INVALID, f->name, "header: %s (offset %d): %.160s",
                    dup ? "duplicate tensor or key" : "not a JSON object", je.position + 8,
                    header ? "" : je.text);
    }
    bt_status_t st = file_tensors(w, f, header, f->bytes - 8 - n);
    json_decref(header);
    return st;
}

/* Maps the shards that the index names, each one once. */
static bt_status_t shards_map(struct bt_weights *w, const char *index, const json_t *map)
{
    const char *tensor;
    json_t *v;
    json_object_foreach((json_t *)map, tensor, v)
    {
        const char *file = json_string_value(v);
        if (!file || !*file || strchr(file, '/') || file[0] == '.' || strlen(file) > 255) {
            return fail(w, BT_ERR_INVALID, index,
                        "weight_map.%.128s: must be the name of a file "
                        "in the same directory",
                        tensor);
        }
        bool known = false, missing;
        for (uint32_t i = 0; i < w->n_files; i++) {
            known |= strcmp(w->files[i].name, file) == 0;
        }
        if (known) {
            continue;
        }
        if (w->n_files == SHARDS_MAX) {
            return fail(w, BT_ERR_TOO_LARGE, index, "more than %d shards", SHARDS_MAX);
        }
        bt_status_t st = file_map(w, file, &missing);
        if (st != BT_OK) {
            return missing ? fail(w, BT_ERR_NOT_FOUND, index,
                                  "weight_map.%.128s: the shard %.128s "
                                  "is missing",
                                  tensor, file)
                           : st;
        }
    }
    return BT_OK;
}

static bt_status_t open_sharded(struct bt_weights *w)
{
    static const char index[] = "model.safetensors.index.json";
    char *path = bt_sprintf("%s/%s", w->dir, index);
    json_error_t je;
    bool there = access(path, F_OK) == 0;
    json_t *root = there ? json_load_file(path, JSON_REJECT_DUPLICATES, &je) : NULL;
    free(path);
    if (!there) {
        return fail(w, BT_ERR_NOT_FOUND, "model.safetensors",
                    "no such file, and no %s either; "
                    "weights must be safetensors",
                    index);
    }
    const json_t *map = json_object_get(root, "weight_map");
    bt_status_t st = BT_OK;
    if (!root) {
        st = fail(w, BT_ERR_INVALID, index, "line %d: not valid JSON: %.160s", je.line, je.text);
    } else if (!json_is_object(map) || json_object_size(map) == 0) {
        st = fail(w, BT_ERR_INVALID, index, "weight_map: missing or empty");
    } else {
        st = shards_map(w, index, map);
    }
    for (uint32_t i = 0; st == BT_OK && i < w->n_files; i++) {
        st = file_read(w, &w->files[i]);
    }
    const char *tensor;
    json_t *v;
    if (st == BT_OK) {
        sort(w->tensors, w->n_tensors, by_name);
        json_object_foreach((json_t *)map, tensor, v)
        {
            const struct bt_tensor *t = bt_weights_find(w, tensor);
            if (!t || strcmp(t->file, json_string_value(v)) != 0) {
                st = fail(w, BT_ERR_INVALID, index, "weight_map.%.128s: not in %.128s", tensor,
                          json_string_value(v));
                break;
            }
        }
    }
    json_decref(root);
    return st;
}

bt_status_t bt_weights_open(const char *dir, struct bt_weights **w_p, char *err, size_t err_cap)
{
    struct bt_weights *w = bt_calloc(1, sizeof(*w));
    *w = (struct bt_weights){.dir = dir, .err = err, .err_cap = err_cap};
    bool missing;
    bt_status_t st = file_map(w, "model.safetensors", &missing);
    if (st == BT_OK) {
        st = file_read(w, &w->files[0]);
    } else if (missing) {
        st = open_sharded(w);
    }
    if (st == BT_OK) {
        sort(w->tensors, w->n_tensors, by_name);
        for (uint32_t i = 1; i < w->n_tensors; i++) {
            if (strcmp(w->tensors[i - 1].name, w->tensors[i].name) == 0) {
                st = fail(w, BT_ERR_INVALID, w->tensors[i].file,
                          "tensor %.128s: duplicate, also "
                          "in %.128s",
                          w->tensors[i].name, w->tensors[i - 1].file);
                break;
            }
        }
    }
    w->dir = NULL; /* these strings belong to the caller */
    w->err = NULL;
    if (st != BT_OK) {
        bt_weights_close(w);
        return st;
    }
    *w_p = w;
    return BT_OK;
}

void bt_weights_close(struct bt_weights *w)
{
    if (!w) {
        return;
    }
    for (uint32_t i = 0; i < w->n_tensors; i++) {
        free(w->tensors[i].name);
    }
    for (uint32_t i = 0; i < w->n_files; i++) {
        munmap(w->files[i].map, (size_t)w->files[i].bytes);
        free(w->files[i].name);
    }
    free(w->tensors);
    free(w->files);
    free(w);
}

const struct bt_tensor *bt_weights_find(const struct bt_weights *w, const char *name)
{
    struct bt_tensor key = {.name = (char *)name};
    return w->n_tensors ? bsearch(&key, w->tensors, w->n_tensors, sizeof(key), by_name) : NULL;
}

static int file_by_name(const void *a, const void *b)
{
    return strcmp(((const struct weight_file *)a)->name, ((const struct weight_file *)b)->name);
}

struct digest_piece {
    const uint8_t *p;
    size_t n;
    uint8_t hash[BT_SHA256_LEN];
};
static void hash_piece(void *arg, uint32_t i)
{
    struct digest_piece *d = (struct digest_piece *)arg + i;
    bt_sha256(d->p, d->n, d->hash);
}

void bt_weights_digest(const struct bt_weights *w, uint8_t out[32])
{
    struct weight_file *sorted = bt_calloc(w->n_files, sizeof(*sorted));
    memcpy(sorted, w->files, w->n_files * sizeof(*sorted));
    qsort(sorted, w->n_files, sizeof(*sorted), file_by_name);
    uint32_t n = 0, at = 0;
    for (uint32_t i = 0; i < w->n_files; i++) {
        n += (uint32_t)BT_DIV_UP(sorted[i].bytes, BT_WEIGHTS_PIECE);
    }
    struct digest_piece *pieces = bt_calloc(n, sizeof(*pieces));
    for (uint32_t i = 0; i < w->n_files; i++) {
        for (uint64_t o = 0; o < sorted[i].bytes; o += BT_WEIGHTS_PIECE) {
            size_t m = (size_t)BT_MIN(sorted[i].bytes - o, (uint64_t)BT_WEIGHTS_PIECE);
            pieces[at++] = (struct digest_piece){.p = sorted[i].map + o, .n = m};
        }
    }
    bt_parallel(n, hash_piece, pieces);
    struct bt_sha256 *h = bt_sha256_create();
    at = 0;
    for (uint32_t i = 0; i < w->n_files; i++) {
        uint8_t size[8];
        for (int b = 0; b < 8; b++) {
            size[b] = (uint8_t)(sorted[i].bytes >> (8 * b));
        }
        bt_sha256_update(h, sorted[i].name, strlen(sorted[i].name) + 1);
        bt_sha256_update(h, size, sizeof(size));
        for (uint64_t o = 0; o < sorted[i].bytes; o += BT_WEIGHTS_PIECE) {
            bt_sha256_update(h, pieces[at++].hash, BT_SHA256_LEN);
        }
    }
    bt_sha256_finish(h, out);
    free(pieces);
    free(sorted);
}

static float value_16(const struct bt_tensor *t, uint64_t i)
{
    uint16_t b;
    memcpy(&b, t->data + i * 2, 2); /* data may be at an odd address */
    if (t->dtype == BT_TENSOR_BF16) {
        return bt_f32_of_bf16(b);
    }
    _Float16 h;
    memcpy(&h, &b, 2);
    return (float)h;
}

/* Value i of a tensor of 16 or 32 bits. */
static float value(const struct bt_tensor *t, uint64_t i)
{
    if (t->dtype != BT_TENSOR_F32) {
        return value_16(t, i);
    }
    float f;
    memcpy(&f, t->data + i * 4, 4);
    return f;
}

/* The scales of an F8 matrix: `<name>_scale_inv` or `<name>_scale`, both to be multiplied with. */
static bt_status_t want_scale(const struct bt_weights *w, const struct bt_weights_wish *wish,
                              struct bt_tensor *t, char *err, size_t err_cap)
{
    char name[160];
    const struct bt_tensor *s = NULL;
    static const char *const ends[] = {"_scale_inv", "_scale"};
    for (size_t i = 0; !s && i < BT_ARRAY_LEN(ends); i++) {
        snprintf(name, sizeof(name), "%s%s", wish->name, ends[i]);
        s = bt_weights_find(w, name);
    }
    t->block_rows = BT_MIN(wish->fp8->block_rows, wish->rows);
    t->block_cols = BT_MIN(wish->fp8->block_cols, wish->cols);
    uint64_t rows = BT_DIV_UP(wish->rows, t->block_rows),
             cols = BT_DIV_UP(wish->cols, t->block_cols), n = 1;
    for (uint32_t i = 0; s && i < s->n_dims; i++) {
        n *= s->dims[i];
    }
    /* One scale may stand in a list or alone, those of rows in a list or a column. */
    bool fits = s && n == rows * cols && (cols == 1 || (s->n_dims == 2 && s->dims[0] == rows));
    if (!fits || s->dtype == BT_TENSOR_OTHER || s->dtype == BT_TENSOR_F8) {
        snprintf(err, err_cap,
                 "%s/%s: tensor %s is F8_E4M3: %s_scale_inv or %s_scale of BF16, F16 or F32 must "
                 "have %llu x %llu scales, one for each %u x %u block",
                 wish->dir, t->file, wish->name, wish->name, wish->name, (unsigned long long)rows,
                 (unsigned long long)cols, t->block_rows, t->block_cols);
        return BT_ERR_INVALID;
    }
    for (uint64_t i = 0; i < n; i++) {
        if (!__builtin_isfinite(value(s, i))) {
            snprintf(err, err_cap, "%s/%s: tensor %s: scale %llu is not a finite number", wish->dir,
                     s->file, s->name, (unsigned long long)i);
            return BT_ERR_INVALID;
        }
    }
    t->scale = s;
    return BT_OK;
}

bt_status_t bt_weights_want(const struct bt_weights *w, const struct bt_weights_wish *wish,
                            const struct bt_tensor **t_p, char *err, size_t err_cap)
{
    const char *name = wish->name, *dir = wish->dir;
    const uint32_t rows = wish->rows, cols = wish->cols;
    const struct bt_tensor *t = bt_weights_find(w, name);
    if (!t) {
        snprintf(err, err_cap,
                 "%s: tensor %s is missing; config.json names %s with %u layers: are config and "
                 "weights of the same model?",
                 dir, name, wish->architecture, wish->layers);
        return BT_ERR_INVALID;
    }
    bool fits = rows ? t->n_dims == 2 && t->dims[0] == rows && t->dims[1] == cols
                     : t->n_dims == 1 && t->dims[0] == cols;
    if (!fits) {
        snprintf(err, err_cap,
                 "%s/%s: tensor %s: shape [%llu, %llu...] of %u dimensions, config.json asks for "
                 "[%u, %u]",
                 dir, t->file, name, (unsigned long long)t->dims[0], (unsigned long long)t->dims[1],
                 t->n_dims, BT_MAX(rows, 1u), cols);
        return BT_ERR_INVALID;
    }
    if (t->dtype == BT_TENSOR_OTHER) {
        snprintf(err, err_cap,
                 "%s/%s: tensor %s: dtype %s is not supported; supported are BF16, F16, F32 and, "
                 "with scales, F8_E4M3",
                 dir, t->file, name, t->dtype_name);
        return BT_ERR_UNSUPPORTED;
    }
    if ((t->dtype == BT_TENSOR_F8) != (wish->fp8 != NULL)) {
        snprintf(err, err_cap,
                 "%s/%s: tensor %s: dtype %s, but by config.json it is %sfp8; correct "
                 "quantization_config and its list of modules that are not converted",
                 dir, t->file, name, t->dtype_name, wish->fp8 ? "" : "not ");
        return BT_ERR_UNSUPPORTED;
    }
    struct bt_tensor *found = &w->tensors[t - w->tensors];
    bt_status_t st = wish->fp8 ? want_scale(w, wish, found, err, err_cap) : BT_OK;
    if (st == BT_OK) {
        found->used = true;
        *t_p = t;
    }
    return st;
}

static bool ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), m = strlen(end);
    return n >= m && strcmp(s + n - m, end) == 0;
}

/* The number of the layer that a tensor's name begins with, in the names of Llama and of GPT-2;
 * UINT32_MAX: none. */
static uint32_t layer_of(const char *name)
{
    unsigned layer;
    return sscanf(name, "model.layers.%u.", &layer) == 1 || sscanf(name, "h.%u.", &layer) == 1 ||
                   sscanf(name, "transformer.h.%u.", &layer) == 1
               ? layer
               : UINT32_MAX;
}

/* GPT-2's files may have the causal mask and its value. */
static bool is_mask(const char *name)
{
    return ends_with(name, ".attn.bias") || ends_with(name, ".attn.masked_bias");
}

/* Tensors with other names, such as a head for rewards, belong to another model in the file. */
static bool is_of_decoder(const char *name)
{
    static const char *const begins[] = {"model.", "lm_head.", "transformer."};
    for (size_t i = 0; i < BT_ARRAY_LEN(begins); i++) {
        if (strncmp(name, begins[i], strlen(begins[i])) == 0) {
            return true;
        }
    }
    return layer_of(name) != UINT32_MAX;
}

const struct bt_tensor *bt_weights_unused(const struct bt_weights *w, uint32_t layers, uint32_t mtp)
{
    for (uint32_t i = 0; i < w->n_tensors; i++) {
        const struct bt_tensor *t = &w->tensors[i];
        uint32_t layer = layer_of(t->name);
        bool known = is_mask(t->name) || strcmp(t->name, "lm_head.weight") == 0 ||
                     (layer >= layers && layer - layers < mtp);
        if (!t->used && !known && is_of_decoder(t->name) &&
            (ends_with(t->name, ".weight") || ends_with(t->name, "bias"))) {
            return t;
        }
    }
    return NULL;
}

const struct bt_tensor *bt_weights_not_finite(const struct bt_weights *w)
{
    for (uint32_t i = 0; i < w->n_tensors; i++) {
        if (__atomic_load_n(&w->tensors[i].not_finite, __ATOMIC_RELAXED)) {
            return &w->tensors[i];
        }
    }
    return NULL;
}

bool bt_weights_wide(const struct bt_weights *w)
{
    double wide = 0, all = 0;
    for (uint32_t i = 0; i < w->n_tensors; i++) {
        const struct bt_tensor *t = &w->tensors[i];
        if (t->n_dims == 2 && ends_with(t->name, ".weight")) { /* not the scales of fp8 */
            double n = (double)t->dims[0] * (double)t->dims[1];
            wide += t->dtype == BT_TENSOR_F16 || t->dtype == BT_TENSOR_F32 ? n : 0;
            all += n;
        }
    }
    return 2 * wide > all;
}

/* Values [from, from + n) of an F8 matrix, run by run of those that share a scale. */
static void convert_f8(const struct bt_tensor *t, uint64_t from, size_t n, bt_tensor_dtype_t as,
                       void *out)
{
    uint64_t cols = t->dims[1], across = BT_DIV_UP(cols, t->block_cols);
    float table[256];
    bool finite = true;
    for (int i = 0; i < 256; i++) {
        table[i] = bt_f32_of_e4m3((uint8_t)i);
    }
    for (size_t i = 0; i < n;) {
        uint64_t row = (from + i) / cols, col = (from + i) % cols, block = col / t->block_cols;
        uint64_t end = BT_MIN((block + 1) * t->block_cols, cols);
        float scale = value(t->scale, row / t->block_rows * across + block);
        for (; col < end && i < n; col++, i++) {
            float f = table[t->data[from + i]] * scale;
            finite &= __builtin_isfinite(f);
            if (as == BT_TENSOR_F32) {
                ((float *)out)[i] = f;
            } else {
                ((uint16_t *)out)[i] = bt_bf16_of_f32(f);
            }
        }
    }
    if (!finite) { /* several threads convert a matrix */
        __atomic_store_n(&((struct bt_tensor *)t)->not_finite, true, __ATOMIC_RELAXED);
    }
}

static size_t item_bytes(bt_tensor_dtype_t type)
{
    return type == BT_TENSOR_F32 ? 4 : type == BT_TENSOR_F8 ? 1 : 2;
}

static void convert(const struct bt_tensor *t, uint64_t from, size_t n, bt_tensor_dtype_t as,
                    void *out)
{
    size_t item = item_bytes(t->dtype);
    if (t->dtype == as) {
        memcpy(out, t->data + from * item, n * item);
        return;
    }
    if (t->dtype == BT_TENSOR_F8) {
        convert_f8(t, from, n, as, out);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        float f = value(t, from + i);
        if (as == BT_TENSOR_F32) {
            ((float *)out)[i] = f;
        } else {
            ((uint16_t *)out)[i] = bt_bf16_of_f32(f);
        }
    }
}

struct values {
    const struct bt_tensor *t;
    uint64_t from;
    size_t n;
    bt_tensor_dtype_t as;
    uint8_t *out;
};
#define VALUES_PART ((size_t)1 << 20) /* values that a thread converts at once */
static void convert_part(void *arg, uint32_t i)
{
    const struct values *v = arg;
    size_t at = i * VALUES_PART, item = item_bytes(v->as);
    convert(v->t, v->from + at, BT_MIN(v->n - at, VALUES_PART), v->as, v->out + at * item);
}

void bt_tensor_values(const struct bt_tensor *t, uint64_t from, size_t n, bt_tensor_dtype_t as,
                      void *out)
{
    BT_ASSERT(t->dtype != BT_TENSOR_OTHER &&
              (as == BT_TENSOR_F32 || as == BT_TENSOR_BF16 || as == t->dtype));
    struct values v = {.t = t, .from = from, .n = n, .as = as, .out = out};
    bt_parallel((uint32_t)BT_DIV_UP(n, VALUES_PART), convert_part, &v);
}

void bt_tensor_ahead(const struct bt_tensor *t)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)t->data & ~(page - 1);
    /* Only a hint: without it the same bytes are read in smaller pieces. */
    (void)madvise((void *)begin, (uintptr_t)t->data - begin + (size_t)t->bytes, MADV_WILLNEED);
}
