"""A batch server over an author's fork: OpenAI's endpoints in front, the fork's own generation loop behind.

Runs in the fork's environment (Python >= 3.9, torch, NumPy, transformers), so it imports nothing of kvstudy. `batching`
and `serving` know nothing of forks; `loop` wraps one; `shims` is the debug switch device=cpu; `tracing` records which
entries a fork keeps and fetches.
"""
