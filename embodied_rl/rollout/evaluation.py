"""Play whole episodes of a fixed set of seeds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.generation.base import Generator
from embodied_rl.sim.seeding import HELD_OUT_START, EpisodeSeeds
from embodied_rl.sim.simulators import Simulators
from embodied_rl.types import ActionLayout, EpisodeSummary, Observation, StepBatch

_MOST_DECISIONS = 1_000_000
"""Decisions of an episode after which an evaluation gives up."""
_NOISE = 0x6E6F6973
"""Constant that separates these random numbers from all others that derive from the same seeds."""
Draw = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Function from (episode seeds [n], decision numbers [n]) to noise [n, W]."""


class Watcher:
    """Observer of the episodes that `play_seeds` plays."""

    def begun(self, slots: Sequence[int], seeds: Sequence[int], observation: Observation) -> None:
        """New episodes begin in `slots`; `observation` {key: [slots, ...]} covers all slots."""

    def stepped(self, actions: np.ndarray, outcome: StepBatch, observation: Observation, ended: Sequence[EpisodeSummary]) -> None:
        """`actions` (simulator units) led to `outcome`; its rows may include idle slots, `ended` does not."""


def evaluate(
    manager: Simulators,
    generator: Generator,
    num_episodes: int,
    *,
    first_seed: int = 0,
    reconfigure: bool = False,
    temperature: float | None = None,
    on_episode: Callable[[EpisodeSummary], object] | None = None,
    is_over: Callable[[], bool] | None = None,
) -> list[EpisodeSummary]:
    """Play each held-out seed 2**30 + first_seed + 0 … num_episodes − 1 exactly once, with the policy's mode or with samples.

    Every seed counts, so short episodes are not over-represented, as they would be among the first n episodes to finish. Slots that have
    played their share stand still. The manager's running episodes are lost: reset it afterwards.

    Args:
        reconfigure: begin as in fresh simulators, regardless of earlier episodes (see `EnvManager.reset`).
        temperature: sampling temperature of action tokens; the random numbers depend only on an episode's seed. None: the mode.
        is_over: checked before every step; once it is true, the evaluation stops and returns the seeds before the first unfinished one.
            Simulators that play by themselves ignore it.

    Returns:
        One summary per seed, ascending by seed. Episodes that the simulator could not finish (see the manager's fault records) are missing,
        with a warning.

    Raises UserError: a temperature is given, and the generator draws no action tokens.
    """
    if manager.plays_itself:
        return manager.evaluate(generator, num_episodes, first_seed, on_episode)
    first = HELD_OUT_START + first_seed
    with ExitStack() as stack:
        draw = None if temperature is None else episode_noise(stack.enter_context(generator.at_temperature(temperature)))
        seeds = range(first, first + num_episodes)
        note = on_episode or (lambda episode: None)
        finished, num_played = play_seeds(manager, generator, seeds, reconfigure=reconfigure, draw=draw, on_episode=note, is_over=is_over)
    return _whole([episode for episode in finished if episode.seed < first + num_played], first, num_played)


def episode_noise(layout: ActionLayout) -> Draw:
    """Noise of a decision, derived only from its episode's seed and its number there: slots and neighbours do not matter."""

    def draw(seeds: np.ndarray, decisions: np.ndarray) -> np.ndarray:
        rows = [np.random.default_rng([_NOISE, int(seed), int(number)]) for seed, number in zip(seeds, decisions, strict=True)]
        if layout.noise_kind == "uniform":
            return np.stack([row.random(layout.noise_width, np.float32) for row in rows])
        return np.stack([row.standard_normal(layout.noise_width, np.float32) for row in rows])

    return draw


def play_seeds(
    manager: Simulators,
    generator: Generator,
    seeds: Sequence[int],
    watcher: Watcher | None = None,
    *,
    reconfigure: bool = False,
    draw: Draw | None = None,
    on_episode: Callable[[EpisodeSummary], object] = lambda episode: None,
    is_over: Callable[[], bool] | None = None,
) -> tuple[list[EpisodeSummary], int]:
    """Play each seed once: slot s of N plays seeds[s], seeds[s + N], …, then stands still.

    Args:
        seeds: held-out seeds; they must be consecutive if the manager resets episodes automatically.
        draw: noise of the generator's actions; None: the generator acts by its mode.
        is_over: checked before every step; once it is true, playing stops.

    Returns the finished episodes, and the number of seeds, counted from the first, that were played to their end: all of them unless
    `is_over` stopped it.
    """
    spec, num_slots, num_seeds = manager.spec, manager.num_slots, len(seeds)
    slots, place = np.arange(num_slots), np.arange(num_slots)  # `place`: index into `seeds` that each slot plays
    decisions, first = np.zeros(num_slots, np.int64), seeds[0]
    watcher, finished = watcher or Watcher(), list[EpisodeSummary]()
    batch = manager.reset(EpisodeSeeds.held_out(first - HELD_OUT_START), reconfigure=reconfigure)
    observation = {key: part.copy() for key, part in batch.observation.items()}

    def seeds_of(chosen: Sequence[int] | np.ndarray) -> list[int]:
        """Seeds that these slots play; an idle slot repeats the last seed."""
        return [seeds[min(place[slot], num_seeds - 1)] for slot in chosen]

    def begin(begun: list[int], by_itself: bool) -> None:
        if begun and not by_itself:
            manager.begin(begun, seeds_of(begun))
            for key, part in manager.recv(begun).observation.items():
                observation[key][begun] = part
        generator.begin(begun)
        shown = [slot for slot in begun if place[slot] < num_seeds]
        if shown:
            watcher.begun(shown, seeds_of(shown), observation)

    other = [slot for slot in range(min(num_slots, num_seeds)) if seeds[slot] != first + slot]  # other than the reset began
    begin([slot for slot in range(num_slots) if slot not in other], by_itself=True)
    begin(other, by_itself=False)
    while (left := place < num_seeds).any() and not (is_over is not None and is_over()):
        active = slots if spec.steps_together else np.flatnonzero(left)
        # Idle slots are sent too, unless the generator has memory: the batch keeps its shape.
        acting = active if generator.remembers else slots
        noise = None if draw is None else draw(np.array(seeds_of(acting)), decisions[acting])
        generator.send(acting, {key: part[acting] for key, part in observation.items()} if generator.remembers else observation, noise)
        actions = generator.recv().for_simulator(spec.action, manager.chunk_size)
        actions = actions if generator.remembers else actions[active]
        manager.send(active, actions)
        outcome = manager.recv(active)
        for key, part in outcome.observation.items():
            observation[key][active] = part
        ended = [episode for episode in outcome.episodes if left[episode.slot]]
        watcher.stepped(actions, outcome, observation, ended)
        for episode in ended:
            finished.append(episode)
            on_episode(episode)
        aborted = [] if outcome.aborted is None else outcome.slots[outcome.aborted].tolist()
        over = sorted([*(episode.slot for episode in outcome.episodes), *aborted])
        decisions += 1
        if decisions[active].max() > _MOST_DECISIONS:
            raise UserError(
                f"An episode of '{spec.task}' has not ended in {_MOST_DECISIONS:,} decisions. Set a step limit: sim.max_episode_steps=…."
            )
        if over:
            decisions[over] = 0
            place[over] += num_slots
            whole = manager.autoreset or spec.steps_together
            begin(over if whole else [slot for slot in over if place[slot] < num_seeds], manager.autoreset)
    return finished, min(place[place < num_seeds].tolist(), default=num_seeds)


