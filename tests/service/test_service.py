"""The environment service over real HTTP: what it answers, what it refuses, and what becomes of environments that fail."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from embodied_rl.commands import serve_envs
from embodied_rl.errors import UserError
from embodied_rl.serving.environments import hub as environment_module
from embodied_rl.serving.environments.app import EnvironmentService
from embodied_rl.serving.environments.hub import Environment, EnvRequest, Outcome
from embodied_rl.serving.http_server import HttpProblem, ServerLimits
from embodied_rl.sim import worker_pool as process
from embodied_rl.sim.snapshots import decode_state
from tests.service.servers import SIMULATORS, served
from tests.sim.runs import hangs

pytestmark = pytest.mark.usefixtures("forked")

ROOT = Path(__file__).resolve().parents[2]


def ask(url: str, path: str, body: Any = None, method: str | None = None, **headers: str) -> tuple[int, dict[str, Any]]:
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    head = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    request = urllib.request.Request(url + path, data, head, method=method or ("GET" if data is None else "POST"))
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def make(url: str, sim: str, **body: Any) -> str:
    status, answer = ask(url, "/v1/environments", {"sim": sim, **body})
    assert status == 201, answer
    return answer["environments"][0]


@pytest.fixture(scope="module")
def service() -> Iterator[EnvironmentService]:
    with served() as running:
        yield running


def test_an_episode_by_hand(service: EnvironmentService) -> None:
    env = f"/v1/environments/{make(service.url, 'count')}"
    status, first = ask(service.url, f"{env}/reset", {"seed": 5})
    assert (status, first) == (200, {"observation": {"state": [5.0, 0.0, 0.0]}})
    for step, action in enumerate([1.5, 2.5], start=1):
        status, answer = ask(service.url, f"{env}/step", {"action": [action]})
        total = sum([1.5, 2.5][:step])
        assert status == 200
        assert answer["observation"] == {"state": [5.0, step, total]}
        assert (answer["reward"], answer["success"], answer["terminated"]) == (action, total >= 3, False)
        assert answer["info"] == {"total": total, "path": [0, 1, 2]}
    assert ask(service.url, env)[1]["steps"] == 2
    assert ask(service.url, env, method="DELETE") == (200, {"closed": env.rpartition("/")[2]})
    status, gone = ask(service.url, f"{env}/step", {"action": [1.0]})
    assert (status, gone["kind"]) == (410, "closed")
    assert ask(service.url, f"{env}/close", {})[0] == 200, "closing again is no error"


def test_text_and_pictures_travel(service: EnvironmentService) -> None:
    env = f"/v1/environments/{make(service.url, 'talk')}"
    ask(service.url, f"{env}/reset", {"seed": 3})
    status, answer = ask(service.url, f"{env}/step", {"action": "grüß Gott"})
    assert status == 200
    observation = answer["observation"]
    assert (observation["text"], observation["lengths"], observation["state"]) == ("grüß Gott", [9], [1.0])
    with Image.open(io.BytesIO(base64.b64decode(observation["picture"]["png"]))) as image:
        np.testing.assert_array_equal(np.asarray(image), np.ones((2, 5, 3), np.uint8))
    status, drawn = ask(service.url, f"{env}/render", {})
    assert drawn["image"]["shape"] == [2, 2, 3]


def test_a_batch_steps_environments_side_by_side_and_tells_each_its_own(tmp_path: Path) -> None:
    """The first step of each of the three ends when all are in it: one after the other none would."""
    meeting = replace(SIMULATORS["meeting"], kwargs={"folder": str(tmp_path), "count": 3})
    with served(offered={"meeting": meeting}) as service:
        _step_side_by_side(service)


def _step_side_by_side(service: EnvironmentService) -> None:
    status, answer = ask(service.url, "/v1/environments", {"sim": "meeting", "count": 3})
    ids = answer["environments"]
    ask(service.url, "/v1/batch", {"requests": [{"id": i, "operation": "reset", "seed": seed} for seed, i in enumerate(ids)]})
    requests = [{"id": i, "operation": "step", "action": [number]} for number, i in enumerate(ids)]
    status, answer = ask(service.url, "/v1/batch", {"requests": requests})
    assert status == 200
    assert [result["body"]["observation"]["state"] for result in answer["results"]] == [[0, 1, 0], [1, 1, 1], [2, 1, 2]]
    requests = [{"id": ids[0], "operation": "step", "action": [1]}, {"id": "nobody", "operation": "step", "action": [1]}]
    status, answer = ask(service.url, "/v1/batch", {"requests": requests})
    assert status == 207
    assert [result["status"] for result in answer["results"]] == [200, 404]
    assert answer["results"][1]["body"]["kind"] == "unknown_environment"
    assert ask(service.url, "/v1/batch", {"requests": [requests[0], requests[0]]})[0] == 400
    for env_id in ids:
        ask(service.url, f"/v1/environments/{env_id}", method="DELETE")


def test_a_repeated_request_is_not_executed_twice(service: EnvironmentService) -> None:
    env = f"/v1/environments/{make(service.url, 'count')}"
    ask(service.url, f"{env}/reset", {"seed": 0, "number": 1})
    first = ask(service.url, f"{env}/step", {"action": [1.0], "number": 2})
    assert ask(service.url, f"{env}/step", {"action": [1.0], "number": 2}) == first
    assert first[1]["observation"]["state"] == [0, 1, 1]
    assert ask(service.url, env)[1]["steps"] == 1
    status, answer = ask(service.url, f"{env}/step", {"action": [2.0], "number": 2})
    assert (status, answer["kind"]) == (409, "number_reused")
    assert ask(service.url, f"{env}/step", {"action": [1.0], "number": 1})[1]["kind"] == "stale_request"
    assert ask(service.url, f"{env}/step", {"action": [1.0], "number": 3})[1]["observation"]["state"] == [0, 2, 2]
    # A step that comes again while the first is still running waits for that one's answer.
    slow = f"/v1/environments/{make(service.url, 'count', kwargs={'step_s': 0.5})}"
    ask(service.url, f"{slow}/reset", {"seed": 0, "number": 1})
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(ask(service.url, f"{slow}/step", {"action": [1.0], "number": 2}))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer[1]["observation"]["state"] for answer in answers] == [[0, 1, 1]] * 3
    # Making is repeated in the same way.
    body = {"sim": "count", "count": 2, "request": "abc"}
    assert ask(service.url, "/v1/environments", body) == ask(service.url, "/v1/environments", body)
    assert ask(service.url, "/v1/environments", {**body, "count": 1})[1]["kind"] == "number_reused"


def test_snapshots_are_taken_up_by_another_environment(service: EnvironmentService) -> None:
    first, second = (f"/v1/environments/{make(service.url, 'saved_count')}" for _ in range(2))
    ask(service.url, f"{first}/reset", {"seed": 4})
    ask(service.url, f"{first}/step", {"action": [2.5]})
    status, answer = ask(service.url, f"{first}/snapshot", {})
    np.testing.assert_array_equal(decode_state(base64.b64decode(answer["snapshot"])), [4, 1, 2.5])
    assert ask(service.url, f"{second}/restore", answer) == (200, {})
    assert ask(service.url, f"{second}/step", {"action": [1.0]})[1]["observation"]["state"] == [4, 2, 3.5]
    for wrong in ("***", base64.b64encode(b"no snapshot").decode()):
        status, answer = ask(service.url, f"{second}/restore", {"snapshot": wrong})
        assert (status, answer["kind"]) == (422, "snapshot_error")
    assert ask(service.url, f"{second}/step", {"action": [1.0]})[1]["observation"]["state"] == [4, 3, 4.5], "a refusal changes nothing"


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "part"),
    [
        ("/v1/environments", {"sim": "puk"}, 404, "unknown_simulator", "Did you mean 'puck'"),
        ("/v1/environments", {}, 400, "bad_request", "'sim' is missing"),
        ("/v1/environments", {"sim": "puck", "count": 0}, 400, "bad_request", "between 1 and"),
        ("/v1/environments", {"sim": "puck", "colour": 1}, 400, "bad_request", "'colour' is not known"),
        ("/v1/environments", {"sim": "puck", "kwargs": {"ice": 1}}, 422, "user_error", "does not take 'ice'"),
        ("/v1/environments", {"sim": "puck", "kwargs": {"fault": "raises_while_built"}}, 500, "raised", "no such motor"),
        ("/v1/environments", b"{", 400, "bad_request", "not JSON"),
        ("/v1/environments", b'{"sim": NaN}', 400, "bad_request", "NaN is not a JSON number"),
        ("/v1/environments", b"[" * 60_000, 400, "bad_request", "not JSON"),
        ("/v1/environments", b"[1]", 400, "bad_request", "must be a JSON object"),
        ("/v1/environments", b'{"sim": "' + b"x" * 70_000 + b'"}', 413, "body_too_large", "65,536"),
        ("/v1/environments/none/step", {"action": [1]}, 404, "unknown_environment", "Environment 'none' does not exist"),
        ("/v1/environments/none/stop", {}, 404, "unknown_route", "Did you mean '/v1/environments/{id}/step'"),
        ("/v1/nothing", {}, 404, "unknown_route", "Unknown path /v1/nothing"),
        ("/v1/health", {}, 405, "wrong_method", "takes GET"),
        ("/v1/batch", {"requests": []}, 400, "bad_request", "between 1 and"),
        ("/v1/batch", {"requests": [1]}, 400, "bad_request", "must be an object"),
        ("/v1/batch", {"requests": [{"id": "a", "operation": "jump"}]}, 400, "bad_request", "'jump' is not a choice"),
    ],
)
def test_what_cannot_be_done_is_refused(small: EnvironmentService, path: str, body: Any, status: int, kind: str, part: str) -> None:
    got, answer = ask(small.url, path, body)
    assert (got, answer["kind"]) == (status, kind), answer
    assert part in answer["error"]
    assert set(answer) == {"error", "kind", "choices"}
    assert small.hub.num_environments == 0


@pytest.fixture(scope="module")
def small() -> Iterator[EnvironmentService]:
    with served(http=ServerLimits(max_body_mb=1 / 16)) as running:
        yield running


def test_wrong_actions_are_refused_and_the_episode_goes_on(service: EnvironmentService) -> None:
    env = f"/v1/environments/{make(service.url, 'count')}"
    assert ask(service.url, f"{env}/step", {"action": [1.0]})[1]["kind"] == "not_reset"
    assert ask(service.url, f"{env}/reset", {"seed": -1})[0] == 400
    assert ask(service.url, f"{env}/reset", {"seed": "1"})[1]["error"] == "'seed' must be a whole number, got '1'."
    ask(service.url, f"{env}/reset", {"seed": 1})
    for wrong in ([1.0, 2.0], "left", None, [[1.0, 2.0]], ["x"], {"a": 1}):
        status, answer = ask(service.url, f"{env}/step", {"action": wrong})
        assert (status, answer["kind"]) == (422, "user_error"), wrong
        assert "a list of 1 numbers" in answer["error"]
    assert ask(service.url, f"{env}/step", {})[0] == 400
    assert ask(service.url, f"{env}/step", {"action": [1.0]})[1]["observation"]["state"] == [1, 1, 1]


def time_is_over_when_it_hangs(monkeypatch: pytest.MonkeyPatch, once: Path) -> None:
    """Of the request number 3; and the environment has minutes to say where it hangs."""
    finish = Environment.finish

    def finish_later(environment: Environment, request: EnvRequest) -> Outcome:
        deadline = time.monotonic() + 240
        while environment.number == 3 and not hangs(once) and time.monotonic() < deadline:
            time.sleep(0.01)
        if environment.number == 3:
            environment._deadline = 0.0
        return finish(environment, request)

    monkeypatch.setattr(Environment, "finish", finish_later)
    monkeypatch.setattr(process, "_STACK_S", 120.0)


@pytest.mark.parametrize(
    ("misbehave", "kind", "part"),
    [("raise", "raised", "the gripper fell off"), ("exit", "died", "exit status 7"), ("hang", "timed_out", "_hang_here"),
     ("nan_reward", "non_finite", "NaN"), ("nan_observation", "non_finite", "'state'"), ("leak", "out_of_memory", "200 MB")],
)  # fmt: skip
def test_an_environment_that_fails_is_a_typed_error_and_stays_one(
    misbehave: str, kind: str, part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    once = tmp_path / "once"
    if misbehave == "hang":
        time_is_over_when_it_hangs(monkeypatch, once)
    failing = replace(SIMULATORS["count"], kwargs={**SIMULATORS["count"].kwargs, "once": str(once)})
    with served(step_timeout_s=3600.0, memory_mb=200.0, offered={"failing": failing}) as running:
        env = f"/v1/environments/{make(running.url, 'failing', kwargs={'misbehave': misbehave, 'at': 2})}"
        other = f"/v1/environments/{make(running.url, 'count')}"
        for path in (env, other):
            ask(running.url, f"{path}/reset", {"seed": 1, "number": 1})
        assert ask(running.url, f"{env}/step", {"action": [1.0], "number": 2})[0] == 200
        status, answer = ask(running.url, f"{env}/step", {"action": [1.0], "number": 3})
        assert (status, answer["kind"]) == (500, kind), answer
        assert part in answer["error"]
        assert ask(running.url, f"{env}/step", {"action": [1.0], "number": 3}) == (status, answer), "the repeat hears the same"
        assert ask(running.url, f"{env}/reset", {"seed": 1, "number": 4})[1]["kind"] == kind, "it does not come back"
        assert ask(running.url, f"{other}/step", {"action": [1.0], "number": 2})[0] == 200
        assert running.hub.num_environments == 1


def test_cpu_time_is_limited() -> None:
    with served(cpu_s=3.0) as running:
        env = f"/v1/environments/{make(running.url, 'busy')}"
        ask(running.url, f"{env}/reset", {"seed": 1})
        status, answer = ask(running.url, f"{env}/step", {"action": [1.0]})
        assert (status, answer["kind"]) == (500, "cpu_limit"), answer


def test_idle_environments_are_closed_and_places_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead_s = 0.0
    monkeypatch.setattr(environment_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s))
    with served(idle_s=3600.0, max_environments=2) as running:
        first = make(running.url, "count", count=2)
        status, answer = ask(running.url, "/v1/environments", {"sim": "count"})
        assert (status, answer["kind"]) == (429, "too_many_environments")
        ahead_s = 3601.0
        until = time.monotonic() + 240
        while running.hub.num_environments and time.monotonic() < until:
            time.sleep(0.05)
        status, answer = ask(running.url, f"/v1/environments/{first}/reset", {"seed": 1})
        assert (status, answer["kind"]) == (410, "idle")
        make(running.url, "count")


def test_a_token_is_asked_for_where_others_can_reach_the_service() -> None:
    with pytest.raises(UserError, match=r"can be reached from other machines.*EMBODIED_RL_TOKEN"):
        EnvironmentService(SIMULATORS, host="0.0.0.0")
    with served(token="correct horse") as running:
        assert ask(running.url, "/v1/health")[1]["kind"] == "unauthorized"
        assert ask(running.url, "/v1/health", Authorization="Bearer wrong horse")[0] == 401
        assert ask(running.url, "/v1/health", Authorization="Bearer correct horse")[0] == 200
        # Who has none makes the server hold no body: it is not waited for.
        with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2])), timeout=20) as connection:
            connection.sendall(b"POST /v1/batch HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 30000000\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 401 ")


def test_a_page_in_a_browser_cannot_use_a_service_without_token(service: EnvironmentService) -> None:
    # By a name that leads here (DNS rebinding), or by a form, which cannot send JSON as such.
    assert ask(service.url, "/v1/health", Host="evil.example")[1]["kind"] == "wrong_host"
    assert ask(service.url, "/v1/environments", {"sim": "puck"}, Content_Type="text/plain")[1]["kind"] == "not_json"


def test_bodies_without_a_length_are_refused_and_the_connection_ends(service: EnvironmentService) -> None:
    port = int(service.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(b"POST /v1/batch HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n")
        data = b"".join(iter(lambda: connection.recv(4096), b""))
    assert data.startswith(b"HTTP/1.1 411 ")
    assert data.count(b"HTTP/1.1") == 1, "the chunks are not taken for another request"


def test_the_service_is_described_in_openapi(service: EnvironmentService) -> None:
    """FastAPI's model of OpenAPI reads it; each path that it names exists with its methods, and takes no other."""
    models = pytest.importorskip("fastapi.openapi.models", reason="fastapi is not installed")
    status, document = ask(service.url, "/openapi.json", method="GET")
    assert status == 200
    models.OpenAPI.model_validate(document)
    with urllib.request.urlopen(f"{service.url}/docs", timeout=60) as response:
        text = response.read().decode()
    assert yaml.safe_load(text) == document
    assert "&id" not in text, "a reader looks nothing up"
    items = {path: models.PathItem.model_validate(item) for path, item in document["paths"].items()}
    assert {"/v1/batch", "/v1/environments", "/v1/environments/{id}/step"} < set(document["paths"])
    assert items["/v1/environments/{id}/reset"].post.requestBody.content["application/json"].schema_.required == ["seed"]
    for path, methods in document["paths"].items():
        real = path.replace("{id}", "none")
        taken = {method.upper() for method in methods if method != "parameters"}
        for method in ("GET", "POST", "DELETE", "PUT"):
            status, answer = ask(service.url, real, {} if method == "POST" else None, method=method)
            assert (status == 405) == (method not in taken), (method, path)
            assert answer.get("kind") != "unknown_route"
            if status == 405:
                assert answer["choices"] == sorted(taken)


