"""``python -m embodied_rl.doctor``: what this machine has, what it lacks, and the command that brings it.

Nothing is taken on trust: every drawing back end draws a frame, every simulator's package is imported and the encoder
encodes, each in a process of its own with a time limit, so that a driver that crashes or hangs is a line in the table.
Exit status 0 when training can run here, 1 when it cannot.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

PROBE_TIMEOUT_S = 60.0
"""Generous: first imports on a cold disk are slow. The probes run side by side, and all take about 10 s on two cores."""

MIN_FREE_DISK_GIB = 1.0
_NOT_HERE = 3  # exit status of a probe that raised NotHere

Status = Literal["ok", "missing", "failed"]


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    group: str
    name: str
    status: Status
    detail: str
    fix: str = ""
    """The command or step that mends it; empty when all is well."""
    required: bool = False
    """Whether training cannot run without it."""


@dataclass(frozen=True)
class Package:
    """A distribution that is looked up by name."""

    name: str
    extra: str | None = None
    """The extra that brings it; None: it comes with the project itself."""

    @property
    def fix(self) -> str:
        return f'pip install "embodied-rl[{self.extra}]"' if self.extra else "pip install embodied-rl"


PACKAGES = (
    *map(Package, ("torch", "numpy", "numba", "gymnasium", "mujoco", "hydra-core", "safetensors", "rich", "tensorboard", "av", "imageio")),
    Package("mani-skill", "maniskill"),
    Package("sapien", "maniskill"),
    Package("metaworld", "metaworld"),
    Package("gymnasium-robotics", "robotics"),
    Package("gym-pusht", "pusht"),
    Package("transformers", "language"),
    Package("wandb", "wandb"),
    Package("ray", "ray"),
)


@dataclass(frozen=True)
class Probe:
    """Something tried in a process of its own."""

    group: str
    name: str
    run: Callable[[], str]
    """Runs in the child; returns the detail to show, raises where it does not work."""
    fix: str
    environment: tuple[tuple[str, str], ...] = ()
    package: str | None = None
    """Distribution that must be there for the probe to make sense."""
    package_fix: str | None = None
    """What brings the distribution, where that is not `fix`."""
    required: bool = False


class NotHere(Exception):
    """What was to be tried is not on this machine: missing, rather than broken."""


# --- what the probes do, each in its own process ---------------------------------------------------------------------


def _import_core() -> str:
    import gymnasium
    import hydra  # noqa: F401
    import numba  # noqa: F401
    import safetensors  # noqa: F401
    import torch

    total = float(torch.ones(8, 8).matmul(torch.ones(8, 8)).sum())
    if total != 512.0:
        raise ArithmeticError(f"torch computes 8x8 ones squared as {total}, not 512")
    gymnasium.make("CartPole-v1").reset(seed=0)
    return f"torch {torch.__version__} computes, gymnasium steps"


def _gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        raise NotHere(f"torch {torch.__version__} finds no CUDA device")
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return ", ".join(f"{device.name} ({device.total_memory / 2**30:.0f} GiB)" for device in found)


def _draw_mujoco() -> str:
    from ctypes import CDLL

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
        return _describe_picture(renderer.render())


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
    return f"{_describe_picture(camera.get_picture('Color')[..., :3] * 255)} on {device}"


def _draw_pygame() -> str:
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    import numpy as np
    import pygame

    pygame.display.init()
    surface = pygame.display.set_mode((64, 64))
    pygame.draw.circle(surface, (255, 0, 0), (32, 32), 16)
    return _describe_picture(np.transpose(pygame.surfarray.array3d(surface), (1, 0, 2)))


def _describe_picture(picture: object) -> str:
    """A sphere or disc, red, was drawn in the middle: check that it is there, and that the corner is not red."""
    import numpy as np

    image = np.asarray(picture, dtype=np.float64)
    middle, corner = (float(image[i, i, 0] - image[i, i, 1:].max()) for i in (image.shape[0] // 2, 0))
    if middle < 30 or corner > 30:
        raise ArithmeticError(f"the picture is wrong: redness {middle:.0f} in the middle, {corner:.0f} in the corner")
    return f"drew a {image.shape[1]}x{image.shape[0]} frame"


def _encode_video() -> str:
    import io

    import av
    import numpy as np

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


def _import_simulator(module: str, extra: str) -> str:
    importlib.import_module(module)
    return _configurations(extra)


def _import_gem() -> str:
    from embodied_rl.sim.text.gem_tasks import tasks

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


def _configurations(extra: str) -> str:
    from embodied_rl.config import group_names, load_sim_config

    names = [name for name in group_names("sim") if load_sim_config(name).extra == extra]
    return f"sim={', '.join(names)}" if names else "no configuration of ours uses it"


def _simulator(name: str, module: str, package: str, extra: str) -> Probe:
    return Probe("simulators", name, lambda: _import_simulator(module, extra), f'pip install "embodied-rl[{extra}]"', package=package)


PROBES = (
    Probe("training", "core packages", _import_core, "pip install embodied-rl", required=True),
    Probe("training", "GPU", _gpus, "none is needed; with an NVIDIA GPU, install its driver and the CUDA build of torch"),
    _simulator("ManiSkill", "mani_skill.envs", "mani-skill", "maniskill"),
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
        package_fix='pip install "embodied-rl[libero]"',
    ),
    Probe("simulators", "GEM", _import_gem, 'pip install "embodied-rl[text]"', package="gem-llm"),
    Probe(
        "drawing",
        "MuJoCo EGL",
        _draw_mujoco,
        "sudo apt-get install libegl1 libgl1",
        environment=(("MUJOCO_GL", "egl"), ("PYOPENGL_PLATFORM", "egl")),
        package="mujoco",
    ),
    Probe(
        "drawing",
        "MuJoCo OSMesa",
        _draw_mujoco,
        "sudo apt-get install libosmesa6",
        environment=(("MUJOCO_GL", "osmesa"), ("PYOPENGL_PLATFORM", "osmesa")),
        package="mujoco",
    ),
    Probe(
        "drawing",
        "SAPIEN Vulkan",
        _draw_sapien,
        "in a checkout: python scripts/install_libraries.py; elsewhere: install Mesa >= 25 and its Vulkan drivers",
        package="sapien",
    ),
    Probe("drawing", "pygame", _draw_pygame, 'pip install "embodied-rl[pusht]"', package="pygame"),
    Probe("drawing", "video encoder", _encode_video, "pip install av"),
)


# --- the report ------------------------------------------------------------------------------------------------------


def examine(probes: Sequence[Probe] = PROBES, timeout_s: float = PROBE_TIMEOUT_S) -> list[Check]:
    """Run every check; the probes side by side, two at a time or as many as there are cores."""
    from embodied_rl.sim.affinity import available_cores

    with ThreadPoolExecutor(max_workers=max(2, min(available_cores(), len(probes)))) as pool:
        tried = list(pool.map(lambda probe: run_probe(probe, timeout_s), probes))
    return [*_system_checks(), *_placement_checks(), *_package_checks(), *_one_is_enough(tried, "MuJoCo EGL", "MuJoCo OSMesa")]


def _one_is_enough(checks: list[Check], *names: str) -> list[Check]:
    """Of alternatives, those that do not work need no mending once one of them does."""
    if not any(check.status == "ok" for check in checks if check.name in names):
        return checks
    return [replace(check, fix="") if check.name in names else check for check in checks]


def can_train(checks: Sequence[Check]) -> bool:
    """Whether everything that training cannot do without is there."""
    return all(check.status == "ok" for check in checks if check.required)


def run_probe(probe: Probe, timeout_s: float = PROBE_TIMEOUT_S) -> Check:
    """Try one thing in a fresh process; a crash, a hang and an exception are all answers."""
    if probe.package is not None and _version(probe.package) is None:
        detail = f"{probe.package} is not installed"
        return Check(probe.group, probe.name, "missing", detail, probe.package_fix or probe.fix, probe.required)
    command = [sys.executable, "-m", "embodied_rl.doctor", "--probe", probe.name]
    environment = {**os.environ, **dict(probe.environment)}
    try:
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        return Check(probe.group, probe.name, "failed", f"no answer within {timeout_s:.0f} s", probe.fix, probe.required)
    if result.returncode == 0:
        return Check(probe.group, probe.name, "ok", result.stdout.strip().splitlines()[-1], required=probe.required)
    if result.returncode < 0:
        reason = f"the process died of signal {-result.returncode}"
    else:
        reason = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
    status: Status = "missing" if result.returncode == _NOT_HERE else "failed"
    return Check(probe.group, probe.name, status, reason[:160], probe.fix, probe.required)


def _probe_here(name: str) -> int:
    """The child's side of `run_probe`: the detail on stdout, or the exception's line on stderr."""
    from embodied_rl.sim.rendering import configure_rendering

    configure_rendering()
    probe = next(probe for probe in PROBES if probe.name == name)
    try:
        detail = probe.run()
    except NotHere as error:
        print(error, file=sys.stderr, flush=True)
        status = _NOT_HERE
    except Exception as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        status = 1
    else:
        print(detail, flush=True)
        status = 0
    # Graphics libraries may crash while the interpreter shuts down, after the answer is known.
    os._exit(status)


def _package_checks() -> list[Check]:
    checks = []
    for package in PACKAGES:
        found = _version(package.name)
        needed = package.extra is None
        status: Status = "ok" if found else "missing"
        checks.append(Check("packages", package.name, status, found or "not installed", "" if found else package.fix, required=needed))
    return checks


def _system_checks(folder: Path | None = None) -> list[Check]:
    from embodied_rl.sim.affinity import available_cores

    cores = available_cores()
    return [
        Check("machine", "python", "ok", f"{platform.python_version()} ({sys.prefix})"),
        Check("machine", "system", "ok", f"{_distribution()}, Linux {platform.release()}, {platform.machine()}"),
        Check("machine", "cores", "ok", f"{cores} usable of {os.cpu_count()} (affinity and container limits)"),
        Check("machine", "memory", "ok", _memory()),
        _shared_memory(),
        _writable(folder or Path.cwd()),
    ]


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown distribution")
    except OSError:
        return "unknown distribution"


def _placement_checks(root: Path = Path("/"), num_workers: int | None = None) -> list[Check]:
    """NUMA nodes and GPUs, and where `num_workers` (None: as many as there are cores) would run."""
    from embodied_rl.errors import UserError
    from embodied_rl.sim import affinity

    cgroup = root / "sys/fs/cgroup"
    try:
        topology = affinity.Topology.read(root)
    except UserError as error:
        return [Check("placement", "topology", "failed", str(error), "sim.placement=none")]
    chosen = affinity.choose_policy(topology, cgroup_root=cgroup)
    # What the default does here, and what else could be asked for: near the GPU where there is one.
    other: affinity.PlacementPolicy = "near_gpu" if topology.gpus else "spread"
    rows = [*affinity.describe_topology(topology), ("sim.placement=auto", f"means {chosen} here")]
    for policy in dict.fromkeys((chosen, other)):
        plan = affinity.plan_placement(topology, num_workers or affinity.available_cores(cgroup), policy)
        rows += [(f"{policy}: {where}", text) for where, text in affinity.describe_placements(plan)]
    return [Check("placement", name, "ok", text) for name, text in rows]


def _memory(cgroup: Path = Path("/sys/fs/cgroup")) -> str:
    import psutil

    memory = psutil.virtual_memory()
    text = f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} free"
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limit = int((cgroup / name).read_text())
        except (OSError, ValueError):
            continue
        if limit < memory.total:
            text += f"; this container may use {limit / 2**30:.1f}"
    return text


def _shared_memory(path: Path = Path("/dev/shm")) -> Check:
    if not path.is_dir():
        return Check("machine", "/dev/shm", "missing", "not there", "mount a tmpfs on /dev/shm")
    free = shutil.disk_usage(path).free / 2**20
    if free < 64:
        fix = "in a container: docker run --shm-size=2g …"
        return Check("machine", "/dev/shm", "failed", f"{free:.0f} MiB free; several processes of torch or Ray need more", fix)
    return Check("machine", "/dev/shm", "ok", f"{free / 1024:.1f} GiB free")


def _writable(folder: Path) -> Check:
    """Runs are written below the current folder: write a file there, and look at the space."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"\0" * 4096)
            file.flush()
        free = shutil.disk_usage(folder).free / 2**30
    except OSError as error:
        fix = "cd to a folder of yours, or name one: run_dir=/path/to/folder"
        return Check("machine", "current folder", "failed", f"{folder} cannot be written: {error.strerror}", fix, required=True)
    status: Status = "ok" if free >= MIN_FREE_DISK_GIB else "failed"
    fix = "" if status == "ok" else "free some space, or name another folder: run_dir=/path/to/folder"
    return Check("machine", "current folder", status, f"writable, {free:.0f} GiB free", fix, required=True)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def print_report(checks: Sequence[Check]) -> None:
    """The table, what is missing and the verdict."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(soft_wrap=False)
    signs = {"ok": Text("ok", "green"), "missing": Text("missing", "yellow"), "failed": Text("failed", "yellow")}
    table = Table(title="embodied_rl doctor", title_justify="left", expand=False)
    for heading in ("", "check", "status", "detail"):
        table.add_column(heading, overflow="fold")
    group = ""
    for check in checks:
        if check.group != group and group:
            table.add_section()
        sign = Text(check.status, "bold red") if check.required and check.status != "ok" else signs[check.status]
        table.add_row(check.group if check.group != group else "", Text(check.name), sign, Text(check.detail))
        group = check.group
    console.print(table)
    wanting = [check for check in checks if check.fix]
    if wanting:
        console.print("What is missing, and what brings it:")
        width = max(len(check.name) for check in wanting)
        for check in wanting:
            console.print(Text(f"  {check.name:<{width}}  {check.fix}"), soft_wrap=True)
    if can_train(checks):
        lacking = any(check.name == "ManiSkill" and check.status != "ok" for check in checks)
        which = " experiment=cartpole (the main job needs ManiSkill)" if lacking else ""
        console.print(Text(f"Training can run here: python -m embodied_rl.train{which}", "green"), soft_wrap=True)
    else:
        broken = ", ".join(check.name for check in checks if check.required and check.status != "ok")
        console.print(Text(f"Training cannot run here: {broken}.", "bold red"))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m embodied_rl.doctor", description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--probe", metavar="NAME", choices=[probe.name for probe in PROBES], help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.probe is not None:
        return _probe_here(arguments.probe)
    checks = examine()
    if arguments.json:
        print(json.dumps({"can_train": can_train(checks), "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        print_report(checks)
    return 0 if can_train(checks) else 1


if __name__ == "__main__":
    sys.exit(main())
