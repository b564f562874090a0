# make quickstart   the whole pipeline on this machine, with data and a model that it makes itself
# make test         every test but those of real engines; `make test-fast` leaves out those that start servers, jobs or pipelines
# make test-matrix  more of what `make test` has a sample of, three hours: every place x every way in which a run can break,
#                   seeds of the quickstart, machines of engines that are lost, rented ones that are kept
# make engines      SGLang and vLLM for a CPU, in .engines/, 7 GB; `make test-engines` tests against them
# make check        lint, format, types
# make bench        docs/benchmarks.md: this library side by side with others, half an hour on an idle machine
# make gpu-check    does training work on this machine's GPU, and how fast? At most 8 minutes; `make gpu-check-wheels` collects
#                   what a machine without network lacks for it (docs/benchmarks.md)

# The first interpreter that is new enough; set PYTHON to choose another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
# Tests start thousands of processes, and without bytecode each compiles what it imports anew.
unexport PYTHONDONTWRITEBYTECODE
READY := .venv/.ready
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile \
	--constraint constraints.txt --editable
# What pip leaves to this, which takes all processors: pip compiles for as long as it takes to install the rest.
COMPILE := $(BIN)/python -m compileall -qq -j 0 .venv/lib >/dev/null 2>&1 || true
# A file of tests stays in one process: its fixtures train models once for all of them. tests/conftest.py orders the files.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

.PHONY: quickstart test test-fast test-matrix test-engines engines check bench gpu-check gpu-check-wheels install clean

quickstart: .venv/.installed
	$(BIN)/rollouts quickstart

test: $(READY)
	$(PYTEST) -m "not engine and not matrix"

test-fast: $(READY)
	$(PYTEST) -m "not slow and not engine"

# Half of them lie in one file: they are spread one by one. Those of engines are skipped where these are not installed.
test-matrix: $(READY)
	$(BIN)/python -m pytest --numprocesses auto -m matrix

# One after the other: an engine that starts takes all processors, and two workers take as long as one.
test-engines: $(READY) engines
	$(BIN)/python -m pytest -m "engine and not matrix" tests/engines

engines: .engines/sglang/.ready .engines/vllm/.ready

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .bench/.ready
	.bench/bin/python benchmarks/run_all.py --out docs/benchmarks.md

gpu-check: .venv/.installed
	$(BIN)/python benchmarks/gpu_check.py

gpu-check-wheels: $(READY)
	$(BIN)/python benchmarks/gpu_wheels.py collect

install: $(READY)

# Who only runs pipelines waits for nothing else: the extras and tools of the tests take nearly as long again.
.venv/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: install it, or name one with PYTHON=..."; exit 2; }
	$(PYTHON) -m venv .venv
	$(INSTALL) .
	@$(COMPILE)
	@touch $@

$(READY): .venv/.installed
	$(INSTALL) '.[dev]'
	@$(COMPILE)
	@touch $@

# An environment of its own: the peers are no part of the project.
.bench/.ready: pyproject.toml constraints.txt benchmarks/requirements.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: install it, or name one with PYTHON=..."; exit 2; }
	$(PYTHON) -m venv .bench
	.bench/bin/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt \
		--editable . --requirement benchmarks/requirements.txt
	@touch $@

.engines/%/.ready: tests/engines/install.sh tests/engines/stand_ins.py tests/engines/%.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: install it, or name one with PYTHON=..."; exit 2; }
	rm -rf $(@D)
	tests/engines/install.sh $* $(@D) $(PYTHON)
	@touch $@

clean:
	rm -rf .venv .bench .engines .rollouts .wheels .gpu-venv .gpu-check
