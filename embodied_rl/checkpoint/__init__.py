"""Checkpoints: saving, finding, reading and verifying them; `embodied_rl.checkpoint.folder` describes their files."""

from embodied_rl.checkpoint.card import add_result_to_card as add_result_to_card
from embodied_rl.checkpoint.card import resume_command as resume_command
from embodied_rl.checkpoint.folder import MODEL_FOLDER as MODEL_FOLDER
from embodied_rl.checkpoint.folder import POLICY_FILE as POLICY_FILE
from embodied_rl.checkpoint.folder import STATE_FILE as STATE_FILE
from embodied_rl.checkpoint.folder import Checkpoint as Checkpoint
from embodied_rl.checkpoint.folder import CheckpointWriter as CheckpointWriter
from embodied_rl.checkpoint.folder import Exported as Exported
from embodied_rl.checkpoint.folder import adopt_checkpoint as adopt_checkpoint
from embodied_rl.checkpoint.folder import base_of as base_of
from embodied_rl.checkpoint.folder import check_compatible as check_compatible
from embodied_rl.checkpoint.folder import check_tensors as check_tensors
from embodied_rl.checkpoint.folder import checkpoint_name as checkpoint_name
from embodied_rl.checkpoint.folder import find_last as find_last
from embodied_rl.checkpoint.folder import load_checkpoint as load_checkpoint
from embodied_rl.checkpoint.folder import note_base as note_base
from embodied_rl.checkpoint.folder import resolve_checkpoint as resolve_checkpoint
from embodied_rl.checkpoint.folder import save_checkpoint as save_checkpoint
