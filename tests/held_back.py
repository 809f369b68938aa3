"""A run that waits for its end before it has logged more rows than its first word says; the others are those of a command line."""

from __future__ import annotations

import sys
import time

from embodied_rl.commands.train import main
from embodied_rl.loggers.jsonl import JsonlLogger, read_metrics

log, most = JsonlLogger.log, int(sys.argv.pop(1))


def held_back(self: JsonlLogger, *arguments: object) -> None:
    while len(read_metrics(self.path)) >= most:
        time.sleep(1.0)
    log(self, *arguments)


JsonlLogger.log = held_back
main()
