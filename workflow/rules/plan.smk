# The plan: conf/ and --config become typed cells and visits, and files that every later rule takes as input.
# It is made while the Snakefile is parsed (milliseconds when nothing changed), so that the graph knows its jobs.
from pathlib import Path

from snakemake.exceptions import WorkflowError

from kvstudy.grid.compose import ConfigError
from kvstudy.grid.plan import model_id, overrides_from_snakemake, plan_study
from kvstudy.grid.store import Layout

RESULTS = config.get("results", "results")
LAYOUT = Layout(Path(RESULTS))

try:
    PLAN = plan_study(
        Path(workflow.basedir),
        overrides_from_snakemake(config),
        Path(RESULTS),
        gpus=workflow.global_resources.get("gpu"),
    )
except ConfigError as error:
    raise WorkflowError(f"invalid study: {error}") from None

STUDY = PLAN.name
VISITS = {visit.id: visit for visit in PLAN.visits}
VISIT_OF_CELL = {cell.cell_id: visit for visit in PLAN.visits for cell in visit.cells}


wildcard_constraints:
    visit="[a-z0-9][a-z0-9._-]*-[0-9a-f]{10}",
    cell="[a-z0-9][a-z0-9._-]*-[0-9a-f]{10}",
    model="[a-z0-9][a-z0-9.-]*-[0-9a-f]{10}",


# Planning, preparing and reporting are short: they run where snakemake runs, never as cluster jobs.
localrules:
    all,
    figures,
    tables,
    report,
    track,
    model,
    environment,
    analyse,
    figure,
    table,
    document,
    sync,
