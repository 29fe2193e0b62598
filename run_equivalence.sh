#!/usr/bin/env bash
# Trains the demo without and with the accelerations and compares the losses. bash run_equivalence.sh --help
set -euo pipefail
REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/setup_env.sh
source "$REPO/scripts/setup_env.sh"

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    cat <<'TEXT'
usage: bash run_equivalence.sh [FOLDER]
Trains pi05_demo twice in float32 from the same seed, STEPS steps each: plain, and with every acceleration of the step.
The learning rates must be equal to the bit and the mean loss difference below 1e-4. Needs no GPU, no data, no weights.
  FOLDER         where data and runs go (default: checkpoints/equivalence)
  STEPS          steps of each run (default 300)
  OPENPI_PYTHON  a Python that has the packages; nothing is installed then
TEXT
    exit 0
fi

FOLDER=${1:-$REPO/checkpoints/equivalence}
ensure_python cpu
export PYTHONPATH="$REPO${PYTHONPATH:+:$PYTHONPATH}"
mapfile -t switches < <(compgen -e | grep '^OPENPI_' | grep -v '^OPENPI_DATA_HOME$' || true)
unset XLA_FLAGS JAX_OPTIMIZATION_LEVEL "${switches[@]}"

train() { # experiment name, then options; variables come from the caller
    local name=$1
    shift
    "$PYTHON" "$REPO/scripts/demo.py" pi05_demo "--exp-name=$name" --overwrite --log-interval=1 \
        "--num-train-steps=${STEPS:-300}" "--checkpoint-base-dir=$FOLDER" "--assets-base-dir=$FOLDER/assets" "$@"
}
say "plain"
train off
say "accelerated"
OPENPI_SKIP_IMAGES=auto OPENPI_FLASH_ATTN=1 OPENPI_FLASH_IMPL=auto OPENPI_BATCH_CAMERAS=1 OPENPI_CAST_EARLY=1 \
    OPENPI_UNROLL_LAYERS=1 train on --remat.gemma=dots --remat.siglip=dots
"$PYTHON" "$REPO/scripts/compare_runs.py" "$FOLDER/pi05_demo/off" "$FOLDER/pi05_demo/on" --max-mean-difference 1e-4
