"""Train the mixers' own vectors (decay, step bias, skip, gate) in full beside LoRA adapters, which cannot wrap them.

PEFT adapts modules; a decay per head is a bare parameter of the mixer. It is unfrozen by hand, and, because an
adapter's checkpoint does not hold it, written and read beside one.
"""

from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import nn
from transformers import TrainerCallback

from convert.alignment.distillation.trainer import MIXER_VECTORS, is_mixer

FILE = "mixer_vectors.safetensors"


def mixer_vectors(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's mixer vectors by name."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if is_mixer(name) and name.rsplit(".", 1)[-1] in MIXER_VECTORS
    }


class MixerVectors(TrainerCallback):
    """Trains the mixers' vectors and keeps them in the checkpoints, where adapters' checkpoints leave them out."""

    def __init__(self, model: nn.Module):
        self.vectors = mixer_vectors(model)
        if not self.vectors:
            raise ValueError("train_decays: the model has no mixer with vectors of its own.")
        for parameter in self.vectors.values():
            parameter.requires_grad_(True)

    def on_train_begin(self, args, state, control, **kwargs):
        """Read them back where a checkpoint is continued."""
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / FILE
        if state.global_step:
            if not path.is_file():
                raise ValueError(f"{path.parent} lacks {FILE}: it was not written to its end; delete that checkpoint.")
            stored = load_file(path)
            for name, parameter in self.vectors.items():
                parameter.data.copy_(stored[name])

    def on_save(self, args, state, control, **kwargs):
        """Write them into the checkpoint just made."""
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            save_file({name: p.detach().cpu().contiguous() for name, p in self.vectors.items()}, folder / FILE)
