"""Flow-matching policies: a small one and pi0, with log-probabilities for reinforcement learning (docs/flow_policies.md)."""
