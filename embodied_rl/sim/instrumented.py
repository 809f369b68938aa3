"""Simulators that also show what no policy sees: pictures for films, an expert's action, their physical state.

In a recording these become further parts of the observation. So they travel through shared memory, also exist after an episode's last step,
and all workers make them in parallel. `split` separates them again. Errors of drawing name what a machine lacks.
"""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from embodied_rl.config import SimConfig
from embodied_rl.errors import UserError, brief, require_known
from embodied_rl.registry import load_target
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.episode_log import Snapshot
from embodied_rl.sim.factory import SimFactory, SimWrapper, wrapped
from embodied_rl.sim.snapshots import SnapshotError, decode_state, encode_state
from embodied_rl.types import Observation, SimSpec, StepBuffers, TensorSpec, VariableSpec
from embodied_rl.video import installed_font

DEFAULT_CAMERA = "default"
"""Camera of `SimEnv.render`."""


def filmed(config: SimConfig, size: int, cameras: Sequence[str] = ()) -> SimConfig:
    """The same simulator, configured for pictures of about `size` pixels a side if it has the choice.

    A fault ends the filming: a driver that kills the process does so every time, and retries only delay the message.

    Args:
        cameras: names of the simulator's cameras, or "default"; empty: the default one. `render` returns their pictures one below
            the other, [cameras · H, W, 3].
    """
    shown = wrapped(config, "embodied_rl.sim.instrumented:FilmedSim", size=size, cameras=list(cameras) or [DEFAULT_CAMERA])
    return dataclasses.replace(shown, on_fault="stop")


@contextmanager
def drawing(task: str) -> Iterator[None]:
    """Turn whatever a driver raises in the block into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # errors of OpenGL, Vulkan, GLFW and pygame share no base class
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"Task '{task}' cannot be drawn on this machine ({reason}). `python -m embodied_rl.doctor` tests each renderer and names the "
            "packages to install."
        ) from error


def picture(sim: SimEnv, env_id: int, camera: str) -> np.ndarray:
    """[H, W, 3] uint8 from one of a simulator's cameras or `DEFAULT_CAMERA`. Raises UserError for an unknown camera."""
    if camera == DEFAULT_CAMERA:
        return np.asarray(sim.render(env_id), np.uint8)
    known = sim.film_cameras(env_id)
    if not known:
        raise UserError(f"Task '{sim.spec.task}' has no camera '{camera}': it has only one view: set cameras=default.")
    require_known(camera, [DEFAULT_CAMERA, *known], f"Camera '{camera}' is not known.")
    return np.asarray(sim.film_from(env_id, camera), np.uint8)


class FilmedSim(SimWrapper):
    """Passes everything on to the simulator named by `target`; for a text task without pictures it draws the text."""

    def __init__(
        self,
        num_envs: int,
        inner: Mapping[str, Any],
        size: int,
        cameras: Sequence[str] = (DEFAULT_CAMERA,),
    ) -> None:
        super().__init__(SimFactory(**inner).make(num_envs, picture_size=size))
        # A text task without pictures is drawn as its text.
        self._shows_text = not self._sim.spec.can_render and "text" in self._sim.spec.variables
        if self._shows_text:
            self.spec = dataclasses.replace(self.spec, can_render=True)
        self._cameras, self._size = tuple(cameras), size
        self._texts = [""] * num_envs

    def render(self, env_id: int) -> np.ndarray:
        """Pictures [cameras · H, W, 3] uint8, one below the other; smaller ones are centred on black.

        Raises UserError: the task or this machine cannot draw, or the camera does not exist.
        """
        with drawing(self.spec.task):
            # Some simulators return the buffer into which they draw the next picture.
            views = [np.array(self._view(env_id, camera), np.uint8) for camera in self._cameras]
        return _stacked(views)

    def _seen(self, env_ids: Sequence[int], out: StepBuffers) -> None:
        if self._shows_text:
            for env_id in env_ids:
                self._texts[env_id] = str(out.observation["text"][env_id])

    def _view(self, env_id: int, camera: str) -> np.ndarray:
        if camera == DEFAULT_CAMERA and self._shows_text:
            return text_panel(self._texts[env_id], self._size)
        return picture(self._sim, env_id, camera)


def _stacked(views: Sequence[np.ndarray]) -> np.ndarray:
    height, width = (max(view.shape[axis] for view in views) for axis in (0, 1))
    canvas = np.zeros((len(views) * height, width, 3), np.uint8)
    for index, view in enumerate(views):
        y, x = index * height + (height - view.shape[0]) // 2, (width - view.shape[1]) // 2
        canvas[y : y + view.shape[0], x : x + view.shape[1]] = view
    return canvas


