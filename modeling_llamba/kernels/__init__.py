"""Faster ways to compute what a hybrid layer computes: functions in C, Triton kernels, flex_attention."""
