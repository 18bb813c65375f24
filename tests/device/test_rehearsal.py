"""What a user with a GPU does first, on one or on a stand-in for one, and the same on the CPU beside it."""

import io
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import modeling_llamba  # noqa: F401  registers its classes
from convert import convert
from convert.cli import main as command
from recipes import distillation, dpo, seqkd, sft
from recipes import evaluate as evaluation
from recipes.cli import main as recipes_command
from tests.device.conftest import IS_THERE, some_device
from tests.helpers.hybrids import make_hybrid
from tests.helpers.teachers import random_ids
from tests.helpers.tiny_chat import common_arguments, conversations, preferences, save_chat_teacher, save_hybrid

pytestmark = [pytest.mark.gpu] if IS_THERE else [pytest.mark.slow]
TEXT = dict(tokens=6 * 64, sequence_length=64, held_out_sequences=2)
STAGES = {name: dict(tokens=128) for name in ("matrix_orientation", "hidden_state_alignment", "distillation")}
QUICK = dict(decays=[0.9], refine_steps=2)
BF16 = ("--bf16", "true", "--gradient_checkpointing", "true")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("device")
    teacher = save_chat_teacher(folder / "teacher")
    experts = save_chat_teacher(folder / "experts", "qwen3-moe")
    return {
        "teacher": teacher,
        "experts": experts,
        "hybrid": save_hybrid(teacher, folder / "hybrid", window=16),
        "mixers": save_hybrid(teacher, folder / "mixers"),
        "text": words(folder / "text.jsonl"),
        "chats": conversations(folder / "chats", count=8, test=4),
        "pairs": preferences(folder / "pairs"),
    }


def words(file):
    """Text for conversions: each device would draw its own."""
    generator = torch.Generator().manual_seed(0)
    lines = (torch.randint(4, 128, (60,), generator=generator).tolist() for _ in range(20))
    file.write_text("".join(json.dumps({"text": " ".join(f"w{i}" for i in line)}) + "\n" for line in lines))
    return file


def weights(folder):
    return load_file(folder / "model.safetensors")


def check_alike(there, here, **tolerance):
    assert there.keys() == here.keys()
    for name in here:
        torch.testing.assert_close(there[name], here[name], **tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "teacher, options",
    [
        ("teacher", dict(window=16)),
        ("teacher", dict(cache=0.5)),
        ("teacher", dict(attention_layers="MAMA", alignment=dict(fit=QUICK))),
        ("teacher", dict(attention_layers="MAMA", mixer="mamba2", alignment=dict(fit=QUICK))),
        ("experts", dict(window=16)),
        ("teacher", dict(align="mohawk", attention_layers="MAMA", alignment=STAGES | dict(fit=QUICK))),
        ("teacher", dict(align="mohawk", window=16, alignment=STAGES | dict(matrix_orientation=dict(tokens=0)))),
    ],
)  # fmt: skip
def test_a_conversion(teacher, options, world, tmp_path):
    """Fits are in float32 and float64, so that the same weights come out."""
    for device in ("cpu", "cuda"):
        with some_device() as stand_in:
            alignment = TEXT | options.get("alignment", {}) | {"device": device, "text": str(world["text"])}
            convert(str(world[teacher]), tmp_path / device, **options | {"alignment": alignment})
        assert (stand_in.peak() > 0) == (device == "cuda")
        assert stand_in.held() < 2**16
    # products of experts are summed in another order, which parameters of the mass show most
    close = dict(rtol=1e-3, atol=3e-4 if IS_THERE or teacher == "experts" else 1e-5)
    check_alike(weights(tmp_path / "cuda"), weights(tmp_path / "cpu"), **close)


@pytest.mark.parametrize(
    "recipe, data, student, options",
    [
        (sft, "chats", "hybrid", ()),
        (sft, "chats", "hybrid", BF16),
        (sft, "chats", "mixers", BF16),
        (dpo, "pairs", "hybrid", BF16),
        (distillation, "chats", "hybrid", (*BF16, "--max_completion_length", "4", "--temperature", "0.01")),
    ],
)
def test_a_training(recipe, data, student, options, world, tmp_path):
    """The answers of `distillation` are drawn, on each device from a stream of its own: all but greedily here."""
    for device in ("cpu", "cuda"):
        arguments = common_arguments(world[student], world["teacher"], world[data], tmp_path / device, *options)
        arguments[arguments.index("--use_cpu") + 1] = str(device == "cpu").lower()
        torch.manual_seed(0)
        with some_device() as stand_in:
            report = recipe.main(arguments)
        assert (stand_in.peak() > 0) == (device == "cuda")
        assert report["after"]["eval_loss"] > 0
    bf16 = options[:1] == BF16[:1]
    # by Adam's first steps a gradient of nothing but rounding errors moves a weight as far as any other
    check_alike(
        weights(tmp_path / "cuda"), weights(tmp_path / "cpu"), rtol=1e-3, atol=5e-3 if bf16 or IS_THERE else 1e-4
    )


def test_answers_of_the_teacher(world, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"instruction": f"w{10 + i} w9", "input": ""}) + "\n" for i in range(6)))
    arguments = ["--teacher_model_name_or_path", str(world["teacher"]), "--dataset_name", str(prompts),
                 "--max_new_tokens", "6", "--truncated", "keep", "--output_dir"]  # fmt: skip
    seqkd.main([*arguments, str(tmp_path / "cpu")])
    with some_device() as device:
        seqkd.main([*arguments, str(tmp_path / "cuda")])
    assert device.peak() > 0
    here, there = ((tmp_path / where / "train.jsonl").read_text() for where in ("cpu", "cuda"))
    assert here == there


