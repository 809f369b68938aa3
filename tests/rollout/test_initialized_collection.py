"""Starting inside episodes with real simulator processes: recorded experts, restored slots, groups, resumed training runs."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.compose import load_train_config
from embodied_rl.config import GroupsConfig, InitializedConfig, SimConfig
from embodied_rl.errors import MissingExtraError, UserError
from embodied_rl.generation.random_backend import RandomGenerator
from embodied_rl.methods.starts import make_starts
from embodied_rl.rollout.domains import DomainMixture
from embodied_rl.rollout.group_collector import GroupCollector
from embodied_rl.rollout.groups import GroupQueue, group_seed
from embodied_rl.rollout.initialized import SnapshotCache, SourceEpisode, Start, StartLibrary, record_expert, shown_expert
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.instrumented import instrumented
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.robots.key_door import KeyDoorExpert
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.types import ActionSpec, SimSpec, StepBatch, TensorSpec

REPLAYED, SAVED, TALKING = "tests.sim.toy:CountingSim", "tests.sim.toy:SavedCountingSim", "tests.sim.toy:TalkingSim"
KEY_DOOR = "embodied_rl.sim.robots.key_door:KeyDoor"


def make_manager(target: str, slots: int = 4, workers: int = 2, task: str | None = None, **kwargs: Any) -> EnvManager:
    return EnvManager(SimFactory(target, task, kwargs), slots, num_workers=workers, autoreset=False)


def counting_expert() -> Any:
    return lambda observation: np.array([0.7])


class Speaker:
    """Says how often it has spoken; one for each episode."""

    def __init__(self) -> None:
        self.spoken = 0

    def __call__(self, observation: Mapping[str, Any]) -> str:
        self.spoken += 1
        return f"word {self.spoken} after {observation['text']!r}"[:60]


class Reciter:
    """Says the same things in every episode."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._left = list(texts)

    def __call__(self, observation: Mapping[str, Any]) -> str:
        return self._left.pop(0)


# ---- experts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [REPLAYED, SAVED])
def test_an_experts_episodes_end_at_their_first_success(target: str) -> None:
    with make_manager(target, slots=2, length=8) as manager:
        recorded, played = record_expert(manager, counting_expert, [11, 12, 13], every=2)
    # The sum of actions reaches 3 with the fifth: 4 · 0.7 = 2.8, 5 · 0.7 = 3.5. Episodes go on to their 8 messages: 3 · 8 = 24.
    assert played == 24
    assert [episode.seed for episode in recorded] == [11, 12, 13]
    for episode in recorded:
        assert (episode.num_messages, episode.success, episode.origin) == (5, True, "expert")
        assert episode.episode_return == pytest.approx(5.6, rel=1e-6)
        np.testing.assert_array_equal(np.stack(episode.actions), np.full((5, 1), 0.7, np.float32))
        assert set(episode.states) == ({2, 4} if target == SAVED else set())


def test_an_episode_that_cannot_even_begin_is_left_out(tmp_path: Path) -> None:
    """Of those that step together none can, if their process dies then."""
    options = {"victim": 12, "once": str(tmp_path / "once")}
    with make_manager("tests.rollout.recording_toys:TogetherSim", slots=2, workers=1, **options) as manager:
        recorded, played = record_expert(manager, counting_expert, [11, 12, 13], every=2)
    assert ([episode.seed for episode in recorded], played) == ([13], 3)


def test_an_expert_that_reads_the_simulators_state_acts_in_its_process() -> None:
    """What it leaves behind is a plain simulator's: its states can be taken up there."""
    config = SimConfig(name="reach", target="embodied_rl.sim.robots.pixel_reach:PixelReach", task="PixelReach", kwargs={"pixels": False})
    shown = instrumented(config, expert="embodied_rl.sim.robots.experts:PixelReachExpert", reconfigure=False)
    with EnvManager.from_config(shown, EpisodeSeeds.given(0), num_slots=2, autoreset=False) as manager:
        recorded, _ = record_expert(manager, shown_expert, [11, 12], every=2)
    assert [episode.success for episode in recorded] == [True, True]
    starts = StartLibrary(InitializedConfig(chunk_steps=2), seed=0)
    starts.add(recorded)
    with EnvManager.from_config(config, EpisodeSeeds.given(0), num_slots=2, autoreset=False) as manager:
        seen = SnapshotCache(manager, starts).restore({0: Start(0, 2), 1: Start(1, 2)})
        for slot, episode in enumerate(recorded):
            assert list(seen[slot]) == ["state"]
            np.testing.assert_array_equal(seen[slot]["state"], episode.states[2]["observation"]["state"])


