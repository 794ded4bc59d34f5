#!/bin/bash
# docs/API.md from the conductor's own table of request fields (make docs). BUILD: the build directory (build).
set -euo pipefail
cd "$(dirname "$0")/../.."
cat <<'T'
# Fields of requests

`make docs` prints this file from the conductor's tables; do not edit it. Baton accepts the OpenAI API as vLLM
extends it, OpenAI's Responses, and Anthropic's Messages (version 2023-06-01).

- **supported**: read and checked.
- **no effect**: accepted with any value, because it cannot change the generated text.
- **refused**: it would change the answer and is not built. It may be null or neutral (false, 0, an empty string, list or
  object, or what the line accepts). Otherwise the answer is 400 with `param` and `code: unsupported_parameter`.

Any other field gets 400 with `param`, `code: unknown_parameter` and, if one is near, the field that was probably meant. `null`
is the same as leaving a field out.

T
"${BUILD:-build}/bin/baton-conductor" --print-api
cat <<'T'
## Constrained output

At most one field constrains an answer; two get 400 with both names. The server compiles what it gets before anything runs: what
is wrong, or cannot be enforced, gets 400 with the reason and, of a schema, its place (`#/properties/a/not`). A text has at most
512 KiB. Every choice of every prompt follows the grammar; the prompt, which `echo` repeats, is no part of it.

- `finish_reason` is `stop` when the grammar ends, and `length` when `max_tokens` cuts the text: then it is a beginning only.
- `stop` and `stop_token_ids` end an answer where they match, also within a document. The model's end-of-text token may come
  only where the grammar may end.
- `ignore_eos` gets 400. `min_tokens` holds the end back where the grammar allows another token, and does nothing elsewhere.
- Sampling, penalties and `logit_bias` choose among the tokens that the grammar allows. Logprobs are the model's own, of all
  tokens.
T
