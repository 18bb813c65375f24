"""The model around its layers: configuration, blocks, softmax attention, norms, rotary embedding."""
