"""``python -m embodied_rl.plan``: see `embodied_rl.commands.plan`."""

from embodied_rl.commands.plan import main as main

if __name__ == "__main__":
    main()
