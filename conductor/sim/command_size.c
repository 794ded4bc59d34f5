/* Weights and KV of models by their config.json, and the GPU memory that remains for KV. Reads
 * files, prints to standard output. */
#include "conductor/sim/command_size.h"

#include <stdio.h>
#include <string.h>

#include "common/engine/model_config.h"

#define SHARE        0.9 /* of a GPU's memory; the rest is for activations, graphs, libraries */
#define BLOCK_TOKENS 64
#define SCALE_VALUES (128.0 * 128) /* values that share an f32 scale in an fp8 matrix */

#define GIB 1073741824.0

/* CUDA reports about 78 GiB of an idle H100 and 139 GiB of an idle H200 as free. */
static const struct cards {
    double gpus;
    const char *gb; /* as sold */
    double bytes;   /* of one GPU */
} cards[] = {
    {1, "80", 78 * GIB}, {1, "141", 139 * GIB}, {8, "80", 78 * GIB}, {8, "141", 139 * GIB}};

struct sizes {
    const char *name;
    double parameters, active;
    double weights[2];  /* bytes in 16 bits, in fp8 */
    double kv_token[2]; /* bytes as f16, as fp8 */
};

static int fail(const char *what)
{
    fprintf(stderr, "baton-sim: %s\n", what);
    return 1;
}

static const char *last_part(char *dir)
{
    size_t n = strlen(dir);
    while (n > 1 && dir[n - 1] == '/') {
        dir[--n] = '\0';
    }
    char *slash = strrchr(dir, '/');
    return slash && slash[1] ? slash + 1 : dir;
}

static bool measure(const char *dir, struct sizes *s, char *err, size_t cap)
{
    static const char *const kinds[] = {"f16", "fp8"};
    struct bt_model_config c;
    struct bt_model_size m;
    if (bt_model_config_load(dir, &c, err, cap) != BT_OK) {
        return false;
    }
    bt_model_count(&c, &m);
    s->parameters = (double)(m.weights + m.embed);
    s->active = (double)m.dense + (double)m.expert * c.experts.used * m.expert_layers;
    double narrow = s->parameters - (double)m.wide;
    s->weights[0] = 2 * s->parameters;
    s->weights[1] = narrow * (1 + sizeof(float) / SCALE_VALUES) + 2 * (double)m.wide;
    for (int i = 0; i < 2; i++) {
        struct bt_kv_layout l;
        bt_status_t st = bt_model_kv_layout(&c, kinds[i], BLOCK_TOKENS, &l);
        if (st != BT_OK) {
            snprintf(err, cap, "%s: no KV layout for %s: %s", dir, kinds[i], bt_status_text(st));
            return false;
        }
        s->kv_token[i] = (double)l.block_bytes / BLOCK_TOKENS;
    }
    return true;
}

/* Tokens as 12 k or 3.4 M; a dash if the weights alone do not fit. */
static void put_tokens(const struct sizes *s, const struct cards *on, int kind)
{
    double room = SHARE * on->gpus * on->bytes - s->weights[kind];
    double tokens = room > 0 ? room / s->kv_token[kind] : 0;
    if (tokens < BLOCK_TOKENS) {
        printf("–");
    } else if (tokens < 999.5e3) {
        printf("%.0f k", tokens / 1e3);
    } else {
        printf("%.*f M", tokens < 9.95e6 ? 1 : 0, tokens / 1e6);
    }
}

static void put_row(const struct sizes *s)
{
    printf("| %s | %.*f B | %.*f B | %.*f GB | %.*f GB | %.0f | %.0f |", s->name,
           s->parameters < 1e10 ? 2 : 0, s->parameters / 1e9, s->active < 1e10 ? 2 : 0,
           s->active / 1e9, s->weights[0] < 1e10 ? 1 : 0, s->weights[0] / 1e9,
           s->weights[1] < 1e10 ? 1 : 0, s->weights[1] / 1e9, s->kv_token[0], s->kv_token[1]);
    for (size_t i = 0; i < BT_ARRAY_LEN(cards); i++) {
        printf(" ");
        put_tokens(s, &cards[i], 0);
        printf("; ");
        put_tokens(s, &cards[i], 1);
        printf(" |");
    }
    printf("\n");
}

int bt_sim_size_command(char *const *dirs, int n)
{
    if (n < 1) {
        fail("size: name one or more model directories, as in baton-sim size deploy/shapes/*");
        return 2;
    }
    printf("| model | parameters | of a token | bf16 | fp8 | KV, f16 | KV, fp8 |");
    for (size_t i = 0; i < BT_ARRAY_LEN(cards); i++) {
        printf(" %.0f × %s GB |", cards[i].gpus, cards[i].gb);
    }
    printf("\n|---|---|---|---|---|---|---|---|---|---|---|\n");
    for (int i = 0; i < n; i++) {
        struct sizes s = {.name = last_part(dirs[i])};
        char err[512];
        if (!measure(dirs[i], &s, err, sizeof(err))) {
            return fail(err);
        }
        put_row(&s);
    }
    return 0;
}
