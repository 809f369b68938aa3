"""robomimic's HDF5 (Mandlekar et al. 2021, arXiv:2108.03298), which LIBERO's demonstrations (Liu et al. 2023, arXiv:2306.03310) also use.

``data/demo_i`` contains ``obs/{key}``, ``next_obs/{key}`` (optional), ``actions``, ``states``, ``rewards`` and ``dones``, a row per step.
Its attributes are ``num_samples`` and, for robosuite's tasks, the episode's MuJoCo model (``model_file``). ``data`` has the attributes
``env_args`` (JSON) and ``total``; LIBERO adds ``problem_info`` with the instruction. ``mask/{name}`` lists the episodes of a subset.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.episodes.formats import base
from embodied_rl.episodes.formats.hdf5 import H5Recording, is_storable, new_file, read_extras, require_numbers, write_array, write_extras
from embodied_rl.episodes.recording import FieldNote, RecordedEpisode, Recording, RecordingInfo, damaged
from embodied_rl.types import SimSpec, TensorSpec

if TYPE_CHECKING:
    import h5py

NAME = "demos.hdf5"
STATES = "states"
"""Name of a simulator state read from ``states``."""
_DEMO = re.compile(r"demo_(\d+)")
_ROBOSUITE, _GYM = 1, 2
"""robomimic's environment type numbers (``EnvType``)."""
_MUJOCO = ("time", "qpos", "qvel")
_FLAGS = ("terminated", "truncated", "success")
_KEPT_ATTRIBUTES = ("env_name", "env", "problem_info", "bddl_file_name", "repository_version", "date", "tag")


# ---- reading --------------------------------------------------------------------------------------------------------


