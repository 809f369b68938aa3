"""LeRobot's newest release: its data sets and ours, its policies in our simulators, and ours in its evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from embodied_rl.episodes.folder import validate
from embodied_rl.episodes.formats import write_foreign
from embodied_rl.episodes.reader import open_recording
from tests.episodes.formats.samples import info_of, record
from tests.episodes.formats.test_lerobot import SPEC, smooth_episode
from tests.neighbours.lerobot_here import BEFORE, lerobot
from tests.neighbours.overlay import run_with

pytestmark = pytest.mark.slow

READ = (
    BEFORE
    + """
import json, sys
import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
data = LeRobotDataset("local/ours", root=sys.argv[1], video_backend="pyav")
rows = [data[index] for index in range(len(data))]
np.savez(sys.argv[2], **{key: np.stack([np.asarray(row[key]) for row in rows]) for key in rows[0] if key != "task"})
stats = {key: {name: np.asarray(value).tolist() for name, value in part.items()} for key, part in data.meta.stats.items()}
episodes = [{key: data.meta.episodes[number][key] for key in ("length", "tasks")} for number in range(data.num_episodes)]
print(json.dumps({"tasks": [row["task"] for row in rows], "fps": data.fps, "stats": stats, "episodes": episodes}))
"""
)


@pytest.mark.parametrize("video", ["mp4", "png"])
def test_lerobot_reads_ours(video: str, tmp_path: Path) -> None:
    episodes = [smooth_episode(0, 5, ends="truncated"), smooth_episode(1, 7, instruction="the other"), smooth_episode(2, 3)]
    with record(tmp_path / "native", info_of(SPEC), episodes) as source:
        write_foreign(source, tmp_path / "there", "lerobot", video=video)
    told = json.loads(run_with(lerobot(), READ, str(tmp_path / "there"), str(tmp_path / "rows.npz")).splitlines()[-1])
    rows = np.load(tmp_path / "rows.npz")
    assert told["fps"] == 20
    assert told["episodes"] == [{"length": each.num_steps, "tasks": [each.instruction or "move it"]} for each in episodes]
    assert told["tasks"] == [each.instruction or "move it" for each in episodes for _ in range(each.num_steps)]
    states = np.concatenate([each.observation["state"][:-1] for each in episodes])
    np.testing.assert_array_equal(rows["action"], np.concatenate([each.action for each in episodes]))
    np.testing.assert_array_equal(rows["observation.state"], states)
    np.testing.assert_array_equal(rows["next.reward"].ravel(), np.concatenate([each.reward for each in episodes]).astype(np.float32))
    np.testing.assert_array_equal(rows["episode_index"], np.repeat(np.arange(3), [5, 7, 3]))
    pictures = np.concatenate([each.observation["rgb"][:-1] for each in episodes])
    found = 255 * rows["observation.images.rgb"].transpose(0, 2, 3, 1)[:, :33]
    assert np.abs(found - pictures).mean(axis=(1, 2, 3)).max() < (1e-3 if video == "png" else 4)
    np.testing.assert_allclose(told["stats"]["observation.state"]["mean"], states.mean(0), rtol=1e-5)
    np.testing.assert_allclose(told["stats"]["observation.state"]["std"], states.std(0), rtol=1e-5)


WRITE = (
    BEFORE
    + """
import sys
import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
features = {
    "observation.state": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
    "observation.images.top": {"dtype": sys.argv[2], "shape": (32, 48, 3), "names": ["height", "width", "channels"]},
    "action": {"dtype": "float32", "shape": (2,), "names": None},
    "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
    "next.done": {"dtype": "bool", "shape": (1,), "names": None},
}
data = LeRobotDataset.create("local/theirs", fps=10, features=features, root=sys.argv[1], use_videos=sys.argv[2] == "video")
for episode, length in enumerate((4, 6)):
    for step in range(length):
        data.add_frame({
            "observation.state": np.array([episode, step], np.float32), "action": np.array([step, -step], np.float32) / 8,
            "observation.images.top": np.full((32, 48, 3), 20 * step + 60 * episode, np.uint8),
            "next.reward": np.array([step + 1], np.float32), "next.done": np.array([step == length - 1]),
            "task": ["sort", "stack"][episode],
        })
    data.save_episode()
