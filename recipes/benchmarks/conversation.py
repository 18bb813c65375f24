"""Tokens that a model reads in each turn of a conversation, with checkpoints of its cache and without.

    python -m recipes.benchmarks.conversation HYBRID

Twenty turns; in some of them the answer is made again, in others the question is edited after it was answered. The
conversation is held with the model's own chat template and with one that leaves out the reasoning of earlier answers.
Without checkpoints a text that does not begin as the cache does is read from its first token on.
"""

import argparse
import itertools
import statistics
import time

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from convert.checkpoint.load import load_model, prompt_tokenizer
from convert.fit.text import documents
from convert.tools.chat import CHECKPOINTS, Conversation
from modeling_llamba.hybrid.cache_checkpoint import CacheCheckpoint

TURNS = 20
QUESTION = 240
"""Characters of a question."""
AGAIN, EDITED = 3, 5
"""Every third answer is made again, every fifth question edited."""
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'].split('</think>')[-1] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""Template of a model that reasons: no reasoning is left of earlier answers, and the prompt begins a new one."""


def hold(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: list[str], checkpoints: int, answer: int
) -> tuple[list[tuple[str, int]], Conversation]:
    """Steps of a conversation, the tokens read in each but for those of the answer; and the conversation."""
    conversation = Conversation(model, tokenizer, checkpoints)
    read = []
    hook = model.get_input_embeddings().register_forward_hook(lambda module, ids, out: read.append(ids[0].shape[1]))
    steps = []

    def take(what: str, say, *arguments) -> None:
        read.clear()
        say(*arguments, answer, 0.0)
        asked = tokenizer.apply_chat_template(conversation.messages[:-1], add_generation_prompt=True)["input_ids"]
        steps.append((what, sum(read) - (len(conversation.held) - len(asked))))

    for number, question in enumerate(questions, start=1):
        take(f"{number}", conversation.answer, question)
        if number % AGAIN == 0:
            take(f"{number}, again", conversation.answer_again, None)
        if number % EDITED == 0:
            take(f"{number}, edited", conversation.answer_again, f"In short: {question}")
    hook.remove()
    return steps, conversation


def milliseconds(conversation: Conversation, repeats: int = 20) -> tuple[float, float]:
    """Time to make a checkpoint, and to go back to it."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        checkpoint = CacheCheckpoint(conversation.cache)
        made = time.process_time()
        checkpoint.restore(conversation.cache)
        times.append((made - started, time.process_time() - made))
    made, restored = zip(*times, strict=True)
    return 1e3 * statistics.median(made), 1e3 * statistics.median(restored)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--answer", type=int, default=48, help="tokens of an answer at most")
    args = parser.parse_args()
    model = load_model(args.model)
    tokenizer = prompt_tokenizer(args.model)
    questions = [text[:QUESTION] for text in itertools.islice(documents("default"), TURNS)]
    columns = []
    for template in (tokenizer.chat_template, REASONING):
        tokenizer.chat_template = template
        for checkpoints in (0, CHECKPOINTS):
            steps, conversation = hold(model, tokenizer, questions, checkpoints, args.answer)
            columns.append(steps)
    print("| turn | tokens read: without checkpoints | with | template without reasoning: without | with |")
    print("|---|---|---|---|---|")
    for row in zip(*columns, strict=True):
        print(f"| {row[0][0]} | {' | '.join(str(count) for _, count in row)} |")
    print(f"| all | {' | '.join(str(sum(count for _, count in column)) for column in columns)} |")
    size = conversation.marks[-1].checkpoint.nbytes() / 2**20
    made, restored = milliseconds(conversation)
    print(f"\nA checkpoint after {len(conversation.held)} tokens: {size:.1f} MiB, {made:.1f} ms; back to it: ", end="")
    print(f"{restored:.1f} ms.")


if __name__ == "__main__":
    main()
