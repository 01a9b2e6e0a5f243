#!/bin/sh
# Makes .venv, the environment that every make target runs in. `make setup` calls this when it has to.
#
#     sh setup.sh           make the environment
#     sh setup.sh --plan    only say which torch it would have
#
# Which torch:
#   - One that PYTHON imports (a cluster's module, a ROCm container, an active environment) is kept. A .pth file shows it to
#     .venv, with all that lies beside it; pip never touches it. The pins do not apply then: other packages fit themselves to it.
#     One that is older than pyproject.toml asks for gets a warning.
#   - Otherwise the version in constraints.txt is installed: on Linux without a GPU the CPU build of PyTorch's own index (PyPI's
#     brings gigabytes of CUDA), or what pip finds if that index does not answer; elsewhere PyPI's. For an AMD GPU you choose.
#     Builds for GPUs bring their own triton. Where the installed torch brought none, Linux gets the pinned one beside it: its
#     interpreter and compilers need no GPU, and kernels can be tested with them.
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
oldest=$(sed -n 's/^torch = \["torch>=\([0-9.]*\).*/\1/p' pyproject.toml)
mode=${1:-}

fail() {
    echo "error: $1" >&2
    exit 2
}

case $mode in "" | --plan) ;; *) fail "setup.sh takes --plan or nothing, not $mode" ;; esac

torch_of() { # "VERSION FOLDER" of the torch that Python $1 imports; nothing if it has none
    "$1" -c '
import importlib.util, os, sys
spec = importlib.util.find_spec("torch")
if spec and spec.origin:
    try:
        import torch
    except (ImportError, OSError) as error:
        reason = str(error).split("\n")[0]
        sys.exit("error: %s does not import (%s): repair that torch, or take it off the path" % (spec.origin, reason))
    print(torch.__version__, os.path.dirname(os.path.dirname(os.path.abspath(torch.__file__))))
' || exit 2
}

answers() {
    "$PYTHON" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)' "$1" 2>/dev/null
}

older() { # whether version $1 is before version $2, by their first two numbers
    "$PYTHON" -c '
import re, sys
one, other = ([int(number) for number in re.findall("[0-9]+", version)[:2]] for version in sys.argv[1:])
sys.exit(one >= other)
' "$1" "$2"
}

install() {
    .venv/bin/python -m pip install --constraint "$constraints" "$@" ||
        fail "pip could not install this, as its lines above say: without a network see 'No network' in MACHINES.md"
}

# 1. The interpreter.
version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
    fail "$PYTHON does not run: install Python 3.10 or newer, or name one with PYTHON=/path/to/python3"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$PYTHON is Python $version, and 3.10 or newer is needed: name one with PYTHON=/path/to/python3"
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$PYTHON cannot make environments: install its venv package (Debian and Ubuntu: apt-get install python$version-venv)"
[ "$mode" = --plan ] || "$PYTHON" -c 'import os, sys; sys.exit(os.path.realpath(".venv") == os.path.realpath(sys.prefix))' ||
    fail ".venv is active and must be made anew: run 'deactivate' first"
[ ! -L .venv ] || fail ".venv is a link, and a new one would erase its target: remove the link first"
[ ! -e .venv ] || [ -e .venv/set-up ] || fail ".venv is not of setup.sh, which would erase it: move it away, or remove it with rm -r .venv"

# 2. Which torch: the plan in words, and in "$@" what pip is asked for.
kept=$(torch_of "$PYTHON")
constraints=constraints.txt
if [ -n "$kept" ]; then
    plan="keeps torch ${kept%% *} of ${kept#* }"
    constraints=.venv/kept.txt
    set --
elif [ -n "$TORCH_BUILD" ]; then
    plan="installs torch $pinned+$TORCH_BUILD"
    set -- --extra-index-url "$index/$TORCH_BUILD" "torch==$pinned+$TORCH_BUILD"
elif command -v nvidia-smi >/dev/null; then
    plan="installs torch $pinned for NVIDIA GPUs"
    set -- torch
elif [ -e /dev/kfd ] || command -v rocminfo >/dev/null; then
    fail "an AMD GPU, but $PYTHON has no torch: load a module that has it, install a ROCm build, or pass TORCH_BUILD=rocmX.Y or cpu"
elif [ "$(uname -s)" = Linux ]; then
    plan="installs torch $pinned (PyTorch's CPU index does not answer, so what pip finds)"
    set -- torch
    if answers "$index/cpu/torch/"; then
        plan="installs torch $pinned for the CPU"
        # A local version ranks above the plain one: pip takes this index's 2.13.0+cpu before PyPI's 2.13.0.
        set -- --extra-index-url "$index/cpu" torch
    fi
else
    plan="installs torch $pinned"
    set -- torch
fi
echo "set-up: Python $version, $plan"
if [ -n "$kept" ] && older "${kept%% *}" "$oldest"; then
    echo "warning: torch ${kept%% *} is kept, but torch $oldest or newer is needed: load or install a newer one before set-up" >&2
fi
[ "$mode" != --plan ] || exit 0

# 3. The environment, always from nothing.
extras=deepspeed-needs,test,lint
size=150 # MB to download, with triton 350
"$PYTHON" -m venv --clear .venv
: >.venv/set-up # a mark: this .venv may be erased
if [ -n "$kept" ]; then
    # Python 3.10 and 3.11 put an old setuptools there, which would hide the one beside torch.
    .venv/bin/python -I -m pip uninstall --quiet --yes setuptools 2>/dev/null
    "$PYTHON" - "${kept#* }" "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" <<'EOF'
import importlib.util, os, sys, sysconfig

torch_folder, site_packages = sys.argv[1:]
standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), sysconfig.get_config_var("DESTSHARED")}
folders = [folder for folder in sys.path if os.path.isdir(folder) and folder not in standard]
if torch_folder not in folders:  # installed from its source tree
    folders.append(torch_folder)
with open(os.path.join(site_packages, "kept_torch.pth"), "w") as file:
    print(*folders, "import kept_torch", sep="\n", file=file)
with open(os.path.join(site_packages, "kept_torch.py"), "w") as file:
    print("# .venv's own packages win over these folders, even where PYTHONPATH puts them first.", file=file)
    print(f"import sys\n\nsys.path.sort(key={ascii(folders)}.__contains__)", file=file)
with open(".venv/kept.txt", "w") as file:
    file.write("torch<0\ntriton<0\n")  # a package that requires them is an error, not a download
    if importlib.util.find_spec("numpy"):
        import numpy

        file.write(f"numpy=={numpy.__version__}\n")
EOF
else
    echo "set-up: downloads torch and what it needs, 200 MB for the CPU, gigabytes for a GPU"
    install "$@"
    .venv/bin/python -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("triton"))' ||
        { extras=$extras,triton size=350; }
fi
echo "set-up: installs 70 more packages, $size MB, in a minute or so without output"
install --quiet --editable ".[$extras]"
echo "set-up: builds deepspeed, in seconds"
install --quiet --no-deps --use-pep517 deepspeed # --use-pep517: build it in a place of its own, without torch
echo "set-up: imports torch, which the first time takes seconds"
found=$(torch_of .venv/bin/python)
[ -z "$kept" ] || [ "$found" = "$kept" ] || fail ".venv has torch $found, not the one to keep: $kept"
pwd -P >.venv/set-up
echo "set-up: done, torch ${found%% *} of ${found#* }"
