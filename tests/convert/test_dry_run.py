"""A plan is made without any of transformers' models, which take seconds to import, and is right nevertheless."""

import json
import shutil
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.activations import ACT2FN

from convert import convert
from convert.dry_run import plan_conversion
from convert.options import make_options
from modeling_llamba.model.config_values import ACTIVATIONS
from tests.helpers.hybrids import tiny_config

RUN = """
import json, sys
from convert.cli import main
for command in json.loads(sys.argv[1]):
    main(command)
    assert "transformers.configuration_utils" in sys.modules
    assert "transformers.modeling_utils" not in sys.modules, command
"""


@pytest.mark.parametrize(
    "options, note",
    [
        ({"align": "none"}, "not yet a language model"),
        ({"attention_layers": "0.5"}, "--window 32"),
        ({"attention_layers": "0.5", "window": 32}, None),
        ({"align": "none", "mixer": "none", "window": 32}, None),
        ({"align": "none", "attention_layers": "all"}, None),
        ({}, None),
    ],
)
def test_what_will_be_far_from_the_teacher_is_said(options, note, saved_teacher):
    notes = plan_conversion(make_options(str(saved_teacher("llama-gqa")), "unused", **options)).notes
    found = [said for said in notes if "during the run" not in said and "the run chooses" not in said]
    assert (found == []) if note is None else (len(found) == 1 and note in found[0])


def test_a_dry_run_notes_what_a_run_notes(saved_teacher, tmp_path):
    """Files beside the weights are tried in both; the notes of a run stand on the card, too."""
    folder, settings = tmp_path / "olmo2", {"temperature": 0.9, "use_cache": False, "eos_token_id": 2}
    shutil.copytree(saved_teacher("olmo2"), folder)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "<e>": 2}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))
    declared = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<e>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(declared))
    said = dict(align="none", attention_layers="0.5")
    notes = plan_conversion(make_options(str(folder), "unused", **said)).notes
    assert notes == convert(str(folder), tmp_path / "out", **said).notes
    card = (tmp_path / "out" / "README.md").read_text()
    for words in ("saved anew", "temperature 0.9", "use_cache false", "nothing is fitted"):
        assert sum(words in note for note in notes) == 1
        assert words in card


def test_models_are_not_imported(saved_teacher, tmp_path):
    teacher, out = str(saved_teacher("qwen3-moe")), str(tmp_path / "out")
    tiny_config().save_pretrained(tmp_path / "hybrid")
    dry = [teacher, out, "--dry-run"]
    commands = [dry, [*dry, "--attention-layers", "0.5", "--json"], ["inspect", str(tmp_path / "hybrid")]]
    subprocess.run([sys.executable, "-c", RUN, json.dumps(commands)], check=True, stdout=subprocess.DEVNULL)


def test_activations_are_those_of_transformers_without_parameters():
    assert set(ACTIVATIONS) == {name for name in ACT2FN if not list(ACT2FN[name].parameters())}
