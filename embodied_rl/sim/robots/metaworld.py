"""Meta-World v3 (Yu et al. 2020, arXiv:1910.10897; McLean et al. 2025): fifty tasks of a Sawyer arm, each by its name.

The goal is part of the observation, and goal and object are placed anew by every seed. Multi-task: "MT10", "MT25", "MT50" or a list of
tasks, whose tasks take turns from episode to episode, each with its language instruction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from embodied_rl.errors import UserError, did_you_mean, from_extra, require_known
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.robots.gymnasium import GymnasiumSim
from embodied_rl.sim.robots.metaworld_steps import shorten_steps
from embodied_rl.sim.robots.mujoco import cheapen_rendering
from embodied_rl.sim.robots.mujoco_model import camera_in_use
from embodied_rl.sim.snapshots import SnapshotError
from embodied_rl.types import SimSpec, StepBuffers, TensorSpec, VariableSpec

if TYPE_CHECKING:
    from metaworld.sawyer_xyz_env import SawyerXYZEnv

SETS = ("MT10", "MT25", "MT50")
"""Tasks of `make` that stand for several: Meta-World's own sets for multi-task learning."""

ONE_HOT = ("none", "part", "state")

UPSIDE_DOWN_CAMERAS = frozenset({"corner", "corner2", "corner3", "corner4"})
"""Cameras of Meta-World's scenes whose pictures come out turned by 180 degrees."""


def tasks() -> list[str]:
    """The fifty task names, such as "reach-v3". Raises MissingExtraError where Meta-World is not installed."""
    return sorted(_classes())


def make(
    task: str,
    num_envs: int,
    render_size: int = 256,
    camera: str = "corner2",
    tasks: Sequence[str] | None = None,
    one_hot: str = "none",
    ahead: bool = False,
) -> GymnasiumSim | MultiTaskSim:
    """`num_envs` environments; dense reward in [0, 10], 500 steps, success from Meta-World's own measure.

    Args:
        task: name such as "drawer-open-v3"; or "MT10", "MT25" or "MT50"; with `tasks`, a name for that list.
        camera: "corner", "corner2", "corner3", "corner4", "topview", "behindGripper" or "gripperPOV".
        tasks: names of the tasks of a multi-task simulator of your own.
        one_hot: multi-task: "part" adds the task, one-hot over the tasks, as the part ``task``; "state" appends it to ``state``, for
            policies that read one vector (Meta-World's own convention); with "none" only the instruction distinguishes the tasks.
        ahead: multi-task: build an environment of every task at the start, instead of when its first episode begins.

    Raises MissingExtraError; UserError: unknown task, camera or choice of `one_hot`, or an empty list of tasks.
    """
    classes = _classes()
    if tasks is None and task not in SETS:
        return _single(task, classes, num_envs, camera, render_size)
    names = list(tasks) if tasks is not None else task_set(task)
    if not names:
        raise UserError("sim.kwargs.tasks is empty: name at least one Meta-World task, or leave it out.")
    for name in names:
        _check_task(name, classes)
    return MultiTaskSim(num_envs, task, names, camera, render_size, one_hot, ahead)


def task_set(name: str) -> list[str]:
    """The tasks of "MT10", "MT25" or "MT50", in Meta-World's order."""
    from metaworld import env_dict

    return list({"MT10": env_dict.MT10_V3, "MT25": env_dict.MT25_V3, "MT50": env_dict.MT50_V3}[name])


def _single(task: str, classes: Mapping[str, type], num_envs: int, camera: str, render_size: int) -> GymnasiumSim:
    _check_task(task, classes)
    envs = [SeededTask(classes[task], camera, render_size) for _ in range(num_envs)]
    sim = GymnasiumSim(envs, task=task, exact_snapshots=True)
    sim.spec = dataclasses.replace(sim.spec, max_episode_steps=envs[0].max_path_length, instruction=instruction(task))
    return sim


def _check_task(task: str, classes: Mapping[str, type]) -> None:
    if task not in classes:
        raise UserError(f"Meta-World task '{task}' is not known.{did_you_mean(task, [*classes, *SETS])}")


def instruction(task: str) -> str:
    """The task's name as an instruction: "button-press-topdown-v3" is "button press topdown"."""
    return task.rsplit("-v", 1)[0].replace("-", " ")


