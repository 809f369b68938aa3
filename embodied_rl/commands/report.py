"""``python -m embodied_rl.report RUN``: one static page about a run, or about several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from embodied_rl.commands.cli import Argument, Command, WrittenFile, as_command, at_home, expand_paths
from embodied_rl.loggers.jsonl import METRICS_FILE
from embodied_rl.progress import progress_bar
from embodied_rl.reports import write_report

COMMAND = Command(
    name="report",
    summary="Write one self-contained page about one or several runs: curves, tables, videos, timeline, failures.",
    arguments=(
        Argument("run", str, "folder of a run; several: separated by commas, or a pattern; 'run=' may be left out"),
        Argument(
            "output",
            WrittenFile,
            "page to write; default: report.html in the run's folder, or for several runs in their common folder",
            None,
        ),
    ),
    examples=(
        "runs/maniskill_pushcube/20260101-120000-seed1",
        "run=runs/fetch_reach/20260101-120000-seed1,runs/fetch_reach/20260101-120000-seed2 output=fetch_reach.html",
        "'runs/fetch_reach/*'",
    ),
)


def expand_runs(words: Sequence[str]) -> list[Path]:
    """Folders of ``A``, ``A,B`` or patterns such as ``runs/fetch/*``, once each; patterns select runs only. Raises UserError: no match."""

    def is_run(path: str) -> bool:
        return any(Path(path, name).exists() for name in ("results.json", METRICS_FILE, "checkpoints"))

    return list(dict.fromkeys(Path(path) for word in words for path in expand_paths(word, "run", "'runs/fetch_reach/*'", is_run)))


def _is_folder(word: str) -> bool:
    """Whether a word is a run without ``run=``. Folders of runs have names like lr=3e-4."""
    return not word.startswith(("-", "output=")) and ("=" not in word or Path(word).exists())


@as_command
def main(argv: Sequence[str]) -> None:
    # A shell expands runs/* into several words; each is a run.
    named = [word for word in argv if word.startswith("run=") or _is_folder(word)]
    runs = [word.removeprefix("run=") for word in named]
    values, _ = COMMAND.parse([*([f"run={','.join(runs)}"] if any(runs) else []), *(word for word in argv if word not in named)])
    folders, output = expand_runs([at_home(run) for run in runs]), Path(values["output"]) if values["output"] else None
    with progress_bar(f"writing the report of {len(folders)} run{'s' if len(folders) > 1 else ''}"):
        page = write_report(folders, output)
    print(page)
