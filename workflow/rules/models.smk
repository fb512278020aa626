# Models: each becomes a local Hugging Face folder once, whatever its source.


rule model:
    input:
        ancient(f"{RESULTS}/plan/models/{{model}}.json"),
    output:
        f"{RESULTS}/models/{{model}}.json",
    log:
        f"{RESULTS}/logs/models/{{model}}.log",
    shell:
        "kvstudy prepare --model {input} --out {RESULTS}/models/{wildcards.model} --card {output} 2> >(tee {log} >&2)"
