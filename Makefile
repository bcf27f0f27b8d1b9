# make demo: set up, then train on two CPU ranks, stop half-way, resume, finish.
# make test: set up, then lint, type check and run all tests.
# make chaos: the long versions of the fault tests, an hour or so.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup demo test test-ranks test-command test-rest lint chaos clean
setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
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

# Ranks often wait for each other, so three thirds of the tests side by side use two cores well.
test: lint
	@echo "three thirds of the tests run side by side; each prints when it ends"
	@$(MAKE) --no-print-directory -j3 --output-sync=target test-ranks test-command test-rest

test-ranks: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/dist

test-command: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/golden

test-rest: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest tests --ignore tests/dist --ignore tests/golden

# The long sweeps: every kill point, thousands of damaged files, every mesh to every other, every
# way to spread a run against one process.
chaos: $(READY)
	SHARDWISE_CHAOS=1 SHARDWISE_FULL_GRID=1 OMP_NUM_THREADS=1 $(BIN)/pytest -s tests/chaos \
	  tests/unit/checkpoint tests/dist/test_reshard.py tests/dist/test_full_disk.py \
	  tests/dist/test_equivalence.py

clean:
	rm -rf .venv runs
