"""Tiny teachers as GGUF files."""

from gguf import GGUFWriter
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from tests.helpers.teachers import make_teacher

ROPE = {"rope_type": "default", "rope_theta": 300.0}
# teacher -> its name in GGUF, and what transformers does not read there but takes for granted
ARCHITECTURES = {
    "llama-gqa": ("llama", {"rope_parameters": ROPE}),
    "mistral-no-window": ("llama", {"rope_parameters": ROPE}),
    "qwen2": ("qwen2", {"rope_parameters": ROPE}),
    "phi3": ("phi3", {"rope_parameters": ROPE, "vocab_size": 32064}),  # a padding token that TINY does not have
    "qwen3": ("qwen3", {"rope_parameters": ROPE, "head_dim": 128}),
    "gemma2": (
        "gemma2",
        {"rope_parameters": ROPE, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
         "final_logit_softcapping": 30.0},
    ),
    "gemma3": (
        "gemma3",
        {"query_pre_attn_scalar": 256, "layer_types": ["sliding_attention"] * 2, "rope_parameters": None},
    ),
    "qwen3-moe": (
        "qwen3moe",
        {"rope_parameters": ROPE, "moe_intermediate_size": 768, "mlp_only_layers": [], "norm_topk_prob": True},
    ),
}  # fmt: skip


def write_gguf(path, name, tokenizer=None, **said):
    """A teacher in a GGUF file as llama.cpp writes it: gate and up of all experts apart, Gemma's norms plus 1.

    Args:
        tokenizer: "llama" for SentencePiece, or the name in llama.cpp of the rule that splits text before BPE.
    """
    architecture, taken_for_granted = ARCHITECTURES[name]
    teacher = make_teacher(name, layers=2, **taken_for_granted)
    writer = GGUFWriter(path, architecture)
    keys = GGUF_CONFIG_MAPPING.get(teacher.config.model_type) or GGUF_CONFIG_MAPPING[architecture]
    for key, field in keys.items():
        value = getattr(teacher.config, field or "", None)
        if field == "rope_theta":
            value = teacher.config.rope_parameters.get("rope_theta")
        if isinstance(value, int | float):
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{architecture}.{key}", value)
    for key, value in said.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(f"{architecture}.{key}", value)
    if tokenizer == "llama":
        add_sentencepiece(writer)
    elif tokenizer is not None:
        add_bpe(writer, tokenizer)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config={})
    tensors = teacher.state_dict()
    for stored, ours in get_gguf_hf_weights_map(teacher, processor, architecture).items():
        tensor = tensors[ours]
        if "_exps" in stored and "gate_up" in ours:
            tensor, stored = tensor.chunk(2, dim=1)["up" in stored], f"{stored}.weight"
        elif "_exps" in stored:
            stored = f"{stored}.weight"
        elif architecture.startswith("gemma") and stored.endswith("norm.weight"):
            tensor = tensor + 1
        elif architecture == "llama" and (".attn_q." in stored or ".attn_k." in stored):
            tensor = tensor.view(-1, 2, 4, 32).transpose(1, 2).reshape(tensor.shape)  # pairs side by side
        if stored != "output.weight" or not teacher.config.tie_word_embeddings:
            writer.add_tensor(stored, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return teacher


NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
"""Kinds of tokens in a GGUF file."""


def add_bpe(writer, split):
    """A tokenizer of bytes and a few merges."""
    merges = ["Ġ t", "Ġt h", "Ġth e", "h e", "i n", "Ġ a"]
    tokens = [*bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in merges)]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list([*tokens, *special])
    writer.add_token_types([NORMAL] * len(tokens) + [CONTROL] * len(special))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(len(tokens))
    writer.add_eos_token_id(len(tokens) + 2)
    writer.add_pad_token_id(len(tokens))
    writer.add_eot_token_id(ord("t"))


def add_sentencepiece(writer):
    """A tokenizer of bytes and a few pieces."""
    pieces = ["▁", "t", "h", "e", "▁t", "▁th", "▁the", "he", "i", "n", "in", "a", "▁a"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*tokens, *pieces])
    writer.add_token_types([UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)])
    writer.add_token_scores([0.0] * len(tokens) + [-float(i) for i in range(len(pieces))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
