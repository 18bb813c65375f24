"""How often the host waits for the device and how many kernels it launches; `make rehearse` prints the table."""

import pytest
import torch
from torch.nn import functional as F

from convert import convert
from convert.fit import fit
from modeling_llamba.hybrid.hybrid_cache import HybridLayer
from modeling_llamba.kernels.torch_backend import TorchBackend
from recipes import sft
from tests.doubles.device import StandIn
from tests.helpers.hybrids import make_hybrid
from tests.helpers.teachers import random_ids
from tests.helpers.tiny_chat import common_arguments, conversations, save_chat_teacher, save_hybrid

TEXT = dict(text="sampled", tokens=8 * 64, sequence_length=64, held_out_sequences=2, device="cuda")
ROWS: list[tuple] = []


@pytest.fixture(scope="module", autouse=True)
def table():
    yield
    print(f"\n{'':40}{'waits':>8}{'goal':>6}{'launches':>10}{'goal':>6}")
    for what, counts, waits, launches in ROWS:
        print(f"{what:40}{counts.syncs:8}{waits:6}{counts.launches:10}{launches or '':>6}")


def check(what, counts, waits, launches=None):
    """Note a row of the table, and compare it with the goals."""
    ROWS.append((what, counts, waits, launches))
    assert counts.syncs <= waits, counts.waits
    assert launches is None or counts.launches <= launches, counts.kernels


@pytest.mark.parametrize("pattern, of_prompt, of_token", [("beside-only", 530, 229), ("every", 520, 213)])
@torch.no_grad()
def test_a_prompt_and_a_token(pattern, of_prompt, of_token):
    """Nothing waits unless a mask comes along, which is looked at once. Launches are those without Triton's step; no
    more than today."""
    model, ids = make_hybrid(pattern=pattern, dtype=torch.float32), random_ids(2, 60)
    with StandIn() as device:
        model, ids = model.cuda(), ids.cuda()
        model(ids, use_cache=True)  # the matrix of the rounding is sent once
        with device.counting() as counts:
            out = model(ids, use_cache=True)
        check(f"prompt, {pattern}, {len(model.model.layers)} layers", counts, 0, of_prompt)
        for _ in range(3):  # of which one opens a block
            with device.counting() as counts:
                model(ids[:, :1], cache=out.cache, use_cache=True)
            check(f"token, {pattern}", counts, 0, of_token)
        mask = torch.ones_like(ids)
        with device.counting() as counts:
            model(ids, attention_mask=mask, use_cache=True)
        check(f"prompt with a mask, {pattern}", counts, 1)
        mask[0, :9] = 0  # one is the model's look at it, the others are those of transformers' mask for kept heads
        with device.counting() as counts:
            out = model(ids, attention_mask=mask, use_cache=True)
        check(f"padded prompt, {pattern}", counts, 3)
        with device.counting() as counts:
            model(ids[:, :1], attention_mask=F.pad(mask, (0, 1), value=1), cache=out.cache)
        check(f"padded token, {pattern}", counts, 3)


@pytest.mark.parametrize("dtype, of_token, of_opening", [(torch.float32, 115, 157), (torch.bfloat16, 134, 180)])
@torch.no_grad()
def test_a_token_by_one_launch_a_layer(dtype, of_token, of_opening, monkeypatch):
    """With Triton's step, for which PyTorch's computes here without being counted: what is left, for two layers and
    the head, are products, norms, rotations, columns that are written, and sums."""
    model, ids = make_hybrid(pattern="beside-only", dtype=dtype), random_ids(1, 60)
    step, put, device = TorchBackend.step, HybridLayer.put, StandIn()

    def one_launch(*arguments):
        device.note_launch("mix_one")
        counts, device.counts = device.counts, []
        monkeypatch.setattr(HybridLayer, "put", lambda *of_put: written(counts, *of_put))
        result, device.counts = step(*arguments), counts
        return result

    def written(counts, *arguments):  # before the kernel, by PyTorch there, too
        device.counts = counts
        result, device.counts = put(*arguments), []
        return result

    monkeypatch.setattr(TorchBackend, "step", one_launch)
    with device:
        model, ids = model.cuda(), ids.cuda()
        cache = model(ids, use_cache=True).cache
        for what, most in (("a block opens", of_opening), ("else", of_token)):
            with device.counting() as counts:
                model(ids[:, :1], cache=cache, use_cache=True)
            assert counts.kernels["mix_one"] == 2
            check(f"token, one launch a step, {what}, {dtype}"[:40], counts, 0, most)


@pytest.mark.slow  # `make rehearse` runs it as well
def test_a_layer_of_a_fit(tmp_path, monkeypatch):
    """A solver of eigenvalues looks at its result. All else is decided on the device, and what came of it read once,
    with the weights; the teacher's are on the device already here."""
    device, found = StandIn(), []

    def counted(what):
        def run(*arguments):
            with device.counting() as counts:
                result = what(*arguments)
            found.append((what.__name__, counts))
            return result

        return run

    for name in ("fit_hybrid_layer", "fit_layer", "_fit_one"):
        monkeypatch.setattr(fit, name, counted(getattr(fit, name)))

    def loaded(teacher, layer):  # from a file, not counted
        counts, device.counts = device.counts, []
        mixer, device.counts = load(teacher, layer), counts
        return mixer

    load = fit.TeacherModel.mixer
    monkeypatch.setattr(fit.TeacherModel, "mixer", loaded)
    move = counted(fit.ActivationStream.attention_data)
    monkeypatch.setattr(fit.ActivationStream, "attention_data", lambda stream, layer: move(stream, layer))
    teacher = save_chat_teacher(tmp_path / "teacher")
    quick = dict(fit=dict(decays=[0.9, 0.99], refine_steps=2))
    with device:
        convert(str(teacher), tmp_path / "windows", window=16, alignment=TEXT)
        convert(str(teacher), tmp_path / "mixers", attention_layers="MAAA", alignment=TEXT | quick)
    goals = {"fit_hybrid_layer": 1, "fit_layer": 0, "_fit_one": 2, "attention_data": 0}
    assert {name for name, _ in found} == goals.keys()
    for name, goal in goals.items():
        counts = max((counts for which, counts in found if which == name), key=lambda counts: counts.syncs)
        check(f"a layer of a fit, {name}", counts, goal)


@pytest.mark.slow  # `make rehearse` runs it as well
def test_a_step_of_training(tmp_path):
    """The difference between three steps and two; what is left is the trainer's, and one list of statistics."""
    teacher = save_chat_teacher(tmp_path / "teacher")
    student, data = save_hybrid(teacher, tmp_path / "hybrid", window=16), conversations(tmp_path / "data")
    found = []
    for steps in ("2", "3"):
        arguments = common_arguments(student, teacher, data, tmp_path / steps, "--eval_strategy", "no")
        for flag, value in (("--use_cpu", "false"), ("--max_steps", steps), ("--logging_steps", "100")):
            arguments[arguments.index(flag) + 1] = value
        with StandIn() as device, device.counting() as counts:
            sft.main(arguments)
        found.append(counts)
    step = type(found[0])(found[1].waits - found[0].waits, found[1].kernels - found[0].kernels)
    check("a step of SFT with a teacher", step, 15, 1950)
