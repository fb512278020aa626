# The two commands a newcomer needs: `make study` and `make test`. Everything else is snakemake or kvstudy.
PYTHON ?= python3
STUDY ?= quick
CORES ?= all
OVERRIDES ?=
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
SNAKEMAKE := snakemake --cores $(CORES) --config study=$(STUDY) $(if $(OVERRIDES),'overrides=$(OVERRIDES)')

.PHONY: study setup test test-long test-slurm lint ui report paper example clean-venv
.DEFAULT_GOAL := study

study: setup  ## set everything up, run the study, end by naming what it made
	@$(SNAKEMAKE)
	@kvstudy report study=$(STUDY) $(OVERRIDES) --only-html

setup: $(VENV)/.ready  ## the project's environment in .venv

$(VENV)/.ready: pyproject.toml envs/kvstudy/constraints.txt envs/kvstudy/torch.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvstudy needs Python 3.11 or newer: make PYTHON=python3.12 setup")'
	@echo "setting up $(VENV) (two minutes and about 2 GB; once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PYTHON) src/kvstudy/frameworks/environments.py torch --python $(BIN)/python
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --use-pep517 -c envs/kvstudy/constraints.txt -e '.[dev]'
	@touch $@

# Tests of arithmetic and files, which run side by side; the others watch clocks, locks and processes of this machine.
SIDE_BY_SIDE := $(addprefix tests/,analysis engine fidelity grid models quality report)

test: setup lint  ## what CI runs
	pytest -m 'not long and not slurm' --durations=10 --numprocesses 2 --dist loadfile $(SIDE_BY_SIDE)
	pytest -m 'not long and not slurm' --durations=10 $(addprefix --ignore=,$(SIDE_BY_SIDE))

test-long: setup  ## trials that take minutes
	pytest -m long

test-slurm: setup  ## a grid through a real SLURM of one node, where SLURM can be had
	@tests/slurm/ready.sh; code=$$?; test $$code = 77 || { test $$code = 0 && \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -c envs/kvstudy/constraints.txt -e '.[slurm]' && \
	  pytest -m slurm -rs; }

lint: setup
	ruff check . && ruff format --check .
	mypy
	lint-imports
	python .ci/harness.py
	snakefmt --check Snakefile workflow/rules

ui: setup  ## browse the runs
	mlflow ui --backend-store-uri sqlite:///results/mlflow.db --port 5000

paper: setup  ## the LaTeX paper of a study (needs latexmk and LaTeX)
	@$(SNAKEMAKE) -- paper

example: report  ## copy a study's report, tables and decided claims to docs/results, where examples are committed
	@mkdir -p docs/results/$(STUDY)/tables
	@cp results/$(STUDY)/report.pdf results/$(STUDY)/cells.csv results/$(STUDY)/claims.json docs/results/$(STUDY)/
	@cp results/$(STUDY)/tables/*.csv results/$(STUDY)/tables/*.tex docs/results/$(STUDY)/tables/

report: setup  ## rebuild figures, tables and PDF from the cells that are there
	@$(SNAKEMAKE) -- report
