"""An OpenAI-compatible server that records what it samples: `python -m embodied_rl.serve_agent`."""
