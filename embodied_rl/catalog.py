"""``python -m embodied_rl.catalog``: see `embodied_rl.commands.catalog`."""

from embodied_rl.commands.catalog import main as main

if __name__ == "__main__":
    main()
