"""Checkpoints: saving, finding, reading and verifying them; see `embodied_rl.checkpoint.folder` for what lies in one."""

from embodied_rl.checkpoint.card import CARD_FILE, add_result_to_card, resume_command
from embodied_rl.checkpoint.fitting import check_compatible, check_tensors
from embodied_rl.checkpoint.folder import (
    CONFIG_FILE,
    FORMAT_VERSION,
    LEARNER_FILE,
    SHARDED_FOLDER,
    STATE_FILE,
    Checkpoint,
    CheckpointWriter,
    adopt_checkpoint,
    base_of,
    checkpoint_name,
    find_last,
    load_checkpoint,
    note_base,
    resolve_checkpoint,
    save_checkpoint,
)
from embodied_rl.checkpoint.tensors import MODEL_FOLDER, POLICY_FILE, Exported

__all__ = [
    "CARD_FILE",
    "CONFIG_FILE",
    "FORMAT_VERSION",
    "LEARNER_FILE",
    "MODEL_FOLDER",
    "POLICY_FILE",
    "SHARDED_FOLDER",
    "STATE_FILE",
    "Checkpoint",
    "CheckpointWriter",
    "Exported",
    "add_result_to_card",
    "adopt_checkpoint",
    "base_of",
    "check_compatible",
    "check_tensors",
    "checkpoint_name",
    "find_last",
    "load_checkpoint",
    "note_base",
    "resolve_checkpoint",
    "resume_command",
    "save_checkpoint",
]
