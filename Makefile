# headrace. Needs python3 (3.11 or newer) with its venv module, git and make; nothing else.
# The versions that are installed are those of constraints.txt.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
OUT    ?= runs/demo

# What the two stamps stand for: headrace and what it runs on; what testing it needs besides.
RUNS   := $(VENV)/.headrace-runs
TESTS  := $(VENV)/.headrace-tests

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help run test test-quick test-all check bench golden regress setup

help:  ## list these
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

run: $(RUNS)  ## install headrace and run its main job at small size, corpus to trained model
	$(BIN)/headrace demo --out $(OUT)

test: $(TESTS)  ## every test that needs nothing but what is installed
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not server and not long"

test-quick: $(TESTS)  ## the tests that take no more than a few seconds each
	$(BIN)/python -m pytest -m "not server and not long and not slow"

test-all: $(TESTS)  ## every test: also those of minutes, and those that install an S3 server (apt-get)
	$(BIN)/python -m pytest --hypothesis-profile=others

check: $(TESTS)  ## lint, format, types, packaging and the rules of the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_house.py

bench: $(TESTS)  ## measure: each benchmark prints one line with a ratio
	$(BIN)/python -m benchmarks

# Options of the golden runs: MODELS='tiny-moe hybrid-50m', LAYOUTS='one tp2', LONG=1, STEPS=50,
# JOBS=2; of `make golden` MISSING=1; of `make regress` QUICK=1, ROUNDING=1. A and B are commits.
GOLDEN = $(if $(MODELS),--models '$(MODELS)') $(if $(LAYOUTS),--layouts '$(LAYOUTS)') \
  $(if $(LONG),--long) $(if $(STEPS),--steps $(STEPS)) $(if $(JOBS),--jobs $(JOBS)) \
  $(if $(A),--a $(A))

golden: $(TESTS)  ## train the golden runs and record them in benchmarks/golden/ (docs/golden.md)
	$(BIN)/python -m benchmarks.golden record $(GOLDEN) $(if $(MISSING),--missing)

regress: $(TESTS)  ## compare with the recordings; A=<commit> B=<commit>: two commits side by side
	$(BIN)/python -m benchmarks.golden regress $(GOLDEN) \
	  $(if $(B),--b $(B)) $(if $(QUICK),--quick) $(if $(ROUNDING),--rounding)

setup: $(TESTS)  ## install headrace and everything that testing it needs into .venv

# The last thing that venv makes is pip: where Debian's python3-venv is missing it is not there.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "headrace needs Python 3.11 or newer: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || \
	  { echo "install Python's venv module: apt-get install python3-venv" >&2; exit 1; }

$(RUNS): pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/python -m pip install --constraint constraints.txt --editable .
	@touch $@

$(TESTS): pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev,ray]'
	@touch $(RUNS) $@
