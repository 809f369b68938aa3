"""``python -m embodied_rl.report RUN``: one static page about a run, or about several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from embodied_rl.commands.cli import Argument, Command, WrittenFile, as_command, expand_paths
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


@as_command
def main(argv: Sequence[str]) -> None:
    # A shell expands runs/* into several words; each is a run.
    folders = [word for word in argv if "=" not in word and not word.startswith("-")]
    named = [f"run={','.join(folders)}"] if folders else []
    values, _ = COMMAND.parse([*named, *(word for word in argv if word not in folders)])
    given = [word.removeprefix("run=") for word in argv if word.startswith("run=")]
    runs, output = expand_runs([*given, *folders]), Path(values["output"]) if values["output"] else None
    with progress_bar(f"writing the report of {len(runs)} run{'s' if len(runs) > 1 else ''}"):
        page = write_report(runs, output)
    print(page)
