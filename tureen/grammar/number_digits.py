"""The numbers of digits that JSON numbers are written with, by the rules of schemas and by guards."""

MAX_DIGITS = 20
EXACT_DIGITS = 15
"""Decimals of so many digits are told apart by doubles."""
