"""``python -m embodied_rl.evaluate``: see `embodied_rl.commands.evaluate`."""

from embodied_rl.commands.evaluate import evaluate_checkpoint, main

__all__ = ["evaluate_checkpoint", "main"]

if __name__ == "__main__":
    main()
