"""A real training job that needs no download: a small causal language model on the functions of the standard library.

Needs the extra `lightning-balance[demo]`.
"""

from lightning_balance.demo.data import FunctionsDataModule, PadCollator, TokenDataset, byte_tokens
from lightning_balance.demo.functions import Function, find_functions
from lightning_balance.demo.model import CausalLM

__all__ = [
    "CausalLM",
    "Function",
    "FunctionsDataModule",
    "PadCollator",
    "TokenDataset",
    "byte_tokens",
    "find_functions",
]
