# Models: each becomes a local Hugging Face folder once, whatever its source.


rule model:
    input:
        ancient(f"{RESULTS}/plan/models/{{model}}.json"),
    output:
        f"{RESULTS}/models/{{model}}.json",
    log:
        f"{RESULTS}/logs/models/{{model}}.log",
    params:
        folder=f"{RESULTS}/models/{{model}}",
    shell:
        "kvstudy prepare --model {input:q} --out {params.folder:q} --card {output:q} 2> >(tee {log:q} >&2)"


# InfiniGen's offline step: queries of a calibration text, decomposed once a model.
rule skew:
    input:
        ancient(f"{RESULTS}/models/{{model}}.json"),
    output:
        f"{RESULTS}/models/{{model}}.skew.safetensors",
    log:
        f"{RESULTS}/logs/models/{{model}}.skew.log",
    params:
        folder=subpath(input[0], strip_suffix=".json"),
    shell:
        "kvstudy skew --model {params.folder:q} --out {output:q} > {log:q} 2>&1"


# The same weights in the format of the authors' forks.
rule convert:
    input:
        ancient(f"{RESULTS}/models/{{model}}.json"),
    output:
        f"{RESULTS}/models/{{model}}.flexgen.json",
    log:
        f"{RESULTS}/logs/models/{{model}}.flexgen.log",
    params:
        folder=subpath(input[0], strip_suffix=".json"),
        out=subpath(output[0], strip_suffix=".json"),
    shell:
        "kvstudy convert --model {params.folder:q} --out {params.out:q} --card {output:q} 2> >(tee {log:q} >&2)"
