#!/bin/sh
# Print the interpreter to build the environment with: the one given, or the first that fits.
# Where there is a GPU, an interpreter that already has a CUDA build of torch goes first.
set -eu

wanted=${1:-}
fits='import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
has_torch='import sys, torch
version = tuple(int(part) for part in torch.__version__.split(".")[:2])
sys.exit(not ((2, 11) <= version <= (2, 15) and torch.version.cuda))'

if [ -n "$wanted" ]; then
    if "$wanted" -c "$fits" >/dev/null 2>&1; then
        printf '%s\n' "$wanted"
        exit 0
    fi
    echo "PYTHON=$wanted cannot be used: expected Python 3.11 to 3.13 with the modules venv and ensurepip" >&2
    exit 1
fi

if nvidia-smi -L >/dev/null 2>&1; then
    for python in python3 python3.13 python3.12 python3.11; do
        if "$python" -c "$fits" >/dev/null 2>&1 && "$python" -c "$has_torch" >/dev/null 2>&1; then
            printf '%s\n' "$python"
            exit 0
        fi
    done
fi

for python in python3.11 python3.12 python3.13 python3; do
    if "$python" -c "$fits" >/dev/null 2>&1; then
        printf '%s\n' "$python"
        exit 0
    fi
done

echo "no usable Python among python3.11, python3.12, python3.13 and python3: expected version 3.11 to 3.13" >&2
echo "with the modules venv and ensurepip (on Debian and Ubuntu: python3-venv); install one, or name it with PYTHON=..." >&2
exit 1
