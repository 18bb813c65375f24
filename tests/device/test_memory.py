"""Out of memory: a fit goes on in smaller pieces, and where that does not help, one line says what to lower."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from convert import convert
from convert.checkpoint.load import load_config, load_model
from convert.cli import main as command
from convert.fit import activations, fit
from convert.fit.aligner import Aligner
from convert.fit.layer_data import Pieces
from convert.fit.memory_estimate import device_bytes
from convert.fit.text import CalibrationRows
from convert.layout.placement import Hybrid, everywhere
from convert.options import make_options
from convert.resolve import resolve
from convert.scores import layer_costs, retrieval
from convert.teachers.teacher import find_teacher
from convert.teachers.weights import TeacherWeights
from modeling_llamba import LlambaConfig
from modeling_llamba.kernels import torch_backend
from modeling_llamba.model import attention
from modeling_llamba.model.cuda_graphs import VARIABLE
from recipes import sft
from recipes.benchmarks import device_memory as memory
from tests.doubles.device import StandIn
from tests.helpers.teachers import TINY, random_ids
from tests.helpers.tiny_chat import chat_tokenizer, common_arguments, save_chat_teacher

TEXT = dict(text="sampled", tokens=12 * 64, sequence_length=64, held_out_sequences=2, device="cuda")


@pytest.fixture(autouse=True)
def without_graphs(monkeypatch):
    """A graph on the stand-in holds all that its pass has made; one on CUDA reuses memory within the pass."""
    monkeypatch.setenv(VARIABLE, "0")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_chat_teacher(tmp_path_factory.mktemp("memory") / "teacher")


def converted(teacher, out, limit=2**33, **alignment):
    with StandIn(limit=limit) as device:
        convert(str(teacher), out, window=16, attention_layers=0, alignment=TEXT | alignment)
    return load_file(out / "model.safetensors"), device


def test_a_fit_goes_on_in_smaller_pieces(teacher, tmp_path, monkeypatch):
    monkeypatch.setattr("convert.dry_run.alignment_bytes", lambda plan: None)
    whole, device = converted(teacher, tmp_path / "whole")
    used, original = [], fit._fit_one
    monkeypatch.setattr(
        fit, "_fit_one", lambda t, n, data, *rest: used.append(data.pieces) or original(t, n, data, *rest)
    )
    limit = device.peak() - 2**12
    there, device = converted(teacher, tmp_path / "smaller", limit)
    assert used[0].kept  # and what is smaller stays so
    assert not used[-1].kept
    assert device.peak() <= limit
    assert there.keys() == whole.keys()
    for name, tensor in whole.items():
        if "down" not in name and "up" not in name:  # whose directions are free
            assert (there[name] - tensor).abs().max() < 1e-2, name


def test_where_nothing_helps_one_line_says_what_to_lower(teacher, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("convert.dry_run.alignment_bytes", lambda plan: None)
    out = tmp_path / "out"
    convert(str(teacher), out, align="none", window=16)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    at_once = []
    original = activations.ActivationStream.close
    monkeypatch.setattr(activations.ActivationStream, "close", lambda s: at_once.append(s.at_once) or original(s))
    text, config = tmp_path / "text.txt", tmp_path / "x.yaml"
    text.write_text(" ".join(f"w{7 + i % 100}" for i in range(2000)))
    config.write_text(yaml.safe_dump({"alignment": TEXT | {"text": str(text)}}))
    for limit in (2**13, 2**16, 2**17, 2**18, 2**19):
        with StandIn(limit=limit), pytest.raises(SystemExit):
            command([str(teacher), str(out), "--window", "16", "--config", str(config), "--overwrite"])
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("error: out of memory, while ")
        assert "; lower alignment.tokens or" in error
        assert before == {path.name: path.read_bytes() for path in out.iterdir()}
    assert 1 in at_once


@pytest.mark.slow
@pytest.mark.parametrize(
    "M, H, K, D, L, sequences", [(64, 4, 2, 16, 256, 24), (128, 4, 2, 32, 512, 16), (256, 8, 8, 32, 256, 8)]
)
def test_memory_on_paper_is_that_of_the_books(M, H, K, D, L, sequences, tmp_path, monkeypatch):
    """Of one layer's fit, within a tenth."""
    monkeypatch.setattr("convert.dry_run.alignment_bytes", lambda plan: None)
    shape = dict(hidden_size=M, num_attention_heads=H, num_key_value_heads=K, head_dim=D, intermediate_size=2 * M)
    config = LlamaConfig(**TINY | shape | {"num_hidden_layers": 2, "max_position_embeddings": 1024})
    LlamaForCausalLM(config).save_pretrained(tmp_path / "teacher")
    chat_tokenizer().save_pretrained(tmp_path / "teacher")
    text, peaks, original = tmp_path / "text.txt", [], fit._fit_one
    text.write_text(" ".join(f"w{7 + i % 100}" for i in range(sequences * L)))

    def measured(*arguments):
        torch.cuda.reset_peak_memory_stats()
        result = original(*arguments)
        peaks.append(torch.cuda.max_memory_allocated())
        return result

    monkeypatch.setattr(fit, "_fit_one", measured)
    alignment = dict(text=str(text), tokens=sequences * L, sequence_length=L, held_out_sequences=4, device="cuda")
    with StandIn():
        plan = convert(
            str(tmp_path / "teacher"), tmp_path / "out", window=64, attention_layers="none", alignment=alignment
        )
    assert device_bytes(plan.config, sequences - 4, 4, L, 64) == pytest.approx(max(peaks), rel=0.1)


