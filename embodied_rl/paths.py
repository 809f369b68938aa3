"""Locations of configuration files and assets: inside an installed wheel, or beside the package in a checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _find(name: str) -> Path:
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def configs_dir() -> Path:
    return _find("configs")


def assets_dir() -> Path:
    return _find("assets")
