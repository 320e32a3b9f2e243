# What people and CI call. `make help` lists it.
.DEFAULT_GOAL := help
SHELL := /bin/sh
VENV := .venv/bin
# Processes that share the tests, a file at a time: one more than two cores, as a third of their time is waiting and
# tests/conftest.py mixes files that wait with files that compute. Each may run engines and has LMDeploy's libraries, about
# 2 GB.
WORKERS ?= 3
# What starts a hundred Python processes compiles its modules once, also where images ask for no bytecode.
TESTS := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(VENV)/pytest

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## install everything into .venv (quick when nothing changed)
	@PYTHON="$(PYTHON)" scripts/setup

.PHONY: up
up: setup ## install, prepare the model, start two engines and the gateway; ARGS="--tiny --port 8001" are handed on
	@exec $(VENV)/kvgate up $(ARGS)

.PHONY: test
test: setup ## the whole suite, but for the slow lane; ARGS="-k name" are handed on
	@$(TESTS) -m "not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=40 --durations-min=3 $(ARGS)

.PHONY: slow
slow: setup ## the slow lane: the real SmolLM2 (downloads 93 MB the first time), and Hypothesis with all of its examples
	@$(TESTS) -m "slow or hypothesis" --hypothesis-profile=full $(ARGS)

# SCENARIO is one of loadtests/scenarios; TARGET the gateway; ARGS go to locust ("--scale 0.1 --crowd 2 --duration 60").
SCENARIO ?= chat
TARGET ?= http://127.0.0.1:8000
.PHONY: loadtest
loadtest: setup ## a scenario against a running gateway: make loadtest SCENARIO=rag TARGET=http://127.0.0.1:8000; report in artifacts/
	@mkdir -p artifacts/loadtest
	@$(VENV)/locust -f loadtests/locustfile.py --headless --only-summary --host "$(TARGET)" --scenario "$(SCENARIO)" \
		--html "artifacts/loadtest/$(notdir $(SCENARIO)).html" --csv "artifacts/loadtest/$(notdir $(SCENARIO))" $(ARGS)

.PHONY: check
check: setup ## formatting, lint, types, import rules, generated files, the pinned set, subjects of new commits
	@$(VENV)/ruff format --check .
	@$(VENV)/ruff check .
	@$(VENV)/mypy
	@$(VENV)/mypy scripts
	@$(VENV)/lint-imports
	@$(VENV)/python scripts/lock.py --check
	@$(VENV)/python -m dashboards.build --check
	@$(VENV)/python scripts/commit_subjects.py

.PHONY: measures
measures: setup ## sizes: lines by package, long files, long functions, large classes
	@$(VENV)/python scripts/measures.py

.PHONY: dashboards
dashboards: setup ## the dashboards against the types that Grafana publishes; nothing without npm
	@$(VENV)/python scripts/check_dashboards.py

.PHONY: format
format: setup ## format the code and mend what the linter can mend
	@$(VENV)/ruff format .
	@$(VENV)/ruff check --fix .

.PHONY: lock
lock: setup ## resolve requirements/cpu.txt anew from pyproject.toml
	@$(VENV)/python scripts/lock.py

.PHONY: docs
docs: setup ## write docs/metrics.md and the dashboards' JSON anew from the catalogue and dashboards/
	@$(VENV)/python -m dashboards.build

.PHONY: clean
clean: ## remove .venv and what tools have left
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist artifacts *.egg-info
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