data.finalize()
"""
)


@pytest.mark.parametrize("kind", ["video", "image"])
def test_ours_reads_what_lerobot_wrote(kind: str, tmp_path: Path) -> None:
    run_with(lerobot(), WRITE, str(tmp_path / "theirs"), kind)
    with open_recording(tmp_path / "theirs") as recording:
        assert validate(recording) == []
        assert recording.lengths.tolist() == [4, 6]
        assert recording.spec.control_hz == 10
        assert recording.returns.tolist() == [1 + 2 + 3 + 4, 1 + 2 + 3 + 4 + 5 + 6]
        for number, episode in enumerate(recording):
            assert episode.instruction == ["sort", "stack"][number]
            steps = np.arange(episode.num_steps)
            np.testing.assert_array_equal(episode.observation["state"][:-1], np.stack([np.full_like(steps, number), steps], 1))
            np.testing.assert_array_equal(episode.action, np.stack([steps, -steps], 1).astype(np.float32) / 8)
            assert episode.terminated.tolist() == [False] * (len(steps) - 1) + [True]
            grey = np.asarray(episode.observation["rgb"])[:-1].astype(int)
            assert np.abs(grey - (20 * steps + 60 * number)[:, None, None, None]).max() <= (4 if kind == "video" else 0)


MAKE = (
    BEFORE
    + """
import sys
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.factory import get_policy_class, make_policy_config, make_pre_post_processors
torch.manual_seed(0)
kind, folder = sys.argv[1:]
small = {
    "act": {"dim_model": 32, "n_heads": 2, "dim_feedforward": 32, "n_encoder_layers": 1, "n_vae_encoder_layers": 1, "latent_dim": 4,
            "chunk_size": 6, "n_action_steps": 3, "pretrained_backbone_weights": None},
    "diffusion": {"n_obs_steps": 1, "horizon": 8, "n_action_steps": 3, "down_dims": (16, 32), "n_groups": 4,
                  "spatial_softmax_num_keypoints": 4, "diffusion_step_embed_dim": 16, "num_inference_steps": 2,
                  "pretrained_backbone_weights": None},
}[kind]
read = {"observation.image": PolicyFeature(FeatureType.VISUAL, (3, 96, 96)), "observation.state": PolicyFeature(FeatureType.STATE, (2,))}
config = make_policy_config(kind, input_features=read, output_features={"action": PolicyFeature(FeatureType.ACTION, (2,))}, device="cpu",
                            push_to_hub=False, **small)
ones = torch.ones(2)
pictures = {"mean": torch.full((3, 1, 1), 0.5), "std": torch.full((3, 1, 1), 0.25), "min": torch.zeros(3, 1, 1), "max": torch.ones(3, 1, 1)}
vector = {"mean": 256 * ones, "std": 90 * ones, "min": 0 * ones, "max": 512 * ones}
stats = {"action": vector, "observation.state": vector, "observation.image": pictures}
policy = get_policy_class(kind)(config)
for part in (policy, *make_pre_post_processors(config, dataset_stats=stats)):
    part.save_pretrained(folder)
"""
)

PLAY = BEFORE + "import sys\nfrom embodied_rl.commands.evaluate import main\nif __name__ == '__main__':\n    main(sys.argv[1:])\n"
TARGET = "embodied_rl.policies.lerobot:LeRobotPolicy"
PUSHT = ("sim=pusht", "sim.kwargs.observation=pixels_agent_pos", "sim.max_episode_steps=9", "sim.num_slots=2", "sim.num_workers=1")

THEIRS = (
    BEFORE
    + """
import json, sys
import gymnasium, gym_pusht, numpy as np
from lerobot.configs.policies import PreTrainedConfig
from lerobot.envs.utils import preprocess_observation
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
folder, *seeds = sys.argv[1:]
config = PreTrainedConfig.from_pretrained(folder)
policy = get_policy_class(config.type).from_pretrained(folder)
before, after = make_pre_post_processors(config, pretrained_path=folder)
returns = []
for seed in map(int, seeds):
    env = gymnasium.make("gym_pusht/PushT-v0", obs_type="pixels_agent_pos", render_mode="rgb_array")
    observation, total = env.reset(seed=seed)[0], 0.0
    policy.reset()
    for _ in range(9):
        rows = {key: np.asarray(value)[None] for key, value in observation.items()}
        action = after(policy.select_action(before(preprocess_observation(rows))))
        observation, reward, *_ = env.step(action[0].numpy())
        total += reward
    returns.append(total)
