"""Generation beyond the tokens for which LongRoPE has its short factors: what was read by them is read again."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from convert import convert
from convert.tools.chat import Conversation
from modeling_llamba.compatibility import cache_of
from tests.helpers.hybrids import make_hybrid
from tests.helpers.padding import left_padded
from tests.helpers.teachers import LONGROPE, make_teacher, random_ids
from tests.helpers.tiny_chat import save_chat_teacher
from tests.helpers.versions import drafts, phi3_reads_again

SWITCH = 24
ROPE = dict(LONGROPE) | {"original_max_position_embeddings": SWITCH}
NEW = dict(max_new_tokens=14, do_sample=False, eos_token_id=None)
EXACT = dict(rtol=0, atol=1e-5)


def longrope_student(pattern, **overrides):
    return make_hybrid(pattern=pattern, rope_parameters=dict(ROPE), **overrides)


def generated(model, ids, **options):
    """Text and the logits of its steps, and how many tokens each pass read."""
    read = []
    hook = model.get_input_embeddings().register_forward_hook(lambda layer, ids, out: read.append(ids[0].shape[1]))
    out = model.generate(ids, output_logits=True, return_dict_in_generate=True, **NEW | options)
    hook.remove()
    return out, torch.stack(out.logits, dim=1), read


@phi3_reads_again
@pytest.mark.parametrize("options", [{}, dict(num_beams=3)], ids=["greedy", "beams"])
@torch.no_grad()
def test_a_hybrid_that_keeps_every_layer_generates_as_its_teacher(options, tmp_path):
    teacher = make_teacher("phi3-longrope", layers=2, rope_parameters=ROPE, original_max_position_embeddings=SWITCH)
    teacher.save_pretrained(tmp_path / "teacher")
    convert(tmp_path / "teacher", tmp_path / "out", align="none", attention_layers="all")
    hybrid = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids, mask = left_padded(random_ids(1, 12), 6)
    ids, mask = torch.cat([ids, random_ids(1, 18, seed=1)]), torch.cat([mask, torch.ones_like(mask)])
    (ours, *ours_in), (theirs, *theirs_in) = (
        generated(model, ids, attention_mask=mask, **options) for model in (hybrid, teacher)
    )
    assert torch.equal(ours.sequences, theirs.sequences)
    assert ours_in[1] == theirs_in[1]
    torch.testing.assert_close(ours_in[0], theirs_in[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("pattern", ["every", "beside", "pure", "beside-only"])
@pytest.mark.parametrize("padding", [0, 5])
@torch.no_grad()
def test_every_step_is_that_of_a_whole_pass(pattern, padding):
    model, (ids, mask) = longrope_student(pattern), left_padded(random_ids(2, 18), padding)
    ids, mask = torch.cat([ids, random_ids(1, 18 + padding)]), torch.cat([mask, torch.ones_like(mask[:1])])
    out, steps, read = generated(model, ids, attention_mask=mask)
    before = SWITCH + 1 - ids.shape[1]
    assert read == [ids.shape[1], *[1] * (before - 1), SWITCH + 1, *[1] * (NEW["max_new_tokens"] - before - 1)]
    whole_mask = torch.cat([mask, mask.new_ones(3, NEW["max_new_tokens"])], dim=1)
    for t in (0, before - 1, before, NEW["max_new_tokens"] - 1):
        end = ids.shape[1] + t
        positions = (whole_mask[:, :end].cumsum(1) - 1).clamp(min=0)
        whole = model(out.sequences[:, :end], attention_mask=whole_mask[:, :end], position_ids=positions).logits
        torch.testing.assert_close(steps[:, t].double(), whole[:, -1], **EXACT)


@drafts
@pytest.mark.parametrize("pattern", ["beside", "pure"])
@torch.no_grad()
def test_drafts_are_taken_back_after_the_switch(pattern):
    model, ids = longrope_student(pattern), random_ids(1, 5).repeat(1, 4)
    plain, *_ = generated(model, ids)
    drafted, _, read = generated(model, ids, prompt_lookup_num_tokens=4)
    assert torch.equal(drafted.sequences, plain.sequences)
    assert max(read[1:]) > SWITCH


@torch.no_grad()
def test_a_static_cache_stays_one():
    model, ids = longrope_student("beside-only"), random_ids(1, 20)
    plain, logits, _ = generated(model, ids)
    static, found, _ = generated(model, ids, cache_implementation="static", disable_compile=True)
    torch.testing.assert_close(found, logits, **EXACT)
    assert all(layer.is_compileable for layer in cache_of(static).layers)


@torch.no_grad()
def test_new_tokens_alone_cannot_be_read_again():
    model, ids = longrope_student("every"), random_ids(1, 30)
    cache = model(ids[:, :20], use_cache=True).cache
    with pytest.raises(ValueError, match="pass all as input_ids"):
        model.generate(ids[:, 20:], attention_mask=torch.ones_like(ids), cache=cache, **NEW)
    with pytest.raises(ValueError, match="no prefill_chunk_size"):
        model.generate(ids, prefill_chunk_size=8, **NEW)


@torch.no_grad()
def test_a_conversation_goes_on_as_if_read_anew(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(save_chat_teacher(tmp_path / "teacher"))
    model = longrope_student("every", vocab_size=len(tokenizer))
    conversation = Conversation(model, tokenizer)
    for said in ("w9 w10 w11", "w12 w9", "w40", "w9"):
        answer = conversation.answer(said, 6, 0.0)
        anew = tokenizer.apply_chat_template(
            conversation.messages[:-1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = model.generate(**anew, do_sample=False, max_new_tokens=6)[0]
        assert answer == tokenizer.decode(ids[anew["input_ids"].shape[1] :], skip_special_tokens=True)
    assert len(conversation.held) > SWITCH + 6
