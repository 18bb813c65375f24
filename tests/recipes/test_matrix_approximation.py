"""Structured matrices near given ones: what is exact, what bounds what, and the recipe on a tiny teacher."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from convert import convert
from convert.alignment.mohawk.orientation import attention_rows
from modeling_llamba.ssd import ssd_matrix
from recipes.studies.structured_matrices import run as matrix_approximation
from recipes.studies.structured_matrices.attention_matrices import Sampler, best_scale, choose_places
from recipes.studies.structured_matrices.distances import Effort, approximate
from recipes.studies.structured_matrices.fits import (
    Factors,
    alternate,
    beyond_window,
    decay_start,
    descend,
    distance,
    fold_decays,
    improve_decays,
    solve_columns,
    solve_rows,
    toeplitz,
    truncated_svd,
)
from recipes.studies.structured_matrices.run import app, approximate_all, needed_text, shortest_names, state_needed
from recipes.studies.structured_matrices.semiseparable import balanced_truncation, lower_bound
from tests.alignment.tiny import teacher_model
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


def random_factors(state, columns, count=2, strongest=0.5):
    C, B = (torch.randn(count, LENGTH, state, dtype=torch.float64) for _ in range(2))
    return Factors(C, B, math.log(strongest) * torch.rand(count, LENGTH, columns, dtype=torch.float64))


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
    for columns in (1, 4):
        target = random_factors(4, columns).matrix()
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


@pytest.mark.parametrize("columns", [1, 5])
def test_rows_and_columns_are_least_squares_solutions(columns):
    """Against a plain solver, row by row."""
    target, factors = softmax_matrices(2), random_factors(5, columns)
    C = solve_rows(target, factors.B, factors.log_a)
    B = solve_columns(target, factors.C, factors.log_a)
    total = factors.log_a.expand(-1, -1, 5).cumsum(1)
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
    factors = random_factors(4, 1)
    theirs = ssd_matrix(factors.log_a, factors.B[:, :, None], factors.C[:, :, None])[:, 0]
    torch.testing.assert_close(factors.matrix(), theirs)


def test_rotary_embedding_adds_nothing_to_free_factors():
    factors = random_factors(4, 1)
    angles = torch.arange(LENGTH)[:, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)
    turn = torch.zeros(LENGTH, 4, 4, dtype=torch.float64)
    for i in range(2):
        c, s = angles[:, i].cos(), angles[:, i].sin()
        turn[:, i, i], turn[:, i + 2, i + 2], turn[:, i, i + 2], turn[:, i + 2, i] = c, c, -s, s
    turned = Factors(*((turn @ part[..., None])[..., 0] for part in (factors.C, factors.B)), factors.log_a)
    assert distance(factors.matrix(), turned.matrix()).min() > 0.1, "rotary embedding changes the matrix"
    back = Factors(*((turn.mT @ part[..., None])[..., 0] for part in (turned.C, turned.B)), factors.log_a)
    torch.testing.assert_close(back.matrix(), factors.matrix())


@pytest.mark.parametrize("columns", [1, 4])
def test_decays_fold_into_low_rank(columns):
    factors = random_factors(4, columns, strongest=0.2)
    folded = fold_decays(factors)
    assert (folded.log_a == 0).all()
    lower = torch.ones(LENGTH, LENGTH, dtype=torch.float64).tril()
    torch.testing.assert_close((folded.C @ folded.B.mT) * lower, factors.matrix(), rtol=1e-9, atol=1e-10)


def test_sweeps_only_improve():
    target = softmax_matrices()
    C, B = truncated_svd(target, 6)
    zeros = target.new_zeros(3, LENGTH, 1)
    last = None
    for sweeps in (1, 2, 4, 8):
        low_rank = distance(target, alternate(target, Factors(C, B, zeros), sweeps, False).matrix())
        decayed = distance(target, alternate(target, Factors(C, B, zeros - 0.05), sweeps, True).matrix())
        if last is not None:
            assert (low_rank <= last[0] + 1e-9).all() and (decayed <= last[1] + 1e-9).all()
        last = low_rank, decayed
    assert (torch.stack(last) >= lower_bound(target, 6)).all()


def test_exact_low_rank_is_found():
    target = random_factors(3, 1, strongest=1.0).matrix()
    C, B = truncated_svd(target, 3)
    start = distance(target, (C @ B.mT).tril())
    found = alternate(target, Factors(C, B, torch.zeros(2, LENGTH, 1)), 60, fit_decays=False)
    assert (distance(target, found.matrix()) < 0.02 * start).all()


def test_decay_step_finds_decays():
    truth = random_factors(4, 1)
    target = truth.matrix()
    guess = Factors(truth.C, truth.B, torch.full_like(truth.log_a, -0.3))
    errors = [distance(target, guess.matrix())]
    for _ in range(12):
        guess = Factors(truth.C, truth.B, improve_decays(target, guess))
        errors.append(distance(target, guess.matrix()))
        assert (errors[-1] <= errors[-2]).all() and (guess.log_a <= 0).all()
    assert (errors[-1] < 0.05 * errors[0]).all()


def test_gradient_descent_follows_the_gradient():
    """Its own gradients against autograd's, through one step of Adam, and a fit that gets nearer."""
    target = softmax_matrices(2, 24)
    norm = target.norm(dim=(1, 2))
    for decayed in (False, True):
        few, many = (distance(target, descend(target, 6, decayed, steps).matrix()) for steps in (5, 400))
        assert (many < few).all() and (many < 0.5 * norm).all()
        parts = descend(target, 6, decayed, 1, learning_rate=1e-3)
        start = descend(target, 6, decayed, 1, learning_rate=0.0)
        leaves = [part.clone().requires_grad_(True) for part in (start.C, start.B, start.log_a)]
        (Factors(*leaves).matrix() - target.float()).square().sum().backward()
        moved = ((parts.C, start.C, leaves[0]), (parts.B, start.B, leaves[1]))
        for after, before, leaf in moved + (((parts.log_a, start.log_a, leaves[2]),) if decayed else ()):
            large = leaf.grad.abs() > 1e-3
            assert large.any() and torch.equal((after - before)[large].sign(), -leaf.grad[large].sign())


