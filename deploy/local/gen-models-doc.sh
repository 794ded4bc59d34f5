#!/bin/bash
# docs/MODELS.md from the shapes of published models (make docs). BUILD: the build directory (build).
set -euo pipefail
cd "$(dirname "$0")/../.."
bin="$(realpath "${BUILD:-build}")/bin"
cat <<'T'
# Models

`make docs` prints this file; the table is the output of `baton-sim size` for the models in `deploy/shapes`. It counts any model directory by its `config.json`. Edit `deploy/local/gen-models-doc.sh`.

## What runs where

| architecture in `config.json` | models | `engine.device: cpu` | `engine.device: cuda` |
|---|---|---|---|
| `LlamaForCausalLM`, `MistralForCausalLM`, `Qwen2ForCausalLM`, `Qwen3ForCausalLM` | Llama 2 and 3.x, Mistral, Qwen2, Qwen3 | yes | yes: compute capability 8.0 or newer; head_dim 64, 128, 256; up to 16 heads for a KV head |
| `Qwen3MoeForCausalLM`, `MixtralForCausalLM` | Qwen3-30B-A3B, Qwen3-235B-A22B, Mixtral | yes | Hopper |
| `DeepseekV2ForCausalLM`, `DeepseekV3ForCausalLM` | V2-Lite, V2, V3, R1, Kimi K2 | yes | Hopper: latents of 512 + 64, heads of 128 + 64 and 128, `kv.block_tokens: 64` |
| `GPT2LMHeadModel` | GPT-2 | yes | yes, as Llama |

- **A worker has one GPU.** A model runs today if one of the columns with one GPU has tokens for it (the second number needs a Hopper GPU); the columns with eight GPUs say only what their memory could hold, until several GPUs serve one model.
- **Engines refuse** a model that they cannot compute or that does not fit. They do so at the start, and name the reason.
- **fp8 weights**: engines read fp8 checkpoints, and `model.quantize: fp8` makes fp8 of 16-bit ones.
  A Hopper GPU keeps them in fp8, except for GPT-2, for the matrix that makes keys and values of latents, for MLPs and experts whose sizes 128 does not divide, and for experts with a scale for each row.
  On the CPU engine they take 32 bits, as f16 and f32 weights do, and as all weights do without bf16 units ([engines](../common/engine/README.md)).
- **MTP** (`model.mtp`, `worker.speculate: mtp`): the CPU engine runs DeepSeek V3's layer behind the last one and takes drafts from it, chained where there is one such layer or where there are several. The layer must share embedding and head with the model.
- **fp8 KV** (`model.kv_dtype: fp8`): keys and values on the cuda engine, latents (DeepSeek, Kimi) on both engines.

## Weights, KV, and tokens that fit

*Of a token*: parameters that one token uses. *bf16*, *fp8*: weights in GB of 10^9 bytes; in fp8 embedding, head, norms, biases and routers stay in 16 bits, and 128 x 128 values share a scale. *KV*: bytes a token, all layers.
*Tokens*: of KV, in all sequences together; first with bf16 weights and f16 KV, then with fp8 for both; –: the weights do not fit. They are what 90 % of the memory leave beside the weights. A card of 80 GB has about 78 GiB, one of 141 GB about 139 GiB.
With eight GPUs, weights and KV are counted once, as if no GPU held what another one holds.

T
cd deploy/shapes
"$bin/baton-sim" size Llama-3.1-8B Llama-3.1-70B Qwen3-8B Qwen3-32B Qwen3-30B-A3B Qwen3-235B-A22B Mixtral-8x7B \
    DeepSeek-V2-Lite DeepSeek-V2 DeepSeek-V3 Kimi-K2 GPT-2
cat <<'T'

DeepSeek-R1 has V3's shape. V3's layer for speculation (MTP) is not counted: with `model.mtp` it is 11.5 B parameters more, and one layer of KV (1,152 bytes a token; 656 with fp8).
T
