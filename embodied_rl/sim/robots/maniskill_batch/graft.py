"""Grafting: the scene of one environment of a batch is replaced by the scene of an environment by itself.

That one (the donor) is an ordinary ManiSkill environment. It builds its scene anew, takes up a saved state or draws an episode as it
would anywhere, bit for bit; then its bodies take the places of the old ones, and its attributes those rows of the batch's.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from mani_skill.utils.structs import Pose

from embodied_rl.sim.robots.maniskill_batch import UnsupportedTask
from embodied_rl.sim.robots.maniskill_batch.rows import row_of, with_row
from embodied_rl.sim.robots.maniskill_batch.scene import STRUCTS
from embodied_rl.sim.robots.maniskill_batch.structs import ROW_CACHES
from embodied_rl.sim.robots.maniskill_state import LEFT, Bodies, EpisodeState, bodies_of, owners_of, physics_of
from embodied_rl.sim.snapshots import SnapshotError

_OBJECTS = ("_objs", "_bodies", "_physx_articulations")
_OF_THE_DONOR = frozenset({"num_envs", "reconfiguration_freq"})
"""Attributes that say how many environments there are; a saved episode has them as an environment by itself has."""


class Grafts:
    """The donor of a batch.

    Args:
        env: the batch.
        donor: an environment of the same task and arguments by itself; nothing else may step or reset it.
        renders: they were made with a rendering device.
    """

    def __init__(self, env: Any, donor: Any, renders: bool) -> None:
        self.env, self.donor = env, donor
        self.frequency = int(donor.reconfiguration_freq)
        """How many episodes an environment by itself plays in one scene; 0: any number."""
        self._state = EpisodeState(donor, renders)
        self._scene_seeds = [int(seed) for seed in env._episode_seed]
        self._left = [int(donor._reconfig_counter)] * env.num_envs

    def rebuilds(self, i: int) -> bool:
        """The next episode of environment `i` begins in a new scene without being asked to."""
        return self.frequency != 0 and self._left[i] == 0

    def began(self, i: int) -> None:
        """An episode of environment `i` has begun in the scene that is there."""
        self._left[i] -= self.frequency != 0

    def begin(self, i: int, seed: int, options: dict[str, Any]) -> Any:
        """A new episode of environment `i` in a new scene; the observation of an environment by itself."""
        observation, _ = self.donor.reset(seed=seed, options={**options, "reconfigure": True})
        self._graft(i)
        return observation

    def capture(self, i: int) -> dict[str, Any]:
        """What `EpisodeState.capture` gives for an environment by itself; `restore` must follow here too."""
        env, donors, seen = self.env, dict(owners_of(self.donor)), {}  # type: ignore[var-annotated]
        env.scene.px.flush()
        attributes: dict[str, dict[str, Any]] = {}
        for name, owner in owners_of(env):
            single = vars(donors[name])
            attributes[name] = {
                key: single[key]
                if _is_donors(key, single)
                else value
                if key in LEFT
                else row_of(value, single.get(key), i, env.num_envs, seen)
                for key, value in vars(owner).items()
            }
        attributes["env"] |= {"_reconfig_counter": self._left[i], "_episode_rng": env._batched_episode_rng.rngs[i]}
        return self._state.pack(self._scene_seeds[i], int(env._episode_seed[i]), physics_of(self._bodies(i)), attributes)

    def _bodies(self, i: int) -> Bodies:
        """What scene `i` holds, by the names that the things have in a scene by itself."""
        mine, single = bodies_of(self.env.scene, i), bodies_of(self.donor.scene)
        return Bodies(
            dict(zip(single.articulations, mine.articulations.values(), strict=True)),
            dict(zip(single.actors, mine.actors.values(), strict=True)),
        )

    def restore(self, i: int, state: dict[str, Any]) -> None:
        """Take up a captured episode in environment `i`. Raises SnapshotError where it is of another task or robot."""
        self._state.restore(state)
        self._graft(i)

    def _graft(self, i: int) -> None:
        env, donor = self.env, self.donor
        donor_scene = donor.scene
        env.scene.px.flush()
        for struct, donated in _pairs(env.scene, i, donor_scene):
            _replace_objects(struct, donated, i)
        env.scene.sub_scenes[i] = donor_scene.sub_scenes[0]
        for kind in ("sensors", "human_render_cameras"):
            for name, sensor in getattr(env.scene, kind).items():
                _replace_camera(sensor.camera, getattr(donor_scene, kind)[name].camera, i)
        env.scene.px.replace(i, donor_scene.sub_scenes[0])
        donors = dict(owners_of(donor))
        for name, owner in owners_of(env):
            present = vars(owner)
            for key, single in vars(donors[name]).items():
                if key in LEFT:
                    continue
                if isinstance(single, torch.Tensor | np.ndarray | Pose | dict | list) or type(single) is type(env._batched_episode_rng):
                    present[key] = with_row(present.get(key), single, i, env.num_envs)
        self._scene_seeds[i], self._left[i] = self._state.scene_seed, int(donor._reconfig_counter)


def _is_donors(name: str, single: dict[str, Any]) -> bool:
    import gymnasium

    return name in single and (name in _OF_THE_DONOR or isinstance(single[name], gymnasium.Space))


def _pairs(scene: Any, i: int, donor_scene: Any) -> list[tuple[Any, Any]]:
    """The batch's structs with something in scene `i`, each with the donor's that was made at the same point."""
    mine = [struct for struct in vars(scene)[STRUCTS] if i in struct._scene_idxs.tolist()]
    theirs = vars(donor_scene)[STRUCTS]
    kinds, donated = [type(one) for one in mine], [type(one) for one in theirs]
    if kinds != donated:
        raise UnsupportedTask(f"its scene is made of {len(kinds)} parts in a batch and of {len(donated)} by itself")
    return list(zip(mine, theirs, strict=True))


def _replace_objects(struct: Any, donated: Any, i: int) -> None:
    places = [k for k, scene in enumerate(struct._scene_idxs.tolist()) if scene == i]
    if len(places) != len(donated._objs):
        raise UnsupportedTask(f"'{struct.name}' has {len(places)} objects in a scene of the batch and {len(donated._objs)} by itself")
    for name in _OBJECTS:
        for k, thing in zip(places, getattr(donated, name, None) or (), strict=False):
            getattr(struct, name)[k] = thing
    present = vars(struct)
    for name in list(present):  # what is computed of the objects; the hash must stay, dictionaries go by it
        if isinstance(getattr(type(struct), name, None), cached_property) and name != "__maniskill_hash__":
            del present[name]
    for name in ROW_CACHES:
        present.pop(name, None)
    initial = getattr(donated, "initial_pose", None)
    if isinstance(initial, Pose):
        rows = struct.initial_pose.raw_pose
        if len(rows) == 1 and len(struct._objs) > 1 and not torch.equal(rows, initial.raw_pose):
            rows = rows.repeat(len(struct._objs), 1)
        if len(rows) == len(struct._objs):
            rows = rows.clone()
            rows[places] = initial.raw_pose
        struct.initial_pose = Pose(raw_pose=rows)


def _replace_camera(camera: Any, donated: Any, i: int) -> None:
    camera._render_cameras[i] = donated._render_cameras[0]
    for name in [name for name in vars(camera) if name.startswith("_cached_")]:
        setattr(camera, name, None)


class GraftedState:
    """`EpisodeState` of one environment of a batch."""

    def __init__(self, grafts: Grafts, i: int) -> None:
        self._grafts, self._i = grafts, i

    def capture(self) -> dict[str, Any]:
        return self._grafts.capture(self._i)

    def restore(self, state: dict[str, Any]) -> None:
        try:
            with torch.inference_mode():
                self._grafts.restore(self._i, state)
        except UnsupportedTask as error:
            raise SnapshotError(f"Snapshot cannot be taken up in a batch of environments: {error}.") from error
