"""The walk finds whatever a configuration names, in every place where a name is resolved, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from embodied_rl import trust as module
from embodied_rl.config import group_names
from embodied_rl.config.compose import load_train_config
from embodied_rl.errors import UserError
from embodied_rl.trust import code_names, named_code, registered_code


def nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


NAMING = {
    "sim.target": ("os:system", "os:system"),
    "sim.task": ("evil_package:Task-v0", "evil_package:Task-v0"),
    "sim.kwargs.environment": ("os:system", "os:system"),
    "sim.kwargs.task": ("evil_package:Task-v0", "evil_package:Task-v0"),
    "sim.kwargs.reward": ("os:system", "os:system"),
    "sim.kwargs.success": ("os:system", "os:system"),
    "sim.kwargs.function": ("agent.py:play", "agent.py:play"),
    "sim.kwargs.command": (["sh", "-c", "touch /tmp/x"], "sh -c 'touch /tmp/x'"),
    "sim.kwargs.env": ({"LD_PRELOAD": "./evil.so"}, "LD_PRELOAD=./evil.so"),
    "sim.kwargs.opponent_options.target": ("os:system", "os:system"),
    "sim.kwargs.opponent_options.base_url": ("https://evil.example/v1", "https://evil.example/v1"),
    "sim.kwargs.opponent_options.api_key_env": ("AWS_SECRET_ACCESS_KEY", "AWS_SECRET_ACCESS_KEY"),
    "sim.kwargs.url": ("https://evil.example", "https://evil.example"),
    "sim.kwargs.token_env": ("GITHUB_TOKEN", "GITHUB_TOKEN"),
    "sim.kwargs.sim_kwargs.environment": ("os:system", "os:system"),
    "sim.kwargs.some_new_key": ("os:system", "os:system"),
    "sim.kwargs.a.b.c": ([{"d": "os:system"}], "os:system"),
    "algorithm.advantage": ("os:system", "os:system"),
    "algorithm.loss": ("os:system", "os:system"),
    "algorithm.loss_options.function": ("os:system", "os:system"),
    "algorithm.recorded.expert": ("os:system", "os:system"),
    "algorithm.initialized.expert": ("os:system", "os:system"),
    "algorithm.warm_start.player": ("os:system", "os:system"),
    "policy.name": ("os:system", "os:system"),
    "hybrid.ray.address": ("10.0.0.1x:6379", "10.0.0.1x:6379"),
    "hybrid.reward_worker.target": ("os:system", "os:system"),
    "hybrid.reward_worker.kwargs.base_url": ("http://evil.example", "http://evil.example"),
    "generation.mix.other.base_url": ("http://evil.example/v1", "http://evil.example/v1"),
    "generation.mix.other.api_key_env": ("OPENAI_API_KEY", "OPENAI_API_KEY"),
    "agent.tool_options.mcp": ([{"command": ["sh", "-c", "id"]}], "sh -c id"),
    "agent.tool_options.python_network": (True, "python_network"),
    "agent.tool_options.python_sandbox": ("prlimit", "python_sandbox=prlimit"),
    "logger.wandb_mode": ("online", "wandb_mode=online"),
    "sim.kwargs.allow_network": (True, "allow_network"),
    "sim.kwargs.network": ("open", "network=open"),
    "sim.kwargs.sandbox": ("prlimit", "sandbox=prlimit"),
    "sim.kwargs.readable": (["/home/a b"], "readable=/home/a b"),
    "sim.kwargs.writable": (["/"], "writable=/"),
    "sim.kwargs.pass_env": (["AWS_SECRET_ACCESS_KEY"], "pass_env=AWS_SECRET_ACCESS_KEY"),
    "sim.kwargs.host": ("evil.example", "evil.example"),
    "domains.one.sim.target": ("os:system", "os:system"),
    "domains.one.sim.kwargs.environment": ("os:system", "os:system"),
    "domains.one.agent.tool_options.mcp": ([{"command": ["sh", "-c", "id"]}], "sh -c id"),
    "domains.one.algorithm.warm_start.player": ("os:system", "os:system"),
}


@pytest.mark.parametrize(("key", "value", "name"), [(key, *pair) for key, pair in NAMING.items()])
def test_every_place_that_names_code_is_found(key: str, value: Any, name: str) -> None:
    assert code_names(nested(key, value)) == (name,)
    assert (key.rpartition(".")[2], name) not in registered_code()


@pytest.mark.parametrize("address", ["10.0.0.1:6379", "ray://10.0.0.1:10001", "[fe80::1]:6379"])
def test_a_cluster_elsewhere_is_asked_about(address: str) -> None:
    # Its messages are pickles: who answers there may run anything here.
    assert code_names(nested("hybrid.ray.address", address)) == (address,)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("agent.system", "Rules: go:up or go:down."),
        ("agent.actions", ["go:up", "go:down"]),
        ("agent.template", "{observation}\nAction:"),
        ("domains.one.agent.actions", ["go:up"]),
        ("run_dir", "runs/12:30:00"),
        ("recording", ["data:1/x"]),
        ("sim.kwargs.question", "What is this: a cube?"),
        ("sim.kwargs.device", "cuda:0"),
        ("sim.kwargs.ratio", "16:9"),
        ("sim.kwargs.reward", "sparse"),
        ("sim.kwargs.path", "data/questions.jsonl"),
        ("sim.kwargs.command", None),
        ("sim.kwargs.function", None),
        ("algorithm.kl.target", 0.1),
        ("hybrid.ray.cpus.env", 1.0),
        ("hybrid.ray.address", "auto"),
        ("agent.tool_options.python_network", False),
        ("agent.tool_options.python_sandbox", "namespaces"),
        ("logger.wandb_mode", "offline"),
        ("sim.kwargs.network", "proxy"),
        ("sim.kwargs.readable", []),
        ("sim.kwargs.sandbox", "landlock"),
    ],
)
def test_no_false_alarm(key: str, value: Any) -> None:
    assert code_names(nested(key, value)) == ()


def test_gems_own_names_are_names_in_gem_alone() -> None:
    assert code_names({"sim": {"target": "embodied_rl.sim.text.gem:make", "task": "game:Sudoku-v0-hard"}})[1:] == ()
    assert code_names({"sim": {"target": "embodied_rl.sim.text.gem:make", "task": "os:Sudoku"}})[1:] == ("os:Sudoku",)
    assert code_names({"sim": {"target": "embodied_rl.sim.robots.gymnasium:make", "task": "game: Sudoku"}})[1:] == ("game: Sudoku",)


@pytest.mark.parametrize("experiment", [name for name in group_names("experiment") if name != "agent_program"])
def test_shipped_experiments_name_only_what_is_registered(experiment: str) -> None:
    plain = load_train_config([f"experiment={experiment}"]).to_dict()
    assert [code for code in named_code(plain) if (code.last, code.name) not in registered_code()] == []


def test_every_registered_simulator_is_registered_code() -> None:
    from embodied_rl.config import load_sim_config

    missing = [name for name in group_names("sim") if ("target", load_sim_config(name).target) not in registered_code()]
    assert missing == ["custom"], "whose target is the user's to give"


def test_placeholders_and_relative_programs_are_not_registered() -> None:
    names = {name for _, name in registered_code()}
    assert not [name for name in names if "package.module" in name or "examples/" in name or "{python}" in name]


def test_a_configuration_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_VALUES", 10_000)
    endless: list[Any] = []
    endless.append(endless)
    bomb: list[Any] = ["lol"]
    for _ in range(40):
        bomb = [bomb] * 9
    for value in (endless, bomb):
        with pytest.raises(UserError, match="at most 10,000 values"):
            named_code({"sim": {"kwargs": {"a": value}}})
    assert code_names({"command": bomb}) != (), "its words are not walked"
