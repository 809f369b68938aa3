"""``python -m embodied_rl.record``: see `embodied_rl.commands.record`."""

from embodied_rl.commands.record import main, record

__all__ = ["main", "record"]

if __name__ == "__main__":
    main()
