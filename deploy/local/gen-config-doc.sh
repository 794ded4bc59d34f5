#!/bin/bash
# docs/CONFIG.md from the tables of the daemons (make docs). BUILD: the build directory (build).
set -euo pipefail
cd "$(dirname "$0")/../.."
bin="${BUILD:-build}/bin"
cat <<'T'
# Configuration

`make docs` prints this file from the tables in the daemons; do not edit it.

Each daemon reads a YAML file, `/etc/baton/<daemon>.yaml` or the one that `--config` names. `--set KEY=VALUE` and the
environment set single keys: `kv.block_tokens` is `BATON_KV_BLOCK_TOKENS`. `--set` wins over the environment, the
environment over the file.

- An unknown key is an error that names file and line. So is a key of an earlier version that no longer exists; the
  error says what to do.
- `--check` checks the values, and the addresses, directories and model that they name on this host, and exits.
  `--check=values` checks the values only. `--print-example` prints a file with all keys.
- Sizes take B, KiB, MiB, GiB, TiB, KB, MB, GB, TB; times take ms, s, m, h.
- SIGHUP makes a daemon read its file again. It applies the keys marked *reload*; other changes wait for a restart.

A first file needs only `node.id` and `model.path`. `deploy/config/` has one example file for each daemon.

T
"$bin/baton-conductor" --print-docs=common
for d in conductor prefill kvstore; do
    "$bin/baton-$d" --print-docs
done
cat <<'T'
## baton-decode

Takes a prompt's KV from the node's pool and generates. File: `/etc/baton/decode.yaml`. The keys are those of
baton-prefill, because a worker can change its role while it runs (`batonctl role`).
T
