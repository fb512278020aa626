"""The `kvstudy` command: every stage of the workflow, on the same files, without Snakemake.

    kvstudy grid study=quick            the cells of a study, and what is left out
    kvstudy measure study=quick         measure what is missing (kvstudy measure --visit FILE: one visit)
    kvstudy quality study=quick         score what is missing: what each budget costs in quality
    kvstudy status study=quick          what is done, running, failed and left, and when it will end
    kvstudy analyse | track | report study=quick
    kvstudy serve framework=full model=smollm2-135m-instruct --port 8000
    kvstudy recommend --cells results/quick/cells.parquet --model NAME --context N --rate R --kv-memory MIB
    kvstudy compare-implementations study=forks
    kvstudy prepare | skew | convert | environment | mock | import

A stage is called either with a study (`study=NAME` and any Hydra overrides) or with the files that the
workflow passes it. Exit codes: 0 done, 2 a fault of the input or the installation (one line says what to do),
130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstudy.arguments import port
from kvstudy.grid.compose import ConfigError
from kvstudy.grid.estimate import estimate
from kvstudy.grid.plan import Plan, make_plan, model_id, plan_study, project_root, write_plan
from kvstudy.grid.schema import Deployment
from kvstudy.grid.store import Layout, cannot_write, is_whole

INTERRUPTED = 130

Main = Callable[[list[str]], int | None]


def _stage(module: str) -> Main:
    """A stage's own `main`, imported when it is called: `kvstudy grid` must not wait for torch."""
    return lambda argv: importlib.import_module(module).main(argv)


def _study_parser(command: str, what: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"kvstudy {command}", description=what)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="study=NAME and Hydra overrides")
    parser.add_argument("--results", type=Path, default=Path("results"), help="default: ./results")
    return parser


def _plan(options: argparse.Namespace) -> Plan:
    return plan_study(project_root(), list(options.overrides), options.results)


def grid(argv: list[str]) -> int:
    """Print a study's cells as a table, and what was left out and why."""
    parser = _study_parser("grid", "The cells of a study, and what was left out and why.")
    parser.add_argument("--json", action="store_true", help="print plan.json instead")
    options = parser.parse_intermixed_args(argv)
    plan = _plan(options)
    layout = Layout(options.results)
    if options.json:
        print(layout.plan(plan.name).read_text(), end="")
        return 0
    rows = [("cell", "visit", "state")]
    for priority, visit in enumerate(plan.visits, start=1):
        for cell in visit.cells:
            state = "measured" if is_whole(layout.cell(cell.cell_id)) else "to do"
            rows.append((cell.cell_id, str(priority), state))
    measured = sum(row[2] == "measured" for row in rows)
    for asked in plan.quality:
        for one in asked.cells:
            rows.append((one.cell_id, "-", "scored" if is_whole(layout.cell(one.cell_id)) else "to do"))
    width = max(len(row[0]) for row in rows)
    for name, number, state in rows:
        print(f"{name:{width}}  {number:>5}  {state}")
    print(f"\n{plan.name}: {len(plan.cells)} cells in {len(plan.visits)} visits, {measured} measured")
    if plan.quality:
        scored = sum(row[2] == "scored" for row in rows)
        print(f"quality: {sum(len(asked.cells) for asked in plan.quality)} cells, {scored} scored")
    done = frozenset(name for name, _, state in rows if state in ("measured", "scored"))
    print(estimate(plan, done).text(max((cell.hardware.gpus for cell in plan.cells), default=0)))
    reasons: dict[str, list[str]] = {}
    for entry in plan.left_out:
        reasons.setdefault(entry.reason, []).append(entry.cell)
    for reason, names in reasons.items():
        print(f"left out, {len(names)}: {reason}")
        for name in names[:20]:
            print(f"  {name}")
        if len(names) > 20:
            print(f"  and {len(names) - 20} more")
    return 0


