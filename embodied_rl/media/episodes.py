"""Pictures of played and recorded episodes, the facts known at each of them, and the choice of episodes to show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from embodied_rl.agents.agent import Answer, Prompt
from embodied_rl.agents.turns import Turn
from embodied_rl.bounds import whole_number
from embodied_rl.episodes.recording import RecordedEpisode, Recording
from embodied_rl.episodes.sink import Sink
from embodied_rl.errors import UserError, require_known
from embodied_rl.generation.base import ActedBatch, Generator
from embodied_rl.generation.random_backend import WrappedGenerator
from embodied_rl.generation.tokens import Completion
from embodied_rl.rollout.evaluation import Watcher, play_seeds
from embodied_rl.sim.manager import EnvManager
from embodied_rl.types import EpisodeSummary, Observation, StepBatch
from embodied_rl.video import fit_square

Kind = Literal["first", "best", "worst", "random"]
KINDS: tuple[Kind, ...] = ("first", "best", "worst", "random")
PLAYED_FOR_EACH = 4
"""Episodes that are played for each one shown, if the best or worst are selected."""


@dataclass(frozen=True)
class Selection:
    """Which episodes are shown. Raises UserError for an impossible choice."""

    kind: Kind
    num_shown: int
    among: int
    """Episodes to choose from, played or recorded."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_shown <= self.among:
            raise UserError(f"select={self.kind}:{self.num_shown}: between 1 and among={self.among} episodes can be shown.")

    @staticmethod
    def parse(text: str, num_shown: int | None, among: int | None) -> Selection:
        """Parse ``best`` or ``best:4``. Raises UserError for anything else.

        Args:
            text: a kind, optionally with a colon and the number of episodes shown.
            num_shown: number if the text has none; None: 4.
            among: episodes to choose from; None: four times as many as are shown, or only those shown for ``first``, which chooses nothing.
        """
        kind, colon, count = text.partition(":")
        require_known(kind, KINDS, f"select={text}: '{kind}' is not a choice.")
        shown = whole_number(count) if colon else num_shown or 4
        if not shown:
            raise UserError(f"select={text}: '{count}' is not a number of episodes; write for example select={kind}:4.")
        if num_shown not in (None, shown):
            raise UserError(f"select={text} and num_episodes={num_shown} contradict each other: leave out one of them.")
        if kind == "first" and among is not None:
            raise UserError(f"among={among} has no effect with select={text}: choose best, worst or random, or leave it out.")
        wanted = shown if kind == "first" else PLAYED_FOR_EACH * shown
        return Selection(next(known for known in KINDS if known == kind), shown, wanted if among is None else among)

    @property
    def is_known_before(self) -> bool:
        """Whether the choice is independent of the episodes' results."""
        return self.kind in ("first", "random")

    def positions(self, seed: int) -> list[int]:
        """Which of 0 … among - 1 are shown, ascending, if `is_known_before`; random ones follow from `seed`."""
        assert self.is_known_before, f"select={self.kind} is known after playing"
        if self.kind == "first":
            return list(range(self.num_shown))
        chosen = np.random.default_rng(seed).choice(self.among, self.num_shown, replace=False)
        return sorted(int(position) for position in chosen)

    @property
    def rank(self) -> Callable[[EpisodeSummary], tuple[float, ...]]:
        """Sort key of episodes, those to be shown first: success, then return; then the smaller seed."""
        sign = -1.0 if self.kind == "best" else 1.0
        return lambda episode: (sign * episode.success_once, sign * episode.episode_return, episode.seed)

    def ranked(self, episodes: Sequence[EpisodeSummary]) -> list[int]:
        """Positions of the `num_shown` best (worst) of finished episodes, in that order."""
        order = sorted(range(len(episodes)), key=lambda position: self.rank(episodes[position]))
        return order[: self.num_shown]


MAX_STEPS_SHOWN = 250
"""Most steps of an episode with a picture; longer ones are all shown faster: every second step, every fourth, …"""
MAX_BYTES = 2**30
"""Most bytes of all pictures in memory; beyond, steps are dropped in the same way."""


