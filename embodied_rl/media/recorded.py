"""Recorded episodes as films: from the pictures that were recorded, or from those that a replay draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from embodied_rl.episodes.recording import RecordedEpisode, Recording
from embodied_rl.episodes.sink import Sink
from embodied_rl.errors import UserError, did_you_mean
from embodied_rl.media.episodes import MAX_BYTES, MAX_STEPS_SHOWN, FilmedEpisode, Moment, beside_each_other
from embodied_rl.types import EpisodeSummary


def summaries(recording: Recording) -> list[EpisodeSummary]:
    """What is known of every episode without reading it."""
    table = recording.table
    return [
        EpisodeSummary(
            slot=0,
            index=number,
            seed=int(table.seeds[number]),
            episode_return=float(table.returns[number]),
            length=int(table.lengths[number]),
            success_once=bool(table.success_once[number]),
            success_at_end=bool(table.success_at_end[number]),
            terminated=False,
        )
        for number in range(len(recording))
    ]


def recorded_cameras(episode: RecordedEpisode) -> dict[str, Any]:
    """{name: pictures [T + 1, H, W, 3] uint8}: those for people, then those that the policy saw."""
    seen = {key: part for key, part in episode.observation.items() if part.dtype == np.uint8 and part.ndim == 4 and part.shape[-1] == 3}
    return {**episode.images, **seen}


def choose_cameras(wanted: Sequence[str], known: Mapping[str, Any], recording: Recording) -> tuple[str, ...]:
    """The cameras to show; without any wish, the first that was recorded. Raises UserError for one that there is not."""
    if not wanted or list(wanted) == ["default"]:
        return tuple(known)[:1]
    for camera in wanted:
        if camera not in known:
            raise UserError(f"'{recording.path}' has no pictures of camera '{camera}'.{did_you_mean(camera, known)}")
    return tuple(wanted)


def stride_of(lengths: Sequence[int], bytes_per_picture: int) -> int:
    """Steps from one picture to the next, a power of two, so that neither the longest nor all together are too many."""
    stride = 1
    while max(lengths) // stride > MAX_STEPS_SHOWN or sum(length // stride + 2 for length in lengths) * bytes_per_picture > MAX_BYTES:
        stride *= 2
    return stride


def from_pictures(
    recording: Recording, number: int, views: Mapping[str, Any], episode: RecordedEpisode, *, size: int, stride: int
) -> FilmedEpisode:
    """A recorded episode with pictures {camera: [T + 1, H, W, 3] uint8}, every `stride`-th step and the last shown."""
    steps = sorted({*range(0, episode.num_steps, stride), episode.num_steps})
    filmed = _empty(recording, number, episode)
    for step in steps:
        filmed.frames.append(beside_each_other([np.asarray(view[step]) for view in views.values()], size))
        filmed.moments.append(moment_of(episode, step))
    return filmed


def moment_of(episode: RecordedEpisode, step: int) -> Moment:
    """What was known after `step` steps."""
    value = None if episode.value is None or step == episode.num_steps else float(episode.value[step])
    action = np.array(episode.action[step - 1]) if step and episode.action.dtype != object else None
    return Moment(
        step=step,
        reward=float(episode.reward[step - 1]) if step else 0.0,
        episode_return=float(episode.reward[:step].sum(dtype=np.float64)),
        success=bool(episode.success[:step].any()),
        value=value,
        action=action,
    )


class PictureSink(Sink):
    """Keeps only the pictures of an episode that is played again."""

    def __init__(self, recording: Recording, number: int, episode: RecordedEpisode, size: int, stride: int) -> None:
        self.filmed = _empty(recording, number, episode)
        self.is_whole = False
        """Whether the replay reached the recorded end."""
        self._episode, self._size, self._stride, self._step = episode, size, stride, 0

    def start(
        self,
        observation: Mapping[str, Any],
        state: Mapping[str, np.ndarray] | None = None,
        images: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """The picture after the reset."""
        self._keep(images or {})

    def step(self, *, images: Mapping[str, np.ndarray] | None = None, **_: object) -> None:
        """The picture after a step."""
        self._step += 1
        if self._step % self._stride == 0 or self._step == self._episode.num_steps:
            self._keep(images or {})

    def finish(self, metadata: Mapping[str, Any] | None = None) -> int:
        """The replay came to the recorded end."""
        self.is_whole = True
        return 0

    def discard(self) -> None:
        """What was drawn until then is kept: it shows how far the replay came."""

    def _keep(self, images: Mapping[str, np.ndarray]) -> None:
        # The replay's own picture comes last; the others were recorded.
        self.filmed.frames.append(beside_each_other(list(images.values())[-1:], self._size))
        self.filmed.moments.append(moment_of(self._episode, self._step))


def _empty(recording: Recording, number: int, episode: RecordedEpisode) -> FilmedEpisode:
    spec = recording.spec
    summary = EpisodeSummary(
        slot=0,
        index=number,
        seed=episode.seed,
        episode_return=episode.episode_return,
        length=episode.num_steps,
        success_once=episode.success_once,
        success_at_end=episode.success_at_end,
        terminated=bool(episode.terminated[-1]),
    )
    return FilmedEpisode(episode.seed, episode.task or spec.task, episode.instruction or spec.instruction, summary=summary)
