# The two commands of a newcomer: `make train` and `make test`. Each first makes
# the environment in .venv, with the versions of constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ENVIRONMENT := $(VENV)/.installed

.PHONY: train test quick check lint types bench environment clean

# Trains the main job on real text, on 4 devices, and goes on if it was stopped.
train: $(ENVIRONMENT)
	$(BIN)/distlm train --config=experiments/tiny.py --workdir=runs/tiny \
	  --devices=4

test: $(ENVIRONMENT)
	$(BIN)/python -m pytest --cov --cov-report=term --cov-fail-under=90

# Without the tests that take longest.
quick: $(ENVIRONMENT)
	$(BIN)/python -m pytest -m "not slow"

check: lint types test

lint: $(ENVIRONMENT)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(ENVIRONMENT)
	$(BIN)/mypy

# Measures all that benchmarks/RESULTS.md shows, in half an hour; TEXT=PATH is a text
# to reach a loss on, such as tinyshakespeare.
bench: $(ENVIRONMENT)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable ".[bench]"
	$(BIN)/python benchmarks/run.py $(if $(TEXT),--text=$(TEXT))

environment: $(ENVIRONMENT)

$(ENVIRONMENT): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
