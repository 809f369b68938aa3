"""The main loop: collect, prepare, update, publish, report, save. Synchronous training is the case of zero staleness."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodied_rl.checkpoint import Checkpoint, CheckpointWriter, base_of, check_compatible, checkpoint_name, note_base
from embodied_rl.config import TrainConfig
from embodied_rl.config.rules import resolve
from embodied_rl.errors import IncompatibleCheckpointError, NonFiniteError, UserError
from embodied_rl.files import append_row, next_free
from embodied_rl.hybrid.engine import make_engine
from embodied_rl.loggers import Logger, check_loggers, make_loggers
from embodied_rl.methods import Experience
from embodied_rl.methods.streams import domains_of, start_recorders
from embodied_rl.methods.warm_start import clone_experts
from embodied_rl.policies.base import saved_tensors
from embodied_rl.progress import Advance, progress_bar
from embodied_rl.reporting import RunSummary, parts_text, require_time, shows_progress, warm_start_figures
from embodied_rl.resuming import load_method, load_policy, random_states, save_method, set_random_states
from embodied_rl.roles.components import Started, end_ranks, hybrid_here, start_simulators
from embodied_rl.rollout.batch_sinks import TrainingRecorder
from embodied_rl.rollout.evaluation import evaluate
from embodied_rl.run_folder import announce, note_run_id, run_id, write_failure
from embodied_rl.sim.instrumented import plain_spec
from embodied_rl.stopping import Stopper, WaitStopped
from embodied_rl.timeline import Timeline, span, timeline_to
from embodied_rl.types import EpisodeSummary

_WINDOW = 100
"""Finished training episodes over which success, return and length are averaged."""
_ENDLESS_STEPS = 10_000
"""Steps of each slot without a single finished episode after which no evaluation begins."""
_EPISODE = "episode."
"""Prefix of the names of running episodes in a checkpoint."""
_PATIENCE_S, _PATIENCE_WITHIN_S = 5.0, 20.0
"""Seconds that a run that is to end waits for its rollout or evaluation; the second with `checkpoint.within_episodes`, which saves the
running episodes. Schedulers kill after about 30 s."""
_INTERIM_SEEDS = 2**28
"""Offset of the seeds of interim evaluations, so that choosing a checkpoint by them does not use the final held-out seeds."""


class Trainer(AbstractContextManager["Trainer"]):
    """One run: `run` trains, `evaluate` plays held-out seeds. Use it as a context manager, so that no process is left running."""

    def __init__(
        self,
        config: TrainConfig,
        run_dir: Path,
        *,
        command: str,
        checkpoint: Checkpoint | None = None,
        started: float | None = None,
        loggers: Sequence[Logger] = (),
    ) -> None:
        """Start the simulators and build policy, learner and generator.

        Args:
            command: how the run was started, for the model card.
            checkpoint: checkpoint to continue from; its simulator and policy must fit.
            started: time.monotonic() when the user started the run; None: now.
            loggers: further loggers, beside the configured ones; an exception in one ends the run.

        Raises:
            UserError: the simulator rejects its configuration, or packages or assets are missing.
            IncompatibleCheckpointError: the checkpoint does not fit.
        """
        config = resolve(config)
        self.config, self.run_dir, self.command = config, run_dir, command
        self._tasks = {name: config.for_domain(name) for name in domains_of(config)}
        self._started = time.monotonic() if started is None else started
        self.iteration = self.steps = 0
        self.best = self._score = -np.inf
        """`_score`: result of the evaluation since the last checkpoint; -inf: none."""
        self.recent: deque[tuple[bool, float, int]] = deque(maxlen=_WINDOW)
        self._stopper = Stopper(_PATIENCE_WITHIN_S if config.checkpoint.within_episodes else _PATIENCE_S)
        self._interim_success: float | None = None
        self._interim_return = -np.inf
        self._faults_logged = self._episodes_given_up = 0
        self._saved_episodes: dict[str, torch.Tensor] = {}
        self._crossed = (0, 0)
        self._base: dict[str, Any] | None = None
        """The base model of the policy's adapter, noted once because its files do not change; None: the policy is saved whole."""
        self.metrics: dict[str, float] = {}
        self.warm_start: dict[str, Any] = {}
        """Figures of the warm start; empty before it runs, or if there is none."""
        self.recorders: list[TrainingRecorder] = []
        self.timeline: Timeline | None = None
        check_loggers(config.logger)
        self._shown = shows_progress(config)
        self.start_s = 0.0
        """Seconds from the user's command to the first iteration."""
        self.episode_s: float | None = None
        """Seconds of the last evaluation per held-out seed, which every domain plays; None before one."""
        self._iteration_s = 0.0
        """Seconds of the last iteration."""
        if checkpoint is None:
            require_time(config, self.wall_clock_s(), "before the simulators were started")
        with progress_bar("starting simulators", shown=self._shown):
            # The simulators start while this process builds its networks.
            parts = start_simulators(config, announce if self._shown else lambda _: None)
        self.manager = parts.simulators
        self.spec = plain_spec(self.manager.spec)
        with ExitStack() as undo:
            undo.callback(self.manager.close)
            if checkpoint is None:
                require_time(config, self.wall_clock_s(), "when the simulators had started")
            with progress_bar("building the policy", shown=self._shown):
                self._build(checkpoint, parts, undo)
            if checkpoint is not None:
                self._load(checkpoint)
            self.run_id = run_id(run_dir)
            self._folder = run_dir.stat()
            self.loggers = make_loggers(
                config.logger,
                run_dir,
                config.to_dict(),
                config.total_steps,
                resume_step=self.steps if checkpoint else None,
                further=loggers,
            )
            undo.pop_all()

    def _build(self, checkpoint: Checkpoint | None, started: Started, undo: ExitStack) -> None:
        config = self.config
        torch.manual_seed(config.seed)
        folder, base = None if checkpoint is None else checkpoint.path, None
        if checkpoint is not None and config.policy.name == "language" and not config.domains:
            base = base_of(checkpoint, config.policy.model, verify=False)  # the model that an adapter belongs to
        parts = started.build(self.spec, self.run_dir, folder, base)
        self.policy, self.generator, self.method = parts.policy, parts.generator, parts.method
        undo.callback(end_ranks, self.method)
        undo.callback(self.generator.close)
        if config.record.share and not self.manager.record(self.run_dir, self.command):
            self.recorders = start_recorders(config, self.method.recordable(), self.run_dir, self.command)
        self.engine = make_engine(hybrid_here(config), self.policy, self.generator, self.method, self.manager)
        self._writer = CheckpointWriter(self.run_dir, asynchronous=config.checkpoint.asynchronous)

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train until the configured steps, time, success rate or return is reached, or until Ctrl-C. Raises SimFault if a worker failed,
        and NonFiniteError for NaN or infinity in an observation, reward or loss; the batch is then in ``<run_dir>/failures``."""
        self._introduce()
        self.engine.publish(version=self.iteration)
        self._clone_first()
        self._begin_episodes()
        if self.iteration == 0 and not (self.warm_start or self.interrupted):
            require_time(self.config, self.wall_clock_s(), "when the first iteration was to begin")
        self.start_s = self.wall_clock_s()
        if self.iteration == 0 and any(own.algorithm.warm_start is not None for own in self._tasks.values()):
            self.save()  # a resumed run must not clone again
        with self._dump_on_non_finite(), self._profiled(), self._stopper.ending_in_order(), self._progress("training") as tell:
            while not self._finished():
                started = time.perf_counter()
                tell(0, f"iteration {self.iteration + 1}: playing")
                with self.engine.generation(), span("generation", "collect", iteration=self.iteration), self._stopper.stoppable():
                    experience = self.method.collect(self.iteration)
                with self.engine.training(), span("training", "update", iteration=self.iteration):
                    tell(0, f"iteration {self.iteration + 1}: updating{'' if self._iteration_s else ' (compiles kernels first)'}")
                    prepared = self.method.prepare(experience)
                    stats = self.method.update(prepared, iteration=self.iteration, steps=self.steps)
                    if experience.observation:
                        self.policy.update_statistics(experience.observation)
                self.iteration += 1
                with span("training", "publish", version=self.iteration):
                    self._publish()
                self._iteration_s = time.perf_counter() - started
                self._report(experience, stats, self._iteration_s)
                self._evaluate_and_save_when_due()
        if not self.interrupted:
            self.method.finish()
            self.engine.publish(version=self.iteration)
        self.save()
        self._writer.wait()

    @property
    def interrupted(self) -> bool:
        """Whether a signal has asked the run to end."""
        return self._stopper.asked

    def _clone_first(self) -> None:
        """Run the robots' warm starts, once per run, and measure success on the final evaluation's seeds before and after."""
        robots = {name: own for name, own in self._tasks.items() if own.policy.name != "language"}
        starts = {name: own for name, own in robots.items() if own.algorithm.warm_start is not None}
        if not starts or self.warm_start:
            return
        seed, options = self.config.evaluation.seed, [own.algorithm.warm_start for own in starts.values()]
        measured = max(start.measured_episodes for start in options if start is not None)
        before = self.evaluate(measured, first_seed=seed, title="success before cloning")
        figures: dict[str, dict[str, Any]] = {}
        with self.engine.training():
            for policy in dict.fromkeys(self.config.policy_of(name) for name in starts):
                of = {name: own for name, own in starts.items() if self.config.policy_of(name) == policy}
                acting = self.policy.acting_in(next(iter(of)))
                figures |= clone_experts(of, acting, self.run_dir, self._time_is_over, shown=self._shown)
            if (trained := self.method.trained_copy) is not None:
                trained.take_weights()
        self.engine.publish(version=self.iteration)
        after = self.evaluate(measured, first_seed=seed, title="success after cloning")
        for one in figures.values():
            one |= {"wall_clock_s": round(self.wall_clock_s(), 2)}
        self.warm_start, self.metrics = warm_start_figures(figures, before, after, self.spec.reports_success)
        self.loggers.log(self.steps, self.metrics)

    def _finished(self) -> bool:
        config = self.config
        if self.interrupted or self.steps >= config.total_steps or self.method.finished:
            return True
        if self._time_is_over(self._iteration_s + self._final_s()):
            return True
        if config.stop_at_return is not None and self._interim_return >= config.stop_at_return:
            return True
        if config.stop_at_success is None:
            return False
        if config.evaluation.every_steps is not None:
            return self._interim_success is not None and self._interim_success >= config.stop_at_success
        return len(self.recent) == _WINDOW and self._success() >= config.stop_at_success

    def _time_is_over(self, reserved_s: float = 0.0) -> bool:
        """Whether `max_minutes` leaves no more than `reserved_s` seconds."""
        limit = self.config.max_minutes
        return limit is not None and self.wall_clock_s() + reserved_s >= 60 * limit

    def _final_s(self) -> float:
        """Estimated seconds of the final evaluation and its films: at most a quarter of `max_minutes`; 0 without that limit."""
        if self.config.max_minutes is None:
            return 0.0
        number, speed = self.config.evaluation.num_episodes, self.metrics.get("speed/steps_per_s", 0.0)
        one = self.episode_s
        if one is None and self.recent and speed > 0:
            one = len(self._tasks) * float(np.mean([length for _, _, length in self.recent])) / speed
        return min(1.2 * number * (one or 0.0), 15.0 * self.config.max_minutes)

    def _publish(self) -> None:
        try:
            with self._stopper.stoppable():
                self.method.play_ahead()
                self.engine.publish(version=self.iteration)
        except WaitStopped:
            self._stopper.gave_up = True  # the weights were not published; the update is done and counts
        self.method.published(self.iteration)

    def _report(self, experience: Experience, stats: dict[str, float], seconds: float) -> None:
        before = self.steps
        self.steps += experience.num_steps
        self._crossed = (before, self.steps)
        self.recent.extend(experience.finished)
        times = self.method.times
        self.metrics = {
            **({"episode/success": self._success()} if self.manager.spec.reports_success and self.recent else {}),
            **({"episode/return": float(np.mean([r for _, r, _ in self.recent]))} if self.recent else {}),
            **({"episode/length": float(np.mean([n for _, _, n in self.recent]))} if self.recent else {}),
            "speed/steps_per_s": experience.num_steps / seconds,
            "time/simulate_s": times.simulate_s,
            "time/act_s": times.act_s,
            "time/update_s": max(seconds - times.simulate_s - times.act_s, 0.0),  # time of playing ahead counts in the next rollout
            "speed/wall_clock_s": self.wall_clock_s(),
            **{f"train/{name}": value for name, value in stats.items()},
            **self.method.metrics(),
            **self.engine.metrics(),
            **({} if self.timeline is None else self.timeline.shares().metrics()),
        }
        if self.timeline is not None:
            self.timeline.curves_of(self.metrics)
        self.require_folder()
        self._report_faults()
        self.loggers.log(self.steps, self.metrics)

    def _report_faults(self) -> None:
        """Report simulators that failed and were replaced: in the metrics, in ``faults.jsonl``, and in one console line each."""
        records = self.manager.fault_records
        if not records:
            return
        for record in records[self._faults_logged :]:
            self._episodes_given_up += sum(slot.outcome == "aborted" for slot in record.slots)
            append_row(self.run_dir / "faults.jsonl", {"step": self.steps, **record.to_dict()})
            self.loggers.message(
                f"Simulator worker {record.worker} {record.kind.value} and was replaced ({record.cause}); see faults.jsonl."
            )
        self._faults_logged = len(records)
        self.metrics |= {"sim/faults": len(records), "sim/episodes_given_up": self._episodes_given_up}

    def _evaluate_and_save_when_due(self) -> None:
        """Evaluate and save if due. Then all slots begin new episodes (unless `checkpoint.within_episodes`): a resume is exact."""
        evaluate_now, save_now = self._due(self.config.evaluation.every_steps), self._due(self.config.checkpoint.every_steps)
        if self._finished() or not (evaluate_now or save_now):
            return
        within = self.config.checkpoint.within_episodes
        running = self.method.running_episodes() if within and evaluate_now else {}
        if evaluate_now:
            with self._stopper.stoppable():
                seed = _INTERIM_SEEDS + self.config.evaluation.seed
                episodes = self.evaluate(self.config.evaluation.interim_episodes, first_seed=seed, title="interim evaluation")
            if running:
                self.method.take_up(running)
            if not episodes:
                return  # max_minutes was over
            success, mean_return = np.mean([e.success_once for e in episodes]), np.mean([e.episode_return for e in episodes])
            figures = {"eval/success": float(success)} if self.manager.spec.reports_success else {}
            figures["eval/return"] = float(mean_return)
            self._interim_success, self._interim_return = figures.get("eval/success"), figures["eval/return"]
            self._score = figures.get("eval/success", self._interim_return)
            self.metrics |= figures
            self.loggers.log(self.steps, figures)
        if save_now:
            self.save()
        if not within or (evaluate_now and not running):
            self._restart_episodes()

    def _due(self, every: int | None) -> bool:
        if every is None:
            return False
        before, now = self._crossed
        return now // every > before // every

    # ---- evaluation, checkpoints ------------------------------------------------------------------------------------

    def evaluate(self, num_episodes: int, *, first_seed: int, title: str = "final evaluation") -> list[EpisodeSummary]:
        """Play held-out seeds of every domain in the run's own simulators, whose running episodes are lost. The policy acts by its mode, or
        at `evaluation.temperature`.

        If `max_minutes` ends first, fewer seeds are played. Simulators with `plays_itself` get as many as fit in the time left.
        """
        self._require_ends()
        started, wanted, num_domains = time.perf_counter(), num_episodes, len(self._tasks)
        if self.manager.plays_itself and self.episode_s is not None and self.config.max_minutes is not None:
            left_s = 60 * self.config.max_minutes - self.wall_clock_s()
            num_episodes = min(num_episodes, max(1, int(left_s / self.episode_s)))
        with self.engine.generation(), self._progress(title, num_episodes * num_domains) as advance:
            episodes = evaluate(
                self.manager,
                self.generator,
                num_episodes,
                first_seed=first_seed,
                temperature=self.config.evaluation.temperature,
                on_episode=lambda episode: advance(1),
                is_over=self._time_is_over,
            )
        if episodes:
            self.episode_s = (time.perf_counter() - started) * num_domains / len(episodes)
        if self._time_is_over() and len(episodes) < wanted * num_domains:
            played = f"{len(episodes)} of {wanted * num_domains} episodes"
            message = f"max_minutes={self.config.max_minutes:g} was over: the {title} played {played}."
            self.loggers.message(message)
        return episodes

    def _require_ends(self) -> None:
        """Raise UserError if no episode would ever end: none has in a long training, and there is no step limit."""
        config, many = self.config, self.steps >= _ENDLESS_STEPS * self.manager.num_slots
        if not many or self.recent or config.domains or config.algorithm.learns_from_recordings:
            return
        if config.sim.max_episode_steps is None and self.spec.max_episode_steps is None:
            raise UserError(
                f"No episode of '{self.spec.task}' has ended in {self.steps:,} steps, so an evaluation would not end either. Set a step "
                "limit, sim.max_episode_steps=…, here and in the next run."
            )

    def save(self) -> Path:
        """Write a checkpoint of this moment (with `checkpoint.asynchronous`: begin to). Raises UserError if it cannot be written, or if the
        run's folder is gone (`require_folder`)."""
        self.require_folder()
        return self._save()

    def require_folder(self) -> None:
        """If the run's folder was removed or moved while it ran, save a checkpoint in a new folder and raise UserError."""
        with suppress(OSError):
            if os.path.samestat(self.run_dir.stat(), self._folder):
                return
        gone, self.run_dir = self.run_dir, next_free(self.run_dir.with_name(f"{self.run_dir.name}_rescued"))
        with suppress(UserError):
            self._writer.wait()
        self._writer = CheckpointWriter(self.run_dir)
        note_run_id(self.run_dir, self.run_id)
        self.loggers.rescue(self.run_dir)
        self._folder = self.run_dir.stat()
        self._save()
        saved = f"It ends, saved at {self.steps:,} steps in another: continue with resume={self.run_dir}."
        raise UserError(f"The run's folder {gone} was removed or moved while it ran. {saved}")

    def _save(self) -> Path:
        score, self._score = self._score, -np.inf
        if self.config.evaluation.every_steps is None:  # then the training episodes decide
            score = self.metrics.get("episode/success", self.metrics.get("episode/return", -np.inf))
        is_best = score >= self.best
        if self._base is None and (folder := self.policy.base_folder) is not None:
            self._base = note_base(folder, self.run_dir)
        self.best = max(self.best, score)
        self.engine.residency.onload_all()
        learner, parts = save_method(self.method, self._writer, self.steps)
        if self.config.checkpoint.within_episodes and not self._stopper.gave_up:  # the simulators may not answer
            learner |= {f"{_EPISODE}{slot}": saved for slot, saved in self.method.running_episodes().items()}
        self._writer.save(
            self.steps,
            policy=saved_tensors(self.policy),
            learner={**learner, **random_states()},
            state={
                "run_id": self.run_id,
                "iteration": self.iteration,
                "wall_clock_s": self.wall_clock_s(),
                "best": self.best if np.isfinite(self.best) else None,
                "recent": [list(episode) for episode in self.recent],
                "algorithm": self.method.state_dict(),
                "warm_start": self.warm_start,
                "interim": {"success": self._interim_success, "return": None if self._interim_return == -np.inf else self._interim_return},
            },
            config=self.config,
            spec=self.spec,
            metrics=self.metrics,
            command=self.command,
            is_best=is_best,
            describe=self.policy.save_description if self.policy.has_description else None,
            base=self._base,
            parts=parts,
            exported=self.policy.exported_names(),
        )
        return self.run_dir / "checkpoints" / checkpoint_name(self.steps)

    def _load(self, checkpoint: Checkpoint) -> None:
        check_compatible(checkpoint, self.spec)
        load_policy(self.policy, checkpoint)
        state, trained_by = checkpoint.state, checkpoint.config.algorithm.name
        try:
            load_method(self.method, checkpoint)
            self.method.load_state_dict(state["algorithm"])
            self.iteration, self.steps = int(state["iteration"]), checkpoint.step
            self._started -= float(state["wall_clock_s"])
            self.best = -np.inf if state["best"] is None else float(state["best"])
            self.recent.extend((bool(success), float(total), int(length)) for success, total, length in state["recent"])
            self.warm_start = dict(state.get("warm_start", {}))
            self.metrics = dict(checkpoint.metrics)
            if (interim := state.get("interim")) is not None:
                self._interim_success = interim["success"]
                self._interim_return = -np.inf if interim["return"] is None else float(interim["return"])
            set_random_states(checkpoint.learner)
            saved = {name.removeprefix(_EPISODE): part for name, part in checkpoint.learner.items() if name.startswith(_EPISODE)}
            self._saved_episodes = saved if self.config.checkpoint.within_episodes else {}
        except (KeyError, TypeError, ValueError) as error:
            why = f"{error!r}" if trained_by == self.config.algorithm.name else f"algorithm={trained_by} wrote its training state"
            raise IncompatibleCheckpointError(f"Checkpoint '{checkpoint.path}' cannot be resumed from: {why}.") from error

    def summary(self, episodes: list[EpisodeSummary]) -> RunSummary:
        """The finished run, for its report; `episodes` are those of the final evaluation."""
        # The method runs a language agent's warm start, and reports it as metrics.
        started = {key.removeprefix("warm_start/"): value for key, value in self.method.metrics().items() if key.startswith("warm_start/")}
        warm_start = {**started, **self.warm_start}
        return RunSummary(
            run_dir=self.run_dir,
            config=self.config,
            spec=self.spec,
            episodes=episodes,
            steps=self.steps,
            iterations=self.iteration,
            train_wall_clock_s=self.metrics.get("speed/wall_clock_s", self.wall_clock_s()),
            wall_clock_s=self.wall_clock_s(),
            command=self.command,
            checkpoint=self.run_dir / "checkpoints" / checkpoint_name(self.steps),
            loggers=self.loggers,
            time_for_films=not self._time_is_over(),
            extra={"warm_start": warm_start} if warm_start else {},
        )

    def wall_clock_s(self) -> float:
        """Seconds since the user started the run, without the time between an end and its resume."""
        return time.monotonic() - self._started

    def close(self) -> None:
        """Close everything that was started, even if a part fails to close; then raise that failure."""
        with ExitStack() as stack:
            stack.callback(self.manager.close)
            stack.callback(self.generator.close)
            stack.callback(self.engine.close)
            stack.callback(self.loggers.close)
            stack.callback(self.method.collector.close)
            for recorder in self.recorders:
                stack.callback(recorder.close)
            stack.callback(self._writer.wait)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except (UserError, OSError) as late:
            # On a full disk every later write fails too: report the first failure.
            if error is None:
                raise
            error.add_note(f"Ending the run failed too: {late}")

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _introduce(self) -> None:
        """Log what the run is made of, once all its parts are built."""
        if self.config.domains:
            return
        if line := self.policy.introduction():
            self.loggers.message(line)
        parameters = list(self.policy.parameters())
        text = parts_text(
            self.config,
            self.spec,
            num_parameters=sum(parameter.numel() for parameter in parameters),
            device=str(parameters[0].device) if parameters else "cpu",
            num_slots=self.manager.num_slots,
            num_workers=self.manager.num_workers,
        )
        self.loggers.message(text)

    def _progress(self, title: str, total: int | None = None) -> AbstractContextManager[Advance]:
        return progress_bar(title, total, shown=self._shown)

    def _begin_episodes(self) -> None:
        """Continue the episodes saved in the checkpoint if it holds one for each slot; else begin new ones."""
        if len(self._saved_episodes) == self.manager.num_slots:
            self.method.take_up(self._saved_episodes)
            self._saved_episodes = {}
        else:
            self._restart_episodes()

    def _restart_episodes(self) -> None:
        with self._stopper.stoppable():
            self.method.restart(self.iteration)

    def _success(self) -> float:
        return float(np.mean([success for success, _, _ in self.recent])) if self.recent else 0.0

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        """With ``profile=true``, write the run's timeline to ``<run_dir>/timeline.json``."""
        if not self.config.profile:
            yield
            return
        with timeline_to(self.run_dir / "timeline.json", devices={"generation": "device", "training": "device"}) as self.timeline:
            yield

    @contextmanager
    def _dump_on_non_finite(self) -> Iterator[None]:
        """On a NonFiniteError, write the offending batch and its origin to ``<run_dir>/failures``."""
        try:
            yield
        except NonFiniteError as error:
            context = {"step": self.steps, "iteration": self.iteration, **error.context()}
            if error.slots:
                context["sim"] = self.config.sim.name
            batch = {f"batch/{name}": value for name, value in (error.batch or {}).items()}
            path = write_failure(self.run_dir, self.steps, context, {**batch, **(self.manager.peek(error.slots) if error.slots else {})})
            error.add_note(f"The offending batch lies in {path}.")
            raise
