"""The base of every logger, and the group of a run's configured loggers."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied_rl.errors import UserError
from embodied_rl.registry import Registry

if TYPE_CHECKING:
    from embodied_rl.config import LoggerConfig

LOGGERS = Registry(
    "logger",
    "loggers",
    {
        "console": "embodied_rl.loggers.console:ConsoleLogger",
        "jsonl": "embodied_rl.loggers.jsonl:JsonlLogger",
        "mlflow": "embodied_rl.loggers.trackers:MlflowLogger",
        "plot": "embodied_rl.loggers.jsonl:PlotLogger",
        "tensorboard": "embodied_rl.loggers.trackers:TensorBoardLogger",
        "trackio": "embodied_rl.loggers.trackers:TrackioLogger",
        "wandb": "embodied_rl.loggers.trackers:WandbLogger",
    },
)
_BUILT_IN = frozenset(LOGGERS.built_in) - {"mlflow", "trackio"}
"""Loggers with their own keys in the configuration; all others, including users' own, take ``logger.options``."""
_OFFERED = ("run_dir", "run_config", "total_steps", "resume_step")


class Logger(ABC):
    """Takes a run's metrics. Names are grouped by a slash: ``episode/success``, ``speed/steps_per_s``, ``time/simulate_s``.

    A user's own logger is a subclass. Its constructor gets those of these arguments that it takes: ``run_dir`` (the run's folder),
    ``run_config`` (the whole configuration, plain), ``total_steps``, ``resume_step`` (None: a new run), and its ``logger.options``.
    """

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one iteration, after `step` environment steps. Values may be NaN or infinite."""

    def log_video(self, step: int, path: Path) -> None:
        """Record a video file; loggers that cannot store it ignore it."""
        return

    def message(self, text: str) -> None:
        """Show one line to the user; loggers without a screen ignore it."""
        return

    def log_checkpoint(self, step: int, path: Path) -> None:
        """Record the final checkpoint, a folder; loggers that cannot store it ignore it."""
        return

    def training_ended(self) -> None:
        """Called after the last metrics of training; the final evaluation and films follow."""
        return

    def rescue(self, folder: Path) -> None:
        """Called when the run's folder is gone: write what is still known of the history into another folder, if anything."""
        return

    @abstractmethod
    def close(self) -> None:
        """Write what is pending. Nothing is logged afterwards."""


class LoggerGroup(Logger, AbstractContextManager["LoggerGroup"]):
    """Several loggers as one."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self.loggers = tuple(loggers)
        self._open = ExitStack()
        for logger in reversed(self.loggers):
            self._open.callback(logger.close)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # numpy scalars and zero-dimensional tensors become floats once, here.
        plain = {name: float(value) for name, value in metrics.items()}
        for logger in self.loggers:
            logger.log(step, plain)

    def log_video(self, step: int, path: Path) -> None:
        for logger in self.loggers:
            logger.log_video(step, path)

    def log_checkpoint(self, step: int, path: Path) -> None:
        for logger in self.loggers:
            logger.log_checkpoint(step, path)

    def message(self, text: str) -> None:
        for logger in self.loggers:
            logger.message(text)

    def training_ended(self) -> None:
        for logger in self.loggers:
            logger.training_ended()

    def rescue(self, folder: Path) -> None:
        for logger in self.loggers:
            logger.rescue(folder)

    def close(self) -> None:
        """Close every logger, even if one of them fails, and only once."""
        self._open.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def make_loggers(
    config: LoggerConfig,
    run_dir: Path,
    run_config: Mapping[str, Any],
    total_steps: int,
    *,
    resume_step: int | None = None,
    further: Sequence[Logger] = (),
) -> LoggerGroup:
    """Build the loggers in ``config.names`` with those of these arguments that their constructors take, and their options.

    Args:
        run_dir: the run's folder; loggers write only inside it.
        run_config: the whole resolved configuration, for loggers that keep it.
        total_steps: environment steps that the run aims at.
        resume_step: step that the run continues from; later rows are dropped, so that no curve is doubled. None: a new run.
        further: loggers that come last.

    Raises MissingExtraError: a logger's packages are not installed; UserError: an unknown logger, or a folder that cannot be written.
    """
    check_loggers(config)
    run, loggers = dict(zip(_OFFERED, (run_dir, run_config, total_steps, resume_step), strict=True)), list[Logger]()
    try:
        # The plot reads the curve so far from metrics.jsonl, so the jsonl logger repairs that file first.
        for name in sorted(config.names, key=lambda name: name != "jsonl"):
            cls: type[Logger] = LOGGERS.load(name)
            options = {} if name in _BUILT_IN else config.options.get(name.rpartition(":")[2], {})
            if name == "wandb":
                options = {"project": config.wandb_project, "mode": config.wandb_mode}
            taken = inspect.signature(cls).parameters
            loggers.append(cls(**{key: value for key, value in run.items() if key in taken}, **options))
    except BaseException:
        LoggerGroup(loggers).close()
        raise
    # Last, so that an exception in one leaves nothing unwritten.
    return LoggerGroup([*loggers, *further])


def check_loggers(config: LoggerConfig) -> None:
    """Import users' own loggers and check their options against their signatures. Raises UserError."""
    from embodied_rl.config.building import check_constructor

    for name in config.names:
        if name in _BUILT_IN:
            continue
        cls = LOGGERS.load(name)
        if not (isinstance(cls, type) and issubclass(cls, Logger)):
            raise UserError(f"'{name}' is not a logger: it must be a subclass of embodied_rl.loggers.Logger.")
        if cls.__abstractmethods__:
            raise UserError(f"'{name}' is not a whole logger: it must define {' and '.join(sorted(cls.__abstractmethods__))}.")
        own = name.rpartition(":")[2]
        check_constructor(cls, name, config.options.get(own, {}), f"logger.options.{own}", offered=_OFFERED)
