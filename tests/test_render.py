"""Films of real, short runs: decoded again, and every picture held against one drawn by plain gymnasium."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import closing
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
from embodied_rl.commands.evaluate import evaluate_checkpoint, make_generator
from embodied_rl.commands.render import main, render_videos
from embodied_rl.config import SimConfig
from embodied_rl.generation.random_backend import RandomGenerator
from embodied_rl.loggers.trackers import TensorBoardLogger
from embodied_rl.media import episodes as filming_episodes
from embodied_rl.media.episodes import MAX_STEPS_SHOWN, FilmedEpisode, Selection, film
from embodied_rl.media.overlays import Overlays, annotate, parse_overlays
from embodied_rl.policies.actor_critic import build_policy
from embodied_rl.sim.instrumented import filmed
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.rendering import mujoco_backend
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.types import ActionSpec
from embodied_rl.video import BAND, GREEN, GREY, RED, add_border, border_width, fit_square, overlay
from tests.short_run import one_line_error, train_shortly

pytestmark = pytest.mark.usefixtures("forked")

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


def side_by_side(pictures: Sequence[np.ndarray]) -> np.ndarray:
    """A row of tiles with gaps of four black pixels."""
    gap = np.zeros((len(pictures[0]), 4, 3), np.uint8)
    return np.concatenate([part for picture in pictures for part in (gap, picture)][1:], axis=1)


def even(picture: np.ndarray) -> np.ndarray:
    """What a video keeps of it."""
    return picture[: len(picture) // 2 * 2, : picture.shape[1] // 2 * 2]


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
            text = f"held-out seed {seed - HELD_OUT}   step {step}   return {float(step):.2f}"  # CartPole pays 1 for each step
            pictures.append(overlay(fit_square(np.asarray(env.render()), SIZE), "CartPole-v1", text))
            if done:
                break
            with torch.no_grad():
                action = policy.act({"state": torch.as_tensor(observation)[None]}, None).action
            observation, _, terminated, truncated, _ = env.step(int(action[0, 0]))
            done = terminated or truncated
    return pictures


USUAL = Overlays(parse_overlays("default"), ActionSpec.discrete(2))


def filmed_by_us(run_dir: Path, seeds: Sequence[int], *, num_slots: int = 2, **options: Any) -> list[FilmedEpisode]:
    checkpoint = load_checkpoint(run_dir, with_learner=False)
    config = filmed(checkpoint.config.sim, SIZE)
    with EnvManager.from_config(config, EpisodeSeeds.held_out(0), num_slots=num_slots, autoreset=False) as manager:
        return film(manager, make_generator(checkpoint, manager.spec), seeds, size=SIZE, **options)


def with_text(episode: FilmedEpisode) -> np.ndarray:
    return np.stack([annotate(frame, episode, moment, USUAL) for frame, moment in zip(episode.frames, episode.moments, strict=True)])


def test_every_picture_is_the_one_drawn_by_hand(cartpole: Path) -> None:
    checkpoint = load_checkpoint(cartpole, with_learner=False)
    episodes = filmed_by_us(cartpole, range(HELD_OUT + 3, HELD_OUT + 6))
    assert [episode.seed for episode in episodes] == list(range(HELD_OUT + 3, HELD_OUT + 6))
    evaluated = evaluate_checkpoint(checkpoint, 3, seed=3).episodes
    for episode, summary in zip(episodes, evaluated, strict=True):
        expected = drawn_by_hand(cartpole, episode.seed)
        assert episode.summary is not None
        assert (episode.summary.seed, episode.summary.length, episode.summary.episode_return) == (
            summary.seed,
            summary.length,
            summary.episode_return,
        )
        assert len(episode.frames) == len(expected) == summary.length + 1
        np.testing.assert_array_equal(with_text(episode), np.stack(expected))
        assert [moment.reward for moment in episode.moments] == [0.0] + [1.0] * summary.length


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
        moments = [add_border(p[min(index, len(p) - 1)], BAND if index < len(p) - 1 else GREY) for p in by_hand]
        assert near(frame, even(side_by_side(moments))), index
    assert not near(frames[0], frames[longest - 1])
    animated, durations, loop = gif(picture)
    assert loop == 0
    # Ten a second are all kept; where nothing seems to move, one picture stays for two moments. The last one stays a second longer.
    moments = [frame for frame, milliseconds in zip(animated, durations, strict=True) for _ in range(0, milliseconds, 1000 // rate)]
    assert len(moments) == len(frames)
    assert len(animated) > longest * 3 // 4
    for shown, frame in zip(moments, frames, strict=True):
        assert near(even(shown), frame)


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
    by_hand = [drawn_by_hand(cartpole, HELD_OUT + 3 + index) for index in range(3)]
    lengths = [len(pictures) - 1 for pictures in by_hand]
    limit = max(lengths) // 2 - 1
    # The longest has more than 2 · limit steps and fewer than 4 · limit: every fourth step is shown, and each one's last.
    assert 2 * limit < max(lengths) <= 4 * limit
    assert any(length % 4 for length in lengths), "one should end between two pictures"
    assert MAX_STEPS_SHOWN == 250
    monkeypatch.setattr(filming_episodes, "MAX_STEPS_SHOWN", limit)
    episodes = filmed_by_us(cartpole, range(HELD_OUT + 3, HELD_OUT + 6))
    for episode, pictures, length in zip(episodes, by_hand, lengths, strict=True):
        steps = [moment.step for moment in episode.moments]
        assert steps == sorted({*range(0, length, 4), length})
        np.testing.assert_array_equal(with_text(episode), np.stack([pictures[step] for step in steps]))


@pytest.mark.parametrize("kind", ["best", "worst"])
def test_the_best_and_the_worst_are_chosen_and_only_their_pictures_are_held(cartpole: Path, kind: str) -> None:
    seeds = [HELD_OUT + offset for offset in (5, 4, 8, 3, 2)]  # in any order
    returns = {seed: float(len(drawn_by_hand(cartpole, seed)) - 1) for seed in seeds}
    assert len(set(returns.values())) > 3, "episodes that are all alike would say nothing"
    seen: list[int] = []
    shown = filmed_by_us(
        cartpole, seeds, selection=Selection.parse(f"{kind}:2", None, 5), on_episode=lambda summary: seen.append(summary.seed)
    )
    assert sorted(seen) == sorted(seeds)
    sign = -1 if kind == "best" else 1
    assert [episode.seed for episode in shown] == sorted(seeds, key=lambda seed: (sign * returns[seed], seed))[:2]
    for episode in shown:
        np.testing.assert_array_equal(with_text(episode), np.stack(drawn_by_hand(cartpole, episode.seed)))


def test_selected_seeds_have_their_own_file_name(cartpole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = [f"checkpoint={cartpole}", f"output={tmp_path}", "size=32", "format=gif", "seed=3"]
    main([*common, "select=best:2", "among=5"])
    main([*common, "select=random:3"])
    stem = f"CartPole-v1_step{load_checkpoint(cartpole).step:09d}"
    names = [Path(line.split(" (")[0]).name for line in capsys.readouterr().out.splitlines()]
    assert names == [f"{stem}_best.gif", f"{stem}_random.gif"]
    assert gif(tmp_path / names[0])[0][0].shape[1] == 2 * (32 + 2 * border_width(32)) + 4
    assert gif(tmp_path / names[1])[0][0].shape[1] == 3 * (32 + 2 * border_width(32)) + 2 * 4


def test_two_policies_stand_one_above_the_other_on_the_same_seeds(
    cartpole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([f"checkpoint={cartpole}", "against=random", f"output={tmp_path}", f"size={SIZE}", "num_episodes=2", "seed=3", "format=mp4"])
    (path,) = tmp_path.iterdir()
    assert path.name == f"CartPole-v1_step{load_checkpoint(cartpole).step:09d}_against_random.mp4"
    frames, _ = mp4(path)
    height, width, _ = frames[0].shape
    by_hand = [[add_border(picture, BAND) for picture in drawn_by_hand(cartpole, HELD_OUT + 3 + index)] for index in range(2)]
    tall = len(by_hand[0][0])
    band = (height - 2 * tall) // 2
    assert width == 2 * (SIZE + 2 * border_width(SIZE)) + 4
    assert 10 < band < 40
    random_start = [pictures[0] for pictures in by_hand]
    # Both begin alike, for the seeds are the same; then the upper row is the policy's own.
    for row in (0, 1):
        y = (row + 1) * band + row * tall
        assert near(frames[0][y : y + tall], side_by_side(random_start))
    for index in range(1, min(len(pictures) for pictures in by_hand) - 1):
        assert near(frames[index][band : band + tall], side_by_side([pictures[index] for pictures in by_hand]))
    assert not near(frames[-1][:band], frames[-1][band + tall : 2 * band + tall]), "each row has its own colour"


def test_values_are_the_critics(cartpole: Path) -> None:
    from embodied_rl.commands.evaluate import make_policy, value_estimate

    checkpoint = load_checkpoint(cartpole, with_learner=False)
    with EnvManager.from_config(filmed(checkpoint.config.sim, SIZE), EpisodeSeeds.held_out(0), num_slots=1, autoreset=False) as manager:
        policy = make_policy(checkpoint, manager.spec)
        generator = make_generator(checkpoint, manager.spec)
        (episode,) = film(manager, generator, [HELD_OUT + 3], size=32, estimate=value_estimate(policy))
    with gymnasium.make("CartPole-v1", max_episode_steps=60) as env:
        observation, _ = env.reset(seed=HELD_OUT + 3)
        for moment, following in zip(episode.moments, [*episode.moments[1:], None], strict=True):
            with torch.no_grad():
                tensors = {"state": torch.as_tensor(observation)[None]}
                assert moment.value == pytest.approx(float(policy.critic(policy.features(tensors))), abs=1e-5)
            if following is not None:
                assert following.action is not None
                observation, *_ = env.step(int(following.action[0]))


def test_simulators_that_step_together_are_filmed_to_the_end_of_the_last() -> None:
    config = SimConfig("vector", "tests.render_toys:vector_cartpole", pipeline_groups=1, num_workers=1)
    seeds = range(HELD_OUT, HELD_OUT + 5)
    with EnvManager.from_config(filmed(config, 32), EpisodeSeeds.held_out(0), num_slots=2, autoreset=False) as manager:
        assert manager.spec.steps_together
        episodes = film(manager, RandomGenerator(manager.spec), seeds, size=32)  # without noise: always to the left
    with gymnasium.make("CartPole-v1") as env:
        for episode, seed in zip(episodes, seeds, strict=True):
            env.reset(seed=seed)
            length = 1
            while not env.step(0)[2]:
                length += 1
            assert (episode.finished.seed, episode.finished.length, len(episode.frames)) == (seed, length, length + 1)


@pytest.mark.parametrize("images", ["64", "none"])
def test_recorded_episodes_are_shown_with_their_pictures_or_replayed(
    tmp_path: Path, images: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from embodied_rl.commands.record import main as record
    from embodied_rl.episodes.reader import open_recording

    folder = tmp_path / "recordings" / "cartpole"
    words = [
        "sim=cartpole",
        "policy=random",
        "num_episodes=4",
        f"output={folder}",
        f"images={images}",
        "sim.num_slots=2",
        "sim.num_workers=1",
    ]
    record(words)
    capsys.readouterr()
    for word in ("domain=arm", "policy=random"):
        assert f"{word} cannot be used with recording=" in one_line_error(main, [f"recording={folder}", word], capsys)
    assert "tokenizer= is for sessions" in one_line_error(main, [f"recording={folder}", "tokenizer=models"], capsys)
    main([f"recording={folder}", "select=best:1", "format=mp4", f"size={SIZE}"])
    path = Path(capsys.readouterr().out.splitlines()[-1].split(" (")[0])
    assert path == tmp_path / "recordings" / "videos" / "CartPole-v1_cartpole_best.mp4"
    frames, rate = mp4(path)
    with open_recording(folder) as recording:
        number = int(np.argmax(recording.returns))
        episode = recording.episode(number)
        length, seed = episode.num_steps, episode.seed
        assert len(frames) == length + 1 + rate
        # Played again in plain gymnasium: the same actions from the same seed.
        with gymnasium.make("CartPole-v1", render_mode="rgb_array") as env:
            env.reset(seed=seed)
            for step in range(length + 1):
                square = fit_square(np.asarray(env.render()), SIZE)
                shown = overlay(square, "CartPole-v1", f"seed {seed}   step {step}   return {float(step):.2f}")
                expected = add_border(shown, GREY if step == length else BAND)
                # Pictures of 64 pixels, stored as mp4 and drawn larger, are blurred.
                assert np.abs(frames[step].astype(int) - even(expected)).mean() < (12 if images == "64" else 4), step
                if step < length:
                    env.step(int(episode.action[step, 0]))


def test_a_film_goes_into_the_logs_of_its_run(cartpole: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    pytest.importorskip("wandb")
    run, films = tmp_path / "run", tmp_path / "films"
    shutil.copytree(cartpole, run, symlinks=True)
    with closing(TensorBoardLogger(run)) as before:
        before.log(10, {"episode/return": 2.0})
    main([f"checkpoint={run}", f"output={films}", "size=32", "num_episodes=1", "format=mp4", "log=tensorboard,wandb"])
    (movie,) = films.iterdir()
    (kept,) = run.glob("wandb/offline-run-*/files/media/videos/*.mp4")
    assert kept.read_bytes() == movie.read_bytes()
    reader = EventAccumulator(str(run / "tensorboard"))
    reader.Reload()
    (event,) = reader.Images("video")
    assert event.step == load_checkpoint(run).step
    assert [scalar.step for scalar in reader.Scalars("episode/return")] == [10], "the run's own curves are there too"


@pytest.mark.skipif(mujoco_backend() is None, reason="MuJoCo cannot draw off-screen here")
def test_pixels_become_a_film_with_the_badge_of_success(tmp_path: Path) -> None:
    overrides = ["sim=pixel_reach", "policy=cnn", "policy.hidden_sizes=[16]", "sim.max_episode_steps=30", "total_steps=256"]
    checkpoint = load_checkpoint(train_shortly(tmp_path / "run", *overrides), with_learner=False)
    (path,) = render_videos(checkpoint, tmp_path / "films", num_episodes=6, size=64, seed=20, formats=("mp4",), policy="random")
    frames, rate = mp4(path)
    wide = 64 + 2 * border_width(64)
    assert frames[0].shape[1] == 3 * wide + 2 * 4  # six tiles: three in a row
    with EnvManager.from_config(filmed(checkpoint.config.sim, 64), EpisodeSeeds.held_out(20), num_slots=4, autoreset=False) as manager:
        generator = make_generator(checkpoint, manager.spec, policy="random", seed=20)
        episodes = film(manager, generator, range(HELD_OUT + 20, HELD_OUT + 26), size=64)
    assert rate == min(20, max(5, max(len(episode.frames) for episode in episodes) // 2))
    outcomes = [episode.summary.success_once for episode in episodes if episode.summary is not None]
    assert len(outcomes) == 6
    assert 0 < sum(outcomes) < 6, "seeds should show both outcomes, or this test tells half"
    for index, success in enumerate(outcomes):
        tall = len(annotate(episodes[index].frames[-1], episodes[index], episodes[index].moments[-1], USUAL)) + wide - 64
        y, x = index // 3 * (tall + 4), index % 3 * (wide + 4)
        last = frames[-1][y : y + tall, x : x + wide]
        assert frames[0][y : y + tall, x : x + wide].std() > 20, "a picture of nothing"
        corner = last[-2:, :].reshape(-1, 3).mean(axis=0)
        assert np.abs(corner - (GREEN if success else RED)).max() < 60  # the codec blurs a border of two pixels
        # The badge, left of the border and of the last letter.
        badge = annotate(episodes[index].frames[-1], episodes[index], episodes[index].moments[-1], USUAL)[0, -1]
        assert (np.abs(badge.astype(int) - GREEN).max() == 0) == success


def test_a_task_without_pictures_is_one_line_and_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train_shortly(tmp_path / "run", "sim=custom", "sim.target=tests.sim.toy:NoOpSim", "sim.max_episode_steps=8")
    capsys.readouterr()
    line = one_line_error(main, [f"checkpoint={run}", f"output={tmp_path / 'films'}"], capsys)
    assert "Task 'no-op' has no pictures" in line
    assert not (tmp_path / "films").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["format=avi"], "format=avi: 'avi' is not a choice. Known: gif, mp4."),
        (["format=mp4,giff"], "'giff' is not a choice. Did you mean 'gif'?"),
        (["format=,"], "is not a choice. Known: gif, mp4."),
        (["size=8"], "size must be between 16 and 2,048, got 8"),
        (["fps=0"], "fps must be between 1 and 120, got 0"),
        (["num_episodes=65"], "num_episodes must be between 1 and 64, got 65"),
        (["seed=-1"], "seed must be between 0"),
        (["episodes=3"], "Argument 'episodes' is not known. Did you mean 'num_episodes'?"),
        (["sim=pendulum", "num_episodes=1"], "was made for another simulator"),
        (["output=FILE", "num_episodes=1", "size=32"], "cannot write"),
        ([], "Nothing to film: give checkpoint=… (for example the folder of a run) or recording=…"),
        (["select=bets:2"], "select=bets:2: 'bets' is not a choice. Did you mean 'best'?"),
        (["select=best:" + "9" * 5000], "is not a number of episodes; write for example select=best:4"),
        (["select=best:two"], "'two' is not a number of episodes; write for example select=best:4"),
        (["select=worst:9", "among=5"], "select=worst:9: between 1 and among=5 episodes can be shown"),
        (["select=first:65"], "at most 64 episodes can be shown"),
        (["among=2000"], "among must be between 1 and 1,024, got 2000"),
        (["overlay=task,valeu"], "overlay=task,valeu: 'valeu' is not a choice. Did you mean 'value'?"),
        (["cameras=default,default"], "list up to 8 different names"),
        (["cameras=top", "num_episodes=1"], "Task 'CartPole-v1' has no camera 'top': it has only one view: set cameras=default"),
        (["log=tensorbord"], "log=tensorbord: 'tensorbord' is not a choice. Did you mean 'tensorboard'?"),
        (["recording=nowhere"], " cannot be used with recording="),
        (["tokenizer=models"], "tokenizer= is for recording=…"),
        (["policy=random", "against=random"], "against=random is the same policy; give another one"),
        (["against=nowhere"], "Checkpoint 'nowhere' does not exist"),
        (["sim.target=tests.render_toys:BrokenScreen", "num_episodes=1"], "cannot be drawn on this machine (RuntimeError: no driver)"),
        (["sim.target=tests.render_toys:DyingDriver", "num_episodes=1"], "Filming failed: simulator worker 0 died (killed by SIGSEGV)"),
        (["sim.target=tests.render_toys:BrokenPhysics", "num_episodes=1"], "worker 0 raised an exception (ZeroDivisionError: no mass)"),
    ],
)
def test_a_mistake_is_one_line(
    cartpole: Path, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    words = [word.replace("FILE", str(tmp_path / "file" / "films")) for word in arguments]
    assert message in one_line_error(main, [f"checkpoint={cartpole}", *words] if words else [], capsys)


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_played(
    cartpole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("embodied_rl.commands.render.film_players", lambda *_, **__: pytest.fail("it was played"))
    (tmp_path / "file").write_text("in the way")
    assert "cannot write" in one_line_error(main, [f"checkpoint={cartpole}", f"output={tmp_path / 'file' / 'films'}"], capsys)
