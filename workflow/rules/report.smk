# Report: one file a figure and a table, each its own rule, so that restyling one reruns no measurement.
from kvstudy.report import FIGURES, TABLES

STUDY_DIR = f"{RESULTS}/{STUDY}"

for figure, category in FIGURES.items():

    rule:
        name:
            f"figure_{figure}"
        input:
            cells=rules.analyse.output.cells,
        output:
            png=report(
                f"{STUDY_DIR}/figures/{figure}.png",
                # Captions are made from the data, beside the figure.
                caption=str(
                    Path(STUDY_DIR, "figures", f"{figure}.caption.rst").resolve()
                ),
                category=category,
                labels={"figure": figure.replace("_", " ")},
            ),
            pdf=f"{STUDY_DIR}/figures/{figure}.pdf",
            text=f"{STUDY_DIR}/figures/{figure}.caption.txt",
            caption=f"{STUDY_DIR}/figures/{figure}.caption.rst",
        log:
            f"{RESULTS}/logs/{STUDY}/figure_{figure}.log",
        localrule: True
        params:
            name=figure,
            study=study_folder,
            results=results_folder,
        shell:
            "kvstudy figure {params.name:q} --study-dir {params.study:q} --results {params.results:q} > {log:q}"


for table in TABLES:

    rule:
        name:
            f"table_{table}"
        input:
            cells=rules.analyse.output.cells,
        output:
            csv=report(
                f"{STUDY_DIR}/tables/{table}.csv",
                caption="../../reports/captions/table.rst",
                category="Tables",
                labels={"table": table.replace("_", " ")},
            ),
            tex=f"{STUDY_DIR}/tables/{table}.tex",
        log:
            f"{RESULTS}/logs/{STUDY}/table_{table}.log",
        localrule: True
        params:
            name=table,
            study=study_folder,
            results=results_folder,
        shell:
            "kvstudy table {params.name:q} --study-dir {params.study:q} --results {params.results:q} > {log:q}"


rule figures:
    input:
        expand(f"{STUDY_DIR}/figures/{{figure}}.pdf", figure=FIGURES),


rule tables:
    input:
        expand(f"{STUDY_DIR}/tables/{{table}}.csv", table=TABLES),


rule document:
    input:
        plan=f"{RESULTS}/plan/{STUDY}/plan.json",
        cells=rules.analyse.output.cells,
        figures=rules.figures.input,
        tables=rules.tables.input,
        template="reports/study.typ",
    output:
        pdf=report(
            f"{STUDY_DIR}/report.pdf",
            caption="../../reports/captions/document.rst",
            category="Report",
        ),
        # Question and answer, which Snakemake's own report opens with (Snakefile).
        opening=f"{STUDY_DIR}/opening.rst",
    log:
        f"{RESULTS}/logs/{STUDY}/document.log",
    params:
        study=study_folder,
        results=results_folder,
    shell:
        "kvstudy report --study-dir {params.study:q} --plan {input.plan:q} --results {params.results:q}"
        " --template {input.template:q} --out {output.pdf:q} > {log:q}"


# The LaTeX route, for who has a LaTeX: the same figures and tables, in a two-column paper.
rule paper:
    input:
        figures=rules.figures.input,
        tables=expand(f"{STUDY_DIR}/tables/{{table}}.tex", table=TABLES),
        source="reports/paper/main.tex",
    output:
        pdf=f"{STUDY_DIR}/paper.pdf",
        words=f"{STUDY_DIR}/paper.tex",
    log:
        f"{RESULTS}/logs/{STUDY}/paper.log",
    params:
        study=study_folder,
        results=results_folder,
    shell:
        "kvstudy paper --study-dir {params.study:q} --results {params.results:q} --source {input.source:q}"
        " --out {output.pdf:q} > >(tee {log:q}) 2>&1"


rule report:
    input:
        rules.analyse.input.visits,
        rules.document.output,
        rules.figures.input,
        rules.tables.input,
