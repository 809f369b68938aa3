#!/usr/bin/env bash
# Installs what drawing needs from the distribution, where this user may; otherwise says what is missing. Never fails:
# training needs none of it, only pictures and videos do.
set -uo pipefail

have_library() { ldconfig -p 2>/dev/null | grep -q -F "$1 " || PATH="/sbin:/usr/sbin:$PATH" ldconfig -p 2>/dev/null | grep -q -F "$1 "; }

missing=()
have_library libX11.so.6 || missing+=(libx11-6)
have_library libGL.so.1 || missing+=(libgl1)
have_library libglib-2.0.so.0 || missing+=(libglib2.0-0)
# MuJoCo draws off-screen through EGL, or through OSMesa where EGL is not there.
have_library libEGL.so.1 || have_library libOSMesa.so.8 || missing+=(libegl1)
# The module that makes virtual environments is a package of its own on Debian and Ubuntu.
"${1:-python3}" -c 'import ensurepip' >/dev/null 2>&1 || missing+=(python3-venv)

if ! command -v apt-get >/dev/null 2>&1; then
    [ ${#missing[@]} -eq 0 ] || echo "make: no apt-get here; the libraries of these Debian packages are missing: ${missing[*]}"
    exit 0
fi

if [ "$(id -u)" = 0 ]; then
    as_root=(env DEBIAN_FRONTEND=noninteractive)
elif command -v sudo >/dev/null 2>&1 && sudo -n true >/dev/null 2>&1; then
    as_root=(sudo -n env DEBIAN_FRONTEND=noninteractive)
else
    if [ ${#missing[@]} -gt 0 ]; then
        echo "make: these system packages are missing, and installing them needs root. Going on without; run when you can:"
        echo "      sudo apt-get install ${missing[*]}"
    fi
    exit 0
fi

apt_get() { timeout 900 "${as_root[@]}" apt-get -q -o DPkg::Lock::Timeout=120 -o Acquire::Retries=2 "$@" </dev/null; }

# lavapipe, the Vulkan driver for processors, as a system package where the distribution's own is new enough
# (Debian 13, Ubuntu 24.04); elsewhere scripts/install_libraries.py takes care of it.
mesa_major() { LC_ALL=C apt-cache policy mesa-vulkan-drivers 2>/dev/null | sed -n 's/^ *Candidate: \([0-9]*\:\)\{0,1\}\([0-9]*\)\..*/\2/p'; }
have_vulkan_driver() { compgen -G '/usr/share/vulkan/icd.d/*.json' >/dev/null || compgen -G '/etc/vulkan/icd.d/*.json' >/dev/null; }

if [ ${#missing[@]} -gt 0 ] || ! have_vulkan_driver; then
    apt_get update >/dev/null || echo "make: apt-get update failed; trying with the package lists that are here."
    if ! have_vulkan_driver && [ "$(mesa_major || echo 0)" -ge 25 ] 2>/dev/null; then
        missing+=(mesa-vulkan-drivers)
    fi
fi
if [ ${#missing[@]} -gt 0 ]; then
    echo "make: installing system packages: ${missing[*]}"
    if ! apt_get install -y --no-install-recommends "${missing[@]}" >/dev/null; then
        echo "make: that did not work; going on without. By hand: apt-get install ${missing[*]}"
    fi
fi
exit 0
