#!/usr/bin/env bash
# Makes .venv with the locked packages and this project in it. Called by `make`, which remembers that it succeeded.
set -euo pipefail
cd "$(dirname "$0")/.."

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
python="$(scripts/find_python.sh)"
scripts/system_packages.sh "$python"

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        echo "make: $python cannot make virtual environments. On Debian and Ubuntu: sudo apt-get install python3-venv" >&2
        exit 1
    fi
    echo "make: creating .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
fi

pip() { .venv/bin/python -m pip "$@" </dev/null; }
pinned() { grep -E "^$1==" requirements.lock; }

# torch comes first and brings what its build needs (a CUDA build: NVIDIA's libraries; a CPU build: nothing). The rest is
# complete in the lock and installed as it stands: no package can draw in another build of torch, or a torchvision.
echo "make: installing $(pinned torch) (a few minutes; a CUDA build is large)"
pip install --quiet --constraint requirements.lock "$(pinned setuptools)" "$(pinned wheel)" "$(pinned torch)"
echo "make: installing the $(grep -c '==' requirements.lock) packages of requirements.lock"
pip install --quiet --no-deps --no-build-isolation --requirement requirements.lock
pip install --quiet --no-deps --no-build-isolation --editable .

.venv/bin/python scripts/install_libraries.py || echo "make: going on without; 'make doctor' says what works here."
