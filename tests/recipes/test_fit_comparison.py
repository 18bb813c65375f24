"""The optimisers that the closed form's refinement is compared with."""

import copy
import json

import pytest
import torch

from convert.alignment.closed_form import held_out_error
from recipes import fit_comparison
from recipes.fit_comparison import Clock, alternating, conjugate_gradients, lbfgs, squared_error
from tests.alignment.tiny import layer_data, teacher_model
from tests.teachers import make_teacher


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("teacher")
    make_teacher("llama-gqa").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return teacher_model(folder)


def disturbed(model, seed: int):
    """A mapped mixer, data made by another one, and the mixer to fit."""
    torch.manual_seed(seed)
    target, mixer = model.mixer(0), model.mixer(0)
    data = layer_data(model, target, sequences=8)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.1 * torch.randn_like(parameter) * parameter.std(unbiased=False)
    return mixer.requires_grad_(True), data


def test_conjugate_gradients_reach_the_least_squares_solution_of_a_block(model, monkeypatch):
    monkeypatch.setattr(fit_comparison, "CG_STEPS", 200)
    mixer, data = disturbed(model, 0)
    mixer, rows = mixer.double(), torch.arange(4)
    data.u, data.y, data.rotary = data.u.double(), data.y.double(), tuple(part.double() for part in data.rotary)
    monkeypatch.setattr(type(data), "batch", lambda self, rows: (self.u[list(rows)], self.y[list(rows)]))
    columns = []  # the output is affine in these rows: its columns, one by one
    weight = mixer.in_proj.weight

    @torch.no_grad()
    def output(values):
        weight[rows] = values
        return torch.cat([mixer(data.u[i : i + 1], data.rotary).flatten() for i in data.fitting()])

    start = weight.detach()[rows].clone()
    origin = output(torch.zeros_like(start))
    for i in range(start.numel()):
        unit = torch.zeros(start.numel(), dtype=torch.float64)
        unit[i] = 1
        columns.append(output(unit.view_as(start)) - origin)
    target = torch.cat([data.y[i].flatten() for i in data.fitting()])
    solution = torch.linalg.lstsq(torch.stack(columns, 1), target - origin).solution.view_as(start)
    best = (output(solution) - target).square().sum() / target.square().sum()
    output(start)
    conjugate_gradients(mixer, weight, rows, data, Clock(60))
    assert squared_error(mixer, data) == pytest.approx(best.item(), rel=1e-6)


def test_both_come_closer_and_stop_in_time(model):
    mixer, data = disturbed(model, 1)
    before = held_out_error(mixer, data)
    for method in (lbfgs, lambda *args: alternating(*args, ridges=(1e-3, 1e-1))):
        candidate = copy.deepcopy(mixer)
        method(candidate, data, Clock(2.0))
        assert held_out_error(candidate, data) < 0.8 * before
        assert all(torch.isfinite(parameter).all() for parameter in candidate.parameters())


def test_the_command(tmp_path, folder):
    report = fit_comparison.main(tmp_path / "out.json", "sampled", [1], 3072, 10, 4, str(folder))
    rows = report["layers"][1]
    assert rows["AdamW, 4 x the time"]["fitting"] < rows["solve only"]["fitting"]
    assert rows["L-BFGS"]["fitting"] < rows["solve only"]["fitting"]
    assert json.loads((tmp_path / "out.json").read_text())["layers"]["1"] == rows
    with pytest.raises(ValueError, match="layers 0 to"):
        fit_comparison.main(tmp_path / "out.json", "sampled", [99], 3072, 10, 1, str(folder))
