"""Composes configurations with Hydra from command-line words; a mistake in a word is a one-line error.

Hydra gives commas, brackets, spaces and letters beyond ASCII a special meaning, but paths contain them. This module quotes paths, so that
users type them as they are.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied_rl.config import TrainConfig, config_file, group_names
from embodied_rl.errors import UserError, did_you_mean, shown
from embodied_rl.files import configs_dir
from embodied_rl.registry import installed_config_folders, installed_targets

if TYPE_CHECKING:
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override
    from hydra.plugins.search_path_plugin import SearchPathPlugin


_FLAGS_WITH_VALUE = {
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "--config-dir": (),
    "--package": (),
}
"""{flag of Hydra: its choices; empty: any text}."""
_LONG = {"-h": "--help", "-m": "--multirun", "-r": "--run", "-sc": "--shell-completion"}
_LONG |= {"-c": "--cfg", "-i": "--info", "-cd": "--config-dir", "-p": "--package"}
FLAGS = (*dict.fromkeys((*_LONG, *_LONG.values())), "--hydra-help", "--version", "--resolve")

_PATHS = re.compile(r"\+{0,2}(?:run_dir|resume|hydra\.(?:run|sweep)\.dir|(?:[\w.]+\.)?(?:\w+_)?(?:path|dir|folder|checkpoint|model))")
"""Keys whose values are paths: passed unchanged, whatever Hydra would read in them."""
_SWEEPER = "hydra.sweeper.params"
_SYNTAX = "[{('\""
"""First characters of a value that is meant for Hydra."""


def split_flags(overrides: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split into ({long form of a flag of Hydra: its value}, settings). Raises UserError for an unknown flag, or one without its value."""
    flags: dict[str, str] = {}
    settings: list[str] = []
    left = list(overrides)
    while left:
        override = left.pop(0)
        if not override.startswith("-"):
            settings.append(override)
            continue
        flag, equals, value = override.partition("=")
        name = _LONG.get(flag, flag)
        if name in _FLAGS_WITH_VALUE:
            choices = _FLAGS_WITH_VALUE[name]
            if not equals and (not left or "=" in left[0]) and name != "--info":
                raise UserError(f"{flag} needs a value: {' or '.join(f'{flag} {c}' for c in choices) or f'{flag} FOLDER'}.")
            if not equals and left and "=" not in left[0]:
                value = left.pop(0)
            if value and choices and value not in choices:
                raise UserError(f"{flag} {shown(value)} is not a choice.{did_you_mean(value, choices)}")
        elif flag not in FLAGS:
            raise UserError(_no_flag(flag, value))
        flags[name] = value
    return flags, settings


def _no_flag(flag: str, value: str) -> str:
    name = flag.lstrip("-").replace("-", "_")
    if flag in ("--config-name", "-cn", "--config-path", "-cp"):
        folder = "or add your own files with --config-dir FOLDER"
        return f"{flag} is not supported: the configuration is always configs/train.yaml. Choose its parts (experiment=…, sim=…), {folder}."
    if not name:
        return f"Argument {shown(flag)} has no meaning. Settings are key=value, such as seed=5; see --help."
    typed = f"{name}={value}" if value else f"{name}=VALUE"
    return f"Flag {shown(flag)} is not known. Settings are key=value without dashes; type: {shlex.quote(typed)}"


def hydra_overrides(overrides: Iterable[str], sweep: bool = False) -> list[str]:
    """Quote values for Hydra that are plain text: those of path keys, and those that its grammar cannot read. ``~/`` at a value's start is
    the home folder. `sweep`: commas separate values."""
    return [_quoted(override, sweep) for override in overrides]


def _quoted(override: str, sweep: bool) -> str:
    key, equals, value = override.partition("=")
    if not equals or override.startswith(("-", "~")) or not value or value[0] in _SYNTAX:
        return override
    if value == "~" or value.startswith("~/"):
        value = str(Path(value).expanduser())
        override = f"{key}={value}"
    is_path = _PATHS.fullmatch(key) and value != "null" and not (sweep and "," in value) and "${" not in value
    return f"{key}={quoted_value(value)}" if is_path or (parsed(override) is None and parsed(f"{key}=x") is not None) else override


