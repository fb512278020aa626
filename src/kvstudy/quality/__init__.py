"""What a budget costs in quality: the same items under every policy and budget, scored as they are served.

Scoring is decode under the policy: a context is prefilled and compressed as in serving, then what follows is scored
token by token. Scoring inside a prefill would show no effect at all, because every policy computes a prompt exactly.
"""
