#!/usr/bin/env bash
# Makes a virtual environment with pip in it: create_venv.sh PYTHON FOLDER. Called by the Makefile.
# Debian splits `venv` into a package of its own; where it is missing, the system's pip fills the gap.
set -euo pipefail
python=${1:-}
folder=$2

if [[ -z "$python" ]]; then
  echo "No Python found. Install one of 3.11 to 3.13, or name it: make PYTHON=/path/to/python3" >&2
  exit 1
fi
if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
  echo "$python is $("$python" --version 2>&1); 3.11 to 3.13 are supported." \
    "Name another: make PYTHON=/path/to/python3.11" >&2
  exit 1
fi
if [[ -x "$folder/bin/python" ]] && "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
  exit 0
fi

echo "Creating $folder with $("$python" --version) ..."
if "$python" -c 'import ensurepip' 2>/dev/null; then
  "$python" -m venv "$folder"
elif "$python" -m pip --version >/dev/null 2>&1; then
  "$python" -m venv --without-pip "$folder"
  "$python" -m pip --python "$folder/bin/python" install --quiet pip
else
  echo "$python has neither ensurepip nor pip. On Debian: apt-get install python3-venv" >&2
  exit 1
fi