class MultiTaskSim(SimEnv):
    """Environments whose episodes are of several tasks: the seed chooses, ``tasks[seed % len(tasks)]``, and places goal and object.

    Every episode has the part ``instruction``, the task as text. An environment of a task is built when it is first needed, goes back
    to the process's stock when its slot begins an episode of another task, and is taken from there by the next slot that needs it.

    `name`: task in the spec.
    """

    many_tasks = True

    def __init__(
        self, num_envs: int, name: str, tasks: Sequence[str], camera: str, render_size: int, one_hot: str = "none", ahead: bool = False
    ) -> None:
        require_known(one_hot, ONE_HOT, f"Meta-World choice of one_hot '{one_hot}' is not known.")
        self.tasks = tuple(tasks)
        self._camera, self._render_size = camera, render_size
        self._stock: dict[str, list[GymnasiumSim]] = {task: [] for task in self.tasks}
        for task in self.tasks if ahead else self.tasks[:1]:
            self._stock[task].append(self._build(task))
        single = self._stock[self.tasks[0]][0].spec
        parts: dict[str, TensorSpec | VariableSpec] = {**single.observation, "instruction": VariableSpec("text", 1024)}
        self._one_hot, self._codes = one_hot, np.eye(len(self.tasks), dtype=np.float32)
        if one_hot == "part":
            parts["task"] = TensorSpec((len(self.tasks),))
        elif one_hot == "state":
            parts["state"] = TensorSpec((single.tensors["state"].shape[0] + len(self.tasks),))
        self.spec: SimSpec = dataclasses.replace(single, task=name, observation=parts, instruction=None)
        self._running: list[tuple[str, GymnasiumSim] | None] = [None] * num_envs
        self._rows = [StepBuffers.allocate(single, 1) for _ in range(num_envs)]

    def task_of(self, seed: int) -> str:
        """The task of an episode."""
        return self.tasks[int(seed) % len(self.tasks)]

    def task_at(self, env_id: int) -> str:
        """The task of a slot's running episode."""
        return self._current(env_id)[0]

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        for i, seed in zip(env_ids, seeds, strict=True):
            task = self.task_of(seed)
            self._take(i, task).reset([0], [int(seed)], self._rows[i], options)
            self._observe(i, task, out)

    def advance(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        for row, i in enumerate(env_ids):
            task, sim = self._current(i)
            own = self._rows[i]
            sim.advance([0], actions[row : row + 1], own)
            out.reward[i], out.terminated[i], out.truncated[i] = own.reward[0], own.terminated[0], own.truncated[0]
            out.success[i], out.info[i] = own.success[0], {**(own.info[0] or {}), "task": task}

    def observe(self, env_ids: Sequence[int], out: StepBuffers) -> None:
        for i in env_ids:
            task, sim = self._current(i)
            sim.observe([0], self._rows[i])
            self._observe(i, task, out)

    def _saved(self, env_id: int) -> dict[str, Any]:
        task, sim = self._current(env_id)
        return {"of": task, "episode": sim.snapshot(0)}

    def _take_up(self, env_id: int, saved: Mapping[str, Any]) -> None:
        if saved["of"] not in self._stock:
            raise SnapshotError(f"Snapshot is of the task '{saved['of']}', which is not among those of '{self.spec.task}'.")
        self._take(env_id, saved["of"]).restore(0, saved["episode"])

    def render(self, env_id: int) -> np.ndarray:
        """One frame [H, W, 3] uint8 of the slot's present task."""
        return self._current(env_id)[1].render(0)

    def film_cameras(self, env_id: int) -> list[str]:
        return self._current(env_id)[1].film_cameras(0)

    def film_from(self, env_id: int, camera: str) -> np.ndarray:
        return self._current(env_id)[1].film_from(0, camera)

    def close(self) -> None:
        for sims in (*self._stock.values(), [running[1] for running in self._running if running is not None]):
            for sim in sims:
                sim.close()

    def _current(self, i: int) -> tuple[str, GymnasiumSim]:
        running = self._running[i]
        assert running is not None, "an environment is reset before it is stepped"
        return running

    def _take(self, i: int, task: str) -> GymnasiumSim:
        """The slot's environment, exchanged at the stock where it is not of this task."""
        running = self._running[i]
        if running is not None:
            if running[0] == task:
                return running[1]
            self._stock[running[0]].append(running[1])
        stock = self._stock[task]
        sim = stock.pop() if stock else self._build(task)
        self._running[i] = task, sim
        return sim

    def _build(self, task: str) -> GymnasiumSim:
        return _single(task, _classes(), 1, self._camera, self._render_size)

    def _observe(self, i: int, task: str, out: StepBuffers) -> None:
        state, code = self._rows[i].observation["state"][0], self._codes[self.tasks.index(task)]
        out.observation["state"][i] = np.concatenate([state, code]) if self._one_hot == "state" else state
        out.observation["instruction"][i] = instruction(task)
        if self._one_hot == "part":
            out.observation["task"][i] = code


class SeededTask(gymnasium.Wrapper):
    """A Meta-World task whose episodes follow from the seed of `reset`, which Meta-World itself ignores."""

    def __init__(self, task_class: type, camera: str, render_size: int) -> None:
        env: SawyerXYZEnv = task_class(render_mode="rgb_array", camera_name=camera, width=render_size, height=render_size)
        super().__init__(env)
        cameras = [env.model.camera(index).name for index in range(env.model.ncam)]
        require_known(camera, cameras, f"Meta-World camera '{camera}' is not known.")
        cheapen_rendering(env)
        shorten_steps(env)
        self.task = env
        self.max_path_length = int(env.max_path_length)
        # What its benchmark classes set through set_task, except that positions are drawn at every reset, from the
        # environment's own generator, instead of frozen.
        env._partially_observable = False
        del env.sawyer_observation_space  # cached while the goal was hidden: its bounds would clip the goal to zero at every step
        env._set_task_called = True
        env._freeze_rand_vec = False
        env.seeded_rand_vec = True
        self.observation_space = env.sawyer_observation_space

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        if seed is not None:
            self.task.seed(seed)
        return self.task.reset()

    def render(self) -> np.ndarray:
        frame = np.asarray(self.env.render())
        return np.ascontiguousarray(frame[::-1, ::-1]) if camera_in_use(self) in UPSIDE_DOWN_CAMERAS else frame


def _classes() -> Mapping[str, type]:
    with from_extra("Meta-World", "metaworld"):
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    return ALL_V3_ENVIRONMENTS
