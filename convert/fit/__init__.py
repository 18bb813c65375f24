"""Fit mixers in closed form to the attention that they replace, one block of the teacher at a time.

`Aligner` (aligner.py) reads the text and has `fit_layers` (fit.py) move it through the teacher's blocks
(activations.py, teacher_model.py). In each, `fit_hybrid_layer` (hybrid_fit.py) or, for a mixer that stands alone,
`fit_layer` (closed_form.py) fits to one layer's data (layer_data.py).
"""
