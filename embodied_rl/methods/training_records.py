"""Which of a run's collectors record their episodes, and where (`record.share`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from embodied_rl.config import TrainConfig
from embodied_rl.episodes.recording import RecordingInfo
from embodied_rl.errors import UserError
from embodied_rl.methods.base import Recordable
from embodied_rl.rollout.batch_sinks import FOLDER, TrainingRecorder
from embodied_rl.types import ActionLayout
from embodied_rl.versions import versions


def start_recorders(config: TrainConfig, recordable: Sequence[Recordable], run_dir: Path, command: str) -> list[TrainingRecorder]:
    """Have a share of the training episodes written into ``<run_dir>/episodes``, or into the folder of each collector in it.

    Raises:
        UserError: no episodes are played.
        RecordingError: see `TrainingRecorder`.
    """
    if not recordable:
        raise UserError(f"record.share={config.record.share:g}: algorithm={config.algorithm.name} plays no episodes. Set record.share=0.")

    who = {"kind": "training", "algorithm": config.algorithm.name, "seed": config.seed}
    recorders = []
    for one in recordable:
        layout = one.collector.layout
        units = {} if layout is None or layout == ActionLayout.of(one.spec.action) else layout.about_units()
        info = RecordingInfo(one.spec, dataclasses.asdict(one.sim), who | units, command, versions()).signed()
        recorder = TrainingRecorder(
            run_dir / FOLDER / one.folder,
            info,
            config.record,
            seeds=one.collector.seeds,
            num_slots=one.num_slots,
            keeps_running=config.checkpoint.within_episodes,
        )
        one.collector.recorder = recorder
        recorders.append(recorder)
    return recorders
