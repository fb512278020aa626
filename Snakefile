# kvstudy: which KV-cache strategy should serve my model, on my hardware, under my load?
#
#   snakemake --cores all                                         study=quick, from configuration to report
#   snakemake --cores all --config study=paper --resources gpu=4  another study, four GPUs
#   snakemake --cores all --config 'overrides=["load.rate=1,2"]'  any Hydra override
#   snakemake --cores all -- figures | tables | report | track    parts of it
#
# Each stage is one file of rules, and each rule one command of `kvstudy`, which works without snakemake too.


include: "workflow/rules/plan.smk"
include: "workflow/rules/models.smk"
include: "workflow/rules/environments.smk"
include: "workflow/rules/measure.smk"
include: "workflow/rules/quality.smk"
include: "workflow/rules/analyse.smk"
include: "workflow/rules/report.smk"
include: "workflow/rules/track.smk"


# A study's question and answer open its report, once there is one.
OPENING = Path(STUDY_DIR, "opening.rst").resolve()


report: str(OPENING) if OPENING.is_file() else "reports/workflow.rst"


rule all:
    default_target: True
    input:
        # Markers are named though the report needs them anyway: snakemake does not make a missing file again
        # that stands between two that are there.
        rules.analyse.input.visits,
        rules.analyse.input.quality,
        rules.report.input,
        rules.track.input,
