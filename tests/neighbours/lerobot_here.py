"""LeRobot beside ours: the newest release with the few packages that it needs beyond our environment.

It asks for Python 3.12 for the sake of eight generic declarations in five files; below that these are written in the older syntax, and
nothing else of it is changed. torchvision's compiled part wants CUDA's libraries and is not loaded: its Python is all that LeRobot's
policies need, once the two operators that it registers shapes for are declared.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.neighbours.overlay import overlay

PACKAGES = (
    "lerobot==0.6.1", "torchvision==0.28.0", "draccus==0.11.6", "datasets==4.8.5", "jsonlines==4.0.0", "mergedeep==1.3.4",
    "pyyaml-include==2.2", "toml==0.10.2", "typing-inspect==0.9.0", "mypy-extensions==1.2.0", "dill==0.4.1", "multiprocess==0.70.19",
    "xxhash==4.1.0", "termcolor==3.3.0", "diffusers==0.39.0", "av==15.1.0",
)  # fmt: skip
BEFORE = """
import torch
for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
"""What a program runs before it imports LeRobot."""
_GENERIC = re.compile(r"^(class|def) (\w+)\[([^\]]+)\](?:\((.*?)\))?", flags=re.MULTILINE)


def lerobot() -> Path:
    """The folder to put before the environment. Skips the test where the registry does not have it."""
    return overlay(*PACKAGES, options=("--ignore-requires-python",), prepare=None if sys.version_info >= (3, 12) else _lower)


def _lower(folder: Path) -> None:
    """Write ``class C[T]:``, ``def f[T]()`` and ``type X = …`` as Python 3.11 has them."""
    for path in (folder / "lerobot").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if (lowered := in_older_syntax(text)) != text:
            path.write_text(lowered, encoding="utf-8")


def in_older_syntax(text: str) -> str:
    """A module's text with type variables at its top in place of generic declarations; all else as it was."""
    variables: dict[str, None] = {}

    def declaration(found: re.Match[str]) -> str:
        kind, name, parameters, bases = found.groups()
        names = [one.partition(":")[0].strip() for one in parameters.split(",")]
        variables.update(dict.fromkeys(names))
        if kind == "def":
            return f"def {name}({bases})"
        generic = f"Generic[{', '.join(names)}]"
        return f"class {name}({', '.join([*([bases] if bases else []), generic])})"

    text = re.sub(r"^type (\w+) = ", r"\1 = ", _GENERIC.sub(declaration, text), flags=re.MULTILINE)
    if not variables:
        return text
    top = re.search(r"^(?:import|from (?!__future__))", text, flags=re.MULTILINE)
    assert top is not None
    declared = "from typing import Generic, TypeVar\n" + "".join(f'{name} = TypeVar("{name}")\n' for name in variables)
    return text[: top.start()] + declared + text[top.start() :]
