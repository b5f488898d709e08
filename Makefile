# `make demo` and `make test` need only python3 with venv, and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_ARGS ?=
FUZZ_SECONDS ?= 600

.PHONY: demo test test-all lint bench fuzz codecs clean

demo: $(VENV)/.installed
	$(BIN)/gradwire demo $(DEMO_ARGS)

test: $(VENV)/.installed-dev lint
	$(BIN)/python -m pytest -m "not slow"

test-all: $(VENV)/.installed-dev lint
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/effects.py
	$(BIN)/python benchmarks/evaluation.py
	$(BIN)/python benchmarks/kernels.py

# Guided by coverage where atheris can be installed, blind otherwise.
fuzz: $(VENV)/.installed-dev
	-$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[fuzz]"
	$(BIN)/python tests/fuzz/fuzz_decoders.py --seconds $(FUZZ_SECONDS)

codecs: $(VENV)/.installed
	$(BIN)/python experiments/make_codecs_page.py

SOURCES := pyproject.toml setup.py constraints.txt $(wildcard src/gradwire/kernels/native/*.[ch])

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python $(SOURCES)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build src/*.egg-info src/gradwire/kernels/native/*.so
