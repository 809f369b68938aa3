"""Whole runs with policies that act in chunks: rollouts, groups, cloning, warm starts, resuming, evaluating, filming."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from embodied_rl.commands import evaluate, render
from embodied_rl.compose import load_train_config
from embodied_rl.episodes.reader import open_recording
from embodied_rl.errors import UserError
from embodied_rl.train import train
from tests.vla.toys import QUIET, SIM, TINY

PPO = ("algorithm.rollout_steps=8", "algorithm.minibatch_size=16", "algorithm.num_epochs=2", "total_steps=150")
GRPO = (
    "algorithm=grpo",
    "algorithm.groups.group_size=4",
    "algorithm.groups.groups_per_step=2",
    "algorithm.num_epochs=2",
    "total_steps=120",
)
IN_EPISODES = ("algorithm=ppo_episodes", *GRPO[1:], "algorithm.micro_batch_size=5", "algorithm.normalize_reward=true")
IN_REWARD = ("algorithm.kl.coef=0.1", "algorithm.kl.place=reward")
EXPERT = "algorithm.recorded.expert=tests.vla.toys:PointExpert"
MASKED = ("algorithm.ratio=token", "algorithm.correction.mode=mask", "algorithm.correction.level=chunk", "algorithm.correction.reject=3")
CRITICS = ("algorithm.off_policy.hidden_sizes=[16]", "algorithm.minibatch_size=16", "algorithm.off_policy.updates_per_iteration=10")
WARM = "+algorithm.warm_start={episodes: 24, num_epochs: 12, minibatch_rows: 32, learning_rate: 0.003, measured_episodes: 16}"


def run(run_dir: Path, *overrides: str) -> Path:
    return train(load_train_config([*SIM, *TINY, *QUIET, *overrides, f"run_dir={run_dir}"]))


def curve(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(
            (*PPO, "algorithm.advantage=gae_chunk", "algorithm.ratio=token", "algorithm.micro_batch_size=5", *MASKED), id="ppo chunks"
        ),
        pytest.param(
            (*PPO, "algorithm.advantage=gae_action", "algorithm.ratio=action", "policy.value=action"),
            id="ppo actions",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (*PPO, "policy.decoding=autoregressive", "algorithm.normalize_reward=true"), id="ppo autoregressive", marks=pytest.mark.slow
        ),
        pytest.param((*PPO, "policy=flow", "policy.chunk=3", "policy.hidden_sizes=[16]", "policy.num_steps=2"), id="ppo flow"),
        pytest.param(
            (*GRPO, *MASKED, "algorithm.aggregation=seq-mean-token-mean", "algorithm.kl.coef=0.1"),
            id="grpo tokens",
        ),
        pytest.param(
            (*IN_EPISODES, "algorithm.advantage=gae_action", "algorithm.ratio=action", "policy.value=action", *IN_REWARD),
            id="episodes, actions",
        ),
        pytest.param(
            (*IN_EPISODES, "algorithm.advantage=gae_chunk", "algorithm.ratio=token"), id="episodes, chunks", marks=pytest.mark.slow
        ),
        pytest.param(
            (
                "algorithm=bc",
                EXPERT,
                "algorithm.recorded.expert_episodes=5",
                "policy.cloning_shift=2",
                "algorithm.minibatch_size=16",
                "algorithm.num_epochs=1",
                "total_steps=20",
            ),
            id="cloning with shifted pictures",
        ),
        pytest.param(
            (
                "algorithm=iql",
                EXPERT,
                "algorithm.recorded.expert_episodes=4",
                *CRITICS,
                "policy.decoding=autoregressive",
                "total_steps=30",
            ),
            id="critics offline",
        ),
        pytest.param(
            (
                *("algorithm=rlpd", EXPERT, "algorithm.recorded.expert_episodes=4", *CRITICS, "algorithm.off_policy.warmup_steps=8"),
                *(
                    "algorithm.off_policy.updates_per_step=0.25",
                    "algorithm.off_policy.replay_capacity=20",
                    "policy.decoding=autoregressive",
                    "total_steps=100",
                ),
            ),
            id="critics with fresh chunks",
        ),
        pytest.param((*GRPO, "algorithm.advantage=gae", "hybrid.precision=bfloat16"), id="groups with a critic", marks=pytest.mark.slow),
    ],
)
def test_a_run_trains_evaluates_and_resumes_to_the_same_bits(method: tuple[str, ...], tmp_path: Path) -> None:
    # "policy=flow" takes the place of the tiny VLA's own settings.
    flow = "policy=flow" in method
    overrides = [word for word in (*SIM, *TINY, *QUIET) if not (flow and word.startswith("policy"))] + list(method)
    whole = train(load_train_config([*overrides, "checkpoint.every_steps=10", "checkpoint.keep_last=9", f"run_dir={tmp_path / 'whole'}"]))
    first = load_file(whole / "checkpoints" / "last" / "policy.safetensors")
    early = min((whole / "checkpoints").glob("step_*"))
    assert early.name != (whole / "checkpoints" / "last").resolve().name, "there is a checkpoint in between"
    results = json.loads((whole / "results.json").read_text())
    assert results["num_episodes"] == 4
    assert results["steps"] == curve(whole)[-1]["step"]
    assert 0 < results["episodes"][0]["length"] <= 10
    moved = load_file(early / "policy.safetensors")
    assert any(not np.array_equal(first[name], moved[name]) for name in first), "it learned"
    continued = tmp_path / "continued"
    import shutil

    shutil.copytree(whole, continued)
    for path in (continued / "checkpoints").iterdir():
        if path.name not in (early.name,):
            path.unlink() if path.is_symlink() else shutil.rmtree(path)
    (continued / "results.json").unlink()
    train(
        load_train_config(
            [*overrides, "checkpoint.every_steps=10", f"run_dir={continued}", f"resume={continued / 'checkpoints' / early.name}"]
        )
    )
    again = load_file(continued / "checkpoints" / "last" / "policy.safetensors")
    for name, expected in first.items():
        np.testing.assert_array_equal(again[name], expected, err_msg=name)


def test_cloning_the_expert_solves_the_task(tmp_path: Path) -> None:
    overrides = ("algorithm=bc", EXPERT, "algorithm.recorded.expert_episodes=40", "algorithm.learning_rate=0.003", "total_steps=140")
    run_dir = run(
        tmp_path / "run", *overrides, "algorithm.minibatch_size=32", "evaluation.num_episodes=40", "algorithm.cloning.patience=null"
    )
    results = json.loads((run_dir / "results.json").read_text())
    # Whoever does not understand the words goes to one side: half of the episodes.
    assert results["success"] >= 0.9
    assert curve(run_dir)[-1]["train/validation_loss"] < curve(run_dir)[0]["train/validation_loss"]


def test_a_cloned_policy_keeps_the_scale_of_what_was_cloned(tmp_path: Path) -> None:
    """Its normalisation is that of the expert's observations, each counted once, and does not move while it plays."""
    mlp = ("policy=mlp", "policy.hidden_sizes=[8]", "policy.normalize_observation=true", "+sim.kwargs={words: spec, pixels: false}")
    overrides = [*SIM, *mlp, *QUIET, *PPO, EXPERT, WARM, f"run_dir={tmp_path / 'run'}"]
    run_dir = train(load_train_config(overrides))
    with open_recording(run_dir / "demonstrations") as recording:
        played = [recording.episode(number) for number in range(len(recording))]
        seen = np.concatenate([episode.observation["state"][:-1] for episode in played if episode.success.any()])
    weights = load_file(run_dir / "checkpoints" / "last" / "policy.safetensors")
    assert weights["normalizer.count"] == len(seen) > 0
    np.testing.assert_allclose(weights["normalizer.mean"], seen.mean(axis=0, dtype=np.float64), rtol=1e-12)
    np.testing.assert_allclose(weights["normalizer.var"], seen.var(axis=0, dtype=np.float64), rtol=1e-9)


