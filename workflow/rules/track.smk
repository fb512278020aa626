# Tracking: one local process reconciles MLflow with the store; nothing else writes to it.


rule sync:
    input:
        plan=f"{RESULTS}/plan/{STUDY}/plan.json",
        cells=f"{RESULTS}/{STUDY}/cells.parquet",
        report=f"{RESULTS}/{STUDY}/report.pdf",
    output:
        f"{RESULTS}/tracking/{STUDY}.json",
    log:
        f"{RESULTS}/logs/{STUDY}/track.log",
    params:
        results=results_folder,
    shell:
        "kvstudy track --plan {input.plan:q} --results {params.results:q} --out {output:q} 2> >(tee {log:q} >&2)"


rule track:
    input:
        rules.sync.output,