def prepare(argv: list[str]) -> int | None:
    """Make a model's folder if it is not there, and copy its card beside it."""
    parser = argparse.ArgumentParser(prog="kvstudy prepare", description=prepare.__doc__)
    parser.add_argument("--model", type=Path, required=True, help="JSON of the model, as the plan wrote it")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--card", type=Path, help="where to copy model.json")
    options = parser.parse_args(argv)
    if not (options.out / "model.json").is_file():
        code = _stage("kvstudy.models.prepare")(["--model", str(options.model), "--out", str(options.out)])
        if code:
            return code
    if options.card:
        shutil.copyfile(options.out / "model.json", options.card)
    return 0


def _ensure_ready(deployment: Deployment, results: Path) -> list[str]:
    """Prepare the model and the environment of a deployment; the extra arguments its visit needs."""
    from kvstudy.frameworks import environments

    layout = Layout(results)
    name = model_id(deployment)
    code = prepare(
        [
            *("--model", str(results / "plan" / "models" / f"{name}.json")),
            *("--out", str(layout.model(name)), "--card", str(results / "models" / f"{name}.json")),
        ]
    )
    if code:
        raise SystemExit(code)
    if deployment.framework.skewed:
        code = _stage("kvstudy.engine.skew")(["--model", str(layout.model(name)), "--out", str(layout.skew(name))])
        if code:
            raise SystemExit(code)
    converted = layout.converted(name)
    card = converted.with_name(f"{converted.name}.json")
    if deployment.framework.converted and not card.is_file():
        arguments = ["--model", str(layout.model(name)), "--out", str(converted), "--card", str(card)]
        code = _stage("kvstudy.models.flexgen")(arguments)
        if code:
            raise SystemExit(code)
    framework = deployment.framework.environment
    if framework is None:
        return []
    flavour = deployment.hardware.device
    folder = layout.environment(f"{framework}-{flavour}-{environments.key(framework, flavour)}")
    freeze = folder.with_name(folder.name + ".txt")
    if not freeze.is_file():
        code = environments.main([framework, "--flavour", flavour, "--dir", str(folder), "--freeze", str(freeze)])
        if code:
            raise SystemExit(code)
    return ["--freeze", str(freeze)]


def measure(argv: list[str]) -> int | None:
    """Measure one visit (--visit FILE), or every visit of a study that is not done."""
    visit_main = _stage("kvstudy.measure.command")
    if any(arg == "--visit" or arg.startswith("--visit=") for arg in argv):
        return visit_main(argv)
    options = _study_parser("measure", "Measure every cell of a study that is not whole.").parse_intermixed_args(argv)
    plan = _plan(options)
    layout = Layout(options.results)
    worst = 0
    for visit in plan.visits:
        if layout.marker(plan.name, visit.id).is_file():
            continue
        freeze = _ensure_ready(visit.deployment, options.results)
        code = visit_main(
            [
                *("--visit", str(layout.visit(plan.name, visit.id))),
                *("--results", str(options.results)),
                *("--marker", str(layout.marker(plan.name, visit.id)), *freeze),
                *("--log", str(options.results / "logs" / "visits" / f"{visit.id}.log")),
            ]
        )
        worst = max(worst, code or 0)
        if worst == INTERRUPTED:
            break
    return worst


def quality(argv: list[str]) -> int | None:
    """Score one quality visit (--visit FILE), or every one of a study that is not done."""
    quality_main = _stage("kvstudy.quality.run")
    if any(arg == "--visit" or arg.startswith("--visit=") for arg in argv):
        return quality_main(argv)
    options = _study_parser("quality", "Score every quality cell of a study that is not whole.").parse_intermixed_args(
        argv
    )
    plan = _plan(options)
    layout = Layout(options.results)
    if not plan.quality:
        print(f"{plan.name} asks for no quality: name one, quality=NAME (conf/quality)")
    worst = 0
    for visit in plan.quality:
        marker = layout.quality_marker(plan.name, visit.id)
        if marker.is_file():
            continue
        freeze: list[str] = []
        for cell in visit.cells:
            freeze = _ensure_ready(cell.deployment, options.results) or freeze
        where = ["--visit", str(layout.quality_visit(plan.name, visit.id)), "--results", str(options.results)]
        worst = max(worst, quality_main([*where, "--marker", str(marker), *freeze]) or 0)
        if worst == INTERRUPTED:
            break
    return worst


