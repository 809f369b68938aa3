"""Films of real, short runs: decoded again, and every picture held against one drawn by plain gymnasium."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import av
import gymnasium
import numpy as np
import pytest
import torch
from PIL import Image

from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.evaluate import evaluate_checkpoint, make_generator
from embodied_rl.policies.actor_critic import build_policy
from embodied_rl.render import MAX_STEPS_SHOWN, FilmedEpisode, film, main, render_videos, side_by_side
from embodied_rl.sim.film import filmed
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.rendering import mujoco_backend
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.types import EpisodeSummary
from embodied_rl.video import GREEN, GREY, RED, add_border, border_width, fit_square, overlay
from tests.short_run import one_line_error, train_shortly

HELD_OUT = 2**30
SIZE = 256  # at which the whole line of text fits


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_shortly(tmp_path_factory.mktemp("cartpole") / "run", "sim=cartpole", "sim.max_episode_steps=60", "total_steps=1024")


def mp4(path: Path) -> tuple[list[np.ndarray], float]:
    """(pictures, pictures a second)."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert stream.average_rate is not None
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)], float(stream.average_rate)


def gif(path: Path) -> tuple[list[np.ndarray], list[int], int]:
    """(pictures, milliseconds each, loop count)."""
    frames, durations = [], []
    with Image.open(path) as image:
        for index in range(getattr(image, "n_frames", 1)):
            image.seek(index)
            durations.append(image.info["duration"])
            frames.append(np.asarray(image.convert("RGB")))
        return frames, durations, image.info["loop"]


def near(first: np.ndarray, second: np.ndarray) -> bool:
    """Equal but for what H.264 or 128 colours change."""
    return float(np.abs(first.astype(int) - second.astype(int)).mean()) < 4


@cache
def drawn_by_hand(run_dir: Path, seed: int) -> list[np.ndarray]:
    """The policy's mode in one CartPole of plain gymnasium: a picture at the start and after every step."""
    checkpoint = load_checkpoint(run_dir)
    policy = build_policy(checkpoint.config.policy, checkpoint.spec)
    policy.load_state_dict(checkpoint.policy)
    policy.train(False)
    pictures: list[np.ndarray] = []
    with gymnasium.make("CartPole-v1", render_mode="rgb_array", max_episode_steps=60) as env:
        observation, _ = env.reset(seed=seed)
        done = False
        while True:
            step = len(pictures)
            text = f"seed {seed}   step {step}   return {float(step):.2f}"  # CartPole pays 1 for each step
            pictures.append(overlay(fit_square(np.asarray(env.render()), SIZE), "CartPole-v1", text))
            if done:
                break
            with torch.no_grad():
                action = policy.act({"state": torch.as_tensor(observation)[None]}, None).action
            observation, _, terminated, truncated, _ = env.step(int(action[0, 0]))
            done = terminated or truncated
    return pictures


def test_every_picture_is_the_one_drawn_by_hand(cartpole: Path) -> None:
    checkpoint = load_checkpoint(cartpole, with_learner=False)
    with EnvManager.from_config(filmed(checkpoint.config.sim, SIZE), EpisodeSeeds.held_out(3), num_slots=2) as manager:
        episodes = film(manager, make_generator(checkpoint, manager.spec), 5, first_seed=3, size=SIZE)
    assert [episode.seed for episode in episodes] == list(range(HELD_OUT + 3, HELD_OUT + 8))
    evaluated = evaluate_checkpoint(checkpoint, 5, seed=3).episodes
    for episode, summary in zip(episodes, evaluated, strict=True):
        expected = drawn_by_hand(cartpole, episode.seed)
        assert episode.summary is not None
        assert (episode.summary.seed, episode.summary.length, episode.summary.episode_return) == (
            summary.seed,
            summary.length,
            summary.episode_return,
        )
        assert len(episode.frames) == len(expected) == summary.length + 1
        # The automatic reset has not replaced the last picture by the first of the next episode.
        np.testing.assert_array_equal(np.stack(episode.frames), np.stack(expected))


