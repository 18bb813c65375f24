"""Compare llama.cpp's logits on a GGUF file with those of the hybrid that it was exported from.

pip install llama-cpp-python
python -m recipes.gguf_logits HYBRID FILE.gguf
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

try:
    from llama_cpp import Llama
except ImportError:
    Llama = None

TEXT = (
    "The capital of France is Paris, and the river that runs through it is called the Seine. Copper was first smelted "
    "in the Balkans some seven thousand years ago, and then"
)
NEW_TOKENS = 24


@torch.no_grad()
def main(hybrid: str, gguf: str) -> dict[str, float]:
    """Print and return how far apart the two are.

    Raises:
        SystemExit: llama-cpp-python is not installed.
    """
    if Llama is None:
        raise SystemExit("error: this recipe needs llama-cpp-python (pip install llama-cpp-python).")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(hybrid, trust_remote_code=True, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(hybrid, trust_remote_code=True)
    ids = tokenizer(TEXT, return_tensors="pt", add_special_tokens=False).input_ids
    ours = model(ids).logits[0]
    drawn = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)[0, ids.shape[1] :]
    f32 = 0  # ggml's number of it, for keys and values
    engine = Llama(gguf, n_ctx=512, logits_all=True, type_k=f32, type_v=f32, verbose=False)
    tokens = ids[0].tolist()
    same_tokens = engine.tokenize(TEXT.encode(), add_bos=False) == tokens
    engine.eval(tokens)
    theirs = torch.tensor(engine.scores[: len(tokens)])
    continued = []
    for _ in range(NEW_TOKENS):
        continued.append(int(engine.scores[engine.n_tokens - 1].argmax()))
        engine.eval(continued[-1:])
    figures = {
        "largest_difference": (theirs - ours).abs().max().item(),
        "spread_of_logits": ours.std().item(),
        "top1_agreement": (theirs.argmax(-1) == ours.argmax(-1)).float().mean().item(),
        "greedy_tokens_equal": (torch.tensor(continued) == drawn).float().mean().item(),
        "same_tokenisation": float(same_tokens),
    }
    for name, figure in figures.items():
        print(f"{name:20} {figure:.6g}")
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hybrid", help="folder of the hybrid, before the export")
    parser.add_argument("gguf", help="what convert_hf_to_gguf.py made of the export")
    arguments = parser.parse_args()
    main(arguments.hybrid, arguments.gguf)
