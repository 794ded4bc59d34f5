/* The walk over a model's tensors: the names of each architecture, as in Hugging Face checkpoints;
 * what is missing, of another shape or too many is refused by name. */
#include "tests/unit/model_dir.h"

#include "common/engine/decoder.h"

#define SEEN_MAX 512

static struct seen {
    bt_decoder_item_t item;
    uint32_t layer, expert, part, rows, cols;
    char name[96];
    bool transposed, loaded;
} seen[SEEN_MAX];
static uint32_t n_seen;

static bt_status_t see(void *arg, const struct bt_decoder_tensors *d)
{
    (void)arg;
    uint64_t rows = 0;
    for (uint32_t i = 0; i < d->n_parts; i++) {
        const struct bt_decoder_part *p = &d->parts[i];
        assert_true(n_seen < SEEN_MAX);
        struct seen *s = &seen[n_seen++];
        *s = (struct seen){.item = d->item,
                           .layer = d->layer,
                           .expert = d->expert,
                           .part = i,
                           .rows = p->rows,
                           .cols = d->cols,
                           .transposed = p->transposed,
                           .loaded = p->t != NULL};
        strcpy(s->name, p->name);
        rows += p->rows;
    }
    assert_int_equal(rows, d->rows);
    return BT_OK;
}

static bt_status_t walk(const struct bt_model_config *c, bool dummy)
{
    const struct bt_engine_config conf = {
        .size = sizeof(conf), .model_dir = model_dir, .load_format = dummy ? "dummy" : "auto"};
    n_seen = 0;
    model_err[0] = 0;
    return bt_decoder_load(&conf, c, see, NULL, model_err, sizeof(model_err));
}

static const struct seen *find(const char *name)
{
    for (uint32_t i = 0; i < n_seen; i++) {
        if (strcmp(seen[i].name, name) == 0) {
            return &seen[i];
        }
    }
    return NULL;
}

/* ---- files ---- */

static json_t *header;
static uint64_t header_end;

static void add(const char *name, uint32_t rows, uint32_t cols)
{
    uint64_t n = (uint64_t)rows * (cols ? cols : 1) * 2;
    json_t *shape = cols ? json_pack("[i,i]", rows, cols) : json_pack("[i]", rows);
    if (json_object_get(header, name)) { /* tied */
        json_decref(shape);
        return;
    }
    json_object_set_new(header, name,
                        json_pack("{s:s,s:o,s:[I,I]}", "dtype", "BF16", "shape", shape,
                                  "data_offsets", (json_int_t)header_end,
                                  (json_int_t)(header_end + n)));
    header_end += n;
}

/* All tensors that the walk over c asks for, but `without`; names lose the first `cut` bytes. */
static void begin_file(const struct bt_model_config *c, const char *without, size_t cut)
{
    assert_int_equal(walk(c, true), BT_OK);
    header = json_object();
    header_end = 0;
    for (uint32_t i = 0; i < n_seen; i++) {
        const struct seen *s = &seen[i];
        bool turn = s->transposed;
        if (!without || strcmp(without, s->name) != 0) {
            add(s->name + (strncmp(s->name, "transformer.", cut) == 0 ? cut : 0),
                turn ? s->cols : s->rows, turn ? s->rows : s->cols);
        }
    }
}

static void end_file(void)
{
    char *text = json_dumps(header, JSON_PRESERVE_ORDER);
    size_t h = strlen(text);
    uint8_t *p = calloc(1, 8 + h + header_end);
    for (int i = 0; i < 8; i++) {
        p[i] = (uint8_t)((uint64_t)h >> (8 * i));
    }
    memcpy(p + 8, text, h);
    model_put("model.safetensors", p, 8 + h + header_end);
    free(p);
    free(text);
    json_decref(header);
}

/* ---- small models ---- */

