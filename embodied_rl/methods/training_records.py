"""Who of a run's collectors writes its episodes down, and where (`record.share`)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from embodied_rl.config import SimConfig, TrainConfig
from embodied_rl.episodes.recorded import RecordingInfo
from embodied_rl.errors import UserError
from embodied_rl.methods.base import Method
from embodied_rl.methods.multi_domain import DomainsMethod
from embodied_rl.rollout.training_recording import FOLDER, TrainingRecorder
from embodied_rl.sim.instrumented import plain_spec
from embodied_rl.types import SimSpec
from embodied_rl.versions import versions


def start_recorders(config: TrainConfig, method: Method, num_slots: int, spec: SimSpec, run_dir: Path, command: str) -> list[Any]:
    """Have a share of the training episodes written into ``<run_dir>/episodes``; of several domains, into a folder of each.

    Raises:
        UserError: no episodes are played.
        RecordingError: see `TrainingRecorder`.
    """
    if config.record.share == 0:
        return []
    collector = getattr(method, "collector", None)
    if collector is None:
        raise UserError(f"record.share={config.record.share:g}: algorithm={config.algorithm.name} plays no episodes. Set record.share=0.")

    def start(collector: Any, folder: Path, num_slots: int, spec: SimSpec, sim: SimConfig) -> TrainingRecorder:
        who = {"kind": "training", "algorithm": config.algorithm.name, "seed": config.seed}
        info = RecordingInfo(spec, dataclasses.asdict(sim), who, command, versions()).signed()
        collector.recorder = TrainingRecorder(folder, info, config.record, seed=config.seed, num_slots=num_slots)
        return collector.recorder

    if not isinstance(method, DomainsMethod):
        return [start(collector, run_dir / FOLDER, num_slots, spec, config.sim)]
    return [
        start(seat.collector, run_dir / FOLDER / seat.domain, seat.manager.num_slots, plain_spec(seat.manager.spec), seat.sim)
        for seat in method.own_seats
    ]
