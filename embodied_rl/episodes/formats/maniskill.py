"""ManiSkill's ``trajectory.h5`` + ``trajectory.json`` (Tao et al. 2024, arXiv:2410.00425), as its `RecordEpisode` writes them.

``traj_i`` contains ``obs`` [T + 1, …] (an array, or nested groups), ``actions`` [T, A], ``terminated``, ``truncated``, ``success`` and
``rewards`` [T] and ``env_states`` {actors, articulations} {name} [T + 1, …]. The JSON file contains the environment's arguments and, for
each episode, seed, control mode and reset arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.episodes.formats import base
from embodied_rl.episodes.formats.hdf5 import H5Recording, new_file, read_extras, require_numbers, write_array, write_extras
from embodied_rl.episodes.recording import FieldNote, RecordedEpisode, Recording, RecordingInfo, damaged
from embodied_rl.types import SimSpec, TensorSpec

if TYPE_CHECKING:
    import h5py

_BY_SUCCESS = "embodied_rl_terminated_by_success"
"""Attribute of a converted episode that terminated only by success."""
NAME = "trajectory"
TARGET = "embodied_rl.sim.robots.maniskill:make"
"""Simulator of this package that plays ManiSkill's tasks."""
_OURS = ("render", "render_size", "camera_size")
"""Arguments of this package's adapter that ManiSkill's own environments do not take."""
_NOT_OURS = ("num_envs", "sim_backend", "render_mode", "render_backend", "human_render_camera_configs", "shader_dir")
"""Arguments of ManiSkill's environments that the adapter sets itself."""
_TEXTURES = ("rgb", "depth", "segmentation", "position", "normal", "albedo")
_CAMERA = "base_camera"
"""ManiSkill's usual name of a task's first camera, omitted from the names of its parts here."""


# ---- reading --------------------------------------------------------------------------------------------------------


class ManiSkillRecording(H5Recording):
    """Reads one pair of files. Raises RecordingError if they are damaged or inconsistent."""

    format = "maniskill"

    def __init__(self, path: Path) -> None:
        path = base.file_in(path, f"{NAME}.h5", ".h5")
        self._meta = base.read_json(path.with_suffix(".json"))
        self._own = self._meta.get(base.SIDE_ENTRY) is not None
        super().__init__(path.with_suffix(".h5"))

    def _open(self, notes: base.NoteBook) -> tuple[int, RecordingInfo | None]:
        json_path = self._file.path.with_suffix(".json")
        self._entries = self._check_entries(json_path)
        return len(self._entries), base.parse_side_info(json_path, self._meta[base.SIDE_ENTRY]) if self._own else None

    def _check_entries(self, json_path: Path) -> list[dict[str, Any]]:
        """Check and return the JSON file's episodes."""
        entries = self._meta.get("episodes")
        env_info = self._meta.get("env_info")
        if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
            raise damaged(json_path, "must list at least one episode", field="episodes")
        if not isinstance(env_info, dict) or not isinstance(env_info.get("env_id"), str):
            raise damaged(json_path, "must say which environment the episodes are of", field="env_info.env_id")
        for number, entry in enumerate(entries):
            if type(entry.get("episode_id")) is not int:
                raise damaged(json_path, f"must be an integer, is {entry.get('episode_id')!r:.40}", number, "episode_id")
        return entries

    def _group(self, number: int) -> h5py.Group:
        return self._file.group(self._file.root, f"traj_{self._entries[number]['episode_id']}", number)

    def _action(self, group: h5py.Group, number: int, notes: base.NoteBook) -> np.ndarray:
        """Actions [T, A]; those of several robots are concatenated."""
        file = self._file
        if file.is_group(group, "actions", number):
            parts = list(file.arrays(file.group(group, "actions", number), number).values())
            notes.add("action", "changed", "one array per robot in the file; side by side here")
            if not parts or len({len(part) for part in parts}) > 1:
                raise damaged(file.path, f"holds {len(parts)} arrays of {sorted({len(part) for part in parts})} rows", number, "actions")
            action = np.concatenate(parts, axis=1)
        else:
            action = file.array(group, "actions", number)
        return action if action.dtype == np.int64 else base.as_float32(action, "action", notes)

    def _flags(self, number: int, notes: base.NoteBook) -> dict[str, Any]:
        file, group, entry = self._file, self._group(number), self._entries[number]
        action = self._action(group, number, notes)
        length = self._length(action, "actions", "elapsed_steps", entry.get("elapsed_steps"), number)
        fields: dict[str, Any] = {"action": action}
        fields |= self._ends(group, number, length, {"terminated": "terminated", "truncated": "truncated"}, notes)
        if file.attribute(group, _BY_SUCCESS, number):
            fields["terminated"][-1] = False
        for ours, theirs, kind in (("success", "success", bool), ("reward", "rewards", np.float32)):
            if file.has(group, theirs):
                fields[ours] = file.array(group, theirs, number, length).astype(kind)
            else:
                fields[ours] = base.filled(ours, length, notes, f"the file has no '{theirs}'")
        fields["seed"] = self._seed(entry, number, notes)
        metadata = {name: entry[name] for name in ("control_mode", "reset_kwargs") if name in entry}
        fields["metadata"] = {"maniskill": metadata}
        return fields | read_extras(file, group, number, length)

    def _seed(self, entry: Mapping[str, Any], number: int, notes: base.NoteBook) -> int:
        reset = entry.get("reset_kwargs")
        seed = entry.get("episode_seed", reset.get("seed") if isinstance(reset, dict) else None)
        seed = seed[0] if isinstance(seed, list) and len(seed) == 1 else seed
        return base.seed_or_unknown(seed, number, notes, "the file does not say")

    def _episode(self, number: int) -> RecordedEpisode:
        file, group, notes = self._file, self._group(number), base.NoteBook()
        fields = self._flags(number, notes)
        fields["observation"] = self._observation(group, number, len(fields["action"]) + 1, notes)
        if "state" not in fields and file.has(group, "env_states"):
            states = file.arrays(file.group(group, "env_states", number), number, len(fields["action"]) + 1)
            fields["state"] = states or None
        return base.finish_episode(file.path, number, fields)

    def _observation(self, group: h5py.Group, number: int, rows: int, notes: base.NoteBook) -> dict[str, np.ndarray]:
        file = self._file
        if not file.has(group, "obs"):
            raise damaged(
                file.path, "is missing: replay the file with --obs-mode state --save-traj, which records observations", number, "obs"
            )
        if not file.is_group(group, "obs", number):
            return {"state": file.array(group, "obs", number, rows)}
        parts = file.arrays(file.group(group, "obs", number), number, rows)
        if not self._own:
            return _named_parts(parts, notes)
        missing = [key for key in self.spec.observation if _place(key) not in parts]
        if missing:
            raise damaged(file.path, "is missing", number, f"obs/{_place(missing[0])}")
        return {key: parts[_place(key)] for key in self.spec.observation}

    def _foreign_info(self, bounds: base.ActionBounds, notes: base.NoteBook) -> RecordingInfo:
        env_info, action = self._meta["env_info"], self._flags(0, base.NoteBook())["action"]
        observation = self._observation(self._group(0), 0, len(action) + 1, notes)
        kwargs = env_info.get("env_kwargs") or {}
        limit = env_info.get("max_episode_steps")
        if action.dtype == np.int64:
            raise damaged(self._file.path, "holds integers; actions of ManiSkill's are vectors", 0, "actions")
        spec = SimSpec(
            task=env_info["env_id"],
            observation=base.tensor_specs(observation),
            action=bounds.spec(notes),
            max_episode_steps=limit if type(limit) is int else None,
            reports_success=self._file.has(self._group(0), "success"),
        )
        notes.add("spec.control_hz", "filled", "the file does not say; not known")
        made = {key: value for key, value in kwargs.items() if key not in _NOT_OURS} if isinstance(kwargs, dict) else {}
        policy = {"kind": "imported"} | {key: self._meta[key] for key in ("source_type", "source_desc") if key in self._meta}
        return RecordingInfo(
            spec,
            sim={"name": "maniskill", "target": TARGET, "task": env_info["env_id"], "extra": "maniskill", "kwargs": made},
            policy=policy,
            metadata={"format": self.format, "env_info": env_info},
        )


