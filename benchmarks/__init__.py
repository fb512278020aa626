"""Commands that measure what a claim of speed rests on; each answers `--json` with one object."""
