# make train                 set up what the main job needs in .venv, then train it
# make train ARGS="sim=cartpole seed=3"
# make train TORCH=cpu       with torch's build for processors, which is a tenth of the other's size
# make everything            all simulators, language models and tools on top
# make test                  that, vLLM and Ray, then format, lint, types and tests
.DEFAULT_GOAL := help
SHELL := /bin/bash
PY := .venv/bin/python
STAMP := .venv/.stamp
ALL_STAMP := .venv/.stamp-everything
TEST_STAMP := .venv/.stamp-tests
ARGS ?=
MINUTES ?= 10
TORCH ?=
export PYTHON TORCH
# In a new clone each worker of the tests would compile all modules, and all at the same time: one process does it beside mypy.
COMPILED = test -d tests/__pycache__
# Processes start by the hundred: the package is compiled for the first of them, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup everything train test test-all chaos check format docs doctor lock clean

help: ## what there is
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

setup: $(STAMP) ## make .venv with what the main job needs

everything: $(ALL_STAMP) ## add every simulator, language models and the developers' tools

$(STAMP): requirements.train.lock setup.cfg setup.py pyproject.toml scripts/setup.sh scripts/find_python.sh scripts/system_packages.sh scripts/install_libraries.py
	@scripts/setup.sh
	@touch $@

$(ALL_STAMP): $(STAMP) requirements.lock
	@scripts/setup.sh everything
	@touch $@

$(TEST_STAMP): $(ALL_STAMP) requirements.test.lock
	@scripts/setup.sh tests
	@touch $@

train: $(STAMP) ## train the main job; ARGS="…" overrides anything
	$(PY) -m embodied_rl.train $(ARGS)

check: $(TEST_STAMP) ## format, lint and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(COMPILED) || $(PY) -m pytest --collect-only -qq >/dev/null 2>&1 & $(PY) -m mypy; found=$$?; wait; exit $$found

test: check ## the tests that every change must pass
	$(PY) -m pytest --numprocesses auto --dist loadfile $(ARGS)

test-all: check ## every test, the slow ones too
	$(PY) -m pytest --numprocesses auto --dist loadfile -m "" $(ARGS)

chaos: $(TEST_STAMP) ## attack commands, files, requests and processes for MINUTES=10
	$(PY) -m tests.chaos minutes=$(MINUTES) $(ARGS)

format: $(ALL_STAMP) ## rewrite the files in the house's format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(ALL_STAMP) ## build the documentation into site/
	$(PY) -m mkdocs build --strict

doctor: $(STAMP) ## what this machine can do, and what it lacks
	$(PY) -m embodied_rl.doctor

lock: $(TEST_STAMP) ## write the three locks from what .venv holds
	$(PY) scripts/lock.py --train > requirements.train.lock.new && mv requirements.train.lock.new requirements.train.lock
	$(PY) scripts/lock.py > requirements.lock.new && mv requirements.lock.new requirements.lock
	$(PY) scripts/lock.py --tests > requirements.test.lock.new && mv requirements.test.lock.new requirements.test.lock

clean: ## remove .venv and everything that was built
	rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
