"""The CPU in C: passes, mixing, and whole layers, each with the Python that calls it.

library.py has C compiled on first use; mode_norm.c includes all other files.
"""
