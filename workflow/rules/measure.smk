# Measuring: a job is a visit, one bring-up of a deployment that serves every cell of it that is not whole yet.
# Cells lie in results/store and are nobody's output, so no rerun can delete them; the output is a marker.


rule measure:
    input:
        visit=ancient(visit_file),
        model=ancient(model_card),
        skew=ancient(skew_file),
        converted=ancient(converted_file),
        freeze=ancient(freeze_file),
    output:
        f"{RESULTS}/{STUDY}/visits/{{visit}}.json",
    log:
        f"{RESULTS}/logs/visits/{{visit}}.log",
    priority: visit_priority
    threads: visit_threads
    resources:
        gpu=visit_gpus,
        mem_mb=visit_memory,
        runtime=visit_minutes,
        cpus_per_task=visit_cpus,
        slurm_partition=visit_partition,
        gpu_model=visit_gpu_model,
        slurm_extra=visit_extra,
        attempt=visit_attempt,
    params:
        cells=visit_cells,
        results=results_folder,
        only="",
    shell:
        "kvstudy measure --visit {input.visit:q} --results {params.results:q} --marker {output:q} --log {log:q}"
        " --attempt {resources.attempt} {params.only}"


use rule measure as cell with:
    output:
        f"{RESULTS}/{STUDY}/cells/{{cell}}.json",
    log:
        f"{RESULTS}/logs/cells/{{cell}}.log",
    params:
        cells=cell_alone,
        results=results_folder,
        only="--cell {cell}",
