#!/usr/bin/env bash
# The paper's table: every method on all four categories. Options go to `whiflash sweep`, for example
#   ./benchmark.sh --max-samples 12 --max-new-tokens 128 --output runs/table
# PROCESSES=N shares the prompts among N processes (one GPU each).
set -euo pipefail
cd "$(dirname "$0")"
[ -d .venv/bin ] && PATH="$PWD/.venv/bin:$PATH"

if [ "${PROCESSES:-1}" -gt 1 ]; then
    exec torchrun --nproc-per-node "$PROCESSES" -m whiflash.cli sweep "$@"
fi
exec whiflash sweep "$@"
