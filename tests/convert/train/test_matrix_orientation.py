"""Stage 1: tiled against materialised, in values and gradients."""

import pytest
import torch

from convert.fit.teacher_model import attention_rows
from convert.train.mohawk import orientation as matrix_orientation
from convert.train.mohawk.orientation import matrix_orientation_loss, mixer_rows
from tests.helpers.tiny import LENGTH, teacher_model

NAMES = ["llama-gqa", "mistral-window", "qwen3", "phi"]


def pair(folder, mixer_name):
    """A mixer and an attention in float64, with everything that enters the matrix in play."""
    model = teacher_model(folder, mixer=mixer_name)
    mixer, block = model.mixer(1).double(), model.block(1).double()
    with torch.no_grad():
        mixer.D.normal_()
        mixer.conv1d.weight.normal_(std=0.5)
        for name, parameter in mixer.named_parameters():
            if name in ("A_log_bias", "A_log", "dt_bias"):
                parameter.normal_()
    u = torch.randn(2, LENGTH, model.config.hidden_size, dtype=torch.float64)
    rotary = tuple(t.double() for t in model.rotary(LENGTH, 0))
    return mixer, block.self_attn, u, rotary


def materialised(mixer, attention, u, rotary):
    """The loss as the papers write it, from whole matrices."""
    matrix, _ = mixer.materialize(u, rotary)
    ((_, probabilities),) = attention_rows(attention, u, rotary, LENGTH)
    return (matrix - probabilities).norm(dim=(-2, -1)).mean()


@pytest.mark.parametrize("mixer_name", ["discrete_mamba2", "mamba2"])
@pytest.mark.parametrize("name", NAMES)
def test_tiled_equals_materialised(saved_teacher, name, mixer_name):
    mixer, attention, u, rotary = pair(saved_teacher(name), mixer_name)
    expected = materialised(mixer, attention, u, rotary)
    expected.backward()
    gradients = {n: p.grad for n, p in mixer.named_parameters() if p.grad is not None}
    for tile in (5, 16, LENGTH):
        mixer.zero_grad()
        assert matrix_orientation_loss(mixer, attention, u, rotary, tile) == pytest.approx(expected.item(), rel=1e-12)
        for n, p in mixer.named_parameters():
            if n in gradients:
                torch.testing.assert_close(p.grad, gradients[n], msg=n)


@pytest.mark.parametrize("name", NAMES)
def test_attention_rows_are_the_teachers_probabilities(saved_teacher, name):
    model = teacher_model(saved_teacher(name))
    model.model.set_attn_implementation("eager")
    block, hidden = model.block(0), torch.randn(2, LENGTH, model.config.hidden_size)
    u, inputs = block.input_layernorm(hidden), model.block_inputs(hidden)
    mask = inputs["masks"][block.layer_type]
    _, probabilities = block.self_attn(u, inputs["position_embeddings"]["main"], mask)
    tiles = [tile for _, tile in attention_rows(block.self_attn, u, inputs["position_embeddings"]["main"], 7)]
    torch.testing.assert_close(torch.cat(tiles, 2), probabilities)


def test_rows_are_those_of_the_unrolled_matrix(saved_teacher):
    mixer, _, u, rotary = pair(saved_teacher("llama-gqa"), "mamba2")
    streams = mixer.project(u, rotary)
    parts = [streams.log_a, streams.B, streams.C, mixer.D, streams.step]
    whole, _ = mixer.materialize(u, rotary)
    torch.testing.assert_close(mixer_rows(parts, slice(9, 20)), whole[:, :, 9:20])


def test_identical_matrices_cost_nothing(saved_teacher, monkeypatch):
    mixer, attention, u, rotary = pair(saved_teacher("llama-gqa"), "discrete_mamba2")
    streams = mixer.project(u, rotary)
    parts = [t.detach() for t in (streams.log_a, streams.B, streams.C, mixer.D)]

    def same(attention, u, rotary, tile):
        for start in range(0, LENGTH, tile):
            rows = slice(start, start + tile)
            yield rows, mixer_rows(parts, rows)

    monkeypatch.setattr(matrix_orientation, "attention_rows", same)
    assert matrix_orientation_loss(mixer, attention, u, rotary, 8) == 0.0
    assert all(torch.isfinite(p.grad).all() and not p.grad.any() for p in mixer.parameters() if p.grad is not None)


def test_gradients_reach_what_makes_the_matrix_and_nothing_else(saved_teacher):
    mixer, attention, u, rotary = pair(saved_teacher("llama-gqa"), "discrete_mamba2")
    matrix_orientation_loss(mixer, attention, u, rotary, 8)
    rows = mixer.in_proj.weight.grad.abs().sum(1)
    x, BC, z, A_log = rows.split([mixer.x_size, mixer.B_size + mixer.C_size, mixer.inner_size, mixer.num_heads])
    assert not x.any()
    assert not z.any()
    assert BC.all()
    assert A_log.all()
    assert mixer.D.grad.all()
    assert mixer.A_log_bias.grad.all()
    assert mixer.out_proj.weight.grad is None
    assert mixer.z_bias.grad is None


def test_bfloat16_input_does_not_blow_up(saved_teacher):
    """Users of the public code report losses of 1e8 to 1e13 in bf16."""
    model = teacher_model(saved_teacher("llama-gqa"))
    mixer, block = model.mixer(1), model.block(1)
    u = 30 * torch.randn(2, LENGTH, model.config.hidden_size)
    with torch.autocast("cpu", torch.bfloat16):
        value = matrix_orientation_loss(mixer, block.self_attn, u.bfloat16(), model.rotary(LENGTH, 0), 8)
    exact = matrix_orientation_loss(mixer, block.self_attn, u.bfloat16().float(), model.rotary(LENGTH, 0), 8)
    assert value == pytest.approx(exact, rel=1e-6)


def test_mamba1_has_no_matrix_per_head(saved_teacher):
    model = teacher_model(saved_teacher("llama-gqa"), mixer="mamba1")
    with pytest.raises(ValueError, match="leave stage 1 out"):
        u = torch.randn(1, 8, 32)
        matrix_orientation_loss(model.mixer(0), model.block(0).self_attn, u, model.rotary(8, 0))
