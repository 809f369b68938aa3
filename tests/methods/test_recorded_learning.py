"""Learning from recorded episodes through the training loop, on simulators that cost next to nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from embodied_rl.compose import load_train_config
from embodied_rl.config import SimConfig, load_sim_config
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import RecordedEpisode, RecordingInfo
from embodied_rl.episodes.writer import RecordingWriter
from embodied_rl.errors import UserError
from embodied_rl.methods.demonstrations import Demonstrations, play_expert, training_sim
from embodied_rl.policies.actor_critic import build_policy
from embodied_rl.sim.instrumented import instrumented
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.robots.key_door import KeyDoorExpert
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.train import train
from embodied_rl.trainer import Trainer
from embodied_rl.types import SimSpec, StepBuffers

QUICK = [
    *("video.enabled=no", "logger=quiet", "evaluation.num_episodes=2", "evaluation.every_steps=null", "stop_at_success=null"),
    *("sim.num_workers=1", "sim.num_slots=4", "policy.hidden_sizes=[32,32]", "hybrid.num_threads=1", "checkpoint.every_steps=null"),
]
KEY_DOOR = ["sim=key_door", *QUICK, "algorithm.recorded.expert_episodes=8", "algorithm.minibatch_size=64"]
MEASURED = "evaluation.num_episodes=20"
"""For tests of what a policy has learned."""
SMALL = ["algorithm.off_policy.hidden_sizes=[32,32]"]
SQUASHED = "policy.distribution=squashed"


def run(tmp_path: Path, name: str, *overrides: str) -> Path:
    return train(load_train_config([*overrides, f"run_dir={tmp_path}/{name}"]))


def rows(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def without_clocks(run_dir: Path) -> list[dict]:
    return [{key: value for key, value in row.items() if not key.startswith(("time", "speed"))} for row in rows(run_dir)]


def success(run_dir: Path) -> float:
    return float(json.loads((run_dir / "results.json").read_text())["success"])


# ---- learning -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cloned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that recorded 8 episodes of its expert and cloned them."""
    folder = tmp_path_factory.mktemp("cloned")
    words = ["algorithm=bc", "algorithm.cloning.patience=40", "total_steps=1500", "algorithm.learning_rate=3e-3"]
    return run(folder, "bc", *KEY_DOOR, *words, MEASURED)


def test_cloning_an_expert_solves_the_task(cloned: Path) -> None:
    # Random actions never get there: the key, the door and the goal are some 40 steps apart.
    assert success(cloned) >= 0.9
    curve = rows(cloned)
    assert curve[-1]["train/validation_mae"] < 0.1 < curve[0]["train/validation_mae"]
    assert curve[-1]["data/recorded_episodes"] == 8


def test_what_the_expert_played_is_a_recording_like_any_other(cloned: Path) -> None:
    with open_recording(cloned / "demonstrations") as recording:
        assert len(recording) == 8
        assert recording.success_once.all()
        assert len(set(recording.seeds.tolist())) == 8
        assert max(recording.seeds) < 2**30, "held-out seeds are not trained on"
        assert (recording.info.sim["name"], recording.info.policy["kind"]) == ("key_door", "expert")
        expert = KeyDoorExpert()
        for episode in recording:
            assert episode.complete
            for state, action in zip(episode.observation["state"][:-1], episode.action, strict=True):
                np.testing.assert_array_equal(expert({"state": state}), action)


def test_a_recording_of_the_simulator_is_learned_from_in_place_of_the_expert(cloned: Path, tmp_path: Path) -> None:
    overrides = [*KEY_DOOR, "algorithm=bc", "total_steps=100", f"recording={cloned / 'demonstrations'}"]
    first = run(tmp_path, "one", *overrides)
    assert not (first / "demonstrations").exists()
    assert rows(first)[-1]["data/recorded_steps"] == rows(cloned)[-1]["data/recorded_steps"]
    # The same recording twice: twice the steps, so that both were read.
    both = f"recording=[{cloned / 'demonstrations'},{cloned / 'demonstrations'}]"
    second = run(tmp_path, "two", *overrides[:-1], both)
    assert rows(second)[-1]["data/recorded_steps"] == 2 * rows(first)[-1]["data/recorded_steps"]


