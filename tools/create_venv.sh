#!/usr/bin/env bash
# Makes a virtual environment with pip in it: create_venv.sh FOLDER [PYTHON]. Called by the Makefile.
# Without PYTHON it takes the first of python3, python3.12, python3.11, python3.13 that is 3.11 to 3.13.
# Debian splits `venv` into a package of its own; where it is missing, the system's pip fills the gap.
set -euo pipefail
folder=$1
asked=${2:-}

is_supported() {
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

python=""
for candidate in ${asked:-python3 python3.12 python3.11 python3.13}; do
  if is_supported "$candidate"; then
    python=$candidate
    break
  fi
done
if [[ -z "$python" ]]; then
  echo "${asked:-No python3 here} is not a working Python 3.11 to 3.13." \
    "Install one, or name it: make PYTHON=/path/to/python3.11" >&2
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
