"""What vLLM trips over in a process that has done other things before."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _WithoutLLVM:
    """Stands for `sys` where vLLM's build for CPUs looks into everything that all modules hold when an engine starts: it breaks on
    llvmlite (numba), whose library answers to every name, ``__dict__`` among them."""

    @property
    def modules(self) -> dict[str, Any]:
        return {name: module for name, module in sys.modules.items() if name.split(".")[0] != "llvmlite"}


@contextmanager
def scannable_modules() -> Iterator[None]:
    """Starting an engine within it works after numba was imported, as after the first update of a run."""
    try:
        from vllm.triton_utils import dispatcher
    except ImportError:  # other builds and versions do not look
        yield
        return
    looking: Any = dispatcher
    looking.sys = _WithoutLLVM()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of names that it has looked at
            yield
    finally:
        looking.sys = sys
