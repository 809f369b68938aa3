"""Other libraries' trainers on our worker processes: each learns CartPole, or at least steps and updates as it does with its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from embodied_rl.errors import UserError
from embodied_rl.sim.vector import make_vec_env
from tests.neighbours.overlay import overlay, run_with

pytestmark = pytest.mark.slow
RANDOM_CARTPOLE = 30.0
"""Well above the mean length of an episode under random actions, 22."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Networks this small only wait for each other's threads, the more so where tests run side by side."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_stable_baselines3_learns() -> None:
    pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")
    from stable_baselines3 import PPO
    from stable_baselines3.common.evaluation import evaluate_policy

    from embodied_rl.sim.sb3 import SB3VecEnv

    with closing(SB3VecEnv(make_vec_env("cartpole", 8, num_workers=2))) as train:
        model = PPO("MlpPolicy", train, n_steps=64, batch_size=128, n_epochs=4, gamma=0.98, learning_rate=1e-3, seed=1)
        model.learn(12_000)
        assert len(model.ep_info_buffer) > 50  # their own statistics come from our infos
        returns, lengths = evaluate_policy(model, train, n_eval_episodes=8, return_episode_rewards=True)
    assert np.mean(returns) > 3 * RANDOM_CARTPOLE
    assert returns == lengths  # CartPole pays 1 a step


def test_stable_baselines3s_own_checks() -> None:
    """An end by CartPole's limit is no failure: SB3 bootstraps from ``terminal_observation`` where ``TimeLimit.truncated`` says so."""
    pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import VecNormalize

    from embodied_rl.sim.sb3 import SB3VecEnv

    with closing(SB3VecEnv(make_vec_env("pendulum", 2, num_workers=1))) as envs:
        assert envs.env_is_wrapped(Monitor) == [True, True]
        envs.seed(5)
        first = envs.reset()
        envs.seed(5)
        np.testing.assert_array_equal(envs.reset(), first)
        total = np.zeros(2)
        for _ in range(200):
            _, reward, done, infos = envs.step(np.zeros((2, 1), np.float32))
            total += reward
        assert done.all()
        for slot, info in enumerate(infos):
            assert info["TimeLimit.truncated"]
            assert info["episode"] == {"r": pytest.approx(total[slot], rel=1e-5), "l": 200}
            assert info["terminal_observation"] in envs.observation_space
        assert np.isfinite(VecNormalize(envs).reset()).all()
        with pytest.raises(UserError, match="cannot be set"):
            envs.set_attr("g", 1.0)
    with closing(make_vec_env("cartpole", 1, autoreset_mode=AutoresetMode.NEXT_STEP)) as other, pytest.raises(UserError, match="SAME_STEP"):
        SB3VecEnv(other)


def test_a_loop_in_cleanrls_style_learns() -> None:
    """One file, as CleanRL writes PPO: gymnasium's own statistics around a vector environment, ``next_done`` carried by hand."""
    torch = pytest.importorskip("torch")
    from gymnasium.wrappers.vector import RecordEpisodeStatistics

    torch.manual_seed(1)
    layers = [torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3)]
    agent = torch.nn.Sequential(*layers)  # two logits and a value
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3)
    returns: list[float] = []
    with closing(RecordEpisodeStatistics(make_vec_env("cartpole", 8, num_workers=2))) as envs:
        assert isinstance(envs.metadata["autoreset_mode"], AutoresetMode)
        shown, _ = envs.reset(seed=1)
        for _ in range(25):
            rows = []
            for _ in range(64):
                with torch.no_grad():
                    out = agent(torch.as_tensor(shown))
                chosen = torch.distributions.Categorical(logits=out[:, :2])
                action = chosen.sample()
                following, reward, terminated, truncated, infos = envs.step(action.numpy())
                rows.append((torch.as_tensor(shown), action, chosen.log_prob(action), out[:, 2], reward, terminated | truncated))
                shown = following
                returns += infos["episode"]["r"][infos["_episode"]].tolist() if "episode" in infos else []
            with torch.no_grad():
                value = agent(torch.as_tensor(shown))[:, 2].numpy()
            advantage, gae = [], np.zeros(8)
            for _, _, _, old, reward, done in reversed(rows):
                delta = reward + 0.98 * value * ~done - old.numpy()
                gae = delta + 0.98 * 0.95 * ~done * gae
                advantage.append(gae)
                value = old.numpy()
            advantages = torch.as_tensor(np.stack(advantage[::-1]).ravel(), dtype=torch.float32)
            seen, acted, log_prob, old = (torch.cat([row[i] for row in rows]) for i in range(4))
            target = advantages + old
            for _ in range(4):
                for part in torch.randperm(len(acted)).split(128):
                    out = agent(seen[part])
                    ratio = (torch.distributions.Categorical(logits=out[:, :2]).log_prob(acted[part]) - log_prob[part]).exp()
                    weight = (advantages[part] - advantages[part].mean()) / (advantages[part].std() + 1e-8)
                    loss = (
                        torch.max(-weight * ratio, -weight * ratio.clamp(0.8, 1.2)).mean() + 0.5 * (out[:, 2] - target[part]).pow(2).mean()
                    )
                    optimizer.zero_grad()
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                    optimizer.step()
    assert np.mean(returns[:20]) < RANDOM_CARTPOLE < np.mean(returns[-20:]) / 3


