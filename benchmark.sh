#!/usr/bin/env bash
# The paper's table: every method on all four categories. Options go to `whiflash sweep`, for example
#   ./benchmark.sh --max-samples 12 --max-new-tokens 128 --output runs/table
# PROCESSES=N shares the prompts among N processes (one GPU each).
set -euo pipefail
bin="$(cd "$(dirname "$0")" && pwd)/.venv/bin"
[ -d "$bin" ] && PATH="$bin:$PATH"

if [ "${PROCESSES:-1}" -gt 1 ]; then
    exec torchrun --nproc-per-node "$PROCESSES" -m whiflash.cli sweep "$@"
fi
exec whiflash sweep "$@"
