"""Simulators and ways of drawing: a package is imported, a task played, a red ball drawn and looked at."""

from __future__ import annotations

import importlib
import io
import os
from ctypes import CDLL

import numpy as np

from embodied_rl.config import group_names, load_sim_config
from embodied_rl.errors import MissingAssetsError, MissingExtraError
from embodied_rl.probes.base import NotHere, Probe, extra_fix
from embodied_rl.types import StepBuffers


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
    groups = [f"equal as a batch: {', '.join(equal)}"] * bool(equal) + [f"one by one: {', '.join(apart)}"] * bool(apart)
    return "; ".join([words, *groups])


def _import_gem() -> str:
    from embodied_rl.sim.text.gem import tasks

    return f"{len(tasks())} tasks that need nothing else; {_configurations('text')}"


def _import_libero() -> str:
    from embodied_rl.sim.robots import libero

    libero.tasks()
    try:
        libero.assets_folder()
    except MissingAssetsError:
        raise NotHere("its meshes and textures are not on this machine") from None
    return _configurations("libero")


def _play_words(name: str) -> str:
    """One action of the simulator's own choice, in its configuration as it stands: made, begun and played."""
    from embodied_rl.sim.factory import SimFactory
    from embodied_rl.sim.text.turns import TextSim

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


def _draw_mujoco() -> str:

    library = {"egl": "libEGL.so.1", "osmesa": "libOSMesa.so.8"}[os.environ["MUJOCO_GL"]]
    try:
        CDLL(library)
    except OSError:
        raise NotHere(f"{library} is not installed") from None
    import mujoco

    scene = "<mujoco><worldbody><light pos='0 0 3'/><geom type='sphere' size='.5' rgba='1 0 0 1'/></worldbody></mujoco>"
    model = mujoco.MjModel.from_xml_string(scene)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    with mujoco.Renderer(model, 64, 64) as renderer:
        renderer.update_scene(data)
        return describe_picture(renderer.render())


def _draw_sapien() -> str:
    from embodied_rl.sim.rendering import vulkan_device

    device = vulkan_device()
    if device is None:
        raise NotHere("no Vulkan driver that SAPIEN accepts")
    import sapien

    scene = sapien.Scene([sapien.physx.PhysxCpuSystem(), sapien.render.RenderSystem()])
    scene.set_ambient_light([0.5, 0.5, 0.5])
    builder = scene.create_actor_builder()
    builder.add_sphere_visual(radius=0.3, material=[1.0, 0.0, 0.0])
    builder.build_static(name="ball").set_pose(sapien.Pose([1.0, 0.0, 0.0]))
    camera = scene.add_camera("camera", width=64, height=64, fovy=1.0, near=0.1, far=10.0)
    scene.update_render()
    camera.take_picture()
    return f"{describe_picture(camera.get_picture('Color')[..., :3] * 255)} on {device}"


def _draw_pygame() -> str:
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    import pygame

    pygame.display.init()
    surface = pygame.display.set_mode((64, 64))
    pygame.draw.circle(surface, (255, 0, 0), (32, 32), 16)
    return describe_picture(np.transpose(pygame.surfarray.array3d(surface), (1, 0, 2)))


def describe_picture(picture: object) -> str:
    """A sphere or disc, red, was drawn in the middle: check that it is there, and that the corner is not red."""
    image = np.asarray(picture, dtype=np.float64)
    middle, corner = (float(image[i, i, 0] - image[i, i, 1:].max()) for i in (image.shape[0] // 2, 0))
    if middle < 30 or corner > 30:
        raise ArithmeticError(f"the picture is wrong: redness {middle:.0f} in the middle, {corner:.0f} in the corner")
    return f"drew a {image.shape[1]}x{image.shape[0]} frame"


def _encode_video() -> str:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=20)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for level in (0, 255):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.full((64, 64, 3), level, np.uint8), format="rgb24")))
        container.mux(stream.encode(None))
    file.seek(0)
    with av.open(file, "r") as container:
        means = [float(frame.to_ndarray(format="gray").mean()) for frame in container.decode(video=0)]
    if len(means) != 2 or means[0] > 20 or means[1] < 235:
        raise ArithmeticError(f"a black and a white frame came back with brightness {means}")
    return "encoded and decoded two H.264 frames"


DRAWING = (
    Probe(
        "drawing",
        "MuJoCo EGL",
        _draw_mujoco,
        "sudo apt-get install libegl1 libgl1",
        environment=(("MUJOCO_GL", "egl"), ("PYOPENGL_PLATFORM", "egl")),
        package="mujoco",
        package_fix=extra_fix("mujoco"),
    ),
    Probe(
        "drawing",
        "MuJoCo OSMesa",
        _draw_mujoco,
        "sudo apt-get install libosmesa6",
        environment=(("MUJOCO_GL", "osmesa"), ("PYOPENGL_PLATFORM", "osmesa")),
        package="mujoco",
        package_fix=extra_fix("mujoco"),
    ),
    Probe(
        "drawing",
        "SAPIEN Vulkan",
        _draw_sapien,
        "in a checkout: python scripts/install_libraries.py; elsewhere: install Mesa >= 25 and its Vulkan drivers",
        package="sapien",
    ),
    Probe("drawing", "pygame", _draw_pygame, extra_fix("classic"), package="pygame"),
    Probe("drawing", "video encoder", _encode_video, "pip install av"),
)
