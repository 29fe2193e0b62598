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

TEXT
    common_usage
    exit 0
fi

choose_config "$@"
CUDA_SET=$(cuda_set)
for name in OPENPI_SKIP_IMAGES OPENPI_SKIP_VIDEO_DECODE; do
    [[ -n ${!name:-} ]] && say "note: $name=${!name} is set in your environment, so this is not the plain baseline"
done
launch baseline
