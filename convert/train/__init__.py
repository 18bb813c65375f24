"""Training of hybrids by gradients: distillation, and MOHAWK's stages."""
