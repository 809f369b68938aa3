"""``python -m embodied_rl.tune``: search values of the configuration with Optuna; poor trials end early."""

from __future__ import annotations

import dataclasses
import importlib.util
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied_rl.bounds import PlayedEpisodes, Seed
from embodied_rl.commands.cli import Argument, Command, WrittenFolder, as_command, command_line, loading
from embodied_rl.errors import MissingExtraError, NonFiniteError, UserError, brief, shown
from embodied_rl.loggers import Logger
from embodied_rl.progress import Advance, clock_text, number_text, progress_bar, run_clock, screen_lines, spoke

if TYPE_CHECKING:
    from optuna import Study, Trial

    from embodied_rl.config import TrainConfig

Value = str | int | float | bool

COMMAND = Command(
    name="tune",
    summary=(
        "Search configuration values with Optuna, one training run per trial. Write search spaces in Hydra's syntax: choice(a,b,c), "
        "range(1,10), interval(0.9,0.999), tag(log,interval(1e-5,1e-2)). All other keys and groups are those of train. To continue a "
        "study, run the same command again."
    ),
    arguments=(
        Argument("trials", PlayedEpisodes, "trials of the study, including earlier ones", 20),
        Argument("study", WrittenFolder, "folder of the study and its runs", "runs/tune"),
        Argument("prune", bool, "stop a trial whose interim evaluation is below the median of earlier trials at that step", True),
        Argument("sampler_seed", Seed, "seed of the sampler", 0),
    ),
    examples=(
        "experiment=cartpole 'algorithm.learning_rate=tag(log,interval(1e-4,1e-2))' 'algorithm.num_epochs=choice(2,4,8)' trials=10",
        "experiment=fetch_reach 'algorithm.gamma=interval(0.8,0.99)' study=runs/gamma evaluation.every_steps=2000",
    ),
)


class Pruned(Exception):
    """A trial ends early because of a poor interim evaluation; the text tells how poor."""


@dataclass(frozen=True)
class Range:
    """Search space of one key: choices, or numbers from `low` to `high`."""

    key: str
    choices: tuple[Value, ...] = ()
    low: float = 0.0
    high: float = 0.0
    step: int | None = None
    """Step between whole numbers; None: real numbers."""
    log: bool = False

    def draw(self, trial: Trial) -> Value:
        """Value for a trial."""
        if self.choices:
            return trial.suggest_categorical(self.key, self.choices)
        if self.step is not None:
            return trial.suggest_int(self.key, int(self.low), int(self.high), step=self.step)
        return trial.suggest_float(self.key, self.low, self.high, log=self.log)

    def word(self, value: Value) -> str:
        """Override with a value, as a user would type it."""
        return (
            f"{self.key}={str(value).lower() if isinstance(value, bool) else format(value, '.6g') if isinstance(value, float) else value}"
        )