def _whole(finished: list[EpisodeSummary], first: int, num_episodes: int) -> list[EpisodeSummary]:
    """Return summaries ascending by seed; warn about missing seeds."""
    missing = sorted(set(range(first, first + num_episodes)) - {episode.seed for episode in finished})
    assert len(finished) + len(missing) == num_episodes, "a seed was played twice"
    if missing:
        warnings.warn(
            f"{len(missing)} of {num_episodes} episodes were dropped because their simulator failed: seeds {missing}.", stacklevel=3
        )
    return sorted(finished, key=lambda episode: episode.seed)


@dataclass
class PlayedEpisode:
    """One episode of `play_each`, of T messages."""

    seed: int
    seen: list[dict[str, Any]] = field(default_factory=list)
    """What was kept of the observation before each message, and after the last one."""
    actions: list[Any] = field(default_factory=list)
    """[T] messages in the simulator's units: actions [A], chunks [1, A] or texts."""
    outcomes: list[tuple[float, bool, bool, bool]] = field(default_factory=list)
    """[T] (reward, terminated, truncated, success)"""
    summary: EpisodeSummary | None = None
    """None: the simulator gave the episode up."""

    @property
    def success_at(self) -> int | None:
        """Messages up to the first success; None: no success yet."""
        return next((number for number, outcome in enumerate(self.outcomes, start=1) if outcome[-1]), None)


def play_each(
    manager: Simulators,
    seeds: Sequence[int],
    act: Callable[[int, dict[str, Any]], Any],
    keep: Callable[[dict[str, Any]], dict[str, Any]],
    between: Callable[[dict[int, PlayedEpisode]], object] = lambda going: None,
) -> list[PlayedEpisode]:
    """Play one episode of each seed side by side: slot s plays seeds[s]. The manager's running episodes are lost.

    Args:
        seeds: at most as many as the manager has slots. If all slots step together, the surplus ones play the last seed.
        act: function from (slot, its observation) to an action [A] or a text; with chunks, a chunk of this one step is sent.
        keep: function from a slot's observation to copies of what is to be kept of it.
        between: called with the episodes that go on, by slot, after each of their messages.
    """
    action, steps_together = manager.spec.action, manager.spec.steps_together
    slots = list(range(manager.num_slots if steps_together else len(seeds)))
    manager.begin(slots, [seeds[min(slot, len(seeds) - 1)] for slot in slots])
    batch, played = manager.recv(slots), [PlayedEpisode(seed) for seed in seeds]
    going = {slot: played[slot] for slot in range(len(seeds)) if batch.aborted is None or not batch.aborted[slot]}
    while going:
        for row, slot in enumerate(batch.slots.tolist()):
            if slot in going:
                seen = {key: part[row] for key, part in batch.observation.items()}
                given = act(slot, seen)
                if action.kind != "text":
                    given = np.atleast_1d(np.array(given, action.dtype))
                    given = given[None] if manager.chunk_size > 1 else given
                going[slot].seen.append(keep(seen))
                going[slot].actions.append(given)
        slots = slots if steps_together else list(going)
        idle = "" if action.kind == "text" else np.zeros_like(next(iter(going.values())).actions[-1])
        messages = [going[slot].actions[-1] if slot in going else idle for slot in slots]
        manager.send(slots, messages if action.kind == "text" else np.stack(messages))
        batch = manager.recv(slots)
        ended = {episode.slot: episode for episode in batch.episodes}
        for row, slot in enumerate(slots):
            if slot not in going:
                continue
            if batch.aborted is not None and batch.aborted[row]:
                del going[slot]
                continue
            outcome = float(batch.reward[row]), bool(batch.terminated[row]), bool(batch.truncated[row]), bool(batch.success[row])
            going[slot].outcomes.append(outcome)
            if slot in ended:
                episode = going.pop(slot)
                episode.seen.append(keep({key: part[row] for key, part in batch.final_observation.items()}))
                episode.summary = ended[slot]
        between(going)
    return played
