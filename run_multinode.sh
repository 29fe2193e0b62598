#!/usr/bin/env bash
# run_opt.sh's settings on several nodes; start it on every node. bash run_multinode.sh --help
set -euo pipefail
REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/launch.sh
source "$REPO/scripts/launch.sh"

if wants_help "$@"; then
    cat <<'TEXT'
usage: MASTER_ADDR=… MASTER_PORT=… RANK=… WORLD_SIZE=… bash run_multinode.sh [CONFIG] [OPTION …]
Trains with run_opt.sh's settings on several nodes. Start it once on every node, with the same arguments.

TEXT
    common_usage
    cat <<'TEXT'
  MASTER_ADDR            host name or address of node 0, as the other nodes reach it
  MASTER_PORT            a free port of node 0
  RANK                   index of this node, from 0
  WORLD_SIZE             number of nodes (not of GPUs)
  NPROC_PER_NODE         GPUs per node (information only)
  OPENPI_DOCTOR=0        start without the look at this node (scripts/doctor.py --quick), whatever it would find
  NCCL_*                 passed on to NCCL, for example NCCL_SOCKET_IFNAME, NCCL_IB_DISABLE, NCCL_IB_GID_INDEX
TEXT
    exit 0
fi

need() { # variable, what it is, example
    [[ -n ${!1:-} ]] || fail "$1 is not set: $2, for example $1=$3. (Your platform usually sets it on every node.)"
}
whole() { # variable, what it is, example, least, most
    need "$1" "$2" "$3"
    if ! [[ ${!1} =~ ^(0|[1-9][0-9]{0,8})$ ]] || ((${!1} < $4 || ${!1} > $5)); then
        fail "$1=${!1} is not right: $2, a whole number from $4 to $5, for example $1=$3."
    fi
}

preflight() { # training's options; a start that cannot work ends here, on the node whose fault it is
    local status=0
    if [[ -n ${OPENPI_DOCTOR:-} ]] && ! switch_is_on OPENPI_DOCTOR; then return 0; fi
    if given --help || given -h; then return 0; fi
    if [[ $CONFIG == pi05_demo ]]; then return 0; fi # makes its own data, on one node
    "$PYTHON" "$REPO/scripts/doctor.py" "$CONFIG" "$@" --quick >&2 || status=$?
    case $status in
        0) ;;
        1)
            say "node $RANK is not ready, see above. Mend it, or start all the same with OPENPI_DOCTOR=0."
            exit 2
            ;;
        2 | 130) exit "$status" ;; # wrong options, Ctrl-C
        *) say "scripts/doctor.py itself ended with exit code $status; going on without it" ;;
    esac
}

need MASTER_ADDR "the host name or address of node 0" 10.0.0.1
[[ $MASTER_ADDR =~ ^[^[:space:]/]+$ && $MASTER_ADDR != *://* ]] ||
    fail "MASTER_ADDR=$MASTER_ADDR is no host: give the name or address of node 0 alone, for example MASTER_ADDR=10.0.0.1."
whole MASTER_PORT "a free port of node 0" 29500 1 65535
whole WORLD_SIZE "the number of nodes (not of GPUs)" 2 1 100000
whole RANK "the index of this node" 0 0 $((WORLD_SIZE - 1))
[[ -z ${NPROC_PER_NODE:-} ]] || whole NPROC_PER_NODE "the number of GPUs of each node" 8 1 1024
export MASTER_ADDR MASTER_PORT RANK WORLD_SIZE

choose_config "$@"
CUDA_SET=$(cuda_set)
acceleration
say "node $RANK of $WORLD_SIZE, coordinator $MASTER_ADDR:$MASTER_PORT"
launch opt "${ACCELERATED[@]}"
