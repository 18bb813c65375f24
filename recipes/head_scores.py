"""Which heads serve recall, whether the cheap score agrees with ablation, and what keeping them brings.

python -m recipes.head_scores runs/heads [--model MODEL] [--window 32]

Every layer sees a window and 4 sinks only. A key/value head is scored by the attention its query heads put on a token
to be copied (one pass of the teacher), and, for the best and some others, by what giving it full attention back takes
off the loss on a copy probe longer than the window: taken from the best eight, or added to them. Then copying and
bytes with the best 0, 1, 2, 4, ... heads kept, and with `--validation` KL by position. Writes OUT/heads.json and a map
of layers and heads.
"""

import argparse
import json
from pathlib import Path

import matplotlib
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers.utils import logging

from convert.alignment.alignment import load_tokenizer
from convert.alignment.probes import copy_probe, plain_tokens
from convert.alignment.retrieval import best_kv_heads, retrieval_scores
from convert.alignment.teacher_model import TeacherModel
from convert.cache_size import cache_bytes
from convert.config import make_config
from convert.head_selection import query_heads
from convert.teacher import embedded_teacher, find_teacher

from .fidelity import Yardstick, text_rows

matplotlib.use("Agg")
CONTEXT = 4096


class Copying:
    """A copy probe, and how well the teacher does when its layers see only a window and some heads everything."""

    def __init__(self, teacher: TeacherModel, distance: int):
        self.teacher = teacher
        self.probe = copy_probe(plain_tokens(teacher.config.vocab_size), 2, distance, seed=5)
        self.shared = teacher.config.num_attention_heads // teacher.config.num_key_value_heads

    @torch.no_grad()
    def measure(self, kept: list[tuple[int, int]] | None) -> tuple[float, float]:
        """Loss in nats per copied token and accuracy; None is the teacher as it is."""
        model = self.teacher.whole() if kept is None else self.student(kept)
        hidden = model.model(self.probe.ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[:, :-1][self.probe.answers[:, 1:]])
        truth = self.probe.ids[self.probe.answers]
        loss = nn.functional.cross_entropy(logits.float(), truth).item()
        return loss, (logits.argmax(-1) == truth).float().mean().item()

    def student(self, kept: list[tuple[int, int]]) -> nn.Module:
        """The teacher behind a window, nothing fitted."""
        self.teacher.keep_heads(query_heads(kept, self.shared))
        return self.teacher.hybrid({i: self.teacher.mixer(i).eval() for i in range(self.teacher.num_layers)})

    def bytes(self, kept: list[tuple[int, int]]) -> int:
        """Of keys and values in float32 at 4k tokens, window included and the unused mixers not."""
        config = self.teacher.config
        per_token = 2 * 4 * config.head_dim
        window = config.num_hidden_layers * config.num_key_value_heads * (self.teacher.options.window + 3)
        return per_token * (window + len(kept) * CONTEXT)


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's."""
    ranks = [torch.tensor(values).argsort().argsort().double() for values in (a, b)]
    return torch.corrcoef(torch.stack(ranks))[0, 1].item()


def plot(scores: torch.Tensor, path: Path) -> None:
    """Layer by query head."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 3.5))
    image = axes.imshow(scores.T, aspect="auto", cmap="viridis")
    axes.set_xlabel("layer")
    axes.set_ylabel("query head")
    figure.colorbar(image, label="attention on the token to copy")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(output: Path, model: str | None, window: int, tested: int, validation: Path | None = None) -> dict:
    """Score, check, measure, print, plot, save."""
    logging.set_verbosity_error()
    output.mkdir(parents=True, exist_ok=True)
    options = make_config(
        model=model or str(embedded_teacher()), output="unused", attention_ratio=0.0, align="none", window=window
    )
    found = find_teacher(options.model)
    teacher = TeacherModel(found, options, found.open_weights())
    copying, layers = Copying(teacher, max(2 * window, 64)), list(range(teacher.num_layers))
    scores = retrieval_scores(teacher, window)
    yardstick = None
    if validation is not None:
        tokenizer = load_tokenizer(found, trust_remote_code=False)
        short, long = (text_rows(validation, tokenizer, *shape) for shape in ((512, 8), (2048, 3)))
        yardstick = Yardstick(teacher.whole(), tokenizer, short, long)
    total = teacher.num_layers * teacher.config.num_key_value_heads
    ranked = best_kv_heads(scores, layers, total, copying.shared)
    counts = [0, *(2**i for i in range(10) if 2**i < total), total]
    kept = []
    for count in counts:
        loss, accuracy = copying.measure(ranked[:count])
        kept.append({"kept": count, "loss": loss, "copy": accuracy, "bytes": copying.bytes(ranked[:count])})
        if yardstick is not None:
            figures = yardstick.measure(Yardstick.final_hidden(copying.student(ranked[:count])))
            kept[-1] |= {name: figures[name] for name in ("kl", "kl_95", "kl_by_position", "top1")}
        print(kept[-1], flush=True)
    # beside the best few, since a single head of a circuit may bring nothing alone
    base = ranked[: min(8, total)]
    with_base = copying.measure(base)[0]
    others = ranked[len(base) : len(base) + tested]
    costs = [copying.measure([pair for pair in base if pair != left])[0] - with_base for left in base]
    gains = [with_base - copying.measure([*base, more])[0] for more in others]
    of_kv = scores.unflatten(1, (-1, copying.shared)).amax(-1)
    agreement = rank_correlation([of_kv[pair].item() for pair in base + others], costs + gains)
    teacher_loss, teacher_copy = copying.measure(None)
    report = {
        "window": window,
        "teacher": {"loss": teacher_loss, "copy": teacher_copy},
        "teacher_bytes": cache_bytes(teacher.mixer_plan.config, CONTEXT, torch.float32)[0],
        "scores": scores.tolist(),
        "ranked": ranked,
        "kept": kept,
        "ablation": [[*pair, value] for pair, value in zip(base + others, costs + gains, strict=True)],
        "rank_correlation": agreement,
    }
    (output / "heads.json").write_text(json.dumps(report, indent=2) + "\n")
    plot(scores, output / "heads.png")
    _print(report)
    return report


def _print(report: dict) -> None:
    table = Table("key/value heads kept", "copy", "loss", "bytes at 4k", "of the teacher's", "KL", "KL beyond 1024")
    for row in report["kept"]:
        share = row["bytes"] / report["teacher_bytes"]
        kl = (f"{row['kl']:.3f}", f"{row['kl_by_position']['1024-2048']:.3f}") if "kl" in row else ()
        table.add_row(
            str(row["kept"]), f"{row['copy']:.3f}", f"{row['loss']:.2f}", f"{row['bytes']:,}", f"{share:.1%}", *kl
        )
    teacher = report["teacher"]
    table.add_row(
        "teacher", f"{teacher['copy']:.3f}", f"{teacher['loss']:.2f}", f"{report['teacher_bytes']:,}", "100%"
    )
    console = Console()
    console.print(table)
    best = " ".join(f"{layer}:{kv}" for layer, kv in report["ranked"][:16])
    console.print(f"best key/value heads (layer:head): {best}")
    console.print(f"rank correlation of score and ablation over {len(report['ablation'])} heads: "
                  f"{report['rank_correlation']:.2f}")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", help="teacher (default: the embedded one)")
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--validation", type=Path, help="text to measure KL on")
    parser.add_argument("--tested", type=int, default=8, help="heads beyond the best eight to check by ablation")
    arguments = parser.parse_args()
    main(arguments.output, arguments.model, arguments.window, arguments.tested, arguments.validation)
