"""``python -m embodied_rl.offline_eval recording=DIR checkpoint=A,B``: evaluate checkpoints on recorded episodes, without a simulator."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from embodied_rl.bounds import Bounds, Coefficient, Episodes, Seed, Share, Steps
from embodied_rl.checkpoint import Checkpoint, load_checkpoint
from embodied_rl.checkpoint.folder import domain_part
from embodied_rl.commands.cli import Argument, Command, WrittenFolder, as_command, command_line, print_tables
from embodied_rl.episodes.assessment import Assumptions, Estimate
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import Recording
from embodied_rl.errors import UserError
from embodied_rl.evaluation.output import labels
from embodied_rl.files import finite, next_free, write_atomic
from embodied_rl.progress import figure_table, progress_bar
from embodied_rl.trust import trusted_names
from embodied_rl.versions import provenance

if TYPE_CHECKING:
    from rich.table import Table

    from embodied_rl.evaluation.offline_study import OfflineSettings, OfflineStudy
    from embodied_rl.reports.offline import Shown

DOCUMENT_FILE, REPORT_FILE = "offline_eval.json", "offline_eval.html"

COMMAND = Command(
    name="offline_eval",
    summary="Compare checkpoints' actions with recorded episodes and estimate their returns, without a simulator.",
    arguments=(
        Argument("recording", str, "folder or file of a recording, in any format that `embodied_rl.episodes` reads"),
        Argument("checkpoint", str, "folder of a run (its last checkpoint) or of a checkpoint; several: separated by commas"),
        Argument("domain", str, "domain whose policies are compared, if the runs have several", None),
        Argument("estimators", str, "is, wis, pdis, wpdis, dr, wdr, fqe (with commas); all; none: only open-loop figures", "all"),
        Argument("target", str, "sample: actions as in training; mode: the most likely action", "sample", ("sample", "mode")),
        Argument("gamma", Share, "discount of the value; 1 is the return that evaluate reports", 1.0),
        Argument("truncation", str, "after a cut: no reward (end) or the fitted value (bootstrap)", "end", choices=("end", "bootstrap")),
        Argument("horizon", Steps, "cut episodes after this many steps", None),
        Argument("task", str, "only episodes of this task", None),
        Argument("max_episodes", Episodes, "use at most this many episodes, of the lowest seeds", None),
        Argument("confidence", Annotated[float, Bounds(0.5, 0.999)], "confidence of the intervals", 0.95),
        Argument("bootstrap", str, "method of the bootstrap intervals", "bca", ("bca", "percentile")),
        Argument("num_samples", Annotated[int, Bounds(100, 100_000)], "resamples of the bootstrap", 2000),
        Argument("reward_range", str, "LOW,HIGH: bounds of every possible reward; needed for concentration intervals", None),
        Argument("min_ess", Coefficient, "refuse estimates with a smaller effective sample size (in episodes)", 10.0),
        Argument("max_weight", Annotated[float, Bounds(1, 10**9)], "clip importance weights at this value (biased, and reported)", None),
        Argument("num_bins", Annotated[int, Bounds(2, 65_536)], "bins per action dimension for the figure 'same bin'", 256),
        Argument("seed", Seed, "seed of resampling, sampling and regression", 0),
        Argument("output", WrittenFolder, "folder to write to; default: the next free offline_eval in the first checkpoint's run", None),
        Argument("trust", str, "code that the checkpoints may name beside registered code: package.module:Attribute, or a list", None),
    ),
    prefixes={"fqe.": "change a setting of the regression: num_steps, num_members, hidden_sizes, batch_size, learning_rate, …"},
    examples=(
        "recording=recordings/cartpole-checkpoint checkpoint=runs/cartpole/20260101-120000-seed1",
        "recording=recordings/cartpole-checkpoint checkpoint=runs/a/checkpoints/step_000010240,runs/b reward_range=0,1",
        "recording=demos/pickcube.h5 checkpoint=runs/pickcube estimators=none",
    ),
)


def load_checkpoints(paths: str, domain: str | None, trust: Sequence[str]) -> list[tuple[str, Checkpoint]]:
    """[(label, checkpoint)] of comma-separated paths; `domain` is `domain_part`'s, `trust` `load_checkpoint`'s.
    Raises UserError: no path, one named twice, or a domain; IncompatibleCheckpointError: one cannot be read."""
    words = [word.strip() for word in paths.split(",") if word.strip()]
    if not words:
        raise UserError("checkpoint= is empty. Give the folder of a run, or several separated by commas.")
    loaded = [domain_part(load_checkpoint(word, with_learner=False, trust=trust, replaced=["logger"]), domain) for word in words]
    known: dict[Path, str] = {}
    for word, checkpoint in zip(words, loaded, strict=True):
        if checkpoint.path in known:
            raise UserError(f"checkpoint={paths}: '{known[checkpoint.path]}' and '{word}' are the same checkpoint.")
        known[checkpoint.path] = word
    return list(zip(labels([(checkpoint, "checkpoint") for checkpoint in loaded]), loaded, strict=True))


def settings_of(values: Mapping[str, Any], further: Mapping[str, Any]) -> OfflineSettings:
    """Settings from the command's arguments. Raises UserError naming an argument that is out of range."""
    from embodied_rl.algorithms.fitted_q import FittedQConfig
    from embodied_rl.evaluation.offline_study import ALL_ESTIMATORS, OfflineSettings

    words = [word.strip() for word in values["estimators"].split(",") if word.strip()]
    names = {"all": ALL_ESTIMATORS, "none": ()}.get(values["estimators"], tuple(dict.fromkeys(words)))
    assumed = ("gamma", "confidence", "num_samples", "bootstrap", "seed", "min_ess", "max_weight")
    given = Assumptions(**{name: values[name] for name in assumed}, reward_range=_range(values["reward_range"]))
    own = {name: values[name] for name in ("target", "truncation", "task", "horizon", "max_episodes", "num_bins")}
    fitted_q = FittedQConfig.from_dict({"seed": values["seed"]} | {key.removeprefix("fqe."): value for key, value in further.items()})
    return OfflineSettings(given=given, estimators=names, fitted_q=fitted_q, **own)