# ---- slots ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "messages_played_again"), [(REPLAYED, 3 * 4), (SAVED, 0)])
def test_slots_are_brought_to_their_start(target: str, messages_played_again: int) -> None:
    starts = StartLibrary(InitializedConfig(chunk_steps=2), seed=0)
    with make_manager(target, length=8) as manager:
        starts.add(record_expert(manager, counting_expert, [11, 12], every=2)[0])
        cache = SnapshotCache(manager, starts)
        seen = cache.restore({0: Start(0, 4), 1: Start(1, 4), 3: Start(0, 4)})
        for slot, seed in ((0, 11), (1, 12), (3, 11)):
            np.testing.assert_allclose(seen[slot]["state"], [seed, 4, 2.8], rtol=1e-6)
        np.testing.assert_array_equal(seen[0]["state"], seen[3]["state"])
        assert starts.replay.num_messages == messages_played_again
        assert (starts.replay.num_mismatches, starts.replay.max_drift) == (0, 0.0)
        # What follows is the episode's own continuation, and its counts are those of the whole episode.
        for step in range(5, 9):
            manager.send([0, 1, 3], np.full((3, 1), 0.7))
            batch = manager.recv([0, 1, 3])
            np.testing.assert_allclose(batch.observation["state"][:, 2], 0.7 * step, rtol=1e-6)
        assert [(episode.seed, episode.length) for episode in batch.episodes] == [(11, 8), (12, 8), (11, 8)]
        assert [episode.episode_return for episode in batch.episodes] == pytest.approx([5.6] * 3, rel=1e-6)


def test_an_own_episode_is_played_again_once_where_the_simulator_saves_its_state() -> None:
    actions = tuple(np.array([0.5], np.float32) for _ in range(6))
    for target, played_again in ((SAVED, 5), (REPLAYED, 4 * 5)):
        starts = StartLibrary(InitializedConfig(chunk_steps=2), seed=0)
        starts.add([SourceEpisode("own", 21, actions, 3.0, True, seen={5: {"state": np.array([21, 5, 2.5])}})])
        with make_manager(target, length=8) as manager:
            seen = SnapshotCache(manager, starts).restore(dict.fromkeys(range(4), Start(0, 5)))
        np.testing.assert_allclose([one["state"] for one in seen.values()], [[21, 5, 2.5]] * 4)
        assert starts.replay.num_messages == played_again
        assert starts.replay.num_mismatches == 0


def test_a_start_that_looks_different_is_counted() -> None:
    starts = StartLibrary(InitializedConfig(), seed=0)
    actions = tuple(np.array([0.5], np.float32) for _ in range(6))
    starts.add([SourceEpisode("own", 21, actions, 3.0, True, seen={5: {"state": np.array([21, 5, 2.0])}})])
    with make_manager(SAVED, length=8) as manager:
        SnapshotCache(manager, starts).restore({0: Start(0, 5), 1: Start(0, 5)})
    # The sum is 2.5 where 2.0 was seen. The second slot is compared with the first.
    assert (starts.replay.num_mismatches, starts.replay.max_drift) == (1, 0.5)


def test_text_episodes() -> None:
    starts = StartLibrary(InitializedConfig(chunk_steps=1), seed=0)
    with make_manager(TALKING, words=2, length=4) as manager:
        recorded, _ = record_expert(manager, Speaker, [5, 6], every=1)
        assert recorded[0].actions[0] == "word 1 after 'seed 5'"
        starts.add(recorded)
        seen = SnapshotCache(manager, starts).restore({1: Start(0, 2), 2: Start(1, 3)})
        assert seen[1]["text"] == " ".join([recorded[0].actions[1]] * 2)
        assert seen[1]["lengths"] == [len(action) for action in recorded[0].actions[:2]]
        assert seen[2]["lengths"] == [len(action) for action in recorded[1].actions[:3]]
        manager.send([1, 2], ["on", "off"])
        batch = manager.recv([1, 2])
        assert batch.observation["text"].tolist() == ["on on", "off off"]
        assert batch.terminated.tolist() == [False, True]


