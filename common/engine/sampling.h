/* How tokens of a sequence are sampled: the parameters that travel from the client's request to the
 * engine, and their limits. Plain values, without the engine's interface. */
#ifndef BT_ENGINE_SAMPLING_H
#define BT_ENGINE_SAMPLING_H

#include <stdint.h>

#define BT_ENGINE_MAX_TOP     20 /* top logprobs per token */
#define BT_ENGINE_MAX_EOS     16
#define BT_ENGINE_CHOICES_MAX 16 /* of one prompt: of a request and of a submission */
#define BT_ENGINE_DOLA_MAX    16 /* early layers that DoLa may choose from */
#define BT_ENGINE_CANDIDATES  16 /* most of contrastive search: top_k */

/* Beyond these no engine samples: a worker refuses the submission. */
#define BT_ENGINE_MAX_TEMPERATURE 10000
#define BT_ENGINE_MAX_REPETITION  1000
#define BT_ENGINE_MAX_PENALTY     1000 /* of frequency and presence, of either sign */

struct bt_engine_params { /* sampling of one sequence; fixed while its slot is open */
    float temperature;    /* 0: greedy */
    float top_p;          /* 1: off */
    float min_p;          /* 0: off */
    uint32_t top_k;       /* 0: off */
    float repetition_penalty, frequency_penalty, presence_penalty; /* 1, 0, 0: off */
    float typical_p;                                               /* 0 and 1: off */
    float xtc_probability, xtc_threshold;                          /* probability 0: off */
    uint64_t seed;
    uint32_t choice;  /* enters the random counter: forks of one request differ */
    int32_t logprobs; /* -1: none; 0: of the chosen token; n: and the n most likely */
    uint32_t min_new; /* EOS is not chosen before that many generated tokens */
    uint32_t n_eos;   /* ids that end the sequence (unless the caller ignores that) */
    uint32_t eos[BT_ENGINE_MAX_EOS];
    /* DoLa: early layers, below the model's number of them; layer i is the hidden state that enters
     * layer i, 0 the embedding. The logits of one of them are subtracted from the last one's
     * (sampler.h). 0: off. */
    uint32_t n_dola;
    uint16_t dola[BT_ENGINE_DOLA_MAX];
    /* Contrastive search: above 0 the next token is the one of the top_k most likely that sampler.h
     * says, and temperature is 0. The engine keeps the hidden states of all tokens that it runs in
     * the slot, of up to hidden_max: so no token's KV may be loaded, and the rows follow each other
     * from position 0 on. */
    float penalty_alpha;
    uint32_t hidden_max;
    uint32_t n_bias;
    const uint32_t *bias_ids; /* copied by slot_open */
    const float *bias;
};

#endif
