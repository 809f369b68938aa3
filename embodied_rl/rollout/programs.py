"""Agent programs side by side, each in its own process with its own session at the agent proxy, and groups of their episodes.

```
   start ──▶ process ──HTTP──▶ AgentProxy ──▶ token backend        a program ends by itself, runs out of time, or is stopped;
     ▲          │                  │                               only one that ended well and was judged gives an episode,
   caller ◀── wait ◀── exit ◀── session's turns, rewards           everything else is a `ProgramFault`, never a reward
```
A program that stays (`ProgramOptions.stays`) replies instead of ending, and gets the next episode.
"""

from __future__ import annotations

import dataclasses
import enum
import select
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from embodied_rl.agents.agent import Agent, PromptTokenizer
from embodied_rl.agents.parsing import InvalidAction, ParsedAction, ValidAction
from embodied_rl.agents.turns import AgentEpisode, Turn, episode_of
from embodied_rl.config import SimConfig
from embodied_rl.episodes.recording import last_only
from embodied_rl.errors import UserError
from embodied_rl.files import append_row
from embodied_rl.generation.tokens import TokenBackend, as_trained
from embodied_rl.rollout.agent_generator import AgentGenerator
from embodied_rl.rollout.collector import PATIENCE_S
from embodied_rl.rollout.groups import Assignment, BatchNeverFullError, GroupQueue
from embodied_rl.rollout.queue_pump import QueuePump
from embodied_rl.sandbox.launch import NOT_STARTED
from embodied_rl.serving.agents.app import AgentProxy, ProxyOptions
from embodied_rl.serving.agents.sessions import CapturedSession, CapturedTurn, SessionLimits, SessionSampling
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import HELD_OUT_START, EpisodeSeeds
from embodied_rl.sim.simulators import Simulators
from embodied_rl.sim.text import program
from embodied_rl.sim.text.program_worker import episode_variables
from embodied_rl.sim.text.served_program import ProgramEnding, ProgramPool, RunningProgram, ServedEpisode
from embodied_rl.stopping import waiting
from embodied_rl.types import EpisodeSummary

_LINES = 6
"""Number of a program's last lines that a fault keeps."""


class ProgramFaultKind(enum.Enum):
    """Reasons why a program gave no episode."""

    NOT_STARTED = "not_started"
    CRASHED = "crashed"
    """The program replied with an exception, died of a signal, or ended with a status that means neither success nor failure."""
    TIMED_OUT = "timed_out"
    NO_REWARD = "no_reward"
    """The program ended well, but neither it nor its session gave a reward."""
    NO_TURNS = "no_turns"
    """The program never called the model, or never got an answer."""
    NOT_TRAINABLE = "not_trainable"
    """The backend gave no log-probabilities."""


@dataclass(frozen=True)
class ProgramFault:
    """Typed record of an episode that failed."""

    kind: ProgramFaultKind
    seed: int
    task: Mapping[str, Any]
    exit_status: int | None
    """Exit status, or minus the signal's number; None: the program never ran, or stays."""
    num_turns: int
    """Number of answers that the program received."""
    seconds: float
    detail: str
    """End of the program's output."""

    def to_dict(self) -> dict[str, Any]:
        return {**{name: value for name, value in vars(self).items() if name != "kind"}, "kind": self.kind.value}

    def __str__(self) -> str:
        """One line for people and for the queue's reasons."""
        last = (self.detail.strip().splitlines() or [""])[-1]
        status = "" if self.exit_status is None else f" (status {self.exit_status})"
        return f"the program {self.kind.value.replace('_', ' ')}{status}{': ' + last if last else ''}"


@dataclass(frozen=True)
class Played:
    """Outcome of one program."""

    tag: Hashable
    """The caller's tag for the program."""
    seed: int
    task: Mapping[str, Any]
    seconds: float
    """Seconds from start to end, or from an episode's task to its reply."""
    outcome: CapturedSession | ProgramFault
    reward: float = 0.0
    """Sum of the rewards; 0 for a fault."""