def test_a_warm_start_is_measured_before_and_after(tmp_path: Path) -> None:
    run_dir = run(tmp_path / "run", *GRPO, EXPERT, WARM, "total_steps=60", "evaluation.num_episodes=16")
    results = json.loads((run_dir / "results.json").read_text())
    warm = results["warm_start"]
    assert warm["episodes"] == 24
    assert warm["after"]["success"] > warm["before"]["success"]
    assert warm["after"]["num_episodes"] == 16
    assert results["steps"] == 80, "the expert's steps do not count"
    first = curve(run_dir)[0]
    assert first["warm_start/success_after"] == warm["after"]["success"]
    # Resumed, it is not done again.
    overrides = [*SIM, *TINY, *QUIET, *GRPO, EXPERT, WARM, f"resume={run_dir}", f"run_dir={run_dir}", "total_steps=100"]
    again = train(load_train_config(overrides), overrides=["total_steps=100"])
    assert json.loads((again / "results.json").read_text())["warm_start"] == warm


def test_evaluate_and_render_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = run(tmp_path / "run", *PPO)
    evaluate.main([f"checkpoint={run_dir}", "num_episodes=6", "against=random"])
    document = json.loads(next(run_dir.glob("comparison*.json")).read_text())
    assert "6" in json.dumps(document)
    render.main([f"checkpoint={run_dir}", "num_episodes=2", f"output={tmp_path / 'film.mp4'}"])
    assert next(tmp_path.glob("film*.mp4")).stat().st_size > 0
    capsys.readouterr()


