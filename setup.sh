#!/bin/sh
# Makes .venv, the environment that every make target runs in. `make setup` calls this when it has to.
#
#     sh setup.sh           make the environment
#     sh setup.sh --plan    only say which torch it would have
#
# Which torch:
#   - One that PYTHON imports (a cluster's module, a ROCm container, an active environment) is kept. A .pth file shows it to
#     .venv, with all that lies beside it; pip never touches it. The pins do not apply then: other packages fit themselves to it.
#   - Otherwise the version in constraints.txt is installed: on Linux without a GPU the CPU build of PyTorch's own index, because
#     PyPI's brings gigabytes of CUDA; elsewhere PyPI's. For an AMD GPU you choose. Where the installed torch brought no triton,
#     Linux gets the pinned one beside it: its interpreter and compilers need no GPU, and kernels can be tested with them.
#
# Variables:
#   PYTHON        the interpreter to start from (default: python3)
#   TORCH_BUILD   where no torch is kept, take this build from PyTorch's own index: cpu, cu126, rocm7.2, ...
set -eu
CDPATH='' cd "$(dirname "$0")"
PYTHON=${PYTHON:-python3}
TORCH_BUILD=${TORCH_BUILD:-}
index=https://download.pytorch.org/whl
pinned=$(sed -n 's/^torch==//p' constraints.txt)

fail() {
    echo "error: $1" >&2
    exit 2
}

torch_of() { # "VERSION FOLDER" of the torch that Python $1 imports; nothing if it has none
    "$1" -c '
import importlib.util, os, sys
if importlib.util.find_spec("torch"):
    try:
        import torch
    except (ImportError, OSError) as error:
        sys.exit("error: torch does not import (%s): repair it, or take it off the path" % str(error).split("\n")[0])
    print(torch.__version__, os.path.dirname(os.path.dirname(os.path.abspath(torch.__file__))))
' || exit 2
}

install() {
    .venv/bin/python -m pip install --constraint "$constraints" "$@" ||
        fail "pip could not install this, as its lines above say: without a network see 'No network' in MACHINES.md"
}

# 1. The interpreter.
"$PYTHON" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
    fail "$PYTHON is no Python 3.10 or newer with its venv package (Debian: python3-venv): name one with PYTHON=/path/to/python3"
"$PYTHON" -c 'import os, sys; sys.exit(os.path.realpath(".venv") == os.path.realpath(sys.prefix))' ||
    fail ".venv is active and must be made anew: run 'deactivate' first"
[ ! -e .venv ] || [ -e .venv/set-up ] || fail ".venv is not of setup.sh, which would erase it: move it away or remove it first"

# 2. Which torch: the plan in words, and in "$@" what pip is asked for.
mode=${1:-}
kept=$(torch_of "$PYTHON")
constraints=constraints.txt
if [ -n "$kept" ]; then
    plan="keeps torch ${kept%% *} of ${kept#* }"
    constraints=.venv/kept.txt
    set --
elif [ -n "$TORCH_BUILD" ]; then
    plan="installs torch $pinned+$TORCH_BUILD"
    set -- --extra-index-url "$index/$TORCH_BUILD" "torch==$pinned+$TORCH_BUILD"
elif [ -e /dev/kfd ] || command -v rocminfo >/dev/null; then
    fail "an AMD GPU, but $PYTHON has no torch: load a module that has it, or pass TORCH_BUILD=rocmX.Y or cpu"
elif [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then
    plan="installs torch $pinned for the CPU"
    if "$PYTHON" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)' "$index/cpu/torch/" 2>/dev/null; then
        set -- --extra-index-url "$index/cpu" torch # a local version, 2.13.0+cpu, ranks above PyPI's 2.13.0
    else
        plan="installs torch $pinned (PyTorch's CPU index does not answer, so what pip finds)"
        set -- torch
    fi
else
    plan="installs torch $pinned"
    set -- torch
fi
echo "set-up: $plan"
[ "$mode" != --plan ] || exit 0

# 3. The environment, always from nothing.
extras=run,deepspeed-needs,test,lint
"$PYTHON" -m venv --clear .venv
: >.venv/set-up # a mark: this .venv may be erased
if [ -n "$kept" ]; then
    packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$PYTHON" -c 'import os, sys; print(sys.argv[1], *[folder for folder in sys.path if "-packages" in folder], sep="\n")' \
        "${kept#* }" >"$packages/kept_torch.pth"
    printf 'torch<0\ntriton<0\n' >.venv/kept.txt # a package that requires them is an error, not a download
    "$PYTHON" -c 'import numpy; print(f"numpy=={numpy.__version__}")' >>.venv/kept.txt 2>/dev/null || true
else
    echo "set-up: downloads torch and what it needs, 200 MB for the CPU, gigabytes for a GPU"
    install "$@"
    .venv/bin/python -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("triton"))' || extras=$extras,triton
fi
echo "set-up: installs 70 more packages, 150 MB, or 500 with triton, in a minute or so without output"
install --quiet --editable ".[$extras]"
echo "set-up: builds deepspeed, in seconds"
install --quiet --no-deps --use-pep517 deepspeed # --use-pep517: build it in a place of its own, without torch
found=$(torch_of .venv/bin/python)
[ -z "$kept" ] || [ "$found" = "$kept" ] || fail ".venv has torch $found, not the one to keep: $kept"
pwd -P >.venv/set-up
echo "set-up: done, torch ${found%% *} of ${found#* }"
