"""``python -m embodied_rl.tune``: see `embodied_rl.commands.tune`."""

from embodied_rl.commands.tune import main as main

if __name__ == "__main__":
    main()