def test_what_is_no_request_is_refused_as_json_too(service: EnvironmentService) -> None:
    assert ask(service.url, "/v1/environments", {}, method="PUT")[1]["kind"] == "wrong_method"
    with socket.create_connection(("127.0.0.1", int(service.url.rpartition(":")[2])), timeout=60) as connection:
        connection.sendall(b"GET /v1/health HTTP/1.1 and more\r\n\r\n")
        data = b"".join(iter(lambda: connection.recv(4096), b""))
    assert json.loads(data.partition(b"\r\n\r\n")[2] or data)["kind"] == "bad_request"


def test_a_gone_environment_keeps_nothing_of_the_requests_that_were_refused(service: EnvironmentService) -> None:
    """An exception that is raised again and again would hold the frames of them all, and their bodies."""
    env_id = make(service.url, "count")
    ask(service.url, f"/v1/environments/{env_id}", method="DELETE")
    for _ in range(2):
        assert ask(service.url, f"/v1/environments/{env_id}/step", {"action": [1.0] * 1000})[1]["kind"] == "closed"
    assert service.hub._gone[env_id].__traceback__ is None


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_no_environment_is_left_behind_by_a_make_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither if no process can be started for the next one, nor if the service closes meanwhile."""
    started: list[process.WorkerProcess] = []

    def start(*arguments: Any, **options: Any) -> process.WorkerProcess:
        if len(started) == 1:
            raise BlockingIOError("no more processes")
        started.append(process.WorkerProcess(*arguments, **options))
        return started[-1]

    with served() as running:
        monkeypatch.setattr(environment_module, "WorkerProcess", start)
        assert ask(running.url, "/v1/environments", {"sim": "puck", "count": 2})[1]["kind"] == "internal_error"
        assert is_gone(started[0].pid)
        monkeypatch.undo()
        closing, closed, started_before = threading.Event(), threading.Event(), Environment.started

        def started_late(environment: Environment) -> None:
            started_before(environment)
            started.append(environment._process)
            closing.set()
            assert closed.wait(120)

        monkeypatch.setattr(Environment, "started", started_late)
        answers: list[tuple[int, dict[str, Any]]] = []
        asking = threading.Thread(target=lambda: answers.append(ask(running.url, "/v1/environments", {"sim": "puck"})))
        asking.start()
        assert closing.wait(120)
        running.hub.close()
        closed.set()
        asking.join()
        assert (answers[0][0], answers[0][1]["kind"]) == (503, "closing")
        assert is_gone(started[1].pid)
        assert running.hub.num_environments == 0


def test_an_environment_that_nobody_asks_is_closed_for_its_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as running:
        env_id = make(running.url, "count")
        problem = HttpProblem(500, "out_of_memory", "too much")
        monkeypatch.setattr(Environment, "over_memory", lambda environment: problem)
        until = time.monotonic() + 240
        while running.hub.num_environments and time.monotonic() < until:
            time.sleep(0.05)
        assert ask(running.url, f"/v1/environments/{env_id}")[1]["kind"] == "out_of_memory"


def test_an_environment_that_is_ended_after_an_answer_leaves_its_place() -> None:
    """It was too large while it was asked: no thread that talks to it hears of its end."""
    with served() as running:
        env_id = make(running.url, "count")
        running.hub.get(env_id).condemn(HttpProblem(500, "out_of_memory", "too much"))
        until = time.monotonic() + 60
        while running.hub.num_environments and time.monotonic() < until:
            time.sleep(0.05)
        assert running.hub.num_environments == 0
        assert ask(running.url, f"/v1/environments/{env_id}")[1]["kind"] == "out_of_memory"


def test_closing_ends_every_process() -> None:
    with served() as running:
        answer = ask(running.url, "/v1/environments", {"sim": "puck", "count": 2})[1]
        pids = [running.hub.get(env_id)._process.pid for env_id in answer["environments"]]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_wrong_argument_of_the_command() -> None:
    with pytest.raises(UserError, match="port"):
        serve_envs.COMMAND.parse(["prot=1"])


def test_the_command_serves_until_it_is_ended() -> None:
    command = [sys.executable, "-m", "embodied_rl.serve_envs", "port=0", "sims=[cartpole]"]
    environment = {key: value for key, value in os.environ.items() if key != "EMBODIED_RL_TOKEN"} | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
        assert process.stdout is not None
        assert "Token" in process.stdout.readline()
        export, _, token = process.stdout.readline().strip().partition("=")
        assert export == "export EMBODIED_RL_TOKEN"
        assert len(token) >= 32
        line = process.stdout.readline()
        url = line.split(" at ")[1].split()[0]
        assert ask(url, "/v1/environments", {"sim": "cartpole"})[0] == 401
        bearer = {"Authorization": f"Bearer {token}"}
        made = ask(url, "/v1/environments", {"sim": "cartpole"}, **bearer)[1]["environments"]
        status, answer = ask(url, f"/v1/environments/{made[0]}/reset", {"seed": 0}, **bearer)
        assert status == 200
        assert len(answer["observation"]["state"]) == 4
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