#define SMALL_MLA                                                                                  \
    "\"vocab_size\":64,\"hidden_size\":48,\"intermediate_size\":96,\"num_hidden_layers\":3,"       \
    "\"num_attention_heads\":2,\"num_key_value_heads\":2,\"kv_lora_rank\":32,"                     \
    "\"qk_nope_head_dim\":32,\"qk_rope_head_dim\":16,\"v_head_dim\":64,\"bos_token_id\":null,"     \
    "\"moe_intermediate_size\":24,\"n_routed_experts\":4,\"num_experts_per_tok\":2,"               \
    "\"eos_token_id\":null,\"first_k_dense_replace\":1,\"n_shared_experts\":2"
static const char v3[] = "{" SMALL_MLA ",\"n_group\":2,\"topk_group\":1,\"q_lora_rank\":40}";
static const char v2[] = "{" SMALL_MLA "}";
static const char qwen[] =
    "{\"vocab_size\":64,\"hidden_size\":48,\"intermediate_size\":96,\"num_hidden_layers\":3,"
    "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":32,\"num_experts\":4,"
    "\"num_experts_per_tok\":2,\"moe_intermediate_size\":24,\"mlp_only_layers\":[1],"
    "\"bos_token_id\":null,\"eos_token_id\":null}";
static const char mix[] =
    "{\"vocab_size\":64,\"hidden_size\":64,\"intermediate_size\":96,\"num_hidden_layers\":2,"
    "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"num_local_experts\":4,"
    "\"bos_token_id\":null,\"eos_token_id\":null,\"tie_word_embeddings\":true}";
static const char gpt[] = "{\"vocab_size\":64,\"n_embd\":48,\"n_head\":3,\"n_layer\":2,"
                          "\"n_positions\":100,\"bos_token_id\":null,\"eos_token_id\":null}";

struct want {
    const char *name;
    bt_decoder_item_t item;
    uint32_t layer, expert, part, rows, cols;
};

static void expect(const struct want *want, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const struct seen *s = find(want[i].name);
        if (!s) {
            fail_msg("%s: not asked for", want[i].name);
        }
        if (s->item != want[i].item || s->layer != want[i].layer || s->expert != want[i].expert ||
            s->part != want[i].part || s->rows != want[i].rows || s->cols != want[i].cols) {
            fail_msg("%s: item %d layer %u expert %u part %u [%u, %u]", s->name, (int)s->item,
                     s->layer, s->expert, s->part, s->rows, s->cols);
        }
    }
}

