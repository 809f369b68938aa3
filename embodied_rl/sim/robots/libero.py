"""LIBERO (Liu et al. 2023, arXiv:2306.03310): 130 tabletop tasks with an instruction and 50 fixed initial states each, on robosuite.

Protocol of the benchmark: an episode starts from one of the task's stored states, ten steps without motion let the objects settle,
and the limit is 220 (spatial), 280 (object), 300 (goal), 400 (90) or 520 (10, "long") steps. The package brings task descriptions
and initial states; meshes and textures are fetched once (see `assets_folder`).
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import os
import pickletools
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.bounds import whole_number
from embodied_rl.errors import MissingAssetsError, MissingExtraError, UserError, did_you_mean, from_extra, require_known
from embodied_rl.files import write_atomic
from embodied_rl.sim.robots.robosuite import FIXED_ARGUMENTS, RobosuiteSim, check_name, observed_cameras, quiet_import
from embodied_rl.sim.seeding import HELD_OUT_START
from embodied_rl.types import StepBuffers, TensorSpec, VariableSpec

# ---- LIBERO's stored initial states: those for training and for evaluation, and their files -----------------------------------


NUM_STATES = 50
NUM_TRAIN_STATES = 40
INIT_STATES = ("split", "train", "test", "all")

_NAMES = ["numpy.core.multiarray _reconstruct", "numpy ndarray", "_codecs encode", "numpy dtype"]
_TEXTS = ["b", "latin1", "f8", "<"]


def chosen_states(which: str, seed: int) -> range:
    """Numbers of the states that an episode with this seed may start from.

    "train" is 0…39, "test" 40…49, "all" 0…49; "split" is "test" for held-out seeds and "train" for training seeds.
    """
    if which == "split":
        which = "test" if seed >= HELD_OUT_START else "train"
    return {"train": range(NUM_TRAIN_STATES), "test": range(NUM_TRAIN_STATES, NUM_STATES), "all": range(NUM_STATES)}[which]


def read_init_states(path: Path) -> np.ndarray:
    """[50, 1 + nq + nv] float64: time, positions and velocities of MuJoCo, one row per state.

    The files were written by `torch.save`, a zip archive around one pickled array. Nothing is unpickled: this function lists the pickle's
    instructions, which must be those of a plain array of 64-bit floats, and reads the numbers from their bytes. Raises UserError: the file
    is missing, damaged or contains anything else.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            content = archive.read(name)
        instructions = [(code.name, argument) for code, argument, _ in pickletools.genops(content)]
        return _plain_array(instructions)
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        raise UserError(
            f"The initial states in '{path}' cannot be read ({error}). Reinstall LIBERO: pip install --force-reinstall hf-libero"
        ) from error


def _plain_array(instructions: list[tuple[str, Any]]) -> np.ndarray:
    texts = [argument for name, argument in instructions if name == "BINUNICODE"]
    names = [argument for name, argument in instructions if name == "GLOBAL"]
    # 0 and 1 are placeholder and version, 3 and the rest belong to the type "<f8".
    first, version, rows, columns, *rest = [argument for name, argument in instructions if name.startswith("BININT")]
    order = [name for name, _ in instructions if name in ("NEWTRUE", "NEWFALSE")]
    plain = names == _NAMES and texts[:4] == _TEXTS and len(texts) == 5 and [first, version, *rest] == [0, 1, 3, -1, -1, 0]
    if not plain or order != ["NEWFALSE", "NEWTRUE", "NEWFALSE"]:  # the last is the order: rows before columns
        raise ValueError("not a plain array of 64-bit floats")
    return np.frombuffer(texts[4].encode("latin1"), "<f8").reshape(rows, columns).astype(np.float64)


STEP_LIMITS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_90": 400, "libero_10": 520}
"""{suite: steps}, OpenVLA's (arXiv:2406.09246), which others adopted."""

SETS = tuple(STEP_LIMITS)
"""Suites, which `make` accepts as tasks."""

SETTLING_STEPS = 10
NO_MOTION = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])
"""Action without motion of the arm, with an open gripper."""

