# Needs Linux, Python 3.11 to 3.13 and make; everything else goes into $(VENV).
#
#   PYTHON=...       the interpreter to use (otherwise the first that fits, see scripts/choose_python.sh)
#   TORCH=...        the version of torch to test with (otherwise that in scripts/make_env.py), in a
#                    folder of its own: make test TORCH=2.15.0 PYTHON=python3.13
#   TORCH_INDEX=...  the package index to take torch from (otherwise see scripts/make_env.py)

PYTHON ?=
TORCH ?=
VENV ?= .venv$(if $(TORCH),-$(TORCH)$(if $(PYTHON),-$(notdir $(PYTHON))))
TORCH_INDEX ?=
DEMO_ARGS ?=
BENCH_OUT ?= runs/bench/step_cpu.json
export TORCH_INDEX
ifneq ($(TORCH),)
export TORCH
endif

PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
INTEGRATIONS := $(VENV)-integrations
DOCS := $(VENV)-docs

.DEFAULT_GOAL := help
.PHONY: help env demo test test-cpu test-extensive test-operators test-integrations docs lint test-gpu bench clean distclean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

env: $(INSTALLED) ## create the environment and install into it

demo: $(INSTALLED) ## train a sweep of sixteen small CNNs as one fleet, and compare
	$(PY) -m trainmux demo $(DEMO_ARGS)

# Side by side: mypy takes most of the time that lint takes, on one core.
test: $(INSTALLED) ## lint, type check, unit and CPU tests
	$(MAKE) -j 2 lint test-cpu

test-cpu: $(INSTALLED)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(PY) -m pytest tests/unit tests/cpu -n 2 --dist worksteal

test-extensive: $(INSTALLED) ## further combinations, which make test leaves out
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(PY) -m pytest tests/unit tests/cpu -n 2 --dist worksteal -m extensive

test-operators: $(INSTALLED) ## all of torch's operator database, of which make test has a part
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(PY) -m pytest tests/cpu/operators -n 2 --dist worksteal -m operators

test-integrations: $(INTEGRATIONS)/.installed ## tests against Optuna and the like, in an environment of their own
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(INTEGRATIONS)/bin/python -m pytest tests/integrations -n 2 --dist worksteal

docs: $(DOCS)/.installed ## the site, into build/site, with tutorials that are run while it is built
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(DOCS)/bin/python -m mkdocs build --strict

lint: $(INSTALLED) ## ruff, mypy and the order of imports
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-cache

# Installs nothing: for machines that have torch, pytest and a GPU, but perhaps no network. With pytest-xdist,
# files run side by side in processes, and tests of device bytes or time by themselves after that.
test-gpu: ## GPU tests, with the Python that already has torch
	@$(or $(PYTHON),python3) -c 'import torch, pytest' || { \
	  echo "make test-gpu needs a Python with torch and pytest; name it with PYTHON=..." >&2; exit 1; }
	@export PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}"; \
	run() { echo "pytest $$*"; $(or $(PYTHON),python3) -m pytest -p no:benchmark "$$@"; }; \
	if $(or $(PYTHON),python3) -c 'import xdist' 2>/dev/null; then \
	  status=0; \
	  run tests/gpu -m 'not alone' -n 6 --dist loadfile || status=$$?; \
	  run tests/gpu -m alone || status=$$?; \
	  exit $$status; \
	else \
	  run tests/gpu; \
	fi

bench: $(INSTALLED) ## CPU benchmark: a fleet of small models against eager torch and vmap
	$(PY) -m benchmarks step --device cpu --workloads mlp,small:cnn,small:transformer --widths 16 --out $(BENCH_OUT)
	$(PY) -m benchmarks report $(BENCH_OUT)

clean: ## remove caches and build output
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f $(INSTALLED) $(INTEGRATIONS)/.installed $(DOCS)/.installed

distclean: clean ## also remove the environment
	rm -rf $(VENV) $(INTEGRATIONS) $(DOCS)

$(INSTALLED): EXTRAS := dev
$(INTEGRATIONS)/.installed: EXTRAS := dev,search,postgresql,loggers,huggingface,lightning,sklearn
$(DOCS)/.installed: EXTRAS := docs
$(INSTALLED) $(INTEGRATIONS)/.installed $(DOCS)/.installed: pyproject.toml scripts/make_env.py
	@python=$$(sh scripts/choose_python.sh '$(PYTHON)') && "$$python" scripts/make_env.py '$(@D)' '$(EXTRAS)'
	@touch $@