static void test_deepseek_names(void **state)
{
    (void)state;
    struct bt_model_config c;
#define A(N) "model.layers.1.self_attn." N ".weight"
#define M(N) "model.layers.1.mlp." N
    static const struct want v3_names[] = {
        {"model.embed_tokens.weight", BT_DECODER_EMBED, 0, 0, 0, 64, 48},
        {"model.layers.1.input_layernorm.weight", BT_DECODER_NORM_ATTN, 1, 0, 0, 48, 0},
        {"model.layers.1.post_attention_layernorm.weight", BT_DECODER_NORM_MLP, 1, 0, 0, 48, 0},
        {A("q_a_proj"), BT_DECODER_Q_A, 1, 0, 0, 40, 48},
        {A("q_a_layernorm"), BT_DECODER_Q_A_NORM, 1, 0, 0, 40, 0},
        {A("q_b_proj"), BT_DECODER_Q_B, 1, 0, 0, 96, 40},
        {A("kv_a_proj_with_mqa"), BT_DECODER_KV_A, 1, 0, 0, 48, 48},
        {A("kv_a_layernorm"), BT_DECODER_KV_A_NORM, 1, 0, 0, 32, 0},
        {A("kv_b_proj"), BT_DECODER_KV_B, 1, 0, 0, 192, 32},
        {A("o_proj"), BT_DECODER_O, 1, 0, 0, 48, 128},
        {M("gate.weight"), BT_DECODER_ROUTER, 1, 0, 0, 4, 48},
        {M("gate.e_score_correction_bias"), BT_DECODER_ROUTER_BIAS, 1, 0, 0, 4, 0},
        {M("experts.3.gate_proj.weight"), BT_DECODER_EXPERT_GATE_UP, 1, 3, 0, 24, 48},
        {M("experts.3.up_proj.weight"), BT_DECODER_EXPERT_GATE_UP, 1, 3, 1, 24, 48},
        {M("experts.3.down_proj.weight"), BT_DECODER_EXPERT_DOWN, 1, 3, 0, 48, 24},
        {M("shared_experts.gate_proj.weight"), BT_DECODER_SHARED_GATE_UP, 1, 0, 0, 48, 48},
        {M("shared_experts.up_proj.weight"), BT_DECODER_SHARED_GATE_UP, 1, 0, 1, 48, 48},
        {M("shared_experts.down_proj.weight"), BT_DECODER_SHARED_DOWN, 1, 0, 0, 48, 48},
        {"model.layers.0.mlp.gate_proj.weight", BT_DECODER_GATE_UP, 0, 0, 0, 96, 48},
        {"model.layers.0.mlp.up_proj.weight", BT_DECODER_GATE_UP, 0, 0, 1, 96, 48},
        {"model.layers.0.mlp.down_proj.weight", BT_DECODER_DOWN, 0, 0, 0, 48, 96},
        {"model.norm.weight", BT_DECODER_NORM, 0, 0, 0, 48, 0},
        {"lm_head.weight", BT_DECODER_HEAD, 0, 0, 0, 64, 48},
    };
    assert_int_equal(model_load(deepseek_v3, v3, &c), BT_OK);
    assert_int_equal(walk(&c, true), BT_OK);
    expect(v3_names, BT_ARRAY_LEN(v3_names));
    /* layers: 2 norms and 7 of attention; a dense MLP of 3, or router, bias, 4 experts, shared */
    assert_int_equal(n_seen, 3 + 3 * 9 + 3 + 2 * (2 + 4 * 3 + 3));
    assert_int_equal(model_load(deepseek_v2_lite, v2, &c), BT_OK);
    assert_int_equal(walk(&c, true), BT_OK);
    static const struct want q[] = {{A("q_proj"), BT_DECODER_Q_B, 1, 0, 0, 96, 48}};
    expect(q, 1);
    assert_null(find(M("gate.e_score_correction_bias")));
    assert_int_equal(n_seen, 3 + 3 * 7 + 3 + 2 * (1 + 4 * 3 + 3));
}