@dataclass(frozen=True)
class Moment:
    """Facts known when a picture is taken."""

    step: int
    reward: float
    """Reward of the last step; 0 before the first."""
    episode_return: float
    """Sum of the rewards so far."""
    success: bool
    """Success at any step so far."""
    value: float | None = None
    """Policy's estimate of the return still to come; None: unknown."""
    action: np.ndarray | None = None
    """[A] action that led here, in the simulator's units; None before the first step."""
    answer: str | None = None
    """Language agent's answer that led here; None for others, and before the first step."""
    log_prob: float | None = None
    """Log-probability of that answer: the sum over its tokens."""


@dataclass
class FilmedEpisode:
    """One episode's pictures."""

    seed: int
    task: str
    instruction: str | None = None
    frames: list[np.ndarray] = field(default_factory=list)
    """Each [size, cameras · size, 3] uint8, the cameras side by side; the last one is the episode's last moment."""
    moments: list[Moment] = field(default_factory=list)
    """One moment for each picture."""
    summary: EpisodeSummary | None = None
    """Summary of the episode; None while it is running."""
    spoken: list[Turn] = field(default_factory=list)
    """Language agent's answers; empty for others. Of several in one step (calls of tools) the last one has the step's reward."""
    final_text: str = ""
    """Last observation of a text environment."""

    @property
    def finished(self) -> EpisodeSummary:
        """The summary of an episode that has ended."""
        assert self.summary is not None, "the episode has not ended"
        return self.summary

    @property
    def num_bytes(self) -> int:
        """Bytes of its pictures."""
        return sum(frame.nbytes for frame in self.frames)

    def thin(self, stride: int) -> None:
        """Keep the pictures of every `stride`-th step, and the last one of an ended episode."""
        last = len(self.moments) - 1 if self.summary is not None else None
        kept = [index for index, moment in enumerate(self.moments) if moment.step % stride == 0 or index == last]
        self.frames, self.moments = [self.frames[index] for index in kept], [self.moments[index] for index in kept]


def beside_each_other(views: Sequence[np.ndarray], size: int) -> np.ndarray:
    """One picture [size, cameras · size, 3] of pictures [H, W, 3] uint8 of any size, with their shapes kept."""
    return np.concatenate([fit_square(np.ascontiguousarray(picture), size) for picture in views], axis=1)


def summaries(recording: Recording) -> list[EpisodeSummary]:
    """Facts about every episode that need no reading of it."""
    return [_summary(recording, number) for number in range(len(recording))]


def _summary(recording: Recording, number: int, terminated: bool = False) -> EpisodeSummary:
    table = recording.table
    return EpisodeSummary(
        slot=0,
        index=number,
        seed=int(table.seeds[number]),
        episode_return=float(table.returns[number]),
        length=int(table.lengths[number]),
        success_once=bool(table.success_once[number]),
        success_at_end=bool(table.success_at_end[number]),
        terminated=terminated,
    )


def recorded_cameras(episode: RecordedEpisode) -> dict[str, Any]:
    """{name: pictures [T + 1, H, W, 3] uint8}: those for people, then the policy's."""
    seen = {key: part for key, part in episode.observation.items() if part.dtype == np.uint8 and part.ndim == 4 and part.shape[-1] == 3}
    return {**episode.images, **seen}


def choose_cameras(wanted: Sequence[str], known: Mapping[str, Any], recording: Recording) -> tuple[str, ...]:
    """Cameras to show; by default the first recorded one. Raises UserError for an unknown camera."""
    if not wanted or list(wanted) == ["default"]:
        return tuple(known)[:1]
    for camera in wanted:
        require_known(camera, known, f"'{recording.path}' has no pictures of camera '{camera}'.")
    return tuple(wanted)


def stride_of(lengths: Sequence[int], bytes_per_picture: int) -> int:
    """Steps between pictures, a power of two, so that neither the longest episode nor all together have too many; each shows its ends."""
    stride, longest = 1, max(lengths)
    while longest // stride > MAX_STEPS_SHOWN or (
        stride < longest and sum(length // stride + 2 for length in lengths) * bytes_per_picture > MAX_BYTES
    ):
        stride *= 2
    return stride


def from_pictures(
    recording: Recording, number: int, views: Mapping[str, Any], episode: RecordedEpisode, *, size: int, stride: int
) -> FilmedEpisode:
    """A recorded episode with pictures {camera: [T + 1, H, W, 3] uint8}, every `stride`-th step and the last shown."""
    steps = sorted({*range(0, episode.num_steps, stride), episode.num_steps})
    filmed = _empty(recording, number, episode)
    for step in steps:
        filmed.frames.append(beside_each_other([np.asarray(view[step]) for view in views.values()], size))
        filmed.moments.append(moment_of(episode, step))
    return filmed