def test_a_text_game_of_gem() -> None:
    from embodied_rl.sim.text import gem

    try:
        gem.tasks()
    except MissingExtraError as error:
        pytest.skip(str(error))
    guesses = ["\\boxed{2}", "\\boxed{9}", "\\boxed{4}", "\\boxed{7}"]
    with make_manager("embodied_rl.sim.text.gem:make", slots=3, workers=1, task="game:GuessTheNumber-v0-easy") as manager:
        # Some numbers are guessed at once: a seed whose first two guesses miss.
        for seed in range(20):
            recorded, _ = record_expert(manager, lambda: Reciter(guesses), [seed], every=1)
            if recorded[0].num_messages >= 3:
                break
        starts = StartLibrary(InitializedConfig(chunk_steps=1), seed=0)
        starts.add(recorded)
        manager.begin([0], [seed])
        original = manager.recv([0]).observation["text"][0]
        for guess in guesses[:2]:
            manager.send([0], [guess])
            original = manager.recv([0]).observation["text"][0]
        seen = SnapshotCache(manager, starts).restore({1: Start(0, 2), 2: Start(0, 2)})
        assert seen[1]["text"] == seen[2]["text"] == original
        manager.send([0, 1, 2], [guesses[2]] * 3)
        batch = manager.recv([0, 1, 2])
        assert len(set(batch.observation["text"].tolist())) == 1
        assert len(set(batch.reward.tolist())) == 1


# ---- groups ---------------------------------------------------------------------------------------------------------


def collect(
    slots: int,
    workers: int,
    batches: int = 3,
    *,
    min_ready: int | None = None,
    share: float = 0.5,
    filters: Sequence[Any] = (),
    **queue: Any,
) -> tuple[list[Any], StartLibrary]:
    """Groups of a random policy on KeyDoor, half of them from within an expert's episode."""
    starts = StartLibrary(InitializedConfig(share=share, mode="parallel", chunk_steps=10), seed=7)
    groups = []
    with make_manager(KEY_DOOR, slots, workers, task="KeyDoor") as manager:
        starts.add(record_expert(manager, KeyDoorExpert, [1, 2], every=10)[0])
        config = GroupsConfig(**{"group_size": 3, "groups_per_step": 4, **queue})
        collector = GroupCollector(
            manager,
            RandomGenerator(manager.spec),
            GroupQueue(config, seed=7, domains=DomainMixture.single("key"), filters=filters),
            seed=7,
            min_ready=min_ready,
            starts=starts,
        )
        for version in range(batches):
            groups.append(collector.next_groups(version))
            collector.generator.publish(version + 1)
            collector.queue.published(version + 1)
            starts.commit(collector.queue.state_dict()["redo"])
    return groups, starts


def test_all_members_of_a_group_start_in_the_same_state_of_the_expert() -> None:
    batches, starts = collect(6, 2)
    kinds = set()
    for group in (group for batch in batches for group in batch):
        firsts = [{key: part[0] for key, part in episode.observation.items()} for episode in group.episodes]
        begun = {json.dumps(episode.metadata["start"]) for episode in group.episodes}
        assert len(begun) == 1
        start = group.episodes[0].metadata["start"]
        kinds.add(start["source"] is None)
        assert group.seed == group_seed(7, "key", group.number), "the group's own seed, wherever it starts"
        for first in firsts[1:]:
            np.testing.assert_array_equal(first["state"], firsts[0]["state"])
        assert len({episode.action.tobytes() for episode in group.episodes}) == 3, "and then they differ"
        if start["source"] is not None:
            assert start["step"] % 10 == 0 < start["step"]
            # 160 steps in all: those before the start are gone.
            assert all(episode.num_messages <= 160 - start["step"] for episode in group.episodes)
            np.testing.assert_array_equal(firsts[0]["state"], expert_at(starts.sources[start["source"]].source, start["step"]))
    assert kinds == {True, False}
    played = sum(episodes for tracked in starts.sources.values() for _, episodes in tracked.counts().values())
    assert played == 3 * sum(group.episodes[0].metadata["start"]["source"] is not None for batch in batches for group in batch)


class OneRoom(EnvManager):
    """Has room for as many restored episodes as `left` says."""

    left = 1

    def room(self) -> int:
        return self.left

    def restore(self, slots: Any, snapshots: Any) -> StepBatch:
        self.left -= len(slots)
        return super().restore(slots, snapshots)


