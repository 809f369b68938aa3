"""Judging a policy: playing held-out episodes, comparing results, estimating from a recording."""
