"""embodied_rl trains vision-language-action policies and language agents by reinforcement learning in simulators.

From Python: `embodied_rl.learn(sim=MyEnv)` returns a `Run`, `embodied_rl.load_policy(path)` an object with ``predict(observation)``.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embodied_rl.commands.learn import LoadedPolicy as LoadedPolicy
    from embodied_rl.commands.learn import Run as Run
    from embodied_rl.commands.learn import learn as learn
    from embodied_rl.commands.learn import load_policy as load_policy

if "embodied_rl_starts" in sys._xoptions:  # see `embodied_rl.distributed.processes.started`
    gc.disable()

__version__ = "0.1.0"

_NAMES = ("learn", "Run", "load_policy", "LoadedPolicy")
"""Names at the package's top, imported at first use, because simulator processes import this package too."""


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'embodied_rl' has no attribute {name!r}")
    return getattr(import_module("embodied_rl.commands.learn"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])