def test_an_episode_that_waits_for_room_is_dropped_with_its_group() -> None:
    """Its start may be gone by then: the first of two members is enough, and nothing else starts in that source."""
    starts = StartLibrary(InitializedConfig(share=1.0, mode="parallel", chunk_steps=2), seed=7)
    with OneRoom(SimFactory(SAVED, None, {"length": 8}), 2, num_workers=1, autoreset=False) as manager:
        starts.add(record_expert(manager, counting_expert, [11], every=2)[0])
        queue = GroupQueue(GroupsConfig(group_size=1, groups_per_step=1, redundancy=1), seed=7, domains=DomainMixture.single("count"))
        collector = GroupCollector(manager, RandomGenerator(manager.spec), queue, seed=7, min_ready=1, starts=starts)
        assert [episode.metadata["start"]["source"] for episode in collector.next_groups(0)[0].episodes] == [0]
        starts.sources.clear()
        manager.left = 1
        collector.pump()
        assert manager.left == 1


def expert_at(source: SourceEpisode, step: int) -> np.ndarray:
    """The observation after `step` of the episode's actions, played in this process."""
    from embodied_rl.sim.robots.key_door import KeyDoor
    from embodied_rl.types import StepBuffers

    sim = KeyDoor(1)
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [source.seed], out)
    for action in source.actions[:step]:
        sim.step([0], np.asarray(action)[None], out)
    return out.observation["state"][0]


def test_slots_and_workers_change_no_group() -> None:
    def content(batches: list[Any]) -> list[Any]:
        return [
            (group.number, [(episode.metadata["start"], episode.action.tolist(), episode.success) for episode in group.episodes])
            for batch in batches
            for group in batch
        ]

    reference, first = collect(6, 1, 2)
    for slots, workers, min_ready in ((6, 2, None), (2, 2, None), (17, 2, 1)):
        other, starts = collect(slots, workers, 2, min_ready=min_ready)
        assert content(other) == content(reference)
        assert starts.sources.keys() == first.sources.keys()
        assert [one.counts() for one in starts.sources.values()] == [one.counts() for one in first.sources.values()]


def test_asynchronous_collection() -> None:
    batches, starts = collect(7, 2, 4, min_ready=1, max_staleness=2)
    for version, batch in enumerate(batches):
        for group in batch:
            assert group.age(version) <= 2
            assert len({episode.observation["state"][0].tobytes() for episode in group.episodes}) == 1
    assert starts.replay.num_mismatches == 0


def test_filtered_groups_are_learned_from_by_the_library() -> None:
    batches, starts = collect(6, 2, 2, share=1.0, filters=[lambda group: "odd" if group.number % 2 else None])
    # Two batches of four even groups are 0, 2, …, 14: at least seven odd ones were dropped before the last of them.
    assert [group.number for batch in batches for group in batch] == list(range(0, 16, 2))
    played = sum(episodes for tracked in starts.sources.values() for _, episodes in tracked.counts().values())
    assert played >= 3 * (8 + 7)
    assert played % 3 == 0


# ---- whole runs -----------------------------------------------------------------------------------------------------

QUICK = [
    *("sim.num_slots=8", "sim.num_workers=1", "algorithm.groups.group_size=4", "algorithm.groups.groups_per_step=3"),
    *("algorithm.num_epochs=2", "algorithm.minibatch_size=256", "policy.hidden_sizes=[16]", "stop_at_success=null"),
    *("evaluation.num_episodes=4", "evaluation.every_steps=null", "video.enabled=no", "logger=quiet"),
]
RUNS = {
    "expert": [
        *("experiment=initialized_sampling", "sim.max_episode_steps=80"),
        *("algorithm.initialized.expert_episodes=2", "total_steps=2000"),
    ],
    "own": [
        *("sim=cartpole", "algorithm=grpo", "algorithm.initialized.share=0.6", "algorithm.initialized.success_return=15"),
        *("algorithm.initialized.sources=[success]", "algorithm.initialized.chunk_steps=4", "total_steps=1500"),
        *("algorithm.initialized.mode=parallel", "algorithm.initialized.anchors=uniform", "algorithm.initialized.num_anchors=2"),
        "algorithm.initialized.max_sources=2",
    ],
}


def curve(run_dir: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(("time", "speed"))} for row in rows]


