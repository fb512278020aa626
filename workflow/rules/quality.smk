# Quality: a job scores cells that share their items, all deployments of our engine together, vLLM by itself.
# As with measuring, cells lie in results/store and are nobody's output; the output is a marker.


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
        attempt=visit_attempt,
    params:
        cells=quality_ids,
        results=results_folder,
        freeze=lambda wildcards, input: (
            ["--freeze", str(input.freeze)] if input.freeze else []
        ),
    shell:
        "kvstudy quality --visit {input.visit:q} --results {params.results:q} --marker {output:q} {params.freeze:q}"
        " --attempt {resources.attempt} --log {log:q} 2> >(tee {log:q} >&2)"
