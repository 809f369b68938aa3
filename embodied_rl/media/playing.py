"""Filming: seeds are played as evaluation plays them, and every step leaves a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from embodied_rl.agents.agent import Answer, Prompt
from embodied_rl.agents.turns import Turn
from embodied_rl.errors import UserError
from embodied_rl.generation.base import ActedBatch, Generator, WrappedGenerator
from embodied_rl.generation.tokens import Completion
from embodied_rl.media.episodes import FilmedEpisode, Moment, Selection, beside_each_other, thinned
from embodied_rl.rollout.agent_generator import AgentGenerator
from embodied_rl.rollout.evaluation import Watcher, play_seeds
from embodied_rl.sim.manager import EnvManager
from embodied_rl.types import EpisodeSummary, Observation, StepBatch


class StepByStep(WrappedGenerator):
    """Hands out a policy's chunks step by step: each is played to its end without another look, as it is in training."""

    def __init__(self, generator: Generator) -> None:
        super().__init__(generator)
        self._acted: ActedBatch | None = None
        self._chunks: np.ndarray | None = None
        """[slots, K, A] of a policy that acts in chunks: what each slot is playing."""
        self._played = np.zeros(0, int)

    def begin(self, slots: Iterable[int]) -> None:
        super().begin(slots)
        if self._chunks is not None:
            self._played[list(slots)] = self._chunks.shape[1]

    def send(self, slots: np.ndarray, observation: Observation, noise: np.ndarray | None) -> None:
        due = slots >= 0 if self._chunks is None else self._played >= self._chunks.shape[1]
        if due.any():
            super().send(slots, observation, noise)
            self._acted = super().recv()
            given = self._acted.given
            if given is None or given.ndim < 3:
                return
            if self._chunks is None:
                self._chunks, self._played = given.copy(), np.zeros(len(given), int)
            self._chunks[due], self._played[due] = given[due], 0

    def recv(self) -> ActedBatch:
        assert self._acted is not None, "something was sent"
        if self._chunks is None:
            return self._acted
        self._played += 1
        return replace(self._acted, given=self._chunks[np.arange(len(self._played)), self._played - 1])


def film(
    manager: EnvManager,
    generator: Generator,
    seeds: Sequence[int],
    *,
    size: int,
    num_cameras: int = 1,
    selection: Selection | None = None,
    estimate: Callable[[Observation], np.ndarray] | None = None,
    on_episode: Callable[[EpisodeSummary], object] | None = None,
) -> list[FilmedEpisode]:
    """Play each seed once and keep a picture of every step.

    Of episodes longer than `MAX_STEPS_SHOWN` every second (fourth, …) step is kept, and of all others too: they run side by side.

    Args:
        manager: of a `FilmedSim` made with ``autoreset=False``, whose slots are then left in the middle of episodes.
        seeds: held-out ones, of the episodes; slot s plays seeds[s], seeds[s + num_slots], …
        size: pixels a side of one camera's picture.
        num_cameras: how many the simulator was made with.
        selection: keep only the best or worst of them, so that memory does not grow with the seeds; None: all.
        estimate: [slots] what the policy expects from here on; None: the pictures do not say.

    Returns:
        In the order of `seeds`; with a selection, in its order.

    Raises:
        UserError: an episode was given up because its simulator failed.
        SimFault: see `EnvManager`.
    """
    assert not manager.autoreset, "the last picture of an episode is taken before the next one begins"
    studio = _Studio(manager, seeds, size, num_cameras, selection, estimate, on_episode)
    if isinstance(generator, AgentGenerator):
        generator.on_answer = studio.listen
    play_seeds(manager, generator if generator.remembers else StepByStep(generator), seeds, studio)
    return studio.shown()


