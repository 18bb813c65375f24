"""Peak memory and time of the distillation loss, chunked against written out, forward and backward, as a ratio.

python -m recipes.benchmarks.loss [--tokens 512] [--vocabulary 49152] [--width 576] [--output runs/bench]

Each runs in a process of its own, whose peak is counted above what it held with its inputs; the times are medians of
three, CPU time of one thread. The default vocabulary and width are SmolLM2's; Llama 3 has 128256 and 2048 to 4096.
"""

import argparse
import multiprocessing
import statistics
import threading
import time
from pathlib import Path

import psutil
import torch
from torch import nn

from convert.alignment.distillation.loss import IGNORED, LossWeights, chunk_loss, distillation_loss

from .measure import result_of, save_report

WEIGHTS = LossWeights(ce_weight=1.0, kl_weight=1.0)
SAMPLE_SECONDS = 0.001


def naive_loss(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, labels: torch.Tensor, weights: LossWeights
) -> torch.Tensor:
    """The mean loss from all logits (B, L, V) at once and labels (B, L)."""
    keep = labels[:, 1:] != IGNORED
    s, t, y = student_logits[:, :-1][keep], teacher_logits[:, :-1][keep], labels[:, 1:][keep]
    return chunk_loss(s, y, t, weights)[0] / keep.sum()


def measure(chunked: bool, tokens: int, vocabulary: int, width: int, results) -> None:
    """Put (bytes, seconds, loss) of one way into a queue."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    student, teacher = (nn.Linear(width, vocabulary, bias=False) for _ in range(2))
    teacher.requires_grad_(False)
    hidden, of_teacher = torch.randn(1, tokens, width, requires_grad=True), torch.randn(1, tokens, width)
    labels = torch.randint(vocabulary, (1, tokens))
    student.weight.grad, hidden.grad = torch.zeros_like(student.weight), torch.zeros_like(hidden)

    def step() -> float:
        if chunked:
            inputs, following = hidden[0, :-1], labels[0, 1:]
            out = distillation_loss(
                inputs, student, following, lambda span: teacher(of_teacher[0, :-1][span]), WEIGHTS
            )
            loss = out.loss / out.tokens
        else:
            loss = naive_loss(student(hidden), teacher(of_teacher), labels, WEIGHTS)
        loss.backward()
        return loss.item()

    process, peak, done = psutil.Process(), [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], process.memory_info().rss)
            time.sleep(SAMPLE_SECONDS)

    before = process.memory_info().rss
    watcher = threading.Thread(target=watch)
    watcher.start()
    seconds, value = [], 0.0
    for _ in range(3):
        started = time.thread_time()
        value = step()
        seconds.append(time.thread_time() - started)
    done.set()
    watcher.join()
    results.put((peak[0] - before, statistics.median(seconds), value))


def main(tokens: int, vocabulary: int, width: int, output: Path) -> dict:
    """Measure both ways, print and keep the ratios."""
    context, figures = multiprocessing.get_context("spawn"), {}
    for name, chunked in (("written out", False), ("chunked", True)):
        results = context.Queue()
        child = context.Process(target=measure, args=(chunked, tokens, vocabulary, width, results))
        child.start()
        size, seconds, value = result_of(child, results)
        figures[name] = {"bytes": size, "seconds": seconds, "loss": value}
        print(f"{name:12} {size / 1e6:8.0f} MB above its inputs  {seconds:6.2f} s  loss {value:.6f}")
    ours, plain = figures["chunked"], figures["written out"]
    ratios = {key: ours[key] / plain[key] for key in ("bytes", "seconds")}
    print(f"chunked over written out: memory {ratios['bytes']:.3f}, time {ratios['seconds']:.2f}")
    report = {"tokens": tokens, "vocabulary": vocabulary, "width": width, "figures": figures, "ratios": ratios}
    save_report(output, "loss", [], **report)
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--output", type=Path, default=Path("runs/bench"))
    main(**vars(parser.parse_args()))
