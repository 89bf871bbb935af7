# make setup   .venv in this checkout, once
# make demo    watch a hybrid model reuse a long document
# make check   ruff, mypy --strict, import-linter
# make test    the test suite
# make wheel-check  the wheel, without torch, on every Python that is here
# make test-long   100,000 random operations: the core against its plain reference, under every policy or POLICY=...
# make replay-traces TRACES=DIR  full public traces: LRU agrees with a plain one, cost is never worse
# make test-store DIR=DIR  10,000 kills of processes that use a disk store, then a herd of two for 10,000 operations (hours)
# make test-size DIR=DIR  a prefix of a million tokens, 3.8 GiB, through a disk store
# make bench-core PEERS="vllm=PYTHON sglang=PYTHON"  the metadata core beside other cache managers
# make bench-data DIR=DIR PEERS="vllm=PYTHON"  tiers, checksums and codecs beside plain copies and plain I/O of that disk
# make gpu-check   verify-model for five families on CUDA (says so when there is no CUDA device)

VENV  := .venv
POLICY ?= all
BIN   := $(VENV)/bin
STAMP := $(VENV)/.kvloom-setup

# Threads that wait by spinning are several times slower when the cores have other work too.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: setup demo check test test-long test-store test-size replay-traces bench-core bench-data gpu-check wheel-check
.DEFAULT_GOAL := setup

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt tools/setup.sh
	bash tools/setup.sh $(VENV)
	@touch $@

demo: setup
	$(BIN)/kvloom demo

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: setup
	$(BIN)/pytest

test-long: setup
	$(BIN)/python -m tests.core.long --steps 100000 --policy $(POLICY)

replay-traces: setup
	$(BIN)/python tools/replay_traces.py "$(TRACES)"

test-store: setup
	$(BIN)/python -m tests.tiers.disk.long --kills 10000 $(if $(DIR),--directory "$(DIR)")
	$(BIN)/python -m tests.tiers.disk.long --operations 10000 --processes 2 $(if $(DIR),--directory "$(DIR)")

test-size: setup
	$(BIN)/python -m tests.tiers.disk.size $(if $(DIR),--directory "$(DIR)")

bench-core: setup
	$(BIN)/kvloom bench core $(foreach peer,$(PEERS),--peer $(peer)) --output benchmarks/results/core.json $(BENCH)

bench-data: setup
	$(BIN)/kvloom bench data $(if $(DIR),--directory "$(DIR)") $(foreach peer,$(PEERS),--peer $(peer)) --output benchmarks/results/data.json $(BENCH)

gpu-check: setup
	$(BIN)/python tools/gpu_check.py

wheel-check: setup
	bash tools/wheel_check.sh
