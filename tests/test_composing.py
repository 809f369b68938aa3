"""What is kept of composing changes nothing: each configuration is the one that Hydra composes alone."""

from __future__ import annotations

import pytest
from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser

from embodied_rl.config.compose import compose_config
from embodied_rl.errors import UserError
from tests import composing

COMMANDS = (
    ["experiment=cartpole", "total_steps=7"],
    ["experiment=cartpole", "policy.hidden_sizes=[3,4]", "sim.kwargs.gravity=2"],
    ["experiment=cartpole", "sim=pendulum"],
    ["experiment=fetch_reach", "~protocol"],
    ["experiment=tiny_vla", "+algorithm.warm_start={player: 'a:b', episodes: 2}"],
    ["domains.lake={sim: {name: frozenlake}}", "algorithm=grpo"],
    [],
)
WRONG = (["experiment=cartpol"], ["experiment=cartpole", "seeds=3"], ["experiment=cartpole", "sim=null"], ["sim.num_slots={"])


def alone(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> dict[str, object]:
    with monkeypatch.context() as patched:
        patched.setattr(config_loader_impl, "create_defaults_list", composing._list)
        patched.setattr(defaults_list, "_create_interpolation_map", composing._choices)
        patched.setattr(OverridesParser, "parse_rule", composing._word)
        patched.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", composing._merge)
        patched.setattr(ConfigLoaderImpl, "_load_configuration_impl", composing._load)
        return compose_config(words)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_it_is_what_hydra_composes(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*words, "run_dir=here"]  # which has the time else
    by_hydra = alone(monkeypatch, words)
    for _ in range(2):
        assert compose_config(words) == by_hydra
    compose_config([*words, "seed=99"])["algorithm"].clear()
    assert compose_config(words) == by_hydra, "a value stays with its configuration"


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_a_mistake_is_told_as_by_hydra(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    for compose in (lambda: alone(monkeypatch, words), lambda: compose_config(words), lambda: compose_config(words)):
        with pytest.raises(UserError) as error:
            compose()
        told.append(str(error.value))
    assert told[0] == told[1] == told[2]


def test_a_list_of_files_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compose_config(["experiment=cartpole", "seed=1"])
    kept = dict(composing._lists)
    compose_config(["experiment=cartpole", "seed=2", "run_dir=elsewhere"])
    assert kept == composing._lists
    compose_config(["experiment=cartpole", "sim=halfcheetah"])
    assert len(composing._lists) == len(kept) + 1
