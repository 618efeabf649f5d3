#!/bin/sh
# Installs a wheel into a new environment of a bare system, and asks its doctor to run kernels:
# sh ci/smoke.sh PACKAGE WHEEL. Nothing is compiled; uv must be on PATH, and brings Python.
set -eu
[ -f "$2" ] || { echo "$2: expected one wheel" >&2; exit 1; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
wheel=$(cd "$(dirname "$2")" && pwd)/$(basename "$2")
cd "$folder"
uv venv --quiet --python 3.12 venv
uv pip install --quiet --python venv/bin/python "$1 @ file://$wheel"
APEX_JIT=0 venv/bin/python -m "apex.${1#apex-}" --check
