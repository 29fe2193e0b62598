#!/usr/bin/env bash
# Writes the pinned requirement files anew from pyproject.toml, pins.in and upstream.in: bash requirements/compile.sh
# Needs uv. The files hold names and versions alone, so that every machine takes them from its own package index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
UV=${UV:-uv}

pin() { # output file, Python version, then what uv compiles
    local out=$1 python=$2
    shift 2
    {
        echo "# Written by requirements/compile.sh; change pyproject.toml or the .in files instead."
        "$UV" pip compile --quiet --no-config --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
            --universal --python-version "$python" --no-python-downloads "$@"
    } >"requirements/.$out.new"
    mv "requirements/.$out.new" "requirements/$out"
}

core=(pyproject.toml --constraint requirements/pins.in)
pin cpu.txt 3.12 "${core[@]}"
pin cuda12.txt 3.12 "${core[@]}" --extra cuda12
pin cuda13.txt 3.12 "${core[@]}" --extra cuda13
pin dev.txt 3.12 "${core[@]}" --extra dev
pin upstream.txt 3.11 requirements/upstream.in
pin upstream_jax.txt 3.12 requirements/upstream_jax.in
