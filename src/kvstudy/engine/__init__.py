"""Our serving engine: continuous batching over a pool of KV bytes, the KV strategy a replaceable policy.

Read in this order: `config`, `request`, `pool` (where KV lies), `policies/base` (what a policy answers),
`policies/full` (the simplest one), `attention` (the arithmetic), `model` (one packed forward), `scheduler`
(who runs in a step), `core` (the loop), `server` (the OpenAI-compatible face of it).
"""