# ---- pictures of text, for films of tasks that draw nothing ---------------------------------------------------------------


PAPER, INK, FAINT = (250, 249, 245), (35, 38, 45), (140, 140, 140)
_LARGEST, _SMALLEST = 22, 9
"""Largest and smallest letter size in pixels for a picture of 256; the largest that fits is used."""
_LETTER_WIDTH, _LINE_HEIGHT = 0.6, 1.35
"""Width and line height of the fixed-width font, relative to its size."""


def text_panel(text: str, size: int) -> np.ndarray:
    """Picture [size, size, 3] uint8 of a text, in the largest letters that fit; of a longer text, the end below an ellipsis.

    Lines keep their order and their spaces, so that boards stay readable; long lines are wrapped.
    """
    from PIL import Image, ImageDraw

    margin = max(4, size // 24)
    top, room = size // 9, size - size // 9 - size // 5  # leave room for the film's strips above and below
    width = size - 2 * margin
    scale = size / 256
    largest, smallest = max(6, round(_LARGEST * scale)), max(6, round(_SMALLEST * scale))
    lines: list[str] = []
    most = 2 * int(width * room / (_LETTER_WIDTH * _LINE_HEIGHT * smallest**2))  # letters, of which no more are wrapped than can be seen
    is_long, text = len(text) > most, text[-most:]
    letter_width = _LETTER_WIDTH if installed_font(text, _font(largest)) is None else 1.0  # Chinese letters are as wide as high
    for height in range(largest, smallest - 1, -1):
        columns, rows = max(8, int(width / (letter_width * height))), max(1, int(room / (_LINE_HEIGHT * height)))
        lines = _wrapped(text, columns)
        if len(lines) <= rows:
            break
    cut = is_long or len(lines) > rows
    shown = lines[-(rows - 1) :] if cut and rows > 1 else lines[-rows:]
    image = Image.new("RGB", (size, size), PAPER)
    draw, font = ImageDraw.Draw(image), installed_font(text, _font(height)) or _font(height)
    y = float(top)
    if cut:
        draw.text((margin, y), "…", fill=FAINT, font=font)
        y += _LINE_HEIGHT * height
    for line in shown:
        draw.text((margin, y), line, fill=INK, font=font)
        y += _LINE_HEIGHT * height
    return np.asarray(image, np.uint8).copy()


def _wrapped(text: str, columns: int) -> list[str]:
    lines: list[str] = []
    for line in text.expandtabs(4).splitlines() or [""]:
        lines += textwrap.wrap(line, columns, replace_whitespace=False, drop_whitespace=len(line) > columns) or [""]
    return lines


@lru_cache(maxsize=32)
def _font(height: int) -> Any:
    """Fixed-width font for boards drawn in letters: matplotlib's, or Pillow's if that is missing."""
    from PIL import ImageFont

    try:
        from matplotlib import get_data_path

        return ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSansMono.ttf", height)
    except (ImportError, OSError):
        return ImageFont.load_default(height)


# ---- further parts of the observation -----------------------------------------------------------------------------------


EXPERT = "expert_action"
"""Part [A] (or text): the expert's action for this observation, in the simulator's units."""
PHYSICS = "physics/"
"""Parts ``physics/<name>``: the physical state, see `SimEnv.physics`."""
IMAGE = "image/"
"""Parts ``image/<camera>`` [H, W, 3] uint8: pictures for people."""
TASK = "episode_task"
"""Text part: task of the running episode, for a simulator with several tasks (`SimEnv.many_tasks`)."""
CAMERA = "render"
"""Name of the default camera's pictures, those of `SimEnv.render`."""

Expert = Callable[[Mapping[str, Any]], Any]
"""Function from one environment's observation {key: value} to its action in the simulator's units, or a text. One is made per episode, by a
class or function without arguments, or with (simulator, environment's number) if it reads the simulator's state."""

_PHYSICS_MARK = b"embodied_rl physics\0"


@dataclass(frozen=True)
class Split:
    """An observation separated into its sources; each is {key: [n, ...]}."""

    observation: Observation
    """Observation of the plain simulator."""
    state: Observation
    """{name: [n, ...]} physical state; empty if not requested."""
    images: Observation
    """{camera: [n, H, W, 3]}; empty if not requested."""
    expert_action: np.ndarray | None
    """[n, A], or texts [n]; None if no expert was requested."""
    task: np.ndarray | None
    """[n] names; None if all episodes have one task."""


def instrumented(
    config: SimConfig,
    *,
    expert: str | None = None,
    physics: bool = False,
    image_size: int | None = None,
    cameras: Sequence[str] = (),
    reconfigure: bool = True,
) -> SimConfig:
    """The same simulator with further parts in its observation.

    Args:
        expert: ``package.module:Attribute`` that makes an `Expert`; None: no part ``expert_action``.
        physics: whether to add the physical state.
        image_size: pixels of a picture's longer side; None: no picture.
        cameras: names of the simulator's cameras, or "default"; empty: the default one.
        reconfigure: make every episode independent of earlier ones (`SimEnv.reset`): a function of its seed and actions.
    """
    own = {"expert": expert, "physics": physics, "image_size": image_size, "cameras": list(cameras), "reconfigure": reconfigure}
    return wrapped(config, "embodied_rl.sim.instrumented:InstrumentedSim", **own)


def plain_spec(spec: SimSpec) -> SimSpec:
    """The spec without the parts that `InstrumentedSim` adds."""
    return dataclasses.replace(spec, observation={key: part for key, part in spec.observation.items() if not _is_added(key)})


def split(observation: Mapping[str, Any]) -> Split:
    """Separate an observation of one or several environments."""
    return Split(
        observation={key: part for key, part in observation.items() if not _is_added(key)},
        state={key.removeprefix(PHYSICS): part for key, part in observation.items() if key.startswith(PHYSICS)},
        images={key.removeprefix(IMAGE): part for key, part in observation.items() if key.startswith(IMAGE)},
        expert_action=observation.get(EXPERT),
        task=observation.get(TASK),
    )


def plain_snapshot(snapshot: Snapshot) -> Snapshot:
    """Snapshot of an instrumented simulator's slot as the plain simulator would have taken it."""
    base = snapshot.base
    if base is not None:
        base = {**base, "observation": split(base["observation"]).observation}
    return dataclasses.replace(snapshot, base=base, observation=split(snapshot.observation).observation)


def instrumented_snapshot(snapshot: Snapshot, spec: SimSpec) -> Snapshot:
    """Plain simulator's snapshot for an instrumented one with this spec; the added parts are empty until the next step."""
    empty = {key: "" for key in spec.variables if _is_added(key)}
    base = snapshot.base
    if base is not None:
        base = {**base, "observation": {**empty, **base["observation"]}}
    return dataclasses.replace(snapshot, base=base)


def encode_physics(state: Mapping[str, np.ndarray]) -> bytes:
    """Physical state for the running episode, which `InstrumentedSim.restore` accepts instead of a snapshot."""
    return _PHYSICS_MARK + encode_state({name: np.asarray(part) for name, part in state.items()})


def _is_added(key: str) -> bool:
    return key in (EXPERT, TASK) or key.startswith((PHYSICS, IMAGE))


class InstrumentedSim(SimWrapper):
    """Passes everything on to the simulator named by `target` and adds the parts of `instrumented`.

    A snapshot is the simulator's own; an expert with a memory begins anew after a restore. Raises UserError: the simulator cannot draw
    here, has no physical state, or its expert does not fit.
    """

    def __init__(
        self,
        num_envs: int,
        inner: Mapping[str, Any],
        expert: str | None = None,
        physics: bool = False,
        image_size: int | None = None,
        cameras: Sequence[str] = (),
        reconfigure: bool = True,
    ) -> None:
        super().__init__(SimFactory(**inner).make(num_envs, picture_size=image_size))
        self._reconfigure = reconfigure
        self._parts: dict[str, TensorSpec | VariableSpec] = {}
        self._pictures: dict[str, tuple[str, tuple[int, int]]] = {}
        """{part: (camera, size)} of the pictures."""
        self._names: tuple[str, ...] = ()
        spec, scratch = self._sim.spec, StepBuffers.allocate(self._sim.spec, num_envs)
        self._plain = tuple(spec.observation)
        if physics or image_size is not None or expert is not None:
            self._sim.reset([0], [0], scratch, None)  # the calls below need a running episode
        if physics:
            self._add_physics()
        if image_size is not None:
            for camera in cameras or (DEFAULT_CAMERA,):
                self._add_picture(camera, image_size)
        if self.many_tasks:
            self._parts[TASK] = VariableSpec("text", 1024)
        self._make_expert = None if expert is None else expert_maker(expert)
        self._experts: list[Expert | None] = [None] * num_envs
        if self._make_expert is not None:
            if not callable(made := self._make_expert(self._sim, 0)):
                raise UserError(
                    f"Expert '{expert}' must make what is called with an observation and returns its action, got {brief(made)}."
                )
            self._parts[EXPERT] = spec.action.part
        self.spec = dataclasses.replace(spec, observation={**spec.observation, **self._parts})

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        if self._reconfigure:
            options = {**(options or {}), "reconfigure": True}
        self._sim.reset(env_ids, seeds, out, options)
        if self._make_expert is not None:
            for i in env_ids:
                self._experts[i] = self._make_expert(self._sim, i)
        self._seen(env_ids, out)

    def restore(self, env_id: int, data: bytes) -> None:
        """See `SimEnv.restore`; data of `encode_physics` is set in the running episode instead.

        Raises SnapshotError: the state does not fit this simulator.
        """
        if data.startswith(_PHYSICS_MARK):
            self._set_physics(env_id, decode_state(memoryview(data)[len(_PHYSICS_MARK) :]))
        else:
            self._sim.restore(env_id, data)
        if self._make_expert is not None:
            self._experts[env_id] = self._make_expert(self._sim, env_id)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _add_physics(self) -> None:
        if type(self._sim).physics is SimEnv.physics:
            raise UserError(
                f"Task '{self._sim.spec.task}' does not expose its physical state (its simulator has no method `physics`). "
                f"{'Snapshots say more: states=snapshots:1.' if self._sim.spec.snapshots == 'exact' else 'Leave it out: states=none.'}"
            )
        for name, part in self._sim.physics(0).items():
            self._parts[PHYSICS + name] = TensorSpec(part.shape, part.dtype.name)
        self._names = tuple(name.removeprefix(PHYSICS) for name in self._parts)

    def _set_physics(self, env_id: int, state: Mapping[str, np.ndarray]) -> None:
        present = self._sim.physics(env_id)
        shapes = {name: np.shape(part) for name, part in state.items()}
        if shapes != (own := {name: part.shape for name, part in present.items()}):
            raise SnapshotError(f"The physical state has the parts {shapes}; task '{self.spec.task}' has {own}.")
        # Setting even an equal state makes a physics engine forget its contacts, so an equal state is not set.
        if any(not np.array_equal(present[name], part) for name, part in state.items()):
            self._sim.set_physics(env_id, state)

    def _add_picture(self, camera: str, size: int) -> None:
        if not self._sim.spec.can_render:
            raise UserError(f"Task '{self._sim.spec.task}' has no pictures (no render mode 'rgb_array'): leave images out.")
        height, width = self._draw(0, camera).shape[:2]
        scale = size / max(height, width)
        # H.264 stores colours at half the resolution, so the sides must be even.
        fitted = max(2, round(height * scale / 2) * 2), max(2, round(width * scale / 2) * 2)
        part = IMAGE + (CAMERA if camera == DEFAULT_CAMERA else camera)
        self._pictures[part], self._parts[part] = (camera, fitted), TensorSpec((*fitted, 3), "uint8")

    def _seen(self, env_ids: Sequence[int], out: StepBuffers) -> None:
        observation = out.observation
        for i in env_ids:
            if self.many_tasks:
                observation[TASK][i] = self._sim.task_at(i)
            if self._names:
                state = self._sim.physics(i)
                for name in self._names:
                    observation[PHYSICS + name][i] = state[name]
            for part, (camera, fitted) in self._pictures.items():
                observation[part][i] = _scaled(self._draw(i, camera), *fitted)
            if (expert := self._experts[i]) is not None:
                observation[EXPERT][i] = expert({key: observation[key][i] for key in self._plain})

    def _draw(self, env_id: int, camera: str) -> np.ndarray:
        with drawing(self._sim.spec.task):
            return picture(self._sim, env_id, camera)


def expert_maker(target: str) -> Callable[[SimEnv, int], Expert]:
    """Function that makes one environment's expert from a class or function without arguments or with (simulator, environment's number)."""
    made = load_target(target)
    needed = [
        parameter
        for parameter in inspect.signature(made).parameters.values()
        if parameter.default is parameter.empty and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(needed) not in (0, 2):
        raise UserError(
            f"Expert '{target}' must take no argument, or the simulator and the environment's number; it takes "
            f"{', '.join(parameter.name for parameter in needed)}."
        )
    return made if needed else lambda sim, env_id: made()


def needs_simulator(target: str) -> bool:
    """Whether a target's expert reads the simulator's state, and so must act in the simulator's process. Raises UserError."""
    return expert_maker(target) is load_target(target)


def _scaled(frame: np.ndarray, height: int, width: int) -> np.ndarray:
    if frame.shape[:2] == (height, width):
        return frame
    from PIL import Image

    return np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling.LANCZOS))
