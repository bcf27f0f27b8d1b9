# make demo: set up, then train on two CPU ranks, stop half-way, resume, finish.
# make test: set up, then lint, type check and run all tests.
# make chaos: the long versions of the fault tests, an hour or so.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Beside the other packages: transformers imports it wherever it is, half a second in every process.
FLOAT8 := .venv/float8
# So is Triton: without a GPU it only interprets kernels, for the test of them.
TRITON := .venv/triton
# Tests that need it.
WITH_FLOAT8 := $(addprefix tests/dist/test_,float8.py compile.py tunnel.py) \
  tests/unit/parallel/test_float8_layers.py tests/unit/tunnel/test_fake.py
# Others over ranks, so that no part is much longer than the rest.
OF_FILES := $(addprefix tests/dist/test_,hf_roundtrip.py reshard.py dcp_import.py full_disk.py)
WITHOUT := $(addprefix --ignore=,$(WITH_FLOAT8) $(OF_FILES))
# Tests start processes by the hundred; where the environment forbids it, each would compile us anew.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest

.PHONY: setup demo test test-alerts test-ranks test-command test-faults test-rest test-files test-float8 lint chaos clean
setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps --upgrade --target $(FLOAT8) torchao
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps --upgrade --target $(TRITON) triton
	touch $@

demo: $(READY)
	rm -rf runs/demo
	$(BIN)/shardwise train examples/demo.yaml train.stop_after=60
	@echo; echo "--- the run stopped half-way; the same command goes on ---"; echo
	$(BIN)/shardwise train examples/demo.yaml

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# Alerts are about time, so the test that makes them fire has little beside it. Of the others two
# parts side by side keep two cores busy: three gain nothing, and four take 12% longer.
test: $(READY)
	@$(MAKE) --no-print-directory -j2 --output-sync=target lint test-alerts
	@echo "parts of the tests run side by side; each prints when it ends"
	@$(MAKE) --no-print-directory -j2 --output-sync=target test-rest test-faults test-ranks test-command test-float8 test-files

test-alerts: $(READY)
	$(PYTEST) tests/chaos/test_live_alerts.py

test-ranks: $(READY)
	$(PYTEST) tests/dist $(WITHOUT)

test-command: $(READY)
	$(PYTEST) tests/golden

test-faults: $(READY)
	$(PYTEST) tests/chaos --ignore tests/chaos/test_live_alerts.py

test-rest: $(READY)
	$(PYTEST) tests --ignore tests/dist --ignore tests/golden --ignore tests/chaos $(WITHOUT)

test-files: $(READY)
	$(PYTEST) $(OF_FILES)

test-float8: $(READY)
	PYTHONPATH=$(FLOAT8) SHARDWISE_FLOAT8=1 $(PYTEST) $(WITH_FLOAT8)
	PYTHONPATH=$(TRITON) TRITON_INTERPRET=1 $(PYTEST) tests/unit/kernels/test_interpreted.py

# The long sweeps: every kill point, thousands of damaged files and inputs, every mesh to any other,
# every way to spread a run against one process, every family against plain PyTorch, a step over a
# slow link, 300 steps in float8.
chaos: $(READY)
	SHARDWISE_CHAOS=1 SHARDWISE_FULL_GRID=1 $(PYTEST) -s tests/chaos \
	  tests/unit/checkpoint tests/dist/test_reshard.py tests/dist/test_full_disk.py \
	  tests/dist/test_equivalence.py tests/dist/test_links.py tests/dist/test_families.py tests/fuzz
	PYTHONPATH=$(FLOAT8) SHARDWISE_FLOAT8=1 SHARDWISE_CHAOS=1 $(PYTEST) tests/dist -m 'long and torchao'

clean:
	rm -rf .venv runs
