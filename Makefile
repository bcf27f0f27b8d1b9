# make demo: set up, then train on two CPU ranks, stop half-way, resume, finish.
# make quick: lint, type check and the fast tests, for a change under way.
# make test: set up, then lint, type check and run all tests.
# make compat: the tests of torch's and transformers' insides, with the oldest, our own and the newest.
# make chaos: all tests in their long forms, some hours.
# make crds: the manifests against the CRDs of JobSet, Trainer and Volcano, which it downloads.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Beside the other packages: transformers imports it wherever it is, half a second in every process.
FLOAT8 := .venv/float8
# So is Triton: without a GPU it only interprets kernels, for the test of them.
TRITON := .venv/triton
# And PEFT, which reads and writes adapters in a process of its own.
PEFT := .venv/peft
# The client of Kubernetes with what its synchronous half needs, which the other packages have not,
# and Kubeflow's models of its own API.
KUBERNETES := kubernetes durationpy oauthlib requests-oauthlib websocket-client kubeflow-trainer-api
# Ray, with all that it needs, for the tests of `make chaos` that start a cluster of it.
RAY := .venv/ray
# Tests start processes by the hundred; where the environment forbids it, each would compile us anew.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest
# All cores have tests to run, so torch.compile starts no processes of its own: each imports torch.
export TORCHINDUCTOR_COMPILE_THREADS := 1
# Two workers more than cores, because a test often waits for ranks that it started. A file's tests stay
# in one worker, because they share ranks and runs; files go out in the order that tests/conftest.py
# gives them, so the long ones (tests/chaos and tests/dist in turn) come first.
WORKERS := $(shell expr $$(getconf _NPROCESSORS_ONLN) + 2)
SPREAD := -n $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder
FLOAT8_TESTS = $(shell grep -rl --include='*.py' 'mark[.]torchao' tests/dist tests/unit)
# Fast tests of every room that a change may touch without a rank being started.
QUICK = tests/unit/test_units.py $(addprefix tests/unit/,config data facts launch lease model plan verify)
# Tests that touch the insides of torch and transformers.
INSIDES = $(wildcard $(addprefix tests/unit/,internals kernels launch model parallel training tunnel)) \
  $(addprefix tests/dist/test_,compile.py equivalence.py hf_roundtrip.py offload_activations.py own_loop.py \
  precision.py replicas.py reshard.py resume.py router_loss.py tunnel.py uneven.py) \
  tests/golden/test_golden_losses.py

.PHONY: setup demo lint quick test test-alerts test-all test-float8 test-interpreted collect compat compat-oldest compat-pinned compat-newest chaos crds clean
setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt --no-deps --upgrade --target $(FLOAT8) torchao
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt --no-deps --upgrade --target $(TRITON) triton
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt --no-deps --upgrade --target $(PEFT) peft accelerate psutil
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt --no-deps $(KUBERNETES)
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

quick: lint
	$(PYTEST) $(SPREAD) $(QUICK) -m 'not slow and not dist and not torchao'

test: $(READY)
	@$(MAKE) --no-print-directory -j2 --output-sync=target test-alerts lint collect test-interpreted
	@$(MAKE) --no-print-directory -j2 test-all test-float8

# Alerts are about time, so the test that makes them fire has one process beside it.
test-alerts: $(READY)
	$(PYTEST) tests/chaos/test_live_alerts.py

test-all: $(READY)
	$(PYTEST) $(SPREAD) tests --ignore tests/chaos/test_live_alerts.py -m 'not torchao'

# One process, because each worker imports torch twice, and most of these tests share ranks.
test-float8: $(READY)
	PYTHONPATH=$(FLOAT8) SHARDWISE_FLOAT8=1 $(PYTEST) -m torchao $(FLOAT8_TESTS)

# Python keeps the bytecode of all tests, which each worker of test-all would compile for itself.
collect: $(READY)
	@$(PYTEST) --collect-only -q tests >.venv/collected || (tail -50 .venv/collected; false)

test-interpreted: $(READY)
	PYTHONPATH=$(TRITON) TRITON_INTERPRET=1 $(PYTEST) tests/unit/kernels/test_interpreted.py

