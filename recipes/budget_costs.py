"""What each head costs by the scores of a cache budget, as a map, and whether ablation says the same.

python -m recipes.budget_costs runs/costs [--model MODEL] [--align-config FILE] [--work-dir runs/budget/work]

The scores (convert/alignment/head_costs.py) integrate over the line from full attention everywhere to windows
everywhere. Ablation stands at the ends of that line: one head sees the window while all others see everything
(`first`), and one head sees everything while all others see the window (`last`). Tested are the dearest key/value
heads and as many spread over the others. Writes OUT/costs.json and OUT/costs.png.
"""

import argparse
import json
from pathlib import Path

import matplotlib
import torch
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from convert.alignment import BudgetSearch
from convert.alignment.head_costs import final_hidden, gated_heads
from convert.cache_budget import KVHead, budget_of
from convert.config import make_config
from convert.teacher import embedded_teacher, find_teacher

from .head_scores import rank_correlation

matplotlib.use("Agg")


class Ablation:
    """KL, and recall of a needle, when some heads of the teacher see a window."""

    def __init__(self, search: BudgetSearch):
        self.search, self.window = search, search.windows()[0]
        self.layers, self.kv_heads = search.budget.shape
        self.kl_loss, self.recall = search.kl_loss(), search.asked

    @torch.no_grad()
    def loss(self, windowed: torch.Tensor) -> float:
        """KL and weighted recall in nats; `windowed` (layers, key/value heads) is 1 for heads that see a window."""
        gates = windowed.repeat_interleave(self.search.budget.shared, 1)
        model, sinks = self.search.model, self.search.budget.options.sinks
        with gated_heads(model, self.window, sinks, gates.to(model.device)):
            total = self.kl_loss(final_hidden(model, self.search.scoring)).item()
            if self.recall.counts:
                total += self.search.weight * self.recall.loss(final_hidden(model, self.recall.probe.ids)).item()
        return total

    def ends(self, heads: list[KVHead]) -> list[tuple[float, float]]:
        """Of each head: the cost of its window where all others see everything, and where all others see a window."""
        none, every = torch.zeros(self.layers, self.kv_heads), torch.ones(self.layers, self.kv_heads)
        without, with_all = self.loss(none), self.loss(every)
        found = []
        for layer, kv in heads:
            one, others = none.clone(), every.clone()
            one[layer, kv], others[layer, kv] = 1.0, 0.0
            found.append((self.loss(one) - without, with_all - self.loss(others)))
            print(f"  {layer}:{kv} first {found[-1][0]:.4f} last {found[-1][1]:.4f}", flush=True)
        return found


def tested_heads(costs: torch.Tensor, count: int) -> list[KVHead]:
    """The dearest `count`, and as many evenly spread over the ranks of the others."""
    kv_heads = costs.shape[1]
    ranked = [(i // kv_heads, i % kv_heads) for i in costs.flatten().argsort(descending=True, stable=True).tolist()]
    others = ranked[count:]
    return ranked[:count] + others[:: max(1, len(others) // max(count, 1))][:count]


def plot(kl: torch.Tensor, recall: torch.Tensor, path: Path) -> None:
    """Two maps, layer by key/value head."""
    from matplotlib import pyplot

    figure, both = pyplot.subplots(2, 1, figsize=(9, 4), sharex=True, layout="constrained")
    for axes, costs, label in zip(both, (kl, recall), ("KL, nats a token", "recall, nats an answer"), strict=True):
        image = axes.imshow(costs.T, aspect="auto", cmap="viridis")
        axes.set_ylabel("key/value head")
        axes.set_yticks(range(costs.shape[1]))
        figure.colorbar(image, label=label)
    both[1].set_xlabel("layer")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments: argparse.Namespace) -> dict:
    """Score, ablate, compare, print, plot, save."""
    logging.set_verbosity_error()
    arguments.output.mkdir(parents=True, exist_ok=True)
    options = make_config(
        model=arguments.model or str(embedded_teacher()), output="unused", dtype="float32",
        cache_ratio=0.25, work_dir=str(arguments.work_dir or arguments.output / "work"),
        align_config=arguments.align_config, calibration_dataset=arguments.calibration_dataset,
        calibration_tokens=arguments.calibration_tokens,
    )  # fmt: skip
    found = find_teacher(options.model)
    weights = found.open_weights()
    search = BudgetSearch(budget_of(options, found, weights), weights, lambda what, done, total: None)
    costs = search.head_costs((False,))
    window = search.windows()[0]
    kl, recall = torch.tensor(costs.kl[window]), torch.tensor(costs.recall)
    total = kl + search.weight * recall
    heads = tested_heads(total, arguments.tested)
    rows = [
        {"head": f"{layer}:{kv}", "integrated": total[layer, kv].item(), "first": first, "last": last}
        for (layer, kv), (first, last) in zip(heads, Ablation(search).ends(heads), strict=True)
    ]
    integrated = [row["integrated"] for row in rows]
    ends = {name: [row[name] for row in rows] for name in ("first", "last")}
    ends["mean"] = [(row["first"] + row["last"]) / 2 for row in rows]
    report = {
        "window": window,
        "recall_weight": search.weight,
        "kl": {str(at): table for at, table in costs.kl.items()},
        "recall": costs.recall,
        "ablation": rows,
        "rank_correlation": {name: rank_correlation(integrated, values) for name, values in ends.items()},
    }
    (arguments.output / "costs.json").write_text(json.dumps(report, indent=2) + "\n")
    plot(kl, recall, arguments.output / "costs.png")
    _print(report)
    return report


def _print(report: dict) -> None:
    table = Table("layer:head", "integrated", "first to see a window", "last to see a window")
    for row in report["ablation"]:
        table.add_row(row["head"], *(f"{row[name]:.4f}" for name in ("integrated", "first", "last")))
    console = Console()
    console.print(table)
    agreement = ", ".join(f"{name} {value:.2f}" for name, value in report["rank_correlation"].items())
    console.print(f"rank correlation with ablation over {len(report['ablation'])} heads: {agreement}")


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", help="teacher (default: the embedded one)")
    parser.add_argument("--align-config", help="alignment file; its `budget` says how heads are scored")
    parser.add_argument("--calibration-dataset", help="text (default: what ships)")
    parser.add_argument("--calibration-tokens", type=int, default=30720)
    parser.add_argument(
        "--work-dir", type=Path, help="where scores are kept, another run's for one (default: OUT/work)"
    )
    parser.add_argument("--tested", type=int, default=8, help="of the dearest heads, and as many of the others")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(parsed())
