"""Episodes from one recording into another: what merging, splitting and converting are made of."""

from __future__ import annotations

import dataclasses

from embodied_rl.episodes.recorded import RecordedEpisode, RecordingInfo
from embodied_rl.episodes.recording import RecordingError


def require_compatible(source: RecordingInfo, target: RecordingInfo, source_name: str, target_name: str) -> None:
    """Raise RecordingError where episodes of one do not fit beside those of the other."""
    for what in ("observation", "action"):
        ours, theirs = (info.spec.to_dict()[what] for info in (source, target))
        for key in sorted({*ours, *theirs}):
            if ours.get(key) != theirs.get(key):
                raise RecordingError(
                    f"Episodes of '{source_name}' do not fit into '{target_name}': {what}.{key} is {ours.get(key)!r:.200} there and "
                    f"{theirs.get(key)!r:.200} here."
                )


def adopted(episode: RecordedEpisode, source: RecordingInfo, target: RecordingInfo) -> RecordedEpisode:
    """The episode with what its recording said for all of its episodes, where the target's says something else."""
    changes: dict[str, object] = {}
    if episode.task is None and source.spec.task != target.spec.task:
        changes["task"] = source.spec.task
    if episode.instruction is None and source.spec.instruction != target.spec.instruction:
        changes["instruction"] = source.spec.instruction
    if "policy" not in episode.metadata and dict(source.policy) != dict(target.policy):
        changes["metadata"] = {**episode.metadata, "policy": dict(source.policy)}
    return dataclasses.replace(episode, **changes) if changes else episode  # type: ignore[arg-type]