@dataclass
class _Running:
    tag: Hashable
    seed: int
    task: Mapping[str, Any]
    session: str
    process: RunningProgram | ServedEpisode
    started_s: float


class ProgramRunner:
    """Runs programs against a proxy with a token, so that only the sessions opened here exist. For use by one thread."""

    def __init__(self, options: program.ProgramOptions, proxy: AgentProxy, model: str) -> None:
        """`model`: the model's name at the proxy.
        Raises UserError: this machine's sandbox is weaker than the options require, or a task file cannot be read."""
        self.options, self.proxy, self.model = options, proxy, model
        self.tasks = program.TaskBook(options)
        self._box = program.program_box(options, proxy.base_url)
        self._pool: ProgramPool | None = None
        if options.stays:
            words = options.words({}, 0, model)
            self._pool = ProgramPool(words, program.lasting_environment(options, proxy.base_url, model), options.timeout_s, self._box)
        self._running: dict[Hashable, _Running] = {}
        self._failed_to_start: list[Played] = []

    @property
    def tags(self) -> list[Hashable]:
        return list(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running) + len(self._failed_to_start)

    def start(self, tag: Hashable, seed: int, sampling: SessionSampling) -> None:
        """Start the program of an episode; `wait` returns a program that cannot start as a fault."""
        assert tag not in self._running, "a program has one name"
        task, started = self.tasks.task(seed), time.monotonic()
        session = ""
        try:
            session, key = self.proxy.open_session({"seed": seed, "task": dict(task)}, sampling)
            line = program.episode_line(base_url=self.proxy.base_url, key=key, session=session, model=self.model, task=task, seed=seed)
            process = self._begin(line)
        except (OSError, ValueError) as error:
            if session:
                self.proxy.end_session(session)
            fault = ProgramFault(ProgramFaultKind.NOT_STARTED, seed, task, None, 0, 0.0, f"{type(error).__name__}: {error}")
            self._failed_to_start.append(Played(tag, seed, task, 0.0, fault))
            return
        self._running[tag] = _Running(tag, seed, task, session, process, started)

    def wait(self, timeout_s: float) -> list[Played]:
        """Programs that have ended since the last call, in the order of starting; waits at most `timeout_s` for the first."""
        ended, self._failed_to_start = self._failed_to_start, []
        now = time.monotonic()
        nearest = min((one.process.wake_s for one in self._running.values()), default=now)
        poll = select.poll()
        for one in self._running.values():
            for descriptor, events in one.process.watched():
                poll.register(descriptor, events)
        wait_s = 0.0 if ended or not self._running else max(0.0, min(timeout_s, nearest - now))
        with waiting:
            poll.poll(1000 * wait_s)
        for one in list(self._running.values()):
            over = one.process.is_over()
            if over or time.monotonic() >= one.process.deadline:
                ended.append(self._finish(one, late=not over))
        return ended

    def num_turns(self, tag: Hashable) -> int:
        """Number of answers that a running program has received."""
        return self.proxy.num_turns(self._running[tag].session)

    def stop(self, tag: Hashable) -> None:
        """End a program that is no longer needed; `wait` does not return it."""
        one = self._running.pop(tag)
        one.process.end()
        self.proxy.end_session(one.session)

    def stop_all(self) -> None:
        """End all programs; an idle program that stays is kept for `start`."""
        for tag in self.tags:
            self.stop(tag)
        self._failed_to_start = []

    def close(self) -> None:
        """End all programs, including those that stay."""
        self.stop_all()
        if self._pool is not None:
            self._pool.close()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _begin(self, line: Mapping[str, Any]) -> RunningProgram | ServedEpisode:
        if self._pool is not None:
            return self._pool.begin(line)
        words = self.options.words(line["task"], line["seed"], self.model)
        env = {**program.lasting_environment(self.options, self.proxy.base_url, self.model), **episode_variables(line)}
        return RunningProgram(words, env, self.options.timeout_s, self._box)

    def _finish(self, one: _Running, *, late: bool) -> Played:
        del self._running[one.tag]
        ending = one.process.end()
        if ending.reward is not None and self.options.reward == "http":
            said = f"It returned reward {ending.reward:g}, but sim.kwargs.reward=http needs it posted: set sim.kwargs.reward=return."
            ending = replace(ending, output=f"{ending.output}\n{said}", failed=True)
        seconds = time.monotonic() - one.started_s
        captured = self.proxy.end_session(one.session)
        num_turns = 0 if captured is None else len(captured.turns)
        kind = self._fault_kind(captured, ending, late)
        if kind is not None or captured is None:
            detail = "\n".join(ending.output.strip().splitlines()[-_LINES:])
            fault = ProgramFault(kind or ProgramFaultKind.NO_TURNS, one.seed, one.task, ending.status, num_turns, seconds, detail)
            return Played(one.tag, one.seed, one.task, seconds, fault)
        own = float(ending.status == 0) if self.options.reward == "exit" else ending.reward or 0.0
        return Played(one.tag, one.seed, one.task, seconds, captured, captured.total_reward + own)

    def _fault_kind(self, captured: CapturedSession | None, ending: ProgramEnding, late: bool) -> ProgramFaultKind | None:
        by_exit = self.options.reward == "exit"
        if ending.status == NOT_STARTED and "sandbox: " in ending.output:
            return ProgramFaultKind.NOT_STARTED
        if late:
            return ProgramFaultKind.TIMED_OUT
        lost = self._pool is not None and ending.status is not None  # a program that stays must not end, whatever its status
        if ending.failed or lost or (ending.status not in (None, 0) and not (by_exit and ending.status == program.FAILURE_STATUS)):
            return ProgramFaultKind.CRASHED
        if captured is None or not any(len(turn.sampled_ids) for turn in captured.turns):
            return ProgramFaultKind.NO_TURNS
        if not by_exit and captured.num_rewards == 0 and ending.reward is None:
            return ProgramFaultKind.NO_REWARD
        trainable = all(bool((turn.log_prob <= 0).all()) for turn in captured.turns)  # False for NaN
        return None if trainable else ProgramFaultKind.NOT_TRAINABLE


