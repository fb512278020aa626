"""What a reader sees: figures, tables and the document, all made from the tidy table and cell files.

Nothing here measures, and nothing imports it: restyling a figure reruns no measurement.
"""

#: Names of figures and the category each has in reports. Here, and not in `figures`, so that the Snakefile
#: knows its targets without waiting for matplotlib.
FIGURES = {
    "throughput_vs_rate": "Results",
    "ttft_vs_rate": "Results",
    "tpot_vs_rate": "Results",
    "e2el_vs_rate": "Results",
    "kv_memory": "Memory",
    "budget_effect": "Budget",
    "memory_timeline": "Memory",
    "quality_vs_budget": "Quality",
    "pareto": "Quality",
    "retention_map": "Quality",
}
TABLES = ("summary", "classes", "prefixes", "admission", "setup", "attribution", "claims", "guide", "quality")