TORCHRL = ("torchrl==0.14.1", "tensordict==0.15.3", "pyvers==0.2.3", "orjson==3.13.0")
TORCHRL_PROGRAM = """
import json, torch
from torchrl.envs import GymWrapper, check_env_specs
from torchrl.collectors import Collector
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from tensordict.nn import TensorDictModule
from embodied_rl.sim.vector import make_env

def main():
    torch.manual_seed(0)
    env = GymWrapper(make_env("cartpole"), categorical_action_encoding=True)
    check_env_specs(env)
    body = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
    actor = ProbabilisticActor(TensorDictModule(body, ["observation"], ["logits"]), in_keys=["logits"], spec=env.action_spec,
                               distribution_class=torch.distributions.Categorical, return_log_prob=True)
    value = ValueOperator(torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)), in_keys=["observation"])
    loss, gae = ClipPPOLoss(actor, value, normalize_advantage=True), GAE(gamma=0.98, lmbda=0.95, value_network=value)
    optimizer = torch.optim.Adam(loss.parameters(), lr=3e-3)
    lengths, steps = [], 0
    for data in Collector(env, actor, frames_per_batch=512, total_frames=6144, auto_register_policy_transforms=False):
        for done in data["next", "done"].flatten():
            steps += 1
            if done:
                lengths.append(steps)
                steps = 0
        with torch.no_grad():
            gae(data)
        for _ in range(6):
            for part in torch.randperm(512).split(128):
                told = loss(data.reshape(-1)[part])
                total = told["loss_objective"] + told["loss_critic"] + told["loss_entropy"]
                optimizer.zero_grad(); total.backward(); optimizer.step()
    env.close()
    print(json.dumps(lengths))

if __name__ == "__main__":
    main()
"""


def test_torchrls_gym_wrapper_learns() -> None:
    lengths = json.loads(run_with(overlay(*TORCHRL), TORCHRL_PROGRAM).splitlines()[-1])
    assert np.mean(lengths[:20]) < 1.3 * RANDOM_CARTPOLE
    assert np.mean(lengths[-8:]) > 2 * RANDOM_CARTPOLE


TIANSHOU = ("tianshou==2.0.1", "sensai-utils==1.6.0", "deepdiff", "orderly-set", "cachebox", "overrides")
TIANSHOU_PROGRAM = """
import json, torch
from tianshou.algorithm import PPO
from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.utils.net.common import Net
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic
from embodied_rl.sim.vector import make_env

def main():
    torch.manual_seed(0)
    envs = DummyVectorEnv([lambda: make_env("cartpole") for _ in range(4)])
    space = envs.action_space[0]
    actor = DiscreteActor(preprocess_net=Net(state_shape=(4,), hidden_sizes=(64,)), action_shape=2)
    critic = DiscreteCritic(preprocess_net=Net(state_shape=(4,), hidden_sizes=(64,)))
    policy = ProbabilisticActorPolicy(actor=actor, dist_fn=torch.distributions.Categorical, action_space=space, action_scaling=False)
    ppo = PPO(policy=policy, critic=critic, optim=AdamOptimizerFactory(lr=3e-3), gamma=0.98)
    collector = Collector(ppo, envs, VectorReplayBuffer(2048, 4))
    collector.reset()
    means = []
    for _ in range(10):
        told = collector.collect(n_step=512)
        if told.n_collected_episodes:
            means.append(float(told.returns.mean()))
        with torch.enable_grad():
            policy.train()
            from tianshou.utils.torch_utils import policy_within_training_step
            with policy_within_training_step(policy):
                ppo.update(buffer=collector.buffer, batch_size=128, repeat=6)
        collector.reset_buffer(keep_statistics=True)
    envs.close()
    print(json.dumps(means))

if __name__ == "__main__":
    main()
"""


def test_tianshou_learns() -> None:
    means = json.loads(run_with(overlay(*TIANSHOU), TIANSHOU_PROGRAM).splitlines()[-1])
    assert means[0] < 1.3 * RANDOM_CARTPOLE
    assert max(means[-3:]) > 2 * RANDOM_CARTPOLE
