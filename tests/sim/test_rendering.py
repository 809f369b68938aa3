"""Which drawing back end is chosen, on made-up machines and on this one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from embodied_rl.sim import rendering

VARIABLES = ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL", "SDL_VIDEODRIVER", "VK_ICD_FILENAMES", "VK_DRIVER_FILES")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with no display, no choice made, no driver and an empty virtual environment; returns the latter's folder."""
    for name in VARIABLES:
        # Set first: monkeypatch then also takes back what configure_rendering puts there.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(rendering, "_ICD_FOLDERS", (str(tmp_path / "icd.d"),))
    monkeypatch.setattr(rendering, "_loads", lambda library: False)
    return tmp_path


def add_lavapipe(prefix: Path) -> str:
    icd = prefix / rendering.PRIVATE_FOLDER / "lvp_icd.json"
    icd.parent.mkdir(parents=True)
    icd.write_text("{}", encoding="utf-8")
    return str(icd)


def test_nothing_there_means_no_mujoco_and_no_vulkan(bare: Path) -> None:
    assert rendering.configure_rendering() == {"SDL_VIDEODRIVER": "dummy"}
    assert rendering.vulkan_device() is None


@pytest.mark.parametrize(
    ("libraries", "vendors", "backend"),
    [
        ({"libEGL.so.1", "libOSMesa.so.8"}, True, "egl"),
        ({"libEGL.so.1", "libOSMesa.so.8"}, False, "osmesa"),
        ({"libOSMesa.so.6"}, True, "osmesa"),
        (set(), True, None),
    ],
)
def test_mujoco_takes_egl_then_osmesa(
    bare: Path, monkeypatch: pytest.MonkeyPatch, libraries: set[str], vendors: bool, backend: str | None
) -> None:
    (bare / "vendors").mkdir()
    if vendors:
        (bare / "vendors" / "50_mesa.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(rendering, "_EGL_VENDOR_FOLDERS", (str(bare / "vendors"),))
    monkeypatch.setattr(rendering, "_loads", lambda library: library in libraries)
    assert rendering.configure_rendering().get("MUJOCO_GL") == backend
    assert os.environ.get("MUJOCO_GL") == backend


def test_choices_of_the_user_are_kept(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_lavapipe(bare)
    monkeypatch.setattr(rendering, "_loads", lambda library: True)
    chosen = {"MUJOCO_GL": "osmesa", "SDL_VIDEODRIVER": "x11", "VK_ICD_FILENAMES": "mine.json"}
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    assert rendering.configure_rendering() == {}
    assert {name: os.environ[name] for name in chosen} == chosen


@pytest.mark.parametrize(("display", "local"), [(":0", True), ("localhost:10.0", False), ("", False)])
def test_a_display_counts_when_it_is_local(bare: Path, monkeypatch: pytest.MonkeyPatch, display: str, local: bool) -> None:
    monkeypatch.setenv("DISPLAY", display)
    assert rendering.has_display() is local
    assert ("SDL_VIDEODRIVER" in rendering.configure_rendering()) is not local


def test_private_lavapipe_is_taken_unless_a_gpu_has_its_driver(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    icd = add_lavapipe(bare)
    assert rendering.configure_rendering()["VK_ICD_FILENAMES"] == icd
    monkeypatch.delenv("VK_ICD_FILENAMES")
    monkeypatch.setattr(rendering, "_accelerated_vulkan", lambda: True)
    assert "VK_ICD_FILENAMES" not in rendering.configure_rendering()


@pytest.mark.parametrize(
    ("vendor", "api", "usable"),
    [
        (rendering._MESA_VENDOR_ID, (1, 3, 230), False),  # Mesa 22.3, as SAPIEN 3.0.3 was seen to refuse it
        (rendering._MESA_VENDOR_ID, (1, 4, 305), True),  # Mesa 25.0
        (0x10DE, (1, 3, 0), True),  # NVIDIA's drivers are not ours to judge
    ],
)
def test_old_lavapipe_is_not_usable(vendor: int, api: tuple[int, int, int], usable: bool) -> None:
    major, minor, patch = api
    device = {"name": "x", "vendor": vendor, "api_version": major << 22 | minor << 12 | patch, "type": 4}
    assert rendering._is_usable(device) is usable


def test_a_driver_that_does_not_load_is_no_device(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real loader, asked in the real child process, about a driver whose library is garbage."""
    monkeypatch.undo()
    library = bare / "libbroken.so"
    library.write_bytes(b"not a library")
    icd = bare / "broken.json"
    icd.write_text(json.dumps({"file_format_version": "1.0.0", "ICD": {"library_path": str(library), "api_version": "1.4.0"}}))
    monkeypatch.setenv("VK_ICD_FILENAMES", str(icd))
    assert rendering.vulkan_device() is None


def test_preloading_stops_quietly_at_a_library_that_does_not_load(bare: Path) -> None:
    folder = bare / rendering.PRIVATE_FOLDER
    folder.mkdir(parents=True)
    (folder / "preload.txt").write_text("libnothing.so.1\n", encoding="utf-8")
    rendering.configure_rendering()


def test_the_probe_here_agrees_with_sapien() -> None:
    """What the probe says about this machine's Vulkan is what SAPIEN finds when it draws."""
    pytest.importorskip("sapien")
    from embodied_rl.commands.doctor import PROBES, run_probe

    rendering.configure_rendering()
    drawn = run_probe(next(probe for probe in PROBES if probe.name == "SAPIEN Vulkan"))
    assert (drawn.status == "ok") is rendering.vulkan_available(), drawn.detail