print(json.dumps(returns))
"""
)


def test_an_act_policy_plays_here_as_in_its_own_loop(tmp_path: Path) -> None:
    """The same seeds, the same actions: the returns of our evaluation are those of LeRobot's steps in plain gym-pusht."""
    run_with(lerobot(), MAKE, "act", str(tmp_path / "act"))
    words = (*PUSHT, "policy=custom", f"policy.target={TARGET}", f"policy.options.path={tmp_path / 'act'}", "policy.chunk=3")
    run_with(lerobot(), PLAY, *words, "num_episodes=2", f"output={tmp_path / 'played.json'}", timeout_s=500)
    played = {row["seed"]: row["return"] for row in json.loads((tmp_path / "played.json").read_text())["episodes"]}
    theirs = json.loads(run_with(lerobot(), THEIRS, str(tmp_path / "act"), *map(str, played)).splitlines()[-1])
    np.testing.assert_allclose(list(played.values()), theirs, rtol=1e-4)


def test_a_diffusion_policy_plays_here(tmp_path: Path) -> None:
    run_with(lerobot(), MAKE, "diffusion", str(tmp_path / "diffusion"))
    words = (*PUSHT, "policy=custom", f"policy.target={TARGET}", f"policy.options.path={tmp_path / 'diffusion'}", "policy.chunk=3")
    run_with(lerobot(), PLAY, *words, "num_episodes=2", f"output={tmp_path / 'played.json'}", timeout_s=500)
    episodes = json.loads((tmp_path / "played.json").read_text())["episodes"]
    assert [row["length"] for row in episodes] == [9, 9]
    assert all(np.isfinite(row["return"]) for row in episodes)


EVALUATE = BEFORE + "from lerobot.scripts.lerobot_eval import main\nif __name__ == '__main__':\n    main()\n"

OURS = """
import json, sys
import gymnasium, gym_pusht, numpy as np
import embodied_rl
policy = embodied_rl.load_policy(sys.argv[1])
returns = []
for seed in map(int, sys.argv[2:]):
    env = gymnasium.make("gym_pusht/PushT-v0", obs_type="environment_state_agent_pos", max_episode_steps=7)
    observation, total, over = env.reset(seed=seed)[0], 0.0, False
    while not over:
        given = {key: np.asarray(value, np.float32) for key, value in observation.items()}
        observation, reward, terminated, truncated, _ = env.step(policy.predict(given))
        total, over = total + reward, terminated or truncated
    returns.append(total)
print(json.dumps(returns))
"""


def test_a_policy_of_ours_plays_in_lerobots_evaluation(tmp_path: Path) -> None:
    """``lerobot-eval`` on gym-pusht: the same returns as the checkpoint's actions by hand."""
    train = "from embodied_rl.commands.train import main\nif __name__ == '__main__':\n    main()\n"
    words = [
        *("sim=pusht", "sim.kwargs.observation=keypoints", "sim.max_episode_steps=8", "sim.num_slots=2", "sim.num_workers=1"),
        *(
            "policy=mixed",
            "total_steps=64",
            "algorithm.rollout_steps=16",
            "algorithm.minibatch_size=32",
            "evaluation.num_episodes=2",
            "video.enabled=no",
            "logger=quiet",
        ),
    ]
    run_with(None, train, *words, f"run_dir={tmp_path / 'run'}", timeout_s=500)
    arguments = [
        *("--policy.discover_packages_path=embodied_rl.lerobot", "--policy.type=embodied_rl", f"--policy.checkpoint={tmp_path / 'run'}"),
        *("--policy.device=cpu", "--env.type=pusht", "--env.obs_type=environment_state_agent_pos", "--env.episode_length=7", "--seed=3"),
        *("--eval.n_episodes=2", "--eval.batch_size=2", "--eval.use_async_envs=false", f"--output_dir={tmp_path / 'eval'}"),
    ]
    run_with(lerobot(), EVALUATE, *arguments, timeout_s=500)
    told = json.loads((tmp_path / "eval" / "eval_info.json").read_text())
    ours = json.loads(run_with(None, OURS, str(tmp_path / "run"), "3", "4").splitlines()[-1])
    np.testing.assert_allclose(told["per_task"][0]["metrics"]["sum_rewards"], ours, rtol=1e-4)
