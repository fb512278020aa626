"""Workloads, arrival processes and the open-loop client. Knows nothing of frameworks: it speaks to a URL."""
