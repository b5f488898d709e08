# `make demo` and `make test` need only python3 with venv, and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_ARGS ?=
FUZZ_SECONDS ?= 600
SOAK_SECONDS ?= 1800
SOAK_SEED ?= 0

.PHONY: demo test test-all test-slow test-long frameworks quick lint bench fuzz soak sanitize docs docs-check codecs rd clean

demo: $(VENV)/.installed
	$(BIN)/gradwire demo $(DEMO_ARGS)

# Tests start hundreds of processes, and each would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE
# One more than there are cores: some tests wait.
PYTEST := $(BIN)/python -m pytest --numprocesses $$($(BIN)/python -c "import os; print(os.cpu_count() + 1)") --dist worksteal

# Both at the same time: mypy has one thread.
test: $(VENV)/.installed-dev
	+$(MAKE) --jobs=2 lint quick

quick: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow and not long"

# `make test`, then what it left out, but for what takes many minutes.
test-all: test
	$(MAKE) test-slow

test-slow: $(VENV)/.installed-dev
	$(PYTEST) -m slow

# Lightning, Accelerate, transformers and Ray: without them their tests are skipped.
frameworks: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[integration-test]"

test-long: $(VENV)/.installed-dev
	$(PYTEST) -m long

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/effects.py
	$(BIN)/python benchmarks/asynchronous.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/evaluation.py
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/codec_speed.py
	$(BIN)/python benchmarks/indices.py
	$(BIN)/python benchmarks/entropy_coders.py
	$(BIN)/python benchmarks/polar.py
	$(BIN)/python benchmarks/dq.py
	$(BIN)/python benchmarks/collectives.py
	$(BIN)/python benchmarks/against_ddp.py
	$(BIN)/python benchmarks/parameter_server.py

# Guided by coverage where atheris can be installed, blind otherwise.
fuzz: $(VENV)/.installed-dev
	-$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[fuzz]"
	$(BIN)/python tests/fuzz/fuzz_decoders.py --seconds $(FUZZ_SECONDS)

# Kills, stops, full disks, garbage and strangers on runs with real processes.
soak: $(VENV)/.installed-dev
	$(BIN)/python tests/soak/run.py --seconds $(SOAK_SECONDS) --seed $(SOAK_SEED)

# The tests of the kernels and of what is built on them, with the C library under AddressSanitizer
# and UndefinedBehaviorSanitizer: a copy of the sources, so that the installed library stays.
# Memory that Python and torch keep until the end is no leak of ours.
SANITIZED := build/sanitize
sanitize: $(VENV)/.installed-dev
	rm -rf $(SANITIZED)
	mkdir -p $(SANITIZED)
	cp -r src $(SANITIZED)
	rm -f $(SANITIZED)/src/gradwire/kernels/native/*.so
	$(CC) -shared -fPIC -g -O1 -fno-omit-frame-pointer -std=c11 -ffp-contract=off -pthread \
	    -fsanitize=address,undefined -fno-sanitize-recover=undefined \
	    -o $(SANITIZED)/src/gradwire/kernels/native/_native.abi3.so \
	    src/gradwire/kernels/native/*.c
	PYTHONPATH=$(SANITIZED)/src GRADWIRE_KERNELS=native \
	    LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0 $(PYTEST) -p no:cacheprovider --capture=sys \
	    tests/kernels tests/coding tests/fuzz

# Generated pages and tables: what has no figures yet is measured, the rest is kept.
docs: $(VENV)/.installed-dev
	$(BIN)/python experiments/make_codecs_page.py --missing
	$(BIN)/python experiments/make_algorithms_table.py
	$(BIN)/python experiments/make_demo.py
	$(BIN)/python experiments/make_report.py
	$(BIN)/python experiments/scheduling.py --write
	$(BIN)/python experiments/training_loops.py --write
	$(BIN)/python experiments/make_results_page.py

# Fails if a page differs from what `make docs` would write.
docs-check: $(VENV)/.installed
	$(BIN)/python experiments/make_codecs_page.py --check
	$(BIN)/python experiments/make_algorithms_table.py --check
	$(BIN)/python experiments/make_demo.py --check
	$(BIN)/python experiments/scheduling.py --check
	$(BIN)/python experiments/training_loops.py --check
	$(BIN)/python experiments/make_results_page.py --check

codecs: $(VENV)/.installed
	$(BIN)/python experiments/make_codecs_page.py

# Figures and tables of docs/polar.md, from the committed results.
rd: $(VENV)/.installed
	$(BIN)/python experiments/make_rd_figure.py --write
	$(BIN)/python experiments/rate_distortion.py --write

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
