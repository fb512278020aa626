# The plan: conf/ and --config become typed cells and visits, and files that every later rule takes as input.
# It is made while the Snakefile is parsed (milliseconds when nothing changed), so that the graph knows its jobs.
from pathlib import Path

from snakemake.exceptions import WorkflowError

from kvstudy.frameworks.environments import key as environment_key
from kvstudy.grid.compose import ConfigError
from kvstudy.grid import resources as needs
from kvstudy.grid.plan import (
    model_id,
    overrides_from_snakemake,
    plan_study,
    planned_study,
)
from kvstudy.grid.store import Layout, cannot_write, hold

RESULTS = config.get("results", "results")
gpus = workflow.global_resources.get("gpu")
LAYOUT = Layout(Path(RESULTS))

try:
    overrides = overrides_from_snakemake(config)
    # Snakemake starts itself again inside a cluster's job. The plan is then the one that was made where the study was
    # started: this node has other cores, and two jobs must not write one plan.
    PLAN = None if workflow.is_main_process else planned_study(overrides, Path(RESULTS))
    if PLAN is None:
        PLAN = plan_study(
            Path(workflow.basedir),
            overrides,
            Path(RESULTS),
            gpus=getattr(gpus, "value", gpus),
        )
except ConfigError as error:
    # Not a WorkflowError: that wraps the line in file names and a trace.
    raise SystemExit(f"kvstudy: {error}") from None
except OSError as error:
    raise SystemExit(f"kvstudy: {cannot_write(error, Path(RESULTS))}") from None

STUDY = PLAN.name
VISITS = {visit.id: visit for visit in PLAN.visits}
QUALITY = {visit.id: visit for visit in PLAN.quality}
VISIT_OF_CELL = {cell.cell_id: visit for visit in PLAN.visits for cell in visit.cells}


HELD = []  # what a hook binds is gone when it returns


onstart:
    # Held until this process ends, however it does: snakemake's own lock outlives a killed one (profile: nolock),
    # and knows only of those that were started in this folder.
    if workflow.is_main_process:
        HELD.append(hold(LAYOUT.lock, f"snakemake, study {STUDY}"))
        if isinstance(HELD[0], str):
            raise SystemExit(f"kvstudy: {HELD[0]}")


wildcard_constraints:
    visit="[a-z0-9][a-z0-9._-]*-[0-9a-f]{10}",
    cell="[a-z0-9][a-z0-9._-]*-[0-9a-f]{10}",
    quality="[a-z0-9][a-z0-9._-]*-[0-9a-f]{10}",
    model="[a-z0-9][a-z0-9.-]*-[0-9a-f]{10}",


# Planning, preparing and reporting are short: they run where snakemake runs, never as cluster jobs.
localrules:
    all,
    figures,
    tables,
    report,
    track,
    model,
    skew,
    convert,
    environment,
    analyse,
    document,
    paper,
    sync,


def results_folder(wildcards):
    """The results folder, for commands that read more of it than their inputs."""
    return RESULTS


def study_folder(wildcards):
    """The folder of the study's view."""
    return f"{RESULTS}/{STUDY}"


def environment_freeze(deployment):
    """The freeze file of a deployment's environment; none when it runs in the project's own."""
    name = deployment.framework.environment
    if name is None:
        return []
    flavour = deployment.hardware.device
    return [
        f"{RESULTS}/environments/{name}-{flavour}-{environment_key(name, flavour)}.txt"
    ]


def visit_of(wildcards):
    """The visit that a job's wildcards name."""
    if hasattr(wildcards, "cell"):
        if wildcards.cell not in VISIT_OF_CELL:
            raise WorkflowError(
                f"no cell {wildcards.cell} in study {STUDY}: `kvstudy grid study={STUDY}` lists them"
            )
        return VISIT_OF_CELL[wildcards.cell]
    return VISITS[wildcards.visit]


def visit_file(wildcards):
    """The resolved description that the job reads."""
    return str(LAYOUT.visit(STUDY, visit_of(wildcards).id))


