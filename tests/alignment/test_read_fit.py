"""The closed-form fit of the normalised read against dense attention."""

import pytest
import torch

from convert.alignment.activations import ActivationStream
from convert.alignment.closed_form import fit_layer, held_out_error
from convert.alignment.probes import copy_probe, with_recall
from convert.alignment.read_fit import attention_received, far_log_mass, fit_salience
from convert.options import FitOptions
from convert.placement.placement import Hybrid, everywhere
from convert.plan import hybrid_config
from modeling_llamba.hybrid_mixer import unpadded
from tests.alignment.tiny import rows, teacher_model

WINDOW, SINKS, SALIENT = 4, 1, 2


def layer_and_data(folder, layer=1, heads=None, **hybrid):
    model = teacher_model(folder)
    hybrid = {"salient": SALIENT, "read": "normalised"} | hybrid
    placement = everywhere(Hybrid(WINDOW, SINKS, **hybrid), 4).with_full_heads(heads or {})
    model.follow(hybrid_config(model.weights, placement, model.options))
    stream = ActivationStream(model, rows(8), 2, 10**9)
    data = [stream.attention_data(i) for i in range(layer + 1)][-1]
    return model.mixer(layer).requires_grad_(False), data


def dense(mixer, u, rotary):
    """Scores (B, H, L, L) of full causal attention."""
    attention = mixer.attention
    q, _, k, *_ = attention.project(u, rotary, unpadded(u))
    k = k.repeat_interleave(attention.heads // attention.kv_heads, dim=1)
    scores = q @ k.mT * attention.scaling
    return scores.masked_fill(torch.ones(u.shape[1], u.shape[1]).triu(1).bool(), -torch.inf)


@pytest.mark.parametrize("name", ["llama-gqa", "phi", "qwen3"])
@torch.no_grad()
def test_the_teachers_attention_in_blocks_is_the_whole(name, saved_teacher, monkeypatch):
    monkeypatch.setattr("convert.alignment.read_fit.QUERIES", 5)
    mixer, data = layer_and_data(saved_teacher(name))
    mixer.attention.salience.normal_(generator=torch.Generator().manual_seed(0))
    u, _ = data.batch(range(2))
    scores, length = dense(mixer, u, data.rotary), u.shape[1]
    left = torch.arange(length) <= torch.arange(length)[:, None] - WINDOW
    expected = (scores.softmax(-1) * left).sum((1, 2)) / (length - WINDOW - torch.arange(length)).clamp(min=1)
    torch.testing.assert_close(attention_received(mixer, u, data.rotary), expected)

    near = mixer.attention(u, data.rotary, unpadded(u))
    mass = far_log_mass(mixer, near)
    for b in range(2):
        in_state = set()
        for t in range(length):
            expected = scores[b, :, t, sorted(in_state)].logsumexp(-1)
            torch.testing.assert_close(mass[b, t], expected, rtol=1e-4, atol=1e-5)
            in_state |= {c - SALIENT for c in [near.leaving[b, t].item()] if c >= 0}
        assert len(in_state) == length - WINDOW + 1 - SINKS - SALIENT
    # near and far together are all of the attention
    together = torch.logaddexp(near.log_mass, mass)
    torch.testing.assert_close(together, scores.logsumexp(-1).transpose(1, 2), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_tokens_that_all_heads_look_at_are_found(saved_teacher):
    """Keys that grow along one direction of the input are salient where the input points there."""
    mixer, data = layer_and_data(saved_teacher("llama-gqa"))
    u = torch.randn(6, 60, data.u.shape[2], generator=torch.Generator().manual_seed(0))
    loud = torch.zeros(6, 60, dtype=torch.bool)
    loud[:, [7, 19]] = True
    queries = mixer.attention.q_proj.weight
    queries.zero_()
    u[..., 0] = 1.0
    queries[:, 0] = 1.0  # every query is the same vector of ones, in pairs that rotate
    mixer.attention.k_proj.weight.zero_()
    mixer.attention.k_proj.weight[:, 1] = 3.0
    u[..., 1] = loud.float()
    still = torch.ones(1, 60, data.rotary[0].shape[-1]), torch.zeros(1, 60, data.rotary[0].shape[-1])
    fit_salience(mixer, [u], still)
    near = mixer.attention(u, still, unpadded(u))
    left = near.leaving[:, :-1]
    assert not (loud.gather(1, (left - SALIENT).clamp(min=0)) & (left >= SALIENT)).any(), "a loud token was let go"


@pytest.mark.parametrize("name", ["llama-gqa", "phi", "qwen3"])
@torch.no_grad()
def test_the_fit_comes_closer_and_leaves_full_heads_alone(name, saved_teacher):
    mixer, data = layer_and_data(saved_teacher(name), heads={1: (1, 3)})
    before = mixer.out_proj.weight.clone()
    mapped = held_out_error(mixer, data)
    mixer, fit = fit_layer(mixer, data, FitOptions())
    assert fit.solved < fit.mapped and fit.solved < mapped
    assert fit.solved == pytest.approx(held_out_error(mixer, data), rel=1e-3)
    changed = (mixer.out_proj.weight != before).unflatten(1, (3, 4, -1)).any(-1).any(0)
    assert not changed[:, [1, 3]].any() and changed[:, [0, 2]].all()


@torch.no_grad()
def test_a_window_alone_learns_who_stays_in_sight_and_nothing_else(saved_teacher):
    mixer, data = layer_and_data(saved_teacher("llama-gqa"), state=False, read="linear")
    before = {name: tensor.clone() for name, tensor in mixer.state_dict().items()}
    fit_layer(mixer, data, FitOptions())
    changed = {name for name, tensor in mixer.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"attention.salience"}


def test_sequences_within_the_window_show_no_salient_tokens(saved_teacher):
    mixer, data = layer_and_data(saved_teacher("llama-gqa"), state=False, read="linear")
    u, _ = data.batch(range(2))
    with pytest.raises(ValueError, match="set sequence_length higher"):
        fit_salience(mixer, [u[:, : WINDOW + SINKS]], tuple(t[:, : WINDOW + SINKS] for t in data.rotary))


def test_calibration_text_asks_for_recall():
    ids = torch.arange(13 * 16).view(13, 16)
    changed = with_recall(ids, range(1000, 1100), seed=0)
    rows_changed = (changed != ids).any(1).nonzero()[:, 0].tolist()
    assert rows_changed == [0, 6, 12]
    assert torch.equal(changed[12, :8], changed[12, 8:]) and torch.equal(changed[0, :8], changed[0, 8:])
    assert torch.equal(changed[6, -4:], changed[6, changed[6].tolist().index(changed[6, -4]) :][:4])
    assert copy_probe(range(1000, 1100), 1, 8, 12).ids.tolist() == changed[12:].tolist()
