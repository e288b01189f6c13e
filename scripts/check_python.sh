#!/usr/bin/env bash
# check_python.sh PYTHON: one clear line and exit 1 where PYTHON cannot make the environment.
set -u
python=$1
if ! command -v "$python" >/dev/null 2>&1; then
    echo "error: no '$python' on the PATH; install Python 3.10 to 3.13 or run: make PYTHON=/path/to/python3 ..." >&2
    exit 1
fi
if ! "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))'; then
    echo "error: $("$python" --version) is not Python 3.10 to 3.13; run: make PYTHON=python3.12 ..." >&2
    exit 1
fi
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    echo "error: $python has no ensurepip; install it (Debian, Ubuntu: apt-get install python$version-venv)" >&2
    exit 1
fi
