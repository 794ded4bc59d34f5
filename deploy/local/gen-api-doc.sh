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
"${BUILD:-build}/bin/baton-conductor" --print-api | sed -e '${/^$/d}'