# Side environments. `pip` resolves them as for a user: torch comes with its CUDA libraries, which it
# does not start without, so each takes 6 GB and some minutes. A torch that is to come:
# make compat-newest NEWEST='torch==2.16.0 transformers'
OLDEST := torch==2.11.0 transformers==5.10.1
NEWEST := torch==2.15.0 transformers==5.23.0
compat: compat-oldest compat-pinned compat-newest

compat-oldest: .venv-oldest/.ready
	$(call test_insides,.venv-oldest,.venv-oldest/float8,)

compat-pinned: $(READY)
	$(call test_insides,.venv,$(FLOAT8),$(TRITON))

compat-newest: .venv-newest/.ready
	$(call test_insides,.venv-newest,.venv-newest/float8,)

.venv-oldest/.ready: WANTED = $(OLDEST)
.venv-newest/.ready: WANTED = $(NEWEST)
.venv-oldest/.ready .venv-newest/.ready: pyproject.toml Makefile
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(WANTED) -e '.[dev]'
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(@D)/float8 torchao
	touch $@

# $(1): an environment, $(2): where its torchao is, $(3): where its Triton is, if beside.
define test_insides
@$(1)/bin/python -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)'
OMP_NUM_THREADS=1 $(1)/bin/python -m pytest $(SPREAD) $(INSIDES) -m 'not torchao'
PYTHONPATH=$(2) SHARDWISE_FLOAT8=1 OMP_NUM_THREADS=1 $(1)/bin/python -m pytest $(SPREAD) $(FLOAT8_TESTS) -m torchao
PYTHONPATH=$(3) TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(1)/bin/python -m pytest tests/unit/kernels/test_interpreted.py
endef

# All tests in their long forms: every kill point, thousands of damaged files and inputs, every mesh to
# any other, every way to spread a run against one process, every family against plain PyTorch, a step
# over a slow link, every compiled form of a block, masks of 10,000 conversations.
chaos: $(READY) $(RAY)/.ready
	SHARDWISE_CHAOS=1 SHARDWISE_FULL_GRID=1 $(PYTEST) -s tests -m 'not torchao'
	PYTHONPATH=$(FLOAT8) SHARDWISE_FLOAT8=1 SHARDWISE_CHAOS=1 $(PYTEST) tests/dist -m 'long and torchao'

$(RAY)/.ready: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt --upgrade --target $(RAY) 'ray[default,train]'
	touch $@

# The oldest release of each that takes all our manifests, and the newest. They are not ours to copy.
GITHUB ?= https://raw.githubusercontent.com
TRAINER_CRDS := $(addprefix manifests/base/crds/trainer.kubeflow.org_,trainjobs.yaml trainingruntimes.yaml)
JOBSET_CRD := config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml
VOLCANO_CRD := config/crd/volcano/bases/batch.volcano.sh_jobs.yaml
CRDS_OLDEST := $(addprefix kubeflow/trainer/v2.2.0/,$(TRAINER_CRDS)) \
  kubernetes-sigs/jobset/v0.10.0/$(JOBSET_CRD) volcano-sh/volcano/v1.15.0/$(VOLCANO_CRD)
CRDS_NEWEST := $(addprefix kubeflow/trainer/v2.3.0/,$(TRAINER_CRDS)) \
  kubernetes-sigs/jobset/v0.12.0/$(JOBSET_CRD) volcano-sh/volcano/v1.15.1/$(VOLCANO_CRD)
CEL := .venv/cel
crds: $(READY) $(CEL)/.ready $(addprefix .crds/oldest/,$(CRDS_OLDEST)) $(addprefix .crds/newest/,$(CRDS_NEWEST))
	$(call test_crds,oldest)
	$(call test_crds,newest)

.crds/oldest/% .crds/newest/%:
	mkdir -p $(@D)
	curl --fail --silent --show-error --location --output $@ $(GITHUB)/$*

$(CEL)/.ready: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt --upgrade --target $(CEL) cel-python
	touch $@

define test_crds
SHARDWISE_CRDS=.crds/$(1) PYTHONPATH=$(CEL) $(PYTEST) -s tests/unit/platforms/test_real_crds.py tests/unit/platforms/test_kube_launcher.py
endef

clean:
	rm -rf .crds .venv .venv-oldest .venv-newest runs
