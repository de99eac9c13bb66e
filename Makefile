# Needs python3 (3.10 or newer, with venv) and make; everything else is installed into $(VENV).
PYTHON ?= python3
VENV ?= .venv
CONFIG ?= configs/quickstart.yaml
FIT_FLAGS ?=
JOBS ?= 2
PYTEST_FLAGS ?=
ROOM ?= 1

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# one thread per worker: the tests are many and small
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(PYTEST_FLAGS)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test test-slow test-slurm check-speed test-all lint format docs tutorials clean

help: ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "variables: PYTHON=$(PYTHON) VENV=$(VENV) CONFIG=$(CONFIG) FIT_FLAGS JOBS=$(JOBS) ROOM=$(ROOM) PYTEST_FLAGS"

setup: $(STAMP) ## install everything into .venv

# The stamp is written last, so an interrupted installation is taken up again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "lipdp needs Python 3.10 or newer, and this is " + sys.version.split()[0] + ". HINT: make PYTHON=python3.11")'
	@echo "Installing into $(VENV); the first time this downloads a few gigabytes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-input --disable-pip-version-check --progress-bar off -c constraints.txt -e ".[dev]"
	@touch $(STAMP)

demo: $(STAMP) ## train a private model on embedded data into a new directory under runs/
	$(BIN)/lipdp fit --config $(CONFIG) $(FIT_FLAGS)

test: $(STAMP) ## the fast tests
	$(PYTEST)

test-slow: $(STAMP) ## the slow tests alone
	$(PYTEST) -m "slow and not slurm"

test-slurm: $(STAMP) ## jobs on a Slurm of one machine; needs root and Debian's slurm-wlm and munge
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_FLAGS) -m slurm tests/slurm

check-speed: $(STAMP) ## hold ratios of time and memory against bounds, on an idle machine
	$(BIN)/lipdp bench --check --room $(ROOM)

test-all: test test-slow ## the fast tests, then the slow ones

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## let ruff rewrite the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP) ## the documentation as a site, in site/; fails for a broken link
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

tutorials: $(STAMP) ## run the tutorials and keep their outputs in docs/tutorials
	$(BIN)/python docs/tutorials/execute.py

clean: ## remove caches; runs/ and .venv stay
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site
