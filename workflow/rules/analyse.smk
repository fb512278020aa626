# Analysis: cells become one tidy table, from which every figure, table and sentence is made.


rule analyse:
    input:
        plan=f"{RESULTS}/plan/{STUDY}/plan.json",
        visits=[str(LAYOUT.marker(STUDY, visit)) for visit in VISITS],
        quality=[str(LAYOUT.quality_marker(STUDY, visit)) for visit in QUALITY],
        claims=sorted(map(str, Path("conf/claims").glob("*.yaml"))),
    output:
        cells=f"{RESULTS}/{STUDY}/cells.parquet",
        csv=report(
            f"{RESULTS}/{STUDY}/cells.csv",
            caption="../../reports/captions/cells.rst",
            category="Tables",
            labels={"table": "all cells"},
        ),
        quality=f"{RESULTS}/{STUDY}/quality.parquet",
        quality_csv=f"{RESULTS}/{STUDY}/quality.csv",
        points=f"{RESULTS}/{STUDY}/points.csv",
        attribution=f"{RESULTS}/{STUDY}/attribution.csv",
        claims=f"{RESULTS}/{STUDY}/claims.json",
    log:
        f"{RESULTS}/logs/{STUDY}/analyse.log",
    params:
        results=results_folder,
    shell:
        "kvstudy analyse --plan {input.plan:q} --results {params.results:q} --out {output.cells:q}"
        " > >(tee {log:q}) 2>&1"
