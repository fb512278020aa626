"""Secrets of the environment reach no file, no output and no other program; archives and configurations are data."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from fabricate import Spec, fabricate
from test_lost import during
from test_workflow import ENVIRONMENT, checkout_at, kvstudy, one_line
from trial import Zygote, whole_cells

from kvstudy.frameworks import serve
from kvstudy.grid import secrets
from kvstudy.grid.plan import STUDY_NAME
from kvstudy.grid.schema import Model, Vllm, Workload
from kvstudy.models import prepare
from kvstudy.tracking import mlflow_sync

SECRETS = {
    "HF_TOKEN": "hf_OpenSesame0123456789",
    "MLFLOW_TRACKING_PASSWORD": "correct horse battery",
    "KVSTUDY_API_KEY": "key-of-the-server-42",
    "MLFLOW_TRACKING_URI": "http://me:p%40ssw0rd-of-tracking@127.0.0.1:9",
    "PIP_INDEX_URL": "https://robot:index-password@pypi.example/simple",
}
SOURCES = sorted((Path(__file__).parents[2] / "src").rglob("*.py"))
VALUES = [
    *(SECRETS[name] for name in list(SECRETS)[:3]),
    "p%40ssw0rd-of-tracking",
    "p@ssw0rd-of-tracking",
    "index-password",
]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


def held(text: str) -> list[str]:
    return [value for value in VALUES if value in text]


def test_what_is_a_secret() -> None:
    kept = secrets.without(
        os.environ | {"TOKENIZERS_PARALLELISM": "false", "AWS_SECRET_ACCESS_KEY": "x", "TOKENS": "1"}
    )
    assert not set(SECRETS) & set(kept) and "AWS_SECRET_ACCESS_KEY" not in kept
    assert kept["TOKENIZERS_PARALLELISM"] == "false" and kept["TOKENS"] == "1" and "PATH" in kept
    said = secrets.redact(f"failed: {' '.join(VALUES)} at postgresql://a:b-c-d@host/x and a:b")
    assert not held(said) and "postgresql://a:***@host/x and a:b" in said


def test_a_measurement_writes_none_and_its_server_has_none(zygote: Zygote, results: Path) -> None:
    """Even where the server prints what it should not, and dies of it."""
    seen: list[str] = []

    def look(pid: int) -> None:
        for name in ("environ", "cmdline"):
            seen.append(Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace"))

    script = {"first_s": 0.01, "die_after": 12, "die_message": "Error: leaked " + " ".join(VALUES)}
    watching = during(results, look)
    ended = zygote.run(results, env=SECRETS, load={"rate": 10, "duration_s": 2.0}, scripts=[script, {"first_s": 0.01}])
    watching.join()
    assert ended.code == 0 and not held(ended.said), ended.said
    assert len(seen) == 2 and not any(map(held, seen[:1]))
    for path in (path for path in results.rglob("*") if path.is_file()):
        assert not held(path.read_bytes().decode(errors="replace")), path
    assert any("leaked ***" in (results / "store" / name / "log.txt").read_text() for name in whole_cells(results))


def test_tracking_says_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    plan = fabricate(tmp_path, "study", [Spec()])
    out = tmp_path / "tracking" / "study.json"
    code = mlflow_sync.main(["--plan", str(plan), "--results", str(tmp_path), "--out", str(out)])
    said = capsys.readouterr()
    assert code == mlflow_sync.UNREACHABLE and not held(said.out + said.err) and "catches up" in said.err


def test_a_configuration_cannot_take_one_along(checkout: Path, tmp_path: Path) -> None:
    work = checkout_at(tmp_path / "work", checkout)
    (work / "conf" / "study" / "tiny.yaml").write_text("name: tiny\ntitle: ${oc.env:HF_TOKEN}\nquestion: y\n")
    run = kvstudy(work, "grid", "study=tiny", env=ENVIRONMENT | SECRETS)
    one_line(run, "secret of the environment")
    assert not held(run.stdout + run.stderr) and not (work / "results").exists()


def test_no_option_of_a_command_takes_one() -> None:
    """Everybody on a machine can read command lines."""
    options = [
        str(argument.value)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument")
        for argument in node.args
        if isinstance(argument, ast.Constant)
    ]
    assert len(options) > 50 and {"--visit", "--port", "--uri"} <= set(options)
    assert not [name for name in options if secrets._NAME.search(name.strip("-").replace("-", "_"))]


@pytest.mark.parametrize(
    "argument", ["--api-key=x", "--hf_token=x", "--trust-remote-code", "--middleware=a.b", "--config=x"]
)
def test_options_of_vllm_that_run_code_or_hold_secrets_are_refused(argument: str) -> None:
    with pytest.raises(ValueError, match=r"refused|environment"):
        Vllm(extra_args=(argument,))
    assert Vllm(extra_args=("--swap-space", "0")).extra_args


def test_serving_to_others_asks_for_a_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVSTUDY_API_KEY")
    for host in ("0.0.0.0", "192.168.0.1", "example.org", "::"):
        assert serve.main(["--visit", str(tmp_path / "none.json"), "--host", host]) == 2
        assert "KVSTUDY_API_KEY" in capsys.readouterr().err
    monkeypatch.setenv("KVSTUDY_API_KEY", SECRETS["KVSTUDY_API_KEY"])
    assert serve.main(["--visit", str(tmp_path / "none.json"), "--host", "0.0.0.0"]) == 2
    assert "no visit" in capsys.readouterr().err
    assert serve._is_loopback("127.0.0.1") and serve._is_loopback("::1") and serve._is_loopback("localhost")


# --- data, never code -----------------------------------------------------------------------------

FORBIDDEN = {
    "eval": "runs text",
    "exec": "runs text",
    "pickle": "runs what it reads",
    "marshal": "runs what it reads",
    "shelve": "runs what it reads",
    "dill": "runs what it reads",
    "joblib": "runs what it reads",
    "os.system": "a shell",
    "yaml.load": "makes objects: safe_load",
    "yaml.unsafe_load": "makes objects: safe_load",
    "yaml.full_load": "makes objects: safe_load",
    "tarfile.open": "may write outside its folder: say why not, here",
    "shutil.unpack_archive": "may write outside its folder",
    "hydra.utils.instantiate": "calls what a configuration names",
    "torch.load": "unpickles: safetensors, or weights_only=True and an exception here",
    "pd.read_pickle": "unpickles",
    "pandas.read_pickle": "unpickles",
}


def test_no_module_runs_what_it_reads() -> None:
    assert len(SOURCES) > 80
    for path, node in ((file, node) for file in SOURCES for node in ast.walk(ast.parse(file.read_text("utf-8")))):
        names: list[str] = []
        if isinstance(node, ast.Call):
            names.append(ast.unparse(node.func))
            for keyword in node.keywords:
                wrong = ast.unparse(keyword)
                assert wrong not in ("shell=True", "trust_remote_code=True", "allow_pickle=True"), (path, wrong)
        elif isinstance(node, ast.Import):
            names += [item.name.partition(".")[0] for item in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append((node.module or "").partition(".")[0])
        for name in names:
            assert name not in FORBIDDEN, f"{path}:{node.lineno}: {name} {FORBIDDEN[name]}"


def test_every_path_in_a_rule_is_quoted() -> None:
    """A results folder may be called anything; unquoted are words that the plan has checked."""
    checked = {"wildcards.framework", "wildcards.flavour", "resources.attempt", "params.only"}
    rules = sorted((Path(__file__).parents[2] / "workflow" / "rules").glob("*.smk"))
    shells = [text for path in rules for text in re.findall(r"shell:\s+((?:\"[^\"]*\"\s+)+)", path.read_text())]
    assert len(shells) > 8
    for shell in shells:
        bare = {name for name in re.findall(r"\{([^{}]+)\}", shell) if not name.endswith(":q")}
        assert bare <= checked, shell


@pytest.mark.parametrize("name", ["../up", "/abs", "a/b", "", ".", "a b", "$(id)", "a\n"])
def test_no_name_leads_out_of_the_results(checkout: Path, name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        Model(name=name, source="folder", path="x", max_model_len=64)
    workload = yaml.safe_load((checkout / "conf" / "workload" / "tiny.yaml").read_text())
    assert Workload.model_validate(workload)
    with pytest.raises(ValueError, match="name"):
        Workload.model_validate(workload | {"name": name})
    assert not STUDY_NAME.match(name)


def test_a_model_folder_of_others_runs_nothing(tmp_path: Path) -> None:
    """Code that a folder brings along is neither run nor copied, and pickled weights are read as weights alone."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    owned = tmp_path / "owned"
    evil = f"from pathlib import Path\nPath({str(owned)!r}).touch()\nclass Config: pass\nclass Model: pass\n"
    (folder / "evil.py").write_text(evil)
    maps = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": "evil.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": maps}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": maps, "tokenizer_class": "evil.Model"}))
    pickled = f"import os, pickle\nclass E:\n def __reduce__(self): return (os.system, ('touch {owned}',))\n"
    code = pickled + f"pickle.dump(E(), open({str(folder / 'pytorch_model.bin')!r}, 'wb'))"
    subprocess.run([sys.executable, "-c", code], check=True)
    model = Model(name="theirs", source="folder", path=str(folder), max_model_len=64)
    described = tmp_path / "model.json"
    described.write_text(model.model_dump_json())
    assert prepare.main(["--model", str(described), "--out", str(tmp_path / "out")]) == 2
    assert not owned.exists() and not (tmp_path / "out").exists()
    (folder / "config.json").write_text(json.dumps({"model_type": "opt", "auto_map": maps}))
    assert prepare.main(["--model", str(described), "--out", str(tmp_path / "out")]) == 2
    assert not owned.exists() and not list(tmp_path.glob("out/*.py"))


def test_a_wheel_of_others_stays_in_its_folder(tmp_path: Path) -> None:
    """zipfile drops what would lead out of the folder: the property that reading a model out of a wheel rests on."""
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("../out.txt", "/abs.txt", "a/../../b.txt", "in.txt"):
            archive.writestr(name, "x")
    folder = tmp_path / "deep" / "folder"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    assert all(path.is_relative_to(folder) for path in tmp_path.rglob("*.txt")) and not Path("/abs.txt").exists()
