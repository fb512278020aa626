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
    params:
        cells=visit_cells,
        results=results_folder,
    shell:
        "kvstudy measure --visit {input.visit:q} --results {params.results:q} --marker {output:q} --log {log:q}"


rule cell:
    input:
        visit=ancient(visit_file),
        model=ancient(model_card),
        skew=ancient(skew_file),
        converted=ancient(converted_file),
        freeze=ancient(freeze_file),
    output:
        f"{RESULTS}/{STUDY}/cells/{{cell}}.json",
    log:
        f"{RESULTS}/logs/cells/{{cell}}.log",
    threads: visit_threads
    resources:
        gpu=visit_gpus,
    params:
        results=results_folder,
    shell:
        "kvstudy measure --visit {input.visit:q} --results {params.results:q} --marker {output:q} --log {log:q}"
        " --cell {wildcards.cell}"
