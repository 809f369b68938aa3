"""``recording.json``: what all episodes of a recording share."""

from __future__ import annotations

from pathlib import Path

from embodied_rl.episodes.recorded import RecordingInfo
from embodied_rl.episodes.recording import RecordingError
from embodied_rl.errors import brief
from embodied_rl.reading import parse_json, read_regular

RECORDING_FILE = "recording.json"


def read_info(folder: Path) -> RecordingInfo:
    """Raises RecordingError where ``recording.json`` is missing, damaged, or of another format version."""
    path = folder / RECORDING_FILE
    try:
        return RecordingInfo.from_dict(parse_json(read_regular(path)))
    except OSError as error:
        raise RecordingError(f"'{path}' cannot be read: {error.strerror or error}.") from error
    except KeyError as error:
        raise RecordingError(f"'{path}' lacks the field {brief(error)}.") from error
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RecordingError(f"'{path}' does not describe a recording: {brief(error)}.") from error
