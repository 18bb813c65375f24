"""What a sequence's cache buys: windows, heads, layers and states at 1 to 50 % of the teacher's bytes.

python -m recipes.validation_text runs/text
python -m recipes.cache_budget runs/budget --validation runs/text/owt_5.jsonl

Nothing is trained: mixers are solved in closed form, windows and heads are the teacher's own. Rows are those of ROWS,
at each of `--ratios` of the teacher's cache at 4k tokens, as many as keep within it, and finished hybrids of the same
teacher, trained or not (`--hybrids`). Columns: KL on short rows with
its 95 % interval and by position on a long one; recall, by distance, of random tokens put into the latter; what greedy
decoding makes of prompts (`--generate`); time of a decoding step (`--decode`). Results go to OUT/results.jsonl, a row
each, and what is there is not computed again; scores and fits are kept in OUT/work. OUT/cache_budget.png shows all.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import statistics
import time
from pathlib import Path

import matplotlib
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.utils import logging

from convert.alignment import BudgetSearch
from convert.alignment.align import write_beside
from convert.alignment.alignment import load_tokenizer
from convert.alignment.divergence import kl_of_hidden
from convert.alignment.probes import plain_tokens
from convert.cache_budget import Budget, Choice, best_choices, budget_of, fitting_window, longest_beside_state
from convert.cache_size import cache_bytes
from convert.config import make_config
from convert.layer_selection import uniform_attention_layers
from convert.loading import load_model
from convert.teacher import embedded_teacher, find_teacher

from .fidelity import EDGES, Yardstick, append, check_same_run, text_rows
from .timing import fill_cache

matplotlib.use("Agg")
CONTEXT = 4096
RATIOS = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5)
ROWS = {
    "window": "every layer: a window and 4 sinks",
    "window+heads": "and what the scores choose, heads or layers, sees everything",
    "window+rounds": "and as many heads, scored again among themselves",
    "window+even": "and as many heads, evenly placed",
    "state+window": "a window beside a state that query heads share, in every layer",
    "state+window+heads": "and what the scores choose sees everything",
    "mixers": "mixers alone; evenly placed layers keep their attention",
}
OF_A_CALL = ("output", "ratios", "rows", "hybrids", "generate", "decode")
"""Arguments that say what to measure this time, not how."""
DISTANCES = (100, 400, 1500, 3500)
ANSWERS, STEPS, HEAD_ROUNDS = 32, 8, 3
LEAST_KL = 1e-3  # what is drawn; below is rounding, which a logarithm cannot show


class Distances:
    """Random tokens at several distances from the end of one long text, where each is asked for again."""

    def __init__(self, text: torch.Tensor, vocabulary: range, distances: tuple[int, ...], seed: int = 3):
        """text: (1, L) token ids, which needles and questions replace in place of L's own."""
        self.ids, length, width = text.clone(), text.shape[1], 2 * ANSWERS
        self.is_text = torch.ones(length, dtype=torch.bool)
        draw = torch.randint(len(vocabulary), (len(distances) * width,), generator=torch.Generator().manual_seed(seed))
        self.distances = [distance for distance in distances if distance + len(distances) * width < length]
        self.answers: dict[int, slice] = {}
        for i, distance in enumerate(self.distances):
            needle = vocabulary.start + draw[i * width : (i + 1) * width]
            asked = length - (len(self.distances) - i) * width
            for start in (asked, asked - distance):
                self.ids[:, start : start + width] = needle
                self.is_text[start : start + width] = False
            self.answers[distance] = slice(asked + ANSWERS, asked + width)

    @torch.no_grad()
    def measure(self, hidden: torch.Tensor, head: nn.Module) -> dict[str, float]:
        """Share of the answers that are right, by distance, given the hidden states (1, L, D) after the final norm."""
        found = {}
        for distance, place in self.answers.items():
            logits = head(hidden[:, place.start - 1 : place.stop - 1])
            found[str(distance)] = (logits.argmax(-1) == self.ids[:, place]).float().mean().item()
        return found


