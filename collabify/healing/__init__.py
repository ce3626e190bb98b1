"""Healing: win back what a conversion lost, without labels; :func:`heal` is all of it."""

from collabify.healing.borrowing import is_main_process
from collabify.healing.checks import new_parameters
from collabify.healing.loss import relative, squares
from collabify.healing.method import heal

__all__ = ["heal", "is_main_process", "new_parameters", "relative", "squares"]
