# Measuring: a job is a visit, one bring-up of a deployment that serves every cell of it that is not whole yet.
# Cells lie in results/store and are nobody's output, so no rerun can delete them; the output is a marker.


def visit_of(wildcards):
    """The visit that a job's wildcards name."""
    if hasattr(wildcards, "cell"):
        if wildcards.cell not in VISIT_OF_CELL:
            raise WorkflowError(f"no cell {wildcards.cell} in study {STUDY}: `kvstudy grid study={STUDY}` lists them")
        return VISIT_OF_CELL[wildcards.cell]
    return VISITS[wildcards.visit]


def visit_file(wildcards):
    """The resolved description that the job reads."""
    return str(LAYOUT.visit(STUDY, visit_of(wildcards).id))


def model_card(wildcards):
    """The card of the model that the visit serves."""
    return f"{RESULTS}/models/{model_id(visit_of(wildcards).deployment)}.json"


def freeze_file(wildcards):
    """The freeze file of the visit's environment, if it has one of its own."""
    return environment_freeze(visit_of(wildcards).deployment)


def visit_cells(wildcards):
    """Ids of the visit's cells: a new one makes the job run again (trigger `params`)."""
    return sorted(cell.cell_id for cell in visit_of(wildcards).cells)


def visit_priority(wildcards):
    """Position in the seeded order of visits, so that drift is no framework's advantage."""
    return visit_of(wildcards).priority


def visit_gpus(wildcards):
    """GPUs that the visit holds."""
    return visit_of(wildcards).gpus


def visit_threads(wildcards):
    """Without a GPU a measurement has the machine to itself."""
    visit = visit_of(wildcards)
    if visit.gpus:
        return 1
    hardware = visit.deployment.hardware
    return max(workflow.cores or 1, len(set(hardware.server_cores) | set(hardware.client_cores)))


rule measure:
    input:
        visit=ancient(visit_file),
        model=ancient(model_card),
        freeze=ancient(freeze_file),
    output:
        f"{RESULTS}/{STUDY}/visits/{{visit}}.json",
    params:
        cells=visit_cells,
    priority: visit_priority
    threads: visit_threads
    resources:
        gpu=visit_gpus,
    log:
        f"{RESULTS}/logs/visits/{{visit}}.log",
    shell:
        "kvstudy measure --visit {input.visit} --results {RESULTS} --marker {output} --log {log}"


rule cell:
    input:
        visit=ancient(visit_file),
        model=ancient(model_card),
        freeze=ancient(freeze_file),
    output:
        f"{RESULTS}/{STUDY}/cells/{{cell}}.json",
    threads: visit_threads
    resources:
        gpu=visit_gpus,
    log:
        f"{RESULTS}/logs/cells/{{cell}}.log",
    shell:
        "kvstudy measure --visit {input.visit} --results {RESULTS} --marker {output} --log {log}"
        " --cell {wildcards.cell}"
