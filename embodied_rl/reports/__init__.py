"""report.html: one file with everything in it, to open anywhere and to share; no server, no outside resource."""

from embodied_rl.reports.page import MAX_EMBEDDED_BYTES, REPORT_FILE, write_report
from embodied_rl.reports.run_data import RunData, load_run

__all__ = ["MAX_EMBEDDED_BYTES", "REPORT_FILE", "RunData", "load_run", "write_report"]
