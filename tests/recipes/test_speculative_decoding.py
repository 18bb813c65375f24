"""The recipe as it is typed, and what it makes of its measurements."""

import json

import pytest
import torch
from typer.testing import CliRunner

from recipes.benchmarks.speculative_decoding import app, first_difference, fit_costs, parse_length, parse_lengths
from tests.modeling.test_training import tokenizer
from tests.students import make_student


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target, a draft, a draft of another size, and one with other words."""
    folder = tmp_path_factory.mktemp("speculation")
    words = tokenizer()
    for name, options in {
        "target": dict(pattern="beside"),
        "draft": dict(family="phimamba", mixer="mamba2"),
        "other": dict(vocab_size=160),
    }.items():
        make_student(**options, dtype=torch.float32).save_pretrained(folder / name)
        words.save_pretrained(folder / name)
    description = json.loads((folder / "other/tokenizer.json").read_text())
    vocabulary = description["model"]["vocab"]
    vocabulary["another"] = vocabulary.pop("w9")
    (folder / "other/tokenizer.json").write_text(json.dumps(description))
    return folder


def decode(folder, *arguments, prompt="w4 w5 w6 w4 w5"):
    arguments = (folder / "target", "--prompt", prompt, "--max-new-tokens", 12, *arguments)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("draft", ["prompt-lookup", "self", "{}/draft"])
def test_the_report(folder, draft):
    done = decode(folder, "--draft", draft.format(folder), "--num-draft-tokens", 3, "--check", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["identical_to_greedy"] is True and report["num_draft_tokens"] == 3
    assert report["tokens_per_target_pass"] >= 1 and report["extra_bytes"] > 0
    assert report["acceptance_rate"] is None or 0 <= report["acceptance_rate"] <= 1
    assert report["seconds"]["plain"] > 0 and report["seconds"]["speculative"] > 0
    # the first token comes of the prompt's own pass; where the model says so, the text ends early
    assert 0 < report["statistics"]["tokens"] <= 11 and len(report["text"]) == 1


def test_a_sweep_stands_beside_the_cost_model(folder):
    done = decode(folder, "--draft", "self", "--draft-layers", 3, "--sweep", "1-3", "--json")
    report = json.loads(done.stdout)
    assert [row["num_draft_tokens"] for row in report["rows"]] == [1, 2, 3]
    assert report["auto"]["num_draft_tokens"] == "auto" and set(report["cost"]) == {
        "step",
        "several",
        "token",
        "draft",
    }
    assert all("predicted_speedup" in row and row["identical_to_greedy"] for row in report["rows"])
    done = decode(folder, "--sweep", "1,2")
    assert done.exit_code == 0 and "plain decoding" in done.stdout and "auto" in done.stdout


def test_batches_and_sampling(folder):
    done = decode(folder, "--prompt", "w7", "--num-draft-tokens", 2, "--json", "--check")
    assert json.loads(done.stdout)["prompt_tokens"] == [5, 1]
    runs = [decode(folder, "--temperature", 1.5, "--seed", seed, "--json").stdout for seed in (1, 1, 2)]
    texts = [json.loads(run)["text"] for run in runs]
    assert json.loads(runs[0])["identical_to_greedy"] is None and texts[0] != texts[2]


def test_costs_are_fitted_to_the_passes():
    rows = []
    for length in (1, 2, 4):
        known = dict(passes=10, row_passes=10, drafted=10 * length, draft_seconds=0.2 * length)
        rows.append({"num_draft_tokens": length, "statistics": known | {"verify_seconds": 10 * (0.5 + 0.1 * length)}})
    cost = fit_costs(rows, step=0.3)
    assert (cost.step, cost.several, cost.token, cost.draft) == pytest.approx((0.3, 0.2, 0.1, 0.02))


def test_where_two_batches_differ():
    a = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert first_difference(a, a.clone()) is None
    assert first_difference(a, torch.tensor([[1, 2, 3], [4, 0, 6]])) == 1
    assert first_difference(a, a[:, :2]) == 2


def test_lengths():
    assert parse_lengths("1-4") == [1, 2, 3, 4] and parse_lengths("2,8") == [2, 8]
    assert parse_length("auto") == "auto" and parse_length("5") == 5


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--num-draft-tokens", 0), "at least 1, or auto"),
        (("--num-draft-tokens", "some"), "at least 1, or auto"),
        (("--sweep", "0-3"), "lengths from 1 on"),
        (("--sweep", "3-1"), "lengths from 1 on"),
        (("--sweep", "1-3", "--num-draft-tokens", 2), "leave --num-draft-tokens out"),
        (("--check", "--temperature", 1), "greedy"),
        (("--draft", "{}/other"), "another vocabulary"),
        (("--draft", "{}/nothing"), "does not exist"),
        (("--draft", "self", "--draft-layers", 9), "1 to 3 of them"),
        (("--prompt", ""), "The prompt is empty"),
        (("--device", "cuda:7"), "no CUDA device"),
    ],
)
def test_bad_input_is_one_line(folder, arguments, message):
    if "cuda:7" in arguments and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = decode(folder, *(str(argument).format(folder) for argument in arguments))
    assert done.exit_code == 1 and message in done.stderr and "Traceback" not in done.output
    assert len(done.stderr.strip().splitlines()) == 1


def test_check_fails_where_the_tokens_differ(folder, monkeypatch):
    monkeypatch.setattr("recipes.benchmarks.speculative_decoding.first_difference", lambda a, b: 7)
    done = decode(folder, "--check")
    assert done.exit_code == 1 and "differ from plain decoding's from column 7 on" in done.stderr
