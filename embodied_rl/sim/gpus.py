"""Which GPUs there are and at which PCI address: asked of NVIDIA's management library, else read from sysfs. Needs no torch."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from embodied_rl.errors import UserError

_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
"""PCI classes of what computes: VGA, 3D and other display controllers, processing accelerators."""
_PCI_ADDRESS = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", re.IGNORECASE)
_TEXT_BYTES = 96


@dataclass(frozen=True)
class GpuAddress:
    """One GPU, in the order of the PCI addresses."""

    pci: str
    """As sysfs writes it: ``0000:c1:00.0``."""
    uuid: str | None = None
    name: str | None = None


def normalise_pci(text: str) -> str:
    """The PCI address as sysfs writes it: lower case, domain of four digits (more only where it needs them).

    NVML and nvidia-smi write ``00000000:C1:00.0`` for sysfs's ``0000:c1:00.0``. Raises UserError for anything else.
    """
    match = _PCI_ADDRESS.fullmatch(text.strip())
    if match is None:
        raise UserError(f"'{text}' is not a PCI address; one looks like '0000:c1:00.0' or '00000000:C1:00.0'.")
    domain, bus, device, function = (int(part or "0", 16) for part in match.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function}"


def pci_order(address: str) -> tuple[int, ...]:
    """Sorts addresses as numbers: domain, bus, device, function."""
    return tuple(int(part, 16) for part in re.split(r"[:.]", address))


def sysfs_gpus(root: Path) -> list[GpuAddress]:
    """NVIDIA's and AMD's GPUs below ``sys/bus/pci/devices``, by PCI address. In a container these are all of the machine."""
    found = []
    for folder in (root / "sys/bus/pci/devices").glob("*"):
        vendor, kind = ((folder / name).read_text().strip() if (folder / name).is_file() else "" for name in ("vendor", "class"))
        if vendor in _VENDORS and kind.startswith(_CLASSES):
            found.append(GpuAddress(normalise_pci(folder.name), name=_VENDORS[vendor]))
    return sorted(found, key=lambda gpu: pci_order(gpu.pci))


def nvml_gpus(library: str = "libnvidia-ml.so.1") -> list[GpuAddress] | None:
    """The GPUs that NVIDIA's driver lets this process see, by PCI address; None where the driver is not installed.

    Raises:
        UserError: the library is there and fails, with what it says (a driver that was updated without a restart, say).
    """
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return None
    nvml.nvmlErrorString.restype = ctypes.c_char_p
    _check(nvml, nvml.nvmlInit_v2())
    try:
        count = ctypes.c_uint()
        _check(nvml, nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        return sorted((_nvml_gpu(nvml, index) for index in range(count.value)), key=lambda gpu: pci_order(gpu.pci))
    finally:
        nvml.nvmlShutdown()


class _PciInfo(ctypes.Structure):
    """nvmlPciInfo_t of nvml.h."""

    _fields_ = (
        ("busIdLegacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pciDeviceId", ctypes.c_uint),
        ("pciSubSystemId", ctypes.c_uint),
        ("busId", ctypes.c_char * 32),
    )


def _nvml_gpu(nvml: ctypes.CDLL, index: int) -> GpuAddress:
    handle, info = ctypes.c_void_p(), _PciInfo()
    uuid, name = ctypes.create_string_buffer(_TEXT_BYTES), ctypes.create_string_buffer(_TEXT_BYTES)
    size = ctypes.c_uint(_TEXT_BYTES)
    _check(nvml, nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)))
    _check(nvml, nvml.nvmlDeviceGetPciInfo_v3(handle, ctypes.byref(info)))
    _check(nvml, nvml.nvmlDeviceGetUUID(handle, uuid, size))
    _check(nvml, nvml.nvmlDeviceGetName(handle, name, size))
    return GpuAddress(normalise_pci(info.busId.decode()), uuid.value.decode(), name.value.decode())


def _check(nvml: ctypes.CDLL, status: int) -> None:
    if status != 0:
        said = nvml.nvmlErrorString(status)
        raise UserError(f"NVIDIA's driver does not answer (NVML: {said.decode() if said else status}). Does nvidia-smi work here?")


def visible_gpus(found: Sequence[GpuAddress], visible: str | None) -> tuple[list[GpuAddress], str]:
    """The GPUs as the framework numbers them under ``CUDA_VISIBLE_DEVICES``, and what could not be understood of it ("" if all).

    As CUDA does it: the list ends at its first entry that names no GPU; a UUID may be shortened; an empty list hides all.
    """
    if visible is None:
        return list(found), ""
    chosen: list[GpuAddress] = []
    for entry in filter(None, (part.strip() for part in visible.split(","))):
        if entry.isdigit() and int(entry) < len(found):
            chosen.append(found[int(entry)])
            continue
        matching = [gpu for gpu in found if gpu.uuid is not None and entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
        if len(matching) != 1:
            hidden = "" if entry == "-1" else f"CUDA_VISIBLE_DEVICES={visible}: '{entry}' is no GPU whose PCI address is known here"
            return chosen, hidden
        chosen.extend(matching)
    return chosen, ""