_LOOK_S = 0.25
"""Seconds between checks whether running programs are still needed."""
_HOPELESS = 8
"""Number of a run's first programs that end the run if all fail before their first model call: a module is missing, say."""
_SEEDS = 29
"""Stream of randomness for the seeds of sessions."""


class ProgramCollector(QueuePump):
    """Fills the queue's groups with the episodes of programs, `num_slots` at a time.

    Each session has its own seed, made of the run's seed, the group, the member and the attempt; each request adds one to it. Samples
    depend on these, the prompt and the weights.
    """

    def __init__(
        self,
        runner: ProgramRunner,
        queue: GroupQueue,
        tokenizer: PromptTokenizer,
        *,
        num_slots: int,
        seed: int,
        sampling: SessionSampling,
        faults_file: Path | None = None,
    ) -> None:
        """
        Args:
            sampling: sampling settings of the answers; its seed is ignored.
            faults_file: file that gets a line for every failed program.
        """
        super().__init__(queue, seed=seed)
        self.runner = runner
        self._faults_file = faults_file
        self._early: int | None = 0
        """Number of programs that failed before their first model call; None: one got further, so the program itself works."""
        self._tokenizer, self._num_slots, self._sampling = tokenizer, num_slots, sampling
        self._turns: dict[Assignment, int] = {}
        self._counts: Counter[str] = Counter()

    def pump(self, patience_s: float = PATIENCE_S) -> bool:
        """Start the programs that the queue requests, and hand in those that ended. False: no program runs, and none is being scored."""
        # Model and programs work at the same time, so no time counts as waiting.
        scored = self._take_scores()
        self._start()
        if not self.runner.num_running:
            return self._wait_for_scores(patience_s) or scored
        for played in self.runner.wait(min(patience_s, _LOOK_S)):
            self._finish(played)
        self._look()
        self._tick()
        return True

    def restart(self, queue: GroupQueue | None = None, *, seed_round: int = 0) -> None:
        self.runner.stop_all()
        self._turns.clear()
        self._go_on_with(queue)

    def figures(self) -> dict[str, float]:
        """Figures since the last call: ended programs, failed ones by kind; for the others, mean seconds, turns and tokens."""
        counts, self._counts = self._counts, Counter()
        good = max(counts["episodes"] - counts["failed"], 1)
        means = {f"{name}_per_program": counts[name] / good for name in ("turns", "conversations", "answer_tokens", "seconds")}
        failed = {name: float(value) for name, value in sorted(counts.items()) if name.startswith("failed")}
        return {"episodes": float(counts["episodes"]), "failed": 0.0, **failed, **means}

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        while self.runner.num_running < self._num_slots and (whose := self.queue.next_assignment(self.domain)) is not None:
            temperature = 0.0 if whose.greedy else self._sampling.temperature
            sampling = dataclasses.replace(self._sampling, seed=self._sampling_seed(whose, _SEEDS), temperature=temperature)
            self.runner.start(whose, whose.seed, sampling)

    def _finish(self, played: Played) -> None:
        whose = played.tag
        assert isinstance(whose, Assignment), "we named it so"
        self._turns.pop(whose, None)
        self._counts["episodes"] += 1
        if isinstance(played.outcome, ProgramFault):
            self._counts.update({"failed": 1, f"failed_{played.outcome.kind.value}": 1})
            if self._faults_file is not None:
                append_row(self._faults_file, {"iteration": self.queue.version, **played.outcome.to_dict()})
            self.queue.failed(whose, str(played.outcome))
            early = played.outcome.num_turns == 0 and played.outcome.kind in (ProgramFaultKind.CRASHED, ProgramFaultKind.NOT_STARTED)
            self._early = self._early + 1 if early and self._early is not None else None
            if self._early == _HOPELESS:
                raise BatchNeverFullError(f"The first {_HOPELESS} programs ended without calling the model. {played.outcome}")
            return
        self._early = None
        episode = episode_of_session(
            played.outcome,
            self._tokenizer,
            reward=played.reward,
            success=played.reward >= self.runner.options.success_reward,
            seed=played.seed,
            domain=whose.domain,
            greedy=whose.greedy,
            task=dict(played.task),
            sampling=None if whose.greedy else self._sampling,
        )
        self._counts.update(
            {
                "turns": episode.num_messages,
                "conversations": len(played.outcome.trajectories()),
                "answer_tokens": sum(len(turn.token_ids) for turn in episode.turns),
            }
        )
        self._counts["seconds"] += played.seconds  # type: ignore[assignment]
        if self.recorder is not None:
            texts = [*episode.observation["text"].tolist(), str(episode.final_observation["text"])]
            success = last_only(len(episode.turns), episode.success)
            seen = [{"text": text} for text in texts]
            self.recorder.finished_turns(whose, episode.turns, seen, success.tolist(), terminated=True, truncated=False)
        self._hand_in(whose, episode)

    def _look(self) -> None:
        """Stop programs that are no longer needed, and report the progress of the others to the queue."""
        for whose in self.runner.tags:
            assert isinstance(whose, Assignment), "we named it so"
            if self.queue.should_stop(whose):
                self.runner.stop(whose)
                self._turns.pop(whose, None)
            elif (turns := self.runner.num_turns(whose)) != self._turns.get(whose, 0):
                self._turns[whose] = turns
                self.queue.progressed(whose)


