"""Filming: seeds are played as evaluation plays them, and every step leaves a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from embodied_rl.agents.agent import Answer, Prompt
from embodied_rl.agents.turns import Turn
from embodied_rl.errors import UserError
from embodied_rl.generation.base import Generator
from embodied_rl.generation.tokens import Completion
from embodied_rl.media.episodes import FilmedEpisode, Moment, Selection, beside_each_other, thinned
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import HELD_OUT_START, EpisodeSeeds
from embodied_rl.types import ActionSpec, EpisodeSummary, Observation, StepBatch

Playing = Sequence[tuple[int, int] | None]
"""(seed, steps taken) of each slot's episode; None: the slot stands still."""


class Actor(Protocol):
    """What acts in front of the camera."""

    def act(self, observation: Observation, playing: Playing) -> np.ndarray:
        """Actions [slots, A] in the simulator's units, of slots that stand still too. `observation` is {key: [slots, ...]}."""
        ...

    def values(self, observation: Observation) -> np.ndarray | None:
        """[slots] what the policy expects from here on; None: it has no such estimate."""
        ...


class PolicyActor:
    """A generator's deterministic actions, and the values of `estimate`. Implements `Actor`."""

    def __init__(
        self, generator: Generator, action: ActionSpec, num_slots: int, estimate: Callable[[Observation], np.ndarray] | None = None
    ) -> None:
        self._generator, self._action, self._estimate = generator, action, estimate
        self._slots = np.arange(num_slots)
        self._chunks: np.ndarray | None = None
        """[slots, K, A] of a policy that acts in chunks: what each slot is playing."""
        self._played = np.zeros(num_slots, int)

    def act(self, observation: Observation, playing: Playing) -> np.ndarray:
        """See `Actor.act`. Slots that stand still are still rows of the batch, as they are in evaluation."""
        fresh = np.array([episode is None or episode[1] == 0 for episode in playing])
        if self._chunks is not None:
            # A chunk is played to its end without another look, as it is in training; every step still leaves its picture.
            due = fresh | (self._played >= self._chunks.shape[1])
            if not due.any():
                return self._next_steps()
        self._generator.send(self._slots, observation, None)
        given = self._generator.recv().for_simulator(self._action)
        if given.ndim == 2 or given.dtype == object:
            return given
        if self._chunks is None:
            self._chunks, due = given.copy(), np.ones(len(given), bool)
        self._chunks[due], self._played[due] = given[due], 0
        return self._next_steps()

    def _next_steps(self) -> np.ndarray:
        assert self._chunks is not None
        steps = self._chunks[self._slots, self._played]
        self._played += 1
        return steps

    def values(self, observation: Observation) -> np.ndarray | None:
        """See `Actor.values`."""
        return None if self._estimate is None else self._estimate(observation)


class EpisodicActor:
    """A generator that remembers its episodes, a language agent say. Implements `Actor`."""

    def __init__(self, generator: Generator, num_slots: int) -> None:
        self._generator, self._num_slots = generator, num_slots
        self._spoken: dict[int, list[Turn]] = {}
        if hasattr(generator, "on_answer"):
            generator.on_answer = self._listen

    def act(self, observation: Observation, playing: Playing) -> np.ndarray:
        """See `Actor.act`: [slots] texts, empty for those that stand still."""
        slots = np.array([slot for slot, episode in enumerate(playing) if episode is not None])
        self._spoken = {}
        self._generator.begin([slot for slot, episode in enumerate(playing) if episode is not None and episode[1] == 0])
        self._generator.send(slots, {key: part[slots] for key, part in observation.items()}, None)
        actions = np.full(self._num_slots, "", object)
        actions[slots] = self._generator.recv().action
        return actions

    def values(self, observation: Observation) -> np.ndarray | None:
        """See `Actor.values`: it has none."""
        return None

    def spoken(self, slot: int) -> list[Turn]:
        """What the last action of a slot was read from."""
        return self._spoken.get(slot, [])

    def _listen(self, slot: int, observation: str, prompt: Prompt, completion: Completion, answer: Answer) -> None:
        tokens = completion.token_ids, completion.log_prob, completion.version
        turn = Turn(observation, prompt.token_ids, *tokens, answer.text, answer.parsed, reward=0.0, game_reward=0.0)
        self._spoken.setdefault(slot, []).append(turn)


