"""Tiny teachers that chat, hybrids made from them, and conversations; every word is a token."""

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from convert import convert
from tests.helpers.teachers import make_teacher

TEMPLATE = (
    "{% for m in messages %}{{ 'w4 ' if m['role'] == 'user' else 'w5 ' }}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ ' </s> ' }}{% else %}{{ ' w6 ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'w5 ' }}{% endif %}"
)
REASONING = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'w4 ' + m['content'] }}"
    "{% else %}{{ ' w6' + m['content'].split('w7')[-1] + ' </s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' w6 w5 ' }}{% endif %}"
)
"""As DeepSeek-R1-Distill's: w5 begins the reasoning, in the generation prompt alone, and w7 ends it."""
STRICT = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + TEMPLATE
)
"""As Gemma's."""
TOOLS = (
    "{% for t in tools or [] %}"
    "{{ 'w8 ' + t['function']['name'] + ' ' + t['function']['description'] | default('') + ' ' }}{% endfor %}"
    "{% for m in messages %}{{ {'user': 'w4 ', 'tool': 'w7 '}.get(m['role'], 'w5 ') }}{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}"
    "{{ ' w9 ' + c['function']['name'] + ' ' + c['function']['arguments'].values() | join(' ') }}{% endfor %}"
    "{{ ' </s> ' if m['role'] == 'assistant' else ' w6 ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'w5 ' + mood | default('') }}{% endif %}"
)
"""With functions, their calls and results."""
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}


def chat_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Three special tokens, then the words w3 to w127."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL.values(), *(f"w{i}" for i in range(3, 128))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)
    tokenizer.chat_template = template
    return tokenizer


def template_of(family: str) -> str:
    """TRL's chat template of a family."""
    import trl  # which the environments of kernels and vLLM lack

    return (Path(trl.__file__).parent / "chat_templates" / f"{family}.jinja").read_text()


def parsing_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """One with TRL's template of a family, which can tell reasoning and calls in an answer."""
    from trl.chat_template_utils import add_response_schema

    return add_response_schema(chat_tokenizer(template_of(family)))


def save_chat_teacher(folder: Path, name: str = "llama-gqa", template: str | None = TEMPLATE) -> Path:
    """A tiny teacher with a tokenizer."""
    make_teacher(name).save_pretrained(folder)
    chat_tokenizer(template).save_pretrained(folder)
    return folder


def save_hybrid(teacher: Path, folder: Path, **options) -> Path:
    """A 50 % hybrid of it, mapped only."""
    convert(str(teacher), folder, **{"align": "none", "attention_layers": 0.5} | options)
    return folder


def words(rng: random.Random, low: int, high: int) -> str:
    """A sentence of so many words."""
    return " ".join(f"w{rng.randrange(7, 128)}" for _ in range(rng.randint(low, high)))


def conversations(path: Path, count: int = 12, test: int = 4, seed: int = 0) -> Path:
    """A folder with prompt-completion rows of different lengths."""
    rng = random.Random(seed)
    path.mkdir(parents=True, exist_ok=True)
    for split, n in (("train", count), ("test", test)):
        rows = [
            {
                "prompt": [{"role": "user", "content": words(rng, 2, 7)}],
                "completion": [{"role": "assistant", "content": words(rng, 3, 9)}],
            }
            for _ in range(n)
        ]
        (path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def preferences(path: Path, count: int = 8, test: int = 4, seed: int = 1) -> Path:
    """A folder with prompt, chosen and rejected."""
    rng = random.Random(seed)
    path.mkdir(parents=True, exist_ok=True)
    for split, n in (("train", count), ("test", test)):
        rows = [
            {
                "prompt": [{"role": "user", "content": words(rng, 2, 7)}],
                "chosen": [{"role": "assistant", "content": words(rng, 3, 9)}],
                "rejected": [{"role": "assistant", "content": words(rng, 3, 9)}],
            }
            for _ in range(n)
        ]
        (path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def common_arguments(hybrid: Path, teacher: Path, data: Path, output: Path, *more: str) -> list[str]:
    """Flags that every recipe takes, for two quick steps on the CPU in float32."""
    return [
        "--model_name_or_path", str(hybrid), "--teacher_model_name_or_path", str(teacher),
        "--dataset_name", str(data), "--output_dir", str(output), "--use_cpu", "true", "--bf16", "false",
        "--report_to", "none", "--max_steps", "2", "--per_device_train_batch_size", "2",
        "--learning_rate", "1e-3", "--logging_steps", "1", "--disable_tqdm", "true", "--save_strategy", "no",
        "--eval_strategy", "steps", "--eval_steps", "2", "--gradient_checkpointing", "false", *more,
    ]  # fmt: skip
