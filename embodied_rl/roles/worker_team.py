"""Several rollout workers side by side, as processes or actors. Each plays its share of the groups, by number, or of a rollout's slots.

```
                       ┌── worker 0: groups 0, 2, 4, …  its half of each batch; of batches of three 0, 2, 3, 5, …
 RemoteWorker ── team ─┤
                       └── worker 1: groups 1, 3, 5, …                                              1, 4, …
```
A group's episodes depend only on its number and seeds, and a slot's episodes only on the slot, so a team plays the same as one worker; only
the batches of forward passes differ. Each worker's queue keeps the staleness bound for its own groups, so it holds for all groups.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from torch import Tensor

from embodied_rl.config import SimConfig, TrainConfig
from embodied_rl.roles.wire import RoleLost
from embodied_rl.roles.worker import Collected
from embodied_rl.rollout.collector import CollectorTimes
from embodied_rl.rollout.groups import EpisodeCounts, GroupCounts, Share
from embodied_rl.sim.affinity import available_cores
from embodied_rl.stopping import waiting
from embodied_rl.types import EpisodeGroup, EpisodeSummary, Rollout

_OF_ONE = ("texts", "demonstrate", "peek", "start_states")
"""Methods that only the first worker is called for."""


class WorkerTeam:
    """Handle of several rollout workers. Implements `WorkerHandle`; when one ends, all are replaced."""

    def __init__(self, config: TrainConfig, start: Callable[[TrainConfig, Share], Any]) -> None:
        """`start` starts a `WorkerHandle` for a share of the configuration's `hybrid.players`; if one fails, the others are ended."""
        self._workers: list[Any] = []
        self._slots: list[dict[str, int]] = []
        """{domain: number of slots} of each worker."""
        self._domains, whole, groups = list(config.domains), slots_of(config), config.algorithm.groups
        self._share = Share(count=config.hybrid.players, batch=None if groups is None else groups.groups_per_step)
        self._pool = ThreadPoolExecutor(config.hybrid.players, thread_name_prefix="worker")
        try:
            for index in range(config.hybrid.players):
                part = part_of(config, index)
                before = {name: sum(slots[name] for slots in self._slots) for name in whole}
                domains = {name: (before[name], whole[name], config.for_domain(name).algorithm.rollout_steps) for name in whole}
                self._workers.append(start(part, dataclasses.replace(self._share, index=index, domains=domains)))
                self._slots.append(slots_of(part))
        except BaseException:
            self.close()
            raise

    def call(self, what: str, **arguments: Any) -> Any:
        """Call the method `what` and combine the answers as if from one worker. Raises RoleLost, and any exception of a worker."""
        if what in _OF_ONE:
            return self._workers[0].call(what, **arguments)
        if what == "evaluate":
            return self._evaluate(**arguments)
        if what == "restart":
            queue, count = arguments.pop("queue"), len(self._workers)
            states = [None] * count if queue is None else divided(queue, self._share)
            return self._ask(what, [{**arguments, "queue": state} for state in states])[0]
        if what == "take_up":
            left = iter(arguments["episodes"])
            parts: list[list[Any]] = [[] for _ in self._workers]
            for domain, index in self._order:
                parts[index] += itertools.islice(left, self._slots[index][domain])
            return self._ask(what, [{"episodes": part} for part in parts])[0]
        answers = self._ask(what, [arguments] * len(self._workers))
        if what == "play":
            return joined(answers, self._share)
        if what == "episodes":
            lefts = [iter(part) for part in answers]
            return [episode for domain, index in self._order for episode in itertools.islice(lefts[index], self._slots[index][domain])]
        return _described(answers) if what == "describe" else answers[0]

    @property
    def _order(self) -> list[tuple[str, int]]:
        """(domain, worker) pairs in the order of a single worker's slots."""
        return [(domain, index) for domain in self._slots[0] for index in range(len(self._workers))]

    def put(self, version: int, tensors: Mapping[str, Tensor]) -> tuple[Any, int]:
        """See `WorkerHandle.put`; the weights are there once, and all workers read them."""
        where: tuple[Any, int] = self._workers[0].put(version, tensors)
        return where

    def close(self) -> None:
        """End all workers at the same time, since each may take a while. May be called twice."""
        workers, self._workers = self._workers, []
        with ThreadPoolExecutor(max(len(workers), 1), thread_name_prefix="end") as ending:
            for ended in [ending.submit(worker.close) for worker in workers]:
                ended.result()
        self._pool.shutdown(wait=False)

    def _evaluate(self, num_episodes: int, first_seed: int, domain: str) -> list[Any]:
        """Evaluate a part of the seeds on each worker; return results in the order of seeds."""
        count = len(self._workers)
        starts = [num_episodes * index // count for index in range(count + 1)]
        ranges = [(end - start, first_seed + start) for start, end in itertools.pairwise(starts)]
        parts = self._ask("evaluate", [{"num_episodes": size, "first_seed": first, "domain": domain} for size, first in ranges])
        episodes = [episode for part in parts for episode in part]
        if self._domains and not domain:
            episodes.sort(key=lambda episode: self._domains.index(episode.final_info["task"]))
        return episodes

    def _ask(self, what: str, arguments: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Call one method of all workers at the same time, each with its own arguments."""
        return self._all(lambda asked: asked[0].call(what, **asked[1]), list(zip(self._workers, arguments, strict=True)))

    def _all(self, ask: Callable[[Any], Any], of: Sequence[Any]) -> list[Any]:
        futures = [self._pool.submit(ask, one) for one in of]
        with waiting:
            wait(futures)
        errors = [error for future in futures if (error := future.exception()) is not None]
        # A lost worker comes first, since it is replaced. Errors that the loss did not cause occur again with the new worker.
        for error in sorted(errors, key=lambda error: not isinstance(error, RoleLost)):
            raise error
        return [future.result() for future in futures]


def slots_of(config: TrainConfig) -> dict[str, int]:
    """{domain with rollouts: number of slots}; a run's only domain has the empty name."""
    of_rollouts = (name for name, own in config.algorithms.items() if own.plays and own.groups is None)
    return {name: config.for_domain(name).sim.num_slots for name in of_rollouts}


def part_of(config: TrainConfig, index: int) -> TrainConfig:
    """Configuration of one worker of a team: its part of the slots, of the simulator workers and of each batch."""
    count, groups = config.hybrid.players, config.algorithm.groups

    def part(number: int) -> int:
        return number // count + (index < number % count)

    def sim_part(sim: SimConfig) -> SimConfig:
        slots = part(sim.num_slots)
        workers = min(max((sim.fixed_workers or available_cores()) // count, 1), slots)
        return dataclasses.replace(sim, num_slots=slots, num_workers=workers, pipeline_groups=min(sim.num_groups, slots))

    mix = {name: dataclasses.replace(player, num_slots=part(player.num_slots)) for name, player in config.generation.mix.items()}
    own = None if groups is None else dataclasses.replace(groups, groups_per_step=part(groups.groups_per_step))
    record = config.record
    if record.max_episodes is not None:  # a worker whose part is none records nothing
        most = part(record.max_episodes)
        record = dataclasses.replace(record, share=record.share if most else 0.0, max_episodes=most or None)
    return dataclasses.replace(
        config,
        sim=sim_part(config.sim),
        domains={name: dataclasses.replace(domain, sim=sim_part(domain.sim)) for name, domain in config.domains.items()},
        generation=dataclasses.replace(config.generation, mix=mix),
        algorithm=dataclasses.replace(config.algorithm, groups=own),
        hybrid=dataclasses.replace(config.hybrid, players=1),
        record=record,
    )


def divided(state: Mapping[str, Any], share: Share) -> list[dict[str, Any]]:
    """Split a group queue's state into one per share. The first gets all counts so far: the sums stay the same."""
    nothing = {"counts": {}, "episodes": dataclasses.asdict(EpisodeCounts()), "rejected": 0, "reasons": {}}
    return [
        {**state, **({} if index == 0 else nothing), "redo": [number for number in state["redo"] if share.player_of(number) == index]}
        for index in range(share.count)
    ]


def united(states: Sequence[Mapping[str, Any]], share: Share) -> dict[str, Any]:
    """Combine the states of all shares into the whole queue's: the inverse of `divided`."""
    last = max(int(state["next_number"]) for state in states)
    redo = [number for state in states for number in state["redo"]]
    for index, state in enumerate(states):
        # A share that is behind still has to admit these.
        redo += [number for number in range(int(state["next_number"]), last) if share.player_of(number) == index]
    domains = sorted({domain for state in states for domain in state["counts"]})
    none = dataclasses.asdict(GroupCounts())
    return {
        **states[0],
        "next_number": last,
        "redo": sorted(redo),
        "counts": {domain: _sums([state["counts"].get(domain, none) for state in states]) for domain in domains},
        "episodes": _sums([state["episodes"] for state in states]),
        "rejected": sum(int(state["rejected"]) for state in states),
        "reasons": dict(sum((Counter(state["reasons"]) for state in states), Counter())),
    }


def joined(parts: Sequence[Collected], share: Share) -> Collected:
    """Combine the workers' experience as one worker's: groups by number, rollouts side by side, times of the slowest worker."""
    groups: list[EpisodeGroup] = []
    for part in parts:
        groups += part.groups
    return Collected(
        groups=sorted(groups, key=lambda group: group.number),
        times=max((part.times for part in parts), key=lambda times: times.simulate_s + times.act_s, default=CollectorTimes()),
        queue=united(queues, share) if (queues := [part.queue for part in parts if part.queue is not None]) else None,
        faults=[record for part in parts for record in part.faults],
        metrics=_figures([part.metrics for part in parts]),
        starts={domain: [report for part in parts for report in part.starts[domain]] for domain in parts[0].starts},
        rollouts={domain: side_by_side([part.rollouts[domain] for part in parts]) for domain in parts[0].rollouts},
    )


def side_by_side(parts: Sequence[Rollout]) -> Rollout:
    """Combine rollouts of slot ranges (`Share`) into the rollout of all slots, equal to that of a single collector."""
    sizes = [part.reward.shape[1] for part in parts]
    total, before = sum(sizes), np.cumsum([0, *sizes])

    def joined(arrays: Sequence[np.ndarray | None], axis: int = 1) -> Any:
        found = [array for array in arrays if array is not None]
        return np.concatenate(found, axis=axis) if found else None

    cut = [np.argwhere(part.truncated & ~part.terminated) @ (total, 1) + first for part, first in zip(parts, before[:-1], strict=True)]
    order = np.argsort(np.concatenate(cut))
    ended: list[tuple[int, int, EpisodeSummary]] = []
    for part, first in zip(parts, before.tolist(), strict=False):
        over = [iter(np.flatnonzero(column).tolist()) for column in (part.terminated | part.truncated).T]
        moved = [dataclasses.replace(episode, slot=first + episode.slot) for episode in part.episodes]
        ended += [(next(over[episode.slot], len(part.reward)), own.slot, own) for episode, own in zip(part.episodes, moved, strict=True)]
    names = ("action", "log_prob", "reward", "terminated", "truncated", "policy_version", "success")
    seen = {key: [part.observation[key] for part in parts] for key in parts[0].observation}
    return Rollout(
        observation={key: joined(rows) for key, rows in seen.items()},
        last_observation={key: joined([part.last_observation[key] for part in parts], 0) for key in seen},
        final_observation={key: joined([part.final_observation[key] for part in parts], 0)[order] for key in seen},
        episodes=tuple(episode for _, _, episode in sorted(ended, key=lambda one: one[:2])),
        **{name: joined([vars(part)[name] for part in parts]) for name in (*names, "chunk_reward", "chunk_success", "executed")},
    )


_COUNTS = re.compile(r"^groups/.*(?<!_mean)$|(^|/)(reward_worker/(scored|failed)|agent/(turns|episodes|failed.*|tools/.*))$")


def _figures(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine metrics: counts add up, maxima are the largest, and a mean counts as often as what it is the mean of (`_weight`)."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values, weights = [part.get(name, 0.0) for part in parts], [_weight(part, name) for part in parts]
        if name.endswith("_max"):
            found[name] = max(part[name] for part in parts if name in part)
        elif _COUNTS.search(name):
            found[name] = float(np.sum(values))
        else:
            found[name] = float(np.average(values, weights=weights)) if any(weights) else 0.0
    return found


def _weight(part: Mapping[str, float], name: str) -> float:
    """Number of things in a worker's metrics that `name` is a mean of: an agent's turns or programs, a batch's groups; 1 or 0 for others.
    A share of turns that is missing is 0."""
    place, agent, _ = name.rpartition("agent/")
    if agent:
        of = place + agent
        return part.get(f"{of}turns", part.get(f"{of}episodes", 0.0) - part.get(f"{of}failed", 0.0))
    if name == "groups/age_mean":
        return sum(count for key, count in part.items() if re.fullmatch(r"groups/age_\d+", key))
    return float(name in part)


def _described(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine the workers' descriptions: slots and process ids of all."""
    pids = [pid for part in parts for pid in part["worker_pids"]]
    return {**parts[0], "num_slots": sum(part["num_slots"] for part in parts), "worker_pids": pids}


def _sums(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(int(part[name]) for part in parts) for name in parts[0]}