def episode_of_session(
    captured: CapturedSession,
    tokenizer: PromptTokenizer,
    *,
    reward: float,
    success: bool,
    seed: int,
    domain: str,
    greedy: bool = False,
    task: dict[str, object] | None = None,
    sampling: SessionSampling | None = None,
) -> AgentEpisode:
    """Convert a session to an episode, its turns ordered by conversation, so that its rows are `CapturedSession.trajectories`.

    Turns keep their own rewards; the last turn gets the rest of `reward`, the sum of all. `sampling`: the session's; None: temperature 1.
    """
    # The turns whose tokens are in each trajectory's mask, in their order there.
    order = [number for path in captured.trajectories() for number in dict.fromkeys(path.turn[path.turn >= 0].tolist())]
    # Turns without tokens (aborted at once) contain nothing to learn from.
    sampling = sampling or SessionSampling(0)
    turns = [_turn(captured, captured.turns[number], tokenizer, sampling) for number in order if len(captured.turns[number].sampled_ids)]
    rest = reward - sum(turn.reward for turn in turns)
    turns[-1] = dataclasses.replace(turns[-1], reward=turns[-1].reward + rest, game_reward=turns[-1].reward + rest)
    episode = episode_of(
        turns, terminated=True, truncated=False, success=success, seed=seed, domain=domain, final_text=f"reward {reward:g}", greedy=greedy
    )
    return dataclasses.replace(episode, metadata={**episode.metadata, "task": task or {}, "session": captured.session})


