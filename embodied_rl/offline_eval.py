"""``python -m embodied_rl.offline_eval``: see `embodied_rl.commands.offline_eval`."""

from embodied_rl.commands.offline_eval import main as main

if __name__ == "__main__":
    main()