def test_dagger_answers_where_the_policy_goes(tmp_path: Path) -> None:
    """Two episodes to clone; then the expert's answers. The task is solved, and labels are counted: each is a step that was played."""
    overrides = [*KEY_DOOR, "algorithm=dagger", "algorithm.recorded.expert_episodes=2", "algorithm.learning_rate=3e-3", "total_steps=768"]
    folder = run(tmp_path, "dagger", *overrides, MEASURED)
    curve = rows(folder)
    assert curve[0]["step"] == 0
    assert curve[-1]["step"] == 768
    assert curve[-1]["data/labels"] == curve[-1]["data/recorded_steps"] + 768
    assert success(folder) >= 0.9
    with open_recording(folder / "demonstrations") as recording:
        assert recording.num_steps == curve[-1]["data/recorded_steps"]
    # The checkpoint is of the plain simulator: nobody needs the expert to use it.
    state = json.loads((folder / "checkpoints/last/state.json").read_text())
    assert set(state["spec"]["observation"]) == {"state"}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [pytest.param("iql", marks=pytest.mark.ci_sample), "awac"])
def test_critics_find_what_is_good_in_bad_data(tmp_path: Path, algorithm: str) -> None:
    """The player drifts to the left, and the goal is on the right: cloning does as it did. A few episodes that began near the goal are
    where rewards come from, and critics carry them to the left."""
    line = ["sim=custom", "sim.target=tests.methods.line:Line", *QUICK, MEASURED, "algorithm.recorded.expert=tests.methods.line:Lazy"]
    cloned = run(tmp_path, "bc", *line, "algorithm=bc", "algorithm.recorded.expert_episodes=60", "total_steps=100")
    with open_recording(cloned / "demonstrations") as recording:
        assert 0 < recording.success_once.mean() < 0.1
    assert success(cloned) <= 0.1
    options = [
        "algorithm.off_policy.temperature=0.02",
        "algorithm.gamma=0.9",
        "algorithm.off_policy.target_rate=0.05",
        "algorithm.minibatch_size=128",
    ]
    offline = run(
        tmp_path,
        *("offline", *line, f"algorithm={algorithm}", *SMALL, *options, "total_steps=400", "algorithm.learning_rate=3e-3"),
        f"recording={cloned / 'demonstrations'}",
    )
    assert success(offline) >= success(cloned) + 0.15


def test_critics_learn_beside_a_policy_that_was_cloned_first(tmp_path: Path) -> None:
    """Updates without any rate leave what was cloned, and so does what is played: the statistics of observations stay."""
    start = "+algorithm.warm_start={episodes: 2, num_epochs: 2, minibatch_rows: 32, learning_rate: 0.003, measured_episodes: 2}"
    words = [*KEY_DOOR, *RLPD[1:], "algorithm=sac", "algorithm.off_policy.warmup_steps=16", start, "algorithm.learning_rate=1e-30"]
    more = ["policy.normalize_observation=true", "checkpoint.keep_last=9", "evaluation.num_episodes=2"]
    folder = run(tmp_path, "sac", *words, *more, "total_steps=32")
    cloned, last = (load_file(folder / "checkpoints" / step / "policy.safetensors") for step in ("step_000000000", "last"))
    assert rows(folder)[-1]["train/updates"] == 4
    for name, tensor in cloned.items():
        np.testing.assert_array_equal(tensor, last[name], err_msg=name)
    with open_recording(folder / "demonstrations") as recording:
        assert cloned["normalizer.count"] == recording.num_steps


def test_the_first_update_reads_observations_as_later_ones_do(tmp_path: Path) -> None:
    """A warm-up of 20 steps ends in the first rollout of 32. Twelve updates follow, with the statistics of its observations."""
    words = ["sim=pendulum", *QUICK, *SMALL, "algorithm=sac", "algorithm.off_policy.warmup_steps=20", "algorithm.rollout_steps=8"]
    config = load_train_config([*words, "policy.normalize_observation=true", f"run_dir={tmp_path}"])
    with Trainer(config, tmp_path, command="test") as trainer:
        trainer.engine.publish(0)
        trainer.method.restart(0)
        with trainer.engine.generation():
            experience = trainer.method.collect(0)
        assert trainer.method.prepare(experience) == {"": 12}
        assert not experience.observation, "they are counted once"
        norm = trainer.policy.normalizer
    seen = experience.data[""][""].observation["state"].reshape(32, 3).astype(np.float64)
    assert int(norm.count) == 32
    np.testing.assert_allclose(norm.mean, seen.mean(0), rtol=1e-12)
    np.testing.assert_allclose(norm.var, seen.var(0), rtol=1e-12)