def _turn(captured: CapturedSession, turn: CapturedTurn, tokenizer: PromptTokenizer, sampling: SessionSampling) -> Turn:
    known = 0 if turn.parent is None else len(captured.turns[turn.parent].token_ids)
    answer = tokenizer.decode(turn.sampled_ids)
    drawn = turn.log_prob, turn.sampling_log_prob
    log_prob, temperature = as_trained(*drawn, sampling.temperature, sampling.top_p, sampling.top_k)
    parsed: ParsedAction = ValidAction(answer.strip()) if answer.strip() else InvalidAction("empty", answer)
    return Turn(
        observation=tokenizer.decode(turn.prompt_ids[known:]).strip(),
        prompt_ids=turn.prompt_ids,
        token_ids=turn.sampled_ids,
        log_prob=log_prob,
        version=turn.version,
        answer=answer,
        parsed=parsed,
        reward=turn.reward,
        game_reward=turn.reward,
        structure=turn.structure,
        stop_ids=turn.stop_ids,
        temperature=temperature,
    )


MODEL_NAME = "policy"
"""Model name that programs use."""

_NEVER_S = 1e9
"""Session idle limit: a session ends with its program, however long the program thinks."""


class ProgramGenerator(AgentGenerator):
    """Serves programs through its own agent proxy, which owns the backend until `close`."""

    def __init__(
        self,
        agent: Agent,
        tokenizer: Any,
        backend: TokenBackend,
        weights: Callable[[], Iterable[tuple[str, Any]]] | None,
        token: str,
        *,
        tells_messages: bool = False,
    ) -> None:
        """
        Args:
            agent: sampling settings and answer lengths; its prompts are not used, because programs write their own.
            weights: tensors that `publish` loads into the backend; None: the caller loads them.
            token: secret that opens sessions, so that programs have only the sessions opened for them.
            tells_messages: requests contain the chat's messages beside its tokens, for a scripted player.

        Raises UserError: the model has no chat template.
        """
        self._own = backend
        self._runners: list[ProgramRunner] = []
        self.tokenizer = tokenizer
        limit = agent.config.max_new_tokens
        options = ProxyOptions(model=MODEL_NAME, stop_ids=agent.stop_ids, max_new_tokens=limit, tells_messages=tells_messages)
        # Programs have their own time limits.
        self.proxy = AgentProxy(backend, tokenizer, options, token=token, limits=SessionLimits(max_sessions=4096, idle_s=_NEVER_S))
        # This process uses only the backend's weights and cache; programs request tokens through the proxy.
        super().__init__(agent, cast(TokenBackend, self.proxy.shared_backend), weights)

    def sampling(self, temperature: float, seed: int = 0) -> SessionSampling:
        """Sampling settings of a session, from the agent's configuration."""
        config = self.agent.config
        return SessionSampling(seed, temperature, config.top_p, config.top_k)

    def runner(self, options: program.ProgramOptions) -> ProgramRunner:
        """Runner of programs that use this proxy."""
        self._runners.append(ProgramRunner(options, self.proxy, MODEL_NAME))
        return self._runners[-1]

    def close(self) -> None:
        for runner in self._runners:
            runner.close()
        self.proxy.close()
        self._own.close()
        self.agent.close()


