# Every target sets up its own environment in $(VENV) on first use, and again when pyproject.toml changes.
#
#   make demo | test | test-all | quick | lint | docs | gpu | clean
#
# PYTHON=python3.12      the interpreter that the environment is made from
# TORCH=torch==2.11.0    the torch that goes into it, before anything that depends on torch
# VENV=system            no environment: use $(PYTHON) as it is (a machine that has torch for its GPU already)
# EXTRAS=dev,zoo         the project's extras that are installed
# PART=0 DRY=1             of gpu: one part; what runs without a GPU
# RESULTS=FOLDER           of gpu: where results, logs and junit files go
# WORKERS=0              processes that run tests; 0: in pytest's own process, as a debugger needs it

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
EXTRAS ?= dev
OUT ?= out
RECIPES ?= delayed current
PYTEST_ARGS ?=
WORKERS ?= 2

ifeq ($(VENV),system)
RUN := PYTHONPATH=$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PYTHON)
READY :=
DEMO_READY :=
else
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
# The demo needs less than the tests; what is there for them does for it, too.
DEMO_READY := $(if $(wildcard $(READY)),$(READY),$(VENV)/.demo)
endif

# Inductor compiles C++ on the CPU. Without a compiler the same rewritten graph runs through aot_eager.
CXX_FOUND := $(shell command -v $(or $(CXX),c++) g++ clang++ 2>/dev/null | head -n 1)
BACKEND ?= $(if $(CXX_FOUND),inductor,aot_eager)

.DELETE_ON_ERROR:
.PHONY: demo test test-all quick lint docs gpu clean

demo: $(DEMO_READY)
	@$(if $(CXX_FOUND),,echo "no C++ compiler found: the demo runs with --backend $(BACKEND)")
	for recipe in $(RECIPES); do \
		$(RUN) examples/train_gpt.py --recipe $$recipe --backend $(BACKEND) --out $(OUT)/demo-$$recipe || exit 1; \
	done

# The fast suite, everything, and what holds lists (passes, operations, pages, the order of imports): tests/support/suites.py.
test: $(READY)
	$(RUN) -m pytest -m "not gpu and not exhaustive" --cpu-limit 3 -n $(WORKERS) --max-worker-restart=0 --dist loadfile $(PYTEST_ARGS)

test-all: $(READY)
	$(RUN) -m pytest -m "not gpu" -n $(WORKERS) --max-worker-restart=0 --dist loadfile $(PYTEST_ARGS)

quick: $(READY)
	$(RUN) -m pytest -m "not gpu and not exhaustive" -n $(WORKERS) tests/test_repository.py tests/fp8pass/test_runner.py tests/fp8pass/test_recipes.py tests/lowering/test_ops.py tests/lowering/test_operation.py $(PYTEST_ARGS)

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

docs: $(READY)
	$(RUN) -m sphinx --fail-on-warning --keep-going -q -d $(OUT)/docs-cache docs $(OUT)/docs

# On a machine with a GPU: what works, the tests that need one, the benchmarks, in parts that end after nine minutes, with the torch
# that $(PYTHON) has, for CUDA. DRY=1 needs neither. Without make: python3 -m benchmarks.gpu.
gpu: $(if $(DRY),$(READY))
	$(if $(DRY),$(RUN),PYTHONPATH=$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PYTHON)) -m benchmarks.gpu $(if $(PART),--part $(PART)) $(if $(DRY),--cpu) $(if $(RESULTS),--out $(RESULTS))

clean:
	rm -rf $(OUT) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	$(if $(filter system,$(VENV)),,rm -rf $(VENV))

# torch comes first and by exact version: a range would let pip take the newest CUDA build.
$(VENV)/.ready: pyproject.toml
	$(call environment,$(EXTRAS),$@)

$(VENV)/.demo: pyproject.toml
	$(call environment,demo,$@)

define environment
$(PYTHON) -m venv $(VENV)
$(RUN) -m pip install --disable-pip-version-check "$(TORCH)"
$(RUN) -m pip install --disable-pip-version-check --editable ".[$(1)]"
touch $(2)
endef
