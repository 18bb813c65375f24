"""Structured matrices near given ones: what is exact, what bounds what, and the study on a tiny teacher."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from convert.alignment.text import documents, token_rows
from convert.checkpoint.load import load_tokenizer
from modeling_llamba.ssd import ssd_matrix
from recipes.studies.structured_matrices.fits import (
    Factors,
    alternate,
    distance,
    improve_decays,
    low_rank,
    solve_columns,
    solve_rows,
    ssd,
    toeplitz,
    truncated_svd,
)
from recipes.studies.structured_matrices.run import approximate, attention_matrices, choose_places, main
from recipes.studies.structured_matrices.semiseparable import balanced_truncation, lower_bound
from tests.modeling.test_training import tokenizer
from tests.teachers import make_teacher

LENGTH = 48


def softmax_matrices(count=3, length=LENGTH, sharpness=3.0):
    scores = sharpness * torch.randn(count, length, length, dtype=torch.float64)
    upper = torch.ones(length, length, dtype=torch.bool).triu(1)
    return scores.masked_fill(upper, float("-inf")).softmax(-1)


def semiseparable(state, count=2, length=LENGTH):
    """General recurrences, unrolled entry by entry."""
    A = torch.randn(count, length, state, state, dtype=torch.float64) / math.sqrt(state)
    B, C = (torch.randn(count, length, state, dtype=torch.float64) for _ in range(2))
    matrix = torch.zeros(count, length, length, dtype=torch.float64)
    for s in range(length):
        column = B[:, s]
        for t in range(s, length):
            column = column if t == s else (A[:, t] @ column[..., None])[..., 0]
            matrix[:, t, s] = (C[:, t] * column).sum(-1)
    return matrix


def random_factors(state, count=2, strongest=0.5):
    C, B = (torch.randn(count, LENGTH, state, dtype=torch.float64) for _ in range(2))
    return Factors(C, B, math.log(strongest) * torch.rand(count, LENGTH, dtype=torch.float64))


@pytest.mark.parametrize("state", [1, 3, 8])
def test_semiseparable_matrices_come_back_exactly(state):
    target = semiseparable(state)
    found = balanced_truncation(target, state)
    torch.testing.assert_close(found.matrix(), target, rtol=0, atol=1e-10 * target.abs().max().item())
    assert lower_bound(target, state).max() < 1e-10 * target.abs().max()
    if state > 1:
        fewer = distance(target, balanced_truncation(target, state // 2).matrix())
        assert fewer.min() > 1e-3 and (fewer >= lower_bound(target, state // 2)).all()


def test_scalar_decays_and_low_rank_are_semiseparable():
    """LR and SSD of a state size are recurrences of that size: balanced truncation finds them, too."""
    for strongest in (0.5, 1.0):  # a strongest decay of 1 is none
        target = random_factors(4, strongest=strongest).matrix()
        torch.testing.assert_close(balanced_truncation(target, 4).matrix(), target, rtol=0, atol=1e-10)


def test_ranks_of_the_truncation_and_its_error():
    target = softmax_matrices()
    tails = []
    for k in range(LENGTH):
        sigma = torch.linalg.svdvals(target[:, k:, : k + 1])
        tails.append(sigma[:, 5:].square().sum(-1))
    found = balanced_truncation(target, 5)
    matrix = found.matrix()
    for k in range(LENGTH):
        assert torch.linalg.matrix_rank(matrix[:, k:, : k + 1], atol=1e-9).max() <= 5
    error = distance(target, matrix)
    torch.testing.assert_close(error, found.dropped.square().sum(1).sqrt())
    assert (error <= torch.stack(tails).sum(0).sqrt()).all(), "the bound by the Hankel blocks' singular values"
    assert (error >= torch.stack(tails).max(0).values.sqrt()).all(), "one block alone is a lower bound"


def test_lower_bound_holds_and_is_reached():
    target = softmax_matrices()
    for state in (1, 4, 10):
        bound = lower_bound(target, state)
        single = torch.linalg.svdvals(target[:, LENGTH // 2 :, : LENGTH // 2])[:, state:].norm(dim=-1)
        assert (bound >= single - 1e-12).all() and (bound > 0).all()
        assert (bound <= distance(target, balanced_truncation(target, state).matrix())).all()
    # one block and nothing else: its best rank-6 approximation is a recurrence, so the bound is the smallest distance
    target, half = torch.zeros(2, LENGTH, LENGTH, dtype=torch.float64), LENGTH // 2
    target[:, half:, :half] = torch.randn(2, half, half)
    left, sigma, right = torch.linalg.svd(target[:, half:, :half])
    best = torch.zeros_like(target)
    best[:, half:, :half] = (left[..., :6] * sigma[:, None, :6]) @ right[:, :6]
    torch.testing.assert_close(balanced_truncation(best, 6).matrix(), best, rtol=0, atol=1e-10)
    torch.testing.assert_close(lower_bound(target, 6), distance(target, best))
    assert (distance(target, balanced_truncation(target, 6).matrix()) < 1.1 * lower_bound(target, 6)).all()


def test_toeplitz_is_the_least_squares_solution():
    target = softmax_matrices(2, 12)
    lag = torch.arange(12)[:, None] - torch.arange(12)
    basis = torch.stack([(lag == d).double().flatten() for d in range(12)], dim=1)
    solution = torch.linalg.lstsq(basis, target.flatten(1).T).solution
    torch.testing.assert_close(toeplitz(target).flatten(1).T, basis @ solution)
    torch.testing.assert_close(toeplitz(toeplitz(target)), toeplitz(target))


def test_rows_and_columns_are_least_squares_solutions():
    """Against a plain solver, row by row."""
    target, factors = softmax_matrices(2), random_factors(5)
    C = solve_rows(target, factors.B, factors.log_a)
    B = solve_columns(target, factors.C, factors.log_a)
    total = factors.log_a.cumsum(1)[..., None]
    for t in (7, 30, LENGTH - 1):
        seen = factors.B[:, : t + 1] * (total[:, t, None] - total[:, : t + 1]).exp()
        exact = torch.linalg.lstsq(seen, target[:, t, : t + 1, None]).solution[..., 0]
        torch.testing.assert_close(C[:, t], exact, rtol=1e-4, atol=1e-6)
    for s in (0, 12, LENGTH - 9):
        read = factors.C[:, s:] * (total[:, s:] - total[:, s, None]).exp()
        exact = torch.linalg.lstsq(read, target[:, s:, s, None]).solution[..., 0]
        torch.testing.assert_close(B[:, s], exact, rtol=1e-4, atol=1e-6)


def test_the_families_are_the_projects_own():
    """An SSD fit is the unrolled matrix of the scan with these B, C and decays."""
    factors = random_factors(4)
    theirs = ssd_matrix(factors.log_a[..., None], factors.B[:, :, None], factors.C[:, :, None])[:, 0]
    torch.testing.assert_close(factors.matrix(), theirs)


def test_rotary_embedding_adds_nothing_to_free_factors():
    factors = random_factors(4)
    angles = torch.arange(LENGTH)[:, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)
    turn = torch.zeros(LENGTH, 4, 4, dtype=torch.float64)
    for i in range(2):
        c, s = angles[:, i].cos(), angles[:, i].sin()
        turn[:, i, i], turn[:, i + 2, i + 2], turn[:, i, i + 2], turn[:, i + 2, i] = c, c, -s, s
    turned = Factors(*((turn @ part[..., None])[..., 0] for part in (factors.C, factors.B)), factors.log_a)
    assert distance(factors.matrix(), turned.matrix()).min() > 0.1, "rotary embedding changes the matrix"
    back = Factors(*((turn.mT @ part[..., None])[..., 0] for part in (turned.C, turned.B)), factors.log_a)
    torch.testing.assert_close(back.matrix(), factors.matrix())


def test_decays_fold_into_low_rank():
    """In exact arithmetic SSD and LR are the same matrices: a product of decays is a ratio of running products."""
    factors = random_factors(4, strongest=0.2)
    running = factors.log_a.cumsum(1).exp()[..., None]
    folded = Factors(factors.C * running, factors.B / running, torch.zeros_like(factors.log_a))
    torch.testing.assert_close(folded.matrix(), factors.matrix(), rtol=1e-9, atol=1e-10)


def test_sweeps_only_improve():
    target = softmax_matrices()
    last = None
    for sweeps in (1, 2, 4, 8):
        linear, decayed = (distance(target, fit(target, 6, sweeps).matrix()) for fit in (low_rank, ssd))
        if last is not None:
            assert (linear <= last[0] + 1e-9).all() and (decayed <= last[1] + 1e-9).all()
        last = linear, decayed
    assert (torch.stack(last) >= lower_bound(target, 6)).all()


def test_exact_low_rank_is_found():
    target = random_factors(3, strongest=1.0).matrix()
    C, B = truncated_svd(target, 3)
    start = distance(target, (C @ B.mT).tril())
    found = alternate(target, Factors(C, B, torch.zeros(2, LENGTH)), 60, fit_decays=False)
    assert (distance(target, found.matrix()) < 0.02 * start).all()


def test_decay_step_finds_decays():
    truth = random_factors(4)
    target = truth.matrix()
    guess = Factors(truth.C, truth.B, torch.full_like(truth.log_a, -0.3))
    errors = [distance(target, guess.matrix())]
    for _ in range(12):
        guess = Factors(truth.C, truth.B, improve_decays(target, guess))
        errors.append(distance(target, guess.matrix()))
        assert (errors[-1] <= errors[-2]).all() and (guess.log_a <= 0).all()
    assert (errors[-1] < 0.05 * errors[0]).all()


def test_families_are_bounded():
    found = approximate(softmax_matrices(4, 64, sharpness=1.0), 8)
    assert all((found[name] >= found["lower_bound"]).all() for name in ("ssm", "low_rank", "ssd"))
    assert (found["ssd"] <= found["low_rank"]).all(), "LR is SSD with decays of 1"
    assert found["ssm"].mean() < found["ssd"].mean()


def test_places_are_spread():
    places = choose_places(["a", "b"], 4, 3, 11, seed=0)
    assert len(places) == 11 and sum(place.dataset == "a" for place in places) == 6
    first = [place.layer for place in places if place.dataset == "a" and place.row == 0]
    assert first == [0, 1, 2, 3] and len({place.head for place in places}) > 1
    assert places == choose_places(["a", "b"], 4, 3, 11, seed=0) != choose_places(["a", "b"], 4, 3, 11, seed=1)


@pytest.fixture
def folder(tmp_path):
    """A teacher with a tokenizer, and a text."""
    make_teacher("llama-gqa").save_pretrained(tmp_path / "teacher")
    tokenizer().save_pretrained(tmp_path / "teacher")
    lines = [" ".join(f"w{30 + (i * j) % 69}" for i in range(100)) for j in range(1, 30)]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    return tmp_path


def run(folder, *more):
    main([str(folder / "teacher"), "--output", str(folder / "out"), "--num-matrices", "6", "--state-sizes", "2", "4",
          "--dataset", str(folder / "text.jsonl"), "--length", "24", *more])  # fmt: skip


def test_sampled_matrices_are_those_of_their_places(folder):
    text = str(folder / "text.jsonl")
    places = choose_places([text, "default"], 4, 4, 11, seed=0)
    model = AutoModelForCausalLM.from_pretrained(folder / "teacher", attn_implementation="eager")
    words = load_tokenizer(str(folder / "teacher"))
    matrices = attention_matrices(model, words, places, 24)
    torch.testing.assert_close(matrices.sum(-1), torch.ones(11, 24))
    for dataset in (text, "default"):
        with torch.no_grad():  # all rows of text at once
            exact = model(token_rows(documents(dataset), words, 24, 2, dataset), output_attentions=True).attentions
        for place, matrix in zip(places, matrices, strict=True):
            if place.dataset == dataset:
                torch.testing.assert_close(matrix, exact[place.layer][place.row, place.head], rtol=1e-4, atol=1e-6)


def test_the_study(folder, capsys):
    run(folder)
    report = json.loads((folder / "out" / "distances.json").read_text())
    one = report["matrices"][0]
    assert len(report["matrices"]) == 6 and one["lower_bound"]["4"] <= one["ssm"]["4"] <= one["norm"]
    assert one["ssm"]["4"] < one["ssm"]["2"] and one["ssd"]["2"] <= one["low_rank"]["2"] <= one["toeplitz"]
    mean = sum(row["ssm"]["4"] for row in report["matrices"]) / 6
    table = (folder / "out" / "distances.md").read_text()
    assert f"{mean:.3f} ±" in table and table in capsys.readouterr().out
    assert (folder / "out" / "distances.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--state-sizes", "0"], "--state-sizes"),
        (["--state-sizes", "24"], "--state-sizes"),
        (["--num-matrices", "0"], "--num-matrices"),
        (["--dataset", "nowhere/text.jsonl"], "text.jsonl"),
        (["--length", "5000"], "longer text"),
    ],
)
def test_bad_input_is_one_line(folder, arguments, message):
    with pytest.raises(SystemExit, match=message) as stopped:
        run(folder, *arguments)
    assert "\n" not in stopped.value.code and not (folder / "out").exists()
