# shellcheck shell=bash
# Finds or makes the Python environment. Sourced by the launchers and run_tests.sh, which set REPO, the project's root.
# Nothing here changes the caller's folder. What people may read goes to stderr.

say() { echo "$*" >&2; }

fail() { # A mistake that the user can mend: one message, exit code 2.
    say "error: $*"
    exit 2
}

switch_is_on() { # name of a 0/1 variable; unset and empty are off
    case "${!1:-}" in
        1 | true | True | TRUE) return 0 ;;
        "" | 0 | false | False | FALSE) return 1 ;;
        *) fail "$1=${!1} is neither on nor off. Write $1=1 or $1=0." ;;
    esac
}

cuda_set() { # prints cuda13 or cuda12 where a GPU answers, else nothing
    [[ ${JAX_PLATFORMS:-} == cpu ]] && return 0
    local driver limit=()
    command -v timeout >/dev/null && limit=(timeout 30) # a sick GPU can make nvidia-smi hang
    driver=$("${limit[@]}" nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) || return 0
    driver=${driver%%.*} # one line per GPU, all alike; the first one's major number
    [[ $driver =~ ^[0-9]+$ ]] || return 0
    if ((driver >= 580)); then echo cuda13; else echo cuda12; fi # CUDA 13 needs driver 580
}

# --- a Python to build on -------------------------------------------------------------------------------------------

python_if() { # condition on `v` (sys.version_info[:2]), command -> the interpreter's own path, if it runs and fits
    local path
    path=$("$2" -c "import sys; v = sys.version_info[:2]; print(sys.executable) if $1 else sys.exit(1)" 2>/dev/null) &&
        [[ -n $path ]] && echo "$path" # a program that is no Python may well exit with 0
}

