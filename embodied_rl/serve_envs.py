"""``python -m embodied_rl.serve_envs``: see `embodied_rl.commands.serve_envs`."""

from embodied_rl.commands.serve_envs import main as main

if __name__ == "__main__":
    main()
