#!/usr/bin/env bash
# Prints a Python interpreter that the locked packages have wheels for. $PYTHON, when set, is taken if it fits.
set -euo pipefail

fits() {
    command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13}; do
    if fits "$candidate"; then
        command -v "$candidate"
        exit 0
    fi
done
{
    echo "make: no suitable Python: 3.11, 3.12 or 3.13 is needed (${PYTHON:-python3} is $("${PYTHON:-python3}" --version 2>&1 || true))."
    echo "      Debian 12 and 13, Ubuntu 24.04:  apt-get install python3 python3-venv"
    echo "      or name one yourself:            make PYTHON=/path/to/python3.12 setup"
} >&2
exit 1
