"""``python -m embodied_rl.episodes``: see `embodied_rl.commands.episode_tools`."""

from __future__ import annotations

from embodied_rl.commands.episode_tools import main

if __name__ == "__main__":
    main()
