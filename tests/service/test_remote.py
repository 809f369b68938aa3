"""``sim=remote``: the same episodes as in this process, connections that break, services that come and go, and ROCK's routes."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from embodied_rl.config import SimConfig
from embodied_rl.config.compose import load_train_config
from embodied_rl.errors import MissingExtraError, UserError
from embodied_rl.serving.environments.app import EnvironmentService
from embodied_rl.serving.http_server import HttpRequest, HttpServer, Reply
from embodied_rl.sim import remote_client
from embodied_rl.sim.check import check_sim
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.faults import FaultKind, FaultPolicy, FaultRecord, NonFiniteSimulationError
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.remote import RemoteSim, make
from embodied_rl.sim.remote_client import JsonClient, Patience, RemoteFault
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.snapshots import SnapshotError
from embodied_rl.sim.text.gem import registered
from embodied_rl.types import StepBuffers
from tests.service.servers import SIMULATORS, LosingProxy, RockServer, pauses_take_no_time, served
from tests.sim.runs import Trace, play_lockstep

pytestmark = pytest.mark.usefixtures("forked")
REMOTE = "embodied_rl.sim.remote:make"


@pytest.fixture(scope="module")
def service() -> Iterator[EnvironmentService]:
    with served() as running:
        yield running


def remote(url: str, sim: str, **kwargs: Any) -> SimFactory:
    return SimFactory(REMOTE, kwargs={"url": url, "sim": sim, **kwargs})


def local(sim: str, **kwargs: Any) -> SimFactory:
    config = SIMULATORS[sim]
    return SimFactory(config.target, config.task, {**config.kwargs, **kwargs})


def play(factory: SimFactory, messages: int = 20, num_workers: int = 1, **kwargs: Any) -> tuple[Trace, list[FaultRecord]]:
    with EnvManager(factory, 3, num_workers=num_workers, seeds=EpisodeSeeds.training(3), **kwargs) as manager:
        manager.reset()
        return play_lockstep(manager, messages), manager.fault_records


def none_is_left(service: EnvironmentService) -> bool:
    """Whether its environments are closed, soon after the end of a process that asked for it."""
    until = time.monotonic() + 60
    while service.hub.num_environments and time.monotonic() < until:
        time.sleep(0.01)
    return service.hub.num_environments == 0


def assert_same(expected: Trace, actual: Trace) -> None:
    assert expected.keys() == actual.keys()
    for slot, rows in expected.items():
        for number, (a, b) in enumerate(zip(rows, actual[slot], strict=True)):
            for part, other in ((a[0], b[0]), (a[-1] or {}, b[-1] or {})):
                assert part.keys() == other.keys()
                for key in part:
                    assert part[key].dtype == other[key].dtype
                    np.testing.assert_array_equal(part[key], other[key], err_msg=f"slot {slot}, message {number}, {key}")
            assert a[1:-1] == b[1:-1], f"slot {slot}, message {number}"


@pytest.mark.parametrize("sim", ["puck", "count"])
def test_traces_are_those_of_the_local_simulator(service: EnvironmentService, sim: str) -> None:
    expected, _ = play(local(sim), num_workers=1, max_episode_steps=9)
    actual, _ = play(remote(service.url, sim), num_workers=2, max_episode_steps=9)
    assert any(row[5] is not None for rows in expected.values() for row in rows), "no episode ended"
    assert_same(expected, actual)
    assert none_is_left(service), "the manager's end closes them"


def test_texts_and_values_of_varying_size_are_those_of_the_local_simulator(service: EnvironmentService) -> None:
    def outputs(factory: SimFactory) -> list[Any]:
        rows = []
        with EnvManager(factory, 2, num_workers=1, seeds=EpisodeSeeds.training(1)) as manager:
            manager.reset()
            for number in range(6):
                batch = manager.step([f"ä{number} {slot}" for slot in range(2)])
                for key, part in batch.observation.items():
                    rows.append([key, *(np.asarray(value).tolist() if key != "text" else value for value in part)])
                rows.append([batch.reward.tolist(), [episode.final_info for episode in batch.episodes]])
        return rows

    assert outputs(local("talk")) == outputs(remote(service.url, "talk"))


@pytest.mark.slow
@pytest.mark.ci_sample
def test_check_sim_passes(service: EnvironmentService) -> None:
    report = check_sim(remote(service.url, "puck"), num_envs=2, steps=12, continuation_steps=20, longest_episode=160)
    assert report.ok, report
    assert report["snapshot"].outcome == report["snapshot_new_process"].outcome == report["render"].outcome == "pass", report


def test_a_lost_answer_neither_repeats_nor_loses_a_step(service: EnvironmentService) -> None:
    proxy = LosingProxy(int(service.url.rpartition(":")[2]))
    try:
        sim = make(2, proxy.url, "count", attempt_s=120.0, deadline_s=240.0)
        assert isinstance(sim, RemoteSim)
        out = StepBuffers.allocate(sim.spec, 2)
        sim.reset([0, 1], [7, 8], out)
        for step in range(1, 7):
            proxy.lose_answers = step % 3
            sim.step([0, 1], np.array([[0.5], [1.0]]), out)
            np.testing.assert_array_equal(out.observation["state"], [[7, step, 0.5 * step], [8, step, step]])
        assert proxy.num_lost == 1 + 2 + 0 + 1 + 2 + 0
        assert sim._client.num_repeats == proxy.num_lost
        sim.close()
    finally:
        proxy.close()


def test_a_client_goes_on_with_its_episode_after_an_outage(service: EnvironmentService) -> None:
    proxy = LosingProxy(int(service.url.rpartition(":")[2]))
    try:
        sim = make(1, proxy.url, "count", deadline_s=240.0)
        out = StepBuffers.allocate(sim.spec, 1)
        sim.reset([0], [7], out)
        proxy.down = True
        threading.Timer(0.6, lambda: setattr(proxy, "down", False)).start()
        sim.step([0], np.array([[2.0]]), out)
        np.testing.assert_array_equal(out.observation["state"], [[7, 1, 2]])
        proxy.down = True
        impatient = RemoteSim.__new__(RemoteSim)
        vars(impatient).update(vars(sim))
        sim._client.close()
        impatient._client = JsonClient(proxy.url, patience=Patience(deadline_s=0.3))
        with pytest.raises(RemoteFault, match="No answer from") as fault:
            impatient.step([0], np.array([[2.0]]), out)
        assert fault.value.kind == "connection"
        proxy.down = False
        sim.close()
    finally:
        proxy.close()


def test_a_client_that_was_started_anew_goes_on_with_its_episodes(service: EnvironmentService) -> None:
    first = make(2, service.url, "count")
    assert isinstance(first, RemoteSim)
    out = StepBuffers.allocate(first.spec, 2)
    first.reset([0, 1], [7, 8], out)
    first.step([0, 1], np.array([[1.0], [2.0]]), out)
    first._client.close()  # as if its process had ended
    second = RemoteSim.attached(JsonClient(service.url), first.env_ids)
    assert second.spec == first.spec
    second.step([0, 1], np.array([[0.5], [0.5]]), out)
    np.testing.assert_array_equal(out.observation["state"], [[7, 2, 1.5], [8, 2, 2.5]])
    second.close()
    with pytest.raises(RemoteFault, match="was closed"):
        RemoteSim.attached(JsonClient(service.url), first.env_ids)


@pytest.mark.slow
@pytest.mark.ci_sample
def test_a_remote_environment_that_dies_is_replaced_and_its_episodes_taken_up(tmp_path: Any) -> None:
    expected, _ = play(local("count"))
    for number, misbehave in enumerate(["raise", "exit"]):
        failing = replace(SIMULATORS["count"], kwargs={**SIMULATORS["count"].kwargs, "once": str(tmp_path / f"once{number}")})
        with served(offered={"failing": failing}) as service:
            actual, records = play(remote(service.url, "failing", sim_kwargs={"misbehave": misbehave, "at": 4}))
            assert none_is_left(service)
        assert_same(expected, actual)
        (record,) = records
        assert record.kind is FaultKind.RAISED
        assert ("the gripper fell off" if misbehave == "raise" else "exit status 7") in record.detail


def test_memory_and_nan_are_told_as_what_they_are(service: EnvironmentService) -> None:
    sim_kwargs = {"misbehave": "nan_reward", "at": 2}
    with pytest.raises(NonFiniteSimulationError, match="NaN or infinity"):
        play(remote(service.url, "count", sim_kwargs=sim_kwargs), faults=FaultPolicy(stop_on=frozenset(FaultKind)))
    with served(memory_mb=200.0) as small:
        sim = make(1, small.url, "count", sim_kwargs={"misbehave": "leak", "at": 1})
        sim.reset([0], [1], out := StepBuffers.allocate(sim.spec, 1))
        with pytest.raises(MemoryError, match="200 MB"):
            sim.step([0], np.ones((1, 1)), out)
        sim.close()


def test_a_service_that_was_started_anew_knows_no_environments() -> None:
    first, second = (EnvironmentService(SIMULATORS, token="none") for _ in range(2))
    proxy = LosingProxy(int(first.url.rpartition(":")[2]))  # one address for both: a port that was let go may be somebody else's
    try:
        sim = make(1, proxy.url, "count", deadline_s=240.0)
        assert isinstance(sim, RemoteSim)
        sim.reset([0], [1], out := StepBuffers.allocate(sim.spec, 1))
        first.close()
        sim._client.close()  # as the end of the first one's process does
        proxy.port = int(second.url.rpartition(":")[2])
        with pytest.raises(RemoteFault, match="may have been restarted") as fault:
            sim.step([0], np.ones((1, 1)), out)
        assert fault.value.kind == "unknown_environment"
        sim.close()
    finally:
        proxy.close()
        first.close()
        second.close()


@pytest.mark.parametrize("protocol", ["embodied_rl", "rock"])
def test_environments_are_closed_at_once(protocol: str) -> None:
    """The process that closes them has a second: one after the other, many would be left over until they were idle for long."""
    together, closed, names = threading.Barrier(3), list[str](), iter("abc")

    def answer(request: HttpRequest) -> Reply:
        if request.path.endswith("/make"):
            return Reply({"sandbox_id": next(names)})
        together.wait(60)
        closed.append(f"{request.method} {request.path} {request.body.get('sandbox_id')}")
        return Reply({})

    server = HttpServer(answer)
    try:
        if protocol == "rock":
            make(3, server.url, task=GAME, protocol=protocol).close()
            expected = [f"POST /apis/v1/envs/gem/close {name}" for name in "abc"]
        else:
            spec = SimFactory("tests.sim.toy:CountingSim").make(1).spec
            RemoteSim(JsonClient(server.url), ["a", "b", "c"], spec, [0, 0, 0]).close()
            expected = [f"DELETE /v1/environments/{name} None" for name in "abc"]
        assert not together.broken
        assert sorted(closed) == expected
    finally:
        together.abort()
        server.close()


def test_a_busy_server_is_asked_again_and_a_broken_one_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses_take_no_time(monkeypatch)
    answers: list[Reply] = []
    server = HttpServer(lambda request: answers.pop(0) if len(answers) > 1 else answers[0])
    client = JsonClient(server.url, patience=Patience(deadline_s=240.0))
    try:
        busy = Reply({"error": "later", "kind": "too_many_environments"}, 429, {"Retry-After": "0.2"})
        answers[:] = [busy, Reply({}, 503), Reply(b"<html>", 200), Reply({"ok": 1})]
        assert client.call("GET", "/").body == {"ok": 1}
        assert client.num_repeats == 3
        answers[:] = [Reply({"error": "it died", "kind": "died"}, 500), Reply({})]
        assert client.call("GET", "/").kind == "died", "what became of an environment is no reason to ask again"
        for hopeless, kind in ((busy, "too_many_environments"), (Reply([1]), "bad_response")):
            answers[:] = [hopeless]
            with pytest.raises(RemoteFault, match=r"No answer from .* after \d+ attempts?: ") as fault:
                client.call("GET", "/")
            assert fault.value.kind == kind
        answers[:] = [Reply(b"<html>"), Reply({})]
        with pytest.raises(RemoteFault, match="after 1 attempt: its answer is not"):
            client.call("POST", "/", {}, repeat=False)
    finally:
        client.close()
        server.close()


def test_what_a_server_has_said_is_told_where_it_had_no_time_to_say_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses_take_no_time(monkeypatch, longer_by_s=120.0 - 0.3)  # which leaves next to nothing to the second attempt
    given_up, asked = threading.Event(), list[int]()

    def answer(request: HttpRequest) -> Reply:
        asked.append(1)
        if len(asked) > 1:
            given_up.wait(240)
        return Reply({"error": "later", "kind": "too_many_environments"}, 429, {"Retry-After": "0.1"})

    server = HttpServer(answer)
    client = JsonClient(server.url, patience=Patience(deadline_s=120.0, attempt_s=60.0))
    try:
        with pytest.raises(RemoteFault, match="after 2 attempts: later") as fault:
            client.call("GET", "/")
        assert fault.value.kind == "too_many_environments"
    finally:
        given_up.set()
        client.close()
        server.close()


def test_mistakes_are_told_in_one_line(service: EnvironmentService, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"'cuont' cannot be made at .*Did you mean 'count'"):
        make(1, service.url, "cuont")
    with pytest.raises(UserError, match="does not take 'gravity'"):
        make(1, service.url, "count", sim_kwargs={"gravity": 1})
    with pytest.raises(UserError, match=r"protocol='rok' is not a choice. Did you mean 'rock'"):
        make(1, service.url, protocol="rok")
    with pytest.raises(UserError, match=r"gravity is not known; the simulator's own go into sim_kwargs"):
        make(1, service.url, "count", gravity=1)
    with pytest.raises(UserError, match="url must be like"):
        make(1, "127.0.0.1:8700")
    with monkeypatch.context() as patch:
        patch.setattr("embodied_rl.sim.remote._CONNECT_S", 0.1)
        with pytest.raises(UserError, match=r"No environment service answers at http://127.0.0.1:9 .*serve_envs"):
            make(1, "http://127.0.0.1:9")
    with served(token="correct horse") as locked:
        with pytest.raises(UserError, match="needs a token"):
            make(1, locked.url, "count")
        monkeypatch.setenv("MY_TOKEN", "correct horse")
        make(1, locked.url, "count", token_env="MY_TOKEN").close()
    sim = make(1, service.url, "count")
    with pytest.raises(SnapshotError, match="has no snapshots"):
        sim.snapshot(0)
    sim.close()


def test_the_configuration_and_what_it_imports() -> None:
    config = load_train_config(["sim=remote", "sim.kwargs.url=http://10.0.0.2:8700", "sim.kwargs.sim=halfcheetah"]).sim
    assert config.target == REMOTE
    assert config.kwargs == {"url": "http://10.0.0.2:8700", "sim": "halfcheetah"}
    heavy = "[name for name in ('torch', 'httpx', 'gymnasium', 'mujoco') if name in sys.modules]"
    code = f"import sys, embodied_rl.sim.remote, embodied_rl.serving.environments.app; print({heavy})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


# ---- ROCK -----------------------------------------------------------------------------------------------------------


def require_gem() -> None:
    try:
        registered()
    except MissingExtraError as error:
        pytest.skip(str(error))


GAME = "game:GuessTheNumber-v0-easy"


@pytest.mark.parametrize("wrapped", [False, True])
def test_rock_plays_the_games_of_gem(wrapped: bool) -> None:
    require_gem()
    from embodied_rl.sim.text import gem

    server = RockServer(wrapped)
    try:
        far = make(2, server.url, task=GAME, protocol="rock", history="conversation")
        near = gem.make(GAME, 2, history="conversation")
        outs = [StepBuffers.allocate(sim.spec, 2) for sim in (far, near)]
        assert far.spec.observation == near.spec.observation
        assert far.spec.action == near.spec.action
        rows: list[list[Any]] = [[], []]
        for episode in range(2):
            for which, (sim, out) in enumerate(zip((far, near), outs, strict=True)):
                for env_id in (0, 1):
                    sim.reset([env_id], [10 * episode + env_id], out)
                    rows[which].append(out.observation["text"][env_id])
                    for guess in (5, 2, 8, 1):
                        sim.step([env_id], [f"\\boxed{{{guess}}}"], out)
                        text, info = out.observation["text"][env_id], out.info[env_id]
                        rows[which].append([text, out.reward[env_id], out.terminated[env_id], out.success[env_id], info])
                        if out.terminated[env_id]:
                            break
        assert rows[0] == rows[1]
        assert server.calls.count("make") == 2
        far.close()
        assert not server.sandboxes
    finally:
        server.server.close()


def test_rock_through_the_manager_and_its_refusals() -> None:
    require_gem()
    server = RockServer()
    try:
        config = SimConfig.from_dict({"name": "remote", "target": REMOTE, "task": GAME, "num_slots": 2, "num_workers": 1,
                                      "kwargs": {"url": server.url, "protocol": "rock"}})  # fmt: skip
        with EnvManager.from_config(config, EpisodeSeeds.training(0)) as manager:
            first = manager.reset()
            assert all("1 and 10" in text for text in first.observation["text"]), first.observation["text"]
            batch = manager.step(["\\boxed{5}", "no number"])
            assert batch.terminated[1] or "text" in batch.observation
        until = time.monotonic() + 60
        while server.sandboxes and time.monotonic() < until:
            time.sleep(0.01)
        assert not server.sandboxes
        with pytest.raises(UserError, match="no such environment: game:Chess"):
            make(1, server.url, task="game:Chess", protocol="rock")
        with pytest.raises(UserError, match="needs the environment's id"):
            make(1, server.url, protocol="rock")
    finally:
        server.server.close()


def test_a_rock_step_whose_answer_is_lost_is_not_sent_again() -> None:
    require_gem()
    server = RockServer()
    proxy = LosingProxy(server.server.port)
    try:
        sim = make(1, proxy.url, task=GAME, protocol="rock")
        sim.reset([0], [1], out := StepBuffers.allocate(sim.spec, 1))
        proxy.lose_answers = 1
        with pytest.raises(RemoteFault, match="after 1 attempt"):
            sim.step([0], ["\\boxed{5}"], out)
        assert server.calls.count("step") == 1
        sim.close()
    finally:
        proxy.close()
        server.server.close()


@pytest.mark.parametrize("head", [b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 200 OK\r\nConnection: close\r\n"])
def test_a_server_that_ends_the_connection_behind_each_answer_is_asked_on_another(head: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for _ in range(3):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(head + b'Content-Length: 9\r\n\r\n{"ok": 1}')

        thread = threading.Thread(target=answer)
        thread.start()
        client = JsonClient(f"http://127.0.0.1:{listener.getsockname()[1]}", patience=Patience(attempt_s=5.0, deadline_s=5.0))
        assert [client.call("GET", "/").body for _ in range(3)] == [{"ok": 1}] * 3
        assert client.num_repeats == 0
        client.close()
        thread.join()


_X = b"x" * 1000


@pytest.mark.parametrize(
    "body",
    [
        b"Content-Length: 99999999999\r\n\r\n" + _X * 5,
        b"\r\n" + _X * 5,
        b"Transfer-Encoding: chunked\r\n\r\n3e8\r\n" + _X + b"\r\n3e8\r\n",
    ],
)
def test_an_answer_without_end_is_given_up(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_client, "MOST_BYTES", 1000)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\n" + body)
                while True:  # until the client goes
                    connection.sendall(b"x" * 100)

        thread = threading.Thread(target=answer)
        thread.start()
        client = JsonClient(f"http://127.0.0.1:{listener.getsockname()[1]}", patience=Patience(attempt_s=20.0, deadline_s=20.0))
        with pytest.raises(RemoteFault, match="/v1 is longer than 1,000 bytes") as fault:
            client.call("GET", "/v1")
        assert (fault.value.kind, client.num_repeats) == ("bad_response", 0)
        client.close()
        thread.join(10.0)
        assert not thread.is_alive()


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:99999", "http://127.0.0.1:x", "ftp://x", "http://", "http://h:0"])
def test_what_is_no_url_of_a_server(url: str) -> None:
    with pytest.raises(UserError, match=r"url must be like http://127\.0\.0\.1:8700"):
        JsonClient(url)