class Study:
    """The teacher, the texts, and what the teacher makes of them."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments, self.folder = arguments, arguments.output
        check_same_run(self.folder, arguments, OF_A_CALL)
        options = make_config(
            model=arguments.model or str(embedded_teacher()), output="unused", dtype="float32", cache_ratio=1.0,
            context=arguments.context, work_dir=str(self.folder / "work"), align_config=arguments.align_config,
            calibration_tokens=arguments.calibration_tokens, calibration_dataset=arguments.calibration_dataset,
        )  # fmt: skip
        found = find_teacher(options.model)
        self.whole: Budget = budget_of(options, found, found.open_weights())
        self.search = BudgetSearch(self.whole, found.open_weights(), self.progress)
        self.model, tokenizer = self.search.model, load_tokenizer(found, trust_remote_code=False)
        short = text_rows(arguments.validation, tokenizer, 512, arguments.short_rows)
        length = arguments.long or arguments.context
        skip = -(-512 * arguments.short_rows // length)
        (text,) = text_rows(arguments.validation, tokenizer, length, 1, skip)
        teacher = self.model.whole()
        vocabulary = plain_tokens(self.model.config.vocab_size)
        self.recall = [Distances(text[None], vocabulary, DISTANCES, seed=3 + i) for i in range(arguments.needles)]
        self.texts = {"short": short, "long": self.recall[0].ids}
        self.reference = {name: self._reference(name, ids) for name, ids in self.texts.items()}
        self.prompts = Yardstick(teacher, tokenizer, short[:2], short[:1]) if arguments.generate else None

    def progress(self, what: str, done: int, total: int) -> None:
        """A line now and then."""
        if done % 10 == 0:
            print(f"  {time.strftime('%H:%M:%S')} {what} {done}/{total}", flush=True)

    def _reference(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """The teacher's hidden states, computed once."""
        digest = hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:12]
        path = self.folder / "work" / f"teacher-{name}-{digest}.safetensors"
        if not path.is_file():
            hidden = self._hidden(self.model.whole(), ids)
            write_beside(path, lambda partial: save_file({"hidden": hidden}, partial))
        return load_file(path)["hidden"]

    @torch.no_grad()
    def _hidden(self, model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([model.model(row, use_cache=False).last_hidden_state for row in ids.split(1)])

    def measure(self, model: nn.Module) -> dict:
        """Everything of one student."""
        head, kl, hidden = self.model.model.lm_head, {}, {}
        for name, ids in self.texts.items():
            hidden[name] = self._hidden(model, ids)
            pair = (self.reference[name].flatten(0, 1), hidden[name].flatten(0, 1))
            kl[name] = kl_of_hidden(*pair, head).view(ids.shape)
        first, *others = self.recall
        rows, edges = kl["short"].mean(1), [edge for edge in EDGES if edge <= first.ids.shape[1]]
        late, is_text = kl["long"][0], first.is_text
        recalled = [first.measure(hidden["long"], head)]
        recalled += [probe.measure(self._hidden(model, probe.ids), head) for probe in others]
        figures = {
            "kl": rows.mean().item(),
            "kl_95": 1.96 * rows.std().item() / math.sqrt(len(rows)),
            "kl_by_position": {
                f"{a}-{b}": late[a:b][is_text[a:b]].mean().item() for a, b in zip(edges, edges[1:], strict=False)
            },
            "recall": {distance: statistics.mean(found[distance] for found in recalled) for distance in recalled[0]},
        }
        if self.arguments.generate:
            found = self.prompts.generation(model)
            figures |= {name: found[name] for name in ("greedy_agreement", "repetition")}
        if self.arguments.decode:
            figures["decode_ms"] = {str(n): decoding_step(model, n) for n in self.arguments.decode}
        return figures

    def budget(self, ratio: float) -> Budget:
        """A share of the teacher's cache."""
        return dataclasses.replace(self.whole, nbytes=int(ratio * self.whole.nbytes))

    def student(self, budget: Budget, choice: Choice) -> nn.Module:
        """The hybrid of a choice, its mixers solved in closed form where it has any."""
        self.search.aligner.follow(budget.applied(choice))
        whole = choice.layers(budget.shape)
        return self._hybrid([i for i in range(budget.shape[0]) if i not in whole], choice.has_state)

    def _hybrid(self, layers: list[int], fitted: bool) -> nn.Module:
        aligner = self.search.aligner
        fits = aligner.fit(layers, aligner.quick) if fitted else {i: (self.model.mixer(i), None) for i in layers}
        return self.model.hybrid({layer: mixer.eval() for layer, (mixer, _) in fits.items()})

    def choice(self, row: str, budget: Budget) -> Choice | None:
        """What a row holds within a budget; None where nothing does, or the scores choose no head."""
        has_state = row.startswith("state")
        sequence_length, sinks = self.search.aligner.settings.sequence_length, budget.options.sinks
        longest = longest_beside_state(sequence_length, sinks) if has_state else budget.context
        kept: tuple = ()
        if row not in ("window", "state+window"):
            choices = best_choices(budget, self.search.head_costs((has_state,)), longest)
            chosen = next((c for c in choices if c.has_state == has_state), None)
            if chosen is None or not chosen.kept:
                return None
            if row == "window+rounds":
                return self.search.in_rounds(budget, chosen, self.search.head_costs((False,)), HEAD_ROUNDS)
            if row != "window+even":
                return chosen
            free, count = budget.free_heads(), len(chosen.kept)
            kept = tuple(free[(i + 1) * len(free) // count - 1] for i in range(count))
        size = budget.sizes(has_state)
        window = fitting_window(budget, kept, size, longest)
        return None if window is None else Choice(kept, window, has_state, size(kept, window), math.nan)

    def mixers(self, nbytes: int) -> tuple[nn.Module, int, str] | None:
        """As many evenly placed layers of attention as fit, mixers alone elsewhere; its bytes; in words."""
        self.search.aligner.follow(mixers_alone(self.whole))
        config, layers = self.model.mixer_plan.config, self.whole.shape[0]
        for count in range(layers, -1, -1):
            kept = uniform_attention_layers(layers, count / layers)
            config.layer_types = ["full_attention" if i in kept else "linear_attention" for i in range(layers)]
            size = cache_bytes(config, self.whole.context, self.whole.dtype)[1]
            config.layer_types = ["linear_attention"] * layers
            if size <= nbytes:
                student = self._hybrid([i for i in range(layers) if i not in kept], True)
                return student, size, f"{layers - count} mixers + {count} layers of attention"
        return None


def mixers_alone(budget: Budget):
    """The options of a conversion without windows."""
    return make_config(
        model=budget.options.model, output="unused", dtype="float32", attention_ratio=0.0, layer_selection="uniform",
        work_dir=budget.options.work_dir, align_config=budget.options.align_config,
        calibration_tokens=budget.options.calibration_tokens, calibration_dataset=budget.options.calibration_dataset,
    )  # fmt: skip


def checkpoint_digest(model: nn.Module) -> str:
    """Which checkpoint it is, configuration and weights, whatever its folder is called."""
    told = model.config.to_dict()
    told.pop("_name_or_path", None)
    digest = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:12]


@torch.no_grad()
def decoding_step(model: nn.Module, length: int) -> float:
    """Median milliseconds of a token after `length` tokens, whose keys and values are made up."""
    config, cache = model.config, model.new_cache()
    ids = torch.full((1, 1), config.vocab_size // 2)
    window = (config.hybrid_window or 0) + config.hybrid_sinks  # is read, not made up
    model(ids.expand(1, min(length, max(window, 1024))), past_key_values=cache)
    fill_cache(cache, length)
    times = []
    for step in range(STEPS):
        started = time.perf_counter()
        model(ids, past_key_values=cache, position_ids=torch.tensor([[length + step]]))
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[1:])


def plot(records: list[dict], path: Path) -> None:
    """KL beyond half of the context and recall from afar, over bytes."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4))
    far = str(max(int(d) for d in records[0]["recall"]))
    last = list(records[0]["kl_by_position"])[-1]
    panels = (
        ("KL, 512 tokens (nats)", lambda r: max(r["kl"], LEAST_KL)),
        (f"KL, tokens {last} (nats)", lambda r: max(r["kl_by_position"][last], LEAST_KL)),
        (f"recall from {far} tokens away", lambda r: r["recall"][far]),
    )
    for axis, (title, value) in zip(axes, panels, strict=True):
        for row in dict.fromkeys(r["row"] for r in records if r["row"] in ROWS):
            points = sorted((100 * r["share"], value(r)) for r in records if r["row"] == row)
            axis.plot(*zip(*points, strict=True), marker="o", label=row)
        for r in records:
            if r["row"].startswith("hybrid "):
                axis.plot(100 * r["share"], value(r), marker="*", ms=10, ls="", label=r["row"])
        axis.set(xscale="log", xlabel="% of the teacher's cache", title=title)
    axes[0].set_yscale("log")
    axes[1].set_yscale("log")
    axes[2].axhline(next((r["recall"][far] for r in records if r["row"] == "teacher"), 1.0), color="k", ls=":")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def as_table(records: list[dict]) -> str:
    """Markdown."""
    positions, distances = list(records[0]["kl_by_position"]), list(records[0]["recall"])
    lines = [
        f"| row | what | % | KL, 512 tokens | KL at {' / '.join(positions)} | recall from {' / '.join(distances)} | "
        "greedy |",
        "|---" * 7 + "|",
    ]
    for r in sorted(records, key=lambda r: (r["ratio"], list(ROWS).index(r["row"]) if r["row"] in ROWS else -1)):
        by_position = " ".join(f"{v:.3f}" for v in r["kl_by_position"].values())
        recall = " ".join(f"{v:.2f}" for v in r["recall"].values())
        greedy = f"{r['greedy_agreement']:.2f}" if "greedy_agreement" in r else ""
        lines.append(
            f"| {r['row']} | {r['what']} | {100 * r['share']:.1f} | {r['kl']:.3f} ± {r['kl_95']:.3f} | "
            f"{by_position} | {recall} | {greedy} |"
        )
    return "\n".join(lines)


def main(arguments: argparse.Namespace) -> None:
    """Measure what is not measured, print, plot."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    study = Study(arguments)
    path = study.folder / "results.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    records = list({(r["row"], r["ratio"]): r for r in lines}.values())  # what was measured again is at the end
    full = study.whole.nbytes

    def record(
        row: str, ratio: float, what: str, nbytes: int, model: nn.Module, predicted: float | None, **of_files: str
    ) -> None:
        started, figures = time.perf_counter(), study.measure(model)
        cell = {"row": row, "ratio": ratio, "what": what, "bytes": nbytes, "share": nbytes / full}
        cell |= {"predicted": predicted, "seconds": round(time.perf_counter() - started)} | figures | of_files
        append(path, cell)
        records.append(cell)
        print(f"{row} at {ratio:.1%}: {what}, {json.dumps(figures)}", flush=True)

    done = {(r["row"], r["ratio"]) for r in records}
    if ("teacher", 1.0) not in done:
        record("teacher", 1.0, "as it is", full, study.model.whole(), None)
    for row in arguments.rows:
        for ratio in arguments.ratios:
            if (row, ratio) in done:
                continue
            budget = study.budget(ratio)
            if row == "mixers":
                if (found := study.mixers(budget.nbytes)) is not None:
                    record(row, ratio, found[2], found[1], found[0], None)
                continue
            choice = study.choice(row, budget)
            if choice is not None:
                what = choice.text(budget.shape)
                predicted = None if math.isnan(choice.predicted) else choice.predicted
                record(row, ratio, what, choice.nbytes, study.student(budget, choice), predicted)
    for folder in arguments.hybrids:
        hybrid = load_model(str(folder), "float32")
        nbytes = cache_bytes(hybrid.config, study.whole.context, study.whole.dtype)[1]
        row, digest = f"hybrid {folder.name}", checkpoint_digest(hybrid)
        if all((r["row"], r.get("checkpoint")) != (row, digest) for r in records):
            records[:] = [r for r in records if r["row"] != row]  # what lay there before
            record(row, nbytes / full, "a checkpoint", nbytes, hybrid, None, checkpoint=digest)
    print(as_table(records))
    plot(records, study.folder / "cache_budget.png")


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--validation", type=Path, required=True, help="text to measure on")
    parser.add_argument("--model", help="teacher (default: the embedded one)")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS, help="of the teacher's cache")
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=list(ROWS), help="none: --hybrids alone")
    parser.add_argument("--hybrids", type=Path, nargs="*", default=(), help="finished checkpoints to measure as well")
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--long", type=int, help="tokens of the long text (default: the context that is paid for)")
    parser.add_argument("--short-rows", type=int, default=8)
    parser.add_argument("--needles", type=int, default=1, help=f"of {ANSWERS} answers, at each distance in turn")
    parser.add_argument("--generate", action="store_true", help="compare greedy decoding with the teacher's, too")
    parser.add_argument("--decode", type=int, nargs="*", default=[], help="time a decoding step after so many tokens")
    parser.add_argument("--calibration-dataset", default="default", help="text that fits mixers and scores heads")
    parser.add_argument("--calibration-tokens", type=int, default=30720)
    parser.add_argument("--align-config", help="YAML file with the alignment's settings")
    arguments = parser.parse_args(given)
    if arguments.needles < 1:
        parser.error("--needles must be at least 1")
    if len({folder.name for folder in arguments.hybrids}) < len(arguments.hybrids):
        parser.error("--hybrids are told apart by the names of their folders; give each its own")
    return arguments


if __name__ == "__main__":
    main(parse_arguments())
