# Environments: each framework runs in its own, built from exact pins; the freeze file says what came out.
rule environment:
    output:
        f"{RESULTS}/environments/{{framework}}-{{flavour}}-{{hash}}.txt",
    log:
        f"{RESULTS}/logs/environments/{{framework}}-{{flavour}}-{{hash}}.log",
    wildcard_constraints:
        framework="[a-z0-9]+",
        flavour="cpu|cuda",
        hash="[0-9a-f]{10}",
    params:
        folder=f"{RESULTS}/environments/{{framework}}-{{flavour}}-{{hash}}",
    shell:
        "kvstudy environment {wildcards.framework} --flavour {wildcards.flavour}"
        " --dir {params.folder:q} --freeze {output:q} 2> >(tee {log:q} >&2)"
