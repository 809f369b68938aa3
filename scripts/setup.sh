#!/usr/bin/env bash
# Makes .venv with the locked packages and this project in it. Called by `make`, which remembers that it succeeded.
# `setup.sh tests` adds what only the tests need to a .venv that was made.
set -euo pipefail
cd "$(dirname "$0")/.."

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
pip() { .venv/bin/python -m pip "$@" </dev/null; }

if [ "${1:-}" = tests ]; then
    # vLLM's build for processors fits torch's build for processors, on one kind of machine.
    if [ "$(uname -sm)" != "Linux x86_64" ] || ! .venv/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then
        echo "make: the tests of vLLM and Ray will be skipped: their locked versions are for Linux on x86-64 and a CPU build of torch."
        exit 0
    fi
    echo "make: installing the $(grep -c '==' requirements.test.lock) packages of requirements.test.lock"
    pip install --quiet --no-deps --no-build-isolation --requirement requirements.test.lock
    exit 0
fi

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

pinned() { grep -E "^$1==" requirements.lock; }

# torch comes first and brings what its build needs (a CUDA build: NVIDIA's libraries; a CPU build: nothing). The rest is
# complete in the lock and installed as it stands: no package can draw in another build of torch, or a torchvision.
echo "make: installing $(pinned torch) (a few minutes; a CUDA build is large)"
pip install --quiet --constraint requirements.lock "$(pinned setuptools)" "$(pinned wheel)" "$(pinned torch)"
echo "make: installing the $(grep -c '==' requirements.lock) packages of requirements.lock"
pip install --quiet --no-deps --no-build-isolation --requirement requirements.lock
pip install --quiet --no-deps --no-build-isolation --editable .

.venv/bin/python scripts/install_libraries.py || echo "make: going on without; 'make doctor' says what works here."
