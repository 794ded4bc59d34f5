/* Presets and files of simulated clusters. A comment at each preset says where its figures come
 * from. */
#include "conductor/sim/cluster.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "conductor/sim/lines.h"
#include "conductor/sim/trace.h"

/* 16 nodes of 8 x A800 (2,496 TFLOP/s bf16, 16.3 TB/s), Llama-2-70B shape, 4 x 200 Gb/s: the
 * testbed of Mooncake (FAST'25, section 5.1). The figures are computed, not measured. Prefill: half
 * of the peak (138 GFLOP a token, 2.62 MFLOP a token and token of context). Decode: three quarters
 * of the bandwidth, and 10 ms for the all-reduces of 80 layers. Links: the 87 GB/s that FAST'25
 * reports. DRAM: 3M tokens (section 5.3). FAST'25 does not say the split or the SSD's speed: 8 and
 * 8 nodes, 12 and 6 GB/s are guesses. */
static const struct bt_sim_cluster a800_70b = {
    .prefill_nodes = 8,
    .decode_nodes = 8,
    .prefill = {.base_ns = 10e6, .token_ns = BT_BATCH_TOKEN_NS(110600), .attn_ns = 2.1},
    .decode = {.base_ns = 21e6, .kv_ns = 26.8, .token_ns = BT_BATCH_TOKEN_NS(50000)},
    .chunk_tokens = 8192,
    .token_bytes = 327680,
    .layers = 80,
    .link_bytes_per_s = 87e9,
    .load_bytes_per_s = 160e9,
    .cache_tokens = 3e6,
    .ssd_read_bytes_per_s = 12e9,
    .ssd_write_bytes_per_s = 6e9,
    .kv_tokens = 1.3e6,
    .rows_max = 256,
};

/* 16 nodes of one H200, Llama-3-8B shape. The costs are fitted to what compiled torch code measured
 * on one H200: prefill of 8k and 32k tokens 212.6 and 1238 ms; decode step of 1 and 64 rows at 1k
 * 4.94 and 8.25 ms, of 64 rows at 8k 32.0 ms; 55 GB/s to the device. Links of 400 Gb/s, 1M tokens
 * (131 GB) of DRAM for each GPU. */
static const struct bt_sim_cluster h200_8b = {
    .prefill_nodes = 8,
    .decode_nodes = 8,
    .prefill = {.base_ns = 0, .token_ns = BT_BATCH_TOKEN_NS(22010), .attn_ns = 0.9625},
    .decode = {.base_ns = 4.89e6, .kv_ns = 51.8, .token_ns = BT_BATCH_TOKEN_NS(0)},
    .chunk_tokens = 8192,
    .token_bytes = 131072,
    .layers = 32,
    .link_bytes_per_s = 48e9,
    .load_bytes_per_s = 55e9,
    .cache_tokens = 1e6,
    .ssd_read_bytes_per_s = 6e9,
    .ssd_write_bytes_per_s = 3e9,
    .kv_tokens = 850e3,
    .rows_max = 256,
};

/* 16 nodes of one H200, Qwen3-30B-A3B in bf16. Costs are fitted to steps of Baton's GPU engine
 * measured on one H200 (2026-11-24): 1, 8 and 64 rows at 1k 3.47, 8.62, 18.10 ms; a prompt of 8k
 * 138 ms, of it attention 44 ms. Reading all experts is what makes the difference between the three
 * steps (48 layers x 300 us; experts alone measured 303 us a layer at 128 rows). Context: 98,304
 * bytes a token at 4.2 TB/s. KV: what 90 % of 141 GB leave beside 61 GB of weights. The rest as for
 * h200-8b, 131 GB of DRAM. */
static const struct bt_sim_cluster h200_qwen3_30b = {
    .prefill_nodes = 8,
    .decode_nodes = 8,
    .prefill = {.base_ns = 2.54e6,
                .token_ns = BT_BATCH_TOKEN_NS(9380),
                .attn_ns = 1.317,
                .experts_ns = 14.4e6,
                .missed = 1 - 8.0 / 128},
    .decode = {.base_ns = 2.54e6,
               .kv_ns = 23.4,
               .token_ns = BT_BATCH_TOKEN_NS(0),
               .experts_ns = 14.4e6,
               .missed = 1 - 8.0 / 128},
    .chunk_tokens = 8192,
    .token_bytes = 98304,
    .layers = 48,
    .link_bytes_per_s = 48e9,
    .load_bytes_per_s = 55e9,
    .cache_tokens = 1.33e6,
    .ssd_read_bytes_per_s = 6e9,
    .ssd_write_bytes_per_s = 3e9,
    .kv_tokens = 670e3,
    .rows_max = 256,
};

