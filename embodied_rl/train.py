"""``python -m embodied_rl.train``: see `embodied_rl.commands.train`."""

from embodied_rl.commands.train import main, train

__all__ = ["main", "train"]

if __name__ == "__main__":
    main()