def _range(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        low, high = (float(word) for word in text.split(","))
    except ValueError:
        raise UserError(f"reward_range={text} must be two numbers, such as reward_range=0,1.") from None
    if not -float("inf") < low < high < float("inf"):
        raise UserError(f"reward_range={text} must be two finite numbers, the smaller one first.")
    return low, high


# ---- what is shown ----------------------------------------------------------------------------------------------------


def refusals(estimates: Sequence[Estimate]) -> list[str]:
    """One line per reason: ``is, wis: refused: …``, and the notes."""
    warnings: dict[str, list[str]] = {}
    for estimate in estimates:
        for text in [f"refused: {estimate.refused}"] if estimate.refused else estimate.notes:
            warnings.setdefault(text, []).append(estimate.estimator)
    return [f"{', '.join(names)}: {text}" for text, names in warnings.items()]


def _table(shown: Shown, caption: str = "") -> Table:
    table = figure_table(shown.title, shown.columns, shown.leading)
    table.caption = caption
    for row in shown.rows:
        table.add_row(*row)
    return table


# ---- the command ------------------------------------------------------------------------------------------------------


@as_command
def main(argv: Sequence[str]) -> None:
    values, further = COMMAND.parse(argv)
    started = time.perf_counter()

    with progress_bar(f"offline evaluation of {values['checkpoint']} on {values['recording']}"):
        settings = settings_of(values, further)
        checkpoints = load_checkpoints(values["checkpoint"], values["domain"], trusted_names(values["trust"]))
    with open_recording(values["recording"]) as recording:
        study = _study(recording, checkpoints, settings)
        folder = Path(values["output"]) if values["output"] else next_free(checkpoints[0][1].run_dir / "offline_eval")
        try:
            _write(study, recording, folder, command_line("offline_eval", argv), started)
        finally:  # neither a file that cannot be written nor a reader that closes the pipe costs the figures
            _show(study)
    print(f"{time.perf_counter() - started:.1f} s. Figures and report: {folder / DOCUMENT_FILE}, {folder / REPORT_FILE}")


def _study(recording: Recording, checkpoints: Sequence[tuple[str, Checkpoint]], settings: OfflineSettings) -> OfflineStudy:
    from embodied_rl.evaluation.offline_study import study_recording

    fits = len(checkpoints) * settings.fitted_q.num_steps if settings.needs_model else 0
    with progress_bar("offline evaluation", len(recording) + fits) as advance:
        return study_recording(
            recording,
            checkpoints,
            settings,
            on_episode=advance,
            on_fit=lambda label, count: advance(count, f"fitting values of {label}"),
        )


def _show(study: OfflineStudy) -> None:
    from embodied_rl.reports.offline import by_dimension, estimates, open_loop, ranking

    if len(study.policies) > 1 and study.ranked_by is not None:
        print_tables(_table(ranking(study)))
    if study.settings.estimators:
        for policy in study.policies:
            print_tables(_table(estimates(study, policy), "\n".join(refusals(policy.estimates))))
    print_tables(_table(open_loop(study)))
    if len(study.policies) == 1 and (dimensions := by_dimension(study.policies)).rows:
        print_tables(_table(dimensions))
    for note in study.notes:
        print(f"Note: {note}.")
    if len(study.policies) > 1 and study.settings.estimators and study.ranked_by is None:
        print("The policies are not ranked, because no estimator has a value for every policy.")


def _write(study: OfflineStudy, recording: Recording, folder: Path, command: str, started: float) -> None:
    from embodied_rl.reports.offline import write_offline_report

    document = {
        "recording": str(recording.path),
        "task": recording.spec.task,
        "recorded_policy": dict(recording.info.policy),
        "recorded_with": recording.info.command,
        **study.to_dict(),
        "wall_clock_s": round(time.perf_counter() - started, 2),
        **provenance(command),
    }
    write_atomic(folder / DOCUMENT_FILE, json.dumps(finite(document), indent=1, allow_nan=False) + "\n")
    write_offline_report(folder / REPORT_FILE, study, recording, document)
