"""A service offers what its operator listed, and requests name neither code nor files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.commands import serve_envs
from embodied_rl.config import SimConfig, group_names, load_sim_config
from embodied_rl.errors import UserError
from embodied_rl.serving.environments.app import EnvironmentService
from embodied_rl.serving.environments.hub import as_requested, offered_simulators
from embodied_rl.serving.http_server import HttpProblem, token_to_ask_for
from embodied_rl.sim.remote import make
from embodied_rl.sim.remote_client import JsonClient
from embodied_rl.trust import named_code, registered_code

EVIL = "tests.trust.evil:run"


def test_what_names_code_is_not_offered_by_default() -> None:
    offered = offered_simulators()
    assert {"cartpole", "gem_sudoku", "frozenlake", "maniskill_pushcube", "toy_text"} <= offered.keys()
    left_out = {"custom", "remote", "text_task", "agent_program", "judged", "mjcf", "textarena"}
    assert set(group_names("sim")) - offered.keys() == left_out
    for config in offered.values():
        named = [code for code in named_code({"kwargs": config.kwargs, "target": config.target}) if code.name != config.target]
        assert not named, "not even in its own file"
        assert ("target", config.target) in registered_code()


def test_the_operator_may_list_anything() -> None:
    assert offered_simulators(("mjcf", "cartpole")).keys() == {"mjcf", "cartpole"}
    assert offered_simulators(("tests.sim.toy:CountingSim",))["tests.sim.toy:CountingSim"].target == "tests.sim.toy:CountingSim"
    with pytest.raises(UserError, match="Did you mean 'cartpole'"):
        offered_simulators(("cartpol",))
    with pytest.raises(UserError, match="custom"):
        offered_simulators(("custom",))


@pytest.mark.parametrize(
    ("sim", "kwargs"),
    [
        ("text_task", {"environment": EVIL}),
        ("text_task", {"environment": "evil"}),
        ("text_task", {"environment_options": {"target": EVIL}}),
        ("cartpole", {"anything": EVIL}),
        ("cartpole", {"anything": ["fine", EVIL]}),
        ("cartpole", {"anything": {"target": EVIL}}),
        ("halfcheetah", {"xml_file": "cheetah"}),
        ("halfcheetah", {"model": "/etc/passwd"}),
        ("halfcheetah", {"model": "robot.xml"}),
        ("halfcheetah", {"model": "~root"}),
        ("halfcheetah", {"model": ".."}),
        ("halfcheetah", {"model": "a/b"}),
        ("questions", {"path": "questions"}),
        ("search_qa", {"corpus": "notes"}),
        ("textarena", {"opponent": "scripted", "opponent_options": {"target": EVIL}}),
        ("agent_program", {"command": ["sh", "-c", "id"]}),
        ("agent_program", {"function": "evil"}),
        ("agent_program", {"pass_env": ["AWS_SECRET_ACCESS_KEY"]}),
        ("agent_program", {"network": "open"}),
        ("agent_program", {"sandbox": "prlimit"}),
        ("code_tasks", {"allow_network": True}),
        ("agent_program", {"env": {"LD_PRELOAD": "evil"}}),
        ("mjcf", {"reward": "evil"}),
        ("judged", {"base_url": "http://evil.example"}),
        ("remote", {"url": "http://evil.example"}),
        ("frozenlake", {"size": float("nan")}),
        ("frozenlake", {"size": [[[[4]]]]}),
        ("frozenlake", {"size": [4] * 1001}),
        ("arithmetic", {"template": "x" * 2001}),
    ],
)
def test_a_request_names_neither_code_nor_files(sim: str, kwargs: dict[str, Any]) -> None:
    with pytest.raises(HttpProblem) as refused:
        as_requested(load_sim_config(sim), None, kwargs)
    assert (refused.value.status, refused.value.kind) == (403, "refused_argument")
    assert next(iter(kwargs)) in refused.value.message
    assert len(refused.value.message) <= 400


@pytest.mark.parametrize(("sim", "task"), [("cartpole", "tests.trust.evil:X-v0"), ("toy_text", "evil: x"), ("mjcf", "pendulum"),
                                           ("mjcf", "/etc/passwd"), ("cartpole", "../x"), ("gem_sudoku", "os:system")])  # fmt: skip
def test_a_task_is_a_name(sim: str, task: str) -> None:
    with pytest.raises(HttpProblem) as refused:
        as_requested(load_sim_config(sim), task, {})
    assert refused.value.status == 403


@pytest.mark.parametrize(
    ("sim", "task", "kwargs"),
    [
        ("frozenlake", None, {"size": [4, 8], "slippery": True, "hole_share": 0.3, "num_maps": None}),
        ("arithmetic", None, {"operations": ["+", "/"], "digits": [1, 3]}),
        ("gem_sudoku", "game:GuessTheNumber-v0-easy", {"history": "none", "max_turns": 5}),
        ("cartpole", "ALE/Pong-v5", {"frameskip": 4}),
        ("maniskill_pushcube", "PickCube-v1", {"control_mode": "pd_ee_delta_pos"}),
        ("metaworld_mt10", None, {"tasks": ["reach-v3", "push-v3"]}),
        ("questions", None, {"path": None}),
    ],
)
def test_plain_values_pass(sim: str, task: str | None, kwargs: dict[str, Any]) -> None:
    config = load_sim_config(sim)
    found = as_requested(config, task, kwargs)
    assert found.kwargs == {**config.kwargs, **kwargs}
    assert found.task == (task or config.task)
    assert found.target == config.target


@pytest.mark.parametrize("name", ["__class__", "_private", "two words", "task", "num_envs", "self"])
def test_some_names_are_no_arguments(name: str) -> None:
    for config in (load_sim_config("cartpole"), SimConfig("theirs", "no_such_package.module:Sim")):
        with pytest.raises(HttpProblem, match=f"does not take '{name}'") as refused:
            as_requested(config, None, {name: 1})
        assert refused.value.status == 422


def test_the_request_of_the_issue_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVIL_MARK", str(tmp_path / "mark"))
    sys.modules.pop("tests.trust.evil", None)
    service = EnvironmentService(offered_simulators(("text_task", "cartpole")), token="none")
    client = JsonClient(service.url)
    try:
        for body in (
            {"sim": "text_task", "kwargs": {"environment": EVIL}},
            {"sim": "cartpole", "task": "tests.trust.evil:X-v0"},
            {"sim": EVIL},
        ):
            assert client.call("POST", "/v1/environments", body).status in (403, 404)
        with pytest.raises(UserError, match=r"cannot be made .* cannot be set by a request"):
            make(1, service.url, "text_task", sim_kwargs={"environment": EVIL})
        assert service.hub.num_environments == 0
    finally:
        client.close()
        service.close()
    assert not (tmp_path / "mark").exists()


# ---- tokens ----


def test_which_token_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMBODIED_RL_TOKEN", raising=False)
    first, second = (token_to_ask_for(None, "127.0.0.1") for _ in range(2))
    assert first[1]
    assert second[1]
    assert len({first[0], second[0]}) == 2
    assert token_to_ask_for("none", "127.0.0.1") == (None, False)
    with pytest.raises(UserError, match="token=none is not allowed"):
        token_to_ask_for("none", "0.0.0.0")
    with pytest.raises(UserError, match="no token is set"):
        token_to_ask_for(None, "0.0.0.0")
    monkeypatch.setenv("EMBODIED_RL_TOKEN", "correct horse")
    assert token_to_ask_for(None, "0.0.0.0") == ("correct horse", False)
    assert token_to_ask_for("none", "127.0.0.1") == (None, False)
    with pytest.raises(UserError, match="token"):
        serve_envs.COMMAND.parse(["token=secret"])


def test_a_service_that_is_built_in_python_asks_for_a_token_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMBODIED_RL_TOKEN", raising=False)
    with pytest.raises(UserError, match="has 5 characters; a token needs at least 8"):
        EnvironmentService({}, token="short")
    service = EnvironmentService(offered_simulators(("cartpole",)))
    try:
        assert service.token_is_new
        assert service.token is not None
        with pytest.raises(UserError, match="needs a token"):
            make(1, service.url, "cartpole")
        monkeypatch.setenv("EMBODIED_RL_TOKEN", service.token)
        make(1, service.url, "cartpole").close()
    finally:
        service.close()


def test_a_client_reads_the_token_from_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMBODIED_RL_TOKEN", raising=False)
    service, token = serve_envs.start(serve_envs.COMMAND.parse(["port=0", "sims=cartpole"])[0])
    try:
        assert token is not None
        with pytest.raises(UserError, match=r"needs a token.*EMBODIED_RL_TOKEN"):
            make(1, service.url, "cartpole")
        monkeypatch.setenv("EMBODIED_RL_TOKEN", token)
        make(1, service.url, "cartpole").close()
    finally:
        service.close()
