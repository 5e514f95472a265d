"""Autograd nodes and operators in C++, which cost the host less than those of Python."""