def test_window_leaves_what_lies_beyond():
    target = softmax_matrices(1, 10)
    rest = beyond_window(target, 3, 2)
    for t in range(10):
        for j in range(10):
            s = j - 3  # the token that enters the state at j
            expected = target[0, t, s].item() if 2 <= s <= t - 3 else 0.0
            assert rest[0, t, j].item() == expected


def test_decay_start_and_families_are_bounded():
    target = softmax_matrices(4, 64, sharpness=1.0)
    for state in (1, 2, 5, 8):
        assert decay_start(target, state).matrix().shape == target.shape
    found = {name: torch.tensor(values) for name, values in approximate(target, 8, Effort(4)).items()}
    for name in ("ssm", "low_rank", "ssd", "mamba1", "mamba1_folded", "ssd_normalised"):
        assert (found[name] >= found["lower_bound"]).all(), name
    assert (found["ssd"] <= found["low_rank"]).all() and (found["ssd_normalised"] >= found["ssd"] - 1e-9).all()
    torch.testing.assert_close(found["mamba1_folded"], found["mamba1"], rtol=1e-6, atol=1e-8)


def test_datasets_that_end_alike_keep_their_names():
    assert shortest_names(["a/text.jsonl", "b/text.jsonl", "c/more.jsonl"]) == {
        "a/text.jsonl": "a/text.jsonl", "b/text.jsonl": "b/text.jsonl", "more.jsonl": "c/more.jsonl"
    }  # fmt: skip


