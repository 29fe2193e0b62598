#!/usr/bin/env bash
# Trains as upstream does, with no acceleration on. bash run_baseline.sh --help
set -euo pipefail
REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/launch.sh
source "$REPO/scripts/launch.sh"

if wants_help "$@"; then
    cat <<'TEXT'
usage: bash run_baseline.sh [CONFIG] [OPTION …]
Trains as upstream does: no acceleration is turned on. The run to compare run_opt.sh with.
Where the chosen Python has lerobot, its own LeRobotDataset reads the data, as upstream's does; --data.reader native
takes this project's reader.

TEXT
    common_usage
    exit 0
fi

choose_config "$@"
CUDA_SET=$(cuda_set)
for name in OPENPI_SKIP_IMAGES OPENPI_SKIP_VIDEO_DECODE; do
    [[ -n ${!name:-} ]] && say "note: $name=${!name} is set in your environment, so this is not the plain baseline"
done
preflight() { # called by launch once PYTHON is known; what is added to REST reaches the training
    given --data.reader && return
    if "$PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("lerobot") is None)'; then
        say "data: lerobot's own reader, two workers, every camera decoded (--data.reader native takes this project's)"
        given --num-workers || REST=(--num-workers 2 "${REST[@]}")
        REST=(--data.reader lerobot "${REST[@]}")
    else
        say "data: this project's reader; upstream's own is used where lerobot is installed (pip install 'openpi_accel[lerobot]')"
    fi
}
launch baseline
