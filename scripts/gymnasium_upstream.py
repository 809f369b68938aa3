"""Gymnasium's own tests of vector environments on `ManagerVectorEnv`: every SyncVectorEnv and AsyncVectorEnv that they build is ours.

    python scripts/gymnasium_upstream.py CHECKOUT [pytest arguments]

CHECKOUT is a clone of Farama-Foundation/Gymnasium at the installed version's tag; its tests are not ours to ship. They want Box2D and
moviepy, which need not be in our environment: ``pip install --target FOLDER box2d moviepy pygame-ce``, PYTHONPATH=FOLDER. The
differences below are expected, each with its reason; a test that fails for no listed reason, or passes although listed, is a failure.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.robots.gymnasium import GymnasiumSim
from embodied_rl.sim.vector import ManagerVectorEnv

_REMOTE = "the environments are in worker processes: call, get_attr, set_attr and envs are not offered"
_NO_SPACE = "our slabs hold no values of this space, and the adapter says so"
_NO_ACTION = "actions are a Box with finite bounds, one Discrete, or one text, and the adapter says so"
_KEPT_INFO = "of an environment's infos only success crosses from the workers; the view adds the return and length of an episode that ended"
_SEEDS = "an episode's seed follows from the seed of the run, its slot and its number: training meets no held-out one"
DIFFERENCES: dict[str, str] = {
    r"test_metadata_sync|test_call_|test_set_attr|test_vector_env_wrapper_attributes": _REMOTE,
    r"subenv_error|test_already_closed|_(timeout|out_of_order)|check_(observations|spaces)_async|test_equivalence_with_wrapper": _REMOTE,
    r"test_sync_vector_determinism": "the state of a wrapped action space stays in its worker: seed the view's, action_space.seed(…)",
    r"test_check_spaces_sync": "the message names ManagerVectorEnv's own rule",
    r"custom_space": _NO_SPACE,
    r"\[.*(Graph|Sequence|OneOf)\(": _NO_SPACE,
    r"test_vector_obs_action_spaces\[(Multi|Tuple\(|Dict\(|Box\(.*inf)": _NO_ACTION,
    r"test_vector_wrapper_equivalence\[.*(DictObsEnv|-ClipAction)": _NO_ACTION,
    r"test_vector_return_info|test_autoreset_within_step|test_final_obs_info|test_record_episode_statistics\[": _KEPT_INFO,
    r"test_random_seed|vector_env_seed": _SEEDS,
    r"test_obs_mode_same_different_spaces": "bounds of observations may differ between environments; the view shows the first one's",
    r"test_mixed_observation_spaces\[same": "refused, by a UserError (a ValueError)",
}
"""{regular expression of test ids: why ours differs}."""


def make(num_envs: int, pickled: str) -> GymnasiumSim:
    """In the worker: the environments of a test's functions. Raises ValueError for another number of them."""
    import cloudpickle

    functions, attributes = cloudpickle.loads(bytes.fromhex(pickled))
    if len(functions) != num_envs:
        raise ValueError(f"{len(functions)} functions for {num_envs} environments")
    environments = [function() for function in functions]
    attributes = {"max_count": [None] * num_envs, **attributes}  # the adapter takes a step before the test can set it
    for name, values in attributes.items():
        for environment, value in zip(environments, values, strict=True):
            setattr(environment.unwrapped, name, value)
    wrapped = [Unseeded(one) if type(one.unwrapped).__name__ == "GenericTestEnv" else one for one in environments]
    return GymnasiumSim(wrapped, task="upstream")


class Unseeded(gymnasium.Wrapper):
    """Our slots always give an episode a seed; these tests' own environment begins to count at it."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.env.reset(seed=None, options=options)


class Upstream(ManagerVectorEnv):
    """Takes what gymnasium's classes take."""

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env]],
        shared_memory: bool = True,
        copy: bool = True,
        context: Any = None,
        observation_mode: Any = "same",
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    ) -> None:
        if observation_mode != "same":
            pytest.xfail("all environments of a manager have the same spaces")
        self._functions, self._attributes, self._wanted = list(env_fns), {}, AutoresetMode(autoreset_mode)
        self._build()

    def _build(self) -> None:
        import cloudpickle

        pickled = cloudpickle.dumps((self._functions, self._attributes)).hex()
        factory = SimFactory("gymnasium_upstream:make", None, {"pickled": pickled})
        autoreset = self._wanted is not AutoresetMode.DISABLED
        super().__init__(EnvManager(factory, len(self._functions), num_workers=1, autoreset=autoreset), self._wanted)

    def set_attr(self, name: str, values: Any) -> None:
        """Environments live in other processes: build them again with the attributes that the test wants."""
        each = values if isinstance(values, (list, tuple)) else [values] * self.num_envs
        self._attributes = {**self._attributes, name: list(each)}
        self.manager.close()
        self._build()


class Plugin:
    """Puts ours into gymnasium before its tests are imported, and holds the outcome against `DIFFERENCES`."""

    def pytest_configure(self) -> None:
        import gymnasium.vector.async_vector_env
        import gymnasium.vector.sync_vector_env

        for module in (gymnasium.vector, gymnasium.vector.sync_vector_env, gymnasium.vector.async_vector_env):
            for name in ("SyncVectorEnv", "AsyncVectorEnv"):
                if hasattr(module, name):
                    setattr(module, name, Upstream)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            reason = next((reason for pattern, reason in DIFFERENCES.items() if re.search(pattern, item.nodeid)), None)
            if reason is not None:
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def main(arguments: list[str]) -> int:
    checkout = Path(arguments[0]).resolve()
    here = [str(checkout), str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*here, *filter(None, [os.environ.get("PYTHONPATH")])])  # for the workers
    sys.path[:0] = here
    os.chdir(checkout)
    np.set_printoptions(threshold=20)
    chosen = arguments[1:] or ["tests/vector", "tests/wrappers/vector", "--ignore=tests/vector/utils"]
    import gymnasium_upstream  # the workers' name of this file

    return int(
        pytest.main(
            [*chosen, "-q", "-rfEX", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short"], plugins=[gymnasium_upstream.Plugin()]
        )
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
