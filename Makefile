# headrace. Needs python3 (3.11 or newer) with its venv module, git and make; nothing else.
# Package versions are pinned in constraints.txt.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
OUT    ?= runs/demo

# Stamps: headrace and its dependencies are installed; test dependencies too; those of the site.
RUNS   := $(VENV)/.headrace-runs
TESTS  := $(VENV)/.headrace-tests
DOCS   := $(VENV)/.headrace-docs

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help run test test-quick test-all check style bench golden samples regress docs pictures setup

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

run: $(RUNS)  ## install headrace and run the demo: corpus to trained model
	$(BIN)/headrace demo --out $(OUT)

test: $(TESTS)  ## run the tests that need no server and no long time; their durations: build/tests.xml
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not server and not long" --junit-xml build/tests.xml

test-quick: $(TESTS)  ## run the tests that take a few seconds at most
	$(BIN)/python -m pytest -m "not server and not long and not slow"

test-all: $(TESTS)  ## run all tests, long ones and those that install an S3 server or Slurm too
	$(BIN)/python -m pytest --hypothesis-profile=others

check: $(TESTS)  ## lint, format, types, packaging, pages and the rules of the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_house.py tests/test_rooms.py tests/test_names.py tests/test_docs.py

style: $(TESTS)  ## format the code and fix lint findings that can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(TESTS)  ## run the benchmarks; each prints lines with ratios
	$(BIN)/python -m benchmarks

# Options of the golden runs: MODELS='tiny-moe hybrid-50m', LAYOUTS='one tp2', LONG=1, STEPS=50,
# JOBS=2; of `make golden` MISSING=1; of `make regress` QUICK=1, ROUNDING=1. A and B are commits.
GOLDEN = $(if $(MODELS),--models '$(MODELS)') $(if $(LAYOUTS),--layouts '$(LAYOUTS)') \
  $(if $(LONG),--long) $(if $(STEPS),--steps $(STEPS)) $(if $(JOBS),--jobs $(JOBS)) \
  $(if $(A),--a $(A))

golden: $(TESTS)  ## train the golden runs and record them in benchmarks/golden/ (docs/golden.md)
	$(BIN)/python -m benchmarks.golden record $(GOLDEN) $(if $(MISSING),--missing)

samples: $(TESTS)  ## write the samples of files, printed JSON and names again (CONTRIBUTING.md)
	RENEW_SAMPLES=1 $(BIN)/python -m pytest $(or $(TESTS_OF),tests/formats)
	git status --short tests/formats/samples

regress: $(TESTS)  ## compare with the recordings; A=<commit> B=<commit>: two commits side by side
	$(BIN)/python -m benchmarks.golden regress $(GOLDEN) \
	  $(if $(B),--b $(B)) $(if $(QUICK),--quick) $(if $(ROUNDING),--rounding)

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(DOCS)  ## build the documentation site in build/site; a broken link fails
	$(BIN)/python -m docs.generate.run_notebook
	$(BIN)/python -m mkdocs build    # with --quiet, broken links would not be counted

pictures: $(RUNS)  ## draw the pictures of the pages from real runs (needs Chromium)
	rm -rf runs/pictures && mkdir -p runs/pictures
	$(BIN)/headrace demo --out runs/pictures/demo
	$(BIN)/python -m docs.generate.pictures runs/pictures/demo/run
	$(BIN)/python -m docs.generate.tutorial_pictures runs/pictures
	$(BIN)/python -m docs.generate.explanations

setup: $(TESTS)  ## install headrace and its test dependencies into .venv

# venv creates pip last: without Debian's python3-venv it is missing.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "headrace needs Python 3.11 or newer: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || \
	  { echo "install Python's venv module: apt-get install python3-venv" >&2; exit 1; }

$(RUNS): pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[train]'
	@touch $@

$(TESTS): pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[train,dev,ray]'
	$(BIN)/python -m pip install --constraint constraints.txt --no-deps mosaicml-streaming
	@touch $(RUNS) $@

$(DOCS): pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[train,docs]'
	@touch $(RUNS) $@