def test_episodes_start_inside_those_of_chunks(tmp_path: Path) -> None:
    """An expert's episodes, step by step, and own ones, chunk by chunk: played again, both show what was seen there the first time."""
    starts = ("share=0.7", "sources=[expert,success]", "expert=tests.vla.toys:PointExpert", "expert_episodes=2", "chunk_steps=1")
    words = [*GRPO, "total_steps=400", *(f"algorithm.initialized.{word}" for word in (*starts, "min_episodes=4"))]
    last = curve(run(tmp_path / "run", *words))[-1]
    assert last["initialized/expert_messages"] >= 4
    assert last["initialized/sources"] > 2, "own episodes too"
    assert last["initialized/replayed_messages"] > 0
    assert last["initialized/mismatched_starts"] == last["initialized/replay_drift"] == 0
    assert any(key.startswith("initialized/success_from_") for key in last)


@pytest.mark.parametrize("method", [PPO, GRPO], ids=["rollouts", "groups"])
@pytest.mark.parametrize(
    "policy", [("policy.chunk=1",), ("policy=flow", "policy.chunk=1", "policy.hidden_sizes=[16]", "policy.num_steps=2")]
)
def test_what_was_given_step_by_step_is_recorded(method: tuple[str, ...], policy: tuple[str, ...], tmp_path: Path) -> None:
    """Tokens of a VLA, and denoised motions: the recorded actions, in the simulator's units, lead from each state to the next."""
    tiny = () if policy[0] == "policy=flow" else TINY
    words = [*SIM, *tiny, *QUIET, *method, *policy, "algorithm.num_epochs=1", "total_steps=60", "record.share=1", f"run_dir={tmp_path}"]
    recording = open_recording(train(load_train_config(words)) / "episodes")
    assert len(recording) >= 4
    for episode in recording:
        x = episode.observation["state"][:, 0]
        np.testing.assert_allclose(x[1:], np.clip(x[:-1] + 0.2 * np.clip(np.asarray(episode.action)[:, 0], -1, 1), -1, 1), atol=1e-6)
        assert episode.log_prob is not None
        assert (episode.sampled_action is not None) == bool(tiny)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("sim.kwargs.pixels=false",), "shows no image at all"),
        (("sim.kwargs.words=none",), "gives no instruction"),
        (("policy.instruction=' '",), "policy.instruction must be null or words"),
        (("policy.name=tiny_vlaa",), "policy.name='tiny_vlaa' is not a choice. Did you mean 'tiny_vla'"),
        (("algorithm.advantage=gae_action", "algorithm.ratio=action"), "and algorithm.advantage=gae_action need each other"),
        (("policy.value=action",), "and algorithm.advantage=gae_action need each other"),
        (("algorithm.ratio=action", "policy=mlp"), "need a policy that acts in chunks"),
        ((WARM,), "has no expert"),
        (("+algorithm.warm_start={player: a:b}",), "answers in text"),
    ],
)
def test_a_mistake_is_one_line(overrides: tuple[str, ...], message: str, tmp_path: Path) -> None:
    mlp = "policy=mlp" in overrides
    own = () if any(word.startswith("algorithm=") for word in overrides) else PPO
    words = [word for word in (*SIM, *TINY, *QUIET, *own) if not (mlp and word.startswith("policy"))]
    with pytest.raises(UserError) as error:
        train(load_train_config([*words, *overrides, f"run_dir={tmp_path}"]))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
