"""Evaluate policies: play held-out episodes, compare results, and estimate from recordings."""