class ProgramManager(Simulators):
    """Manager that holds the programs' options; it has no simulator processes."""

    autoreset = False
    plays_itself = True

    def __init__(self, config: SimConfig, num_slots: int | None = None) -> None:
        """`num_slots`: programs at a time; None: the configuration's. Raises UserError: see `ProgramOptions.of` and `TaskBook`."""
        self.options = program.ProgramOptions.of(config)
        self.tasks = program.TaskBook(self.options)
        self.spec = program.program_spec(config)
        self.num_slots = num_slots or config.num_slots

    def texts(self, num_slots: int | None = None) -> list[str]:
        """Texts of all tasks that a tiny model's tokenizer must know."""
        # Each text with and without a leading space: the tokenizer treats these as different words.
        return [*self.options.texts, *(space + text for text in self.tasks.texts for space in ("", " "))]

    def evaluate(
        self, generator: object, num_episodes: int, first_seed: int, on_episode: Callable[[EpisodeSummary], object] | None = None
    ) -> list[EpisodeSummary]:
        """See `embodied_rl.rollout.evaluation.evaluate`. A failed program counts as an episode without success or reward.
        Raises UserError: the generator serves no programs."""
        if not isinstance(generator, ProgramGenerator):
            raise UserError("An agent program needs a language model behind the proxy; policy=random cannot write text.")
        runner = ProgramRunner(self.options, generator.proxy, MODEL_NAME)
        waiting = list(range(num_episodes))[::-1]
        finished: dict[int, EpisodeSummary] = {}
        try:
            while len(finished) < num_episodes:
                while waiting and runner.num_running < self.num_slots:
                    number = waiting.pop()
                    seed = HELD_OUT_START + first_seed + number
                    runner.start(number, seed, generator.sampling(generator.temperature, seed))
                for played in runner.wait(1.0):
                    number = played.tag  # type: ignore[assignment]
                    finished[number] = self._summary(number, played, generator)
                    if on_episode is not None:
                        on_episode(finished[number])
        finally:
            runner.close()
        return [finished[number] for number in range(num_episodes)]

    def _summary(self, number: int, played: Played, generator: ProgramGenerator) -> EpisodeSummary:
        success, length, info = False, 0, {}
        if isinstance(played.outcome, CapturedSession):
            success = played.reward >= self.options.success_reward
            length = episode_of_session(
                played.outcome, generator.tokenizer, reward=played.reward, success=success, seed=played.seed, domain=self.spec.task
            ).num_messages
        else:
            length, info = played.outcome.num_turns, {"fault": played.outcome.kind.value}
        return EpisodeSummary(
            slot=number % self.num_slots,
            index=number // self.num_slots,
            seed=played.seed,
            episode_return=played.reward,
            length=length,
            success_once=success,
            success_at_end=success,
            terminated=isinstance(played.outcome, CapturedSession),
            final_info=info,
        )


def make_manager(config: SimConfig, seeds: EpisodeSeeds, **options: Any) -> EnvManager | ProgramManager:
    """The environment manager of a configuration (see `EnvManager.from_config`), or the `ProgramManager` for agent programs.
    Raises UserError: the simulator's or the program's configuration is invalid."""
    if program.is_program(config):
        return ProgramManager(config, options.get("num_slots"))
    return EnvManager.from_config(config, seeds, **options)
