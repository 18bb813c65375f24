"""Answers to the same prompts: how long they agree, how much they repeat, if they end, what instructions they follow.

Likelihood flatters a hybrid: it is always shown the teacher's own history. Here each model reads its own. The
instructions are in the manner of IFEval (Zhou et al. 2023, arXiv 2311.07911), which lm-eval has as well, but needs
further packages and a download for. A rule judges the form of an answer, never its truth.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

from convert.checkpoint.load import encode
from convert.tools.generate import sampling

from .metrics import Advance, mean

Enough = Callable[[int, list[int]], bool]
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue? Answer in one sentence.",
    "Write a short letter to a friend about a walk in the woods.",
    "List three uses of copper.",
    "My name is Miriam and I live in Oslo. What is my name, and where do I live?",
    "Explain to a child what a bank does.",
    "Translate into French: good morning, my friend.",
    "What is 17 plus 25?",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "Write a Python function that returns the sum of a list.",
    "Summarise in one sentence: The ship left the harbour at dawn. By noon a storm had broken its mast, and the crew "
    "rowed back through the night.",
    "What should I pack for a week in the mountains in winter?",
    "Tell me a story about a lighthouse keeper who finds a letter in a bottle.",
)


def words(text: str) -> list[str]:
    """Runs of letters and digits."""
    return re.findall(r"[^\W_]+(?:['’-][^\W_]+)*", text)


def sentences(text: str) -> int:
    """Number of parts that end in a full stop, an exclamation or a question mark."""
    return sum(bool(words(part)) for part in re.split(r"(?<=[.!?])\s+", text.strip()))


def items(text: str, mark: str) -> int:
    """Number of lines that begin with a mark, a regular expression."""
    return sum(bool(re.match(mark, line.strip())) for line in text.splitlines())


def is_json(text: str, *keys: str) -> bool:
    """Return True if the text is a JSON object with these keys, with nothing around it but a code fence."""
    try:
        found = json.loads(re.sub(r"^```(?:json)?\s*|\s*```$", "", text.strip()))
    except json.JSONDecodeError:
        return False
    return isinstance(found, dict) and set(keys) <= found.keys()


INSTRUCTIONS: dict[str, Callable[[str], bool]] = {
    "Answer in capital letters only: what is the capital of Italy?": str.isupper,
    "Tell me in lowercase letters only what a bicycle is. Do not use capital letters.": str.islower,
    "Answer with a single word: what colour is grass?": lambda text: len(words(text)) == 1,
    "In at most five words, say what bread is made from.": lambda text: 1 <= len(words(text)) <= 5,
    "Describe a forest in at least 40 words.": lambda text: len(words(text)) >= 40,
    "Write exactly two sentences about dogs.": lambda text: sentences(text) == 2,
    "Explain in exactly one sentence what a clock is for.": lambda text: sentences(text) == 1,
    "List three fruits as bullet points, each beginning with '- '.": lambda text: items(text, "- ") == 3,
    "Give a numbered list of exactly three animals (1., 2., 3.).": lambda text: items(text, r"\d+\.") == 3,
    "Name five cities, separated by commas, and write nothing else.": lambda text: text.count(",") == 4,
    "Write a sentence that contains the words 'river' and 'stone'.": lambda text: (
        {"river", "stone"} <= {word.lower() for word in words(text)}
    ),
    "Write one sentence about birds without any comma.": lambda text: bool(words(text)) and "," not in text,
    "Begin your answer with the words 'In short' and explain what a school is.": lambda text: text.strip().startswith(
        "In short"
    ),
    "Tell me a fact about whales and end your answer with the words 'The end.'": lambda text: text.strip().endswith(
        "The end."
    ),
    "Answer with JSON only: an object with the keys 'name' and 'age'.": lambda text: is_json(text, "name", "age"),
    "Put your whole answer in double quotation marks: greet the reader.": lambda text: (
        re.fullmatch(r'".+"', text.strip(), re.DOTALL) is not None
    ),
    "Write the numbers from 1 to 5, separated by spaces, and nothing else.": lambda text: (
        text.strip().removesuffix(".") == "1 2 3 4 5"
    ),
    "Is water wet? Answer only 'yes' or 'no'.": lambda text: text.strip().removesuffix(".").lower() in ("yes", "no"),
}
PROMPTS = (*QUESTIONS, *INSTRUCTIONS)


def common_prefix(a: list[int], b: list[int]) -> int:
    """Number of equal leading tokens."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def repetition(tokens: list[int], n: int = 4) -> float:
    """Share of n-grams that occurred before."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    if not grams:
        return 0.0
    return 1 - len(set(grams)) / len(grams)


def _stop(enough: Enough, first: int, begin: int) -> Callable[..., torch.Tensor]:
    """Tell `generate` which rows need not go on, of a batch from prompt `first` on with answers from token `begin`."""

    def stop(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        answers = enumerate(ids[:, begin:].tolist(), first)
        return torch.tensor([enough(prompt, answer) for prompt, answer in answers], device=ids.device)

    return stop


@torch.no_grad()
def continuations(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    max_new_tokens: int,
    batch_size: int,
    advance: Advance = lambda done: None,
    temperature: float = 0.0,
    seed: int = 0,
    chat: bool = True,
    enough: Enough = lambda prompt, answer: False,
) -> list[list[int]]:
    """The answer to each prompt, the end-of-text token included; in batches padded on the left.

    Args:
        chat: the prompts are a user's messages where there is a chat template; if not, each is a text to go on with.
        enough: whether an answer so far, given with the number of its prompt, need not go on; padding may follow it.
    """
    said: list[list[int]] = []
    torch.manual_seed(seed)
    end = model.generation_config.eos_token_id
    if not isinstance(end, (list, tuple)):
        end = [end]
    ends = set(end)
    for start in range(0, len(prompts), batch_size):
        inputs = encode(tokenizer, list(prompts[start : start + batch_size]), chat=chat)
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        ids = model.generate(
            **inputs,
            **{"temperature": None, "top_p": None, "top_k": None} | sampling(temperature),
            num_beams=1,
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
            stopping_criteria=StoppingCriteriaList([_stop(enough, start, inputs["input_ids"].shape[1])]),
        )
        for row in ids[:, inputs["input_ids"].shape[1] :].tolist():
            last = next((i for i, token in enumerate(row) if token in ends), len(row))
            said.append(row[: last + 1])
        advance(len(said))
    return said


def judge(
    prompts: list[str],
    model: list[list[int]],
    teacher: list[list[int]] | None,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
) -> dict[str, Any]:
    """Figures over all prompts, and every answer; one that has as many tokens as it may have was cut off."""
    answers: list[dict[str, Any]] = [{"prompt": prompt} for prompt in prompts]
    found: dict[str, Any] = {"prompts": len(prompts)}
    found |= dict.fromkeys(("greedy_agreement", "equal_answers", "tokens_alike", "length_ratio", "cut_off"))
    if teacher is not None:
        found |= agreement(model, teacher, max_new_tokens)
    found |= {"repetition": mean([repetition(said) for said in model]), "teacher_repetition": None}
    if teacher is not None:
        found["teacher_repetition"] = mean([repetition(said) for said in teacher])
    share = {}
    for which, said in (("model", model), ("teacher", teacher)):
        followed = []
        texts = [None] * len(prompts)
        if said is not None:
            texts = tokenizer.batch_decode(said, skip_special_tokens=True)
        for answer, text in zip(answers, texts, strict=True):
            rule = INSTRUCTIONS.get(answer["prompt"])
            answer |= {which: text, f"{which}_followed": None}
            if rule is not None and text is not None:
                answer[f"{which}_followed"] = rule(text)
                followed.append(answer[f"{which}_followed"])
        share[which] = mean(followed)
    count = sum(prompt in INSTRUCTIONS for prompt in prompts)
    return found | {"instructions": share | {"count": count}, "answers": answers}


def agreement(model: list[list[int]], teacher: list[list[int]], max_new_tokens: int) -> dict[str, float]:
    """Figures of answers beside the teacher's to the same prompts."""
    pairs = list(zip(model, teacher, strict=True))
    alike = [common_prefix(a, b) for a, b in pairs]
    longer = [max(len(a), len(b)) for a, b in pairs]
    return {
        "greedy_agreement": sum(part / whole for part, whole in zip(alike, longer, strict=True)) / len(pairs),
        "equal_answers": sum(a == b for a, b in pairs) / len(pairs),
        "tokens_alike": sorted(alike)[len(alike) // 2],
        "length_ratio": sum(map(len, model)) / sum(map(len, teacher)),
        "cut_off": sum(len(a) == max_new_tokens > len(b) for a, b in pairs) / len(pairs),
    }