static void test_other_names(void **state)
{
    (void)state;
    struct bt_model_config c;
    static const struct want qwen_names[] = {
        {"model.layers.2.self_attn.k_proj.weight", BT_DECODER_QKV, 2, 0, 1, 64, 48},
        {"model.layers.2.self_attn.q_norm.weight", BT_DECODER_Q_NORM, 2, 0, 0, 32, 0},
        {"model.layers.2.mlp.gate.weight", BT_DECODER_ROUTER, 2, 0, 0, 4, 48},
        {"model.layers.2.mlp.experts.1.up_proj.weight", BT_DECODER_EXPERT_GATE_UP, 2, 1, 1, 24, 48},
        {"model.layers.1.mlp.down_proj.weight", BT_DECODER_DOWN, 1, 0, 0, 48, 96},
    };
    assert_int_equal(model_load(qwen3_moe, qwen, &c), BT_OK);
    assert_int_equal(walk(&c, true), BT_OK);
    expect(qwen_names, BT_ARRAY_LEN(qwen_names));
    assert_int_equal(n_seen, 3 + 3 * 8 + 3 + 2 * (1 + 4 * 3));
#define X(N) "model.layers.1.block_sparse_moe." N ".weight"
    static const struct want mix_names[] = {
        {X("gate"), BT_DECODER_ROUTER, 1, 0, 0, 4, 64},
        {X("experts.2.w1"), BT_DECODER_EXPERT_GATE_UP, 1, 2, 0, 96, 64},
        {X("experts.2.w3"), BT_DECODER_EXPERT_GATE_UP, 1, 2, 1, 96, 64},
        {X("experts.2.w2"), BT_DECODER_EXPERT_DOWN, 1, 2, 0, 64, 96},
    };
    assert_int_equal(model_load(mixtral, mix, &c), BT_OK);
    assert_int_equal(walk(&c, true), BT_OK);
    expect(mix_names, BT_ARRAY_LEN(mix_names));
    assert_int_equal(n_seen, 3 + 2 * (6 + 1 + 4 * 3));
    assert_string_equal(seen[n_seen - 1].name, "model.embed_tokens.weight"); /* tied */
    assert_int_equal(seen[n_seen - 1].item, BT_DECODER_HEAD);
#define H(N) "transformer.h.1." N
    static const struct want gpt_names[] = {
        {"transformer.wte.weight", BT_DECODER_EMBED, 0, 0, 0, 64, 48},
        {"transformer.wpe.weight", BT_DECODER_POSITIONS, 0, 0, 0, 100, 48},
        {H("ln_1.weight"), BT_DECODER_NORM_ATTN, 1, 0, 0, 48, 0},
        {H("ln_1.bias"), BT_DECODER_NORM_ATTN_BIAS, 1, 0, 0, 48, 0},
        {H("ln_2.weight"), BT_DECODER_NORM_MLP, 1, 0, 0, 48, 0},
        {H("ln_2.bias"), BT_DECODER_NORM_MLP_BIAS, 1, 0, 0, 48, 0},
        {H("attn.c_attn.weight"), BT_DECODER_QKV, 1, 0, 0, 144, 48},
        {H("attn.c_attn.bias"), BT_DECODER_QKV_BIAS, 1, 0, 0, 144, 0},
        {H("attn.c_proj.weight"), BT_DECODER_O, 1, 0, 0, 48, 48},
        {H("attn.c_proj.bias"), BT_DECODER_O_BIAS, 1, 0, 0, 48, 0},
        {H("mlp.c_fc.weight"), BT_DECODER_UP, 1, 0, 0, 192, 48},
        {H("mlp.c_fc.bias"), BT_DECODER_UP_BIAS, 1, 0, 0, 192, 0},
        {H("mlp.c_proj.weight"), BT_DECODER_DOWN, 1, 0, 0, 48, 192},
        {H("mlp.c_proj.bias"), BT_DECODER_DOWN_BIAS, 1, 0, 0, 48, 0},
        {"transformer.ln_f.weight", BT_DECODER_NORM, 0, 0, 0, 48, 0},
        {"transformer.ln_f.bias", BT_DECODER_NORM_BIAS, 0, 0, 0, 48, 0},
    };
    assert_int_equal(model_load(gpt2, gpt, &c), BT_OK);
    assert_int_equal(walk(&c, true), BT_OK);
    expect(gpt_names, BT_ARRAY_LEN(gpt_names));
    assert_int_equal(n_seen, 2 + 2 * 12 + 3);
    assert_true(find(H("mlp.c_fc.weight"))->transposed &&
                find(H("attn.c_attn.weight"))->transposed);
    assert_false(find("transformer.wpe.weight")->transposed);
}

static const struct {
    const char *config, *changes;
} all[] = {
    {deepseek_v3, v3}, {deepseek_v2_lite, v2}, {qwen3_moe, qwen}, {mixtral, mix}, {gpt2, gpt}};

static void expect_walk(const struct bt_model_config *c, bt_status_t want, const char *what)
{
    bt_status_t st = walk(c, false);
    if (st != want || !strstr(model_err, what)) {
        fail_msg("status %s, expected %s with \"%s\": %s", bt_status_name(st), bt_status_name(want),
                 what, model_err);
    }
}

