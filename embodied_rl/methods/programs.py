"""Agent programs in the training loop: the episodes that they play through the proxy are learned from as all language agents' are."""

from __future__ import annotations

import json
from pathlib import Path

from embodied_rl.config import TrainConfig
from embodied_rl.methods.agents import AgentMethod
from embodied_rl.methods.base import Experience
from embodied_rl.policies.language import LanguagePolicy
from embodied_rl.rollout.program_collector import ProgramCollector
from embodied_rl.rollout.program_manager import ProgramGenerator, ProgramManager

FAULTS_FILE = "program_faults.jsonl"
"""In a run's folder: a line for every program that failed."""


class ProgramMethod(AgentMethod):
    """`AgentMethod` whose episodes come from programs instead of simulators."""

    def __init__(
        self, config: TrainConfig, manager: ProgramManager, policy: LanguagePolicy, generator: ProgramGenerator, run_dir: Path
    ) -> None:
        self._programs, self._served, self._faults_written = manager, generator, 0
        super().__init__(config, manager, policy, generator, run_dir)

    def collect(self, iteration: int) -> Experience:
        """See `Method.collect`; programs that failed are written into `FAULTS_FILE`."""
        try:
            return super().collect(iteration)
        finally:
            self._write_faults(iteration)

    def _write_faults(self, iteration: int) -> None:
        faults = self.collector.faults[self._faults_written :]
        if faults:
            with (self._run_dir / FAULTS_FILE).open("a", encoding="utf-8") as file:
                file.writelines(json.dumps({"iteration": iteration, **fault.to_dict()}) + "\n" for fault in faults)
        self._faults_written += len(faults)

    def _new_collector(self, manager: object, generator: object) -> ProgramCollector:
        served = self._served
        return ProgramCollector(
            served.runner(self._programs.options),
            self.queue,
            served.tokenizer,
            num_slots=self._programs.num_slots,
            seed=self.config.seed,
            sampling=served.sampling(served.agent.config.temperature),
            greedy_member="greedy_baseline" in self.algorithm.composition.advantage.needs,
        )