def serve(argv: list[str]) -> int | None:
    """Bring one deployment up in the foreground: --visit FILE, or overrides that leave one."""
    serve_main = _stage("kvstudy.frameworks.serve")
    if any(arg == "--visit" or arg.startswith("--visit=") for arg in argv):
        return serve_main(argv)
    parser = _study_parser("serve", "Bring one deployment up and leave it running until Ctrl-C.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=port, default=8000)
    options = parser.parse_intermixed_args(argv)
    plan = make_plan(project_root() / "conf", [*options.overrides, "study.name=serve"])
    write_plan(plan, options.results)
    deployments = {visit.deployment.id: visit for visit in plan.visits}
    if len(deployments) > 1:
        names = ", ".join(sorted(visit.deployment.slug for visit in deployments.values()))
        raise ConfigError(f"one deployment at a time, these overrides leave {len(deployments)}: {names}")
    (visit,) = deployments.values()
    freeze = _ensure_ready(visit.deployment, options.results)
    path = Layout(options.results).visit(plan.name, visit.id)
    where = ["--host", options.host, "--port", str(options.port)]
    return serve_main(["--visit", str(path), "--results", str(options.results), *freeze, *where])


def _with_study(module: str, command: str, out: Callable[[Layout, str], Path]) -> Main:
    """A stage that reads the plan: called with --plan by the workflow, or with a study by a person."""

    def run(argv: list[str]) -> int | None:
        if any(arg == "--plan" or arg.startswith("--plan=") for arg in argv):
            return _stage(module)(argv)
        if "--help" in argv or "-h" in argv:
            print(f"usage: kvstudy {command} study=NAME [KEY=VALUE ...] [--results DIR]\n\nAs the workflow calls it:\n")
        overrides = [arg for arg in argv if "=" in arg and not arg.startswith("--")]
        rest = [arg for arg in argv if arg not in overrides]
        parser = argparse.ArgumentParser(prog=f"kvstudy {command}", add_help=False)
        parser.add_argument("--results", type=Path, default=Path("results"))
        options, rest = parser.parse_known_args(rest)
        plan = plan_study(project_root(), overrides, options.results)
        layout = Layout(options.results)
        target = out(layout, plan.name)
        return _stage(module)(
            [
                *("--plan", str(layout.plan(plan.name)), "--results", str(options.results)),
                *("--out", str(target), *rest),
            ]
        )

    return run


def compare_implementations(argv: list[str]) -> int | None:
    """The authors' forks of a study against our engine: prepare what they need, then compare."""
    module = "kvstudy.measure.implementations"
    if any(arg == "--plan" or arg.startswith("--plan=") for arg in argv) or {"-h", "--help"} & set(argv):
        return _stage(module)(argv)
    parser = _study_parser("compare-implementations", "The authors' forks against our engine, on the same prompts.")
    options, rest = parser.parse_known_intermixed_args(argv)
    plan = _plan(options)
    for visit in plan.visits:
        _ensure_ready(visit.deployment, options.results)
    layout = Layout(options.results)
    out = layout.study(plan.name) / "implementations.json"
    files = ["--plan", str(layout.plan(plan.name)), "--results", str(options.results), "--out", str(out)]
    return _stage(module)([*files, *rest])


def report(argv: list[str]) -> int | None:
    """Make the PDF (workflow: --plan ...), or everything a reader gets of a study from the cells there are."""
    document = _stage("kvstudy.report.document")
    if any(arg == "--plan" or arg.startswith("--plan=") for arg in argv):
        return document(argv)
    parser = _study_parser("report", "Figures, tables and PDF of a study, from the cells that are there.")
    parser.add_argument("--html", action="store_true", help="also Snakemake's HTML report")
    parser.add_argument("--only-html", action="store_true", help="only that (figures and PDF are there)")
    options = parser.parse_intermixed_args(argv)
    plan = _plan(options)
    layout = Layout(options.results)
    folder = layout.study(plan.name)
    files = ["--plan", str(layout.plan(plan.name)), "--results", str(options.results)]
    view = ["--study-dir", str(folder), "--results", str(options.results)]
    if not options.only_html:
        template = str(project_root() / "reports" / "study.typ")
        steps: list[tuple[str, list[str]]] = [
            ("kvstudy.analysis.run", [*files, "--out", str(folder / "cells.parquet")]),
            ("kvstudy.report.figures", ["all", *view]),
            ("kvstudy.report.tables", view),
            (
                "kvstudy.report.document",
                [*view, *files[:2], "--template", template, "--out", str(folder / "report.pdf")],
            ),
        ]
        for module, arguments in steps:
            code = _stage(module)(arguments)
            if code:
                return code
    if options.html or options.only_html:
        _html(options.overrides, options.results, folder / "report.html")
    for what, path in (("PDF", folder / "report.pdf"), ("HTML report", folder / "report.html")):
        if path.is_file():
            print(f"{what:12} {path}")
    print(f"{'MLflow':12} make ui, then http://127.0.0.1:5000")
    return 0


def _html(overrides: Sequence[str], results: Path, out: Path) -> None:
    """Snakemake's own report of the finished study."""
    config = [text for text in overrides if "." not in text.partition("=")[0]]
    dotted = [text for text in overrides if text not in config]
    arguments = ["snakemake", "--cores", "1", "--report", str(out), "--config", f"results={results}", *config]
    if dotted:
        arguments.append(f"overrides={json.dumps(dotted)}")
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=project_root(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ConfigError(f"no HTML report: {(done.stderr.strip() or done.stdout.strip()).splitlines()[-1]}")


COMMANDS: dict[str, tuple[Main, str]] = {
    "grid": (grid, "print the cells of a study, and what is left out and why"),
    "prepare": (prepare, "make a model's local folder"),
    "skew": (_stage("kvstudy.engine.skew"), "make InfiniGen's skewing matrices of a model"),
    "convert": (_stage("kvstudy.models.flexgen"), "an OPT model in the format of the authors' forks"),
    "environment": (_stage("kvstudy.frameworks.environments"), "build a framework's environment"),
    "serve": (serve, "bring one deployment up and leave it running"),
    "measure": (measure, "measure what is missing"),
    "quality": (quality, "score what is missing: perplexity, divergence, retention, tasks"),
    "status": (_stage("kvstudy.measure.progress"), "what of a study is done, running, failed and left"),
    "analyse": (
        _with_study("kvstudy.analysis.run", "analyse", lambda lay, name: lay.study(name) / "cells.parquet"),
        "cells -> one tidy table",
    ),
    "figure": (_stage("kvstudy.report.figures"), "draw one figure"),
    "table": (_stage("kvstudy.report.tables"), "write one table"),
    "paper": (_stage("kvstudy.report.paper"), "the LaTeX paper of a study's figures and tables"),
    "report": (report, "figures, tables, PDF and HTML"),
    "track": (
        _with_study("kvstudy.tracking.sync", "track", lambda lay, name: lay.root / "tracking" / f"{name}.json"),
        "reconcile MLflow with the store",
    ),
    "claims": (_stage("kvstudy.analysis.claims"), "decide the claims of the field from measured cells"),
    "recommend": (_stage("kvstudy.analysis.recommend"), "which deployment to use, from measured cells"),
    "compare-implementations": (compare_implementations, "the authors' forks against our engine, on the same prompts"),
    "import": (_stage("kvstudy.measure.importers"), "another load generator's results, by our definitions"),
    "mock": (_stage("kvstudy.load.mock"), "a scripted server to try a client on"),
}


def _refuse_files(arguments: Sequence[str]) -> None:
    """Raise ConfigError where `--results` names what is no folder, whichever command takes it."""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        path = Path(value if equals else following)
        if name == "--results" and path.exists() and not path.is_dir():
            raise ConfigError(f"--results {path} is a file, not a folder")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `kvstudy` command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        print("\ncommands:")
        for name, (_, what) in COMMANDS.items():
            print(f"  {name:12} {what}")
        return 0
    if arguments[0] == "--version":
        from kvstudy import __version__

        print(f"kvstudy {__version__}")
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        print(f"kvstudy: unknown command '{command}'; choices: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        _refuse_files(rest)
        return COMMANDS[command][0](rest) or 0
    except ConfigError as error:
        print(f"kvstudy: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvstudy: interrupted; finished cells are kept", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return 0
    except OSError as error:
        print(f"kvstudy: {cannot_write(error, Path('results'))}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
