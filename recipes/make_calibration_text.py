"""Write the calibration text that ships: passages of Wikipedia, and what the embedded teacher wrote in a chat.

python -m recipes.validation_text runs/text
python -m recipes.make_calibration_text OUT.jsonl --wikipedia runs/text/wikipedia_5.jsonl

Wikipedia is under CC BY-SA 3.0 (see calibration_text.LICENSE beside the text). SmolLM2-135M-Instruct is under
Apache-2.0 and the prompts are this project's own; what it says is often wrong, it only has to be text. Fitted on the
teacher's own writing alone, hybrids are much worse on other text (docs/alignment.md). Takes ten minutes on two cores.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from convert.teacher import embedded_teacher

FORMS = (
    "Write an encyclopedia article about {}.",
    "Write a newspaper report about {}.",
    "Tell a short story in which {} plays a part.",
    "Explain {} to a colleague in a long letter.",
    "Write a dialogue between two people who disagree about {}.",
    "Write an opinion column about {}.",
    "Write a practical guide for beginners on {}.",
    "Write a forum post with a question about {}, and three answers.",
)
SUBJECTS = (
    "the history of a small harbour town", "sorting algorithms in Python", "a football final", "bread baking",
    "the water cycle", "a court case about patents", "migratory birds", "the invention of the telescope",
    "running a bookshop", "antibiotics", "a mountain rescue", "tax law", "jazz in the 1950s", "volcanoes",
    "a mayor's election", "learning to swim", "the price of wheat", "space probes", "a stolen painting",
    "databases and SQL", "grandparents", "railway timetables", "chess openings", "a new vaccine trial",
)  # fmt: skip
TOKENS = 440
BATCH = 48


PASSAGES_PER_CHAT = 3


@torch.no_grad()
def chats(seed: int, count: int) -> Iterator[str]:
    """Answers of the embedded teacher to prompts on many subjects, in many forms."""
    gguf = embedded_teacher()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    torch.manual_seed(seed)
    pairs = [form.format(subject) for subject, form in itertools.product(SUBJECTS, FORMS)]
    order = torch.randperm(len(pairs)).tolist()[:count]
    for first in range(0, len(order), BATCH):
        prompts = [[{"role": "user", "content": pairs[i]}] for i in order[first : first + BATCH]]
        inputs = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        drawn = model.generate(**inputs, do_sample=True, temperature=1.0, top_p=0.95, max_new_tokens=TOKENS)
        for text in tokenizer.batch_decode(drawn[:, inputs.input_ids.shape[1] :], skip_special_tokens=True):
            yield text.strip()


def interleaved(passages: list[str], written: list[str]) -> Iterator[str]:
    """Some passages, then one chat, and so on, so that a short cut from the beginning holds both."""
    for index, text in enumerate(written):
        yield from passages[PASSAGES_PER_CHAT * index : PASSAGES_PER_CHAT * (index + 1)]
        yield text


def main(arguments: argparse.Namespace) -> None:
    """One JSON line per document."""
    passages = [json.loads(line)["text"] for line in arguments.wikipedia.read_text().splitlines()]
    needed = PASSAGES_PER_CHAT * arguments.chats
    if len(passages) < needed:
        raise ValueError(f"{arguments.wikipedia} has {len(passages)} passages; {arguments.chats} chats need {needed}.")
    texts = interleaved(passages[-needed:], list(chats(arguments.seed, arguments.chats)))
    arguments.output.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--wikipedia", type=Path, required=True, help='a JSON line {"text": ...} per passage')
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chats", type=int, default=144)
    main(parser.parse_args())
