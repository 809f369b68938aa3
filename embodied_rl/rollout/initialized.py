"""Initialized sampling: groups that start from a snapshot inside an expert's or an earlier episode (IPA; ROME, Wang et al. 2025).

If success is so rare that ordinary episodes teach nothing, an episode that begins shortly before a known success teaches its last part.
Once that part is learned, episodes begin a little earlier (Salimans & Chen 2018, arXiv:1812.03381, for demonstrations).

`StartLibrary` holds the source episodes and decides where each group starts. It applies the outcomes of a group at the next publication of
weights. So the start of group n is a function of (run seed, n, the library's state at a publication), whatever the order in which episodes
arrive; groups in flight keep their start in a checkpoint.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from embodied_rl.config import InitializedConfig
from embodied_rl.errors import IncompatibleCheckpointError
from embodied_rl.rollout.evaluation import PlayedEpisode, play_each
from embodied_rl.rollout.groups import Assignment
from embodied_rl.rollout.observations import copied
from embodied_rl.sim.episode_log import Snapshot
from embodied_rl.sim.instrumented import EXPERT, Expert, plain_snapshot
from embodied_rl.sim.seeding import EpisodeSeeds, SeedStream
from embodied_rl.sim.simulators import Simulators
from embodied_rl.sim.snapshots import decode_state, encode_state
from embodied_rl.statistics import wilson_interval
from embodied_rl.types import EpisodeSummary


@dataclass(frozen=True, eq=False)
class SourceEpisode:
    """Episode of T messages, up to its first success, inside which others may start: an expert's, or one of the run.

    It keeps its seed and messages, which reproduce every point of it in a deterministic simulator, and the recorded states if the simulator
    saves its state. Both make a `Snapshot`, for simulators and text environments alike.
    """

    origin: Literal["expert", "own"]
    seed: int
    actions: tuple[Any, ...]
    """[T] messages in the simulator's units: actions [A], chunks [k, A] or texts."""
    episode_return: float
    success: bool
    states: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """{messages before it: base of a `Snapshot`} for the recorded simulator states."""
    seen: Mapping[int, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    """{messages before it: observation} to compare a replay with; not saved."""
    said: tuple[tuple[str, np.ndarray | None], ...] = ()
    """[T] for a language agent: (text shown before a message, tokens of the answer), from which a conversation is rebuilt; tokens None: a
    scripted player's answer, which is the message itself."""
    pictures: tuple[tuple[np.ndarray, ...], ...] = field(default=(), repr=False)
    """[T] for a language agent with vision: pictures shown before each message."""

    @property
    def num_messages(self) -> int:
        """Number of messages, T."""
        return len(self.actions)

    def snapshot(self, step: int, *, task: str, chunk_size: int = 1) -> Snapshot:
        """Snapshot after `step` messages: the last recorded state before it, or the seed, and the messages since.
        Raises ValueError for a step outside 0 … T - 1."""
        if not 0 <= step < self.num_messages:
            raise ValueError(f"An episode of {self.num_messages} messages has no start after {step} of them.")
        base_step = max((at for at in self.states if at <= step), default=None)
        base = None if base_step is None else self.states[base_step]
        return Snapshot(
            task=task,
            chunk_size=chunk_size,
            stream=SeedStream(EpisodeSeeds.given(self.seed), 0, 0, 1),
            index=0,
            base=base,
            options={},
            actions=self.actions[base_step or 0 : step],
            observation=self.seen.get(step, base["observation"] if base is not None and base_step == step else {}),
        )

    def to_text(self) -> str:
        """Text for JSON: the snapshot format in base 64."""
        tree = {name: value for name, value in vars(self).items() if name != "seen"}
        tree["states"] = {step: dict(state) for step, state in self.states.items()}
        return base64.b64encode(encode_state(tree)).decode("ascii")

    @staticmethod
    def from_text(text: str) -> SourceEpisode:
        """Inverse of `to_text`. Raises SnapshotError for any other text."""
        return SourceEpisode(**decode_state(base64.b64decode(text)))


def record_expert(
    manager: Simulators, make_expert: Callable[[], Expert], seeds: Sequence[int], *, every: int, picture_keys: Sequence[str] = ()
) -> tuple[list[SourceEpisode], int]:
    """Let an expert play each of these seeds, in all slots, and record it.

    Args:
        manager: manager with ``autoreset=False``; its running episodes are lost.
        make_expert: called once per episode, so that an expert may have memory; `shown_expert` if the simulator's own process has one.
        every: messages between recorded states, if the simulator saves its state.
        picture_keys: parts of an observation that a language agent sees.

    Returns:
        The episodes, successful or not, in the order of seeds (without those that the simulator gave up), and the number of messages
        played.
    """
    found: list[SourceEpisode] = []
    num_messages = 0
    for first in range(0, len(seeds), manager.num_slots):
        chosen = seeds[first : first + manager.num_slots]
        experts = [make_expert() for _ in chosen]
        for episode, states in _play_experts(manager, experts, chosen, every, picture_keys):
            num_messages += len(episode.actions)
            if (summary := episode.summary) is not None:
                actions = tuple(episode.actions[: episode.success_at])
                spoken = [seen for seen in episode.seen[: len(actions)] if seen]
                said = tuple((seen["text"], None) for seen in spoken)
                result = summary.episode_return, summary.success_once
                pictures = tuple(seen["pictures"] for seen in spoken)
                found.append(SourceEpisode("expert", episode.seed, actions, *result, states, said=said, pictures=pictures))
    return found, num_messages


def _play_experts(
    manager: Simulators, experts: Sequence[Expert], seeds: Sequence[int], every: int, picture_keys: Sequence[str]
) -> list[tuple[PlayedEpisode, dict[int, Mapping[str, Any]]]]:
    """(episode, {messages before it: recorded state}) of each expert, as `record_expert` wants them."""
    keeps_states, is_text = manager.spec.snapshots in ("exact", "approximate"), manager.spec.action.kind == "text"
    states: list[dict[int, Mapping[str, Any]]] = [{} for _ in seeds]

    def keep(seen: dict[str, Any]) -> dict[str, Any]:
        pictures = tuple(np.array(seen[key], np.uint8) for key in picture_keys)
        return {"text": str(seen["text"]), "pictures": pictures} if is_text else {}

    def keep_states(going: dict[int, PlayedEpisode]) -> None:
        # After the first success no episode can start.
        due = [slot for slot, one in going.items() if keeps_states and one.success_at is None and len(one.actions) % every == 0]
        for slot, snapshot in zip(due, manager.snapshot(due) if due else (), strict=True):
            assert snapshot.base is not None, "a state was asked for"
            states[slot][len(going[slot].actions)] = plain_snapshot(snapshot).base or {}

    played = play_each(manager, seeds, lambda slot, seen: experts[slot](seen), keep, keep_states)
    return list(zip(played, states, strict=True))


def shown_expert() -> Expert:
    """Expert that plays what an `instrumented` simulator's own expert shows; called once per episode, like any other."""
    return lambda observation: observation[EXPERT]


@dataclass(frozen=True)
class ChunkEffect:
    """Effect of one chunk of an episode on the chance of success."""

    first: int
    """Number of messages before the chunk."""
    stop: int
    """Number of messages up to and including the chunk."""
    effect: float
    """Success rate after the chunk minus that before it, in [-1, 1]."""
    low: float
    """Lower end of the effect's confidence interval."""
    high: float
    is_crucial: bool


def success_difference(before: tuple[int, int], after: tuple[int, int], *, confidence: float = 0.95) -> tuple[float, float, float]:
    """Difference of two success rates: (estimate, low, high); low = d - √((p₁ - l₁)² + (u₂ - p₂)²), high likewise; index 1 is after.

    Args:
        before, after: (successes, episodes), at least one episode each.
        confidence: nominal coverage, between 0 and 1.

    Raises ValueError: no episodes, impossible counts, or a confidence out of range.
    """
    if before[1] < 1 or after[1] < 1:
        raise ValueError(f"a difference of success rates needs episodes on both sides, got {before[1]} before and {after[1]} after")
    rate_before, rate_after = before[0] / before[1], after[0] / after[1]
    low_before, high_before = wilson_interval(*before, confidence=confidence)
    low_after, high_after = wilson_interval(*after, confidence=confidence)
    effect = rate_after - rate_before
    low = effect - math.hypot(rate_after - low_after, high_before - rate_before)
    high = effect + math.hypot(high_after - rate_after, rate_before - low_before)
    return effect, max(-1.0, low), min(1.0, high)


def chunk_effects(
    outcomes: Mapping[int, tuple[int, int]], *, min_episodes: int = 8, effect: float = 0.3, confidence: float = 0.95
) -> list[ChunkEffect]:
    """Effects of the chunks between neighbouring starts of one episode that have enough episodes, ascending.

    A chunk is crucial if success after it exceeds success before it by at least `effect`, and the confidence interval of the difference
    lies above 0.

    Args:
        outcomes: {messages before the start: (successes, episodes)}.
        min_episodes: episodes needed from both starts to judge a chunk.

    Raises ValueError: see `success_difference`.
    """
    judged = [(step, counts) for step, counts in sorted(outcomes.items()) if counts[1] >= max(1, min_episodes)]
    found = []
    for (first, before), (stop, after) in itertools.pairwise(judged):
        estimate, low, high = success_difference(before, after, confidence=confidence)
        found.append(ChunkEffect(first, stop, estimate, low, high, estimate >= effect and low > 0))
    return found


_FORMAT_VERSION = 1
_WINDOW = 64
"""Number of latest outcomes in a start's success rate; older ones belong to an older policy."""


@dataclass(frozen=True)
class Start:
    """Start of a group's episodes inside a source episode."""

    source: int
    """Key of the source episode in the library."""
    step: int
    """Number of its messages before the start."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of one episode, kept by the library until its group is done."""

    group: int
    member: int
    start: Start | None
    success: bool
    candidate: SourceEpisode | None
    """The whole episode, if others may start in it."""


@dataclass(frozen=True)
class Lesson:
    """Outcomes that a library applied at a publication; copies elsewhere apply the same and stay equal."""

    done: list[Outcome]
    """Outcomes of the finished groups, by group and member."""
    held: list[int]
    """Keys of the sources in which episodes of other groups run."""


@dataclass
class TrackedSource:
    """A source episode, with the outcomes of episodes that started in it."""

    source: SourceEpisode
    position: int
    """rollback: messages before the current start; 0: rolled back to its beginning, so no longer used."""
    outcomes: dict[int, deque[bool]] = field(default_factory=dict)
    """{messages before the start: latest outcomes}"""
    since_moved: deque[bool] = field(default_factory=deque)
    """rollback: latest outcomes from the current start."""

    def counts(self) -> dict[int, tuple[int, int]]:
        """{messages before the start: (successes, episodes)} of the latest outcomes."""
        return {step: (sum(outcomes), len(outcomes)) for step, outcomes in sorted(self.outcomes.items())}


@dataclass
class ReplayFigures:
    """Cost of replaying to the starts, and whether the replays matched."""

    num_messages: int = 0
    """Number of replayed messages; no other count of steps includes them."""
    num_mismatches: int = 0
    """Number of starts with another observation than before: the simulator depends on more than its seed and actions."""
    max_drift: float = 0.0
    """Largest finite difference of an observation."""


@dataclass(frozen=True)
class Report:
    """Changes in a copy since its last report."""

    outcomes: list[Outcome]
    assigned: dict[int, Start | None]
    """{group: start} of all groups that have a start there."""
    replay: ReplayFigures


class StartLibrary:
    """Source episodes, the outcomes of starts inside them, and each group's start.

    Rollout workers elsewhere use copies, which `report` to the trainer's library and `learn` what it committed.
    """

    def __init__(self, config: InitializedConfig, *, seed: int) -> None:
        """`seed`: the run's seed."""
        self.config, self.seed = config, seed
        self.sources: dict[int, TrackedSource] = {}
        self.num_expert_messages = 0
        """Number of messages that the expert played; no other count of steps includes them."""
        self.replay = ReplayFigures()
        self._next_key = 0
        self._retired: dict[int, TrackedSource] = {}
        """Removed sources in which an episode of this copy still runs."""
        self._assigned: dict[int, Start | None] = {}
        self._outcomes: list[Outcome] = []

    # --- which start -------------------------------------------------------------------------------------------------

    def start_of(self, group: int) -> Start | None:
        """Start of a group, the same for all its members and retries; None: an ordinary start from its own seed."""
        if group not in self._assigned:
            self._assigned[group] = self._choose(group)
        return self._assigned[group]

    def _choose(self, group: int) -> Start | None:
        active = [key for key, tracked in sorted(self.sources.items()) if self.starts_of(tracked)]
        if not active or self._uniform(group, "share") >= self.config.share:
            return None
        key = active[int(self._uniform(group, "source") * len(active))]
        steps = self.starts_of(self.sources[key])
        return Start(key, steps[int(self._uniform(group, "start") * len(steps))])

    def starts_of(self, tracked: TrackedSource) -> list[int]:
        """Messages before each start that a group may get now; empty if the episode is no longer used."""
        steps = self.boundaries(tracked.source)
        if self.config.mode == "rollback":
            return [tracked.position] if tracked.position > 0 else []
        if self.config.anchors == "uniform" and len(steps) > self.config.num_anchors:
            picked = np.linspace(0, len(steps) - 1, self.config.num_anchors).round().astype(int)
            return [steps[index] for index in picked]
        if self.config.anchors == "crucial":
            crucial = [chunk for chunk in self.effects(tracked) if chunk.is_crucial and chunk.first > 0]
            if crucial:
                return [max(crucial, key=lambda chunk: chunk.effect).first]
        return steps

    def boundaries(self, source: SourceEpisode) -> list[int]:
        """Message counts between the chunks of an episode, without its beginning, where ordinary episodes start."""
        return list(range(self.config.chunk_steps, source.num_messages, self.config.chunk_steps))

    def effects(self, tracked: TrackedSource) -> list[ChunkEffect]:
        """Known effect of each chunk of an episode on the chance of success."""
        return chunk_effects(tracked.counts(), min_episodes=self.config.min_episodes, effect=self.config.crucial_effect)

    def _uniform(self, group: int, purpose: str) -> float:
        """Number in [0, 1): a hash of only (run seed, group, purpose)."""
        digest = hashlib.blake2b(f"start/{self.seed}/{group}/{purpose}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53

    # --- what came of it ---------------------------------------------------------------------------------------------

    def add(self, sources: Sequence[SourceEpisode], *, num_messages: int = 0) -> None:
        """Add an expert's episodes, which stay; `num_messages`: messages that the expert played for them."""
        self.num_expert_messages += num_messages
        for source in sources:
            self._insert(source)

    def is_success(self, success: bool, episode_return: float) -> bool:
        """Whether a whole episode counts as successful, by the simulator's success or by its return."""
        return success if self.config.success_return is None else episode_return >= self.config.success_return

    def wants(self, success: bool) -> bool:
        """Whether an episode of the run may become a source."""
        return "best" in self.config.sources or ("success" in self.config.sources and success)

    def source_of(self, start: Start) -> SourceEpisode:
        key = start.source
        return (self.sources[key] if key in self.sources else self._retired[key]).source

    def played(
        self,
        whose: Assignment,
        start: Start | None,
        summary: EpisodeSummary | None,
        *,
        given: Sequence[Any] = (),
        seen: Mapping[int, Mapping[str, Any]] | None = None,
        said: Sequence[tuple[str, np.ndarray | None]] = (),
        pictures: Sequence[tuple[np.ndarray, ...]] = (),
    ) -> None:
        """Note the outcome of an episode; the library applies it when its group is done.

        Args:
            summary: summary of the whole episode, including what came before the start; None: given up before its end, without success.
            given: messages since the start, up to the first success.
            seen: {messages since the start: observation before the next message}.
            said, pictures: a language agent's, for each of `given`; see `SourceEpisode`.
        """
        success, candidate = False, None
        if summary is not None:
            success = self.is_success(summary.success_once, summary.episode_return)
        if summary is not None and self.wants(success):
            source = None if start is None else self.source_of(start)
            step = 0 if start is None else start.step
            before = () if source is None else source.actions[:step]
            spoken, showed = ((), ()) if source is None else (source.said[:step], source.pictures[:step])
            actions, shown = (*before, *given), seen or {}
            places = range(self.config.chunk_steps, len(actions), self.config.chunk_steps)
            candidate = SourceEpisode(
                "own",
                whose.seed if source is None else source.seed,
                actions,
                summary.episode_return,
                success,
                seen={at: shown[at - step] for at in places if at >= step},
                said=(*spoken, *said),
                pictures=(*showed, *pictures),
            )
        self.finished(Outcome(whose.group, whose.member, start, success, candidate))

    def finished(self, outcome: Outcome) -> None:
        """Note the outcome of an episode; the library applies it when its group is done (`commit`)."""
        self._outcomes.append(outcome)

    def commit(self, in_flight: Collection[int] | None = None) -> Lesson:
        """Learn from the groups that are done, however they ended: all whose number is not in `in_flight`. None: all that have an outcome,
        for episodes with a number of their own."""
        waiting = self._assigned.keys() - {one.group for one in self._outcomes} if in_flight is None else set(in_flight)
        done = sorted((one for one in self._outcomes if one.group not in waiting), key=lambda one: (one.group, one.member))
        self._outcomes = [one for one in self._outcomes if one.group in waiting]
        lesson = Lesson(done, sorted(self._used(waiting) & self.sources.keys()))
        self.learn(lesson, waiting)
        return lesson

    def learn(self, lesson: Lesson, in_flight: Collection[int] | None = None) -> None:
        """Apply a lesson that another copy committed; `in_flight`: the groups played here, see `commit`."""
        if in_flight is None:
            in_flight = self._assigned.keys() - {one.group for one in (*self._outcomes, *lesson.done)}
        self._assigned = {group: start for group, start in self._assigned.items() if group in in_flight}
        done, held = lesson.done, set(lesson.held)
        for one in done:
            if one.start is not None and one.start.source in self.sources:
                self._count(self.sources[one.start.source], one.start.step, one.success)
        if self.config.mode == "rollback":
            for tracked in self.sources.values():
                self._roll_back(tracked)
        for one in done:
            if one.candidate is not None:
                self._offer(one.candidate, held)
        used = self._used(in_flight)
        self._retired = {key: tracked for key, tracked in self._retired.items() if key in used}

    def _used(self, groups: Collection[int]) -> set[int]:
        """Keys of the sources in which these groups start."""
        return {start.source for group, start in self._assigned.items() if start is not None and group in groups}

    def report(self) -> Report:
        """Changes since the last call, for `take_in` of the trainer's library."""
        found = Report(self._outcomes, dict(self._assigned), self.replay)
        self._outcomes, self.replay = [], ReplayFigures()
        return found

    def take_in(self, report: Report) -> None:
        """Add the changes that a copy reports."""
        self._outcomes += report.outcomes
        self._assigned |= report.assigned
        self.replay.num_messages += report.replay.num_messages
        self.replay.num_mismatches += report.replay.num_mismatches
        self.replay.max_drift = max(self.replay.max_drift, report.replay.max_drift)

    def goes_on(self, assigned: Mapping[int, Start | None]) -> None:
        """Keep only these running episodes; forget the outcomes and starts of all others."""
        self._outcomes.clear()
        self._assigned = dict(assigned)

    def discard(self) -> None:
        """Forget episodes of unfinished groups: they are played again. Their starts stay."""
        self._outcomes.clear()

    def _count(self, tracked: TrackedSource, step: int, success: bool) -> None:
        tracked.outcomes.setdefault(step, deque(maxlen=_WINDOW)).append(success)
        if step == tracked.position:
            tracked.since_moved.append(success)

    def _roll_back(self, tracked: TrackedSource) -> None:
        """Move the start back by a chunk if its latest episodes (`min_episodes`, or more since the last update) succeed often enough."""
        latest = tracked.since_moved
        if tracked.position > 0 and len(latest) >= self.config.min_episodes:
            if sum(latest) >= self.config.threshold * len(latest):
                tracked.position -= self.config.chunk_steps
            latest.clear()

    def _offer(self, source: SourceEpisode, held: Collection[int]) -> None:
        """Add an episode of the run if there is room, or if it is better than one that is not `held`."""
        own = {key: one for key, one in self.sources.items() if one.source.origin == "own" and key not in held}
        if not self.boundaries(source) or any(self.sources[key].source.seed == source.seed for key in held):
            return
        if any(one.source.seed == source.seed and self._rank(one) >= _merit(source) for one in own.values()):
            return
        same = [key for key, tracked in own.items() if tracked.source.seed == source.seed]
        if not same and len(self.sources) >= self.config.max_sources:
            if not own:
                return
            worst = min(own, key=lambda key: (self._rank(own[key]), -key))
            if self._rank(own[worst]) >= _merit(source):
                return
            same = [worst]
        for key in same:
            self._retired[key] = self.sources.pop(key)
        self._insert(source)

    def _rank(self, tracked: TrackedSource) -> tuple[float, ...]:
        """Rank of the run's own sources: unused ones are dropped first; without "best", a source in use is never dropped."""
        if not self.starts_of(tracked):
            return (-np.inf,)
        return _merit(tracked.source) if "best" in self.config.sources else (np.inf,)

    def _insert(self, source: SourceEpisode) -> None:
        boundaries = self.boundaries(source)
        self.sources[self._next_key] = TrackedSource(source, boundaries[-1] if boundaries else 0)
        self._next_key += 1

    # --- what is going on --------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """``initialized/…``: sources, those rolled back to their beginning, mean position (messages before the start over messages, 0: the
        beginning), crucial chunks, and ``success_from_0.3``: success rate of starts in that tenth of an episode."""
        tracked = list(self.sources.values())
        figures = {"sources": float(len(tracked)), "expert_messages": float(self.num_expert_messages)}
        figures |= {"replayed_messages": float(self.replay.num_messages), "mismatched_starts": float(self.replay.num_mismatches)}
        figures["replay_drift"] = self.replay.max_drift
        if self.config.mode == "rollback" and tracked:
            figures["rolled_back"] = float(sum(one.position == 0 for one in tracked))
            figures["position"] = float(np.mean([one.position / one.source.num_messages for one in tracked]))
        figures["crucial_chunks"] = float(sum(chunk.is_crucial for one in tracked for chunk in self.effects(one)))
        tenths: dict[int, list[int]] = {}
        for one in tracked:
            for step, (successes, episodes) in one.counts().items():
                total = tenths.setdefault(10 * step // one.source.num_messages, [0, 0])
                total[0] += successes
                total[1] += episodes
        figures |= {f"success_from_0.{tenth}": successes / episodes for tenth, (successes, episodes) in sorted(tenths.items())}
        return {f"initialized/{name}": value for name, value in figures.items()}

    # --- resuming ----------------------------------------------------------------------------------------------------

    def state_dict(self, in_flight: Collection[int]) -> dict[str, Any]:
        """State for resuming, JSON-able; `in_flight`: the groups that will be played again, from the same starts."""
        found = {number: start for number in sorted(in_flight) if (start := self._assigned.get(number)) is not None}
        assigned = {number: start for number, start in found.items() if start.source in self.sources}
        return {
            "format": _FORMAT_VERSION,
            "seed": self.seed,
            "chunk_steps": self.config.chunk_steps,
            "next_key": self._next_key,
            "expert_messages": self.num_expert_messages,
            "replay": asdict(self.replay),
            "ordinary": sorted(number for number in in_flight if number in self._assigned and number not in assigned),
            "assigned": [[number, start.source, start.step] for number, start in assigned.items()],
            "sources": [
                {
                    "key": key,
                    "episode": tracked.source.to_text(),
                    "position": tracked.position,
                    "outcomes": {str(step): _to_bits(outcomes) for step, outcomes in tracked.outcomes.items()},
                    "since_moved": _to_bits(tracked.since_moved),
                }
                for key, tracked in self.sources.items()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state. Raises IncompatibleCheckpointError if the run's seed or chunk length differs: other starts would follow."""
        for name, value in {"format": _FORMAT_VERSION, "seed": self.seed, "chunk_steps": self.config.chunk_steps}.items():
            if state[name] != value:
                raise IncompatibleCheckpointError(
                    f"The checkpoint's start library has {name}={state[name]}, this run {value}, so groups would start elsewhere. Resume "
                    "with the checkpoint's setting."
                )
        self._next_key, self.num_expert_messages = int(state["next_key"]), int(state["expert_messages"])
        self.replay = ReplayFigures(**state["replay"])
        self._assigned = {int(number): None for number in state["ordinary"]}
        self._assigned |= {int(number): Start(int(source), int(step)) for number, source, step in state["assigned"]}
        self._outcomes = []
        self.sources = {
            int(entry["key"]): TrackedSource(
                source=SourceEpisode.from_text(entry["episode"]),
                position=int(entry["position"]),
                outcomes={int(step): _from_bits(bits, _WINDOW) for step, bits in entry["outcomes"].items()},
                since_moved=_from_bits(entry["since_moved"], None),
            )
            for entry in state["sources"]
        }


def _merit(source: SourceEpisode) -> tuple[float, ...]:
    """Sort key: higher returns first, then shorter episodes."""
    return (source.episode_return, -source.num_messages)


def _to_bits(outcomes: Collection[bool]) -> str:
    return "".join("1" if success else "0" for success in outcomes)


def _from_bits(bits: str, most: int | None) -> deque[bool]:
    return deque((bit == "1" for bit in bits), maxlen=most)


_MAX_KEPT = 256
_MAX_DRIFT = 1e-3
"""Largest difference of an observation between replay and original that counts as the same start."""


class SnapshotCache:
    """Restores slots to starts, and keeps the snapshots of starts that were reached once.

    For the first member, the cache restores the nearest recorded state, or the seed, and plays the messages since. If the simulator saves
    its state, that member's snapshot then serves the others: nothing is played twice, and all members start bit-identical.
    """

    def __init__(self, manager: Simulators, library: StartLibrary) -> None:
        self._manager, self._library = manager, library
        self._kept: dict[Start, Snapshot] = {}

    def restore(self, wanted: Mapping[int, Start], streams: Mapping[int, SeedStream] | None = None) -> dict[int, dict[str, Any]]:
        """Restore each slot to its start; return {slot: {key: observation}}.

        `streams`: seeds of slots whose simulators begin further episodes automatically; the first seed is the source's.

        Steps in flight in other slots finish first (they stay ready to be received), so asynchronous collection waits for the slowest of
        them, once for all slots restored together.
        Raises SimFault: see EnvManager; also raised if an episode ends earlier in the replay.
        """
        first: dict[Start, int] = {}
        for slot, start in sorted(wanted.items()):
            if start not in self._kept:
                first.setdefault(start, slot)
        seen = self._take_up(sorted(first.values()), wanted, streams or {}) if first else {}
        others = [slot for slot in sorted(wanted) if slot not in seen]
        if others:
            seen |= self._take_up(others, wanted, streams or {})
        while len(self._kept) > _MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        return seen

    def clear(self) -> None:
        """Forget the snapshots; a resumed run has none either."""
        self._kept.clear()

    def _take_up(self, slots: Sequence[int], wanted: Mapping[int, Start], streams: Mapping[int, SeedStream]) -> dict[int, dict[str, Any]]:
        snapshots: list[Snapshot] = []
        for slot in slots:
            if (snapshot := self._kept.get(start := wanted[slot])) is None:
                source = self._library.source_of(start)
                snapshot = source.snapshot(start.step, task=self._manager.spec.task, chunk_size=self._manager.chunk_size)
            snapshots.append(replace(snapshot, stream=streams.get(slot, snapshot.stream)))
        batch = self._manager.restore(slots, snapshots)
        rows = enumerate(batch.slots.tolist())
        seen = {slot: {key: copied(part[row]) for key, part in batch.observation.items()} for row, slot in rows}
        self._note(snapshots, [self._manager.last_drift[slot] for slot in slots])
        new = [slot for slot in slots if wanted[slot] not in self._kept]
        if new:
            self._kept |= {wanted[slot]: snapshot for slot, snapshot in zip(new, self._manager.snapshot(new), strict=True)}
        return seen

    def _note(self, snapshots: Sequence[Snapshot], drifts: Sequence[float | None]) -> None:
        replay = self._library.replay
        replay.num_messages += sum(len(snapshot.actions) for snapshot in snapshots)
        known = [drift for drift in drifts if drift is not None]
        replay.num_mismatches += sum(drift > _MAX_DRIFT for drift in known)
        replay.max_drift = max([replay.max_drift, *(drift for drift in known if math.isfinite(drift))])
