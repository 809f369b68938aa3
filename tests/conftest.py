"""What every test stands on: drawing without a display, and no process or shared memory left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

import tests.composing  # noqa: F401
from embodied_rl.sim.rendering import configure_rendering
from tests.forks import forked, forked_simulators  # noqa: F401 (a fixture)
from tests.scheduling import Scheduling

# Before any test imports mujoco, sapien or pygame.
configure_rendering()
# Tests must not look at, nor write to, somebody's account.
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
# As a training command sets it: threads that spin between two parallel regions take the cores from the tests beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Every core has a test: more threads wait for one another. What a run sets for its updates counts as it does for users.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Processes start by the hundred: the package is compiled for the first of them, whatever the shell says.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# What tests write is signed with a key of their own, and nobody's allow-list is read; processes that they start inherit both.
_OWN_FOLDERS = tempfile.TemporaryDirectory(prefix="embodied-rl-tests-")
os.environ["XDG_STATE_HOME"], os.environ["XDG_CONFIG_HOME"] = (str(Path(_OWN_FOLDERS.name, name)) for name in ("state", "config"))

# Nothing is said of a property by how long an example takes on a busy machine, and the same tests are the same examples in every run.
settings.register_profile("anywhere", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("anywhere")

_SHARED_MEMORY = Path("/dev/shm")
_GRACE_S = 60.0
"""For processes that have been let go of, on a busy machine."""
_BEFORE = pytest.StashKey[set[str]]()
"""Names of shared memory when the session began."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--store-durations", action="store_true", help="write tests/durations.json, by which the tests are scheduled")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """``--numprocesses auto``: one worker more than there are cores, up to eight, because tests wait for processes and for time limits."""
    return min(len(os.sched_getaffinity(0)) + 1, 8)


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(Scheduling(config))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none; torch is imported only when such a test was collected."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Nothing is collected as garbage while all that is tested is imported."""
    gc.disable()
    yield
    gc.enable()


def pytest_collection_finish() -> None:
    """What is loaded by now stays to the end: the garbage collector need not look through it, not once."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test draws from torch without a seed of its own is the same in every run: torch itself begins with a seed of the moment."""
    if "torch" in sys.modules:
        import torch

        torch.default_generator.manual_seed(0)  # torch.manual_seed looks at every kind of device: a millisecond
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)


_FORK_SIMULATORS = ("golden", "hybrid", "learning", "methods", "policies", "roles", "rollout", "vla")
"""Folders whose tests are of what runs on simulators; files beside them use `forked`."""


@pytest.fixture(scope="module", autouse=True)
def _simulators(request: pytest.FixtureRequest) -> Iterator[None]:
    """Simulators' processes are forks where they are not what is tested: a fifth of a second of imports each, a thousand times."""
    above = request.path.relative_to(Path(__file__).parent).parts[0]
    with forked_simulators() if above in _FORK_SIMULATORS else contextlib.nullcontext():
        yield


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """A module's tests end their worker processes and leave no named shared memory, whatever happened in them."""
    shared_before = _shared_memory()
    yield
    deadline = time.monotonic() + _GRACE_S
    while (left := _workers()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"simulator processes were left running: {left}"
    if (
        "PYTEST_XDIST_WORKER" not in os.environ
    ):  # where modules run side by side, the names of others come and go: see the end of the session
        new = _shared_memory() - shared_before
        assert not new, f"shared memory was left behind: {sorted(new)}"


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_BEFORE] = _shared_memory()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The same for the whole session, from the process that started the others."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    if new := _shared_memory() - session.config.stash[_BEFORE]:
        print(f"\nshared memory was left behind: {sorted(new)}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _workers() -> list[str]:
    """Command lines of simulator processes below this one that still run."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            command = " ".join(child.cmdline()[1:])  # without the interpreter, which may lie in a folder of that name
            ours = "embodied_rl." in command or ("tests.forks" in command and child.ppid() != os.getpid())
            if ours and child.status() != psutil.STATUS_ZOMBIE:
                found.append(command)
        except psutil.Error:
            continue
    return found


def _shared_memory() -> set[str]:
    """Files of ours in /dev/shm; other programs' come and go."""
    if not _SHARED_MEMORY.is_dir():
        return set()
    return {entry.name for entry in os.scandir(_SHARED_MEMORY) if entry.name.startswith(("embodied", "psm_", "torch_"))}
