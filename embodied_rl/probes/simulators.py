"""Simulators: each one's package is imported, or one of its tasks is played, as its adapter does it."""

from __future__ import annotations

import importlib

from embodied_rl.probes.base import NotHere, Probe, extra_fix


def _import_simulator(module: str, extra: str) -> str:
    importlib.import_module(module)
    return _configurations(extra)


def _import_maniskill() -> str:
    """With what is remembered of tasks that were to be stepped as a batch."""
    from embodied_rl.sim.robots.maniskill import remembered
    from embodied_rl.sim.robots.maniskill_assets import registered_tasks

    registered_tasks()
    words = _configurations("maniskill")

    found = remembered()
    equal = sorted({one.task for one in found if one.equal})
    apart = sorted({one.task for one in found if not one.equal})
    told = [f"equal as a batch: {', '.join(equal)}"] * bool(equal) + [f"one by one: {', '.join(apart)}"] * bool(apart)
    return "; ".join([words, *told])


def _import_gem() -> str:
    from embodied_rl.sim.text.gem import tasks

    return f"{len(tasks())} tasks that need nothing else; {_configurations('text')}"


def _import_libero() -> str:
    from embodied_rl.errors import MissingAssetsError
    from embodied_rl.sim.robots import libero

    libero.tasks()
    try:
        libero.assets_folder()
    except MissingAssetsError:
        raise NotHere("its meshes and textures are not on this machine") from None
    return _configurations("libero")


def _play_words(name: str) -> str:
    """One action of the simulator's own choice, in its configuration as it stands: made, begun and played."""
    from embodied_rl.config import load_sim_config
    from embodied_rl.errors import MissingAssetsError, MissingExtraError
    from embodied_rl.sim.factory import SimFactory
    from embodied_rl.sim.text.turns import TextSim
    from embodied_rl.types import StepBuffers

    config = load_sim_config(name)
    try:
        sim = SimFactory(config.target, config.task, config.kwargs, config.extra).make(1)
    except MissingAssetsError as error:
        raise NotHere(str(error).partition(" Fetch ")[0], error.fetch) from None
    except MissingExtraError as error:
        raise NotHere(str(error).partition(" Install ")[0], extra_fix(error.extra)) from None
    assert isinstance(sim, TextSim)
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [0], out)
    sim.step([0], [sim.sample_action(0, seed=0)], out)
    sim.close()
    return f"played a turn; sim={name}"


def _configurations(extra: str) -> str:
    from embodied_rl.config import group_names, load_sim_config

    names = [name for name in group_names("sim") if load_sim_config(name).extra == extra]
    return f"sim={', '.join(names)}" if names else "no configuration of ours uses it"


def _simulator(name: str, module: str, package: str, extra: str) -> Probe:
    return Probe("simulators", name, lambda: _import_simulator(module, extra), extra_fix(extra), package=package)


def _words(name: str, sim: str, extra: str | None = None) -> Probe:
    """A text environment; `extra` installs the package of the same name, None: it needs none. Its adapter reports what else it needs."""
    return Probe("simulators", name, lambda: _play_words(sim), extra_fix(extra) if extra else "pip install embodied-rl", package=extra)


SIMULATORS = (
    Probe("simulators", "ManiSkill", _import_maniskill, extra_fix("maniskill"), package="mani-skill"),
    _simulator("Meta-World", "metaworld", "metaworld", "metaworld"),
    _simulator("gymnasium-robotics", "gymnasium_robotics", "gymnasium-robotics", "robotics"),
    _simulator("gym-pusht", "gym_pusht", "gym-pusht", "pusht"),
    _simulator("gym-aloha", "gym_aloha", "gym-aloha", "aloha"),
    _simulator("robosuite", "robosuite", "robosuite", "robosuite"),
    Probe(
        "simulators",
        "LIBERO",
        _import_libero,
        "hf download lerobot/libero-assets --repo-type dataset --local-dir ~/.cache/libero/assets",
        package="hf-libero",
        package_fix=extra_fix("libero"),
    ),
    Probe("simulators", "GEM", _import_gem, extra_fix("text"), package="gem-llm"),
    _words("TextArena", "textarena", "textarena"),
    _words("TextWorld", "textworld", "textworld"),
    _words("ALFWorld", "alfworld", "alfworld"),
    _words("Search-QA", "search_qa"),
    _words("WebShop", "webshop"),
    _words("AppWorld", "appworld", "appworld"),
)
