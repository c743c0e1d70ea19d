# `make` lists the targets. Each makes .venv first, or brings it up to date: two minutes once, then nothing.
# PYTHON=python3.12 takes another Python for .venv than the first of python3.11, python3.12 and python3.

BIN := .venv/bin
TOOLS := .venv-tools/bin
SETUP := python3 tools/setup_env.py $(if $(PYTHON),--python $(PYTHON))

.DEFAULT_GOAL := help
.PHONY: help env tools browser demo test check soak-protocol fuzz drills soak e2e e2e-latest compare lock sbom audit clean
# Engines fill the machine: one thing at a time, whatever -j says.
.NOTPARALLEL:

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

env: ## set up .venv
	@$(SETUP)

tools: ## set up .venv-tools: for fuzzing, the bill of materials, the audit and the locks
	@$(SETUP) --tools

browser: ## Chromium for the tests of the router's page, where root may install it with apt
	@python3 tools/setup_browser.py

demo: env ## a real model, prefill and decode apart: same answers as one engine, with the figures
	@$(BIN)/python examples/demo.py

test: check e2e ## all that CI runs

check: env browser ## format, lint, types and the fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not e2e" --durations 20

soak-protocol: env ## random walks of the handoff, for a quarter of an hour; KVBERTH_SOAK_EXAMPLES says how many
	KVBERTH_SOAK_EXAMPLES=$${KVBERTH_SOAK_EXAMPLES:-20000} $(BIN)/python -m pytest --timeout 0 tests/protocol/test_random_walks.py

fuzz: tools ## a million messages on the control channel (50,000 scripts), files of traces, bodies to the router
	$(TOOLS)/python -m tests.fuzz protocol --runs $${FUZZ_RUNS:-50000}
	$(TOOLS)/python -m tests.fuzz traces --runs $${FUZZ_RUNS:-100000}
	$(TOOLS)/python -m tests.fuzz requests --runs $${FUZZ_RUNS:-1000000}

drills: env ## break a cluster in every way, 25 times each; an hour at a time (DRILL_MINUTES), again to go on
	@mkdir -p logs
	$(BIN)/python -m kvberth faults --repeat $${DRILL_ROUNDS:-25} --minutes $${DRILL_MINUTES:-60} --resume \
		--json logs/drills.json --markdown logs/drills.md

soak: env ## a fault a minute under load, for an hour; SOAK_SECONDS says for how long
	@mkdir -p logs
	$(BIN)/python -m kvberth faults --soak $${SOAK_SECONDS:-3600} --json logs/soak.json --markdown logs/soak.md

e2e: env ## the tests that start real engines
	$(BIN)/python -m pytest -m e2e --durations 20

e2e-latest: ## the emulated ones of them on the newest supported vLLM, in .venv-latest (10 GB)
	@$(SETUP) --latest
	.venv-latest/bin/python -m pytest -m e2e tests/e2e/emulated

compare: env ## the published grid on emulated engines, 70 minutes; again to go on where it was stopped
	@$(BIN)/python -m kvberth compare --emulate qwen3-32b-8xh200 --published --out results/published \
		$(if $(wildcard results/published/compare.json),--resume)

lock: tools ## resolve requirements/*.lock anew, with the hashes of what may be installed
	$(TOOLS)/python tools/lock.py

sbom: env tools ## what is in .venv as a CycloneDX bill of materials, in build/sbom.cdx.json
	@mkdir -p build
	$(TOOLS)/cyclonedx-py environment --pyproject pyproject.toml --mc-type application --output-reproducible \
		--output-format JSON --output-file build/sbom.cdx.json $(BIN)/python

audit: tools ## known vulnerabilities of what is pinned, where advisories can be asked for
	@$(TOOLS)/python tools/audit.py

clean: ## remove .venv, logs and caches of the tools
	rm -rf .venv .venv-latest .venv-tools logs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
