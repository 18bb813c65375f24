"""Streaming: shards, exact bytes, bounded memory."""

import itertools
import json
import os
import shutil
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from convert import convert
from convert.io.reader import (
    GgufCheckpoint,
    PickledCheckpoint,
    SafetensorsCheckpoint,
    check_weights,
    is_finite,
    open_weights,
)
from convert.io.rules import Rule
from convert.io.writer import plan_shards, write_shards
from recipes.benchmarks.conversion import copy_convert_copy, synthetic_llama
from recipes.benchmarks.measure import in_own_process
from tests.helpers.teachers import make_teacher, random_ids

NOT_FINITE = ("nan", "inf", "-inf")


def test_shards_hold_what_one_file_holds(saved_teacher, tmp_path):
    convert(str(saved_teacher("llama-mha-tied")), tmp_path / "one", align="none")
    convert(str(saved_teacher("llama-mha-tied")), tmp_path / "many", max_shard_size="20KB", align="none")
    one = load_file(tmp_path / "one" / "model.safetensors")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    shards = {name: load_file(tmp_path / "many" / name) for name in set(index["weight_map"].values())}
    assert len(shards) > 3
    assert set(index["weight_map"]) == set(one)
    for name, value in one.items():
        assert torch.equal(shards[index["weight_map"][name]][name], value)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in one.values())
    for file in (tmp_path / "many").glob("*.safetensors"):
        sizes = [t.numel() * t.element_size() for t in shards[file.name].values()]
        assert sum(sizes) <= 20_000 or len(sizes) == 1
    ids = random_ids(1, 6)
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / n)(ids).logits for n in ("one", "many"))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", ["llama-mha-tied", "qwen2-mixed-window"])
def test_a_tied_head_in_the_checkpoint_is_dropped_and_said(name, tmp_path):
    from safetensors.torch import save_file

    teacher = make_teacher(name)
    teacher.save_pretrained(tmp_path / "teacher")
    tensors = load_file(tmp_path / "teacher" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "teacher" / "model.safetensors", metadata={"format": "pt"})
    plan = convert(str(tmp_path / "teacher"), tmp_path / "out", attention_layers=1.0, align="none")
    assert set(plan.weights.dropped) == {"lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"}
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    ids = random_ids(1, 6)
    hybrid = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(hybrid(ids).logits, teacher(ids).logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(dtype, saved_teacher, tmp_path):
    plan = convert(str(saved_teacher("llama-gqa")), tmp_path / "out", dtype=dtype, align="none")
    wanted = getattr(torch, dtype)
    assert plan.dtype == wanted
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {wanted}
    original = make_teacher("llama-gqa").state_dict()["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(stored["model.layers.1.mlp.up_proj.weight"], original.to(wanted))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == wanted


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_are_those_that_transformers_loads(name, saved_teacher, tmp_path):
    """Which takes one file before an index, as tools leave them that save into a folder in use."""
    teacher = Path(shutil.copytree(saved_teacher("llama-gqa"), tmp_path / "teacher"))
    tensors = load_file(teacher / "model.safetensors")
    save = partial(save_file, metadata={"format": "pt"}) if name == "model.safetensors" else torch.save
    shard = name.replace(".", "-00001-of-00001.")
    (teacher / "model.safetensors").unlink()
    save(tensors, teacher / name)
    save({key: tensor * 0.5 for key, tensor in tensors.items()}, teacher / shard)
    (teacher / f"{name}.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, shard)}))
    convert(str(teacher), tmp_path / "out", attention_layers=1.0, align="none")
    written = load_file(tmp_path / "out" / "model.safetensors")
    for key, tensor in AutoModelForCausalLM.from_pretrained(teacher).state_dict().items():
        assert torch.equal(written[key], tensor), key


def test_an_adapter_beside_the_weights_is_refused(saved_teacher, tmp_path):
    """As PEFT's `save_pretrained` leaves it in the folder of its model; transformers loads it, too."""
    from peft import LoraConfig, get_peft_model

    teacher = shutil.copytree(saved_teacher("llama-gqa"), tmp_path / "teacher")
    model = AutoModelForCausalLM.from_pretrained(teacher)
    before = model(random_ids(1, 8)).logits
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(teacher)
    assert not torch.allclose(AutoModelForCausalLM.from_pretrained(teacher)(random_ids(1, 8)).logits, before)
    with pytest.raises(ValueError, match="has an adapter .* merge it into them"):
        convert(str(teacher), tmp_path / "out", align="none")


def test_a_file_of_weights_under_another_name_is_refused(saved_teacher, tmp_path):
    teacher = Path(shutil.copytree(saved_teacher("llama-gqa"), tmp_path / "teacher"))
    config = json.loads((teacher / "config.json").read_text()) | {"transformers_weights": "other.safetensors"}
    (teacher / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="transformers_weights: other.safetensors"):
        convert(str(teacher), tmp_path / "out", align="none")


def test_pickled_and_safetensors_teachers_give_the_same_files(saved_teacher, tmp_path):
    shutil.copytree(saved_teacher("phi"), tmp_path / "bin")
    tensors = load_file(tmp_path / "bin" / "model.safetensors")
    (tmp_path / "bin" / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
    for file, part in shards.items():
        torch.save({n: tensors[n] for n in part}, tmp_path / "bin" / file)
    index = {"weight_map": {n: file for file, part in shards.items() for n in part}}
    (tmp_path / "bin" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert isinstance(open_weights(tmp_path / "bin"), PickledCheckpoint)
    assert isinstance(open_weights(saved_teacher("phi")), SafetensorsCheckpoint)
    convert(str(tmp_path / "bin"), tmp_path / "from-bin", align="none")
    convert(str(saved_teacher("phi")), tmp_path / "from-safetensors", align="none")
    a, b = (load_file(tmp_path / f"from-{k}" / "model.safetensors") for k in ("bin", "safetensors"))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_a_tensor_larger_than_a_shard_has_one_of_its_own():
    rules = [Rule(str(i), (n,), "moved", (), None) for i, n in enumerate((2, 100, 3, 3))]
    assert [[r.target for r in s.rules] for s in plan_shards(rules, torch.float32, 24)] == [["0"], ["1"], ["2", "3"]]


def initialised(name: str, blocks, columns: int = 2) -> Rule:
    return Rule(name, (2, columns), "initialised", (), blocks)


def test_two_shards_are_written_at_a_time(tmp_path):
    both = threading.Barrier(2, timeout=20)  # breaks where one waits for the other to end
    columns = 125_000  # a megabyte in two rows

    def rows(value):
        def blocks(checkpoint):
            for _ in range(2):
                both.wait()
                yield torch.full((1, columns), value)

        return blocks

    shards = plan_shards([initialised(str(i), rows(float(i)), columns) for i in range(4)], torch.float32, 2_000_000)
    written = []
    write_shards(shards, None, torch.float32, tmp_path, lambda what, done, total: written.append((done, total)))
    stored = {name: t for shard in shards for name, t in load_file(tmp_path / shard.name).items()}
    assert len(shards) == 2
    assert sorted(written)[-2:] == [(4, 4), (4, 4)]
    assert {total for _, total in written} == {4}
    assert all(torch.equal(stored[str(i)], torch.full((2, columns), float(i))) for i in range(4))


def test_the_disk_is_told_of_every_byte_at_once(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(os, "POSIX_FADV_DONTNEED", "begin", raising=False)
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: told.append(arguments), raising=False)
    blocks = [torch.full((rows, 4), float(rows)) for rows in (3, 5)]
    rule = Rule("a", (8, 4), "initialised", (), lambda checkpoint: iter(blocks))
    write_shards(plan_shards([rule], torch.float32, 10**6), None, torch.float32, tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    starts, sizes = [start for _, start, _, _ in told], [nbytes for _, _, nbytes, _ in told]
    assert sizes == [48, 80]
    assert starts == [size - 128, size - 80]
    assert {advice for *_, advice in told} == {"begin"}
    monkeypatch.delattr(os, "posix_fadvise")  # as on a Mac
    write_shards(plan_shards([rule], torch.float32, 10**6), None, torch.float32, tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], torch.cat(blocks))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_weights_may_be(dtype):
    largest = min(torch.finfo(dtype).max, 9e10)
    for fine in ([], [1.0, -2.0], [largest] * 300, [-largest] * 300):  # sums that overflow
        check_weights(torch.tensor(fine, dtype=dtype), "w")
    for bad, where in itertools.product((*NOT_FINITE, "-3e38"), (0, 150, 299)):
        values = torch.ones(300, dtype=dtype)
        values[where] = float(bad)
        assert is_finite(values) == values.isfinite().all()
        with pytest.raises(ValueError, match="NaN" if bad == "nan" else "inf|3e"):
            check_weights(values, "w")
    assert is_finite(torch.full((300,), torch.finfo(dtype).max, dtype=dtype)), "although the sum overflows"
    with pytest.raises(ValueError, match="contains inf"):
        check_weights(torch.tensor([float("inf"), 1.0, float("-inf")], dtype=dtype), "w")  # whose sum is NaN
    if dtype != torch.float16:
        with pytest.raises(ValueError, match=r"contains 1e\+30"):
            check_weights(torch.tensor([1e30, 1.0, -1e30], dtype=dtype), "w")  # whose sum is 1
    check_weights(torch.tensor([2**31, -1]), "w")


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_what_comes_out_infinite_is_refused(bad, tmp_path):
    rule = Rule("a", (2,), "derived", (), lambda checkpoint: iter([torch.tensor([1.0, float(bad)])]))
    with pytest.raises(ValueError, match="a came out infinite or not a number"):
        write_shards(plan_shards([rule], torch.float32, 10**6), None, torch.float32, tmp_path)


def test_a_shard_that_fails_stops_the_others(tmp_path):
    begun = threading.Event()

    def endless(checkpoint):
        while True:
            begun.set()
            yield torch.ones(0, 2)

    def damaged(checkpoint):
        assert begun.wait(20)
        raise ValueError("damaged")
        yield

    rules = [initialised("endless", endless), initialised("damaged", damaged), initialised("never", endless)]
    with pytest.raises(ValueError, match="damaged"):
        write_shards(plan_shards(rules, torch.float32, 16), None, torch.float32, tmp_path)
    assert (tmp_path / "model-00002-of-00003.safetensors").is_file()
    assert not (tmp_path / "model-00003-of-00003.safetensors").exists()


def test_a_gguf_file_is_read_by_one_thread_at_a_time(tmp_path):
    reading, most = [], []

    def blocks(checkpoint):
        reading.append(1)
        most.append(len(reading))
        threading.Event().wait(0.02)
        reading.pop()
        yield torch.ones(2, 2)

    rules = [initialised(str(i), blocks) for i in range(4)]
    write_shards(plan_shards(rules, torch.float32, 16), object.__new__(GgufCheckpoint), torch.float32, tmp_path)
    assert max(most) == 1


def test_peak_memory_stays_below_a_shard(tmp_path):
    """Above the interpreter's own, at most 1.2 times the largest output shard, whatever the model's size."""
    synthetic_llama(tmp_path / "teacher", gigabytes=0.6, num_shards=4)
    report = in_own_process(copy_convert_copy, tmp_path, "150MB", False)
    largest = max(p.stat().st_size for p in (tmp_path / "hybrid").glob("*.safetensors"))
    assert report["peak"] <= 1.2 * largest, (report["peak"] / largest, report)
    plan = json.loads((tmp_path / "hybrid" / "config.json").read_text())
    assert plan["conversion"]["teacher_sha256"].keys() == {
        p.name for p in (tmp_path / "teacher").glob("*.safetensors")
    }
