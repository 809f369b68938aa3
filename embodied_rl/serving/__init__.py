"""What is offered over HTTP: simulators (`environments`) and language models to agent programs (`agents`)."""
