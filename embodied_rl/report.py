"""``python -m embodied_rl.report``: see `embodied_rl.commands.report`."""

from embodied_rl.commands.report import main as main

if __name__ == "__main__":
    main()
