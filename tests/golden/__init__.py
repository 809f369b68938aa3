"""Golden runs: short runs of every kind whose final weights and metrics may not change by a bit."""