class _Studio(Watcher):
    """The pictures so far."""

    def __init__(
        self,
        manager: EnvManager,
        seeds: Sequence[int],
        size: int,
        num_cameras: int,
        selection: Selection | None,
        estimate: Callable[[Observation], np.ndarray] | None,
        on_episode: Callable[[EpisodeSummary], object] | None,
    ) -> None:
        self._manager, self._positions = manager, {seed: position for position, seed in enumerate(seeds)}
        self._size, self._num_cameras, self._selection = size, num_cameras, selection
        self._estimate, self._on_episode, self._stride = estimate, on_episode, 1
        self._returns, self._lengths = np.zeros(manager.num_slots), np.zeros(manager.num_slots, int)
        self._success = np.zeros(manager.num_slots, bool)
        self._running: dict[int, FilmedEpisode] = {}
        self._kept: dict[int, FilmedEpisode] = {}
        self._spoken: dict[int, list[Turn]] = {}
        """What each slot's action was read from, of a language agent."""

    def listen(self, slot: int, observation: str, prompt: Prompt, completion: Completion, answer: Answer) -> None:
        """A language agent's answer; see `AgentGenerator.on_answer`."""
        tokens = completion.token_ids, completion.log_prob, completion.version
        turn = Turn(observation, prompt.token_ids, *tokens, answer.text, answer.parsed, reward=0.0, game_reward=0.0)
        self._spoken.setdefault(slot, []).append(turn)

    def begun(self, slots: Sequence[int], seeds: Sequence[int], observation: Observation) -> None:
        spec = self._manager.spec
        for slot, seed in zip(slots, seeds, strict=True):
            self._returns[slot], self._lengths[slot], self._success[slot] = 0.0, 0, False
            told = observation.get("instruction")
            instruction = str(told[slot]) if told is not None and told.dtype == object else spec.instruction
            self._running[slot] = FilmedEpisode(seed, spec.task, instruction)
        self._take(slots, observation, {}, {})

    def stepped(self, actions: np.ndarray, outcome: StepBatch, observation: Observation, ended: Sequence[EpisodeSummary]) -> None:
        if outcome.aborted is not None and outcome.aborted.any():
            seed = self._running[int(outcome.slots[outcome.aborted][0])].seed
            raise UserError(f"The episode of seed {seed} was given up: its simulator failed again and again.")
        slots = outcome.slots.tolist()
        rewards = dict(zip(slots, outcome.reward.tolist(), strict=True))
        for slot, said in self._spoken.items():
            said[-1] = replace(said[-1], reward=rewards[slot], game_reward=rewards[slot])
            self._running[slot].spoken += said
        self._returns[slots] += outcome.reward
        self._lengths[slots] += 1
        self._success[slots] |= outcome.success
        over = {summary.slot: summary for summary in ended}
        due = [slot for slot in self._running if slot in over or self._lengths[slot] % self._stride == 0]
        self._take(due, observation, rewards, dict(zip(slots, actions, strict=True)))
        self._spoken.clear()
        self._stride = thinned([*self._running.values(), *self._kept.values()], self._stride)
        texts = outcome.final_observation.get("text")
        for slot, summary in over.items():
            self._finish(self._running.pop(slot), summary, "" if texts is None else str(texts[slots.index(slot)]))

    def shown(self) -> list[FilmedEpisode]:
        """What is left in the end."""
        positions = sorted(self._kept)
        if self._selection is not None and not self._selection.is_known_before:
            order = self._selection.ranked([self._kept[position].finished for position in positions])
            positions = [positions[index] for index in order]
        return [self._kept[position] for position in positions]

    def _finish(self, episode: FilmedEpisode, summary: EpisodeSummary, final_text: str) -> None:
        episode.summary, episode.final_text = summary, final_text
        if isinstance(task := summary.final_info.get("task"), str):
            episode.task = task
        self._kept[self._positions[episode.seed]] = episode
        selection = self._selection
        if selection is not None and not selection.is_known_before and len(self._kept) > selection.num_shown:
            del self._kept[max(self._kept, key=lambda position: selection.rank(self._kept[position].finished))]
        if self._on_episode is not None:
            self._on_episode(summary)

    def _take(self, slots: Sequence[int], observation: Observation, rewards: dict[int, float], actions: dict[int, np.ndarray]) -> None:
        values = self._estimate(observation) if self._estimate is not None and slots else None
        for slot in slots:
            (picture,) = self._manager.render([slot])
            views = np.split(picture, self._num_cameras) if self._num_cameras > 1 else [picture]
            episode, said = self._running[slot], self._spoken.get(slot)
            episode.frames.append(beside_each_other(views, self._size))
            episode.moments.append(
                Moment(
                    step=int(self._lengths[slot]),
                    reward=rewards.get(slot, 0.0),
                    episode_return=float(self._returns[slot]),
                    success=bool(self._success[slot]),
                    value=None if values is None else float(values[slot]),
                    action=np.array(actions[slot]) if slot in actions else None,
                    answer=said[-1].answer if said else None,
                    log_prob=float(said[-1].log_prob.sum(dtype=np.float64)) if said else None,
                )
            )
