"""``recording.json``: what all episodes of a recording share."""

from __future__ import annotations

import json
from pathlib import Path

from embodied_rl.episodes.recorded import RecordingInfo
from embodied_rl.episodes.recording import RecordingError

RECORDING_FILE = "recording.json"


def read_info(folder: Path) -> RecordingInfo:
    """Raises RecordingError where ``recording.json`` is missing, damaged, or of another format version."""
    path = folder / RECORDING_FILE
    try:
        return RecordingInfo.from_dict(json.loads(path.read_bytes()))
    except OSError as error:
        raise RecordingError(f"'{path}' cannot be read: {error.strerror or error}.") from error
    except KeyError as error:
        raise RecordingError(f"'{path}' lacks the field {error}.") from error
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise RecordingError(f"'{path}' does not describe a recording: {' '.join(str(error).split())}.") from error