def split_words(words: Sequence[str]) -> tuple[list[str], list[Range]]:
    """(overrides common to all trials, search spaces). Raises UserError: nothing is searched, a search is malformed, or a key is there
    twice."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    fixed, ranges, seen = [], [], set[str]()
    for word in dict.fromkeys(words):
        key, _, text = word.partition("=")
        if (name := key.lstrip("+")) in seen:
            raise UserError(f"{shown(name)} is given twice. Remove one.")
        seen.add(name)
        if not text.startswith(("choice(", "range(", "interval(", "tag(")):
            fixed.append(word)
            continue
        try:
            override = OverridesParser.create().parse_override(word)
        except HydraException as error:
            raise UserError(f"{shown(key)}: the search space {shown(text)} cannot be read ({brief(error)}).") from error
        ranges.append(_range(key, override.value()))
    if not ranges:
        raise UserError("No search space. Give a key choices or a range, e.g. 'algorithm.learning_rate=tag(log,interval(1e-4,1e-2))'.")
    return fixed, ranges


def _range(key: str, sweep: object) -> Range:
    from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, QuotedString, RangeSweep

    if isinstance(sweep, ChoiceSweep):
        choices = [value.with_quotes() if isinstance(value, QuotedString) else value for value in sweep.list]
        plain = tuple(value for value in choices if isinstance(value, str | int | float))
        if len(plain) == len(choices):
            return Range(key, choices=plain)
    if isinstance(sweep, IntervalSweep) and sweep.start is not None and sweep.end is not None and sweep.start < sweep.end:
        low, high, log = float(sweep.start), float(sweep.end), "log" in sweep.tags
        if not log or low > 0:
            return Range(key, low=low, high=high, log=log)
    if isinstance(sweep, RangeSweep) and isinstance(sweep.start, int) and isinstance(sweep.stop, int) and isinstance(sweep.step, int):
        last = len(range(sweep.start, sweep.stop, sweep.step)) - 1
        if last >= 0 and sweep.step > 0:
            return Range(key, low=sweep.start, high=sweep.start + last * sweep.step, step=sweep.step)
    raise UserError(
        f"{shown(key)}: invalid search space. Choices must be words or numbers, intervals ascending (above 0 with tag(log,…)), and ranges "
        "whole numbers."
    )


@as_command
def main(argv: Sequence[str]) -> None:
    own = {argument.name for argument in COMMAND.arguments}
    ours = [word for word in argv if word.partition("=")[0] in own or word.startswith("-")]
    values, _ = COMMAND.parse(ours)
    fixed, ranges = split_words([word for word in argv if word not in ours])
    for key in ("run_dir", "resume"):
        if any(word.startswith(f"{key}=") for word in fixed):
            raise UserError(f"{key}= is set by the study, which keeps its runs in study={values['study']}.")
    if importlib.util.find_spec("optuna") is None:
        raise MissingExtraError("Command 'tune'", "tune")
    folder, trials = Path(values["study"]), values["trials"]
    searched = [word for word in argv if word not in (*ours, *fixed)]
    _say(f"Optuna searches {', '.join(searched)}: {trials} trials of {shlex.join(fixed) or 'the main job'}.")
    print(f"Study: {folder}", flush=True)
    spoke()
    with run_clock(time.monotonic()):
        with loading("Optuna and PyTorch"):
            study = _open(folder, values["prune"], values["sampler_seed"])
            import torch  # noqa: F401
        finished = _search(study, folder, fixed, ranges, trials)
        _tell(study, folder, fixed, finished)


def _say(text: str) -> None:
    """Print text, wrapped between words on a narrow terminal."""
    print("\n".join(screen_lines(text, 2)), flush=True)


def _open(folder: Path, prune: bool, seed: int) -> Study:
    """Study of a folder, new or continued."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder.mkdir(parents=True, exist_ok=True)
    storage = JournalStorage(JournalFileBackend(str(folder / "study.journal")))
    pruner = optuna.pruners.MedianPruner(n_startup_trials=3) if prune else optuna.pruners.NopPruner()
    study = optuna.create_study(storage=storage, study_name="study", direction="maximize", pruner=pruner, load_if_exists=True)
    # A continued study must not repeat its earlier draws.
    study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.trials))
    return study


