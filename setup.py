"""Packages of the distribution; everything else is in setup.cfg.

The folders configs/ and assets/ lie beside the package in a checkout and inside it in a wheel (embodied_rl/files.py finds
both). setup.cfg cannot say "find the packages, and these two folders as well".
"""

from setuptools import find_packages, setup

DATA = ["**/*"]

setup(
    packages=[*find_packages(include=["embodied_rl", "embodied_rl.*"]), "embodied_rl.configs", "embodied_rl.assets"],
    package_dir={"embodied_rl.configs": "configs", "embodied_rl.assets": "assets"},
    package_data={"embodied_rl": ["py.typed"], "embodied_rl.configs": DATA, "embodied_rl.assets": DATA},
    include_package_data=False,
)
