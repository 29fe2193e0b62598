#!/usr/bin/env bash
# ruff, mypy and all tests; arguments go to pytest. bash run_tests.sh --help
set -euo pipefail
REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/setup_env.sh
source "$REPO/scripts/setup_env.sh"

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    cat <<'TEXT'
usage: bash run_tests.sh [PYTEST OPTION …]
Sets up the environment if need be, then runs ruff check, ruff format --check, mypy and pytest. For example:
  bash run_tests.sh -k layering
  bash run_tests.sh tests/unit
Tests that read ../shared are left out, with a printed count, where that folder is absent; with CI=true that is an error.
OPENPI_PYTHON names a Python that has the packages; nothing is installed then.
TEXT
    exit 0
fi

cd "$REPO"
if switch_is_on CI && [[ ! -d ../shared ]]; then
    say "error: CI=$CI, but ../shared is absent, so the tests that read it could not run."
    exit 1
fi
ensure_python dev
unset OPENPI_PYTHON # tests start launchers of their own
export PYTHONPATH="$REPO${PYTHONPATH:+:$PYTHONPATH}"

failed=()
check() { # name, command …
    local name=$1 started=$SECONDS
    shift
    echo "== $name"
    "$@" || failed+=("$name")
    echo "   ($name: $((SECONDS - started)) s)"
}
check "ruff check" "$PYTHON" -m ruff check
check "ruff format" "$PYTHON" -m ruff format --check
check "mypy" "$PYTHON" -m mypy
# Two processes, each with whole files: what a file compiles once stays in its process. Exits with 5, so fails, where no
# test ran.
check "pytest" "$PYTHON" -m pytest -n 2 --dist loadfile "$@"

if ((${#failed[@]})); then
    echo "FAILED: $(printf '%s, ' "${failed[@]}" | sed 's/, $//')"
    exit 1
fi
echo "all checks passed"
