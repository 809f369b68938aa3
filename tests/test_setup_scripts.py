"""The pieces of `make setup` that read and rewrite somebody's apt sources."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_libraries", ROOT / "scripts" / "install_libraries.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_backports_of_deb822_sources(script: ModuleType) -> None:
    text = """\
Types: deb
# a comment
URIs: mirror+file:/etc/apt/mirrors/debian.list
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian.gpg

Types: deb
URIs: mirror+file:/etc/apt/mirrors/security.list
Suites: bookworm-security
Components: main

Enabled: no
Types: deb
URIs: cdrom:x
Suites: bookworm
Components: main
"""
    assert script.backports_of_sources(text, "bookworm") == (
        "Types: deb\n"
        "URIs: mirror+file:/etc/apt/mirrors/debian.list\n"
        "Suites: bookworm-backports\n"
        "Components: main\n"
        "Signed-By: /usr/share/keyrings/debian.gpg\n"
    )
    assert script.backports_of_sources(text, "trixie") == ""


def test_backports_of_one_line_lists(script: ModuleType) -> None:
    text = """\
# deb ftp://mirror.example/debian bookworm main
deb [signed-by=/usr/share/keyrings/x.gpg arch=amd64] ftp://mirror.example/debian bookworm main contrib
deb ftp://mirror.example/debian-security bookworm-security main
deb-src ftp://mirror.example/debian bookworm main
deb\tftp://mirror.example/debian\tbookworm\tmain
"""
    assert script.backports_of_list(text, "bookworm") == (
        "deb [signed-by=/usr/share/keyrings/x.gpg arch=amd64] ftp://mirror.example/debian bookworm-backports main contrib\n"
        "deb\tftp://mirror.example/debian\tbookworm-backports\tmain\n"
    )


def test_private_apt_needs_a_source_of_this_distribution(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "etc"
    (sources / "sources.list.d").mkdir(parents=True)
    (sources / "sources.list.d" / "other.list").write_text("deb ftp://mirror.example/tool stable main\n")
    monkeypatch.setattr(script, "SOURCES", sources)
    with pytest.raises(script.NotPossible, match="bookworm"):
        script.PrivateApt(tmp_path / "a", "bookworm")
    (sources / "sources.list").write_text("deb ftp://mirror.example/debian bookworm main\n")
    script.PrivateApt(tmp_path / "b", "bookworm")
    written = sorted((tmp_path / "b" / "sources").iterdir())
    # The third party's source is left out: its outage is no business of ours.
    assert [path.read_text() for path in written] == [
        "deb ftp://mirror.example/debian bookworm-backports main\n",
        "deb ftp://mirror.example/debian bookworm main\n",
    ]


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg")
def test_package_is_unpacked_and_its_dependencies_read(script: ModuleType, tmp_path: Path) -> None:
    """A real .deb of our own making: a library behind a link, and alternatives and versions among its dependencies."""
    tree, folder = tmp_path / "tree", tmp_path / "out"
    library = tree / "usr" / "lib" / "x86_64-linux-gnu"
    for path in (tree / "DEBIAN", library, folder):
        path.mkdir(parents=True)
    (library / "libtoy.so.1.2").write_bytes(b"toy")
    (library / "libtoy.so.1").symlink_to("libtoy.so.1.2")
    (tree / "DEBIAN" / "control").write_text(
        "Package: libtoy1\nVersion: 1.2\nArchitecture: all\nMaintainer: nobody <nobody@example.org>\n"
        "Depends: libc6 (>= 2.34), liba1 | libb1, libgl1:any, zlib1g\nDescription: toy\n"
    )
    deb = tmp_path / "libtoy1.deb"
    subprocess.run(["dpkg-deb", "--build", str(tree), str(deb)], check=True, capture_output=True)
    assert script.dependencies(deb) == ["libc6", "liba1", "libgl1", "zlib1g"]
    script.take_libraries(deb, tmp_path / "scratch" / "libtoy1", folder)
    assert (folder / "libtoy.so.1").read_bytes() == b"toy"
    assert not (folder / "libtoy.so.1").is_symlink()


@pytest.mark.skipif(shutil.which("ldd") is None, reason="needs ldd")
def test_missing_libraries_of_a_real_program(script: ModuleType, tmp_path: Path) -> None:
    assert script.missing_libraries(Path(sys.executable).resolve(), tmp_path) == []


def test_python_is_chosen_by_version(tmp_path: Path) -> None:
    """Interpreters that only answer the version question, in a folder that is the whole PATH."""
    for name, fits in (("python3", 1), ("python3.12", 0)):
        (tmp_path / name).write_text(f"#!/bin/bash\nexit {fits}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "bash").symlink_to("/bin/bash")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON"} | {"PATH": str(tmp_path)}

    def find(**more: str) -> subprocess.CompletedProcess[str]:
        command = ["/bin/bash", str(ROOT / "scripts" / "find_python.sh")]
        return subprocess.run(command, env=environment | more, capture_output=True, text=True, check=False)

    assert find().stdout.strip() == str(tmp_path / "python3.12")
    refused = find(PYTHON="python3")
    assert refused.returncode == 1
    assert "3.11, 3.12 or 3.13 is needed" in refused.stderr
    assert "apt-get install" in refused.stderr
