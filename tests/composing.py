"""Hydra composes the same choices of files thousands of times in a run of the tests: what does not depend on values is kept.

Kept are the list of files that choices name (``experiment=cartpole sim=pendulum``) and what these files say together; values are put into
it by Hydra each time. Only our own folder of configurations is kept: it does not change while tests run.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import pickle
from collections.abc import Sequence
from pathlib import Path

import omegaconf.base
from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository, IConfigRepository
from hydra._internal.defaults_list import DefaultsList, Overrides
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import InputDefault, ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from embodied_rl.files import configs_dir

_parse, _list, _merge = OmegaConf.load, config_loader_impl.create_defaults_list, ConfigLoaderImpl._compose_config_from_defaults_list
_word, _load = OverridesParser.parse_rule, ConfigLoaderImpl._load_configuration_impl
_choices = defaults_list._create_interpolation_map
_OURS = f"file://{configs_dir()}"


@functools.cache
def _parsed(text: str) -> bytes:
    return pickle.dumps(_parse(io.StringIO(text)))


def _parse_once(file: str | Path | io.TextIOBase) -> object:
    if isinstance(file, io.TextIOBase):
        with contextlib.suppress(Exception):
            return pickle.loads(_parsed(file.read()))
        file.seek(0)  # a mistake is told with the file's name
    return _parse(file)


_lists: dict[tuple[object, ...], DefaultsList] = {}
_merged: dict[int, bytes] = {}
"""By the identity of a kept list's files."""


def _list_once(
    repo: IConfigRepository, config_name: str | None, overrides_list: Sequence[Override], prepend_hydra: bool, skip_missing: bool
) -> DefaultsList:
    sources = {(source.provider, f"{source.scheme()}://{source.path}") for source in repo.get_sources()}
    if sources != {("hydra", "pkg://hydra.conf"), ("main", _OURS), ("schema", "structured://")}:
        return _list(repo, config_name, list(overrides_list), prepend_hydra, skip_missing)
    values = Overrides(repo, list(overrides_list)).config_overrides
    choices = [word for word in overrides_list if not any(word is value for value in values)]
    stored = str(ConfigStore.instance().repo.get("sim"))  # simulators of packages that a test installs
    key = (config_name, *(word.input_line for word in choices), prepend_hydra, skip_missing, stored)
    if key not in _lists:
        _lists[key] = _list(repo, config_name, choices, prepend_hydra, skip_missing)
    return dataclasses.replace(_lists[key], config_overrides=values)


def _merge_once(self: ConfigLoaderImpl, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
    if not any(defaults is kept.defaults for kept in _lists.values()):
        return _merge(self, defaults, repo)
    if id(defaults) not in _merged:
        _merged[id(defaults)] = pickle.dumps(_merge(self, defaults, repo))
    merged: DictConfig = pickle.loads(_merged[id(defaults)])
    return merged


@functools.cache
def _read_word(word: str) -> Override:
    return _word(OverridesParser.create(), word, "override")


def _word_once(self: OverridesParser, word: str, rule: str) -> object:
    return copy.copy(_read_word(word)) if rule == "override" else _word(self, word, rule)


def _load_what_stays(self: ConfigLoaderImpl, config_name: str | None, overrides: list[str], run_mode: RunMode, **how: bool) -> DictConfig:
    """Without what Hydra notes below ``hydra``, which takes as long as the rest: `hydra.compose` leaves that away."""
    words, repo = OverridesParser.create().parse_overrides(overrides), CachingConfigRepository(self.repository)
    if how.get("from_shell", True) or any(word.is_hydra_override() for word in words):
        return _load(self, config_name, overrides, run_mode, **how)
    self.validate_sweep_overrides_legal(words, run_mode, from_shell=False)
    kept = config_loader_impl.create_defaults_list(repo, config_name, words, prepend_hydra=True, skip_missing=False)
    config = self._compose_config_from_defaults_list(kept.defaults, repo)
    OmegaConf.set_struct(config, True)
    self._apply_overrides_to_config(kept.config_overrides, config)
    return config


def _with_its_own_sources(self: CachingConfigRepository, delegate: ConfigRepository) -> None:
    """Of the repository that is copied its sources are replaced, if anything: there is no need to copy what they hold."""
    self.delegate, self.cache = copy.copy(delegate), {}


def _choices_where_read(overrides: Overrides, files: list[InputDefault], self_added: bool) -> DictConfig:
    """What names of files may refer to, such as ``${sim}_tasks``: a fifth of the time of composing, and seldom read."""
    return _choices(overrides, files, self_added) if any(file.is_interpolation() for file in files) else OmegaConf.create()


OmegaConf.load = staticmethod(_parse_once)
OverridesParser.parse_rule = _word_once
CachingConfigRepository.__init__ = _with_its_own_sources
omegaconf.base.parse = functools.cache(omegaconf.base.parse)
config_loader_impl.create_defaults_list = _list_once
defaults_list._create_interpolation_map = _choices_where_read
ConfigLoaderImpl._compose_config_from_defaults_list = _merge_once
ConfigLoaderImpl._load_configuration_impl = _load_what_stays
