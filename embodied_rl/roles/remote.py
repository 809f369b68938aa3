"""A player elsewhere, as the training loop sees it: in place of the manager, the generator and the collector."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from embodied_rl.agents.turns import AgentEpisode
from embodied_rl.config import TrainConfig
from embodied_rl.errors import UserError
from embodied_rl.hybrid.weight_sync import is_lora
from embodied_rl.methods.domain_roles import RolePolicies
from embodied_rl.methods.language_apart import model_files
from embodied_rl.policies.language import LanguagePolicy
from embodied_rl.roles.failures import RoleLost
from embodied_rl.roles.player import Played
from embodied_rl.rollout.collector import CollectorTimes
from embodied_rl.rollout.groups import GroupQueue
from embodied_rl.sim.faults import FaultRecord
from embodied_rl.timeline import record
from embodied_rl.types import EpisodeGroup, EpisodeSummary, Rollout, SimSpec


class PlayerHandle(Protocol):
    """A player in a process or in an actor."""

    def call(self, what: str, **arguments: Any) -> Any:
        """What the player's method `what` returns. Raises RoleLost, and what the method raised."""
        ...

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> int:
        """Have it play with these weights; how many bytes were sent. Raises RoleLost."""
        ...

    def close(self) -> None: ...


class RemotePlayer:
    """Stands where the training loop has its `EnvManager` and its `Generator`; a player that ends is replaced.

    Nothing is lost with it but time: groups that were in flight are asked for again, with their seeds, and what was consumed is known
    here. Fixed rollouts begin new episodes.
    """

    def __init__(
        self, config: TrainConfig, start: Callable[[TrainConfig], PlayerHandle], *, at_close: Sequence[Callable[[], None]] = ()
    ) -> None:
        """Start a player; `at_close` is called when none is needed any more, last first. Raises UserError as `EnvManager` does."""
        self.config, self._start = config, start
        self.at_close: list[Callable[[], None]] = list(at_close)
        self.version = 0
        self.num_restarts = 0
        self.fault_records: list[FaultRecord] = []
        self.publish_s = 0.0
        self.published_bytes = 0
        """Of the last time."""
        self._has_base = False
        """The player has what never changes."""
        self.cluster: Any = None
        """The Ray cluster that it plays on; None without."""
        self.policy: Any = None
        """Whose weights `publish` sends; see `take_policy`."""
        self.model: dict[str, np.ndarray] | None = None
        """Of a language agent: what its model is, for whoever builds it elsewhere (`language_apart.model_files`)."""
        self.needs_restart = False
        """A new player waits to be told which episodes to play."""
        self._handle: PlayerHandle | None = None
        try:
            self._handle = start(config)
            described = self._handle.call("describe")
        except RoleLost as lost:
            self.close()
            raise UserError(f"{lost} It had not begun; its own message is above.") from lost
        except BaseException:
            self.close()
            raise
        self.spec = SimSpec.from_dict(described["spec"])
        self.num_slots = int(described["num_slots"])
        self.worker_pids: list[int] = described["worker_pids"]
        self.specs = [SimSpec.from_dict(spec) for spec in described.get("specs", ())]
        """Of several domains: of every seat, in the order of `multi_domain.seats_of`."""

    def take_policy(self, policy: Any) -> None:
        """The policy that is trained: its weights are published from now on, and a language agent's player learns what model it is.

        Raises UserError for a model that the player's token backend cannot run.
        """
        self.policy = policy
        if isinstance(policy, LanguagePolicy | RolePolicies):
            speaks = policy if isinstance(policy, LanguagePolicy) else policy.language
            self.model = {} if speaks is None else model_files(speaks)
            try:
                self._live().call("take_model", files=self.model)
            except RoleLost as lost:
                self.replace(lost)

    def texts(self, domain: str | None = None) -> list[str]:
        """See `AgentPlayer.texts`, and `DomainPlayer.texts` of several domains."""
        return [str(text) for text in self._insist("texts", **_of(domain))]

    def demonstrate(self, domain: str | None = None) -> list[AgentEpisode]:
        """See `AgentPlayer.demonstrate`, and `DomainPlayer.demonstrate` of several domains."""
        return list(self._insist("demonstrate", **_of(domain)))

    def publish(self, version: int) -> None:
        """See `Generator.publish`."""
        started = time.perf_counter()
        self.version = version
        try:
            self._send_weights()
        except RoleLost as lost:
            self.replace(lost)
        self.publish_s = time.perf_counter() - started

    def send(self, slots: np.ndarray, observation: Any, noise: np.ndarray | None) -> None:
        raise RuntimeError("This process does not act: its player does.")

    def recv(self) -> Any:
        raise RuntimeError("This process does not act: its player does.")

    def evaluate(self, num_episodes: int, first_seed: int, domain: str | None = None) -> list[EpisodeSummary]:
        """See `Player.evaluate`, and `DomainPlayer.evaluate` of several domains."""
        return list(self._insist("evaluate", num_episodes=num_episodes, first_seed=first_seed, **_of(domain)))

    def ask(self, what: str, **arguments: Any) -> Any:
        """See `PlayerHandle.call`."""
        return self._live().call(what, **arguments)

    def peek(self, slots: list[int]) -> dict[str, np.ndarray]:
        """See `EnvManager.peek`; nothing where the player is gone."""
        try:
            return dict(self._live().call("peek", slots=list(slots)))
        except RoleLost:
            return {}

    def replace(self, lost: RoleLost) -> None:
        """Start another player with the weights that were published last. Raises UserError when that was done too often."""
        if self.num_restarts >= self.config.hybrid.max_restarts:
            raise UserError(
                f"{lost} It was replaced {self.num_restarts} times already (hybrid.max_restarts). "
                f"The run goes on from its last checkpoint with resume=auto and run_dir={self.config.run_dir}."
            ) from lost
        self.num_restarts += 1
        self.needs_restart = True
        self._end_player()
        try:
            self._handle = self._start(self.config)
            self.worker_pids = self._handle.call("describe")["worker_pids"]
            if self.model is not None:
                self._handle.call("take_model", files=self.model)
            if self.policy is not None:
                self._send_weights()
        except RoleLost as again:
            self.replace(again)

    def offload(self) -> int:
        raise UserError("hybrid.offload=[simulators] moves what plays in this process; another one does (hybrid.placement). Leave it out.")

    def onload(self) -> None:
        raise AssertionError("nothing was offloaded")

    def close(self) -> None:
        """End the player. May be called twice."""
        self._end_player()
        while self.at_close:
            self.at_close.pop()()

    def _send_weights(self) -> None:
        self.published_bytes = self._live().publish(self.version, self._weights())
        self._has_base = True

    def _weights(self) -> dict[str, Tensor]:
        """What the player acts with: of a language agent the model alone, any adapter merged into it, unless it merges by itself."""
        if self.config.hybrid.publish == "adapter":
            state = self.policy.state_dict()
            return {name: tensor for name, tensor in state.items() if is_lora(name)} if self._has_base else dict(state)
        if isinstance(self.policy, LanguagePolicy | RolePolicies):
            return dict(self.policy.named_weights())
        weights: dict[str, Tensor] = self.policy.state_dict()
        return weights

    def _insist(self, what: str, **arguments: Any) -> Any:
        """`ask`, again of a new player when one ends."""
        while True:
            try:
                return self.ask(what, **arguments)
            except RoleLost as lost:
                self.replace(lost)

    def _end_player(self) -> None:
        handle, self._handle, self._has_base = self._handle, None, False
        if handle is not None:
            handle.close()

    def _live(self) -> PlayerHandle:
        if self._handle is None:
            raise RuntimeError("The player was closed.")
        return self._handle


