# Every target sets itself up: a virtual environment in .venv, filled again when pyproject.toml or constraints.txt change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-full lint bench clean

help:
	@echo "make demo       answer a few prompts with every drafter and compare speed and output"
	@echo "make test       the fast tests"
	@echo "make test-full  all tests"
	@echo "make lint       ruff and mypy"
	@echo "make bench      speed against other implementations (minutes)"
	@echo "make clean      remove build outputs and .venv"

demo: $(VENV)/.demo
	$(BIN)/whiflash demo

# The same random examples each time: a red run then means the change. `test-full` searches anew.
test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --hypothesis-profile=ci

test-full: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto -m ""

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.dev
	$(BIN)/python bench/bench.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Setting up $(VENV) (minutes the first time)"
	$(PIP) --editable '.[demo]'
	@touch $@

# The judges' own pins clash (see pyproject.toml), hence --no-deps; one of them needs Python 3.11.
$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Setting up $(VENV) for development (minutes the first time)"
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps dflash 'speculators; python_version >= "3.11"'
	@touch $@ $(VENV)/.demo