def _search(study: Study, folder: Path, fixed: Sequence[str], ranges: Sequence[Range], trials: int) -> list[Path]:
    """Run the remaining trials; returns the folders of the finished ones. Raises UserError: a study's first trial is invalid."""
    from optuna.trial import TrialState

    finished = []
    while len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL))) < trials:
        trial = study.ask()
        try:
            chosen = [one.word(one.draw(trial)) for one in ranges]
        except ValueError as error:  # Optuna draws a key from the same choices, or the same kind of numbers, in all trials
            raise UserError(f"study={folder} has searched other values of a key ({brief(error)}). Choose another study=….") from error
        trial.set_user_attr("overrides", chosen)
        name, run_dir, began_s = f"trial {trial.number + 1} of {trials}", _run_dir(folder, trial.number), time.monotonic()
        try:
            results = _run(trial, name, [*fixed, *chosen], run_dir)
        except Pruned as end:
            study.tell(trial, state=TrialState.PRUNED)
            outcome = f"ended early, {end}"
        except (UserError, NonFiniteError) as error:
            study.tell(trial, state=TrialState.FAIL)
            if trial.number == 0:
                raise
            outcome = f"failed: {brief(error)}"
        else:
            if results is None:
                study.tell(trial, state=TrialState.FAIL)
                print("Interrupted. Run the same command again to continue the study.")
                break
            study.tell(trial, float(results["return_mean"] if results["success"] is None else results["success"]))
            finished.append(run_dir)
            outcome = _score(results["success"], results["return_mean"]) + f", {results['steps']:,} steps"
        _say(f"{name}: {outcome}, {clock_text(time.monotonic() - began_s)}: {shlex.join(chosen)}")
    return finished


def _run_dir(folder: Path, number: int) -> Path:
    """Folder of a trial; displayed numbers count from 1."""
    return folder / f"trial{number + 1:04d}"


def _score(success: float | None, mean_return: float) -> str:
    return f"return {number_text(mean_return)}" if success is None else f"success {success:.1%}"


def _run(trial: Trial, name: str, words: Sequence[str], run_dir: Path) -> dict[str, Any] | None:
    """Results of a trial's run; None if it was interrupted. Raises Pruned."""
    from embodied_rl.commands.learn import Run
    from embodied_rl.commands.train import train
    from embodied_rl.config.compose import load_train_config

    words = [*words, f"run_dir={run_dir}", "video.enabled=no"]
    config = load_train_config(words)
    # The study prints one line per trial instead.
    logger = dataclasses.replace(config.logger, names=tuple(each for each in config.logger.names if each != "console"))
    config = dataclasses.replace(config, logger=logger)
    with progress_bar(name, config.total_steps) as advance:
        run = Run(
            train(config, overrides=words, command=command_line("train", words), loggers=[_Watcher(trial, config, advance)], tells=False)
        )
    return run.results if (run.path / "results.json").is_file() else None


class _Watcher(Logger):
    """Reports interim evaluations to Optuna, and ends the run if Optuna prunes it."""

    def __init__(self, trial: Trial, config: TrainConfig, advance: Advance) -> None:
        self._trial, self._total, self._advance = trial, config.total_steps, advance
        self._step, self._note = 0, ""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        success, mean_return = metrics.get("eval/success"), metrics.get("eval/return")
        score = mean_return if success is None else success
        if score is not None:
            self._note = _score(success, score)
        self._advance(min(step, self._total) - self._step, self._note)
        self._step = min(step, self._total)
        if score is not None:
            self._trial.report(float(score), step)
            if self._trial.should_prune():
                raise Pruned(f"{self._note} after {step:,} steps is below the median of earlier trials")

    def close(self) -> None:
        return


def _tell(study: Study, folder: Path, fixed: Sequence[str], finished: Sequence[Path]) -> None:
    from optuna.trial import TrialState

    from embodied_rl.reporting import sweep_table
    from embodied_rl.reports.page import MAX_RUNS, write_report

    done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    ended = len(study.get_trials(deepcopy=False, states=(TrialState.PRUNED,)))
    if not done:
        print(f"\nNo trial of {folder} finished.")
        return
    folders = [_run_dir(folder, trial.number) for trial in sorted(done, key=lambda trial: -(trial.value or 0.0))]
    there = [path for path in folders if path.is_dir()]
    print(f"\n{sweep_table(there)}")
    best = study.best_trial
    print(f"\n{len(done)} trials finished, {ended} ended early. The best, trial {best.number + 1}: {number_text(best.value or 0.0)}")
    if finished and there:
        print(f"  report      {write_report(there[:MAX_RUNS], folder / 'report.html')}")
    print(f"  train it    {shlex.join(['python', '-m', 'embodied_rl.train', *fixed, *best.user_attrs['overrides']])}")