def model_card(wildcards):
    """The card of the model that the visit serves."""
    return f"{RESULTS}/models/{model_id(visit_of(wildcards).deployment)}.json"


def skew_file(wildcards):
    """InfiniGen's skewing matrices of the visit's model; none for other frameworks."""
    deployment = visit_of(wildcards).deployment
    return (
        [str(LAYOUT.skew(model_id(deployment)))] if deployment.framework.skewed else []
    )


def converted_file(wildcards):
    """The visit's model in the format of the authors' forks; none for other frameworks."""
    deployment = visit_of(wildcards).deployment
    if not deployment.framework.converted:
        return []
    return [f"{LAYOUT.converted(model_id(deployment))}.json"]


def freeze_file(wildcards):
    """The freeze file of the visit's environment, if it has one of its own."""
    return environment_freeze(visit_of(wildcards).deployment)


def visit_cells(wildcards):
    """Ids of the visit's cells: a new one makes the job run again (trigger `params`)."""
    return sorted(cell.cell_id for cell in visit_of(wildcards).cells)


def cell_alone(wildcards):
    """The one cell that the job measures."""
    return [wildcards.cell]


def visit_priority(wildcards):
    """Position in the seeded order of visits, so that drift is no framework's advantage."""
    return visit_of(wildcards).priority


def visit_gpus(wildcards):
    """GPUs that the visit holds."""
    return visit_of(wildcards).gpus


def all_cores(wildcards):
    """Cores that Snakemake may use here; 1 where a cluster has them."""
    try:
        return workflow.cores or 1
    except WorkflowError:
        return 1


def visit_threads(wildcards):
    """Without a GPU a measurement has the machine to itself."""
    visit = visit_of(wildcards)
    return 1 if visit.gpus else max(all_cores(wildcards), needs.cpus(visit))


# What follows is read by cluster executors only.
def visit_cpus(wildcards):
    """CPUs of a cluster's job."""
    return needs.cpus(visit_of(wildcards))


def visit_memory(wildcards, attempt):
    """Memory of a cluster's job in MiB, by the model's size; more on a retry."""
    return needs.host_memory_mib(visit_of(wildcards).deployment, attempt)


def visit_minutes(wildcards, attempt):
    """Time limit of a cluster's job in minutes; more on a retry."""
    return needs.minutes(visit_of(wildcards), attempt)


def visit_partition(wildcards):
    """The partition that conf/hardware names, if any."""
    return visit_of(wildcards).deployment.hardware.cluster.partition


def visit_gpu_model(wildcards):
    """The kind of GPU that conf/hardware names, if any."""
    return visit_of(wildcards).deployment.hardware.cluster.gpu_model


def visit_extra(wildcards):
    """Without a GPU a measurement has the node to itself."""
    return None if visit_of(wildcards).gpus else "--exclusive"


def visit_attempt(wildcards, attempt):
    """How often the job has been tried, this time included."""
    return attempt


def quality_cells(wildcards):
    """The cells that a quality visit scores."""
    return QUALITY[wildcards.quality].cells


def quality_visit(wildcards):
    """The resolved description that the job reads."""
    return str(LAYOUT.quality_visit(STUDY, wildcards.quality))


def quality_models(wildcards):
    """Cards of the models that the visit's deployments serve."""
    return sorted(
        {f"{RESULTS}/models/{model_id(cell)}.json" for cell in quality_cells(wildcards)}
    )


def quality_skews(wildcards):
    """Skewing matrices of those models whose deployments need them."""
    cells = [cell for cell in quality_cells(wildcards) if cell.framework.skewed]
    return sorted({str(LAYOUT.skew(model_id(cell))) for cell in cells})


def quality_freezes(wildcards):
    """The freeze file of the environment of a framework that has one of its own."""
    cells = quality_cells(wildcards)
    return sorted(
        {path for cell in cells for path in environment_freeze(cell.deployment)}
    )


def quality_ids(wildcards):
    """Ids of the visit's cells: a new one makes the job run again (trigger `params`)."""
    return sorted(cell.cell_id for cell in quality_cells(wildcards))