def _named_parts(parts: Mapping[str, np.ndarray], notes: base.NoteBook) -> dict[str, np.ndarray]:
    """Rename ManiSkill's nested observation {path: [T + 1, …]} to the simulator's names (`sim.robots.maniskill_state`)."""
    named: dict[str, np.ndarray] = {}
    shown = [part for path, part in parts.items() if path.split("/")[0] in ("agent", "extra")]
    if "state" in parts:
        named["state"] = parts["state"]
    elif shown:
        named["state"] = np.concatenate([part.reshape(len(part), -1).astype(np.float32) for part in shown], axis=1)
    cameras = list(dict.fromkeys(path.split("/")[1] for path in parts if path.startswith("sensor_data/")))
    for path, part in parts.items():
        words = path.split("/")
        if words[0] == "sensor_data" and len(words) == 3:
            named[words[2] if words[1] == cameras[0] else f"{words[2]}.{words[1]}"] = part
        elif words[0] == "pointcloud" and len(words) == 2:
            named["pointcloud" if words[1] == "xyzw" else f"pointcloud.{words[1]}"] = part
        elif words[0] not in ("agent", "extra", "state"):
            notes.add(f"obs/{words[0]}", "lost", "no part of an observation here")
    return named


# ---- writing --------------------------------------------------------------------------------------------------------


def write(recording: Recording, folder: Path, target: Path, advance: base.Advance) -> tuple[FieldNote, ...]:
    """Write ``trajectory.h5`` and ``.json``, which ManiSkill's own `replay_trajectory` plays, into an empty folder; `target` is unused.
    Raises RecordingError: the recording contains data that the format cannot (text actions), or is damaged; OSError: a write fails.
    """
    spec, notes = recording.spec, base.NoteBook()
    kept = require_numbers(spec, "ManiSkill", notes)
    for key in spec.tensors:
        notes.add(f"observation.{key}", "kept", f"obs/{_place(key)}; the camera's name is not known" if key in _TEXTURES else "")
    for name in ("action", "reward", "terminated", "truncated", "success"):
        notes.add(name, "kept")
    entries = _write_h5(folder / f"{NAME}.h5", recording, kept, notes, advance)
    document = _document(recording, notes) | {"episodes": entries, base.SIDE_ENTRY: base.side_info(recording.info, kept)}
    (folder / f"{NAME}.json").write_text(json.dumps(document, indent=2), encoding="utf-8")
    return tuple(notes)


