#!/usr/bin/env bash
# ensure_pycosat.sh PYTHON: install pycosat, which reasoning-gym requires and which comes only as C source.
# Without a C compiler on the machine, the one that the package ziglang carries compiles it, and is then removed.
set -eu
python=$1
pip="$python -m pip install -q -q --no-compile --disable-pip-version-check"
if "$python" -c 'import pycosat' 2>/dev/null; then exit 0; fi

header=$("$python" -c 'import os, sysconfig; print(os.path.join(sysconfig.get_path("include"), "Python.h"))')
hint="Debian, Ubuntu: apt-get install gcc libc6-dev $("$python" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')"
if [ ! -f "$header" ]; then
    # A wheel built earlier needs no headers.
    $pip --no-build-isolation --only-binary pycosat pycosat 2>/dev/null && exit 0
    echo "error: pycosat, which reasoning-gym needs, is compiled against Python's headers, but $header is missing; $hint" >&2
    exit 1
fi
for compiler in ${CC:-cc gcc clang}; do
    if command -v "$compiler" >/dev/null 2>&1; then
        $pip pycosat && exit 0
        echo "error: $compiler cannot compile pycosat, which reasoning-gym needs; $hint" >&2
        exit 1
    fi
done
echo "No C compiler here: compiling pycosat with the one from the package ziglang"
$pip ziglang
zig=$("$python" -c 'import os, ziglang; print(os.path.join(os.path.dirname(ziglang.__file__), "zig"))')
CC="$zig cc" $pip pycosat || {
    echo "error: pycosat, which reasoning-gym needs, cannot be compiled; $hint" >&2
    exit 1
}
"$python" -m pip uninstall --quiet --yes ziglang
