"""Terminals of Lark's grammars: those that can be imported, and regular expressions."""

from __future__ import annotations

import re

from tureen.grammar import regex
from tureen.grammar.expression import Expression, GrammarError
from tureen.grammar.regex_classes import PythonFlavour
from tureen.grammar.regex_nodes import ASSERTING
from tureen.grammar.regex_syntax import PatternParser

INT = "[0-9]+"
EXPONENT = f"[eE][+-]?{INT}"
DECIMAL = rf"(?:{INT}\.(?:{INT})?|\.{INT})"
FLOAT = rf"(?:{INT}{EXPONENT}|{DECIMAL}(?:{EXPONENT})?)"

COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": INT,
    "SIGNED_INT": f"[+-]?{INT}",
    "DECIMAL": DECIMAL,
    "FLOAT": FLOAT,
    "SIGNED_FLOAT": f"[+-]?{FLOAT}",
    "NUMBER": f"(?:{FLOAT}|{INT})",
    "SIGNED_NUMBER": f"[+-]?(?:{FLOAT}|{INT})",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z_0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "C_COMMENT": r"/\*(?:[^*]|\*+[^*/])*\*+/",
    "SQL_COMMENT": r"--[^\n]*",
}
"""The patterns that `%import common.NAME` stands for."""

LAZY = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|(?P<lazy>[*+?}]\?)", re.DOTALL)
FLAGS = "imsux"


def pattern_terminal(written: str, flavour: PythonFlavour) -> Expression:
    """Returns the texts of `/pattern/flags`. Raises GrammarError, also for what asks about the text around it."""
    pattern, _, flags = written[1:].rpartition("/")
    pattern = pattern.replace("\\/", "/")
    unknown = next((flag for flag in flags if flag not in FLAGS), "")
    if unknown:
        raise GrammarError(f"the flag {unknown} is not supported; known are {' '.join(FLAGS)}")
    if any(match["lazy"] for match in LAZY.finditer(pattern)):
        raise GrammarError("lazy repeats (*? +? ??) end where they can; name the characters that are repeated instead")
    flagged = f"(?{flags}){pattern}" if flags else pattern
    if isinstance(PatternParser(flagged, flavour).pattern(), ASSERTING):
        raise GrammarError("^ $ \\b and lookarounds ask about the text around a terminal; leave them out")
    return regex.parse(flagged, flavour=flavour)
