"""Episodes that change manager, and answers that change backend, in the middle: what comes out is what would have come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl.config.policy import LanguageConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.tokens import Completion, GenerationRequest, ScriptedTokens
from embodied_rl.generation.torch_tokens import TorchTokens
from embodied_rl.hybrid.multiplex import Multiplexer
from embodied_rl.policies.language import LanguagePolicy, build_language_policy
from embodied_rl.policies.packing import TokenSequence
from embodied_rl.roles.device_lease import DeviceLease, HostPlan
from embodied_rl.roles.multiplexed import MultiplexedTokens, PartialAnswer, SimHost, TokenHost
from embodied_rl.roles.token_process import HostTokens
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.manager import EnvManager
from tests.policies.language_models import make_model
from tests.sim.runs import action_of

Trace = dict[int, list[tuple[bytes, float]]]


def manager(num_slots: int, factory: SimFactory, **options: Any) -> EnvManager:
    return EnvManager(factory, num_slots, num_workers=1, autoreset=False, **options)


def play(hosts: list[SimHost], num_episodes: int, multiplexer: Multiplexer | None, shrink_at: int, expand_at: int) -> Trace:
    """All episodes to their ends, as many at a time as there is room for; with a multiplexer, host 1 leaves and comes back."""
    trace: Trace = {}
    waiting, messages = list(range(num_episodes)), dict.fromkeys(range(num_episodes), 0)
    total = 0

    def act(host: SimHost, keys: list[int]) -> None:
        # One by one: `send` takes actions in the order of the slots.
        for key in keys:
            host.manager.send([host.sending(key)], action_of(key, messages[key])[None])
            messages[key] += 1

    def begin() -> None:
        while waiting:
            number = multiplexer.room() if multiplexer is not None else (0 if len(hosts[0].running) < hosts[0].capacity else None)
            if number is None:
                return
            key = waiting.pop(0)
            hosts[number].begin(key, 1000 + key)
            if multiplexer is not None:
                multiplexer.started(key, number)

    begin()
    while any(host.num_in_flight or host.running for host in hosts) or waiting:
        for host in hosts:
            if not host.num_in_flight:
                continue
            batch = host.manager.recv(min_ready=1, timeout_s=240.0)
            keys = [host.received(slot) for slot in batch.slots.tolist()]
            done = []
            for row, key in enumerate(keys):
                observation = b"".join(part[row].tobytes() for _, part in sorted(batch.observation.items()))
                final = b"".join(part[row].tobytes() for _, part in sorted(batch.final_observation.items())) if batch.done[row] else b""
                trace.setdefault(key, []).append((final or observation, float(batch.reward[row])))
                if batch.done[row]:
                    done.append(key)
            total += len(keys)
            for key in done:
                host.end(key)
                if multiplexer is not None:
                    multiplexer.finished(key)
            if multiplexer is not None and total >= shrink_at and not multiplexer.shrunk and total < expand_at:
                multiplexer.shrink()
            if multiplexer is not None and total >= expand_at and multiplexer.shrunk:
                assert multiplexer.vacated or hosts[1].num_in_flight
                multiplexer.expand()
            if multiplexer is not None:
                multiplexer.settle()
            act(host, [key for key in keys if key not in done and key in host.running])
        for host in hosts:
            act(host, host.arrived())
        begin()
    return trace


@pytest.mark.parametrize(
    "factory",
    [SimFactory("tests.sim.toy:CountingSim", kwargs={"length": 12}), SimFactory("tests.sim.toy:SavedCountingSim", kwargs={"length": 12})],
)
def test_episodes_that_move_between_processes_go_on_bit_by_bit(factory: SimFactory) -> None:
    count = 9
    with manager(3, factory) as alone:
        whole = play([SimHost(alone)], count, None, 0, 0)
    with manager(2, factory) as first, manager(2, factory) as second:
        hosts = [SimHost(first), SimHost(second)]
        multiplexer = Multiplexer(hosts, train_on=[1])
        moved = play(hosts, count, multiplexer, shrink_at=20, expand_at=60)
        counts = multiplexer.counts()
    assert counts.moves >= 2
    assert (counts.started, counts.finished, counts.running, counts.parked) == (count, count, 0, 0)
    assert {key: len(steps) for key, steps in moved.items()} == dict.fromkeys(range(count), 13)
    assert moved == whole


def test_physics_goes_on_bit_by_bit_too() -> None:
    factory = SimFactory("gymnasium:make", kwargs={"id": "Pendulum-v1"})
    with manager(2, factory, max_episode_steps=25) as alone:
        whole = play([SimHost(alone)], 4, None, 0, 0)
    with manager(2, factory, max_episode_steps=25) as first, manager(2, factory, max_episode_steps=25) as second:
        hosts = [SimHost(first), SimHost(second)]
        multiplexer = Multiplexer(hosts, train_on=[1])
        moved = play(hosts, 4, multiplexer, shrink_at=30, expand_at=80)
        assert multiplexer.counts().moves >= 2
    assert moved == whole


def test_hosts_of_simulators_refuse_what_would_go_wrong() -> None:
    factory = SimFactory("tests.sim.toy:CountingSim", kwargs={"length": 5})
    with manager(1, factory) as one:
        host = SimHost(one)
        host.begin(1, 3)
        with pytest.raises(ValueError, match="no free slot"):
            host.begin(2, 4)
        with pytest.raises(ValueError, match="step in flight"):
            host.take([1])
        assert list(host.movable()) == []
        host.received(int(host.manager.recv().slots[0]))
        assert list(host.movable()) == [1]
        with pytest.raises(ValueError, match="already"):
            host.begin(1, 4)


# ---- tokens ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def policy(tmp_path: Path) -> LanguagePolicy:
    torch.set_num_threads(1)
    return build_language_policy(LanguageConfig(str(make_model("llama", tmp_path / "model"))))


def asked(count: int, **options: Any) -> list[GenerationRequest]:
    rng = np.random.default_rng(3)
    return [
        GenerationRequest(request_id=n, prompt_ids=rng.integers(3, 250, 6 + n), max_new_tokens=18, seed=n, **options) for n in range(count)
    ]


def moved_answers(policy: LanguagePolicy, requests: list[GenerationRequest], steps: int) -> tuple[dict[int, Completion], int]:
    """Answers of which those on the second backend move to the first after some tokens."""
    hosts = [TokenHost(TorchTokens(policy.generation_model(), max_batch=8, version=version), 8) for version in (0, 0)]
    hosts[0].backend.load_weights(5, [])
    multiplexer = Multiplexer(hosts, train_on=[1])
    for number, request in enumerate(requests):
        hosts[number % 2].submit([request])
        multiplexer.started(request.request_id, number % 2)
    got: dict[int, Completion] = {}

    def poll() -> None:
        for host in hosts:
            if host.running:
                for completion in host.poll(1, 0.0):
                    assert completion.request_id not in got
                    got[completion.request_id] = completion
                    multiplexer.finished(completion.request_id)

    for _ in range(steps):
        poll()
    multiplexer.shrink()
    assert multiplexer.vacated
    while len(got) < len(requests):
        poll()
    assert multiplexer.counts().add_up
    return got, multiplexer.counts().moves


def test_greedy_answers_that_move_are_the_same_tokens(policy: LanguagePolicy) -> None:
    requests = asked(6, temperature=0.0)
    alone = TorchTokens(policy.generation_model(), max_batch=8)
    alone.submit(requests)
    expected = {completion.request_id: completion for completion in alone.poll(min_ready=6)}
    got, moves = moved_answers(policy, requests, steps=7)
    assert moves == 3
    for number, completion in expected.items():
        np.testing.assert_array_equal(got[number].token_ids, completion.token_ids)
        np.testing.assert_allclose(got[number].log_prob, completion.log_prob, atol=1e-4)
        assert got[number].finish_reason == completion.finish_reason
        assert got[number].num_tokens == completion.num_tokens


def test_sampled_answers_that_move_keep_their_own_log_probs_and_versions(policy: LanguagePolicy) -> None:
    requests = asked(4)
    got, moves = moved_answers(policy, requests, steps=5)
    assert moves == 2
    for request in requests:
        completion = got[request.request_id]
        sequence = TokenSequence.of(request.prompt_ids, completion.token_ids, ())
        with torch.no_grad():
            found = policy.evaluate([sequence]).log_prob[0, np.flatnonzero(sequence.mask)].numpy()
        np.testing.assert_allclose(completion.log_prob, found, atol=1e-4)
        assert completion.num_tokens == 18
    # Moved ones: what was sampled before, by version 0, then by the other backend's version 5.
    assert got[1].version.tolist() == sorted(got[1].version.tolist())
    assert set(got[1].version.tolist()) == {0, 5}
    assert set(got[0].version.tolist()) == {5}


def test_the_rest_of_a_request() -> None:
    (request,) = asked(1)
    part = PartialAnswer(request)
    assert part.rest() is request
    part = part.plus(Completion.of(0, [7, 8], [-0.5, -0.25], [-0.5, -0.25], [1, 1], "aborted"))
    rest = part.rest()
    assert rest.prompt_ids.tolist() == [*request.prompt_ids.tolist(), 7, 8]
    assert rest.max_new_tokens == 16
    assert rest.seed not in (None, request.seed)
    whole = part.whole(Completion.of(0, [9], [-1.0], [-1.0], [2], "stop"))
    assert (whole.token_ids.tolist(), whole.version.tolist(), whole.finish_reason) == ([7, 8, 9], [1, 1, 2], "stop")
    assert whole.log_prob.tolist() == [-0.5, -0.25, -1.0]
    with pytest.raises(UserError, match="in text without token ids"):
        part.plus(Completion.of(0, [], [], [], [], "aborted", text="Go left."))


def test_an_answer_that_ends_while_it_is_to_be_moved_is_not_lost() -> None:
    host = TokenHost(ScriptedTokens(lambda request: [1, 2, 3]), 4)
    host.submit(asked(2))
    # A scripted backend has sampled nothing when it is asked to stop: all is taken.
    assert set(host.take([0])) == {0}
    assert list(host.running) == [1]
    # Here the abort comes too late: the answer is there already.
    host.backend.abort = lambda ids: None  # type: ignore[method-assign]
    assert host.take([1]) == {}
    assert list(host.running) == [1]
    assert [completion.token_ids.tolist() for completion in host.poll()] == [[1, 2, 3]]
    assert list(host.running) == []


class Answer:
    """Implements `Call`: its answer is there, and can be read once."""

    def __init__(self, *values: Any) -> None:
        self._values = list(values)

    def is_over(self, timeout_s: float) -> bool:
        return True

    def value(self) -> Any:
        (found,) = self._values
        self._values.clear()
        if isinstance(found, Exception):
            raise found
        return found


class Elsewhere(HostTokens):
    def load_weights(self, version: int, tensors: Any) -> None: ...

    def close(self) -> None: ...


def test_a_poll_that_failed_is_asked_anew() -> None:
    done = Completion.of(0, [1], [0.0], [0.0], [0], "stop")
    answers = {"submit": [Answer(None)], "poll": [Answer([done]), Answer(RuntimeError("out of memory"))]}
    backend = Elsewhere(lambda what, **arguments: answers[what].pop())
    backend.submit(asked(1))
    with pytest.raises(RuntimeError, match="out of memory"):
        backend.poll()
    assert backend.poll() == [done]


def test_parked_answers_are_aborted_with_the_others() -> None:
    """Room that aborting makes on the first host does not bring a parked one there."""
    lease = DeviceLease(HostPlan(num_hosts=3, num_lent=1, num_cores=3))
    backends = [ScriptedTokens(lambda request: [1, 2, 3]) for _ in range(3)]
    tokens = MultiplexedTokens(backends, lease, 1, lambda version, tensors: None)
    tokens.submit(asked(3))
    lease.shrink()
    assert lease.multiplexers[0].counts().parked == 1
    tokens.abort([0, 1, 2])
    assert {completion.request_id: completion.finish_reason for completion in tokens.poll(3, 0.0)} == dict.fromkeys(range(3), "aborted")
    assert lease.multiplexers[0].counts().running == 0
