#!/usr/bin/env bash
# Finds the thresholds and lengths of drafts that are fastest on this machine, for `--threshold auto`. Options go to
# `whiflash calibrate`, for example
#   ./calibrate_thresholds.sh --drafters df-e3 --dataset gsm8k,humaneval --max-samples 20
set -euo pipefail
bin="$(cd "$(dirname "$0")" && pwd)/.venv/bin"
[ -d "$bin" ] && PATH="$bin:$PATH"

case " $* " in
*" --drafters "* | *" -d "* | *" --drafters="*) exec whiflash calibrate "$@" ;;
*) exec whiflash calibrate --drafters df-e3,ddt-e3,df-ddt "$@" ;;
esac