@pytest.mark.parametrize("shape, most", [((4096, 32, 14336, 32), 24e9), ((8192, 64, 28672, 80), 80e9)])
def test_large_teachers_fit_on_one_device(shape, most):
    """8B and 70B by default: 30 sequences of 1,024 tokens."""
    M, H, intermediate, layers = shape
    config = LlambaConfig(
        vocab_size=128256, hidden_size=M, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=H, num_key_value_heads=8, layer_types=["full_attention"] * layers,
    )  # fmt: skip
    assert most / 10 < device_bytes(config, 26, 4, 1024, 224) < most


def test_what_is_fitted_leaves_the_device(tmp_path, monkeypatch):
    """Or the mixers of a deep teacher would fill it: those of 70B take 48 GB."""
    monkeypatch.setattr("convert.dry_run.alignment_bytes", lambda plan: None)
    peaks = []
    for layers in (2, 6):
        config = LlamaConfig(**TINY | {"num_hidden_layers": layers})
        LlamaForCausalLM(config).save_pretrained(tmp_path / f"{layers}")
        chat_tokenizer().save_pretrained(tmp_path / f"{layers}")
        text = tmp_path / "text.txt"
        text.write_text(" ".join(f"w{7 + i % 100}" for i in range(2000)))
        _, device = converted(tmp_path / f"{layers}", tmp_path / f"out{layers}", text=str(text))
        peaks.append(device.peak())
    assert peaks[1] < peaks[0] + 2**12  # in blocks of 512 bytes


def test_scores_are_taken_in_smaller_pieces(teacher, monkeypatch):
    """Heads by half of the rows, errors of layers by half of the sequences, and the same scores come out."""
    ids, found = random_ids(4, 64), {}
    used = []
    monkeypatch.setattr(layer_costs, "within_memory", lambda *args: used.append(fit.within_memory(*args)) or used[-1])
    monkeypatch.setattr(retrieval, "within_memory", layer_costs.within_memory)
    for name, lower in (("whole", 0), ("pieces", 2**12)):
        options = make_options(str(teacher), "unused", window=16, attention_layers=0, alignment=TEXT | {"tokens": 384})
        weights = TeacherWeights.of(find_teacher(str(teacher)))
        with StandIn(limit=2**33 if not lower else found["peak of heads"] - lower) as device:
            aligner = Aligner(weights, resolve(options, weights))
            heads = retrieval.retrieval_scores(aligner.model, ids)
        if not lower:
            found["peak of heads"] = device.peak()
        with StandIn() as device:
            aligner = Aligner(weights, resolve(options, weights))
            placement = everywhere(Hybrid(16, 8, 4, salient=4), 4)
            aligner.ids = ids
            text = CalibrationRows(ids, 0)
            monkeypatch.setattr(Aligner, "text", text)
            aligner.model.whole()
            torch.cuda.reset_peak_memory_stats()
            device.books[0].limit = found["peak of layers"] - lower if lower else 2**33
            (errors,) = layer_costs.layer_errors(aligner, [placement])
        if not lower:
            found["peak of layers"] = device.peak()
        found[name] = heads, torch.tensor(list(errors.values()))
    for here, there in zip(found["whole"], found["pieces"], strict=True):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-6)
    assert min(size.at_once for _, size in used if isinstance(size, retrieval.Rows)) < 4
    assert not all(size.kept for _, size in used if isinstance(size, Pieces))


