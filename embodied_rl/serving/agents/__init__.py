"""An OpenAI-compatible server that keeps what it samples: `python -m embodied_rl.serve_agent`."""