/* 16 nodes of one H200, DeepSeek-V2-Lite in bf16. Put together from measured layers (H200,
 * 2026-11-24), not from measured steps. Experts: 33.5, 153, 262 us a layer for 1, 8, 32 rows, so
 * 270 us x 26 layers for all of them; 8,192 rows 1,558 us. Base: 2.2 GB of other weights at 4.3
 * TB/s, and the 40 us a layer by which steps of the same shape without experts exceed their floor.
 * Context: MLA decode with 16 heads, 64 rows at 8k, 146 us a layer. Prompt of 8k: experts 40.5 ms,
 * attention 506 us x 27 layers, everything else 28 ms. KV as for h200-qwen3-30b. */
static const struct bt_sim_cluster h200_v2_lite = {
    .prefill_nodes = 8,
    .decode_nodes = 8,
    .prefill = {.base_ns = 1.6e6,
                .token_ns = BT_BATCH_TOKEN_NS(7290),
                .attn_ns = 0.407,
                .experts_ns = 7.02e6,
                .missed = 1 - 6.0 / 64},
    .decode = {.base_ns = 1.6e6,
               .kv_ns = 7.5,
               .token_ns = BT_BATCH_TOKEN_NS(0),
               .experts_ns = 7.02e6,
               .missed = 1 - 6.0 / 64},
    .chunk_tokens = 8192,
    .token_bytes = 31104,
    .layers = 27,
    .link_bytes_per_s = 48e9,
    .load_bytes_per_s = 55e9,
    .cache_tokens = 4.2e6,
    .ssd_read_bytes_per_s = 6e9,
    .ssd_write_bytes_per_s = 3e9,
    .kv_tokens = 3.07e6,
    .rows_max = 256,
};

/* 16 nodes of 8 H200, DeepSeek-V3 in fp8, f16 latents; 32 experts of each layer and an eighth of
 * the rows on each GPU. Computed: Baton runs no model on several GPUs yet. Measured parts: 32 of
 * V3's experts in bf16, 663 us a layer (32 rows; fp8 is taken as half), MLA decode with 128 heads,
 * 128 rows at 8k, 601 us; MLA prefill, 8k, 3,765 us; 40 us a layer of launches and small kernels.
 * Base: these, 14.9 GB of other weights at 4.1 TB/s on each GPU (attention, shared experts), and 50
 * us a layer for two exchanges between the GPUs, a guess. Tokens: 74 GFLOP at 900 TFLOP/s a GPU, a
 * guess from fp8 products of 1,083 to 1,318, and 10 MB of exchange at 394 GB/s a GPU; rows, at 1
 * PFLOP/s. KV: what 90 % of 141 GB leave beside 98 GB of weights, on eight GPUs. */
static const struct bt_sim_cluster h200x8_v3 = {
    .prefill_nodes = 8,
    .decode_nodes = 8,
    .prefill = {.base_ns = 8.9e6,
                .token_ns = BT_BATCH_TOKEN_NS(13500),
                .attn_ns = 0.856,
                .experts_ns = 19.2e6,
                .missed = 1 - 8.0 / 256},
    .decode = {.base_ns = 8.9e6,
               .kv_ns = 4.4,
               .token_ns = BT_BATCH_TOKEN_NS(9250),
               .experts_ns = 19.2e6,
               .missed = 1 - 8.0 / 256},
    .chunk_tokens = 16384,
    .token_bytes = 70272,
    .layers = 61,
    .link_bytes_per_s = 384e9,
    .load_bytes_per_s = 440e9,
    .cache_tokens = 14.9e6,
    .ssd_read_bytes_per_s = 12e9,
    .ssd_write_bytes_per_s = 6e9,
    .kv_tokens = 3.29e6,
    .rows_max = 1024,
};

static const struct {
    const char *name;
    uint32_t gpus; /* of a node */
    const struct bt_sim_cluster *c;
} presets[] = {{"a800-70b", 8, &a800_70b},
               {"h200-8b", 1, &h200_8b},
               {"h200-qwen3-30b", 1, &h200_qwen3_30b},
               {"h200-v2-lite", 1, &h200_v2_lite},
               {"h200x8-v3", 8, &h200x8_v3}};
const char bt_sim_cluster_names[] = "a800-70b, h200-8b, h200-qwen3-30b, h200-v2-lite or h200x8-v3";

const char *bt_sim_cluster_preset(uint32_t i)
{
    return i < BT_ARRAY_LEN(presets) ? presets[i].name : NULL;
}

uint32_t bt_sim_cluster_gpus(const char *name)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(presets); i++) {
        if (strcmp(presets[i].name, name) == 0) {
            return presets[i].gpus;
        }
    }
    return 1;
}

#define KEY(k, m, lo, hi, doc)                                                                     \
    {                                                                                              \
        k, offsetof(struct bt_sim_cluster, m), lo, hi, doc, false                                  \
    }
