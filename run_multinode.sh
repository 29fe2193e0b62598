#!/usr/bin/env bash
# run_opt.sh's settings on several nodes; start it on every node. bash run_multinode.sh --help
set -euo pipefail
REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/launch.sh
source "$REPO/scripts/launch.sh"

if wants_help "$@"; then
    cat <<'TEXT'
usage: MASTER_ADDR=… MASTER_PORT=… RANK=… WORLD_SIZE=… bash run_multinode.sh [CONFIG] [OPTION …]
       srun --ntasks-per-node=1 bash run_multinode.sh [CONFIG] [OPTION …]
Trains with run_opt.sh's settings on several nodes. Start it once on every node, with the same arguments.
Slurm, MPI and Kubernetes are recognised by their variables; docs/multinode.md has scripts and manifests for them.

TEXT
    common_usage
    cat <<'TEXT'
  --tuned [FILE]         (an option) settings that scripts/tune.py has found on one of these nodes; FILE (else
                         tuned/CONFIG.json) must be the same on all. Its --batch-size is that of one node: give your
                         own, as many times as large as there are nodes, to keep the batch of each GPU
  MASTER_ADDR            host name or address of node 0, as the other nodes reach it
  MASTER_PORT            a free port of node 0
  RANK                   index of this node, from 0
  WORLD_SIZE             number of nodes (not of GPUs)
  NPROC_PER_NODE         GPUs per node (information only: tells a WORLD_SIZE that counts GPUs)
  OPENPI_DOCTOR=0        start without the look at this node (scripts/doctor.py --quick), whatever it would find
  NCCL_*                 passed on to NCCL, for example NCCL_SOCKET_IFNAME, NCCL_IB_DISABLE, NCCL_IB_GID_INDEX
TEXT
    exit 0
fi

tell_others() { # why this node does not start, so that they need not wait for it
    "$PYTHON" "$REPO/scripts/check_nodes.py" --tell-others "$1" >&2 || true
}

preflight() { # training's options; a start that cannot work ends here, on the node whose fault it is
    local status=0
    if [[ -n ${OPENPI_DOCTOR:-} ]] && ! switch_is_on OPENPI_DOCTOR; then return 0; fi
    if given --help || given -h; then return 0; fi
    "$PYTHON" "$REPO/scripts/doctor.py" "$CONFIG" "$@" --quick >&2 || status=$?
    case $status in
        0) ;;
        1)
            say "this node is not ready, see above. Mend it, or start all the same with OPENPI_DOCTOR=0."
            tell_others "a look at it found what must be mended first; its own log says what."
            exit 2
            ;;
        2)
            tell_others "its command line was not understood; its own log says why."
            exit 2
            ;;
        130) exit "$status" ;; # Ctrl-C
        *) say "scripts/doctor.py itself ended with exit code $status; going on without it" ;;
    esac
}

choose_config "$@"
[[ $CONFIG != pi05_demo ]] || fail "pi05_demo makes its own data and runs on one node: bash run_opt.sh pi05_demo"
CUDA_SET=$(cuda_set)
ensure_python "${CUDA_SET:-cpu}"
"$PYTHON" "$REPO/scripts/check_nodes.py"
take_tuned
if [[ -n ${TUNED:-} ]] && ! given --batch-size; then
    say "warning: --tuned takes the batch that was found for one node as the batch of all together, so each GPU has less than was tried. Give --batch-size, as many times that of the file as there are nodes, to keep the batch of each GPU."
fi
acceleration
launch opt "${ACCELERATED[@]}"
