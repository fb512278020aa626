# Quality: a job scores cells that share their items, all deployments of our engine together, vLLM by itself.
# As with measuring, cells lie in results/store and are nobody's output; the output is a marker.


def quality_cells(wildcards):
    """The cells that a quality visit scores."""
    return QUALITY[wildcards.quality].cells


rule quality:
    input:
        visit=lambda wildcards: ancient(
            str(LAYOUT.quality_visit(STUDY, wildcards.quality))
        ),
        model=lambda wildcards: ancient(
            of_deployments(
                quality_cells(wildcards),
                lambda deployment: [f"{RESULTS}/models/{model_id(deployment)}.json"],
            )
        ),
        skew=lambda wildcards: ancient(
            of_deployments(
                quality_cells(wildcards),
                lambda deployment: (
                    [str(LAYOUT.skew(model_id(deployment)))]
                    if deployment.framework.skewed
                    else []
                ),
            )
        ),
        freeze=lambda wildcards: ancient(
            of_deployments(quality_cells(wildcards), environment_freeze)
        ),
    output:
        f"{RESULTS}/{STUDY}/quality/{{quality}}.json",
    log:
        f"{RESULTS}/logs/quality/{{quality}}.log",
    # As a measurement, it has the machine to itself: it would disturb one.
    threads: workflow.cores or 1
    resources:
        gpu=lambda wildcards: max(cell.devices for cell in quality_cells(wildcards)),
        mem_mb=lambda wildcards, attempt: max(
            needs.host_memory_mib(cell, attempt) for cell in quality_cells(wildcards)
        ),
        runtime=lambda wildcards, attempt: 240 * attempt,
        slurm_partition=lambda wildcards: quality_cells(wildcards)[
            0
        ].hardware.cluster.partition,
    params:
        cells=lambda wildcards: sorted(
            cell.cell_id for cell in quality_cells(wildcards)
        ),
        results=results_folder,
        freeze=lambda wildcards, input: (
            ["--freeze", str(input.freeze)] if input.freeze else []
        ),
    shell:
        "kvstudy quality --visit {input.visit:q} --results {params.results:q} --marker {output:q} {params.freeze:q}"
        " 2> >(tee {log:q} >&2)"
