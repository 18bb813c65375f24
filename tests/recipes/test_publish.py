"""From training to the Hub and back, with the real client over HTTP against a stand-in."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from tests.doubles.hub import HubServer
from tests.helpers.tiny_chat import common_arguments, conversations, save_chat_teacher, save_hybrid


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("publish")
    teacher = save_chat_teacher(folder / "teacher")
    return teacher, save_hybrid(teacher, folder / "hybrid"), conversations(folder / "data", count=4, test=2)


def client(hub, tmp_path, *command):
    environment = os.environ | hub.environment(tmp_path / "cache")
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_a_model_of_the_hub_is_trained_and_pushed_and_an_upload_that_broke_off_goes_on(world, tmp_path):
    teacher, hybrid, data = world
    start = shutil.copytree(hybrid, tmp_path / "hub" / "me" / "hybrid")
    stage = {"stage": "sft", "teacher": None, "data": "chats", "settings": {}, "before": {}, "after": {}, "log": []}
    (start / "training.json").write_text(json.dumps([stage]))
    push = ("--push_to_hub", "true", "--hub_model_id", "me/finished", "--hub_private_repo", "true")
    argv = common_arguments("me/hybrid", teacher, data, tmp_path / "out", *push, "--max_shard_size", "60KB")
    with HubServer(tmp_path / "hub", large_bytes=10_000, refuse_after=1) as hub:
        done = client(hub, tmp_path, "-m", "recipes.sft", *argv)
        assert done.returncode == 1, done.stderr[-2000:]
        assert "the model is complete in" in done.stderr, done.stderr[-2000:]
        assert "Traceback" not in done.stderr
        assert not (hub.root / "me" / "finished" / "config.json").exists()
        assert not (tmp_path / "out.work").exists(), "the checkpoints have served"
        received = {path.name for path in hub.objects.iterdir()}
        assert len(received) == 1
        hub.refuse_after = None
        hub.requests.clear()
        done = client(
            hub, tmp_path, "-m", "huggingface_hub.cli.hf", "upload", "me/finished", str(tmp_path / "out"), "."
        )
        assert done.returncode == 0, done.stderr[-2000:]
        sent = {request.split("/")[-1] for request in hub.requests if request.startswith("PUT")}
        assert sent
        assert not sent & received
        assert hub.private["me/finished"]
        pushed = {path.name for path in (hub.root / "me" / "finished").iterdir()}
        assert {path.name for path in (tmp_path / "out").iterdir()} <= pushed
        assert len([name for name in pushed if name.endswith(".safetensors")]) > 2
        code = (
            "import torch, sys; from transformers import AutoModelForCausalLM as A, AutoTokenizer as T\n"
            "m = A.from_pretrained('me/finished', trust_remote_code=True)\n"
            "t = T.from_pretrained('me/finished', trust_remote_code=True)\n"
            "chat = [{'role': 'user', 'content': 'w9 w10'}]\n"
            "ids = t.apply_chat_template(chat, add_generation_prompt=True, return_tensors='pt', return_dict=True)\n"
            "torch.save(m(**ids).logits, sys.argv[1])"
        )
        environment = os.environ | hub.environment(tmp_path / "another-cache")
        pulled = subprocess.run([sys.executable, "-I", "-c", code, str(tmp_path / "logits.pt")],
                                env=environment, capture_output=True, text=True, cwd=tmp_path)  # fmt: skip
        assert pulled.returncode == 0, pulled.stderr[-2000:]
    assert len(json.loads((tmp_path / "hub/me/finished/training.json").read_text())) == 2
    local = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), local(torch.tensor([[4, 9, 10, 6, 5]])).logits)
    card = ModelCard.load(tmp_path / "hub" / "me" / "finished" / "README.md")
    assert card.data.eval_results
    assert card.data.base_model is None
    assert "Training" in card.text
