"""Find this machine's means to draw, before any graphics library is loaded.

Graphics libraries read environment variables once, on import, so simulator processes call `configure_rendering` first. This file needs only
the standard library: it also runs as a script (the Vulkan probe), so that a driver's crash ends a short-lived child, never a simulator.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

PRIVATE_FOLDER = "share/graphics"
"""Folder below ``sys.prefix`` into which scripts/install_libraries.py unpacks missing libraries (lavapipe among them)."""

MIN_LAVAPIPE_API = (1, 4)
"""SAPIEN 3.0.3 refuses the lavapipe of Mesa 22.3 (Debian 12, Vulkan 1.3) and works with Mesa 25.0 (Vulkan 1.4).

lavapipe reports driver version 1 whatever Mesa it came with, so the probe compares its Vulkan version.
"""

PROBE_TIMEOUT_S = 60.0

_ICD_FOLDERS = ("/etc/vulkan/icd.d", "/usr/local/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/usr/share/vulkan/icd.d")
_EGL_VENDOR_FOLDERS = ("/usr/share/glvnd/egl_vendor.d", "/etc/glvnd/egl_vendor.d")
_MESA_VENDOR_ID = 0x10005
_VK_SUCCESS = 0


def configure_rendering() -> dict[str, str]:
    """Choose off-screen drawing for MuJoCo, SAPIEN (Vulkan) and pygame unless the user has chosen already.

    Call it before mujoco, sapien or pygame is imported. A variable that is set is never changed.

    Returns the environment variables that this call set; empty if there was nothing to choose.
    """
    chosen: dict[str, str] = {}
    if not has_display():
        chosen["SDL_VIDEODRIVER"] = "dummy"
        if "MUJOCO_GL" not in os.environ and (backend := mujoco_backend()) is not None:
            chosen["MUJOCO_GL"] = backend
    asked = any(os.environ.get(name) for name in ("VK_ICD_FILENAMES", "VK_DRIVER_FILES"))
    if not asked and (icd := private_lavapipe()) is not None and not _accelerated_vulkan():
        chosen["VK_ICD_FILENAMES"] = str(icd)
    chosen = {name: value for name, value in chosen.items() if name not in os.environ}
    os.environ.update(chosen)
    _preload(Path(sys.prefix) / PRIVATE_FOLDER)
    return chosen


def exports() -> dict[str, str]:
    """Environment variables with which other programs draw as we do: those of `configure_rendering`, and the folders of its libraries."""
    folder, chosen = Path(sys.prefix) / PRIVATE_FOLDER, configure_rendering()
    if (folder / "preload.txt").is_file():
        others = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if path and path != str(folder)]
        chosen["LD_LIBRARY_PATH"] = os.pathsep.join([str(folder), *others])
    return chosen


@lru_cache(maxsize=1)
def vulkan_available() -> bool:
    """Whether SAPIEN finds an acceptable Vulkan device; checked once, in a child process, without importing sapien.

    Call `configure_rendering` first. Takes about 0.2 s, or nothing if no driver is registered.
    """
    return vulkan_device() is not None


def vulkan_device() -> str | None:
    """Name of the first usable Vulkan device, e.g. ``llvmpipe (LLVM 15.0.6, 256 bits)``; None: no device."""
    loader = _vulkan_loader()
    if loader is None or not _registered_drivers():
        return None
    command = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), loader]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, stdin=subprocess.DEVNULL, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    devices = json.loads(result.stdout.strip().splitlines()[-1])
    return next((device["name"] for device in devices if _is_usable(device)), None)


def mujoco_backend() -> str | None:
    """``egl`` or ``osmesa``, the first with an installed library; None if MuJoCo cannot draw without a display."""
    if _loads("libEGL.so.1") and any(list(Path(folder).glob("*.json")) for folder in _EGL_VENDOR_FOLDERS):
        return "egl"
    if any(_loads(name) for name in ("libOSMesa.so.8", "libOSMesa.so.6", "libOSMesa.so")):
        return "osmesa"
    return None


def has_display() -> bool:
    """Whether there is a local screen. A screen forwarded by ssh (``localhost:10.0``) is slow and often lacks OpenGL: it does not count."""
    return bool(os.environ.get("WAYLAND_DISPLAY")) or os.environ.get("DISPLAY", "").startswith(":")


def private_lavapipe() -> Path | None:
    """Driver description that scripts/install_libraries.py wrote in this environment; None: no such file."""
    path = Path(sys.prefix) / PRIVATE_FOLDER / "lvp_icd.json"
    return path if path.is_file() else None


def _accelerated_vulkan() -> bool:
    """Whether a GPU's driver is registered and a GPU for it is present."""
    names = " ".join(path.name for path in _system_drivers())
    if "nvidia" in names and Path("/dev/nvidiactl").exists():
        return True
    return any(Path("/dev/dri").glob("renderD*")) and any(
        vendor in names for vendor in ("radeon", "amd", "intel", "nouveau", "asahi", "freedreno")
    )


