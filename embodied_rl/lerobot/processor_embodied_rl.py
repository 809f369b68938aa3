"""LeRobot's pre- and post-processing of an embodied_rl policy: none. The checkpoint contains its own normalisation."""

from __future__ import annotations

from typing import Any

from lerobot.processor import PolicyProcessorPipeline
from lerobot.processor.converters import policy_action_to_transition, transition_to_policy_action

from embodied_rl.lerobot.configuration_embodied_rl import EmbodiedRLConfig


def make_embodied_rl_pre_post_processors(
    config: EmbodiedRLConfig, dataset_stats: dict[str, dict[str, Any]] | None = None
) -> tuple[PolicyProcessorPipeline, PolicyProcessorPipeline]:
    """Two pipelines without steps."""
    before: PolicyProcessorPipeline = PolicyProcessorPipeline(steps=[], name="policy_preprocessor")
    after: PolicyProcessorPipeline = PolicyProcessorPipeline(
        steps=[], name="policy_postprocessor", to_transition=policy_action_to_transition, to_output=transition_to_policy_action
    )
    return before, after