def test_choices_are_cloned(tmp_path: Path) -> None:
    overrides = ["sim=cartpole", "sim.max_episode_steps=300", *QUICK, "algorithm=bc", "algorithm.recorded.expert_episodes=8"]
    expert = "algorithm.recorded.expert=tests.methods.experts:CartPoleController"
    folder = run(tmp_path, "bc", *overrides, expert, "algorithm.learning_rate=3e-3", "total_steps=500")
    assert rows(folder)[-1]["train/validation_accuracy"] > 0.95
    # A random policy balances for 22 steps.
    assert json.loads((folder / "results.json").read_text())["return_mean"] > 200


# ---- continuing -----------------------------------------------------------------------------------------------------

RLPD = ["algorithm=rlpd", SQUASHED, *SMALL, "algorithm.off_policy.warmup_steps=64", "algorithm.off_policy.updates_per_step=0.25"]
SHORT_DOOR = [*KEY_DOOR, "sim.max_episode_steps=70", "algorithm.recorded.expert_episodes=3"]
"""The expert needs 60; what has not learned is evaluated for no longer."""
RESUMED = {
    "bc": [*SHORT_DOOR, "algorithm=bc", "algorithm.num_epochs=2", "checkpoint.every_steps=10", "total_steps=30"],
    "bc_windows": [
        *(*SHORT_DOOR, "algorithm=bc", "algorithm.num_epochs=2", "checkpoint.every_steps=10", "total_steps=30"),
        *("algorithm.recorded.memory_mb=0.01", SQUASHED),
    ],
    "dagger": [*SHORT_DOOR, "algorithm=dagger", "algorithm.num_epochs=2", "checkpoint.every_steps=64", "total_steps=192"],
    "iql": [
        *SHORT_DOOR,
        "algorithm=iql",
        *SMALL,
        "algorithm.off_policy.updates_per_iteration=5",
        "checkpoint.every_steps=10",
        "total_steps=30",
    ],
    "awac": [
        *SHORT_DOOR,
        "algorithm=awac",
        *SMALL,
        "algorithm.off_policy.updates_per_iteration=5",
        "checkpoint.every_steps=10",
        "total_steps=30",
    ],
    "rlpd": [*SHORT_DOOR, *RLPD, "checkpoint.every_steps=64", "total_steps=192", "algorithm.off_policy.replay_capacity=100"],
    "sac": [
        "sim=pendulum",
        *QUICK,
        *RLPD[1:],
        "algorithm=sac",
        "algorithm.normalize_reward=true",
        "algorithm.minibatch_size=32",
        "checkpoint.every_steps=64",
        "total_steps=192",
    ],
}


@pytest.mark.parametrize("name", RESUMED)
def test_resume_continues_to_the_same_curve_bit_for_bit(tmp_path: Path, name: str) -> None:
    common = [*RESUMED[name], "checkpoint.keep_last=9", "algorithm.lr_schedule=linear"]
    whole = run(tmp_path, "whole", *common)
    middle = sorted((whole / "checkpoints").glob("step_*"))[1]
    copied = tmp_path / "resumed" / "checkpoints" / middle.name
    shutil.copytree(middle, copied)
    shutil.copy(whole / "metrics.jsonl", tmp_path / "resumed")
    resumed = run(tmp_path, "resumed", *common, "resume=auto")
    assert rows(whole)[-1]["step"] > json.loads((middle / "state.json").read_text())["step"] > 0
    assert without_clocks(whole) == without_clocks(resumed)
    for file in ("policy.safetensors", "learner.safetensors"):
        first, second = (load_file(folder / "checkpoints/last" / file) for folder in (whole, resumed))
        assert first.keys() == second.keys()
        for tensor in first:
            np.testing.assert_array_equal(first[tensor], second[tensor], err_msg=tensor)


