"""``python -m embodied_rl.episodes info|validate|convert|merge|split``: work on recorded episodes as files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.bounds import Seed
from embodied_rl.commands.cli import Argument, Command, WrittenFolder, as_command, columns, fail, terminal_width
from embodied_rl.episodes.folder import adopted, require_compatible, validate
from embodied_rl.episodes.formats import NATIVE, new_folder, write_foreign
from embodied_rl.episodes.formats.base import unknown_seed
from embodied_rl.episodes.layout import VIDEO_FORMATS, picture_column
from embodied_rl.episodes.pictures import Frames
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import CHOSEN, OPTIONAL_COLUMNS, FieldNote, Recording, RecordingError, RecordingInfo
from embodied_rl.episodes.writer import SAME_SIM, SKIPPED, RecordingWriter
from embodied_rl.errors import UserError, require_known
from embodied_rl.progress import number_text, progress_bar

FORMAT_NAMES = ("lerobot", "maniskill", "minari", "native", "robomimic")
_PATH = Argument("path", str, "recording: a native folder, or a recording of ManiSkill, LeRobot, robomimic, LIBERO or Minari")
_VIDEO = Argument(
    "video", str, "storage of pictures (formats native and lerobot); raw: only native; mp4: not exact in lerobot", "mp4", VIDEO_FORMATS
)
_SPLIT_NAMES = {2: ("train", "test"), 3: ("train", "val", "test")}

INFO = Command(
    name="episodes info",
    summary="Describe a recording: task, simulator, policy, episodes, success, fields, and facts that its format lacks.",
    arguments=(Argument("json", bool, "print JSON instead of text", False),),
    examples=("recordings/pickcube",),
    paths=(_PATH,),
)
VALIDATE = Command(
    name="episodes validate",
    summary="Read every episode and compare it with the recording's metadata. The exit status is 1 if something is wrong.",
    arguments=(Argument("pictures", bool, "also decode every picture (slow)", True),),
    examples=("recordings/pickcube", "trajectory.h5 pictures=false"),
    paths=(_PATH,),
)
CONVERT = Command(
    name="episodes convert",
    summary="Convert a recording to another format, and report what happened to each field.",
    arguments=(
        Argument("output", WrittenFolder, "new folder"),
        Argument("format", str, "format of the output", choices=FORMAT_NAMES),
        _VIDEO,
        Argument("json", bool, "print the report on the fields as JSON", False),
    ),
    examples=("recordings/pickcube output=exports/pickcube format=lerobot", "demos/trajectory.h5 output=recordings/demos format=native"),
    paths=(_PATH,),
)
MERGE = Command(
    name="episodes merge",
    summary="Merge several recordings. Episodes with the same seed, policy and task are kept once.",
    arguments=(
        Argument("output", WrittenFolder, "new folder, in the native format"),
        Argument("ignore_sim", bool, "also merge recordings with different simulator configurations; the result cannot be replayed", False),
        _VIDEO,
    ),
    examples=("recordings/day1 recordings/day2 output=recordings/both",),
    paths=(Argument("path", str, "two or more recordings with the same observations and actions"),),
    many_paths=True,
)
SPLIT = Command(
    name="episodes split",
    summary="Split a recording into several folders below output. Episodes with the same seed and task stay together.",
    arguments=(
        Argument("output", WrittenFolder, "new folder"),
        Argument("fractions", str, "fractions for a random split, such as 0.9,0.1 or 0.8,0.1,0.1", None),
        Argument("names", str, "names of the folders; default: train,test or train,val,test", None),
        Argument("by", str, "split by success (at any step) or by task instead", None, choices=("success", "task")),
        Argument("seed", Seed, "seed of the random split", 0),
        _VIDEO,
    ),
    examples=("recordings/pickcube output=recordings/parts fractions=0.9,0.1", "recordings/pickcube output=recordings/outcomes by=success"),
    paths=(_PATH,),
)
COMMANDS = {"info": INFO, "validate": VALIDATE, "convert": CONVERT, "merge": MERGE, "split": SPLIT}


def usage() -> str:
    """The text of ``--help`` without a subcommand."""
    lines = [f"usage: python -m embodied_rl.episodes {{{'|'.join(COMMANDS)}}} PATH key=value …", ""]
    lines += columns([(name, command.summary) for name, command in COMMANDS.items()], terminal_width())
    return "\n".join([*lines, "", "Options of a command: python -m embodied_rl.episodes convert --help"])


@as_command
def main(argv: Sequence[str]) -> None:
    if not argv or argv[0] in ("--help", "-h"):
        print(usage())
        return
    name, *words = argv
    require_known(name, COMMANDS, f"'{name}' is not a subcommand.")
    bodies = {"info": _info, "validate": _validate, "convert": _convert, "merge": _merge, "split": _split}
    bodies[name](COMMANDS[name].parse(words)[0])


# ---- info, validate -------------------------------------------------------------------------------------------------


def describe(recording: Recording) -> dict[str, Any]:
    """Contents of `info`'s output, JSON-able."""
    spec, info = recording.spec, recording.info
    first = recording.episode(0) if len(recording) else None
    return {
        "path": str(recording.path),
        "format": recording.format,
        "task": spec.task,
        "instruction": spec.instruction,
        "simulator": {key: info.sim[key] for key in SAME_SIM if info.sim.get(key) is not None},
        "policy": dict(info.policy),
        "command": info.command,
        "created": info.created,
        "num_episodes": len(recording),
        "num_steps": recording.num_steps,
        "complete": int(recording.complete.sum()),
        "lengths": _range(recording.lengths),
        "seeds": _range(recording.seeds),
        "returns": _range(recording.returns) | ({"mean": float(recording.returns.mean())} if len(recording) else {}),
        "success_once": float(recording.success_once.mean()) if spec.reports_success and len(recording) else None,
        "success_at_end": float(recording.success_at_end.mean()) if spec.reports_success and len(recording) else None,
        "tasks": {str(task): int((recording.tasks == task).sum()) for task in sorted({str(task) for task in recording.tasks})},
        "observation": {key: part.to_dict() for key, part in spec.observation.items()},
        "action": spec.action.to_dict(),
        "control_hz": spec.control_hz,
        "fields": [] if first is None else [name for name in OPTIONAL_COLUMNS if vars(first)[name] is not None],
        "states": [] if first is None else sorted(first.state or {}),
        "snapshots": 0 if first is None else len(first.snapshots),
        "images": {} if first is None else {camera: list(pictures.shape[1:]) for camera, pictures in first.images.items()},
        "notes": [vars(note) for note in recording.notes],
    }


