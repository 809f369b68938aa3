"""The files of a recording are the same bytes from version to version: what was recorded before opens, and is gone on with."""

from __future__ import annotations

import hashlib
from pathlib import Path

from embodied_rl.episodes.writer import RecordingWriter
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec, VariableSpec
from tests.episodes.episode_toys import info_of, make_episode

SPEC = SimSpec(
    "stored",
    {"state": TensorSpec((3,)), "rgb": TensorSpec((16, 20, 3), "uint8"), "text": VariableSpec("text"), "sets": VariableSpec("array")},
    ActionSpec.continuous([-1, -2], [1, 2]),
)
WRITTEN = "a7a0a5f7174b9c32069f0781ca658894cb671cd75dc4d479bcf0cff9e66acd2a"
"""SHA-256 over names and bytes of all files, written by the code of 2026-11-24 before its sinks and writers were taken apart."""


def test_the_bytes_are_those_of_earlier_versions(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "r", info_of(SPEC), video="raw") as writer:
        for seed in range(4):
            length = 3 + 2 * seed
            writer.add(make_episode(SPEC, seed, length, snapshots={1: b"\1\2", length - 1: bytes([seed])}, metadata={"n": seed}))
        for seed in range(4, 6):  # of other columns, which go into another part
            writer.add(make_episode(SPEC, seed, 5, chunk=make_episode(SPEC, seed, 5).reward.astype("int64")))
    found = hashlib.sha256()
    for file in sorted((tmp_path / "r").glob("part-*/**/*")):
        if file.is_file():
            found.update(str(file.relative_to(tmp_path)).encode() + b"\0" + file.read_bytes())
    assert found.hexdigest() == WRITTEN
