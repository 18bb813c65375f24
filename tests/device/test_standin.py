"""The stand-in device: what is wrong on CUDA is caught, and what is right computes what a CPU does."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.doubles.device import StandIn

MIXED = "Expected all tensors to be on the same device"
LIMIT = 2**20


@pytest.fixture
def device():
    with StandIn(devices=2, limit=LIMIT) as device:
        yield device


def cuda(*shape, **options):
    return torch.ones(*shape, device="cuda", **options)


def changed(change):
    return lambda: change(cuda(3, 3))


WRONG = {
    "a sum over two devices": (MIXED, lambda: cuda(2) + torch.ones(2)),
    "a number on the device, numbers on the host": (MIXED, lambda: cuda(()) * torch.ones(2)),
    "two devices": (MIXED, lambda: cuda(2) + torch.ones(2, device="cuda:1")),
    "a product with the host": (MIXED, lambda: F.linear(cuda(1, 3), torch.ones(3, 3))),
    "weights left behind": (MIXED, lambda: nn.Linear(3, 3)(cuda(1, 3))),
    "inputs left behind": (MIXED, lambda: nn.Embedding(4, 3).cuda()(torch.tensor([1]))),
    "a mask on the host": (MIXED, lambda: cuda(3).masked_fill(torch.ones(3, dtype=torch.bool), 0)),
    "a matrix put together from two places": (MIXED, lambda: torch.cat([cuda(2), torch.ones(2)])),
    "numbers stacked from two places": (MIXED, lambda: torch.stack([cuda(()), torch.ones(())])),
    "gathered with an index on the host": (MIXED, lambda: cuda(3).gather(0, torch.tensor([1]))),
    "the host's rows by the device's index": (MIXED, lambda: torch.ones(3)[torch.tensor([1], device="cuda")]),
    "a row assigned from the host": (MIXED, lambda: cuda(3).index_put_((torch.tensor([1]),), torch.ones(1))),
    "into the host": (MIXED, lambda: torch.ones(()).add_(cuda(()))),
    "a position that stays on the host": (MIXED, lambda: cuda(3) * torch.arange(3)),
    "attention with a mask on the host": (
        MIXED,
        lambda: F.scaled_dot_product_attention(*[cuda(1, 1, 4, 8)] * 3, attn_mask=torch.zeros(4, 4)),
    ),
    "numpy": ("can't convert cuda:0 device type tensor to numpy", lambda: cuda(2).numpy()),
    "numpy, unasked": ("can't convert cuda:0", lambda: __import__("numpy").asarray(cuda(2))),
    "a generator of the host": (
        "Expected a 'cuda' device type for generator",
        lambda: torch.rand(2, device="cuda", generator=torch.Generator()),
    ),
    "draws by a generator of the host": (
        "Expected a 'cuda' device type for generator",
        lambda: torch.multinomial(cuda(3), 1, generator=torch.Generator()),
    ),
    "products of integers": ("not implemented for", lambda: cuda(2, 2).long() @ cuda(2, 2).long()),
    "a device that is not there": ("invalid device ordinal", lambda: torch.ones(2, device="cuda:2")),
    "pinned memory of the device": ("only dense CPU tensors can be pinned", lambda: cuda(2).pin_memory()),
    "more than there is": ("CUDA out of memory", lambda: cuda(LIMIT)),
    "more and more": ("CUDA out of memory", lambda: [cuda(LIMIT // 16) for _ in range(5)]),
    "too much in a backward pass": (
        "CUDA out of memory",
        lambda: cuda(LIMIT // 12, requires_grad=True).exp().sum().backward(),  # a third each: data, exp, gradient
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_program_is_caught(name, device):
    said, program = WRONG[name]
    with pytest.raises((RuntimeError, TypeError), match=said):
        program()


def test_memory_is_back_after_it_ran_out(device):
    with pytest.raises(torch.OutOfMemoryError):
        cuda(LIMIT)
    assert torch.cuda.memory_allocated() == 0
    held = cuda(LIMIT // 8)
    assert torch.cuda.memory_allocated() == LIMIT // 2  # a view takes nothing
    assert held[1:].sum() == LIMIT // 8 - 1
    assert torch.cuda.memory_allocated("cuda:1") == 0
    del held
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0


def test_the_peak_is_known_by_type(device):
    wide = cuda(LIMIT // 32)
    half = cuda(LIMIT // 32).bfloat16()  # a copy in four bytes is there beside it
    del wide
    cuda(LIMIT // 64)  # less
    peaks = device.peak_by_dtype()
    assert peaks[torch.float32] == LIMIT // 4
    assert peaks[torch.bfloat16] == LIMIT // 16 == half.nbytes
    assert sum(peaks.values()) == device.peak()
    torch.cuda.reset_peak_memory_stats()
    assert device.peak_by_dtype()[torch.float32] == 0
    assert device.peak() == half.nbytes


RIGHT = {
    "a number of the host": lambda x: x + torch.tensor(2.0),
    "a number of the host, filled in": lambda x: x.masked_fill(x > 1, torch.tensor(0.0)),
    "rows by an index of the host": lambda x: x[torch.tensor([1, 0])],
    "a choice between numbers": lambda x: torch.where(x > 1, x, torch.tensor(0.0)),
    "in place, of a view": lambda x: x.clone()[1:].mul_(2),
    "sorted": lambda x: x.sort(dim=-1, descending=True).values,
    "squeezed in place": lambda x: x[:1].clone().squeeze_(0).unsqueeze_(1).t_(),
    "numbers in a row": lambda x: torch.arange(5, device=x.device)[None] * torch.linspace(0, 1, 5, device=x.device),
    "solved": lambda x: torch.linalg.solve(x @ x.mT + torch.eye(3, device=x.device), x),
    "attention": lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3, is_causal=True),
    "as Python": lambda x: torch.tensor(x.tolist(), device=x.device),
    "there and back": lambda x: x.cpu().to(x.device, torch.bfloat16).float(),
    "copied": lambda x: copy.deepcopy(nn.Parameter(x)) * 2,
    "inference": lambda x: torch.inference_mode()(F.linear)(x, x),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_computes_what_a_cpu_does(name, device):
    x = torch.arange(9.0).view(3, 3).sin()
    there = RIGHT[name](x.cuda())
    assert there.device == torch.device("cuda:0")
    assert torch.equal(there.cpu(), RIGHT[name](x))


def test_a_model_goes_to_the_meta_device_and_back(device):
    model = nn.Linear(2, 2).cuda().to("meta")
    assert model.weight.is_meta
    assert torch.cuda.memory_allocated() == 0
    assert model.to_empty(device="cuda").weight.is_cuda
    assert not model.cpu().weight.is_cuda


def train(where, autocast=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 8, bias=False))
    model[3].weight = model[0].weight
    model = model.to(where)
    assert model[3].weight is model[0].weight  # tied weights stay tied
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ids = torch.arange(8, device=where)
    for _ in range(3):
        with torch.autocast(torch.device(where).type, autocast, enabled=autocast is not None):
            hidden = torch.utils.checkpoint.checkpoint(model[:3], ids, use_reentrant=False)
            loss = F.cross_entropy(model[3](hidden).float(), ids)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_training_is_that_of_a_cpu(autocast, device):
    for there, here in zip(train("cuda", autocast), train("cpu", autocast), strict=True):
        # the host's autocast has other lists of operations
        torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-5 if autocast is None else 1e-2)


@pytest.mark.parametrize(
    "waits, program",
    [
        (1, changed(lambda t: t.sum().item())),
        (1, changed(lambda t: bool(t.all()))),
        (1, changed(lambda t: t.cpu())),
        (1, changed(lambda t: t[t > 0])),
        (1, changed(lambda t: t.nonzero())),
        (1, changed(lambda t: t[[0, 1]])),
        (1, changed(lambda t: torch.linalg.solve(t + torch.eye(3, device="cuda"), t))),
        (1, lambda: torch.tensor([1, 2], device="cuda")),
        (1, lambda: torch.cuda.synchronize()),
        (0, lambda: torch.ones(2).pin_memory().to("cuda", non_blocking=True)),
        (0, changed(lambda t: t[1:, None].mT + torch.tensor(1.0))),
        (0, changed(lambda t: t.masked_fill_(t > 0, 2))),
        (0, lambda: torch.full((3,), 2.0, device="cuda")),
    ],
)
def test_who_waits_is_counted(waits, program, device):
    with device.counting() as counts:
        program()
    assert counts.syncs == waits, counts


def test_streams_and_events_do_nothing_but_wait(device):
    side, done = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    with device.counting() as counts:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x = cuda(2, 3) + 1
        done.record(side)
        torch.cuda.default_stream().wait_event(done)
        assert done.query()
        assert counts.syncs == 0
        done.synchronize()
    assert counts.syncs == 1
    assert x.is_cuda


def test_launches_are_counted(device):
    x = cuda(2, 3, 4)
    with device.counting() as counts:
        x.transpose(1, 2).reshape(2, -1)  # one copy
        (x.view(-1)[None] + 1).exp_()  # two
        F.scaled_dot_product_attention(*[x[None]] * 3)  # one
    assert counts.launches == 4, counts


def test_streams_of_numbers_are_those_of_the_device(device):
    torch.manual_seed(3)
    first = torch.rand(4, device="cuda")
    torch.manual_seed(3)
    torch.rand(4)  # of the host
    assert torch.equal(torch.rand(4, device="cuda"), first)
    generator = torch.Generator("cuda").manual_seed(3)
    assert generator.device.type == "cuda"
    assert torch.equal(torch.rand(4, device="cuda", generator=generator), first)


def test_nothing_is_left_of_it():
    with StandIn():
        assert torch.cuda.is_available()
        assert torch.accelerator.is_available()
        made = torch.ones(2, device="cuda")
        with torch.device("meta"):
            assert nn.Embedding(2, 2).weight.is_meta
            assert nn.Linear(2, 2).weight.is_meta
    assert not torch.cuda.is_available()
    assert not torch.accelerator.is_available()
    assert made.is_cuda
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        torch.ones(2, device="cuda")
    x = torch.ones(2, requires_grad=True)
    x.sum().backward()
    assert torch.equal(x.grad, torch.ones(2))
    assert not isinstance(torch.Generator(), torch.Tensor)
