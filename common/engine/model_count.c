/* How many parameters a model has, and which of them a token uses. Pure. */
#include "common/engine/model_config.h"

static uint64_t attention(const struct bt_model_config *c)
{
    const struct bt_model_mla *m = &c->mla;
    uint64_t hidden = c->hidden, q = (uint64_t)c->heads * c->head_dim;
    if (m->kv_rank) {
        uint64_t queries = m->q_rank ? m->q_rank * (hidden + 1 + q) : hidden * q;
        uint64_t up = (uint64_t)c->heads * (m->nope + m->v) * m->kv_rank;
        return queries + hidden * (m->kv_rank + m->rope) + m->kv_rank + up +
               (uint64_t)c->heads * m->v * hidden;
    }
    uint64_t qkv = q + (uint64_t)c->kv_heads * c->head_dim * 2;
    return hidden * (qkv + q) + (c->qkv_bias ? qkv : 0) + (c->qk_norm ? 2 * c->head_dim : 0) +
           (c->gpt2 ? hidden : 0);
}

/* The MLP of a layer without experts, or the part of a layer with experts that every token uses. */
static uint64_t mlp(const struct bt_model_config *c, bool experts)
{
    const struct bt_model_experts *e = &c->experts;
    uint64_t hidden = c->hidden;
    if (c->gpt2) {
        return 2 * hidden * c->intermediate + c->intermediate + hidden;
    }
    return experts ? e->n * (hidden + e->bias) + 3 * hidden * e->shared
                   : 3 * hidden * c->intermediate;
}

/* Norms and biases inside a layer's attention. */
static uint64_t attention_wide(const struct bt_model_config *c)
{
    uint64_t qkv = (uint64_t)(c->heads + 2 * c->kv_heads) * c->head_dim;
    return c->mla.kv_rank ? c->mla.q_rank + c->mla.kv_rank
                          : (c->qkv_bias ? qkv : 0) + (c->qk_norm ? 2 * c->head_dim : 0) +
                                (c->gpt2 ? c->hidden : 0);
}

static uint64_t mlp_wide(const struct bt_model_config *c, bool experts)
{
    const struct bt_model_experts *e = &c->experts;
    return c->gpt2   ? (uint64_t)c->intermediate + c->hidden
           : experts ? e->n * ((uint64_t)c->hidden + e->bias)
                     : 0;
}

void bt_model_count(const struct bt_model_config *c, struct bt_model_size *s)
{
    uint64_t hidden = c->hidden, norm = c->gpt2 ? 2 * hidden : hidden;
    const struct bt_model_mla *m = &c->mla;
    uint64_t of_pair = m->kv_rank ? c->head_dim + m->v : 2 * c->head_dim;
    uint64_t of_latent = m->kv_rank ? 2 * (uint64_t)m->kv_rank + m->rope : of_pair;
    *s = (struct bt_model_size){.dense = c->vocab * hidden + norm,
                                .expert = 3 * hidden * c->experts.intermediate,
                                .pair = c->layers * c->heads * of_pair,
                                .latent_pair = c->layers * c->heads * of_latent};
    for (uint32_t i = 0; i < c->layers; i++) {
        bool experts = bt_model_has_experts(c, i);
        s->dense += attention(c) + mlp(c, experts) + 2 * norm;
        s->wide += attention_wide(c) + mlp_wide(c, experts) + 2 * norm;
        s->expert_layers += experts;
    }
    s->weights = s->dense + s->expert * c->experts.n * s->expert_layers;
    s->embed =
        (c->tie_embeddings ? 0 : c->vocab * hidden) + (c->gpt2 ? c->max_model_len * hidden : 0);
    s->wide += c->vocab * hidden + norm + s->embed;
    if (c->mtp) { /* three norms and the matrix that joins, beside a layer */
        bool experts = bt_model_has_experts(c, c->layers);
        s->mtp = attention(c) + mlp(c, experts) + 5 * norm + 2 * hidden * hidden +
                 (experts ? s->expert * c->experts.n : 0);
    }
}
