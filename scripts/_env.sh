# Sourced by the other scripts: creates and updates .venv. Fast if there is nothing to do.
#
#   ROOT         the checkout           VENV  its environment (LLMRL_VENV sets another path)
#   ensure_env   base | dev             installs llmrl editable, with the development tools for dev
#   step NAME COMMAND...                runs it; a script that ends in it says which step failed

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${LLMRL_VENV:-$ROOT/.venv}
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '%s\n' "$*" >&2; }

STEP=
step() {
    STEP=$1
    shift
    say "== $STEP"
    "$@"
    STEP=
}

name_failed_step() {
    local status=$?
    [[ -z $STEP ]] || say "FAILED with exit code $status: $STEP"
}
trap name_failed_step EXIT

find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    say "llmrl needs Python 3.11 or newer; none of python3, python3.13, python3.12, python3.11 is."
    return 3
}

# A hash of everything an installation depends on: declared dependencies, interpreter, path of the checkout.
stamp_of() {
    "$VENV/bin/python" - "$ROOT" <<'PYTHON'
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
print(hashlib.sha256((root / "pyproject.toml").read_bytes() + f"{root} {sys.version}".encode()).hexdigest())
PYTHON
}

install_torch() {
    if "$VENV/bin/python" -c 'import torch' >/dev/null 2>&1; then
        return
    fi
    if [[ $(uname -s) != Linux ]] || command -v nvidia-smi >/dev/null 2>&1; then
        return # the default build is right: pip installs it with the other dependencies
    fi
    # On Linux without a GPU the default build would install several GB of unusable CUDA libraries. The version is
    # exact, because otherwise pip prefers a newer CUDA build to a CPU build ("+cpu").
    local version=2.13.0
    say "installing torch $version for CPU"
    "$VENV/bin/python" -m pip install --quiet --no-deps "torch==$version+cpu" 2>/dev/null ||
        "$VENV/bin/python" -m pip install --quiet --no-deps --retries 1 --timeout 30 \
            --index-url https://download.pytorch.org/whl/cpu "torch==$version" 2>/dev/null ||
        "$VENV/bin/python" -m pip install --quiet "torch==$version"
}

ensure_env() {
    local kind=$1 target=$ROOT python
    if ! "$VENV/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
        python=$(find_python)
        say "making $VENV"
        rm -rf -- "$VENV"
        "$python" -m venv "$VENV" || {
            rm -rf -- "$VENV"
            say "$python cannot make environments; on Debian and Ubuntu: apt install python3-venv"
            return 3
        }
    fi
    local stamp
    stamp=$(stamp_of)
    if [[ -f $VENV/.llmrl-$kind && $(<"$VENV/.llmrl-$kind") == "$stamp" ]]; then
        return
    fi
    say "installing llmrl into $VENV (a few minutes the first time)"
    install_torch
    [[ $kind == dev ]] && target="$ROOT[dev]"
    "$VENV/bin/python" -m pip install --quiet --editable "$target"
    printf '%s\n' "$stamp" >"$VENV/.llmrl-base"
    printf '%s\n' "$stamp" >"$VENV/.llmrl-$kind"
}