@pytest.mark.parametrize("stage", ["matrix_orientation", "hidden_state_alignment", "distillation"])
def test_a_stage_says_what_to_lower(stage, teacher, tmp_path, capsys):
    hybrid, out, config = tmp_path / "hybrid", tmp_path / "out", tmp_path / "x.yaml"
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{7 + i % 100}" for i in range(2000)))
    convert(str(teacher), hybrid, align="none", attention_layers="MAMA")
    alignment = {name: value for name, value in TEXT.items() if name != "tokens"}
    alignment |= {"text": str(text), stage: {"tokens": 512, "sequences": 4}}
    others = {"matrix_orientation", "hidden_state_alignment", "distillation"} - {stage}
    config.write_text(yaml.safe_dump({"alignment": alignment | {name: {"tokens": 0} for name in others}}))
    with StandIn(limit=2**20), pytest.raises(SystemExit):
        command(["mohawk", str(hybrid), str(out), "--teacher", str(teacher), "--config", str(config)])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"error: out of memory, while training ({stage})"), error
    assert f"lower alignment.{stage}.sequences or alignment.sequence_length" in error
    assert not out.exists()


def sized(folder, **shape):
    """A teacher of this shape, in bfloat16, with a tokenizer."""
    config = LlamaConfig(**TINY | {"num_hidden_layers": 2, "max_position_embeddings": 4096} | shape)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "M, H, K, D, I, V, window, L, sequences",
    [(128, 8, 4, 32, 512, 128, 64, 512, 2), (128, 8, 4, 32, 4096, 128, 64, 256, 2),
     (64, 4, 2, 16, 128, 32768, 64, 512, 2), (256, 16, 4, 16, 1024, 2048, 224, 1024, 1)],
)  # fmt: skip
def test_memory_of_training_on_paper(M, H, K, D, I, V, window, L, sequences, tmp_path):  # noqa: E741
    """SFT in bfloat16 with checkpointing, where attention, the MLP or the logits take most."""
    teacher = sized(
        tmp_path / "teacher", hidden_size=M, num_attention_heads=H, num_key_value_heads=K, head_dim=D,
        intermediate_size=I, vocab_size=V,
    )  # fmt: skip
    convert(str(teacher), tmp_path / "hybrid", align="none", window=window, attention_layers="none")
    (tmp_path / "data").mkdir()
    row = json.dumps({"text": " ".join(f"w{7 + i % 100}" for i in range(L))}) + "\n"
    for split in ("train", "test"):
        (tmp_path / "data" / f"{split}.jsonl").write_text(8 * row)
    arguments = common_arguments(
        tmp_path / "hybrid", teacher, tmp_path / "data", tmp_path / "out", "--bf16", "true", "--max_length", str(L),
        "--gradient_checkpointing", "true", "--dtype", "float32", "--teacher_dtype", "bfloat16",
    )  # fmt: skip
    for flag, value in (
        ("--use_cpu", "false"),
        ("--per_device_train_batch_size", sequences),
        ("--eval_strategy", "no"),
    ):
        arguments[arguments.index(flag) + 1] = str(value)
    with StandIn() as device:
        sft.main(arguments)
    config = load_config(str(tmp_path / "hybrid"))
    expected = memory.training_bytes(config, memory.parameters(config), sequences, L)
    assert expected == pytest.approx(device.peak(), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "M, H, K, D, bits, kept, sequences, at_once",
    [(64, 4, 2, 32, 8, "0:0", 4, 2**27), (128, 8, 4, 32, 8, "0:0,0:1,0:2", 8, 2**27),
     (128, 8, 4, 32, 4, "1:2,1:3", 4, 2**27), (128, 8, 4, 32, 8, "0:0,0:1,0:2", 8, 2**17)],
)  # fmt: skip
@torch.no_grad()
def test_memory_of_decoding_on_paper(M, H, K, D, bits, kept, sequences, at_once, tmp_path, monkeypatch):
    """Of a step after 2,048 tokens; where less is taken out at once, less memory is needed."""
    for module in (attention, torch_backend):
        monkeypatch.setattr(module, "DECODED", at_once)
    monkeypatch.setattr(memory, "DECODED", at_once)
    teacher = sized(
        tmp_path / "teacher", hidden_size=M, num_attention_heads=H, num_key_value_heads=K, head_dim=D,
        intermediate_size=2 * M,
    )  # fmt: skip
    options = dict(window=32, attention_layers="none", attention_heads=kept, bits=bits)
    convert(str(teacher), tmp_path / "hybrid", align="none", **options)
    ids = torch.randint(7, 100, (sequences, 2048))
    with StandIn() as device:
        model = load_model(str(tmp_path / "hybrid"), "bfloat16", "cuda")
        cache = model(ids.cuda(), use_cache=True, logits_to_keep=1).cache
        token = ids[:, :1].cuda()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(4):
            model(token, cache=cache, use_cache=True)
    assert memory.decoding_bytes(model.config, sequences, 2050) == pytest.approx(device.peak(), rel=0.1)
