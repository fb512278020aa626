"""Builds the environment of a framework: a venv of exact pins, whole or absent, described by a freeze file.

Run by the workflow as
`python -m kvstudy.frameworks.environments vllm --flavour auto --dir DIR --freeze FILE`, and by `make setup`,
before anything is installed, as
`python3 src/kvstudy/frameworks/environments.py torch --python .venv/bin/python`. Hence only the standard
library.

Pins lie in `envs/<framework>/<flavour>.txt`, the project's own torch in `envs/kvstudy/torch.txt`. A CPU file
is a whole freeze, installed without resolving. A CUDA file pins the root package and pip resolves the rest;
the freeze file then says what that was.

The authors' forks (`envs/<framework>/fork.toml`: repository, full commit, the folders needed, licence) are checked out
into the environment, from the mirror or local clone that `conf/mirrors.toml` names for them, else from their own
repository, and put on its path. Nothing of them is copied into this project.

torch is special, because its CPU build is not on the package index that pip uses by default. It is installed
first, from wherever pip is configured to look, and from PyTorch's own CPU index only when it was not found
there: an index that cannot be reached must neither break nor slow a set-up that does not need it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FLAVOURS = ("cpu", "cuda")
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

#: The repository's folder of pins, seen from src/kvstudy/frameworks/.
PINS = Path(__file__).resolve().parents[3] / "envs"

#: What pins an author's fork, beside the packages.
FORK = "fork.toml"

#: The project's own environment: not a framework that a study serves.
OWN = "kvstudy"

#: pip's own patience is 15 s and 5 retries, which on a machine without a route is minutes of silence.
IMPATIENT = ("--timeout", "10", "--retries", "1")


class EnvironmentFault(RuntimeError):
    """The environment cannot be built on this machine; the message is one line that says why."""


def has_nvidia_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU and its driver (torch may not be there to ask)."""
    if any(Path("/proc/driver/nvidia/gpus").glob("*")):
        return True
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU 0" in listed.stdout


def resolve_flavour(flavour: str) -> str:
    """'cpu' or 'cuda'; 'auto' asks the machine."""
    if flavour == "auto":
        return "cuda" if has_nvidia_gpu() else "cpu"
    return flavour


def flavour_for(device: str) -> str:
    """The flavour that serves on a `hardware.device` ('cpu' or 'cuda')."""
    return "cuda" if device == "cuda" else "cpu"


def pin_file(framework: str, flavour: str) -> Path:
    """The file of pins of a framework.

    Raises
    ------
    EnvironmentFault
        There is none.
    """
    path = PINS / framework / f"{flavour}.txt"
    if not path.is_file():
        raise EnvironmentFault(f"no pins for {framework} on {flavour}: {path} is missing")
    return path


def key(framework: str, flavour: str) -> str:
    """Ten hex digits that change when the pins or the Python release (such as 3.11) do."""
    digest = hashlib.sha256(pin_file(framework, flavour).read_bytes())
    fork = PINS / framework / FORK
    if fork.is_file():
        digest.update(fork.read_bytes())
    digest.update(f"python {sys.version_info.major}.{sys.version_info.minor}".encode())
    return digest.hexdigest()[:10]


def python_of(out_dir: Path) -> Path:
    """The interpreter of an environment."""
    return out_dir / "bin" / "python"


def build(framework: str, flavour: str, out_dir: Path, freeze: Path) -> None:
    """Make the environment `out_dir` from its pins and write its freeze file.

    The freeze file (`pip freeze` of the result) is written last. While it is missing the environment is not
    whole: whatever an interrupted build left in `out_dir` is deleted and built again.

    Raises
    ------
    EnvironmentFault
        A pin cannot be installed here.
    """
    flavour = resolve_flavour(flavour)
    pins = pin_file(framework, flavour)
    freeze.unlink(missing_ok=True)  # from here until the end the environment is not whole
    if out_dir.exists():
        shutil.rmtree(out_dir)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", str(out_dir)], f"cannot make a venv in {out_dir}")
    python = python_of(out_dir)
    # A CPU file is whole and resolves nothing: what it leaves out is left out on purpose.
    exact = ["--no-deps"] if flavour == "cpu" else []
    for requirement in _requirements(pins):
        if requirement.startswith("torch=="):
            install_torch(python, requirement, *exact)
    _run(
        [*_pip(python), "install", "--quiet", *exact, "-r", str(pins)],
        f"cannot install {pins.relative_to(PINS.parent)}",
    )
    frozen = _run([*_pip(python), "freeze"], "pip freeze failed")
    if (PINS / framework / FORK).is_file():
        frozen += check_out(framework, out_dir)
    freeze.parent.mkdir(parents=True, exist_ok=True)
    beside = freeze.with_name(f".{freeze.name}.new")
    beside.write_text(frozen, encoding="utf-8")
    os.replace(beside, freeze)


def fork_folder(out_dir: Path) -> Path:
    """Where a fork lies in its environment."""
    return out_dir / "fork"


