"""Autotuning and code generation for DeepSeek-V4's decode kernels under SGLang."""

__version__ = "0.1.0"