#define WHOLE(k, m, lo, hi, doc)                                                                   \
    {                                                                                              \
        k, offsetof(struct bt_sim_cluster, m), lo, hi, doc, true                                   \
    }
static const struct {
    const char *name;
    size_t offset;
    double min, max;
    const char *doc;
    bool whole;
} keys[] = {
    WHOLE("prefill_nodes", prefill_nodes, 1, 1e4, "nodes that prefill"),
    WHOLE("decode_nodes", decode_nodes, 1, 1e4, "nodes that decode"),
    KEY("prefill_base_ns", prefill.base_ns, 0, 1e15, "fixed time of a prefill step"),
    KEY("prefill_token_ns", prefill.token_ns[0], 0, 1e15, "time for each token of a prefill step"),
    KEY("prefill_experts_ns", prefill.experts_ns, 0, 1e15,
        "time to read all experts in a prefill step"),
    KEY("prefill_attn_ns", prefill.attn_ns, 0, 1e15,
        "time for each pair of a prompt token and an earlier token"),
    KEY("decode_base_ns", decode.base_ns, 1, 1e15, "fixed time of a decode step"),
    KEY("decode_kv_ns", decode.kv_ns, 0, 1e15,
        "time for each token of the rows' context in a decode step"),
    KEY("decode_token_ns", decode.token_ns[0], 0, 1e15, "time for each row of a decode step"),
    KEY("decode_experts_ns", decode.experts_ns, 0, 1e15,
        "time to read all experts in a decode step"),
    KEY("experts_missed", decode.missed, 0, 1, "share of the experts that one token does not use"),
    WHOLE("chunk_tokens", chunk_tokens, 1, 1e9, "most prompt tokens of a prefill step"),
    KEY("token_bytes", token_bytes, 1, 4e9, "KV of a token, all layers"),
    WHOLE("layers", layers, 1, 1e6,
          "layers of the model; hand-off of all but the last overlaps prefill"),
    KEY("link_bytes_per_s", link_bytes_per_s, 1, 1e15,
        "network bandwidth of a node, in each direction"),
    KEY("load_bytes_per_s", load_bytes_per_s, 1, 1e15, "bandwidth from the slab to the GPU"),
    KEY("cache_tokens", cache_tokens, 0, 1e12, "tokens in a prefill node's slab; 0: unlimited"),
    KEY("ssd_tokens", ssd_tokens, 0, 1e12, "tokens on a node's SSD; 0: no SSD"),
    KEY("ssd_read_bytes_per_s", ssd_read_bytes_per_s, 0, 1e15,
        "read bandwidth of the SSD; 0: unlimited"),
    KEY("ssd_write_bytes_per_s", ssd_write_bytes_per_s, 0, 1e15,
        "write bandwidth of the SSD; 0: unlimited"),
    KEY("kv_tokens", kv_tokens, 1, 1e12, "tokens in the GPU pages of a decode node"),
    WHOLE("rows_max", rows_max, 1, 1e6, "most rows of a decode step"),
};

bool bt_sim_cluster_key(const struct bt_sim_cluster *c, uint32_t i, const char **key_p,
                        double *value_p, const char **doc_p)
{
    if (i >= BT_ARRAY_LEN(keys)) {
        return false;
    }
    *key_p = keys[i].name;
    *value_p = *(const double *)((const char *)c + keys[i].offset);
    *doc_p = keys[i].doc;
    return true;
}

_Static_assert(BT_ARRAY_LEN(keys) < 64, "they are bits of seen_p");

/* The key's place in keys. The number of keys: it is not one of them. */
static size_t key_of(const char *key, size_t len)
{
    size_t i = 0;
    while (i < BT_ARRAY_LEN(keys) &&
           (strlen(keys[i].name) != len || memcmp(keys[i].name, key, len) != 0)) {
        i++;
    }
    return i;
}

static bt_status_t set(struct bt_sim_cluster *c, const char *key, size_t len, const char *value,
                       char *err, size_t cap)
{
    size_t i = key_of(key, len);
    if (i < BT_ARRAY_LEN(keys)) {
        char *end;
        double v = strtod(value, &end);
        end += strspn(end, " \t\r\n");
        if (end == value || *end != '\0' || !(v >= keys[i].min && v <= keys[i].max)) {
            snprintf(err, cap, "%s: '%s' is not a number from %g to %g", keys[i].name, value,
                     keys[i].min, keys[i].max);
            return BT_ERR_INVALID;
        }
        if (keys[i].whole && v != floor(v)) {
            snprintf(err, cap, "%s: '%s' is not a whole number", keys[i].name, value);
            return BT_ERR_INVALID;
        }
        if (keys[i].offset == offsetof(struct bt_sim_cluster, cache_tokens) && v > 0 &&
            v < BT_SIM_BLOCK_TOKENS) {
            snprintf(err, cap, "cache_tokens: '%s' is less than a block of %d tokens", value,
                     BT_SIM_BLOCK_TOKENS);
            return BT_ERR_INVALID;
        }
        *(double *)((char *)c + keys[i].offset) = v;
        c->prefill.missed = c->decode.missed;
        /* one price for all of a step's tokens */
        for (uint32_t k = 1; k < BT_BATCH_SEGMENTS; k++) {
            c->prefill.token_ns[k] = c->prefill.token_ns[0];
            c->decode.token_ns[k] = c->decode.token_ns[0];
        }
        return BT_OK;
    }
    snprintf(err, cap, "there is no key '%.*s'; baton-sim clusters lists them", (int)len, key);
    return BT_ERR_INVALID;
}