def test_processes_find_the_same(monkeypatch):
    monkeypatch.setattr(matrix_approximation, "MATRICES_AT_ONCE", 2)
    target = softmax_matrices(3, 24).float()
    alone = approximate_all(target, [2], Effort(2, extensions=False), workers=1)
    together = approximate_all(target, [2], Effort(2, extensions=False), workers=2)
    for name in ("low_rank", "ssd", "ssm"):
        torch.testing.assert_close(alone[name]["2"], together[name]["2"])


def test_state_needed():
    curve = {"16": 0.8, "32": 0.4, "64": 0.2}
    assert state_needed(curve, 0.4) == pytest.approx(32) and state_needed(curve, 0.8) == pytest.approx(16)
    assert state_needed(curve, 0.2 * math.sqrt(2)) == pytest.approx(32 * math.sqrt(2))
    assert state_needed(curve, 0.1) is None and state_needed(curve, 1.0) is None
    assert [needed_text(curve, wanted) for wanted in (1.0, 0.4, 0.1)] == ["< 16", "32", "> 64"]
    assert state_needed({"2": 0.0}, 0.0) == pytest.approx(2), "a distance of zero is one, too"


def test_places_are_spread():
    places = choose_places(["a", "b"], 4, 3, 11, seed=0)
    assert len(places) == 11 and sum(place.dataset == "a" for place in places) == 6
    first = [place.layer for place in places if place.dataset == "a" and place.sequence == 0]
    assert first == [0, 1, 2, 3] and len({place.head for place in places}) > 1
    assert places == choose_places(["a", "b"], 4, 3, 11, seed=0) != choose_places(["a", "b"], 4, 3, 11, seed=1)


def test_best_scale():
    target = softmax_matrices(2)
    torch.testing.assert_close(best_scale(target, -3 * target), target)
    other = torch.randn_like(target)
    best = distance(target, best_scale(target, other))
    assert all((best <= distance(target, scale * other)).all() for scale in (0.0, 0.01, -0.01, 1.0))


@pytest.fixture
def folder(tmp_path):
    """A teacher with a tokenizer, and a text."""
    make_teacher("llama-gqa").save_pretrained(tmp_path / "teacher")
    tokenizer().save_pretrained(tmp_path / "teacher")
    lines = [" ".join(f"w{30 + (i * j) % 69}" for i in range(100)) for j in range(1, 30)]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    return tmp_path


def run(folder, *more):
    command = [str(folder / "teacher"), "--output", str(folder / "out"), "--num-matrices", "6", "--state-sizes", "2,4",
               "--dataset", str(folder / "text.jsonl"), "--length", "24", "--workers", "1"]  # fmt: skip
    return CliRunner().invoke(app, [*command, *more])


def test_sampled_matrices_are_the_teachers(folder):
    teacher = teacher_model(folder / "teacher")
    places = choose_places([str(folder / "text.jsonl")], 4, 4, 6, seed=0)
    sampler = Sampler(teacher, places, 24)
    matrices = sampler.attention()
    torch.testing.assert_close(matrices.sum(-1), torch.ones(6, 24))
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "teacher", attn_implementation="eager")
    rows = sampler.rows[str(folder / "text.jsonl")]
    with torch.no_grad():
        exact = model(rows, output_attentions=True).attentions
    for place, matrix in zip(places, matrices, strict=True):
        torch.testing.assert_close(matrix, exact[place.layer][place.sequence, place.head], rtol=1e-4, atol=1e-6)