def moment_of(episode: RecordedEpisode, step: int) -> Moment:
    """Facts known after `step` steps."""
    value = None if episode.value is None or step == episode.num_steps else float(episode.value[step])
    action = np.array(episode.action[step - 1]) if step and episode.action.dtype != object else None
    return Moment(
        step=step,
        reward=float(episode.reward[step - 1]) if step else 0.0,
        episode_return=float(episode.reward[:step].sum(dtype=np.float64)),
        success=bool(episode.success[:step].any()),
        value=value,
        action=action,
    )


class PictureSink(Sink):
    """Keeps only the pictures of a replayed episode."""

    def __init__(self, recording: Recording, number: int, episode: RecordedEpisode, size: int, stride: int) -> None:
        self.filmed = _empty(recording, number, episode)
        self._episode, self._size, self._stride, self._step = episode, size, stride, 0

    def begin(self, row: Mapping[str, Any]) -> None:
        self._keep(row)

    def append(self, row: dict[str, Any], snapshot: bytes | None = None) -> None:
        self._step += 1
        if self._step % self._stride == 0 or self._step == self._episode.num_steps:
            self._keep(row)

    def finish(self, metadata: Mapping[str, Any] | None = None) -> int:
        return 0

    def discard(self) -> None:
        """Keep the pictures so far: they show how far the replay came."""

    def _keep(self, row: Mapping[str, Any]) -> None:
        # The replay's own picture comes last; the others were recorded.
        self.filmed.frames.append(beside_each_other([row[name] for name in row if name.startswith("images.")][-1:], self._size))
        self.filmed.moments.append(moment_of(self._episode, self._step))


def _empty(recording: Recording, number: int, episode: RecordedEpisode) -> FilmedEpisode:
    spec, summary = recording.spec, _summary(recording, number, terminated=bool(episode.terminated[-1]))
    return FilmedEpisode(episode.seed, episode.task or spec.task, episode.instruction or spec.instruction, summary=summary)


# ---- filming: plays seeds as evaluation does, with a picture of every step --------------------------------------------


