"""Stand-ins for LIBERO's meshes, scenes and textures: boxes of ours under LIBERO's names, with the joints that its stored states have.

Enough for every task of libero_object and libero_spatial. How things look and weigh is ours; places, joints, goals and words are LIBERO's.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from embodied_rl.sim.robots.libero import ASSET_FOLDERS

GROCERIES = (
    *("alphabet_soup", "bbq_sauce", "butter", "chocolate_pudding", "cookies", "cream_cheese", "ketchup", "milk", "orange_juice"),
    *("salad_dressing", "tomato_sauce"),
)
SCANNED = {
    "akita_black_bowl": (0.05, 0.05, 0.02),
    "glazed_rim_porcelain_ramekin": (0.04, 0.04, 0.02),
    "plate": (0.08, 0.08, 0.008),
}
"""{name: half extents in metres}"""
WALL = 0.005
_CAMERAS = ("frontview", "birdview", "agentview", "sideview")
_TEXTURES = ("light-gray-floor-tile", "light-gray-plaster")


def write_stand_ins(folder: Path) -> Path:
    """Write all of them below `folder`, where LIBERO would look. Returns the folder, for ``assets_dir``."""
    import imageio.v3

    for name in ASSET_FOLDERS:
        (folder / name).mkdir(parents=True)
    for number, name in enumerate(_TEXTURES):
        imageio.v3.imwrite(folder / "textures" / f"{name}.png", np.full((8, 8, 3), 150 + 60 * number, np.uint8))
    for name in GROCERIES:
        (folder / "stable_hope_objects" / name).mkdir()
        half = (0.02, 0.02, 0.03)
        _write(folder / "stable_hope_objects" / name / f"{name}.xml", _thing(name, _box("body", half, _colour(name)), half))
    for name, half in SCANNED.items():
        (folder / "stable_scanned_objects" / name).mkdir()
        _write(folder / "stable_scanned_objects" / name / f"{name}.xml", _thing(name, _box("body", half, _colour(name)), half))
    (folder / "stable_scanned_objects" / "basket").mkdir()
    _write(folder / "stable_scanned_objects" / "basket" / "basket.xml", _thing("basket", _basket(), (0.08, 0.08, 0.05)))
    _write(folder / "articulated_objects" / "wooden_cabinet.xml", _thing("wooden_cabinet", _cabinet(), (0.11, 0.1, 0.15), top=0.0))
    _write(folder / "articulated_objects" / "flat_stove.xml", _thing("flat_stove", _stove(), (0.1, 0.1, 0.02)))
    _write(folder / "scenes" / "libero_floor_base_style.xml", _scene("floor", '<body name="floor"/>'))
    _write(folder / "scenes" / "libero_tabletop_base_style.xml", _scene("tabletop", _table()))
    return folder


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _colour(name: str) -> str:
    red, green, blue = np.random.default_rng(list(name.encode())).uniform(0.2, 0.9, 3)
    return f"{red:.2f} {green:.2f} {blue:.2f} 1"


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:g}" for value in values)


def _box(name: str, half: tuple[float, ...], colour: str, at: tuple[float, ...] = (0.0, 0.0, 0.0)) -> str:
    """What touches, and what is seen."""
    where = f'type="box" size="{_numbers(half)}" pos="{_numbers(at)}" rgba="{colour}"'
    seen = f'<geom name="{name}_visual" {where} group="1" contype="0" conaffinity="0" mass="0"/>'
    return f'<geom name="{name}" {where} group="0" density="100" friction="0.95 0.3 0.1"/>{seen}'


def _region(name: str, half: tuple[float, ...], at: tuple[float, ...]) -> str:
    return f'<site name="{name}" type="box" size="{_numbers(half)}" pos="{_numbers(at)}" quat="1 0 0 0" rgba="0 0 0 0"/>'


def _thing(name: str, inside: str, half: tuple[float, ...], top: float | None = None) -> str:
    """An object as robosuite reads it: its body, and three sites that say how large it is. What is put above `top` is not within it."""
    above = half[2] if top is None else top
    places = {"bottom_site": (0.0, 0.0, -half[2]), "top_site": (0.0, 0.0, above), "horizontal_radius_site": (half[0], half[1], 0.0)}
    sites = "".join(f'<site name="{site}" size="0.005" pos="{_numbers(at)}" rgba="0 0 0 0"/>' for site, at in places.items())
    body = f'<body><body name="object">{inside}</body>{sites}</body>'
    return f'<mujoco model="{name}"><worldbody>{body}</worldbody></mujoco>'


def _basket() -> str:
    """Open above; LIBERO's goals ask whether something is in its ``contain_region``."""
    side, colour = 0.075, _colour("basket")
    walls = [_box("bottom", (side, side, WALL), colour, (0.0, 0.0, -0.045))]
    for name, sign in (("left", -1), ("right", 1)):
        walls.append(_box(name, (WALL, side, 0.05), colour, (sign * side, 0.0, 0.0)))
        walls.append(_box(f"{name}_end", (side, WALL, 0.05), colour, (0.0, sign * side, 0.0)))
    region = _region("contain_region", (0.06, 0.06, 0.04), (0.0, 0.0, 0.0))
    return "".join(walls) + f'<body name="inside">{region}</body>'


