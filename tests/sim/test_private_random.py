"""Environments that draw from the process-wide generators, each from a state of its own, which the process does not see."""

# ruff: noqa: NPY002  (numpy's legacy global generator is the subject here)
from __future__ import annotations

import random
from contextlib import suppress

import numpy as np

from embodied_rl.sim.private_random import PrivateRandom, fingerprint, process_state_kept


def drawn() -> tuple[float, float, float]:
    """A Gaussian number leaves another one behind, which is a part of the state."""
    return float(np.random.randn()), float(np.random.random()), random.random()


def test_each_has_numbers_of_its_own_and_the_process_keeps_its() -> None:
    expected = []
    for seed in (3, 4):
        np.random.seed(seed)
        random.seed(seed)
        expected.append([drawn() for _ in range(3)])
    np.random.seed(0)
    random.seed(0)
    drawn()
    first, second, before = PrivateRandom(), PrivateRandom(), fingerprint()
    found: list[list[tuple[float, float, float]]] = [[], []]
    for own, seed, numbers in ((first, 3, found[0]), (second, 4, found[1])):
        with own.active(seed):
            numbers.append(drawn())
    with process_state_kept():  # as a simulator steps all of its environments
        for own, numbers in ((first, found[0]), (second, found[1])):
            with own.taken():
                numbers.append(drawn())
    with suppress(ZeroDivisionError), process_state_kept(), second.taken():
        found[1].append(drawn())
        raise ZeroDivisionError
    with first.active():
        found[0].append(drawn())
    assert found == expected
    assert fingerprint() == before
