#!/bin/bash
# docs/API.md from the conductor's own tables of routes and request fields (make docs). BUILD: the build directory (build).
set -euo pipefail
cd "$(dirname "$0")/../.."
cat <<'T'
# API

`make docs` prints this file from the conductor's tables; do not edit it. A conductor shows the same tables at `/docs` (a page)
and `/openapi.json` (OpenAPI 3.1). Baton accepts the OpenAI API as vLLM extends it, OpenAI's Responses, and Anthropic's Messages
(version 2023-06-01).

- **supported**: read and checked.
- **no effect**: accepted with any value, because it cannot change the generated text.
- **refused**: it would change the answer, and this server does not support it. It may be null or neutral (false, 0, an empty string, list or
  object, or what the line accepts). Otherwise the answer is 400 with `param` and `code: unsupported_parameter`.

Any other field gets 400 with `param`, `code: unknown_parameter` and, if one is near, the field that was probably meant. `null`
is the same as leaving a field out.

T
"${BUILD:-build}/bin/baton-conductor" --print-api
cat <<'T'
## Beam search

With `use_beam_search` the choices are the `n` best answers that a search with `best_of` beams (default: `n`) finds, the best
first. The tokens are those of transformers' `generate(num_beams=...)`. The score of an answer is the sum of its logprobs divided
by its length to the power of `length_penalty`. `early_stopping` says when the search may end, once it has as many answers as
beams. `true`: at once. `false`: when the best beam, if it ended now, would not be among these answers. `never`: when no beam can
get among them.

- At most 16 beams, and at most 20 together with the ids that end an answer (the model's and `stop_token_ids`).
- Beam search does not sample: `seed` has no effect. `temperature` (except 0 and 1), `top_p`, `top_k`, `min_p`, penalties,
  `logit_bias`, `stop` and constrained output get 400.
- `stream` sends everything when the search is over. `min_tokens`, `ignore_eos`, `stop_token_ids`, `echo` and logprobs mean what
  they mean elsewhere.
- `usage` counts the tokens of the answers, not those of other beams. Limits of API keys count each beam as a request.

## Constrained output

At most one field may constrain an answer; two get 400 with both names. The server compiles the grammar before the request runs.
If the grammar is wrong or cannot be enforced, the answer is 400 with the reason and, for a schema, the place
(`#/properties/a/not`). A grammar's text may have at most 512 KiB. Every choice of every prompt follows the grammar. The prompt,
which `echo` repeats, does not.

- `finish_reason` is `stop` when the grammar ends, and `length` when `max_tokens` cuts the text. Then the text is only the
  beginning of a valid answer.
- `stop` and `stop_token_ids` end an answer where they match, also within a document. The model's end-of-text token may come
  only where the grammar may end.
- `ignore_eos` gets 400. `min_tokens` delays the end where the grammar allows another token, and has no effect elsewhere.
- Sampling, penalties and `logit_bias` choose among the tokens that the grammar allows. Logprobs are the model's own, of all
  tokens.
T
