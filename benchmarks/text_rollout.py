"""Language agents in environments of long-tailed latency: every episode moves on by itself, against all of them turn by turn.

``python benchmarks/text_rollout.py``: real processes, collector and group queue; what an environment waits for (a compiler, a web page) and
what a GPU would compute is slept. A batch is complete when all its groups are; no weights are published meanwhile (staleness 0).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tables import provenance, text_table

from embodied_rl.agents.agent import Agent
from embodied_rl.config import AgentConfig, GroupsConfig
from embodied_rl.generation.tokens import Completion, RandomTokens
from embodied_rl.rollout.agent_collector import AgentCollector
from embodied_rl.rollout.domains import DomainMixture
from embodied_rl.rollout.groups import GroupQueue
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.manager import EnvManager
from embodied_rl.types import ActionSpec, SimSpec, StepBuffers, VariableSpec

WORDS = tuple("abcdefgh")
GROUPS, GROUP_SIZE = 4, 4
STOP = 1


def latency_s(seed: int, words: Sequence[str], mean_s: float, sigma: float) -> float:
    """Of a step: lognormal with this mean. A function of the episode's seed and of what was answered, so that every side waits as long for
    the same member of the same group, however it is scheduled."""
    key = [seed % 2**32, seed >> 32, *(1 + WORDS.index(word) for word in words)]  # zeros at the end would say nothing
    normal = float(np.random.default_rng(key).standard_normal())
    return mean_s * float(np.exp(sigma * normal - 0.5 * sigma**2))


class WaitingGame(SimEnv):
    """Takes `turns` words; each step waits. Implements `embodied_rl.sim.env.SimEnv`."""

    def __init__(self, num_envs: int, turns: int, mean_s: float, sigma: float) -> None:
        self._turns, self._mean_s, self._sigma = turns, mean_s, sigma
        self._seeds, self._words = [0] * num_envs, [[""]] * num_envs
        self.spec = SimSpec("waiting", {"text": VariableSpec("text", 64)}, ActionSpec.text(64))

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        for env_id, seed in zip(env_ids, seeds, strict=True):
            self._seeds[env_id], self._words[env_id] = int(seed), []
            out.observation["text"][env_id] = "?"

    def step(self, env_ids: Sequence[int], actions: Sequence[str], out: StepBuffers) -> None:
        for env_id, action in zip(env_ids, actions, strict=True):
            words = self._words[env_id]
            words.append(action)
            time.sleep(latency_s(self._seeds[env_id], words, self._mean_s, self._sigma))
            out.observation["text"][env_id] = "?"
            out.reward[env_id] = 1.0
            out.terminated[env_id] = len(words) == self._turns
            out.truncated[env_id] = out.success[env_id] = False

    def render(self, env_id: int) -> np.ndarray:
        return np.zeros((2, 2, 3), np.uint8)

    def close(self) -> None:
        pass


class Letters:
    """A token is a character; 1 ends an answer."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> np.ndarray:
        return np.array([ord(letter) for letter in text], np.int64)

    def decode(self, token_ids: np.ndarray | Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(int(token)) for token in token_ids if int(token) != STOP)

    def chat_text(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        return "".join(str(message["content"]) for message in messages)

    def stop_ids(self, *tokens: str) -> tuple[int, ...]:
        return (STOP,)


class SleepingTokens(RandomTokens):
    """A word by chance; a batch of n takes base_s + n · per_row_s, as decoding does, which mostly waits for the weights."""

    def __init__(self, base_s: float, per_row_s: float) -> None:
        super().__init__(choices=[[ord(word), STOP] for word in WORDS])
        self._base_s, self._per_row_s = base_s, per_row_s

    def poll(self, min_ready: int = 1, timeout_s: float | None = None) -> list[Completion]:
        if self.num_in_flight:
            time.sleep(self._base_s + self._per_row_s * self.num_in_flight)
        return super().poll(min_ready, timeout_s)


@dataclass(frozen=True)
class Side:
    name: str
    min_ready: int | None
    redundancy: int = 0


SIDES = (
    Side("turn by turn", None),
    Side("turn by turn, redundant", None, 1),
    Side("episode by episode", 1),
    Side("episode by episode, redundant", 1, 1),
)


def batch_times(manager: EnvManager, side: Side, batches: int, decode: tuple[float, float]) -> list[float]:
    """Seconds of each batch."""
    config = AgentConfig(
        strategy="memory", last_turns=0, chat=False, template="{observation}", answer="word", actions=WORDS, max_new_tokens=2
    )
    agent = Agent(config, Letters(), instruction=None, max_context=16)
    settings = GroupsConfig(group_size=GROUP_SIZE, groups_per_step=GROUPS, redundancy=side.redundancy)
    queue = GroupQueue(settings, seed=1, domains=DomainMixture.single("waiting"))
    collector = AgentCollector(manager, agent, SleepingTokens(*decode), queue, seed=1, min_ready=side.min_ready)
    collector.restart(queue)
    times = []
    for version in range(batches):
        started = time.perf_counter()
        groups = collector.next_groups(version)
        times.append(time.perf_counter() - started)
        assert sum(group.num_episodes for group in groups) == GROUPS * GROUP_SIZE
        collector.backend.load_weights(version + 1, ())
        queue.published(version + 1)
    assert queue.counts().add_up
    assert queue.episode_counts().add_up
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--mean-ms", type=float, default=80.0, help="that an environment's step waits")
    parser.add_argument("--sigma", type=float, nargs="+", default=[0.25, 0.75, 1.25], help="of the logarithm of the waits")
    parser.add_argument("--decode-ms", type=float, nargs=2, default=[15.0, 0.3], metavar=("BASE", "PER_ROW"), help="of a batch of answers")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="num_workers")  # they sleep
    print(provenance())
    base_s, per_row_s = (1e-3 * value for value in options.decode_ms)
    slots, told = GROUPS * (GROUP_SIZE + 1), []
    for sigma in options.sigma:
        kwargs = {"turns": options.turns, "mean_s": 1e-3 * options.mean_ms, "sigma": sigma}
        module = os.path.splitext(os.path.basename(__file__))[0]  # not "__main__", which a worker does not have
        with EnvManager(SimFactory(f"{module}:WaitingGame", kwargs=kwargs), slots, num_workers=slots, autoreset=False) as manager:
            found = {side: statistics.mean(batch_times(manager, side, options.batches, (base_s, per_row_s))) for side in SIDES}
        base = found[SIDES[0]]
        rows = [[side.name, f"{seconds:.2f}", f"{base / seconds:.2f}x"] for side, seconds in found.items()]
        print(f"\nwaits of {options.mean_ms:g} ms, lognormal, sigma {sigma:g}; {GROUPS} groups of {GROUP_SIZE}, {options.turns} turns")
        print(text_table(["rollouts", "s/batch", "to turn by turn"], rows))
        plain, redundant = found[SIDES[2]], found[SIDES[3]]
        told.append(f"sigma {sigma:g} {base / plain:.2f}x, with redundancy {base / redundant:.2f}x")
    print(f"\nfigure: episode by episode / turn by turn: {'; '.join(told)} (ROLL Flash reports 1.23x to 2.46x)")


if __name__ == "__main__":
    main()