def test_the_command_line_writes_an_mp4_and_a_gif_that_play(cartpole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [f"checkpoint={cartpole}", f"output={tmp_path}", "num_episodes=3", f"size={SIZE}", "fps=10", "seed=3"]
    main(arguments)
    steps = load_checkpoint(cartpole).step
    movie, picture = tmp_path / f"CartPole-v1_step{steps:09d}.mp4", tmp_path / f"CartPole-v1_step{steps:09d}.gif"
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"{path} ({path.stat().st_size / 1e6:.2f} MB)" for path in (movie, picture)]
    by_hand = [drawn_by_hand(cartpole, HELD_OUT + 3 + index) for index in range(3)]
    longest = max(len(pictures) for pictures in by_hand)
    rate = min(10, max(5, longest // 2))
    frames, per_second = mp4(movie)
    assert per_second == rate
    assert len(frames) == longest + rate  # one second more of the end
    for index, frame in enumerate(frames):
        assert frame.shape == (SIZE, 3 * SIZE, 3)
        moments = [p[index] if index < len(p) - 1 else add_border(p[-1], GREY) for p in by_hand]
        assert near(frame, np.concatenate(moments, axis=1)), index
    assert not near(frames[0], frames[longest - 1])
    animated, durations, loop = gif(picture)
    assert loop == 0
    # Ten a second are all kept; where nothing seems to move, one picture stays for two moments. The last one stays a second longer.
    moments = [frame for frame, milliseconds in zip(animated, durations, strict=True) for _ in range(0, milliseconds, 1000 // rate)]
    assert len(moments) == len(frames)
    assert len(animated) > longest * 3 // 4
    for shown, frame in zip(moments, frames, strict=True):
        assert near(shown, frame)


def test_earlier_videos_are_never_overwritten(cartpole: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(cartpole, with_learner=False)

    def render(*formats: str) -> list[Path]:
        return render_videos(checkpoint, tmp_path, num_episodes=1, size=32, formats=formats)

    (first,) = render("gif")
    before = first.read_bytes()
    second = render("mp4", "gif")
    third = render("mp4")
    stem = f"CartPole-v1_step{checkpoint.step:09d}"
    assert first.name == f"{stem}.gif"
    # One number for both formats, so that what belongs together is seen to.
    assert [path.name for path in second] == [f"{stem}_2.mp4", f"{stem}_2.gif"]
    assert [path.name for path in third] == [f"{stem}.mp4"]
    assert first.read_bytes() == before
    (random,) = render_videos(checkpoint, tmp_path, num_episodes=1, size=32, formats=("gif",), policy="random")
    assert random.name == f"{stem}_random.gif"
    assert random.read_bytes() != before


def test_long_episodes_are_shown_faster_and_the_short_ones_beside_them_too(monkeypatch: pytest.MonkeyPatch, cartpole: Path) -> None:
    checkpoint = load_checkpoint(cartpole, with_learner=False)
    by_hand = [drawn_by_hand(cartpole, HELD_OUT + 3 + index) for index in range(5)]
    lengths = [len(pictures) - 1 for pictures in by_hand]
    limit = max(lengths) // 2 - 1
    # The longest has more than 2 · limit steps and fewer than 4 · limit: every fourth step is shown, and each one's last.
    assert 2 * limit < max(lengths) <= 4 * limit
    assert any(length % 4 for length in lengths), "one should end between two pictures"
    assert MAX_STEPS_SHOWN == 250
    monkeypatch.setattr("embodied_rl.render.MAX_STEPS_SHOWN", limit)
    with EnvManager.from_config(filmed(checkpoint.config.sim, SIZE), EpisodeSeeds.held_out(3), num_slots=2) as manager:
        episodes = film(manager, make_generator(checkpoint, manager.spec), 5, first_seed=3, size=SIZE)
    for episode, pictures, length in zip(episodes, by_hand, lengths, strict=True):
        assert episode.steps == sorted({*range(0, length, 4), length})
        np.testing.assert_array_equal(np.stack(episode.frames), np.stack([pictures[step] for step in episode.steps]))


def test_an_ended_tile_keeps_its_last_moment_in_a_frame_of_its_outcome() -> None:
    def episode(colour: int, num_frames: int, success: bool) -> FilmedEpisode:
        frames = [np.full((32, 32, 3), colour + index, np.uint8) for index in range(num_frames)]
        summary = EpisodeSummary(0, 0, 0, 1.0, num_frames - 1, success, success, False)
        return FilmedEpisode(0, frames, [*range(num_frames)], summary)

    short, long = episode(50, 2, True), episode(150, 4, False)
    frames = side_by_side([short, long], reports_success=True)
    assert len(frames) == 4
    width = border_width(32)
    for index, frame in enumerate(frames):
        left, right = frame[:, :32], frame[:, 32:]
        assert (left[width:-width, width:-width] == 50 + min(index, 1)).all()
        assert (right[width:-width, width:-width] == 150 + index).all()
        assert (left[0] == (GREEN if index >= 1 else 50)).all()
        assert (right[0] == (RED if index >= 3 else 150 + index)).all()
    assert (side_by_side([short, long], reports_success=False)[-1][0] == GREY).all()


@pytest.mark.skipif(mujoco_backend() is None, reason="MuJoCo cannot draw off-screen here")
def test_pixels_become_a_film_with_the_badge_of_success(tmp_path: Path) -> None:
    overrides = ["sim=pixel_reach", "policy=cnn", "policy.hidden_sizes=[16]", "sim.max_episode_steps=30", "total_steps=256"]
    checkpoint = load_checkpoint(train_shortly(tmp_path / "run", *overrides), with_learner=False)
    (path,) = render_videos(checkpoint, tmp_path / "films", num_episodes=6, size=64, seed=20, formats=("mp4",), policy="random")
    frames, rate = mp4(path)
    assert frames[0].shape == (2 * 64, 3 * 64, 3)  # six tiles: three in a row
    with EnvManager.from_config(filmed(checkpoint.config.sim, 64), EpisodeSeeds.held_out(20), num_slots=4) as manager:
        generator = make_generator(checkpoint, manager.spec, policy="random", seed=20)
        episodes = film(manager, generator, 6, first_seed=20, size=64)
    assert rate == min(20, max(5, max(len(episode.frames) for episode in episodes) // 2))
    outcomes = [episode.summary.success_once for episode in episodes if episode.summary is not None]
    assert len(outcomes) == 6
    assert 0 < sum(outcomes) < 6, "seeds should show both outcomes, or this test tells half"
    for index, success in enumerate(outcomes):
        y, x = index // 3 * 64, index % 3 * 64
        last = frames[-1][y : y + 64, x : x + 64]
        assert frames[0][y : y + 64, x : x + 64].std() > 20, "a picture of nothing"
        corner = last[-2:, :].reshape(-1, 3).mean(axis=0)
        assert np.abs(corner - (GREEN if success else RED)).max() < 60  # the codec blurs a border of two pixels
        # The badge, left of the border and of the last letter.
        assert (np.abs(episodes[index].frames[-1][0, -1].astype(int) - GREEN).max() == 0) == success


def test_a_task_without_pictures_is_one_line_and_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train_shortly(tmp_path / "run", "sim=custom", "sim.target=tests.sim.toy:NoOpSim", "sim.max_episode_steps=8")
    capsys.readouterr()
    line = one_line_error(main, [f"checkpoint={run}", f"output={tmp_path / 'films'}"], capsys)
    assert "Task 'no-op' offers no pictures" in line
    assert not (tmp_path / "films").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["format=avi"], "format=avi: 'avi' is not a choice. Known: gif, mp4."),
        (["format=mp4,giff"], "'giff' is not a choice. Did you mean 'gif'?"),
        (["format=,"], "is not a choice. Known: gif, mp4."),
        (["size=8"], "size must be between 16 and 2048, got 8"),
        (["fps=0"], "fps must be between 1 and 120, got 0"),
        (["num_episodes=65"], "num_episodes must be between 1 and 64, got 65"),
        (["seed=-1"], "seed must be between 0"),
        (["episodes=3"], "Argument 'episodes' is not known. Did you mean 'num_episodes'?"),
        (["sim=pendulum", "num_episodes=1"], "was made for another simulator"),
        (["output=FILE", "num_episodes=1", "size=32"], "Cannot write"),
        (["sim.target=tests.test_render:BrokenScreen", "num_episodes=1"], "cannot be drawn on this machine (RuntimeError: no driver)"),
        (["sim.target=tests.test_render:DyingDriver", "num_episodes=1"], "Filming failed: simulator worker 0 died (killed by SIGSEGV)"),
        (["sim.target=tests.test_render:BrokenPhysics", "num_episodes=1"], "worker 0 raised an exception (ZeroDivisionError: no mass)"),
    ],
)
def test_a_mistake_is_one_line(
    cartpole: Path, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    words = [word.replace("FILE", str(tmp_path / "file" / "films")) for word in arguments]
    assert message in one_line_error(main, [f"checkpoint={cartpole}", *words], capsys)


class BrokenScreen(gymnasium.Wrapper):
    """CartPole where drawing raises what a missing driver raises."""

    def __init__(self, task: str) -> None:
        super().__init__(gymnasium.make(task, render_mode="rgb_array"))

    def render(self) -> np.ndarray:
        raise RuntimeError("no\n  driver")


class DyingDriver(BrokenScreen):
    """CartPole where drawing ends the process, as graphics drivers do."""

    def render(self) -> np.ndarray:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGSEGV)
        return np.zeros((1, 1, 3), np.uint8)


class BrokenPhysics(gymnasium.Wrapper):
    """CartPole whose fourth step fails; the picture is not to blame, and the film is not to be had all the same."""

    def __init__(self, task: str) -> None:
        super().__init__(gymnasium.make(task, render_mode="rgb_array"))
        self.num_steps = 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self.num_steps = 0
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.num_steps += 1
        if self.num_steps == 4:
            raise ZeroDivisionError("no mass")
        return self.env.step(action)