def test_cloning_stops_early_and_keeps_the_best_weights(tmp_path: Path) -> None:
    """Two training episodes, a large rate: the validation loss rises soon, and the run ends `patience` epochs after its minimum."""
    overrides = ["algorithm.recorded.expert_episodes=3", "algorithm.cloning.validation_share=0.34", "algorithm.learning_rate=3e-2"]
    folder = run(
        tmp_path, "bc", *KEY_DOOR, "algorithm=bc", *overrides, "algorithm.num_epochs=1", "algorithm.cloning.patience=5", "total_steps=5000"
    )
    losses = [row["train/validation_loss"] for row in rows(folder)]
    assert len(losses) == int(np.argmin(losses)) + 1 + 5
    state = load_file(folder / "checkpoints/last/learner.safetensors")
    assert float(state["best_loss"]) == min(losses)
    for name, tensor in load_file(folder / "checkpoints/last/policy.safetensors").items():
        np.testing.assert_array_equal(tensor, state[f"best.{name}"])


def test_statistics_are_those_of_the_recorded_observations(tmp_path: Path) -> None:
    folder = run(
        tmp_path,
        "bc",
        *KEY_DOOR,
        "algorithm=bc",
        "algorithm.cloning.validation_share=0",
        "total_steps=20",
        "policy.normalize_observation=true",
    )
    policy = load_file(folder / "checkpoints/last/policy.safetensors")
    with open_recording(folder / "demonstrations") as recording:
        seen = np.concatenate([episode.observation["state"][:-1] for episode in recording])
    np.testing.assert_allclose(policy["normalizer.mean"], seen.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(policy["normalizer.var"], seen.var(0), rtol=1e-5)
    assert policy["normalizer.count"] == len(seen)


def test_a_recorder_that_was_stopped_goes_on(cloned: Path, tmp_path: Path) -> None:
    """Five of eight episodes were written: the three others are added, the same as without the interruption."""
    config = load_train_config([*KEY_DOOR, "algorithm=bc", f"run_dir={tmp_path}"])
    with open_recording(cloned / "demonstrations") as recording:
        with RecordingWriter(tmp_path / "demonstrations", recording.info) as writer:
            for number in range(5):
                writer.add(recording.episode(number))
        with EnvManager.from_config(training_sim(config), EpisodeSeeds.training(config.seed)) as manager:
            policy = build_policy(config.policy, recording.spec)
            found = Demonstrations(config, manager, policy, tmp_path).load()
        assert [number for _, number in found] == list(range(8))
        for first, (second, number) in zip(recording, found, strict=True):
            np.testing.assert_array_equal(first.action, second.episode(number).action)
            assert first.seed == second.episode(number).seed


# ---- the expert's episodes ------------------------------------------------------------------------------------------


@pytest.fixture
def manager() -> Iterator[EnvManager]:
    config = instrumented(load_sim_config("key_door"), expert="embodied_rl.sim.robots.key_door:KeyDoorExpert")
    with EnvManager.from_config(config, EpisodeSeeds.training(0), num_slots=3) as made:
        yield made


def test_episodes_hold_what_the_simulator_did(manager: EnvManager) -> None:
    """Each is played again in a simulator of its own, from its seed and with its actions."""
    from embodied_rl.sim.robots.key_door import KeyDoor

    for episode, share in zip(play_expert(manager, [5, 9, 13], [0.0, 0.5, 1.0]), (0.0, 0.5, 1.0), strict=True):
        assert isinstance(episode, RecordedEpisode)
        sim = KeyDoor(num_envs=1)
        out = StepBuffers.allocate(sim.spec, 1)
        sim.reset([0], [episode.seed], out)
        expert, agreed = KeyDoorExpert(), []
        for step in range(episode.num_steps):
            np.testing.assert_array_equal(out.observation["state"][0], episode.observation["state"][step])
            agreed.append(np.array_equal(expert({"state": out.observation["state"][0]}), episode.action[step]))
            sim.step([0], episode.action[step : step + 1], out)
            assert out.reward[0] == episode.reward[step]
            assert out.success[0] == episode.success[step]
        np.testing.assert_array_equal(out.observation["state"][0], episode.observation["state"][-1])
        assert episode.complete
        assert np.mean(agreed) == pytest.approx(1 - share, abs=0.0 if share in (0.0, 1.0) else 0.25)


# ---- mistakes -------------------------------------------------------------------------------------------------------


def write_recording(folder: Path, sim: SimConfig, spec: SimSpec, episodes: list[RecordedEpisode]) -> Path:
    import dataclasses

    with RecordingWriter(folder, RecordingInfo(spec, sim=dataclasses.asdict(sim), policy={"kind": "random"})) as writer:
        for episode in episodes:
            writer.add(episode)
    return folder


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["algorithm=bc", "recording={folder}/demonstration"],
            r"Recording '.*/demonstration' does not exist\. Did you mean 'demonstrations'\?",
        ),
        (["algorithm=bc", "recording={folder}/demonstrations", "sim=pendulum"], r"of another simulator: task KeyDoor.* ≠ Pendulum-v1"),
        (
            ["algorithm=bc", "recording={folder}/demonstrations", "policy=cnn"],
            r"policy.observation_key='rgb' is not an observation of task",
        ),
        (
            ["algorithm=ppo", "recording={folder}/demonstrations"],
            r"its own policy sampled\. Choose a method that learns from recordings",
        ),
        (["algorithm=bc", "sim=pendulum"], r"Task 'Pendulum-v1' of sim=pendulum has no expert\. Tasks with one: "),
        (["algorithm=dagger", "sim=pendulum", "recording={folder}/demonstrations"], "has no expert"),
        (["algorithm=sac", "policy.distribution=gaussian"], r"policy.distribution='gaussian': set policy.distribution=squashed"),
        (["algorithm=iql", "algorithm.off_policy.update=sac", SQUASHED], "without fresh steps nothing corrects it"),
        (["algorithm=iql", "algorithm.off_policy.recorded_share=0.5"], r"recorded_share=0.5 mixes recorded steps"),
        (["algorithm=iql", "algorithm.off_policy.target_critics=3"], r"target_critics must be <= num_critics \(2\), got 3"),
        (["algorithm=sac", SQUASHED, "sim=pendulum", "algorithm.off_policy.reward=success"], "does not report success"),
        (["algorithm=bc", "algorithm.recorded.expert_randomness=[2.0]"], r"expert_randomness\[0\] must be between 0 and 1, got 2.0"),
    ],
)
def test_a_mistake_is_one_line(cloned: Path, tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        run(tmp_path, "run", "sim=key_door", *QUICK, *(override.format(folder=cloned) for override in overrides))
    assert "\n" not in str(caught.value)


def test_other_settings_of_the_simulator_are_a_warning(cloned: Path, tmp_path: Path) -> None:
    overrides = [*KEY_DOOR, "algorithm=bc", f"recording={cloned / 'demonstrations'}", "sim.kwargs.render_size=64", "total_steps=10"]
    with pytest.warns(UserWarning, match=r"made with other settings of the simulator: render_size None ≠ 64 \(recording ≠ simulator\)"):
        run(tmp_path, "bc", *overrides)


def test_what_a_recording_may_lack(cloned: Path, tmp_path: Path) -> None:
    sim = load_sim_config("key_door")
    with open_recording(cloned / "demonstrations") as recording:
        spec, first = recording.spec, recording.episode(0)
        failed = RecordedEpisode(
            seed=1,
            observation={"state": first.observation["state"][:4].copy()},
            action=first.action[:3].copy(),
            reward=np.zeros(3, np.float32),
            terminated=np.zeros(3, bool),
            truncated=np.array([0, 0, 1], bool),
            success=np.zeros(3, bool),
        )
    empty = write_recording(tmp_path / "empty", sim, spec, [])
    with pytest.raises(UserError, match="has no episodes"):
        run(tmp_path, "a", *KEY_DOOR, "algorithm=bc", f"recording={empty}")
    hopeless = write_recording(tmp_path / "hopeless", sim, spec, [failed])
    with pytest.raises(UserError, match="no successful episode: none of its 1 episodes succeeded"):
        run(tmp_path, "b", *KEY_DOOR, "algorithm=bc", f"recording={hopeless}", "algorithm.recorded.only_success=true")
    folder = run(
        tmp_path, "c", *KEY_DOOR, "algorithm=bc", f"recording={hopeless}", "total_steps=10", "algorithm.cloning.validation_share=0"
    )
    assert rows(folder)[-1]["data/recorded_steps"] == 3
