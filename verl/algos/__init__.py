"""Layer 1: the mathematics. Pure functions of tensors, per token and unreduced; one function reduces.

Legend: N sequences, T tokens of the batch, K most sampled tokens of any sequence, G groups.
"""