class RobomimicRecording(H5Recording):
    """Reads one file. Raises RecordingError if it is damaged or inconsistent."""

    format = "robomimic"

    def __init__(self, path: Path) -> None:
        super().__init__(base.file_in(path, NAME, ".hdf5", ".h5"))

    def _open(self, notes: base.NoteBook) -> tuple[int, RecordingInfo | None]:
        file = self._file
        self._data = file.group(file.root, "data")
        found = [match for name in file.names(self._data) if (match := _DEMO.fullmatch(name))]
        self._demos = [match.group() for match in sorted(found, key=lambda match: int(match.group(1)))]
        if not self._demos:
            raise damaged(file.path, "has no group 'demo_0', 'demo_1', …", field="/data")
        self._masks = self._read_masks()
        env_args = file.attribute(self._data, "env_args")
        self._env_args = {} if env_args is None else base.parse_json(file.path, env_args, "/data@env_args")
        side = file.attribute(self._data, base.SIDE_ENTRY)
        self._own = side is not None
        self._sparse = self._rewards_tell_success() and not self._own
        info = base.parse_side_info(file.path, base.parse_json(file.path, side, base.SIDE_ENTRY)) if self._own else None
        return len(self._demos), info

    def _episode(self, number: int) -> RecordedEpisode:
        return self._read(number, base.NoteBook(), tuple(self.spec.observation))

    def _group(self, number: int) -> h5py.Group:
        return self._file.group(self._data, self._demos[number], number)

    def _read_masks(self) -> dict[str, set[str]]:
        """{name of a subset: its episodes}"""
        file = self._file
        if not file.has(file.root, "mask"):
            return {}
        group = file.group(file.root, "mask")
        masks = {name: set(file.strings(group, name)) for name in file.names(group)}
        for name, demos in masks.items():
            if missing := sorted(demos - set(self._demos)):
                raise damaged(file.path, f"names the episode '{missing[0]}', which is not there", field=f"/mask/{name}")
        return masks

    def _rewards_tell_success(self) -> bool:
        """Whether the reward shows success: robosuite's is 1 if the task is solved and 0 otherwise, unless reward shaping is on."""
        kwargs = self._env_args.get("env_kwargs")
        shaped = isinstance(kwargs, dict) and bool(kwargs.get("reward_shaping"))
        return self._env_args.get("type") == _ROBOSUITE and not shaped

    def _flags(self, number: int, notes: base.NoteBook) -> dict[str, Any]:
        file, group = self._file, self._group(number)
        action = file.array(group, "actions", number)
        length = self._length(action, "actions", "num_samples", file.attribute(group, "num_samples", number), number)
        fields: dict[str, Any] = {"action": action if self._own and action.dtype == np.int64 else base.as_float32(action, "action", notes)}
        if file.has(group, "rewards"):
            fields["reward"] = base.as_float32(file.array(group, "rewards", number, length), "reward", notes)
        else:
            fields["reward"] = base.filled("reward", length, notes, "the file has no 'rewards'")
        fields |= read_extras(file, group, number, length)
        if not all(name in fields for name in _FLAGS):
            fields |= self._guess_ends(group, number, fields["reward"], notes)
        fields["seed"] = base.seed_or_unknown(fields.get("seed"), number, notes, "the format has none")
        return fields

    def _guess_ends(self, group: h5py.Group, number: int, reward: np.ndarray, notes: base.NoteBook) -> dict[str, np.ndarray]:
        """Guess terminated, truncated and success for a file of another program."""
        file, length = self._file, len(reward)
        done = file.array(group, "dones", number, length) if file.has(group, "dones") else None
        fields = base.guessed_ends(done, length, "dones", notes)
        if self._sparse and np.isin(reward, (0, 1)).all():
            success = reward == 1
            notes.add("success", "filled", "the file has none; a reward of 1 is robosuite's sign of it")
        else:
            success = base.filled("success", length, notes, "the file has none")
        return fields | {"success": success}

    def _read(self, number: int, notes: base.NoteBook, keys: tuple[str, ...] | None) -> RecordedEpisode:
        file, group = self._file, self._group(number)
        fields = self._flags(number, notes)
        length = len(fields["reward"])
        metadata = fields.setdefault("metadata", {}) if self._own else fields.setdefault("metadata", self._metadata(group, number))
        fields["observation"], repeated = self._observation(group, number, length, keys, notes)
        if repeated and not self._own:
            metadata["final_observation"] = "repeated"
        if "state" not in fields and file.has(group, STATES):
            fields["state"] = {STATES: base.unknown_last(file.array(group, STATES, number, length))}
            notes.add("state", "filled", "the file holds the states before each step; the one after the last is NaN")
        return base.finish_episode(file.path, number, fields)

    def _observation(
        self, group: h5py.Group, number: int, length: int, keys: tuple[str, ...] | None, notes: base.NoteBook
    ) -> tuple[dict[str, np.ndarray], bool]:
        """Observation {key: [T + 1, …]}, and whether its last row is not in the file."""
        file = self._file
        if not file.has(group, "obs"):
            raise damaged(file.path, "is missing: robomimic's dataset_states_to_obs.py extracts observations", number, "obs")
        shown = file.group(group, "obs", number)
        after = file.group(group, "next_obs", number) if file.has(group, "next_obs") else None
        observation: dict[str, np.ndarray] = {}
        repeated = []
        for key in file.names(shown) if keys is None else keys:
            part = file.array(shown, key, number, length)
            if after is not None and file.has(after, key):
                observation[key] = np.concatenate([part, file.array(after, key, number, length)[-1:]])
            else:
                observation[key] = base.repeat_last(part)
                repeated.append(key)
        if not observation:
            raise damaged(file.path, "has no observation", number, "obs")
        for key in repeated:
            notes.add(f"observation.{key}", "filled", "the file has no 'next_obs' of it; the last observation stands twice")
        return observation, bool(repeated)

    def _metadata(self, group: h5py.Group, number: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {"demo": self._demos[number]}
        for name in ("model_file", "init_state"):
            value = self._file.attribute(group, name, number)
            if value is not None:
                metadata[name] = value
        masks = sorted(name for name, demos in self._masks.items() if self._demos[number] in demos)
        return metadata | ({"masks": masks} if masks else {})

    def _foreign_info(self, bounds: base.ActionBounds, notes: base.NoteBook) -> RecordingInfo:
        action = bounds.spec(notes)
        attributes = {name: self._file.attribute(self._data, name) for name in _KEPT_ATTRIBUTES}
        attributes = {name: str(value) for name, value in attributes.items() if value is not None}
        first = self._read(0, notes, None)
        task = self._env_args.get("env_name") or attributes.get("env_name") or attributes.get("env")
        if not task:
            notes.add("spec.task", "filled", "the file does not say; its own name")
        spec = SimSpec(
            task=str(task or self._file.path.stem),
            observation=base.tensor_specs(first.observation),
            action=action,
            control_hz=self._control_hz(notes),
            instruction=_instruction(attributes.get("problem_info")),
            reports_success=self._sparse,
        )
        metadata: dict[str, Any] = {"format": self.format, "attributes": attributes}
        if self._env_args:
            metadata["env_args"] = self._env_args
        return RecordingInfo(spec, sim={}, policy=base.IMPORTED, metadata=metadata)

    def _control_hz(self, notes: base.NoteBook) -> float | None:
        kwargs = self._env_args.get("env_kwargs")
        value = kwargs.get("control_freq") if isinstance(kwargs, dict) else None
        if not isinstance(value, int | float) or isinstance(value, bool):
            notes.add("spec.control_hz", "filled", "the file does not say; not known")
            return None
        return float(value)


def _instruction(problem_info: str | None) -> str | None:
    """LIBERO's language instruction, which was a list of words in one release, and quoted in others."""
    try:
        found = json.loads(problem_info or "{}").get("language_instruction")
    except (ValueError, AttributeError):
        return None
    found = "".join(map(str, found)) if isinstance(found, list) else found
    return str(found).strip().strip('"') if found else None


# ---- writing --------------------------------------------------------------------------------------------------------


def write(recording: Recording, folder: Path, target: Path, advance: base.Advance) -> tuple[FieldNote, ...]:
    """Write ``demos.hdf5`` into an empty folder; `target` is unused.
    Raises RecordingError: the recording contains data that the format cannot (text actions), or is damaged; OSError: a write fails."""
    spec, notes = recording.spec, base.NoteBook()
    for key in require_numbers(spec, "robomimic", notes):
        notes.add(f"observation.{key}", "kept", "obs and, for the one after the last step, next_obs")
    for field in ("action", "reward"):
        notes.add(field, "kept")
    for field in _FLAGS:
        notes.add(field, "extra", f"{base.SIDE_ENTRY}/{field}; 'dones' says only that the episode ended")
    _write_h5(folder / NAME, recording, notes, advance)
    return tuple(notes)


def _write_h5(path: Path, recording: Recording, notes: base.NoteBook, advance: base.Advance) -> None:
    masks: dict[str, list[str]] = {}
    with new_file(path, advance) as (file, advanced):
        data = file.create_group("data", track_order=True)
        total = 0
        for number, episode in enumerate(recording):
            name = f"demo_{number}"
            _write_episode(data.create_group(name), episode, recording.spec.tensors, notes)
            total += episode.num_steps
            own = episode.metadata.get("masks")
            for mask in own if isinstance(own, list) else ():
                if is_storable(mask) and mask and "/" not in mask:
                    masks.setdefault(mask, []).append(name)
            advanced(1)
        data.attrs["total"] = total
        data.attrs["env_args"] = json.dumps(_env_args(recording, notes))
        data.attrs[base.SIDE_ENTRY] = json.dumps(base.side_info(recording.info, recording.spec.tensors))
        theirs = recording.info.metadata.get("attributes")
        attributes = theirs if isinstance(theirs, dict) else {}
        for attribute in _KEPT_ATTRIBUTES:
            if is_storable(value := attributes.get(attribute)):
                data.attrs[attribute] = value
        if "problem_info" not in data.attrs and recording.spec.instruction:
            data.attrs["problem_info"] = json.dumps({"language_instruction": recording.spec.instruction})
        if not masks:
            for number in range(len(recording)):
                masks.setdefault(_split(number, len(recording)), []).append(f"demo_{number}")
        for mask, demos in masks.items():
            file.create_dataset(f"mask/{mask}", data=np.array(demos, dtype="S"))


def _split(number: int, num_episodes: int) -> str:
    """robomimic's training mask of an episode, for a recording without masks: every tenth is for validation, or the last of fewer than
    ten."""
    return "valid" if number % 10 == 9 or (num_episodes < 10 and 0 < number == num_episodes - 1) else "train"


def _write_episode(group: h5py.Group, episode: RecordedEpisode, kept: Mapping[str, TensorSpec], notes: base.NoteBook) -> None:
    group.attrs["num_samples"] = episode.num_steps
    if is_storable(model := episode.metadata.get("model_file")):
        group.attrs["model_file"] = model
    for key in kept:
        write_array(group, f"obs/{key}", episode.observation[key][:-1])
        write_array(group, f"next_obs/{key}", episode.observation[key][1:])
    write_array(group, "actions", episode.action)
    write_array(group, "rewards", episode.reward)
    write_array(group, "dones", (episode.terminated | episode.truncated).astype(np.int64))
    plain = _plain_states(episode)
    if plain is not None:
        write_array(group, STATES, plain[:-1])
        notes.add("state", "kept", f"'{STATES}' (one vector), and exactly in {base.SIDE_ENTRY}/state")
    write_extras(group, episode, notes, with_state=True, flags=_FLAGS)


def _plain_states(episode: RecordedEpisode) -> np.ndarray | None:
    """[T + 1, S] float64: for MuJoCo's state time, positions and velocities, as robosuite flattens it; for others all parts in order."""
    if not episode.state:
        return None
    names = _MUJOCO if all(name in episode.state for name in _MUJOCO) else tuple(episode.state)
    parts = [np.asarray(episode.state[name]).reshape(episode.num_steps + 1, -1).astype(np.float64) for name in names]
    return np.concatenate(parts, axis=1)


def _env_args(recording: Recording, notes: base.NoteBook) -> dict[str, Any]:
    info = recording.info
    theirs = info.metadata.get("env_args")
    if isinstance(theirs, dict):
        return theirs
    robosuite = any(word in str(info.sim.get("target", "")) for word in ("robosuite", "libero"))
    if not robosuite:
        notes.add("env_args", "filled", "robomimic knows no such simulator: it trains on the file, and cannot play it")
    kwargs = dict(info.sim.get("kwargs") or {})
    if info.spec.control_hz is not None:
        kwargs.setdefault("control_freq", info.spec.control_hz)
    return {"env_name": info.spec.task, "type": _ROBOSUITE if robosuite else _GYM, "env_kwargs": kwargs}
