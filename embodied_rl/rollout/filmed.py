"""A simulator wrapper that encodes videos in the simulator's own process, for the recording of its episodes.

Every simulator process encodes its own pictures a few at a time: no other process waits for an encoder, and encoders grow with the number
of simulator processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.config import SimConfig
from embodied_rl.episodes.layout import Column, Filming, FilmingTools, Films, picture_column
from embodied_rl.episodes.pictures import frame_rate
from embodied_rl.sim.factory import SimFactory, SimWrapper, wrapped
from embodied_rl.sim.instrumented import IMAGE
from embodied_rl.types import SimSpec, StepBuffers


def with_films(config: SimConfig, folder: Path) -> SimConfig:
    """Wrap a simulator so that its processes write the pictures of its episodes into `folder` as videos.

    Args:
        config: configuration of a simulator, `instrumented` or not.
        folder: a `films_folder`; it must exist when the first episode begins.
    """
    return wrapped(config, "embodied_rl.rollout.filmed:EncodingSim", folder=str(folder.absolute()))


def films_of(spec: SimSpec, folder: Path) -> Films | None:
    """Columns of a recording that such a simulator encodes; None if it has no pictures."""
    columns = filmed_columns(spec)
    return Films(folder, frozenset(column.name for column in columns.values())) if columns else None


def filmed_columns(spec: SimSpec) -> dict[str, Column]:
    """{part of the observation: its column} for the parts kept as videos."""
    columns: dict[str, Column] = {}
    for key, part in spec.tensors.items():
        name = f"images.{key.removeprefix(IMAGE)}" if key.startswith(IMAGE) else f"observation.{key}"
        if (column := picture_column(name, np.dtype(part.dtype), part.shape)) is not None:
            columns[key] = column
    return columns


class EncodingSim(SimWrapper):
    """Passes everything on to the simulator named by `target` and films its episodes.

    An episode restored from a snapshot lacks its beginning and is not filmed. Raises UserError: a video cannot be written.
    """

    def __init__(self, num_envs: int, inner: Mapping[str, Any], folder: str) -> None:
        super().__init__(SimFactory(**inner).make(num_envs))
        self._folder, self._fps = Path(folder), frame_rate(self.spec.control_hz)
        self._columns = filmed_columns(self.spec)
        self._tools = FilmingTools(list)
        self._filming: list[Filming | None] = [None] * num_envs

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        for i, seed in zip(env_ids, seeds, strict=True):
            self._give_up(i)
            self._filming[i] = Filming(self._folder, self._columns, self._fps, int(seed), self._tools) if self._columns else None
        super().reset(env_ids, seeds, out, options)

    def episodes_ended(self, env_ids: Sequence[int]) -> None:
        super().episodes_ended(env_ids)
        for i in env_ids:
            filming, self._filming[i] = self._filming[i], None
            if filming is not None:
                filming.finish()

    def restore(self, env_id: int, data: bytes) -> None:
        self._give_up(env_id)
        super().restore(env_id, data)

    def close(self) -> None:
        for i in range(len(self._filming)):
            self._give_up(i)
        self._sim.close()

    def _seen(self, env_ids: Sequence[int], out: StepBuffers) -> None:
        for i in env_ids:
            if (filming := self._filming[i]) is not None:
                filming.add({part: out.observation[part][i] for part in self._columns})

    def _give_up(self, env_id: int) -> None:
        filming, self._filming[env_id] = self._filming[env_id], None
        if filming is not None:
            filming.discard()