/* Each tensor is found; each one that is missing is named. */
static void test_files(void **state)
{
    (void)state;
    struct bt_model_config c;
    for (size_t k = 0; k < BT_ARRAY_LEN(all); k++) {
        assert_int_equal(model_load(all[k].config, all[k].changes, &c), BT_OK);
        begin_file(&c, NULL, 0);
        end_file();
        expect_walk(&c, BT_OK, "");
        uint32_t n = n_seen;
        for (uint32_t i = 0; i < n; i++) {
            assert_true(seen[i].loaded);
        }
        for (uint32_t i = 0; i < n; i++) {
            char name[96];
            assert_int_equal(walk(&c, true), BT_OK);
            strcpy(name, seen[i].name);
            begin_file(&c, name, 0);
            end_file();
            expect_walk(&c, BT_ERR_INVALID, name);
        }
    }
}

/* GPT-2's files from before the head was part of the model, with masks. */
static void test_gpt2_files(void **state)
{
    (void)state;
    struct bt_model_config c;
    assert_int_equal(model_load(gpt2, gpt, &c), BT_OK);
    begin_file(&c, NULL, strlen("transformer."));
    add("h.0.attn.bias", 100, 100);
    add("h.1.attn.masked_bias", 1, 0);
    end_file();
    expect_walk(&c, BT_OK, "");
    assert_non_null(find("h.1.attn.c_attn.weight"));
    begin_file(&c, NULL, 0);
    add("transformer.h.0.attn.bias", 100, 100);
    end_file();
    expect_walk(&c, BT_OK, "");
    begin_file(&c, NULL, strlen("transformer."));
    add("h.1.crossattention.c_attn.bias", 96, 0);
    end_file();
    expect_walk(&c, BT_ERR_UNSUPPORTED, "h.1.crossattention.c_attn.bias");
    /* not turned: the shape of a Linear */
    begin_file(&c, "transformer.h.0.mlp.c_fc.weight", 0);
    add("transformer.h.0.mlp.c_fc.weight", 192, 48);
    end_file();
    expect_walk(&c, BT_ERR_INVALID, "shape [192, 48");
}

static void test_too_many(void **state)
{
    (void)state;
    static const struct {
        size_t model; /* of `all` */
        const char *name;
        bool fine;
    } cases[] = {
        {0, "model.layers.3.self_attn.kv_b_proj.weight", true}, /* MTP */
        {0, "model.layers.3.eh_proj.weight", true},
        {0, "model.layers.4.mlp.up_proj.weight", false},
        {1, "model.layers.3.eh_proj.weight", true}, /* config.json does not count it */
        {1, "model.layers.3.mlp.up_proj.weight", false},
        {2, "model.layers.4.mlp.up_proj.weight", false}, /* too few layers in config.json */
        {2, "model.layers.3.eh_proj.weight", false},
        {3, "model.norm.bias", false},
        {3, "lm_head.bias", false},
        {4, "lm_head.weight", true},
        {3, "v_head.summary.weight", true},
        {0, "model.layers.1.mlp.experts.4.up_proj.weight", false},
        {0, "model.layers.0.mlp.gate.weight", false},
        {0, "model.layers.2.self_attn.q_proj.weight", false},
        {1, "model.layers.1.mlp.gate.e_score_correction_bias", false},
        {1, "model.layers.1.self_attn.q_a_proj.weight", false},
        {2, "model.layers.1.mlp.experts.0.up_proj.weight", false},
        {2, "model.layers.0.mlp.shared_expert.up_proj.weight", false},
        {3, "model.layers.0.block_sparse_moe.gate.bias", false},
        {3, "model.layers.0.self_attn.rotary_emb.inv_freq", true},
    };
    struct bt_model_config c;
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        const size_t m = cases[i].model;
        assert_int_equal(model_load(all[m].config, all[m].changes, &c), BT_OK);
        begin_file(&c, NULL, 0);
        add(cases[i].name, 16, 0);
        end_file();
        expect_walk(&c, cases[i].fine ? BT_OK : BT_ERR_UNSUPPORTED,
                    cases[i].fine ? "" : cases[i].name);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_deepseek_names), cmocka_unit_test(test_other_names),
        cmocka_unit_test(test_files),          cmocka_unit_test(test_gpt2_files),
        cmocka_unit_test(test_too_many),
    };
    return cmocka_run_group_tests(tests, model_setup, model_teardown);
}
