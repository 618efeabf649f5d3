"""Batch normalization of channels-last tensors over groups of ranks, for groupbn and cudnn_gbn."""
