# Quality: a job scores cells that share their items, all deployments of our engine together, vLLM by itself.
# As with measuring, cells lie in results/store and are nobody's output; the output is a marker.


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


rule quality:
    input:
        visit=ancient(quality_visit),
        model=ancient(quality_models),
        skew=ancient(quality_skews),
        freeze=ancient(quality_freezes),
    output:
        f"{RESULTS}/{STUDY}/quality/{{quality}}.json",
    log:
        f"{RESULTS}/logs/quality/{{quality}}.log",
    # As a measurement, it has the machine to itself: it would disturb one.
    threads: all_cores
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
        cells=quality_ids,
        results=results_folder,
        freeze=lambda wildcards, input: (
            ["--freeze", str(input.freeze)] if input.freeze else []
        ),
    shell:
        "kvstudy quality --visit {input.visit:q} --results {params.results:q} --marker {output:q} {params.freeze:q}"
        " 2> >(tee {log:q} >&2)"
