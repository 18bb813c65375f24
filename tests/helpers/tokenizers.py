"""A tiny tokenizer, and a chat template."""

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
"""As Phi-3.5's."""


def tokenizer(begins: bool = False):
    """The words w0 to w127; `begins` puts w1 before every text, as Llama's and Gemma's tokenizers do."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w3"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if begins:
        backend.post_processor = processors.TemplateProcessing(single="w1 $A", special_tokens=[("w1", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w0", bos_token="w1", eos_token="w2")
