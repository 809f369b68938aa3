"""``python -m embodied_rl.render``: see `embodied_rl.commands.render`."""

from embodied_rl.commands.render import main, render_videos

__all__ = ["main", "render_videos"]

if __name__ == "__main__":
    main()
