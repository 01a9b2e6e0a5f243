# `make` lists the targets. PYTHON and TORCH_BUILD are explained in setup.sh.
PYTHON ?= python3
export PYTHON TORCH_BUILD

# setup.sh fills this file last, with the folder it was made in: a .venv that was copied or moved is made anew.
STAMP := .venv/set-up

# Of `make compare`: the sizes. STEPS=N sets the timed steps.
PRESET ?= tiny
export PRESET STEPS JSON RUN OTHER

.PHONY: help setup setup-jax preflight train compare page test test-slow test-browser docs slides lint types clean
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## make the environment .venv, once; other targets do so if need be (4 min)

setup-jax: $(STAMP) ## add JAX on the CPU, for the profiling lab (1 min)
	.venv/bin/python -m pip install --constraint $$(test -f .venv/kept.txt && echo .venv/kept.txt || echo constraints.txt) --editable '.[jax]'

preflight: $(STAMP) ## check what this machine can do; JSON=FILE: also as a file (1 min)
	.venv/bin/python -m common.preflight $${JSON:+--json "$$JSON"}

train: $(STAMP) ## train Version 1 at the default configuration, and save the model (1 min)
	cd version1_pytorch_baseline && ../.venv/bin/python tiny_llama_v1.py --save-model model
	@echo "let it write: .venv/bin/python decoding/generate.py --checkpoint version1_pytorch_baseline/model --prompt 'def '"

compare: $(STAMP) ## measure all versions and peers at PRESET, tiny, into comparison/PRESET; accuracy on a GPU alone (5 to 10 min)
	@if .venv/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
	then set -- --use-amp --num-steps "$${STEPS:-50}"; else set -- --metrics throughput,memory --num-steps "$${STEPS:-3}"; fi; \
	.venv/bin/python version2_pytorch_fused/benchmark_suite.py --models available --preset "$$PRESET" \
		--batch-sizes preset --seq-lengths preset --output-dir "comparison/$$PRESET" "$$@"

test: $(STAMP) ## run the tests (4-9 min on two cores)
	.venv/bin/python -m pytest -n 2 --dist worksteal

test-slow: $(STAMP) ## run the tests that take minutes each
	.venv/bin/python -m pytest -m slow -n 2 --dist worksteal

docs: $(STAMP) ## rewrite the tables of the documents from results/ (seconds)
	.venv/bin/python -m documents

slides: $(STAMP) ## make slides/slides.html with Marp, which needs npx and a network (1 min)
	text=$$(.venv/bin/python questions.py --slides) && printf '%s\n' "$$text" | \
		npx --yes @marp-team/marp-cli --output slides/slides.html

page: $(STAMP) ## make run.html, the page of the profile or trace RUN= (and OTHER=) (1 min)
	.venv/bin/python page.py "$${RUN:?is missing: make page RUN=FILE}" $${OTHER:+"$$OTHER"}

test-browser: $(STAMP) ## open the pages in chromium, which must be here (1 min)
	@.venv/bin/python -c 'import playwright' 2>/dev/null || .venv/bin/python -m pip install --editable '.[browser]' \
		--constraint $$(test -f .venv/kept.txt && echo .venv/kept.txt || echo constraints.txt)
	.venv/bin/python -m pytest -m browser

lint: $(STAMP) ## check style and format (seconds)
	.venv/bin/python -m ruff check
	.venv/bin/python -m ruff format --check

types: $(STAMP) ## check types with mypy (1 min)
	.venv/bin/python -m mypy

clean: ## remove the environment and caches; what runs have written stays
	rm -rf .venv build .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): setup.sh pyproject.toml constraints.txt
	sh setup.sh

ifneq "$(shell cat $(STAMP) 2>/dev/null)" "$(CURDIR)"
.PHONY: $(STAMP)
endif
