# Environments: each framework runs in its own, built from exact pins; the freeze file says what came out.
from kvstudy.frameworks.environments import flavour_for, key as environment_key


def environment_freeze(deployment):
    """The freeze file of a deployment's environment; none when it runs in the project's own."""
    name = deployment.framework.environment
    if name is None:
        return []
    key = environment_key(name, flavour_for(deployment.hardware.device))
    return [f"{RESULTS}/environments/{key}.txt"]


rule environment:
    output:
        f"{RESULTS}/environments/{{framework}}-{{flavour}}-{{hash}}.txt",
    log:
        f"{RESULTS}/logs/environments/{{framework}}-{{flavour}}-{{hash}}.log",
    wildcard_constraints:
        framework="[a-z0-9]+",
        flavour="cpu|cuda",
        hash="[0-9a-f]{10}",
    shell:
        "kvstudy environment {wildcards.framework} --flavour {wildcards.flavour} --freeze {output}"
        " --dir {RESULTS}/environments/{wildcards.framework}-{wildcards.flavour}-{wildcards.hash}"
        " 2> >(tee {log} >&2)"