@pytest.mark.parametrize("name", list(RUNS))
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    from embodied_rl.train import train

    common = [*RUNS[name], *QUICK, "checkpoint.every_steps=400", "checkpoint.keep_last=9"]
    whole = train(load_train_config([*common, f"run_dir={tmp_path}/whole"]))
    middle = sorted((whole / "checkpoints").glob("step_*"))[1]
    copied = tmp_path / "resumed" / "checkpoints" / middle.name
    copied.parent.mkdir(parents=True)
    shutil.copytree(middle, copied)
    shutil.copy(whole / "metrics.jsonl", tmp_path / "resumed")
    resumed = train(load_train_config([*common, f"run_dir={tmp_path}/resumed", "resume=auto"]))
    rows = curve(whole)
    assert rows == curve(resumed)
    assert rows[-1]["initialized/sources"] >= 2
    assert any(key.startswith("initialized/success_from_") for key in rows[-1])
    assert rows[-1]["initialized/mismatched_starts"] == 0


def test_starts_are_learned_of_when_episodes_are_scored(tmp_path: Path) -> None:
    """A score of 0 changes nothing: the run and its library are those without a reward worker."""
    from embodied_rl.train import train

    scored = "hybrid.reward_worker={target: tests.roles.scores:nothing, num_workers: 2}"
    runs = [train(load_train_config([*RUNS["expert"], *QUICK, *more, f"run_dir={tmp_path}/{len(more)}"])) for more in ([], [scored])]
    plain, with_scores = map(curve, runs)
    assert with_scores[-1]["reward_worker/scored"] > 0
    assert plain[-1]["initialized/sources"] >= 2
    # How many groups are ready, and what was played in vain, is a matter of when scores come.
    of_time = ("reward_worker/", "roles/", "groups/", "initialized/replay")
    kept = [[{key: value for key, value in row.items() if not key.startswith(of_time)} for row in rows] for rows in (plain, with_scores)]
    assert kept[0] == kept[1]


def test_what_is_recorded_begins_at_its_seed(tmp_path: Path) -> None:
    """Of a run whose episodes mostly start inside others, those are written that can be played again."""
    from embodied_rl.episodes.reader import open_recording
    from embodied_rl.train import train
    from tests.rollout.test_training_recording import play_again

    recording = open_recording(
        train(load_train_config([*RUNS["expert"], *QUICK, "record.share=1", f"run_dir={tmp_path}/run"])) / "episodes"
    )
    assert len(recording) > 2
    assert {episode.metadata["start"]["source"] for episode in recording} == {None}
    for again in play_again(recording):
        np.testing.assert_array_equal(again["seen"], again["recorded"])


def test_success_of_a_run_is_that_of_ordinary_starts(tmp_path: Path) -> None:
    from embodied_rl.train import train

    run = train(load_train_config([*RUNS["expert"], *QUICK, "algorithm.initialized.share=1.0", f"run_dir={tmp_path}/run"]))
    last = curve(run)[-1]
    # Every group starts inside the expert's episodes, many near their end: none says anything about ordinary starts.
    assert max(value for key, value in last.items() if key.startswith("initialized/success_from_")) > 0
    assert "episode/success" not in last
    assert json.loads((run / "results.json").read_text())["num_episodes"] == 4


def test_mistakes_are_told_before_anything_is_played() -> None:
    config = load_train_config(["sim=cartpole", "algorithm=grpo", "algorithm.initialized.share=0.5"])
    spec = SimSpec("cart", {"state": TensorSpec((4,))}, ActionSpec.discrete(2))
    with pytest.raises(UserError, match=r"'cart' does not report success: set algorithm\.initialized\.success_return"):
        make_starts(config, spec)
    with pytest.raises(UserError, match="'cart' cannot be restored"):
        make_starts(config, dataclasses.replace(spec, snapshots="none"))
    assert make_starts(load_train_config(["sim=cartpole", "algorithm=grpo"]), spec) is None


def test_an_expert_that_fails_is_told(tmp_path: Path) -> None:
    from embodied_rl.train import train

    helpless = [*RUNS["expert"], *QUICK, "sim.max_episode_steps=20", f"run_dir={tmp_path}/run"]
    with pytest.raises(UserError, match=r"KeyDoorExpert succeeded in 0 of 6 episodes, but 2 successful ones are needed"):
        train(load_train_config(helpless))