def film(
    manager: EnvManager,
    actor: Actor,
    seeds: Sequence[int],
    *,
    size: int,
    num_cameras: int = 1,
    selection: Selection | None = None,
    with_values: bool = False,
    on_episode: Callable[[EpisodeSummary], object] | None = None,
) -> list[FilmedEpisode]:
    """Play each seed once and keep a picture of every step.

    Of episodes longer than `MAX_STEPS_SHOWN` every second (fourth, …) step is kept, and of all others too: they run side by side.

    Args:
        manager: of a `FilmedSim` made with ``autoreset=False``, whose slots are then left in the middle of episodes.
        seeds: of the episodes; slot s plays seeds[s], seeds[s + num_slots], …
        size: pixels a side of one camera's picture.
        num_cameras: how many the simulator was made with.
        selection: keep only the best or worst of them, so that memory does not grow with the seeds; None: all.

    Returns:
        In the order of `seeds`; with a selection, in its order.

    Raises:
        UserError: an episode was given up because its simulator failed.
        SimFault: see `EnvManager`.
    """
    studio = _Studio(manager, actor, seeds, size, num_cameras, selection, with_values)
    while studio.is_open:
        studio.advance()
        for episode in studio.take_finished():
            if on_episode is not None:
                on_episode(episode.finished)
    return studio.shown()


