"""HTTP servers: simulators (`environments`), and language models for agent programs (`agents`)."""