class StepByStep(WrappedGenerator):
    """Plays a policy's chunks step by step: each is played to its end without a new observation, as in training."""

    def __init__(self, generator: Generator) -> None:
        super().__init__(generator)
        self._acted: ActedBatch | None = None
        self._chunks: np.ndarray | None = None
        """[slots, K, A] chunk that each slot is playing, for a policy that acts in chunks."""
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

    If an episode is longer than `MAX_STEPS_SHOWN`, every second (fourth, …) step of all episodes is kept, because they run side by side.

    Args:
        manager: manager of a `FilmedSim` made with ``autoreset=False``, whose slots are left in the middle of episodes.
        seeds: held-out seeds of the episodes; slot s plays seeds[s], seeds[s + num_slots], …
        num_cameras: cameras with which the simulator was made.
        selection: keep only the best or worst of them, so that memory does not grow with the seeds; None: all.
        estimate: [slots] expected return from here on; None: the pictures do not show it.

    Returns them in the order of `seeds`, or in the selection's order.

    Raises UserError: an episode was given up because its simulator failed; SimFault: see `EnvManager`.
    """
    assert not manager.autoreset, "the last picture of an episode is taken before the next one begins"
    studio = _Studio(manager, seeds, size, num_cameras, selection or Selection("first", len(seeds), len(seeds)), estimate, on_episode)
    generator.on_answer = studio.listen
    play_seeds(manager, generator if generator.remembers else StepByStep(generator), seeds, studio)
    return studio.shown()


@dataclass
class _Studio(Watcher):
    """The pictures so far; see `film`."""

    manager: EnvManager
    seeds: Sequence[int]
    size: int
    num_cameras: int
    selection: Selection
    estimate: Callable[[Observation], np.ndarray] | None
    on_episode: Callable[[EpisodeSummary], object] | None

    def __post_init__(self) -> None:
        self._stride = 1
        self._running: dict[int, FilmedEpisode] = {}
        self._now: dict[int, Moment] = {}
        """Present moment of each running episode, without the policy's estimate."""
        self._kept: dict[int, FilmedEpisode] = {}
        self._spoken: dict[int, list[Turn]] = {}
        """Language agent's answers from which each slot's action was read."""

    def listen(self, slot: int, observation: str, prompt: Prompt, completion: Completion, answer: Answer) -> None:
        """Record a language agent's answer; see `AgentGenerator.on_answer`."""
        tokens = completion.token_ids, completion.log_prob, completion.version
        turn = Turn(observation, prompt.token_ids, *tokens, answer.text, answer.parsed, reward=0.0, game_reward=0.0)
        self._spoken.setdefault(slot, []).append(turn)

    def begun(self, slots: Sequence[int], seeds: Sequence[int], observation: Observation) -> None:
        spec = self.manager.spec
        for slot, seed in zip(slots, seeds, strict=True):
            instructions = observation.get("instruction")
            instruction = str(instructions[slot]) if instructions is not None and instructions.dtype == object else spec.instruction
            self._running[slot], self._now[slot] = FilmedEpisode(seed, spec.task, instruction), Moment(0, 0.0, 0.0, success=False)
        self._take(slots, observation)

    def stepped(self, actions: np.ndarray, outcome: StepBatch, observation: Observation, ended: Sequence[EpisodeSummary]) -> None:
        if outcome.aborted is not None and outcome.aborted.any():
            seed = self._running[int(outcome.slots[outcome.aborted][0])].seed
            raise UserError(f"The episode of seed {seed} was given up: its simulator failed repeatedly.")
        slots = outcome.slots.tolist()
        for slot, action, reward, success in zip(slots, actions, outcome.reward.tolist(), outcome.success.tolist(), strict=True):
            if slot not in self._running:
                continue
            before, said = self._now[slot], self._spoken.pop(slot, [])
            if said:
                said[-1] = replace(said[-1], reward=reward, game_reward=reward)
                self._running[slot].spoken += said
            self._now[slot] = Moment(
                step=before.step + 1,
                reward=reward,
                episode_return=before.episode_return + reward,
                success=before.success or success,
                action=np.array(action),
                answer=said[-1].answer if said else None,
                log_prob=float(said[-1].log_prob.sum(dtype=np.float64)) if said else None,
            )
        over = {summary.slot: summary for summary in ended}
        self._take([slot for slot in self._running if slot in over or self._now[slot].step % self._stride == 0], observation)
        episodes = [*self._running.values(), *self._kept.values()]
        longest = max((len(each.frames) for each in episodes), default=0)
        if longest > MAX_STEPS_SHOWN + 1 or sum(each.num_bytes for each in episodes) > MAX_BYTES:
            self._stride *= 2
            for each in episodes:
                each.thin(self._stride)
        texts = outcome.final_observation.get("text")
        for slot, summary in over.items():
            self._finish(self._running.pop(slot), summary, "" if texts is None else str(texts[slots.index(slot)]))

    def shown(self) -> list[FilmedEpisode]:
        episodes = [self._kept[seed] for seed in self.seeds if seed in self._kept]
        if self.selection.is_known_before:
            return episodes
        return [episodes[index] for index in self.selection.ranked([episode.finished for episode in episodes])]

    def _finish(self, episode: FilmedEpisode, summary: EpisodeSummary, final_text: str) -> None:
        episode.summary, episode.final_text = summary, final_text
        if isinstance(task := summary.final_info.get("task"), str):
            episode.task = task
        self._kept[episode.seed] = episode
        if not self.selection.is_known_before and len(self._kept) > self.selection.num_shown:
            del self._kept[max(self._kept, key=lambda seed: self.selection.rank(self._kept[seed].finished))]
        if self.on_episode is not None:
            self.on_episode(summary)

    def _take(self, slots: Sequence[int], observation: Observation) -> None:
        values = self.estimate(observation) if self.estimate is not None and slots else None
        for slot, picture in zip(slots, self.manager.render(slots), strict=True):
            views = np.split(picture, self.num_cameras) if self.num_cameras > 1 else [picture]
            self._running[slot].frames.append(beside_each_other(views, self.size))
            self._running[slot].moments.append(replace(self._now[slot], value=None if values is None else float(values[slot])))