bt_status_t bt_sim_cluster_set(struct bt_sim_cluster *c, const char *assignment, char *err,
                               size_t err_cap)
{
    const char *eq = strchr(assignment, '=');
    if (eq == NULL) {
        snprintf(err, err_cap, "'%s' is not key=value", assignment);
        return BT_ERR_INVALID;
    }
    return set(c, assignment, (size_t)(eq - assignment), eq + 1, err, err_cap);
}

static const struct bt_sim_cluster *preset(const char *name)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(presets); i++) {
        if (strcmp(presets[i].name, name) == 0) {
            return presets[i].c;
        }
    }
    return NULL;
}

/* *seen_p: the keys of the lines before, as bits; the first bit behind them is the preset. */
static bt_status_t read_line(struct bt_sim_cluster *c, char *p, uint64_t *seen_p, char *err,
                             size_t cap)
{
    p[strcspn(p, "#\r\n")] = '\0';
    p += strspn(p, " \t");
    size_t key = strcspn(p, ": \t");
    char *value = p + key + strspn(p + key, " \t");
    if (*p == '\0') {
        return BT_OK;
    }
    if (*value != ':') {
        snprintf(err, cap, "'%s' is not key: value", p);
        return BT_ERR_INVALID;
    }
    value += 1 + strspn(value + 1, " \t");
    uint64_t bit = 1ull << key_of(p, key);
    if ((*seen_p & bit) != 0) {
        snprintf(err, cap, "%.*s stands above already; a file has one cluster", (int)key, p);
        return BT_ERR_INVALID;
    }
    if (key != 6 || memcmp(p, "preset", 6) != 0) {
        bt_status_t st = set(c, p, key, value, err, cap);
        *seen_p |= st == BT_OK ? bit : 0;
        return st;
    }
    value[strcspn(value, " \t")] = '\0';
    if (preset(value) == NULL) {
        snprintf(err, cap, "preset: there is no '%s'; use %s", value, bt_sim_cluster_names);
        return BT_ERR_INVALID;
    }
    if (*seen_p != 0) {
        snprintf(err, cap, "preset: it would undo the keys above it; give it first");
        return BT_ERR_INVALID;
    }
    *c = *preset(value);
    *seen_p |= bit;
    return BT_OK;
}

bt_status_t bt_sim_cluster_load(const char *name, struct bt_sim_cluster *c, char *err,
                                size_t err_cap)
{
    if (preset(name) != NULL) {
        *c = *preset(name);
        return BT_OK;
    }
    FILE *f = fopen(name, "r");
    if (f == NULL) {
        snprintf(err, err_cap, "%s: no preset and %s; use %s, or a file of 'key: value' lines",
                 name, strerror(errno), bt_sim_cluster_names);
        return BT_ERR_NOT_FOUND;
    }
    memset(c, 0, sizeof(*c));
    struct bt_buf line;
    char why[256] = "";
    const char *wrong = NULL;
    bt_status_t st = BT_OK;
    uint64_t seen = 0;
    int no = 0;
    bt_buf_init(&line);
    while (st == BT_OK && bt_sim_next_line(f, &line, &wrong)) {
        bool bom = no++ == 0 && strncmp(line.data, "\xef\xbb\xbf", 3) == 0;
        st = read_line(c, line.data + (bom ? 3 : 0), &seen, why, sizeof(why));
    }
    if (wrong != NULL) {
        no++;
        snprintf(why, sizeof(why), "%s", wrong);
        st = BT_ERR_INVALID;
    }
    bt_buf_cleanup(&line);
    fclose(f);
    for (size_t i = 0; st == BT_OK && i < BT_ARRAY_LEN(keys); i++) {
        if (*(double *)((char *)c + keys[i].offset) < keys[i].min) {
            snprintf(why, sizeof(why), "%s is missing; give it, or begin with 'preset: NAME'",
                     keys[i].name);
            st = BT_ERR_INVALID;
        }
    }
    if (st != BT_OK) {
        snprintf(err, err_cap, "%s:%d: %s", name, no, why);
    }
    return st;
}
