"""The models that versions are measured against.

external_baselines   transformers' LLaMA: eager, under torch.compile, and with Liger's kernels
captured_peer        a fifth LLaMA, fused by hand with PyTorch alone and captured as one graph
known_models         the names of all versions, their variants, and the peers above
"""
