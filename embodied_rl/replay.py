"""``python -m embodied_rl.replay``: see `embodied_rl.commands.replay`."""

from embodied_rl.commands.replay import main, replay

__all__ = ["main", "replay"]

if __name__ == "__main__":
    main()
