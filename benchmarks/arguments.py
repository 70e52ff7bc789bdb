"""Numbers and sizes on the command line; argparse says what is wrong with others."""

from __future__ import annotations

import argparse

import torch


def positive(text: str) -> int:
    return _at_least(1, text)


def not_negative(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, not {text}")
    return number


def share(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, not {text}")
    return number


def batch_size(text: str) -> int | str:
    return text if text == "published" else positive(text)


def budget(text: str) -> int | float | str:
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


def optimizer(text: str) -> type[torch.optim.Optimizer]:
    """A class of torch.optim, by its name."""
    found = getattr(torch.optim, text, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise argparse.ArgumentTypeError(f"must be a class of torch.optim, such as AdamW, not {text}")
    return found
