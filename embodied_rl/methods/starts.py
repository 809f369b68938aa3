"""Start libraries of a run (`algorithm.initialized`): groups and episodes that start inside others, in the process that plays them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from embodied_rl.config import TrainConfig
from embodied_rl.errors import UserError
from embodied_rl.methods.streams import Stream, prefixed
from embodied_rl.registry import load_target
from embodied_rl.rollout.groups import GroupQueue, group_seed
from embodied_rl.rollout.initialized import Lesson, Report, StartLibrary, record_expert, shown_expert
from embodied_rl.sim.instrumented import Expert, instrumented, needs_simulator
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.simulators import Simulators
from embodied_rl.sim.text.program import is_program
from embodied_rl.types import SimSpec

_EXPERT_TRIES = 3
"""Episodes that an expert may play per wanted one."""


class Starts:
    """The start libraries of all streams."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = list(streams)
        self._of_groups = {stream.domain for stream in streams if stream.plays_groups}

    @property
    def libraries(self) -> dict[str, StartLibrary]:
        """{domain: its start library}"""
        return {stream.domain: stream.starts for stream in self._streams if stream.starts is not None}

    def record(self) -> None:
        """Let experts play the episodes that groups start in, at the beginning of a run; a resumed run has them in its checkpoint.
        Raises UserError."""
        for stream in self._streams:
            _record_starts(stream)

    def commit(self, queue: GroupQueue | None = None) -> dict[str, Lesson]:
        """Learn from finished groups, or from the episodes of fixed rollouts; return {domain: what was learned}."""
        return {domain: starts.commit(self._in_flight(domain, queue)) for domain, starts in self.libraries.items()}

    def begin_anew(self) -> None:
        """Note that all running episodes have ended; unfinished groups are played again."""
        for domain, starts in self.libraries.items():
            if domain in self._of_groups:
                starts.discard()
            else:
                starts.goes_on({})

    # ---- copies in rollout workers ----------------------------------------------------------------------------------

    def report(self) -> dict[str, list[Report]]:
        """{domain: reports since the last call}"""
        return {domain: [starts.report()] for domain, starts in self.libraries.items()}

    def learn(self, lessons: Mapping[str, Lesson], queue: GroupQueue | None) -> None:
        """Take over what the trainer's libraries committed."""
        for domain, lesson in lessons.items():
            self.libraries[domain].learn(lesson, self._in_flight(domain, queue))

    def copy(self, state: Mapping[str, Any]) -> None:
        """Continue as a copy of a `state`, without reporting its contents."""
        self.load(state)
        self.report()

    def metrics(self) -> dict[str, float]:
        figures: dict[str, float] = {}
        for domain, starts in self.libraries.items():
            figures |= prefixed(f"domains/{domain}" if domain else "", starts.metrics())
        return figures

    def state(self, queue: GroupQueue | None = None) -> dict[str, Any]:
        """{domain: state that a resume needs}, JSON-able; empty if all groups start ordinarily."""
        return {domain: starts.state_dict(self._in_flight(domain, queue) or ()) for domain, starts in self.libraries.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a `state`. Raises IncompatibleCheckpointError (see `StartLibrary.load_state_dict`)."""
        for domain, starts in self.libraries.items():
            starts.load_state_dict(state[domain])

    def _in_flight(self, domain: str, queue: GroupQueue | None) -> list[int] | None:
        """Numbers of the groups that a resume would request again now; None: there are no groups."""
        return None if queue is None or domain not in self._of_groups else [int(number) for number in queue.state_dict()["redo"]]


def give_starts(streams: Sequence[Stream]) -> Starts:
    """Give each stream of the run's own player its start library, if configured. Raises UserError if its task does not allow it, or its
    running episodes cannot be saved and the run needs that."""
    for stream in streams:
        _require_snapshots(stream.config, stream.manager.spec)
        stream.starts = make_starts(stream.config, stream.manager.spec) if stream.is_own else None
    return Starts(streams)


def _require_snapshots(config: TrainConfig, spec: SimSpec) -> None:
    """Raises UserError before anything is played: the first checkpoint, or the first update, would end the run."""
    keys = []
    if config.checkpoint.within_episodes and config.algorithm.groups is None and config.algorithm.plays:
        keys.append("checkpoint.within_episodes=true")
    if "simulators" in config.hybrid.offload:
        keys.append("hybrid.offload=[simulators]")
    if keys and spec.snapshots == "none" and not is_program(config.sim):  # programs keep no simulator
        raise UserError(
            f"{' and '.join(keys)}: running episodes are saved, and those of task '{spec.task}' cannot be (its spec has snapshots='none'). "
            "Leave this out."
        )


def make_starts(config: TrainConfig, spec: SimSpec) -> StartLibrary | None:
    """The start library of a configuration; None: all groups start ordinarily. Raises UserError if the task does not allow it."""
    options = config.algorithm.initialized
    if options.share == 0:
        return None
    if spec.snapshots == "none":
        raise UserError(f"algorithm.initialized starts inside episodes, and episodes of task '{spec.task}' cannot be restored.")
    if options.success_return is None and not spec.reports_success:
        raise UserError(f"Task '{spec.task}' does not report success: set algorithm.initialized.success_return.")
    return StartLibrary(options, seed=config.seed)


def _record_starts(stream: Stream) -> None:
    """Record the expert's episodes at the beginning of a run; a resumed run has them in its checkpoint. Raises UserError."""
    options, starts = stream.config.algorithm.initialized, stream.starts
    if starts is None or "expert" not in options.sources or starts.num_expert_messages > 0:
        return
    assert options.expert is not None, "the configuration was checked"
    if not needs_simulator(options.expert):
        _record_with(stream, starts, stream.manager, load_target(options.expert))
        return
    # The expert reads the simulator's state in separate processes; the run's simulators stay unchanged.
    shown = instrumented(stream.config.sim, expert=options.expert, reconfigure=False)
    chunk_size = stream.config.policy.chunk_size
    with EnvManager.from_config(shown, EpisodeSeeds.given(0), autoreset=False, chunk_size=chunk_size) as manager:
        _record_with(stream, starts, manager, shown_expert)


def _record_with(stream: Stream, starts: StartLibrary, manager: Simulators, make_expert: Callable[[], Expert]) -> None:
    options, seed = stream.config.algorithm.initialized, stream.config.seed
    keys = () if stream.agent is None else stream.agent.image_inputs.keys
    wanted, first = options.expert_episodes, 0
    while wanted and first < _EXPERT_TRIES * options.expert_episodes:
        seeds = [group_seed(seed, "expert", number) for number in range(first, first + wanted)]
        recorded, played = record_expert(manager, make_expert, seeds, every=options.chunk_steps, picture_keys=keys)
        good = [source for source in recorded if starts.is_success(source.success, source.episode_return)]
        starts.add(good, num_messages=played)
        wanted, first = wanted - len(good), first + len(seeds)
    if wanted:
        raise UserError(
            f"The expert algorithm.initialized.expert={options.expert} succeeded in {options.expert_episodes - wanted} of {first} "
            f"episodes, but {options.expert_episodes} successful ones are needed (algorithm.initialized.expert_episodes)."
        )
