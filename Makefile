# What there is to do here, one line each: `make help`.
# Every target makes what it needs, on a machine that has Python >= 3.10, git and make.

PYTHON   ?= python3
VENV     ?= .venv
# Passed through: `make demo ARGS="--teacher tiny"`, `make test ARGS="-k grid"`.
ARGS     ?=
# Processes that share the tests, file by file; WORKERS=0 keeps them in one.
WORKERS  ?= 2
# What `make fuzz` tries.
SURFACE  ?= rpc
RUNS     ?= 10000
# What `make chaos` and `make soak` play.
SEEDS    ?= 0-199
TEACHERS ?= 2000
# Passed to pip, for a mirror or an index of CPU builds of torch.
PIP_ARGS ?=

BIN      := $(VENV)/bin
PY       := $(BIN)/python
READY    := $(VENV)/.ready
PYTEST    = $(PY) -m pytest -n $(WORKERS) --dist loadfile
# protoc finds the plugin of mypy-protobuf on the PATH.
IN_VENV  := PATH="$(abspath $(BIN)):$$PATH"
PROTOS   := $(shell cd proto && find teacher_logits -name '*.proto' | sort)
SERVICES := $(filter %_service.proto,$(PROTOS))
BUF      := $(abspath $(BIN)/buf)
RELEASED := released.binpb
BENCHES   = $(notdir $(basename $(shell grep -l '^def main\>' benchmarks/*.py 2>/dev/null)))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test test-all fuzz chaos soak check gpu-check lint format types floors \
        deploy-check proto proto-check proto-release wheel image-check bench clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- the environment ---------------------------------------------------------

venv: $(READY)  ## build .venv with everything that development needs

# pip first: the one that comes with Python may be too old to know --group.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "$(PYTHON) is older than Python 3.10: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q $(PIP_ARGS) -U pip
	$(PY) -m pip install $(PIP_ARGS) -c constraints.txt -e '.[demo]' --group dev
	@touch $@

# --- the main job ------------------------------------------------------------

demo: $(READY)  ## a real teacher, a student that learns from it (ARGS="--teacher tiny")
	$(BIN)/teacher-logits demo $(ARGS)

# --- checks ------------------------------------------------------------------

test: lint types floors proto-check  ## all static checks and the suite without its slow tier
	$(PYTEST) -m "not slow" $(ARGS)

test-all: lint types floors proto-check  ## the same with the slow tier
	$(PYTEST) $(ARGS)

# RUNS inputs; atheris comes with the group `fuzz`, for Python 3.11 and newer.
# ARGS="--engine own" goes without, and ARGS="--seed 2" elsewhere.
fuzz: $(READY)  ## fuzz one surface of tests/fuzz (SURFACE=rpc RUNS=10000)
	$(if $(filter own --engine=own,$(ARGS)),,\
	    $(PY) -m pip install -q $(PIP_ARGS) -c constraints.txt --group fuzz)
	$(PY) -m tests.fuzz $(SURFACE) --runs $(RUNS) $(ARGS)

chaos: $(READY)  ## kill, stop and starve everybody: SEEDS=0-199 (docs/reliability.md)
	TEACHER_LOGITS_FAULT_SEEDS=$(SEEDS) TEACHER_LOGITS_STORM_SEEDS=$(SEEDS) \
	    TEACHER_LOGITS_LOCAL_FAULT_SEEDS=$(SEEDS) TEACHER_LOGITS_RAY_FAULT_SEEDS=$(SEEDS) \
	    $(PY) -m pytest -n $(WORKERS) tests/processes/faults/test_scenarios.py \
	    tests/processes/faults/test_storms.py tests/processes/faults/test_local_faults.py \
	    tests/ray/faults $(ARGS)

soak: $(READY)  ## go on in peace, and hold every process against what it was: TEACHERS=2000
	TEACHER_LOGITS_SOAK_TEACHERS=$(TEACHERS) $(PY) -m pytest \
	    tests/processes/faults/test_soak.py $(ARGS)

check: lint types floors proto-check deploy-check wheel  ## all static checks, and the wheel builds

lint: $(READY)  ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: $(READY)  ## ruff: mend what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(READY)  ## mypy --strict
	$(BIN)/mypy

floors: $(READY)  ## import-linter: who may import whom
	$(BIN)/lint-imports --no-logo

# With PY=python3 it takes the torch of that interpreter, and builds no .venv: it needs this
# checkout and what `pip install teacher-logits` would bring, and no network.
gpu-check: $(if $(filter $(BIN)/python,$(PY)),$(READY))  ## on a machine with a GPU: its acceptance test, JSON out (ARGS="--device 1")
	PYTHONPATH="proto:server:client$${PYTHONPATH:+:$$PYTHONPATH}" $(PY) -m tests.gpu.check $(ARGS)

# What a tool is missing for is skipped in sight, and is a failure in CI.
deploy-check: $(READY)  ## each file of deploy/ by a tool that knows its kind (ARGS="chart units")
	$(PY) -m deploy.check $(if $(CI),--require-all) $(ARGS)

# --- the schema --------------------------------------------------------------

# Made in a folder of their own first: a schema that does not compile leaves the stubs
# alone, and the check changes nothing. Stubs of services alone, since protoc writes an
# empty _pb2_grpc.py for every other file.
FRESH := build/stubs
.PHONY: fresh-stubs
fresh-stubs: $(READY)
	@rm -rf $(FRESH) && mkdir -p $(FRESH)
	@$(IN_VENV) $(PY) -m grpc_tools.protoc -Iproto --python_out=$(FRESH) --pyi_out=$(FRESH) $(PROTOS)
	@$(IN_VENV) $(PY) -m grpc_tools.protoc -Iproto --grpc_python_out=$(FRESH) \
	    --mypy_grpc_out=quiet:$(FRESH) $(SERVICES)

proto: fresh-stubs  ## make the stubs anew from the .proto files
	find proto/teacher_logits/v1 -name '*_pb2*.py*' -not -path '*/__pycache__/*' -delete
	cp $(FRESH)/teacher_logits/v1/* proto/teacher_logits/v1/

# `diff -r` finds what is stale, missing and left over.
proto-check: fresh-stubs  ## the stubs are those of the .proto files; buf lint; buf breaking
	@diff -r -x __pycache__ -x __init__.py -x '*.proto' \
	    proto/teacher_logits/v1 $(FRESH)/teacher_logits/v1 || \
	    { echo "The stubs are not those of the .proto files: run make proto, and commit both."; exit 1; }
	cd proto && $(BUF) lint && $(BUF) breaking --against $(RELEASED)

proto-release: proto-check  ## keep the schema of this release, for buf breaking and tests/compat
	cd proto && $(BUF) build --exclude-source-info -o $(RELEASED)
	cp proto/$(RELEASED) tests/compat/releases/$$($(PY) -c 'import teacher_logits as t; print(t.__version__)').binpb
	$(PY) -m tests.compat.golden_bytes

# --- the rest ----------------------------------------------------------------

wheel: $(READY)  ## build dist/*.whl
	$(PY) -m build --wheel

# Without Docker: root, and Debian's buildah, debootstrap and runc. The torch that pip finds
# has to be the build that the Dockerfile asks for: PIP_ARGS, or
# ARGS="--build-arg TORCH_BUILD=...".
image-check: $(READY)  ## build deploy/Dockerfile in a clean root, and score with it
	$(PY) -m deploy.image_check --build-arg PIP_ARGS="$(PIP_ARGS)" $(ARGS)

bench: $(READY)  ## run the benchmarks, one JSON object a line (BENCHES=scoring, ARGS=...)
	@test -n "$(BENCHES)" || { echo "No benchmarks/*.py with a main()."; exit 1; }
	@for bench in $(BENCHES); do $(PY) -m benchmarks.$$bench $(ARGS) || exit; done

clean:  ## remove what was built, .venv excepted
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
