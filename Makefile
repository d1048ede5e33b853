# Every chore of the project. Each target does the set-up that it needs, on a fresh Debian or Ubuntu machine as root too,
# and is quick the second time.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# -P: the folders at the root (coordinator, worker, …) must not be importable under their bare names.
PY := $(CURDIR)/$(BIN)/python -P
STAMPS := $(VENV)/stamps
PYTEST_ARGS ?=
# Most tests wait for processes, so more than there are cores; 0 runs all of them in one process, one after another.
TEST_JOBS ?= 4
export PYTHONSAFEPATH := 1

NATIVE := CMakeLists.txt $(shell find native -type f 2>/dev/null)
NATIVE_TESTS := $(shell find tests/native -type f 2>/dev/null)

.PHONY: help
help: ## list these targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(STAMPS)/installed runtime ## all that moorage needs to run here: packages, .venv, CRIU, runc, etcd

.PHONY: test
test: lint proto-check native-test setup $(STAMPS)/torch languages ## all checks and tests but those of the examples
	$(PY) -m pytest -n $(TEST_JOBS) -m 'not examples' $(PYTEST_ARGS)

# One after another: each fills a small machine by itself, and Ray gives its own nodes 30 s to start.
.PHONY: test-examples
test-examples: setup $(STAMPS)/torch $(STAMPS)/ray ## what needs Ray, and each example from its README's line
	$(PY) -m pytest -n 0 -m examples $(PYTEST_ARGS)

# Node.js, Java and Go for the programs of tests/programs/state: quick when they are there.
.PHONY: languages
languages:
	@tools/language-packages.sh

.PHONY: what-is-saved
what-is-saved: setup $(STAMPS)/torch languages ## try every kind of state and write docs/what-is-saved.md from what is found
	$(PY) -m pytest tests/multinode/test_state.py tests/multinode/test_refusals.py
	$(PY) tools/what_is_saved.py

.PHONY: demo
demo: setup $(STAMPS)/torch ## a training job loses a node and goes on bit for bit (build/demo-report.json)
	mkdir -p build
	$(PY) examples/node_loss/demo.py

.PHONY: demo-s3
demo-s3: setup $(STAMPS)/torch ## the same, with the store encrypted on an S3 server and all local copies deleted
	mkdir -p build
	$(PY) examples/node_loss/demo.py --s3 --timeout 900

BENCHES := $(filter-out __init__ report cold_start gpu_%,$(basename $(notdir $(wildcard bench/*.py))))

.PHONY: bench
bench: setup ## measure barrier and store (bench/results); fails when a target is missed
	@missed=
	for name in $(BENCHES); do
	  # Without -P: they are run as modules of this folder, and import nothing under a bare name.
	  env -u PYTHONSAFEPATH $(BIN)/python -m bench.$$name || missed="$$missed $$name"
	done
	[ -z "$$missed" ] || { echo "targets missed:$$missed" >&2; exit 1; }

.PHONY: test-gpu
test-gpu: setup $(STAMPS)/torch ## the tests that need an NVIDIA GPU
	mkdir -p build
	$(BIN)/cmake -S . -B build/proxy -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DMOORAGE_INTERCEPT=ON >build/proxy.log
	$(BIN)/cmake --build build/proxy --target moorage-cuda
	$(BIN)/python -m pip install -qq --editable '.[gpu]'
	export MOORAGE_LIBCUDA_PROXY=$(CURDIR)/build/proxy/native/intercept/moorage-cuda-dir/libcuda.so.1
	$(PY) -m pytest -m gpu -n 4 -k 'not long_kernel' $(PYTEST_ARGS)
	# By itself: driver 580 cannot switch from a long kernel to another process after a restore (docs/gpu.md).
	$(PY) -m pytest -m gpu -k long_kernel $(PYTEST_ARGS)

.PHONY: packages
packages: setup ## a .deb and a tarball of CRIU, runc, etcd and nft for Debian 12, 13 and Ubuntu 24.04 (build/packages)
	$(PY) tools/packages.py --into build/packages

.PHONY: lint
lint: $(STAMPS)/installed ## ruff, mypy, and are the pages that are made from the code current?
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/docs.py --check

.PHONY: format
format: $(STAMPS)/installed ## let ruff format and sort imports
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: docs
docs: $(STAMPS)/installed ## write the pages that are made from the code: command line, errors, Python API
	$(BIN)/python tools/docs.py

.PHONY: proto-check
proto-check: $(STAMPS)/installed ## are the committed protobuf descriptors and stubs those of the .proto files?
	PYTHON=$(CURDIR)/$(BIN)/python tools/proto-check.sh

.PHONY: native-test
native-test: $(STAMPS)/native-test ## build native/ with sanitizers and run its tests

$(STAMPS)/native-test: $(NATIVE) $(NATIVE_TESTS) $(STAMPS)/installed
	$(BIN)/cmake -S . -B build/sanitize -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -DCMAKE_BUILD_TYPE=Debug -DMOORAGE_SANITIZE=ON >build/sanitize.log || { cat build/sanitize.log; exit 1; }
	$(BIN)/cmake --build build/sanitize
	$(BIN)/ctest --test-dir build/sanitize --output-on-failure --no-tests=ignore
	touch $@

$(BIN)/python:
	tools/machine-packages.sh $(PYTHON)
	$(PYTHON) -m venv $(VENV)

$(STAMPS)/installed: pyproject.toml $(NATIVE) | $(BIN)/python
	mkdir -p $(STAMPS) build
	tools/machine-packages.sh $(PYTHON)
	$(BIN)/python -m pip install -qq --editable '.[dev]'
	touch $@

# Not a file's target: the programs lie outside of this folder, and the script sees in no time that they are there.
.PHONY: runtime
runtime: | $(STAMPS)/installed ## lay CRIU, runc, etcd, nft and ip under /opt/moorage/runtime
	@tools/install-runtime.sh

# torch is for tests and the demo only, scikit-learn for its handwritten digits. A torch that is already in the
# environment is used; where pip finds no CPU build of this release on disk it downloads some gigabytes.
$(STAMPS)/torch: | $(STAMPS)/installed
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install -qq torch==2.13.0
	$(BIN)/python -m pip install -qq --editable '.[demo]'
	touch $@

# Ray is for the tests of moorage.ray and their examples only (a wheel of 70 MB).
$(STAMPS)/ray: pyproject.toml | $(STAMPS)/installed
	$(BIN)/python -m pip install -qq --editable '.[ray]'
	touch $@

.PHONY: clean
clean: ## remove what was built (not .venv, not the runtime)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
