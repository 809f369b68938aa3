"""What files may make this machine run (docs/trust.md)."""

from __future__ import annotations

from embodied_rl.trust.folders import config_folder, state_folder
from embodied_rl.trust.judging import ALLOW_LIST, UntrustedCode, require_trusted, trusted_names
from embodied_rl.trust.named import NamedCode, code_names, named_code, registered_code
from embodied_rl.trust.signing import CHECKPOINT, RECORDING, is_signed, sign

__all__ = [
    "ALLOW_LIST",
    "CHECKPOINT",
    "RECORDING",
    "NamedCode",
    "UntrustedCode",
    "code_names",
    "config_folder",
    "is_signed",
    "named_code",
    "registered_code",
    "require_trusted",
    "sign",
    "state_folder",
    "trusted_names",
]
