"""The Toeplitz mixer, and the swap on a tiny teacher."""

import json

import pytest
import torch
from typer.testing import CliRunner

from convert.alignment.activations import ActivationStream
from convert.alignment.align import fit_mixers
from convert.alignment.matrix_orientation import attention_rows
from recipes.matrix_fits import toeplitz
from recipes.mixer_swap import Budget, app, correlations, fit_kinds, layer_distances
from recipes.toeplitz_mixer import ToeplitzMixer, set_kernel
from tests.alignment.tiny import teacher_model
from tests.modeling.test_training import tokenizer
from tests.recipes.test_fidelity import CHAT
from tests.teachers import make_teacher, random_ids


@pytest.fixture
def folder(tmp_path):
    make_teacher("llama-gqa").save_pretrained(tmp_path / "teacher")
    words = tokenizer()
    words.chat_template = CHAT
    words.save_pretrained(tmp_path / "teacher")
    lines = [" ".join(f"w{30 + (i * j) % 69}" for i in range(100)) for j in range(1, 60)]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    return tmp_path


def test_toeplitz_mixer_is_its_matrix(folder):
    """The transform against the matrix, head by head, with an open gate and a closed one."""
    model = teacher_model(folder / "teacher")
    attention = model.block(1).self_attn
    mixer = ToeplitzMixer(attention, model.config, 20)
    u = torch.randn(2, 24, 32)
    with torch.no_grad():
        mixer.kernel.normal_()
        x = mixer.x_proj(u).unflatten(-1, (2, 8)).repeat_interleave(2, dim=2).transpose(1, 2)
        y = (mixer.materialize(24) @ x).transpose(1, 2).flatten(2)
        torch.testing.assert_close(mixer(u), mixer.out_proj(y), rtol=1e-4, atol=1e-5)
        mixer.gate.bias.zero_()
        assert torch.equal(mixer(u), mixer.out_proj.bias.expand(2, 24, 32))
    matrix = mixer.materialize(24)
    assert (matrix.triu(1) == 0).all() and (matrix.tril(-20) == 0).all()
    torch.testing.assert_close(matrix[:, 5, 3], mixer.kernel[:, 2])


def test_kernel_is_the_nearest_toeplitz_matrix(folder):
    model, ids = teacher_model(folder / "teacher"), random_ids(4, 24)
    with ActivationStream(model, ids, 1, 10**9) as stream:
        stream.attention_data(0)
        data, attention = stream.attention_data(1), model.block(1).self_attn
        mixer = ToeplitzMixer(attention, model.config, 24)
        set_kernel(mixer, attention, data, 2)
        u = data.batch([0, 1])[0]
        exact = torch.cat([rows for _, rows in attention_rows(attention, u, data.rotary, 24)], 2)
    torch.testing.assert_close(mixer.materialize(24), toeplitz(exact.mean(0)), rtol=1e-4, atol=1e-6)


def test_ssd_is_the_projects_own_fit_and_lr_never_forgets(folder):
    model, ids = teacher_model(folder / "teacher"), random_ids(8, 32)
    budget = Budget(4, refine_steps=5)
    fitted = fit_kinds(model, [1, 3], ids, budget, lambda *at: None)
    from convert.alignment.align import FitCache
    from convert.alignment.closed_form import FitSettings

    theirs = fit_mixers(model, [1, 3], ids, 4, FitSettings(refine_steps=5), FitCache(None, {}), 10**9)
    u = torch.randn(1, 32, 32)
    for layer in (1, 3):
        for name, tensor in theirs[layer][0].state_dict().items():
            torch.testing.assert_close(fitted["ssd"][layer].state_dict()[name], tensor)
        assert (fitted["low_rank"][layer].project(u, model.rotary(32)).log_a.abs() < 1e-6).all()
        assert (fitted["ssd"][layer].project(u, model.rotary(32)).log_a < -1e-3).any()


def run(folder, *more):
    command = [str(folder / "teacher"), "--output", str(folder / "out"), "--layers", "1,2", "--length", "32",
               "--sequences", "16", "--refine-steps", "4", "--stage2-steps", "3", "--train",
               str(folder / "text.jsonl")]  # fmt: skip
    return CliRunner().invoke(app, [*command, *more])


def test_swap_measures_every_kind(folder):
    matrices = [
        {
            "layer": i,
            "norm": 2.0,
            "toeplitz": 1.0 + i,
            "low_rank": {"4": 9.0, "16": 0.5},
            "ssd": {"4": 9.0, "16": 0.25},
        }
        for i in (1, 1, 2)
    ]
    (folder / "approximation.json").write_text(json.dumps({"matrices": matrices}))
    result = run(folder, "--json", "--quiet", "--approximation", str(folder / "approximation.json"))
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report == json.loads((folder / "out" / "swap.json").read_text())
    assert report["matrix_distance"] == {"toeplitz": {"1": 1.0, "2": 1.5}, "low_rank": {"1": 0.25, "2": 0.25},
                                         "ssd": {"1": 0.125, "2": 0.125}}  # fmt: skip
    for kind in ("toeplitz", "low_rank", "ssd"):
        before, after = (report["rows"][f"{kind}, {stage}"] for stage in ("closed form", "stage 2"))
        assert 0 < after["error"] <= 1.01 * before["error"] and after["kl"] > 0
    assert report["correlation"]["all"] is not None and report["correlation"]["ssd"] is None
    lines = (folder / "out" / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == list(report["rows"].values())
    assert (folder / "out" / "swap.png").stat().st_size > 5000
    assert "| SSD, stage 2 |" in (folder / "out" / "table.md").read_text()
    again = run(folder)
    assert again.exit_code == 1 and "--overwrite" in again.output


def test_correlations():
    distances = {"ssd": {1: 0.1, 2: 0.2, 3: 0.3}, "toeplitz": {1: 1.0, 2: 2.0, 3: 3.0}}
    errors = {"ssd": {1: 0.1, 2: 0.2, 3: 0.3}, "toeplitz": {1: 0.9, 2: 0.8, 3: 0.7}}
    found = correlations(distances, errors)
    assert found["ssd"] == pytest.approx(1) and found["toeplitz"] == pytest.approx(-1) and 0 < found["all"] < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "1,9"], "layers must lie in 0 to 3"),
        (["--layers", "one"], "commas"),
        (["--sequences", "0"], "--sequences"),
        (["--stage2-steps", "0"], "--stage2-steps"),
        (["--train", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--approximation", "nowhere.json"], "matrix_approximation"),
        (["--length", "4000"], "longer text"),
    ],
)
def test_bad_input_is_one_line(folder, arguments, message):
    result = run(folder, *arguments)
    assert result.exit_code == 1 and message in result.output, result.output
    assert "Traceback" not in result.output and len(result.output.strip().splitlines()) == 1
    assert not (folder / "out").exists()


def test_results_of_something_else_are_refused(tmp_path):
    for content in ("{", "{}", '{"matrices": []}', '{"matrices": [{"ssd": 1}]}'):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(ValueError, match="holds no results"):
            layer_distances(tmp_path / "a.json", [0])
