"""Frames, links, groups and their collectives; to import this makes "tllm" a backend of `torch.distributed`."""

from tllm.comm import c10d as c10d
