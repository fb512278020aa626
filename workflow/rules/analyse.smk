# Analysis: cells become one tidy table, from which every figure, table and sentence is made.


rule analyse:
    input:
        plan=f"{RESULTS}/plan/{STUDY}/plan.json",
        visits=[str(LAYOUT.marker(STUDY, visit)) for visit in VISITS],
    output:
        cells=f"{RESULTS}/{STUDY}/cells.parquet",
    log:
        f"{RESULTS}/logs/{STUDY}/analyse.log",
    params:
        results=results_folder,
    shell:
        "kvstudy analyse --plan {input.plan} --results {params.results} --out {output.cells} 2> >(tee {log} >&2)"
