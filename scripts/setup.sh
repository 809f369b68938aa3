#!/usr/bin/env bash
# Makes .venv with the locked packages that the main job needs and this project in it. Called by `make`, which remembers that it
# succeeded. `setup.sh everything` adds the other simulators and the tools, `setup.sh tests` then what only the tests need.
# TORCH=cpu (or cu130, …) chooses torch's build; without it, it is the one that pip finds.
set -euo pipefail
cd "$(dirname "$0")/.."

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
pip() { .venv/bin/python -m pip "$@" </dev/null; }
# pip would compile every module, a third of the time, and most of them are never imported: see the two places that compile.
install() { pip install --quiet --no-compile "$@"; }
compiling() { env -u PYTHONDONTWRITEBYTECODE .venv/bin/python "$@"; }
install_lock() {
    echo "make: installing the $(grep -c '==' "$1") packages of $1"
    install --no-deps --no-build-isolation --requirement "$1"
}
packages() { .venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'; }
compile_all() {
    echo "make: compiling modules"
    compiling -m compileall -q -j 0 "$(packages)" >/dev/null 2>&1 || true # some packages hold templates that are no Python
}
find_libraries() {
    .venv/bin/python scripts/install_libraries.py || echo "make: going on without; 'make doctor' says what works here."
}

case "${1:-}" in
everything)
    install_lock requirements.lock
    compile_all
    find_libraries
    exit 0
    ;;
tests)
    # vLLM's build for processors fits torch's build for processors, on one kind of machine.
    if [ "$(uname -sm)" != "Linux x86_64" ] || ! .venv/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then
        echo "make: the tests of vLLM and Ray will be skipped: their locked versions are for Linux on x86-64 and a CPU build of torch."
        exit 0
    fi
    install_lock requirements.test.lock
    compile_all
    exit 0
    ;;
esac

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

pinned() { grep -E "^$1==" requirements.train.lock; }

# torch comes first and brings what its build needs (a CUDA build: NVIDIA's libraries; a CPU build: nothing). The rest is
# complete in the lock and installed as it stands: no package can draw in another build of torch, or a torchvision.
echo "make: installing $(pinned torch)${TORCH:+ for $TORCH}"
if [ -n "${TORCH:-}" ]; then
    install uv
    .venv/bin/uv pip install --quiet --python .venv/bin/python --torch-backend "$TORCH" --constraint requirements.train.lock "$(pinned torch)" </dev/null
fi
install --constraint requirements.train.lock "$(pinned setuptools)" "$(pinned wheel)" "$(pinned torch)"
install_lock requirements.train.lock
# What these packages test themselves with: 160 MB that no user runs.
site="$(packages)"
find "$site"/torch/test "$site"/torch/bin -type f -iname '*test*' -delete 2>/dev/null || true
find "$site"/{numpy,scipy,sympy,numba,matplotlib,transforms3d} -type d -name tests -prune -exec rm -rf {} + 2>/dev/null || true
# What only compilers read (33 MB), and symbol tables that only debuggers read (117 MB).
rm -rf "$site"/sapien/include "$site"/torch/bin/protoc*
for library in "$site"/torch/lib/libtorch_{cpu,python}.so "$site"/llvmlite/binding/libllvmlite.so; do
    if readelf --sections --wide "$library" 2>/dev/null | grep -q ' \.symtab '; then
        strip --strip-unneeded -o "$library.new" "$library" && mv "$library.new" "$library" # programs that run keep the old one
    fi
done
install --no-deps --no-build-isolation --editable .
find_libraries
# Importing is compiling; a program that cannot be imported here says so when it is run.
echo "make: compiling the modules that training imports"
compiling - >/dev/null 2>&1 <<'PYTHON' || true
import av, hydra, matplotlib.backends.backend_agg, numba, PIL.ImageDraw, rich.live, rich.progress, safetensors.torch
import tensorboard.compat.proto.event_pb2, tensorboard.summary.writer.record_writer
import embodied_rl.train, embodied_rl.trainer, embodied_rl.render, embodied_rl.reporting
from embodied_rl.sim.robots.maniskill_sim import registered_tasks

registered_tasks()
PYTHON
