"""Attacks on the doors of the project: ``make chaos MINUTES=10`` runs them all, the tests run a sample of each."""