def quoted_value(value: str) -> str:
    """A text in Hydra's double quotes, in which a backslash counts only before a quote."""
    if value and re.fullmatch(r"[A-Za-z_/.][\w/.-]*", value, re.ASCII):
        return value
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return f'"{escaped}{chr(92) * trailing}"'


def parsed(override: str) -> Override | None:
    """Hydra's reading of a word; None if it cannot read it."""
    from hydra.errors import HydraException

    try:
        return _parser().parse_override(override)
    except (HydraException, ValueError, RecursionError):  # numbers of 5,000 digits, and nesting as deep
        return None


@cache
def _parser() -> OverridesParser:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create()


def check_form(override: str, groups: Sequence[str], *, sweep: bool) -> None:
    """Raise UserError for an override that is no setting in any configuration; the message says what to type instead."""
    key, equals, value = override.partition("=")
    name = key.lstrip("+~")
    if not equals and not (override.startswith("~") and re.fullmatch(r"[\w./@-]+", name)):
        near = f" Type: {name}=VALUE" if name in groups else did_you_mean(name, groups) if re.fullmatch(r"\w+", name) else ""
        raise UserError(f"Argument {shown(override)} is not of the form key=value, such as seed=5 or sim=cartpole.{near}")
    if not name or parsed(f"{name}=x") is None:
        raise UserError(f"{shown(key)} in argument {shown(override)} is not a configuration key. Settings are key=value, such as seed=5.")
    found, typed = parsed(override), shlex.quote(f"{key}={quoted_value(value)}")
    if found is None:
        raise UserError(
            f"The value of {shown(key)} cannot be read: {shown(value)}. Write lists as [1,2] and mappings as {{a:1}}. Quote text with "
            f"such characters twice, for Hydra and for the shell. Type: {typed}"
        )
    if found.is_sweep_override() and not sweep:
        raise UserError(
            f"{shown(override)} has several values, which is a sweep: python -m embodied_rl.train -m {shlex.quote(override)}. Write a "
            f"list as [1,2]. For one text, type: {typed}"
        )


def of_each_value(overrides: Sequence[str]) -> list[list[str]]:
    """Words of single runs in which each value of a sweep appears at least once; other keys have their first value."""
    choices = _choices(overrides)
    first = [values[0] for values in choices]
    return [first, *([*first[:at], value, *first[at + 1 :]] for at, values in enumerate(choices) for value in values[1:])]


def runs_of(overrides: Sequence[str]) -> list[list[str]]:
    """Words of all runs of a sweep, in the order in which Hydra's own sweeper starts them."""
    return [list(run) for run in itertools.product(*_choices(overrides))]


def _choices(overrides: Sequence[str]) -> list[list[str]]:
    choices = []
    for override in overrides:
        found = parsed(override)
        swept = found is not None and found.is_discrete_sweep()
        choices.append([f"{found.get_key_element()}={text}" for text in found.sweep_string_iterator()] if found and swept else [override])
    return choices


def with_sweeper_params(overrides: Sequence[str], sweep: bool) -> list[str]:
    """Replace ``hydra.sweeper.params={seed: '1,2'}`` and ``hydra.sweeper.params.seed=1,2`` by what Hydra's own sweeper makes of them:
    ``seed=1,2``, before the other words. Raises UserError: there is no sweep, or the value is no mapping of keys to texts."""
    first: list[str] = []
    others: list[str] = []
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key != _SWEEPER and not key.startswith(_SWEEPER + "."):
            others.append(override)
            continue
        if not sweep:
            raise UserError(f"{shown(override)} defines a sweep. Add -m to run it.")
        if key != _SWEEPER:
            first.append(f"{key.removeprefix(_SWEEPER + '.')}={value.strip(chr(39) + chr(34))}")
            continue
        found = parsed(override)
        mapping = found.value() if found is not None else None
        if not isinstance(mapping, dict):
            raise UserError(f"{_SWEEPER} must be a mapping of keys to values, such as {_SWEEPER}={{seed: '1,2'}}, got {shown(value)}.")
        first += [f"{name}={text}" for name, text in mapping.items()]
    return [*first, *others]


_OPEN = (
    *("sim.kwargs.", "sim.kwargs=", "algorithm.advantage_options", "algorithm.loss_options", "logger.options", "policy.options"),
    *("domains.", "domains=", "generation.mix.", "generation.mix="),
)