def _system_drivers() -> list[Path]:
    return [path for folder in _ICD_FOLDERS for path in sorted(Path(folder).glob("*.json"))]


def _registered_drivers() -> list[Path]:
    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        listed = os.environ.get(name)
        if listed:
            return [path for path in map(Path, listed.split(os.pathsep)) if path.exists()]
    return _system_drivers()


def _vulkan_loader() -> str | None:
    """Vulkan loader that SAPIEN would load: the system's, else the one in its own package."""
    if _loads("libvulkan.so.1"):
        return "libvulkan.so.1"
    spec = importlib.util.find_spec("sapien")
    if spec is None or spec.origin is None:
        return None
    bundled = sorted((Path(spec.origin).parent / "vulkan_library").glob("libvulkan.so*"))
    return str(bundled[0]) if bundled else None


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _preload(folder: Path) -> None:
    """Load the private libraries that SAPIEN, OpenCV and lavapipe need and the system lacks; usually there are none.

    The dynamic linker searches the system's folders only, but finds loaded libraries by their name.
    """
    listing = folder / "preload.txt"
    if not listing.is_file():
        return
    for name in listing.read_text(encoding="utf-8").split():
        try:
            ctypes.CDLL(str(folder / name))
        except OSError:
            return  # the library that needs it raises its own error


def _is_usable(device: dict[str, int | str]) -> bool:
    api = int(device["api_version"])
    return device["vendor"] != _MESA_VENDOR_ID or (api >> 22 & 0x7F, api >> 12 & 0x3FF) >= MIN_LAVAPIPE_API


def _list_devices(loader: str) -> list[dict[str, int | str]]:
    """List the Vulkan loader's devices (Vulkan 1.0 calls only)."""
    for driver in os.environ.get("VK_ICD_FILENAMES", "").split(os.pathsep):
        _preload(Path(driver).parent)
    vulkan = ctypes.CDLL(loader)
    instance = ctypes.c_void_p()
    create_info = (ctypes.c_uint64 * 8)(1)  # VkInstanceCreateInfo: its type, 1, and neither layers nor extensions
    if vulkan.vkCreateInstance(ctypes.byref(create_info), None, ctypes.byref(instance)) != _VK_SUCCESS:
        return []
    count = ctypes.c_uint32()
    vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None)
    handles = (ctypes.c_void_p * count.value)()
    vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), handles)
    return [_device_properties(vulkan, handle) for handle in handles[: count.value]]


def _device_properties(vulkan: ctypes.CDLL, handle: int | None) -> dict[str, int | str]:
    # VkPhysicalDeviceProperties: five 32-bit words (API, driver version, vendor, device, type), then a name of 256 bytes.
    properties = ctypes.create_string_buffer(2048)  # the structure takes 824
    vulkan.vkGetPhysicalDeviceProperties(ctypes.c_void_p(handle), properties)
    words = [int.from_bytes(properties.raw[offset : offset + 4], sys.byteorder) for offset in range(0, 20, 4)]
    name = properties.raw[20:276].split(b"\0", 1)[0].decode("utf-8", "replace")
    return {"name": name, "api_version": words[0], "vendor": words[2], "type": words[4]}


if __name__ == "__main__":
    print(json.dumps(_list_devices(sys.argv[1])))
