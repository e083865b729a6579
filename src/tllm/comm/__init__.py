"""Frames, links, groups and their collectives; to import this makes "tllm" a backend of `torch.distributed`."""

from tllm.comm.c10d import backend as backend
