"""Facts that the rules of a configuration read: its parts, and what its names mean on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from embodied_rl.algorithms.advantage_table import AdvantageInfo, advantage_info
from embodied_rl.algorithms.composition import OF_ROLLOUTS
from embodied_rl.algorithms.loss_table import LossInfo, loss_info
from embodied_rl.config import policy as policies
from embodied_rl.config.algorithm import AlgorithmConfig, GroupsConfig, RewardConfig
from embodied_rl.config.hybrid import HybridConfig
from embodied_rl.config.run import SimConfig, TrainConfig
from embodied_rl.hybrid.placement import Cluster, Placement
from embodied_rl.hybrid.placement import resolve as placed
from embodied_rl.roles.local_devices import LocalDevices, plan_devices, this_machine
from embodied_rl.sim.text.program import is_program


@dataclass(frozen=True)
class Run:
    """A configuration as rules read it: the whole run's, or a task's (one of its domains, or the run itself)."""

    config: TrainConfig
    domain: str | None = None
    """Domain of the configuration; None: the run's."""
    beside: int = 0
    """Decisions of other domains' rollouts in the same update."""

    @property
    def sim(self) -> SimConfig:
        return self.config.sim

    @property
    def policy(self) -> policies.AnyPolicyConfig:
        return self.config.policy

    @property
    def algorithm(self) -> AlgorithmConfig:
        return self.config.algorithm

    @property
    def groups(self) -> GroupsConfig | None:
        return self.config.algorithm.groups

    @property
    def hybrid(self) -> HybridConfig:
        return self.config.hybrid

    @cached_property
    def advantage(self) -> AdvantageInfo:
        return advantage_info(self.algorithm.advantage)

    @cached_property
    def loss(self) -> LossInfo:
        return loss_info(self.algorithm.loss)

    @property
    def why_episodes(self) -> str | None:
        """Reason why the loss cannot learn from fixed rollouts, which show it single decisions; None: it can."""
        loss = self.loss
        if missing := [name for name in loss.inputs if name not in OF_ROLLOUTS]:
            return f"it reads {missing[0]}"
        if loss.unit != "entry":
            return f"its ratio is that of a {loss.unit}"
        return "it needs groups" if loss.needs & {"groups", "demonstrations"} else None

    @property
    def shapes_returns(self) -> bool:
        """Whether `algorithm.reward` needs more than a single step's reward."""
        own = self.algorithm.reward
        return own != RewardConfig(clip=own.clip, scale=own.scale, length_penalty=own.length_penalty)

    @property
    def by_sac(self) -> bool:
        """Whether soft actor-critic updates the policy."""
        own = self.algorithm.off_policy
        return own is not None and own.update == "sac"

    @cached_property
    def of_program(self) -> bool:
        """Whether episodes are agent programs."""
        return is_program(self.sim)

    @property
    def speaks(self) -> bool:
        return self.policy.name == "language"

    @property
    def is_small(self) -> bool:
        """Whether the policy is a small network that acts step by step in the simulator's own actions."""
        return isinstance(self.policy, policies.PolicyConfig)

    @property
    def gives_others(self) -> bool:
        """Whether a robot's policy has other actions than the simulator's: tokens, chunks, denoised motions."""
        return not self.is_small and not self.speaks

    @property
    def values_steps(self) -> bool:
        """Whether the policy gives a value for each step of a chunk."""
        return isinstance(self.policy, policies.TinyVLAConfig | policies.OpenVLAOFTPolicyConfig) and self.policy.value == "action"

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Layers of the policy that get a LoRA adapter; empty: none."""
        policy = self.policy
        if isinstance(policy, policies.LanguageConfig | policies.OpenVLAPolicyConfig) and policy.lora_rank > 0:
            return policy.lora_targets
        return ()

    @property
    def has_adapter(self) -> bool:
        """Whether the policy trains a LoRA adapter of a frozen model."""
        policy = self.policy
        return bool(self.lora_targets) or (isinstance(policy, policies.LanguageConfig) and policy.adapter is not None)

    @property
    def needs_critic(self) -> bool:
        """Whether a robot's method reads values of states."""
        own = self.algorithm
        stored = own.off_policy is not None and own.off_policy.update == "iql"
        return stored or (own.on_policy and self.advantage.returns_value_target)

    # ---- placement --------------------------------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        return self.hybrid.placement.kind

    @property
    def on_ray(self) -> bool:
        return self.hybrid.cluster == "ray"

    @property
    def ranks(self) -> int:
        return 1 if self.hybrid.sharding is None else self.hybrid.sharding.num_ranks

    @property
    def tensor_shards(self) -> int:
        return 1 if self.hybrid.sharding is None else self.hybrid.sharding.num_tensor_shards

    @cached_property
    def machine(self) -> Cluster:
        return this_machine(self.config)

    @property
    def num_gpus(self) -> int:
        return len(self.machine.gpus)

    @cached_property
    def roles(self) -> Placement:
        """Placement of the roles on this machine. Raises UserError for devices that it lacks."""
        return placed(self.hybrid.placement, self.machine)

    @cached_property
    def devices(self) -> LocalDevices:
        """Devices of a run without Ray. Raises UserError: see `plan_devices`."""
        return plan_devices(self.config, self.machine)

    @property
    def plays_apart(self) -> bool:
        """Whether episodes are played outside the process of the training loop."""
        return self.on_ray or bool(self.devices.players)

    @property
    def max_staleness(self) -> int:
        return self.algorithm.max_staleness if self.groups is None else self.groups.max_staleness

    @property
    def staleness_key(self) -> str:
        return "algorithm.max_staleness" if self.groups is None else "algorithm.groups.max_staleness"

    @property
    def most_players(self) -> int:
        """Most players at once, as configured where allowed; none of a multiplexed run's hosts plays separately."""
        if self.on_ray:
            return 1 if self.kind == "multiplexed" else self.hybrid.players
        return max(len(self.devices.players), 1)

    @property
    def scarcest(self) -> tuple[str, int, str]:
        """(key, number, unit) of the scarcest thing that several players must divide: slots of a domain or of a player in `generation.mix`,
        or the groups of a batch."""
        found = [(f"domains.{name}.sim.num_slots", domain.sim.num_slots, "slots") for name, domain in self.config.domains.items()]
        found += [(f"generation.mix.{name}.num_slots", player.num_slots, "slots") for name, player in self.config.generation.mix.items()]
        found = found or [("sim.num_slots", self.sim.num_slots, "slots")]
        if self.groups is not None:
            found.append(("algorithm.groups.groups_per_step", self.groups.groups_per_step, "groups"))
        return min(found, key=lambda one: one[1])

    @property
    def why_no_gpu(self) -> str | None:
        """What makes training run on a processor; None: it runs on a GPU."""
        if self.on_ray:
            return None if self.hybrid.ray.gpus.train > 0 else "hybrid.ray.gpus.train=0"
        if self.devices.ranks[0] is not None:
            return None
        return "hybrid.placement.roles.train" if self.machine.gpus else "hybrid.device=auto finds no GPU"

    # ---- domains ----------------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> Iterator[Run]:
        """Each domain's own run; the run itself if there are no domains."""
        own = {name: self.config.for_domain(name) for name in self.config.domains}
        of: dict[str, int] = {}
        for name, config in own.items():
            policy = self.config.policy_of(name)
            of[policy] = of.get(policy, 0) + config.decisions_per_iteration
        tasks = (Run(one, name, of[self.config.policy_of(name)] - one.decisions_per_iteration) for name, one in own.items())
        return tasks if own else iter([self])

    @property
    def num_decisions(self) -> int:
        """Decisions of an update on fixed rollouts."""
        return self.config.decisions_per_iteration + self.beside

    @property
    def played(self) -> list[str]:
        """Domains that players of `generation.mix` can play: not agent programs, which talk to the policy that learns from them."""
        return [name for name, one in self.config.domains.items() if self.config.speaks_in(name) and not is_program(one.sim)]
