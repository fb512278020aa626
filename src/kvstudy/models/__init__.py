"""Models as artefacts: a description from `conf/` becomes a local Hugging Face folder that frameworks serve.

One folder holds config, safetensors weights, tokenizer, generation config and chat template, and `model.json`
(`ModelCard`), which says what was made. Frameworks read the folder and never a hub, so that all of them serve
the same bytes.
"""
