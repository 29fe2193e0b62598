# shellcheck shell=bash
# What run_baseline.sh, run_opt.sh and run_multinode.sh share; they set REPO and source this file.
# shellcheck source=scripts/setup_env.sh
source "$REPO/scripts/setup_env.sh"

DEFAULT_CONFIG=pi05_libero
XLA_GPU_FLAGS="--xla_gpu_triton_gemm_any=false --xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_enable_pipelined_all_gather=true --xla_gpu_dot_merger_threshold_mb=0"

common_usage() {
    cat <<'TEXT'
  CONFIG                 config name (default pi05_libero); `CONFIG --help` lists its options
  OPTION                 passed on to scripts/train.py; what you give wins over what the launcher sets

Environment:
  EXP_NAME               name of the run; its folder is checkpoints/CONFIG/EXP_NAME
  RESUME=1               continue the run of that name, with its own options where you give none; otherwise it is started anew, over what is there
  SAVE_INTERVAL          save every so many steps (the last step is always saved)
  DATA_PATH              LeRobot dataset folder
  BASE_CHECKPOINT_PATH   base weights, …/pi05_base/params
  OPENPI_PYTHON          a Python that has the packages; nothing is installed then
TEXT
}

choose_config() { # the arguments; sets CONFIG and REST
    CONFIG=$DEFAULT_CONFIG
    if (($#)) && [[ $1 != -* ]]; then
        CONFIG=$1
        shift
    fi
    REST=("$@")
}

wants_help() { (($# == 1)) && [[ $1 == -h || $1 == --help ]]; }

option_value() { # option name -> the last value that the user gave it
    local i value=
    for ((i = 0; i < ${#REST[@]}; i++)); do
        case ${REST[i]} in
            "$1="*) value=${REST[i]#*=} ;;
            "$1") value=${REST[i + 1]:-} ;;
        esac
    done
    echo "$value"
}

given() { # option name -> whether the user gave it
    local argument
    for argument in "${REST[@]}"; do
        [[ $argument == "$1" || $argument == "$1="* ]] && return 0
    done
    return 1
}

take_tuned() { # takes --tuned [FILE] out of REST; sets TUNED to the file's settings, a line each, where it was given
    local words=() file='' asked=''
    TUNED=''
    while ((${#REST[@]})); do
        case ${REST[0]} in
            --tuned=*) asked=1 file=${REST[0]#*=} ;;
            --tuned)
                asked=1
                [[ ${REST[1]:--} != -* ]] && file=${REST[1]} && REST=("${REST[@]:1}")
                ;;
            *) words+=("${REST[0]}") ;;
        esac
        REST=("${REST[@]:1}")
    done
    REST=("${words[@]}")
    [[ -n $asked ]] || return 0
    ensure_python "${CUDA_SET:-cpu}"
    if ! TUNED=$("$PYTHON" "$REPO/scripts/tuned_settings.py" "$CONFIG" "$file"); then
        if declare -F tell_others >/dev/null; then # a launcher's own way to the other nodes
            tell_others "its file for --tuned is refused; its own log says why."
        fi
        exit 2
    fi
}

acceleration() { # sets ACCELERATED and the environment of the accelerations that exist; needs CONFIG and CUDA_SET
    ACCELERATED=()
    local compute=() tuned_options=() setting name
    if [[ -n ${TUNED:-} ]]; then
        while IFS= read -r setting; do
            case $setting in
                [A-Z]*=*) compute+=("$setting") ;;
                *) tuned_options+=("$setting") ;;
            esac
        done <<<"$TUNED"
    fi
    for setting in "${compute[@]}"; do # before the defaults; the user's own value is kept
        [[ -v ${setting%%=*} ]] || export "${setting?}"
    done
    export OPENPI_SKIP_VIDEO_DECODE="${OPENPI_SKIP_VIDEO_DECODE-1}"
    # The demo is small: starting eight workers, or processes for them, would take longer than it trains.
    if [[ $CONFIG == pi05_demo ]]; then
        export OPENPI_WORKER_CPU="${OPENPI_WORKER_CPU-0}"
    else
        export OPENPI_WORKER_CPU="${OPENPI_WORKER_CPU-1}"
        ACCELERATED+=(--num-workers 8)
    fi
    if [[ $CONFIG == *libero* ]]; then # two cameras, and no prompt of LIBERO is longer than 28 tokens
        export OPENPI_SKIP_IMAGES="${OPENPI_SKIP_IMAGES-right_wrist_0_rgb}"
        ACCELERATED+=(--model.max-token-len 28)
    else
        export OPENPI_SKIP_IMAGES="${OPENPI_SKIP_IMAGES-auto}"
        ACCELERATED+=(--model.max-token-len auto)
    fi
    ACCELERATED+=("${tuned_options[@]}")
    if [[ -n $CUDA_SET ]]; then
        # The next start of the same step takes seconds instead of a minute.
        export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR-$REPO/.cache/jax}"
        # JAX takes three quarters of a card otherwise; the rest is for the CUDA context and NCCL's buffers.
        export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION-0.95}"
    fi
    if [[ -n $CUDA_SET && -z ${TUNED:-} ]]; then # on a CPU unrolled layers take longer to compile than they save
        compute=(OPENPI_FLASH_ATTN=1 OPENPI_FLASH_IMPL=auto OPENPI_BATCH_CAMERAS=1 OPENPI_CAST_EARLY=1 OPENPI_UNROLL_LAYERS=1)
        ACCELERATED+=(--remat.gemma dots --remat.siglip dots)
    fi
    local shown="OPENPI_SKIP_VIDEO_DECODE=$OPENPI_SKIP_VIDEO_DECODE OPENPI_WORKER_CPU=$OPENPI_WORKER_CPU OPENPI_SKIP_IMAGES=$OPENPI_SKIP_IMAGES"
    for setting in "${compute[@]}"; do # the user's own value is kept
        name=${setting%%=*}
        [[ $name == OPENPI_SKIP_IMAGES ]] && continue # shown already
        [[ -v $name ]] || export "${setting?}"
        shown+=" $name=${!name}"
    done
    shown+=" ${ACCELERATED[*]}"
    [[ -n $CUDA_SET ]] && shown+=" JAX_COMPILATION_CACHE_DIR=$JAX_COMPILATION_CACHE_DIR XLA_PYTHON_CLIENT_MEM_FRACTION=$XLA_PYTHON_CLIENT_MEM_FRACTION"
    if switch_is_on OPENPI_STRICT_EQUIV; then
        shown+="; XLA's defaults (OPENPI_STRICT_EQUIV)"
    elif [[ -n $CUDA_SET ]]; then
        export JAX_OPTIMIZATION_LEVEL="${JAX_OPTIMIZATION_LEVEL-O1}"
        export XLA_FLAGS="$XLA_GPU_FLAGS${XLA_FLAGS:+ $XLA_FLAGS}" # the last of two equal flags counts: the user's
        shown+=" JAX_OPTIMIZATION_LEVEL=$JAX_OPTIMIZATION_LEVEL XLA_FLAGS='$XLA_FLAGS'"
    fi
    say "accelerations: $shown"
}

launch() { # suffix of the default experiment name, then the launcher's own options; needs CONFIG, REST and CUDA_SET
    local suffix=$1 options=() script=train.py
    shift
    EXP_NAME=${EXP_NAME:-${CONFIG}_$suffix}
    options=("--exp-name=$EXP_NAME" "$@")
    local saved assets=("--assets-base-dir=$REPO/assets")
    saved=$(option_value --checkpoint-base-dir)
    saved=${saved:-$REPO/checkpoints}/$CONFIG/$EXP_NAME/config.json
    if { switch_is_on RESUME || given --resume; } && [[ -f $saved ]]; then
        options=("--exp-name=$EXP_NAME") # the run goes on as it was, also where it was started with other settings
        say "resuming with the options in $saved${*:+, in place of: $*}"
        assets=() # its own
    fi
    if switch_is_on RESUME; then
        given --overwrite && fail "RESUME=1 and --overwrite exclude each other: choose whether to continue or to start anew."
        options+=(--resume)
    elif ! given --resume && ! given --overwrite && ! given --no-overwrite; then
        options+=(--overwrite)
    fi
    if [[ -n ${SAVE_INTERVAL:-} ]]; then
        [[ $SAVE_INTERVAL =~ ^[1-9][0-9]*$ ]] || fail "SAVE_INTERVAL=$SAVE_INTERVAL is no number of steps. Write for example SAVE_INTERVAL=1000."
        options+=("--save-interval=$SAVE_INTERVAL")
    fi
    [[ -n ${DATA_PATH:-} ]] && options+=("--data.path=$DATA_PATH")
    [[ -n ${BASE_CHECKPOINT_PATH:-} ]] && options+=("--weight-loader.params-path=$BASE_CHECKPOINT_PATH")
    # A run is found again from wherever it is started.
    [[ $PWD -ef $REPO ]] || options+=("${assets[@]}" "--checkpoint-base-dir=$REPO/checkpoints")
    [[ $CONFIG == pi05_demo ]] && script=demo.py # writes the dataset, trains by the same code, evaluates
    ensure_python "${CUDA_SET:-cpu}"
    export PYTHONPATH="$REPO${PYTHONPATH:+:$PYTHONPATH}"
    say "$CONFIG, experiment $EXP_NAME, $PYTHON"
    if declare -F preflight >/dev/null; then # a launcher's own look at the node, with what training will be given
        preflight "${options[@]}" "${REST[@]}"
    fi
    exec "$PYTHON" "$REPO/scripts/$script" "$CONFIG" "${options[@]}" "${REST[@]}"
}
