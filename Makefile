# `make` lists the targets. PYTHON and TORCH_BUILD are explained in setup.sh.
PYTHON ?= python3
export PYTHON TORCH_BUILD

# setup.sh writes this file last, with the folder it was made in: a .venv that was copied or moved is made anew.
STAMP := .venv/set-up

# Of `make compare`: the sizes. STEPS=N sets the timed steps, and FASTEST=v4 makes it fail where another model is faster.
PRESET ?= tiny

.PHONY: help setup preflight train compare test test-slow docs slides lint types clean
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## make the environment .venv, once

preflight: $(STAMP) ## set up, then check what this machine can do for each part (JSON=FILE.json: also as a file)
	.venv/bin/python -m common.preflight $(JSON:%=--json %)

train: $(STAMP) ## set up, then train Version 1 at the default configuration
	cd version1_pytorch_baseline && ../.venv/bin/python tiny_llama_v1.py

compare: $(STAMP) ## set up, then measure all versions and peers at PRESET (tiny), into comparison/PRESET
	@if .venv/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
	then set -- --use-amp --num-steps $(or $(STEPS),50); else set -- --num-steps $(or $(STEPS),3) --repeats 1; fi; \
	.venv/bin/python version2_pytorch_fused/benchmark_suite.py --models available --preset $(PRESET) \
		--batch-sizes preset --seq-lengths preset --output-dir comparison/$(PRESET) $(FASTEST:%=--fastest %) "$$@"

test: $(STAMP) ## set up, then run the tests
	.venv/bin/python -m pytest -n 2

test-slow: $(STAMP) ## set up, then run the tests that take minutes
	.venv/bin/python -m pytest -m slow -n 2

docs: $(STAMP) ## rewrite the tables of the documents from results/
	.venv/bin/python -m common.documents

slides: docs ## make the slides, slides/slides.html, from slides/slides.md
	.venv/bin/python -m common.documents.slides.deck

lint: $(STAMP) ## check style and format
	.venv/bin/python -m ruff check
	.venv/bin/python -m ruff format --check

types: $(STAMP) ## check types with mypy
	.venv/bin/python -m mypy

clean: ## remove the environment and caches; what runs have written stays
	rm -rf .venv .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): setup.sh pyproject.toml constraints.txt
	sh setup.sh

ifneq "$(shell cat $(STAMP) 2>/dev/null)" "$(CURDIR)"
.PHONY: $(STAMP)
endif