def _write_h5(
    path: Path, recording: Recording, kept: Mapping[str, TensorSpec], notes: base.NoteBook, advance: base.Advance
) -> list[dict[str, Any]]:
    control_mode = dict(recording.info.sim.get("kwargs") or {}).get("control_mode")
    entries = []
    with new_file(path, advance) as (file, advanced):
        for number, episode in enumerate(recording):
            group = file.create_group(f"traj_{number}", track_order=True)
            _write_episode(group, episode, kept, notes, ends_at_success=recording.info.sim.get("target") == TARGET)
            theirs = dict(episode.metadata).get("maniskill")
            known = theirs if isinstance(theirs, dict) else {}
            reset = known.get("reset_kwargs") or _reset_kwargs(episode, recording.info)
            entries.append(
                {
                    "episode_id": number,
                    "episode_seed": episode.seed,
                    "control_mode": known.get("control_mode", control_mode),
                    "elapsed_steps": episode.num_steps,
                    "reset_kwargs": reset,
                    "success": episode.success_at_end,
                }
            )
            advanced(1)
    return entries


def _reset_kwargs(episode: RecordedEpisode, info: RecordingInfo) -> dict[str, Any]:
    """Reset arguments with which ManiSkill's environment reproduces the episode."""
    theirs = episode.metadata.get("reset_options")
    options = dict(theirs) if isinstance(theirs, dict) else {}
    if info.metadata.get("reconfigure"):
        options["reconfigure"] = True
    return {"seed": episode.seed} | ({"options": options} if options else {})


def _write_episode(
    group: h5py.Group, episode: RecordedEpisode, kept: Mapping[str, TensorSpec], notes: base.NoteBook, ends_at_success: bool
) -> None:
    if tuple(kept) == ("state",):
        write_array(group, "obs", episode.observation["state"])
    else:
        obs = group.create_group("obs", track_order=True)
        for key in kept:
            write_array(obs, _place(key), episode.observation[key])
    group.create_dataset("actions", data=episode.action)
    terminated = episode.terminated.copy()
    if ends_at_success and episode.success[-1] and not terminated[-1]:
        # ManiSkill's tasks terminate at success, and so do its own recordings; these episodes continue, or are truncated there.
        terminated[-1] = group.attrs[_BY_SUCCESS] = True
        notes.add("terminated", "changed", "success at the last step is termination, as ManiSkill's tasks have it; read back as it was")
    for name, flags in (("terminated", terminated), ("truncated", episode.truncated), ("success", episode.success)):
        group.create_dataset(name, data=flags, dtype=bool)
    group.create_dataset("rewards", data=episode.reward, dtype=np.float32)
    if episode.state is not None:
        states = group.create_group("env_states", track_order=True)
        for name, part in episode.state.items():
            write_array(states, name, part)
        notes.add("state", "kept", "env_states")
    write_extras(group, episode, notes, with_state=False, own=("seed",))


def _place(key: str) -> str:
    """Path in ``obs`` of an observation part."""
    texture, _, camera = key.partition(".")
    if texture in _TEXTURES:
        return f"sensor_data/{camera or _CAMERA}/{texture}"
    if texture == "pointcloud":
        return f"pointcloud/{camera or 'xyzw'}"
    return key if key == "state" else f"extra/{key}"


def _document(recording: Recording, notes: base.NoteBook) -> dict[str, Any]:
    """Content of the JSON file without the episodes."""
    info = recording.info
    theirs = info.metadata.get("env_info")
    if info.metadata.get("format") == "maniskill" and isinstance(theirs, dict):
        env_info = theirs
    else:
        kwargs = {key: value for key, value in dict(info.sim.get("kwargs") or {}).items() if key not in _OURS}
        kwargs = {"obs_mode": "state", **kwargs, "sim_backend": kwargs.get("sim_backend", "physx_cpu")}
        env_info = {"env_id": info.spec.task, "env_kwargs": kwargs, "max_episode_steps": info.spec.max_episode_steps}
        if "control_mode" not in kwargs:
            notes.add("control_mode", "filled", "the recording names none: the task's default, null in the file")
        if info.sim.get("target") != TARGET:
            notes.add("env_info", "filled", f"'{info.spec.task}' is not known to be a task of ManiSkill's: it may not be replayable")
    kind = str(info.policy.get("kind", "unknown"))
    return {
        "env_info": env_info,
        "commit_info": None,
        "source_type": {"checkpoint": "rl", "training": "rl"}.get(kind, kind),
        "source_desc": info.command or f"policy: {json.dumps(dict(info.policy))}",
    }
