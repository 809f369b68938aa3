"""``python -m embodied_rl.serve_agent``: see `embodied_rl.commands.serve_agent`."""

from embodied_rl.commands.serve_agent import main as main

if __name__ == "__main__":
    main()