python_candidates() { # every command that might be a Python, best first; many will not run (pyenv's shims)
    local name root
    for name in python3.12 python3.13 python3.14 python3.11 python3 python; do type -aP "$name" || true; done
    for root in "${PYENV_ROOT:-}" "$(pyenv root 2>/dev/null || true)" "$(dirname "$(dirname "$(type -P pyenv || echo /x/x)")")" \
        "${HOME:-/nonexistent}/.pyenv"; do
        [[ -d $root/versions ]] && printf '%s\n' "$root"/versions/*/bin/python3
    done
    return 0
}

find_python() { # condition on `v` -> the first Python that fits
    local candidate
    while IFS= read -r candidate; do
        python_if "$1" "$candidate" && return 0
    done < <(python_candidates)
    return 1
}

find_uv() { # -> a uv that runs; put by pip into .uv/env where the machine has none
    local candidate python log
    for candidate in "$(type -P uv || true)" "$REPO/.uv/env/bin/uv" "${HOME:-/nonexistent}/.local/bin/uv" "${HOME:-/nonexistent}/.cargo/bin/uv"; do
        [[ -x $candidate ]] && "$candidate" --version >/dev/null 2>&1 && echo "$candidate" && return 0
    done
    python=$(find_python 'v >= (3, 9)') || fail "neither uv nor Python is on this machine. Install Python 3.12 or newer, or uv, and start again."
    say "getting uv into .uv/ (once)"
    log=$REPO/.uv/install.log
    mkdir -p "$REPO/.uv"
    rm -rf "$REPO/.uv/env"
    # Debian's Python may lack venv, but then often has pip.
    { "$python" -m venv "$REPO/.uv/env" && "$REPO/.uv/env/bin/python" -m pip install --quiet uv; } >"$log" 2>&1 ||
        { rm -rf "$REPO/.uv/env" && "$python" -m pip install --quiet --target "$REPO/.uv/env" uv; } >>"$log" 2>&1 ||
        fail "uv could not be installed with $python: $(grep -v '^$' "$log" | tail -n 1) (all of it: $log). Install uv yourself, or set OPENPI_PYTHON to a Python that has the packages."
    echo "$REPO/.uv/env/bin/uv"
}

uv_settings() { # certificates and index as the machine's pip has them, unless the user told uv itself
    local bundle index
    for bundle in /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/cert.pem; do
        [[ -f $bundle ]] && export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS-1}" && break
    done
    if [[ -z ${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}${UV_INDEX:-} ]]; then
        index=${PIP_INDEX_URL:-$(python3 -m pip config get global.index-url 2>/dev/null || true)}
        [[ -n $index ]] && export UV_DEFAULT_INDEX="$index"
    fi
    return 0
}

make_venv() { # folder, condition on `v`, the version that uv fetches where the machine has none
    local python
    python=$(find_python "$2") || {
        say "no Python $3 on this machine; asking uv for one"
        if ! { "$UV" python install --quiet "$3" >&2 && python=$("$UV" python find --managed-python "$3"); }; then
            fail "no Python $3 was found on this machine, and uv could not fetch one. Install it (for example: apt install python$3), or set OPENPI_PYTHON to a Python that has the packages."
        fi
    }
    "$UV" venv --quiet --clear --python "$python" "$1" >&2 || fail "$python could not make a virtual environment in $1."
}

# --- the project's environment --------------------------------------------------------------------------------------

stamp_of() { cksum <"$REPO/requirements/$1.txt"; }

is_set_up() { # requirement set -> whether .venv holds it, whole
    local extra=()
    [[ $1 == dev ]] && extra=(--extra dev)
    [[ -f $REPO/.venv/.openpi_accel/$1 && ! -e $REPO/.venv/.openpi_accel/unfinished ]] &&
        [[ $(<"$REPO/.venv/.openpi_accel/$1") == "$(stamp_of "$1")" ]] &&
        "$REPO/.venv/bin/python" "$REPO/scripts/missing_packages.py" "${extra[@]}" >/dev/null 2>&1
}

set_up() { # requirement set; the caller holds the lock
    local venv=$REPO/.venv stamps=$REPO/.venv/.openpi_accel started=$SECONDS quiet=(--quiet)
    is_set_up "$1" && return 0 # another start did it while this one waited
    [[ -t 2 ]] && quiet=()
    UV=$(find_uv) || exit 2
    uv_settings
    # Anew, unless what is there works and only lacks this set.
    if [[ -e $stamps/unfinished || -f $stamps/$1 ]] || ! python_if 'v >= (3, 12)' "$venv/bin/python" >/dev/null; then
        [[ -e $venv ]] && say "the environment in .venv is out of date or broken; making it anew"
        make_venv "$venv" 'v >= (3, 12)' 3.12
    fi
    mkdir -p "$stamps"
    touch "$stamps/unfinished"
    say "installing requirements/$1.txt into .venv ($("$venv/bin/python" --version)); this happens once"
    "$UV" pip install "${quiet[@]}" --python "$venv/bin/python" -r "$REPO/requirements/$1.txt" >&2 ||
        fail "requirements/$1.txt could not be installed (uv's words are above). Is the package index reachable from here? A Python that has the packages can be used instead: OPENPI_PYTHON=/path/to/python"
    stamp_of "$1" >"$stamps/$1"
    rm "$stamps/unfinished"
    say "environment ready after $((SECONDS - started)) s"
}

ensure_python() { # requirement set: cpu, cuda12, cuda13 or dev. Sets PYTHON.
    local lacking extra=() gpu=()
    [[ $1 == dev ]] && extra=(--extra dev)
    [[ $1 == cuda* ]] && gpu=(--gpu)
    if [[ -n ${OPENPI_PYTHON:-} ]]; then
        PYTHON=$(type -P "$OPENPI_PYTHON") || fail "OPENPI_PYTHON=$OPENPI_PYTHON is no command. Set it to a Python, for example OPENPI_PYTHON=python3, or unset it and the environment is made for you."
        python_if 'v >= (3, 12)' "$PYTHON" >/dev/null || fail "OPENPI_PYTHON=$OPENPI_PYTHON does not run, or is older than Python 3.12."
        lacking=$("$PYTHON" "$REPO/scripts/missing_packages.py" "${extra[@]}" "${gpu[@]}") ||
            fail "OPENPI_PYTHON=$OPENPI_PYTHON lacks: $(paste -sd, <<<"$lacking" | sed 's/,/, /g'). Install them there ($OPENPI_PYTHON -m pip install -r requirements/$1.txt), or unset OPENPI_PYTHON and the environment is made for you."
        return
    fi
    if [[ -n ${VIRTUAL_ENV:-} && ! $VIRTUAL_ENV -ef $REPO/.venv ]] &&
        "$VIRTUAL_ENV/bin/python" "$REPO/scripts/missing_packages.py" "${extra[@]}" "${gpu[@]}" >/dev/null 2>&1; then
        PYTHON=$VIRTUAL_ENV/bin/python
        return
    fi
    if ! is_set_up "$1"; then
        mkdir -p "$REPO/.uv" || fail "$REPO cannot be written to, so no environment can be made there. Set OPENPI_PYTHON to a Python that has the packages."
        (
            if command -v flock >/dev/null; then
                flock --nonblock 9 || { say "another start is setting up the environment; waiting for it"; flock 9; }
            fi
            set_up "$1" 9>&-
        ) 9>"$REPO/.uv/lock" || exit $?
    fi
    PYTHON=$REPO/.venv/bin/python
}