def _cabinet() -> str:
    """Three drawers on slides, closed at 0 and open at -0.16 m, and a top that things stand on."""
    colour, shell = _colour("wooden_cabinet"), []
    for name, half, at in (
        ("top", (0.11, 0.1, WALL), (0.0, 0.0, 0.145)),
        ("back", (0.11, WALL, 0.15), (0.0, 0.1, 0.0)),
        ("left", (WALL, 0.1, 0.15), (-0.11, 0.0, 0.0)),
        ("right", (WALL, 0.1, 0.15), (0.11, 0.0, 0.0)),
    ):
        shell.append(_box(name, half, colour, at))
    drawers = []
    for name, height in (("top", 0.06), ("middle", -0.04), ("bottom", -0.14)):
        slide = f'<joint name="{name}_level" type="slide" axis="0 1 0" range="-0.16 0.01" damping="10" limited="true"/>'
        floor = _box(f"{name}_floor", (0.09, 0.08, WALL), colour) + _box(f"{name}_front", (0.1, WALL, 0.03), colour, (0.0, -0.09, 0.03))
        region = _region(f"{name}_region", (0.08, 0.07, 0.03), (0.0, 0.0, 0.035))
        drawers.append(f'<body name="cabinet_{name}" pos="0 0 {height}">{slide}{floor}{region}</body>')
    top_side = f'<body name="cabinet_upper">{_region("top_side", (0.1, 0.09, 0.001), (0.0, 0.0, 0.15))}</body>'
    return "".join([*shell, *drawers, top_side])


def _stove() -> str:
    """A plate that cooks, a light over it, and a knob that turns."""
    hinge = '<joint name="button" type="hinge" axis="0 0 1" range="-0.005 2.1" damping="1" limited="true"/>'
    knob = f'<body name="knob" pos="0.08 0.08 0.03">{hinge}{_box("knob", (0.01, 0.01, 0.01), "0.1 0.1 0.1 1")}'
    knob += f"{_region('knob_region', (0.01, 0.01, 0.01), (0.0, 0.0, 0.0))}</body>"
    plate = _box("body", (0.1, 0.1, 0.02), _colour("flat_stove")) + _region("burner", (0.05, 0.05, 0.001), (0.0, 0.0, 0.021))
    return f'{plate}{knob}<body name="plate">{_region("cook_region", (0.06, 0.06, 0.001), (0.0, 0.0, 0.02))}</body>'


def _table() -> str:
    legs = "".join(
        f'<geom name="table_leg{n}_visual" type="cylinder" size="0.03 0.3" contype="0" conaffinity="0" group="1"/>' for n in range(1, 5)
    )
    top = '<geom name="table_collision" type="box" size="0.4 0.4 0.4" group="0"/>'
    top += '<geom name="table_visual" type="box" size="0.4 0.4 0.4" contype="0" conaffinity="0" group="1" rgba="0.7 0.6 0.5 1"/>'
    return f'<body name="table">{top}<site name="table_top" size="0.001" rgba="0 0 0 0"/>{legs}</body>'


def _scene(name: str, inside: str) -> str:
    """An arena as robosuite reads it: floor, a wall, light, cameras that the task moves, and the textures that LIBERO's styles replace."""
    textures = f'<texture name="texplane" type="2d" file="../textures/{_TEXTURES[0]}.png"/>'
    textures += f'<texture name="tex-wall" type="2d" file="../textures/{_TEXTURES[1]}.png"/>'
    materials = '<material name="floorplane" texture="texplane"/><material name="walls_mat" texture="tex-wall"/>'
    floor = '<geom name="floor" type="plane" size="3 3 .125" material="floorplane" group="1" condim="3"/>'
    wall = '<geom name="wall" type="box" pos="-2 0 1.5" size="0.01 3 1.5" material="walls_mat" group="1" contype="0" conaffinity="0"/>'
    cameras = "".join(f'<camera name="{camera}" mode="fixed" pos="1 0 1.4" quat="0.56 0.43 0.43 0.56"/>' for camera in _CAMERAS)
    light = '<light pos="1 1 1.5" dir="-0.2 -0.2 -1" directional="true" castshadow="false"/>'
    world = floor + wall + inside + light + cameras
    return f'<mujoco model="{name}"><asset>{textures}{materials}</asset><worldbody>{world}</worldbody></mujoco>'
