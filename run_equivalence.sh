#!/usr/bin/env bash
# Trains the demo without and with the accelerations and compares the losses. bash run_equivalence.sh --help
set -euo pipefail
REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/setup_env.sh
source "$REPO/scripts/setup_env.sh"

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    cat <<'TEXT'
usage: bash run_equivalence.sh [FOLDER]
Trains pi05_demo three times in float32 from the same seed, STEPS steps each: plain; with every acceleration of the
step; and, as a control, plain with the gradients of the batch's two halves added up, which is the same mathematics in
another order of summation. The verdict: learning rates equal to the bit, the same samples, mean loss difference below
1e-4, difference of the last tenth's mean losses below 1e-3; and whether the accelerated run stays as near to the plain
one as the control, which rounding alone drives away. Writes FOLDER/equivalence.html. Exit code 1 where a line fails.
Needs no GPU, no data, no weights.
  FOLDER         where data, runs and the report go (default: checkpoints/equivalence)
  STEPS          steps of each run (default 300)
  SCHEDULE       finetune: as pi0.5 is fine-tuned, from trained weights (the demo after 150 steps, trained first) with
                 1000 steps of warm-up to 2.5e-5 (default); demo: the demo's own, from fresh weights with 30 steps of
                 warm-up to 1e-3, where rounding grows to the size of the loss's own noise
  OPENPI_PYTHON  a Python that has the packages; nothing is installed then
TEXT
    exit 0
fi

FOLDER=${1:-$REPO/checkpoints/equivalence}
SCHEDULE=${SCHEDULE:-finetune}
[[ $SCHEDULE == finetune || $SCHEDULE == demo ]] || fail "SCHEDULE=$SCHEDULE is neither finetune nor demo."
ensure_python cpu
export PYTHONPATH="$REPO${PYTHONPATH:+:$PYTHONPATH}"
mapfile -t switches < <(compgen -e | grep '^OPENPI_' | grep -Ev '^OPENPI_(CACHE|DATA)_HOME$' || true)
unset XLA_FLAGS JAX_OPTIMIZATION_LEVEL "${switches[@]}"

train() { # experiment name, steps, then options; variables come from the caller
    local name=$1 steps=$2
    shift 2
    "$PYTHON" "$REPO/scripts/demo.py" pi05_demo "--exp-name=$name" --overwrite --log-interval=1 --only-train \
        "--num-train-steps=$steps" "--checkpoint-base-dir=$FOLDER" "--assets-base-dir=$FOLDER/assets" "$@"
}
STEPS=${STEPS:-300} BASE_STEPS=150
schedule=()
if [[ $SCHEDULE == finetune ]]; then
    say "weights to start from"
    train base $BASE_STEPS
    schedule=("--weight-loader.params-path=$FOLDER/pi05_demo/base/$((BASE_STEPS - 1))/params"
        --lr-schedule.peak-lr=2.5e-5 --lr-schedule.warmup-steps=1000 --lr-schedule.decay-steps=30000
        --lr-schedule.decay-lr=2.5e-6)
fi
say "plain"
train off "$STEPS" "${schedule[@]}"
say "accelerated"
OPENPI_SKIP_IMAGES=auto OPENPI_FLASH_ATTN=1 OPENPI_FLASH_IMPL=auto OPENPI_BATCH_CAMERAS=1 OPENPI_CAST_EARLY=1 \
    OPENPI_UNROLL_LAYERS=1 train on "$STEPS" "${schedule[@]}" --remat.gemma=dots --remat.siglip=dots
say "control"
train control "$STEPS" "${schedule[@]}" --num-microbatches=2
"$PYTHON" "$REPO/scripts/compare_runs.py" "$FOLDER/pi05_demo/off" "$FOLDER/pi05_demo/on" \
    --control "$FOLDER/pi05_demo/control" --html "$FOLDER/equivalence.html"
