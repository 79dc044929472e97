"""Create the virtual environment and install trainmux into it with everything that tests need.

Called by the Makefile with the folder of the environment and the extras to install. Uses the standard
library only. On a machine without a GPU only a CPU build of torch is ever installed; where the running
interpreter already has a CUDA build in the supported range, and there is a GPU, that one is used as it is.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

TORCH_VERSION = os.environ.get("TORCH", "2.13.0")
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
# The index that the PyTorch project publishes its CPU builds on.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Folders of installed packages whose modules are not compiled ahead, as a regular expression.
LEFT_OUT = r"/tests/|/transformers/models/"
OWN_FOLDERS = ("src", "benchmarks")
"""Modules of this repository that processes import again and again; they are used from where they are."""


def has_gpu() -> bool:
    program = shutil.which("nvidia-smi")
    return program is not None and subprocess.run([program, "-L"], capture_output=True).returncode == 0


def has_usable_torch() -> bool:
    """Whether this interpreter has a CUDA build of torch in the supported range."""
    try:
        import torch
    except ImportError:
        return False
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return OLDEST_TORCH <= version <= NEWEST_TORCH and torch.version.cuda is not None


def torch_attempts(gpu: bool, index: str, system: str) -> list[list[str]]:
    """What to ask pip for, in turn, until one succeeds.

    Without a GPU on Linux the plain requirement would bring several gigabytes of CUDA packages from
    the usual index, so the CPU build is asked for by its full version, and then on its own index.
    """
    plain, cpu = f"torch=={TORCH_VERSION}", f"torch=={TORCH_VERSION}+cpu"
    if index:
        return [[plain, "--index-url", index]]
    if gpu or system != "Linux":
        return [[plain]]
    return [[cpu], [cpu, "--index-url", CPU_INDEX]]


def pip_error(python: Path, arguments: list[str]) -> str:
    """Run ``pip install``; give its last error line, or nothing if it succeeded.

    pip neither asks for anything nor says where it looks: an index may be private. Nor does it compile
    modules, which it does on one core: see `compile_modules`.
    """
    options = [
        "--quiet",
        "--no-input",
        "--no-compile",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
    ]
    command = [str(python), "-m", "pip", "install", *options, *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
    return errors[-1] if errors else f"pip ended with status {done.returncode}"


def create(folder: Path, reuse_torch: bool) -> Path:
    """Make the environment if it is not there yet, and return its interpreter."""
    python = folder / "bin" / "python"
    if (
        python.exists()
        and subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0
    ):
        return python
    print(f"creating {folder} with Python {platform.python_version()}", flush=True)
    venv.EnvBuilder(with_pip=True, clear=True, system_site_packages=reuse_torch).create(folder)
    if reuse_torch and sys.prefix != sys.base_prefix:
        # An environment made from another environment sees the base interpreter's packages only.
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        link = folder / "lib" / version / "site-packages" / "parent_environment.pth"
        link.write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


def install_torch(python: Path, gpu: bool) -> None:
    print(f"installing torch {TORCH_VERSION}" + ("" if gpu else " (CPU build)"), flush=True)
    error = ""
    for attempt in torch_attempts(gpu, os.environ.get("TORCH_INDEX", ""), platform.system()):
        error = pip_error(python, attempt)
        if not error:
            return
    raise SystemExit(
        f"torch {TORCH_VERSION} for Python {platform.python_version()} could not be installed ({error}); "
        "set TORCH_INDEX to an index that has it, or PYTHON to another interpreter"
    )


def compile_modules(python: Path) -> subprocess.Popen[bytes]:
    """Start to compile what is there by now, on all cores: where nothing may write bytecode later, every
    process would compile torch anew. Tests of other packages and transformers' models are left out: few are
    imported. Files that are no Python for this version, which packages may have, stay as they are.
    """
    folders = [str(python.parents[1] / "lib"), *OWN_FOLDERS]
    command = [str(python), "-m", "compileall", "-qq", "-j", "0", "-x", LEFT_OUT, *folders]
    return subprocess.Popen(command)


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit("usage: make_env.py FOLDER EXTRAS")
    gpu = has_gpu()
    reuse_torch = gpu and "TORCH" not in os.environ and has_usable_torch()
    python = create(Path(sys.argv[1]), reuse_torch)
    if not reuse_torch:
        install_torch(python, gpu)
    compiling = compile_modules(python)  # pip needs one core at most
    extras = sys.argv[2]
    print(f"installing trainmux with its extras {extras}", flush=True)
    error = pip_error(python, ["--editable", f".[{extras}]"])
    if error:
        raise SystemExit(f"trainmux could not be installed ({error})")
    compiling.wait()
    compile_modules(python).wait()


if __name__ == "__main__":
    main()
