"""Unpacks the graphics libraries that this system lacks into the virtual environment; needs apt, not root.

Two things that simulators want and a small system may not have:

- libraries that their Python packages are linked with (SAPIEN does not even import without libX11);
- lavapipe, Mesa's Vulkan driver for processors, in a version that SAPIEN accepts: Debian 12's own Mesa 22.3 is refused.
  The distribution's backports have a newer one, but adding backports to somebody's system is not ours to do.

This makes a private apt configuration in a temporary folder (the system's own sources, and the same ones with the suite
<codename>-backports), downloads the packages and unpacks their libraries under ``.venv/share/graphics``, where
`embodied_rl.sim.rendering` finds them. Nothing outside the virtual environment changes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from embodied_rl.sim.rendering import PRIVATE_FOLDER, configure_rendering, private_lavapipe, vulkan_device

PACKAGE = "mesa-vulkan-drivers"
MIN_MESA = 25
DRIVER = "libvulkan_lvp.so"
TARGET = Path(sys.prefix) / PRIVATE_FOLDER
LINKED = {"sapien.libs": "libsvulkan2*.so*", "cv2": "cv2*.so"}
"""{folder in site-packages: shared libraries there that want the system's}."""
PACKAGE_OF = {
    "libX11.so.6": "libx11-6",
    "libGL.so.1": "libgl1",
    "libglib-2.0.so.0": "libglib2.0-0",
    "libgthread-2.0.so.0": "libglib2.0-0",
    "libxcb.so.1": "libxcb1",
}
SOURCES = Path("/etc/apt")


class NotPossible(Exception):
    """This machine cannot get the driver; the message says why and what would help."""


def codename() -> str:
    """``bookworm``, ``trixie``, ``noble``, … of this distribution."""
    text = Path("/etc/os-release").read_text(encoding="utf-8") if Path("/etc/os-release").is_file() else ""
    match = re.search(r"^VERSION_CODENAME=\"?(\w+)", text, re.MULTILINE)
    if match is None or shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise NotPossible("this is not a Debian or Ubuntu system; install Mesa >= 25's Vulkan drivers by the system's own means")
    return match.group(1)


def backports_of_sources(text: str, suite: str) -> str:
    """The stanzas of a deb822 ``.sources`` file that serve `suite`, pointed at its backports."""
    stanzas = []
    uncommented = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for stanza in re.split(r"\n[ \t]*\n", uncommented):
        suites = re.search(r"^Suites:(.*)$", stanza, re.MULTILINE | re.IGNORECASE)
        if suites is None or suite not in suites.group(1).split() or re.search(r"^Enabled:\s*no", stanza, re.MULTILINE | re.IGNORECASE):
            continue
        stanzas.append(stanza.replace(suites.group(0), f"Suites: {suite}-backports").strip())
    return "\n\n".join(stanzas) + "\n" if stanzas else ""


def backports_of_list(text: str, suite: str) -> str:
    """The lines of a one-line-style ``.list`` file that serve `suite`, pointed at its backports."""
    lines = re.findall(rf"^\s*(deb\s+(?:\[[^\]]*\]\s+)?\S+\s+){re.escape(suite)}(\s+.*)$", text, re.MULTILINE)
    return "".join(f"{before}{suite}-backports{after}\n" for before, after in lines)


class PrivateApt:
    """apt with sources, lists and cache of its own; the system's are read and never written."""

    def __init__(self, folder: Path, suite: str) -> None:
        self.downloads = folder / "downloads"
        parts = folder / "sources"
        for path in (parts, folder / "lists" / "partial", folder / "cache" / "archives" / "partial", self.downloads):
            path.mkdir(parents=True)
        found = 0
        for source in [SOURCES / "sources.list", *sorted((SOURCES / "sources.list.d").glob("*"))]:
            if source.suffix not in (".list", ".sources") or not source.is_file():
                continue
            text = source.read_text(encoding="utf-8", errors="replace")
            backports = (backports_of_sources if source.suffix == ".sources" else backports_of_list)(text, suite)
            if not backports:
                continue  # a third party's: not needed here
            found += 1
            (parts / f"{found}-stable{source.suffix}").write_text(text, encoding="utf-8")
            (parts / f"{found}-backports{source.suffix}").write_text(backports, encoding="utf-8")
        if not found:
            raise NotPossible(f"no apt source of this system serves '{suite}'")
        self._options = [
            option
            for setting in (
                "Dir::Etc::sourcelist=/dev/null",
                f"Dir::Etc::sourceparts={parts}",
                f"Dir::State::lists={folder / 'lists'}",
                f"Dir::Cache={folder / 'cache'}",
                "APT::Sandbox::User=root",  # the download folder is ours alone
                "APT::Update::Post-Invoke-Success::=",
                "Acquire::Retries=2",
            )
            for option in ("-o", setting)
        ]

    def update(self) -> None:
        # A suite without backports (or a source that is down) is an error of apt-get; what could be read is used.
        self._run("apt-get", "-q", "update", timeout_s=300)

    def newest(self, package: str) -> str | None:
        """Highest version on offer anywhere; None when there is none. (apt-cache lists them from the highest down.)"""
        listing = self._run("apt-cache", "madison", package, timeout_s=60).stdout
        versions = [line.split("|")[1].strip() for line in listing.splitlines() if line.count("|") >= 2]
        return versions[0] if versions else None

    def download(self, package: str, version: str | None = None) -> Path | None:
        """The package's file; None when it cannot be had."""
        self._run("apt-get", "-q", "download", f"{package}={version}" if version else package, timeout_s=600)
        return next(self.downloads.glob(f"{package}_*.deb"), None)

    def _run(self, program: str, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        command = [program, *self._options, *arguments]
        environment = {**os.environ, "LC_ALL": "C"}
        return subprocess.run(
            command,
            cwd=self.downloads,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )


def missing_libraries(library: Path, folder: Path) -> list[str]:
    """Names that the dynamic linker does not find for `library`, looking in `folder` as well."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "LC_ALL": "C"}
    listing = subprocess.run(["ldd", str(library)], env=environment, capture_output=True, text=True, check=False).stdout
    return re.findall(r"^\s*(\S+) => not found", listing, re.MULTILINE)


def load_order(library: Path, folder: Path) -> list[str]:
    """Libraries of `folder` that `library` needs, each after those it needs itself."""
    order: list[str] = []

    def visit(path: Path) -> None:
        listing = subprocess.run(
            ["ldd", str(path)],
            env={**os.environ, "LD_LIBRARY_PATH": str(folder), "LC_ALL": "C"},
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        for name in re.findall(rf"^\s*(\S+) => {re.escape(str(folder))}/", listing, re.MULTILINE):
            if name != path.name and name not in order:
                visit(folder / name)
        if path != library and path.name not in order:
            order.append(path.name)

    visit(library)
    return order


def dependencies(deb: Path) -> list[str]:
    """Names of the packages that a .deb depends on, the first of each choice."""
    field = subprocess.run(["dpkg-deb", "-f", str(deb), "Depends"], capture_output=True, text=True, check=True).stdout
    return [re.split(r"[\s(|:]", entry.strip())[0] for entry in field.split(",") if entry.strip()]


def is_installed(package: str) -> bool:
    query = subprocess.run(["dpkg-query", "-W", "-f", "${Status}", package], capture_output=True, text=True, check=False)
    return query.stdout.endswith("ok installed")


def take_libraries(deb: Path, scratch: Path, folder: Path, only: str = "*.so*") -> None:
    """Copy a package's shared libraries, flat, into `folder`; links become files, since names are what the linker asks for."""
    scratch.mkdir(parents=True)
    subprocess.run(["dpkg-deb", "-x", str(deb), str(scratch)], check=True, timeout=120)
    for path in scratch.rglob(only):
        if path.is_file():
            shutil.copy(path, folder / path.name, follow_symlinks=True)


def linked_libraries() -> list[Path]:
    """The installed packages' own libraries that want some of the system's."""
    site = Path(sysconfig.get_paths()["platlib"])
    return [path for folder, pattern in LINKED.items() for path in sorted((site / folder).glob(pattern))]


def fetch(apt: PrivateApt, wanted: Callable[[], object], packages: list[str], folder: Path, scratch: Path) -> None:
    """Unpack `packages` and what they depend on into `folder`, breadth first, until nothing more is `wanted`."""
    queue, seen = list(packages), {"libc6", "libvulkan1"}
    while queue and wanted():
        package = queue.pop(0)
        if package in seen or is_installed(package):
            continue
        seen.add(package)
        deb = apt.download(package)
        if deb is not None:
            take_libraries(deb, scratch / package, folder)
            queue.extend(dependencies(deb))


def add_linked_libraries(apt: PrivateApt, folder: Path, scratch: Path) -> None:
    """What the installed Python packages are linked with and the system lacks."""

    def missing() -> set[str]:
        return {name for path in linked_libraries() for name in missing_libraries(path, folder)}

    # Some libraries of a package find each other only while they run, which ldd does not know: those are not ours to find.
    theirs = missing() - PACKAGE_OF.keys()
    first = sorted({PACKAGE_OF[name] for name in missing() - theirs})
    fetch(apt, lambda: missing() - theirs, first, folder, scratch)
    if missing() - theirs:
        raise NotPossible(f"these libraries were not found: {', '.join(sorted(missing() - theirs))}")


def add_lavapipe(apt: PrivateApt, folder: Path, scratch: Path) -> str:
    """The driver, its libraries and its description. Returns the Mesa version."""
    version = apt.newest(PACKAGE)
    if version is None or int(re.sub(r"^\d+:", "", version).split(".")[0]) < MIN_MESA:
        raise NotPossible(
            f"Mesa >= {MIN_MESA} is needed for a Vulkan driver, and this distribution with its backports offers {version or 'none'}"
        )
    deb = apt.download(PACKAGE, version)
    if deb is None:
        raise NotPossible(f"{PACKAGE} {version} could not be downloaded")
    take_libraries(deb, scratch / PACKAGE, folder, only=DRIVER)
    fetch(apt, lambda: missing_libraries(folder / DRIVER, folder), dependencies(deb), folder, scratch)
    missing = missing_libraries(folder / DRIVER, folder)
    if missing:
        (folder / DRIVER).unlink()
        raise NotPossible(f"libraries that {DRIVER} needs were not found: {', '.join(missing)}")
    driver = {"file_format_version": "1.0.0", "ICD": {"library_path": str(TARGET / DRIVER), "api_version": "1.4.305"}}
    (folder / "lvp_icd.json").write_text(json.dumps(driver, indent=2) + "\n", encoding="utf-8")
    return version


def finish(folder: Path) -> None:
    """Say in which order the libraries are loaded, remove those that nobody needs, and put the folder in its place."""
    order: list[str] = []
    for library in [*linked_libraries(), folder / DRIVER]:
        if library.is_file():
            order += [name for name in load_order(library, folder) if name not in order]
    for path in folder.glob("*.so*"):
        if path.name != DRIVER and path.name not in order:
            path.unlink()
    (folder / "preload.txt").write_text("".join(f"{name}\n" for name in order), encoding="utf-8")
    shutil.rmtree(TARGET, ignore_errors=True)
    folder.rename(TARGET)


def main() -> int:
    configure_rendering()
    device = vulkan_device()
    missing = {name for path in linked_libraries() for name in missing_libraries(path, TARGET) if name in PACKAGE_OF}
    if device is not None and not missing:
        print(f"make: graphics libraries are there; Vulkan draws on {device}")
        return 0
    problems = []
    try:
        TARGET.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as work, tempfile.TemporaryDirectory(dir=TARGET.parent) as staging:
            folder = Path(staging) / TARGET.name
            folder.mkdir()
            apt = PrivateApt(Path(work) / "apt", codename())
            apt.update()
            has_own_driver = device is not None and private_lavapipe() is None
            for step in [add_linked_libraries] if has_own_driver else [add_linked_libraries, add_lavapipe]:
                try:
                    step(apt, folder, Path(work) / step.__name__)
                except NotPossible as error:
                    problems.append(str(error))
            finish(folder)
    except (NotPossible, subprocess.SubprocessError, OSError) as error:
        problems.append(str(error))
    for problem in problems:
        print(f"make: {problem.rstrip('.')}.")
    configure_rendering()
    device = vulkan_device()
    print(
        f"make: Vulkan draws on {device} (libraries in {TARGET})" if device else "make: no Vulkan here; ManiSkill trains without pictures."
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