_MOST_COMPOSED = 200
"""Runs of a sweep that are checked before the first starts."""
_ABSENT = object()
_MAIN_JOB = "experiment=maniskill_pushcube"
_TASKS = {"experiment", "sim", "policy", "algorithm", "resume"}
"""Keys that, beside ``domains``, choose a run's task."""


def compose_config(overrides: Sequence[str]) -> dict[str, Any]:
    """Compose ``configs/train.yaml`` with overrides, as the command line does, into plain values.
    Raises UserError naming the unknown key or choice, and the nearest one."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    _check_choices(overrides)
    overrides = hydra_overrides(overrides)
    try:
        return _plain(overrides)
    except RecursionError:
        raise UserError(f"{shown(max(overrides, key=len))} is nested too deeply to be read.") from None
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # Hydra raises ValueError for a group set to null
        raise UserError(_explain(error, overrides)) from error


def _plain(overrides: Sequence[str]) -> dict[str, Any]:
    """What Hydra composes of our files and those of installed packages. Raises its errors."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    add_installed_configs()
    add_resolvers()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(configs_dir()), version_base="1.3"):
        plain = OmegaConf.to_container(compose("train", overrides=open_kwargs(overrides)), resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _check_choices(overrides: Sequence[str]) -> None:
    """Raise UserError if a group of files is not given exactly one name: Hydra would take a list as several files merged in order, and a
    mapping as a value."""
    for override in overrides:
        group, equals, value = override.lstrip("+").partition("=")
        names = group_names(group) if re.fullmatch(r"\w+", group) else []
        if names and override.startswith("+"):
            raise UserError(f"{shown(override)}: '{group}' is in the configuration already. Type: {override.lstrip('+')}")
        if override == "resume=true":
            raise UserError("resume=true: write resume=auto for run_dir's run or the newest unfinished one, or name it with resume=FOLDER.")
        if group == "protocol" and value == "null":
            raise UserError("protocol=null: to leave out an experiment's protocol, type '~protocol' (in quotes).")
        if equals and names and (value in ("null", "true", "false") or not re.fullmatch(r"[A-Za-z_][\w.-]*", value)):
            raise UserError(f"{group} must be the name of one file of configs/{group}, got {shown(value)}.{did_you_mean(value, names)}")


def _check_given_once(overrides: Sequence[str]) -> None:
    """Raise UserError for a key with two values: Hydra would silently take the last."""
    values: dict[str, str] = {}
    for override in overrides:
        key, equals, value = override.lstrip("+").partition("=")
        if equals and values.setdefault(key, value) != value:
            both = shlex.quote(f"{key}={values[key]},{value}")
            raise UserError(
                f"{shown(key)} is given twice: {shown(values[key])} and {shown(value)}. Remove one. For a run with each, type: -m {both}"
            )


def add_resolvers() -> None:
    """Register the resolvers ``${rows_per_slot:1024}``, ``${distribution:}`` and ``${played:${sim.name}}`` for configuration files."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("rows_per_slot", rows_per_slot, replace=True)
    OmegaConf.register_new_resolver("distribution", distribution, replace=True)
    OmegaConf.register_new_resolver("played", played, replace=True)


def played(sim: str, *, _root_: Mapping[str, Any]) -> str:
    """Name of what is played: the simulator's, or the domains' names."""
    return "+".join(map(str, _domains(_root_))) or sim


def _domains(root: Mapping[str, Any]) -> dict[Any, Mapping[str, Any]]:
    """A composed configuration's domains; what is no mapping is refused where `TrainConfig.domains` is checked."""
    found = root.get("domains")
    return {name: one for name, one in found.items() if isinstance(one, Mapping)} if isinstance(found, Mapping) else {}


def distribution(*, _root_: Mapping[str, Any], _parent_: Mapping[str, Any]) -> str:
    """Default distribution of continuous actions: SAC needs bounded ones. `_parent_`: the policy; a domain's may have its own method."""
    domains = _domains(_root_).values()
    own = next((one.get("algorithm") or {} for one in domains if one.get("policy") is _parent_), {})
    learns = (own if "name" in own else _root_.get("algorithm") or {}).get("off_policy") or {}
    return "squashed" if learns.get("update") == "sac" else "gaussian"


def rows_per_slot(rows: int, *, _root_: Mapping[str, Any], _parent_: Mapping[str, Any]) -> int:
    """Steps of every slot that give about `rows` rows per update, counting at least 16 slots; at least 1.

    With fewer slots each takes as many steps as with 16: updates are smaller, and as frequent in each slot's time. An invalid number of
    slots is refused where `sim.num_slots` is checked.

    Args:
        rows: rows of one update.
        _root_: the composed configuration; the slots are those of its domains, or of `sim` if it has none.
        _parent_: the algorithm; if it is one domain's own, the slots are that domain's.
    """
    domains = list(_domains(_root_).values())
    own = [domain for domain in domains if domain.get("algorithm") is _parent_]
    played = [domain.get("sim") for domain in own or domains] if domains else [_root_.get("sim")]
    slots = [(sim or {}).get("num_slots") for sim in played]
    return max(1, rows // max(sum(number for number in slots if type(number) is int), 16))


def add_installed_configs() -> None:
    """Let Hydra find what installed packages provide: folders of configuration files, searched after ours, and simulators that are only a
    target. Acts once per process, and only if such a package is installed."""
    from hydra.core.config_store import ConfigStore

    targets = {name: target for name, target in installed_targets("sim").items() if config_file("sim", name) is None}
    for name, target in targets.items():
        ConfigStore.instance().store(group="sim", name=name, node={"name": name, "target": target})
    if installed_config_folders():
        from hydra.core.plugins import Plugins

        Plugins.instance().register(_search_path_plugin())


@cache
def _search_path_plugin() -> type[SearchPathPlugin]:
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class InstalledConfigs(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            for package, folder in installed_config_folders().items():
                search_path.append(provider=package, path=f"file://{folder}")

    return InstalledConfigs


def open_kwargs(overrides: Sequence[str]) -> list[str]:
    """Add ``++`` to a simulator's or a method's own arguments, because only the target knows which exist."""
    return [f"++{override}" if override.startswith(_OPEN) else override for override in overrides]


def or_main_job(overrides: Sequence[str]) -> list[str]:
    """The words of a run; words that choose no task train the main job."""
    keys = [override.lstrip("+").partition("=")[0] for override in overrides]
    chosen = any(key.partition("@")[0] in _TASKS or key.startswith("domains") for key in keys)
    return [*overrides] if chosen else [*overrides, _MAIN_JOB]


def load_train_config(overrides: Sequence[str]) -> TrainConfig:
    """The configuration that ``python -m embodied_rl.train OVERRIDES`` would run. Raises UserError."""
    return TrainConfig.from_dict(compose_config(or_main_job(overrides)))


def check_overrides(arguments: Sequence[str], check: Callable[[TrainConfig], object] | None = None) -> list[str]:
    """Compose once before Hydra does, so that mistakes get our messages. Returns the arguments for Hydra.

    Composes each value of a sweep once. Searches a user's own folder (``--config-dir``) like ours.

    `check`: checks the configurations of a sweep before its first run starts. Raises UserError: an invalid flag or argument, an unknown key
    or choice, a value that does not fit; and whatever `check` raises.
    """
    flags, overrides = split_flags(arguments)
    sweep = "--multirun" in flags
    given = [argument for argument in arguments if argument not in overrides]
    overrides = or_main_job(with_sweeper_params(overrides, sweep))
    if not sweep:
        _check_choices(overrides)
    settings = hydra_overrides(overrides, sweep)
    top_keys = [found.name for found in fields(TrainConfig)]
    for override in settings:
        check_form(override, top_keys, sweep=sweep)
    _check_given_once(overrides)
    own = []
    if (folder := flags.get("--config-dir")) is not None:
        if not Path(folder).is_dir():
            raise UserError(f"--config-dir {shown(folder)} is not a folder.")
        own = [f"hydra.searchpath=[{quoted_value('file://' + str(Path(folder).absolute()))}]"]
    for run in of_each_value(settings)[:_MOST_COMPOSED]:
        config = TrainConfig.from_dict(compose_config([*run, *own]))
        if sweep and check is not None:
            check(config)
    return [*given, *open_kwargs(settings)]


def runs_to_show(arguments: Sequence[str]) -> list[list[str]]:
    """Arguments of each run if only the configurations of a sweep are to be shown (``-m … --cfg job``), which Hydra shows one by one;
    else `arguments`, those of `check_overrides`, as they are."""
    flags, overrides = split_flags(arguments)
    if not {"--multirun", "--cfg"} <= set(flags):
        return [list(arguments)]
    given = [argument for argument in arguments if argument not in overrides and argument not in ("-m", "--multirun")]
    return [[*given, *run] for run in runs_of(overrides)]


def _explain(error: Exception, overrides: Sequence[str]) -> str:
    text = str(error)
    if choice := re.search(r"Could not find '([\w-]+)/([^']*)'", text):
        group, value = choice.groups()
        kind = {"sim": "Simulator"}.get(group, group.capitalize())
        return f"{kind} {shown(value)} is not known.{did_you_mean(value, group_names(group))}"
    if key := re.search(r"Could not override '([^']+)'|Key '([^']+)' is not in struct", text):
        return _unknown_key(key[1] or key[2], overrides)
    if "integer string conversion" in text:
        return f"{shown(max(overrides, key=len))} has too many digits to be read."
    if twice := re.search(r"Multiple values for ([\w./-]*\w)", text):
        return f"'{twice[1]}' is chosen twice. Give it one value."
    if there := re.search(r"An item is already at '([^']+)'", text):
        return f"'{there[1]}' is already in the configuration: remove the '+' before it."
    culprit = next((override for override in overrides if not _composes(override)), None)
    if culprit is None:
        return f"These settings do not go together: {' '.join(map(shlex.quote, overrides))}. See python -m embodied_rl.train --cfg job."
    if culprit.startswith("~"):
        return f"{shown(culprit)} removes a key that a run needs or that does not exist. Remove it, or set a value: {culprit[1:]}=…"
    if "${" in culprit:
        return f"{shown(culprit)} refers to a value that does not exist. All values: python -m embodied_rl.train --cfg job"
    hint = "python -m embodied_rl.train --cfg job shows all keys with their values"
    return f"{shown(culprit)} does not fit the configuration: the key must exist and the value must have its type; {hint}."


def _composes(override: str) -> bool:
    try:
        _plain([override])
    except Exception:  # compose_config reports any error
        return False
    return True


def _unknown_key(key: str, overrides: Sequence[str]) -> str:
    """Say which part of a dotted key exists, and which keys are there, in the files that the overrides choose."""
    # Only choices of existing files, so that a mistake in another override is not reported instead of the key.
    chosen = [override for override in overrides if override.partition("=")[2] in group_names(override.partition("=")[0])]
    composed = compose_config(chosen)
    here: object = composed
    walked: list[str] = []
    for part in key.split("."):
        if not isinstance(here, Mapping) or part not in here:
            break
        here = here[part]
        walked.append(part)
    place = f"in '{'.'.join(walked)}' " if walked else ""
    missing = key.split(".")[len(walked)] if len(walked) < len(key.split(".")) else key
    choices = [str(choice) for choice in here] if isinstance(here, Mapping) else []
    if here is None and walked == ["algorithm", "groups"]:
        who = f"algorithm={composed['algorithm']['name']}"
        return f"{shown(key)}: {who} learns from fixed rollouts and has no groups. Choose a method with groups, for example algorithm=grpo."
    files = ", ".join(_files_with(key)) if walked else ""
    if (there := ".".join(walked)) == "hybrid.placement" or (here is None and walked):
        typed = f"{there}={{{'' if here is None else f'kind: {here}, '}{missing}: …}}"
        known = f"choose a file that has it ({walked[0]}={files}), or set" if files else "set"
        return f"{shown(key)} sets a part of {there}, which is {shown(here)} here: {known} it whole, '{typed}'. See docs/configuration.md."
    known = f" Files of configs/{walked[0]} that have it: {files}." if files else did_you_mean(missing, choices)
    return f"Configuration key '{key}' is not known: {place}'{missing}' does not exist.{known}"


def _files_with(key: str) -> list[str]:
    """Choices of the key's group whose files have it."""
    import yaml

    group, *parts = key.split(".")
    found = []
    for file in group_names(group):
        here: object = yaml.safe_load(path.read_text(encoding="utf-8")) if (path := config_file(group, file)) is not None else None
        for part in parts:
            here = here.get(part, _ABSENT) if isinstance(here, Mapping) else _ABSENT
        found += [file] if here is not _ABSENT else []
    return found
