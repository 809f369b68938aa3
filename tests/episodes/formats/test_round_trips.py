"""Native → another format → native: what comes back is what went in, as far as the format's notes say so."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from embodied_rl.commands.episode_tools import convert
from embodied_rl.episodes.folder import validate
from embodied_rl.episodes.formats import FORMATS, detect_format, write_foreign
from embodied_rl.episodes.formats.base import NoteBook
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import FieldNote, RecordedEpisode, Recording, RecordingError
from embodied_rl.errors import UserError
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec, VariableSpec
from tests.episodes.episode_toys import make_episode
from tests.episodes.formats.samples import (
    CHOICES,
    PICTURES,
    STATE,
    WORDS,
    assert_same_episode,
    info_of,
    record,
    rich_episode,
    words_episode,
)

CASES: dict[str, tuple[SimSpec, list[RecordedEpisode]]] = {
    "state": (STATE, [rich_episode(STATE, seed, 3 + seed, ends=["terminated", "truncated", "nothing"][seed]) for seed in range(3)]),
    "plain": (STATE, [make_episode(STATE, 5, 1, success=False), make_episode(STATE, 2, 9, ends="truncated")]),
    "pictures": (PICTURES, [make_episode(PICTURES, seed, 4) for seed in range(2)]),
    "choices": (CHOICES, [make_episode(CHOICES, seed, 5) for seed in range(2)]),
    "words": (WORDS, [words_episode(seed, 2 + seed) for seed in range(2)]),
}
HOLDS_NO_WORDS = ("maniskill", "robomimic")
PAIRS = [(name, case) for name in FORMATS for case in CASES if not (case == "words" and name in HOLDS_NO_WORDS)]


def converted(source: Recording, folder: Path, name: str) -> tuple[Recording, dict[str, FieldNote]]:
    options = {"video": "png"} if name == "lerobot" else {}
    notes = write_foreign(source, folder, name, **options)
    assert detect_format(folder) == name
    return open_recording(folder), {note.field: note for note in notes}


@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_everything_that_the_format_holds_comes_back(name: str, case: str, tmp_path: Path) -> None:
    spec, episodes = CASES[case]
    info = info_of(spec)
    with record(tmp_path / "native", info, episodes) as source:
        back, notes = converted(source, tmp_path / "there", name)
    with back:
        assert len(back) == len(episodes)
        assert back.info.to_dict() == info.to_dict()
        for found, expected in zip(back, episodes, strict=True):
            # LeRobot has a row for each step, and none after the last.
            assert_same_episode(found, expected, whole=name != "lerobot")
        assert back.lengths.tolist() == [episode.num_steps for episode in episodes]
        assert back.seeds.tolist() == [episode.seed for episode in episodes]
        np.testing.assert_allclose(back.returns, [episode.episode_return for episode in episodes], rtol=1e-12)
        assert back.success_once.tolist() == [episode.success_once for episode in episodes]
        assert back.complete.tolist() == [episode.complete for episode in episodes]
        assert validate(back) == []
    assert "snapshots" not in notes
    for part in spec.observation:
        assert notes[f"observation.{part}"].fate == ("changed" if name == "lerobot" else "kept")


@pytest.mark.parametrize("name", FORMATS)
def test_notes_say_what_is_an_extra_and_what_is_lost(name: str, tmp_path: Path) -> None:
    episode = rich_episode(STATE, 1, 4, snapshots={0: b"only we read this"})
    with record(tmp_path / "native", info_of(STATE), [episode]) as source:
        back, notes = converted(source, tmp_path / "there", name)
    with back:
        assert back.episode(0).snapshots == {}
    assert notes["snapshots"].fate == "lost"
    for field in ("log_prob", "value", "policy_version", "chunk", "sampled_action", "instruction"):
        assert notes[field].fate == "extra", field
    own_seed = name in ("maniskill", "minari")
    assert notes["seed"].fate == ("kept" if own_seed else "extra")
    assert notes["action"].fate == notes["reward"].fate == "kept"
    if name == "lerobot":
        assert notes["observation.state"].note.endswith("the one after the last step is lost: LeRobot has a row for each step")


@pytest.mark.parametrize("name", FORMATS)
def test_the_way_through_two_formats_and_back_to_ours(name: str, tmp_path: Path) -> None:
    episodes = CASES["state"][1]
    with record(tmp_path / "native", info_of(STATE), episodes) as source:
        first, _ = converted(source, tmp_path / "first", name)
    with first:
        second, _ = converted(first, tmp_path / "second", "minari")
    with second, record(tmp_path / "again", second.info, list(second)) as again:
        for found, expected in zip(again, episodes, strict=True):
            assert_same_episode(found, expected, whole=name != "lerobot")


def test_lerobot_marks_what_stands_for_the_last_observation(tmp_path: Path) -> None:
    with record(tmp_path / "native", info_of(STATE), CASES["state"][1]) as source:
        back, _ = converted(source, tmp_path / "there", "lerobot")
    with back:
        episode = back.episode(2)
        np.testing.assert_array_equal(episode.observation["state"][-1], episode.observation["state"][-2])
        assert episode.metadata["final_observation"] == "repeated"
        assert episode.state is not None
        assert np.isnan(episode.state["actors/cube"][-1]).all()
        notes = {note.field: note for note in back.notes}  # type: ignore[attr-defined]
        assert notes["observation"].fate == notes["state"].fate == "filled"


@pytest.mark.parametrize("name", HOLDS_NO_WORDS)
def test_words_are_refused_where_there_is_no_place(name: str, tmp_path: Path) -> None:
    with (
        record(tmp_path / "native", info_of(WORDS), CASES["words"][1]) as source,
        pytest.raises(RecordingError, match=r"actions as numbers, and these are text. Choose native, lerobot or minari"),
    ):
        write_foreign(source, tmp_path / "there", name)
    assert [entry.name for entry in tmp_path.iterdir()] == ["native"], "nothing half written stays"


@pytest.mark.parametrize("name", FORMATS)
def test_parts_of_varying_size_are_lost_with_a_word_or_kept(name: str, tmp_path: Path) -> None:
    spec = SimSpec(
        "Mixed", {"state": TensorSpec((2,)), "facts": VariableSpec("json"), "map": VariableSpec("array")}, ActionSpec.continuous([-1], [1])
    )
    episode = make_episode(spec, 0, 3)
    with record(tmp_path / "native", info_of(spec), [episode]) as source:
        back, notes = converted(source, tmp_path / "there", name)
    with back:
        assert notes["observation.map"].fate == "lost"
        held = {"state", "facts"} if name == "lerobot" else {"state"}
        assert set(back.spec.observation) == set(back.episode(0).observation) == held
        if name == "lerobot":
            assert list(back.episode(0).observation["facts"][:-1]) == list(episode.observation["facts"][:-1])
        else:
            assert notes["observation.facts"].fate == "lost"


def test_lerobot_leaves_out_what_not_all_episodes_have(tmp_path: Path) -> None:
    with_values = make_episode(STATE, 0, 3, value=np.arange(3, dtype=np.float32), log_prob=np.zeros((3, 2), np.float32))
    wider = make_episode(STATE, 1, 4, value=np.ones(4, np.float32), log_prob=np.zeros((4, 5), np.float32))
    without = make_episode(STATE, 2, 2)
    with record(tmp_path / "native", info_of(STATE), [with_values, wider, without]) as source:
        back, notes = converted(source, tmp_path / "there", "lerobot")
    with back:
        assert [episode.value for episode in back] == [episode.log_prob for episode in back] == [None] * 3
        assert back.lengths.tolist() == [3, 4, 2]
    for field in ("value", "log_prob"):
        assert notes[field].fate == "lost"
        assert "not in all episodes alike" in notes[field].note
    assert not list((tmp_path / "there").glob("attempt_*"))


def test_texts_that_a_file_would_cut_are_refused(tmp_path: Path) -> None:
    episode = words_episode(0, 2)
    episode.observation["text"][1] = "cut\0here"
    with (
        record(tmp_path / "native", info_of(WORDS), [episode]) as source,
        pytest.raises(RecordingError, match=r"row 1: HDF5 files cannot store text with NUL or half a surrogate pair, as 'cut\\x00here'"),
    ):
        write_foreign(source, tmp_path / "there", "minari")
    episode.observation["text"][1] = "half \ud800"
    with (
        record(tmp_path / "second", info_of(WORDS), [episode]) as source,
        pytest.raises(RecordingError, match=r"'observation.text': parquet files cannot store text with half a surrogate pair"),
    ):
        write_foreign(source, tmp_path / "there", "lerobot")


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_there_is_not_overwritten(name: str, tmp_path: Path) -> None:
    with record(tmp_path / "native", info_of(STATE), CASES["plain"][1]) as source:
        (tmp_path / "there").mkdir()
        write_foreign(source, tmp_path / "there", name)  # an empty folder is no obstacle
        with pytest.raises(RecordingError, match="already exists and is not an empty folder"):
            write_foreign(source, tmp_path / "there", name)


@pytest.mark.parametrize("name", FORMATS)
def test_of_two_that_write_the_same_output_at_once_one_succeeds(name: str, tmp_path: Path) -> None:
    """They may have the same process number: containers on a shared disk often do."""
    with record(tmp_path / "native", info_of(STATE), CASES["plain"][1]) as source:
        other = iter([lambda: write_foreign(source, tmp_path / "there", name)])
        with pytest.raises(UserError, match="Directory not empty"):
            write_foreign(source, tmp_path / "there", name, lambda _: [begin() for begin in other])
        assert sorted(path.name for path in tmp_path.iterdir()) == ["native", "there"]
        with open_recording(tmp_path / "there") as found:
            assert len(found) == len(source)


def test_unknown_formats_and_paths(tmp_path: Path) -> None:
    with (
        record(tmp_path / "native", info_of(STATE), CASES["plain"][1]) as source,
        pytest.raises(RecordingError, match="Did you mean 'lerobot'"),
    ):
        write_foreign(source, tmp_path / "there", "lerobt")
    (tmp_path / "other").mkdir()
    with pytest.raises(RecordingError, match="is not a recording in a known format: native, maniskill, lerobot, robomimic, minari"):
        open_recording(tmp_path / "other")
    assert detect_format(tmp_path / "native") == "native"
    assert detect_format(tmp_path / "nowhere") is None


def test_the_worse_fate_of_a_field_wins() -> None:
    book = NoteBook()
    book.add("a", "kept")
    book.add("b", "lost", "gone")
    book.add("a", "changed", "rounded")
    book.add("b", "kept")
    assert list(book) == [FieldNote("b", "lost", "gone"), FieldNote("a", "changed", "rounded")]


def test_info_of_another_shape_is_refused(tmp_path: Path) -> None:
    import json

    with record(tmp_path / "native", info_of(STATE), CASES["plain"][1]) as source:
        write_foreign(source, tmp_path / "there", "minari")
    path = tmp_path / "there" / "data" / "metadata.json"
    data = json.loads(path.read_text())
    del data["embodied_rl"]["spec"]
    path.write_text(json.dumps(data))
    with pytest.raises(RecordingError, match=r"metadata.json', field 'embodied_rl': was not written by this package"):
        open_recording(tmp_path / "there")


@pytest.mark.parametrize("name", [*FORMATS, "native"])
def test_a_disk_that_is_full_is_one_line_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    """A limit on the size of files in place of a full disk: 60 pictures of noise do not fit into 100 kB."""
    source = record(tmp_path / "native", info_of(PICTURES), [make_episode(PICTURES, seed, 30) for seed in range(2)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with source, pytest.raises(UserError, match=r"^Cannot write '.*': .*Choose another folder, or check permissions and free space\.$"):
            convert(source, tmp_path / "there", name, "png" if name == "lerobot" else "mp4")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [entry.name for entry in tmp_path.iterdir()] == ["native"]


@pytest.mark.parametrize("name", ["maniskill", "robomimic", "minari"])
def test_a_name_that_is_the_beginning_of_another_is_one_line(name: str, tmp_path: Path) -> None:
    """HDF5 would need a data set and a group of one name."""
    state = {"arm": np.zeros((4, 2)), "arm/joint": np.zeros((4, 1))}
    with (
        record(tmp_path / "native", info_of(STATE), [make_episode(STATE, 0, 3, state=state)]) as source,
        pytest.raises(RecordingError, match=r"/arm/joint: HDF5 files cannot store it"),
    ):
        write_foreign(source, tmp_path / "there", name)


@pytest.mark.parametrize("name", FORMATS)
def test_metadata_of_other_programs_are_no_masks_options_or_attributes(name: str, tmp_path: Path) -> None:
    ours = {"masks": ["a/b", "", 3], "model_file": "\0", "reset_options": [1]}
    for attributes in ({"masks": 5}, ours):
        place = tmp_path / str(len(attributes))
        info = replace(info_of(STATE), metadata={"attributes": {"": "x", "embodied_rl": "x", "env": {"a": 1}}, "env_args": [1]})
        with record(place, info, [make_episode(STATE, 0, 2, metadata=attributes)]) as source:
            back, _ = converted(source, place / "there", name)
        with back:
            assert validate(back) == []
            assert dict(back.episode(0).metadata).items() >= attributes.items()


def test_half_a_surrogate_pair_in_an_instruction(tmp_path: Path) -> None:
    with record(tmp_path / "native", info_of(STATE), [make_episode(STATE, 0, 3, instruction="half \ud800")]) as source:
        back, _ = converted(source, tmp_path / "there", "lerobot")
    with back:
        assert back.episode(0).instruction == "half \ud800"


@pytest.mark.parametrize("name", FORMATS)
def test_a_recording_without_episodes_is_refused(name: str, tmp_path: Path) -> None:
    """The readers of these formats refuse a file without any."""
    with (
        record(tmp_path / "native", info_of(STATE), []) as source,
        pytest.raises(RecordingError, match=f"files of {name} hold at least one"),
    ):
        write_foreign(source, tmp_path / "there", name)
