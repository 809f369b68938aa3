"""report.html: one file with everything in it, to look at anywhere and to send to somebody."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodied_rl.files import write_atomic
from embodied_rl.loggers.plot import CURVES_FILE

REPORT_FILE = "report.html"
MAX_EMBEDDED_BYTES = 5_000_000

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; color: #1f2328; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; border-bottom: 1px solid #d0d7de; }
table { border-collapse: collapse; } td, th { padding: .25rem .9rem .25rem 0; text-align: left; vertical-align: top; }
pre { background: #f6f8fa; padding: .8rem; overflow-x: auto; border-radius: 6px; font-size: 13px; }
img, video { max-width: 100%; } .figure { font-size: 1.3rem; font-weight: 600; }
"""


def write_report(run_dir: Path, results: dict[str, Any], videos: Sequence[Path], headline: str) -> Path:
    """Write ``<run_dir>/report.html`` from the content of results.json, curves.png and the run's videos, `headline` on top.

    Raises:
        UserError: the file cannot be written.
    """
    import yaml

    curves = run_dir / CURVES_FILE
    title = f"{results['task']}: {results['algorithm']}, seed {results['seed']}"
    made_with = {**results["versions"], **results["machine"], "configuration SHA-256": results["config_sha256"]}
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="figure">{html.escape(headline)}</p>',
        _table(_figure_rows(results)),
        f"<h2>Curves</h2>{_image(curves)}" if curves.is_file() else "",
        f"<h2>Video</h2>{_video(videos, run_dir)}" if videos else "",
        f"<h2>Command</h2><pre>{html.escape(results['command'])}</pre>",
        f"<h2>Configuration</h2><pre>{html.escape(yaml.safe_dump(results['config'], sort_keys=False, allow_unicode=True))}</pre>",
        f"<h2>Versions and machine</h2>{_table(made_with)}",
    ]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    body = "\n".join(part for part in parts if part)
    page = f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'
    return write_atomic(run_dir / REPORT_FILE, page)


def _figure_rows(results: dict[str, Any]) -> dict[str, str]:
    seeds = results["held_out_seeds"]
    rows = {
        "held-out seeds": f"{seeds['first']} … {seeds['last']} ({seeds['count']})",
        "return": f"{results['return_mean']:.4g} ± {results['return_std']:.3g} (standard deviation between episodes)",
        "episode length": f"{results['length_mean']:.1f} steps",
        "trained": f"{results['steps']:,} environment steps in {results['iterations']:,} iterations",
        "wall-clock": f"{results['wall_clock_s']:.0f} s in all, {results['train_wall_clock_s']:.0f} s of it until the end of training",
        "finished": results["finished"],
    }
    if results["success"] is not None:
        low, high = results["success_at_end_interval_95"]
        rows = {"success at the last step": f"{results['success_at_end']:.1%} (95% interval {100 * low:.1f}–{100 * high:.1f}%)", **rows}
    return rows


def _table(rows: dict[str, Any]) -> str:
    cells = "".join(f"<tr><th>{html.escape(str(name))}</th><td>{html.escape(str(value))}</td></tr>" for name, value in rows.items())
    return f"<table>{cells}</table>"


def _image(path: Path) -> str:
    kind = "gif" if path.suffix == ".gif" else "png"
    return f'<img alt="{html.escape(path.name)}" src="data:image/{kind};base64,{_base64(path)}">'


def _video(videos: Sequence[Path], run_dir: Path) -> str:
    small = [path for path in videos if path.is_file() and path.stat().st_size <= MAX_EMBEDDED_BYTES]
    movies = [path for path in small if path.suffix == ".mp4"]
    if movies:
        return f'<video controls loop muted autoplay src="data:video/mp4;base64,{_base64(movies[0])}"></video>'
    if small:
        return _image(small[0])
    links = (path.relative_to(run_dir) if path.is_relative_to(run_dir) else path for path in videos)
    return " ".join(f'<a href="{html.escape(str(link))}">{html.escape(str(link))}</a>' for link in links)


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode("ascii")