def test_generate_beside_the_teacher(world, capsys):
    said = []
    for device in ("cpu", "cuda"):
        with some_device():
            command(["generate", str(world["hybrid"]), "--prompt", "w9 w10", "--max-new-tokens", "24",
                     "--device", device, "--teacher", str(world["teacher"])])  # fmt: skip
        said.append([line for line in capsys.readouterr().out.splitlines() if "tokens per second" not in line])
    assert said[0] == said[1] != []


def test_evaluate(world, tmp_path, capsys):
    found = []
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"w{i} w7 " * 60}) + "\n" for i in range(8, 28)))
    for device in ("cpu", "cuda"):
        with some_device():
            evaluation.main([str(world["hybrid"]), "--teacher", str(world["teacher"]), "--text", str(text),
                             "--lengths", "64", "--sequences", "2", "--max-new-tokens", "4", "--speed-tokens", "2",
                             "--device", device, "--output", str(tmp_path / device)])  # fmt: skip
        found.append(json.loads((tmp_path / device / "evaluation.json").read_text()))
    here, there = found
    assert there["text"][0]["kl"] == pytest.approx(here["text"][0]["kl"], rel=1e-3)
    assert there["recall"] == here["recall"]
    assert there["generation"]["answers"] == here["generation"]["answers"]
    assert here["speed"][0]["cache_bytes"] == there["speed"][0]["cache_bytes"]


def test_chat(world, capsys, monkeypatch):
    said = []
    for device in ("cpu", "cuda"):
        monkeypatch.setattr("sys.stdin", io.StringIO("w9 w10\nw11 w12 w13\n"))
        with some_device() as stand_in:
            command(["chat", str(world["hybrid"]), "--device", device, "--max-new-tokens", "12", "--temperature", "0"])
        assert (stand_in.peak() > 0) == (device == "cuda")
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != ""


def test_compare(world, tmp_path):
    """All methods: caches in few bits, windows, eviction with its second reading of the context, and speed."""
    text, found = tmp_path / "text.jsonl", []
    text.write_text("".join(json.dumps({"text": f"w{i} w7 w{i + 1} " * 60}) + "\n" for i in range(8, 28)))
    for device in ("cpu", "cuda"):
        with some_device() as stand_in:
            recipes_command(["compare", str(world["teacher"]), str(world["hybrid"]), "--text", str(text),
                             "--length", "128", "--first", "32", "--rows", "1", "--speed", "64", "--dtype", "float32",
                             "--device", device, "--out", str(tmp_path / device), "--quiet"])  # fmt: skip
        assert (stand_in.peak() > 0) == (device == "cuda")
        found.append(json.loads((tmp_path / device / "compare.json").read_text()))
    here, there = (comparison["methods"] for comparison in found)
    assert len(here) >= 8
    for one, other in zip(here, there, strict=True):
        assert one["name"] == other["name"]
        assert one["cache_bytes"] == other["cache_bytes"]
        assert other["recall"] == one["recall"]
        for of_one, of_other in zip(one["text"].values(), other["text"].values(), strict=True):
            kl = of_one["after_contexts"]["kl"]
            assert of_other["after_contexts"]["kl"] == pytest.approx(kl, rel=1e-2, abs=1e-6)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("pattern", ["beside", "every", "gemma", "window", "experts"])
@torch.no_grad()
def test_a_prompt_and_tokens_with_and_without_padding(pattern, static, monkeypatch):
    """A static cache and a step compiled for it are for a GPU; here the step runs as it is."""
    model, ids = make_hybrid(pattern=pattern, dtype=torch.float32, backend="torch"), random_ids(2, 20)
    if static and pattern in ("window", "experts"):
        pytest.skip("mixers alone have no keys that a static cache would hold")
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    monkeypatch.setattr(type(model), "get_compiled_call", lambda self, config: self.__call__)

    def answers(where):
        options = {"cache_implementation": "static"} if static else {}
        model.to(where)
        return [
            model.generate(ids.to(where), attention_mask=m.to(where), max_new_tokens=12, do_sample=False, **options)
            for m in (torch.ones_like(mask), mask)
        ]

    here = answers("cpu")
    with some_device():
        there = [t.cpu() for t in answers("cuda")]
        model.to("cpu")
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


@torch.no_grad()
def test_two_devices(world):
    ids = random_ids(1, 40)
    for name in ("hybrid", "mixers"):
        here = AutoModelForCausalLM.from_pretrained(world[name], dtype=torch.float32)
        expected = here.generate(ids, max_new_tokens=8, do_sample=False)
        with some_device(2) as device:
            places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 0, "model.layers.2": 1,
                      "model.layers.3": 1, "model.norm": 1, "model.rotary_emb": 0, "lm_head": 1}  # fmt: skip
            model = AutoModelForCausalLM.from_pretrained(world[name], dtype=torch.float32, device_map=places)
            assert torch.equal(model.generate(ids.cuda(), max_new_tokens=8, do_sample=False).cpu(), expected)
        assert IS_THERE or all(books.peak > 0 for books in device.books)
