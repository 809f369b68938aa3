"""One self-contained page of one run or several, with its style and script; its content security policy forbids every other one."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from embodied_rl import __version__
from embodied_rl.errors import UserError
from embodied_rl.files import write_atomic
from embodied_rl.paths import assets_dir
from embodied_rl.reports.charts import card, text
from embodied_rl.reports.run_data import RunData, load_run
from embodied_rl.reports.sections import (
    MAX_EMBEDDED_BYTES,
    config_section,
    curve_charts,
    dialogue_section,
    evaluation_section,
    failure_section,
    image,
    provenance_section,
    runs_table,
    tiles,
    timeline_section,
    video_section,
)


@cache
def style() -> str:
    """CSS. Raises UserError where the installation lacks the file."""
    return _read("page.css")


@cache
def script() -> str:
    """JavaScript: the switch between light and dark, and what is shown under the pointer."""
    return _read("page.js")


def _read(name: str) -> str:
    path = assets_dir() / "report_page" / name
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"'{path}' is missing from this installation ({error.strerror}). Install embodied_rl again.") from error


__all__ = ["MAX_EMBEDDED_BYTES", "REPORT_FILE", "write_report"]

REPORT_FILE = "report.html"
MAX_RUNS = 64


def write_report(run_dirs: Sequence[Path | str], output: Path | None = None) -> Path:
    """Write one page about one run, or about several together.

    Args:
        run_dirs: the runs' folders.
        output: where to; None: report.html in the run's folder, or of several in the folder that holds them all.

    Returns:
        The page.

    Raises:
        UserError: a folder is not a run's, or the page cannot be written.
    """
    if not 1 <= len(run_dirs) <= MAX_RUNS:
        raise UserError(f"A report is of 1 to {MAX_RUNS} runs, got {len(run_dirs)}.")
    runs = [load_run(path) for path in run_dirs]
    target = output or _folder_of(runs) / REPORT_FILE
    return write_atomic(target, page_of(runs, target.parent))


def page_of(runs: Sequence[RunData], folder: Path) -> str:
    """The page as HTML; links to what is too large for it are relative to `folder`."""
    return html_page(_title(runs), _subtitle(runs), _sections(runs, folder), badge=_badge(runs), tiles=tiles(runs))


def html_page(title: str, subtitle: str, sections: Sequence[tuple[str, str]], *, badge: str = "", tiles: str = "") -> str:
    """A page of titled sections, whose contents are HTML already; those without any are left out. `badge` stands behind the title, `tiles`
    before the sections."""
    sections = [(name, content) for name, content in sections if content]
    links = "".join(f'<a href="#{_anchor(name)}">{name}</a>' for name, _ in sections)
    body = "".join(f'<section id="{_anchor(name)}"><h2>{name}</h2>{content}</section>' for name, content in sections)
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy()}"><link rel="icon" href="data:,">'
        f"<title>{text(title)}</title><style>{style()}</style></head>\n<body><main>"
        f'<header><div><h1>{text(title)}{badge}</h1><p class="under">{text(subtitle)}</p></div>'
        '<button type="button" class="theme">Dark</button></header>'
        f"<nav>{links}</nav>{tiles}\n{body}\n"
        f"<footer>Written by embodied_rl {__version__}. Everything on this page is inside it.</footer>"
        f"</main>\n<script>{script()}</script></body></html>\n"
    )


def _sections(runs: Sequence[RunData], folder: Path) -> list[tuple[str, str]]:
    one = runs[0] if len(runs) == 1 else None
    curves = curve_charts(runs)
    if not curves and one is not None and one.curves_image is not None:
        curves = card(image(one.curves_image))
    return [
        ("Runs", runs_table(runs)),
        ("Videos", video_section(runs, folder)),
        ("Dialogues", dialogue_section(runs, folder)),
        ("Curves", curves),
        ("Evaluation", evaluation_section(one) if one is not None else ""),
        ("Timeline", timeline_section(one) if one is not None else ""),
        ("Failures", failure_section(runs)),
        ("Configuration", config_section(runs)),
        ("Provenance", provenance_section(runs)),
    ]


def _policy() -> str:
    """Only our own script, no network, no frames: whatever a file of the run may hold, it stays text."""
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    parts = ("default-src 'none'", f"script-src 'sha256-{digest}'", "style-src 'unsafe-inline'", "img-src data:", "media-src data:")
    return "; ".join((*parts, "base-uri 'none'", "form-action 'none'"))


def _title(runs: Sequence[RunData]) -> str:
    tasks = list(dict.fromkeys(run.task for run in runs))
    name = tasks[0] if len(tasks) == 1 else f"{len(tasks)} tasks"
    return name if len(runs) == 1 else f"{name}: {len(runs)} runs"


def _subtitle(runs: Sequence[RunData]) -> str:
    if len(runs) > 1:
        return ", ".join(run.name for run in runs[:8]) + (" …" if len(runs) > 8 else "")
    run = runs[0]
    algorithm = run.results.get("algorithm") or (run.config.get("algorithm") or {}).get("name")
    policy = run.results.get("policy") or (run.config.get("policy") or {}).get("name")
    seed = None if run.seed is None else f"seed {run.seed}"
    finished = str(run.results.get("finished") or "").replace("T", " ").replace("+00:00", " UTC")
    parts = (algorithm, policy, seed, run.name, finished or None)
    return " · ".join(str(part) for part in parts if part is not None)


def _badge(runs: Sequence[RunData]) -> str:
    unfinished = sum(not run.results for run in runs)
    failed = sum(bool(run.failures) for run in runs)
    faults = sum(len(run.faults) for run in runs)
    badges = [("bad", "stopped at NaN")] if failed else []
    badges += [("warn", f"{unfinished} unfinished" if len(runs) > 1 else "unfinished")] if unfinished and not failed else []
    badges += [("warn", f"{faults} faults" if faults > 1 else "1 fault")] if faults else []
    return "".join(f'<span class="badge {kind}">{label}</span>' for kind, label in badges or [("good", "finished")])


def _folder_of(runs: Sequence[RunData]) -> Path:
    """The run's own folder, or the one that holds all of them."""
    if len(runs) == 1:
        return runs[0].path
    return Path(os.path.commonpath([run.path.resolve() for run in runs]))


def _anchor(title: str) -> str:
    return title.lower()