def test_recipe_with_students(folder):
    """Two stages of a student: mapped, and with decays that forget at once."""
    teacher, text = str(folder / "teacher"), str(folder / "text.jsonl")
    names = {"mapped": 1.0, "forgetful": 1e-4}
    for name, decay in names.items():
        convert(teacher, folder / name, attention_layers="1", align="none", initial_decay=decay)
    students = [argument for name in names for argument in ("--student", str(folder / name))]
    result = run(folder, "--json", "--quiet", *students)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report == json.loads((folder / "out" / "approximation.json").read_text())
    assert set(report["distance"]) == {"toeplitz", "low_rank", "ssd", "ssm"}
    assert isinstance(report["distance"]["toeplitz"], float) and set(report["distance"]["ssd"]) == {"2", "4"}
    one = report["matrices"][0]
    assert report["distance"]["ssm"]["4"] == pytest.approx(sum(m["ssm"]["4"] for m in report["matrices"]) / 6)
    assert one["lower_bound"]["4"] <= one["ssm"]["4"] <= one["norm"]
    assert (folder / "out" / "approximation.png").stat().st_size > 5000
    table = (folder / "out" / "table.md").read_text()
    assert f"{report['distance']['ssm']['4']:.3f} ±" in table and "| mapped |" in table
    # the student's distance, worked out here: the mapped one is the teacher's QK^T / sqrt(d), head by head
    model = teacher_model(folder / "teacher")
    places = choose_places([text], 4, 4, 6, seed=0)
    sampler, away = Sampler(model, places, 24), []
    for _, place, block, u, rotary in sampler._inputs():
        if place.layer != 1:
            with torch.no_grad():
                exact = torch.cat([rows for _, rows in attention_rows(block.self_attn, u, rotary, 24)], 2)
                mixed = model.mixer(place.layer)
                mixed.A_log_bias.fill_(-1e4)
                away.append((exact - mixed.materialize(u, rotary)[0])[0, place.head].norm().item())
    mapped, forgetful = report["students"]
    assert mapped["matrices"] == len(away) < 6
    assert mapped["distance"] == pytest.approx(sum(away) / len(away), rel=1e-4)
    assert forgetful["distance"] != pytest.approx(mapped["distance"], rel=1e-2)
    assert mapped["scaled"] <= mapped["distance"]


def test_gradient_steps_and_overwrite(folder):
    assert run(folder, "--gradient-steps", "3", "--no-extensions", "--quiet").exit_code == 0
    report = json.loads((folder / "out" / "approximation.json").read_text())
    assert report["effort"]["gradient_steps"] == 3 and report["extensions"] == {}
    again = run(folder)
    assert again.exit_code == 1 and "--overwrite" in again.output
    assert run(folder, "--overwrite", "--no-extensions", "--quiet").exit_code == 0
    assert json.loads((folder / "out" / "approximation.json").read_text())["effort"]["gradient_steps"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--state-sizes", "16,x"], "state sizes"),
        (["--state-sizes", "0"], "state sizes"),
        (["--state-sizes", "24"], "state sizes"),
        (["--num-matrices", "0"], "--num-matrices"),
        (["--sweeps", "0"], "--sweeps"),
        (["--workers", "0"], "--workers"),
        (["--delta-steps", "-1"], "--delta-steps"),
        (["--dataset", "nowhere/text.jsonl"], "text.jsonl"),
        (["--student", "nowhere"], "no config.json"),
        (["--length", "5000"], "longer text"),
    ],
)
def test_bad_input_is_one_line(folder, arguments, message):
    result = run(folder, *arguments)
    assert result.exit_code == 1 and message in result.output
    assert "Traceback" not in result.output and len(result.output.strip().splitlines()) == 1
    assert not (folder / "out").exists()


def test_students_that_do_not_go_with_the_teacher(folder):
    teacher = str(folder / "teacher")
    make_teacher("llama-mqa-wide-heads").save_pretrained(folder / "kept")
    convert(teacher, folder / "kept-all", attention_layers=1.0, align="none")
    convert(teacher, folder / "windowed", attention_layers="1", align="none", window=4)
    convert(teacher, folder / "mamba1", attention_layers="1", align="none", mixer="mamba1")
    for name, message in (("kept-all", "nothing to compare"), ("windowed", "window beside"), ("mamba1", "mamba1"),
                          ("kept", "not a hybrid")):  # fmt: skip
        result = run(folder, "--student", str(folder / name))
        assert result.exit_code == 1 and message in result.output, result.output
