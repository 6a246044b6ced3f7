"""Checkpoints on storage in the format of ``torch.distributed.checkpoint``: written, found, verified, read."""
