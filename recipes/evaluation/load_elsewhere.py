"""Load a hybrid in a process that cannot import this project, so that only the code that it ships is used.

    python -I recipes/evaluation/load_elsewhere.py JOB.json

JOB names a folder or Hub id, chat prompts, a text and a file for the results: what the model answers, and its logits
over the text.

Shapes: L length, V vocabulary.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


class ProjectNotInstalled:
    """An import finder that refuses this project's packages."""

    packages = ("convert", "modeling_llamba", "modeling_phimamba", "recipes")

    def find_spec(self, name, path=None, target=None):
        """Called by the import system before its own finders."""
        if name.split(".")[0] in self.packages:
            raise ModuleNotFoundError(f"{name} is not installed here")


if __name__ == "__main__":  # importing this file must not hide the project from whoever imports it
    sys.meta_path.insert(0, ProjectNotInstalled())

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from transformers.utils import logging  # noqa: E402


def answer(model, tokenizer, prompt: str, max_new_tokens: int) -> str:
    """The model's greedy answer to one chat message."""
    chat = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    generated = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(generated[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@torch.no_grad()
def main(job: dict) -> None:
    """Carry out a job."""
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(job["folder"], trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(job["folder"], trust_remote_code=True, dtype=torch.float32).eval()
    ids = tokenizer(job["text"], return_tensors="pt").input_ids[:, : job["max_tokens"]]
    results = {
        "class": f"{type(model).__module__}.{type(model).__name__}",
        "parameters": model.num_parameters(),
        "answers": [answer(model, tokenizer, prompt, job["max_new_tokens"]) for prompt in job["prompts"]],
        "logits": model(ids).logits[0],
    }
    torch.save(results, job["results"])


def run_elsewhere(
    model: str, prompts: list[str], text: str, max_tokens: int, max_new_tokens: int, **environment: str
) -> dict[str, Any]:
    """Load a folder or a Hub repository in such a process, with these changes to its environment.

    Returns:
        class, parameters, answers to the prompts, and logits (L, V) over the text's first `max_tokens` tokens.
    """
    with tempfile.TemporaryDirectory() as scratch:
        job, results = Path(scratch) / "job.json", Path(scratch) / "results.pt"
        asked = {"folder": model, "prompts": prompts, "text": text, "max_tokens": max_tokens}
        job.write_text(json.dumps(asked | {"max_new_tokens": max_new_tokens, "results": str(results)}))
        changed = {"HF_MODULES_CACHE": f"{scratch}/modules", "TRANSFORMERS_VERBOSITY": "error"} | environment
        command = [sys.executable, "-I", str(Path(__file__).absolute()), str(job)]
        subprocess.run(command, cwd=scratch, check=True, env=os.environ | changed)
        return torch.load(results)


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        main(json.load(file))
