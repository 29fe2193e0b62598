#!/usr/bin/env bash
# Trains with every acceleration that exists. bash run_opt.sh --help
set -euo pipefail
REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/launch.sh
source "$REPO/scripts/launch.sh"

if wants_help "$@"; then
    cat <<'TEXT'
usage: bash run_opt.sh [CONFIG] [OPTION …]
Trains with every acceleration on. `bash run_opt.sh pi05_demo` needs no GPU, no data and no weights.

TEXT
    common_usage
    cat <<'TEXT'
  --tuned [FILE]         (an option) settings that scripts/tune.py has found on this machine, in place of the usual
                         ones; FILE is tuned/CONFIG.json where it is not given
  OPENPI_STRICT_EQUIV=1  leave out the XLA flags that may reorder arithmetic
  OPENPI_SKIP_VIDEO_DECODE, OPENPI_WORKER_CPU, OPENPI_SKIP_IMAGES,
  OPENPI_FLASH_ATTN, OPENPI_FLASH_IMPL, OPENPI_BATCH_CAMERAS, OPENPI_CAST_EARLY, OPENPI_UNROLL_LAYERS,
  JAX_COMPILATION_CACHE_DIR, JAX_OPTIMIZATION_LEVEL, XLA_FLAGS, XLA_PYTHON_CLIENT_MEM_FRACTION
                         your own value is kept
TEXT
    exit 0
fi

choose_config "$@"
CUDA_SET=$(cuda_set)
take_tuned
acceleration
launch opt "${ACCELERATED[@]}"
