"""Models made by the project's environment, and vLLM's engine in this process."""

import gc
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.vllm.reference import NEW_TOKENS

ROOT = Path(__file__).parents[2]
# oneDNN keeps what it has compiled for the last 1,024 shapes, so that a process grows with new lengths of prompts;
# it reads this before its first product
os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "8"
IS_SECOND = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
SETTINGS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
}


def start_reference(*arguments: str) -> subprocess.Popen:
    """A module with arguments, in the environment that REFERENCE_PYTHON names: the project's own."""
    python = os.environ.get("REFERENCE_PYTHON", ".venv/bin/python")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VLLM")}
    return subprocess.Popen([python, "-m", *arguments], cwd=ROOT, env=environment)


def reference(*arguments: str) -> None:
    """`start_reference`, run to its end.

    Raises:
        CalledProcessError: it failed.
    """
    process = start_reference(*arguments)
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, process.args)


def greedy(llm, prompts, **options):
    """The tokens of each prompt and their log-probabilities."""
    from vllm import SamplingParams

    sampling = SamplingParams(**dict(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0) | options)
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """A folder of models with their references."""
    folder = tmp_path_factory.mktemp("models")
    reference("tests.vllm.reference", "make", str(folder))
    return folder


@pytest.fixture(scope="session")
def prompts(models) -> list[list[int]]:
    return json.loads((models / "prompts.json").read_text())


@pytest.fixture
def engine(models, monkeypatch):
    """name of a model, vLLM's options -> an engine with it."""
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    started = []

    def start(name: str, **options):
        from vllm import LLM

        usual = {"kv_cache_memory_bytes": 2**27, "dtype": "float32", "disable_log_stats": False}
        started.append(LLM(str(models / name), **usual | options))
        return started[-1]

    yield start
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    started.clear()
    gc.collect()
    cleanup_dist_env_and_memory()