def _of(domain: str | None) -> dict[str, Any]:
    """A player of one task is not asked about domains."""
    return {} if domain is None else {"domain": domain}


class RemoteCollector:
    """Stands where a method has its collector, of rollouts or of groups."""

    def __init__(self, player: RemotePlayer, begin_again: Callable[[int], None]) -> None:
        """`begin_again(iteration)`: tell a new player what to play, and whoever else must know."""
        self._player, self._begin_again = player, begin_again
        self._queue: GroupQueue | None = None
        self._figures: dict[str, float] = {}
        self.times = CollectorTimes()
        self.recorder: Any = None

    def restart(self, queue: GroupQueue | None = None, *, seed_round: int = 0) -> None:
        """See `RolloutCollector.restart` and `GroupCollector.restart`; `queue` becomes the image of the player's."""
        self._queue = queue
        while True:
            try:
                self._player.ask("restart", seed_round=seed_round, queue=None if queue is None else queue.state_dict())
            except RoleLost as lost:
                self._player.replace(lost)
            else:
                self._player.needs_restart = False
                return

    def next_rollout(self, version: int) -> Rollout:
        """See `RolloutCollector.next_rollout`."""
        data = self._play(version).data
        assert isinstance(data, Rollout)
        return data

    def next_groups(self, version: int) -> list[EpisodeGroup]:
        """See `GroupCollector.next_groups`; the queue here learns in the same moment that they are consumed."""
        played = self._play(version)
        assert self._queue is not None, "restart comes first"
        assert played.queue is not None
        assert isinstance(played.data, list)
        self._queue.mirror(played.queue)
        return played.data

    def metrics(self) -> dict[str, float]:
        """How long the trainer waited, what the player did meanwhile or before, and what publishing took; of the last iteration."""
        return {
            **self._figures,
            "roles/publish_s": self._player.publish_s,
            "roles/published_bytes": float(self._player.published_bytes),
            "roles/restarts": float(self._player.num_restarts),
        }

    def _play(self, version: int) -> Played:
        started = time.perf_counter()
        while True:
            if self._player.needs_restart:
                self._begin_again(version)
            try:
                played: Played = self._player.ask("play", version=version)
                break
            except RoleLost as lost:
                self._player.replace(lost)
        waited = time.perf_counter() - started
        self._player.fault_records.extend(played.faults)
        for role, name, begin_ns, end_ns in played.spans:
            record(role, name, begin_ns, end_ns)
        times = played.times
        # The loop's own figures are of its waiting: it is divided as the player's time was.
        share = waited / max(times.simulate_s + times.act_s, 1e-9)
        self.times = CollectorTimes(times.simulate_s * min(share, 1.0), times.act_s * min(share, 1.0))
        figures = {"roles/wait_s": waited, "roles/simulate_s": times.simulate_s, "roles/act_s": times.act_s}
        self._figures = {**played.metrics, **figures}
        return played
