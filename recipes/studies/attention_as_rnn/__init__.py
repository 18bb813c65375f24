"""A notebook: softmax attention computed like a recurrent network."""