OBSERVATIONS = ("rgb", "state")
ORIENTATIONS = {"upright": (1, 1), "raw": (-1, 1), "rotated": (1, -1)}
"""{name: steps along rows and columns of an upright picture}. LIBERO's data sets store pictures bottom row first ("raw"); OpenVLA and its
successors turn those by 180 degrees ("rotated"), which mirrors left and right."""

ASSET_FOLDERS = ("articulated_objects", "scenes", "stable_hope_objects", "stable_scanned_objects", "textures", "turbosquid_objects")
ASSETS_REPOSITORY = "lerobot/libero-assets"


def tasks() -> list[str]:
    """The 130 tasks as "suite/task name"; needs no assets. Raises MissingExtraError if LIBERO is not installed."""
    return [f"{suite}/{name}" for suite, names in suites().items() for name in names]


def instruction(task: str) -> str:
    """Instruction of a task ("suite/name") in the benchmark's words: the name as a sentence, without its scene."""
    name = task.partition("/")[2]
    if name[:1].isupper():  # "KITCHEN_SCENE3_turn_on_the_stove"
        name = name.partition("SCENE")[2].partition("_")[2]
    return name.replace("_", " ")


class LiberoSim(RobosuiteSim):
    """One task, or a whole suite, whose tasks alternate from episode to episode.

    Actions [7] are OSC_POSE deltas of the end effector (position, axis-angle) and the gripper (-1 open, 1 closed); the reward is 1 at
    success. An episode is a function of its seed: of n tasks, seed s plays number s mod n from its stored state (s // n) mod (number of
    states); as many consecutive seeds as there are pairs visit each pair once.

    Args:
        task: "libero_spatial/3" (number in its suite), "libero_goal/put_the_bowl_on_the_stove", or a suite, "libero_spatial".
        observation: "rgb": the cameras, and ``state`` [8]: position of the end effector in metres, its orientation as axis-angle,
            positions of the two fingers. "state": the robot's and the objects' state as one vector, without cameras; a single task only.
        init_states: which of the 50 stored states episodes start from. "split": the last ten for held-out seeds (evaluation), the first
            forty for training seeds, so that the two never meet. "train" or "test": those parts for all seeds. "all": all 50,
            as in published results (policies trained on recorded data that never saw these states).
        cameras: the first is ``rgb``, the others ``rgb.<camera>``.
        orientation: "upright", "raw" or "rotated": see `ORIENTATIONS`.
        assets_dir: folder of the meshes and textures; None: see `assets_folder`.
        max_episode_steps: None: the suite's limit, counted after settling.
        render_size: pixels a side of `render`'s picture (always upright).

    Raises MissingExtraError, MissingAssetsError; UserError: unknown suite, task, observation, camera or choice of states.
    """

    def __init__(
        self,
        task: str,
        num_envs: int,
        observation: str = "rgb",
        init_states: str = "split",
        image_size: int = 224,
        cameras: str | Sequence[str] = ("agentview", "robot0_eye_in_hand"),
        orientation: str = "upright",
        assets_dir: str | None = None,
        max_episode_steps: int | None = None,
        render_size: int = 256,
    ) -> None:
        for kind, name, known in (
            ("observation", observation, OBSERVATIONS),
            ("choice of init_states", init_states, INIT_STATES),
            ("orientation", orientation, ORIENTATIONS),
        ):
            require_known(name, known, f"LIBERO {kind} '{name}' is not known.")
        observed = observed_cameras(observation, cameras)
        self.tasks = _expand(task)
        if observation == "state" and len(self.tasks) > 1:
            raise UserError(f"The objects of the tasks of '{task}' differ: observe a suite with observation=rgb, or choose one task.")
        self._which, self._flip = init_states, ORIENTATIONS[orientation]
        self._observe_robot = observation == "rgb"
        _import_libero(Path(assets_dir).expanduser() if assets_dir is not None else None)
        suite = self.tasks[0].partition("/")[0]
        self._present = [self.tasks[0]] * num_envs
        super().__init__(
            lambda: _build(self.tasks[0]),
            num_envs,
            task=task,
            observe_objects=True,
            cameras=observed,
            image_size=(image_size, image_size),
            max_episode_steps=STEP_LIMITS[suite] if max_episode_steps is None else max_episode_steps,
            render_camera="agentview",
            render_size=render_size,
            instruction=instruction(self.tasks[0]) if len(self.tasks) == 1 else None,
            multisampling=True,  # as in LIBERO's own pictures, pixel by pixel
        )
        self.many_tasks = len(self.tasks) > 1
        if self.many_tasks:
            parts: dict[str, TensorSpec | VariableSpec] = {**self.spec.observation, "instruction": VariableSpec("text", 1024)}
            self.spec = replace(self.spec, observation=parts, instruction=None)

    def task_of(self, seed: int) -> tuple[str, int]:
        return episode_of(self.tasks, self._which, int(seed))

    def task_at(self, env_id: int) -> str:
        return self._present[env_id]

    def _advance(self, i: int, action: np.ndarray, out: StepBuffers) -> None:
        super()._advance(i, action, out)
        out.terminated[i] = False  # LIBERO's "done" is success, which we report without ending the episode
        out.info[i] = {**(out.info[i] or {}), "task": self._present[i]}

    def _first(self, i: int, seed: int) -> Mapping[str, np.ndarray]:
        from robosuite.utils.errors import RandomizationError

        task, number = self.task_of(seed)
        if task != self._present[i]:
            self.envs[i].close()
            self.envs[i], self._present[i] = _build(task), task
        env, states = self.envs[i], _init_states(task)
        # The stored state holds every joint; LIBERO's other random placements (cabinets, stoves) are the same at every reset.
        np.random.seed(0)  # noqa: NPY002  (LIBERO draws from it)
        for attempt in range(100):
            try:
                env.reset()
                break
            except RandomizationError:
                if attempt == 99:
                    raise
        if len(states[number]) != 1 + env.sim.model.nq + env.sim.model.nv:
            raise UserError(f"The initial states of LIBERO task '{task}' have another version than its assets.")
        env.sim.set_state_from_flattened(states[number])
        env.sim.forward()
        env._post_process()
        env._update_observables(force=True)
        for _ in range(SETTLING_STEPS):
            observation, *_ = env.step(NO_MOTION)
        return observation

    def _state(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        if not self._observe_robot:
            return super()._state(observation)
        angle = axis_angle(observation["robot0_eef_quat"])
        return np.concatenate([observation["robot0_eef_pos"], angle, observation["robot0_gripper_qpos"]])

    def _observe(self, i: int, out: StepBuffers) -> None:
        super()._observe(i, out)
        for key in self._cameras:
            frame = out.observation[key][i]
            frame[:] = frame[:: self._flip[0], :: self._flip[1]].copy()
        if "instruction" in out.observation:
            out.observation["instruction"][i] = instruction(self._present[i])


make = LiberoSim
"""`num_envs` LIBERO environments."""


def episode_of(tasks: Sequence[str], which: str, seed: int) -> tuple[str, int]:
    """Task of an episode and number of its initial state: see `LiberoSim` and `chosen_states`."""
    number, task = divmod(seed, len(tasks))
    states = chosen_states(which, seed)
    return tasks[task], states[number % len(states)]


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """[3] rotation vector of a unit quaternion [4] (x, y, z, w), of length in [0, 2π] as in robosuite: the quaternion's sign counts."""
    sine = np.linalg.norm(quaternion[:3])
    if sine < 1e-12:
        return np.zeros(3)
    return quaternion[:3] / sine * (2.0 * np.arctan2(sine, quaternion[3]))


def assets_folder(assets_dir: Path | None = None) -> Path:
    """Folder of LIBERO's meshes and textures: `assets_dir`, the package's own folder, or ``~/.cache/libero/assets``.

    Raises MissingAssetsError with the command that fetches them.
    """
    download = Path("~/.cache/libero/assets").expanduser()
    places = [assets_dir] if assets_dir is not None else [_package() / "assets", download]
    for place in places:
        if all((place / name).is_dir() for name in ASSET_FOLDERS):
            return place
    tried = " and ".join(f"'{place}'" for place in places)
    raise MissingAssetsError(
        f"LIBERO needs its meshes and textures, which are not in {tried}. "
        f"Get them: hf download {ASSETS_REPOSITORY} --repo-type dataset --local-dir ~/.cache/libero/assets "
        "(or point sim.kwargs.assets_dir at libero/libero/assets of a checkout of LIBERO)."
    )


def _expand(task: str) -> list[str]:
    """Full names of the task or of the suite's tasks."""
    known = suites()
    suite, _, name = task.partition("/")
    require_known(suite, known, f"LIBERO suite '{suite}' is not known.")
    if not name:
        return [f"{suite}/{each}" for each in known[suite]]
    if (number := whole_number(name)) is not None and number < len(known[suite]):
        name = known[suite][number]
    if name not in known[suite]:
        choices = f" Or a number below {len(known[suite])}." if number is not None else ""
        raise UserError(f"LIBERO task '{task}' is not known.{choices}{did_you_mean(name, known[suite])}")
    return [f"{suite}/{name}"]


def _build(task: str) -> Any:
    """LIBERO's environment of one task, without LIBERO's own pictures."""
    import robosuite
    from libero.libero.envs import TASK_MAPPING
    from libero.libero.envs.bddl_utils import get_problem_info

    description = str(_package() / "bddl_files" / f"{task}.bddl")
    problem = get_problem_info(description)["problem_name"]
    check_name("problem", problem, TASK_MAPPING)
    arguments = {key: value for key, value in FIXED_ARGUMENTS.items() if key != "use_object_obs"}
    return TASK_MAPPING[problem](
        description,
        robots=["Panda"],
        controller_configs=robosuite.load_controller_config(default_controller="OSC_POSE"),
        initialization_noise=None,
        control_freq=20,
        **arguments,
    )


@lru_cache(maxsize=16)
def _init_states(task: str) -> np.ndarray:
    return read_init_states(_package() / "init_files" / f"{task}.pruned_init")


def _import_libero(assets_dir: Path | None) -> None:
    """Import LIBERO with a configuration file, without which its first import asks a question and waits for an answer."""
    folder = assets_folder(assets_dir)
    os.environ["LIBERO_CONFIG_PATH"] = str(configuration_folder())
    with quiet_import(), from_extra("LIBERO", "libero"):
        libero: Any = importlib.import_module("libero.libero")
        importlib.import_module("libero.libero.envs")
    # Its own search would use the network if it finds nothing.
    libero._assets_path_cache = str(folder)


def configuration_folder() -> Path:
    """Folder with LIBERO's configuration file: the user's own if it exists, else one of ours in the user's cache."""
    chosen = Path(os.environ.get("LIBERO_CONFIG_PATH") or "~/.libero").expanduser()
    if (chosen / "config.yaml").is_file():
        return chosen
    import yaml

    package = _package()
    paths = {
        "benchmark_root": str(package),
        "bddl_files": str(package / "bddl_files"),
        "init_states": str(package / "init_files"),
        "datasets": str(package.parent / "datasets"),
        "assets": str(package / "assets"),
    }
    text = yaml.safe_dump(paths)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = cache / "embodied_rl" / f"libero-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"
    if not (folder / "config.yaml").is_file():
        write_atomic(folder / "config.yaml", text)
    return folder


@lru_cache(maxsize=1)
def _package() -> Path:
    """The folder of ``libero.libero``, found without importing it. Raises MissingExtraError."""
    try:
        found = importlib.util.find_spec("libero")  # the distribution nests the package in a namespace package
    except ImportError:
        found = None
    for place in (found.submodule_search_locations or []) if found is not None else []:
        if (Path(place) / "libero" / "bddl_files").is_dir():
            return Path(place) / "libero"
    raise MissingExtraError("LIBERO", "libero")


@lru_cache(maxsize=1)
def suites() -> dict[str, list[str]]:
    """{suite: task names in the benchmark's order}, read from LIBERO's source, because importing its package would import torch and ask its
    question. Raises MissingExtraError if LIBERO is not installed."""
    source = (_package() / "benchmark" / "libero_suite_task_map.py").read_text(encoding="utf-8")
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", None) == "libero_task_map":
            table = ast.literal_eval(statement.value)
            return {suite: list(table[suite]) for suite in STEP_LIMITS}
    raise UserError("LIBERO's table of tasks was not found in the installed package: this version is not known to work.")
