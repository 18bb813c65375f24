"""Greedy decoding of the same prompts: how long it agrees, how much it repeats, what instructions it follows.

Likelihood flatters a student: it is always shown the teacher's own history. Here each reads its own.
"""

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from convert.checkpoint.load import encode

from .fidelity import PROMPTS, common_prefix, repetition
from .instructions import INSTRUCTIONS
from .metrics import Advance

CHECKED = (*PROMPTS, *(instruction.prompt for instruction in INSTRUCTIONS))


@torch.no_grad()
def continuations(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    max_new_tokens: int,
    batch_size: int,
    advance: Advance = lambda done: None,
) -> list[list[int]]:
    """What each prompt is continued with, the end-of-text token included; in batches padded on the left."""
    said: list[list[int]] = []
    for start in range(0, len(prompts), batch_size):
        inputs = encode(tokenizer, list(prompts[start : start + batch_size]), chat=True)
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        ids = model.generate(
            **inputs,
            do_sample=False,
            num_beams=1,
            temperature=None,
            top_p=None,
            top_k=None,
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
        )
        said += [_up_to_end(row, model) for row in ids[:, inputs["input_ids"].shape[1] :].tolist()]
        advance(len(said))
    return said


def _up_to_end(tokens: list[int], model: PreTrainedModel) -> list[int]:
    end = model.generation_config.eos_token_id
    ends = set(end) if isinstance(end, (list, tuple)) else {end}
    last = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: last + 1]


def judge(
    prompts: list[str],
    model: list[list[int]],
    teacher: list[list[int]] | None,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Figures over all prompts, and every answer."""
    rules = {instruction.prompt: instruction.followed for instruction in INSTRUCTIONS}
    ours, theirs = (_judged(prompts, tokens, rules, tokenizer) for tokens in (model, teacher))
    agreement = None
    if teacher is not None:
        shares = [common_prefix(a, b) / max(len(a), len(b)) for a, b in zip(model, teacher, strict=True)]
        agreement = sum(shares) / len(shares)
    asked = [prompt for prompt in prompts if prompt in rules]
    return {
        "prompts": len(prompts),
        "greedy_agreement": agreement,
        "repetition": ours["repetition"],
        "teacher_repetition": theirs["repetition"],
        "instructions": {"model": ours["followed"], "teacher": theirs["followed"], "count": len(asked)},
        "answers": [
            {"prompt": prompt, "model": mine, "teacher": reference, "followed": followed, "teacher_followed": other}
            for prompt, mine, reference, followed, other in zip(
                prompts, ours["texts"], theirs["texts"], ours["by_prompt"], theirs["by_prompt"], strict=True
            )
        ],
    }


def _judged(prompts: list[str], tokens: list[list[int]] | None, rules: dict, tokenizer) -> dict[str, Any]:
    nothing = [None] * len(prompts)
    if tokens is None:
        return {"texts": nothing, "by_prompt": nothing, "repetition": None, "followed": None}
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    by_prompt = [rules[p](text) if p in rules else None for p, text in zip(prompts, texts, strict=True)]
    judged = [kept for kept in by_prompt if kept is not None]
    return {
        "texts": texts,
        "by_prompt": by_prompt,
        "repetition": sum(map(repetition, tokens)) / len(tokens),
        "followed": sum(judged) / len(judged) if judged else None,
    }