def check_out(framework: str, out_dir: Path) -> str:
    """Check a fork out at its pinned commit and put its packages on the environment's path.

    Returns a line for the freeze file.

    Raises
    ------
    EnvironmentFault
        Neither mirror nor repository gives the commit.
    """
    fork: dict[str, Any] = tomllib.loads((PINS / framework / FORK).read_text(encoding="utf-8"))
    commit, source = fork["commit"], mirror_of(framework) or fork["url"]
    folder = fork_folder(out_dir)
    fault = f"cannot get commit {commit[:10]} of {framework} from {source}"
    git = ["git", "-C", str(folder), "-c", "advice.detachedHead=false"]
    if Path(source).expanduser().is_dir():
        # Objects are linked or copied, none is looked at: a mirror may lack files that the sparse checkout leaves out.
        source = str(Path(source).expanduser().resolve())
        _run(["git", "clone", "--quiet", "--no-checkout", "--local", source, str(folder)], fault)
        _run([*git, "cat-file", "-e", f"{commit}^{{commit}}"], f"{fault}: the mirror does not hold it")
    else:
        _run(["git", "init", "--quiet", str(folder)], fault)
        _run([*git, "remote", "add", "origin", source], fault)
        fetch = [*git, "fetch", "--quiet", "--depth", "1", "--filter", "blob:none", "origin", commit]
        _run(fetch, f"{fault} (name a mirror or a local clone in conf/mirrors.toml)")
    _run([*git, "sparse-checkout", "set", "--no-cone", *fork["paths"]], fault)
    _run([*git, "checkout", "--quiet", "--detach", commit], fault)
    if _run([*git, "rev-parse", "HEAD"], fault).strip() != commit:
        raise EnvironmentFault(f"{fault}: another commit was checked out")
    site = Path(sysconfig.get_path("purelib", vars={"base": str(out_dir), "platbase": str(out_dir)}))
    lines = [str((folder / name).absolute()) for name in fork["packages"]]
    (site / "kvstudy_fork.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"# {framework}: {fork['url']} @ {commit}, licence: {fork['license']}\n"


def mirror_of(framework: str) -> str | None:
    """The mirror or local clone of a fork: KVSTUDY_MIRROR_<NAME>, else what conf/mirrors.toml says."""
    named = os.environ.get(f"KVSTUDY_MIRROR_{framework.upper()}")
    path = PINS.parent / "conf" / "mirrors.toml"
    if named or not path.is_file():
        return named
    mirror = tomllib.loads(path.read_text(encoding="utf-8")).get(framework)
    return None if mirror is None else str(mirror)


def install_torch(python: Path, requirement: str, *options: str) -> None:
    """Install exactly one build of torch into the environment of `python`.

    Parameters
    ----------
    python
        The interpreter to install into.
    requirement
        `torch==2.13.0+cpu`, or without `+cpu` for the CUDA build that the package index holds.
    options
        More options of `pip install`, such as `--no-deps`.

    Raises
    ------
    EnvironmentFault
        Neither pip's own configuration nor PyTorch's CPU index gave it.
    """
    install = [*_pip(python), "install", "--quiet"]
    if not requirement.endswith("+cpu"):
        _run([*install, *options, requirement], f"cannot install {requirement}")
        return
    try:
        _run([*install, *options, requirement], "not where pip is configured to look")
    except EnvironmentFault as first:
        print(f"{requirement}: {first}; trying {TORCH_CPU_INDEX}", file=sys.stderr)
        # In two steps: with the index given for its dependencies too, pip would ask it for each of them.
        _run(
            [*install, *IMPATIENT, "--no-deps", "--index-url", TORCH_CPU_INDEX, requirement],
            f"cannot install {requirement}, which pip's configuration does not find either",
        )
        _run([*install, *options, requirement], f"cannot install what {requirement} depends on")


def _requirements(pins: Path) -> list[str]:
    lines = (line.split("#")[0].strip() for line in pins.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def _pip(python: Path) -> list[str]:
    return [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]


def _run(command: Sequence[str], fault: str) -> str:
    """Run a command; answers its standard output, or raises the fault with the command's last word."""
    quiet = os.environ | {"GIT_TERMINAL_PROMPT": "0"}  # a repository that asks for a password is one that is not there
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=quiet)
    except OSError as error:
        raise EnvironmentFault(f"{fault}: {command[0]}: {error.strerror}") from None
    if done.returncode:
        said = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR:")] or said[-1:]
        raise EnvironmentFault(": ".join([fault, *errors[-1:]]))
    return done.stdout


def main(argv: list[str] | None = None) -> int:
    """Entry point; exit code 0, or 2 with one line on stderr when something cannot be installed here."""
    parser = argparse.ArgumentParser(prog="kvstudy environment", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="framework", required=True, metavar="FRAMEWORK|torch")
    for framework in sorted({path.parent.name for path in PINS.glob("*/*.txt")} - {OWN}):
        one = commands.add_parser(framework, help=f"build the environment of {framework}")
        one.add_argument("--flavour", choices=("auto", *FLAVOURS), default="auto")
        one.add_argument("--dir", type=Path, required=True, help="the venv to make")
        one.add_argument("--freeze", type=Path, required=True, help="written when the venv is whole")
    torch = commands.add_parser("torch", help="install the project's pinned torch into an environment")
    torch.add_argument("--flavour", choices=("auto", *FLAVOURS), default="auto")
    torch.add_argument("--python", type=Path, required=True, help="interpreter to install into")
    arguments = parser.parse_args(argv)
    try:
        if arguments.framework == "torch":
            (pinned,) = _requirements(PINS / OWN / "torch.txt")
            build_tag = "+cpu" if resolve_flavour(arguments.flavour) == "cpu" else ""
            install_torch(arguments.python, pinned + build_tag)
        else:
            build(arguments.framework, arguments.flavour, arguments.dir, arguments.freeze)
    except EnvironmentFault as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
