"""From measured cells to numbers one may quote: the tidy table, replicates, attribution, claims.

Reads plans and `summary.json` (and, where requests are paired, `requests.parquet`); imports neither
`measure` nor a framework, so a table can be made on a laptop from a store that was copied there.
"""
