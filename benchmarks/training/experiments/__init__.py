"""What `learning.py` shows: one module for each experiment, and how a run of it is made."""
