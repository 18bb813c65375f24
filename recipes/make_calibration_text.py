"""Write the calibration text that ships: prose, dialogue and code that the embedded teacher wrote on many subjects.

python -m recipes.make_calibration_text convert/alignment/calibration_text.jsonl

SmolLM2-135M-Instruct is under Apache-2.0 and the prompts are this project's own, so the text is free of other rights.
What it says is often wrong; it only has to be text. Takes ten minutes on two cores.
"""

import argparse
import itertools
import json
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


@torch.no_grad()
def main(output: Path, seed: int, documents: int) -> None:
    """Generate and write one JSON line per document."""
    gguf = embedded_teacher()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    torch.manual_seed(seed)
    pairs = [form.format(subject) for subject, form in itertools.product(SUBJECTS, FORMS)]
    order = torch.randperm(len(pairs)).tolist()[:documents]
    with open(output, "w") as file:
        for first in range(0, len(order), BATCH):
            chats = [[{"role": "user", "content": pairs[i]}] for i in order[first : first + BATCH]]
            inputs = tokenizer.apply_chat_template(
                chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
            )
            drawn = model.generate(**inputs, do_sample=True, temperature=1.0, top_p=0.95, max_new_tokens=TOKENS)
            for text in tokenizer.batch_decode(drawn[:, inputs.input_ids.shape[1] :], skip_special_tokens=True):
                file.write(json.dumps({"text": text.strip()}) + "\n")
            file.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", type=int, default=144)
    arguments = parser.parse_args()
    main(arguments.output, arguments.seed, arguments.documents)