def _range(values: np.ndarray) -> dict[str, Any]:
    return {"min": values.min().item(), "max": values.max().item()} if len(values) else {}


def _info(values: dict[str, Any]) -> None:
    with open_recording(values["path"]) as recording:
        data = describe(recording)
    if values["json"]:
        print(json.dumps(data, indent=1))
        return
    rows = list(_info_rows(data))
    width = max(len(name) for name, _ in rows)
    print(f"{data['path']} ({data['format']})")
    print(*(f"  {name:<{width}}  {text}" for name, text in rows), sep="\n")
    _print_notes("Not in the files:", data["notes"])


def _info_rows(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "task", data["task"] + (f": {data['instruction']}" if data["instruction"] else "")
    if len(data["tasks"]) > 1:
        yield "tasks", ", ".join(f"{task} ({count})" for task, count in data["tasks"].items())
    yield "simulator", json.dumps(data["simulator"]) if data["simulator"] else "not known"
    yield "policy", ", ".join(f"{key}={value}" for key, value in data["policy"].items())
    count, complete = data["num_episodes"], data["complete"]
    yield "episodes", f"{count:,}" + ("" if complete == count else f", {count - complete:,} of them cut short by the recorder")
    if count:
        lengths, seeds, returns = data["lengths"], data["seeds"], data["returns"]
        yield "steps", f"{data['num_steps']:,}, {lengths['min']} to {lengths['max']} an episode"
        yield "seeds", "not known" if seeds["max"] < 0 else f"{seeds['min']} to {seeds['max']}"
        mean, low, high = (number_text(returns[name]) for name in ("mean", "min", "max"))
        yield "return", f"mean {mean}, from {low} to {high}"
        known = data["success_once"] is not None
        yield "success", f"{data['success_once']:.1%} once, {data['success_at_end']:.1%} at the end" if known else "not reported"
    yield "observation", ", ".join(f"{key} {_part(part)}" for key, part in data["observation"].items())
    yield "action", _action(data["action"])
    also = [*data["fields"], *([f"state ({', '.join(data['states'])})"] if data["states"] else [])]
    also += [f"images {camera} {shape[0]}×{shape[1]}" for camera, shape in data["images"].items()]
    also += ["snapshots"] if data["snapshots"] else []
    yield "also", ", ".join(also) or "nothing"
    if data["command"]:
        yield "made by", data["command"]


def _part(part: Mapping[str, Any]) -> str:
    return part["kind"] if "kind" in part else f"{part['dtype']} {part['shape']}"


def _action(action: Mapping[str, Any]) -> str:
    if action["kind"] == "continuous":
        return f"continuous [{action['dim']}] within {min(action['low']):.4g} … {max(action['high']):.4g}"
    return f"one of {action['num_actions']}" if action["kind"] == "discrete" else action["kind"]


def _validate(values: dict[str, Any]) -> None:
    path = Path(values["path"])
    try:
        # Readable but wrong contents are reported too; every checksum is verified once.
        with open_recording(path, verify=False) as recording:
            count = len(recording)
            problems = validate(recording, pictures=values["pictures"])
    except RecordingError as error:
        if not path.exists():
            raise
        count, problems = 0, [str(error)]
    if problems:
        print(*problems, sep="\n")
        fail(f"'{path}' has {len(problems)} problem{'s' if len(problems) > 1 else ''}.", 1)
    print(f"'{path}': {count:,} episodes, nothing wrong.")


# ---- convert, merge, split ------------------------------------------------------------------------------------------


def convert(source: Recording, output: Path, format_name: str, video: str = "mp4") -> tuple[FieldNote, ...]:
    """Write a recording in a format; returns what became of each field.

    Raises:
        RecordingError: the format cannot represent it, the source is damaged, or the output exists.
        UserError: the output cannot be written.
        MissingExtraError: h5py or pyarrow is not installed.
    """
    with progress_bar(f"writing {format_name}", len(source)) as advance:
        if format_name != NATIVE:
            options = {"video": video} if format_name == "lerobot" else {}
            return write_foreign(source, output, format_name, advance, **options)
        with new_folder(output) as folder:
            _write_native(folder, source.info, [(source, range(len(source)))], video, "allow", advance)
    return _native_notes(source, video)


def _native_notes(source: Recording, video: str) -> tuple[FieldNote, ...]:
    notes = []
    for name, part in source.episode(0).images.items() if len(source) and video == "mp4" else ():
        is_copied = isinstance(part, Frames) and part.video is not None  # a video of our own
        if not is_copied and picture_column(f"images.{name}", part.dtype, part.shape[1:]) is not None:
            notes.append(FieldNote(f"images.{name}", "changed", "stored as H.264, which is not exact (video=png is)"))
    return tuple(notes)


def _write_native(
    folder: Path,
    info: RecordingInfo,
    sources: Iterable[tuple[Recording, Iterable[int]]],
    video: Any,
    duplicates: Any,
    advance: Callable[[int], object],
) -> tuple[int, int]:
    """Write episodes of several recordings into one; returns (its number of episodes, number of duplicates)."""
    written = skipped = 0
    with RecordingWriter(folder, info, video=video, duplicates=duplicates) as writer:
        for source, numbers in sources:
            require_compatible(source.info, info, str(source.path), str(folder))
            for number in numbers:
                episode = adopted(source.episode(number), source.info, info)
                if episode.seed < 0:
                    # The numbers of two recordings' unknown seeds are unrelated.
                    episode = dataclasses.replace(episode, seed=unknown_seed(written))
                if writer.add(episode) == SKIPPED:
                    skipped += 1
                else:
                    written += 1
                advance(1)
    return written, skipped


def merge(sources: Sequence[Recording], output: Path, ignore_sim: bool = False, video: str = "mp4") -> tuple[int, int]:
    """Merge the episodes of several recordings into one in our format; returns (its number of episodes, number of duplicates).

    Raises:
        RecordingError: observations, actions or simulators differ, a source is damaged, or the output exists.
        UserError: the output cannot be written.
    """
    first = sources[0]
    same = True
    for other in sources[1:]:
        require_compatible(other.info, first.info, str(other.path), str(first.path))
        for key in SAME_SIM:
            if other.info.sim.get(key) != first.info.sim.get(key):
                same = False
                if not ignore_sim:
                    ours, theirs = (f"{recording.info.sim.get(key)!r:.100}" for recording in (first, other))
                    raise RecordingError(
                        f"sim.{key} is {ours} in '{first.path}' and {theirs} in '{other.path}': an episode of one cannot be replayed in "
                        "the other. ignore_sim=true merges them without the simulator's configuration."
                    )
    chosen = {CHOSEN: True} if any(source.info.selected_by_outcome for source in sources) else {}
    metadata = {**first.info.metadata, **chosen, "merged": [str(source.path) for source in sources]}
    # An episode without known success must not count as a failure.
    spec = dataclasses.replace(first.spec, reports_success=all(source.spec.reports_success for source in sources))
    info = dataclasses.replace(first.info, spec=spec, metadata=metadata, sim=first.info.sim if same else {})
    with progress_bar("merging", sum(map(len, sources))) as advance, new_folder(output) as folder:
        return _write_native(folder, info, [(source, range(len(source))) for source in sources], video, "skip", advance)


def split_numbers(recording: Recording, fractions: Sequence[float], seed: int) -> list[list[int]]:
    """Numbers of the episodes of each part, ascending.

    Episodes with the same seed and task, which began alike, stay together; otherwise the sizes match the fractions to one episode.
    """
    groups: dict[tuple[int, str], list[int]] = {}
    for number, (seed_of, task) in enumerate(zip(recording.seeds.tolist(), recording.tasks, strict=True)):
        groups.setdefault((seed_of, task), []).append(number)
    drawn = list(groups.values())
    order = np.random.default_rng(seed).permutation(len(drawn))
    ends = np.round(np.cumsum(fractions) * len(recording)).astype(int)
    parts: list[list[int]] = [[] for _ in fractions]
    taken = 0
    for index in order:
        part = min(int(np.searchsorted(ends, taken, side="right")), len(parts) - 1)
        parts[part] += drawn[index]
        taken += len(drawn[index])
    return [sorted(part) for part in parts]


def split(recording: Recording, output: Path, parts: Mapping[str, Sequence[int]], video: str = "mp4", by: str | None = None) -> None:
    """Write episodes by number into ``output/<name>``, each part a separate recording, which notes a choice `by` success.
    Raises RecordingError: the recording is damaged, or the output exists; UserError: the output cannot be written."""
    with progress_bar("splitting", sum(map(len, parts.values()))) as advance, new_folder(output) as folder:
        for name, numbers in parts.items():
            chosen = {CHOSEN: True} if by == "success" else {}
            metadata = {**recording.info.metadata, **chosen, "split_from": str(recording.path), "split": name}
            info = dataclasses.replace(recording.info, metadata=metadata)
            _write_native(folder / name, info, [(recording, numbers)], video, "allow", advance)


def _convert(values: dict[str, Any]) -> None:
    output = Path(values["output"])
    with open_recording(values["path"]) as source:
        if values["video"] == "raw" and values["format"] != "native":
            raise UserError("video=raw needs format=native; lerobot stores pictures as mp4 or png, other formats always exactly.")
        read, written = source.notes, convert(source, output, values["format"], values["video"])
        count = len(source)
    if values["json"]:
        print(json.dumps({"episodes": count, "read": [vars(note) for note in read], "written": [vars(note) for note in written]}, indent=1))
        return
    _print_notes(f"Not in '{values['path']}':", [vars(note) for note in read])
    _print_notes(f"Fields in {values['format']}:", [vars(note) for note in written])
    if not written:
        print("Every field is kept.")
    print(f"{count:,} episodes: {output}")


def _print_notes(title: str, notes: Sequence[Mapping[str, str]]) -> None:
    if not notes:
        return
    width = max(len(note["field"]) for note in notes)
    print(title)
    for note in notes:
        print(f"  {note['fate']:<8}{note['field']:<{width}}  {note['note']}".rstrip())


def _merge(values: dict[str, Any]) -> None:
    paths = values["path"]
    if len(paths) < 2:
        raise UserError("merge needs two or more recordings: python -m embodied_rl.episodes merge A B output=C.")
    with ExitStack() as stack:
        sources = [stack.enter_context(open_recording(path)) for path in paths]
        written, skipped = merge(sources, Path(values["output"]), values["ignore_sim"], values["video"])
    print(f"{written:,} episodes, {skipped:,} duplicates left out: {values['output']}")


def _split(values: dict[str, Any]) -> None:
    with open_recording(values["path"]) as recording:
        parts = parts_of(recording, values["fractions"], values["names"], values["by"], values["seed"])
        split(recording, Path(values["output"]), parts, values["video"], values["by"])
    for name, numbers in parts.items():
        print(f"{len(numbers):,} episodes: {Path(values['output']) / name}")


def parts_of(recording: Recording, fractions: str | None, names: str | None, by: str | None, seed: int) -> dict[str, list[int]]:
    """{folder: numbers of its episodes} from the command's arguments. Raises UserError if they contradict each other."""
    if (fractions is None) == (by is None):
        raise UserError("split needs either fractions=0.9,0.1 or by=success|task.")
    if by is not None:
        if names is not None:
            raise UserError(f"names={names} needs fractions=…: by={by} names the folders itself.")
        labels = _labels(recording, by)
        found = {label: [number for number, other in enumerate(labels) if other == label] for label in sorted(set(labels))}
    else:
        shares = _fractions(str(fractions))
        folders = names.split(",") if names else _SPLIT_NAMES.get(len(shares), tuple(f"part_{index}" for index in range(len(shares))))
        usable = all(name not in ("", "..") and Path(name).name == name for name in folders)
        if not (usable and len(set(folders)) == len(folders) == len(shares)):
            raise UserError(f"names={names} must be {len(shares)} different folder names, separated by commas.")
        found = dict(zip(folders, split_numbers(recording, shares, seed), strict=True))
    if empty := [name for name, numbers in found.items() if not numbers]:
        raise UserError(f"'{empty[0]}' would get none of the {len(recording)} episodes. Choose larger fractions.")
    return found


_NAME_LETTERS = 60
"""Letters of a folder's name: at four bytes each, file systems take some more."""


def _labels(recording: Recording, by: str) -> list[str]:
    if by == "success":
        if not recording.spec.reports_success:
            raise UserError(f"'{recording.path}' does not report success. Split it by fractions or by task.")
        return ["success" if once else "failure" for once in recording.success_once]
    folders: dict[str, str] = {}
    for task in sorted({str(task) for task in recording.tasks}):
        # A task's name may come from another program's file: ".." would be the folder around the output, a sentence too long for a folder.
        name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in task).lstrip(".")[:_NAME_LETTERS] or "task"
        names = (name, *(f"{name}_{number}" for number in range(2, len(folders) + 2)))
        folders[task] = next(free for free in names if free not in folders.values())
    return [folders[str(task)] for task in recording.tasks]


def _fractions(text: str) -> list[float]:
    try:
        shares = [float(word) for word in text.split(",")]
    except ValueError:
        shares = []
    if len(shares) < 2 or not all(share > 0 for share in shares) or abs(sum(shares) - 1) > 1e-6:
        raise UserError(f"fractions={text} must be two or more numbers above 0 with sum 1, separated by commas.")
    return shares