class _Studio:
    """The state of `film`: which slot plays what, and the pictures so far."""

    def __init__(
        self,
        manager: EnvManager,
        actor: Actor,
        seeds: Sequence[int],
        size: int,
        num_cameras: int,
        selection: Selection | None,
        with_values: bool,
    ) -> None:
        assert not manager.autoreset, "the last picture of an episode is taken before the next one begins"
        self._manager, self._actor, self._seeds = manager, actor, seeds
        self._size, self._num_cameras, self._selection, self._with_values = size, num_cameras, selection, with_values
        self._num_slots, self._stride = manager.num_slots, 1
        self._current = list(range(self._num_slots))  # position in `seeds` of what each slot plays
        self._returns, self._lengths = np.zeros(self._num_slots), np.zeros(self._num_slots, int)
        self._success = np.zeros(self._num_slots, bool)
        self._running: dict[int, FilmedEpisode] = {}
        self._kept: dict[int, FilmedEpisode] = {}
        self._finished: list[FilmedEpisode] = []
        self._final_texts: dict[int, str] = {}
        first = seeds[0]
        held_out = first >= HELD_OUT_START
        start = manager.reset(EpisodeSeeds.held_out(first - HELD_OUT_START) if held_out else EpisodeSeeds.given(first))
        self._observation = {key: part.copy() for key, part in start.observation.items()}
        # What the reset did not begin by itself.
        others = {s: seeds[s] for s in self._active() if seeds[s] != (first + s if held_out else first)}
        self._begin(others)
        self._open([slot for slot in self._active() if slot not in others])

    @property
    def is_open(self) -> bool:
        return bool(self._active())

    def advance(self) -> None:
        """One step of every slot that plays."""
        active = self._active()
        playing: Playing = [
            (self._seeds[self._current[s]], int(self._lengths[s])) if s in self._running else None for s in range(self._num_slots)
        ]
        actions = self._actor.act(self._observation, playing)
        sent = list(range(self._num_slots)) if self._manager.spec.steps_together else active
        self._manager.send(sent, actions[sent])
        outcome = self._manager.recv(sent)
        self._take_outcome(outcome, sent)
        ended = {summary.slot: summary for summary in outcome.episodes if summary.slot in self._running}
        rewards = dict(zip(sent, outcome.reward.tolist(), strict=True))
        due = [slot for slot in active if slot in ended or self._lengths[slot] % self._stride == 0]
        self._take(due, rewards, actions)
        self._stride = thinned([*self._running.values(), *self._kept.values()], self._stride)
        for slot, summary in ended.items():
            self._finish(slot, summary)
        self._begin({slot: self._seeds[self._current[slot]] for slot in ended if self._current[slot] < len(self._seeds)})
        if self._manager.spec.steps_together:
            # Those that have played their share are stepped with the others, and must not be stepped beyond their end.
            resting = sorted(summary.slot for summary in outcome.episodes if summary.slot not in self._running)
            self._restart(resting, [self._seeds[-1]] * len(resting))

    def take_finished(self) -> list[FilmedEpisode]:
        """Those that ended with the last step."""
        finished, self._finished = self._finished, []
        return finished

    def shown(self) -> list[FilmedEpisode]:
        """What is left in the end."""
        positions = sorted(self._kept)
        if self._selection is not None and not self._selection.is_known_before:
            order = self._selection.ranked([self._kept[position].finished for position in positions])
            positions = [positions[index] for index in order]
        return [self._kept[position] for position in positions]

    def _active(self) -> list[int]:
        return [slot for slot, position in enumerate(self._current) if position < len(self._seeds)]

    def _take_outcome(self, outcome: StepBatch, sent: list[int]) -> None:
        for key, part in outcome.observation.items():
            self._observation[key][sent] = part
        if "text" in outcome.final_observation:
            texts = outcome.final_observation["text"]
            self._final_texts = {slot: str(texts[row]) for row, slot in enumerate(outcome.slots.tolist()) if outcome.done[row]}
        if outcome.aborted is not None and outcome.aborted.any():
            slot = int(outcome.slots[outcome.aborted][0])
            raise UserError(f"The episode of seed {self._seeds[self._current[slot]]} was given up: its simulator failed again and again.")
        for slot, reward in zip(sent, outcome.reward.tolist(), strict=True):
            if slot in self._running and (said := self._said(slot)):
                said[-1] = replace(said[-1], reward=reward, game_reward=reward)
                self._running[slot].spoken += said
        self._returns[sent] += outcome.reward
        self._lengths[sent] += 1
        self._success[sent] |= outcome.success

    def _said(self, slot: int) -> list[Turn]:
        """The answers that the last action was read from; empty unless the actor is a language agent."""
        return self._actor.spoken(slot) if isinstance(self._actor, EpisodicActor) else []

    def _finish(self, slot: int, summary: EpisodeSummary) -> None:
        episode = self._running.pop(slot)
        episode.summary = summary
        episode.final_text = self._final_texts.get(slot, "")
        if isinstance(task := summary.final_info.get("task"), str):
            episode.task = task
        self._finished.append(episode)
        self._kept[self._current[slot]] = episode
        self._current[slot] += self._num_slots
        selection = self._selection
        if selection is not None and not selection.is_known_before and len(self._kept) > selection.num_shown:
            del self._kept[max(self._kept, key=lambda position: selection.rank(self._kept[position].finished))]

    def _begin(self, seeds: dict[int, int]) -> None:
        if not seeds:
            return
        slots = sorted(seeds)
        self._restart(slots, [seeds[slot] for slot in slots])
        self._open(slots)

    def _restart(self, slots: list[int], seeds: list[int]) -> None:
        if not slots:
            return
        self._manager.begin(slots, seeds)
        for key, part in self._manager.recv(slots).observation.items():
            self._observation[key][slots] = part

    def _open(self, slots: list[int]) -> None:
        spec = self._manager.spec
        for slot in slots:
            self._returns[slot], self._lengths[slot], self._success[slot] = 0.0, 0, False
            told = self._observation.get("instruction")
            instruction = str(told[slot]) if told is not None and told.dtype == object else spec.instruction
            self._running[slot] = FilmedEpisode(self._seeds[self._current[slot]], spec.task, instruction)
        self._take(slots, {}, None)

    def _take(self, slots: list[int], rewards: dict[int, float], actions: np.ndarray | None) -> None:
        said = {slot: spoken for slot in slots if actions is not None and (spoken := self._said(slot))}
        values = self._actor.values(self._observation) if self._with_values and slots else None
        for slot in slots:
            (picture,) = self._manager.render([slot])
            views = np.split(picture, self._num_cameras) if self._num_cameras > 1 else [picture]
            episode = self._running[slot]
            episode.frames.append(beside_each_other(views, self._size))
            episode.moments.append(
                Moment(
                    step=int(self._lengths[slot]),
                    reward=rewards.get(slot, 0.0),
                    episode_return=float(self._returns[slot]),
                    success=bool(self._success[slot]),
                    value=None if values is None else float(values[slot]),
                    action=None if actions is None else np.array(actions[slot]),
                    answer=said[slot][-1].answer if slot in said else None,
                    log_prob=float(said[slot][-1].log_prob.sum(dtype=np.float64)) if slot in said else None,
                )
            )
