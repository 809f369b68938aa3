"""``python -m embodied_rl.doctor``: see `embodied_rl.commands.doctor`."""

import sys

from embodied_rl.commands.cli import run_command
from embodied_rl.commands.doctor import main

if __name__ == "__main__":
    run_command(lambda: sys.exit(main()))
