#!/usr/bin/env bash
# Builds the wheel and installs it outside the checkout, without torch, on every Python given.
#
#   tools/wheel_check.sh python3.11 python3.13        (default: every python3.N from 3.11 on that is here)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root="$PWD"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

"${PYTHON:-.venv/bin/python}" -m build --wheel --outdir "$work/wheel" . >/dev/null
pythons=("$@")
if [ ${#pythons[@]} -eq 0 ]; then
    for minor in 11 12 13 14; do
        if "python3.$minor" -c 'import venv' >/dev/null 2>&1; then pythons+=("python3.$minor"); fi
    done
fi

echo "A few words." >"$work/document.txt"
cd "$work"
for python in "${pythons[@]}"; do
    version="$("$python" -V)"
    "$python" -m venv "$work/venv"
    bin="$work/venv/bin"
    "$bin/python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" "$work"/wheel/*.whl
    "$bin/python" -c 'import importlib.util as u; assert u.find_spec("torch") is None'
    "$bin/python" -c 'import kvloom; [getattr(kvloom, name) for name in kvloom.__all__]'
    "$bin/kvloom" spec gpt-oss-120b --json >/dev/null
    for command in "run --model smollm2 --document document.txt --question Why?" "run --model . --document document.txt --question Why?"; do
        if "$bin/kvloom" $command 2>error.txt || [ $? -ne 2 ] || ! grep -q "pip install 'kvloom\[" error.txt; then
            echo "$version: kvloom $command did not name its extra:" && cat error.txt && exit 1
        fi
    done
    echo "$version: spec works without torch; $(cat error.txt)"
    rm -rf "$work/venv"
done
