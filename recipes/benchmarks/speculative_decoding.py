"""Decode with a draft and without: the same tokens, how many a pass of the target yields, and whether it is faster.

python -m recipes.benchmarks.speculative_decoding TARGET --draft PATH|prompt-lookup|self --prompt TEXT [--check] [--json]
python -m recipes.benchmarks.speculative_decoding TARGET --draft self --prompt TEXT --sweep 1-8
"""

import json
import re
import statistics
import sys
import time
from dataclasses import asdict
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from convert.checkpoint.load import encode, load_model, load_tokenizer
from convert.cli import console, one_line_errors, set_verbosity
from modeling_llamba.speculative_decoding import CostModel, speculative_decoding

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
NAMED_DRAFTS = ("prompt-lookup", "self")


class Seconds(NamedTuple):
    """By the clock on the wall, and of the processor, which a busy machine does not stretch."""

    wall: float
    cpu: float


class Decoding:
    """One target and batch of prompts, decoded in several ways."""

    def __init__(self, target, tokenizer, inputs: dict[str, torch.Tensor], max_new_tokens: int, temperature: float):
        self.target, self.tokenizer = target, tokenizer
        self.inputs = {name: tensor.to(target.device) for name, tensor in inputs.items()}
        self.options = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
        if temperature > 0:
            self.options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}

    def plain(self) -> tuple[torch.Tensor, Seconds]:
        """Token ids (B, length) and seconds."""
        return self._timed()

    def speculative(self, draft, length: int | str, draft_layers: int | None) -> tuple[torch.Tensor, Seconds, dict]:
        """The same, and what happened."""
        out, seconds = self._timed(
            custom_generate=speculative_decoding,
            return_dict_in_generate=True,
            draft=draft,
            num_draft_tokens=length,
            draft_layers=draft_layers,
        )
        return out.sequences, seconds, out.statistics.summary()

    def prompt_alone(self) -> Seconds:
        """Of the prompt and the first token, which no draft can help."""
        return self._timed(max_new_tokens=1)[1]

    def _timed(self, **options):
        started = self._now()
        result = self.target.generate(**self.inputs, **self.options | options)
        return result, Seconds(*(after - before for after, before in zip(self._now(), started, strict=True)))

    def _now(self) -> tuple[float, float]:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()

    def texts(self, ids: torch.Tensor) -> list[str]:
        """What was said behind the prompts."""
        return self.tokenizer.batch_decode(ids[:, self.inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def parse_lengths(text: str) -> list[int]:
    """1-8, or 1,2,4.

    Raises:
        ValueError: it is neither, or holds a length below 1.
    """
    if match := re.fullmatch(r"(\d+)-(\d+)", text):
        lengths = list(range(int(match[1]), int(match[2]) + 1))
    elif re.fullmatch(r"\d+(,\d+)*", text):
        lengths = [int(part) for part in text.split(",")]
    else:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise ValueError(f"--sweep takes lengths from 1 on, as 1-8 or 1,2,4; got {text!r}.")
    return lengths


def parse_length(text: str) -> int | str:
    """A number from 1 on, or auto.

    Raises:
        ValueError: it is neither.
    """
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--num-draft-tokens must be at least 1, or auto; got {text!r}.")
    return int(text)


def first_difference(a: torch.Tensor, b: torch.Tensor) -> int | None:
    """The first column in which two batches of ids differ; None where they are equal."""
    shared = min(a.shape[1], b.shape[1])
    different = (a[:, :shared] != b[:, :shared]).any(0).nonzero()
    if len(different):
        return int(different[0])
    return None if a.shape == b.shape else shared


def measure(decoding: Decoding, draft, lengths: list, draft_layers: int | None, repeats: int) -> list[dict]:
    """A row per length: medians of the seconds, taken in turns with plain decoding's; the rest of the last turn."""
    if repeats > 1 or len(lengths) > 1:
        decoding.plain()  # the first call of a process is slow
    plain, drafted = [], {length: [] for length in lengths}
    for _ in range(repeats):
        plain.append(decoding.plain())
        for length in lengths:
            drafted[length].append(decoding.speculative(draft, length, draft_layers))
    return [_row(decoding, length, plain, runs) for length, runs in drafted.items()]


def _row(decoding: Decoding, length: int | str, plain: list, runs: list) -> dict:
    ids, _, known = runs[-1]
    before, after = (
        Seconds(*map(statistics.median, zip(*(run[1] for run in kind), strict=True))) for kind in (plain, runs)
    )
    where = first_difference(ids, plain[0][0])
    sampled = decoding.options["do_sample"]
    return {
        "num_draft_tokens": length,
        "identical_to_greedy": None if sampled else where is None,
        "first_difference": None if sampled else where,
        "tokens_per_target_pass": known["tokens_per_target_pass"],
        "acceptance_rate": known["acceptance_rate"],
        "seconds": {"plain": before.wall, "speculative": after.wall},
        "cpu_seconds": {"plain": before.cpu, "speculative": after.cpu},
        "speedup": before.wall / after.wall,
        "cpu_speedup": before.cpu / after.cpu,
        "extra_bytes": known["extra_bytes"],
        "statistics": known,
        "text": decoding.texts(ids),
    }


def fit_costs(rows: list[dict], step: float) -> CostModel:
    """The cost model's times, by least squares over the passes of a sweep, beside plain decoding's seconds a step."""
    known = [row["statistics"] for row in rows]
    # where less was drafted than asked for, what a pass verified is what counts
    lengths = torch.tensor([k["drafted"] / max(k["row_passes"], 1) for k in known], dtype=torch.float64)
    seconds = torch.tensor([k["verify_seconds"] / max(k["passes"], 1) for k in known], dtype=torch.float64)
    design = torch.stack([torch.ones_like(lengths), lengths], 1)
    whole, token = torch.linalg.lstsq(design, seconds[:, None]).solution[:, 0].tolist()
    drafted = sum(k["drafted"] for k in known)
    draft = sum(k["draft_seconds"] for k in known) / max(drafted, 1)
    return CostModel(step, max(whole - step, 0.0), max(token, 0.0), draft)


def add_predictions(rows: list[dict], prompt: float) -> dict[str, float]:
    """What the cost model, fitted to all rows, says of each; its times. `prompt`: seconds that no draft can help."""
    steps = max(row["statistics"]["passes"] * row["tokens_per_target_pass"] for row in rows)
    cost = fit_costs(rows, max((rows[0]["seconds"]["plain"] - prompt) / max(steps, 1), 1e-9))
    for row in rows:
        known = row["statistics"]
        drafted = known["drafted"] / max(known["row_passes"], 1)
        row["predicted_speedup"] = known["tokens_per_target_pass"] * cost.step / cost.seconds(drafted)
        row["break_even_acceptance"] = cost.break_even(row["num_draft_tokens"])
    return asdict(cost)


def print_rows(rows: list[dict]) -> None:
    """The report in the terminal."""
    columns = ("K", "a pass", "taken", "same", "s", "ratio", "CPU", "model", "extra bytes")
    table = Table(*columns, title=f"plain decoding: {rows[0]['seconds']['plain']:.2f} s")
    table.caption = (
        "tokens that a pass of the target yields; share of drafted tokens taken; seconds, and plain decoding's over "
        "them by the clock, of CPU time, and by the cost model"
    )
    for row in rows:
        table.add_row(
            str(row["num_draft_tokens"]),
            _figure(row["tokens_per_target_pass"]),
            _figure(row["acceptance_rate"]),
            {True: "yes", False: f"up to {row['first_difference']}", None: "-"}[row["identical_to_greedy"]],
            _figure(row["seconds"]["speculative"]),
            _figure(row["speedup"]),
            _figure(row["cpu_speedup"]),
            _figure(row.get("predicted_speedup")),
            f"{row['extra_bytes']:,}",
        )
    Console().print(table)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def load_draft(draft: str, target_tokenizer, device: str, dtype: str, trust_remote_code: bool):
    """A named draft as it is, or the model of that name.

    Raises:
        ValueError: its tokenizer is not the target's.
    """
    if draft in NAMED_DRAFTS:
        return draft
    if load_tokenizer(draft, trust_remote_code=trust_remote_code).get_vocab() != target_tokenizer.get_vocab():
        raise ValueError(f"{draft} has another vocabulary than the target; a draft must share it.")
    return load_model(draft, dtype, device, trust_remote_code=trust_remote_code)


@app.command(no_args_is_help=True)
def command(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="Hybrid, or any causal model: folder, Hub id, GGUF.")
    ],
    prompt: Annotated[list[str], typer.Option(help="What to continue; repeat it for a batch.")],
    draft: Annotated[str, typer.Option(help="A model, prompt-lookup, or self (its first layers).")] = "prompt-lookup",
    draft_layers: Annotated[int | None, typer.Option(help="Layers of a draft of self (default a third).")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to say.", min=1)] = 64,
    num_draft_tokens: Annotated[str | None, typer.Option(help="Verified per pass: a number, or auto.")] = None,
    sweep_lengths: Annotated[str | None, typer.Option("--sweep", help="Several lengths at once: 1-8.")] = None,
    temperature: Annotated[float, typer.Option(help="Above 0: sample.", min=0.0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    repeats: Annotated[int, typer.Option(help="Runs of each kind; the median counts.", min=1)] = 1,
    raw: Annotated[bool, typer.Option("--raw", help="Leave the chat template out.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Fail unless the tokens are plain decoding's.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON on stdout.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run a repository's code.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Tracebacks.")] = False,
) -> None:
    """Decode TARGET plainly and with a draft."""
    set_verbosity(verbose, quiet=False)
    with one_line_errors(verbose):
        logging.disable_progress_bar()
        if sweep_lengths is not None and num_draft_tokens is not None:
            raise ValueError("--sweep says the lengths; leave --num-draft-tokens out.")
        if check and temperature > 0:
            raise ValueError("--check compares greedy tokens; leave --temperature out.")
        lengths = None if sweep_lengths is None else parse_lengths(sweep_lengths)
        length = parse_length(num_draft_tokens or "auto")
        tokenizer = load_tokenizer(target, trust_remote_code=trust_remote_code)
        inputs = encode(tokenizer, prompt, chat=not raw)
        source = load_draft(draft, tokenizer, device, dtype, trust_remote_code)
        model = load_model(target, dtype, device, trust_remote_code=trust_remote_code)
        torch.manual_seed(seed)
        decoding = Decoding(model, tokenizer, inputs, max_new_tokens, temperature)
        report = {
            "target": target,
            "draft": draft,
            "prompt_tokens": inputs["attention_mask"].sum(1).tolist(),
            "max_new_tokens": max_new_tokens,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": device,
            "threads": torch.get_num_threads(),
        }
        if lengths is None:
            rows = measure(decoding, source, [length], draft_layers, repeats)
            report |= rows[0]
        else:
            rows = measure(decoding, source, [*lengths, "auto"], draft_layers, repeats)
            report |= {"rows": rows[:-1], "auto": rows[-1]}
            if len(lengths) > 1 and rows[0]["tokens_per_target_pass"]:
                report["cost"] = add_predictions(rows[:-1], decoding.prompt_alone().wall)
        if as_json:
            sys.stdout.write(json.dumps(report, indent=2) + "\n")
        else:
            print_rows(rows)
            for text in rows[-1]["text"]:
                console.print(text, markup=False)
        different = [row for row in rows if row["identical_to_greedy"] is False]
        if check and different:
            column = different[0]["first_difference"]
            raise ValueError(
                f"The tokens differ from plain decoding's from column {column} on: in {report['dtype']} two nearly "
                "equal logits can change places between a pass of one token and one of several."
            )


if __name__ == "__main__":
    app()
